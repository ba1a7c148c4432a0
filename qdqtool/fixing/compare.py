"""Runs models in onnxruntime on the same inputs, to see that a fix does not change what the network computes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool import qdq
from qdqtool.errors import DataError
from qdqtool.graph import Model
from qdqtool.onnxgraph.editor import Editor
from qdqtool.onnxgraph.view import View

Arrays = dict[str, npt.NDArray[Any]]
_DYNAMIC = {0: 1}  # an unknown batch
_SIDE = 256  # an unknown height or width: a multiple of every stride in use
_ATOL = 1e-6  # of the largest output: rounding of float arithmetic


class RunError(Exception):
    """A model that onnxruntime cannot run; the message is its first line."""


@dataclass(frozen=True)
class Noise:
    """How far outputs are from those of the float network.

    Attributes:
        each: For each output, root mean square of the difference over that of the float output.
        finite: Whether all values are numbers.
    """

    each: dict[str, float]
    finite: bool

    @property
    def relative(self) -> float:
        """The worst output's."""
        return max(self.each.values(), default=0.0)


def float_model(model: Model) -> onnx.ModelProto:
    """The network without activation quantizers; weights stay as quantized."""
    view = View(model)
    editor = Editor(model)
    for q, dqs in view.pairs():
        for dq in dqs:  # a DQ may be a network output, so it stays as a copy
            proto = editor.proto_of(dq)
            proto.op_type, proto.domain = "Identity", ""
            del proto.attribute[:]
            del proto.input[:]
            proto.input.append(q.input(0))
        if len(dqs) == len(view.model.readers(q.output)):
            editor.remove(q)
    return editor.finish()


def runnable(model: Model, body: bool = False) -> tuple[onnx.ModelProto, list[str]]:
    """The part of a model that onnxruntime can run, and the nodes where it was cut.

    Args:
        model: The model.
        body: Keep only what leads to the last convolutions; else all but operators that onnxruntime does not have
            (TensorRT's plugins) and what is behind them.
    """
    if body:
        view = View(model)
        keep = {n.index for n in view.weighted} | view.feeds_weighted
        lost = {n.index for n in model.nodes if n.index not in keep}
        return _cut(model, lost), [n.name for n in model.ordered if n.index in lost]
    lost = {n.index for n in model.nodes if not _is_known(n.op, n.domain, model.opset)}
    names = [n.name for n in model.ordered if n.index in lost]
    if not lost:
        return model.proto, []
    tensors: set[str] = set()
    for node in model.ordered:
        if node.index in lost or any(t in tensors for t in node.inputs):
            lost.add(node.index)
            tensors.update(node.outputs)
    return _cut(model, lost), names


def _cut(model: Model, lost: set[int]) -> onnx.ModelProto:
    """The model without some nodes; what they read from the rest becomes an output."""
    made = {o for n in model.nodes if n.index in lost for o in n.outputs}
    ends = [t for n in model.nodes if n.index in lost for t in n.inputs
            if t and t not in made and not model.is_constant(t) and t not in model.inputs]
    ends += [t for t in model.outputs if t not in made]
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    copies = [onnx.NodeProto.FromString(n.proto.SerializeToString()) for n in model.nodes if n.index not in lost]
    del proto.graph.node[:]
    proto.graph.node.extend(copies)
    del proto.graph.output[:]
    # Every reader in the rest still sees these tensors, quantized ones apart: those are compared behind their DQ.
    proto.graph.output.extend(
        onnx.ValueInfoProto(name=t) for t in dict.fromkeys(ends) if not qdq.is_q(model.producer(t))
    )
    return proto


def _is_known(op: str, domain: str, opset: int) -> bool:
    if domain in ("com.microsoft", "ai.onnx.ml"):
        return True
    return domain in ("", "ai.onnx") and bool(onnx.defs.has(op, max(opset, 1)))


