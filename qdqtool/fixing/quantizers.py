"""Fixes of scales and zero points, and conversions of the layers without Q/DQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.fixing.pairs import find_pairs_after_head
from qdqtool.fixing.site import (
    FixSite,
    broadcast_along,
    collect_names,
    drop_missing_sites,
    find_reason_nodes,
    select_reasons,
)
from qdqtool.fixing.weights import find_computed_weights, make_float_constant_site
from qdqtool.insertion import fp16
from qdqtool.insertion.prepare import prepare_float_model, raise_opset
from qdqtool.ir import constants, qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import BYTES, INTEGER_RANGES, Precision
from qdqtool.ir.qdq import QuantParams
from qdqtool.patterns.half import HALF_OPSET
from qdqtool.patterns.layernorm import NORM_OPSET, fuse_layer_norms
from qdqtool.patterns.rewrites import clips_negative_values, insert_relu
from qdqtool.patterns.view import AXIS_OPSET, View
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.scales import ScaleDead, ScaleImplausible, ScaleNotPositive
from qdqtool.reasons.text import format_number
from qdqtool.reasons.weights import WeightScales, WeightScalesCause
from qdqtool.trt.fault_checks import compute_channel_maxima, find_extreme_scales
from qdqtool.trt.targets import Target

_LEVELS = 127.0
_MULTIPLE_TOLERANCE = 1e-3  # maximum distance of rounded floats from multiples of a step, in steps
FloatArray = npt.NDArray[np.float64]


def find_asymmetric_quantizers(
    view: View, target: Target, reasons: Sequence[Reason]
) -> list[FixSite]:
    """Return sites that make quantizers symmetric: int8 with zero points of 0.

    Quantized constants that are not weights of a layer, such as the anchors of a detector, become
    floats instead. Symmetric steps are up to twice as large, which would move the anchors.
    """
    sites: list[FixSite | None] = []
    scales: dict[object, FloatArray] = {}  # cache by parameters: nodes may share them
    weights = _weight_dqs(view)
    for nodes in _find_quantizer_groups(view, reasons):
        site = None
        if qdq.is_dq(nodes[0]) and nodes[0].index not in weights:
            site = _asymmetric_constant_site(view, nodes[0])
        sites.append(site or _symmetric_site(view, nodes, scales))
    return drop_missing_sites(sites)


def _weight_dqs(view: View) -> set[int]:
    dqs = (view.weights(n).dq for n in view.nodes_with_weights)
    return {dq.index for dq in dqs if dq is not None}


def _asymmetric_constant_site(view: View, dq: Node) -> FixSite | None:
    params = view.params(dq)
    if params.precision != Precision.UINT8 and not np.any(params.zero_point != 0):
        return None
    return make_float_constant_site(view, dq, "constant stored as float (with the same values)")


def find_rounded_constants(view: View) -> list[tuple[float, str]]:
    """Return scale and name of quantized constants whose values were probably rounded.

    A constant that is stored as float before a Q counts if all its values are multiples of the
    scale. Weights, biases and single values are left out, and so are constants whose values are all
    multiples of 0.5 (anchors and strides that rounding did not change).
    """
    weights = _weight_dqs(view)
    constants: list[tuple[float, str]] = []
    for dq in view.quantizers:
        params = view.params(dq)
        if not qdq.is_dq(dq) or dq.index in weights or params.precision not in BYTES:
            continue
        step = params.single_scale
        if step is not None:
            tensor = _find_rounded_constant(view, dq, step, params.zero_point)
            if tensor:
                constants.append((step, tensor))
    return constants


def _find_rounded_constant(view: View, dq: Node, step: float, zero: npt.NDArray[Any] | None) -> str:
    """Return the constant that a DQ or its pair reads; empty if it was probably not rounded."""
    q = view.model.producer(dq.input(0))
    is_pair = q is not None and qdq.is_q(q)
    tensor = q.input(0) if q is not None and is_pair else dq.input(0)
    shape = view.model.constant_shape(tensor)
    if shape is None or int(np.prod(shape)) <= 1:
        return ""
    stored = view.model.constant(tensor)
    if is_pair:
        is_rounded = stored is not None and _is_rounded_float(stored, step)
    else:
        is_rounded = stored is None or not _has_exact_halves(stored, step, zero)
    return tensor if is_rounded else ""


def _is_rounded_float(values: npt.NDArray[Any], step: float) -> bool:
    """Return whether floats are multiples of a step, which is unlikely unless they were rounded.

    False for constants with fewer than three magnitudes: their largest value may determine the
    step.
    """
    levels = values.astype(np.float64) / step
    is_multiple = bool(np.all(np.abs(levels - np.rint(levels)) < _MULTIPLE_TOLERANCE))
    is_exact = _has_exact_halves(np.rint(levels), step, None)
    return is_multiple and not is_exact and np.unique(np.abs(np.rint(levels))).size > 2


def _has_exact_halves(stored: npt.NDArray[Any], step: float, zero: npt.NDArray[Any] | None) -> bool:
    offset = 0 if zero is None or not zero.size else zero.reshape(-1)[0]
    halves = 2 * (stored.astype(np.float64) - offset) * step
    return bool(np.all(np.abs(halves - np.round(halves)) < 1e-4))


def _find_quantizer_groups(view: View, reasons: Sequence[Reason]) -> list[list[Node]]:
    """Return the quantizers that reasons name, in groups: a Q and its DQs, or a constant's DQ."""
    places = {r.node for r in reasons}
    groups: list[list[Node]] = []
    for node in view.quantizers:
        if qdq.is_q(node):
            nodes = [node, *(n for n in view.model.consumers(node.output) if qdq.is_dq(n))]
            if not places.isdisjoint(n.name for n in nodes):
                groups.append(nodes)
        elif node.name in places and not qdq.is_q(view.model.producer(node.input(0))):
            groups.append([node])
    return groups


