"""``qdqtool explain``: the long form of a finding code, or of a TensorRT error message."""

from __future__ import annotations

import dataclasses

import click

from qdqtool.commands import inputs
from qdqtool.errors import QdqtoolError


@click.command("explain", cls=inputs.Command)
@click.argument("what", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List every finding code.")
@click.option("--for", "way", metavar="WAY", help="How you build: trtexec, python, onnxruntime, torch-tensorrt or "
                                                  "deepstream. Alone: what to give that builder.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(), default=None, help="Write the answer to a file.")
def command(what: tuple[str, ...], listing: bool, way: str | None, form: str, output: str | None) -> int:
    """Explain WHAT: a finding code such as SKIP-FLOAT, a TensorRT error, or a line of the optimizer's log.

    The cause, what TensorRT does, how to see it in a log, the fix, and on which versions it is known to hold. For a
    line of a log, a pass or one of its cases: what the line means, the builds that show it, the rule and its test.
    """
    from qdqtool.explain import codes
    from qdqtool.explain.ways import way_named
    from qdqtool.io.files import claim
    from qdqtool.render.explain_text import code_json, code_text, error_text, list_text, way_text
    from qdqtool.render.output import emit, terminal_width, to_json

    claim(output, "-o")
    width = 100 if output else terminal_width()
    building = way_named(way) if way is not None else None
    if listing:
        rows = list(codes.CODES.values())
        emit(to_json([code_json(c) for c in rows]) if form == "json" else list_text(rows, width), output)
        return 0
    further = "" if building is None else "\n" + way_text(building, width)
    extra = {} if building is None else {"for": dataclasses.asdict(building)}
    text = " ".join(what).strip()
    if not text and building is not None:
        emit(to_json(extra) if form == "json" else further.lstrip(), output)
        return 0
    if not text:
        raise click.UsageError("give a finding code, an error text or a line of a log, or --list")
    entry = codes.find(text)
    if entry is not None:
        emit(to_json(code_json(entry) | extra) if form == "json" else code_text(entry, width) + further, output)
        return 0
    from qdqtool.explain.lines import explain_line

    answer = explain_line(text)
    if answer is not None:
        from qdqtool.render.explain_text import line_text

        emit(to_json(answer.as_json()) if form == "json" else line_text(answer, width), output)
        return 0
    from qdqtool.explain.errors import lookup

    known = lookup(text)
    if known is None:
        raise QdqtoolError(
            f"'{text[:80]}' is not a finding code, a known TensorRT error or a line of its optimizer; "
            f"{codes.hint(text)}"
        )
    emit(to_json(dataclasses.asdict(known) | extra) if form == "json" else error_text(known, width) + further, output)
    return 0
