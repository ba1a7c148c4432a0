"""Sections of the page that are beside the prediction: a build, a tuning, calibration statistics, weights."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from qdqtool.errors import DataError, QdqtoolError
from qdqtool.formats.build_text import verdict
from qdqtool.formats.output import as_options
from qdqtool.formats.predict_text import decision
from qdqtool.insertion.scales import LEVELS, find_scale_groups
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED, output_axis
from qdqtool.ir.qdq import is_qdq
from qdqtool.patterns.view import View
from qdqtool.reporting import data
from qdqtool.reporting.nodes import ModelCollector, ReportSubject, time_kind
from qdqtool.reporting.page import display_message, display_name, round_digits
from qdqtool.timing.estimate import match_profile_rows
from qdqtool.types import EngineLayer, Precision
from qdqtool.util import limits
from qdqtool.util.files import read_input, record_input
from qdqtool.util.json_text import parse_json
from qdqtool.util.progress import track
from qdqtool.verification.api import exit_code
from qdqtool.verification.times import is_timed, measured_time

if TYPE_CHECKING:
    from calibration.statistics import TensorStatistics
    from qdqtool.buildlog.types import ProfileRow


_Kind = TypeVar("_Kind", dict[str, Any], list[Any])
MAX_MISMATCHES = 500


def collect_agreement(collector: ModelCollector) -> data.BuildAgreement | None:
    """What the build confirms, and every mismatch with the node that it is about."""
    result = collector.subject.verification
    if result is None:
        return None
    build = result.build
    version = (
        f"TensorRT {build.tensorrt}"
        if build.tensorrt
        else "a TensorRT that does not state its version"
    )
    where = f" on {build.device}" if build.device else ""
    files = ", ".join(display_name(f, 120) for f in build.files)
    conv, layers, conversions = result.convolutions, result.layers, result.conversions
    rows = [
        [
            "convolutions",
            str(conv.agree),
            str(conv.total),
            f"{conv.unknown} not stated by the build"
            if conv.unknown
            else "data types of inputs and output, and what each layer took in",
        ]
    ]
    if layers.total:
        rows.append(["engine layers", str(layers.agree), str(layers.total), "name and data types"])
    if conversions.built is not None and conversions.predicted is not None:
        rows.append(
            [
                "conversions",
                str(min(conversions.built, conversions.predicted)),
                str(max(conversions.built, conversions.predicted)),
                f"{conversions.predicted} predicted, {conversions.built} built",
            ]
        )
    rows += [
        [name, str(counts.agree), str(counts.built), f"{counts.predicted} predicted"]
        for name, counts in (("pass lines", result.trace), ("slice and copy lines", result.copies))
        if counts.built
    ]
    mismatches, notes = result.mismatches[:MAX_MISMATCHES], [str(note) for note in result.notes]
    if left := len(result.mismatches) - len(mismatches):
        notes.append(f"{left} more mismatches (qdqtool verify --format json lists them all)")
    found = data.BuildAgreement(
        f"{version}{display_name(where, 120)} ({files or build.source})",
        verdict(result),
        exit_code(result, True) == 0,
        result.complete,
        [display_message(m) for m in build.missing],
        rows,
        [
            [
                str(m.kind),
                display_name(m.name),
                "" if m.line is None else str(m.line),
                display_message(m.why),
            ]
            for m in mismatches
        ],
        [collector.find_first_node([m.name]) for m in mismatches],
        [display_message(n) for n in notes],
    )
    if result.times is not None:
        found.measured_ms = result.times["built_ms"]
        found.measured_from = result.times["built_from"]
        found.predicted_ms = result.times["predicted_ms"]
    elif (timed := collector.subject.build) is not None and is_timed(
        timed
    ):  # on which GPU is not known
        found.measured_ms, found.measured_from = measured_time(timed)
    return found


# The Pareto front of ``qdqtool tune``; what is in its file is data of unknown origin --------------------------------

_GIVE = "give what 'qdqtool tune --format json' wrote"
MOST_POINTS, MOST_SITES = 2_000, 5_000


def read_tuning(path: str | os.PathLike[str], model: Model) -> data.TuningPlot:
    """Reads what ``qdqtool tune --format json`` or ``--result`` wrote about a model.

    Raises:
        DataError: The file is missing, is something else, is about another network (fewer than half of the nodes that
            it names are in ``model``), or a field that a plot needs is damaged.
    """
    from qdqtool.tuning.result import SCHEMA

    name = os.fspath(path)
    try:
        found = parse_json(read_input(path, limits.JSON_FILE, error=DataError))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"is not JSON ({str(error)[:80]}); {_GIVE}",
            name,
            code="wrong-format",
            parameter="tuning",
        ) from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise DataError(
            f"its schema is not {SCHEMA}; {_GIVE}", name, code="wrong-format", parameter="tuning"
        )
    try:
        named = {str(n) for s in _list(found.get("sites")) for n in _list(_object(s).get("nodes"))}
        known = sum(node.name in named for node in model.nodes)
        if 2 * known < len(named):
            raise DataError(
                f"{known} of the {len(named)} nodes that it names are in "
                f"{model.path or 'the model'}; it is the tuning of another network",
                name,
                code="different-models",
                parameter="tuning",
            )
        return _read(found)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the tuning result is damaged ({str(error)[:80]}); run qdqtool tune again",
            name,
            code="file-damaged",
            parameter="tuning",
        ) from None


def _read(found: dict[str, Any]) -> data.TuningPlot:
    metric, goal, cost = (_object(found.get(k)) for k in ("metric", "goal", "cost"))
    front = [_object(p) for p in _list(found["front"])][:MOST_POINTS]
    if not front:
        raise ValueError("its front is empty")
    others = [_object(p) for p in _list(found.get("others"))][:MOST_POINTS]
    # What was tried but not judged has no metric to draw it at.
    unjudged = sum(p.get("metric") is None for p in others)
    others = [p for p in others if p.get("metric") is not None]
    chosen = _object(found.get("chosen"))
    timed = all(_optional(p.get("ms")) is not None for p in front)
    with_cost = all(_optional(p.get("cost")) is not None for p in front)
    if timed:
        axis = "estimated milliseconds" + (
            f" on {display_name(str(found['gpu']), 60)}" if found.get("gpu") else ""
        )
    else:
        axis = display_message(
            str(cost.get("sentence") or "convolutions left float, and conversions")
        )
    points = []
    for on_front, listed in ((True, front), (False, others)):
        for number, p in enumerate(listed):
            x = (
                _number(p["ms"])
                if timed and p.get("ms") is not None
                else _number(p["cost"])
                if with_cost
                else _number(p.get("conversions", 0)) - _number(p.get("int8", 0))
            )
            is_chosen = on_front and chosen.get("index", -1) == p.get("index", number)
            points.append(
                data.TuningPoint(
                    display_name(str(p.get("name") or f"{p.get('int8', '?')} INT8"), 120),
                    x,
                    _number(p["metric"]),
                    _optional(p.get("low")),
                    _optional(p.get("high")),
                    _count(p.get("int8")),
                    _count(p.get("conversions")),
                    _optional(p.get("ms")),
                    is_chosen,
                    on_front,
                )
            )
    if chosen and not any(p.chosen for p in points):
        match = [
            p
            for p in points
            if (p.int8, p.conversions, p.metric)
            == (
                _count(chosen.get("int8")),
                _count(chosen.get("conversions")),
                _optional(chosen.get("metric")),
            )
        ]
        for point in match[:1]:
            point.chosen = True
    float_metric = _optional(metric.get("float"))
    keep = _optional(goal.get("keep"))
    return data.TuningPlot(
        display_name(str(metric.get("name") or "metric"), 80),
        display_message(str(metric.get("sentence") or "")),
        axis,
        points,
        float_metric,
        keep * float_metric if keep is not None and float_metric is not None else None,
        _optional(goal.get("budget_ms")),
        goal.get("reached") if isinstance(goal.get("reached"), bool) else None,
        [_site(_object(s)) for s in _list(found.get("sites"))[:MOST_SITES]],
        [
            *(
                [f"{unjudged} more were tried and not judged; they are not drawn"]
                if unjudged
                else []
            ),
            *(
                display_message(str(n))
                for n in [*_list(found.get("notes")), *_list(found.get("warnings"))][:50]
            ),
        ],
    )


def _site(site: dict[str, Any]) -> list[str]:
    loss, ms = _optional(site.get("loss")), _optional(site.get("ms"))
    return [
        *(display_name(str(site.get(key, "")), 200) for key in ("site", "kind", "choice")),
        "" if loss is None else f"{loss:.4g}",
        "" if ms is None else f"{ms:.4g}",
        display_message(str(site.get("why", ""))),
    ]


def _object(value: Any) -> dict[str, Any]:
    return _of(dict, value, "an object")


def _list(value: Any) -> list[Any]:
    return _of(list, value, "a list")


def _of(kind: type[_Kind], value: Any, what: str) -> _Kind:
    """A value of a type; an empty one where there is none."""
    if not isinstance(value, kind | None):
        raise TypeError(f"{what} is something else")
    return kind() if value is None else value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:30]!r} is not a number")
    return float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def _count(value: Any) -> int | None:
    return None if value is None else int(_number(value))


# Histograms beside the ranges of the model, and those that each method would choose ---------------------------------

BINS = 96
_EQUAL = 0.01  # two ranges that differ by less are shown as one


def read_histograms(
    path: str | os.PathLike[str], collector: ModelCollector
) -> tuple[list[data.ValueHistogram], str]:
    """The histograms of the tensors that the model quantizes, in graph order, and a sentence about the data.

    Raises:
        DataError: The cache is missing or damaged, or of another model: most of its tensors are not there.
    """
    from calibration.cache import load_statistics

    statistics = load_statistics(path)
    record_input(path)
    view = collector.subject.view
    wanted = [(q, q.input(0)) for q in view.activation_qs]
    known = [(q, tensor) for q, tensor in wanted if tensor in statistics]
    there = sum(t in view.model.producers or t in view.model.inputs for t in statistics)
    if not known or 2 * there < len(statistics):
        raise DataError(
            f"{there} of its {len(statistics)} tensors are in the model, which quantizes "
            f"{len(known)} of them; it is the cache of another model ('qdqtool insert --calib-cache' writes it)",
            os.fspath(path),
            code="different-models",
            parameter="calib_cache",
        )
    found: dict[str, data.ValueHistogram] = {}
    for q, tensor in track(known, "Ranges of each method"):
        if tensor in found:
            continue
        scale = view.params(q).scale
        chosen = float(scale[0]) * LEVELS if scale is not None and scale.size == 1 else None
        found[tensor] = _histogram(
            statistics[tensor], tensor, q.name, collector.find_first_node([q.name]), chosen
        )
    missing = len({t for _, t in wanted}) - len(found)
    others = (
        f"; {missing} quantized tensors take their range from others of their scale group"
        if missing > 0
        else ""
    )
    return list(found.values()), f"{len(found)} tensors over {statistics.images} images{others}"


def _histogram(
    stats: TensorStatistics, tensor: str, quantizer: str, node: int, chosen: float | None
) -> data.ValueHistogram:
    from calibration.methods import METHODS, amax_of, clipped_fraction

    if chosen is not None and not (np.isfinite(chosen) and chosen > 0):
        chosen = None
    elif chosen is not None and abs(chosen - stats.absmax) < 1e-5 * stats.absmax:
        chosen = stats.absmax  # a scale is a float32: what it lost is no clipping
    methods = []
    for name in METHODS if stats.count else ():
        amax = amax_of(stats, name)
        methods.append(
            data.MethodRange(
                name, round_digits(amax, 5), round_digits(clipped_fraction(stats, amax), 5)
            )
        )
    nearest = (
        []
        if chosen is None
        else [m.name for m in methods if abs(m.amax - chosen) <= _EQUAL * chosen]
    )
    counts = stats.linear(BINS).counts if stats.count and stats.absmax > 0 else np.zeros(BINS)
    least, most = (stats.minimum, stats.maximum) if stats.count else (0.0, 0.0)
    return data.ValueHistogram(
        display_name(tensor),
        display_name(quantizer),
        node,
        round_digits(stats.absmax, 5),
        round_digits(least, 5),
        round_digits(most, 5),
        stats.count,
        [round(float(c)) for c in counts],
        None if chosen is None else round_digits(chosen, 5),
        None if chosen is None else round_digits(clipped_fraction(stats, chosen), 5),
        nearest,
        methods,
    )


# Ranges of weights by output channel --------------------------------------------------------------------------------

MOST_CHANNELS = 4096  # of one convolution; of more the plot would show nothing
MOST_VALUES = 300_000_000  # of one constant


def add_weights(collector: ModelCollector) -> None:
    """Writes the ranges of every convolution with quantized weights into the collector's model."""
    subject, model = collector.subject, collector.model
    for node in (
        n for n in subject.model.ordered if n.op in WEIGHTED and n.index in collector.place
    ):
        found = _ranges(subject.view, node)
        if found is None:
            continue
        place = collector.place[node.index]
        model.nodes[place].weights = len(model.weights)
        largest, holds = ([round_digits(v, 4) for v in values.tolist()] for values in found[:2])
        model.weights.append(
            data.WeightRanges(place, display_name(node.name), found[2], largest, holds)
        )


