"""``qdqtool.tune``: the fastest placement that is accurate enough."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import EncodeError

from calibration.cluster import mapping
from calibration.dataset import Dataset
from calibration.options import Preprocess
from qdqtool import prediction
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.findings.left_float import nothing_to_quantize
from qdqtool.insertion import losses, sample_runs
from qdqtool.insertion.api import prepared, said_of_half, too_large
from qdqtool.insertion.options import (
    ClusterOptions,
    ImageOptions,
    NetworkOptions,
    PlacementOptions,
    RangeOptions,
)
from qdqtool.insertion.placement import find_class_outputs, place
from qdqtool.insertion.ranges import collect_statistics
from qdqtool.insertion.rules import choose_rules
from qdqtool.insertion.scales import MethodChoice
from qdqtool.insertion.smoothing import smooth
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load_full
from qdqtool.timing import gpus
from qdqtool.timing.options import GpuOptions
from qdqtool.timing.parts import PAYS
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.tuning.configuration import FLOAT, Configuration, Planner
from qdqtool.tuning.expected import expected, fitting, leave_time
from qdqtool.tuning.measure import ClusterMapper, Job, Mapper, default_workers, local, looked_at
from qdqtool.tuning.measurements import Measurements, OutOfTime, Sets, Store, open_sets
from qdqtool.tuning.metrics import Outputs, compared, metric_for
from qdqtool.tuning.options import SearchBudget, TuneOptions, TuningGoal
from qdqtool.tuning.result import Choice, Point, SiteResult, Tuning
from qdqtool.tuning.search import Search
from qdqtool.tuning.sites import FREE, INT8
from qdqtool.types import Json
from qdqtool.util import limits
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import of_error, said

_JUDGED_POINTS = 10
_RANGING = 0.25  # part of a time limit that the pass for ranges may take
_TIMED = 4  # samples that tell how long it takes


def tune(
    model: ModelSource | Model,
    data: object,
    *,
    mapper: Mapper | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
    evaluation: object = None,
    keep: float | None = None,
    budget_ms: float | None = None,
    metric: str | Callable[[Outputs, Outputs, str], float] | None = None,
    gpu: str | None = None,
    clock: float | None = None,
    power: str | None = None,
    target: str | Target = DEFAULT_TARGET,
    method: str = "focus",
    method_for: Sequence[tuple[str, str]] = (),
    percentile: float = 99.99,
    max_images: int = 512,
    preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
    head: str = "box",
    residual: str = "auto",
    attention: str = "float",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_op: Sequence[str] = (),
    weights: str = "float",
    high_precision: str | None = None,
    smooth: float | None = None,
    cluster: object = None,
    mixed_cpus: bool = False,
    state: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    check_timeout: float | None = None,
    whole_front: bool = False,
    chosen_on: int = 32,
    judged_on: int = 64,
    swept_on: int | None = None,
    workers: int | None = None,
) -> Tuning:
    """Find the placement of Q/DQ with the least predicted time that keeps the accuracy.

    Args:
        model: Float ONNX model; it is not changed.
        data: Images for the calibration, as for :func:`qdqtool.insert`; not an iterator.
        mapper: Runs tasks elsewhere, see :mod:`qdqtool.tuning.measure`.
        progress: Whether to draw progress on stderr if that is a terminal.
        say: Called with lines about the work and the time it will take.
        evaluation: Data like that of the deployment. Choices are made on one half of it and
            judged on the other. Default: two quarters of `data` are held out for that.
        keep: Part of the float model's metric to keep, above 0 to 1. Default: 0.97 without a
            budget.
        budget_ms: Milliseconds on `gpu`. The most accurate placement within them is the result.
        metric: ``package.module:function`` or a function ``(reference, outputs, image) -> float``,
            called once for each sample with the outputs of the float and the quantized model
            (dicts of name to array) and the name of the image. Higher is better; the mean over
            the samples counts. Default: agreement mAP for YOLOv8-style outputs, a relative output
            error for other models.
        gpu: GPU to estimate times for; see ``qdqtool gpus``.
        clock: SM clock in MHz under load.
        power: Power mode of a Jetson.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        method: How the range of an activation is chosen, as for :func:`qdqtool.insert`.
        method_for: Pairs of a regular expression on tensor names and the method for these
            tensors.
        percentile: For the method ``percentile``, in percent of the absolute values.
        max_images: Maximum number of samples, spread evenly over the data.
        preprocess: How images become inputs. Default: letterbox, RGB, divided by 255.
        size: Height and width in pixels if the model leaves them open. Default: its ``imgsz``
            metadata.
        head: What stays float in a detection head, as for :func:`qdqtool.insert`.
        residual: Which inputs of a residual Add are quantized, as for :func:`qdqtool.insert`.
        attention: Type of the products of attention, as for :func:`qdqtool.insert`.
        unify: Whether tensors tied by Concat and the like share one scale.
        exclude: Regular expressions (``re.search``) on names of nodes that stay float.
        include: The same for nodes to quantize although a preset would leave them float.
        exclude_op: Operator types that stay float.
        weights: ``float`` keeps float weights with Q and DQ, ``int8`` stores int8 with DQ alone.
        high_precision: Type of the float remainder, as for :func:`qdqtool.insert`.
        smooth: Strength of SmoothQuant, as for :func:`qdqtool.insert`.
        cluster: Workers that calibrate and measure, as for :func:`qdqtool.insert`.
        mixed_cpus: Whether workers are allowed whose results may differ in the last bits.
        state: File that keeps what was measured, so that another run continues from there.
        time_limit: Seconds after which the best placement so far is the result.
        check_timeout: Seconds for one call of `metric`. Default: 600.
        whole_front: Whether to measure the front even if the all-INT8 candidate is accurate
            enough.
        chosen_on: Maximum number of images to choose on.
        judged_on: Maximum number of images to judge on.
        swept_on: Maximum number of images for the sensitivity of single sites. Default: all to
            choose on.
        workers: Threads that measure. Default: one for each core. The result is the same.

    Raises:
        ModelError: The model cannot be read or run, is quantized already, or has nothing to
            quantize.
        DataError: The data or the state cannot be used.
        QdqtoolError: An option is wrong, the target has no INT8 on the GPU or does not build for
            it, or the metric failed.
    """
    options = TuneOptions(
        TuningGoal(evaluation, keep, budget_ms, metric),
        GpuOptions(gpu, clock, power),
        RangeOptions(method, method_for, percentile, max_images),
        ImageOptions(preprocess, size),
        PlacementOptions(head, residual, attention, unify, exclude, include, exclude_op, weights),
        NetworkOptions(high_precision, smooth),
        ClusterOptions(cluster, mixed_cpus),
        SearchBudget(
            state, time_limit, check_timeout, whole_front, chosen_on, judged_on, swept_on, workers
        ),
    )
    with record_inputs() as inputs:
        tuning = _tune(model, data, target_named(target), options, mapper, progress, say)
    tuning.read = inputs
    return tuning


def _tune(
    model: ModelSource | Model,
    data: object,
    chosen: Target,
    options: TuneOptions,
    mapper: Mapper | None,
    progress: bool,
    say: Callable[[str], None] | None,
) -> Tuning:
    aim, machine, ranges, images = options.goal, options.gpu, options.ranges, options.images
    placing, remainder, where = options.placement, options.network, options.cluster
    effort = options.search
    began, cpu = time.monotonic(), time.process_time()
    if where.cluster is not None:
        mapping.check_where(where.cluster)
    limit = limits.check_seconds(effort.check_timeout, "check_timeout")
    aim.check_budget(machine.gpu)
    keep, time_limit = aim.kept_part, effort.time_limit
    chip = _gpu(machine, chosen)
    chosen = chosen if chip is None else chosen.with_capability(chip.cc)
    loaded = load_full(model)
    described = {
        "path": loaded.path,
        "sha256": loaded.sha256,
        "opset": loaded.opset,
        "nodes": len(loaded.nodes),
    }
    work, half, notes, warnings = prepared(
        model, loaded, chosen, placing.weights, remainder.high_precision
    )
    rules, placement = choose_rules(work, placing, chosen)
    measure = metric_for(work, aim.metric, limit)
    sets = open_sets(
        work,
        data,
        aim.evaluation,
        images,
        max_images=ranges.max_images,
        chosen_on=effort.chosen_on,
        judged_on=effort.judged_on,
        swept_on=effort.swept_on,
    )
    settings = _settings(
        {**vars(ranges), **vars(placing), **vars(images), **vars(remainder)},
        chosen,
        measure.identity,
    )
    identity = {
        "model": hashlib.sha256(_serialized(work)).hexdigest()[:20],
        "images": sets.fingerprint,
        "settings": settings,
    }
    store = Store(effort.state, identity)  # before anything takes long: it may be another tuning's
    if remainder.smooth is not None:
        notes.append(
            smooth(work, placement or place(work, rules), remainder.smooth, sets.calibration)[1]
        )
    planner = Planner(
        work, rules, chosen, MethodChoice.from_options(ranges), placing.unify, chip, half
    )
    with contextlib.ExitStack() as stack:
        opened = None
        if where.cluster is not None:
            opened = stack.enter_context(mapping.Cluster(where.cluster, where.mixed_cpus))
        calibration = _calibrate(
            planner,
            sets,
            progress,
            replace(where, cluster=getattr(opened, "client", None)),
            time_limit,
            store,
        )
        scores = find_class_outputs(work)
        base = planner.plan(Configuration())
        notes.extend(base.placement.notes)
        if store.ranged_on:
            notes.append(Remark.RANGES_ON(room=store.ranged_on, images=len(sets.calibration)))
        if half:
            planner.wide = _wide(planner, sets, warnings)
            notes.extend(said_of_half(work, chosen, planner.wide, remainder.high_precision is None))
        job = Job(
            _serialized(work),
            sets.measured,
            tuple(compared(work)),
            scores if set(scores) <= set(compared(work)) else (),
            measure,
        )
        count = effort.workers or (default_workers() if opened is None else opened.threads())
        if mapper is None and opened is not None:
            mapper = stack.enter_context(ClusterMapper(opened))
        elif mapper is not None:
            mapper = looked_at(mapper)
        bench = Measurements(
            job,
            sets,
            mapper or local(count),
            store,
            count,
            None if time_limit is None else began + time_limit,
            progress,
        )
        search = Search(
            planner,
            bench,
            keep,
            aim.budget_ms,
            effort.whole_front,
            say or (lambda line: None),
            time_limit or 0.0,
        )
        _run(search, say)
        point, reached = search.choose()
        shown = _thinned(search.front(), point)
        search.judge_points([point])
        bought = [] if search.stopped else search.more_of(point, shown)
        plan = planner.plan(point.configuration)
        made, quantized = planner.build(plan, placing.weights)
        if half:
            notes.extend(
                _moved_by_half(
                    work, [plan.recipe.build(work)[0], made], sets, search.moved_on, warnings
                )
            )
        made.path, made.sha256 = "", None
        result = Tuning(
            made.proto,
            quantized,
            prediction.predict(made, chosen),
            reached,
            keep,
            aim.budget_ms,
            point,
            bought,
            shown,
            [p for p in search.points() if not any(p is s for s in shown)],
            _sites(search, point),
            planner.cost(search.start),
            {
                "name": measure.name,
                "sentence": measure.sentence,
                "float": search.float_value(sets.judged_on),
            },
            _cost_words(chip),
            _images(sets, data, aim.evaluation, calibration),
            _effort(search, bench, began, cpu),
            described,
            chosen.name,
            None if chip is None else chip.name,
            [*notes, *search.notes, *_against_float(search, point)],
            [*warnings, *base.warnings, *calibration.get("warnings", ()), *_unread(sets)],
            loaded.path,
            builder=lambda configuration: (
                planner.build(planner.plan(configuration), placing.weights)[0].proto
            ),
            float_type="fp16" if half else "fp32",
            float32=dict(planner.wide),
        )
    return result


def _run(search: Search, say: Callable[[str], None] | None) -> None:
    bench = search.bench
    try:
        if bench.deadline is None:
            _require_agreement(search, bench.sets.chosen_on)
        search.prepare()
        if say is not None or bench.deadline is not None:
            what, each = expected(search)
            search.say(what)
            leave_time(search, each)
        for samples in (
            bench.sets.chosen_on,
            bench.sets.judged_on,
        ):  # of which a time limit may have left few
            _require_agreement(search, samples)
        search.measure([("everything INT8", search.start)])
    except OutOfTime:
        raise QdqtoolError(
            said(
                "{`time_limit`}: over before everything INT8 was measured once; give more time or fewer images"
            ),
            code="timeout",
            parameter="time_limit",
        ) from None
    search.run()
    search.bench.deadline = None  # what is left is needed to judge what was found


def _require_agreement(search: Search, samples: Sequence[int]) -> None:
    """Looks whether there is anything to agree with at all."""
    own = search.float_value(samples)
    if search.keep is not None and own <= 0.0:
        raise QdqtoolError(
            said(
                "{`metric`} {name}: gives {own:.4g} for the float model itself; {`keep`} is a part of "
                "that, which has to be above 0 (higher is better)",
                name=search.bench.job.metric.name,
                own=own,
            ),
            code="metric-not-positive",
            parameter="metric",
        )


def _serialized(model: Model) -> bytes:
    try:
        return bytes(model.proto.SerializeToString())
    except (ValueError, EncodeError):
        raise ModelError(
            "over 2 GB with its weights, which cannot be tuned",
            model.path or "model",
            code="file-too-large",
        ) from None


def _unread(sets: Sets) -> list[Note]:
    skipped = sorted(set(sets.measured.skipped))
    if not skipped:
        return []
    name, reason = skipped[0]
    return [Remark.UNREAD_IMAGES(count=len(skipped), file=name, reason=reason)]


def _gpu(machine: GpuOptions, target: Target) -> gpus.Gpu | None:
    name = machine.gpu
    if name is None:
        return None
    found = gpus.chosen(name, machine.clock, machine.power)
    found = gpus.used_by(target.with_capability(found.cc, found.name), found)
    if not found.has_int8:
        raise QdqtoolError(
            said(
                "{`gpu`} {name}: {gpu} has no INT8 on {target}, so that every placement is slower "
                "than the float model; deploy that, or name another GPU",
                name=name,
                gpu=found.name,
                target=target.display_name,
            ),
            code="no-int8",
            parameter="gpu",
        )
    return found


def _settings(given: dict[str, Any], target: Target, metric: str) -> str:
    """What measurements depend on beside model and images."""
    names = (
        "method",
        "method_for",
        "percentile",
        "head",
        "residual",
        "attention",
        "unify",
        "exclude",
        "include",
        "exclude_op",
        "size",
        "preprocess",
        "smooth",
    )
    parts = [target.name, metric, *(f"{n}={given[n]!r}" for n in names)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _calibrate(
    planner: Planner,
    sets: Sets,
    progress: bool,
    workers: ClusterOptions,
    time_limit: float | None,
    store: Store,
) -> Json:
    """One pass for every method, and for every tensor that any placement could quantize.

    Where time is limited it takes no more samples than there is time for, or as many as what is in the store had.
    """
    base = planner.placement(Configuration())
    if not base.inputs:
        raise nothing_to_quantize(base.skipped, planner.model.path or "model")
    planner.methods.check([t for g in planner.groups(base) for t in g.tensors])
    groups, data = planner.possible_groups(), sets.calibration
    room = store.ranged_on if time_limit is not None and store.resumed else 0
    if (
        time_limit is not None
        and not store.resumed
        and workers.cluster is None
        and len(data) > 2 * _TIMED
    ):
        began, few = time.monotonic(), _some(sets, _TIMED)
        collect_statistics(planner.model, few, groups, max_images=len(few), cluster=workers)
        room = fitting(_RANGING * time_limit, (time.monotonic() - began) / len(few))
    store.ranged_on = room if 0 < room < len(data) else 0
    if store.ranged_on:
        data = _some(sets, room)
    statistics, report = collect_statistics(
        planner.model, data, groups, max_images=len(data), cluster=workers, progress=progress
    )
    planner.statistics = statistics.tensors
    return report


def _some(sets: Sets, samples: int) -> Dataset:
    """So many of the samples that ranges are made from, spread over all."""
    data = sets.calibration
    return Dataset(data.source, data.inputs, samples * data.batch)


def _wide(planner: Planner, sets: Sets, warnings: list[Note]) -> dict[str, float]:
    """Tensors that near the largest value of FP16, with everything INT8."""
    made, quantized = planner.plan(Configuration()).recipe.build(planner.model)
    seen = {t: s.absmax for t, s in planner.statistics.items()}
    return too_large(made, quantized, seen, _some(sets, sample_runs.FP16_SAMPLES), warnings)


def _moved_by_half(
    work: Model, made: Sequence[Model], sets: Sets, samples: int, warnings: list[Note]
) -> list[Note]:
    """How far FP16 moves the outputs of what was measured in FP32: of that, and of the same in FP16."""
    try:
        found = losses.compare_outputs(work, made, _some(sets, samples), samples=samples)
    except ModelError as error:
        warnings.append(Remark.HALF_NOT_MEASURED(error=of_error(error)))
        return []
    before, after = (f.error for f in found) if found else (math.nan, math.nan)
    return [Remark.MEASURED_IN_FP32(before=before, after=after)]


def _thinned(front: list[Point], chosen: Point) -> list[Point]:
    """At most so many points of the front, evenly spread, its ends and the chosen one among them."""
    if not any(p is chosen for p in front):
        front = sorted([*front, chosen], key=lambda p: p.cost.value)
    if len(front) <= _JUDGED_POINTS:
        return front
    step = (len(front) - 1) / (_JUDGED_POINTS - 1)
    kept = {round(i * step) for i in range(_JUDGED_POINTS)} | {
        next(i for i, p in enumerate(front) if p is chosen)
    }
    return [front[i] for i in sorted(kept)]


def _sites(search: Search, chosen: Point) -> list[SiteResult]:
    """Every site, in the order of the network."""
    taken = {s.name for s in search.parts(chosen.configuration)}
    by_site: dict[tuple[str, ...], list[Choice]] = defaultdict(
        list
    )  # by the nodes: one node and a group share a name
    lost: dict[tuple[str, ...], float] = {}
    looked_at = [(j.candidate, j.cost, j.why_not) for j in search.judged]
    looked_at += [(c, search.planner.cost(search.with_choice(c)), "") for c in search.scales]
    for candidate, cost, why in looked_at:
        key = candidate.site.kind, *candidate.site.nodes
        before, error = (None if why else search.errors_with(candidate)) or (None, None)
        if (
            before is not None
            and error is not None
            and candidate.choice == FLOAT
            and not by_site[key]
        ):
            lost[key] = before - error
        by_site[key].append(Choice(candidate.choice, cost, error, why))
    methods = dict(chosen.configuration.methods)
    found = []
    for site in search.sites:
        key = site.kind, *site.nodes
        choices, loss = by_site[key], lost.get(key)
        first = choices[0] if choices else None
        choice, why = (
            site.default,
            "accurate enough in INT8" if site.default == INT8 else "the head preset",
        )
        if set(site.nodes) <= search.start.floats:
            choice, why = FLOAT, FREE
        elif site.name in taken or set(site.nodes) <= chosen.configuration.floats:
            choice, why = FLOAT, "most accuracy for its time"
        elif site.default == FLOAT and set(site.nodes) <= chosen.configuration.quantized:
            choice, why = INT8, "accurate enough in INT8"
        elif changed := next((methods[t] for t in site.tensors if t in methods), None):
            choice, why = (
                changed,
                "a smaller output error on every kind of image that it was chosen on",
            )
        elif first is not None and first.why:
            why = first.why
        found.append(
            SiteResult(site.name, site.kind, site.nodes, site.tensors, choice, why, loss, choices)
        )
    return found


def _against_float(search: Search, point: Point) -> list[Note]:
    """What to say where the float model needs no more time than what was asked for, or hardly more than what was found."""
    alone, own = search.planner.cost(search.everything_float).ms, point.cost.ms
    if alone is None or own is None:
        return []
    if search.budget is not None and alone <= search.budget:
        return [(Remark.FLOAT_FITS if point.cost.int8 else Remark.FLOAT_FITS_AND_WRITTEN)(ms=alone)]
    if not point.cost.int8:
        return [Remark.FLOAT_WRITTEN(ms=alone)]
    if alone < PAYS * own:
        return [Remark.HARDLY_PAYS(pays=PAYS, ms=alone, times=alone / own)]
    return []


def _cost_words(gpu: gpus.Gpu | None) -> Json:
    if gpu is None:
        return {
            "unit": "operations",
            "sentence": said("float convolutions and conversions, counted together (no {`gpu`})"),
        }
    return {"unit": "ms", "sentence": f"predicted milliseconds on {gpu.name}"}


def _images(sets: Sets, data: object, evaluation: object, calibration: Json) -> Json:
    paths = [os.fspath(d) if isinstance(d, str | os.PathLike) else "" for d in (data, evaluation)]
    return {
        "calibration": calibration["images"],
        "chosen_on": len(sets.chosen_on),
        "swept_on": len(sets.swept_on),
        "judged_on": len(sets.judged_on),
        "calibration_data": paths[0],
        "evaluation_data": paths[1],
        "fingerprint": sets.fingerprint,
    }


def _effort(search: Search, bench: Measurements, began: float, cpu: float) -> Json:
    judged = search.judged
    return {
        "candidates": len(judged) + len(search.scales),
        "never_measured": sum(bool(j.why_not) for j in judged),
        "runs": bench.runs,
        "combinations": len(search.pool),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "resumed": bench.store.resumed,
        "stopped": search.stopped,
    }
