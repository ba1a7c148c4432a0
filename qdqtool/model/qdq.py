"""What a QuantizeLinear/DequantizeLinear pair is: find it, read its scale and zero point, judge them.

Every spelling in use is understood: parameters as initializers or Constant nodes, shape ``[]`` or ``[1]``, float
weights with Q and DQ, integer weights with DQ only, per-channel axes, a missing zero point, float16.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.base.records import record
from qdqtool.model.graph import Model, Node
from qdqtool.model.subgraphs import DOMAINS, STANDARD
from qdqtool.types import Precision

FLOATS = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
    }
)
QUANTIZABLE = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)  # what gets a Q
Q = "QuantizeLinear"
DQ = "DequantizeLinear"
SMOOTHED = "qdqtool.smoothed"  # metadata of a model whose outliers were moved into weights: the tensors, one a line
INTEGER_OPERATORS = (
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
    "MatMulInteger",
    "DynamicQuantizeLinear",
)

_PRECISIONS: dict[int, Precision] = {
    onnx.TensorProto.INT8: Precision.INT8,
    onnx.TensorProto.UINT8: Precision.UINT8,
    onnx.TensorProto.INT4: Precision.INT4,
    onnx.TensorProto.INT32: Precision.INT32,
    onnx.TensorProto.INT64: Precision.INT64,
    onnx.TensorProto.BOOL: Precision.BOOL,
    onnx.TensorProto.FLOAT8E4M3FN: Precision.FP8,
    onnx.TensorProto.FLOAT8E5M2: Precision.FP8,
    onnx.TensorProto.FLOAT8E4M3FNUZ: Precision.FP8,
    onnx.TensorProto.FLOAT8E5M2FNUZ: Precision.FP8,
    onnx.TensorProto.FLOAT: Precision.FP32,
    onnx.TensorProto.DOUBLE: Precision.FP32,
    onnx.TensorProto.FLOAT16: Precision.FP16,
    onnx.TensorProto.BFLOAT16: Precision.BF16,
}
_STORED = (onnx.TensorProto.INT8, onnx.TensorProto.INT4, onnx.TensorProto.FLOAT8E4M3FN)


def smoothed_tensors(model: Model) -> frozenset[str]:
    """What Linears read of which outliers were moved into their weights, as the model's metadata say."""
    return frozenset(model.metadata.get(SMOOTHED, "").splitlines())


def precision_of(elem_type: int) -> Precision:
    """The precision that an ONNX element type stands for."""
    return _PRECISIONS.get(elem_type, Precision.UNKNOWN)


@record
class PerChannel:
    """A summary of one scale for each channel; equal for equal scales. There may be a million, shown many times.

    Attributes:
        count: How many.
        digest: Of all of them, see :attr:`Numbers.digest`.
        least: The least of them; NaN where there is none.
        greatest: The greatest.
    """

    count: int
    digest: bytes
    least: float
    greatest: float


