"""QAT tools beside each other on one trained detector: box error, INT8 in and out, conversions, lines of code.

    pip install 'qdqtool[qat]' ultralytics            # AGPL-3.0: measured here, no part of qdqtool
    python benchmarks/qat.py --weights best.pt --images photographs/ --docs docs/qat.md

Nothing is fine-tuned: every row is the same float network with quantizers placed and calibrated by one tool, so that
only places and ranges differ. The box error is the mean distance in pixels between the corners of the float network's
50 most confident boxes of an image and the quantized network's boxes of the same cells, run with onnxruntime. The first
images calibrate, the last ``--judge`` are judged. Conversions and INT8 convolutions are those predicted for trt8.5.
Lines of code are the statements of a row's function below, from the float network to the file; the float export that
two of them need counts for one. ``--keep FILE`` remembers rows that are done, ``--docs`` writes the table into a page.

What calibration costs is qat_calibration.py, fine-tuning over three seeds is qat_training.py and
examples/qat_yolov8/run.py with a naive placement and distillation.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import inspect
import io
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import onnxruntime
import torch
from marked import kept_rows, replace_between
from PIL import Image
from torch import Tensor, nn

import qdqtool
from qdqtool import qat
from qdqtool.qat.networks import exporting_heads

TOP = 50
BEGIN, END = "<!-- tools: written by benchmarks/qat.py -->", "<!-- end of tools -->"
Row = Callable[[Any, Tensor, Path], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True, help="a checkpoint of Ultralytics' detectors (.pt)")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--judge", type=int, default=8)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--keep", type=Path, help="a JSON file with the rows that are done")
    parser.add_argument("--docs", type=Path, help="a page whose table between markers is replaced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    images = load_images(options.images, options.size)
    if len(images) < options.judge + 8:
        sys.exit(f"{options.images}: {len(images)} images; at least {options.judge + 8} are needed")
    calibration, judged = images[: -options.judge], images[-options.judge :]
    from ultralytics import YOLO

    yolo = YOLO(options.weights)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "float.onnx"
        export_float(yolo, judged[:1], plain)
        wanted = [run(plain, image) for image in judged]
        found = kept_rows(
            options.rows, options.keep,
            lambda name: measured(name, YOLO(options.weights), calibration, judged, wanted, Path(folder)),
        )  # fmt: skip
    classes = len(yolo.names)
    text = table(
        {n: found[n] for n in options.rows},
        f"A trained {type(yolo.model).__name__} of {sum(p.numel() for p in yolo.model.parameters()) / 1e6:.1f} million "
        f"parameters and {classes} class{'es' * (classes != 1)}, "
        f"{options.size} x {options.size}; {len(calibration)} photographs calibrate, {len(judged)} others judge; "
        f"torch {torch.__version__}, nothing fine-tuned.",
    )
    print(text)
    if options.docs is not None:
        replace_between(options.docs, BEGIN, END, text)


def measured(
    name: str, yolo: Any, calibration: Tensor, judged: Tensor, wanted: list[np.ndarray], folder: Path
) -> dict[str, Any]:
    """A row's box error in pixels and what is predicted for it, or what the tool raised."""
    path = folder / f"{name.replace(' ', '_')}.onnx"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            ROWS[name](yolo, calibration, path)
        errors = [box_error(run(path, image), w) for image, w in zip(judged, wanted, strict=True)]
        return {"error": float(np.mean(errors)), **qdqtool.predict(path, "trt8.5").summary()}
    except Exception as failure:  # another tool's: the row says what it raised
        traceback.print_exc()
        return {"fails": f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:60]}"}


