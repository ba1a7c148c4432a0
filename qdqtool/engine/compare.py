"""Two engines of one network side by side: which layer became which, and where the time went.

The same convolution has different names in an FP16 and a Q/DQ engine, and often in the ONNX files too (exporters number
nodes, so that one name may be two nodes). Layers are paired by the names of layers, weights and ONNX nodes that they
share, numbered ones only where they agree with what the layers compute; what is left, in order, by kind, kernel and
shapes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from qdqtool.buildlog.records import Shape
from qdqtool.buildlog.types import BuiltTensor, LayerKind
from qdqtool.engine.costs import EngineReport, LayerCost, Totals, node_of
from qdqtool.types import Json

A = TypeVar("A")
B = TypeVar("B")
NUMBERED = re.compile(r"^[^/.]*\d$")  # Conv_12, onnx::Conv_193: no path of modules
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
    for one, two in align([x for x in left if _works(x)], [x for x in right if _works(x)], _likeness):
        taken[one.index] = two.index
    used = set(taken.values())
    for one, two in _alone([x for x in left if x.index not in taken], [x for x in right if x.index not in used]):
        taken[one.index] = two.index
    result.by = "names" if 2 * named >= len(taken) and named else "shapes"
    result.pairs = [Pair(row, second.rows[taken[row.index]] if row.index in taken else None) for row in first.rows]
    used = set(taken.values())
    result.pairs += [Pair(None, row) for row in second.rows if row.index not in used]
    return result


def _by_names(first: EngineReport, second: EngineReport) -> dict[int, int]:
    """Pairs by layers of one name or by the ONNX nodes that name their work; a node of several layers names none."""
    one, two = _keys(first), _keys(second)
    common = [(name, index, two[name]) for name, index in one.items() if name in two]
    alike = {name: _same_work(first.rows[i], second.rows[j]) for name, i, j in common}
    numbered = {name for name in alike if NUMBERED.search(name)}
    if not all(alike[name] for name in numbered):
        numbered.clear()  # the numbers are those of two exports
    taken: dict[int, int] = {}
    used: set[int] = set()
    for exact in (True, False):  # names of weights and whole paths first: they are the same in every export
        for name, index, other in common:
            if alike[name] and index not in taken and other not in used and (
                    name in numbered if not exact else not NUMBERED.search(name)):
                taken[index] = other
                used.add(other)
    return taken


def _same_work(one: LayerCost, two: LayerCost) -> bool:
    whole = one.layer.name == two.layer.name and not (one.layer.type and two.layer.type)  # a row of a profile
    return whole or (_family(one) == _family(two) and not _contradict(one, two))


def _contradict(one: LayerCost, two: LayerCost) -> bool:
    """Whether two layers compute different things: another kernel, or other channels."""
    kernels = [c.layer.extras.get("Kernel", c.layer.extras.get("ConvKernel")) for c in (one, two)]
    maps = [c.layer.extras.get("OutMaps") for c in (one, two)]
    edges = [(_channels(one.layer.inputs), _channels(two.layer.inputs)),
             (_channels(one.layer.outputs), _channels(two.layer.outputs)), tuple(kernels), tuple(maps)]
    return any(a and b and a != b for a, b in edges)


def _channels(tensors: list[BuiltTensor]) -> int | None:
    shape = tensors[0].shape if tensors else None
    return shape[1] if shape is not None and len(shape) == 4 else None


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


def align(left: Sequence[A], right: Sequence[B], likeness: Callable[[A, B], int]) -> list[tuple[A, B]]:
    """Pairs in the same order in both, of the greatest likeness altogether (dynamic programming)."""
    if len(left) * len(right) > _MAX_CELLS:
        return []
    alike = [[likeness(one, two) for two in right] for one in left]
    best = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        row, below = best[i], best[i + 1]
        for j in range(len(right) - 1, -1, -1):
            row[j] = max(below[j], row[j + 1], below[j + 1] + alike[i][j])
    pairs = []
    i = j = 0
    while i < len(left) and j < len(right):
        if alike[i][j] and best[i][j] == best[i + 1][j + 1] + alike[i][j]:
            pairs.append((left[i], right[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _alone(left: list[LayerCost], right: list[LayerCost]) -> list[tuple[LayerCost, LayerCost]]:
    """Of what came in another order: layers that have no second one of their kind, kernel and shapes on either side."""

    def by_work(rows: list[LayerCost]) -> dict[Hashable, list[LayerCost]]:
        found: dict[Hashable, list[LayerCost]] = {}
        for row in rows:
            if row.layer.is_convolution and row.layer.inputs and row.layer.outputs:
                kernel = tuple(row.layer.extras.get("Kernel") or ())
                key = kernel, _edge(row.layer.inputs), _edge(row.layer.outputs)
                found.setdefault(key, []).append(row)
        return found

    one, two = by_work(left), by_work(right)
    return [(rows[0], two[key][0]) for key, rows in one.items() if len(rows) == len(two.get(key, ())) == 1]


def _works(row: LayerCost) -> bool:
    """Whether a layer computes something: those that move data only have no counterpart."""
    return row.layer.kind not in (LayerKind.CONVERSION, LayerKind.REFORMAT) and row.layer.type != "NoOp"


def _likeness(one: LayerCost, two: LayerCost) -> int:
    """How much two layers compute alike, apart from precision and batch: 0 for different families or kernels."""
    if _family(one) != _family(two) or (one.layer.inputs and _contradict(one, two)):
        return 0
    same_input = _edge(one.layer.inputs) == _edge(two.layer.inputs)
    same_output = _edge(one.layer.outputs) == _edge(two.layer.outputs)
    if not (same_input or same_output):
        return 0
    same_edges = len(one.layer.inputs) == len(two.layer.inputs)  # a residual Add is fused into both or neither
    return 2 + 3 * (same_input and same_output) + same_edges


def _edge(tensors: list[BuiltTensor]) -> Shape | None:
    """Dimensions without the batch."""
    shape = tensors[0].shape if tensors else None
    return shape[1:] if shape is not None and len(shape) > 1 else shape
