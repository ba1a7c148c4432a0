"""Text of ``fix``: the result first, then the changes and the remaining findings."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from qdqtool.findings import codes
from qdqtool.findings.rules import ATTEMPTED_CODES, split_fixable
from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.formats.output import (
    ROW_COLUMN,
    SEVERITY_STYLES,
    Style,
    TextPage,
    as_options,
    fixed_model_path,
)
from qdqtool.formats.verdicts import verdict
from qdqtool.reasons.finding import Severity
from qdqtool.util.text import format_count, format_ms

if TYPE_CHECKING:
    from qdqtool.fixing.api import Fixed
    from qdqtool.fixing.outputs import OutputError
    from qdqtool.fixing.session import FixAttempt
    from qdqtool.reasons.finding import FindingCode
    from qdqtool.timing.results import TimeEstimate

_MAX_FIXES = 1  # maximum number of listed changes with the same code and reason
_LOSSES = ("constants-rounded",)  # codes of notes on problems that no fix can remove

_LISTED_ERRORS = ("error-grew",)  # codes of notes that repeat a line of "Output error"


def render(
    fixed: Fixed,
    output: str,
    width: int,
    *,
    options: str = "",
    images: str = " --calib other-images/",
    seconds: float | None = None,
) -> TextPage:
    """Return the text of ``fix``: verdicts before and after the fixes, and all changes.

    Args:
        fixed: The result.
        output: Path of the written model.
        width: Columns.
        options: Options that the suggested commands repeat, each with a space before it.
        images: ``--calib`` and the options of images in the suggested ``compare``, in this form.
        seconds: Time that the command took. None: the time is not printed.
    """
    page = TextPage(width)
    _add_fix_result(page, fixed)
    page.add_row("Before", verdict(fixed.before))
    page.add_row("After", verdict(fixed.after) + _describe_slow_places(fixed))
    if fixed.time is not None:
        page.add_row("Time", _describe_time(fixed.time))
    _add_errors(page, fixed)
    for note in fixed.notes:
        if note.code not in (*_LOSSES, *_LISTED_ERRORS):
            page.fill(f"note: {as_options(note)}", style=Style.NOTE)
    places = fixed.fixed_places()
    remaining = {f.code for f in fixed.after.findings} - places.keys()
    _add_changes(page, "Applied", fixed.applied, places, remaining=remaining)
    _add_other_removed_findings(page, fixed, places)
    fixes = [] if fixed.time is None else fixed.time.fixes
    savings = {code: fix.saves_ms for fix in fixes for code in fix.codes}
    _add_changes(page, "Not applied", fixed.refused, savings=savings)
    _add_remaining_findings(page, fixed, output, options)
    page.add_gap()
    time = "" if seconds is None else f" ({seconds:.1f} s)"
    written = f"Wrote {output}" if _is_changed(fixed) else f"Wrote a copy to {output}"
    page.fill(f"{written}{time}", style=Style.BOLD)
    page.add_command("Next:", f"qdqtool predict {shlex.quote(output)}{options}")
    if _is_changed(fixed):
        page.add_command("Compare:", f"qdqtool compare FLOAT.onnx {shlex.quote(output)}{images}")
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
    counts = Counter(change.code for change in fixed.refused)
    slow = [
        format_count(count, f"{code} place")
        for code, count in counts.items()
        if code in gaining and codes.get(code).saves_time
    ]
    return f"; slower because of {' and '.join(slow)} (not applied)" if slow else ""


def _find_gaining_codes(fixed: Fixed) -> set[str]:
    """Return the codes whose fixes save time: by the estimate for a GPU, else by the prediction."""
    if fixed.time is not None:
        return {code for fix in fixed.time.fixes for code in fix.codes}
    return {f.code for f in fixed.after.findings if f.gains and f.severity != Severity.INFO}


def _describe_time(time: TimeEstimate) -> str:
    text = f"{format_ms(time.total_ms)} on {time.gpu.name} (estimated)"
    other = time.float_time
    return text if other is None else f"{text}; in {other.precision} {format_ms(other.total_ms)}"


def _add_remaining_findings(page: TextPage, fixed: Fixed, output: str, options: str) -> None:
    counts = fixed.after.findings_by_code()
    serious = dict.fromkeys(f.code for f in fixed.after.findings if f.severity != Severity.INFO)
    losses = [note for note in fixed.notes if note.code in _LOSSES]
    refused = {(change.code, change.node) for change in fixed.refused}
    minor = dict.fromkeys(f.code for f in fixed.after.findings if (f.code, f.node) in refused)
    codes = dict.fromkeys([*serious, *minor])
    listed = [f"{code} ({counts[code]}{_note_reason(fixed, code)})" for code in codes]
    if listed or losses:
        listed += [format_count(note.values["count"], "rounded constant") for note in losses]
        page.add_heading(f"Left: {', '.join(listed)}")
    for note in losses:
        text = as_options(note)
        page.fill(f"{text[0].upper()}{text[1:]}.", 2, "  ", SEVERITY_STYLES[Severity.WARNING])
    if serious:
        _add_manual_fixes(page, fixed)
        _add_untried_fixes(page, fixed, output, options)


def _note_reason(fixed: Fixed, code: FindingCode) -> str:
    """Return why the remaining places of a code are not fixed; empty if unknown for all."""
    if code not in ATTEMPTED_CODES:
        return ", no automatic fix"
    places = {(f.code, f.node) for f in fixed.after.findings if f.code == code}
    explained = places & _list_refused_places(fixed)
    if not explained:
        return ""
    return ", reason above" if explained == places else f", reason above for {len(explained)}"


def _list_refused_places(fixed: Fixed) -> set[tuple[str, str]]:
    places = (((change.code, change.node), *change.places) for change in fixed.refused)
    return set(itertools.chain.from_iterable(places))


def _add_manual_fixes(page: TextPage, fixed: Fixed) -> None:
    """Add advice for places without an automatic fix, if ``fix`` handles the code elsewhere."""
    refused = _list_refused_places(fixed)
    float_type = find_float_type(fixed.after)
    fixes: dict[FindingCode, list[str]] = {}
    for f in fixed.after.findings:
        is_listed = f.automatic or (f.code, f.node) in refused or f.code not in ATTEMPTED_CODES
        if f.severity != Severity.INFO and not is_listed:
            fix = name_floats(f.fix, f.code, float_type)
            fixes.setdefault(f.code, []).append(f"{f.node}: {fix}".removeprefix(": "))
    for code, texts in fixes.items():
        first = "First: " if len(texts) > 1 else ""
        page.fill(f"{code} ({len(texts)}): no automatic fix. {first}{texts[0]}", 4, "  ")


def _add_untried_fixes(page: TextPage, fixed: Fixed, output: str, options: str) -> None:
    tried = {change.code for change in (*fixed.applied, *fixed.refused)}
    untried: dict[FindingCode, str] = {}
    reasons = "not named with --only", "may cost speed, needs --only"
    for reason, group in zip(reasons, split_fixable(fixed.after.findings), strict=True):
        for f in group:
            if f.code not in tried and f.severity != Severity.INFO:
                untried.setdefault(f.code, reason)
    if untried:
        texts = [
            f"{', '.join(group)} ({reason})"
            for reason, group in itertools.groupby(untried, key=lambda code: untried[code])
        ]
        page.fill(f"Not tried: {'; '.join(texts)}. To try:", 2, "  ")
        other = fixed_model_path(output)
        only = " ".join(f"--only {code}" for code in untried)
        page.add_command(
            "", f"qdqtool fix {shlex.quote(output)} {only} -o {shlex.quote(other)}{options}"
        )


def _add_errors(page: TextPage, fixed: Fixed) -> None:
    """Add the errors of outputs against the network with float activations, before and after.

    For random inputs, which say little about accuracy, only errors that grew and outputs that
    became constant are listed.
    """
    errors = fixed.errors
    if not errors:
        return
    if fixed.samples:
        inputs = format_count(fixed.samples, "sample")
        page.add_row("Output error", f"before and after, against float activations ({inputs})")
    else:
        errors = [error for error in errors if error.has_grown or error.lost]
        text = "not measured on images: give --calib images/ (random inputs are not meaningful)"
        page.add_row("Output error", text)
    for error in errors:
        change = f"{error.before:>7.2%} -> {error.after:>7.2%}"
        if not fixed.samples:
            change = f"on random inputs: {error.before:.2%} -> {error.after:.2%}"
        mark = _rate_change(error)
        style = Style.BAD if error.lost else Style.UNCLEAR if error.has_grown else Style.PLAIN
        page.fill(
            f"{change}{mark}  {error.title}",
            ROW_COLUMN + 2,
            " " * ROW_COLUMN,
            style,
        )
    if any(error.has_grown for error in errors):
        inputs = "" if fixed.samples else " on random inputs"
        page.fill(
            f"warning: an output error grew{inputs}. Measure the agreement with the float model on "
            "images (command at the end). If it is too low, quantize the float model again "
            "(qdqtool insert FLOAT.onnx --calib images/).",
            style=Style.UNCLEAR,
        )


def _rate_change(error: OutputError) -> str:
    if error.lost:
        return "  lost"
    if error.has_grown:
        return "  grew"
    return "  fell" if error.has_fallen else "  about equal"


def _add_changes(
    page: TextPage,
    title: str,
    changes: list[FixAttempt],
    places: Counter[str] | None = None,
    savings: Mapping[str, float] | None = None,
    remaining: Collection[str] = (),
) -> None:
    def code_and_reason(change: FixAttempt) -> tuple[str, str]:
        return change.code, change.why_not

    if changes:
        page.add_heading(title)
    counts = Counter(change.code for change in changes)
    listed: set[str] = set()  # codes whose saving is printed: it is that of all places together
    ordered = sorted(changes, key=code_and_reason)
    for (code, why_not), group in itertools.groupby(ordered, key=code_and_reason):
        same = list(group)
        count = (places[code] if places else 0) or len(same)
        saved_ms = None if code in listed else (savings or {}).get(code)
        together = f"all {counts[code]} together " if counts[code] > len(same) else ""
        saving = "" if saved_ms is None else f", {together}would save up to {format_ms(saved_ms)}"
        listed.add(code)
        reason = f": {as_options(why_not)}" if why_not else ""
        label = f"{format_count(count, 'change')}, finding remains" if code in remaining else count
        page.fill(f"{code} ({label}){saving}{reason}", 4, "  ")
        for change in same[:_MAX_FIXES]:
            page.fill(change.what, 6, f"    {'first: ' if len(same) > 1 else ''}")