def table(found: dict[str, dict[str, Any]], title: str) -> str:
    """Markdown."""
    lines = [
        title,
        "",
        "| tool | box error, px | INT8 | INT8 in and out | conversions, trt8.5 | lines of code |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        if "fails" in row:
            lines.append(f"| {name} | fails: {row['fails']} | | | | {lines_of(ROWS[name])} |")
            continue
        cells = f"{row['int8']} of {row['convolutions']} | {row['int8_to_int8']} | {row['conversions']}"
        lines.append(f"| {name} | {row['error']:.2f} | {cells} | {lines_of(ROWS[name])} |")
    return "\n".join(lines)


def load_images(folder: Path, size: int) -> Tensor:
    """Centre squares of the photographs, [n, 3, size, size], 0 to 1, in the order of their names."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png", ".bmp")):
        picture = Image.open(path).convert("RGB")
        side = min(picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        square = picture.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        found.append(torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1).float() / 255)
    return torch.stack(found) if found else torch.empty(0)


def export_float(yolo: Any, sample: Tensor, path: Path) -> None:
    model = copy.deepcopy(yolo.model).float().eval()
    with exporting_heads(model), torch.no_grad():
        torch.onnx.export(model, (sample,), str(path), opset_version=17, dynamo=False)


def run(path: Path, image: Tensor) -> np.ndarray:
    """[4 + classes, cells]: boxes (centre and size, in pixels) and class scores."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: image[None].numpy()})[0])[0]


def box_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Mean distance of box corners, in pixels, over the cells of the reference's most confident boxes."""
    cells = np.argsort(-wanted[4:].max(0))[:TOP]

    def corners(output: np.ndarray) -> np.ndarray:
        centre, size = output[:2, cells], output[2:4, cells]
        return np.concatenate([centre - size / 2, centre + size / 2])

    return float(np.abs(corners(found) - corners(wanted)).mean())


def by_qat(yolo: Any, images: Tensor, path: Path) -> None:
    qat.prepare(yolo, images[:1], report=None)
    qat.calibrate(yolo, images.split(4))
    qat.export(yolo, path, images[:1])


def by_insert(yolo: Any, images: Tensor, path: Path) -> None:
    plain = path.with_suffix(".float.onnx")
    export_float(yolo, images[:1], plain)
    qdqtool.insert(plain, images.numpy(), target="trt8.5").save(path)


def by_ultralytics_qat(yolo: Any, images: Tensor, path: Path) -> None:
    """Their prepare_qat, as quantize=8 in their trainer calls it, and their fuse() before the export."""
    from ultralytics.utils.torch_utils import prepare_qat

    model = prepare_qat(yolo.model.float(), list(images.split(4)), lambda batch: batch, batches=len(images) // 4)
    export_modelopt(model.eval().fuse(verbose=False), images[:1], path)


def by_ultralytics_ptq(yolo: Any, images: Tensor, path: Path) -> None:
    """Their onnx_int8_quantize, as export(quantize=8) calls it."""
    from ultralytics.utils.export.onnx import onnx_int8_quantize

    plain = path.with_suffix(".float.onnx")
    export_float(yolo, images[:1], plain)
    import onnx

    name = onnx.load(plain).graph.input[0].name
    onnx_int8_quantize(plain, path, list(images.split(1)), lambda batch: batch.numpy(), input_name=name)


def by_modelopt(yolo: Any, images: Tensor, path: Path) -> None:
    import modelopt.torch.quantization as mtq

    model = yolo.model.float().eval()
    with torch.no_grad():
        mtq.quantize(model, mtq.INT8_DEFAULT_CFG, lambda m: [m(x) for x in images.split(4)])
    export_modelopt(model, images[:1], path)


def by_modelopt_fused(yolo: Any, images: Tensor, path: Path) -> None:
    yolo.model.float().eval().fuse(verbose=False)
    by_modelopt(yolo, images, path)


def export_modelopt(model: nn.Module, sample: Tensor, path: Path) -> None:
    with exporting_heads(model), torch.no_grad():
        torch.onnx.export(model, (sample,), str(path), opset_version=17, dynamo=False)


def by_pytorch_quantization(yolo: Any, images: Tensor, path: Path) -> None:
    """quant_modules.initialize(), then the network is built again, and histograms by least squared error."""
    from pytorch_quantization import calib, quant_modules
    from pytorch_quantization import nn as quant_nn
    from ultralytics.nn.tasks import DetectionModel

    quant_modules.initialize()
    try:
        model = DetectionModel(copy.deepcopy(yolo.model.yaml), nc=yolo.model.model[-1].nc, verbose=False)
    finally:
        quant_modules.deactivate()
    model.load_state_dict(yolo.model.float().state_dict(), strict=False)
    model.eval()
    quantizers = [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]
    for q in quantizers:
        q.disable_quant()
        q.enable_calib()
    with torch.no_grad():
        for x in images.split(4):
            model(x)
    for q in quantizers:
        q.load_calib_amax(strict=False) if isinstance(q._calibrator, calib.MaxCalibrator) else q.load_calib_amax(
            "percentile", percentile=99.99, strict=False
        )
        q.enable_quant()
        q.disable_calib()
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        export_modelopt(model, images[:1], path)
    finally:
        quant_nn.TensorQuantizer.use_fb_fake_quant = False


ROWS: dict[str, Row] = {
    "qdqtool.qat": by_qat,
    "qdqtool.insert": by_insert,
    "Ultralytics QAT (quantize=8)": by_ultralytics_qat,
    "Ultralytics PTQ": by_ultralytics_ptq,
    "ModelOpt mtq.quantize": by_modelopt,
    "ModelOpt, BN folded first": by_modelopt_fused,
    "quant_modules.initialize()": by_pytorch_quantization,
}


def lines_of(row: Row) -> int:
    """Statements of the row's function, without docstring, imports and signature; with those of a row that it calls."""
    body = ast.parse(textwrap.dedent(inspect.getsource(row))).body[0]
    kept = (ast.Expr, ast.Assign, ast.For, ast.With, ast.Try)
    own = sum(
        isinstance(n, kept) and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        for n in ast.walk(body)
    )
    called = {n.func.id for n in ast.walk(body) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return own + sum(lines_of(r) - 1 for r in ROWS.values() if r.__name__ in called)


if __name__ == "__main__":
    main()
