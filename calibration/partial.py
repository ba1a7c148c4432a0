"""The part of a model that computes the wanted tensors, and nothing else."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import onnx
from onnx import external_data_helper

from calibration.dataset import InputSpec
from qdqtool import external, runtime
from qdqtool.errors import ModelError
from qdqtool.external import all_tensors, location_of
from qdqtool.graph import Model, without_data
from qdqtool.jsontext import parse_json

Size = tuple[int, int]


def input_specs(model: Model) -> list[InputSpec]:
    """The model's inputs, initializers apart.

    Raises:
        ModelError: An input is not a tensor, or holds no numbers.
    """
    specs = []
    for value in model.proto.graph.input:
        if value.name in model.initializers:
            continue
        elem_type = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else 0
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
        except KeyError:
            raise ModelError(f"{_name(model)}: input '{value.name}' is not a tensor of numbers") from None
        if dtype.kind not in "fiub":
            raise ModelError(f"{_name(model)}: input '{value.name}' holds {dtype}, which cannot be fed")
        if not value.type.tensor_type.HasField("shape"):
            raise ModelError(f"{_name(model)}: input '{value.name}' has no known rank; export the model with shapes")
        # Some exporters write 0 or -1 for an open dimension.
        shape = tuple(d if d is not None and d > 0 else None for d in model.shape(value.name) or ())
        specs.append(InputSpec(value.name, shape, dtype.name))
    return specs


def metadata_size(model: Model) -> Size | None:
    """Height and width from the ``imgsz`` metadata that Ultralytics writes (``[640, 640]``); None without it."""
    text = model.metadata.get("imgsz", "")
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        numbers = re.findall(r"\d+", text)
        value = [int(n) for n in numbers[:2]]
    if isinstance(value, int):
        value = [value, value]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) and 0 < v <= 1 << 16 for v in value):
        return value[0], value[1]
    return None


def _name(model: Model) -> str:
    return model.path or "model"


def check_tensors(model: Model, tensors: Sequence[str]) -> None:
    """Makes sure that every tensor can be computed.

    Raises:
        ModelError: One does not exist, or is a constant.
    """
    known = {*model.producers, *model.inputs}
    for name in tensors:
        if model.is_constant(name):
            raise ModelError(f"{_name(model)}: tensor '{name}' is a constant; its range needs no calibration")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ModelError(f"{_name(model)}: there is no tensor '{name}'{hint}")


def partial_model(
    model: Model, tensors: Sequence[str], given: Sequence[onnx.ValueInfoProto] = (), *, weights: bool = True
) -> onnx.ModelProto:
    """A model whose outputs are the given tensors; nodes, weights and inputs that they do not need are left out.

    External data stays external. It is made to be run: newest exporters state an IR version that the installed
    onnxruntime refuses, whatever is in the file.

    Args:
        model: The model; it is not changed.
        tensors: Outputs of nodes.
        given: Tensors that will be fed instead of computed; those that are not needed are left out.
        weights: Whether large weights are copied; they are placeholders otherwise.
    """
    needed = set(tensors)
    fed = {v.name for v in given}
    nodes = []
    for node in reversed(model.ordered):
        if (needed - fed).intersection(node.outputs):
            nodes.append(node)
            needed.update(t for t in (*node.inputs, *node.captured) if t)
    result = onnx.ModelProto()
    source = model.proto
    result.ir_version = min(source.ir_version, runtime.IR_VERSION)
    result.opset_import.extend(source.opset_import)
    result.functions.extend(source.functions)
    graph = result.graph
    graph.name = source.graph.name or "calibration"
    graph.node.extend(n.proto for n in reversed(nodes))
    for tensor in source.graph.initializer:
        if tensor.name in needed:
            graph.initializer.append(tensor if weights or not external.is_separable(tensor) else without_data(tensor))
    graph.sparse_initializer.extend(t for t in source.graph.sparse_initializer if t.values.name in needed)
    # Before IR version 4 initializers had to be inputs too; from then on listing them only stops constant folding.
    listed = model.initializers if source.ir_version < 4 else {}
    allowed = {*model.inputs, *listed}
    graph.input.extend(v for v in source.graph.input if v.name in needed and v.name in allowed and v.name not in fed)
    graph.input.extend(v for v in given if v.name in needed)
    graph.output.extend(onnx.ValueInfoProto(name=t) for t in tensors)
    return result


def external_folder(model: Model) -> str:
    """The folder of the model's external weights; empty where it has none.

    Raises:
        ModelError: A weight file is missing or lies outside the model's folder.
    """
    folder = ""
    for tensor in all_tensors(model.proto.graph):
        if not external_data_helper.uses_external_data(tensor):
            continue
        location = location_of(tensor)
        if not model.base_dir:
            raise ModelError(f"model: tensor '{tensor.name}' has its weights in '{location}'; give the model's path")
        if external.path_of(tensor, model.base_dir, model.path) is None:
            raise ModelError(f"{model.path}: weight file '{location}' of tensor '{tensor.name}' is missing")
        folder = model.base_dir
    return folder