def _symmetric_site(
    view: View, nodes: list[Node], scales: dict[object, FloatArray]
) -> FixSite | None:
    """Return a site that makes a group of quantizers symmetric.

    Args:
        view: The model.
        nodes: The group: a Q and its DQs, or a DQ of a constant.
        scales: Cache of symmetric scales, by the key of the old parameters. New scales are added.

    Returns:
        The site. None if the group is not INT8 or UINT8, or if its parameters are unknown.
    """
    first = nodes[0]
    params = view.params(first)
    if params.precision not in BYTES or params.scale is None or params.zero_point is None:
        return None
    if not params.scale.size or not params.zero_point.size:
        return None
    is_asymmetric = params.precision == Precision.UINT8 or bool(np.any(params.zero_point != 0))
    if not is_asymmetric:
        description = f"{first.name}: zero point set to int8 zeros"
        return _new_scale_site(view, nodes, params.scale, description)
    clips = clips_negative_values(view, first)
    key = params.key or first.index  # the key is None if a scale is NaN
    if key not in scales:
        scales[key] = _compute_symmetric_scales(params)
    scale = scales[key]

    def apply_first(editor: Editor) -> None:
        if qdq.is_dq(first):
            _requantize_constant(view, editor, first, scale)
        if clips:
            insert_relu(editor, first)

    description = _describe_symmetric_scale(first, params.scale, scale, clips=clips)
    return _new_scale_site(view, nodes, scale, description, apply_first)


def _new_scale_site(
    view: View,
    nodes: list[Node],
    scale: FloatArray,
    description: str,
    apply_first: Callable[[Editor], None] = lambda editor: None,
) -> FixSite:
    """Return a site that sets new scales and int8 zero points of 0.

    The site has the name of the first node. `apply_first` is a further change, which is made before
    the scales are set.
    """

    def apply(editor: Editor) -> None:
        apply_first(editor)
        for node in nodes:
            _set_symmetric_scale(view, editor, node, scale)

    return FixSite(nodes[0].name, description, apply, [n.name for n in nodes])


