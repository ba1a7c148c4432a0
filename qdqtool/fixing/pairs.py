"""Fixes that remove, move or add Q/DQ pairs whose scale is known already.

Scales that differ where TensorRT wants one are made one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.findings import messages
from qdqtool.findings.messages import number
from qdqtool.fixing.site import Site, at, named, nodes_of, only
from qdqtool.fixing.weights import dequantized
from qdqtool.insertion.scales import LEVELS, find_scale_groups
from qdqtool.ir import qdq
from qdqtool.ir.bounds import find_bounds
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import LayerKind, commuting_inputs, operator_of, passage
from qdqtool.ir.qdq import QuantParams
from qdqtool.patterns.heads import find_dfl
from qdqtool.patterns.view import View, adds_computed
from qdqtool.trt.faults import HeadQuantized, JoinedBehindHead, ScaleDead
from qdqtool.trt.refusals import InsideActivation, ResidualBothQuantized, ResidualFloat
from qdqtool.trt.targets import Target
from qdqtool.types import Precision, Refusal
from qdqtool.util.notes import Remark


def _dqs(view: View, q: Node) -> list[Node]:
    return [n for n in view.model.consumers(q.output) if qdq.is_dq(n)]


def inside_activations(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """The pair goes behind the activation, or away where one is there already."""
    sites: list[Site] = []
    inside = {r.node: r for r in only(InsideActivation, reported)}
    for q in nodes_of(view, reported):
        r = inside[q.name]
        site = None if r.gate else _inner(view, q, view.model.node(r.activation))
        if site is not None:
            sites.append(site)
        second = r.node if r.gate else r.second
        if second:
            what = f"{second} removed from between {r.activation} and its Mul"
            sites.append(Site(second, what, _bypass(view, view.model.node(second)), (r.node,)))
    return sites


def _inner(view: View, q: Node, activation: Node) -> Site | None:
    """None where another pair feeds the activation: TensorRT merged the two."""
    dqs = _dqs(view, q)
    ends = [n for dq in dqs for n in view.model.consumers(dq.output)]
    if activation not in ends:
        return None
    last = next((n for n in ends if operator_of(n).operation == "PROD"), activation)
    readers = view.model.consumers(last.output)
    if (
        (readers and all(qdq.is_q(n) for n in readers))
        or view.model.is_output(last.output)
        or not readers
    ):
        return Site(q.name, f"{q.name} and its DequantizeLinear removed", _bypass(view, q))

    scale = _scale_within_bounds(view, q, last.output)

    def move(editor: Editor) -> None:
        if not editor.remove_pairs(q, dqs):
            return
        dq = dqs[0]
        first = min(readers, key=lambda n: n.index)
        given, given_dq = q.inputs[1:], dq.inputs[1:]
        if scale is not None:
            given = given_dq = (
                editor.constant(f"{q.name}_moved_scale", scale),
                editor.constant(f"{q.name}_moved_zero_point", np.zeros((), np.int8)),
            )
        integers = editor.insert(
            first, qdq.Q, f"{q.name}_moved", [last.output, *given], dict(q.attributes)
        )
        floats = editor.insert(
            first, qdq.DQ, f"{dq.name}_moved", [integers, *given_dq], dict(dq.attributes)
        )
        editor.redirect(last.output, floats, readers)

    finer = "" if scale is None else f", with scale {number(float(scale))} for its range"
    return Site(q.name, f"{q.name} moved behind {last.name}{finer}", move)


def _scale_within_bounds(view: View, q: Node, tensor: str) -> npt.NDArray[Any] | None:
    """The scale of a Q on a bounded tensor, where its own is larger than what the bounds need; else None.

    The range of what an activation reads says nothing of what a Sigmoid gives, which its bounds do.
    """
    params, bounds = view.params(q), find_bounds(view.model).get(tensor)
    if bounds is None or params.scale is None or params.scale.size != 1 or _shifted(view, q):
        return None
    reach = max(abs(bounds.low), abs(bounds.high))
    scale = view.model.constant(q.input(1))
    if scale is None or not 0 < reach < float(params.scale[0]) * LEVELS:
        return None
    return np.asarray(reach / LEVELS, scale.dtype)


def _bypass(view: View, q: Node) -> Callable[[Editor], None]:
    dqs = _dqs(view, q)

    def apply(editor: Editor) -> None:
        editor.remove_pairs(q, dqs)

    return apply


def convolution_side(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """The pair on the convolution's side of a residual Add goes."""
    sites: list[Site] = []
    for r in only(ResidualBothQuantized, reported):
        q = view.model.node(r.quantizer)
        what = f"{q.name} and its DequantizeLinear removed between {r.node} and {r.add}"
        sites.append(Site(r.add, what, _bypass(view, q)))
    return sites


