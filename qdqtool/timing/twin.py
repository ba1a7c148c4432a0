"""The network without its Q/DQ, and the network with as much Q/DQ as can help: what a prediction is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.model.external import has_data
from qdqtool.model.graph import Model, tensor_bytes
from qdqtool.model.qdq import is_dq, is_qdq
from qdqtool.trt.targets import Target

_MOST_FILLED = 1 << 28  # bytes of weights that stand in for those that are not available
_KEEP = 4096  # bytes; larger constants keep their dimensions only
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, 0)


def has_qdq(model: Model) -> bool:
    """Whether the model has any Q or DQ."""
    return any(is_qdq(node) for node in model.nodes)


def float_twin(model: Model) -> Model:
    """The same network without its Q and DQ, constants without data where they are large; the model is not changed."""
    renamed: dict[str, str] = {}

    def origin(tensor: str) -> str:
        seen = 0
        while tensor in renamed and seen < 10_000:
            tensor, seen = renamed[tensor], seen + 1
        return tensor

    made: list[TensorProto] = []
    for node in model.nodes:
        if not is_qdq(node) or not node.inputs or not node.output:
            continue
        source = node.input(0)
        stored = model.constant_proto(source)
        if is_dq(node) and stored is not None and stored.data_type not in _FLOATS:
            made.append(placeholder(node.output, stored.dims))  # int8 weights: floats again
        else:
            renamed[node.output] = source
    graph = onnx.GraphProto(name=model.proto.graph.name)
    for node in model.nodes:
        if is_qdq(node):
            if model.is_output(node.output) and node.output in renamed:
                graph.node.append(helper.make_node("Identity", [origin(node.output)], [node.output], name=node.name))
            continue
        copied = graph.node.add()
        copied.CopyFrom(node.proto)
        for i, tensor in enumerate(copied.input):
            if tensor in renamed:
                copied.input[i] = origin(tensor)
    for tensor in model.proto.graph.initializer:
        if tensor_bytes(tensor) <= _KEEP:
            graph.initializer.append(tensor)
        else:
            graph.initializer.append(placeholder(tensor.name, tensor.dims, tensor.data_type))
    graph.initializer.extend(made)
    graph.input.extend(model.proto.graph.input)
    graph.output.extend(model.proto.graph.output)
    graph.value_info.extend(model.proto.graph.value_info)
    proto = onnx.ModelProto(ir_version=model.proto.ir_version, graph=graph)
    proto.opset_import.extend(model.proto.opset_import)
    proto.functions.extend(model.proto.functions)
    proto.metadata_props.extend(model.proto.metadata_props)
    return Model(proto, model.path, sha256=model.sha256, types=model)


def placeholder(name: str, dims: Iterable[int], kind: int = TensorProto.FLOAT) -> TensorProto:
    """A constant of known shape whose data is not available."""
    tensor = TensorProto(name=name, data_type=kind, data_location=TensorProto.EXTERNAL)
    tensor.dims.extend(dims)
    tensor.external_data.add(key="location", value="not-at-hand")
    return tensor


def with_weights(model: Model) -> Model | None:
    """A float twin whose placeholders hold ones, for what looks at weights; None where they would take much memory."""
    missing = [t for t in model.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    if sum(4 * math.prod(t.dims) for t in missing) > _MOST_FILLED:
        return None
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL and tensor.data_type in _FLOATS:
            filled = np.ones(tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(filled, tensor.name))
    return Model(proto, model.path, sha256=model.sha256, types=model)


def best_placement(model: Model, target: Target) -> Model:
    """A float network with Q/DQ as ``insert`` would put them; the scales are made up, one for each scale group.

    Raises:
        ModelError: Nothing can be quantized.
    """
    from qdqtool.insertion.api import prepared
    from qdqtool.insertion.groups import scale_groups
    from qdqtool.insertion.halfprecision import to_half
    from qdqtool.insertion.options import Placing
    from qdqtool.insertion.placement import place
    from qdqtool.insertion.residuals import rules_for, sketch

    work, half, _, _ = prepared(model, model, target, Placing().weights, None)
    placement = place(work, rules_for(work, Placing(), target))
    if not placement.readers:
        raise ModelError(f"{model.path or 'model'}: nothing can be quantized")
    placed = sketch(work, placement, scale_groups(work, placement.readers))
    if half:
        for tensor in placed.proto.graph.initializer:
            if not has_data(tensor):
                tensor.CopyFrom(placeholder(tensor.name, tensor.dims, tensor.data_type))
        to_half(placed)
    return placed


def half_twin(model: Model, target: Target) -> Model | None:
    """A float network as a file in FP16, as ``insert`` would write it; None where it cannot be converted."""
    from qdqtool.insertion.api import prepared
    from qdqtool.insertion.halfprecision import to_half

    try:
        work, half, _, _ = prepared(model, model, target, "float", None)
        return work if half and to_half(work) else None
    except QdqtoolError:
        return None


def resolved(model: Model, batch: int = 1) -> tuple[Model, list[str]]:
    """The model with its symbolic input dimensions chosen, and what was chosen.

    The first dimension becomes ``batch``, height and width those of the ``imgsz`` metadata, else 640 where
    it has four dimensions.
    """
    notes: list[str] = []
    chosen: dict[str, list[int]] = {}
    size = _image_size(model)
    for name in model.inputs:
        shape = model.shape(name)
        if shape is None or all(d is not None and d > 0 for d in shape):
            continue
        dims = [
            d if d else (batch if i == 0 else size[i - 2] if len(shape) == 4 and i >= 2 else 1)
            for i, d in enumerate(shape)
        ]
        chosen[name] = dims
        notes.append(f"input '{name}' taken as {'x'.join(map(str, dims))}")
    if not chosen:
        return model, notes
    proto = onnx.ModelProto(ir_version=model.proto.ir_version)
    proto.opset_import.extend(model.proto.opset_import)
    proto.functions.extend(model.proto.functions)
    proto.metadata_props.extend(model.proto.metadata_props)
    graph = proto.graph
    graph.name = model.proto.graph.name
    graph.node.extend(model.proto.graph.node)
    for tensor in model.proto.graph.initializer:
        graph.initializer.append(
            tensor if tensor_bytes(tensor) <= _KEEP else placeholder(tensor.name, tensor.dims, tensor.data_type)
        )
    for value in model.proto.graph.input:
        added = graph.input.add()
        added.CopyFrom(value)
        if value.name in chosen:
            shape = added.type.tensor_type.shape  # written anew: an output of that name may have given another rank
            del shape.dim[:]
            shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=d) for d in chosen[value.name])
    for value in model.proto.graph.output:
        added = graph.output.add()
        added.CopyFrom(value)
        added.type.tensor_type.ClearField("shape")
    return Model(proto, model.path, sha256=model.sha256), notes


def _image_size(model: Model) -> tuple[int, int]:
    digits = "".join(c if c.isdigit() else " " for c in model.metadata.get("imgsz", "")[:100]).split()
    found = [int(d) for d in digits if 0 < int(d) <= 65536]
    return (found[0], found[-1]) if found else (640, 640)
