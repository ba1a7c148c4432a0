"""What a line of TensorRT's optimizer log means, as text."""

from __future__ import annotations

from qdqtool.explain.lines import LineAnswer, Rule
from qdqtool.render.output import wrap
from qdqtool.text import as_text


def line_text(answer: LineAnswer, width: int) -> str:
    """The answer to one line, the likeliest pass first."""
    lines = wrap(answer.line, 2, width)
    if answer.note:
        lines += ["", *wrap(answer.note, 0, width)]
    for rule in answer.rules:
        lines += ["", *_rule(rule, width)]
    return as_text(lines)


def _rule(rule: Rule, width: int) -> list[str]:
    lines = wrap(rule.does, 4, width, f"{rule.pass_name}: ")
    if rule.means:
        lines += wrap(rule.means, 4, width, "  For you: ")
    lines.append("  Evidence")
    for name, case in rule.cases.items():
        lines += wrap(f"{case.evidence}: {case.says}", 6, width, f"  - {name.rpartition('/')[2]}, ")
        if case.builds:
            lines += wrap(", ".join(case.builds), 8, width, "      in ")
        if case.source:
            lines += wrap(case.source, 8, width, "      ")
    return [*lines, f"  Rule: {rule.file}", f"  Test: {rule.test}"]
