"""What a line of TensorRT's optimizer log says: its pass, the cases that show it, and what it means for the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from qdqtool.evidence import Case
from qdqtool.trt import trace
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.pipeline import cases, passes
from qdqtool.types import Event, Json
from qdqtool.util.notes import Note
from qdqtool.util.records import to_json_fields
from qdqtool.util.tables import join_lines, read_sections

# Behind a time, a level or nothing: "[01/10/2024-21:52:53] [V] [TRT] ", "[TRT] [V] ", "TensorRT VERBOSE ".
_PREFIX = re.compile(r"\s*(?:\[[^\]]{1,40}\]\s*){0,4}(?:TensorRT VERBOSE:?\s*)?")
_HEADING = re.compile(r"(Original|After [a-zA-Z /-]{1,60}?): (\d{1,9}) layers?\b")

_MEANINGS = read_sections(Path(__file__).with_name("meanings.toml"))
MEANINGS = {name: join_lines(text) for name, text in _MEANINGS["passes"].items()}
HEADINGS = {name: join_lines(text) for name, text in _MEANINGS["headings"].items()}


@dataclass(frozen=True, slots=True)
class Rule:
    """A pass that the line may come from.

    Attributes:
        pass_name: As TensorRT names it, or as qdqtool does where TensorRT's name is not known.
        does: What the pass does.
        means: What that means for the user.
        cases: Its cases by id; for a line, the one that is about what it names comes first.
        file: Where the rule is.
        test: Where it is tested.
    """

    pass_name: str
    does: str
    means: str
    cases: dict[str, Case]
    file: str
    test: str

    def as_json(self) -> Json:
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
class LineAnswer:
    """What is known about a line.

    Attributes:
        line: The line without its prefix.
        event: What it says, as data; None for a heading or a pass that is not known.
        rules: The passes that it may come from, the likeliest first; empty for a heading.
        note: What a heading says, or what is not known.
    """

    line: str
    event: Event | None
    rules: tuple[Rule, ...] = ()
    note: str = ""
    counted: int | None = field(default=None)

    def as_json(self) -> Json:
        return {
            "schema": "qdqtool/line/1",
            "line": self.line,
            "event": self.event.as_json() if self.event else None,
            "rules": [rule.as_json() for rule in self.rules],
            "note": self.note,
            "layers": self.counted,
        }


def explain_line(text: str) -> LineAnswer | None:
    """The answer to a line of a log, with or without its prefix; None for a line that is not one of the optimizer's.

    The name of a pass, and the id of a case as a prediction names it (``<pass>/<case>``), are answered alike.
    """
    line = text.strip("\r\n")
    named = line.strip()
    known = {kind.__name__: kind for kind in passes()}
    if named.partition("/")[0] in known or named in cases():
        return _named(named, known)
    prefix = _PREFIX.match(line)
    line = line[prefix.end() :] if prefix else line
    heading = _heading(line)
    if heading is not None:
        return heading
    event = trace.parse(line)
    if event is None:
        return None
    named = event.pass_name
    owners = [known[named]] if named in known else [] if named else _owners(event)
    rules = tuple(_fitting(_rule(kind), event) for kind in owners)
    note: str = ""
    if not rules:
        note = Note(
            f"{named} is a pass that no available build shows; qdqtool does not simulate it. Please "
            "report a log that contains it.",
            code="pass-unknown",
            name=named,
        )
    elif len(rules) > 1:
        note = Note(
            "Several passes print this line: it belongs to the pass of the last 'Running: ...' "
            "line above it.",
            code="passes-share-line",
        )
    return LineAnswer(line, event, rules, note)


def _owners(event: Event) -> list[type[Pass]]:
    """Whose line it may be, where the line itself names no pass; what most builds show comes first."""
    owners = [kind for kind in passes() if event.kind in kind.anonymous_lines]
    decided = [kind for kind in owners if kind.converted_kind in event.object.split()]
    builds = {
        kind: len({line.partition(":")[0] for case in kind.cases for line in case.builds})
        for kind in owners
    }
    return sorted(decided or owners, key=lambda kind: -builds[kind])


def _fitting(rule: Rule, event: Event) -> Rule:
    """The rule with those cases first that are about what the line names: its kind, the operators in its names."""
    named = {
        event.kind,
        *re.findall(r"[A-Z][A-Za-z]{2,}(?=_\d+\b|\b)", f"{event.subject} {event.object}"),
    }
    ordered = sorted(rule.cases.items(), key=lambda item: -len(named.intersection(item[1].about)))
    return replace(rule, cases=dict(ordered))


def _named(name: str, known: Mapping[str, type[Pass]]) -> LineAnswer:
    owner = name.partition("/")[0]
    if owner in known:
        rule = _rule(known[owner])
        own = {i: c for i, c in rule.cases.items() if i == name}
        return LineAnswer(name, None, (replace(rule, cases=own or rule.cases),))
    rule = Rule(
        owner,
        f"What TensorRT does with {owner}.",
        "",
        {name: cases()[name]},
        "qdqtool/ir/operators.py",
        "tests/ir/test_operators.py",
    )
    return LineAnswer(name, None, (rule,))


def _heading(line: str) -> LineAnswer | None:
    counted = _HEADING.match(line)
    if counted:
        note = HEADINGS.get(counted[1], "A stage of the build has ended; so many layers are left.")
        return LineAnswer(line, None, (), note, int(counted[2]))
    note = next((meaning for begins, meaning in HEADINGS.items() if line.startswith(begins)), "")
    return LineAnswer(line, None, (), note) if note else None


def _rule(kind: type[Pass]) -> Rule:
    name = kind.__name__
    module = kind.__module__.rpartition(".")[2]
    prefix = f"{name}/"
    own = {i: case for i, case in cases().items() if i.startswith(prefix) or case in kind.cases}
    does = (kind.__doc__ or "").partition("\n\n")[0].strip()
    return Rule(
        name,
        " ".join(does.split()),
        MEANINGS.get(name, ""),
        own,
        f"qdqtool/trt/passes/{module}.py",
        f"tests/trt/passes/test_{module}.py",
    )
