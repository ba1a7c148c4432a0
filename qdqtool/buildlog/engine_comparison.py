"""Comparison of two engines layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qdqtool.buildlog.costs import EngineReport, LayerCost, LayerTotals, main_node
from qdqtool.buildlog.types import BuiltTensor, LayerRole, Shape
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields

A = TypeVar("A")
B = TypeVar("B")
V = TypeVar("V", bound=Hashable)
W = TypeVar("W", bound=Hashable)
# Matches names without a module path, such as Conv_12 or onnx::Conv_193.
NUMBERED_NAME = re.compile(r"^[^/.]*\d$")
_MAX_CELLS = 4_000_000
# Names are ignored if they pair less than this share of the smaller engine's layers.
_MIN_SHARE_BY_NAME = 0.3
_FAMILIES = ("pool", "resize", "softmax", "reformat", "pointwise")


@dataclass(slots=True)
class LayerPair:
    """Corresponding layers of two engines. Either layer may be missing."""

    first: LayerCost | None
    second: LayerCost | None

    @property
    def change_ms(self) -> float | None:
        """Milliseconds of the second layer minus those of the first; None if a time is unknown.

        A missing layer counts as 0 milliseconds.
        """
        first, second = (0.0 if cost is None else cost.ms for cost in (self.first, self.second))
        return None if first is None or second is None else second - first

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "first": _layer_json(self.first),
            "second": _layer_json(self.second),
            "change_ms": self.change_ms,
        }


def _layer_json(cost: LayerCost | None) -> Json | None:
    if cost is None:
        return None
    return {
        "index": cost.index,
        **to_json_fields(cost.layer, "name", "type", "kind"),
        "inputs": [str(tensor.precision) for tensor in cost.layer.inputs],
        "outputs": [str(tensor.precision) for tensor in cost.layer.outputs],
        "ms": cost.ms,
    }


@dataclass(slots=True)
class EngineComparison:
    """Two engines with their layers in pairs.

    Attributes:
        pairs: Layers in the order of the first engine, then layers of only the second engine.
        aligned_by: How most pairs were found: ``names`` or ``shapes``.
    """

    first: EngineReport
    second: EngineReport
    pairs: list[LayerPair]
    aligned_by: str

    @property
    def totals_by_kind(self) -> dict[str, tuple[LayerTotals, LayerTotals]]:
        """Sums of both engines by kind of layer."""
        first, second = self.first.totals("kind"), self.second.totals("kind")
        return {
            kind: (first.get(kind, LayerTotals()), second.get(kind, LayerTotals()))
            for kind in dict.fromkeys([*first, *second])
        }

    def as_json(self) -> Json:
        """Return the JSON output of ``qdqtool engine --compare``."""
        return {
            "schema": "qdqtool/engine-comparison/1",
            "first": {"build": self.first.build.as_json(), "total_ms": self.first.total_ms},
            "second": {"build": self.second.build.as_json(), "total_ms": self.second.total_ms},
            "aligned_by": self.aligned_by,
            "kinds": {
                kind: [first.as_json(), second.as_json()]
                for kind, (first, second) in self.totals_by_kind.items()
            },
            "pairs": [pair.as_json() for pair in self.pairs],
        }


def compare_engines(first: EngineReport, second: EngineReport) -> EngineComparison:
    """Pair the layers of two engines.

    Layers are paired by the names of their nodes if this gives enough pairs. The remaining layers
    are paired by shapes, in the order of the engines. Finally, convolutions are paired if their
    kernel and shapes are unique in both engines.
    """
    partners = _pair_by_names(first, second)
    if len(partners) < _MIN_SHARE_BY_NAME * min(len(first.rows), len(second.rows)):
        partners = {}
    paired_by_name = len(partners)
    left, right = (
        [(row, _find_signature(row)) for row in rows if _has_work(row)]
        for rows in _find_unpaired(first, second, partners)
    )
    partners.update((x.index, y.index) for x, y in align_sequences(left, right, _rate_similarity))
    left_groups, right_groups = map(_group_convolutions, _find_unpaired(first, second, partners))
    for key, rows in left_groups.items():
        if len(rows) == len(right_groups.get(key, ())) == 1:
            partners[rows[0].index] = right_groups[key][0].index
    pairs = [
        LayerPair(row, second.rows[partners[row.index]] if row.index in partners else None)
        for row in first.rows
    ]
    pairs += [LayerPair(None, row) for row in _find_unpaired(first, second, partners)[1]]
    aligned_by = "names" if 0 < len(partners) <= 2 * paired_by_name else "shapes"
    return EngineComparison(first, second, pairs, aligned_by)


def _find_unpaired(
    first: EngineReport, second: EngineReport, partners: dict[int, int]
) -> tuple[list[LayerCost], list[LayerCost]]:
    paired = set(partners.values())
    return (
        [row for row in first.rows if row.index not in partners],
        [row for row in second.rows if row.index not in paired],
    )


def _pair_by_names(first: EngineReport, second: EngineReport) -> dict[int, int]:
    first_index, second_index = _index_names(first), _index_names(second)
    common = [name for name in first_index if name in second_index]
    rows = {
        name: (first.rows[first_index[name]], second.rows[second_index[name]]) for name in common
    }
    same = {name for name in common if _is_same_operation(*rows[name])}
    numbered = [name for name in common if NUMBERED_NAME.search(name)]
    # Names without numbers are the same in every export, so they are matched first. Numbered names
    # are comparable only if both engines come from one export.
    names = [name for name in common if not NUMBERED_NAME.search(name)]
    if same.issuperset(numbered):
        names += numbered
    partners: dict[int, int] = {}
    paired: set[int] = set()
    for name in names:
        index, partner = first_index[name], second_index[name]
        if name in same and index not in partners and partner not in paired:
            partners[index] = partner
            paired.add(partner)
    return partners


def _index_names(report: EngineReport) -> dict[str, int]:
    """Return the index of the layer of each node name; names of several layers are left out."""
    index: dict[str, int] = {}
    ambiguous: set[str] = set()
    for row in report.rows:
        parsed = row.layer.parse_name()
        for name in row.layer.onnx_names or ([] if parsed.is_copy else parsed.bases):
            if "uantizeLinear" in name and not row.layer.is_qdq:
                continue
            if index.setdefault(name, row.index) != row.index:
                ambiguous.add(name)
    return {name: row for name, row in index.items() if name not in ambiguous}


class _LayerSignature(NamedTuple):
    """Properties of a layer that do not depend on precision and batch size.

    Attributes:
        family: Kind of the layer.
        sizes: Channels of the input and the output, kernel, and output channels as listed. Unknown
            sizes are None or empty.
        shapes: Shapes of the first input and output without the batch.
        inputs: Number of inputs.
    """

    family: str
    sizes: tuple[Hashable, ...]
    shapes: tuple[Shape | None, Shape | None]
    inputs: int


def _find_signature(row: LayerCost) -> _LayerSignature:
    layer = row.layer
    kernel = layer.extras.get("Kernel", layer.extras.get("ConvKernel"))
    maps = layer.extras.get("OutMaps")
    return _LayerSignature(
        _find_family(row),
        (
            _count_channels(layer.inputs),
            _count_channels(layer.outputs),
            str(kernel or ""),
            str(maps or ""),
        ),
        (_shape_without_batch(layer.inputs), _shape_without_batch(layer.outputs)),
        len(layer.inputs),
    )


def _find_family(row: LayerCost) -> str:
    # Without a listing, a layer has only a name.
    kind = row.layer.type.lower() or main_node(row).lower()
    if row.layer.is_convolution or (not row.layer.type and "conv" in kind):
        return "convolution"
    return next((word for word in _FAMILIES if word in kind), row.layer.kind)


def _count_channels(tensors: list[BuiltTensor]) -> int | None:
    shape = tensors[0].shape if tensors else None
    return shape[1] if shape is not None and len(shape) == 4 else None


def _shape_without_batch(tensors: list[BuiltTensor]) -> Shape | None:
    shape = tensors[0].shape if tensors else None
    return shape[1:] if shape is not None and len(shape) > 1 else shape


def _is_same_operation(first: LayerCost, second: LayerCost) -> bool:
    is_profile = not (first.layer.type and second.layer.type)
    if is_profile and first.layer.name == second.layer.name:
        return True
    left, right = _find_signature(first), _find_signature(second)
    return left.family == right.family and not _has_contradiction(left, right)


def _has_contradiction(first: _LayerSignature, second: _LayerSignature) -> bool:
    return any(a and b and a != b for a, b in zip(first.sizes, second.sizes, strict=True))


def _has_work(row: LayerCost) -> bool:
    """Return whether a layer needs a partner, because it does not only move or convert data."""
    is_move = row.layer.kind in (LayerRole.CONVERSION, LayerRole.REFORMAT)
    return not is_move and row.layer.type != "NoOp"


def _rate_similarity(first: _LayerSignature, second: _LayerSignature) -> int:
    """Return the similarity of two layers, from 0 to 6.

    The similarity is 0 if families or sizes differ, or if both input and output shapes differ.
    """
    if first.family != second.family or (first.inputs and _has_contradiction(first, second)):
        return 0
    same = [a == b for a, b in zip(first.shapes, second.shapes, strict=True)]
    if not any(same):
        return 0
    # If a residual Add is fused into only one of the layers, the numbers of inputs differ.
    return 2 + 3 * all(same) + (first.inputs == second.inputs)


def _group_convolutions(rows: list[LayerCost]) -> dict[Hashable, list[LayerCost]]:
    groups: dict[Hashable, list[LayerCost]] = {}
    for row in rows:
        layer = row.layer
        if layer.is_convolution and layer.inputs and layer.outputs:
            kernel = tuple(layer.extras.get("Kernel") or ())
            shapes = _shape_without_batch(layer.inputs), _shape_without_batch(layer.outputs)
            groups.setdefault((kernel, *shapes), []).append(row)
    return groups


def align_sequences(
    left: Sequence[tuple[A, V]], right: Sequence[tuple[B, W]], rate: Callable[[V, W], int]
) -> list[tuple[A, B]]:
    """Pair items of two sequences in order, so that the total similarity is largest.

    Uses dynamic programming. Returns no pairs if the sequences are too long.

    Args:
        left: Items of the first sequence, each with the value that is passed to `rate`.
        right: Items of the second sequence, each with the value that is passed to `rate`.
        rate: Function that returns the similarity of two values, 0 if they must not be paired.
            The function is called once for each pair of distinct values.
    """
    if len(left) * len(right) > _MAX_CELLS:
        return []
    similarity = _rate_pairs([value for _, value in left], [value for _, value in right], rate)
    # best[i][j] is the largest total similarity of pairs from left[i:] and right[j:].
    best = np.zeros((len(left) + 1, len(right) + 1), np.int32)
    for row, below, rating in zip(best[-2::-1], best[:0:-1], reversed(similarity), strict=True):
        row[-2::-1] = np.maximum.accumulate(np.maximum(below[:-1], below[1:] + rating)[::-1])
    pairs = []
    i = j = 0
    while i < len(left) and j < len(right):
        if similarity[i][j] and best[i][j] == best[i + 1][j + 1] + similarity[i][j]:
            pairs.append((left[i][0], right[j][0]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _rate_pairs(
    left: list[V], right: list[W], rate: Callable[[V, W], int]
) -> list[npt.NDArray[np.int32]]:
    rows: dict[V, npt.NDArray[np.int32]] = {}
    for value in dict.fromkeys(left):
        similarity_to = {other: rate(value, other) for other in dict.fromkeys(right)}
        rows[value] = np.array([similarity_to[other] for other in right], np.int32)
    return [rows[value] for value in left]
