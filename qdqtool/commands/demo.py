"""``qdqtool demo``: insert, predict and verify with a generated network and images."""

from pathlib import Path

import click

from qdqtool.commands import options
from qdqtool.util.files import forbid_dash


@click.command("demo", cls=options.HelpCommand)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="DIR",
    default="qdqtool-demo",
    show_default=True,
    help="Folder to write to; created if missing.",
)
@click.option(
    "--size",
    type=click.INT,
    default=320,
    show_default=True,
    help="Height and width of the network's input in pixels, a multiple of 32 up to 960.",
)
@click.option(
    "--images",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="Number of calibration images.",
)
@click.option(
    "--activation",
    type=click.Choice(("silu", "relu")),
    default="silu",
    show_default=True,
    help="Activation after each convolution.",
)
@options.target_option
def command(output: str, size: int, images: int, activation: str, target: str | None) -> int:
    """Insert, predict and verify on an embedded model, without downloads, GPU or TensorRT.

    The model has YOLOv8n's layers and random weights: it detects nothing, but is quantized like a
    trained model.
    """
    forbid_dash(output, "-o")
    chosen_target = options.choose_target(target)
    from qdqtool.demo.steps import run_demo

    for line in run_demo(Path(output), size, images, activation, chosen_target):
        click.echo(line)
    return 0
