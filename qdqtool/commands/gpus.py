"""``qdqtool gpus``: GPUs for which times can be estimated, with the sources of their data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qdqtool.commands import options

if TYPE_CHECKING:
    from qdqtool.timing.gpus import Gpu


@click.command("gpus", cls=options.HelpCommand)
@click.argument("name", required=False)
@click.option("--sources", is_flag=True, help="Show the source and the evidence of each figure.")
@options.output_options
def command(name: str | None, sources: bool, answer: options.AnswerWriter) -> int:
    """List the GPUs for which times can be estimated, or the GPUs that NAME may mean.

    Exit codes: 0 done, 2 unknown GPU.
    """
    from qdqtool.formats.predict_text import render_gpus
    from qdqtool.timing import gpus

    rows = _select_gpus(name) if name else list(gpus.all_gpus())
    answer.write(
        lambda: {"schema": "qdqtool/gpus/1", "gpus": [g.as_json() for g in rows]},
        lambda width: render_gpus(rows, width, sources=sources or bool(name)),
    )
    return 0


def _select_gpus(name: str) -> list[Gpu]:
    """Return all GPUs that a name may mean. Without a memory size, these may be several."""
    from qdqtool.timing import gpus

    matches = gpus.match_gpus(name) or [gpus.choose_gpu(name)]
    if len(matches) > 1:
        return matches
    listed = gpus.all_gpus()
    variants = gpus.find_variants(name, matches[0].name, [gpu.name for gpu in listed])
    return matches + [gpu for gpu in listed if gpu.name in variants]
