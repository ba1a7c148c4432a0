"""``qdqtool demo``: insert, predict and verify on a generated YOLOv8n-architecture model and generated images."""

from __future__ import annotations

from pathlib import Path

import click

from qdqtool.commands import inputs
from qdqtool.options import On


@click.command("demo", cls=inputs.Command)
@click.option("-o", "--output", type=click.Path(), default="qdqtool-demo", show_default=True, metavar="DIR",
              help="Folder to write to; it is made when it is missing.")
@click.option("--size", type=int, default=320, show_default=True, help="Side of the network's input in pixels.")
@click.option("--images", type=click.IntRange(1), default=100, show_default=True, help="Images to calibrate with.")
@click.option("--activation", type=click.Choice(["silu", "relu"]), default="silu", show_default=True)
@inputs.made_of("on", On)
def command(output: str, size: int, images: int, activation: str, on: On) -> int:
    """Run the whole loop on an embedded model: nothing is downloaded, no GPU and no TensorRT are needed.

    The model has YOLOv8n's layers and random weights: it detects nothing, yet it quantizes like a real one.
    """
    from qdqtool.trt.targets import target_named

    chosen = target_named(on.target)
    from qdqtool.commands.demo_run import run

    for line in run(Path(output), size, images, activation, chosen):
        click.echo(line)
    return 0
