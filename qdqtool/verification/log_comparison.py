"""Comparison of a prediction with the pass lines, layers and conversions in a log."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qdqtool.buildlog.agreement import (
    ConversionCounts,
    DetailedDifference,
    Difference,
    LayerCounts,
    Mismatch,
    MismatchKind,
    TraceCounts,
)
from qdqtool.buildlog.names import SCALE_NODE
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, LogEvent, Section
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import precision_of
from qdqtool.trt import trace
from qdqtool.trt.pipeline import passes
from qdqtool.trt.result import EngineLayer, Prediction, TensorPrecision
from qdqtool.trt.targets import target_named
from qdqtool.trt.trace import Event
from qdqtool.verification.kernels import is_myelin_kernel
from qdqtool.verification.layer_mapping import NodeMapper

# Maximum product of the lengths of two sequences of lines, to find their longest common
# subsequence: about 60,000 lines each.
_MAX_STEPS = 4_000_000_000
_COPY_KINDS = frozenset(
    {
        trace.COPY_STOMPING,
        trace.COPY_STRIDING,
        trace.COPY_UNMOVABLE,
        trace.ELIMINATING_CONCAT,
        trace.ELIMINATING_SLICE,
        trace.REPLACING_SLICE,
        trace.RETARGETING,
    }
)
_NUMBERED = re.compile(r"^(.*[A-Za-z])_\d+$")
# Maximum number of listed mismatches of one kind; counts include all mismatches.
MAX_MISMATCHES = 50
C = TypeVar("C")


def count_agreement(predicted: Sequence[Hashable], built: Sequence[Hashable]) -> TraceCounts:
    """Count the elements of two sequences, the common ones, and those in the same order.

    A repeated element is common as often as both sequences contain it. The common elements in the
    same order are the longest common subsequence; their number is None for very long sequences.
    """
    common = (Counter(predicted) & Counter(built)).total()
    in_order = longest_common_subsequence(predicted, built)
    return TraceCounts(len(predicted), len(built), common, in_order)


def longest_common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int | None:
    """Return the length of the longest common subsequence; None for very long sequences.

    Bit-parallel (Hyyro, 2004, "Bit-parallel LCS-length computation revisited"): one integer holds
    a row of the dynamic-programming table. A zero bit marks a position where the length grows.
    """
    if len(first) * len(second) > _MAX_STEPS:
        return None
    positions: dict[Hashable, int] = {}
    for position, item in enumerate(first):
        positions[item] = positions.get(item, 0) | 1 << position
    full = (1 << len(first)) - 1
    row = full
    for item in second:
        hits = row & positions.get(item, 0)
        row = (row + hits | row - hits) & full
    return len(first) - row.bit_count()


@dataclass
class PartComparison(Generic[C]):
    """Counts and mismatches of one part of a verification."""

    counts: C
    mismatches: list[Mismatch] = field(default_factory=list)


@functools.cache
def qdq_pass_names() -> frozenset[str]:
    """Return the names of the optimizer passes whose log lines ``verify`` compares."""
    return frozenset(kind.__name__ for kind in passes() if kind.is_compared)


def compare_trace(
    prediction: Prediction,
    build: Build,
    complete: bool,
    uncertain: Iterable[Event] = (),
    kind: MismatchKind = MismatchKind.TRACE,
) -> PartComparison[TraceCounts]:
    """Compare the simulated lines with the logged lines, as multisets.

    Args:
        prediction: The prediction.
        build: The build.
        complete: Whether the log contains all passes. If not, a missing line is not a mismatch.
        uncertain: Lines that depend on unknown scales and are left out on both sides.
        kind: TRACE compares the lines of the Q/DQ passes, COPY the lines about slices and
            concatenations.
    """
    is_copy, excluded = kind == MismatchKind.COPY, set(uncertain)

    def is_compared(event: Event) -> bool:
        return event.kind in _COPY_KINDS if is_copy else event.pass_name in qdq_pass_names()

    predicted = [e for e in prediction.trace if is_compared(e) and e not in excluded]
    # The lines about copies are printed near the end of the optimizer's section, close to the
    # heading "After concat removal". A log without the heading lacks these lines.
    are_logged = is_copy and build.milestone("After concat removal") is not None
    if not are_logged and not any(map(is_compared, build.trace)):
        return PartComparison(TraceCounts(len(predicted)))
    logged = [e for e in build.trace if is_compared(e) and e.event not in excluded]
    events = [e.event for e in logged]
    mismatches = _list_unpredicted_lines(predicted, logged, kind)
    if complete:
        mismatches += _list_unlogged_events(predicted, events, kind)
    return PartComparison(count_agreement(predicted, events), mismatches)


def _list_unpredicted_lines(
    predicted: Sequence[Event], logged: Sequence[LogEvent], kind: MismatchKind
) -> list[Mismatch]:
    extra = Counter(line.event for line in logged) - Counter(predicted)
    mismatches: list[Mismatch] = []
    for line in logged:
        if _remove_event(extra, line.event):
            difference = Difference.LOGGED if mismatches else Difference.FIRST_LINE
            name = trace.render(line.event)
            mismatches.append(Mismatch(kind, name, {}, line.as_json(), difference, line=line.line))
    return mismatches


def _list_unlogged_events(
    predicted: Sequence[Event], logged: Sequence[Event], kind: MismatchKind
) -> list[Mismatch]:
    missing = Counter(predicted) - Counter(logged)
    return [
        Mismatch(kind, trace.render(event), event.as_json(), {}, Difference.NOT_LOGGED)
        for event in predicted
        if _remove_event(missing, event)
    ]


def _remove_event(remaining: Counter[Event], event: Event) -> bool:
    """Remove one occurrence of an event; return False if none was left."""
    is_left = remaining[event] > 0
    if is_left:
        remaining[event] -= 1
    return is_left


def compare_conversions(
    prediction: Prediction, build: Build, complete: bool
) -> PartComparison[ConversionCounts]:
    """Compare the predicted Q and DQ that remain in the engine with those of the build.

    Args:
        prediction: The prediction.
        build: The build.
        complete: Whether the log contains all passes.
    """
    built = _built_conversions(build, complete)
    if built is None:
        return PartComparison(ConversionCounts(prediction.conversions))
    comparison = PartComparison(ConversionCounts(prediction.conversions, len(built)))
    if prediction.conversions is None:
        return comparison
    predicted_names = Counter(name.removesuffix(SCALE_NODE) for name in prediction.conversion_nodes)
    built_names = Counter(name.removesuffix(SCALE_NODE) for name in built)
    lines = {layer.name.removesuffix(SCALE_NODE): layer.line for layer in build.layers}
    comparison.mismatches = [
        Mismatch(
            MismatchKind.CONVERSION,
            name,
            {},
            {"name": name},
            Difference.REMAINS,
            line=lines.get(name),
        )
        for name in (built_names - predicted_names).elements()
    ] + [
        Mismatch(MismatchKind.CONVERSION, name, {"name": name}, {}, Difference.ABSENT)
        for name in (predicted_names - built_names).elements()
    ]
    return comparison


def _built_conversions(build: Build, complete: bool) -> list[str] | None:
    """Return the names of the remaining Q and DQ: from the listing, else from QDQToCopy lines.

    None if the log shows neither.
    """
    if build.layers and not build.names_only and not build.has_gap(Section.LISTING):
        return [layer.name for layer in build.layers if layer.is_qdq]
    if not complete or qdq_pass_names().isdisjoint(e.pass_name for e in build.trace):
        return None
    return [e.subject for e in build.trace if e.pass_name == "QDQToCopy" and e.kind == "Running"]


def compare_layers(
    prediction: Prediction, build: Build, mapper: NodeMapper, reported: Collection[str | None] = ()
) -> PartComparison[LayerCounts]:
    """Compare engine layers by name, and by the data types of their inputs and outputs.

    Args:
        prediction: The prediction.
        build: The build.
        mapper: Mapper of the build's layers.
        reported: Names of layers with a convolution mismatch, which are not reported again.
    """
    predictable = filter(_is_predictable, mapper.layers)
    listed = [layer for layer in predictable if layer.type or build.names_only]
    if not listed or prediction.conversions is None:
        return PartComparison(LayerCounts(len(listed) or None))
    predicted = {_layer_key(layer.name): layer for layer in prediction.layers}
    has_fixed_floats = target_named(prediction.target).strongly_typed
    agree = 0
    unmatched: list[str] = []
    mismatches: list[Mismatch] = []
    for layer in listed:
        expected = predicted.get(_layer_key(layer.name))
        if expected is None:
            unmatched.append(layer.name)
            continue
        mismatch = _compare_types(expected, layer, has_fixed_floats)
        if mismatch is None:
            agree += 1
        elif layer.name not in reported:
            mismatches.append(mismatch)
    other_types = _count_other_types(build, listed)
    counts = LayerCounts(len(listed), agree, tuple(unmatched), other_types)
    return PartComparison(counts, mismatches)


def _count_other_types(build: Build, compared: Sequence[BuiltLayer]) -> dict[str, int]:
    """Return the number of layers of each type that were not compared, the largest first."""
    names = {layer.name for layer in compared}
    others = (layer.type for layer in build.layers if layer.type and layer.name not in names)
    return dict(Counter(others).most_common())


def _is_predictable(layer: BuiltLayer) -> bool:
    """Return whether a prediction can contain a layer's name; False for Myelin kernels."""
    return not is_myelin_kernel(layer) and layer.type != "shape_call"


