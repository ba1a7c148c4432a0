"""Puts Q/DQ pairs into a model, named as QAT exports name them; tries both forms of residual Adds on a copy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.base.records import replaced
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.explain import codes
from qdqtool.explain.coded import MADE
from qdqtool.insertion.placement import Placement, Reader, Rules, WeightSite, place
from qdqtool.insertion.scales import ScaleGroup, scale_groups, weight_scale
from qdqtool.model import qdq
from qdqtool.model.editor import Editor
from qdqtool.model.graph import EDITED, Model, Node, without_large_weights
from qdqtool.model.operators import needs_own_dq
from qdqtool.options import Placing
from qdqtool.trt.faults import DepthwiseAdd, DepthwiseSilu, LargeKernel
from qdqtool.trt.outcome import settled
from qdqtool.trt.targets import Target
from qdqtool.types import Prediction, QuantizedTensor, Severity

_ROLES = ("_residual_quantizer", "_input_quantizer")
_CHANNELS = 1 << 20  # of one layer; more is damage


@dataclass(frozen=True)
class ActivationScale:
    """What :func:`rewrite` needs to know of a tensor: its scale, how it was chosen, and its group's number."""

    scale: float
    method: str
    group: int | None


def rewrite(
    model: Model, placement: Placement, scales: Mapping[str, ActivationScale], weights: str = Placing.weights
) -> list[QuantizedTensor]:
    """Inserts Q/DQ pairs into a model, in place.

    Every quantized tensor gets one Q, in front of its first reader, and one DQ that all its quantized readers share but
    matrix products, each of which has its own (:func:`qdqtool.model.operators.needs_own_dq`); float readers and graph
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
        self._pairs: dict[str, tuple[str, list[str]]] = {}  # from a tensor to Q's output and its parameters
        self._dequantized: dict[tuple[str, int | None], str] = {}  # by tensor, and the one reader where it has but one

    def activation(self, tensor: str, reader: Reader, scale: ActivationScale) -> None:
        base = self._base(reader.node, _ROLES[reader.role == "input"])
        dtype = _float_type(self.model, tensor)
        parameters = [self.editor.constant(f"{base}/scale", np.asarray(scale.scale, np.float32).astype(dtype)),
                      self.editor.constant(f"{base}/zero_point", np.asarray(0, np.int8))]
        self._pairs[tensor] = self._insert(reader.node, base, qdq.Q, tensor, parameters), parameters
        self._dequantized[tensor, _only(reader)] = self._insert(reader.node, base, qdq.DQ, *self._pairs[tensor])
        self.quantized.append(QuantizedTensor(tensor, scale.scale, scale.method, scale.group, f"{base}/{qdq.Q}"))

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
        parameters = [self.editor.constant(f"{base}/scale", scale),
                      self.editor.constant(f"{base}/zero_point", np.zeros(scale.shape, np.int8))]
        if form == "int8":
            value = self.model.constant(name)
            assert value is not None
            source, first = self.editor.constant(f"{name}_quantized", quantize(value, scale, site.axis)), qdq.DQ
        else:
            source, first = self._insert(node, base, qdq.Q, name, parameters, site.axis), qdq.Q
        self.editor.set_input(node, 1, self._insert(node, base, qdq.DQ, source, parameters, site.axis))
        listed: Any = [float(s) for s in scale] if scale.ndim else float(scale)
        self.quantized.append(QuantizedTensor(name, listed, "weights-max", None, f"{base}/{first}"))

    def _scale(self, site: WeightSite) -> npt.NDArray[Any]:
        value = self.model.constant(site.tensor)
        assert value is not None
        scale = weight_scale(value, site.axis)
        return round_up_to_half(scale) if value.dtype == np.float16 else scale

    def _insert(
        self, node: Node, base: str, op: str, tensor: str, parameters: list[str], axis: int | None = None
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
        return any(self.editor.is_taken(f"{base}/{name}") for name in names)


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
        raise ModelError(f"weights '{site.tensor}' have an impossible shape {list(shape)}; the file is damaged")
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


def quantize(value: npt.NDArray[Any], scale: npt.NDArray[Any], axis: int | None) -> npt.NDArray[np.int8]:
    """QuantizeLinear with zero point 0, as ONNX defines it: round half to even, saturate to [-128, 127]."""
    shaped = _along(scale, axis, value.ndim)
    codes: npt.NDArray[np.int8] = np.clip(np.rint(value.astype(np.float32) / shaped), -128, 127).astype(np.int8)
    return codes


def _along(scale: npt.NDArray[Any], axis: int | None, ndim: int) -> npt.NDArray[np.float32]:
    shaped = scale.astype(np.float32)
    return shaped if axis is None else np.expand_dims(shaped, [i for i in range(ndim) if i != axis])


def round_up_to_half(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """The next FP16 number that is not smaller, so that nothing saturates, and never zero."""
    half = scale.astype(np.float16)
    lower = half.astype(np.float32) < scale
    return np.where(lower, np.nextafter(half, np.float16(np.inf)), half).astype(np.float16)


# Residual Adds behind Conv and activation (C2f's SiLU): by the worse of two outcomes ---------------------------------


OPTIONS = ("both", "skip")  # the first is taken where both are worth the same: seen with a YOLOv8 on TensorRT 8.4
Worth = tuple[int, int, int]


def rules_for(model: Model, placing: Placing, target: Target) -> Rules:
    """The rules that the user's choices and the target's abilities make for a prepared model."""
    rules = Rules(placing.head, placing.residual, OPTIONS[0], placing.exclude, placing.include, placing.exclude_op,
                  not target.is_rtx, target.transposed_per_channel, attention=placing.attention,
                  failing=[form for form in (LargeKernel, DepthwiseAdd, DepthwiseSilu)
                           if (held := codes.get(MADE[form][0].code).on(target.name)) is not None
                           and held.severity != Severity.INFO])
    return replace(rules, residual_after_activation=after_activation(model, rules, target, placing.unify))


def after_activation(model: Model, rules: Rules, target: Target, unify: bool) -> str:
    """The residual inputs to quantize behind an activation: that option of which the worse outcome is the better one.

    Whether Conv, SiLU and an Add with a quantized skip become one layer is reported both ways (fused, apart), and for
    small maps as the builder's choice by timing. With both inputs quantized the Add is an INT8 layer of its own, INT8
    in and out, whichever holds; with the skip alone quantized it is nothing at all where the three fuse, and leaves
    conversions where they do not. So each placement is simulated under both, the INT8 convolutions, those of them with
    INT8 output and the conversions are counted, and the placement with the better worst case is taken. TensorRT-RTX
    writes float from every convolution and fuses pointwise work anyway: a Q/DQ there only costs accuracy.

    Returns:
        ``both``, ``skip`` or ``none``: ``residual_after_activation`` of :class:`Rules`.
    """
    if target.is_rtx:
        return "none"
    best, reached = OPTIONS[0], None
    if rules.residual != "auto":
        return best
    placements = {o: place(model, replace(rules, residual_after_activation=o)) for o in OPTIONS}
    if len(set(map(_read, placements.values()))) == 1:  # no such Add
        return best
    for option, placement in placements.items():
        try:
            slim = sketch(model, placement, scale_groups(model, placement.readers, unify))
            worst = _worst(slim, placement, target, reached)
        except QdqtoolError:  # a graph that cannot be simulated is placed for as the evidence says
            return OPTIONS[0]
        if worst is not None:
            best, reached = option, worst
    return best


def _read(placement: Placement) -> frozenset[tuple[str, int, int]]:
    return frozenset((t, r.node.index, r.position) for t, found in placement.readers.items() for r in found)


def _worst(slim: Model, placement: Placement, target: Target, reached: Worth | None) -> Worth | None:
    """What a placement is worth in its worse outcome; None as soon as that is no better than what is reached."""
    found: list[Worth] = []
    # Where every Add that is touched reads both inputs dequantized, no convolution can take it.
    all_read = all(len(positions) > 1 for positions in _residual_positions(placement).values())
    for fused in [False] if all_read else [False, True]:
        found.append(_worth(settled(slim, replaced(target, residual_through_activation=fused))))
        if reached is not None and found[-1] <= reached:
            return None
    return min(found)


def _residual_positions(placement: Placement) -> dict[int, set[int]]:
    """Of each residual Add, by index, the inputs that it reads dequantized."""
    read: dict[int, set[int]] = {}
    for found in placement.readers.values():
        for reader in found:
            if reader.role == "residual":
                read.setdefault(reader.node.index, set()).add(reader.position)
    return read


def _worth(prediction: Prediction) -> Worth:
    """INT8 convolutions, those with INT8 output, and conversions (fewer are better); greater is better."""
    summary = prediction.summary()
    return summary["int8"], summary["int8_to_int8"], -summary["conversions"]


def sketch(model: Model, placement: Placement, groups: Sequence[ScaleGroup]) -> Model:
    """A Q/DQ model for simulation alone: no large weights, and a group's number from 1 for the scale of its tensors."""
    slim = Model(without_large_weights(model.proto), model.path, EDITED, types=model)
    nodes = slim.nodes
    readers = {t: [Reader(nodes[r.node.index], r.position, r.role) for r in rs] for t, rs in placement.readers.items()}
    weights = [WeightSite(nodes[w.node.index], w.tensor, w.axis) for w in placement.weights]
    scales = {
        tensor: ActivationScale(number, "", None)
        for number, group in enumerate(groups, 1) for tensor in group.quantized
    }
    rewrite(slim, Placement(readers, weights), scales, "sketch")
    return slim
