"""Fixes that remove, move or add Q/DQ pairs, or set one scale for several pairs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.fixing.common_scale import CommonScale, ReplacedScale
from qdqtool.fixing.site import (
    FixSite,
    collect_names,
    drop_missing_sites,
    find_nodes,
    find_reason_nodes,
    map_reason_nodes,
    select_reasons,
)
from qdqtool.fixing.weights import make_dequantizer
from qdqtool.insertion.number_formats import LEVELS
from qdqtool.insertion.scales import ScaleGroup, find_scale_groups
from qdqtool.ir import qdq
from qdqtool.ir.bounds import find_bounds
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import (
    LayerKind,
    commuting_inputs,
    find_passage,
    is_no_op_cast,
    operator_of,
)
from qdqtool.ir.precision import Precision
from qdqtool.patterns.heads import find_dfl
from qdqtool.patterns.view import View, is_sum_of_computed
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fusions import QuantizerInsideActivation
from qdqtool.reasons.heads import ResultAfterHead
from qdqtool.reasons.residuals import ResidualBothQuantized, ResidualFloat
from qdqtool.reasons.scales import ScaleDead
from qdqtool.reasons.text import (
    format_number,
    list_names,
)
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note

_NAMES_SHOWN = 4  # maximum number of quantizers of a group that a description names


def _consuming_dqs(view: View, q: Node) -> list[Node]:
    return [n for n in view.model.consumers(q.output) if qdq.is_dq(n)]


def find_pairs_inside_activations(
    view: View, target: Target, reasons: Sequence[Reason]
) -> list[FixSite]:
    """Return sites that move a pair from before an activation to after it, or remove it.

    A pair is removed if pairs that can share a scale follow the activation, or if the pair is
    between the Sigmoid and the Mul of an activation.
    """
    sites: list[FixSite] = []
    inside = {r.node: r for r in select_reasons(QuantizerInsideActivation, reasons)}
    for q in find_reason_nodes(view, reasons):
        r = inside[q.name]
        site = None if r.gate else _activation_input_site(view, q, view.model.node(r.activation))
        if site is not None:
            sites.append(site)
        second = r.node if r.gate else r.second
        if second:
            description = f"{second} removed from between {r.activation} and its Mul"
            apply = _make_pair_removal(view, view.model.node(second))
            sites.append(FixSite(second, description, apply, (r.node,)))
    return sites


def _activation_input_site(view: View, q: Node, activation: Node) -> FixSite | None:
    """Return a site that moves or removes the pair before an activation.

    None if the activation does not read this pair. TensorRT has then merged the pair with another.
    """
    consumers = _consumers_of_pairs(view, [q])
    if activation not in consumers:
        return None
    others = _find_pairs_before_product(view, q, activation)
    consumers += _consumers_of_pairs(view, others)
    last = next((n for n in consumers if operator_of(n).operation == "PROD"), activation)
    if view.model.is_output(last.output) or _have_common_scale(view, last.output):
        description = f"{q.name} and its DequantizeLinear removed"
        return FixSite(q.name, description, _make_pair_removal(view, q, *others))
    scale = _scale_within_bounds(view, q, last.output)
    description = f"{q.name} moved after {last.name}"
    if scale is not None:
        description += f", with scale {format_number(float(scale))} for its range"
    return FixSite(q.name, description, _make_pair_move(view, q, last, scale, others))


def _have_common_scale(view: View, tensor: str) -> bool:
    """Return whether only Qs read a tensor, and their scales are equal or may become equal.

    Further quantizers may have to share the scale, for example those around a Concat.
    """
    consumers = view.model.consumers(tensor)
    if not all(map(qdq.is_q, consumers)):
        return False
    if len({view.params(n).summary for n in consumers}) <= 1:
        return True
    groups = (quantizers for g, quantizers in _find_quantizer_groups(view) if tensor in g.tensors)
    site = _common_scale_site(view, next(groups), set())
    return site is not None and not site.skip_reason


def _consumers_of_pairs(view: View, quantizers: Sequence[Node]) -> list[Node]:
    dqs = [dq for q in quantizers for dq in _consuming_dqs(view, q)]
    return [n for dq in dqs for n in view.model.consumers(dq.output)]


def _find_pairs_before_product(view: View, q: Node, activation: Node) -> list[Node]:
    """Return the other Qs between the input of an activation and the Mul after the activation.

    onnxruntime's option DedicatedQDQPair gives each consumer of a tensor a pair of its own.
    """
    gates = view.model.consumers(activation.output)
    gates = [*gates, *_consumers_of_pairs(view, [n for n in gates if qdq.is_q(n)])]
    products = {n.index for n in gates if operator_of(n).operation == "PROD"}
    pairs = []
    for other in view.model.consumers(q.input(0)):
        if qdq.is_q(other) and other.index != q.index:
            consumers = {n.index for n in _consumers_of_pairs(view, [other])}
            if consumers & products:
                pairs.append(other)
    return pairs


def _make_pair_move(
    view: View,
    q: Node,
    last: Node,
    scale: npt.NDArray[Any] | None,
    others: Sequence[Node] = (),
) -> Callable[[Editor], None]:
    """Return the change that moves a pair after a node, and removes the pairs of `others`.

    A `scale` of None keeps the old scale.
    """
    dqs = _consuming_dqs(view, q)
    remove_others = _make_pair_removal(view, *others)
    consumers = view.model.consumers(last.output)

    def move(editor: Editor) -> None:
        if not editor.remove_pairs(q, dqs):
            return
        remove_others(editor)
        dq = dqs[0]
        first = min(consumers, key=lambda n: n.index)
        parameters: list[str] = []
        if scale is not None:
            parameters = [
                editor.add_constant(f"{q.name}_moved_scale", scale),
                editor.add_constant(f"{q.name}_moved_zero_point", np.zeros((), np.int8)),
            ]
        floats = _insert_moved_pair(editor, first, last.output, q, dq, parameters)
        editor.redirect_consumers(last.output, floats, consumers)

    return move


def _insert_moved_pair(
    editor: Editor, before: Node, tensor: str, q: Node, dq: Node, parameters: Sequence[str] = ()
) -> str:
    """Insert copies of a Q and a DQ before a node, and return the output of the DQ.

    `tensor` is the input of the new Q, `parameters` are the names of scale and zero point of the
    copies. If `parameters` is empty, the copies have those of `q` and `dq`.
    """
    inputs = [tensor, *(parameters or q.inputs[1:])]
    integers = editor.insert_node(before, qdq.Q, f"{q.name}_moved", inputs, dict(q.attributes))
    inputs = [integers, *(parameters or dq.inputs[1:])]
    return editor.insert_node(before, qdq.DQ, f"{dq.name}_moved", inputs, dict(dq.attributes))


def _scale_within_bounds(view: View, q: Node, tensor: str) -> npt.NDArray[Any] | None:
    """Return the scale for the bounds of a tensor.

    A pair that moves after a bounded activation (Sigmoid) gets this scale, because the range of the
    activation's input is too large for its output.

    Returns:
        The scale. None if the bounds are unknown or not smaller than the range of the Q, if the Q
        is not symmetric, or if it has several scales.
    """
    single_scale, bounds = view.params(q).single_scale, find_bounds(view.model).get(tensor)
    if bounds is None or single_scale is None or _is_asymmetric(view, q):
        return None
    reach = max(abs(bounds.low), abs(bounds.high))
    scale = view.model.constant(q.input(1))
    if scale is None or not 0 < reach < single_scale * LEVELS:
        return None
    return np.asarray(reach / LEVELS, scale.dtype)


def _make_pair_removal(view: View, *quantizers: Node) -> Callable[[Editor], None]:
    pairs = [(q, _consuming_dqs(view, q)) for q in quantizers]

    def apply(editor: Editor) -> None:
        for q, dqs in pairs:
            editor.remove_pairs(q, dqs)

    return apply


def find_pairs_before_adds(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that remove the pair between a convolution and a residual Add.

    If both inputs of an Add come from convolutions, only one pair is removed. The other convolution
    cannot fuse the Add too, and it needs its pair to write INT8.
    """
    sites: list[FixSite] = []
    first: dict[str, ResidualBothQuantized] = {}
    for r in select_reasons(ResidualBothQuantized, reasons):
        first.setdefault(r.add, r)
    for r in first.values():
        q = view.model.node(r.quantizer)
        description = f"{q.name} and its DequantizeLinear removed between {r.node} and {r.add}"
        sites.append(FixSite(r.add, description, _make_pair_removal(view, q)))
    return sites


