"""QAT tools beside each other on trained detectors: without fine-tuning, and fine-tuned over several seeds.

    pip install 'qdqtool[qat]' ultralytics            # AGPL-3.0: measured here, no part of qdqtool
    python benchmarks/qat.py tools --weights best.pt --images photographs/ --page docs/qat.md
    python benchmarks/qat.py training --work FOLDER --seeds 0 1 2 --page docs/qat.md

``tools``: box error, INT8 in and out, conversions, lines of code. Nothing is fine-tuned: every row is the same float
network with quantizers placed and calibrated by one tool, so that only places and ranges differ. The box error is the
mean distance in pixels between the corners of the float network's 50 most confident boxes of an image and the quantized
network's boxes of the same cells, run with onnxruntime. The first images calibrate, the last ``--judge`` are judged.
Conversions and INT8 convolutions are those predicted for trt8.5. Lines of code are the statements of a row's function
below, from the float network to the file; the float export that two of them need counts for one.

``training``: each seed makes pictures of its own (discs, rectangles and triangles of examples/qat_yolov8/shapes.py,
exact boxes) and trains a YOLOv8n from scratch. From its last checkpoint everything else starts: the float network
fine-tuned as long, PTQ, QAT, the same with BatchNormalization frozen (which of the two is the default was chosen on
seed 0, so that the others judge), and Ultralytics' ``quantize=8``, which is ModelOpt's. The fine-tuned rows have the
same pictures, steps and rates (``qdqtool.qat.ultralytics.RECIPE``); the last checkpoint counts, none is chosen. All
rows are files, run with onnxruntime without graph optimizations, on the same pictures for every seed, which no network
was trained, calibrated or chosen on. mAP is COCO's mAP50-95, by qdqtool.tuning.metrics. Done rows are kept in FOLDER.
"""

import argparse
import ast
import contextlib
import copy
import inspect
import io
import os
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "qat_yolov8"))

import numpy as np
import onnxruntime
import torch
from common import failure, input_name, kept_rows, publish, run_model, table
from PIL import Image
from shapes import CLASSES, SIZE, generate
from torch import Tensor, nn

import qdqtool
from qdqtool import qat
from qdqtool.qat.networks import exporting_heads
from qdqtool.tuning.metrics import Detections, match, precision