def _ranges(view: View, node: Node) -> tuple[npt.NDArray[Any], npt.NDArray[Any], str] | None:
    """Largest magnitudes [channels], ranges [channels] (or [1] of one scale), and the shape as text."""
    weights = view.weights(node)
    quantizer = weights.first_quantizer
    if quantizer is None or weights.before:
        return None
    scale = view.params(quantizer).scale
    shape = view.model.constant_shape(weights.source)
    if scale is None or not scale.size or not shape or not np.isfinite(scale).all():
        return None
    if math.prod(shape) > MOST_VALUES or scale.size > MOST_CHANNELS:
        return None
    axis = output_axis(node, len(shape))
    if (
        weights.after
        or axis is None
        or not -len(shape) <= axis < len(shape)
        or shape[axis] > MOST_CHANNELS
    ):
        return None
    largest = np.zeros(0)
    try:
        values = view.model.constant(weights.source)
    except QdqtoolError:  # its file is missing: the scales are known all the same
        values = None
    if values is not None and values.size:
        others = tuple(i for i in range(values.ndim) if i != axis % len(shape))
        largest = np.abs(values.astype(np.float32)).max(axis=others)
        if weights.q is None:  # stored integers
            largest = largest * (scale if scale.size in (1, largest.size) else float("nan"))
        if not np.isfinite(largest).all():
            largest = np.zeros(0)
    return largest, scale.astype(np.float64) * LEVELS, "x".join(map(str, shape))


