"""``qdqtool.tune``: find the fastest placement of Q/DQ pairs that is accurate enough."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from google.protobuf.message import EncodeError

from calibration.arrays import CalibrationSource
from calibration.cluster.connection import check_cluster, connect
from calibration.dataset import Dataset
from calibration.options import DaskCluster, ImageFunction, Preprocess
from calibration.presets import name_preprocess, note_preprocess, note_unused_preprocess
from qdqtool import prediction
from qdqtool.accuracy.metrics import (
    MetricFunction,
    choose_metric,
    find_compared_tensors,
    note_unmeasured,
    note_wide_interval,
)
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion import output_errors
from qdqtool.insertion.fp16 import describe_fp16_conversion, find_wide_tensors
from qdqtool.insertion.network import prepare_network
from qdqtool.insertion.number_formats import FORMATS, FP8, find_number_format
from qdqtool.insertion.options import (
    AttentionChoice,
    CacheOptions,
    ClusterOptions,
    HeadChoice,
    HighPrecision,
    ImageOptions,
    NetworkOptions,
    PlacementOptions,
    RangeMethod,
    RangeOptions,
    ResidualChoice,
    WeightForm,
)
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.insertion.preprocessing import record_preprocess, resolve_images
from qdqtool.insertion.ranges import collect_statistics
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.insertion.rules import choose_placement, restrict_to_fp8
from qdqtool.insertion.sample_runs import FP16_SAMPLES
from qdqtool.insertion.scales import MethodChoice
from qdqtool.insertion.smoothing import smooth_activations
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import store_image_size
from qdqtool.ir.metadata import record_tuned_head
from qdqtool.ir.modelfile import ModelSource, load_full
from qdqtool.ir.precision import Precision
from qdqtool.patterns.network_kind import warn_preprocess
from qdqtool.reasons.placement import create_nothing_to_quantize_error
from qdqtool.timing import gpus
from qdqtool.timing.options import GpuOptions
from qdqtool.trt.gpu_support import require_gpu_support
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.tuning import summary
from qdqtool.tuning.evaluator import CandidateEvaluator, OutOfTime
from qdqtool.tuning.image_sets import open_sets
from qdqtool.tuning.measure import (
    ClusterMapper,
    TaskMapper,
    TuningJob,
    count_default_workers,
    map_on_threads,
)
from qdqtool.tuning.options import SearchBudget, TuneOptions, TuningGoal
from qdqtool.tuning.planner import Configuration, Planner
from qdqtool.tuning.result import PlacementResult, Tuning
from qdqtool.tuning.search import PlacementSearch
from qdqtool.tuning.selection import ResultSelection
from qdqtool.tuning.store import MeasurementStore
from qdqtool.tuning.time_plan import (
    JUDGING_END,
    SEARCH_END,
    TIMED_SAMPLES,
    count_calibration_samples,
    describe_work,
    estimate_shortest_limit,
    fit_samples_to_time,
    measure_run_seconds,
)
from qdqtool.util.checks import check_choice
from qdqtool.util.files import record_inputs
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from pathlib import Path

    from calibration.statistics import TensorStatistics


def tune(
    model: ModelSource | Model,
    data: CalibrationSource,
    *,
    mapper: TaskMapper | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
    evaluation: CalibrationSource | None = None,
    keep: float | None = None,
    budget_ms: float | None = None,
    metric: str | MetricFunction | None = None,
    gpu: str | None = None,
    clock: float | None = None,
    power: str | None = None,
    target: str | Target = DEFAULT_TARGET,
    precision: str = "int8",
    method: RangeMethod = "focus",
    method_for: Sequence[tuple[str, RangeMethod]] = (),
    percentile: float = 99.99,
    max_images: int = 512,
    preprocess: Preprocess | str | ImageFunction | None = None,
    size: tuple[int, int] | None = None,
    head: HeadChoice = "box",
    residual: ResidualChoice = "auto",
    attention: AttentionChoice = "auto",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_op: Sequence[str] = (),
    weights: WeightForm = "float",
    high_precision: HighPrecision | None = None,
    smooth: float | None = None,
    cluster: DaskCluster | None = None,
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
    """Find the placement of Q/DQ pairs with the least predicted time that keeps the accuracy.

    Args:
        model: Float ONNX model, which is not changed.
        data: Images for the calibration, as for :func:`qdqtool.insert`; not an iterator.
        mapper: Function that runs measurement tasks and yields their results, for example on
            other machines; see :mod:`qdqtool.tuning.measure`. Default: threads, or `cluster`.
        progress: Whether to draw a progress bar on stderr if stderr is a terminal.
        say: Function that receives each line of text about the work and its duration.
        evaluation: Images like those of the deployment. The search compares placements on about
            half of the images, and evaluates the result on the rest. Default: up to half of `data`,
            which then does not set the ranges of the search.
        keep: Fraction of the float model's metric to keep, above 0 and at most 1. Default: 0.97
            without a budget.
        budget_ms: Maximum predicted milliseconds on `gpu`, instead of `keep`. The result is the
            most accurate placement within this time.
        metric: ``package.module:function`` or a function ``(reference, outputs, image) -> float``,
            called once for each sample with the outputs of the float and the quantized model
            (dicts of name to array) and the name of the image. Higher is better; the mean over
            the samples counts. Default: agreement mAP for YOLOv8-style outputs, one minus the
            relative output error for other models.
        gpu: GPU to estimate times for; see ``qdqtool gpus``.
        clock: SM clock in MHz under load.
        power: Power mode of a Jetson, such as ``15W`` or ``MAXN``; see ``qdqtool gpus NAME``.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        precision: ``int8`` or ``fp8``, as for :func:`qdqtool.insert`.
        method: Calibration method that chooses the range of an activation, as for
            :func:`qdqtool.insert`.
        method_for: Pairs of a regular expression on tensor names and the method for these
            tensors.
        percentile: Percentage of the magnitudes that the method ``percentile`` does not clip.
        max_images: Maximum number of images or rows, spread evenly over the data.
        preprocess: Conversion of images to inputs: a name of :data:`calibration.PRESETS` (``yolo``,
            ``imagenet``, ...), a :class:`calibration.Preprocess`, or a function from an RGB image
            of Pillow to the input. Default: the preprocessing in the model's metadata, else
            ``yolo`` (letterbox, RGB, divided by 255).
        size: Height and width in pixels for a model with dynamic image size. Default: the
            ``imgsz`` in the model's metadata.
        head: Outputs of a detection head that remain float, as for :func:`qdqtool.insert`.
        residual: Which inputs of a residual Add are quantized, as for :func:`qdqtool.insert`.
        attention: Type of the products of attention, as for :func:`qdqtool.insert`.
        unify: Whether tensors share one scale if Concat, Split, Slice, MaxPool or Resize connect
            them.
        exclude: Regular expressions (``re.search``) on names of nodes that remain float.
        include: Regular expressions on names of nodes to quantize although a preset leaves them
            float.
        exclude_op: Operator types that remain float.
        weights: ``float`` keeps float weights with Q and DQ; ``int8`` and ``fp8`` store quantized
            weights with DQ alone.
        high_precision: Type of the layers that are not quantized, as for :func:`qdqtool.insert`.
        smooth: Strength of SmoothQuant, as for :func:`qdqtool.insert`.
        cluster: Workers that calibrate and measure, as for :func:`qdqtool.insert`.
        mixed_cpus: Whether to allow workers whose results may differ in the last bits.
        state: File that stores the measurements. A later run with this file continues from there.
        time_limit: Time limit in seconds. When it ends, the best placement so far is the result.
        check_timeout: Time limit of one call of `metric` in seconds. Default: 600.
        whole_front: Whether to measure the Pareto front (placements that no other placement beats
            in both time and accuracy) even if the model with every layer in INT8 is accurate
            enough.
        chosen_on: Maximum number of samples on which the search compares placements. A sample is
            an image, or a batch of images if the model has a fixed batch size.
        judged_on: Maximum number of held-out samples on which the result is evaluated.
        swept_on: Maximum number of samples for the sensitivity of single sites. Default: 4.
        workers: Number of threads that measure; the result does not depend on this number.
            Default: one for each core, up to 8.

    Returns:
        The Q/DQ model and the results of the search. If no placement reaches the goal,
        :attr:`Tuning.reached` is False.

    Raises:
        ModelError: The model cannot be read or run, is quantized already, or has nothing to
            quantize.
        DataError: The data or the state cannot be used.
        QdqtoolError: An option is wrong, the target has no INT8 on the GPU or does not support
            the GPU, no layer would be faster in INT8, the time limit is too short, or the metric
            or a worker failed.
    """
    options = TuneOptions(
        TuningGoal(evaluation, keep, budget_ms, metric),
        GpuOptions(gpu, clock, power),
        RangeOptions(method, method_for, percentile, max_images),
        ImageOptions(preprocess, size),
        PlacementOptions(
            head, residual, attention, unify, exclude, include, exclude_op, weights, precision
        ),
        NetworkOptions(high_precision, smooth),
        ClusterOptions(cluster, mixed_cpus),
        SearchBudget(
            state, time_limit, check_timeout, whole_front, chosen_on, judged_on, swept_on, workers
        ),
    )
    with record_inputs() as inputs, contextlib.ExitStack() as stack:
        run = _TuningRun(model, data, target_named(target), options)
        if say is not None:
            for warning in run.small_sets:
                say(f"warning: {warning}")
        opened = stack.enter_context(connect(cluster, mixed_cpus)) if cluster is not None else None
        run.collect_ranges(progress, None if opened is None else opened.client)
        if mapper is None and opened is not None:
            mapper = stack.enter_context(ClusterMapper(opened))
        workers = workers or (
            count_default_workers() if opened is None else max(1, opened.threads())
        )
        search = run.make_search(mapper or map_on_threads(workers), workers, progress, say)
        _run_search(search, run, estimate=say is not None)
        tuning = run.make_result(search, progress)
    tuning.read = inputs
    return tuning


class _TuningRun:
    """State of one call of `tune`: network, images and ranges."""

    def __init__(
        self,
        model: ModelSource | Model,
        data: CalibrationSource,
        target: Target,
        options: TuneOptions,
    ) -> None:
        self.started, self.cpu_started = time.monotonic(), time.process_time()
        self.data = data
        self.options = options
        if options.cluster.cluster is not None:
            check_cluster(options.cluster.cluster)
        timeout = options.goal.choose_metric_timeout(options.search.check_timeout)
        options.goal.check_budget(options.gpu.gpu)
        check_choice("precision", options.placement.precision, FORMATS)
        self.format = find_number_format(options.placement.precision)
        if self.format == FP8:
            target = restrict_to_fp8(target)
        self.gpu = _choose_gpu(options.gpu, target)
        self.target = target if self.gpu is None else target.with_capability(self.gpu.cc)
        self.source = load_full(model)
        self.info: Json = {
            "path": self.source.path,
            "sha256": self.source.sha256,
            "opset": self.source.opset,
            "nodes": len(self.source.nodes),
        }
        placing, network = options.placement, options.network
        self.prepared = prepared = prepare_network(
            model, self.target, placing.weights, network.high_precision, self.source, self.format
        )
        self.model, self.notes, self.warnings = prepared.model, prepared.notes, prepared.warnings
        store_image_size(self.model, options.images.size)
        rules, placement = choose_placement(self.model, placing, self.target)
        self.metric = choose_metric(self.model, options.goal.metric, timeout)
        self.notes += note_unmeasured(self.model, [self.metric])
        self.images, self.origin = resolve_images(self.model, options.images)
        self.sets = open_sets(
            self.model,
            data,
            options.goal.evaluation,
            self.images,
            max_images=options.ranges.max_images,
            chosen_on=options.search.chosen_on,
            judged_on=options.search.judged_on,
            swept_on=options.search.swept_on,
        )
        # Float model on both sets, and INT8 model on the selection samples.
        self.first_runs = 2 * len(self.sets.chosen_on) + len(self.sets.judged_on)
        # The store is opened before any long work, because its file may belong to another tuning.
        self.store = MeasurementStore(options.search.state, self._compute_hashes())
        if network.smooth is not None:
            calibration = self.sets.calibration
            self.notes.append(
                smooth_activations(self.model, placement, network.smooth, calibration)[1]
            )
        self.planner = Planner(
            self.model,
            rules,
            self.target,
            MethodChoice.from_options(options.ranges, self.format),
            placing.unify,
            self.gpu,
            prepared.fp16,
        )
        self.small_sets = summary.warn_small_sets(
            self.sets, options.search, options.goal.evaluation
        )
        self.cluster = options.cluster
        self.ranges_report: Json = {}
        self.written_metric: float | None = None  # with ranges from all images
        self.searched_images = 0  # number of images that gave the ranges of the search
        self.calibration_seconds = 0.0  # seconds for collecting ranges so far
        self.seconds_per_sample = 0.0  # seconds for collecting ranges from one sample

    def _compute_hashes(self) -> Json:
        options = self.options
        settings = [
            self.target.name,
            self.metric.identity,
            name_preprocess(self.images.preprocess),
            options.images.size,
            options.network.smooth,
            replace(options.ranges, max_images=0),
            replace(options.placement, weights="float"),
        ]
        return {
            "model": _hash_bytes(_serialize_model(self.model)),
            "images": self.sets.fingerprint,
            "settings": _hash_bytes(repr(settings).encode()),
        }

    def collect_ranges(self, progress: bool, client: object) -> None:
        """Collect statistics of every tensor that a placement may quantize, for all methods.

        Args:
            progress: Whether to draw a progress bar.
            client: Client of a Dask cluster; None to use this process.

        Raises:
            ModelError: The network has no tensors to quantize.
        """
        planner = self.planner
        placement = planner.placement(Configuration())
        if not placement.inputs:
            raise create_nothing_to_quantize_error(placement.skipped, planner.model.path or "model")
        groups = planner.groups(placement)
        planner.methods.check([t for group in groups for t in group.tensors])
        self.cluster = replace(self.options.cluster, cluster=client)
        data = self._choose_calibration_samples()
        planner.statistics, self.ranges_report = self._collect_statistics(
            data, progress, self.store.ranges_cache
        )
        self.searched_images = self.ranges_report["images"]
        folders = (*self.sets.complete.folder_notes, *self.sets.measured.folder_notes)
        for note in dict.fromkeys(folders):  # both may be one set
            (self.warnings if note.values["evaluation"] else self.notes).append(note)
        self._record_preprocess()
        self.notes += planner.plan(Configuration()).placement.notes
        if planner.fp16:
            planner.fp32_tensors = self._find_wide_tensors(planner)
            by_default = self.options.network.high_precision is None
            self.notes.extend(
                describe_fp16_conversion(self.model, self.target, planner.fp32_tensors, by_default)
            )
        conditions = repr((self.gpu, planner.fp16, sorted(planner.fp32_tensors)))
        planner.costs_by_recipe = self.store.select_costs(_hash_bytes(conditions.encode()))

    def _list_range_warnings(self) -> list[Note]:
        """Return the warnings of the calibration, without that on the folders of its samples.

        The samples are a part of the images, whose folders have been reported.
        """
        warnings = map(Note.from_text, self.ranges_report.get("warnings", ()))
        return [warning for warning in warnings if warning.code != "subfolders-read"]

    def _choose_calibration_samples(self) -> Dataset:
        """Return the samples for the ranges of the search.

        With a time limit, some samples are left out if all of them would take too long. If the
        store has measurements of an earlier run, the number of samples is that of the earlier run,
        because the measurements depend on the ranges.
        """
        data, limit, store = self.sets.calibration, self.options.search.time_limit, self.store
        count, reason = len(data), "more would exceed the time limit"
        if limit is not None and store.resumed:
            count = store.calibrated_on or count
            reason = "the saved measurements are for these ranges"
        elif limit is not None and count > TIMED_SAMPLES:
            self._collect_statistics(_take_samples(data, TIMED_SAMPLES), progress=False)
            spent = time.monotonic() - self.started
            count = count_calibration_samples(limit, spent, self.seconds_per_sample)
        store.calibrated_on = min(count, len(data))
        if count >= len(data):
            return data
        text = f"ranges of the search from {count} of {len(data)} images: {reason}"
        self.notes.append(Note(text, code="searched-on", room=count, images=len(data)))
        return _take_samples(data, count)

    def _record_preprocess(self) -> None:
        used = self.ranges_report["preprocess"]
        if used is None:
            if not self.sets.measured.source.is_images:
                self.notes.extend(note_unused_preprocess(self.origin, self.data))
            return
        self.notes.append(note_preprocess(used))
        self.warnings.extend(warn_preprocess(self.model, used))
        record_preprocess(self.model.proto, used)

    def _collect_statistics(
        self, data: Dataset, progress: bool, cache: Path | None = None
    ) -> tuple[Mapping[str, TensorStatistics], Json]:
        """Return the statistics of the tensors on samples, and a report.

        Args:
            data: The samples.
            progress: Whether to draw a progress bar.
            cache: File of the statistics, which is read if it belongs to the same samples, and
                otherwise replaced.
        """
        started = time.monotonic()
        statistics, report = collect_statistics(
            self.planner.model,
            data,
            self.planner.possible_groups(),
            max_images=len(data),
            cache=CacheOptions(cache, overwrite_cache=cache is not None),
            cluster=self.cluster,
            progress=progress,
        )
        seconds = time.monotonic() - started
        self.calibration_seconds += seconds
        self.seconds_per_sample = seconds / len(data)
        if cache is not None:
            # If the statistics come from the cache, the time of a run is a better estimate.
            self.seconds_per_sample = max(self.seconds_per_sample, self.store.seconds_per_run)
        if report["preprocess"] is not None:
            report["preprocess"]["origin"] = self.origin
        return statistics.tensors, report

    def _find_wide_tensors(self, planner: Planner) -> dict[str, float]:
        """Return the tensors that may exceed the range of FP16, with their largest magnitudes.

        Only tensors of the model with every layer in INT8 are considered.
        """
        recipe = planner.plan(Configuration()).recipe
        model, quantized = recipe.build(planner.model)
        largest = {t: s.absmax for t, s in planner.statistics.items()}
        return find_wide_tensors(
            model,
            quantized,
            largest,
            self._take_fp16_samples(),
            self.warnings,
            number_format=self.format,
        )

    def _take_fp16_samples(self) -> Dataset:
        return _take_samples(self.sets.calibration, FP16_SAMPLES)

    def make_search(
        self,
        mapper: TaskMapper,
        workers: int,
        progress: bool,
        say: Callable[[str], None] | None,
    ) -> PlacementSearch:
        compared = tuple(find_compared_tensors(self.model))
        scores = find_class_outputs(self.model)
        job = TuningJob(
            _serialize_model(self.model),
            self.sets.measured,
            compared,
            scores if set(scores) <= set(compared) else (),
            self.metric,
        )
        evaluator = CandidateEvaluator(
            job, self.sets, mapper, self.store, workers, self.compute_deadline(1.0), progress
        )
        goal = self.options.goal
        return PlacementSearch(
            self.planner,
            evaluator,
            goal.required_part,
            goal.budget_ms,
            self.options.search.whole_front,
            say or (lambda line: None),
        )

    def compute_deadline(self, fraction: float) -> float | None:
        """Return the ``time.monotonic()`` at which a fraction of the time limit has passed.

        None without a time limit.
        """
        limit = self.options.search.time_limit
        return None if limit is None else self.started + fraction * limit

    def create_timeout_error(self, search: PlacementSearch, seconds_per_run: float) -> QdqtoolError:
        """Return the error for a time limit that ends before the first result.

        Args:
            search: The search, which has no result.
            seconds_per_run: Seconds of one run on one sample; 0 if unknown.
        """
        self.store.save(costs_alone=True)
        predictions, repetition = search.predictions, ""
        other = time.monotonic() - self.started - self.calibration_seconds
        if self.store.can_continue:
            other -= predictions.seconds  # not repeated
            repetition = f". The same command then continues from {self.store.path}"
        seconds = estimate_shortest_limit(
            other + predictions.remaining_seconds,
            (self.seconds_per_sample, len(self.sets.calibration)),
            (seconds_per_run or self.seconds_per_sample, self.first_runs),
        )
        return QdqtoolError(
            "`time_limit` ended before the first candidate was measured, so no model was written; "
            f"give about {seconds} s or more{repetition}",
            code="timeout",
            parameter="time_limit",
        )

    def make_result(self, search: PlacementSearch, progress: bool) -> Tuning:
        """Choose the best placement, and return its model and its results on held-out images."""
        selection = ResultSelection(search, self.compute_deadline(JUDGING_END))
        placement, reached = selection.choose_placement()
        front = summary.thin_front(selection.find_front(), placement)
        selection.judge_placements([placement])
        bought = selection.judge_and_measure_benefits(placement, front)
        planner = self._choose_final_planner(selection, placement, reached, progress)
        model, quantized = self._build(planner, placement.configuration)
        is_unchanged = not quantized and not planner.fp16
        if is_unchanged:
            model = self.prepared.load_float_model().copy()
        if planner.fp16:
            self._note_fp16_error(planner, placement, model)
        model.path, model.sha256 = "", None
        predicted = prediction.predict(model, self.target)
        return Tuning(
            model=model.proto,
            quantized=quantized,
            prediction=predicted,
            times=planner.estimate_times(model, predicted),
            reached=reached,
            keep=search.keep,
            budget_ms=search.budget,
            chosen=placement,
            bought=bought,
            front=front,
            others=summary.list_other_placements(search, front),
            sites=summary.build_site_results(search, placement, reached),
            base=planner.cost(search.start),
            metric=summary.describe_metric(search),
            cost=summary.describe_cost(self.gpu),
            images=self._describe_images(search, placement),
            effort=summary.describe_effort(
                search, time.monotonic() - self.started, time.process_time() - self.cpu_started
            ),
            info=self.info,
            target=self.target.name,
            gpu=None if self.gpu is None else self.gpu.name,
            unchanged=is_unchanged,
            cheapest_plausible=selection.find_cheapest_plausible(placement),
            cheaper_alternative=selection.find_cheaper_alternative(placement),
            notes=[
                *self.notes,
                *search.notes,
                *summary.compare_with_float_model(search, placement),
                *note_wide_interval(self.metric, len(self.sets.judged_on)),
            ],
            warnings=[
                *self.small_sets,
                *self.warnings,
                *planner.plan(Configuration()).warnings,
                *self._list_range_warnings(),
                *summary.warn_unread_images(self.sets),
            ],
            source=self.source.path,
            written_metric=self.written_metric,
            builder=lambda configuration: self._build(planner, configuration)[0].proto,
            float_type="fp16" if planner.fp16 else "fp32",
            precision=self.format.name,
            float32=dict(planner.fp32_tensors),
        )

    def _build(
        self, planner: Planner, configuration: Configuration
    ) -> tuple[Model, list[QuantizedTensor]]:
        plan = planner.plan(configuration)
        model, quantized = planner.build(plan, self.options.placement.weights)
        record_tuned_head(model.proto, configuration.quantized)
        return model, quantized

    def _describe_images(self, search: PlacementSearch, placement: PlacementResult) -> Json:
        report, recipe = self.ranges_report, search.recipe(placement.configuration)
        images = summary.describe_images(
            self.sets,
            self.data,
            self.options.goal.evaluation,
            calibrated=report["images"],
            searched=self.searched_images,
        )
        images["judged_detections"] = search.evaluator.count_references(recipe, self.sets.judged_on)
        images["preprocess"] = report["preprocess"]
        return images

    def _choose_final_planner(
        self, selection: ResultSelection, placement: PlacementResult, reached: bool, progress: bool
    ) -> Planner:
        """Return a planner with ranges from all images, or the search's planner.

        The ranges of the search do not use the images on which placements are compared and
        evaluated. The search's planner is returned if nothing is quantized, if there are no more
        images, if no time is left to collect ranges again, or if the placement reaches the goal
        only with the ranges of the search.
        """
        images = len(self.sets.complete)
        if images <= self.store.calibrated_on or not placement.cost.int8:
            return self.planner
        if not self._has_time_for_ranges(images):
            count = self.searched_images
            text = f"ranges from {count} of {images} images: more would exceed the time limit"
            self.notes.append(Note(text, code="ranges-on", room=count, images=images))
            return self.planner
        statistics, report = self._collect_statistics(self.sets.complete, progress)
        planner = self.planner.with_statistics(statistics)
        if planner.fp16:
            planner.fp32_tensors = self._find_wide_tensors(planner)
        recipe = planner.plan(placement.configuration).recipe
        metric = selection.judge_recipe(recipe)
        if reached and not selection.is_goal_reached_with(metric):
            text = (
                f"ranges from all {images} images were not used, because the metric on the "
                f"held-out images is then {metric:.3f}, which misses the goal. The held-out images "
                "thus decided on the ranges, so their metric may be too high for other images"
            )
            self.notes.append(Note(text, code="ranges-from-all-worse", metric=metric))
            return self.planner
        text = (
            f"the written model has ranges from all {images} images, including the held-out "
            f"images; the metric on the held-out images is then {metric:.3f}"
        )
        self.notes.append(Note(text, code="ranges-from-all", images=images, metric=metric))
        self.ranges_report, self.written_metric = report, metric
        return planner

    def _has_time_for_ranges(self, images: int) -> bool:
        """Return whether ranges can be collected from images, and evaluated, in the time left.

        If the estimate may come from an earlier run, which may have been slower, and exceeds the
        time left, two samples are timed.
        """
        end = self.compute_deadline(1.0)
        if end is None:
            return True
        # Evaluating the placement with the new ranges takes at most as long as collecting them.
        has_time = time.monotonic() + 2 * images * self.seconds_per_sample <= end
        seconds = TIMED_SAMPLES * self.seconds_per_sample
        if not has_time and self.store.resumed and time.monotonic() + seconds <= end:
            samples = _take_samples(self.sets.calibration, TIMED_SAMPLES)
            self._collect_statistics(samples, progress=False)
            has_time = time.monotonic() + 2 * images * self.seconds_per_sample <= end
        return has_time

    def _note_fp16_error(self, planner: Planner, placement: PlacementResult, model: Model) -> None:
        """Add a note on the output errors with FP32 and with FP16, or a warning if a run fails."""
        fp32_model = planner.plan(placement.configuration).recipe.build(self.model)[0]
        data = self._take_fp16_samples()
        try:
            compared = output_errors.find_compared_outputs(self.model, fp32_model)
            errors = output_errors.measure_sample_errors(
                self.model, [fp32_model, model], data, compared, samples=FP16_SAMPLES
            ).values
        except ModelError as error:
            text = f"the output error of the FP16 model was not measured: {error}"
            self.warnings.append(Note(text, code="half-not-measured"))
            return
        before, after = errors.mean(axis=0).tolist() if len(errors) else (math.nan, math.nan)
        text = (
            "accuracy was measured with the unquantized layers in FP32. The output error, relative "
            f"to the standard deviation of the float model's outputs, is {before:.2%} with these "
            f"layers in FP32 and {after:.2%} in FP16 as written"
        )
        self.notes.append(Note(text, code="measured-in-fp32", before=before, after=after))


def _take_samples(data: Dataset, count: int) -> Dataset:
    return Dataset(data.source, data.inputs, count * data.batch)


def _run_search(search: PlacementSearch, run: _TuningRun, estimate: bool) -> None:
    evaluator, time_limit = search.evaluator, run.options.search.time_limit
    sets, store = evaluator.sets, evaluator.store
    seconds_per_run = 0.0
    try:
        _prepare_search(search)
        if estimate or time_limit is not None:
            seconds_per_run = measure_run_seconds(search)
            if not store.placements:  # the earlier run ended before its first result
                seconds_per_run = seconds_per_run or store.seconds_per_run
            search.report(describe_work(search, seconds_per_run, time_limit, run.started))
            if time_limit is not None:
                fit_samples_to_time(search, time_limit, seconds_per_run)
        store.record_samples(sets.chosen_on, sets.judged_on, seconds_per_run)
        _require_positive_metric(search, sets.chosen_on)
        _require_positive_metric(search, sets.judged_on)
        search.measure([(search.start_name, search.start)])
    except OutOfTime:
        if not search.end_early():
            raise run.create_timeout_error(search, seconds_per_run) from None
    else:
        evaluator.deadline = run.compute_deadline(SEARCH_END)
        search.run()
    evaluator.deadline = None  # evaluating the result has a separate deadline


def _prepare_search(search: PlacementSearch) -> None:
    """Prepare a search: predict costs, and select the choices to measure.

    If earlier runs measured placements, the preparation ignores the deadline, because these
    measurements cannot be used without the preparation.
    """
    evaluator = search.evaluator
    deadline = evaluator.deadline
    if evaluator.store.placements:
        evaluator.deadline = None
    try:
        search.select_choices()
    except KeyboardInterrupt:
        evaluator.store.save(costs_alone=True)
        raise
    evaluator.deadline = deadline


def _require_positive_metric(search: PlacementSearch, samples: Sequence[int]) -> None:
    value = search.float_value(samples)
    if search.keep is not None and value <= 0.0:
        raise QdqtoolError(
            f"`metric` {search.evaluator.job.metric.name} returned {value:.4g} for the float "
            "model; `keep` is a fraction of this value, so give a metric that is above 0 and "
            "higher for better outputs",
            code="metric-not-positive",
            parameter="metric",
        )


def _hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _serialize_model(model: Model) -> bytes:
    try:
        return bytes(model.proto.SerializeToString())
    except (ValueError, EncodeError):
        raise ModelError(
            "the model with its weights exceeds 2 GB, the limit for tuning; tune a smaller model",
            model.path or "model",
            code="file-too-large",
        ) from None


def _choose_gpu(options: GpuOptions, target: Target) -> gpus.Gpu | None:
    if options.gpu is None:
        return None
    gpu = gpus.choose_gpu(options.gpu, options.clock, options.power)
    if not gpu.has_int8:
        flag = " with --fp16" if gpu.float_type == Precision.FP16 else ""
        raise QdqtoolError(
            f"`gpu` {options.gpu}: {gpu.name} has no INT8, so Q/DQ cannot make the model faster. "
            f"Build the float model{flag}, or give another GPU",
            code="no-int8",
            parameter="gpu",
        )
    gpu = gpus.remove_unsupported_int8(target.with_capability(gpu.cc, gpu.name), gpu)
    require_gpu_support(target, gpu.cc, gpu.name)
    if not gpu.has_int8:
        raise QdqtoolError(
            f"`gpu` {options.gpu}: {gpu.name} has no INT8 on {target.display_name}, so every "
            "quantized model is slower than the float model; deploy the float model, or give "
            "another GPU",
            code="no-int8",
            parameter="gpu",
        )
    return gpu
