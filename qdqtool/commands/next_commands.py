"""Commands that other commands suggest for the Q/DQ model that they wrote."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from qdqtool.commands import options

if TYPE_CHECKING:
    import onnx

    from qdqtool.formats.output import TextPage
    from qdqtool.trt.targets import Target
    from qdqtool.tuning.result import Tuning

_MAX_PATTERNS = 8  # maximum number of --exclude and --tuned in a suggested command
OTHER_IMAGES = "other-images/"  # a placeholder for images that were not used for calibration


def compare_options() -> str:
    """Return the options of a suggested ``compare``: other images, and options of this command.

    The text begins with a space.
    """
    repeated = options.repeat_options("gpu", "power", *options.IMAGE_PARAMETERS)
    return f" --calib {OTHER_IMAGES}{options.repeat_target_name()}{repeated}"


def suggest_compare(page: TextPage, model: str, path: str, input_type: str = "float") -> None:
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
    page.add_command("Compare:", f"{command}{compare_options()}")
    text = (
        f"{OTHER_IMAGES} stands for images that were not used for calibration. The "
        "calibration images may give an optimistic result."
    )
    page.fill(text, 9, " " * 9)


def suggest_uint8_input(
    page: TextPage, model: str, calib: str, path: str, target: Target, tuning: Tuning
) -> None:
    """Suggest the ``insert`` that writes the placement of a tuning for an input of pixels.

    Nothing is suggested without images, if ``insert`` cannot write this placement with a uint8
    input, or if the command would be long.
    """
    from qdqtool.util import files

    arguments = tuning.insert_arguments()
    has_pixels = tuning.images["preprocess"] is not None and target.uint8_inputs
    quantized = {tensor.tensor for tensor in tuning.quantized}
    is_stream = files.is_stream(Path(path))
    if arguments is None or tuning.precision != "int8" or not has_pixels or is_stream:
        return
    patterns = [(f"--{name}", p) for name, values in arguments.items() for p in values]
    is_quantized = any(graph_input.name in quantized for graph_input in tuning.model.graph.input)
    if not is_quantized or len(patterns) > _MAX_PATTERNS:
        return
    words = ["qdqtool", "insert", model, "--calib", calib]
    repeated = options.repeat_options(
        "target", *options.PLACEMENT_PARAMETERS, *options.IMAGE_PARAMETERS
    )
    output = Path(path).with_stem(f"{Path(path).stem}_uint8")
    more = [*itertools.chain(*patterns), "--input-type", "uint8", "-o", str(output)]
    page.add_command("Pixels:", f"{shlex.join(words)}{repeated} {shlex.join(more)}")
    page.fill("writes this placement for an input of uint8 pixels.", 9, " " * 9)


def suggest_build(
    page: TextPage, path: str, target: Target, model: onnx.ModelProto, gpu: str | None
) -> None:
    """Add the commands that build the written model for a target, on the named GPU if any."""
    from qdqtool.formats.predict_text import build_commands
    from qdqtool.ir.graph import Model
    from qdqtool.ir.input_shapes import describe_model
    from qdqtool.timing.gpus import choose_gpu

    if not target.is_rtx:
        on_jetson = None if gpu is None else choose_gpu(gpu).is_jetson
        page.add_page(
            build_commands(
                target, path, page.width, describe_model(Model(model)), on_jetson=on_jetson
            )
        )