# Where the time goes, the roofline, and the scale groups ------------------------------------------------------------

MOST_ROWS = 50  # of a profile that no predicted layer stands for
PARTS = {
    "int8": ("INT8 layers", "convolutions and other layers that compute in INT8"),
    "float": ("Float layers", "layers that compute in a floating-point type"),
    "conversion": ("Conversions", "Q and DQ that stay: a change of data type at run time"),
    "copy": ("Copies", "copies that Concats and Splits need: memory only"),
    "layout": ("Layout changes", "reformats that change the layout in memory and no data type"),
    "region": (
        "Unlisted regions",
        "what the build compiles as one (ForeignNode) and the simulation does not list",
    ),
    "edge": (
        "Inputs and outputs",
        "reformats of inputs and outputs, and what belongs to no predicted layer",
    ),
}


def collect_time(subject: ReportSubject) -> data.EngineTime | None:
    """The estimate as the page shows it."""
    time = subject.time
    if time is None:
        return None
    return data.EngineTime(
        time.gpu.name,
        time.gpu.clock,
        time.total_ms,
        time.low_ms,
        time.high_ms,
        time.conversions_ms,
        [as_options(note) for note in time.notes],
        decision(time),
    )


def collect_parts(subject: ReportSubject, before: ReportSubject | None) -> list[data.TimePart]:
    """Milliseconds by kind of layer, as a profile shows them: measured, estimated, and those of the model before."""
    mine, timed = _sums(subject), _measured(subject)
    other = _sums(before) if before is not None else {}
    none = (0.0, 0)
    return [
        data.TimePart(
            key,
            name,
            what,
            mine.get(key, (None,))[0],
            (timed.get(key) or mine.get(key, none))[1],
            other.get(key, none)[0] if other else None,
            timed.get(key, none)[0] if timed else None,
        )
        for key, (name, what) in PARTS.items()
        if mine.get(key, none)[0] or other.get(key, none)[0] or timed.get(key, none)[0]
    ]