def residuals(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """An Add reads its residual through the pair that the tensor has already."""
    sites: list[Site] = []
    floats: dict[str, str] = {}  # the residual tensor of each Add that a convolution could take in
    for r in only(ResidualFloat, reported):
        floats.setdefault(r.add, r.tensor)
    for add in at(view, named(reported)):
        if not adds_computed(view, add) or len(add.inputs) != 2:
            continue
        wanted = _shared(view, add, floats.get(add.name))
        if not wanted:
            continue

        def apply(editor: Editor, add: Node = add, wanted: list[tuple[int, Node]] = wanted) -> None:
            for position, q in wanted:
                dq = _dqs(view, q)[0]
                inputs = [q.output, *dq.inputs[1:]]
                output = editor.insert(
                    add, qdq.DQ, f"{add.name}/residual_{qdq.DQ}", inputs, dict(dq.attributes)
                )
                editor.set_input(add, position, output)

        read = ", ".join(f"'{add.input(p)}' through {q.name}" for p, q in wanted)
        sites.append(Site(add.name, f"{add.name} reads {read}", apply))
    return sites


def _shared(view: View, add: Node, residual: str | None) -> list[tuple[int, Node]]:
    """The float inputs of an Add with a Q whose pair it can read, by position.

    Empty where a float input is left that no Q reads: its scale would have to be calibrated. Of one with a residual
    tensor only that counts, for a convolution can take in the other one as it is.
    """
    wanted: list[tuple[int, Node]] = []
    for position, tensor in enumerate(add.inputs):
        if (residual is not None and tensor != residual) or qdq.find_pair(
            view.model, tensor
        ) is not None:
            continue
        q = next(
            (
                n
                for n in view.model.consumers(tensor)
                if qdq.is_q(n) and not view.params(n).per_channel
            ),
            None,
        )
        if q is None or not _dqs(view, q):
            return []
        wanted.append((position, q))
    return wanted


def behind_pads(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """The pair moves in front of a Pad that a Q passes (of zeros, or one that copies)."""
    sites: list[Site] = []
    for conv in nodes_of(view, reported):
        found = qdq.find_pair(view.model, conv.input(0))
        if found is None or found[1] is None:
            continue
        dq, q = found[0], found[1]
        pad = view.model.producer(q.input(0))
        if (
            pad is None
            or operator_of(pad).kind != LayerKind.PADDING
            or passage(view.model, pad) is None
        ):
            continue
        if any(
            len(view.model.consumers(t)) != 1 or view.model.is_output(t)
            for t in (pad.output, q.output, dq.output)
        ):
            continue

        def apply(
            editor: Editor, conv: Node = conv, pad: Node = pad, q: Node = q, dq: Node = dq
        ) -> None:
            integers = editor.insert(
                pad, qdq.Q, f"{q.name}_moved", [pad.input(0), *q.inputs[1:]], dict(q.attributes)
            )
            floats = editor.insert(
                pad, qdq.DQ, f"{dq.name}_moved", [integers, *dq.inputs[1:]], dict(dq.attributes)
            )
            editor.set_input(pad, 0, floats)
            editor.set_input(conv, 0, pad.output)
            editor.remove(q)
            editor.remove(dq)

        sites.append(Site(conv.name, f"{q.name} moved in front of {pad.name}", apply))
    return sites


def heads(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """Float box outputs and DFL (all last convolutions without one)."""
    sites: list[Site] = []
    for conv in nodes_of(view, only(HeadQuantized, reported)):
        data, weights = qdq.find_pair(view.model, conv.input(0)), view.weights(conv)
        if data is None or data[1] is None or weights.dq is None or weights.after:
            continue
        stored = dequantized(view, weights.dq) if weights.q is None else None
        if weights.q is None and stored is None:
            continue

        def apply(
            editor: Editor,
            conv: Node = conv,
            x: str = data[1].input(0),
            w: str = weights.source,
            stored: Callable[[], npt.NDArray[Any]] | None = stored,
        ) -> None:
            editor.set_input(conv, 0, x)
            editor.set_input(
                conv, 1, w if stored is None else editor.constant(f"{w}_float", stored())
            )

        sites.append(Site(conv.name, f"{conv.name} reads floats", apply))
    return sites


def head_tails(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """No pairs behind the last layers of a head whose Concat gives boxes and scores one scale.

    Pairs between the convolutions and that Concat go too: a step of boxes in pixels is several pixels. Only the one
    in front of a DFL's convolution stays, whose input it quantizes.
    """
    sites: list[Site] = []
    seen: set[int] = set()
    dfl = find_dfl(view.model) if reported else set()
    parts = [r for r in only(ScaleDead, reported) if not r.whole]
    for reported_q in nodes_of(view, [*only(JoinedBehindHead, reported), *parts]):
        if reported_q.index in seen or _reaches_weights(view, reported_q):
            continue
        tail = _unweighted_around(view, reported_q, dfl)
        seen |= tail
        pairs = [
            q
            for q in view.activation_qs
            if q.index in tail and _dqs(view, q) and not _reaches_weights(view, q)
        ]
        if not pairs:
            continue

        def apply(editor: Editor, pairs: list[Node] = pairs) -> None:
            for q in pairs:
                editor.remove_pairs(q, _dqs(view, q))

        names = messages.names((q.name for q in pairs), _NAMED)
        what = f"{len(pairs)} Q/DQ pairs removed behind the last layers of the head ({names})"
        sites.append(Site(pairs[0].name, what, apply, [q.name for q in pairs]))
    return sites


def _unweighted_around(view: View, start: Node, dfl: Collection[int]) -> set[int]:
    """Indices of the nodes that are connected with one without a layer with weights in between, a DFL apart."""
    found = {start.index}
    stack = [start]
    while stack:
        node = stack.pop()
        producers = (view.model.producer(t) for t in node.inputs)
        consumers = (n for t in node.outputs for n in view.model.consumers(t))
        for other in (*producers, *consumers):
            if other is None or other.index in found or other.op == "Constant":
                continue
            if operator_of(other).weights is None or other.index in dfl:
                found.add(other.index)
                stack.append(other)
    return found


def _reaches_weights(view: View, q: Node) -> bool:
    """Whether a layer with weights is downstream of a Q, or reads its pair directly (the DFL)."""
    direct = (n for dq in _dqs(view, q) for n in view.model.consumers(dq.output))
    return q.index in view.feeds_weighted or any(operator_of(n).weights is not None for n in direct)


_NAMED = 4  # quantizers of a group


def scales(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """One scale, the largest, for all quantizers that are tied by operators that a Q passes.

    Tied are the tensors on both sides of an operator that a Q passes and of a Q/DQ pair: what TensorRT may merge into
    one. A chain of Concats is one group.
    """
    names = named(reported)
    sites: list[Site] = []
    activations = {q.index: q for q in view.activation_qs}
    tensors = [
        *(q.input(0) for q in activations.values()),
        *(t for n in view.model.ordered for t in n.outputs),
    ]
    for group in find_scale_groups(view.model, tensors):
        readers = {n.index for tensor in group.tensors for n in view.model.consumers(tensor)}
        members = [activations[index] for index in sorted(readers & activations.keys())]
        crossed = [
            n
            for n in map(view.model.producer, group.tensors)
            if n and commuting_inputs(view.model, n)
        ]
        values = [_scalar(view.params(q)) for q in members]
        known = [v for v in values if v is not None]
        if len(known) != len(values) or len(set(known)) < 2:
            continue
        if any(view.params(q).precision != Precision.INT8 or _shifted(view, q) for q in members):
            continue
        unified = max(known)
        places = {*(n.name for n in (*members, *crossed)), *(q.input(0) for q in members)}
        if places.isdisjoint(names):
            continue
        smallest = min(known)
        lost = math.log2(unified / smallest) if smallest > 0 else math.inf
        bits = f", at most {lost:.1f} bits lost" if smallest > 0 else ""
        before = messages.names(map(number, known), 12)

        def apply(editor: Editor, members: list[Node] = members, unified: float = unified) -> None:
            for q in members:
                for node in (q, *(n for n in view.model.consumers(q.output) if qdq.is_dq(n))):
                    shape = view.params(node).scale_shape or ()
                    editor.set_quantizer(node, np.full(shape, unified), np.zeros(shape, np.int8))

        of_all = messages.names((q.name for q in members), _NAMED)
        what = f"one scale {number(unified)} instead of {before} for {len(members)} quantizers ({of_all}){bits}"
        refusal = ""
        if smallest < unified * messages.MOST_SHARED:
            finest = members[known.index(smallest)].input(0)
            refusal = Remark.SCALE_TOO_COARSE(tensor=finest, bits=lost)
        sites.append(Site(members[0].name, what, apply, places, refusal=refusal))
    return sites


def _scalar(params: QuantParams) -> float | None:
    """The one scale of a per-tensor quantizer; None for a per-channel or unknown one."""
    return float(params.scale[0]) if params.scale is not None and params.scale.size == 1 else None


def _shifted(view: View, q: Node) -> bool:
    zero = view.params(q).zero_point
    return zero is None or bool(np.any(zero != 0))
