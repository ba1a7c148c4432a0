"""Puts Q/DQ pairs into a model, named as QAT exports name them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.errors import ModelError
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import Placement, Reader, WeightSite
from qdqtool.insertion.scales import weight_scale
from qdqtool.ir import qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import needs_own_dq
from qdqtool.types import QuantizedTensor

_ROLES = ("_residual_quantizer", "_input_quantizer")
_CHANNELS = 1 << 20  # of one layer; more is damage


@dataclass(frozen=True)
class ActivationScale:
    """What :func:`rewrite` needs to know of a tensor: its scale, how it was chosen, and its group's number."""

    scale: float
    method: str
    group: int | None


def rewrite(
    model: Model,
    placement: Placement,
    scales: Mapping[str, ActivationScale],
    weights: str = PlacementOptions.weights,
) -> list[QuantizedTensor]:
    """Inserts Q/DQ pairs into a model, in place.

    Every quantized tensor gets one Q, in front of its first reader, and one DQ that all its quantized readers share but
    matrix products, each of which has its own (:func:`qdqtool.ir.operators.needs_own_dq`); float readers and graph
    outputs keep the tensor itself. Activation scales have rank 0 (TensorRT-RTX takes a scale of shape
    [1] for a per-channel one and runs the convolution in FP32); zero points are int8 zeros.

    Args:
        model: The model to change.
        placement: What to quantize.
        scales: For each tensor in ``placement.readers``.
        weights: ``float`` stores weights as they are, with Q and DQ; ``int8`` stores them quantized, with DQ alone;
            ``sketch`` gives them scales of 1, for a model that is only simulated; ``rounded`` reads those of float32
            under the name :func:`rounded_name`, for whoever gives what Q and DQ make of them.

    Returns:
        What was quantized, in graph order.
    """
    writer = _Writer(model)
    done: set[str] = set()
    by_reader: dict[int, list[tuple[str, Reader]]] = {}
    for tensor, readers in placement.readers.items():
        for reader in readers:
            by_reader.setdefault(reader.node.index, []).append((tensor, reader))
    sites = {site.node.index: site for site in placement.weights}
    for node in model.ordered:
        for tensor, reader in by_reader.get(node.index, ()):
            if tensor not in done:
                done.add(tensor)
                writer.activation(tensor, reader, scales[tensor])
            writer.editor.set_input(node, reader.position, writer.dequantized(tensor, reader))
        if node.index in sites:
            writer.weight(sites[node.index], weights)
    writer.editor.finish()
    return writer.quantized


class _Writer:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.editor = Editor(model)
        self.quantized: list[QuantizedTensor] = []
        self._pairs: dict[
            str, tuple[str, list[str]]
        ] = {}  # from a tensor to Q's output and its parameters
        self._dequantized: dict[
            tuple[str, int | None], str
        ] = {}  # by tensor, and the one reader where it has but one

    def activation(self, tensor: str, reader: Reader, scale: ActivationScale) -> None:
        base = self._base(reader.node, _ROLES[reader.role == "input"])
        dtype = _float_type(self.model, tensor)
        parameters = [
            self.editor.constant(
                f"{base}/scale", np.asarray(scale.scale, np.float32).astype(dtype)
            ),
            self.editor.constant(f"{base}/zero_point", np.asarray(0, np.int8)),
        ]
        self._pairs[tensor] = self._insert(reader.node, base, qdq.Q, tensor, parameters), parameters
        self._dequantized[tensor, _only(reader)] = self._insert(
            reader.node, base, qdq.DQ, *self._pairs[tensor]
        )
        self.quantized.append(
            QuantizedTensor(tensor, scale.scale, scale.method, scale.group, f"{base}/{qdq.Q}")
        )

    def dequantized(self, tensor: str, reader: Reader) -> str:
        """DQ's output for a reader of a tensor that has its Q."""
        key = tensor, _only(reader)
        if key not in self._dequantized:
            base = self._base(reader.node, _ROLES[reader.role == "input"])
            self._dequantized[key] = self._insert(reader.node, base, qdq.DQ, *self._pairs[tensor])
        return self._dequantized[key]

    def weight(self, site: WeightSite, form: str) -> None:
        node, name = site.node, site.tensor
        if form == "rounded" and self.model.elem_type(name) == TensorProto.FLOAT:
            self.editor.set_input(node, 1, rounded_name(name, site.axis))
            return
        scale = _sketched(self.model, site) if form == "sketch" else self._scale(site)
        base = self._base(node, "_weight_quantizer")
        parameters = [
            self.editor.constant(f"{base}/scale", scale),
            self.editor.constant(f"{base}/zero_point", np.zeros(scale.shape, np.int8)),
        ]
        if form == "int8":
            value = self.model.constant(name)
            assert value is not None
            source, first = (
                self.editor.constant(f"{name}_quantized", quantize(value, scale, site.axis)),
                qdq.DQ,
            )
        else:
            source, first = self._insert(node, base, qdq.Q, name, parameters, site.axis), qdq.Q
        self.editor.set_input(
            node, 1, self._insert(node, base, qdq.DQ, source, parameters, site.axis)
        )
        listed: Any = [float(s) for s in scale] if scale.ndim else float(scale)
        self.quantized.append(QuantizedTensor(name, listed, "weights-max", None, f"{base}/{first}"))

    def _scale(self, site: WeightSite) -> npt.NDArray[Any]:
        value = self.model.constant(site.tensor)
        assert value is not None
        scale = weight_scale(value, site.axis)
        return round_up_to_half(scale) if value.dtype == np.float16 else scale

    def _insert(
        self,
        node: Node,
        base: str,
        op: str,
        tensor: str,
        parameters: list[str],
        axis: int | None = None,
    ) -> str:
        """Q or DQ in front of a node, on a base that :meth:`_base` found free; returns its output."""
        attributes = {} if axis is None else {"axis": axis}
        return self.editor.insert(node, op, f"{base}/{op}", [tensor, *parameters], attributes)

    def _base(self, node: Node, role: str) -> str:
        """``/model.0/conv/_input_quantizer`` for ``/model.0/conv/Conv``; a name that is not taken."""
        folder, _, last = node.name.rpartition("/")
        # Where a folder holds several such nodes (Conv, Conv_1), only the first is named after the folder.
        short = [f"{folder}/{role}"] if folder and last.startswith(node.op) else []
        whole = f"{node.name}/{role}"
        numbered = (f"{whole}_{number}" for number in itertools.count())
        return next(b for b in itertools.chain(short, [whole], numbered) if not self._is_taken(b))

    def _is_taken(self, base: str) -> bool:
        names = (qdq.Q, qdq.DQ, "scale", "zero_point", f"{qdq.Q}_output_0", f"{qdq.DQ}_output_0")
        return any(self.editor.has_name(f"{base}/{name}") for name in names)


