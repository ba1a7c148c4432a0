"""``qdqtool demo``: insert, predict and verify on a generated YOLOv8n-architecture model and generated images."""

from __future__ import annotations

from pathlib import Path

import click

from qdqtool.base.files import forbid_dash
from qdqtool.commands import inputs
from qdqtool.options import Loop, On


@click.command("demo", cls=inputs.Command)
@inputs.made_of("loop", Loop, "output", "size", "images", "activation")
@inputs.made_of("on", On)
def command(loop: Loop, on: On) -> int:
    """Run the whole loop on an embedded model: nothing is downloaded, no GPU and no TensorRT are needed.

    The model has YOLOv8n's layers and random weights: it detects nothing, yet it quantizes like a real one.
    """
    from qdqtool.trt.targets import target_named

    forbid_dash(loop.output, "-o")
    chosen = target_named(on.target)
    from qdqtool.commands.demo_run import run

    for line in run(Path(loop.output), loop.size, loop.images, loop.activation, chosen):
        click.echo(line)
    return 0