def _compare_types(
    predicted: EngineLayer, built: BuiltLayer, has_fixed_floats: bool
) -> Mismatch | None:
    difference = _find_type_difference(
        Difference.INPUT, predicted.inputs, built.inputs, has_fixed_floats
    ) or _find_type_difference(
        Difference.OUTPUT, predicted.outputs, built.outputs, has_fixed_floats
    )
    if difference is None:
        return None
    sides = (predicted.as_json(), built.as_json())
    return Mismatch(MismatchKind.LAYER, built.name, *sides, *difference, built.line)


def _layer_key(name: str) -> str:
    """Return a layer name without suffixes that only the prediction or only the build has.

    These suffixes are the parser's number on NonMaxSuppression, and ``_quantize_scale_node``.
    """
    plain = name.removesuffix(SCALE_NODE)
    match = _NUMBERED.match(plain) if plain.startswith("/NonMaxSuppression") else None
    return match[1] if match else plain


def _find_type_difference(
    side: Difference,
    predicted: list[TensorPrecision],
    built: list[BuiltTensor],
    has_fixed_floats: bool,
) -> DetailedDifference | None:
    """Return the first difference of types on one side of a layer.

    Float types differ only in strongly typed networks. In others, the builder or an option
    (``--inputIOFormats``) chooses them.
    """
    for ours, theirs in zip(predicted, built, strict=False):
        types = (ours.precision, theirs.precision)
        comparable = all(p.is_float or p in (Precision.INT8, Precision.FP8) for p in types)
        if not has_fixed_floats and all(p.is_float for p in types):
            continue
        if comparable and not ours.precision.agrees(theirs.precision):
            return side, types
    return None


