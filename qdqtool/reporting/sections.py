"""Collect the page's sections on build, tuning, calibration, weights and times."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qdqtool.errors import DataError, QdqtoolError
from qdqtool.formats.build_text import verdict
from qdqtool.formats.output import as_options
from qdqtool.insertion.number_formats import LEVELS
from qdqtool.insertion.scales import find_scale_groups
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED, output_axis
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import is_qdq
from qdqtool.reporting import data
from qdqtool.reporting.nodes import ModelCollector, ReportSubject, time_kind
from qdqtool.reporting.page import display_message, display_name, round_digits
from qdqtool.timing.results import KernelTime
from qdqtool.timing.time_calibration import match_profile_rows
from qdqtool.trt.result import EngineLayer
from qdqtool.util import limits
from qdqtool.util.files import read_input, record_input
from qdqtool.util.json_text import parse_json
from qdqtool.util.progress import track_progress
from qdqtool.util.text import format_count
from qdqtool.verification.api import exit_code
from qdqtool.verification.times import find_measured_time, is_timed

if TYPE_CHECKING:
    from calibration.statistics import TensorStatistics
    from qdqtool.buildlog.agreement import BuildFacts, Mismatch
    from qdqtool.buildlog.types import Build, ProfileRow
    from qdqtool.patterns.view import View
    from qdqtool.verification.result import Verification


MAX_MISMATCHES = 500


def _format_mismatch(mismatch: Mismatch) -> list[str]:
    line = "" if mismatch.line is None else str(mismatch.line)
    return [str(mismatch.kind), display_name(mismatch.name), line, display_message(mismatch.why)]


def collect_agreement(collector: ModelCollector) -> data.BuildAgreement | None:
    """Return the comparison of the prediction with the build; None without a build."""
    result = collector.subject.verification
    if result is None:
        return None
    build = result.build
    mismatches = result.mismatches[:MAX_MISMATCHES]
    notes = [str(note) for note in result.notes]
    omitted = len(result.mismatches) - len(mismatches)
    if omitted:
        count = "1 more mismatch" if omitted == 1 else f"{omitted} more mismatches"
        notes.append(f"{count} (qdqtool verify --format json lists all)")
    agreement = data.BuildAgreement(
        build=_describe_build(build),
        verdict=verdict(result),
        ok=exit_code(result, True) == 0,
        complete=build.complete,
        missing=[display_message(m) for m in build.missing],
        rows=_agreement_rows(result),
        mismatches=[_format_mismatch(m) for m in mismatches],
        mismatch_nodes=[collector.find_first_node([m.name]) for m in mismatches],
        notes=[display_message(n) for n in notes],
    )
    _add_measured_times(agreement, result, collector.subject.build)
    return agreement


def _add_measured_times(
    agreement: data.BuildAgreement, result: Verification, build: Build | None
) -> None:
    if result.times is not None:
        agreement.measured_ms = result.times["built_ms"]
        agreement.measured_from = result.times["built_from"]
        agreement.predicted_ms = result.times["predicted_ms"]
    elif build is not None and is_timed(build):
        # Without a known GPU, there is only the measured time, and nothing to compare it with.
        agreement.measured_ms, agreement.measured_from = find_measured_time(build)


def _describe_build(build: BuildFacts) -> str:
    version = "an unknown version of TensorRT"
    if build.tensorrt:
        version = f"TensorRT {build.tensorrt}"
    device = display_name(f" on {build.device}", 120) if build.device else ""
    files = ", ".join(display_name(f, 120) for f in build.files)
    return f"{version}{device} ({files or build.source})"


def _agreement_rows(result: Verification) -> list[list[str]]:
    conv, layers, conversions = result.convolutions, result.layers, result.conversions
    remark = "data types of inputs and output, and the nodes fused into each layer"
    if conv.unknown:
        remark = f"{conv.unknown} not stated by the build"
    rows = [["convolutions", str(conv.agree), str(conv.total), remark]]
    if layers.total:
        rows.append(["engine layers", str(layers.agree), str(layers.total), "name and data types"])
    built, predicted = conversions.built, conversions.predicted
    if built is not None and predicted is not None:
        remark = f"{predicted} predicted, {built} built"
        rows.append(["conversions", str(min(built, predicted)), str(max(built, predicted)), remark])
    for name, counts in (("pass lines", result.trace), ("slice and copy lines", result.copies)):
        if counts.built:
            remark = f"{counts.predicted} predicted"
            rows.append([name, str(counts.agree), str(counts.built), remark])
    return rows


# The Pareto front of ``qdqtool tune``; the contents of the file are untrusted ---------------------

_GZIP = b"\x1f\x8b"  # start of the files NAME.tuning that tune continues from
_EXPECTED_FILE = "give the output of 'qdqtool tune --format json'"
MAX_POINTS, MAX_SITES, MAX_NOTES = 2_000, 5_000, 50


def read_tuning(path: str | os.PathLike[str], model: Model) -> data.TuningPlot:
    """Read the result of ``qdqtool tune`` (``--format json`` or ``--result``) for a model.

    Raises:
        DataError: The file is missing, has another format or a damaged field, or belongs to another
            network: ``model`` has fewer than half of the nodes that the result names.
    """
    name = os.fspath(path)
    result = _read_tuning_file(path)
    try:
        _check_tuned_model(model, result, name)
        return _parse_tuning(result)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        missing = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        brief = missing[:80]
        raise DataError(
            f"the tuning result is damaged ({brief}); run qdqtool tune again",
            name,
            code="file-damaged",
            parameter="tuning",
        ) from None


def _read_tuning_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    from qdqtool.tuning.result import SCHEMA

    name = os.fspath(path)
    content = read_input(path, limits.JSON_FILE, error=DataError)
    if content.startswith(_GZIP):
        raise DataError(
            f"has the measurements of tune, but not its result; {_EXPECTED_FILE}",
            name,
            code="wrong-format",
            parameter="tuning",
        )
    try:
        result = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"is not JSON ({str(error)[:80]}); {_EXPECTED_FILE}",
            name,
            code="wrong-format",
            parameter="tuning",
        ) from None
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise DataError(
            f"its schema is not {SCHEMA}; {_EXPECTED_FILE}",
            name,
            code="wrong-format",
            parameter="tuning",
        )
    return result


def _check_tuned_model(model: Model, result: dict[str, Any], path: str) -> None:
    names = {str(node) for site in result["sites"] for node in site.get("nodes", ())}
    common = sum(node.name in names for node in model.nodes)
    if 2 * common < len(names):
        raise DataError(
            f"belongs to another network: only {common} of its {len(names)} nodes are in "
            f"{model.path or 'the model'}. Give the result of qdqtool tune for this model",
            path,
            code="different-models",
            parameter="tuning",
        )


def _parse_tuning(result: dict[str, Any]) -> data.TuningPlot:
    metric, goal, chosen = result["metric"], result["goal"], result["chosen"]
    complete_front = result["front"][:MAX_POINTS]
    # If tune reached its time limit, some configurations were not measured on held-out images.
    front = [point for point in complete_front if point["metric"] is not None]
    if not front:
        raise ValueError("its Pareto front is empty")
    others = result["others"][:MAX_POINTS]
    measured = [point for point in others if point["metric"] is not None]
    unmeasured = len(complete_front) - len(front) + len(others) - len(measured)
    cost = "cost" if any(point["ms"] is None for point in front) else "ms"
    points = [_parse_point(point, cost) for point in (*front, *measured)]
    for fields, point in zip(front, points, strict=False):
        point.on_front = True
        point.chosen = fields["index"] == chosen["index"]
    float_metric = _as_optional_number(metric.get("float"))
    return data.TuningPlot(
        metric=display_name(str(metric["name"]), 80),
        sentence=display_message(str(metric["sentence"])),
        axis=_axis_label(result, cost),
        points=points,
        float_metric=float_metric,
        keep=_metric_to_keep(goal, float_metric),
        budget=_as_optional_number(goal.get("budget_ms")),
        reached=goal.get("reached"),
        is_float=chosen["int8"] == 0,
        sites=[_format_site(site) for site in result["sites"][:MAX_SITES]],
        notes=_list_tuning_notes(result, unmeasured),
    )


def _metric_to_keep(goal: dict[str, Any], float_metric: float | None) -> float | None:
    share = _as_optional_number(goal.get("keep"))
    return None if share is None or float_metric is None else share * float_metric


def _list_tuning_notes(result: dict[str, Any], unmeasured: int) -> list[str]:
    notes = [*result["notes"], *result["warnings"]][:MAX_NOTES]
    texts = [display_message(as_options(str(note))) for note in notes]
    if unmeasured:
        count = format_count(unmeasured, "choice")
        return [f"{count} not drawn: no measurement on held-out images.", *texts]
    return texts


def _axis_label(result: dict[str, Any], cost: str) -> str:
    if cost == "cost":
        return display_message(str(result["cost"]["sentence"]))
    gpu = f" on {display_name(str(result['gpu']), 60)}" if result.get("gpu") else ""
    return f"estimated milliseconds{gpu}"


def _parse_point(point: dict[str, Any], cost: str) -> data.TuningPoint:
    """Return a point, whose horizontal position is the field ``ms`` or ``cost``."""
    return data.TuningPoint(
        name=display_name(str(point.get("name") or f"{point['int8']} INT8"), 120),
        x=float(point[cost]),
        metric=float(point["metric"]),
        low=_as_optional_number(point.get("low")),
        high=_as_optional_number(point.get("high")),
        int8=int(point["int8"]),
        conversions=None if point["conversions"] is None else int(point["conversions"]),
        ms=_as_optional_number(point["ms"]),
        chosen=False,
        on_front=False,
    )


def _format_site(site: dict[str, Any]) -> list[str]:
    error, ms = _as_optional_number(site.get("error_alone")), _as_optional_number(site.get("ms"))
    # The JSON has the change to the first alternative, which is INT8 for the sites of the head.
    if ms is not None and (_as_optional_number(site.get("int8")) or 0.0) > 0.0:
        ms = -ms
    return [
        *(display_name(str(site.get(key, "")), 200) for key in ("site", "kind", "choice")),
        "" if error is None else f"{error:.4g}",
        "" if ms is None else f"{ms:.4g}",
        display_message(as_options(str(site.get("why", "")))),
    ]


def _as_optional_number(value: Any) -> float | None:
    return None if value is None else float(value)


# Histograms with the ranges of the model and of each method ---------------------------------------

BINS = 96
_SAME_RANGE = 0.01  # maximum relative difference of ranges that count as equal


def read_histograms(
    path: str | os.PathLike[str], collector: ModelCollector
) -> tuple[list[data.ValueHistogram], str]:
    """Read histograms of quantized tensors from a calibration cache.

    Returns:
        The histograms in graph order, and a sentence with the numbers of tensors and images.

    Raises:
        DataError: The cache is missing or damaged, the model lacks most of its tensors, or none of
            them is quantized in the model.
    """
    from calibration.cache import load_statistics

    statistics = load_statistics(path)
    record_input(path)
    view = collector.subject.view
    quantizers: dict[str, Node] = {}  # first quantizer of each tensor
    for q in view.activation_qs:
        quantizers.setdefault(q.input(0), q)
    calibrated = [tensor for tensor in quantizers if tensor in statistics]
    common = len({*view.model.producers, *view.model.inputs}.intersection(statistics))
    if 2 * common < len(statistics):
        raise DataError(
            f"belongs to another model: only {common} of the cache's {len(statistics)} tensors are "
            "in this model. Write a cache of this model with 'qdqtool insert --calib-cache'",
            os.fspath(path),
            code="different-models",
            parameter="calib_cache",
        )
    if not calibrated:
        raise DataError(
            f"none of the cache's {len(statistics)} tensors is quantized in the model. Give the "
            "Q/DQ model that 'qdqtool insert' wrote with this cache",
            os.fspath(path),
            code="not-quantized",
            parameter="calib_cache",
        )
    histograms = []
    for tensor in track_progress(calibrated, "Ranges of each method"):
        q = quantizers[tensor]
        scale = view.params(q).single_scale
        amax = None if scale is None else scale * LEVELS
        histogram = _collect_histogram(statistics[tensor], amax)
        histogram.tensor, histogram.quantizer = display_name(tensor), display_name(q.name)
        histogram.node = collector.find_first_node([q.name])
        histograms.append(histogram)
    sentence = (
        f"{format_count(len(histograms), 'tensor')} over {format_count(statistics.images, 'image')}"
    )
    missing = len(quantizers) - len(histograms)
    if missing > 0:
        verb = "uses" if missing == 1 else "use"
        sentence += (
            f"; {format_count(missing, 'more quantized tensor')} {verb} the range of another "
            "tensor in the scale group"
        )
    return histograms, sentence


def _add_statistics(histogram: data.ValueHistogram, statistics: TensorStatistics) -> None:
    """Add the counts and extremes of a tensor, and the range that each method chooses."""
    from calibration.methods import METHODS, amax_of, clipped_fraction

    histogram.minimum = round_digits(statistics.minimum, 5)
    histogram.maximum = round_digits(statistics.maximum, 5)
    for name in METHODS:
        value = amax_of(statistics, name)
        clipped = round_digits(clipped_fraction(statistics, value), 5)
        histogram.methods.append(data.MethodRange(name, round_digits(value, 5), clipped))
    if statistics.absmax > 0:
        histogram.counts = [round(float(c)) for c in statistics.linear(BINS).counts]


def _collect_histogram(statistics: TensorStatistics, amax: float | None) -> data.ValueHistogram:
    """Return the histogram of a tensor, without names.

    `amax` is the range of the tensor in the model; None if unknown.
    """
    from calibration.methods import clipped_fraction

    histogram = data.ValueHistogram(
        tensor="",
        quantizer="",
        node=-1,
        absmax=round_digits(statistics.absmax, 5),
        minimum=0.0,
        maximum=0.0,
        values=statistics.count,
        counts=[0] * BINS,
        chosen=None,
        clipped=None,
        nearest=[],
        methods=[],
    )
    if statistics.count:
        _add_statistics(histogram, statistics)
    if amax is None or not (math.isfinite(amax) and amax > 0):
        return histogram
    if abs(amax - statistics.absmax) < 1e-5 * statistics.absmax:
        # This difference is caused by rounding the scale to float32, not by clipping.
        amax = statistics.absmax
    histogram.chosen = round_digits(amax, 5)
    histogram.clipped = round_digits(clipped_fraction(statistics, amax), 5)
    histogram.nearest = [
        m.name for m in histogram.methods if abs(m.amax - amax) <= _SAME_RANGE * amax
    ]
    return histogram


# Ranges of weights by output channel --------------------------------------------------------------

MAX_CHANNELS = 4096  # maximum number per convolution; a plot of more channels is unreadable
MAX_VALUES = 300_000_000  # maximum number of weights of a convolution, to limit the time


def add_weights(collector: ModelCollector) -> None:
    """Add the weight ranges of every convolution with quantized weights to the page."""
    subject, model = collector.subject, collector.model
    for node in subject.model.ordered:
        if node.op not in WEIGHTED or node.index not in collector.positions:
            continue
        position = collector.positions[node.index]
        ranges = _collect_weight_ranges(subject.view, node)
        if ranges is not None:
            ranges.node = position
            model.nodes[position].weights = len(model.weights)
            model.weights.append(ranges)


def _is_drawable(shape: Sequence[int], axis: int, scales: int) -> bool:
    if not -len(shape) <= axis < len(shape):
        return False
    return math.prod(shape) <= MAX_VALUES and max(scales, shape[axis]) <= MAX_CHANNELS


def _collect_weight_ranges(view: View, node: Node) -> data.WeightRanges | None:
    """Return the weight ranges of a node by output channel; None if they cannot be shown.

    Weights cannot be shown if they are not quantized or not constant, if a node between weights and
    quantizer changes them, if a scale is not finite, or if there are too many channels or values.
    """
    weights = view.weights(node)
    quantizer = weights.first_quantizer
    shape = view.model.constant_shape(weights.source)
    if quantizer is None or weights.before or weights.after or not shape:
        return None
    scale = view.params(quantizer).scale
    axis = output_axis(node, len(shape))
    if scale is None or not scale.size or not np.isfinite(scale).all() or axis is None:
        return None
    if not _is_drawable(shape, axis, scale.size):
        return None
    steps = scale if weights.q is None else np.ones(1)  # stored integers are multiples of the scale
    return data.WeightRanges(
        node=-1,
        name=display_name(node.name),
        shape="x".join(map(str, shape)),
        largest=_largest_magnitudes(view.model, weights.source, axis, steps),
        holds=[round_digits(v, 4) for v in (scale.astype(np.float64) * LEVELS).tolist()],
    )


def _largest_magnitudes(
    model: Model, tensor: str, axis: int, steps: npt.NDArray[Any]
) -> list[float]:
    """Return the largest magnitude of each channel along an axis.

    `steps` has a factor for each channel, or one for all. Empty if data is missing or not finite,
    or `steps` has another number of channels.
    """
    try:
        values = model.constant(tensor)
    except QdqtoolError:
        return []
    if values is None or not values.size or steps.size not in (1, values.shape[axis]):
        return []
    others = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
    largest = np.abs(values.astype(np.float32)).max(axis=others) * steps
    if not np.isfinite(largest).all():
        return []
    return [round_digits(v, 4) for v in largest.tolist()]


# Parts of the time, the roofline, and the scale groups --------------------------------------------

MAX_ROWS = 50  # maximum number of profile rows without a predicted layer
PARTS = {
    "int8": ("INT8 layers", "convolutions and other layers that compute in INT8 or FP8"),
    "float": ("Float layers", "layers that compute in a floating-point type"),
    "conversion": ("Conversions", "Q and DQ that remain as layers and change the data type"),
    "copy": ("Copies", "copies that Concats and Splits need; they only move data"),
    "layout": ("Layout changes", "reformats, which change the memory layout but not the data type"),
    "region": (
        "Unlisted layers",
        "layers that the simulation does not list: activations after convolutions, changes between "
        "FP32 and FP16, reshapes, and layers that the build compiles as one (ForeignNode)",
    ),
    "edge": (
        "Inputs and outputs",
        "reformats of inputs and outputs, and all time outside of predicted layers",
    ),
}
_REFORMAT = "reformat of "  # prefix of kernels that change the float type of a tensor
# Names of unlisted kernels, except reformats of inputs and outputs, begin with one of these.
_UNLISTED_PREFIXES = ("PWN after ", "reshape before ", "copy of ", _REFORMAT)


def collect_time(subject: ReportSubject) -> data.EngineTime | None:
    """Return the estimated time of the engine; None without an estimate."""
    time = subject.time
    if time is None:
        return None
    return data.EngineTime(
        gpu=time.gpu.name,
        clock=time.clock,
        total=time.total_ms,
        low=time.low_ms,
        high=time.high_ms,
        conversions=subject.prediction.conversions_ms or 0.0,
        notes=[as_options(note) for note in time.notes],
    )


def collect_time_parts(subject: ReportSubject, before: ReportSubject | None) -> list[data.TimePart]:
    """Return the time of each kind of layer: estimated, measured, and estimated for `before`.

    Kinds without any time are left out.
    """
    estimated, measured = _sum_estimates(subject), _sum_measurements(subject)
    earlier = _sum_estimates(before) if before is not None else {}
    none = (0.0, 0)
    parts = []
    for kind, (name, description) in PARTS.items():
        ms, layers = estimated.get(kind, none)
        earlier_ms, _ = earlier.get(kind, none)
        measured_ms, measured_layers = measured.get(kind, none)
        if not (ms or earlier_ms or measured_ms):
            continue
        part = data.TimePart(
            kind=kind,
            name=name,
            what=description,
            ms=ms if kind in estimated else None,
            layers=measured_layers if kind in measured else layers,
            before_ms=earlier_ms if earlier else None,
            measured_ms=measured_ms if measured else None,
        )
        parts.append(part)
    return parts


def explain_time_parts(subject: ReportSubject, parts: list[data.TimePart]) -> str:
    """Return sentences that explain why the parts do not add up to the total time.

    A profile adds time to each layer and hides the gaps between layers.
    """
    time = subject.time
    measured = [p.measured_ms for p in parts if p.measured_ms is not None]
    sentences = []
    if measured:
        sentences.append(
            f"Measured parts: {sum(measured):.3f} ms together, including the time that profiling "
            "adds."
        )
    if time is not None and parts:
        together = sum(p.ms or 0.0 for p in parts)
        layouts = ""
        if time.layouts:
            layouts = f", of which layout changes take {time.layouts_ms:.3f} ms"
        sentences.append(
            f"Estimated parts: {together:.3f} ms together, as in a profile, which adds a few us "
            f"per layer. The estimate without profiling is {time.total_ms:.3f} ms{layouts}."
        )
        timed, predicted = sum(p.layers for p in parts), len(subject.prediction.layers)
        if timed > predicted and not measured:
            idle = sum(ms <= 0 for ms in time.layers)
            omitted = f" ({idle} without run time, not in the parts)" if idle else ""
            sentences.append(
                f"The parts have {timed} layers, but the prediction has {predicted} engine layers"
                f"{omitted}: layout changes, unlisted layers, and reformats of inputs and "
                "outputs are added."
            )
    return " ".join(sentences)


def collect_unlisted_rows(subject: ReportSubject) -> list[data.ProfileEntry]:
    """Return at most 50 rows of a profile that match no predicted layer, slowest first."""
    rows = sorted(
        (row for layer, row in _pair_profile_rows(subject) if layer is None and row.ms > 0),
        key=lambda row: -row.ms,
    )
    return [data.ProfileEntry(display_name(r.name), round(r.ms, 5)) for r in rows[:MAX_ROWS]]


def _pair_profile_rows(subject: ReportSubject) -> list[tuple[EngineLayer | None, ProfileRow]]:
    """Return the rows of a profile with their predicted layers, then the unmatched rows."""
    rows = subject.build.profile_rows if subject.build is not None else []
    layers = subject.prediction.layers
    pairs: list[tuple[EngineLayer | None, ProfileRow]] = []
    pairs.extend(
        (layer, row)
        for layer, row in zip(layers, match_profile_rows(layers, rows), strict=True)
        if row is not None
    )
    matched = {id(row) for _, row in pairs}
    return pairs + [(None, row) for row in rows if id(row) not in matched]


def _sum_measurements(subject: ReportSubject) -> dict[str, tuple[float, int]]:
    """Return the measured milliseconds and the number of profile rows, by kind of layer."""
    times: dict[str, list[float]] = defaultdict(list)
    for layer, row in _pair_profile_rows(subject):
        times[_row_kind(row) if layer is None else time_kind(layer)].append(row.ms)
    return {kind: (sum(values), len(values)) for kind, values in times.items()}


def _row_kind(row: ProfileRow) -> str:
    if row.name.startswith("Reformatting CopyNode"):
        return "layout"
    return "region" if "ForeignNode" in row.name else "edge"


def _sum_estimates(subject: ReportSubject) -> dict[str, tuple[float, int]]:
    """Return the estimated milliseconds and the number of layers, by kind of layer."""
    time = subject.time
    if time is None or not time.layers:
        return {}
    layers = subject.prediction.layers
    times: dict[str, list[float]] = defaultdict(list)
    for layer, ms in zip(layers, time.layers, strict=True):
        times[time_kind(layer)].append(ms)
        times["layout"] += [change["ms"] for change in layer.layouts]
    fused = {node.name for node in subject.model.nodes} - {layer.name for layer in layers}
    edges = {f"{_REFORMAT}{tensor}" for tensor in (*subject.model.inputs, *subject.model.outputs)}
    inner = [kernel for kernel in time.kernels if kernel.name not in edges]
    times["region"] = _list_region_times(inner, fused)
    sums = {kind: (sum(ms), sum(t > 0 for t in ms)) for kind, ms in times.items() if ms}
    rest, count = _sum_unassigned_kernels(time.kernels, sums)
    if rest > 1e-3:
        sums["edge"] = rest, count
    return sums


def _list_region_times(kernels: Iterable[KernelTime], fused: Set[str]) -> list[float]:
    """Return the milliseconds of the kernels in regions; `fused` are the nodes in regions."""
    return [
        kernel.ms
        for kernel in kernels
        if kernel.name in fused or kernel.name.startswith(_UNLISTED_PREFIXES)
    ]


def _sum_unassigned_kernels(
    kernels: Sequence[KernelTime], sums: dict[str, tuple[float, int]]
) -> tuple[float, int]:
    """Return the milliseconds and number of the kernels that no kind of layer contains."""
    rest = sum(kernel.ms for kernel in kernels) - sum(ms for ms, _ in sums.values())
    return rest, max(0, len(kernels) - sum(number for _, number in sums.values()))


def collect_roofline(subject: ReportSubject) -> data.GpuRoofline | None:
    """Return the peak rates and bandwidth of the GPU; None without an estimate for a GPU."""
    if subject.time is None:
        return None
    gpu = subject.time.gpu
    rates = {"FP32": gpu.mac_rate(Precision.FP32), "FP16": gpu.mac_rate(Precision.FP16)}
    if gpu.has_int8:
        rates["INT8"] = gpu.mac_rate(Precision.INT8)
    if gpu.has_fp8 and subject.prediction.summary()["fp8"]:
        rates["FP8"] = gpu.mac_rate(Precision.FP8)
    return data.GpuRoofline(gpu.name, gpu.clock, gpu.bandwidth * 1e9, rates)


def collect_scale_groups(
    collector: ModelCollector, before: ReportSubject | None
) -> list[data.ScaleGroupEntry]:
    """Return groups of quantized activations that share a scale, the largest group first.

    Args:
        collector: Contents of the Q/DQ model.
        before: The model to compare with. If it is float, its operators determine the groups as in
            ``insert``. Without a float model, activations with equal scales are a group.
    """
    view = collector.subject.view
    quantizers: dict[str, list[Node]] = defaultdict(list)
    for q in view.activation_qs:
        quantizers[q.input(0)].append(q)
    has_float_model = before is not None and not any(map(is_qdq, before.model.nodes))
    if before is not None and has_float_model:
        groups = _group_tied_scales(before.model, quantizers)
    else:
        groups = _group_equal_scales(view, quantizers)
    entries = []
    for tensors in groups:
        nodes = [q for tensor in tensors for q in quantizers[tensor]]
        entry = _collect_scale_group(collector, nodes)
        if len(tensors) == 1:
            entry.tied = "alone"
        elif not has_float_model:
            entry.tied = "equal scales"
        entries.append(entry)
    return sorted(entries, key=lambda entry: -len(entry.tensors))


def _collect_scale_group(collector: ModelCollector, nodes: list[Node]) -> data.ScaleGroupEntry:
    params = [collector.subject.view.params(q) for q in nodes]
    scale = params[0].scale
    channels = 0 if scale is None else int(scale.size)
    is_equal = all(map(params[0].same_as, params[1:]))
    return data.ScaleGroupEntry(
        scale=float(scale[0]) if scale is not None and channels == 1 and is_equal else None,
        tensors=[display_name(t) for t in dict.fromkeys(q.input(0) for q in nodes)],
        nodes=collector.find_nodes(q.name for q in nodes),
        quantizers=len(nodes),
        tied="tied, one scale" if is_equal else "tied, but scales differ",
        channels=channels,
    )


def _group_equal_scales(view: View, quantizers: dict[str, list[Node]]) -> list[list[str]]:
    groups: dict[object, list[str]] = defaultdict(list)
    for tensor, nodes in quantizers.items():
        groups[view.params(nodes[0]).key or tensor].append(tensor)
    return list(groups.values())


def _group_tied_scales(float_model: Model, tensors: Iterable[str]) -> list[list[str]]:
    """Group tensors as ``insert`` does. A tensor that the float model lacks is its own group."""
    present, missing = [], []
    for tensor in tensors:
        if tensor in float_model.producers or tensor in float_model.inputs:
            present.append(tensor)
        else:
            missing.append([tensor])
    return [list(group.quantized) for group in find_scale_groups(float_model, present)] + missing
