"""The demo's steps, each told as it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from qdqtool.demo.images import write_images
from qdqtool.demo.model import yolov8n
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.api import Insertion, insert
from qdqtool.modelfile import save
from qdqtool.render.insertion_text import render
from qdqtool.render.output import terminal_width
from qdqtool.trt.targets import Target


def run(folder: Path, size: int, images: int, activation: str, target: Target) -> Iterator[str]:
    """Runs the demo and yields what to print.

    Args:
        folder: Where to write; made when it is missing.
        size: Side of the input in pixels, a multiple of 32.
        images: Number of calibration images.
        activation: ``silu`` or ``relu``.
        target: Which TensorRT.

    Raises:
        QdqtoolError: The folder cannot be made or written, or the size is wrong.
    """
    started = time.perf_counter()
    proto = yolov8n(size, activation=activation)
    pictures = folder / "images"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QdqtoolError(f"{folder}: cannot be made: {error.strerror or error}") from error
    model, quantized = folder / "yolov8n-demo.onnx", folder / "yolov8n-demo_qdq.onnx"
    save(proto, model)
    for old in pictures.glob("demo-*.png"):  # of an earlier run with more images
        old.unlink()
    write_images(pictures, images, size)
    yield f"1. wrote {model} (YOLOv8n architecture, random weights)"
    yield f"   and {images} generated images of {size} x {size} pixels to {pictures}"
    yield ""
    yield "2. qdqtool insert: calibrating and placing Q/DQ pairs"
    result = insert(model, pictures, target=target, progress=True)
    result.save(quantized)
    yield from (f"   {line}".rstrip() for line in render(result, terminal_width() - 3).splitlines())
    yield f"   wrote {quantized}"
    yield ""
    yield from _next(result, quantized, time.perf_counter() - started)


def _next(result: Insertion, quantized: Path, seconds: float) -> Iterator[str]:
    yield f"done in {seconds:.1f} s. Look closer:"
    yield f"  qdqtool predict {quantized} --target {result.target} --all"
    yield "and on a model of your own, with a few hundred of its images:"
    yield f"  qdqtool insert yolov8n.onnx --calib images/ --target {result.target}"
