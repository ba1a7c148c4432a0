"""Commands that other commands suggest for the Q/DQ model that they wrote."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from qdqtool.commands import options

if TYPE_CHECKING:
    import onnx

    from qdqtool.formats.output import TextPage
    from qdqtool.trt.targets import Target

OTHER_IMAGES = "other-images/"  # a placeholder for images that were not used for calibration


def compare_options(target: Target) -> str:
    """Return the options of a suggested ``compare``: other images, and options of this command.

    The text begins with a space. ``compare`` has no --strongly-typed, so the name of the target
    expresses this option.
    """
    from qdqtool.formats.predict_text import target_option

    repeated = options.repeat_options("gpu", "power", *options.IMAGE_PARAMETERS)
    return f" --calib {OTHER_IMAGES}{target_option(target.display_name)}{repeated}"


def suggest_compare(
    page: TextPage, model: str, path: str, target: Target, input_type: str = "float"
) -> None:
    """Suggest ``compare`` of a float model with the written model, on other images.

    ``compare`` cannot run a model whose `input_type` is int8.
    """
    if input_type == "int8":
        text = (
            "not possible for an int8 input. To compare, insert with --input-type float and "
            "another -o: the first Q of that model computes the same int8 numbers."
        )
        page.fill(text, 9, "Compare: ")
        return
    command = shlex.join(["qdqtool", "compare", model, path])
    page.add_command("Compare:", f"{command}{compare_options(target)}")
    text = (
        f"{OTHER_IMAGES} stands for images that were not used for calibration. The "
        "calibration images may give an optimistic result."
    )
    page.fill(text, 9, " " * 9)


def suggest_build(
    page: TextPage, path: str, target: Target, model: onnx.ModelProto, gpu: str | None
) -> None:
    """Add the commands that build the written model for a target, on the named GPU if any."""
    from qdqtool.formats.predict_text import build_commands
    from qdqtool.ir.graph import Model
    from qdqtool.ir.input_shapes import describe_model
    from qdqtool.timing.gpus import choose_gpu

    if not target.is_rtx:
        on_jetson = gpu is not None and choose_gpu(gpu).is_jetson
        page.add_page(
            build_commands(
                target, path, page.width, describe_model(Model(model)), on_jetson=on_jetson
            )
        )
