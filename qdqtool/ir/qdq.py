"""QuantizeLinear and DequantizeLinear nodes: pairs, scales and zero points.

All forms in use are supported: parameters as initializers or Constant nodes, shape ``[]`` or
``[1]``, float weights with Q and DQ, integer weights with DQ only, per-channel axes, a missing zero
point, float16.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.proto.subgraphs import DOMAINS, STANDARD, nested_graphs

FLOATS = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
    }
)
QUANTIZABLE = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)  # types that can be quantized
Q = "QuantizeLinear"
DQ = "DequantizeLinear"
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
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
    onnx.TensorProto.FLOAT: Precision.FP32,
    onnx.TensorProto.DOUBLE: Precision.FP32,
    onnx.TensorProto.FLOAT16: Precision.FP16,
    onnx.TensorProto.BFLOAT16: Precision.BF16,
}
_MAX_CHAIN = 20  # maximum number of nodes between a stored constant and its quantizer
_STORED_TYPES = (
    onnx.TensorProto.INT8,
    onnx.TensorProto.INT4,
    onnx.TensorProto.FLOAT8E4M3FN,
)


def precision_of(elem_type: int) -> Precision:
    """Return the precision of an ONNX element type."""
    return _PRECISIONS.get(elem_type, Precision.UNKNOWN)


@dataclass(frozen=True)
class PerChannel:
    """Summary of the scales of all channels. Equal scales have equal summaries.

    Findings contain the summary instead of the scales, because there may be a million scales.

    Attributes:
        count: Number of scales.
        digest: Hash of all scales, see :attr:`ParameterValues.digest`.
        least: Smallest scale; NaN without scales.
        greatest: Largest scale; NaN without scales.
    """

    count: int
    digest: bytes
    least: float
    greatest: float


@dataclass(frozen=True, eq=False, repr=False)
class ParameterValues:
    """Flat values of a scale or zero-point tensor, shared by all nodes that read it."""

    values: npt.NDArray[Any]

    @functools.cached_property
    def is_positive(self) -> bool:
        """Whether all values are finite and above 0."""
        return bool(np.all((self.values > 0) & np.isfinite(self.values)))

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether all values are equal."""
        return bool(np.ptp(self.values) == 0)

    @functools.cached_property
    def is_zero(self) -> bool:
        """Whether all values are 0."""
        return not np.any(self.values)

    @functools.cached_property
    def digest(self) -> bytes:
        """Hash of the values, or of one value if all are equal."""
        values = self.values[:1] if (self.values == self.values[:1]).all() else self.values
        return hashlib.sha256(np.ascontiguousarray(values).data).digest()

    @functools.cached_property
    def summary(self) -> float | PerChannel:
        """The value, or the summary of the values of all channels."""
        values = self.values
        if values.size == 1:
            return float(values[0])
        if not values.size:
            return PerChannel(0, self.digest, math.nan, math.nan)
        return PerChannel(values.size, self.digest, float(values.min()), float(values.max()))


