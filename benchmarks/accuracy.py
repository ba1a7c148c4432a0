"""Agreement of a quantized YOLOv8 with the float model's own detections.

    python benchmarks/accuracy.py MODEL.onnx CALIBRATION_IMAGES EVALUATION_IMAGES [--also OTHER_QDQ.onnx] [--all]

The reference is what the float model detects with a score of at least 0.25 on the evaluation images, none of which may
be among the calibration images. Prints mAP50 and mAP50-95 with their standard deviation over 200 bootstrap resamples
of the evaluation images. Models and images are the user's: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from detection import average_precision, load_samples, run_model

import qdqtool

CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "method max": {"method": "max"},
    "method percentile": {"method": "percentile"},
    "method entropy": {"method": "entropy"},
    "no-unify": {"unify": False},
    "residual none": {"residual": "none"},
    "residual skip": {"residual": "skip"},
    "head float": {"head": "float"},
    "head none": {"head": "none"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="float YOLOv8 ONNX model with the output [1, 4 + classes, anchors]")
    parser.add_argument("calibration", help="folder of calibration images")
    parser.add_argument("evaluation", help="folder of other images")
    parser.add_argument("--all", action="store_true", help="measure every choice, not the default alone")
    parser.add_argument("--also", action="append", default=[], metavar="ONNX", help="judge this model as well")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    samples = load_samples(arguments.model, arguments.evaluation)
    floats = run_model(arguments.model, samples)
    references = [d.above(0.25) for d in floats]
    boxes = sum(len(r.scores) for r in references)
    print(f"{len(samples)} evaluation images, {boxes} reference boxes; float against itself: ", end="")
    print("{:.3f} / {:.3f}".format(*average_precision(references, floats)))
    print(f"{'what':<24} {'mAP50':>14} {'mAP50-95':>14} {'INT8':>6} {'pairs':>6} {'s':>6}")
    rows = []
    for name, options in CHOICES.items() if arguments.all else [("default", CHOICES["default"])]:
        start = time.perf_counter()
        made = qdqtool.insert(arguments.model, arguments.calibration, predict=False, **options)
        seconds = time.perf_counter() - start
        row = _judge(name, made.model.SerializeToString(), samples, references)
        row.update(int8=len(made.weights), pairs=len(made.activations), seconds=round(seconds, 1))
        rows.append(_print(row))
    for path in arguments.also:
        rows.append(_print(_judge(Path(path).name, path, samples, references)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _judge(name: str, model: bytes | str, samples: list[Any], references: list[Any]) -> dict[str, Any]:
    found = run_model(model, samples)
    low, high = average_precision(references, found)
    rng = np.random.default_rng(0)
    resampled = [
        average_precision(references, found, rng.integers(0, len(samples), len(samples))) for _ in range(200)
    ]
    spread = np.nanstd(resampled, axis=0)
    return {"what": name, "map50": low, "map50_sd": spread[0], "map": high, "map_sd": spread[1]}


def _print(row: dict[str, Any]) -> dict[str, Any]:
    cells = [f"{row['map50']:.3f} ±{row['map50_sd']:.3f}", f"{row['map']:.3f} ±{row['map_sd']:.3f}"]
    rest = [str(row.get(key, "")) for key in ("int8", "pairs", "seconds")]
    print(f"{row['what']:<24} {cells[0]:>14} {cells[1]:>14} {rest[0]:>6} {rest[1]:>6} {rest[2]:>6}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
