"""Memory, operations and time of each engine layer, and what people know it by.

Definitions follow TREx (NVIDIA's TensorRT engine explorer, up to TensorRT 11.0): a layer's bytes are those of its input
tensors, its weights (bias apart) and its output tensors, each element counted once at its own width, a vectorized
layout without its padding. Operations are multiply-accumulates (MACs); arithmetic intensity is MACs per byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qdqtool.buildlog.layers import find_precision, int_list
from qdqtool.buildlog.names import NO_NAMES
from qdqtool.buildlog.summary import is_implicit_int8
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    LayerRole,
    ParsedNode,
    Shape,
    static_shape,
)
from qdqtool.ir.operators import WEIGHTED
from qdqtool.types import Json, Precision
from qdqtool.util.records import published
from qdqtool.util.text import ending

_MAX_MACS = 1 << 80  # more is damage, as are more weights than these
_MAX_COUNT = 1 << 48
_PRODUCTS = ("conv", "gemm", "matmul")
ENGINE_SCHEMA = "qdqtool/engine/1"


@dataclass(slots=True)
class LayerCost:
    """One layer, its place in the engine, and what it costs; bytes are None for dynamic shapes.

    Attributes:
        macs: Multiply-accumulates; None where weights or shapes are not known, 0 for layers without any.
        ms: Average milliseconds, None without a profile.
        share: Share of the profile's total, 0 to 1.
        expected_ms: What such a layer usually takes on the GPU, as a profile shows it; None where that is not known.
        best_ms: What it would take at the GPU's peak rates.
    """

    layer: BuiltLayer
    index: int
    macs: int | None = None
    input_bytes: int | None = None
    weight_bytes: int | None = None
    output_bytes: int | None = None
    ms: float | None = None
    share: float | None = None
    expected_ms: float | None = None
    best_ms: float | None = None

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def precision(self) -> Precision:
        """What it computes in: the type of its data input; of its output where it has no input."""
        return self.layer.input_precision if self.layer.inputs else self.layer.output_precision

    @property
    def total_bytes(self) -> int | None:
        """Inputs, weights and outputs; weights count as none for layers that have none."""
        if self.input_bytes is None or self.output_bytes is None or self.weight_bytes is None:
            return None
        return self.input_bytes + self.weight_bytes + self.output_bytes

    @property
    def times_expected(self) -> float | None:
        """Measured time over what such a layer usually takes."""
        return self.ms / self.expected_ms if self.ms is not None and self.expected_ms else None

    @property
    def intensity(self) -> float | None:
        """MACs per byte."""
        total = self.total_bytes
        return None if self.macs is None or not total else self.macs / total

    def as_json(self) -> Json:
        return {
            "index": self.index,
            **published(self.layer, "name", "type", "kind"),
            "precision": str(self.precision),
            **published(self.layer, "inputs", "outputs"),
            **published(self, "macs", "input_bytes", "weight_bytes", "output_bytes"),
            "bytes": self.total_bytes,
            **published(
                self, "intensity", "ms", "share", "expected_ms", "best_ms", "times_expected"
            ),
        }


@dataclass(slots=True)
class LayerTotals:
    """Sums over some layers; ``unknown`` is how many of them have an unknown number of bytes or MACs."""

    layers: int = 0
    macs: int = 0
    bytes: int = 0
    ms: float = 0.0
    unknown: int = 0

    def add(self, cost: LayerCost) -> None:
        self.layers += 1
        self.macs += cost.macs or 0
        self.bytes += cost.total_bytes or 0
        self.ms += cost.ms or 0.0
        self.unknown += cost.macs is None or cost.total_bytes is None

    def as_json(self) -> Json:
        return published(self)


@dataclass(slots=True)
class EngineReport:
    """An engine's layers, in their order, with their costs.

    ``unmatched`` are names in the profile that no layer has; ``gpu`` is what expected times are for, where known.
    """

    build: Build
    rows: list[LayerCost] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    gpu: str | None = None

    @property
    def implicit_int8(self) -> bool:
        """Whether its INT8 comes from a calibration table."""
        return is_implicit_int8(self.build)

    @property
    def has_times(self) -> bool:
        return any(row.ms is not None for row in self.rows)

    @property
    def total_ms(self) -> float:
        return sum(row.ms or 0.0 for row in self.rows)

    def totals(self, key: str) -> dict[str, LayerTotals]:
        """Sums by ``precision``, ``type`` or ``kind``, the costliest first."""
        table: dict[str, LayerTotals] = {}
        value_of: Callable[[LayerCost], str] = {
            "precision": lambda row: str(row.precision),
            "type": lambda row: row.layer.type or "unknown",
            "kind": lambda row: str(row.layer.kind),
        }[key]
        for row in self.rows:
            table.setdefault(value_of(row), LayerTotals()).add(row)
        return dict(
            sorted(
                table.items(),
                key=lambda item: (-item[1].ms, -item[1].bytes, -item[1].layers, item[0]),
            )
        )

    def sorted_rows(self, key: str) -> list[LayerCost]:
        """The layers by ``order``, ``ms``, ``macs``, ``bytes``, ``intensity`` (largest first), ``name`` or ``type``."""
        if key == "order":
            return list(self.rows)
        if key in ("name", "type"):
            return sorted(
                self.rows,
                key=lambda row: (row.layer.type if key == "type" else row.name, row.index),
            )
        values = {"ms": "ms", "macs": "macs", "bytes": "total_bytes", "intensity": "intensity"}
        return sorted(self.rows, key=lambda row: (-(getattr(row, values[key]) or 0.0), row.index))

    def as_json(self) -> Json:
        return {
            "schema": ENGINE_SCHEMA,
            **published(self, "build"),
            "bindings": list(self.build.bindings),
            "total_ms": self.total_ms if self.has_times else None,
            "totals": {
                key: {k: t.as_json() for k, t in self.totals(key).items()}
                for key in ("kind", "precision", "type")
            },
            "layers": [row.as_json() for row in self.rows],
            **published(self, "unmatched", "gpu", "implicit_int8"),
        }


def analyze(build: Build) -> EngineReport:
    """Costs of every layer of a build; times where the build has a profile."""
    nodes = {node.name: node for node in build.parse.nodes if node.op in WEIGHTED}
    known = build.parse.names if nodes else NO_NAMES
    report = EngineReport(build)
    times: dict[str, list[float]] = {}
    for row in build.profile_rows:
        times.setdefault(row.name, []).append(row.average_ms)
    total = sum(row.average_ms for row in build.profile_rows)
    for index, layer in enumerate(build.layers):
        counts = (
            [_count_weights(nodes[part]) for part in layer.parse_name(known).bases if part in nodes]
            if nodes
            else []
        )
        parsed = sum(c for c in counts if c) if counts and all(counts) else None
        macs = _count_macs(layer, parsed)
        cost = LayerCost(
            layer,
            index,
            macs if macs is not None and 0 <= macs < _MAX_MACS else None,
            _count_bytes(layer.inputs),
            _weight_bytes(layer, parsed),
            _count_bytes(layer.outputs),
        )
        if waiting := times.get(layer.name):
            cost.ms = waiting.pop(0)
            cost.share = cost.ms / total if total else None
        report.rows.append(cost)
    report.unmatched = [name for name, waiting in times.items() for _ in waiting]
    return report


def _count_bytes(tensors: Iterable[BuiltTensor]) -> int | None:
    total = 0.0
    for tensor in tensors:
        if tensor.elements is None or tensor.precision.width is None:
            return None
        total += tensor.elements * tensor.precision.width
    return math.ceil(total)


def _has_weights(layer: BuiltLayer) -> bool:
    return layer.is_convolution or "gemm" in layer.type.lower() or "MatrixMultiply" in layer.type


def _weight_bytes(layer: BuiltLayer, parsed: int | None) -> int | None:
    """Bytes of the weights as they are listed; else by how many weights the parsed nodes have."""
    if (listed := _find_listed_weights(layer)) is not None:
        return math.ceil(listed[0] * (listed[1].width or 4.0))
    if layer.constants and _has_weights(layer):
        return _count_bytes(c for c in layer.constants if c.shape is not None and len(c.shape) > 1)
    if parsed is not None:
        return math.ceil(parsed * (layer.input_precision.width or 4.0))
    return None if layer.is_convolution else 0


def _find_listed_weights(layer: BuiltLayer) -> tuple[int, Precision] | None:
    """Number and type of the weights that the detailed listing gives (``ConvWeights`` for a fused pooling)."""
    for key in ("Weights", "ConvWeights"):
        weights = layer.extras.get(key)
        if isinstance(weights, dict):
            count = weights.get("Count")
            if isinstance(count, int) and not isinstance(count, bool) and 0 < count < _MAX_COUNT:
                return count, find_precision(str(weights.get("Type", "")))
    return None


def _count_weights(node: ParsedNode) -> int | None:
    shape = (
        static_shape(node.inputs[1].shape)
        if len(node.inputs) > 1 and node.inputs[1] is not None
        else None
    )
    count = _MAX_COUNT if shape is None else math.prod(shape)
    return count if count < _MAX_COUNT else None


def _count_macs(layer: BuiltLayer, parsed: int | None) -> int | None:
    if not _has_weights(layer):
        return 0
    source, target = (
        static_shape(tensors[0].shape) if tensors else None
        for tensors in (layer.inputs, layer.outputs)
    )
    if source is None or target is None:
        return None
    if layer.is_convolution and len(source) >= 3:
        return _count_convolution_macs(layer, parsed, source, target) if len(target) >= 3 else None
    if len(source) >= 2 and len(target) >= 2:
        # A matrix product sums over the last dimension of its input, or, with the weights on the left, over the one
        # before: there the last dimension stays and the one before changes.
        left = source[-1] == target[-1] and source[-2] != target[-2]
        return math.prod(target) * source[-2 if left else -1]
    return None


def _count_convolution_macs(
    layer: BuiltLayer, parsed: int | None, source: list[int], target: list[int]
) -> int | None:
    extras = layer.extras
    shaped = [
        c.elements
        for c in layer.constants
        if c.shape is not None and len(c.shape) >= 4 and c.elements
    ]
    listed = _find_listed_weights(layer)
    count = listed[0] if listed else next(iter(shaped), parsed)
    if count is None:
        kernel, maps, groups = (
            int_list(extras.get("Kernel"), 1),
            extras.get("OutMaps"),
            extras.get("Groups", 1),
        )
        if kernel is None or not isinstance(maps, int) or not isinstance(groups, int) or groups < 1:
            return None
        count = math.prod(kernel) * maps * source[1] // groups
    if layer.is_deconvolution:  # each input element is used once with every weight of its channel
        return math.prod(source) // max(1, source[1]) * count
    pooled = _count_positions_before_pooling(extras, source)
    if pooled is not None:
        return target[0] * pooled * count
    if "pool" in layer.type.lower():
        return None  # the convolution's own output, before the pooling in the same layer, is not listed
    return math.prod(target) // max(1, target[1]) * count


def _count_positions_before_pooling(extras: dict[str, Any], source: list[int]) -> int | None:
    """Output positions of the convolution inside a fused convolution and pooling."""
    fields = (("ConvKernel", 1), ("ConvStride", 1), ("ConvPrePadding", 0), ("ConvPostPadding", 0))
    listed = [
        found for name, least in fields if (found := int_list(extras.get(name), least)) is not None
    ]
    dims = zip(source[2:], *listed, strict=False)
    return (
        None
        if len(listed) < len(fields)
        else math.prod(
            (given + low + high - size) // step + 1 for given, size, step, low, high in dims
        )
    )


# What people know a layer by --------------------------------------------------------------------------------------


def layer_title(row: LayerCost) -> str:
    """The part of a fused name that people know the layer by: its convolution, else the last node."""
    fused = row.layer.parse_name()
    if fused.kind.startswith("reformat"):
        return f"reformat {ending(fused.of, 26)}"
    if fused.kind == "copy":
        return f"copy {ending(fused.of, 30)}"
    if row.layer.is_qdq:
        owner, _, op = row.layer.name.rpartition("/")
        return (
            f"{'DQ' if op.startswith('D') else 'Q'} {ending(owner, 33)}"
            if owner
            else row.layer.name
        )
    extra = f"  (+{len(fused.alternatives) - 1})" if len(fused.alternatives) > 1 else ""
    return ending(main_node(row), 36 - len(extra)) + extra


def main_node(row: LayerCost) -> str:
    """The ONNX node that multiplies in a layer, as its name or metadata say; else the last one, or the name."""
    groups = row.layer.parse_name().alternatives
    listed = (
        row.layer.onnx_names if len(groups) < 2 else []
    )  # of layers merged side by side the first one's nodes
    names = listed or next(iter(groups), []) or [row.layer.name]
    plain = [n for n in reversed(names) if not n.endswith("weight") and "uantizeLinear" not in n]
    return next(
        (n for word in _PRODUCTS for n in plain if word in n.rsplit("/", 1)[-1].lower()), names[-1]
    )


def format_tensor(tensor: BuiltTensor) -> str:
    """``1x64x80x80 INT8:32``: shape, precision, vector width."""
    shape = "x".join("?" if d is None else str(d) for d in tensor.shape) if tensor.shape else ""
    vector = f":{tensor.vector}" if tensor.vector > 1 else ""
    return f"{shape} {tensor.precision}{vector}".strip()


# Two engines ---------------------------------------------------------------------------------------------------------

A = TypeVar("A")
B = TypeVar("B")
V = TypeVar("V", bound=Hashable)
W = TypeVar("W", bound=Hashable)
NUMBERED_NAME = re.compile(r"^[^/.]*\d$")  # Conv_12, onnx::Conv_193: no path of modules
_MAX_CELLS = 4_000_000
_COMMON = (
    0.3  # share of the smaller engine's layers that must pair by name before names are trusted
)


@dataclass(slots=True)
class LayerPair:
    """A layer of each engine; either side may be missing."""

    first: LayerCost | None
    second: LayerCost | None

    @property
    def change_ms(self) -> float | None:
        """Milliseconds that the second engine takes more; a missing layer takes none, one without a time is unknown."""
        if any(cost is not None and cost.ms is None for cost in (self.first, self.second)):
            return None
        return (self.second.ms or 0.0 if self.second else 0.0) - (
            self.first.ms or 0.0 if self.first else 0.0
        )

    def as_json(self) -> Json:
        def side(cost: LayerCost | None) -> Json | None:
            return (
                None
                if cost is None
                else {
                    "index": cost.index,
                    **published(cost.layer, "name", "type", "kind"),
                    "inputs": [str(t.precision) for t in cost.layer.inputs],
                    "outputs": [str(t.precision) for t in cost.layer.outputs],
                    "ms": cost.ms,
                }
            )

        return {"first": side(self.first), "second": side(self.second), "change_ms": self.change_ms}


@dataclass(slots=True)
class EngineComparison:
    """Two engines, aligned: layers of both in the first's order, with what only the second has at the end.

    ``by`` is ``names`` or ``shapes``: how most pairs were found.
    """

    first: EngineReport
    second: EngineReport
    pairs: list[LayerPair]
    by: str

    @property
    def totals_by_kind(self) -> dict[str, tuple[LayerTotals, LayerTotals]]:
        """Sums of both engines by kind of layer."""
        one, two = self.first.totals("kind"), self.second.totals("kind")
        return {
            kind: (one.get(kind, LayerTotals()), two.get(kind, LayerTotals()))
            for kind in dict.fromkeys([*one, *two])
        }

    def as_json(self) -> Json:
        return {
            "schema": "qdqtool/engine-comparison/1",
            "first": {"build": self.first.build.as_json(), "total_ms": self.first.total_ms},
            "second": {"build": self.second.build.as_json(), "total_ms": self.second.total_ms},
            "aligned_by": self.by,
            "kinds": {
                kind: [one.as_json(), two.as_json()]
                for kind, (one, two) in self.totals_by_kind.items()
            },
            "pairs": [pair.as_json() for pair in self.pairs],
        }


def compare_engines(first: EngineReport, second: EngineReport) -> EngineComparison:
    """Aligns two engines."""
    taken = _pair_by_names(first, second)
    if len(taken) < _COMMON * min(len(first.rows), len(second.rows)):
        taken = {}
    named = len(taken)

    def left() -> tuple[list[LayerCost], list[LayerCost]]:
        used = set(taken.values())
        return [x for x in first.rows if x.index not in taken], [
            x for x in second.rows if x.index not in used
        ]

    one, two = ([x for x in rows if _has_work(x)] for rows in left())
    aligned = align(
        [(x, _find_signature(x)) for x in one],
        [(x, _find_signature(x)) for x in two],
        _rate_similarity,
    )
    taken.update((a.index, b.index) for a, b in aligned)
    taken.update((a.index, b.index) for a, b in _pair_unique_layers(*left()))
    pairs = [
        LayerPair(row, second.rows[taken[row.index]] if row.index in taken else None)
        for row in first.rows
    ]
    by = "names" if 2 * named >= len(taken) and named else "shapes"
    return EngineComparison(
        first, second, [*pairs, *(LayerPair(None, row) for row in left()[1])], by
    )


def _pair_by_names(first: EngineReport, second: EngineReport) -> dict[int, int]:
    """Pairs by layers of one name or by the ONNX nodes that name their work; a node of several layers names none."""
    one, two = _index_names(first), _index_names(second)
    common = [(name, index, two[name]) for name, index in one.items() if name in two]
    alike = {name: _has_same_work(first.rows[i], second.rows[j]) for name, i, j in common}
    numbered = {name for name in alike if NUMBERED_NAME.search(name)}
    exact = [one for one in common if one[0] not in numbered]
    if not all(alike[name] for name in numbered):
        numbered.clear()  # the numbers are those of two exports
    taken: dict[int, int] = {}
    used: set[int] = set()
    # Names of weights and whole paths first: they are the same in every export.
    for name, index, other in (*exact, *(one for one in common if one[0] in numbered)):
        if alike[name] and index not in taken and other not in used:
            taken[index] = other
            used.add(other)
    return taken


def _has_same_work(one: LayerCost, two: LayerCost) -> bool:
    if one.layer.name == two.layer.name and not (
        one.layer.type and two.layer.type
    ):  # a row of a profile
        return True
    first, second = _find_signature(one), _find_signature(two)
    return first.family == second.family and not _contradicts(first, second)


class _LayerSignature(NamedTuple):
    """What a layer computes, apart from precision and batch; ``sizes`` are channels, kernel and maps."""

    family: str
    sizes: tuple[Hashable, ...]
    edges: tuple[Shape | None, Shape | None]
    inputs: int


def _find_signature(row: LayerCost) -> _LayerSignature:
    layer = row.layer
    kernel, maps = (
        layer.extras.get("Kernel", layer.extras.get("ConvKernel")),
        layer.extras.get("OutMaps"),
    )
    sizes = _channels(layer.inputs), _channels(layer.outputs), str(kernel or ""), str(maps or "")
    return _LayerSignature(
        _family(row),
        sizes,
        (_shape_without_batch(layer.inputs), _shape_without_batch(layer.outputs)),
        len(layer.inputs),
    )


def _contradicts(one: _LayerSignature, two: _LayerSignature) -> bool:
    """Whether two layers compute different things: another kernel, or other channels."""
    return any(a and b and a != b for a, b in zip(one.sizes, two.sizes, strict=True))


def _channels(tensors: list[BuiltTensor]) -> int | None:
    shape = tensors[0].shape if tensors else None
    return shape[1] if shape is not None and len(shape) == 4 else None


def _index_names(report: EngineReport) -> dict[str, int]:
    found: dict[str, int] = {}
    several: set[str] = set()
    for row in report.rows:
        fused = row.layer.parse_name()
        for name in row.layer.onnx_names or ([] if fused.is_copy else fused.bases):
            if ("uantizeLinear" not in name or row.layer.is_qdq) and found.setdefault(
                name, row.index
            ) != row.index:
                several.add(name)
    for name in several:
        del found[name]
    return found


def _family(row: LayerCost) -> str:
    kind = (
        row.layer.type.lower() or main_node(row).lower()
    )  # of a profile alone the name is all there is
    if row.layer.is_convolution or (not row.layer.type and "conv" in kind):
        return "convolution"
    words = ("pool", "resize", "softmax", "reformat", "pointwise")
    return next((word for word in words if word in kind), row.layer.kind)


def align(
    left: Sequence[tuple[A, V]], right: Sequence[tuple[B, W]], likeness: Callable[[V, W], int]
) -> list[tuple[A, B]]:
    """Pairs in the same order in both, of the greatest likeness altogether (dynamic programming).

    Args:
        left: What is to be paired, each with all that its likeness rests on.
        right: The same.
        likeness: Of those; asked once for all that are equal.
    """
    if len(left) * len(right) > _MAX_CELLS:
        return []
    kinds = dict.fromkeys(two for _, two in right)
    of_kind = {
        one: {two: likeness(one, two) for two in kinds}
        for one in dict.fromkeys(one for _, one in left)
    }
    rows = {
        one: np.array([known[two] for _, two in right], np.int32) for one, known in of_kind.items()
    }
    alike = [rows[one] for _, one in left]
    best = np.zeros((len(left) + 1, len(right) + 1), np.int32)
    for row, below, own in zip(best[-2::-1], best[:0:-1], reversed(alike), strict=True):
        row[-2::-1] = np.maximum.accumulate(np.maximum(below[:-1], below[1:] + own)[::-1])
    pairs = []
    i = j = 0
    while i < len(left) and j < len(right):
        if alike[i][j] and best[i][j] == best[i + 1][j + 1] + alike[i][j]:
            pairs.append((left[i][0], right[j][0]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _pair_unique_layers(
    left: list[LayerCost], right: list[LayerCost]
) -> list[tuple[LayerCost, LayerCost]]:
    """Of what came in another order: layers that have no second one of their kind, kernel and shapes on either side."""

    def group_by_shapes(rows: list[LayerCost]) -> dict[Hashable, list[LayerCost]]:
        found: dict[Hashable, list[LayerCost]] = {}
        for row in rows:
            if row.layer.is_convolution and row.layer.inputs and row.layer.outputs:
                kernel = tuple(row.layer.extras.get("Kernel") or ())
                key = (
                    kernel,
                    _shape_without_batch(row.layer.inputs),
                    _shape_without_batch(row.layer.outputs),
                )
                found.setdefault(key, []).append(row)
        return found

    one, two = group_by_shapes(left), group_by_shapes(right)
    return [
        (rows[0], two[key][0])
        for key, rows in one.items()
        if len(rows) == len(two.get(key, ())) == 1
    ]


def _has_work(row: LayerCost) -> bool:
    """Whether a layer computes something: those that move data only have no counterpart."""
    return (
        row.layer.kind not in (LayerRole.CONVERSION, LayerRole.REFORMAT)
        and row.layer.type != "NoOp"
    )


def _rate_similarity(one: _LayerSignature, two: _LayerSignature) -> int:
    """How much two layers compute alike: 0 for different families or kernels."""
    if one.family != two.family or (one.inputs and _contradicts(one, two)):
        return 0
    same = [a == b for a, b in zip(one.edges, two.edges, strict=True)]
    same_edges = one.inputs == two.inputs  # a residual Add is fused into both or neither
    return 2 + 3 * all(same) + same_edges if any(same) else 0


def _shape_without_batch(tensors: list[BuiltTensor]) -> Shape | None:
    """Dimensions without the batch."""
    shape = tensors[0].shape if tensors else None
    return shape[1:] if shape is not None and len(shape) > 1 else shape
