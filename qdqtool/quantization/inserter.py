"""One insertion of Q/DQ pairs: the methods are the steps of :func:`qdqtool.insert`."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from qdqtool import prediction
from qdqtool.errors import DataError, ModelError, QdqtoolError
from qdqtool.findings.lint.activation_scales import check_outliers
from qdqtool.findings.lint.floats import check_decomposed_norms
from qdqtool.findings.report import FindingReport
from qdqtool.insertion import fp16, rules
from qdqtool.insertion.exclusion_costs import predict_count_changes
from qdqtool.insertion.format_choice import FLOAT, FORMAT_SAMPLES, compare_precision
from qdqtool.insertion.input_types import (
    check_input_type,
    check_pixel_range,
    convert_inputs_to_integers,
)
from qdqtool.insertion.losses import (
    SAMPLES,
    ActivationLosses,
    TensorLoss,
    measure_losses,
    rank_activations,
)
from qdqtool.insertion.network import prepare_network
from qdqtool.insertion.number_formats import FP8, INT8, find_number_format
from qdqtool.insertion.options import CacheOptions, InsertOptions
from qdqtool.insertion.output_errors import (
    Fp16Agreement,
    SampleErrors,
    compare_outputs,
    find_compared_outputs,
    measure_sample_errors,
)
from qdqtool.insertion.placement import Placement, compute_placement
from qdqtool.insertion.preprocessing import record_preprocess, resolve_images
from qdqtool.insertion.ranges import collect_statistics, read_table_scales
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.rewrite import ActivationScale, QuantizedTensor, insert_pairs
from qdqtool.insertion.scales import (
    GroupScale,
    MethodChoice,
    ScaleGroup,
    choose_scale,
    choose_tensor_scales,
    find_scale_groups,
    group_separately,
)
from qdqtool.insertion.smoothing import smooth_activations
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import store_image_size
from qdqtool.ir.metadata import record_tuned_head
from qdqtool.ir.modelfile import ModelSource
from qdqtool.patterns.network_kind import warn_preprocess
from qdqtool.patterns.view import View
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.reasons.placement import create_nothing_to_quantize_error
from qdqtool.reasons.scales import ScaleImplausible, ScaleOwner
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from calibration import Statistics
    from calibration.arrays import CalibrationSource
    from calibration.options import Preprocess

# A warning is added if the model with Q/DQ and FP16 has an output error above 10 %, and above five
# times the error of its quantized activations alone.
_MIN_FP16_ERROR, _MIN_FP16_RATIO = 0.1, 5.0


@dataclass(frozen=True)
class InsertRequest:
    """Arguments of :func:`qdqtool.insert`."""

    model: ModelSource | Model
    data: CalibrationSource | None
    target: Target
    options: InsertOptions
    timing: TimingOptions

    def with_precision(self, precision: str) -> InsertRequest:
        """Return the request for another number format."""
        placement = replace(self.options.placement, precision=precision)
        return replace(self, options=replace(self.options, placement=placement))

    def with_exclusion(self, pattern: str) -> InsertRequest:
        """Return the request that also excludes the nodes of a pattern."""
        placement = self.options.placement
        placement = replace(placement, exclude=(*placement.exclude, pattern))
        return replace(self, options=replace(self.options, placement=placement))


class Inserter:
    """One insertion: its options, the model, and methods for the steps of :func:`insert`.

    Attributes:
        result: The result so far.
        target: TensorRT version that will build the model.
        fp8_obstacle: Why FP8 is not compared with this format; empty if it is, or if no formats
            are compared.
    """

    def __init__(self, request: InsertRequest) -> None:
        options, target = request.options, request.target
        if options.cluster.cluster is not None:
            from calibration.cluster.connection import check_cluster

            check_cluster(options.cluster.cluster)
        self._format = find_number_format(options.placement.precision)
        if self._format == FP8:
            target = rules.restrict_to_fp8(target)
        check_input_type(options.network.input_type, target, self._format)
        self.target = target
        self.fp8_obstacle = ""
        self._request = request
        # A table replaces the data, so the network never runs.
        self._data = request.data if options.calib_table is None else None
        self._network = prepare_network(
            request.model,
            target,
            options.placement.weights,
            options.network.high_precision,
            number_format=self._format,
        )
        self._model = self._network.model
        store_image_size(self._model, options.images.size)
        images, self._origin = resolve_images(self._model, options.images)
        self._options = replace(options, images=images)
        self._placement: Placement | None = None
        self._shared: tuple[Statistics, Json] | None = None
        self._scales: list[GroupScale] = []
        self._statistics: Statistics | None = None
        self._maxima: dict[str, float] = {}  # largest magnitudes of tensors in the calibration
        self._wide: dict[str, float] | None = None
        self.result = Insertion(
            self._model.proto,
            quantized=[],
            skipped=[],
            calibration={},
            groups=[],
            notes=self._network.notes,
            warnings=self._network.warnings,
            target=target.name,
            source=self._network.loaded.path,
            float_type="fp16" if self._network.fp16 else "fp32",
            precision=self._format.name,
            compute_capabilities=target.capability_names,
            requested_target=target,
            load_float_model=self._network.load_float_model,
            measure_scales=self._measure_scales,
        )

    def collect_shared_statistics(self, other: Inserter) -> None:
        """Calibrate the tensors of this insertion and of another one in a single run."""
        groups = [*self._find_groups(), *other._find_groups()]
        self._shared = other._shared = self._collect_statistics(
            self._model, groups, self._options.cache
        )

    def keep_float_model(self, trial: Inserter) -> None:
        """Make the float model the result: unchanged, unless it will be converted to FP16.

        `trial` is the INT8 insertion, whose calibration is reported and used for FP16.
        """
        result = self.result
        result.precision = FLOAT
        result.calibration, result.fits = trial.result.calibration, trial.result.fits
        about_images = result.calibration.get("warnings", ())
        result.warnings.extend(w for w in trial.result.warnings if w in about_images)
        self._maxima = trial._maxima
        if not self._network.fp16:
            result.unchanged = True
            result.notes.clear()
            self._model = self._network.load_float_model().copy()
            result.model = self._model.proto

    def copy_final_model(self) -> Model:
        """Return a copy of the model in the float type of the result."""
        model = self._model.copy()
        if self._network.fp16:
            fp16.convert_to_fp16(model, self.find_wide_tensors())
        return model

    def measure_errors(self, models: Sequence[Model]) -> tuple[SampleErrors, bool]:
        """Measure the output errors of models relative to the float model.

        Returns:
            The errors, and whether they are those at objects.
        """
        assert self._data is not None
        float_model = self._network.load_float_model()
        compared = find_compared_outputs(float_model, models[0])
        errors = measure_sample_errors(
            float_model,
            models,
            self._data,
            compared,
            samples=FORMAT_SAMPLES,
            images=self._options.images,
        )
        return errors, compared.at_objects

    def choose_placement(self) -> Placement:
        """Choose the tensors to quantize, after SmoothQuant if the option `smooth` is set.

        SmoothQuant changes the network. Further calls return the same placement.

        Raises:
            NothingToQuantize: The placement is empty.
        """
        if self._placement is None:
            self._placement = self._choose_placement()
        return self._placement

    def _choose_placement(self) -> Placement:
        result, alpha = self.result, self._options.network.smooth
        rule_set, placement = rules.choose_placement(
            self._model, self._options.placement, self.target
        )
        result.notes.extend(placement.notes)
        result.warnings.extend(rules.warn_fp8_version(placement, self.target))
        if alpha is not None:
            result.smoothed, note = smooth_activations(
                self._model, placement, alpha, self._data, self._options.images
            )
            result.notes.append(note)
            if result.smoothed:
                self._model.sha256 = None  # statistics of the original model do not apply
                placement = compute_placement(self._model, rule_set)
        if not placement.inputs:
            raise create_nothing_to_quantize_error(placement.skipped, result.source or "model")
        result.skipped = placement.skipped
        return placement

    def choose_scales(self) -> None:
        """Choose the scales of activations, by a calibration or from a table."""
        options, result = self._options, self.result
        groups = self._find_groups()
        methods = MethodChoice.from_options(options.ranges, self._format)
        methods.check([t for g in groups for t in g.tensors])
        if options.calib_table is not None:
            scales, result.calibration = read_table_scales(
                options.calib_table, groups, self._model, self._format
            )
        else:
            scales = self._choose_calibrated_scales(groups, methods)
        methods_used = Counter(s.method for s in scales for _ in s.group.quantized)
        result.calibration["methods"] = dict(methods_used)
        result.calibration["powers"] = {
            t: round(s.power, 2) for s in scales if s.power for t in s.group.quantized
        }
        self._scales = scales

    def _find_groups(self) -> list[ScaleGroup]:
        inputs = self.choose_placement().inputs
        return find_scale_groups(self._model, inputs, self._options.placement.unify)

    def _collect_statistics(
        self, model: Model, groups: Sequence[ScaleGroup], cache: CacheOptions
    ) -> tuple[Statistics, Json]:
        options = self._options
        return collect_statistics(
            model,
            self._data,
            groups,
            max_images=options.ranges.max_images,
            images=options.images,
            cache=cache,
            cluster=options.cluster,
            progress=options.progress,
        )

    def _check_pixel_ranges(self, statistics: Statistics) -> None:
        for name in self._model.inputs:
            if name in statistics and statistics[name].count:
                low, high = statistics[name].minimum, statistics[name].maximum
                check_pixel_range(name, low, high, self._preprocess)

    def _choose_calibrated_scales(
        self, groups: Sequence[ScaleGroup], methods: MethodChoice
    ) -> list[GroupScale]:
        options = self._options
        statistics, report = self._shared or self._collect_statistics(
            self._model, groups, options.cache
        )
        self.result.calibration = dict(report)
        self.result.notes.extend(map(Note.from_text, statistics.notes))
        self.result.warnings.extend(map(Note.from_text, statistics.warnings))
        self._record_preprocess()
        if options.network.input_type == "uint8":
            self._check_pixel_ranges(statistics)
        scales = []
        for group in groups:
            scale, warnings = choose_scale(group, statistics, methods)
            scales.append(scale)
            self.result.warnings.extend(warnings)
        int8_scales = scales
        if self._format != INT8:
            int8_methods = MethodChoice.from_options(options.ranges)
            int8_scales = [choose_scale(group, statistics, int8_methods)[0] for group in groups]
        if self.target.has_fp8:
            self.result.fits = compare_precision(int8_scales, statistics)
        self._statistics = statistics
        self._maxima = {tensor: entry.absmax for tensor, entry in statistics.items()}
        return scales

    def _measure_scales(self, model: Model, tensors: Sequence[str]) -> dict[str, float]:
        """Return INT8 scales of tensors of the float model, measured in a separate run.

        Empty without data, if the data cannot be read again, or if the run fails (with a warning).
        """
        if self._data is None or isinstance(self._data, Iterator) or not tensors:
            return {}
        groups = group_separately(tensors)
        methods = MethodChoice.from_options(self._options.ranges)
        try:
            statistics, _ = self._collect_statistics(model, groups, CacheOptions())
        except (ModelError, DataError) as error:
            self._add_warning(
                "others-not-measured", "tensors without a quantizer were not measured", error
            )
            return {}
        return choose_tensor_scales(groups, statistics, methods)

    def _record_preprocess(self) -> None:
        used = self.result.calibration["preprocess"]
        if used is None:
            # An integer input depends on the preprocessing, also if the data are arrays.
            if self._options.network.input_type == "float":
                from calibration.presets import note_unused_preprocess

                self.result.notes.extend(note_unused_preprocess(self._origin, self._data))
            return
        used["origin"] = self._origin
        record_preprocess(self._model.proto, used)
        self.result.warnings.extend(warn_preprocess(self._network.loaded, used))

    @property
    def _preprocess(self) -> Preprocess:
        from calibration.options import Preprocess

        preprocess = self._options.images.preprocess
        if not isinstance(preprocess, Preprocess):
            raise QdqtoolError(
                f"`input_type={self._options.network.input_type!r}` needs a Preprocess object or "
                "the name of a preset, because the steps of a preprocessing function are unknown",
                code="option-conflict",
                parameter="input_type",
            )
        return preprocess

    def insert_pairs(self) -> None:
        """Insert the Q/DQ pairs of the placement with the chosen scales."""
        groups = self.result.groups
        by_tensor: dict[str, ActivationScale] = {}
        for scale in self._scales:
            number = len(groups) if scale.group.is_shared else None
            if scale.group.is_shared:
                groups.append(scale)
            for tensor in scale.group.quantized:
                by_tensor[tensor] = ActivationScale(scale.scale, scale.method, number)
        self.result.quantized = insert_pairs(
            self._model, self.choose_placement(), by_tensor, self._options.placement.weights
        )
        self._record_tuned_nodes()

    def _record_tuned_nodes(self) -> None:
        patterns = [re.compile(pattern) for pattern in self._options.placement.tuned]
        inputs = itertools.chain.from_iterable(self.choose_placement().inputs.values())
        names = {entry.node.name for entry in inputs}
        record_tuned_head(
            self._model.proto, (n for n in names if any(p.search(n) for p in patterns))
        )

    def check_outliers(self) -> None:
        """Report INT8 scales that cover outliers.

        The warnings recommend SmoothQuant, unless it was requested without effect. FP8 is not
        checked: its steps are relative to each value, so outliers do not affect other values.
        """
        if self._statistics is None or self._format != INT8:
            return
        quantizers = {q.tensor: q.node for q in self.result.quantized}
        entries = []
        for scale in self._scales:
            group = scale.group
            for tensor in group.quantized:
                sources = (tensor,) if tensor in group.sources else group.sources
                parts = [self._statistics[source] for source in sources]
                entries.append((quantizers[tensor], tensor, scale.scale, 0, parts))
        report = FindingReport(self.target.name)
        check_outliers(report, self._model, entries, self._statistics.images)
        has_fix = self._options.network.smooth is None or bool(self.result.smoothed)
        for finding in report.findings:
            fix = f" {finding.fix}" if has_fix else ""
            self.result.warnings.append(_note_finding(finding, fix))
        self.result.findings.extend(report.findings)

    def measure_losses(self) -> None:
        """Measure which quantized activations cause the output error, if requested.

        For confirmed activations, the error is measured again with their consumers excluded.
        """
        # The statistics take tens of megabytes, so they are freed at the end of this method.
        statistics, self._statistics = self._statistics, None
        if self._options.losses == 0 or statistics is None:
            return
        assert self._data is not None  # `statistics` are those of the data
        sources = {t: s.group.sources for s in self._scales for t in s.group.quantized}
        candidates = rank_activations(
            self.result.activations, statistics, sources, number_format=self._format
        )
        try:
            losses = self._measure_losses(candidates)
            if losses is not None:
                tensors = [
                    self._measure_exclusion(t, statistics) if t.confirmed else t
                    for t in losses.tensors
                ]
                losses = replace(losses, tensors=tensors)
            self.result.losses = losses
        except ModelError as error:  # for example, TensorRT's own operators cannot run here
            self._add_warning(
                "losses-not-measured", "the causes of accuracy loss were not measured", error
            )

    def _measure_losses(self, candidates: Sequence[QuantizedTensor]) -> ActivationLosses | None:
        assert self._data is not None
        return measure_losses(
            self._model,
            candidates,
            self._data,
            activations=self.result.activations,
            images=self._options.images,
            samples=self._options.losses,
        )

    def _measure_exclusion(self, loss: TensorLoss, statistics: Statistics) -> TensorLoss:
        """Make the insertion that also excludes an activation's consumers, and measure its error.

        The error is not measured if this insertion needs another calibration or cannot be made.
        """
        if self._options.network.smooth is not None:  # SmoothQuant would change other tensors
            return loss
        try:
            trial = Inserter(self._request.with_exclusion(loss.exclude_pattern))
            groups = trial._find_groups()
            loss = replace(loss, unused_options=trial._drop_unused_methods(groups))
            if not all(source in statistics for g in groups for source in g.sources):
                return loss
            trial._shared = statistics, self.result.calibration
            trial.choose_scales()
            trial.insert_pairs()
        except QdqtoolError:  # for example, nothing else is quantized
            return replace(loss, excludable=False)
        losses = trial._measure_losses([])
        return loss if losses is None else replace(loss, excluded_error=losses.error)

    def _drop_unused_methods(self, groups: Sequence[ScaleGroup]) -> tuple[tuple[str, str], ...]:
        """Drop the methods for tensors that are in none of the groups.

        Returns:
            Name and value of each option that was dropped.
        """
        ranges = self._options.ranges
        methods = MethodChoice.from_options(ranges, self._format)
        unused = methods.find_unused_overrides([t for g in groups for t in g.tensors])
        kept = ranges.without_methods(unused)
        self._options = replace(self._options, ranges=kept)
        dropped = [("method_for", "=".join(entry)) for entry in unused]
        if kept.percentile != ranges.percentile:
            dropped.append(("percentile", f"{ranges.percentile:g}"))
        return tuple(dropped)

    def find_wide_tensors(self) -> dict[str, float]:
        """Return the tensors that may exceed the FP16 range, with their maxima; cached."""
        if self._wide is None:
            self._wide = fp16.find_wide_tensors(
                self._model,
                self.result.quantized,
                self._maxima,
                self._data,
                self.result.warnings,
                self._options.images,
                self._format,
            )
        return self._wide

    def convert_to_fp16(self) -> None:
        """Convert the float layers to FP16 if requested, and compare the outputs."""
        if not self._network.fp16:
            return
        options, result = self._options, self.result
        result.float32 = self.find_wide_tensors()
        result.notes.extend(
            fp16.describe_fp16_conversion(
                self._model, self.target, result.float32, options.network.high_precision is None
            )
        )
        # If inputs become integers, convert_inputs() converts the model later. The comparison of
        # the outputs needs float inputs, so a copy is converted here.
        model = self._model if options.network.input_type == "float" else self._model.copy()
        fp16.convert_to_fp16(model, result.float32)
        if options.losses == 0 or self._data is None:
            return
        try:
            self._measure_agreement(model)
        except ModelError as error:
            text = "agreement with the float model was not measured"
            self._add_warning("agreement-not-measured", text, error)

    def _measure_agreement(self, model: Model) -> None:
        agreement = self._measure_or_reuse_agreement(model)
        if agreement is None:
            return
        self.result.agreement = agreement
        losses, error = self.result.losses, agreement.error
        if losses and not error <= max(_MIN_FP16_ERROR, _MIN_FP16_RATIO * losses.error):
            change = f"by {error:.0%}" if np.isfinite(error) else "to NaN or infinity"
            self.result.warnings.append(
                Note(
                    f"{self._format.title} activations alone change the outputs by "
                    f"{losses.error:.1%}, but together with FP16 layers {change}. Compare the "
                    "accuracy with that of `high_precision='fp32'`",
                    code="half-differs",
                    int8=losses.error,
                    half=error,
                )
            )

    def _measure_or_reuse_agreement(self, model: Model) -> Fp16Agreement | None:
        choice = self.result.choice
        if choice is not None and self.result.precision in choice.errors:
            error = choice.errors[self.result.precision]
            return Fp16Agreement(error, choice.samples, choice.at_objects)
        assert self._data is not None
        return compare_outputs(
            self._network.load_float_model(),
            model,
            self._data,
            samples=self._options.losses or SAMPLES,
            images=self._options.images,
        )

    def convert_inputs(self) -> None:
        """Change inputs to integers if requested, and update the scales of an FP16 model."""
        result, input_type = self.result, self._options.network.input_type
        if input_type != "float":
            notes = convert_inputs_to_integers(self._model, input_type, self._preprocess)
            result.notes.extend(notes)
            if self._network.fp16:
                fp16.convert_to_fp16(self._model, result.float32)
        if self._network.fp16 or fp16.has_fp16(self._model):
            result.groups, notes = fp16.update_recorded_scales(
                self._model, result.quantized, result.groups
            )
            if self._network.fp16:
                result.notes.extend(notes)
            else:
                result.warnings.extend(fp16.warn_coarse_scales(notes))

    def check_layer_norms(self) -> None:
        """Report decomposed layer normalizations; one warning describes the first of them."""
        report = FindingReport(self.target.name)
        check_decomposed_norms(View(self._model), report)
        findings = report.findings
        self.result.findings.extend(findings)
        if findings:
            more = len(findings) - 1
            others = f" This also applies to {format_count(more, 'more node')}." if more else ""
            self.result.warnings.append(_note_finding(findings[0], f"{others} {findings[0].fix}"))

    def predict(self) -> None:
        """Predict the engine, and how it would change if single activations were left float.

        A failure becomes a warning.
        """
        model, result = self._model, self.result
        if not self._options.predict:
            return
        try:
            model.path, model.sha256 = "", None  # the model differs from the file
            result.prediction = prediction.predict(model, self.target)
            if result.losses is not None:
                result.losses = predict_count_changes(
                    result.losses,
                    model,
                    result.activations,
                    result.prediction,
                    lambda changed: prediction.predict_outcome(changed, self.target),
                )
            result.warnings.extend(_note_errors(result.prediction))
        except QdqtoolError as error:  # the Q/DQ model is complete without a prediction
            self._add_warning("not-predicted", "the result was not predicted", error)

    def _add_warning(self, code: str, text: str, error: QdqtoolError) -> None:
        self.result.warnings.append(Note(f"{text}: {error}", code=code, error=str(error)))


def _note_finding(finding: Finding, addition: str) -> Note:
    return Note(f"{finding.code}: {finding.message}{addition}", code="of-finding", finding=finding)


def _note_errors(prediction: Prediction) -> list[Note]:
    """Return a note for the first finding of each code that is an error."""
    first: dict[str, Finding] = {}
    for finding in prediction.findings:
        if finding.severity == Severity.ERROR:
            first.setdefault(finding.code, finding)
    counts = prediction.findings_by_code()
    notes = []
    for code, finding in first.items():
        others = f" (and {counts[code] - 1} more)" if counts[code] > 1 else ""
        reason = finding.causes[0].reason
        if isinstance(reason, ScaleImplausible) and reason.owner == ScaleOwner.ACTIVATION:
            text = f"{code}: {reason.message_after_calibration()}{others}"
            notes.append(Note(text, code="of-finding", finding=finding))
        else:
            notes.append(_note_finding(finding, f"{others} {finding.fix}"))
    return notes
