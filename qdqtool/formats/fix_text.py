"""Text of ``fix``: the result first, then the changes and the remaining findings."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from qdqtool.findings import codes
from qdqtool.findings.rules import ATTEMPTED_CODES
from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.formats.output import (
    ROW_COLUMN,
    SEVERITY_STYLES,
    Style,
    TextPage,
    as_options,
    fixed_model_path,
)
from qdqtool.formats.verdicts import RAW_ERROR_REMARK, needs_other_format, verdict
from qdqtool.reasons.finding import Severity, split_fixable
from qdqtool.util.files import output_verb
from qdqtool.util.text import format_count, format_ms

if TYPE_CHECKING:
    from qdqtool.fixing.api import Fixed
    from qdqtool.fixing.outputs import OutputError
    from qdqtool.fixing.session import FixAttempt
    from qdqtool.ir.precision import Precision
    from qdqtool.reasons.finding import Finding, FindingCode
    from qdqtool.timing.results import TimeEstimate

_MANUAL = "no automatic fix"
_SLOWER = "would make the model slower on this GPU"
_LOSSES = ("constants-rounded",)  # codes of notes on problems that no fix can remove

_LISTED_ERRORS = ("error-grew",)  # codes of notes that repeat a line of "Output error"


def render(
    fixed: Fixed,
    output: str,
    width: int,
    *,
    options: str = "",
    fix_options: str = "",
    compare_options: str = " --calib other-images/",
    seconds: float | None = None,
) -> TextPage:
    """Return the text of ``fix``: verdicts before and after the fixes, and all changes.

    Args:
        fixed: The result.
        output: Path of the written model.
        width: Columns.
        options: Options that suggested ``predict`` and ``fix`` repeat, each with a space before it.
        fix_options: Further options of a suggested ``fix``, in this form.
        compare_options: Options of the suggested ``compare``, in this form.
        seconds: Time that the command took. None: the time is not printed.
    """
    page = TextPage(width)
    _add_fix_result(page, fixed)
    times = [] if fixed.time is None else [fixed.time]
    earlier_times = times if fixed.time_before is None else [fixed.time_before]
    page.add_row("Before", verdict(fixed.before, times=earlier_times))
    page.add_row("After", verdict(fixed.after, times=times) + _describe_slow_places(fixed))
    if fixed.time is not None:
        _add_time(page, fixed, fixed.time)
    _add_errors(page, fixed)
    for note in fixed.notes:
        if note.code not in (*_LOSSES, *_LISTED_ERRORS):
            page.fill(f"note: {as_options(note)}", style=Style.NOTE)
    places = fixed.fixed_places()
    _add_applied_changes(page, fixed, places)
    _add_other_removed_findings(page, fixed, places)
    _add_refused_changes(page, fixed)
    _add_remaining_findings(page, fixed, output, f"{options}{fix_options}")
    page.add_gap()
    time = "" if seconds is None else f" ({seconds:.1f} s)"
    verb = output_verb(output) if _is_changed(fixed) else "Wrote a copy to"
    page.fill(f"{verb} {output}{time}", style=Style.BOLD)
    page.add_command("Next:", f"qdqtool predict {shlex.quote(output)}{options}")
    if _is_changed(fixed):
        command = f"qdqtool compare FLOAT.onnx {shlex.quote(output)}{compare_options}"
        page.add_command("Compare:", command)
    return page


def _add_other_removed_findings(page: TextPage, fixed: Fixed, places: Counter[str]) -> None:
    """Add the findings that the changes removed, but that no listed change is for."""
    removed = Counter(f.code for f in fixed.before.findings if f.severity != Severity.INFO)
    removed.subtract(f.code for f in fixed.after.findings)
    for code in {change.code for change in fixed.applied}:
        removed[code] -= places[code]
    others = [f"{code} ({count})" for code, count in removed.items() if count > 0]
    if fixed.applied and others:
        page.fill(f"These changes also removed: {', '.join(others)}", 2, "  ")


def _add_fix_result(page: TextPage, fixed: Fixed) -> None:
    count = fixed.fixed_places().total()
    style = SEVERITY_STYLES[Severity.WARNING] if fixed.ok else SEVERITY_STYLES[Severity.ERROR]
    text = f"Nothing {'to fix' if fixed.after.ok else 'fixed'}"
    if _is_changed(fixed):
        text = f"Fixed {format_count(count, 'place')}" if count else "Changed the model"
    page.fill(text, style=Style.GOOD if fixed.after.ok else style)
    page.add_gap()


def _is_changed(fixed: Fixed) -> bool:
    restored = any(note.code == "constants-restored" for note in fixed.notes)
    return restored or bool(fixed.applied)


def _describe_slow_places(fixed: Fixed) -> str:
    gaining = _find_gaining_codes(fixed)
    refused = dict.fromkeys(change.code for change in fixed.refused)
    slow = [
        format_count(_count_refused(fixed, code), f"{code} place")
        for code in refused
        if code in gaining and codes.get(code).saves_time
    ]
    return f"; could be faster: {' and '.join(slow)} not fixed" if slow else ""


def _count_refused(fixed: Fixed, code: FindingCode) -> int:
    """Return the number of places of a code whose changes were refused."""
    groups = _group_by_reason(change for change in fixed.refused if change.code == code)
    return sum(_count_places(fixed, changes) for changes in groups.values())


def _count_places(fixed: Fixed, changes: Sequence[FixAttempt]) -> int:
    """Return the number of remaining findings that refused changes of one code were to remove.

    A change that was for none of them counts as one place.
    """
    left = {(f.code, f.node) for f in fixed.after.findings if f.code == changes[0].code}
    places: set[tuple[str, str]] = set()
    for change in changes:
        own = (change.code, change.node)
        places |= left.intersection({own, *change.places}) or {own}
    return len(places)


def _group_by_reason(changes: Iterable[FixAttempt]) -> dict[str, list[FixAttempt]]:
    groups: dict[str, list[FixAttempt]] = {}
    for change in sorted(changes, key=lambda change: change.why_not):
        groups.setdefault(as_options(change.why_not), []).append(change)
    return groups


def _find_gaining_codes(fixed: Fixed) -> set[str]:
    """Return the codes whose fixes save time: by the estimate for a GPU, else by the prediction."""
    if fixed.time is not None:
        return {code for fix in fixed.time.fixes for code in fix.codes}
    return {f.code for f in fixed.after.findings if f.gains and f.severity != Severity.INFO}


def _add_time(page: TextPage, fixed: Fixed, time: TimeEstimate) -> None:
    """Add the time before and after the fixes, with a warning if the fixed model is slower."""
    if not time.is_supported:
        page.add_row("Time", f"none on {time.gpu.name}: TensorRT {fixed.after.rejection} the model")
        return
    before_ms = fixed.time_before_ms if _is_changed(fixed) else None
    before, after = format_ms(before_ms or time.total_ms), format_ms(time.total_ms)
    change = after if before_ms is None else f"{before} -> {after}"
    other = time.float_time
    text = "" if other is None else f"; in {other.precision} {format_ms(other.total_ms)}"
    page.add_row("Time", f"{change} on {time.gpu.name} (estimated){text}")
    if before_ms is not None and time.total_ms > before_ms and before != after:
        slower = format_ms(time.total_ms - before_ms)
        text = f"warning: the fixed model is {slower} slower on this GPU (estimated)"
        page.fill(text, style=Style.UNCLEAR)


def _add_remaining_findings(page: TextPage, fixed: Fixed, output: str, options: str) -> None:
    counts = fixed.after.findings_by_code()
    notes = Counter(f.code for f in fixed.after.findings if f.severity == Severity.INFO)
    losses = [note for note in fixed.notes if note.code in _LOSSES]
    codes = _list_remaining_codes(fixed)
    untried = _list_untried_codes(fixed)
    if codes or losses:
        page.add_heading("Left")
    for code in codes:
        reasons = _describe_reasons(fixed, code, untried)
        count = str(counts[code])
        if 0 < notes[code] < counts[code]:
            count += f", including {format_count(notes[code], 'note')}"
        page.fill(f"{code} ({count}){': ' if reasons else ''}{reasons}", 4, "  ")
    for note in losses:
        text = as_options(note)
        page.fill(f"{text[0].upper()}{text[1:]}.", 2, "  ", SEVERITY_STYLES[Severity.WARNING])
    offered = [code for code, reason in untried.items() if reason != _SLOWER]
    if offered:
        page.fill("To apply fixes that were not tried:", 2, "  ")
        other = fixed_model_path(output)
        only = " ".join(f"--only {code}" for code in offered)
        page.add_command(
            "", f"qdqtool fix {shlex.quote(output)} {only} -o {shlex.quote(other)}{options}"
        )


def _list_remaining_codes(fixed: Fixed) -> list[FindingCode]:
    """Return the codes of remaining errors and warnings, then those of notes on refused fixes."""
    findings = fixed.after.findings
    refused = {(change.code, change.node) for change in fixed.refused}
    serious = [f.code for f in findings if f.severity != Severity.INFO]
    minor = [f.code for f in findings if (f.code, f.node) in refused]
    return list(dict.fromkeys([*serious, *minor]))


def _describe_reasons(fixed: Fixed, code: FindingCode, untried: Mapping[FindingCode, str]) -> str:
    """Return why the places of a code remain, with counts, and advice on one of the places.

    Empty if the reason is unknown for all places. Advice is for places without an automatic fix, if
    ``fix`` handles the code elsewhere.
    """
    refused = _find_refusing_codes(fixed)
    findings = [f for f in fixed.after.findings if f.code == code]
    reason_of = {id(f): _find_reason(f, refused, untried) for f in findings}
    counts = Counter(filter(None, reason_of.values()))
    manual = [f for f in findings if f.code in ATTEMPTED_CODES and reason_of[id(f)] == _MANUAL]
    reasons = [
        reason if count == len(findings) else f"{reason} for {count}"
        for reason, count in counts.items()
    ]
    return f"{', '.join(reasons)}{_describe_manual_fix(manual, find_float_type(fixed.after))}"


def _find_reason(
    finding: Finding, refused: Mapping[tuple[str, str], str], untried: Mapping[FindingCode, str]
) -> str:
    """Return why a place remains; empty if the reason is unknown."""
    code = refused.get((finding.code, finding.node))
    if code is not None:
        return "reason above" if code == finding.code else f"see {code} above"
    if finding.automatic and finding.code in ATTEMPTED_CODES:
        return untried.get(finding.code, "")
    is_note = finding.severity == Severity.INFO and finding.code in ATTEMPTED_CODES
    return "" if is_note else _MANUAL


def _describe_manual_fix(findings: Sequence[Finding], float_type: Precision | None) -> str:
    """Return the advice of the first finding as a further sentence; empty without findings."""
    if not findings:
        return ""
    node, fix = findings[0].node, name_floats(findings[0].fix, findings[0].code, float_type)
    return f". {'First: ' if len(findings) > 1 else ''}{f'{node}: ' if node else ''}{fix}"


def _find_refusing_codes(fixed: Fixed) -> dict[tuple[str, str], str]:
    """Return the code under which the refused change of each place is listed."""
    own = {(change.code, change.node): str(change.code) for change in fixed.refused}
    return {place: change.code for change in fixed.refused for place in change.places} | own


def _list_untried_codes(fixed: Fixed) -> dict[FindingCode, str]:
    """Return the codes whose automatic fixes were not tried, with the reason."""
    tried = {change.code for change in (*fixed.applied, *fixed.refused)}
    untried: dict[FindingCode, str] = {}
    if needs_other_format(fixed.after):
        return untried
    slower = _find_slower_codes(fixed)
    reasons = "not named with --only", "may cost speed, needs --only"
    for reason, group in zip(reasons, split_fixable(fixed.after.findings), strict=True):
        for f in group:
            if f.code not in tried and f.severity != Severity.INFO:
                untried.setdefault(f.code, _SLOWER if f.code in slower else reason)
    return untried


def _find_slower_codes(fixed: Fixed) -> set[str]:
    """Return the codes of which no fix would save time, and some would make the model slower."""
    if fixed.time is None:
        return set()
    notes = [note for note in fixed.time.notes if note.code == "fixes-slower"]
    slower = {code for note in notes for code in note.values["codes"]}
    saving = (*fixed.time.fixes, *fixed.time.further_fixes)
    return slower.difference(*(fix.codes for fix in saving))


def _add_errors(page: TextPage, fixed: Fixed) -> None:
    """Add the errors of outputs against the network with float activations, before and after.

    Errors on random inputs do not show the accuracy, so they are left out.
    """
    if not fixed.errors:
        return
    if not fixed.samples:
        text = (
            "not measured: give --calib images/. Random inputs do not show the accuracy; fix used "
            "them only to refuse changes that alter the outputs too much."
        )
        page.add_row("Output error", text)
        return
    samples = format_count(fixed.samples, "sample")
    text = (
        "RMS difference of the outputs to those with float activations, in percent of the RMS of "
        f"the latter (100%: the error of zeros), before and after on {samples}. {RAW_ERROR_REMARK}"
    )
    if any(error.tensor for error in fixed.errors):
        text += (
            " All boxes count, also those without an object, so the error of the scores can be "
            "large although most detections agree."
        )
    is_head_fixed = any(change.code == "HEAD-QUANT" for change in fixed.applied)
    if is_head_fixed and fixed.detections is None:
        text += (
            " HEAD-QUANT hardly changes these errors, but can raise the agreement: from 0.79 to "
            "0.97 for a YOLOv8n, whose error fell by 0.04 percentage points."
        )
    page.add_row("Output error", text)
    for error in fixed.errors:
        style = Style.BAD if error.lost else Style.UNCLEAR if error.has_grown else Style.PLAIN
        change = f"{error.before:>7.2%} -> {error.after:>7.2%}{_rate_change(error)}"
        page.fill(f"{change}  {error.title}", ROW_COLUMN + 2, " " * ROW_COLUMN, style)
    if fixed.detections is not None:
        text = (
            f"{fixed.detections.describe_values()}: agreement mAP with this model's own float "
            "activations, not with the float model, so errors of the weights are not included. "
            "Values of two calls of fix cannot be compared."
        )
        page.add_row("Agreement", text)
    if any(error.has_grown for error in fixed.errors):
        page.fill(
            f"warning: an output error grew{_describe_recovery(fixed)}. Measure the agreement with "
            "the float model on images (command at the end). If it is too low, quantize the float "
            "model again (qdqtool insert).",
            style=Style.UNCLEAR,
        )


def _describe_recovery(fixed: Fixed) -> str:
    """Return the agreement if the fixed model finds objects, but the model before found none."""
    detections = fixed.detections
    if detections is None or not detections.finds_objects_again:
        return ""
    values = f"{detections.before:.3f} -> {detections.after:.3f}"
    return f", but the model finds objects again: agreement {values}"


def _rate_change(error: OutputError) -> str:
    if error.lost:
        return "  lost"
    if error.has_grown:
        return "  grew"
    return "  fell" if error.has_fallen else "  little change"


def _add_applied_changes(page: TextPage, fixed: Fixed, places: Counter[str]) -> None:
    if fixed.applied:
        page.add_heading("Applied")
    remaining = {f.code for f in fixed.after.findings} - places.keys()
    for code, changes in _group_by_code(fixed.applied):
        label = str(places[code] or len(changes))
        if code in remaining:
            label = f"{format_count(len(changes), 'change')}, finding remains"
        page.fill(f"{code} ({label})", 4, "  ")
        _add_first_change(page, changes, 6)


def _add_refused_changes(page: TextPage, fixed: Fixed) -> None:
    """Add the refused changes of each code, with the number of places for each reason."""
    fixes = [] if fixed.time is None else fixed.time.fixes
    savings = {code: fix.saves_ms for fix in fixes for code in fix.codes}
    if fixed.refused:
        page.add_heading("Not applied")
    for code, changes in _group_by_code(fixed.refused):
        count = _count_refused(fixed, code)
        saving = f", would save up to {format_ms(savings[code])}" if code in savings else ""
        heading = f"{code} ({count}){saving}{' together' if saving and count > 1 else ''}"
        groups = _group_by_reason(changes)
        if len(groups) == 1:
            page.fill(f"{heading}: {next(iter(groups))}", 4, "  ")
            _add_first_change(page, changes, 6)
            continue
        page.fill(heading, 4, "  ")
        for reason, same in groups.items():
            page.fill(f"{_count_places(fixed, same)}: {reason}", 6, "    - ")
            _add_first_change(page, same, 8)


def _group_by_code(changes: Iterable[FixAttempt]) -> list[tuple[FindingCode, list[FixAttempt]]]:
    groups: dict[FindingCode, list[FixAttempt]] = {}
    for change in sorted(changes, key=lambda change: change.code):
        groups.setdefault(change.code, []).append(change)
    return list(groups.items())


def _add_first_change(page: TextPage, changes: Sequence[FixAttempt], indent: int) -> None:
    text = f"{'first: ' if len(changes) > 1 else ''}{changes[0].what}"
    page.fill(text, indent, " " * (indent - 2))
