"""Comparison of the outputs of changed models with those of the float network."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx

from calibration.session import partial_model
from qdqtool.fixing.outputs import (
    PART_SLACK,
    OutputError,
    OutputNoise,
    OutputPart,
    find_output_parts,
    find_worst_part,
    is_growth_permitted,
    list_output_errors,
    measure_noise,
)
from qdqtool.fixing.runner import (
    Arrays,
    ModelRunner,
    NotFiniteError,
    RunError,
    RunLimitError,
    check_finite,
    cut_runnable_part,
    draw_random_inputs,
    select_inputs,
)
from qdqtool.fixing.site import FixCriteria
from qdqtool.ir.graph import Model
from qdqtool.patterns.rewrites import insert_clipping_relus, remove_quantizers
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from qdqtool.fixing.detections import DetectionJudge, DetectionVerdict

_WEAK = 0.5  # if the output error of the unchanged model is larger, a comparison is of little use


class OutputJudge:
    """Decides whether the outputs of changed models are close enough to the float network's.

    Args:
        model: Model before any change.
        samples: For each sample, the inputs by name. None for random inputs.
        effort: Factor for the limits of runs.
        notes: List to which notes about the comparison are added.

    Attributes:
        noise: Output errors of the model with all changes that were accepted so far. None until a
            model was run.
        first_noise: Output errors of the model before any change. If a change quantized weights
            again, they refer to the float network with the new weights, as those in `noise`. None
            until a model was run.
        verdict: Comparison of detections by which the last model was accepted. None if the errors
            of the outputs decided.
        failure: Reason why outputs cannot be compared; None if they can.
        has_samples: Whether the inputs are not random.
    """

    def __init__(
        self, model: Model, samples: Sequence[Arrays] | None, effort: float, notes: list[Note]
    ) -> None:
        self.noise: OutputNoise | None = None
        self._limit: OutputNoise | None = None  # errors at the start of the current step
        self.first_noise: OutputNoise | None = None
        self.verdict: DetectionVerdict | None = None
        self.failure: Note | None = None
        self.has_samples = samples is not None
        self._model = model
        self._samples = samples
        self._notes = notes
        self._runner = ModelRunner(effort, 1 if samples is None else len(samples))
        self._inputs: list[Arrays] = []
        self._parts: list[OutputPart] = []
        self._reference: list[Arrays] | None = None
        self._detections: DetectionJudge | None = None  # None without images of a detector
        self._body = False  # whether only tensors up to the last convolutions are compared

    def list_errors(self) -> list[OutputError]:
        """Return the errors of all outputs, before and after the changes; empty without a run."""
        if self.first_noise is None or self.noise is None:
            return []
        return list_output_errors(self._parts, self.first_noise, self.noise)

    def compare_detections(self) -> DetectionVerdict | None:
        """Compare the detections after all accepted changes with those before any change.

        None without images of a detector, or with too few detections of the float network.
        """
        if self._detections is None or self._reference is None:
            return None
        verdict = self._detections.compare_all_changes(self._reference)
        return verdict if verdict.has_enough_detections else None

    def start_step(self) -> None:
        """Start a step: the growth of errors is limited for all its changes together."""
        self._limit = self.noise
        if self._detections is not None:
            self._detections.start_step()

    def accept_if_close(
        self, current: Model, candidate: Model, criteria: FixCriteria, fewer_errors: bool
    ) -> Note | None:
        """Accept a changed model if its outputs are close enough to those of the float network.

        If a change requantizes weights, `current` and `candidate` are both compared with the
        network that has float weights and float activations. Parts of outputs, such as the scores
        of a detector, are compared only if the inputs are not random and the change does not remove
        an error.

        The error of a detector includes boxes without objects. With images as samples, a change
        whose error grows too much is therefore accepted if the detections do not get worse.

        Args:
            current: Model before the change.
            candidate: Changed model.
            criteria: Permitted growth of the errors.
            fewer_errors: Whether the change removes a finding that is an error.

        Returns:
            None if the model is accepted, else the reason why it is not.
        """
        self.verdict = None
        self.run_reference()
        if self._reference is None or self.noise is None:
            return Note(
                "the outputs cannot be compared with those of the float network: "
                f"{self.failure or ''}",
                code="not-comparable",
                cause=self.failure.code if self.failure else "",
            )
        try:
            return self._judge_candidate(
                current, candidate, criteria, self.has_samples and not fewer_errors
            )
        except RunError as error:
            return Note(
                f"onnxruntime cannot run the result: {error}",
                code="result-cannot-run",
                cause=error.code,
            )

    def _judge_candidate(
        self, current: Model, candidate: Model, criteria: FixCriteria, parts: bool
    ) -> Note | None:
        assert self._reference is not None and self.noise is not None
        proto, cut = cut_runnable_part(candidate, self._body)
        part = Model(proto, self._model.path, sha256="part") if cut else candidate
        if criteria.requantizes_weights:
            growth = self._find_requantization_growth(current, part, criteria)
            if growth is not None:
                return growth
        reference = self._reference
        if criteria.requantizes_weights or criteria.costs_speed:
            reference = self._run_samples(_to_float_network(part).proto)
        outputs = self._run_samples(proto)
        noise = self._compare_outputs(outputs, reference)
        growth = None if criteria.requantizes_weights else self._find_growth(noise, criteria, parts)
        if growth is not None:
            if not noise.finite or self._detections is None:
                return growth
            verdict = self._detections.compare(outputs, reference)
            if not verdict.permits_change:
                return verdict.add_to(growth)
            self.verdict = verdict
        self._reference, self.noise = reference, noise
        if criteria.requantizes_weights:
            original, _ = cut_runnable_part(self._model, self._body)
            with contextlib.suppress(RunLimitError):
                self.first_noise = self._measure_noise(original, reference)
        if self._detections is not None:
            self._detections.keep(outputs)
        return None

    def _find_requantization_growth(
        self, current: Model, part: Model, criteria: FixCriteria
    ) -> Note | None:
        """Return a note if the errors grow too much, compared with the network of float weights.

        Args:
            current: Model before the change.
            part: Changed model, or the part of it that onnxruntime can run.
            criteria: Permitted growth of the errors.
        """
        exact = self._run_samples(_to_float_network(part, weights=True).proto)
        current_proto, _ = cut_runnable_part(current, self._body)
        before = self._measure_noise(current_proto, exact)
        after = self._measure_noise(part.proto, exact)
        if is_growth_permitted(before, after, criteria.noise_factor, criteria.rounding):
            return None
        return _describe_growth(before, after, criteria)

    def _find_growth(self, noise: OutputNoise, criteria: FixCriteria, parts: bool) -> Note | None:
        """Return a note if the errors grow too much since the start of the step."""
        assert self.noise is not None
        before = self._limit or self.noise
        # If outputs are NaN before and after the change, they are not compared. Another fix has to
        # repair the scale that causes NaN.
        if not noise.finite and not before.finite:
            return None
        factor = criteria.noise_factor
        if is_growth_permitted(before, noise, factor, criteria.rounding, parts=parts):
            return None
        worst = find_worst_part(before, noise, factor) if parts else None
        return _describe_growth(before, noise, criteria, worst, self.noise)

    def find_nonnegative_tensors(self, model: Model, tensors: Sequence[str]) -> set[str]:
        """Return the tensors of a model that have no negative value on the samples.

        Empty if onnxruntime cannot compute the tensors.
        """
        if not tensors or self._reference is None:
            return set()
        try:
            samples = self._run_samples(partial_model(model, list(tensors)))
        except RunError:
            return set()
        return {
            t for t in tensors if all(t in values and values[t].min() >= 0 for values in samples)
        }

    def _run_samples(self, proto: onnx.ModelProto) -> list[Arrays]:
        return self._runner.run_samples(proto, self._inputs)

    def _measure_noise(self, proto: onnx.ModelProto, reference: list[Arrays]) -> OutputNoise:
        return self._compare_outputs(self._run_samples(proto), reference)

    def _compare_outputs(self, outputs: list[Arrays], reference: list[Arrays]) -> OutputNoise:
        return measure_noise(list(zip(outputs, reference, strict=True)), self._parts)

    def run_reference(self) -> None:
        """Run the model and its float network, if this was not done yet.

        If onnxruntime cannot run the whole model, only the nodes up to the last convolutions are
        run. If this fails too, `failure` is set.
        """
        if self._reference is not None or self.failure is not None:
            return
        for self._body in (False, True):
            try:
                self._run_original()
            except RunLimitError as error:  # running fewer nodes would need almost as much work
                self.failure = Note(str(error), code=error.code)
                return
            except RunError as error:
                self.failure = self.failure or Note(str(error), code=error.code)
            else:
                if self.failure is not None:
                    self._notes.append(
                        Note(
                            f"the outputs of the whole model cannot be compared ({self.failure}): "
                            "tensors after its last convolutions were compared instead",
                            code="compared-in-body",
                            cause=self.failure.code,
                        )
                    )
                self.failure = None
                return

    def _run_original(self) -> None:
        proto, cut = cut_runnable_part(self._model, self._body)
        part = Model(proto, self._model.path, sha256="part") if cut else self._model
        if self._samples is None:
            self._inputs = [draw_random_inputs(part)]
        else:
            self._inputs = [select_inputs(part, sample) for sample in self._samples]
        floats, reference = self._run_float_network(part)
        self._parts = find_output_parts(floats, self._inputs[0], self._runner.run)
        outputs = self._run_samples(proto)
        self.noise = self.first_noise = self._limit = self._compare_outputs(outputs, reference)
        self._reference = reference
        if self.has_samples and not cut:
            from qdqtool.fixing.detections import find_detection_judge

            self._detections = find_detection_judge(floats, outputs)
        if self.noise.relative > _WEAK:
            text = "random inputs do not fit the scales: give images with `data`"
            if self.has_samples:
                text = (
                    f"the outputs differ by {self.noise.relative:.0%} from the float network, so "
                    "the comparison is unreliable; check that the images and their preprocessing "
                    "fit the scales"
                )
            self._notes.append(Note(text, code="weak-comparison"))
        if cut and not self._body:
            self._notes.append(
                Note(
                    f"onnxruntime cannot run {', '.join(cut[:3])}: the inputs of these nodes were "
                    "compared instead of the outputs; no action needed",
                    code="compared-in-front",
                    nodes=cut[:3],
                )
            )

    def _run_float_network(self, part: Model) -> tuple[Model, list[Arrays]]:
        """Return the network without activation quantizers, and its outputs for each sample.

        If the outputs are NaN or infinite, weight quantizers are removed as well.

        Raises:
            RunError: onnxruntime cannot run the network, or its outputs are not finite.
        """
        floats = _to_float_network(part)
        reference = self._run_samples(floats.proto)
        try:
            check_finite(reference)
        except NotFiniteError:
            floats = _to_float_network(part, weights=True)
            reference = self._run_samples(floats.proto)
            check_finite(reference)
        return floats, reference


def _to_float_network(model: Model, weights: bool = False) -> Model:
    """Return a copy without activation quantizers. Quantizers that clip at 0 become Relus.

    Args:
        model: The model.
        weights: Whether the quantizers of float weights are removed as well.
    """
    return remove_quantizers(insert_clipping_relus(model.copy()), weights=weights)


def _describe_growth(
    before: OutputNoise,
    after: OutputNoise,
    criteria: FixCriteria,
    part: tuple[str, str] | None = None,
    current: OutputNoise | None = None,
) -> Note:
    """Return a note on the growth of an error, for a change that is refused.

    This is the error of `part`, or if `part` is None, of the output whose error grew most. For NaN
    or infinite outputs, the note says so instead.

    Args:
        before: Errors to which the permitted growth refers.
        after: Errors of the refused model.
        criteria: Permitted growth of the errors.
        part: Output and tensor that identify a part of an output.
        current: Errors after the changes that were kept since `before`.
    """
    if not after.finite:
        return Note("outputs would be NaN or infinite", code="no-numbers")
    kept_noise = None if current is before else current
    if part is not None:
        output, tensor = part
        kept = None if kept_noise is None else kept_noise.parts.get(part)
        earlier = before.parts.get(part, 0.0)
        limit = earlier * criteria.noise_factor + PART_SLACK
        return Note(
            f"the error of '{tensor}' in output '{output}' against the float network would "
            f"{_describe_error_growth(earlier, after.parts[part], limit, kept)}",
            code="distance-of-part-grows",
        )
    worst = max(after.each, key=lambda n: after.each[n] / (before.each.get(n, 0.0) + 1e-9))
    kept = None if kept_noise is None else kept_noise.each.get(worst)
    earlier = before.each.get(worst, 0.0)
    limit = earlier * criteria.noise_factor + criteria.rounding
    return Note(
        f"the error of output '{worst}' against the float network would "
        f"{_describe_error_growth(earlier, after.each[worst], limit, kept)}",
        code="distance-grows",
    )


def _describe_error_growth(before: float, after: float, limit: float, kept: float | None) -> str:
    """Return ``grow from 2% to 5%`` with the limit, and with the present error if it is given."""
    is_close = f"{after:.2%}" == f"{limit:.2%}"
    result, highest = (f"{value:{'.4%' if is_close else '.2%'}}" for value in (after, limit))
    if kept is None:
        return f"grow from {before:.2%} to {result} (limit {highest})"
    return (
        f"be {result} (now {kept:.2%}, {before:.2%} before this kind of fix; the limit is "
        f"{highest} for all changes of this kind together)"
    )
