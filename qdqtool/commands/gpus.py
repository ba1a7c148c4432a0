"""``qdqtool gpus``: GPUs that times can be estimated for, with the sources of their data."""

import click

from qdqtool.commands import options


@click.command("gpus", cls=options.HelpCommand)
@click.argument("name", required=False)
@click.option("--sources", is_flag=True, help="Show the source and the evidence of each figure.")
@options.output_options
def command(name: str | None, sources: bool, answer: options.AnswerWriter) -> int:
    """List the GPUs that times can be estimated for, or show the GPU that NAME selects.

    Exit codes: 0 done, 2 unknown GPU.
    """
    from qdqtool.formats.predict_text import gpus_text
    from qdqtool.timing import gpus

    rows = [gpus.choose_gpu(name)] if name else list(gpus.all_gpus())
    answer.write(
        lambda: {"schema": "qdqtool/gpus/1", "gpus": [g.as_json() for g in rows]},
        lambda width: gpus_text(rows, width, sources=sources or bool(name)),
    )
    return 0
