"""YOLOv8n trained in Ultralytics, then INT8 in five ways: mAP over three seeds, INT8 convolutions and conversions.

    pip install 'qdqtool[qat]' ultralytics            # AGPL-3.0: measured here, no part of qdqtool
    python benchmarks/qat_training.py --work FOLDER --seeds 0 1 2 --docs docs/qat.md

Each seed makes pictures of its own (discs, rectangles and triangles of examples/qat_yolov8/shapes.py, exact boxes) and
trains a YOLOv8n from scratch. From its last checkpoint everything else starts:

* float, fine-tuned as long: what the same further steps do to the float network
* PTQ: ``qdqtool.insert`` on the export
* QAT: ``yolo.train(trainer=qdqtool.qat.ultralytics.Trainer)``
* the same with BatchNormalization frozen, ``Trainer.with_options(freeze_norms=True)``: which of the two is the default
  was chosen on seed 0, so that the others judge
* QAT of Ultralytics: ``yolo.train(quantize=8)``, which is ModelOpt's, and their export

The fine-tuned rows have the same pictures, steps and rates (``qdqtool.qat.ultralytics.RECIPE``); the last checkpoint
counts, none is chosen. All rows are files, run with onnxruntime without graph optimizations, on the same pictures for
every seed, which no network was trained, calibrated or chosen on. mAP is COCO's mAP50-95, by qdqtool.tuning.detection.
Done rows are kept in FOLDER, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "qat_yolov8"))

from detectors import run_model
from marked import kept_rows, replace_between
from shapes import CLASSES, SIZE, generate

import qdqtool
from qdqtool.tuning.detection import Detections, match, precision

JUDGED_SEED = 1_000_003
BEGIN, END = "<!-- training: written by benchmarks/qat_training.py -->", "<!-- end of training -->"
ROWS = {
    "float": "float",
    "ptq": "PTQ: `qdqtool.insert`",
    "qat": "QAT: `qdqtool.qat.ultralytics.Trainer`",
    "frozen": "QAT: the same, BatchNormalization frozen",
    "theirs": "QAT: Ultralytics' `quantize=8`",
    "float+": "float, fine-tuned as long",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="where pictures, checkpoints and results are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--pictures", type=int, default=1600)
    parser.add_argument("--judge", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tuning", type=int, default=2)
    parser.add_argument("--docs", type=Path, help="a page whose table between markers is replaced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.update(YOLO_CONFIG_DIR=str(options.work), YOLO_OFFLINE="True", YOLO_AUTOINSTALL="false")
    options.work.mkdir(parents=True, exist_ok=True)
    judged = generate(options.judge, JUDGED_SEED)
    results: dict[int, dict[str, Any]] = {}
    for seed in options.seeds:
        results[seed] = Seed(seed, options).results(judged)
    text = table(results, options)
    print(text)
    if options.docs is not None:
        replace_between(options.docs, BEGIN, END, text)


class Seed:
    """Everything that starts from one seed; files of what is done stay in its folder."""

    def __init__(self, seed: int, options: argparse.Namespace) -> None:
        self.seed, self.options = seed, options
        self.folder = (options.work / f"seed{seed}").resolve()
        self.folder.mkdir(exist_ok=True)

    def results(self, judged: tuple[np.ndarray, list[np.ndarray]]) -> dict[str, Any]:
        """By row: mAP, what is INT8, seconds of CPU time."""
        return kept_rows(
            self.options.rows, self.folder / "results.json", lambda row: self._measured(row, judged),
            f"seed {self.seed}: ",
        )  # fmt: skip

    def _measured(self, row: str, judged: tuple[np.ndarray, list[np.ndarray]]) -> dict[str, Any]:
        before = time.process_time()
        path = self.folder / f"{row.replace('+', '-tuned')}.onnx"
        WAYS[row](self, path)
        seconds = time.process_time() - before
        summary = qdqtool.predict(path, "trt8.5").summary()
        return {"map": score(path, *judged), "seconds": round(seconds), **summary}

    @property
    def data(self) -> Path:
        """The description of the pictures, which are made where they are not there yet."""
        import yaml
        from PIL import Image

        described = self.folder / "data.yaml"
        if described.exists():
            return described
        for split, count, seed in (("train", self.options.pictures, self.seed), ("val", 64, self.seed + 500_000)):
            for kind in ("images", "labels"):
                (self.folder / kind / split).mkdir(parents=True, exist_ok=True)
            for i, (picture, objects) in enumerate(zip(*generate(count, seed), strict=True)):
                Image.fromarray(picture.transpose(1, 2, 0)).save(self.folder / "images" / split / f"{i:05}.png")
                lines = [
                    f"{int(k)} {(a + c) / 2 / SIZE} {(b + d) / 2 / SIZE} {(c - a) / SIZE} {(d - b) / SIZE}\n"
                    for k, a, b, c, d in objects
                ]
                (self.folder / "labels" / split / f"{i:05}.txt").write_text("".join(lines))
        text = yaml.safe_dump(
            {"path": str(self.folder), "train": "images/train", "val": "images/val", "names": dict(enumerate(CLASSES))}
        )
        described.write_text(text)
        return described

    def train(self, start: str, name: str, **changes: Any) -> Path:
        """Trains from a file; the last checkpoint."""
        from ultralytics import YOLO

        last = self.folder / name / "weights" / "last.pt"
        finished = self.folder / f"{name}.finished"
        if not finished.exists():
            YOLO(start).train(
                data=str(self.data), imgsz=SIZE, batch=16, device="cpu", workers=0, plots=False, val=False,
                project=str(self.folder), name=name, exist_ok=True, verbose=False, seed=self.seed, amp=False,
                cache="ram", **changes,
            )  # fmt: skip
            finished.touch()
        return last

    def base(self) -> str:
        """The checkpoint of the float network, trained from scratch."""
        return str(
            self.train(
                "yolov8n.yaml", "base", epochs=self.options.epochs, optimizer="AdamW", lr0=2e-3, cos_lr=True,
                warmup_epochs=1.0, mosaic=0.0, pretrained=False,
            )
        )

    def tuned(self, name: str, **changes: Any) -> Path:
        """The checkpoint after the steps that all fine-tuned rows have."""
        from qdqtool.qat.ultralytics import RECIPE

        recipe = {k: v for k, v in RECIPE.items() if k != "amp"}
        return self.train(self.base(), name, **{**recipe, "epochs": self.options.tuning, **changes})


def by_float(seed: Seed, path: Path) -> None:
    _export(seed.base(), path)


def by_float_tuned(seed: Seed, path: Path) -> None:
    _export(str(seed.tuned("float-tuned")), path)


def by_ptq(seed: Seed, path: Path) -> None:
    plain = path.with_suffix(".float.onnx")
    _export(seed.base(), plain)
    pictures, _ = generate(128, seed.seed)  # of those that the network was trained on
    qdqtool.insert(plain, pictures.astype(np.float32) / 255, target="trt8.5").save(path)


def by_qat(seed: Seed, path: Path, *, frozen: bool = False) -> None:
    import torch
    from ultralytics import YOLO

    from qdqtool import qat
    from qdqtool.qat.ultralytics import Trainer

    yolo = YOLO(str(seed.tuned("frozen" if frozen else "qat", trainer=Trainer.with_options(freeze_norms=frozen))))
    qat.export(yolo, path, torch.zeros(1, 3, SIZE, SIZE))


def by_frozen(seed: Seed, path: Path) -> None:
    by_qat(seed, path, frozen=True)


def by_theirs(seed: Seed, path: Path) -> None:
    from ultralytics import YOLO

    yolo = YOLO(str(seed.tuned("theirs", quantize=8)))
    Path(yolo.export(format="onnx", imgsz=SIZE, device="cpu", simplify=False)).rename(path)


WAYS: dict[str, Callable[[Seed, Path], None]] = {
    "float": by_float, "float+": by_float_tuned, "ptq": by_ptq, "qat": by_qat, "frozen": by_frozen, "theirs": by_theirs,
}  # fmt: skip


def _export(weights: str, path: Path) -> None:
    import torch
    from qat import export_float
    from ultralytics import YOLO

    export_float(YOLO(weights), torch.zeros(1, 3, SIZE, SIZE), path)


def score(path: Path, pictures: np.ndarray, objects: list[np.ndarray]) -> float:
    """mAP50-95 in percent, the mean over the classes."""
    found = run_model(str(path), (p[None].astype(np.float32) / 255 for p in pictures), threads=1)
    wanted = [
        Detections(o[:, 1:].astype(np.float64), np.ones(len(o)), o[:, 0].astype(np.int64)) for o in objects
    ]
    matches = [match(w, f) for w, f in zip(wanted, found, strict=True)]
    return 100 * float(precision(matches, pooled=False).mean())


def table(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> str:
    """Markdown: means over the seeds, and paired differences to float, with their standard deviations."""
    seeds = list(results.values())
    lines = [
        f"| {len(seeds)} seed{'s' * (len(seeds) != 1)}, {options.judge} pictures | mAP50-95 | minus float, paired "
        "| INT8 | INT8 in and out | conversions, trt8.5 |",
        "|---|---|---|---|---|---|",
    ]
    for row, name in ROWS.items():
        having = [s for s in seeds if row in s]
        if not having:
            continue
        scores = np.array([s[row]["map"] for s in having])
        differences = scores - np.array([s["float"]["map"] for s in having])
        difference = "" if row == "float" else f"{differences.mean():+.2f}{spread(differences)}"
        one = having[0][row]
        counts = f"{one['int8']} of {one['convolutions']} | {one['int8_to_int8']} | {one['conversions']}"
        some = "" if len(having) == len(seeds) else f", {len(having)} seed{'s' * (len(having) != 1)}"
        lines.append(f"| {name}{some} | {scores.mean():.2f}{spread(scores)} | {difference} | {counts} |")
    return "\n".join(lines)


def spread(values: np.ndarray) -> str:
    """The standard deviation between seeds, where there are several."""
    return f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""


if __name__ == "__main__":
    main()
