"""Compare QAT tools on a detector: box error, INT8 layers, conversions, lines of code.

    pip install 'qdqtool[qat]' ultralytics   # AGPL-3.0: measured here, not a part of qdqtool
    python benchmarks/qat.py --weights best.pt --images photographs/ --page docs/qat-results.md

The networks are not fine-tuned. For each row, one tool places and calibrates quantizers in the same
float network, so the rows differ only in placement and ranges. The box error is the mean distance,
in pixels, between the corners of the boxes of the float network and those of the quantized network
in onnxruntime. In each image, the cells of the 50 most confident boxes of the float network count.
The last ``--judge`` images are for evaluation, all others for calibration. Conversions and INT8
convolutions are predicted for trt8.5. The lines of code are the statements of the row's function in
this script, from the float network to the file. The float export that two functions need counts as
one statement.
"""

import argparse
import ast
import contextlib
import copy
import inspect
import io
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import corners, failure, input_name, kept_rows, parser_of, publish, table
from PIL import Image, ImageOps
from torch import Tensor, nn

import qdqtool
from qdqtool import qat
from qdqtool.qat.networks import switch_heads_to_export
from qdqtool.runtime.sessions import open_session

TOP = 50


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--weights", required=True, help="checkpoint of a detector of Ultralytics (.pt)"
    )
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--judge", type=int, default=8)
    parser.add_argument("--rows", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--keep", type=Path, help="JSON file for finished rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    publish("tools", compare_tools(options), options.page)


def compare_tools(options: argparse.Namespace) -> str:
    from ultralytics import YOLO

    images = load_images(options.images, options.size)
    if len(images) < options.judge + 8:
        sys.exit(f"{options.images}: {len(images)} images; at least {options.judge + 8} are needed")
    calibration, judged = images[: -options.judge], images[-options.judge :]
    yolo = YOLO(options.weights)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_network(yolo.model, judged[:1], folder / "float.onnx")
        wanted = run(folder / "float.onnx", judged)

        def measure(row: str) -> dict[str, Any]:
            path = folder / f"{row.replace(' ', '_')}.onnx"
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    TOOLS[row](YOLO(options.weights), calibration, path)
                errors = list(map(box_error, run(path, judged), wanted))
                return {
                    "error": float(np.mean(errors)),
                    **qdqtool.predict(path, "trt8.5").summary(),
                }
            except Exception as error:  # the row shows the error of the tool
                traceback.print_exc()
                return {"fails": failure(error)}

        found = kept_rows(options.rows, options.keep, measure)
    rows = []
    for name, row in found.items():
        cells = (
            (f"fails: {row['fails']}", "", "", "")
            if "fails" in row
            else (
                f"{row['error']:.2f}",
                f"{row['int8']} of {row['convolutions']}",
                row["int8_to_int8"],
                row["conversions"],
            )
        )
        rows.append((name, *cells, lines_of(TOOLS[name])))
    classes = len(yolo.names)
    millions = sum(p.numel() for p in yolo.model.parameters()) / 1e6
    return (
        f"A trained {type(yolo.model).__name__} of {millions:.1f} million parameters and {classes} "
        f"class{'es' * (classes != 1)}, {options.size} x {options.size}; {len(calibration)} photographs for "
        f"calibration, {len(judged)} others for evaluation; torch {torch.__version__}, nothing fine-tuned.\n\n"
    ) + table(
        (
            "tool",
            "box error, px",
            "INT8",
            "INT8 in and out",
            "conversions, trt8.5",
            "lines of code",
        ),
        rows,
    )


def load_images(folder: Path, size: int) -> Tensor:
    """Return the center squares of images, sorted by name, from 0 to 1, [n, 3, size, size]."""
    kinds = (".jpg", ".jpeg", ".png", ".bmp")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in kinds)
    opened = (Image.open(path).convert("RGB") for path in paths)
    squares = [
        np.asarray(ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR))
        for picture in opened
    ]
    return (
        torch.tensor(np.array(squares)).movedim(-1, 1).float() / 255 if squares else torch.empty(0)
    )


def export_network(model: nn.Module, sample: Tensor, path: Path) -> None:
    with switch_heads_to_export(model.float().eval()), torch.no_grad():
        torch.onnx.export(model, (sample,), str(path), opset_version=17, dynamo=False)


def run(path: Path, images: Tensor) -> list[np.ndarray]:
    """Return boxes and class scores of each image, [4 + classes, cells].

    A box is its center and size in pixels.
    """
    session = open_session(path, 0, optimize="basic")
    name = session.get_inputs()[0].name
    return [np.asarray(session.run(None, {name: image[None].numpy()})[0])[0] for image in images]