def _describe_symmetric_scale(node: Node, old: FloatArray, new: FloatArray, *, clips: bool) -> str:
    text = f"{node.name}: int8, zero point 0, scale {format_number(float(old[0]))}"
    text += " ..." if old.size > 1 else ""
    if not np.array_equal(new, old):
        text += f" -> {format_number(float(new[0]))}"
    relu = ", with a Relu before it, because its range clips negative values"
    return text + relu if clips else text


def _compute_symmetric_scales(params: QuantParams) -> FloatArray:
    assert params.scale is not None and params.zero_point is not None
    low, high = INTEGER_RANGES[params.precision]
    zero = params.zero_point
    if zero.size != params.scale.size:
        zero = zero[:1]
    below, above = (zero - low).astype(np.float64), (high - zero).astype(np.float64)
    fits = (below <= _LEVELS + 1) & (above <= _LEVELS)
    steps = np.where(fits, 1.0, np.maximum(below, above) / _LEVELS)
    return np.asarray(params.scale * steps, np.float64)


def _set_symmetric_scale(view: View, editor: Editor, node: Node, scale: FloatArray) -> None:
    params = view.params(node)
    shape = params.scale_shape if params.scale_shape is not None else scale.shape
    if int(np.prod(shape)) != scale.size:
        shape = scale.shape if scale.size > 1 else ()
    editor.set_quantizer(node, scale.reshape(shape), np.zeros(shape, np.int8))


def _requantize_constant(view: View, editor: Editor, dq: Node, scale: FloatArray) -> None:
    stored, params = view.model.constant(dq.input(0)), view.params(dq)
    if stored is None or params.scale is None or params.zero_point is None:
        return
    old_zero, old_scale, new_scale = (
        broadcast_along(values, stored.shape, view.axis(dq), dq.name)
        for values in (params.zero_point.astype(np.float64), params.scale, scale)
    )
    with np.errstate(all="ignore"):
        integers = np.rint((stored.astype(np.float64) - old_zero) * old_scale / new_scale)
    integers = np.clip(np.nan_to_num(integers), -128, 127).astype(np.int8)
    editor.set_input(dq, 0, editor.add_constant(f"{dq.input(0)}_int8", integers))


