"""Finding codes, known TensorRT errors and lines of an optimizer log as text and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from qdqtool.explain.knowledge import ALL_TARGETS, Code
from qdqtool.explain.lines import LineAnswer, Rule
from qdqtool.render.output import wrap
from qdqtool.text import as_text
from qdqtool.types import Json

if TYPE_CHECKING:
    from qdqtool.explain.errors import KnownError
    from qdqtool.explain.ways import Way


def code_text(entry: Code, width: int) -> str:
    """The long form of a code."""
    lines = wrap(entry.title, 4, width, f"{entry.code} ({entry.severity}): ")
    for heading, text in (
        ("Cause", entry.cause), ("What TensorRT does", entry.tensorrt), ("In a log", entry.log), ("Fix", entry.fix),
    ):
        lines += ["", heading, *wrap(text, 2, width)]
    if entry.automatic:
        lines += wrap(f"qdqtool fix --only {entry.code} model.onnx -o fixed.onnx does this where no new data is "
                      "needed.", 2, width)
    lines += ["", "Where it holds"]
    for holds in entry.holds:
        severity = f", {holds.severity}" if holds.severity is not None and holds.severity != entry.severity else ""
        lines += wrap(f"{holds.evidence}{severity}: {holds.source}", 4, width, f"  {', '.join(holds.targets)}: ")
    other = [t for t in ALL_TARGETS if entry.on(t) is None]
    if other:
        lines += wrap(f"not on {', '.join(other)}", 2, width)
    return as_text(lines)


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
    rows = sorted(entries, key=lambda c: (("error", "warning", "info").index(c.severity), c.code))
    wide = max(len(c.code) for c in rows)
    lines: list[str] = []
    for entry in rows:
        lines += wrap(entry.title, wide + 11, width, f"{entry.code:<{wide}}  {entry.severity:<7}  ")
    return as_text(lines)


def error_text(known: KnownError, width: int) -> str:
    """The long form of a known error message."""
    lines = wrap(f"{known.title} ({known.severity})", 2, width, "")
    for heading, text in (
        ("Cause", known.cause), ("Fix", known.fix), ("Fixed in", known.fixed), ("Not known", known.unknown),
        ("Versions", known.versions), ("Source", known.source),
    ):
        if text:
            lines += ["", heading, *wrap(text, 2, width)]
    if known.codes:
        some = ", ".join(known.codes)
        lines += ["", *wrap(f"'qdqtool predict' reports it before the build: {some} (qdqtool explain {known.codes[0]})",
                            2, width, "")]
    return as_text(lines)


def error_json(known: KnownError) -> Json:
    """A known error's fields."""
    data: Json = dataclasses.asdict(known)
    return data


def way_text(way: Way, width: int) -> str:
    """What to give a builder, and how to get its log."""
    rows = (("flags, up to TensorRT 10", way.weak), ("flags, TensorRT 11", way.strong), ("log", way.log),
            ("note", way.care), ("source", way.source))
    lines = [f"With {way.title}"]
    for heading, text in rows:
        lines += wrap(f"{heading}: {text}", 4, width, "  ")
    return as_text(lines)


def way_json(way: Way) -> Json:
    """A way to build, all of it."""
    data: Json = dataclasses.asdict(way)
    return data


# Lines of a log -----------------------------------------------------------------------------------------------------


def line_text(answer: LineAnswer, width: int) -> str:
    """The answer to one line, the likeliest pass first."""
    lines = wrap(answer.line, 2, width)
    if answer.note:
        lines += ["", *wrap(answer.note, 0, width)]
    for rule in answer.rules:
        lines += ["", *_rule(rule, width, 1 if answer.event else len(rule.cases))]
    return as_text(lines)


def _rule(rule: Rule, width: int, most: int) -> list[str]:
    lines = wrap(rule.does, 4, width, f"{rule.pass_name}: ")
    if rule.means:
        lines += wrap(rule.means, 4, width, "  For you: ")
    lines.append("  Evidence")
    for name, case in list(rule.cases.items())[:most]:
        lines += wrap(f"{case.evidence}: {case.says}", 6, width, f"  - {name.rpartition('/')[2]}, ")
        if case.builds:
            lines += wrap(", ".join(case.builds), 8, width, "      in ")
        if case.source:
            lines += wrap(case.source, 8, width, "      ")
    if len(rule.cases) > most:
        lines += wrap(f"the likeliest case, by the names in the line; all {len(rule.cases)}: "
                      f"qdqtool explain {rule.pass_name}", 4, width)
    return [*lines, f"  Rule: {rule.file}", f"  Test: {rule.test}"]