@record
class ParameterValues:
    """The flat values of a scale or a zero point: one object for all nodes that read the tensor, which may be large."""

    values: npt.NDArray[Any]

    __eq__, __hash__ = object.__eq__, object.__hash__

    @functools.cached_property
    def is_positive(self) -> bool:
        """Whether all are finite and above 0."""
        return bool(np.all((self.values > 0) & np.isfinite(self.values)))

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether all are one number."""
        return bool(np.ptp(self.values) == 0)

    @functools.cached_property
    def is_zero(self) -> bool:
        """Whether all are 0."""
        return not np.any(self.values)

    @functools.cached_property
    def digest(self) -> bytes:
        """Equal for equal values; of one value where all are the same."""
        values = self.values[:1] if (self.values == self.values[:1]).all() else self.values
        return hashlib.sha256(np.ascontiguousarray(values).data).digest()

    @functools.cached_property
    def summary(self) -> float | PerChannel:
        """One number, or one for each channel."""
        values = self.values
        if values.size == 1:
            return float(values[0])
        least, greatest = (
            (float(values.min()), float(values.max())) if values.size else (math.nan, math.nan)
        )
        return PerChannel(values.size, self.digest, least, greatest)


@record
class QuantParams:
    """Scale and zero point of a Q or DQ node.

    Attributes:
        scales: Flat float64 scales, in units of the tensor per integer step; None when computed at run time or the
            data is not available.
        scale_shape: The scale tensor's dimensions; None when unknown.
        scale_type: ONNX element type of the scale; 0 when unknown.
        zero_points: Flat int64 zero points; zeros where the input is missing; None when not known.
        has_zero_point: Whether the node has a zero-point input.
        precision: The quantized type.
        axis: The channel axis of a per-channel node, as written (default 1); None for per-tensor.
        has_axis: Whether the node has an ``axis`` attribute.
    """

    scales: ParameterValues | None
    scale_shape: tuple[int, ...] | None
    scale_type: int
    zero_points: ParameterValues | None
    has_zero_point: bool
    precision: Precision
    axis: int | None
    has_axis: bool

    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def per_channel(self) -> bool:
        return self.axis is not None

    @property
    def scale(self) -> npt.NDArray[np.float64] | None:
        """The values of ``scales``."""
        return None if self.scales is None else self.scales.values

    @property
    def zero_point(self) -> npt.NDArray[np.int64] | None:
        """The values of ``zero_points``."""
        return None if self.zero_points is None else self.zero_points.values

    @property
    def summary(self) -> float | PerChannel | None:
        """One scale, or one for each channel; None where it is not known."""
        return None if self.scales is None else self.scales.summary

    @functools.cached_property
    def key(self) -> tuple[object, ...] | None:
        """Equal for two that quantize alike (see :meth:`same_as`); None when a scale is not known or no number."""
        if self.scales is None or self.zero_points is None or np.isnan(self.scales.values).any():
            return None
        size = self.scales.values.size
        axis = self.axis if size > 1 else None
        return self.precision, axis, size, self.scales.digest, self.zero_points.digest

    def same_as(self, other: QuantParams) -> bool | None:
        """Whether both quantize alike; None when a scale is not known."""
        if (
            self.scale is None
            or other.scale is None
            or self.zero_point is None
            or other.zero_point is None
        ):
            return None
        return self.key is not None and self.key == other.key


def is_q(node: Node | None) -> bool:
    return node is not None and node.op == Q and node.domain in DOMAINS


def is_dq(node: Node | None) -> bool:
    return node is not None and node.op == DQ and node.domain in DOMAINS


def is_qdq(node: Node | None) -> bool:
    return node is not None and node.op in (Q, DQ) and node.domain in DOMAINS


def read_params(model: Model, node: Node) -> QuantParams:
    """Reads scale and zero point of a Q or DQ node, whatever their spelling."""
    known = model.cache.get("quantizers")
    if known is None:
        known = model.cache["quantizers"] = {}
    found: QuantParams | None = known.get(node.index)
    if found is None:
        # A Q and its DQ, and quantizers that share their scale, are read once, where no type of theirs comes in.
        axis = node.attributes.get("axis")
        key = (
            (node.input(1), node.input(2), axis)
            if axis is None or isinstance(axis, int)
            else node.index
        )
        alike = known.get(key)
        if alike is None:
            alike = _read_params(model, node)
            if node.input(2) and model.elem_type(node.input(2)):
                known[key] = alike
        found = known[node.index] = alike
    return found


def _read_params(model: Model, node: Node) -> QuantParams:
    scale_name, zero_name = node.input(1), node.input(2)
    scales = _numbers(model, scale_name, np.float64)
    shape = model.constant_shape(scale_name)
    size = scales.values.size if scales is not None else 0
    count = math.prod(shape) if shape is not None else size
    axis = node.attributes.get("axis", 1)
    if zero_name:
        zeros = _numbers(model, zero_name, np.int64)
    else:
        # As many as there are scales: what the file says of their number may be wrong.
        zeros = ParameterValues(
            np.broadcast_to(np.zeros(1, np.int64), (size if scales is not None else 1,))
        )
    return QuantParams(
        scales=scales,
        scale_shape=shape,
        scale_type=model.elem_type(scale_name),
        zero_points=zeros,
        has_zero_point=bool(zero_name),
        precision=_quantized_type(model, node, zero_name),
        axis=None if count <= 1 else axis if isinstance(axis, int) else 1,
        has_axis="axis" in node.attributes,
    )


def _numbers(model: Model, name: str, dtype: type[np.generic]) -> ParameterValues | None:
    """A constant's values, kept with the model for its other readers."""
    known = model.cache.setdefault(f"numbers of {dtype.__name__}", {})
    if name not in known:
        value = model.constant(name)
        known[name] = (
            None if value is None else ParameterValues(np.asarray(value).astype(dtype).reshape(-1))
        )
    found = known[name]
    assert found is None or isinstance(found, ParameterValues)
    return found


