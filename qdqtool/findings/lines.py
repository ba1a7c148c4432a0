"""Explanation of a line of TensorRT's optimizer log by the pass that prints the line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qdqtool.evidence import Case
from qdqtool.trt import trace
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.pipeline import cases, passes
from qdqtool.trt.trace import Event
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.records import to_json_fields
from qdqtool.util.tables import join_lines, read_sections

# Prefix with or without a time and a level: "[01/10/2024-21:52:53] [V] [TRT] ", "[TRT] [V] ",
# "TensorRT VERBOSE ".
_PREFIX = re.compile(r"\s*(?:\[[^\]]{1,40}\]\s*){0,4}(?:TensorRT VERBOSE:?\s*)?")
_HEADING = re.compile(r"(Original|After [a-zA-Z /-]{1,60}?): (\d{1,9}) layers?\b")

_MEANINGS = read_sections(Path(__file__).with_name("meanings.toml"))
MEANINGS = {name: join_lines(text) for name, text in _MEANINGS["passes"].items()}
HEADINGS = {name: join_lines(text) for name, text in _MEANINGS["headings"].items()}
# Modules of passes that are tested together, in test_fusions.py.
_TESTED_TOGETHER = (
    "conv_relu_fusion",
    "elt_relu_fusion",
    "scale_activation_fusion",
    "scale_scale_fusion",
    "shuffle_shuffle_fusion",
)


@dataclass(frozen=True, slots=True)
class PassRule:
    """Pass that may have printed a line.

    Attributes:
        pass_name: Name in TensorRT's log, or qdqtool's name if TensorRT's name is unknown.
        does: Description of the pass.
        means: Consequence for the user.
        cases: Cases of the pass by id. Cases that match the line are first.
        file: Source file of the pass.
        test: Test file of the pass.
    """

    pass_name: str
    does: str
    means: str
    cases: dict[str, Case]
    file: str
    test: str

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        cases = [
            {"case": name} | to_json_fields(case, "evidence", "says", "builds", "source")
            for name, case in self.cases.items()
        ]
        return (
            {"pass": self.pass_name}
            | to_json_fields(self, "does", "means", "file", "test")
            | {"cases": cases}
        )


@dataclass(frozen=True, slots=True)
class LineExplanation:
    """Explanation of a line.

    Attributes:
        line: The line without its prefix.
        event: The line as data; None for a heading, or if the text is the name of a pass or case.
        rules: Passes that may have printed the line, the most likely first; empty for a heading.
        note: Meaning of a heading, or a remark on an unknown or ambiguous pass.
        counted: Number of layers that a heading states; None for other lines.
    """

    line: str
    event: Event | None
    rules: tuple[PassRule, ...] = ()
    note: str = ""
    counted: int | None = field(default=None)

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "schema": "qdqtool/line/1",
            "line": self.line,
            "event": self.event.as_json() if self.event else None,
            "rules": [rule.as_json() for rule in self.rules],
            "note": self.note,
            "layers": self.counted,
        }


def explain_line(text: str) -> LineExplanation | None:
    """Explain a line of the optimizer's log; None if the text is not such a line.

    The line may have the prefix of TensorRT's log. The text may also be the name of a pass, or the
    id of a case (``<pass>/<case>``).
    """
    line = text.strip("\r\n")
    name = line.strip()
    by_name = {kind.__name__: kind for kind in passes()}
    if name.partition("/")[0] in by_name or name in cases():
        return _explain_name(name, by_name)
    prefix = _PREFIX.match(line)
    line = line[prefix.end() :] if prefix else line
    heading = _explain_heading(line)
    if heading is not None:
        return heading
    event = trace.parse(line)
    if event is None:
        return None
    if event.pass_name in by_name:
        owners = [by_name[event.pass_name]]
    else:
        owners = [] if event.pass_name else _possible_passes(event)
    rules = tuple(_sort_cases(_make_rule(kind), event) for kind in owners)
    return LineExplanation(line, event, rules, _explain_ambiguity(event, rules))


def _explain_ambiguity(event: Event, rules: Sequence[object]) -> str:
    if not rules:
        return Note(
            f"No available build shows the pass {event.pass_name}, so qdqtool does not simulate "
            "it. Please report a log with this pass.",
            code="pass-unknown",
            name=event.pass_name,
        )
    if len(rules) > 1:
        return Note(
            "Several passes print this line. The last 'Running: ...' line above it names the pass.",
            code="passes-share-line",
        )
    return ""


def _possible_passes(event: Event) -> list[type[Pass]]:
    """Return the passes that may print a line without a pass name, the most likely first."""
    owners = [kind for kind in passes() if event.kind in kind.anonymous_lines]
    decided = [kind for kind in owners if kind.converted_kind in event.object.split()]
    builds = {
        kind: len({line.partition(":")[0] for case in kind.cases for line in case.builds})
        for kind in owners
    }
    return sorted(decided or owners, key=lambda kind: -builds[kind])


def _sort_cases(rule: PassRule, event: Event) -> PassRule:
    """Return the rule, with cases about the kind and the operators of the line first."""
    operators = re.findall(r"[A-Z][A-Za-z]{2,}(?=_\d+\b|\b)", f"{event.subject} {event.object}")
    topics = {event.kind, *operators}
    ordered = sorted(rule.cases.items(), key=lambda item: -len(topics.intersection(item[1].about)))
    return replace(rule, cases=dict(ordered))


def _explain_name(name: str, by_name: Mapping[str, type[Pass]]) -> LineExplanation:
    owner = name.partition("/")[0]
    if owner in by_name:
        rule = _make_rule(by_name[owner])
        named = {i: c for i, c in rule.cases.items() if i == name}
        return LineExplanation(name, None, (replace(rule, cases=named or rule.cases),))
    rule = PassRule(
        owner,
        f"TensorRT's treatment of {owner}.",
        "",
        {name: cases()[name]},
        "qdqtool/ir/operators.py",
        "tests/ir/test_operators.py",
    )
    return LineExplanation(name, None, (rule,))


def _explain_heading(line: str) -> LineExplanation | None:
    match = _HEADING.match(line)
    if match:
        default = "A stage of the build has ended. The number counts the remaining layers."
        return LineExplanation(line, None, (), HEADINGS.get(match[1], default), int(match[2]))
    for beginning, meaning in HEADINGS.items():
        if line.startswith(beginning):
            return LineExplanation(line, None, (), meaning)
    return None


def _make_rule(kind: type[Pass]) -> PassRule:
    name = kind.__name__
    module = kind.__module__.rpartition(".")[2]
    prefix = f"{name}/"
    pass_cases = {i: c for i, c in cases().items() if i.startswith(prefix) or c in kind.cases}
    test = "fusions" if module in _TESTED_TOGETHER else module
    does = (kind.__doc__ or "").partition("\n\n")[0].strip()
    return PassRule(
        name,
        " ".join(does.split()),
        MEANINGS.get(name, ""),
        pass_cases,
        f"qdqtool/trt/passes/{module}.py",
        f"tests/trt/passes/test_{test}.py",
    )
