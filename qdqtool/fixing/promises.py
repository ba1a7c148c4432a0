"""Examination of findings: whether ``fix`` has a change for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial

from qdqtool.errors import QdqtoolError
from qdqtool.findings import codes
from qdqtool.findings.rules import ON_REQUEST_CODES, UNPROMISED_CODES
from qdqtool.fixing.common_scale import ScaleHistory
from qdqtool.fixing.gains import NO_GAIN
from qdqtool.fixing.site import FixStep, Place, count_total_loss, select_default_sites
from qdqtool.fixing.steps import MODEL_STEPS, STEPS
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.ir.metadata import read_refused_fixes
from qdqtool.ir.modelfile import require_weights
from qdqtool.patterns.view import View
from qdqtool.reasons.finding import Finding, split_fixable
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import target_named
from qdqtool.util.notes import Note

# Fixes of these codes may make the prediction worse at other places, so that `fix` refuses them.
_UNCERTAIN_CODES = frozenset({"ACT-INNER-Q", "ADD-BOTH", "SKIP-FLOAT"})
_STEP_CODES = frozenset(code for step in STEPS for code in step.codes)
_MODEL_CODES = frozenset(code for step in MODEL_STEPS for code in step.codes)


def review_promises(model: Model, prediction: Prediction) -> None:
    """Set ``automatic`` of findings to whether ``fix`` has a change by default, in place.

    The rules that set ``automatic`` examine single reasons. For example, the scales around a Concat
    may differ little, but a further tensor that shares their scale may differ more. Some codes have
    a fix that seldom improves the prediction (ADD-ACT). If it does, the note becomes a finding of
    the usual severity. If a change would not improve the prediction, the savings of its findings
    are cleared. If an earlier call of ``fix`` refused the changes of a finding, ``automatic`` is
    cleared. Findings that need a request are not examined. Nothing else changes if a weight file
    is missing.

    Args:
        model: The predicted model.
        prediction: The prediction.
    """
    refused = read_refused_fixes(model)
    for finding in prediction.findings:
        if finding.automatic and (finding.code, finding.node) in refused:
            finding.automatic = False
            finding.words = partial(_add_refusal, finding.words)
    default, _ = split_fixable(prediction.findings)
    promised = [finding for finding in default if finding.code not in _MODEL_CODES]
    # Fixes outside the steps rewrite quantizers, which enables further fixes.
    if not _STEP_CODES.issuperset(f.code for f in promised):
        return
    with contextlib.suppress(QdqtoolError):
        require_weights(model)
        unfixable = None
        if not (_needs_rehearsal(prediction, promised) or _has_unpromised_site(model, prediction)):
            unfixable = _find_unfixable(model, prediction, promised) if promised else []
        if unfixable is None:
            _review_by_rehearsal(model, prediction, promised)
        for finding in unfixable or ():
            finding.automatic = False


def _add_refusal(words: Callable[[Finding], tuple[str, str]], finding: Finding) -> tuple[str, str]:
    message, fix = words(finding)
    return message, f"{fix} An earlier call of fix refused this change because of the output error."


def _needs_rehearsal(prediction: Prediction, promised: Sequence[Finding]) -> bool:
    # In a model with FP8, a common scale often does not improve the prediction.
    has_fp8 = bool(promised) and any(conv.is_fp8 for conv in prediction.convolutions)
    return has_fp8 or not _UNCERTAIN_CODES.isdisjoint(f.code for f in promised)


def _has_unpromised_site(model: Model, prediction: Prediction) -> bool:
    """Return whether there is a change for a finding of a code that promises no fix."""
    present = {finding.code for finding in prediction.findings} & UNPROMISED_CODES
    view, target = View(model), target_named(prediction.target)
    steps = (step for step in STEPS if not present.isdisjoint(step.codes))
    return any(
        site.code in UNPROMISED_CODES and not site.skip_reason
        for step in steps
        for site in step.find_sites(view, target, prediction, step.codes)
    )


def _review_by_rehearsal(model: Model, prediction: Prediction, promised: Sequence[Finding]) -> None:
    """Set ``automatic`` of the findings that all fixes together remove or leave.

    Raises:
        QdqtoolError: A fixed model cannot be predicted.
    """
    from qdqtool.fixing.rehearsal import rehearse

    session = rehearse(model, target_named(prediction.target))
    useless = (a.places for a in session.refused if Note.from_text(a.why_not).code == NO_GAIN.code)
    places = set(itertools.chain.from_iterable(useless))
    for finding in prediction.findings:
        if concerns(finding, places):
            finding.saves_ms = None
    left = {(f.code, f.node) for f in session.prediction.findings if f.gains}
    for finding in promised:
        finding.automatic = (finding.code, finding.node) not in left
    removed = {(a.code, a.node) for a in session.applied}
    removed -= {(f.code, f.node) for f in session.prediction.findings}
    for finding in prediction.findings:
        if finding.code in UNPROMISED_CODES and (finding.code, finding.node) in removed:
            finding.automatic = finding.gains = True
            finding.severity = codes.get(finding.code).severity_on(prediction.target)


def concerns(finding: Finding, places: Collection[Place]) -> bool:
    """Return whether a finding is at one of the places, or refers to one of them."""
    references = itertools.chain.from_iterable(cause.see for cause in finding.causes)
    return any(place in places for place in ((finding.code, finding.node), *references))


def _find_unfixable(
    model: Model, prediction: Prediction, promised: Sequence[Finding]
) -> list[Finding] | None:
    """Return the findings that have no change in the model, or a change that ``fix`` skips.

    None if only :func:`rehearse` can show this, because of a common scale after other changes.

    The changes of each step are applied before the next step, but not predicted. A finding that has
    a change in the model, but none after earlier steps, is one that these steps remove.

    Raises:
        QdqtoolError: A change cannot be applied.
    """
    target = target_named(prediction.target)
    steps = _select_steps({finding.code for finding in promised})
    fixable: set[Place] = set()
    skipped: set[Place] = set()
    current, history = model, ScaleHistory.from_model(model)
    for step in steps:
        found = step.find_sites(View(current), target, prediction, step.codes)
        found = count_total_loss(found, history)
        skipped.update(*(site.findings for site in found if site.skip_reason))
        possible = [site for site in found if not site.skip_reason]
        sites = select_default_sites(possible, prediction.findings)
        fixable.update(*(site.findings for site in sites))
        if sites:
            editor = Editor(model.copy() if current is model else current)
            for site in sites:
                site.apply(editor)
                if site.common_scale is not None:
                    history.record(site.common_scale)
            current = editor.finish()
    for step in (step for step in steps if step.shares_scales):
        # Pairs that later steps moved may need a scale that `fix` then refuses.
        found = step.find_sites(View(current), target, prediction, step.codes)
        sites = count_total_loss(found, history)
        if any(site.skip_reason and site.place in fixable for site in sites):
            return None
    left = {(f.code, f.node) for f in promised} - fixable
    if left - skipped:
        view = View(model)
        found = [s for step in steps for s in step.find_sites(view, target, prediction, step.codes)]
        left -= {place for site in found for place in site.findings} - skipped
    return [f for f in promised if (f.code, f.node) in left]


def _select_steps(codes: set[str]) -> list[FixStep]:
    """Return the steps that ``fix`` tries by default, up to the last step for one of the codes."""
    last = max(number for number, step in enumerate(STEPS) if not codes.isdisjoint(step.codes))
    return [
        step
        for step in STEPS[: last + 1]
        if not codes.isdisjoint(step.codes) or not ON_REQUEST_CODES.issuperset(step.codes)
    ]
