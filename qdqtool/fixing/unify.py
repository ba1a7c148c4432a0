"""Fixes of scales that differ where TensorRT wants one: the parts of a Concat, of a Split, both sides of a pooling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from qdqtool.explain.words import number
from qdqtool.fixing.site import Site, named
from qdqtool.model import qdq
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Node
from qdqtool.model.operators import inputs_behind_q, of
from qdqtool.model.qdq import QuantParams
from qdqtool.model.view import View
from qdqtool.trt.targets import Target
from qdqtool.types import FindingCode, Precision, Refusal

CODES: tuple[FindingCode, ...] = ("CONCAT-SCALE", "SPLIT-SCALE", "POOL-SCALE", "SIBLING-SCALE", "DOUBLE-QDQ")


def scales(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """One scale, the largest, for all quantizers that are tied by operators that a Q passes.

    Tied are the tensors on both sides of an operator that a Q passes and of a Q/DQ pair: what TensorRT may merge into
    one. A chain of Concats is one group.
    """
    groups = _Groups(view)
    names = named(reported)
    sites: list[Site] = []
    for members, crossed in groups.found():
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
        code = _code(members, crossed)
        where = crossed[0].name if crossed else members[0].input(0)
        smallest = min(known)
        bits = f", at most {np.log2(unified / smallest):.1f} bits lost" if smallest > 0 else ""
        before = ", ".join(dict.fromkeys(number(v) for v in known))

        def apply(editor: Editor, members: list[Node] = members, unified: float = unified) -> None:
            for q in members:
                for node in (q, *(n for n in view.model.readers(q.output) if qdq.is_dq(n))):
                    shape = view.params(node).scale_shape or ()
                    editor.set_quantizer(node, np.full(shape, unified), np.zeros(shape, np.int8))

        what = f"{where}: one scale {number(unified)} instead of {before} for {len(members)} quantizers{bits}"
        sites.append(Site(code, where, what, apply))
    return sites


def _scalar(params: QuantParams) -> float | None:
    """The one scale of a per-tensor quantizer; None for a per-channel or unknown one."""
    return float(params.scale[0]) if params.scale is not None and params.scale.size == 1 else None


def _shifted(view: View, q: Node) -> bool:
    zero = view.params(q).zero_point
    return zero is None or bool(np.any(zero != 0))


def _code(members: list[Node], crossed: list[Node]) -> FindingCode:
    if crossed:
        return "CONCAT-SCALE" if of(crossed[0]).joins else "SPLIT-SCALE" if of(crossed[0]).cuts else "POOL-SCALE"
    return "SIBLING-SCALE" if len({q.input(0) for q in members}) == 1 else "DOUBLE-QDQ"


class _Groups:
    """Union-find over tensors."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.parent: dict[str, str] = {}
        self.crossed: list[Node] = []
        for node in view.model.ordered:
            sources = inputs_behind_q(view.model, node)
            if sources and sources[0] not in view.constants:
                for tensor in (*sources, *(o for o in node.outputs if o)):
                    self._join(sources[0], tensor)
                self.crossed.append(node)
        for q, dqs in view.pairs():
            for dq in dqs:
                self._join(q.input(0), dq.output)

    def _find(self, tensor: str) -> str:
        self.parent.setdefault(tensor, tensor)
        while self.parent[tensor] != tensor:
            self.parent[tensor] = self.parent[self.parent[tensor]]
            tensor = self.parent[tensor]
        return tensor

    def _join(self, a: str, b: str) -> None:
        self.parent[self._find(b)] = self._find(a)

    def found(self) -> list[tuple[list[Node], list[Node]]]:
        """Quantizers of each group, with the nodes in it that a Q passes."""
        members: dict[str, list[Node]] = defaultdict(list)
        crossed: dict[str, list[Node]] = defaultdict(list)
        for q in self.view.activation_qs:
            members[self._find(q.input(0))].append(q)
        for node in self.crossed:
            crossed[self._find(node.input(0))].append(node)
        return [
            (qs, sorted(crossed[key], key=lambda n: (not of(n).joins, not of(n).cuts, n.index)))
            for key, qs in members.items() if len(qs) > 1
        ]
