"""The network's input as integers, so that a deployment need not write floats.

* ``int8``: the first Q goes, and the input holds what it would have made: ``rint(x / scale)`` from -128 to 127. Only a
  DequantizeLinear is left between the input and the convolution, as in ModelOpt's ``--direct_io_types``.
* ``uint8``: the input holds pixels from 0 to 255, as they come from a decoder. A Cast makes them float (TensorRT takes
  UINT8 at the network's boundary only, from 8.5 on), and the factor of the preprocessing (1/255) goes into the scale of
  the first Q, so that it costs nothing. A mean or a deviation cannot go there; they become one Mul and one Add.

The order of channels, the size and the letterbox stay the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.graph import Model, Node
from qdqtool.trt.targets import Target

INPUT_TYPES = ("float", "int8", "uint8")
_LEVELS = 255.0


@dataclass(frozen=True)
class Scaling:
    """How pixels from 0 to 255 become what the float network takes: ``(pixel * scale - mean) / std``, by channel."""

    scale: float = 1.0 / _LEVELS
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    @property
    def plain(self) -> bool:
        return not any(self.mean) and all(s == 1.0 for s in self.std)


def check_input_type(kind: str, target: Target) -> None:
    """Before the work: whether a target takes such an input.

    Raises:
        QdqtoolError: It does not, or there is no such type.
    """
    if kind not in INPUT_TYPES:
        raise QdqtoolError(f"`input_type={kind!r}`: choose one of {', '.join(INPUT_TYPES)}")
    if kind == "uint8" and not target.uint8_inputs:
        raise QdqtoolError(f"`input_type='uint8'`: {target.name} has no UINT8 inputs (8.5 has); use int8 or float")


def change_inputs(proto: onnx.ModelProto, kind: str, scaling: Scaling) -> list[str]:
    """Turns the float inputs of a Q/DQ model into integer ones, in place.

    Args:
        proto: A model that :func:`qdqtool.insertion.rewrite.rewrite` made.
        kind: ``int8`` or ``uint8``.
        scaling: Of the pixels, for ``uint8`` and for what is said.

    Returns:
        What to feed, one sentence for each input.

    Raises:
        ModelError: No input is a quantized picture, or floats read it as well (``int8``).
    """
    model = Model(proto, sha256="edited")
    said = []
    for name in model.inputs:
        quantizers = [r for r in model.readers(name) if r.op == "QuantizeLinear" and r.input(0) == name]
        if not quantizers or model.elem_type(name) != TensorProto.FLOAT:
            continue
        said.append(_int8(model, name, quantizers, scaling) if kind == "int8" else _uint8(model, name, scaling))
    if not said:
        raise ModelError(f"`input_type={kind!r}`: no float input of the model is quantized; leave the option out")
    return said


def _scale_of(model: Model, quantizer: Node) -> float:
    value = model.constant(quantizer.input(1))
    assert value is not None and value.size == 1
    return float(value.reshape(-1)[0])


def _int8(model: Model, name: str, quantizers: Sequence[Node], scaling: Scaling) -> str:
    others = [r.name for r in model.readers(name) if r.index not in {q.index for q in quantizers}]
    scales = {_scale_of(model, q) for q in quantizers}
    if others or len(scales) != 1 or model.is_output(name):
        reader = f"'{others[0]}' reads it as float" if others else "it is needed as float or with several scales"
        raise ModelError(f"`input_type='int8'`: input '{name}': {reader}; use uint8 or float")
    gone = {q.index for q in quantizers}
    for node in model.nodes:
        for position, tensor in enumerate(node.proto.input):
            producer = model.producer(tensor)
            if producer is not None and producer.index in gone:
                node.proto.input[position] = name
    kept = [n.proto for n in model.nodes if n.index not in gone]
    del model.proto.graph.node[:]
    model.proto.graph.node.extend(kept)
    _retype(model, name, TensorProto.INT8)
    scale = scales.pop()
    what = f"input '{name}' is int8: feed rint(x / {scale:.8g}) clipped to -128 ... 127, x as the float model takes it"
    if scaling.plain:
        what += f"; from pixels, rint(pixel * {scaling.scale / scale:.8g})"
    return what


def _uint8(model: Model, name: str, scaling: Scaling) -> str:
    graph = model.proto.graph
    taken = {*model.producers, *model.inputs, *model.initializers, *(n.name for n in model.nodes)}

    def fresh(base: str) -> str:
        while base in taken:
            base += "_"
        taken.add(base)
        return base

    def constant(base: str, value: object) -> str:
        made = fresh(base)
        graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), made))
        return made

    pixels = fresh(f"{name}_pixels")
    nodes = [helper.make_node("Cast", [name], [pixels], name=fresh(f"{name}/Cast"), to=TensorProto.FLOAT)]
    values = ""
    if not scaling.plain or any(r.op != "QuantizeLinear" for r in model.readers(name)) or model.is_output(name):
        if model.is_output(name):
            raise ModelError(f"`input_type='uint8'`: input '{name}' is an output as well; leave the option out")
        values = fresh(f"{name}_values")
        rank = len(model.shape(name) or (1, 1, 1, 1))
        by_channel = (1, -1, *(1,) * (rank - 2))
        mean, std = _by_channel(model, name, scaling.mean), _by_channel(model, name, scaling.std)
        factor, shift = scaling.scale / std, -mean / std
        scaled = values if scaling.plain else fresh(f"{name}_scaled")
        factors = constant(f"{name}_factor", scaling.scale if scaling.plain else factor.reshape(by_channel))
        nodes.append(helper.make_node("Mul", [pixels, factors], [scaled], name=fresh(f"{name}/Mul")))
        if not scaling.plain:
            shifts = constant(f"{name}_shift", shift.reshape(by_channel))
            nodes.append(helper.make_node("Add", [scaled, shifts], [values], name=fresh(f"{name}/Add")))
    for node in model.readers(name):
        folded = scaling.plain and node.op == "QuantizeLinear"
        for position, tensor in enumerate(node.proto.input):
            if tensor == name:
                node.proto.input[position] = pixels if folded else values
        if folded:
            scale = constant(f"{node.input(1)}_pixels", _scale_of(model, node) / scaling.scale)
            node.proto.input[1] = scale
    rest = [n.proto for n in model.nodes]
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    _retype(model, name, TensorProto.UINT8)
    folded_in = f"{scaling.scale:.6g} is in the first scale" if scaling.plain else "scale, mean and std are in it"
    return f"input '{name}' is uint8: feed pixels from 0 to 255 ({folded_in})"


def _by_channel(model: Model, name: str, values: Sequence[float]) -> npt.NDArray[np.float64]:
    """One value where all are the same, else one for each channel of the input."""
    if len(set(values)) == 1:
        return np.asarray(values[:1], np.float64)
    shape = model.shape(name)
    if shape is None or len(shape) != 4 or shape[1] != len(values):
        raise ModelError(f"`input_type='uint8'`: input '{name}' has not the {len(values)} channels of `mean` and `std`")
    return np.asarray(values, np.float64)


def _retype(model: Model, name: str, elem_type: int) -> None:
    for value in model.proto.graph.input:
        if value.name == name:
            value.type.tensor_type.elem_type = elem_type