def _only(reader: Reader) -> int | None:
    """What distinguishes DQs of one tensor: the reader that has one to itself."""
    return reader.node.index if needs_own_dq(reader.node) else None


def _sketched(model: Model, site: WeightSite) -> npt.NDArray[Any]:
    """Scales of the right shape and type for weights whose values are not available."""
    shape = model.constant_shape(site.tensor)
    assert shape is not None
    if site.axis is None:
        return np.ones((), _float_type(model, site.tensor))
    if site.axis >= len(shape) or not 0 <= shape[site.axis] <= _CHANNELS:
        raise ModelError(
            f"weights '{site.tensor}' have an impossible shape {list(shape)}; the file is damaged",
            code="wrong-shape",
            node=site.tensor,
        )
    return np.ones(shape[site.axis], _float_type(model, site.tensor))


def _float_type(model: Model, tensor: str) -> type[np.float32] | type[np.float16]:
    return np.float16 if model.elem_type(tensor) == TensorProto.FLOAT16 else np.float32


def rounded_name(tensor: str, axis: int | None) -> str:
    """What weights are called that Q and DQ have gone over."""
    return f"{tensor}/rounded/{axis}"


def rounded(value: npt.NDArray[np.float32], axis: int | None) -> npt.NDArray[np.float32]:
    """What Q and DQ make of weights, with the scales that :func:`rewrite` gives them; the bits of onnxruntime."""
    scale = weight_scale(value, axis)
    return quantize(value, scale, axis).astype(np.float32) * _along(scale, axis, value.ndim)


def quantize(
    value: npt.NDArray[Any], scale: npt.NDArray[Any], axis: int | None
) -> npt.NDArray[np.int8]:
    """QuantizeLinear with zero point 0, as ONNX defines it: round half to even, saturate to [-128, 127]."""
    shaped = _along(scale, axis, value.ndim)
    codes: npt.NDArray[np.int8] = np.clip(
        np.rint(value.astype(np.float32) / shaped), -128, 127
    ).astype(np.int8)
    return codes


def _along(scale: npt.NDArray[Any], axis: int | None, ndim: int) -> npt.NDArray[np.float32]:
    shaped = scale.astype(np.float32)
    return shaped if axis is None else np.expand_dims(shaped, [i for i in range(ndim) if i != axis])


def round_up_to_half(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """The next FP16 number that is not smaller, so that nothing saturates, and never zero."""
    half = scale.astype(np.float16)
    lower = half.astype(np.float32) < scale
    return np.where(lower, np.nextafter(half, np.float16(np.inf)), half).astype(np.float16)