def _quantized_type(model: Model, node: Node, zero_name: str) -> Precision:
    if zero_name and (written := model.elem_type(zero_name)):
        return precision_of(written)  # UNKNOWN for int16 and the like, which TensorRT does not take
    if node.op == Q:
        out = node.integer("output_dtype", 0)
        return (
            precision_of(out) if out else Precision.UINT8
        )  # ONNX: without a zero point the type is uint8
    elem, producer = model.elem_type(node.input(0)), model.producer(node.input(0))
    if not elem and producer is not None and producer.op == Q:
        return _quantized_type(model, producer, producer.input(2))
    return precision_of(elem)


def quantizers(model: Model) -> Iterator[Node]:
    """All Q and DQ nodes, in graph order."""
    return (n for n in model.ordered if is_qdq(n))


def is_quantized(model: Model) -> bool:
    """Whether a model already has Q/DQ nodes or integer operators."""
    return any(is_qdq(n) or n.op in INTEGER_OPERATORS for n in model.nodes)


def is_sparse(model: Model, tensor: str) -> bool:
    """Whether a tensor is stored as a sparse one."""
    return any(sparse.values.name == tensor for sparse in model.proto.graph.sparse_initializer)


def find_misread_constants(model: Model) -> Iterator[tuple[Node, str]]:
    """Nodes that read a stored int8, int4 or FP8 constant though they are no quantizer, with its name.

    TensorRT's optimizer takes every such constant for quantized values, whatever it was meant for. Operators of other
    domains are plugins, which may read one; Shape asks for nothing but the dimensions; a node whose result nothing
    needs is not built.
    """
    stored = {t.name for t in model.initializers.values() if t.data_type in _STORED}
    for node in model.nodes:
        proto = model.constant_proto(node.output) if node.op == "Constant" else None
        if proto is not None and proto.data_type in _STORED:
            stored.add(node.output)
    reading = {
        n.index
        for t in stored
        for n in model.consumers(t)
        if not (is_qdq(n) or n.op == "Shape" or n.op in INTEGER_OPERATORS)
        and n.domain in STANDARD
        and onnx.defs.has(n.op)
    }
    if not reading:
        return
    needed = set(model.outputs)
    found: list[tuple[Node, str]] = []
    for node in reversed(model.ordered):
        if needed.isdisjoint(node.outputs):
            continue
        needed.update(node.inputs)
        needed.update(node.captured)
        if node.index in reading:
            found.extend((node, t) for t in dict.fromkeys(node.inputs) if t in stored)
    yield from reversed(found)


def find_pair(model: Model, tensor: str) -> tuple[Node, Node | None] | None:
    """The DQ that makes a tensor, with the Q in front of it (None for stored integers); None when no DQ makes it."""
    dq = model.producer(tensor)
    if dq is None or not is_dq(dq):
        return None
    q = model.producer(dq.input(0))
    return dq, q if is_q(q) else None


def float_tensor(model: Model, tensor: str) -> str:
    """The tensor that stands in the float network for what pairs in a row make."""
    while (found := find_pair(model, tensor)) is not None and found[1] is not None:
        tensor = found[1].input(0)
    return tensor
