"""Scales of activations (one for each tensor group) and weights (one for each channel)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion.number_formats import INT8, LEVELS, NumberFormat
from qdqtool.insertion.options import METHODS, PlacementOptions, RangeOptions
from qdqtool.ir.graph import Model
from qdqtool.ir.operators import commuting_inputs, pads_below_range
from qdqtool.ir.qdq import find_pair
from qdqtool.patterns.heads import is_attention_probability
from qdqtool.util.checks import check_choice, compile_pattern
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from calibration.methods import Range
    from calibration.statistics import TensorStatistics


T = TypeVar("T")


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors that share one scale.

    Attributes:
        quantized: Tensors of the group that get a Q/DQ pair, in graph order.
        tensors: All tensors of the group, with or without a pair.
        sources: Tensors of the group whose values the other tensors contain. Only the sources are
            calibrated.
        largest: The largest value, if it does not depend on the data (1 for the Softmax of an
            attention), else None.
    """

    quantized: tuple[str, ...]
    tensors: tuple[str, ...]
    sources: tuple[str, ...]
    largest: float | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the scale is a compromise between several sources."""
        return len(self.sources) > 1


class UnionFind(Generic[T]):
    """Groups of keys, such as tensors. A union merges two groups.

    Attributes:
        parent: For each key, a key of the same group that is closer to the representative. The
            representative is its own parent.
    """

    def __init__(self) -> None:
        self.parent: dict[T, T] = {}

    def find(self, key: T) -> T:
        """Return the representative of the group of a key. A new key becomes a group of its own."""
        self.parent.setdefault(key, key)
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def union(self, left: T, right: T) -> None:
        """Merge the groups of two keys. The representative of `left` represents the result."""
        self.parent[self.find(right)] = self.find(left)


def group_separately(tensors: Iterable[str]) -> list[ScaleGroup]:
    """Return one scale group for each tensor."""
    return [ScaleGroup((tensor,), (tensor,), (tensor,)) for tensor in tensors]


def find_scale_groups(
    model: Model, quantized: Iterable[str], unify: bool = PlacementOptions.unify
) -> list[ScaleGroup]:
    """Group quantized tensors that are connected by operators that only move values.

    If `unify` is False, every tensor is a group of its own.

    Returns:
        The groups, in the order of their first quantized tensor. Chained Concats form one group.
    """
    names = list(dict.fromkeys(quantized))
    if not unify:
        return [ScaleGroup((t,), (t,), (t,), _constant_maximum(model, (t,))) for t in names]
    union, sources = _group_upstream(model, names)
    members: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for tensor in names:
        members.setdefault(union.find(tensor), ([], [], []))[0].append(tensor)
    for tensor in union.parent:
        members[union.find(tensor)][1].append(tensor)
    for tensor in sources:
        members[union.find(tensor)][2].append(tensor)
    return [
        ScaleGroup(tuple(group), tuple(tensors), tuple(origins), _constant_maximum(model, group))
        for group, tensors, origins in members.values()
    ]


def _group_upstream(model: Model, tensors: Sequence[str]) -> tuple[UnionFind[str], list[str]]:
    """Group tensors with the upstream tensors whose values they contain.

    Returns:
        The groups, and the sources of all groups.
    """
    union: UnionFind[str] = UnionFind()
    sources: list[str] = []
    stack = list(reversed(tensors))
    visited: set[str] = set()
    while stack:
        tensor = stack.pop()
        if tensor in visited:
            continue
        visited.add(tensor)
        union.find(tensor)
        inputs = _inputs_with_same_scale(model, tensor)
        variable = [t for t in inputs if not model.is_constant(t)]
        # A tensor with a constant operand is a source, because the constant extends the range.
        if not variable or len(variable) < len(inputs):
            sources.append(tensor)
        for name in variable:
            union.union(tensor, name)
            stack.append(name)
    return union, sources


def _inputs_with_same_scale(model: Model, tensor: str) -> Sequence[str]:
    pair = find_pair(model, tensor)
    if pair is not None:
        return pair[1].inputs[:1] if pair[1] is not None else ()
    node = model.producer(tensor)
    if node is not None and pads_below_range(model, node):
        return node.inputs[:1]
    return commuting_inputs(model, node)


def _constant_maximum(model: Model, tensors: Sequence[str]) -> float | None:
    return 1.0 if all(is_attention_probability(model, t) for t in tensors) else None


_SMALLEST = float(np.finfo(np.float32).tiny)
_RANGE_CANDIDATES = 48


@dataclass(frozen=True)
class MethodChoice:
    """Calibration methods of tensors: by patterns on their names, else the default.

    Attributes:
        default: One of :data:`METHODS`.
        overrides: Pairs of a regular expression (``re.search`` on the tensor's name) and a method.
            The first pattern that matches is used.
        percentile: Percentile of the absolute values, in percent, for the method ``percentile``.
        number_format: Format of the quantized numbers.
    """

    default: str = RangeOptions.method
    overrides: Sequence[tuple[str, str]] = ()
    percentile: float = RangeOptions.percentile
    number_format: NumberFormat = INT8

    @classmethod
    def from_options(cls, ranges: RangeOptions, number_format: NumberFormat = INT8) -> MethodChoice:
        """Return the calibration methods that the options select; ``max`` for FP8.

        The precision of an FP8 number is relative to its value. A smaller range would clip large
        values and make no other value more precise.
        """
        if number_format != INT8:
            return cls("max", (), ranges.percentile, number_format)
        return cls(ranges.method, tuple(ranges.method_for), ranges.percentile)

    def check(self, tensors: Sequence[str]) -> None:
        """Check methods, percentile and patterns.

        Raises:
            QdqtoolError: A method is unknown, the percentile is outside 50 to 100, or a pattern is
                not a regular expression or matches none of the tensors.
        """
        for method in (self.default, *(m for _, m in self.overrides)):
            check_choice("method", method, METHODS)
        if not 50.0 <= self.percentile <= 100.0:
            raise QdqtoolError(
                f"`percentile={self.percentile:g}` is out of range; give a number from 50 to 100",
                code="out-of-range",
                parameter="percentile",
            )
        for pattern, method in self.overrides:
            compile_pattern(pattern, f"`method_for` {pattern}={method}")
        for pattern, method in self.find_unused_overrides(tensors):
            example = f"; names look like '{tensors[0]}'" if tensors else ""
            raise QdqtoolError(
                f"`method_for` {pattern}={method} matches no quantized tensor{example}",
                code="no-match",
                parameter="method_for",
            )

    def find_unused_overrides(self, tensors: Sequence[str]) -> list[tuple[str, str]]:
        """Return the overrides that match none of the tensors."""
        return [o for o in self.overrides if not any(re.search(o[0], t) for t in tensors)]

    def method_for(self, group: ScaleGroup) -> str:
        """Return the calibration method of a group.

        The first override that matches a tensor's name gives the method. Without a match, the
        method is the default.

        Raises:
            QdqtoolError: Overrides give two tensors of the group different methods.
        """
        tensors: dict[str, str] = {}  # first tensor of each method
        for tensor in group.tensors:
            for pattern, method in self.overrides:
                if re.search(pattern, tensor):
                    tensors.setdefault(method, tensor)
                    break
        if len(tensors) > 1:
            (method, tensor), (other_method, other) = list(tensors.items())[:2]
            raise QdqtoolError(
                f"`method_for`: '{tensor}' gets {method} and '{other}' gets {other_method}, but "
                "they share one scale; use one method for both, or `unify=False`",
                code="ambiguous",
                parameter="method_for",
            )
        return next(iter(tensors), self.default)


@dataclass(frozen=True)
class GroupMember:
    """One source of a scale group.

    Attributes:
        tensor: Name of the source.
        amax: Range that the source would get without the other sources; 0 if all its values are 0.
        bits_lost: log2 of the group's range divided by `amax`. Negative if the group's range is
            smaller than `amax`. 0 for FP8, a table of ranges, and an `amax` of 0.
    """

    tensor: str
    amax: float
    bits_lost: float


@dataclass(frozen=True)
class GroupScale:
    """Scale of a group: ``amax / 127`` (INT8) or ``amax / 448`` (FP8).

    Attributes:
        power: Power of the error in the sum that the range minimizes; None for methods that do not
            minimize an error.
    """

    group: ScaleGroup
    scale: float
    method: str
    members: tuple[GroupMember, ...]
    power: float | None = None


def constant_scale(
    group: ScaleGroup, largest: float, number_format: NumberFormat = INT8
) -> GroupScale:
    """Return the scale of a group whose largest value does not depend on the data."""
    members = tuple(GroupMember(t, largest, 0.0) for t in group.sources)
    return GroupScale(group, clamp_scale(largest / number_format.largest), "fixed", members)


def choose_tensor_scales(
    groups: Sequence[ScaleGroup],
    statistics: Mapping[str, TensorStatistics],
    choice: MethodChoice,
) -> dict[str, float]:
    """Choose the scales of groups that have one tensor each, by tensor. Warnings are ignored."""
    return {g.tensors[0]: choose_scale(g, statistics, choice)[0].scale for g in groups}


def choose_scale(
    group: ScaleGroup, statistics: Mapping[str, TensorStatistics], choice: MethodChoice
) -> tuple[GroupScale, list[Note]]:
    """Choose one scale for a group from the statistics of its sources.

    ``max`` chooses the largest range of the sources. ``percentile`` and ``entropy`` use the merged
    statistics. ``mse`` and ``focus`` choose the range with the smallest sum of the errors of the
    sources. The error of a source is relative to the magnitude of its values, so that sources with
    small values and with large values count equally.

    Returns:
        The scale, and warnings.

    Raises:
        DataError: A source has values that are not finite.
        QdqtoolError: See :meth:`MethodChoice.method_for`.
    """
    from calibration.methods import Range, choose_range

    if group.largest is not None:
        return constant_scale(group, group.largest, choice.number_format), []
    method = choice.method_for(group)
    warnings: list[Note] = []
    ranges: dict[str, float] = {}
    chosen_range = Range(1.0, None)
    for tensor in group.sources:
        _check_finite(tensor, statistics[tensor])
        if statistics[tensor].absmax > 0.0:
            chosen_range = choose_range(statistics[tensor], method, percentile=choice.percentile)
            ranges[tensor] = chosen_range.amax
        else:
            warnings.append(
                Note(
                    f"'{tensor}' is zero on all calibration data, so its scale is meaningless; "
                    "check the images and the preprocessing",
                    code="always-zero",
                    tensor=tensor,
                )
            )
    if len(ranges) > 1:
        sources = [statistics[t] for t in ranges]
        chosen_range = _choose_shared_range(
            sources, list(ranges.values()), method, choice.percentile
        )
    amax = chosen_range.amax
    # A shared range does not reduce the precision of FP8, because that precision is relative to
    # each value.
    costs = ranges if choice.number_format == INT8 else {}
    members = tuple(
        GroupMember(t, ranges.get(t, 0.0), math.log2(amax / ranges[t]) if t in costs else 0.0)
        for t in group.sources
    )
    scale = clamp_scale(amax / choice.number_format.largest)
    return GroupScale(group, scale, method, members, chosen_range.power), warnings


def _check_finite(tensor: str, statistics: TensorStatistics) -> None:
    nonfinite = statistics.nonfinite
    if nonfinite:
        raise DataError(
            f"tensor '{tensor}': {nonfinite} of {nonfinite + statistics.count} values are NaN or "
            "infinite on the calibration data; check the model and the preprocessing, or leave "
            "its consumers in float with `exclude`",
            code="not-finite",
            node=tensor,
        )


def _choose_shared_range(
    parts: Sequence[TensorStatistics], ranges: Sequence[float], method: str, percentile: float
) -> Range:
    from calibration.methods import Range, amax_of
    from calibration.statistics import merge_all

    if method in ("mse", "focus"):
        return _least_error_range(parts, min(ranges), max(ranges), method)
    return Range(amax_of(merge_all(parts), method, percentile=percentile), None)


def _least_error_range(
    parts: Sequence[TensorStatistics], low: float, high: float, method: str
) -> Range:
    """Return the range from `low` to `high` with the smallest sum of relative errors.

    The error of a source is the p-th root of the mean of ``|error| ** p``, divided by the p-th root
    of the mean of ``|value| ** p`` (p is 2 for ``mse``). Of the sums that were tried on two trained
    models, this sum had the smallest box errors: 0.57 and 0.52 pixels. The sum of relative squared
    errors had 0.62 and 0.57 pixels, the sum of their logarithms 0.59 and 0.55. A sum of squared
    errors that are not relative depends mostly on the sources with large values, and reduced the
    mAP50-95 of one model by 0.03.
    """
    from calibration.methods import (
        SEARCH_BITS,
        Range,
        choose_focus_range,
        focused_error,
        squared_error,
    )

    candidates = np.geomspace(low, high, _RANGE_CANDIDATES)

    def compute_errors(
        part: TensorStatistics, ranges: npt.NDArray[np.float64], power: float
    ) -> npt.NDArray[np.float64]:
        if method == "focus":
            return focused_error(part, ranges, power, SEARCH_BITS)
        return squared_error(part, ranges)

    def sum_errors(ranges: npt.NDArray[np.float64], power: float) -> npt.NDArray[np.float64]:
        total = np.zeros(len(ranges))
        for part in parts:
            # A tiny range clips all values to almost 0, so its error is the mean of |x| ** power.
            size = compute_errors(part, np.array([part.absmax * 1e-6]), power).item()
            total += (compute_errors(part, ranges, power) / max(size, _SMALLEST)) ** (1.0 / power)
        return total

    def choose_best_range(power: float) -> float:
        return float(candidates[int(np.argmin(sum_errors(candidates, power)))])

    if method == "focus":
        return choose_focus_range(
            parts, choose_best_range, lambda ranges, power: sum_errors(ranges, power) ** power
        )
    return Range(choose_best_range(2.0), 2.0)


def clamp_scale(scale: float) -> float:
    """Return a scale as a positive normal float32. TensorRT rejects zero and negative scales."""
    return float(np.float32(max(scale, _SMALLEST)))


def weight_scale(
    weight: npt.NDArray[Any], axis: int | None, largest: float = LEVELS
) -> npt.NDArray[np.float32]:
    """Return symmetric scales of weights: largest magnitude divided by `largest`.

    Args:
        weight: The weights, finite.
        axis: The output-channel axis; None for one scale.
        largest: Largest magnitude of the format, 127 for INT8.

    Returns:
        float32 scales. Shape: [channels] with one scale for each index of `axis`, or [] if `axis`
        is None. All scales are positive. A channel whose scale would be 0 or subnormal gets the
        largest scale of the other channels, or 1 if all channels are like this.
    """
    magnitude = np.abs(weight)
    if axis is None:
        amax = np.asarray(magnitude.max(initial=0.0), np.float64)
    else:
        others = tuple(i for i in range(weight.ndim) if i != axis)
        amax = magnitude.max(axis=others, initial=0.0).astype(np.float64)
    scale = amax / largest
    usable = scale[scale >= _SMALLEST]
    substitute = float(usable.max()) if usable.size else 1.0
    return np.where(scale >= _SMALLEST, scale, substitute).astype(np.float32)