def find_nonpositive_scales(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that make scales positive.

    Scales of weights are computed from the weights. Other negative scales are replaced by their
    absolute values. Activation scales of 0 or NaN are not fixed, because this needs calibration
    data.
    """
    sites = []
    recomputable = {r.node for r in select_reasons(ScaleNotPositive, reasons) if r.is_recomputable}
    for nodes in _find_quantizer_groups(view, reasons):
        old = view.params(nodes[0]).scale
        if old is not None and not recomputable.isdisjoint(n.name for n in nodes):
            sites.append(_positive_scale_site(view, nodes, old))
    return sites


def find_weight_scales(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that compute scales of float weights from the weights: max|w| / 127.

    If the scales of a layer do not match its weights, all scales of the layer are computed. If only
    single scales are extreme, only these are computed. Scales of activations are not changed.
    """
    extreme = {r.node for r in select_reasons(ScaleImplausible, reasons)}
    misfits = {
        name
        for r in select_reasons(WeightScales, reasons)
        if r.cause != WeightScalesCause.AXIS  # the axis is wrong, not the scales
        for name in r.layers
    }
    layers = {q.index: node.name for node in view.nodes_with_weights if (q := view.weights(node).q)}
    sites = []
    for q in filter(qdq.is_q, view.quantizers):
        nodes = [q, *(n for n in view.model.consumers(q.output) if qdq.is_dq(n))]
        layer = layers.get(q.index, "")
        if layer in misfits or not extreme.isdisjoint(n.name for n in nodes):
            sites.append(_weight_scale_site(view, nodes, layer, everything=layer in misfits))
    return drop_missing_sites(sites)


def _weight_scale_site(
    view: View, nodes: list[Node], layer: str, *, everything: bool
) -> FixSite | None:
    q = nodes[0]
    old, value = view.params(q).scale, view.model.constant(q.input(0))
    if old is None or value is None or not np.isfinite(value).all():
        return None
    largest = compute_channel_maxima(value, view.axis(q))
    if largest.size != old.size:
        return None
    is_bad = ~(old > 0) | ~np.isfinite(old) | find_extreme_scales(old, largest) | everything
    scale = np.where(is_bad & (largest > 0), largest / _LEVELS, old)
    site = _new_scale_site(view, nodes, scale, f"{q.name}: scale computed from the weights")
    return replace(site, names=[*site.names, layer])


def _positive_scale_site(view: View, nodes: list[Node], old: FloatArray) -> FixSite:
    first = nodes[0]
    is_bad = ~(old > 0) | ~np.isfinite(old)
    replacement = np.where(np.isfinite(old) & (old != 0), np.abs(old), 1.0)
    value = view.model.constant(first.input(0)) if qdq.is_q(first) else None
    if value is not None:
        magnitude = compute_channel_maxima(value, view.axis(first)) / _LEVELS
        replacement = np.where(magnitude > 0, magnitude, 1.0)
    scale = np.asarray(np.where(is_bad, replacement, old), np.float64)

    def apply_first(editor: Editor) -> None:
        if qdq.is_dq(first):
            _restore_signs(view, editor, first, old)

    description = f"{first.name}: scales made positive"
    return _new_scale_site(view, nodes, scale, description, apply_first)


def _restore_signs(view: View, editor: Editor, dq: Node, scale: FloatArray) -> None:
    """Multiply stored integers by the signs of their scales, which become positive."""
    stored = view.model.constant(dq.input(0))
    if stored is None:
        return
    sign = broadcast_along(np.nan_to_num(np.sign(scale)), stored.shape, view.axis(dq), dq.name)
    integers = np.clip(stored.astype(np.int16) * sign, -128, 127).astype(stored.dtype)
    editor.set_input(dq, 0, editor.add_constant(f"{dq.input(0)}_positive", integers))


def find_computed_constants(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that store computed weights, scales and zero points as constants."""
    names = collect_names(reasons)
    evaluator = constants.ConstantEvaluator(view.model)
    sites = find_computed_weights(view, target, reasons)
    for tensor, consumers in constants.find_computed_parameters(view.model).items():
        chain = evaluator.find_nodes(tensor)
        places = [node.name for node in (*consumers, *chain)]
        value = evaluator.evaluate(tensor)
        if value is not None and not names.isdisjoint(places):
            description = f"{consumers[0].name}: '{tensor}' stored as a constant"
            apply = make_constant_change(consumers, tensor, value)
            sites.append(FixSite(consumers[0].name, description, apply, places))
    return sites


def make_constant_change(
    consumers: Sequence[Node], tensor: str, value: npt.NDArray[Any]
) -> Callable[[Editor], None]:
    """Return the change that replaces a computed scale or zero point by a constant."""

    def apply(editor: Editor) -> None:
        stored = editor.add_constant(f"{tensor}_folded", value)
        for node in consumers:
            for position, name in enumerate(node.inputs[1:3], 1):
                if name == tensor:
                    editor.set_input(node, position, stored)

    return apply


def find_dead_scales(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites for dead scales, which round all values of a tensor to the same integer.

    The new scale covers all values that the producer of the tensor can compute, which may be more
    than the data needs. If only a part of a Q's input becomes constant, no scale is suitable for
    the whole input. The pair is then removed if no layer with weights consumes its values.
    """
    dead = select_reasons(ScaleDead, reasons)
    sites = find_pairs_after_head(view, target, [r for r in dead if not r.whole])
    by_node = {r.node: r for r in dead}
    candidates = [
        _dead_scale_site(view, q, by_node[q.name]) for q in find_reason_nodes(view, reasons)
    ]
    return [*sites, *drop_missing_sites(candidates)]


def _dead_scale_site(view: View, q: Node, reason: ScaleDead) -> FixSite | None:
    if reason.largest_magnitude is None:
        return None
    scale = np.asarray([reason.largest_magnitude / _LEVELS], np.float64)
    nodes = [q, *(n for n in view.model.consumers(q.output) if qdq.is_dq(n))]
    description = (
        f"{q.name}: scale {format_number(reason.scale)} -> {format_number(float(scale[0]))}, "
        f"which covers all values of {reason.parts[0].op}"
    )
    return _new_scale_site(view, nodes, scale, description)


def find_scale_vectors(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that replace per-channel scales of activations by one scalar scale.

    For TensorRT-RTX, a scale of shape [1] is replaced by a scalar too.
    """
    names = collect_names(reasons)
    groups = [[q, *dqs] for q, dqs in view.pairs()]
    named = [nodes for nodes in groups if not names.isdisjoint(n.name for n in nodes)]
    return drop_missing_sites(_scalar_scale_site(view, target, nodes) for nodes in named)


def _scalar_scale_site(view: View, target: Target, nodes: list[Node]) -> FixSite | None:
    q = nodes[0]
    params = view.params(q)
    if params.scale is None or not params.scale.size or params.scale_shape == ():
        return None
    if params.scale.size == 1 and not target.is_rtx:
        return None
    scale = float(params.scale.max())

    def apply(editor: Editor) -> None:
        for node in nodes:
            editor.set_quantizer(node, np.asarray(scale), np.zeros((), np.int8))

    description = f"{q.name}: one scalar scale, {format_number(scale)}"
    return FixSite(q.name, description, apply, [n.name for n in nodes])


def to_axis_opset(model: Model) -> Model:
    """Return a copy of a model in opset 13, in which Q and DQ have an axis.

    Per-channel quantizers without an axis get axis 0, which TensorRT uses for older opsets. The
    default of opset 13 is 1.

    Raises:
        ModelError: onnx cannot raise the opset.
    """
    view = View(model)
    axes = {q.output: view.axis(q) for q in view.quantizers if view.params(q).is_per_channel}
    copy = model.copy()
    raise_opset(copy, AXIS_OPSET)
    for proto in copy.proto.graph.node:
        axis = axes.get(proto.output[0]) if proto.output else None
        if axis is not None and all(a.name != "axis" for a in proto.attribute):
            proto.attribute.append(onnx.helper.make_attribute("axis", axis))
    copy.reindex()
    return copy


def to_fp16_layers(model: Model, target: Target) -> Model | None:
    """Return a copy of the model in which the layers without Q/DQ are FP16.

    None if the target chooses types itself, or if no node can be FP16.

    Raises:
        ModelError: The opset cannot be raised to 19.
    """
    if not target.strongly_typed:
        return None
    copy = model.copy()
    prepare_float_model(copy, opset=HALF_OPSET)
    return copy if fp16.convert_to_fp16(copy) else None


def to_float32(model: Model, target: Target) -> Model | None:
    """Return a float32 copy; None if the model has no float16 or the target reads FP16 scales."""
    if target.float16_scales or not fp16.has_fp16(model):
        return None
    copy = model.copy()
    fp16.widen_float16(copy)
    return copy


def to_layer_norm(model: Model, target: Target) -> Model | None:
    """Return a copy in which LayerNormalizations replace decomposed LayerNorms.

    None if no LayerNormalization computes the same values, or if the target does not support
    LayerNormalization.

    Raises:
        ModelError: The opset cannot be raised to 17.
    """
    if not target.layer_normalization:
        return None
    copy = model.copy()
    if copy.opset < NORM_OPSET:
        raise_opset(copy, NORM_OPSET)
    return copy if fuse_layer_norms(copy) else None