TOP = 50
JUDGED_SEED = 1_000_003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="what", required=True)
    one = ways.add_parser("tools")
    one.add_argument("--weights", required=True, help="a checkpoint of Ultralytics' detectors (.pt)")
    one.add_argument("--images", type=Path, required=True)
    one.add_argument("--size", type=int, default=640)
    one.add_argument("--judge", type=int, default=8)
    one.add_argument("--rows", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    one.add_argument("--keep", type=Path, help="a JSON file with the rows that are done")
    other = ways.add_parser("training")
    other.add_argument("--work", type=Path, required=True, help="where pictures, checkpoints and results are kept")
    other.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    other.add_argument("--rows", nargs="+", default=list(TRAINED), choices=list(TRAINED))
    other.add_argument("--pictures", type=int, default=1600)
    other.add_argument("--judge", type=int, default=500)
    other.add_argument("--epochs", type=int, default=10)
    other.add_argument("--tuning", type=int, default=2)
    for each in (one, other):
        each.add_argument("--page", type=Path, help="a page whose table between marks is replaced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    text = compare_tools(options) if options.what == "tools" else train(options)
    publish(options.what, text, options.page)


# Tools, nothing fine-tuned ----------------------------------------------------------------------------------------


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
        wanted = [run(folder / "float.onnx", image) for image in judged]

        def measure(row: str) -> dict[str, Any]:
            path = folder / f"{row.replace(' ', '_')}.onnx"
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    TOOLS[row](YOLO(options.weights), calibration, path)
                errors = [box_error(run(path, image), w) for image, w in zip(judged, wanted, strict=True)]
                return {"error": float(np.mean(errors)), **qdqtool.predict(path, "trt8.5").summary()}
            except Exception as error:  # another tool's: the row says what it raised
                traceback.print_exc()
                return {"fails": failure(error)}

        found = kept_rows(options.rows, options.keep, measure)
    rows = []
    for name, row in found.items():
        cells = (f"fails: {row['fails']}", "", "", "") if "fails" in row else (
            f"{row['error']:.2f}", f"{row['int8']} of {row['convolutions']}", row["int8_to_int8"], row["conversions"])
        rows.append((name, *cells, lines_of(TOOLS[name])))
    classes = len(yolo.names)
    millions = sum(p.numel() for p in yolo.model.parameters()) / 1e6
    return (
        f"A trained {type(yolo.model).__name__} of {millions:.1f} million parameters and {classes} "
        f"class{'es' * (classes != 1)}, {options.size} x {options.size}; {len(calibration)} photographs calibrate, "
        f"{len(judged)} others judge; torch {torch.__version__}, nothing fine-tuned.\n\n"
    ) + table(("tool", "box error, px", "INT8", "INT8 in and out", "conversions, trt8.5", "lines of code"), rows)


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


def export_network(model: nn.Module, sample: Tensor, path: Path) -> None:
    with exporting_heads(model.float().eval()), torch.no_grad():
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
    export_network(yolo.model, images[:1], plain)
    qdqtool.insert(plain, images.numpy(), target="trt8.5").save(path)


def by_ultralytics_qat(yolo: Any, images: Tensor, path: Path) -> None:
    """Their prepare_qat, as quantize=8 in their trainer calls it, and their fuse() before the export."""
    from ultralytics.utils.torch_utils import prepare_qat

    model = prepare_qat(yolo.model.float(), list(images.split(4)), lambda batch: batch, batches=len(images) // 4)
    export_network(model.eval().fuse(verbose=False), images[:1], path)


def by_ultralytics_ptq(yolo: Any, images: Tensor, path: Path) -> None:
    """Their onnx_int8_quantize, as export(quantize=8) calls it."""
    from ultralytics.utils.export.onnx import onnx_int8_quantize

    plain = path.with_suffix(".float.onnx")
    export_network(yolo.model, images[:1], plain)
    onnx_int8_quantize(plain, path, list(images.split(1)), lambda batch: batch.numpy(), input_name=input_name(plain))


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
    """quant_modules.initialize(), then the network is built again, and histograms by percentile."""
    from ultralytics.nn.tasks import DetectionModel

    def build() -> nn.Module:
        return DetectionModel(copy.deepcopy(yolo.model.yaml), nc=yolo.model.model[-1].nc, verbose=False)

    with pytorch_quantized(build, yolo.model.float().state_dict(), images.split(4), percentile=99.99) as model:
        export_network(model, images[:1], path)


@contextlib.contextmanager
def pytorch_quantized(
    build: Callable[[], nn.Module], weights: Any, batches: Any, percentile: float | None = None
) -> Iterator[nn.Module]:
    """A network built with pytorch-quantization's layers and calibrated, ready for the export.

    Args:
        build: Builds it.
        weights: Of the float network.
        batches: To calibrate with.
        percentile: Of the activations' histograms; None takes the largest magnitudes.
    """
    from absl import logging as absl_logging
    from pytorch_quantization import calib, quant_modules
    from pytorch_quantization import nn as quant_nn

    absl_logging.set_verbosity(absl_logging.ERROR)
    quant_modules.initialize()
    try:
        model = build()
    finally:
        quant_modules.deactivate()
    model.load_state_dict(weights, strict=False)
    model.eval()
    quantizers = [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]
    for quantizer in quantizers:
        if percentile is None:
            quantizer._calibrator = calib.MaxCalibrator(8, quantizer._axis, False)
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        for x in batches:
            model(x)
    for quantizer in quantizers:
        largest = isinstance(quantizer._calibrator, calib.MaxCalibrator)
        quantizer.load_calib_amax(*(() if largest else ("percentile",)), strict=False,
                                  **({} if largest else {"percentile": percentile}))
        quantizer.enable_quant()
        quantizer.disable_calib()
        if getattr(quantizer, "_amax", None) is None:
            quantizer.disable()  # a module that did not run
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        yield model
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
    """Statements of the row's function, without docstring, imports and signature; with those of a row that it calls."""
    body = ast.parse(textwrap.dedent(inspect.getsource(row))).body[0]
    kept = (ast.Expr, ast.Assign, ast.For, ast.With, ast.Try)
    own = sum(isinstance(n, kept) and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
              for n in ast.walk(body))
    called = {n.func.id for n in ast.walk(body) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return own + sum(lines_of(r) - 1 for r in (*TOOLS.values(), pytorch_quantized) if r.__name__ in called)


# Training over several seeds --------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> str:
    os.environ.update(YOLO_CONFIG_DIR=str(options.work), YOLO_OFFLINE="True", YOLO_AUTOINSTALL="false")
    options.work.mkdir(parents=True, exist_ok=True)
    judged = generate(options.judge, JUDGED_SEED)
    seeds = [Seed(seed, options).results(judged) for seed in options.seeds]

    def spread(values: np.ndarray) -> str:
        return f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""

    rows = []
    for name in options.rows:
        scores = np.array([s[name]["map"] for s in seeds])
        differences = scores - np.array([s["float"]["map"] for s in seeds]) if "float" in options.rows else scores * 0
        difference = "" if name == "float" else f"{differences.mean():+.2f}{spread(differences)}"
        one = seeds[0][name]
        rows.append((TRAINED[name][0], f"{scores.mean():.2f}{spread(scores)}", difference,
                     f"{one['int8']} of {one['convolutions']}", one["int8_to_int8"], one["conversions"]))
    return table((f"{len(seeds)} seed{'s' * (len(seeds) != 1)}, {options.judge} pictures", "mAP50-95",
                  "minus float, paired", "INT8", "INT8 in and out", "conversions, trt8.5"), rows)


class Seed:
    """Everything that starts from one seed; files of what is done stay in its folder."""

    def __init__(self, seed: int, options: argparse.Namespace) -> None:
        self.seed, self.options = seed, options
        self.folder = (options.work / f"seed{seed}").resolve()
        self.folder.mkdir(exist_ok=True)

    def results(self, judged: tuple[np.ndarray, list[np.ndarray]]) -> dict[str, Any]:
        """By row: mAP, what is INT8, seconds of CPU time."""
        def measure(row: str) -> dict[str, Any]:
            before = time.process_time()
            path = self.folder / f"{row.replace('+', '-tuned')}.onnx"
            TRAINED[row][1](self, path)
            seconds = round(time.process_time() - before)
            return {"map": score(path, *judged), "seconds": seconds, **qdqtool.predict(path, "trt8.5").summary()}

        return kept_rows(self.options.rows, self.folder / "results.json", measure, f"seed {self.seed}: ")

    @property
    def data(self) -> Path:
        """The description of the pictures, which are made where they are not there yet."""
        import yaml

        described = self.folder / "data.yaml"
        if described.exists():
            return described
        for split, count, seed in (("train", self.options.pictures, self.seed), ("val", 64, self.seed + 500_000)):
            for kind in ("images", "labels"):
                (self.folder / kind / split).mkdir(parents=True, exist_ok=True)
            for i, (picture, objects) in enumerate(zip(*generate(count, seed), strict=True)):
                Image.fromarray(picture.transpose(1, 2, 0)).save(self.folder / "images" / split / f"{i:05}.png")
                lines = [f"{int(k)} {(a + c) / 2 / SIZE} {(b + d) / 2 / SIZE} {(c - a) / SIZE} {(d - b) / SIZE}\n"
                         for k, a, b, c, d in objects]  # fmt: skip
                (self.folder / "labels" / split / f"{i:05}.txt").write_text("".join(lines))
        described.write_text(yaml.safe_dump({"path": str(self.folder), "train": "images/train", "val": "images/val",
                                             "names": dict(enumerate(CLASSES))}))
        return described

    def train(self, start: str, name: str, **changes: Any) -> Path:
        """Trains from a file; the last checkpoint."""
        from ultralytics import YOLO

        finished = self.folder / f"{name}.finished"
        if not finished.exists():
            YOLO(start).train(
                data=str(self.data), imgsz=SIZE, batch=16, device="cpu", workers=0, plots=False, val=False,
                project=str(self.folder), name=name, exist_ok=True, verbose=False, seed=self.seed, amp=False,
                cache="ram", **changes,
            )  # fmt: skip
            finished.touch()
        return self.folder / name / "weights" / "last.pt"

    def base(self) -> str:
        """The checkpoint of the float network, trained from scratch."""
        return str(self.train("yolov8n.yaml", "base", epochs=self.options.epochs, optimizer="AdamW", lr0=2e-3,
                              cos_lr=True, warmup_epochs=1.0, mosaic=0.0, pretrained=False))

    def tuned(self, name: str, **changes: Any) -> str:
        """The checkpoint after the steps that all fine-tuned rows have."""
        from qdqtool.qat.ultralytics import RECIPE

        recipe = {k: v for k, v in RECIPE.items() if k != "amp"}
        return str(self.train(self.base(), name, **{**recipe, "epochs": self.options.tuning, **changes}))


def exported(weights: str, path: Path) -> Path:
    from ultralytics import YOLO

    export_network(YOLO(weights).model, torch.zeros(1, 3, SIZE, SIZE), path)
    return path


def trained_ptq(seed: Seed, path: Path) -> None:
    pictures, _ = generate(128, seed.seed)  # of those that the network was trained on
    plain = exported(seed.base(), path.with_suffix(".float.onnx"))
    qdqtool.insert(plain, pictures.astype(np.float32) / 255, target="trt8.5").save(path)


def trained_qat(seed: Seed, path: Path, *, frozen: bool = False) -> None:
    from ultralytics import YOLO

    from qdqtool.qat.ultralytics import Trainer

    yolo = YOLO(seed.tuned("frozen" if frozen else "qat", trainer=Trainer.with_options(freeze_norms=frozen)))
    qat.export(yolo, path, torch.zeros(1, 3, SIZE, SIZE))


def trained_theirs(seed: Seed, path: Path) -> None:
    from ultralytics import YOLO

    yolo = YOLO(seed.tuned("theirs", quantize=8))
    Path(yolo.export(format="onnx", imgsz=SIZE, device="cpu", simplify=False)).rename(path)


TRAINED: dict[str, tuple[str, Callable[[Seed, Path], Any]]] = {
    "float": ("float", lambda seed, path: exported(seed.base(), path)),
    "ptq": ("PTQ: `qdqtool.insert`", trained_ptq),
    "qat": ("QAT: `qdqtool.qat.ultralytics.Trainer`", trained_qat),
    "frozen": ("QAT: the same, BatchNormalization frozen", lambda seed, path: trained_qat(seed, path, frozen=True)),
    "theirs": ("QAT: Ultralytics' `quantize=8`", trained_theirs),
    "float+": ("float, fine-tuned as long", lambda seed, path: exported(seed.tuned("float-tuned"), path)),
}


def score(path: Path, pictures: np.ndarray, objects: list[np.ndarray]) -> float:
    """mAP50-95 in percent, the mean over the classes."""
    found = run_model(str(path), (p[None].astype(np.float32) / 255 for p in pictures), threads=1)
    wanted = [Detections(o[:, 1:].astype(np.float64), np.ones(len(o)), o[:, 0].astype(np.int64)) for o in objects]
    matches = [match(w, f) for w, f in zip(wanted, found, strict=True)]
    return 100 * float(precision(matches, pooled=False).mean())


if __name__ == "__main__":
    main()