@dataclass(frozen=True, eq=False, repr=False)
class QuantParams:
    """Scale and zero point of a Q or DQ node.

    Attributes:
        scales: Flat float64 scales, in units of the tensor per integer step; None if computed at
            run time or if the data is not available.
        scale_shape: Dimensions of the scale tensor; None if unknown.
        scale_type: ONNX element type of the scale; 0 if unknown.
        zero_points: Flat int64 zero points (float64 for FP8); zeros if the input is missing, None
            if unknown.
        has_zero_point: Whether the node has a zero-point input.
        precision: The quantized type.
        axis: Channel axis of a per-channel node as written (1 by default); None for per-tensor.
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

    @property
    def is_per_channel(self) -> bool:
        """Whether each channel has its own scale."""
        return self.axis is not None

    @property
    def scale(self) -> npt.NDArray[np.float64] | None:
        """The values of ``scales``."""
        return None if self.scales is None else self.scales.values

    @property
    def single_scale(self) -> float | None:
        """The scale of a quantizer with a single scale; None if unknown or for several scales."""
        summary = self.summary
        return summary if isinstance(summary, float) else None

    @property
    def zero_point(self) -> npt.NDArray[Any] | None:
        """The values of ``zero_points``."""
        return None if self.zero_points is None else self.zero_points.values

    @property
    def summary(self) -> float | PerChannel | None:
        """The scale, or the summary of the scales of all channels; None if unknown."""
        return None if self.scales is None else self.scales.summary

    @functools.cached_property
    def scalars(self) -> tuple[float, int] | None:
        """The scale and the zero point of a per-tensor quantizer.

        None if they are unknown, if the scale is not positive, or if the type is not INT8 or UINT8.
        """
        scales, zero_points = self.scales, self.zero_points
        if scales is None or zero_points is None or self.precision not in BYTES:
            return None
        if not scales.values.size == zero_points.values.size == 1 or not scales.is_positive:
            return None
        return float(scales.values[0]), int(zero_points.values[0])

    @functools.cached_property
    def key(self) -> tuple[object, ...] | None:
        """Key that is equal for equal parameters; None for unknown parameters or a NaN scale."""
        if self.scales is None or self.zero_points is None or np.isnan(self.scales.values).any():
            return None
        size = self.scales.values.size
        axis = self.axis if size > 1 else None
        return self.precision, axis, size, self.scales.digest, self.zero_points.digest

    def same_as(self, other: QuantParams) -> bool | None:
        """Return whether two quantizers have equal parameters; None if a parameter is unknown."""
        if self.scales is None or self.zero_points is None:
            return None
        if other.scales is None or other.zero_points is None:
            return None
        return self.key is not None and self.key == other.key


def is_q(node: Node | None) -> bool:
    """Return whether a node is a QuantizeLinear."""
    return node is not None and node.op == Q and node.domain in DOMAINS


def is_dq(node: Node | None) -> bool:
    """Return whether a node is a DequantizeLinear."""
    return node is not None and node.op == DQ and node.domain in DOMAINS


def is_qdq(node: Node | None) -> bool:
    """Return whether a node is a QuantizeLinear or DequantizeLinear."""
    return node is not None and node.op in (Q, DQ) and node.domain in DOMAINS


def read_params(model: Model, node: Node) -> QuantParams:
    """Return scale and zero point of a Q or DQ node in any supported form."""
    cache = model.cache.get("quantizers")
    if cache is None:
        cache = model.cache["quantizers"] = {}
    params: QuantParams | None = cache.get(node.index)
    if params is None:
        params = cache[node.index] = _read_shared_params(model, node, cache)
    return params


def _read_shared_params(model: Model, node: Node, cache: dict[Any, QuantParams]) -> QuantParams:
    """Return a quantizer's parameters, read only once for quantizers that share their scale."""
    axis = node.attributes.get("axis")
    if axis is not None and not isinstance(axis, int):
        return _read_params(model, node)
    key = (node.input(1), node.input(2), axis)
    params = cache.get(key)
    if params is None:
        params = _read_params(model, node)
        # Without a zero point of known type, the quantized type depends on the node, so the
        # parameters cannot be shared.
        if node.input(2) and model.elem_type(node.input(2)):
            cache[key] = params
    return params


def _read_params(model: Model, node: Node) -> QuantParams:
    scale_name, zero_name = node.input(1), node.input(2)
    scales = _read_parameter(model, scale_name, np.float64)
    shape = model.constant_shape(scale_name)
    size = scales.values.size if scales is not None else 0
    count = math.prod(shape) if shape is not None else size
    precision = _quantized_type(model, node, zero_name)
    if zero_name:
        dtype = np.float64 if precision == Precision.FP8 else np.int64
        zeros = _read_parameter(model, zero_name, dtype)
    else:
        # There are as many zero points as scales. If the scales were read, their number is used,
        # because the stated dimensions may be wrong.
        zero_count = size if scales is not None else 1
        zeros = ParameterValues(np.broadcast_to(np.zeros(1, np.int64), (zero_count,)))
    return QuantParams(
        scales=scales,
        scale_shape=shape,
        scale_type=model.elem_type(scale_name),
        zero_points=zeros,
        has_zero_point=bool(zero_name),
        precision=precision,
        axis=_channel_axis(node) if count > 1 else None,
        has_axis="axis" in node.attributes,
    )


