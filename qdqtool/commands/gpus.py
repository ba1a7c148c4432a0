"""``qdqtool gpus``: the GPUs that times can be estimated for, with the source of each figure."""

from __future__ import annotations

import click

from qdqtool.commands import inputs


@click.command("gpus", cls=inputs.Command)
@click.argument("name", required=False)
@inputs.made_of("shown", inputs.Shown, "sources")
@inputs.made_of("answer", inputs.Written)
def command(name: str | None, shown: inputs.Shown, answer: inputs.Written) -> int:
    """List the GPUs that predict --gpu knows, or what NAME stands for.

    Exit codes: 0 done, 2 no such GPU.
    """
    from qdqtool.render.predict_text import gpus_text
    from qdqtool.timing import gpus

    found = [gpus.chosen(name)] if name else list(gpus.gpus())
    answer.give(
        lambda: {"schema": "qdqtool/gpus/1", "gpus": [g.as_json() for g in found]},
        lambda width: gpus_text(found, width, sources=shown.sources or bool(name)),
    )
    return 0
