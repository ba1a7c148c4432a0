"""Finding codes, known TensorRT errors and lines of an optimizer log as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from qdqtool.explain.codes import ALL_TARGETS, Code
from qdqtool.explain.lines import LineAnswer, Rule
from qdqtool.render.output import Page
from qdqtool.types import Json

if TYPE_CHECKING:
    from qdqtool.explain.errors import KnownError
    from qdqtool.explain.ways import Way


def _sections(page: Page, **texts: str) -> None:
    """A heading and a paragraph for each text that there is."""
    for heading, text in texts.items():
        if text:
            page.line("", heading.replace("_", " "))
            page.fill(text, 2, "  ")


def code_text(entry: Code, width: int) -> str:
    """The long form of a code."""
    page = Page(width)
    page.fill(entry.title, 4, f"{entry.code} ({entry.severity.word}): ")
    _sections(page, Cause=entry.cause, What_TensorRT_does=entry.tensorrt, In_a_log=entry.log, Fix=entry.fix)
    if entry.automatic:
        page.fill(f"qdqtool fix --only {entry.code} model.onnx -o fixed.onnx does this where no new data is needed.",
                  2, "  ")
    page.line("", "Where it holds")
    for holds in entry.holds:
        severity = f", {holds.severity.word}" if holds.severity is not None and holds.severity != entry.severity else ""
        page.fill(f"{holds.evidence}{severity}: {holds.source}", 4, f"  {', '.join(holds.targets)}: ")
    other = [t for t in ALL_TARGETS if entry.on(t) is None]
    if other:
        page.fill(f"not on {', '.join(other)}", 2, "  ")
    return str(page)


def code_json(entry: Code) -> Json:
    """A code and all that is known about it."""
    return {
        "code": entry.code, "title": entry.title, "severity": str(entry.severity), "cause": entry.cause,
        "tensorrt": entry.tensorrt, "log": entry.log, "fix": entry.fix, "automatic": entry.automatic,
        "holds": [
            {"targets": list(h.targets), "evidence": str(h.evidence), "source": h.source,
             "severity": str(h.severity or entry.severity)}
            for h in entry.holds
        ],
    }


def list_text(entries: Iterable[Code], width: int) -> str:
    """Every code with its title, by severity."""
    page = Page(width)
    rows = sorted(entries, key=lambda c: (("error", "warning", "info").index(c.severity), c.code))
    wide = max(len(c.code) for c in rows)
    for entry in rows:
        page.fill(entry.title, wide + 11, f"{entry.code:<{wide}}  {entry.severity.word:<7}  ")
    return str(page)


def error_text(known: KnownError, width: int) -> str:
    """The long form of a known error message."""
    page = Page(width)
    page.fill(f"{known.title} ({known.severity})")
    _sections(page, Cause=known.cause, Fix=known.fix, Fixed_in=known.fixed, Not_known=known.unknown,
              Versions=known.versions, Source=known.source)
    if known.codes:
        page.heading(f"'qdqtool predict' reports it before the build: {', '.join(known.codes)} (qdqtool explain "
                     f"{known.codes[0]})")
    return str(page)


def way_text(way: Way, width: int) -> str:
    """What to give a builder, and how to get its log."""
    page = Page(width)
    page.line(f"With {way.title}")
    for heading, text in (("flags, up to TensorRT 10", way.weak), ("flags, TensorRT 11", way.strong), ("log", way.log),
                          ("note", way.care), ("source", way.source)):
        page.fill(f"{heading}: {text}", 4, "  ")
    return str(page)


def line_text(answer: LineAnswer, width: int) -> str:
    """The answer to one line of a log, the likeliest pass first."""
    page = Page(width)
    page.fill(answer.line, 2, "  ")
    if answer.note:
        page.gap()
        page.fill(answer.note, 0)
    for rule in answer.rules:
        page.gap()
        _rule(page, rule, 1 if answer.event else len(rule.cases))
    return str(page)


def _rule(page: Page, rule: Rule, most: int) -> None:
    page.fill(rule.does, 4, f"{rule.pass_name}: ")
    if rule.means:
        page.fill(rule.means, 4, "  For you: ")
    page.line("  Evidence")
    for name, case in list(rule.cases.items())[:most]:
        page.fill(f"{case.evidence}: {case.says}", 6, f"  - {name.rpartition('/')[2]}, ")
        if case.builds:
            page.fill(", ".join(case.builds), 8, "      in ")
        if case.source:
            page.fill(case.source, 8, "      ")
    if len(rule.cases) > most:
        page.fill(f"the likeliest case, by the names in the line; all {len(rule.cases)}: "
                  f"qdqtool explain {rule.pass_name}", 4, "    ")
    page.line(f"  Rule: {rule.file}", f"  Test: {rule.test}")
