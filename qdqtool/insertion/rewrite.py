"""Insertion of Q/DQ pairs into a model, with node names as in QAT exports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.errors import ModelError
from qdqtool.insertion.number_formats import INT8, NumberFormat
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import Placement, QuantizedInput, WeightSite
from qdqtool.insertion.scales import weight_scale
from qdqtool.ir import qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import needs_own_dq
from qdqtool.util.json_text import Json

_QUANTIZER_NAMES = {"residual": "_residual_quantizer", "input": "_input_quantizer"}
_MAX_CHANNELS = 1 << 20  # a file with more output channels is damaged


@dataclass(slots=True)
class QuantizedTensor:
    """A tensor with an inserted Q/DQ pair.

    Attributes:
        tensor: Name of the tensor in the input model.
        scale: Value of one integer step; a list of values for per-channel weights.
        method: How the range was chosen (``mse``, ``max``, ``percentile``, ``entropy``,
            ``weights-max``, ...).
        group: Index of the scale group; None for weights, and for a group with one source.
        node: Name of the inserted QuantizeLinear.
    """

    tensor: str
    scale: float | list[float]
    method: str
    group: int | None
    node: str

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            name: getattr(self, name) for name in ("tensor", "scale", "method", "group", "node")
        }


@dataclass(frozen=True)
class ActivationScale:
    """Scale of an activation.

    Attributes:
        scale: Value of one integer step.
        method: Calibration method.
        group: Index of the scale group; None for a group with one source.
    """

    scale: float
    method: str
    group: int | None


def insert_pairs(
    model: Model,
    placement: Placement,
    scales: Mapping[str, ActivationScale],
    weights: str = PlacementOptions.weights,
) -> list[QuantizedTensor]:
    """Insert Q/DQ pairs into a model, in place.

    Every quantized tensor gets one Q before its first consumer, and one DQ that its quantized
    consumers share. Matrix products do not share a DQ (:func:`qdqtool.ir.operators.needs_own_dq`).
    Float consumers and graph outputs still read the tensor itself. Activation scales have rank 0,
    because TensorRT-RTX treats a scale of shape [1] as per channel and runs the convolution in
    FP32. Zero points are zeros of the quantized type.

    Args:
        model: The model to change.
        placement: Tensors and weights to quantize.
        scales: Scale of each tensor in `placement.inputs`.
        weights: ``float`` stores float weights with Q and DQ. ``int8`` and ``fp8`` store quantized
            weights with DQ alone. ``sketch`` sets the scales of the weights to 1, for a model that
            is only simulated. ``rounded`` inserts no pairs for float32 weights. Instead, the nodes
            read tensors with the names of :func:`name_rounded_weights`, whose values the caller
            supplies.

    Returns:
        The quantized tensors, in graph order.
    """
    writer = _PairWriter(model, placement.number_format)
    by_consumer: dict[int, list[tuple[str, QuantizedInput]]] = {}
    for tensor, inputs in placement.inputs.items():
        for consumer in inputs:
            by_consumer.setdefault(consumer.node.index, []).append((tensor, consumer))
    sites = {site.node.index: site for site in placement.weights}
    for node in model.ordered:
        for tensor, consumer in by_consumer.get(node.index, ()):
            writer.quantize_input(tensor, consumer, scales[tensor])
        if node.index in sites:
            writer.quantize_weights(sites[node.index], weights)
    writer.editor.finish()
    return writer.quantized


class _PairWriter:
    def __init__(self, model: Model, number_format: NumberFormat) -> None:
        self.model = model
        self.format = number_format
        self.editor = Editor(model)
        self.quantized: list[QuantizedTensor] = []
        # Names of the Q's output, the scale and the zero point, by quantized tensor.
        self._pairs: dict[str, list[str]] = {}
        # Name of each DQ's output, by tensor and consumer index. The index is None for a shared DQ.
        self._dq_outputs: dict[tuple[str, int | None], str] = {}

    def quantize_input(self, tensor: str, consumer: QuantizedInput, scale: ActivationScale) -> None:
        node = consumer.node
        key = tensor, node.index if needs_own_dq(node) else None
        if key not in self._dq_outputs:
            base = self._find_free_name(node, _QUANTIZER_NAMES[consumer.role])
            if tensor not in self._pairs:
                self._insert_q(tensor, node, base, scale)
            self._dq_outputs[key] = self._insert_node(node, base, qdq.DQ, self._pairs[tensor])
        self.editor.set_input(node, consumer.position, self._dq_outputs[key])

    def _insert_q(self, tensor: str, node: Node, base: str, scale: ActivationScale) -> None:
        array: npt.NDArray[Any] = np.asarray(scale.scale, np.float32)
        if _float_type(self.model, tensor) is np.float16:
            array = round_up_to_half(array)
        parameters = self._add_scale_and_zero_point(base, array)
        output = self._insert_node(node, base, qdq.Q, [tensor, *parameters])
        self._pairs[tensor] = [output, *parameters]
        self.quantized.append(
            QuantizedTensor(tensor, scale.scale, scale.method, scale.group, f"{base}/{qdq.Q}")
        )

    def quantize_weights(self, site: WeightSite, form: str) -> None:
        node, name = site.node, site.tensor
        if form == "rounded" and self.model.elem_type(name) == TensorProto.FLOAT:
            self.editor.set_input(node, 1, name_rounded_weights(name, site.axis, self.format))
            return
        scale = _unit_scale(self.model, site) if form == "sketch" else self._weight_scale(site)
        base = self._find_free_name(node, "_weight_quantizer")
        parameters = self._add_scale_and_zero_point(base, scale)
        if form in ("int8", "fp8"):
            value = self.model.constant(name)
            assert value is not None
            numbers = self.format.round_steps(_divide_by_scale(value, scale, site.axis))
            first, source = qdq.DQ, self._add_quantized_constant(f"{name}_quantized", numbers)
        else:
            first = qdq.Q
            source = self._insert_node(node, base, qdq.Q, [name, *parameters], site.axis)
        output = self._insert_node(node, base, qdq.DQ, [source, *parameters], site.axis)
        self.editor.set_input(node, 1, output)
        scales: Any = [float(s) for s in scale] if scale.ndim else float(scale)
        self.quantized.append(QuantizedTensor(name, scales, "weights-max", None, f"{base}/{first}"))

    def _add_scale_and_zero_point(self, base: str, scale: npt.NDArray[Any]) -> list[str]:
        return [
            self.editor.add_constant(f"{base}/scale", scale),
            self._add_quantized_constant(f"{base}/zero_point", np.zeros(scale.shape, np.float32)),
        ]

    def _add_quantized_constant(self, base: str, numbers: npt.NDArray[np.float32]) -> str:
        return self.editor.add_constant_tensor(self.format.make_tensor(base, numbers))

    def _weight_scale(self, site: WeightSite) -> npt.NDArray[Any]:
        value = self.model.constant(site.tensor)
        assert value is not None
        scale = weight_scale(value, site.axis, self.format.largest)
        return round_up_to_half(scale) if value.dtype == np.float16 else scale

    def _insert_node(
        self, node: Node, base: str, op: str, inputs: list[str], axis: int | None = None
    ) -> str:
        attributes = {} if axis is None else {"axis": axis}
        return self.editor.insert_node(node, op, f"{base}/{op}", inputs, attributes)

    def _find_free_name(self, node: Node, role: str) -> str:
        """Return an unused name for a quantizer, such as ``/model.0/conv/_input_quantizer``.

        This name is the first choice for the node ``/model.0/conv/Conv``. If it is used already, or
        if the node's name has another form, the quantizer's name contains the full name of the
        node.
        """
        folder, _, last = node.name.rpartition("/")
        short = [f"{folder}/{role}"] if folder and last.startswith(node.op) else []
        long = f"{node.name}/{role}"
        numbered = (f"{long}_{number}" for number in itertools.count())
        return next(b for b in itertools.chain(short, [long], numbered) if not self._is_used(b))

    def _is_used(self, base: str) -> bool:
        names = (qdq.Q, qdq.DQ, "scale", "zero_point", f"{qdq.Q}_output_0", f"{qdq.DQ}_output_0")
        return any(self.editor.has_name(f"{base}/{name}") for name in names)


def _unit_scale(model: Model, site: WeightSite) -> npt.NDArray[Any]:
    shape = model.constant_shape(site.tensor)
    assert shape is not None
    dtype = _float_type(model, site.tensor)
    if site.axis is None:
        return np.ones((), dtype)
    if site.axis >= len(shape) or not 0 <= shape[site.axis] <= _MAX_CHANNELS:
        raise ModelError(
            f"weights '{site.tensor}' have an impossible shape {list(shape)}; the file is "
            "damaged, export it again",
            code="wrong-shape",
            node=site.tensor,
        )
    return np.ones(shape[site.axis], dtype)


def _float_type(model: Model, tensor: str) -> type[np.float32] | type[np.float16]:
    return np.float16 if model.elem_type(tensor) == TensorProto.FLOAT16 else np.float32


def name_rounded_weights(tensor: str, axis: int | None, number_format: NumberFormat = INT8) -> str:
    """Return the name of the tensor with weights after Q and DQ, for :func:`insert_pairs`."""
    return f"{tensor}/rounded/{number_format.name}/{axis}"


def round_weights(
    value: npt.NDArray[np.float32], axis: int | None, number_format: NumberFormat = INT8
) -> npt.NDArray[np.float32]:
    """Return weights after Q and DQ, as :func:`insert_pairs` and onnxruntime compute them."""
    scale = weight_scale(value, axis, number_format.largest)
    numbers = number_format.round_steps(_divide_by_scale(value, scale, axis))
    return numbers * _broadcast_scale(scale, axis, value.ndim)


def quantize_to_int8(
    value: npt.NDArray[Any], scale: npt.NDArray[Any], axis: int | None
) -> npt.NDArray[np.int8]:
    """Apply ONNX's QuantizeLinear with zero point 0.

    Halves are rounded to even. Values saturate to [-128, 127].
    """
    return INT8.round_steps(_divide_by_scale(value, scale, axis)).astype(np.int8)


def _divide_by_scale(
    value: npt.NDArray[Any], scale: npt.NDArray[Any], axis: int | None
) -> npt.NDArray[np.float32]:
    return value.astype(np.float32) / _broadcast_scale(scale, axis, value.ndim)


def _broadcast_scale(
    scale: npt.NDArray[Any], axis: int | None, rank: int
) -> npt.NDArray[np.float32]:
    scale = scale.astype(np.float32)
    if axis is None:
        return scale
    return np.expand_dims(scale, [i for i in range(rank) if i != axis])


def round_up_to_half(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """Return the smallest FP16 numbers that are at least as large as the scales.

    The result is never zero, and a scale that is rounded up saturates no additional values.
    """
    half = scale.astype(np.float16)
    is_lower = half.astype(np.float32) < scale
    return np.where(is_lower, np.nextafter(half, np.float16(np.inf)), half).astype(np.float16)
