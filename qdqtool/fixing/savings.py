"""Times that the automatic fixes of a model save, for the estimate of a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdqtool.errors import QdqtoolError
from qdqtool.findings import codes
from qdqtool.findings.rules import ON_REQUEST_CODES, UNPROMISED_CODES
from qdqtool.fixing import gains
from qdqtool.fixing.promises import concerns
from qdqtool.fixing.rehearsal import rehearse
from qdqtool.fixing.session import (
    FixAttempt,
    apply_sites,
    find_needless_sites,
)
from qdqtool.fixing.site import FixSite, FixStep
from qdqtool.fixing.speed import SLOWER, SpeedCheck
from qdqtool.fixing.steps import MODEL_STEPS, STEPS, ModelStep
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import require_weights
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Severity, split_fixable
from qdqtool.timing.alternatives import estimate_variant
from qdqtool.timing.results import FixTime, TimeEstimate
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

_MAX_SITES = 512  # the saving of a kind of fix with more sites is not estimated
_NOT_ESTIMATED = "saving-not-estimated"  # code of the note on such a kind of fix


def add_fix_savings(
    model: Model, prediction: Prediction, time: TimeEstimate, target: Target
) -> None:
    """Add the time that each kind of automatic fix saves to a time estimate, in place.

    A kind of fix is left out if it saves no time, if :func:`fix` would refuse it because of the
    prediction, or if it cannot be applied because weights are missing. It is also left out, with a
    note, if it has more than 512 places. Nothing is added for a GPU without INT8. ``saves_ms`` of
    findings becomes None if their fix saves no time or is refused. Otherwise, it becomes at most
    the saving of this kind of fix. ``automatic`` of findings is cleared if :func:`fix` with this
    GPU refuses their fix because the model would become slower.
    """
    if not time.gpu.has_int8:
        return
    savings = _FixSavings(View(model), prediction, time, target, time.total_ms)
    savings.add_steps()
    kinds = len(time.fixes)
    for model_step in MODEL_STEPS:
        if model_step.changes_types:
            with contextlib.suppress(QdqtoolError):
                savings.add_type_change(model_step)
    time.fixes.sort(key=lambda f: -f.saves_ms)
    changes_types = kinds < len(time.fixes)
    default, on_request = split_fixable(prediction.findings)
    is_useful = on_request or any(codes.get(f.code).saves_time for f in default)
    has_many_sites = any(note.code == _NOT_ESTIMATED for note in time.notes)
    if default and is_useful and not has_many_sites:
        with contextlib.suppress(QdqtoolError):
            require_weights(model)
            savings = savings.add_steps_in_order()
    if not has_many_sites:
        savings.add_accuracy_steps()
    if changes_types:
        time.fixed_ms = None


def _withdraw_slower_fixes(
    prediction: Prediction, time: TimeEstimate, refused: Sequence[FixAttempt]
) -> None:
    """Withdraw the refused fixes, which make the model slower, with a note."""
    places = set(itertools.chain.from_iterable(attempt.places for attempt in refused))
    withdrawn = [f for f in prediction.findings if concerns(f, places)]
    names = list(dict.fromkeys(attempt.code for attempt in refused))
    named = [f for f in withdrawn if f.code in names]
    count = sum(f.automatic for f in named) or len(refused)
    for finding in withdrawn:
        finding.automatic, finding.saves_ms = False, None
    time.fixes[:] = [fix for fix in time.fixes if set(names).isdisjoint(fix.codes)]
    text = (
        f"the fixes of {', '.join(names)} ({format_count(count, 'place')}) would make the model "
        f"slower on {time.gpu.name}. 'qdqtool fix' applies them only without `gpu`, or if `only` "
        "names the code"
    )
    nodes = [f.node for f in named]
    time.notes.append(Note(text, code="fixes-slower", codes=names, places=count, nodes=nodes))


def _remove_savings(
    prediction: Prediction, sites: Sequence[FixSite], accepted: Sequence[FixSite]
) -> None:
    """Set ``saves_ms`` of the findings to None whose code or place has no accepted site."""
    refused_codes = {s.code for s in sites} - {s.code for s in accepted}
    refused_places = {(s.code, s.node) for s in sites} - {(s.code, s.node) for s in accepted}
    for finding in prediction.findings:
        is_refused = finding.automatic and finding.code in refused_codes
        if is_refused or concerns(finding, refused_places):
            finding.saves_ms = None


def _limit_savings(prediction: Prediction, accepted: Sequence[FixSite], saved_ms: float) -> None:
    """Limit ``saves_ms`` of findings at accepted sites to the saving of all these sites.

    Findings of codes that promise no fix have no ``saves_ms`` yet, and get this limit.
    """
    places = {(site.code, site.node) for site in accepted}
    for finding in prediction.findings:
        is_unpromised = finding.code in UNPROMISED_CODES and finding.automatic
        if (finding.saves_ms is not None or is_unpromised) and concerns(finding, places):
            limit = round(saved_ms, 5)
            finding.saves_ms = min(finding.saves_ms or limit, limit)


def _make_fix_time(fixes: Sequence[FixSite | FixAttempt], saved_ms: float) -> FixTime:
    """Return the codes and nodes of fixes with the milliseconds that they save."""
    nodes = list(dict.fromkeys(fix.node for fix in fixes))
    return FixTime(sorted({fix.code for fix in fixes}), nodes, saved_ms)


@dataclass(frozen=True, slots=True)
class _FixSavings:
    """Adds the time that fixes save to a time estimate, in place.

    Attributes:
        view: The model that is fixed.
        prediction: Prediction of this model.
        time: The estimate.
        target: TensorRT version.
        total_ms: Milliseconds of this model.
    """

    view: View
    prediction: Prediction
    time: TimeEstimate
    target: Target
    total_ms: float

    def _find_codes(self, step: FixStep) -> set[str]:
        """Return the codes of the findings that a step fixes without a request."""
        return {f.code for f in self.prediction.findings if f.automatic}.intersection(step.codes)

    def add_steps(self) -> None:
        """Add the time that each step saves."""
        for step in STEPS:
            if not step.costs_speed and self._find_codes(step):
                with contextlib.suppress(QdqtoolError):
                    self._add_step(step)

    def _add_step(self, step: FixStep) -> None:
        """Add the time that the fixes of a step save.

        Raises:
            QdqtoolError: A fix cannot be applied, or the fixed model cannot be predicted.
        """
        sites = self._find_sites(step)
        if len(sites) > _MAX_SITES:
            self.time.notes += _note_many_sites(sites)
            return
        accepted, saved_ms = self._choose_sites(step, sites)
        if accepted:
            self.time.fixes.append(_make_fix_time(accepted, saved_ms))
            _limit_savings(self.prediction, accepted, saved_ms)
        _remove_savings(self.prediction, sites, accepted)

    def _find_sites(self, step: FixStep) -> list[FixSite]:
        found = step.find_sites(self.view, self.target, self.prediction, self._find_codes(step))
        return [site for site in found if not site.skip_reason]

    def _choose_sites(self, step: FixStep, sites: list[FixSite]) -> tuple[list[FixSite], float]:
        """Return the sites that ``fix`` accepts together, and the milliseconds that they save.

        Sites that ``fix`` refuses because the prediction gets worse near them are left out. The
        sites are empty if they save no time.
        """
        model, before = self.view.model, self.prediction
        while sites:
            candidate, edited = apply_sites(model, sites)
            saved_ms = self._measure_gain(candidate)
            if saved_ms <= 0:
                break
            after = predict(candidate, self.target)
            worse = gains.find_worsening_changes(model, candidate, edited, before, after, step)
            if gains.find_objection(before, after, step) is None:
                worse = find_needless_sites(model, self.target, worse, sites, after, step)
                if not worse:
                    return sites, saved_ms
            sites = [site for i, site in enumerate(sites) if worse and i not in worse]
        return [], 0.0

    def _measure_gain(self, candidate: Model) -> float:
        """Return by how many milliseconds a changed model is faster."""
        return self.total_ms - estimate_variant(self.time, candidate, self.target)

    def add_steps_in_order(self) -> _FixSavings:
        """Estimate the fixes that need no request together, and the others after them.

        Fixes that make the model slower are withdrawn, with a note.

        Returns:
            Savings for the model after the fixes that need no request.

        Raises:
            QdqtoolError: A fix cannot be applied, or a fixed model cannot be predicted.
        """
        speed = SpeedCheck(self.time, self.target)
        session = rehearse(self.view.model, self.target, speed)
        refused = [a for a in session.refused if Note.from_text(a.why_not).code == SLOWER]
        if refused:
            _withdraw_slower_fixes(self.prediction, self.time, refused)
        self._add_further_fixes(session.savings)
        fixed_ms = speed.measure_ms(session.model)
        if fixed_ms is not None and (self.time.fixes or self.time.further_fixes):
            self.time.fixed_ms = fixed_ms
        for step in MODEL_STEPS:
            if step.changes_types and session.is_tried_by_default(step):
                session.try_model_step(step)
        total_ms = speed.measure_ms(session.model)
        if total_ms is None or not session.applied:
            return self
        view, after = View(session.model), session.prediction
        later = replace(self, view=view, prediction=after, total_ms=total_ms)
        self._replace_requested_savings(later)
        return later

    def add_accuracy_steps(self) -> None:
        """Add the time that fixes on request cost if they are for accuracy.

        A kind of fix is left out if it cannot be applied, or if the model cannot be predicted.
        """
        for step in STEPS:
            requested = {f.code for f in split_fixable(self.prediction.findings)[1]}
            if step.costs_speed and not requested.isdisjoint(step.codes):
                with contextlib.suppress(QdqtoolError):
                    sites = self._find_sites(step)
                    if 0 < len(sites) <= _MAX_SITES:
                        candidate, _ = apply_sites(self.view.model, sites)
                        saved_ms = self._measure_gain(candidate)
                        self.time.accuracy_fixes.append(_make_fix_time(sites, saved_ms))

    def _add_further_fixes(self, kept: Sequence[tuple[list[FixAttempt], float]]) -> None:
        """Add the time that kept fixes save after others, unless they save time alone."""
        fixes = self.time.further_fixes if self.time.fixes else self.time.fixes
        alone = {code for fix in self.time.fixes for code in fix.codes}
        for attempts, saved_ms in kept:
            if saved_ms > 0 and alone.isdisjoint(attempt.code for attempt in attempts):
                fixes.append(_make_fix_time(attempts, saved_ms))

    def _replace_requested_savings(self, later: _FixSavings) -> None:
        """Replace the savings of fixes on request by those that remain after the other fixes.

        Args:
            later: Savings for the model with the other fixes.
        """
        default, on_request = split_fixable(self.prediction.findings)
        requested = {f.code for f in on_request} - {f.code for f in default}
        time = self.time
        time.fixes[:] = [fix for fix in time.fixes if requested.isdisjoint(fix.codes)]
        for step in STEPS:
            if step.costs_speed or requested.isdisjoint(step.codes):
                continue
            sites, saved_ms = later._choose_sites(step, later._find_sites(step))
            if sites:
                time.further_fixes.append(_make_fix_time(sites, saved_ms))
            for finding in on_request:
                if finding.code in step.codes and finding.saves_ms is not None:
                    saves_ms = min(finding.saves_ms, round(saved_ms, 5))
                    finding.saves_ms = saves_ms if sites else None

    def add_type_change(self, step: ModelStep) -> None:
        """Add the time that FP16 instead of FP32 saves for the layers without Q/DQ.

        INT8 convolutions can write FP32 but not FP16, so an FP16 layer after an INT8 convolution
        needs a reformat. If few layers are FP32, these reformats cost more time than FP16 saves. In
        this case nothing is added, and the finding on FP32 layers becomes a note, in place.

        Raises:
            QdqtoolError: The model cannot be converted or predicted.
        """
        findings = [f for f in self.prediction.findings if step.select_causes(f)]
        if not any(f.code in ON_REQUEST_CODES for f in findings):
            return
        candidate = step.convert(self.view.model, self.target)
        if candidate is None:
            return
        saved_ms = self._measure_gain(candidate)
        if saved_ms > 0:
            nodes = [f.node for f in findings]
            self.time.fixes.append(FixTime(sorted({f.code for f in findings}), nodes, saved_ms))
            return
        for finding in findings:
            finding.severity, finding.gains = Severity.INFO, False
            finding.automatic, finding.saves_ms = False, None


def _note_many_sites(sites: Sequence[FixSite]) -> list[Note]:
    names = sorted({s.code for s in sites if codes.get(s.code).saves_time})
    if not names:
        return []
    text = (
        f"the time that fixing {', '.join(names)} saves and the time after all fixes were not "
        f"estimated, because {len(sites)} places exceed the limit of {_MAX_SITES}. 'qdqtool fix' "
        "tries all of them"
    )
    return [Note(text, code=_NOT_ESTIMATED, codes=names, places=len(sites))]