def box_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the mean distance of box corners in pixels.

    Only the cells with the most confident boxes in `wanted` count.
    """
    cells = np.argsort(-wanted[4:].max(0))[:TOP]
    return float(np.abs(corners(found[:4, cells].T) - corners(wanted[:4, cells].T)).mean())


def by_qat(yolo: Any, images: Tensor, path: Path) -> None:
    qat.prepare(yolo, images[:1], report=None)
    qat.calibrate(yolo, images.split(4))
    qat.export(yolo, path, images[:1])


def by_insert(yolo: Any, images: Tensor, path: Path) -> None:
    plain = path.with_suffix(".float.onnx")
    export_network(yolo.model, images[:1], plain)
    qdqtool.insert(plain, images.numpy(), target="trt8.5").save(path)


def by_ultralytics_qat(yolo: Any, images: Tensor, path: Path) -> None:
    """Quantize with Ultralytics' prepare_qat, as its trainer does for quantize=8.

    The network is fused before the export, as in Ultralytics.
    """
    from ultralytics.utils.torch_utils import prepare_qat

    model = prepare_qat(
        yolo.model.float(), list(images.split(4)), lambda batch: batch, batches=len(images) // 4
    )
    export_network(model.eval().fuse(verbose=False), images[:1], path)


def by_ultralytics_ptq(yolo: Any, images: Tensor, path: Path) -> None:
    """Quantize with Ultralytics' onnx_int8_quantize, as export(quantize=8) does."""
    from ultralytics.utils.export.onnx import onnx_int8_quantize

    plain = path.with_suffix(".float.onnx")
    export_network(yolo.model, images[:1], plain)
    onnx_int8_quantize(
        plain,
        path,
        list(images.split(1)),
        lambda batch: batch.numpy(),
        input_name=input_name(plain),
    )


def by_modelopt(yolo: Any, images: Tensor, path: Path) -> None:
    import modelopt.torch.quantization as mtq

    model = yolo.model.float().eval()
    with torch.no_grad():
        mtq.quantize(model, mtq.INT8_DEFAULT_CFG, lambda m: [m(x) for x in images.split(4)])
    export_network(model, images[:1], path)


def by_modelopt_fused(yolo: Any, images: Tensor, path: Path) -> None:
    yolo.model.float().eval().fuse(verbose=False)
    by_modelopt(yolo, images, path)


def by_pytorch_quantization(yolo: Any, images: Tensor, path: Path) -> None:
    """Quantize with quant_modules.initialize(), for which the network is built again.

    The ranges are percentiles of histograms.
    """
    from absl import logging as absl_logging
    from pytorch_quantization import calib, nn as quant_nn, quant_modules
    from ultralytics.nn.tasks import DetectionModel

    absl_logging.set_verbosity(absl_logging.ERROR)
    quant_modules.initialize()
    try:
        model = DetectionModel(
            copy.deepcopy(yolo.model.yaml), nc=yolo.model.model[-1].nc, verbose=False
        )
    finally:
        quant_modules.deactivate()
    model.load_state_dict(yolo.model.float().state_dict(), strict=False)
    model.eval()
    quantizers = [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        for x in images.split(4):
            model(x)
    for quantizer in quantizers:
        if isinstance(quantizer._calibrator, calib.MaxCalibrator):
            quantizer.load_calib_amax(strict=False)
        else:
            quantizer.load_calib_amax("percentile", strict=False, percentile=99.99)
        quantizer.enable_quant()
        quantizer.disable_calib()
        if getattr(quantizer, "_amax", None) is None:
            quantizer.disable()  # a module that did not run
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        export_network(model, images[:1], path)
    finally:
        quant_nn.TensorQuantizer.use_fb_fake_quant = False


TOOLS: dict[str, Callable[[Any, Tensor, Path], None]] = {
    "qdqtool.qat": by_qat,
    "qdqtool.insert": by_insert,
    "Ultralytics QAT (quantize=8)": by_ultralytics_qat,
    "Ultralytics PTQ": by_ultralytics_ptq,
    "ModelOpt mtq.quantize": by_modelopt,
    "ModelOpt, BN folded first": by_modelopt_fused,
    "quant_modules.initialize()": by_pytorch_quantization,
}


def lines_of(row: Callable[..., Any]) -> int:
    """Return the number of statements of a row's function.

    The statements of other rows' functions that it calls count too. The docstring, imports and the
    signature do not count.
    """
    body = ast.parse(inspect.getsource(row)).body[0]
    kept = (ast.Expr, ast.Assign, ast.For, ast.With, ast.Try)
    own = sum(
        isinstance(n, kept) and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        for n in ast.walk(body)
    )
    called = {
        n.func.id
        for n in ast.walk(body)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    return own + sum(lines_of(r) - 1 for r in TOOLS.values() if r.__name__ in called)


if __name__ == "__main__":
    main()
