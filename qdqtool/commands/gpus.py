"""``qdqtool gpus``: the GPUs that times can be estimated for, with the source of each figure."""

from __future__ import annotations

import click

from qdqtool.commands import inputs


@click.command("gpus", cls=inputs.Command)
@click.argument("name", required=False)
@click.option("--sources", is_flag=True, help="Show where each figure comes from, and how well it is proven.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(), default=None, help="Write the answer to a file.")
def command(name: str | None, sources: bool, form: str, output: str | None) -> int:
    """List the GPUs that predict --gpu knows, or what NAME stands for.

    Exit codes: 0 done, 2 no such GPU.
    """
    from qdqtool.render.output import emit, terminal_width, to_json
    from qdqtool.render.predict_text import gpus_text
    from qdqtool.timing import gpus

    found = [gpus.chosen(name)] if name else list(gpus.gpus())
    if form == "json":
        emit(to_json({"schema": "qdqtool/gpus/1", "gpus": [g.as_json() for g in found]}), output)
    else:
        emit(gpus_text(found, 100 if output else terminal_width(), sources=sources or bool(name)), output)
    return 0