def find_float_residuals(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that make an Add read its residual input through an existing pair."""
    residuals: dict[str, str] = {}  # residual input of each Add that a convolution could fuse
    for r in select_reasons(ResidualFloat, reasons):
        residuals.setdefault(r.add, r.tensor)
    adds = find_nodes(view, collect_names(reasons))
    return drop_missing_sites(
        _float_residual_site(view, add, residuals.get(add.name)) for add in adds
    )


def _float_residual_site(view: View, add: Node, residual: str | None) -> FixSite | None:
    if not is_sum_of_computed(view, add) or len(add.inputs) != 2:
        return None
    quantizers = _find_quantizers_of_inputs(view, add, residual)
    if not quantizers:
        return None

    def apply(editor: Editor) -> None:
        for position, q in quantizers:
            dq = _consuming_dqs(view, q)[0]
            name, inputs = f"{add.name}/residual_{qdq.DQ}", [q.output, *dq.inputs[1:]]
            output = editor.insert_node(add, qdq.DQ, name, inputs, dict(dq.attributes))
            editor.set_input(add, position, output)

    pairs = ", ".join(f"'{add.input(p)}' through {q.name}" for p, q in quantizers)
    return FixSite(add.name, f"{add.name} reads {pairs}", apply)


def _find_quantizers_of_inputs(
    view: View, add: Node, residual: str | None
) -> list[tuple[int, Node]]:
    """Return the positions of float inputs of an Add, and the Q that already reads each input.

    A float input without a Q stays float, because its scale would have to be calibrated. If
    `residual` is not None, the other input is ignored, because it comes from the convolution that
    fuses the Add.
    """
    quantizers: list[tuple[int, Node]] = []
    for position, tensor in enumerate(add.inputs):
        if residual is not None and tensor != residual:
            continue
        source = _skip_equal_casts(view.model, tensor)
        if qdq.find_pair(view.model, source) is not None:
            continue
        consumers = view.model.consumers(source)
        q = next((n for n in consumers if qdq.is_q(n) and not view.params(n).is_per_channel), None)
        if q is not None and _consuming_dqs(view, q):
            quantizers.append((position, q))
    return quantizers


def _skip_equal_casts(model: Model, tensor: str) -> str:
    """Return the tensor before the Casts of a tensor that do not change its type."""
    node = model.producer(tensor)
    while node is not None and is_no_op_cast(model, node):
        tensor = node.input(0)
        node = model.producer(tensor)
    return tensor


@map_reason_nodes
def find_pairs_after_pads(view: View, target: Target, conv: Node) -> FixSite | None:
    """Return a site that moves a pair from between a Pad and a convolution to before the Pad.

    None without such a pair, if the Pad inserts values other than zeros or copies, or if a tensor
    between Pad and convolution has several consumers or is a network output.
    """
    pair = qdq.find_pair(view.model, conv.input(0))
    if pair is None or pair[1] is None:
        return None
    dq, q = pair[0], pair[1]
    pad = view.model.producer(q.input(0))
    is_padding = pad is not None and operator_of(pad).kind == LayerKind.PADDING
    if pad is None or not is_padding or find_passage(view.model, pad) is None:
        return None
    for tensor in (pad.output, q.output, dq.output):
        if len(view.model.consumers(tensor)) != 1 or view.model.is_output(tensor):
            return None

    def apply(editor: Editor) -> None:
        editor.set_input(pad, 0, _insert_moved_pair(editor, pad, pad.input(0), q, dq))
        editor.set_input(conv, 0, pad.output)
        editor.remove(q)
        editor.remove(dq)

    return FixSite(conv.name, f"{q.name} moved before {pad.name}", apply)


@map_reason_nodes
def find_quantized_heads(view: View, target: Target, conv: Node) -> FixSite | None:
    """Return a site that makes a convolution of the detection head float.

    Pairs from which only operators that move values lead to the convolution are removed too,
    because TensorRT moves them to the convolution.

    None if its input or weights are not quantized, if a node changes the weights after their Q/DQ,
    or if stored integers cannot be dequantized. `conv` is a convolution that a finding on the head
    names: one of the boxes or the DFL, or a last convolution of a head without DFL.
    """
    pair, weights = qdq.find_pair(view.model, conv.input(0)), view.weights(conv)
    if pair is None or pair[1] is None or weights.dq is None or weights.after:
        return None
    dequantize = make_dequantizer(view, weights.dq) if weights.q is None else None
    if weights.q is None and dequantize is None:
        return None
    tensor = pair[1].input(0)
    remove_others = _make_pair_removal(view, *_find_pairs_moved_to(view, tensor))

    def apply(editor: Editor) -> None:
        source = weights.source
        if dequantize is not None:
            source = editor.add_constant(f"{source}_float", dequantize())
        editor.set_input(conv, 0, tensor)
        editor.set_input(conv, 1, source)
        remove_others(editor)

    return FixSite(conv.name, f"{conv.name}: Q/DQ of its input and weights removed", apply)


def _find_pairs_moved_to(view: View, tensor: str) -> list[Node]:
    """Return the Qs of pairs from which only operators that move values lead to a tensor.

    Pairs that other nodes read as well are left out.
    """
    model = view.model
    quantizers: list[Node] = []
    while len(model.consumers(tensor)) == 1 and not model.is_output(tensor):
        producer = model.producer(tensor)
        pair = qdq.find_pair(model, tensor)
        sources = commuting_inputs(model, producer)
        q = None if pair is None else pair[1]
        if q is not None and len(model.consumers(q.output)) == 1:
            quantizers.append(q)
            tensor = q.input(0)
        elif len(sources) == 1:
            tensor = sources[0]
        else:
            break
    return quantizers


def find_pairs_after_head(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that remove pairs after a head whose boxes and scores share a scale.

    Pairs between the last convolutions and the Concat are removed too, because one integer step of
    their box coordinates is several pixels. The pair before the convolution of a DFL remains,
    because it quantizes the input of this convolution. Pairs of constants, such as anchors, are
    removed as well.
    """
    sites: list[FixSite] = []
    visited: set[int] = set()
    dfl = find_dfl(view.model) if reasons else set()
    parts = [r for r in select_reasons(ScaleDead, reasons) if not r.whole]
    joined = select_reasons(ResultAfterHead, reasons)
    for start in find_reason_nodes(view, [*joined, *parts]):
        if start.index in visited or _has_weighted_consumer(view, start):
            continue
        tail = _find_unweighted_nodes(view, start, dfl)
        visited |= tail
        inside = (q for q in view.quantizers if qdq.is_q(q) and q.index in tail)
        pairs = [
            q for q in inside if _consuming_dqs(view, q) and not _has_weighted_consumer(view, q)
        ]
        if pairs:
            sites.append(_head_tail_site(view, pairs))
    return sites


def _head_tail_site(view: View, pairs: list[Node]) -> FixSite:
    def apply(editor: Editor) -> None:
        for q in pairs:
            editor.remove_pairs(q, _consuming_dqs(view, q))

    names = list_names((q.name for q in pairs), _NAMES_SHOWN)
    description = f"{len(pairs)} Q/DQ pairs removed after the last layers of the head ({names})"
    return FixSite(pairs[0].name, description, apply, [q.name for q in pairs])


def _find_unweighted_nodes(view: View, start: Node, dfl: Collection[int]) -> set[int]:
    """Return the indices of `start` and of all nodes that are connected to it.

    A node with weights ends a connection, unless it belongs to a DFL (`dfl`).
    """
    indices = {start.index}
    stack = [start]
    while stack:
        node = stack.pop()
        producers = (view.model.producer(t) for t in node.inputs)
        consumers = (n for t in node.outputs for n in view.model.consumers(t))
        for other in (*producers, *consumers):
            if other is None or other.index in indices or other.op == "Constant":
                continue
            if operator_of(other).weights is None or other.index in dfl:
                indices.add(other.index)
                stack.append(other)
    return indices


def _has_weighted_consumer(view: View, q: Node) -> bool:
    """Return whether the values of a Q reach a layer with weights.

    The convolution of a DFL is considered only if it is a direct consumer of the pair.
    """
    if q.index in view.feeds_weighted:
        return True
    consumers = [n for dq in _consuming_dqs(view, q) for n in view.model.consumers(dq.output)]
    return any(operator_of(n).weights is not None for n in consumers)


def find_different_scales(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that set the scale of connected quantizers to the largest of their scales.

    Quantizers are connected if only Q/DQ pairs and operators that move values are between them.
    TensorRT may merge such quantizers. Chained Concats connect all their quantizers.
    """
    names = collect_names(reasons)
    sites = []
    for group, quantizers in _find_quantizer_groups(view):
        places = {name for q in quantizers for name in (q.name, q.input(0))}
        places |= _find_moving_producers(view.model, group.tensors)
        if not places.isdisjoint(names):
            sites.append(_common_scale_site(view, quantizers, places))
    return drop_missing_sites(sites)


def _find_quantizer_groups(view: View) -> Iterator[tuple[ScaleGroup, list[Node]]]:
    """Yield the groups of connected tensors, with the activation quantizers that read them."""
    activations = {q.index: q for q in view.activation_qs}
    tensors = [q.input(0) for q in activations.values()]
    tensors += [tensor for node in view.model.ordered for tensor in node.outputs]
    for group in find_scale_groups(view.model, tensors):
        consumers = {n.index for tensor in group.tensors for n in view.model.consumers(tensor)}
        yield group, [activations[index] for index in sorted(consumers & activations.keys())]


def _find_moving_producers(model: Model, tensors: Iterable[str]) -> set[str]:
    producers = filter(None, map(model.producer, tensors))
    return {producer.name for producer in producers if commuting_inputs(model, producer)}


def _common_scale_site(view: View, quantizers: list[Node], places: set[str]) -> FixSite | None:
    scales = [s for q in quantizers if (s := view.params(q).single_scale) is not None]
    if len(scales) != len(quantizers) or len(set(scales)) < 2:
        return None
    replaced = [
        ReplacedScale(q.name, q.input(0), s) for q, s in zip(quantizers, scales, strict=True)
    ]
    common = CommonScale(max(scales), tuple(replaced))
    is_fp8 = view.params(quantizers[0]).precision == Precision.FP8

    def apply(editor: Editor) -> None:
        for q in quantizers:
            for node in (q, *_consuming_dqs(view, q)):
                shape = view.params(node).scale_shape or ()
                zero_point = None if is_fp8 else np.zeros(shape, np.int8)
                editor.set_quantizer(node, np.full(shape, common.scale), zero_point)

    skip_reason = _find_asymmetric_quantizer(view, quantizers) or common.find_obstacle()
    name, text = quantizers[0].name, common.describe()
    return FixSite(name, text, apply, places, skip_reason=skip_reason, common_scale=common)


def _find_asymmetric_quantizer(view: View, quantizers: list[Node]) -> str:
    """Return why quantizers cannot have a common scale; empty if they can."""
    precision = view.params(quantizers[0]).precision
    precision = precision if precision == Precision.FP8 else Precision.INT8
    other = next((q for q in quantizers if not _is_symmetric(view, q, precision)), None)
    if other is None:
        return ""
    return Note(
        "a common scale needs quantizers to one type (INT8 or FP8) with zero point 0",
        code="not-symmetric-int8",
        quantizer=other.name,
    )


def _is_asymmetric(view: View, q: Node) -> bool:
    zero = view.params(q).zero_point
    return zero is None or bool(np.any(zero != 0))


def _is_symmetric(view: View, q: Node, precision: Precision) -> bool:
    return view.params(q).precision == precision and not _is_asymmetric(view, q)