def _channel_axis(node: Node) -> int:
    axis = node.attributes.get("axis", 1)
    return axis if isinstance(axis, int) else 1


def _read_parameter(model: Model, name: str, dtype: type[np.generic]) -> ParameterValues | None:
    cache: dict[str, ParameterValues | None] = model.cache.setdefault(
        f"parameters of {dtype.__name__}", {}
    )
    if name not in cache:
        value = model.constant(name)
        if value is None:
            cache[name] = None
        else:
            cache[name] = ParameterValues(np.asarray(value).astype(dtype).reshape(-1))
    return cache[name]


def _quantized_type(model: Model, node: Node, zero_name: str) -> Precision:
    zero_type = model.elem_type(zero_name) if zero_name else 0
    if zero_type:
        # The result is UNKNOWN for int16, FP8 E5M2 and other types that TensorRT does not support.
        return precision_of(zero_type)
    if node.op == Q:
        output_type = node.integer("output_dtype", 0)
        # By ONNX's definition, the type is uint8 without a zero point.
        return precision_of(output_type) if output_type else Precision.UINT8
    elem_type, producer = model.elem_type(node.input(0)), model.producer(node.input(0))
    if not elem_type and producer is not None and producer.op == Q:
        return _quantized_type(model, producer, producer.input(2))
    return precision_of(elem_type)


def quantizers(model: Model) -> Iterator[Node]:
    """Yield all Q and DQ nodes in graph order."""
    return (node for node in model.ordered if is_qdq(node))


def uses_fp8(model: Model) -> bool:
    """Return whether a model has quantizers of FP8."""
    return any(read_params(model, node).precision == Precision.FP8 for node in quantizers(model))


def is_quantized(model: Model) -> bool:
    """Return whether the main graph of a model has Q/DQ nodes or integer operators."""
    return any(is_qdq(node) or node.op in INTEGER_OPERATORS for node in model.nodes)


def find_bfloat16(model: Model) -> str:
    """Return the name of the first tensor that is stated to be bfloat16, else ``""``."""
    return _find_typed_tensor(model, onnx.TensorProto.BFLOAT16)


def states_float16(model: Model) -> bool:
    """Return whether the model states a float16 type, such as that of weights or of a Cast."""
    return bool(_find_typed_tensor(model, onnx.TensorProto.FLOAT16))


def _find_typed_tensor(model: Model, kind: int) -> str:
    graph = model.proto.graph
    graphs = (graph, *nested_graphs(node.proto for node in model.nodes if node.subgraphs))
    return next(itertools.chain.from_iterable(_typed_tensors(g, kind) for g in graphs), "")


def _typed_tensors(graph: onnx.GraphProto, kind: int) -> Iterator[str]:
    values = (*graph.input, *graph.output, *graph.value_info)
    yield from (tensor.name for tensor in graph.initializer if tensor.data_type == kind)
    yield from (value.name for value in values if value.type.tensor_type.elem_type == kind)
    yield from _typed_outputs(graph.node, kind)


def _typed_outputs(nodes: Iterable[onnx.NodeProto], kind: int) -> Iterator[str]:
    """Yield an output of each node with an attribute of the element type ``kind``.

    The attribute names the type (such as ``to`` of a Cast), or is a tensor of the type.
    """
    for node in (n for n in nodes if n.attribute):
        for attribute in node.attribute:
            is_typed = attribute.name in _TYPE_ATTRIBUTES and attribute.i == kind
            if is_typed or attribute.t.data_type == kind:
                yield next(filter(None, node.output), node.name)