def find_inconsistent_tensors(model: Model, build: Build) -> list[Mismatch]:
    """Return mismatches for tensors that two layers list with different types.

    Also report float inputs and outputs of the network that are INT8 in the engine.
    """
    first_uses: dict[str, tuple[Precision, BuiltLayer]] = {}
    mismatches: list[Mismatch] = []
    for layer in (*build.layers, *build.second_layers):
        for tensor in (*layer.inputs, *layer.outputs):
            if tensor.precision == Precision.UNKNOWN:
                continue
            precision, first = first_uses.setdefault(tensor.tensor, (tensor.precision, layer))
            if precision != tensor.precision:
                mismatches.append(
                    Mismatch(
                        MismatchKind.LAYER,
                        tensor.tensor,
                        {},
                        layer.as_json(),
                        Difference.TWO_TYPES,
                        (precision, first.line, tensor.precision, layer.line),
                        layer.line,
                    )
                )
    return mismatches + _find_int8_bindings(model, build, first_uses)


def _find_int8_bindings(
    model: Model, build: Build, first_uses: dict[str, tuple[Precision, BuiltLayer]]
) -> list[Mismatch]:
    """Return the float inputs and outputs of the network that are INT8 in the engine.

    Inputs and outputs are matched by their names in the model. If all of them are float in the
    model, the inputs and outputs that the build lists under other names are checked too.
    """
    names = (*model.inputs, *model.outputs)
    types = {name: precision_of(model.elem_type(name)) for name in names}
    if types and all(precision.is_float for precision in types.values()):
        types = dict.fromkeys(build.bindings, Precision.FLOAT) | types
    mismatches: list[Mismatch] = []
    for name, expected in types.items():
        precision, first = first_uses.get(name, (None, None))
        if first is not None and precision == Precision.INT8 and expected.is_float:
            mismatches.append(
                Mismatch(
                    MismatchKind.LAYER,
                    name,
                    {"precision": str(expected)},
                    first.as_json(),
                    Difference.END,
                    (name, expected, precision),
                    first.line,
                )
            )
    return mismatches
