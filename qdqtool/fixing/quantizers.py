"""Fixes of scales and zero points (symmetric int8, positive scales, scalars) and of the float part's types."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from qdqtool.findings.messages import number
from qdqtool.fixing.pairs import head_tails
from qdqtool.fixing.site import Site, along, named, nodes_of, only
from qdqtool.fixing.weights import dequantized
from qdqtool.insertion import fp16
from qdqtool.insertion.prepare import prepare, raise_opset
from qdqtool.ir import qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import QuantParams
from qdqtool.patterns.half import HALF_OPSET
from qdqtool.patterns.layernorm import NORM_OPSET, fuse_layer_norms
from qdqtool.patterns.view import View
from qdqtool.trt.faults import ScaleDead
from qdqtool.trt.targets import Target
from qdqtool.types import BYTES, Precision, Refusal

_LEVELS = 127.0
Floats = npt.NDArray[np.float64]


def zero_points(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """All are int8 with zero points of 0, of the scale's shape.

    Stored constants that are no layer's weights, as the anchors of a detector, become floats instead: symmetric
    steps are up to twice as large, and of anchors half a step is half a cell.
    """
    sites: list[Site] = []
    known: dict[object, Floats] = {}  # a scale may be large, and read by many nodes
    weights = {dq.index for n in view.weighted if (dq := view.weights(n).dq) is not None}
    for q, dqs in _families(view, reported):
        site = None
        if q is None and dqs[0].index not in weights:
            site = _float_constant(view, dqs[0])
        site = site or _family_site(view, q, dqs, known)
        if site is not None:
            sites.append(site)
    return sites


def _float_constant(view: View, dq: Node) -> Site | None:
    """What a DQ makes of stored integers with a zero point, as a float constant; None where it stays as it is."""
    params, value = view.params(dq), dequantized(view, dq)
    shifted = params.precision == Precision.UINT8 or np.any(params.zero_point != 0)
    if (
        value is None
        or not shifted
        or view.model.is_output(dq.output)
        or any(n.captured for n in view.model.consumers(dq.output))
    ):
        return None

    def apply(editor: Editor) -> None:
        editor.redirect(dq.output, editor.constant(f"{dq.input(0)}_float", value()))
        editor.remove(dq)

    return Site(dq.name, f"{dq.name}: constant stored as float", apply)


def rounded_constants(view: View) -> list[tuple[float, str]]:
    """Step and name of the constants that the file holds as integers alone, and that are no weights or biases."""
    weights = {dq.index for n in view.weighted if (dq := view.weights(n).dq) is not None}
    found: list[tuple[float, str]] = []
    for dq in view.quantizers:
        params, shape = view.params(dq), view.model.constant_shape(dq.input(0))
        if qdq.is_dq(dq) and dq.index not in weights and shape is not None:
            if params.precision in BYTES and params.scale is not None and params.scale.size == 1:
                if int(np.prod(shape)) > 1:
                    found.append((float(params.scale[0]), dq.input(0)))
    return found


def _families(view: View, reported: Sequence[Refusal]) -> list[tuple[Node | None, list[Node]]]:
    """Each Q with its DQs, and each DQ of stored integers alone, where one of them was reported."""
    places = {r.node for r in reported}
    families: list[tuple[Node | None, list[Node]]] = []
    for node in view.quantizers:
        if qdq.is_q(node):
            families.append((node, [n for n in view.model.consumers(node.output) if qdq.is_dq(n)]))
        elif not qdq.is_q(view.model.producer(node.input(0))):
            families.append((None, [node]))
    return [
        (q, dqs)
        for q, dqs in families
        if any(n is not None and n.name in places for n in (q, *dqs))
    ]


def _family_site(
    view: View, q: Node | None, dqs: list[Node], known: dict[object, Floats]
) -> Site | None:
    head = q or dqs[0]
    params = view.params(head)
    if params.precision not in BYTES or params.scale is None or params.zero_point is None:
        return None
    if not params.scale.size or not params.zero_point.size:
        return None
    nodes = [n for n in (q, *dqs) if n is not None]
    unsigned = params.precision == Precision.UINT8
    shifted = bool(np.any(params.zero_point != 0))
    if unsigned or shifted:
        key = params.key or head.index  # None where a scale is NaN
        if key not in known:
            known[key] = _symmetric(params)
        scale = known[key]
        old = number(float(params.scale[0])) + (" ..." if params.scale.size > 1 else "")
        exact = np.array_equal(scale, params.scale)
        what = f"{head.name}: int8, zero point 0, scale {old}" + (
            "" if exact else f" -> {number(float(scale[0]))}"
        )
    else:
        scale = params.scale
        what = f"{head.name}: zero point of int8 zeros"

    def apply(editor: Editor) -> None:
        if q is None and (unsigned or shifted):
            _requantize_constant(view, editor, dqs[0], params, scale)
        for node in nodes:
            _set(view, editor, node, scale)

    return Site(head.name, what, apply, [n.name for n in nodes])


def _symmetric(params: QuantParams) -> Floats:
    """Scales with which int8 around 0 holds the range that the old parameters could express."""
    assert params.scale is not None and params.zero_point is not None
    low, high = (0, 255) if params.precision == Precision.UINT8 else (-128, 127)
    zero = (
        params.zero_point if params.zero_point.size == params.scale.size else params.zero_point[:1]
    )
    below, above = (zero - low).astype(np.float64), (high - zero).astype(np.float64)
    steps = np.where(
        (below <= _LEVELS + 1) & (above <= _LEVELS), 1.0, np.maximum(below, above) / _LEVELS
    )
    return np.asarray(params.scale * steps, np.float64)


def _set(view: View, editor: Editor, node: Node, scale: Floats) -> None:
    params = view.params(node)
    shape = params.scale_shape if params.scale_shape is not None else scale.shape
    if int(np.prod(shape)) != scale.size:
        shape = scale.shape if scale.size > 1 else ()
    editor.set_quantizer(node, scale.reshape(shape), np.zeros(shape, np.int8))


def _requantize_constant(
    view: View, editor: Editor, dq: Node, params: QuantParams, scale: Floats
) -> None:
    """Stored integers, written again for zero point 0 and the new scales."""
    stored = view.model.constant(dq.input(0))
    if stored is None or params.scale is None or params.zero_point is None:
        return
    zero = along(params.zero_point.astype(np.float64), stored.shape, view.axis(dq), dq.name)
    real = (stored.astype(np.float64) - zero) * along(
        params.scale, stored.shape, view.axis(dq), dq.name
    )
    with np.errstate(all="ignore"):
        integers = np.rint(real / along(scale, stored.shape, view.axis(dq), dq.name))
    integers = np.clip(np.nan_to_num(integers), -128, 127).astype(np.int8)
    editor.set_input(dq, 0, editor.constant(f"{dq.input(0)}_int8", integers))


def positive_scales(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """Weights get the scale of their largest value, other scales their absolute value or 1."""
    sites: list[Site] = []
    for q, dqs in _families(view, reported):
        head = q or dqs[0]
        params = view.params(head)
        if params.scale is None:
            continue
        apply = _positive(view, q, dqs, params)
        sites.append(
            Site(head.name, f"{head.name}: scales made positive", apply, [n.name for n in dqs])
        )
    return sites


def _positive(
    view: View, q: Node | None, dqs: list[Node], params: QuantParams
) -> Callable[[Editor], None]:
    assert params.scale is not None
    old = params.scale
    bad = ~(old > 0) | ~np.isfinite(old)
    scale = np.where(bad, np.where(np.isfinite(old) & (old != 0), np.abs(old), 1.0), old)
    head = q or dqs[0]
    value = view.model.constant(head.input(0)) if q is not None else None
    if value is not None:
        magnitude = _channel_maximum(value, view.axis(head)) / _LEVELS
        scale = np.where(bad, np.where(magnitude > 0, magnitude, 1.0), old)

    def apply(editor: Editor) -> None:
        if q is None:
            stored = view.model.constant(dqs[0].input(0))
            if stored is not None:
                sign = along(
                    np.nan_to_num(np.sign(old)), stored.shape, view.axis(dqs[0]), dqs[0].name
                )
                turned = np.clip(stored.astype(np.int16) * sign, -128, 127).astype(stored.dtype)
                editor.set_input(dqs[0], 0, editor.constant(f"{dqs[0].input(0)}_positive", turned))
        for node in (q, *dqs):
            if node is not None:
                _set(view, editor, node, np.asarray(scale, np.float64))

    return apply


def dead_scales(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """A scale for all that the tensor's operator can give, where the scale there makes one value of it.

    The range is that of the operator, not an estimate of the data's. Where only a part of what a Q reads is lost,
    no scale fits all of it: the pair goes if no layer with weights is downstream, and stays otherwise.
    """
    sites = head_tails(view, target, [r for r in only(ScaleDead, reported) if not r.whole])
    dead = {r.node: r for r in only(ScaleDead, reported)}
    for q in nodes_of(view, reported):
        r = dead[q.name]
        if r.reach is None:
            continue
        scale = np.asarray([r.reach / _LEVELS], np.float64)
        nodes = [q, *(n for n in view.model.consumers(q.output) if qdq.is_dq(n))]

        def apply(editor: Editor, nodes: list[Node] = nodes, scale: Floats = scale) -> None:
            for node in nodes:
                _set(view, editor, node, scale)

        what = (
            f"{q.name}: scale {number(r.scale)} -> {number(float(scale[0]))}, which holds all that "
            f"{r.parts[0].op} can give"
        )
        sites.append(Site(q.name, what, apply, [n.name for n in nodes]))
    return sites


def _channel_maximum(value: npt.NDArray[np.float64], axis: int | None) -> Floats:
    if axis is None:
        return np.asarray([np.abs(value).max(initial=0.0)], np.float64)
    others = tuple(i for i in range(value.ndim) if i != axis % value.ndim)
    return np.asarray(np.abs(value).max(axis=others, initial=0.0), np.float64)


def scalars(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """One scalar scale for an activation."""
    sites: list[Site] = []
    names = named(reported)
    for q, dqs in view.pairs():
        if names.isdisjoint(n.name for n in (q, *dqs)):
            continue
        params = view.params(q)
        if params.scale is None or not params.scale.size or params.scale_shape == ():
            continue
        if params.scale.size == 1 and not target.is_rtx:
            continue
        scale = float(params.scale.max())

        def apply(editor: Editor, q: Node = q, dqs: list[Node] = dqs, scale: float = scale) -> None:
            for node in (q, *dqs):
                editor.set_quantizer(node, np.asarray(scale), np.zeros((), np.int8))

        what = f"{q.name}: one scalar scale, {number(scale)}"
        sites.append(Site(q.name, what, apply, [n.name for n in dqs]))
    return sites


def to_half(model: Model, target: Target) -> Model | None:
    """The float part in FP16; None where the target chooses the width itself.

    Raises:
        ModelError: The opset cannot be raised to 19.
    """
    if not target.strongly_typed:
        return None
    copy = model.copy()
    prepare(copy, opset=HALF_OPSET)
    return copy if fp16.convert_to_fp16(copy) else None


def to_float(model: Model, target: Target) -> Model | None:
    """The whole model in float32; None where the target takes float16 scales."""
    if target.float16_scales or not fp16.has_fp16(model):
        return None
    copy = model.copy()
    fp16.convert_to_fp32(copy)
    return copy


def to_layer_norm(model: Model, target: Target) -> Model | None:
    """Each normalization in pieces that a LayerNormalization computes exactly, as one.

    Raises:
        ModelError: The opset cannot be raised to 17.
    """
    if not target.layer_normalization:
        return None
    copy = model.copy()
    if copy.opset < NORM_OPSET:
        raise_opset(copy, NORM_OPSET)
    return copy if fuse_layer_norms(copy) else None