def random_inputs(model: Model, seed: int = 0) -> Arrays:
    """Inputs for every graph input: images of smooth shapes and noise, in the range of the first quantizer."""
    generator = np.random.default_rng(seed)
    view = View(model)
    result: Arrays = {}
    for name in model.inputs:
        dims = model.shape(name)
        if dims is None:
            raise RunError(f"the shape of input '{name}' is not known")
        shape = [d or _DYNAMIC.get(i, _SIDE) for i, d in enumerate(dims)]
        kind = model.elem_type(name) or onnx.TensorProto.FLOAT
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        if not np.issubdtype(dtype, np.floating):
            result[name] = generator.integers(-100 if np.issubdtype(dtype, np.signedinteger) else 0, 100, shape).astype(
                dtype
            )
            continue
        result[name] = (_images(generator, shape) * _range_of(view, name)).astype(dtype)
    return result


def _images(generator: np.random.Generator, shape: list[int]) -> npt.NDArray[np.float64]:
    noise = generator.random(shape)
    if len(shape) != 4 or min(shape[2:]) < 8:
        return noise
    coarse = generator.random((*shape[:2], shape[2] // 8 + 1, shape[3] // 8 + 1))
    smooth = np.repeat(np.repeat(coarse, 8, axis=2), 8, axis=3)[:, :, : shape[2], : shape[3]]
    return np.asarray(0.75 * smooth + 0.25 * noise)


def _range_of(view: View, name: str) -> float:
    """What the first quantizer of an input can hold; 1 where it has none."""
    for node in view.model.readers(name):
        if qdq.is_q(node):
            params = view.params(node)
            if params.scale is not None and params.scale.size == 1 and 0 < params.scale[0] < 1e4:
                return float(params.scale[0] * 127)
    return 1.0


def check_inputs(model: Model, given: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Inputs that the user gave, checked against the model.

    Raises:
        DataError: One is missing, or has the wrong rank.
    """
    for name in model.inputs:
        if name not in given:
            raise DataError(f"the inputs have no array for the model's input '{name}'")
        dims = model.shape(name)
        if dims is not None and len(dims) != given[name].ndim:
            raise DataError(f"input '{name}' has {given[name].ndim} dimensions, the model wants {len(dims)}")
    return {name: np.asarray(given[name]) for name in model.inputs}


def run(proto: onnx.ModelProto, inputs: Arrays) -> Arrays:
    """The outputs of a model, computed on the CPU without fusing Q/DQ.

    Raises:
        RunError: onnxruntime cannot load or run it.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = max(1, min(4, os.cpu_count() or 1))
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        return dict(zip(names, session.run(names, inputs), strict=True))
    except Exception as error:
        # onnxruntime raises its own exception classes, and ValueError for models over 2 GB.
        text = str(error).strip().splitlines()
        raise RunError(text[0] if text else type(error).__name__) from error


def noise(outputs: Arrays, reference: Arrays) -> Noise:
    """The distance of outputs from the float network's; outputs that are not floats are left out."""
    each: dict[str, float] = {}
    finite = True
    for name, wanted in reference.items():
        got = outputs.get(name)
        if got is None or got.shape != wanted.shape:
            return Noise({name: float("inf")}, False)
        if not np.issubdtype(wanted.dtype, np.floating) or not wanted.size:
            continue
        a, b = got.astype(np.float64), wanted.astype(np.float64)
        finite = finite and bool(np.all(np.isfinite(a)))
        level = float(np.sqrt(np.mean(b * b)))
        difference = float(np.sqrt(np.mean((a - b) ** 2)))
        each[name] = difference / level if level > 0 else difference
    return Noise(each, finite)


def within(before: Noise, after: Noise, factor: float) -> bool:
    """Whether no output's noise grew by more than a factor, rounding of float arithmetic apart."""
    if not after.finite:
        return False
    if not before.finite:
        return True
    return all(value <= before.each.get(name, 0.0) * factor + _ATOL for name, value in after.each.items())
