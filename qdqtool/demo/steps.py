"""Steps of ``qdqtool demo``, and the texts that it prints."""

import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from qdqtool.demo.images import IMAGE_NAME, make_image, write_images
from qdqtool.demo.network import yolov8n
from qdqtool.demo.recording import verify_recorded, write_recorded_layers
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.formats.insertion_text import render
from qdqtool.formats.output import TextPage, terminal_width, wrap, wrap_command
from qdqtool.ir.modelfile import save
from qdqtool.quantization.api import insert
from qdqtool.runtime.sessions import open_session
from qdqtool.trt.targets import Target
from qdqtool.util import limits
from qdqtool.util.text import format_count

_COMPARED_IMAGES = 8
_GPU = "RTX 3060"  # GPU for which the report has estimated times


def run_demo(
    folder: Path, size: int, images: int, activation: str, target: Target
) -> Iterator[str]:
    """Run the demo in a folder, and yield the texts to print.

    Args:
        folder: Folder for all files. It is created if it is missing.
        size: Height and width of the network input in pixels.
        images: Number of calibration images.
        activation: Activation of the network, as in :func:`yolov8n`.
        target: TensorRT version for which Q/DQ pairs are inserted.

    Raises:
        QdqtoolError: The folder or a file cannot be written, or the size is invalid.
    """
    started = time.perf_counter()
    if size > limits.DEMO_SIZE:
        raise DataError(
            f"`size={size}` is too large for the demo; give at most {limits.DEMO_SIZE} pixels",
            code="out-of-range",
            parameter="size",
        )
    proto = yolov8n(size, activation=activation)
    image_folder = folder / "images"
    model, quantized = folder / "yolov8n-demo.onnx", folder / "yolov8n-demo_qdq.onnx"
    _prepare_image_folder(image_folder, folder)
    save(proto, model)
    write_images(image_folder, images, size)
    yield from _wrap_line(
        f"wrote {model} (YOLOv8n architecture, random weights) and "
        f"{format_count(images, 'generated image')} of {size} x {size} pixels to {image_folder}",
        "1. ",
    )
    yield "\n2. qdqtool insert: calibrating, placing Q/DQ pairs, predicting"
    cache = folder / "calibration.npz"
    result = insert(
        model, image_folder, target=target, progress=True, calib_cache=cache, overwrite_cache=True
    )
    result.save(quantized)
    yield _indent_page(render(result, terminal_width() - 3))
    yield from _wrap_line(f"wrote {quantized}")
    pixels, correlation = _compare_outputs(proto, result.model, size, images)
    yield (
        f"   on {_COMPARED_IMAGES} other images boxes move by {pixels:.1f} px on average;\n"
        f"   the correlation of the scores is {correlation:.3f}\n\n"
        "3. qdqtool verify: comparing the prediction with a real build"
    )
    yield from _run_verify_step(quantized)
    yield "\n4. qdqtool report: writing an HTML page"
    yield from _run_report_step(model, quantized, cache, target)
    yield (
        f"\ndone in {time.perf_counter() - started:.1f} s. "
        "For your own model, with a few hundred images:\n"
        f"  qdqtool insert yolov8n.onnx --calib images/ --target {result.target}\n"
        "For all details of the demo model:"
    )
    yield from _wrap_command(
        f"{_program_name()} predict {shlex.quote(str(quantized))} --target {result.target} --all",
        "  ",
    )


def _wrap_line(text: str, first: str = "   ") -> list[str]:
    return wrap(text, 3, terminal_width(), first)


def _wrap_command(command: str, indent: str) -> list[str]:
    return wrap_command(command, terminal_width(), indent, len(indent) + 2)


def _prepare_image_folder(image_folder: Path, folder: Path) -> None:
    try:
        image_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QdqtoolError(
            f"cannot be created: {error.strerror or error}",
            str(folder),
            code="not-written",
            parameter="output",
        ) from error
    for path in image_folder.glob("demo-*.png"):
        if IMAGE_NAME.fullmatch(path.name):
            path.unlink()


def _indent_page(text: TextPage) -> str:
    return textwrap.indent(str(text).rstrip(), "   ")


def _compare_outputs(
    before: onnx.ModelProto, after: onnx.ModelProto, size: int, first: int
) -> tuple[float, float]:
    """Return the mean difference of box coordinates in pixels, and the correlation of scores.

    `first` is the number of the first generated image, which follows the calibration images.
    """
    outputs = []
    for proto in (before, after):
        session = open_session(proto.SerializeToString(), 0, optimize="none")
        rows = []
        for index in range(first, first + _COMPARED_IMAGES):
            pixels = np.asarray(make_image(size, index), np.float32).transpose(2, 0, 1)[None] / 255
            rows.append(session.run(None, {"images": pixels})[0])
        outputs.append(np.concatenate(rows))
    boxes = float(np.abs(outputs[0] - outputs[1])[:, :4].mean())
    return boxes, float(np.corrcoef(outputs[0][:, 4:].ravel(), outputs[1][:, 4:].ravel())[0, 1])


def _run_verify_step(quantized: Path) -> Iterator[str]:
    from qdqtool.builders.compiler_process import is_installed
    from qdqtool.formats.build_text import render_verification

    width = terminal_width()
    if is_installed("tensorrt_rtx"):
        from qdqtool.verification.api import verify_with_builder

        result = verify_with_builder(quantized, "tensorrt-rtx")
        yield _indent_page(render_verification(result, width - 3))
        return
    recorded = verify_recorded(quantized)
    if recorded is None:
        yield from _wrap_line(
            "nothing was compared: TensorRT-RTX is not installed, and the recorded build is of the "
            "default demo model, not of this model"
        )
    else:
        yield "   TensorRT-RTX is not installed: a recorded build of this model is used"
        yield _indent_page(render_verification(recorded, width - 3))
        layers = quantized.with_name("yolov8n-demo_recorded-layers.json")
        write_recorded_layers(layers)
        yield from _wrap_line(
            f"wrote {layers} (the recorded data types; other layers and times were not recorded). "
            "To try verify and log:"
        )
        for command in (["verify", str(quantized), str(layers)], ["log", str(layers)]):
            yield from _wrap_command(f"{_program_name()} {shlex.join(command)}", "     ")
    yield from _wrap_line(
        "After pip install 'qdqtool[rtx]' (which accepts NVIDIA's license), the demo builds the "
        "model with TensorRT-RTX, which needs no GPU. For another TensorRT, give the log of "
        "trtexec to verify:"
    )
    yield from _wrap_command(f"qdqtool verify {shlex.quote(str(quantized))} build.log", "     ")


def _run_report_step(model: Path, quantized: Path, cache: Path, target: Target) -> Iterator[str]:
    from qdqtool.reporting.page import describe_missing_packages

    missing = describe_missing_packages()
    if missing:
        yield from _wrap_line(missing)
        paths = shlex.join([str(quantized), "--float", str(model)])
        yield from _wrap_command(f"qdqtool report {paths}", "     ")
        return
    from qdqtool.reporting.api import report

    page = quantized.with_name("yolov8n-demo_report.html")
    report(quantized, before=model, target=target, gpu=_GPU, calib_cache=cache).save(page)
    yield from _wrap_line(
        f"wrote {page}: open it in a browser (its times are estimates for one GPU, {_GPU})"
    )


def _program_name() -> str:
    if shutil.which("qdqtool") is not None:
        return "qdqtool"
    if sys.argv[0].endswith("qdqtool"):
        return shlex.quote(os.path.relpath(sys.argv[0]))
    return f"{shlex.quote(sys.executable)} -m qdqtool"