def is_sparse(model: Model, tensor: str) -> bool:
    """Return whether a tensor is a sparse initializer."""
    return any(sparse.values.name == tensor for sparse in model.proto.graph.sparse_initializer)


def find_misread_constants(model: Model) -> Iterator[tuple[Node, str]]:
    """Yield each node that reads a stored INT8, INT4 or FP8 constant as plain numbers.

    Each item is the node and the name of the constant.

    TensorRT's optimizer treats every such constant as quantized values. Consumers for which this is
    harmless are left out: DQs, integer operators, plugins (operators of other domains), Shape
    (which reads only the dimensions), a Clip with such constants as bounds, and nodes whose results
    are not needed.
    """
    constants = _find_stored_constants(model)
    misreading: set[int] = set()
    for tensor in constants:
        consumers = filter(_reads_values, model.consumers(tensor))
        # A Clip misreads only its data, because the parser itself reads its bounds.
        misreading.update(n.index for n in consumers if n.op != "Clip" or n.input(0) == tensor)
    if not misreading:
        return
    needed = set(model.outputs)
    pairs: list[tuple[Node, str]] = []
    for node in reversed(model.ordered):
        if needed.isdisjoint(node.outputs):
            continue
        needed.update(node.inputs, node.captured)
        if node.index in misreading:
            pairs.extend((node, t) for t in dict.fromkeys(node.inputs) if t in constants)
    yield from reversed(pairs)


def find_parameter_consumer(model: Model, node: Node) -> tuple[Node, bool] | None:
    """Return the Q or DQ whose scale or zero point depends on a node.

    Only the first consumer of each tensor is followed.

    Returns:
        The quantizer, and whether `node` and all nodes from there to the quantizer are Identities.
        None if the search does not find such a quantizer.
    """
    is_identity = True
    for _ in range(_MAX_CHAIN):
        is_identity = is_identity and node.op == "Identity"
        tensor = node.output
        consumers = model.consumers(tensor)
        if not consumers:
            return None
        node = consumers[0]
        if is_qdq(node):
            return (node, is_identity) if tensor != node.input(0) else None
    return None


def _find_stored_constants(model: Model) -> set[str]:
    tensors = {t.name for t in model.initializers.values() if t.data_type in _STORED_TYPES}
    for node in model.nodes:
        if node.op == "Constant":
            proto = model.constant_proto(node.output)
            if proto is not None and proto.data_type in _STORED_TYPES:
                tensors.add(node.output)
    return tensors


def _reads_values(node: Node) -> bool:
    return (
        not is_qdq(node)
        and node.op != "Shape"
        and node.op not in INTEGER_OPERATORS
        and node.domain in STANDARD
        and onnx.defs.has(node.op)
    )


def find_pair(model: Model, tensor: str) -> tuple[Node, Node | None] | None:
    """Return the DQ that produces a tensor and the Q before it; None if no DQ produces it.

    The Q is None if no Q is directly before the DQ, for example if the DQ reads stored integers.
    """
    dq = model.producer(tensor)
    if dq is None or not is_dq(dq):
        return None
    q = model.producer(dq.input(0))
    return dq, q if is_q(q) else None


def find_first_quantizer(model: Model, quantizer: Node) -> Node:
    """Return the Q before a DQ; the quantizer itself if it is a Q, or if no Q is before it."""
    producer = model.producer(quantizer.input(0)) if is_dq(quantizer) else None
    return producer if producer is not None and is_q(producer) else quantizer


def find_float_tensor(model: Model, tensor: str) -> str:
    """Return the tensor upstream of all Q/DQ pairs directly before a tensor, or the tensor."""
    pair = find_pair(model, tensor)
    while pair is not None and pair[1] is not None:
        tensor = pair[1].input(0)
        pair = find_pair(model, tensor)
    return tensor
