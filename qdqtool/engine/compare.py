"""Two engines of one network side by side: which layer became which, and where the time went.

The same convolution has different names in an FP16 and a Q/DQ engine, and often in the ONNX files too (exporters number
nodes). Layers are paired by the ONNX nodes they share; what is left, in order, by what they compute: kind, kernel and
shapes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from qdqtool.buildlog.records import Shape
from qdqtool.buildlog.types import BuiltTensor, LayerKind
from qdqtool.engine.costs import EngineReport, LayerCost, Totals, node_of
from qdqtool.types import Json

_MAX_CELLS = 4_000_000
_COMMON = 0.3  # share of the smaller engine's layers that must pair by name before names are trusted


@dataclass(slots=True)
class Pair:
    """A layer of each engine; either side may be missing."""

    first: LayerCost | None
    second: LayerCost | None

    @property
    def change_ms(self) -> float | None:
        """Milliseconds that the second engine takes more; a missing layer takes none, one without a time is unknown."""
        if any(cost is not None and cost.ms is None for cost in (self.first, self.second)):
            return None
        return (self.second.ms or 0.0 if self.second else 0.0) - (self.first.ms or 0.0 if self.first else 0.0)

    def as_json(self) -> Json:
        def side(cost: LayerCost | None) -> Json | None:
            if cost is None:
                return None
            return {
                "index": cost.index, "name": cost.name, "type": cost.layer.type, "kind": str(cost.layer.kind),
                "inputs": [str(t.precision) for t in cost.layer.inputs],
                "outputs": [str(t.precision) for t in cost.layer.outputs], "ms": cost.ms,
            }

        return {"first": side(self.first), "second": side(self.second), "change_ms": self.change_ms}


@dataclass(slots=True)
class Comparison:
    """Two engines, aligned.

    Attributes:
        first: The engine given first.
        second: The other one.
        pairs: Layers of both, in the first's order, with what only the second has at the end.
        by: ``names`` or ``shapes``: how most pairs were found.
    """

    first: EngineReport
    second: EngineReport
    pairs: list[Pair] = field(default_factory=list)
    by: str = "names"

    @property
    def by_kind(self) -> dict[str, tuple[Totals, Totals]]:
        """Sums of both engines by kind of layer."""
        one, two = self.first.totals("kind"), self.second.totals("kind")
        return {kind: (one.get(kind, Totals()), two.get(kind, Totals())) for kind in dict.fromkeys([*one, *two])}

    def as_json(self) -> Json:
        return {
            "schema": "qdqtool/engine-comparison/1",
            "first": {"build": self.first.build.as_json(), "total_ms": self.first.total_ms},
            "second": {"build": self.second.build.as_json(), "total_ms": self.second.total_ms},
            "aligned_by": self.by,
            "kinds": {kind: [one.as_json(), two.as_json()] for kind, (one, two) in self.by_kind.items()},
            "pairs": [pair.as_json() for pair in self.pairs],
        }


def compare(first: EngineReport, second: EngineReport) -> Comparison:
    """Aligns two engines."""
    result = Comparison(first, second)
    taken = _by_names(first, second)
    named = len(taken)
    if named < _COMMON * min(len(first.rows), len(second.rows)):
        taken, named = {}, 0
    left = [row for row in first.rows if row.index not in taken]
    used = set(taken.values())
    right = [row for row in second.rows if row.index not in used]
    for one, two in _align(left, right):
        taken[one.index] = two.index
    result.by = "names" if 2 * named >= len(taken) and named else "shapes"
    result.pairs = [Pair(row, second.rows[taken[row.index]] if row.index in taken else None) for row in first.rows]
    used = set(taken.values())
    result.pairs += [Pair(None, row) for row in second.rows if row.index not in used]
    return result


def _by_names(first: EngineReport, second: EngineReport) -> dict[int, int]:
    """Pairs by the ONNX nodes that name the layer's work; a node of several layers names none."""
    one, two = _keys(first), _keys(second)
    taken: dict[int, int] = {}
    used: set[int] = set()
    for node, index in one.items():
        other = two.get(node)
        if other is not None and index not in taken and other not in used:
            if _family(first.rows[index]) == _family(second.rows[other]):
                taken[index] = other
                used.add(other)
    return taken


def _keys(report: EngineReport) -> dict[str, int]:
    found: list[tuple[str, int]] = []
    for row in report.rows:
        fused = row.layer.fused()
        names = row.layer.onnx_names or ([] if fused.is_copy else fused.bases)
        quantizers = row.layer.is_qdq
        found += [(name, row.index) for name in dict.fromkeys(names) if quantizers or "uantizeLinear" not in name]
    counts = Counter(name for name, _ in found)
    return {name: index for name, index in found if counts[name] == 1}


def _family(row: LayerCost) -> str:
    kind = row.layer.type.lower() or node_of(row).lower()  # of a profile alone the name is all there is
    if row.layer.is_convolution or (not row.layer.type and "conv" in kind):
        return "convolution"
    return next((word for word in ("pool", "resize", "softmax", "reformat", "pointwise") if word in kind),
    row.layer.kind)


def _align(left: list[LayerCost], right: list[LayerCost]) -> list[tuple[LayerCost, LayerCost]]:
    """Pairs of layers in the same order in both, of the greatest likeness altogether (dynamic programming)."""
    left, right = [x for x in left if _works(x)], [x for x in right if _works(x)]
    if len(left) * len(right) > _MAX_CELLS:
        return []
    best = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        row, below = best[i], best[i + 1]
        for j in range(len(right) - 1, -1, -1):
            row[j] = max(below[j], row[j + 1], below[j + 1] + _likeness(left[i], right[j]))
    pairs = []
    i = j = 0
    while i < len(left) and j < len(right):
        likeness = _likeness(left[i], right[j])
        if likeness and best[i][j] == best[i + 1][j + 1] + likeness:
            pairs.append((left[i], right[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _works(row: LayerCost) -> bool:
    """Whether a layer computes something: those that move data only have no counterpart."""
    return row.layer.kind not in (LayerKind.CONVERSION, LayerKind.REFORMAT) and row.layer.type != "NoOp"


def _likeness(one: LayerCost, two: LayerCost) -> int:
    """How much two layers compute alike, apart from precision: 0 for different families, more for equal shapes."""
    if _family(one) != _family(two):
        return 0
    same_input = _edge(one.layer.inputs) == _edge(two.layer.inputs)
    same_output = _edge(one.layer.outputs) == _edge(two.layer.outputs)
    kernel, other = (c.layer.extras.get("Kernel", c.layer.extras.get("ConvKernel")) for c in (one, two))
    if not (same_input or same_output) or (kernel != other and kernel and other):
        return 0
    same_edges = len(one.layer.inputs) == len(two.layer.inputs)  # a residual Add is fused into both or neither
    return 2 + 3 * (same_input and same_output) + same_edges


def _edge(tensors: list[BuiltTensor]) -> Shape | None:
    return tensors[0].shape if tensors else None
