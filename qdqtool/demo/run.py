"""The demo's steps, each reported as it is done."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtool.buildlog.agreement import BuildFacts, BuildSource
from qdqtool.demo.model import OWN_NAME, make_image, write_images, yolov8n
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.api import insert
from qdqtool.insertion.result import Insertion
from qdqtool.io.outputs import commit
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load, save
from qdqtool.model.sessions import open_session
from qdqtool.prediction import predict
from qdqtool.render.insertion_text import render
from qdqtool.render.output import terminal_width, wrap
from qdqtool.trt.targets import TARGETS, Target
from qdqtool.types import Precision
from qdqtool.verification.convolutions import BuiltNode
from qdqtool.verification.lines import of_pairs
from qdqtool.verification.pairs import Pair
from qdqtool.verification.result import Verification

_CHECKED = 8
_GPU = "RTX 3060"  # that the page estimates times for


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
    for old in pictures.glob("demo-*.png"):
        if OWN_NAME.fullmatch(old.name):  # of an earlier run with more images; others are the user's
            old.unlink()
    write_images(pictures, images, size)
    commit()  # the next steps read what this one wrote
    yield f"1. wrote {model} (YOLOv8n architecture, random weights)"
    yield f"   and {images} generated images of {size} x {size} pixels to {pictures}"
    yield ""
    yield "2. qdqtool insert: calibrating, placing Q/DQ pairs, predicting"
    cache = folder / "calibration.npz"
    result = insert(model, pictures, target=target, progress=True, calib_cache=cache, overwrite_cache=True)
    result.save(quantized)
    commit()
    yield from _indented(render(result, terminal_width() - 3))
    yield f"   wrote {quantized}"
    pixels, correlation = _difference(proto, result.model, size, images)
    yield f"   on {_CHECKED} other images boxes move by {pixels:.1f} px on average;"
    yield f"   the correlation of the scores is {correlation:.3f}"
    yield ""
    yield "3. qdqtool verify: a real compiler's answer"
    yield from _verified(quantized)
    yield ""
    yield "4. qdqtool report: one page to look at"
    yield from _reported(model, quantized, cache, target)
    yield ""
    yield from _next(result, quantized, time.perf_counter() - started)


def _indented(text: str) -> Iterator[str]:
    return (f"   {line}".rstrip() for line in text.rstrip().splitlines())


def _difference(before: onnx.ModelProto, after: onnx.ModelProto, size: int, first: int) -> tuple[float, float]:
    """Mean distance of box coordinates in pixels and correlation of scores, on images that calibration did not see."""
    outputs = []
    for proto in (before, after):
        session = open_session(proto.SerializeToString(), 0, optimize="none")
        rows = []
        for index in range(first, first + _CHECKED):
            pixels = np.asarray(make_image(size, index), np.float32).transpose(2, 0, 1)[None] / 255
            rows.append(session.run(None, {"images": pixels})[0])
        outputs.append(np.concatenate(rows))
    boxes = float(np.abs(outputs[0] - outputs[1])[:, :4].mean())
    return boxes, float(np.corrcoef(outputs[0][:, 4:].ravel(), outputs[1][:, 4:].ravel())[0, 1])


def _verified(quantized: Path) -> Iterator[str]:
    from qdqtool.builders.child import is_installed
    from qdqtool.render.build_text import render_verification

    if not is_installed("tensorrt_rtx"):
        recorded = verify_recorded(quantized)
        if recorded is None:
            yield "   no TensorRT-RTX here, and the recorded build is of the default demo model, not of this one"
        else:
            yield "   no TensorRT-RTX here: compared with the record of an earlier build of this model"
            yield from _indented(render_verification(recorded, terminal_width() - 3))
        yield from wrap(
            "After 'pip install qdqtool[rtx]' (which accepts NVIDIA's licence) the demo builds the model with "
            "TensorRT-RTX, which needs no GPU; with any other TensorRT, verify takes trtexec's log:",
            3, terminal_width(),
        )  # fmt: skip
        yield f"     qdqtool verify {quantized} build.log"
        return
    from qdqtool.verification.built_here import verify_with_builder

    yield from _indented(render_verification(verify_with_builder(quantized, "tensorrt-rtx"), terminal_width() - 3))


def _reported(model: Path, quantized: Path, cache: Path, target: Target) -> Iterator[str]:
    from qdqtool.reporting.page import lacking

    missing = lacking()
    if missing:
        yield from wrap(missing, 3, terminal_width())
        yield f"     qdqtool report {quantized} --float {model}"
        return
    from qdqtool.reporting.api import report

    page = quantized.with_name("yolov8n-demo_report.html")
    report(quantized, before=model, target=target, gpu=_GPU, calib_cache=cache).save(page)
    commit()
    yield f"   wrote {page}: open it in a browser"
    yield f"   (its times are estimates for one GPU, {_GPU})"


def _next(result: Insertion, quantized: Path, seconds: float) -> Iterator[str]:
    yield f"done in {seconds:.1f} s. With a model of your own and a few hundred of its images:"
    yield f"  qdqtool insert yolov8n.onnx --calib images/ --target {result.target}"
    yield "Look closer at this one:"
    yield f"  {_this_program()} predict {shlex.quote(str(quantized))} --target {result.target} --all"


def _this_program() -> str:
    """How to call it again: by its name where the shell finds that, else as it was called (``.venv/bin/qdqtool``)."""
    called = sys.argv[0]
    found = shutil.which("qdqtool")
    if found is not None or not called.endswith("qdqtool"):
        return "qdqtool" if found is not None else f"{shlex.quote(sys.executable)} -m qdqtool"
    return shlex.quote(os.path.relpath(called))


# The recorded build, for machines without a compiler ----------------------------------------------------------------


RECORDING = Path(__file__).with_name("recorded_build.json")


def structure(model: Model) -> str:
    """SHA-256 over nodes, connections and the shapes of initializers: equal for models that differ in values alone."""
    rows: list[Any] = [[n.op, n.name, n.inputs, n.outputs] for n in model.nodes]
    rows += sorted([t.name, *t.dims] for t in model.initializers.values())
    rows += [[v.name, *(d.dim_value for d in v.type.tensor_type.shape.dim)] for v in model.proto.graph.input]
    return hashlib.sha256(json.dumps(rows, default=list).encode()).hexdigest()


def verify_recorded(source: str | os.PathLike[str]) -> Verification | None:
    """Holds the prediction for a quantized demo model against the recorded build.

    Args:
        source: Path of the model.

    Returns:
        The verification; None when the recording is of another model than this one.

    Raises:
        ModelError: The model cannot be read.
    """
    model = load(source)
    recorded = json.loads(RECORDING.read_text())
    if recorded["structure"] != structure(model):
        return None
    built = {row["name"]: row for row in recorded["convolutions"]}
    prediction = predict(model, TARGETS["rtx1.7"])
    pairs = []
    for conv in prediction.convolutions:
        row = built.get(conv.name)
        node = None if row is None else BuiltNode(
            conv.index, conv.name, conv.op, Precision(row["precision"]), output=Precision(row["output"])
        )  # fmt: skip
        pairs.append(Pair(conv, node))
    result = of_pairs(prediction, pairs, BuildFacts(
        BuildSource.RECORDING, (RECORDING.name,), recorded["tensorrt"], complete=True,
    ))  # fmt: skip
    result.notes.append("the build was made when this demo was written, not on this machine")
    return result