def describe_parts(subject: ReportSubject, parts: list[data.TimePart]) -> str:
    """Why the parts do not add up to the headline: a profile adds time to each layer, and takes the gaps away."""
    time = subject.time
    timed = [p.measured_ms for p in parts if p.measured_ms is not None]
    text = (
        f"Measured parts: {sum(timed):.3f} ms together, with what profiling added. "
        if timed
        else ""
    )
    if time is None or not parts:
        return text.strip()
    together = sum(p.ms or 0.0 for p in parts)
    return (
        f"{text}Estimated parts are as a profile shows them, {together:.3f} ms together; without a profiler, which "
        f"adds a few us per layer, the estimate is {time.total_ms:.3f} ms."
    )


def collect_unlisted_rows(subject: ReportSubject) -> list[data.ProfileEntry]:
    """The rows of a profile that belong to no predicted layer, the slowest first."""
    rest = sorted(
        (row for layer, row in _rows(subject) if layer is None and row.ms > 0), key=lambda r: -r.ms
    )
    return [data.ProfileEntry(display_name(row.name), round(row.ms, 5)) for row in rest[:MOST_ROWS]]


def _rows(subject: ReportSubject) -> list[tuple[EngineLayer | None, ProfileRow]]:
    """The rows of a profile: those of predicted layers with these, then the others."""
    rows = subject.build.profile_rows if subject.build is not None else []
    layers = subject.prediction.layers
    found = [
        (layer, row)
        for layer, row in zip(layers, match_profile_rows(layers, rows), strict=True)
        if row is not None
    ]
    matched = {id(row) for _, row in found}
    return [*found, *((None, row) for row in rows if id(row) not in matched)]


