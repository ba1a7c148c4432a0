"""``qdqtool explain``: the long form of a finding code, or of a TensorRT error message."""

from __future__ import annotations

import click

from qdqtool.commands import options
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.util.records import to_json_fields


@click.command("explain", cls=options.HelpCommand)
@click.argument("what", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List every finding code.")
@options.way_option(
    "How the engine is built, as for predict. Without WHAT: what to give that builder."
)
@options.output_options
def command(what: tuple[str, ...], listing: bool, way: str | None, answer: options.Answer) -> int:
    """Explain WHAT: a finding code such as SKIP-FLOAT, a TensorRT error, or a line of the optimizer's log.

    The cause, what TensorRT does, how to see it in a log, the fix, and on which versions it is known to hold. For a
    line of a log, a pass or one of its cases: what the line means, the builds that show it, the rule and its test.
    """
    from qdqtool.findings import codes
    from qdqtool.findings.ways import find_build_method
    from qdqtool.formats.log_text import code_json, code_text, error_text, list_text, way_text
    from qdqtool.util.files import reserve_output

    reserve_output(answer.output, "-o")
    building = find_build_method(way) if way is not None else None
    if listing:
        rows = list(codes.CODES.values())
        answer.write(lambda: [code_json(c) for c in rows], lambda width: list_text(rows, width))
        return 0

    def further(width: int) -> str:
        return "" if building is None else "\n" + way_text(building, width)

    extra = {} if building is None else {"for": to_json_fields(building)}
    text = " ".join(what).strip()
    if not text and building is not None:
        answer.write(lambda: extra, lambda width: further(width).lstrip())
        return 0
    if not text:
        raise UsageError(
            "give a finding code, an error text or a line of a log, or --list",
            code="missing-argument",
            parameter="what",
        )
    entry = codes.find(text)
    if entry is not None:
        answer.write(
            lambda: code_json(entry) | extra, lambda width: code_text(entry, width) + further(width)
        )
        return 0
    from qdqtool.findings.lines import explain_line

    line = explain_line(text)
    if line is not None:
        from qdqtool.formats.log_text import line_text

        answer.write(line.as_json, lambda width: line_text(line, width))
        return 0
    from qdqtool.findings.errors import lookup

    known = lookup(text)
    if known is None:
        raise QdqtoolError(
            f"'{text[:80]}' is not a finding code, a known TensorRT error or a line of its optimizer; "
            f"{codes.suggest_code(text)}",
            code="unknown-choice",
            parameter="what",
        )
    answer.write(
        lambda: to_json_fields(known) | extra,
        lambda width: error_text(known, width) + further(width),
    )
    return 0
