"""Trials of fixes: each fix is predicted, run in onnxruntime, and kept or refused."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qdqtool.errors import ModelError
from qdqtool.findings.rules import (
    ON_REQUEST_CODES,
    PROMISED_CODES,
    attempted_reasons,
)
from qdqtool.fixing import gains, quantizers
from qdqtool.fixing.common_scale import TOO_COARSE, CommonScale, ScaleHistory
from qdqtool.fixing.judge import OutputJudge
from qdqtool.fixing.outputs import OutputError
from qdqtool.fixing.runner import Arrays
from qdqtool.fixing.site import (
    FixCriteria,
    FixSite,
    FixStep,
    Place,
    count_total_loss,
    select_default_sites,
)
from qdqtool.fixing.speed import SLOWER, SpeedCheck
from qdqtool.fixing.steps import HALVING_CODES, MODEL_STEPS, STEPS, ModelStep
from qdqtool.ir import qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.metadata import read_refused_fixes, record_refused_fixes
from qdqtool.patterns.view import View
from qdqtool.prediction import choose_typing, predict
from qdqtool.reasons.finding import Finding, Severity, needs_request
from qdqtool.reasons.text import list_names
from qdqtool.reasons.weights import WeightsPerTensor
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count_were

if TYPE_CHECKING:
    from qdqtool.fixing.detections import DetectionVerdict

_FEW_SITES = 4  # for at most this number of sites, both halves are always tried
_MIN_TRIES = 24  # number of tries that are permitted in each step for a model of any size
_MAX_NODES = 20_000  # further tries are permitted until this many nodes were predicted

# Codes of the reasons for which changes are refused that other fixes may make needless.
_NEEDLESS_REFUSALS = (gains.NO_GAIN.code, TOO_COARSE)
# Codes of the reasons that fixes of other kinds may remove.
_OUTPUT_REFUSALS = ("distance-grows", "distance-of-part-grows")
_EARLIER_REFUSAL = Note(
    "an earlier call of fix refused this change, because the error of the outputs would grow too "
    "much (`only` tries it again)",
    code="refused-earlier",
)


@dataclass(slots=True)
class FixAttempt:
    """A fix that was kept or refused.

    Attributes:
        code: Code of the finding.
        node: Node of the finding.
        what: Description of the change.
        why_not: Reason why the change was not kept; empty if it was kept.
        places: Code and node of every finding that the change was to remove.
    """

    code: str
    node: str
    what: str
    why_not: str = ""
    places: frozenset[Place] = frozenset()

    def as_json(self) -> Json:
        """Return the attempt as a JSON object."""
        return {"code": self.code, "node": self.node, "what": self.what, "why_not": self.why_not}


@dataclass(slots=True)
class _StepProgress:
    """Places of a step that were accepted or refused so far.

    Attributes:
        accepted: Places whose fixes were kept.
        refused: Refused fixes, by place.
        suspects: Places of which at least one prevents acceptance; empty if none is suspected.
        is_time_compared: Whether the times without each of the sites were compared.
    """

    accepted: set[Place] = field(default_factory=set)
    refused: dict[Place, FixAttempt] = field(default_factory=dict)
    suspects: list[Place] = field(default_factory=list)
    is_time_compared: bool = False

    def is_open(self, site: FixSite) -> bool:
        return site.place not in self.refused and site.place not in self.accepted

    def select(self, sites: list[FixSite]) -> list[FixSite]:
        """Return the sites of the first half of the suspects, or `sites` if there are none."""
        half = self.suspects[: max(1, len(self.suspects) // 2)]
        return [site for site in sites if site.place in half] or sites

    def accept(self, sites: Sequence[FixSite]) -> None:
        self.accepted.update(site.place for site in sites)
        self.suspects = [place for place in self.suspects if place not in self.accepted]

    def refuse(self, sites: Iterable[FixSite], reason: str) -> None:
        self.refused.update((site.place, _make_attempt(site, reason)) for site in sites)

    def narrow(self, sites: Sequence[FixSite], culprits: Mapping[int, Note]) -> None:
        """Refuse the culprits among sites that failed together; if there are none, suspect all.

        Args:
            sites: Sites that were tried together.
            culprits: Reasons by index of the site.
        """
        for number, reason in culprits.items():
            self.refuse([sites[number]], reason)
        self.suspects = [] if culprits else _list_places(sites)


def apply_sites(model: Model, sites: Sequence[FixSite]) -> tuple[Model, list[set[int]]]:
    """Return a copy of a model with fixes applied, and the node indices that each fix edits.

    Raises:
        ModelError: A fix cannot be applied.
    """
    editor = Editor(model.copy())
    edited = []
    for site in sites:
        editor.edited = set()
        site.apply(editor)
        edited.append(editor.edited)
    return editor.finish(), edited


def find_needless_sites(
    model: Model,
    target: Target,
    suspects: Mapping[int, Note],
    sites: Sequence[FixSite],
    prediction: Prediction,
    step: FixStep,
) -> dict[int, Note]:
    """Return the sites without which the prediction of all sites would be better, with reasons.

    The suspects are examined, and the sites for findings that promise no fix (ADD-ACT) if the
    prediction would be better without all of these sites. Common scales that no finding reports are
    needless if the prediction is as good without all of them.

    Args:
        model: Model without the fixes.
        target: TensorRT version.
        suspects: Indices of the sites near which the prediction gets worse, with the reasons.
        sites: The sites, which together improve the prediction.
        prediction: Prediction with all sites.
        step: Step of the sites.
    """

    def predict_without(numbers: Collection[int]) -> Prediction:
        others = [site for i, site in enumerate(sites) if i not in numbers]
        candidate, _ = apply_sites(model, others)
        return predict(candidate, target)

    def find_cost(numbers: Collection[int]) -> Note | None:
        """Return why to omit the sites of these indices; None if they improve the model."""
        without = predict_without(numbers)
        if gains.find_objection(prediction, without, step) is not None:
            return None
        return gains.find_objection(without, prediction, step) or gains.NO_GAIN

    def gains_nothing(numbers: Collection[int]) -> bool:
        """Return whether the prediction is not better with the sites of these indices."""
        return gains.find_objection(predict_without(numbers), prediction, step) is not None

    attempts = {
        i for i, site in enumerate(sites) if site.code not in PROMISED_CODES and i not in suspects
    }
    if not 0 < len(attempts) < len(sites) or find_cost(attempts) is None:
        attempts = set()
    needless = {}
    for number in itertools.islice((*suspects, *sorted(attempts)), _MIN_TRIES):
        reason = find_cost([number])
        if reason is not None:
            needless[number] = suspects.get(number, reason)
    unreported = {i for i, site in enumerate(sites) if not site.is_reported and i not in needless}
    if step.shares_scales and 0 < len(unreported) < len(sites) and gains_nothing(unreported):
        needless |= dict.fromkeys(unreported, gains.NO_GAIN)
    return needless


def find_slower_sites(
    model: Model, candidate: Model, sites: Sequence[FixSite], speed: SpeedCheck
) -> dict[int, Note]:
    """Return the sites without which the model with all sites would be faster, with reasons.

    Args:
        model: Model without the fixes.
        candidate: Model with all sites.
        sites: The sites.
        speed: Comparison of times.
    """
    slower = {}
    for number, site in itertools.islice(enumerate(sites), _MIN_TRIES):
        others, _ = apply_sites(model, [other for other in sites if other is not site])
        slowdown = speed.find_slowdown(others, candidate, {site.code})
        if slowdown is not None:
            slower[number] = slowdown
    return slower


class FixSession:
    """Trials of fixes on one model, with a record of the kept and the refused fixes.

    Args:
        model: The model.
        target: TensorRT version whose rules the prediction uses.
        samples: For each sample on which outputs are compared, the inputs by name. None for random
            inputs.
        effort: Factor for the limits of the runs that compare outputs.
        requested: Codes that the user named; empty for the fixes that are made by default.
        judge: Comparison of outputs. Default: a comparison on the samples.
        speed: Comparison of times, by which slower changes are refused. None: times do not decide.

    Attributes:
        model: The model with the fixes that were kept.
        target: TensorRT version, strongly typed if the model has FP8 quantizers.
        before: Prediction of the model without fixes.
        prediction: Prediction of the model with the fixes that were kept.
        applied: Fixes that were kept.
        refused: Fixes that were not kept, or not tried.
        notes: Notes for the user.
        judge: Comparison of outputs.
        savings: Kept changes that were tried together, with the milliseconds that they save.
            Changes are left out if times do not decide on them.
    """

    def __init__(
        self,
        model: Model,
        target: Target,
        samples: Sequence[Arrays] | None,
        effort: float,
        requested: Collection[str] = (),
        judge: OutputJudge | None = None,
        speed: SpeedCheck | None = None,
    ) -> None:
        self._requested = requested
        self.model = self._original = model
        self._named_target = target
        self.target = choose_typing(model, target)
        self.before = self.prediction = predict(model, target)
        self.applied: list[FixAttempt] = []
        self.refused: list[FixAttempt] = []
        self.notes: list[Note] = []
        self.judge = judge or OutputJudge(model, samples, effort, self.notes)
        self._speed = speed
        self.savings: list[tuple[list[FixAttempt], float]] = []
        self._history = ScaleHistory.from_model(model)
        self._common_scales: list[tuple[FixAttempt, CommonScale]] = []  # kept ones
        self._verdict_note: Note | None = None  # note of the current step on detections
        # Limits of errors refer to the model that a call starts with. Without this record, a second
        # call would accept changes that the first call refused.
        self._refused_earlier = frozenset() if requested else read_refused_fixes(model)
        # For each step that was tried: the model after the step, and the reason of the refusal if
        # the outputs refused all places together and the places were not tried separately.
        self._outcomes: dict[FixStep, tuple[Model, Note | None]] = {}
        # For the place of each finding, the place of the attempt that may remove the finding.
        self._attempt_places: dict[Place, Place] = {}

    def is_tried_by_default(self, step: FixStep | ModelStep) -> bool:
        """Return whether to try a step that the user did not request.

        Some codes are usually fixed only on request. A step that has only such codes is tried if
        one of the findings needs no request, for example because it is an error.
        """
        return not ON_REQUEST_CODES.issuperset(step.codes) or any(
            f.code in step.codes and not needs_request(f) for f in self.prediction.findings
        )

    def try_steps(self, rounds: Sequence[bool] = (False, True, False)) -> Iterator[None]:
        """Try the requested steps, or the steps that are tried by default.

        Yields after each try, so that the caller can show progress.

        Args:
            rounds: For each round, whether places that the outputs refuse together are tried
                separately, see :meth:`try_step`.
        """
        for separate in rounds:
            for step in STEPS:
                codes = self._choose_codes(step)
                if codes and self.needs_try(step):
                    yield from self.try_step(step, codes, separate=separate)

    def _choose_codes(self, step: FixStep) -> set[str]:
        """Return the codes for which a step is tried; empty if it is not tried."""
        requested = set(self._requested)
        if requested.intersection(step.codes):
            return requested
        return set(step.codes) if not requested and self.is_tried_by_default(step) else set()

    def needs_try(self, step: FixStep) -> bool:
        """Return whether to try a step that was not tried yet, or whose result may change.

        The result may change if other steps changed the model, or if the places of the step were
        not tried separately.
        """
        model, reason = self._outcomes.get(step, (None, None))
        return reason is not None or model is not self.model

    def try_step(self, step: FixStep, codes: set[str], *, separate: bool = True) -> Iterator[None]:
        """Try all places of a step together, then without the places that prevent acceptance.

        If the prediction gets worse near a place, this place is refused. If no such place is found,
        for example because the outputs change too much, halves of the places are tried. The number
        of tries therefore grows little with the number of places.

        Fixes of other kinds change the prediction and the errors of the outputs. With `separate`
        False, the places are therefore not tried in halves if all of them together change the
        outputs too much, unless the step removes errors of the model.

        Yields after each try, so that the caller can show progress.
        """
        self._start_step()
        progress = _StepProgress()
        limit = max(_MIN_TRIES, _MAX_NODES // (1 + len(self.model.nodes)))
        tries = 0
        pending: Note | None = None
        is_last_round = step in self._outcomes
        reason = self._find_known_refusal(step)
        if reason is not None:
            progress.suspects = _list_places(self._find_open_sites(step, codes, progress))
        while sites := self._find_open_sites(step, codes, progress):
            if tries == limit:
                progress.refuse(sites, _describe_try_limit(limit, reason, sites))
                break
            tries += 1
            selection = progress.select(sites)
            reason, culprits = self._try_sites(selection, step, progress)
            yield
            if reason is None:
                progress.accept(selection)
                if selection is sites and not step.requantizes_weights:
                    break  # new weight scales may show a smaller misfit
            elif not separate and selection is sites and self._can_defer(step, sites, reason):
                pending = reason
                if is_last_round:
                    progress.refuse(sites, reason)
                break
            else:
                culprits = self._choose_refused_sites(selection, reason, culprits)
                progress.narrow(selection, culprits)
        self._replace_refusals(progress)
        self._outcomes[step] = self.model, pending

    def _find_known_refusal(self, step: FixStep) -> Note | None:
        """Return why all places of a step together were refused for the current model, if so."""
        model, reason = self._outcomes.get(step, (None, None))
        return reason if model is self.model else None

    def _replace_refusals(self, progress: _StepProgress) -> None:
        """Replace the refusals at the places of a step by its own."""
        decided = {*progress.refused, *progress.accepted}
        earlier = [a for a in self.refused if (a.code, a.node) not in decided]
        self.refused = [*earlier, *progress.refused.values()]

    def _can_defer(self, step: FixStep, sites: Sequence[FixSite], reason: Note) -> bool:
        removes_errors = any(
            f.severity == Severity.ERROR and step.select_causes(f) for f in self.prediction.findings
        )
        is_separable = len(_list_places(sites)) > 1
        return reason.code in _OUTPUT_REFUSALS and is_separable and not removes_errors

    def _find_open_sites(
        self, step: FixStep, codes: set[str], progress: _StepProgress
    ) -> list[FixSite]:
        """Return the sites that are neither refused nor accepted.

        Sites that have a skip reason are refused. Sites that need a request are left out without
        one.
        """
        sites = step.find_sites(View(self.model), self.target, self.prediction, codes)
        sites = count_total_loss(sites, self._history)
        if not self._requested:
            sites = select_default_sites(sites, self.prediction.findings)
        sites = list(filter(progress.is_open, sites))
        for site in sites:
            self._attempt_places.update(dict.fromkeys(site.findings, site.place))
            if site.skip_reason:
                progress.refuse([site], site.skip_reason)
            elif not site.findings.isdisjoint(self._refused_earlier):
                progress.refuse([site], _EARLIER_REFUSAL)
        return list(filter(progress.is_open, sites))

    def _choose_refused_sites(
        self, sites: Sequence[FixSite], reason: Note, culprits: dict[int, Note]
    ) -> dict[int, Note]:
        """Return the indices of the sites to refuse, with reasons.

        If the result is empty, the caller tries the sites in halves.
        """
        if self.judge.failure is not None or len(_list_places(sites)) == 1:
            return dict.fromkeys(range(len(sites)), reason)
        return culprits if len(sites) > _FEW_SITES or reason.code == SLOWER else {}

    def _try_sites(
        self, sites: list[FixSite], step: FixStep, progress: _StepProgress
    ) -> tuple[Note | None, dict[int, Note]]:
        """Apply sites together, and keep the changes if prediction and outputs permit it.

        Returns:
            The reason why the changes were not kept, or None if they were kept; and by site index,
            reasons for the sites near which the prediction gets worse, or for all sites if it stays
            equal everywhere.
        """
        try:
            candidate, edited = apply_sites(self.model, sites)
        except ModelError as error:
            return Note(str(error), code=error.code), {}
        prediction = predict(candidate, self._named_target)
        objection = gains.find_objection(self.prediction, prediction, step)
        culprits = gains.find_worsening_changes(
            self.model, candidate, edited, self.prediction, prediction, step
        )
        if objection is None:
            culprits = find_needless_sites(
                self.model, self.target, culprits, sites, prediction, step
            )
            speed = self._choose_speed_check(prediction)
            if speed is not None and step.shares_scales and not culprits and len(sites) > 1:
                if not progress.is_time_compared:
                    culprits = find_slower_sites(self.model, candidate, sites, speed)
                progress.is_time_compared = True
            objection = next(iter(culprits.values()), None)
        if objection is None:
            attempts = [_make_attempt(site) for site in sites]
            objection = self._keep_if_accepted(candidate, prediction, attempts, step)
            if objection is None:
                self._record_common_scales(sites, attempts)
            return objection, {}
        if not culprits and objection is gains.NO_GAIN:
            culprits = dict.fromkeys(range(len(sites)), objection)
        return objection, culprits

    def _record_common_scales(
        self, sites: Sequence[FixSite], attempts: Sequence[FixAttempt]
    ) -> None:
        """Record kept common scales, and state them in the fixes that set these scales before."""
        for site, attempt in zip(sites, attempts, strict=True):
            if site.common_scale is not None:
                self._history.record(site.common_scale)
                self._common_scales.append((attempt, site.common_scale))
        for attempt, common in self._common_scales:
            attempt.what = self._history.add_later(common).describe()

    def try_model_step(self, step: ModelStep) -> None:
        """Try a rewrite of the whole model if it can remove causes of findings."""
        findings = [f for f in self.prediction.findings if step.select_causes(f)]
        if not findings:
            return
        self._start_step()
        attempt = FixAttempt(findings[0].code, "", step.description)
        try:
            candidate = step.convert(self.model, self.target)
        except ModelError as error:
            attempt.why_not = str(error)
        else:
            if candidate is None:
                return
            prediction = predict(candidate, self._named_target)
            objection = gains.find_objection(self.prediction, prediction, step)
            attempt.why_not = (
                objection or self._keep_if_accepted(candidate, prediction, [attempt], step) or ""
            )
        for f in findings:
            self._attempt_places[(f.code, f.node)] = (attempt.code, attempt.node)
        if attempt.why_not:
            self.refused.append(attempt)

    def _keep_if_accepted(
        self,
        candidate: Model,
        prediction: Prediction,
        attempts: list[FixAttempt],
        criteria: FixCriteria,
    ) -> Note | None:
        codes = {attempt.code for attempt in attempts}
        speed = self._choose_speed_check(prediction)
        if speed is not None:
            slowdown = speed.find_slowdown(self.model, candidate, codes)
            if slowdown is not None:
                return slowdown
        fewer_errors = self._has_fewer_errors(prediction)
        reason = self.judge.accept_if_close(self.model, candidate, criteria, fewer_errors)
        if reason is None:
            if speed is not None:
                saved_ms = speed.measure_saving(self.model, candidate, codes)
                self.savings.append((attempts, saved_ms or 0.0))
            self.model, self.prediction = candidate, prediction
            self.applied += attempts
            if self.judge.verdict is not None:
                self._note_verdict(self.judge.verdict, [attempt.code for attempt in attempts])
        return reason

    def _has_fewer_errors(self, prediction: Prediction) -> bool:
        return count_error_findings(prediction) < count_error_findings(self.prediction)

    def _choose_speed_check(self, prediction: Prediction) -> SpeedCheck | None:
        """Return the comparison of times if it decides on changes with this prediction.

        Changes that the user requested, or that remove errors, may make the model slower.
        """
        is_needed = self._requested or self._has_fewer_errors(prediction)
        return None if is_needed else self._speed

    def _start_step(self) -> None:
        self.judge.start_step()
        self._verdict_note = None

    def _note_verdict(self, verdict: DetectionVerdict, codes: Sequence[str]) -> None:
        """Add the note on kept changes; it replaces the note on earlier changes of the step."""
        earlier = self._verdict_note
        if earlier is not None:
            codes = [*earlier.values["codes"], *codes]
            self.notes.remove(earlier)
        self._verdict_note = verdict.describe_kept_change(list(dict.fromkeys(codes)))
        self.notes.append(self._verdict_note)

    def drop_outdated_refusals(self) -> None:
        """Remove refusals at nodes that other fixes removed from the model.

        Refusals of common scales or changes without a gain are removed as well, if nothing is lost
        at their places.
        """
        removed = {n.name for n in self._original.nodes} - {n.name for n in self.model.nodes}
        costly = {(f.code, f.node) for f in self.prediction.findings if f.gains}
        self.refused = [
            attempt
            for attempt in self.refused
            if attempt.node not in removed
            and (
                Note.from_text(attempt.why_not).code not in _NEEDLESS_REFUSALS
                or not costly.isdisjoint(attempt.places)
            )
        ]

    def record_unfixed(self, codes: Collection[str]) -> None:
        """Add notes on requested codes without findings, and refusals for findings that remain."""
        present: set[str] = {f.code for f in self.before.findings}
        present.update(a.code for a in (*self.applied, *self.refused))
        self.notes += [
            Note(
                f"{code} does not occur in this model for {self._named_target.name}",
                code="code-not-found",
                finding=code,
            )
            for code in sorted(set(codes) - present)
        ]
        refused = {(a.code, a.node) for a in self.refused}
        applied = {(a.code, a.node) for a in self.applied}
        for finding in self.prediction.findings:
            place = self._attempt_places.get((finding.code, finding.node))
            if finding.code in codes and place not in refused:
                why_not = _explain_untried(finding)
                if place is not None and place in applied:
                    # One finding may be about several layers, each with its own fix.
                    node = "this place" if place[1] == finding.node else place[1]
                    why_not = f"the fix was applied at {node}, but the finding remains"
                self.refused.append(FixAttempt(finding.code, finding.node, finding.fix, why_not))

    def _find_added_relus(self) -> list[Node]:
        before = {node.name for node in self._original.nodes}
        return [n for n in self.model.nodes if n.op == "Relu" and n.name not in before]

    def remove_idle_relus(self) -> None:
        """Remove added Relus whose quantizer another fix removed and that clip no value.

        A Relu that clips values of the samples may have been part of the network, see
        :func:`qdqtool.patterns.rewrites.clips_negative_values`.
        """
        relus = [
            relu
            for relu in self._find_added_relus()
            if not any(map(qdq.is_q, self.model.consumers(relu.output)))
        ]
        sources = self.judge.find_nonnegative_tensors(self.model, [n.input(0) for n in relus])
        if not sources:
            return
        editor = Editor(self.model.copy())
        for relu in relus:
            if relu.input(0) in sources:
                editor.bypass(relu, relu.input(0))
        self.model = editor.finish()
        self.prediction = predict(self.model, self._named_target)

    def record_scales(self) -> None:
        """Write the scales that common scales replaced to the metadata of the fixed model."""
        if self._common_scales:
            self._history.write_to(self.model)

    def record_refusals(self) -> None:
        """Write the places that the outputs on the samples refused to the metadata of the model.

        Errors are left out: ``fix`` always tries to remove them.
        """
        earlier = read_refused_fixes(self.model)
        places = self._list_output_refusals()
        if self._requested:  # changes of other codes were not tried
            places.update(place for place in earlier if place[0] not in self._requested)
        warnings = (f for f in self.prediction.findings if f.severity != Severity.ERROR)
        places &= {(f.code, f.node) for f in warnings}
        if places != earlier:
            self.model = self.model.copy()  # nothing but the metadata may differ from the input
            record_refused_fixes(self.model.proto, places)

    def _list_output_refusals(self) -> set[Place]:
        """Return the places that the outputs on the samples refused, now or in an earlier call."""
        kinds = (_EARLIER_REFUSAL.code, *(_OUTPUT_REFUSALS if self.judge.has_samples else ()))
        refused = [a for a in self.refused if Note.from_text(a.why_not).code in kinds]
        return set(itertools.chain.from_iterable({(a.code, a.node), *a.places} for a in refused))

    def note_added_relus(self) -> None:
        """Add a note with the number of Relus that fixes added."""
        count = len(self._find_added_relus())
        if count:
            self.notes.append(
                Note(
                    f"{format_count_were(count, 'Relu')} added, because quantizers whose range "
                    "started at 0 also clipped negative values",
                    code="relus-added",
                    count=count,
                )
            )

    def note_losses(self) -> None:
        """Add notes on errors that grew, and the advice to quantize again if accuracy was lost."""
        if self.judge.has_samples:
            self.judge.run_reference()  # this was not done yet if no fix was tried
        errors = self.judge.list_errors()
        inputs = "" if self.judge.has_samples else " on random inputs"
        self.notes += _note_worse_outputs(errors, inputs)
        # Constants that the file stores as INT8: fixes may make them floats, but the exact values
        # are lost.
        rounded = quantizers.find_rounded_constants(View(self._original))
        if rounded:
            self.notes.append(_describe_rounded_constants(rounded))
        halved = any(a.code in HALVING_CODES for a in self.applied)
        is_worse = self.judge.has_samples and any(e.has_grown for e in errors)
        if halved or is_worse or rounded or _has_lossy_weights(self.prediction):
            self.notes.append(
                Note(
                    "fixes keep the ranges of the file and do not calibrate: for full accuracy, "
                    "quantize the float model (qdqtool insert)",
                    code="insert-is-better",
                )
            )


def _make_attempt(site: FixSite, why_not: str = "") -> FixAttempt:
    return FixAttempt(site.code, site.node, site.description, why_not, site.findings)


def _list_places(sites: Sequence[FixSite]) -> list[Place]:
    return list(dict.fromkeys(site.place for site in sites))


def _describe_try_limit(tries: int, reason: Note | None, sites: Sequence[FixSite]) -> Note:
    codes = {site.code for site in sites}
    advice = "; try each code alone with `only`" if len(codes) > 1 else ""
    limit = f"the limit of {tries} attempts was reached before"
    if reason is None:
        return Note(f"{limit} these places were tried{advice}", code="not-separated")
    return Note(
        f"{reason}; {limit} the places that cause this were found, so all these places were left "
        f"unchanged{advice}",
        code="not-separated-as",
    )


def _explain_untried(finding: Finding) -> str:
    """Return why no site was found for a finding."""
    if not attempted_reasons(finding):
        return "no automatic fix exists for the cause of this finding"
    if finding.gains:
        steps = (step for step in (*STEPS, *MODEL_STEPS) if step.select_causes(finding))
        requires = [step.requires for step in steps if step.requires]
        text = f"the fix needs {', or '.join(requires) or 'another structure'}"
        return Note(text, code="condition-not-met", requires=requires)
    return "the fix would not improve the prediction"


def count_error_findings(prediction: Prediction) -> int:
    """Return the number of findings that are errors."""
    return sum(f.severity == Severity.ERROR for f in prediction.findings)


def _describe_rounded_constants(constants: list[tuple[float, str]]) -> Note:
    step, tensor = max(constants)
    count = len(constants)
    ordered = sorted(constants, reverse=True)
    names = list_names(f"'{name}' in steps of {s:.4g}" for s, name in ordered)
    return Note(
        f"{format_count_were(count, 'constant')} rounded to INT8 or UINT8 by another tool, and "
        f"only the float model has the exact values: {names}. Rounded anchors or strides of a "
        "detector move boxes by up to half a step",
        code="constants-rounded",
        count=count,
        tensor=tensor,
        step=step,
    )


def _has_lossy_weights(prediction: Prediction) -> bool:
    reasons = [c.reason for f in prediction.findings for c in f.causes]
    return any(isinstance(r, WeightsPerTensor) and r.lossy for r in reasons)


def _note_worse_outputs(errors: Sequence[OutputError], inputs: str) -> list[Note]:
    grown = [
        Note(
            f"the error of {e.title} grew from {e.before:.2%} to {e.after:.2%}{inputs}",
            code="error-grew",
        )
        for e in errors
        if e.has_grown
    ]
    lost = [
        Note(
            f"{e.title} has the same value everywhere, but varies in the float network: quantize "
            "the float model again",
            code="output-lost",
        )
        for e in errors
        if e.lost
    ]
    return grown + lost
