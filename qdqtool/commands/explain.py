"""``qdqtool explain``: explanation of a finding code, an error or a line of a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qdqtool.commands import completion, options
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.util.records import to_json_fields

if TYPE_CHECKING:
    from qdqtool.findings.errors import KnownError


@click.command("explain", cls=options.HelpCommand)
@click.argument("what", nargs=-1, shell_complete=completion.complete_codes)
@click.option("--list", "listing", is_flag=True, help="List every finding code.")
@options.way_option(
    "Build method, as for predict. Without WHAT: explain the settings of this method."
)
@options.output_options
def command(
    what: tuple[str, ...], listing: bool, way: str | None, answer: options.AnswerWriter
) -> int:
    """Explain a finding code, a TensorRT error, or a line of the optimizer's log.

    WHAT is a finding code such as SKIP-FLOAT, an error message, a line of a log, or the name of an
    optimizer pass. For a code or an error, print the cause, the effect in TensorRT, the log lines
    that show it, the fix and the versions. For a line or a pass, print the meaning, the builds that
    show it, and the source file and test file of its rule.
    """
    from qdqtool.findings import codes
    from qdqtool.findings.build_methods import find_build_method
    from qdqtool.formats.log_text import (
        finding_code_json,
        render_build_method,
        render_code_list,
        render_error,
        render_finding_code,
        render_log_line,
    )
    from qdqtool.formats.output import TextPage

    build_method = find_build_method(way) if way is not None else None
    if listing:
        _forbid_arguments_with_list(what, way)
        rows = list(codes.CODES.values())
        answer.write(
            lambda: [finding_code_json(c) for c in rows],
            lambda width: render_code_list(rows, width),
        )
        return 0

    def with_method(page: TextPage) -> TextPage:
        if build_method is not None:
            page.add_gap()
            page.add_page(render_build_method(build_method, page.width))
        return page

    extra = (
        {} if build_method is None else {"for": to_json_fields(build_method, *build_method._fields)}
    )
    text = " ".join(what).strip()
    if not text and build_method is not None:
        answer.write(lambda: extra, lambda width: with_method(TextPage(width)))
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
            lambda: finding_code_json(entry) | extra,
            lambda width: with_method(render_finding_code(entry, width)),
        )
        return 0
    from qdqtool.findings.lines import explain_line

    line = explain_line(text)
    if line is not None:
        answer.write(line.as_json, lambda width: render_log_line(line, width))
        return 0
    error = _find_known_error(text)
    answer.write(
        lambda: to_json_fields(error) | extra,
        lambda width: with_method(render_error(error, width)),
    )
    return 0


def _forbid_arguments_with_list(what: tuple[str, ...], way: str | None) -> None:
    if what or way is not None:
        raise UsageError(
            ("--list prints all finding codes; leave out ")
            + (f"'{' '.join(what)[:60]}'" if what else "--for"),
            code="option-without-effect",
            parameter="what" if what else "way",
        )


def _find_known_error(text: str) -> KnownError:
    from qdqtool.findings.codes import suggest_code
    from qdqtool.findings.errors import is_listed, lookup
    from qdqtool.findings.partial_errors import find_by_part

    error = lookup(text)
    if error is None or not is_listed(error):
        error = find_by_part(text) or error
    if error is None:
        raise QdqtoolError(
            f"'{text[:80]}' is not a finding code, a known TensorRT error or a line of "
            f"TensorRT's optimizer; {suggest_code(text)}",
            code="unknown-choice",
            parameter="what",
        )
    return error