def _measured(subject: ReportSubject) -> dict[str, tuple[float, int]]:
    """Milliseconds of a profile by kind of layer; rows of no predicted layer are reformats, regions, or the rest."""
    sums: dict[str, list[float]] = defaultdict(list)
    for layer, row in _rows(subject):
        sums[
            time_kind(layer)
            if layer is not None
            else "layout"
            if row.name.startswith("Reformatting CopyNode")
            else "region"
            if "ForeignNode" in row.name
            else "edge"
        ].append(row.ms)
    return {kind: (sum(values), len(values)) for kind, values in sums.items()}


def _sums(subject: ReportSubject) -> dict[str, tuple[float, int]]:
    time = subject.time
    if time is None or not time.layers:
        return {}
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for layer, ms in zip(subject.prediction.layers, time.layers, strict=True):
        sums[time_kind(layer)] += ms
        counts[time_kind(layer)] += ms > 0
    changes = sum(change["ms"] for layer in subject.prediction.layers for change in layer.layouts)
    if changes:
        sums["layout"], counts["layout"] = (
            changes,
            sum(len(x.layouts) for x in subject.prediction.layers),
        )
    listed = {layer.name for layer in subject.prediction.layers}
    names = {node.name for node in subject.model.nodes}
    alone = [k for k in time.kernels if k.name not in listed and k.name in names]
    if alone:
        sums["region"], counts["region"] = sum(k.ms for k in alone), len(alone)
    rest = sum(k.ms for k in time.kernels) - sum(time.layers) - changes - sums.get("region", 0.0)
    if rest > 1e-3:
        sums["edge"] = rest
        counts["edge"] = max(
            0, len(time.kernels) - sum(ms > 0 for ms in time.layers) - counts["layout"] - len(alone)
        )
    return {key: (value, counts[key]) for key, value in sums.items()}


def collect_roofline(subject: ReportSubject) -> data.GpuRoofline | None:
    """The GPU's peaks."""
    if subject.time is None:
        return None
    gpu = subject.time.gpu
    rates = {"FP32": gpu.mac_rate(Precision.FP32), "FP16": gpu.mac_rate(Precision.FP16)}
    if gpu.has_int8:
        rates["INT8"] = gpu.mac_rate(Precision.INT8)
    return data.GpuRoofline(gpu.name, gpu.clock, gpu.bandwidth * 1e9, rates)


def collect_scale_groups(
    collector: ModelCollector, before: ReportSubject | None
) -> list[data.ScaleGroupEntry]:
    """Quantized activations by scale: with the float model tied as ``insert`` ties them, else those of equal scales."""
    view = collector.subject.view
    quantizers: dict[str, list[str]] = defaultdict(list)
    for q in view.activation_qs:
        quantizers[q.input(0)].append(q.name)
    by_name = {n.name: n for n in view.quantizers}
    if before is not None and not any(is_qdq(n) for n in before.model.nodes):
        known = [t for t in quantizers if t in before.model.producers or t in before.model.inputs]
        sets = [list(g.quantized) for g in find_scale_groups(before.model, known)]
        sets += [[t] for t in quantizers if t not in set(known)]
        tied = True
    else:
        same: dict[object, list[str]] = defaultdict(list)
        for tensor, names in quantizers.items():
            same[view.params(by_name[names[0]]).key or tensor].append(tensor)
        sets, tied = list(same.values()), False
    rows = []
    for tensors in sets:
        names = [n for t in tensors for n in quantizers[t]]
        params = [view.params(by_name[n]) for n in names]
        one = params[0].scale
        equal = all(params[0].same_as(p) for p in params[1:])
        sharing = (
            "alone"
            if len(tensors) == 1
            else "equal scales"
            if not tied
            else ("tied, one scale" if equal else "tied, but scales differ")
        )
        rows.append(
            data.ScaleGroupEntry(
                float(one[0]) if one is not None and one.size == 1 and equal else None,
                [display_name(t) for t in tensors],
                collector.find_nodes(names),
                len(names),
                sharing,
                int(one.size) if one is not None else 0,
            )
        )
    return sorted(rows, key=lambda g: -len(g.tensors))
