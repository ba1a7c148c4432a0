"""Compare float, PTQ, QAT and a naive QAT of one small detector.

The table has the accuracy, the INT8 convolutions and the conversions.

python run.py --quick          # about a minute on one core
python run.py --seeds 0 1 2    # the table in README.md
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from absl import logging
from detector import Detector
from evaluation import detect, mean_average_precision
from naive import calibrate_naive, export_naive, prepare_naive
from shapes import CLASSES, SIZE, generate
from training import as_input, train

import qdqtool
from qdqtool import qat
from qdqtool.errors import BuilderError

ROWS = {
    "float": "float",
    "float+": "float, fine-tuned for as many steps",
    "ptq": "PTQ: qdqtool.insert",
    "qat": "QAT: qdqtool.qat.prepare",
    "distilled": "QAT, distilled from float",
    "naive": "QAT: naive placement",
}
EVALUATION_SEED = 1_000_003  # the networks of all seeds are evaluated on the same images
METHOD = "mse"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run all parts in about a minute, with too few steps and images for a result",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--target", default="trt8.5")
    parser.add_argument(
        "--backend", default="pytorch-quantization", choices=["pytorch-quantization", "modelopt"]
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.ERROR)
    torch.set_num_threads(options.threads)
    options.steps, options.tuning, options.train, options.evaluate = (
        (70, 15, 640, 200) if options.quick else (400, 100, 4000, 1000)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    evaluation = generate(options.evaluate, EVALUATION_SEED)
    results = {}
    for seed in options.seeds:
        results[seed] = run_seed(seed, options, evaluation)
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(table(results, options))


def run_seed(
    seed: int, options: argparse.Namespace, evaluation: tuple[np.ndarray, list]
) -> dict[str, Any]:
    images, objects = generate(options.train, seed)
    sample = torch.zeros(1, 3, SIZE, SIZE)
    calibration = as_input(images[:256])
    files = {row: options.out / f"{row}-{seed}.onnx" for row in ROWS}

    def report_progress(text: str) -> None:
        if sys.stderr.isatty() or not options.quick:
            print(
                f"seed {seed}: {time.process_time():6.0f} s CPU: {text}",
                file=sys.stderr,
                flush=True,
            )

    def tune(model: torch.nn.Module, teacher: torch.nn.Module | None = None) -> torch.nn.Module:
        train(
            model,
            images,
            objects,
            steps=options.tuning,
            rate=3e-4,
            seed=seed + 1,
            freeze_norms=True,
            teacher=teacher,
            progress=report_progress,
        )
        return model

    torch.manual_seed(seed)
    model = Detector(len(CLASSES), SIZE)
    train(
        model, images, objects, steps=options.steps, rate=3e-3, seed=seed, progress=report_progress
    )
    torch.onnx.export(model, (sample,), str(files["float"]), opset_version=17, dynamo=False)

    report_progress("PTQ")
    qdqtool.insert(files["float"], calibration.numpy(), method=METHOD, target=options.target).save(
        files["ptq"]
    )

    report_progress("float, fine-tuned for as many steps")
    longer = tune(copy.deepcopy(model))
    torch.onnx.export(longer, (sample,), str(files["float+"]), opset_version=17, dynamo=False)

    report_progress("QAT")
    prepared = copy.deepcopy(model)
    plan = qat.prepare(
        prepared, sample, target=options.target, backend=options.backend, report=None
    )
    qat.calibrate(prepared, calibration.split(32), METHOD)
    distilled = copy.deepcopy(prepared)
    qat.export(tune(prepared), files["qat"], sample)

    report_progress("QAT, distilled")
    qat.export(tune(distilled, copy.deepcopy(model)), files["distilled"], sample)

    report_progress("naive QAT")
    naive = copy.deepcopy(model)
    prepare_naive(naive)
    calibrate_naive(naive, calibration.split(32), METHOD)
    export_naive(tune(naive), str(files["naive"]), sample)

    report_progress("evaluation")
    result: dict[str, Any] = {"plan": len(plan.convolutions)}
    for row, path in files.items():
        score = mean_average_precision(
            detect(str(path), evaluation[0]), evaluation[1], len(CLASSES)
        )
        result[row] = {
            "map": score,
            **qdqtool.predict(path, options.target).summary(),
            "built": describe_build(path, row),
        }
        report_progress(f"{row}: {result[row]}")
    return result


def describe_build(path: Path, row: str) -> str:
    """Return a text with the number of convolutions that TensorRT-RTX builds as predicted.

    The text is empty for float models.
    """
    if row.startswith("float"):
        return ""
    from qdqtool.verification.api import verify_with_builder

    try:
        verification = verify_with_builder(path, "tensorrt-rtx")
    except BuilderError:
        return "not installed"
    counts = verification.convolutions
    return f"{counts['agree']} of {counts['total']} as predicted"


def table(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> str:
    """Return a Markdown table of means over the seeds, and of paired differences from float."""
    lines = [
        f"| {len(results)} seeds, {options.evaluate} images | mAP50-95 | minus float, paired | INT8 "
        f"| INT8 in and out | conversions, {options.target} | TensorRT-RTX build |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, name in ROWS.items():
        found = [r[row] for r in results.values()]
        scores = np.array([f["map"] for f in found])
        paired = scores - np.array([r["float"]["map"] for r in results.values()])
        deviation = f" ± {paired.std(ddof=1):.2f}" if len(paired) > 1 else ""
        one = found[0]
        difference = "" if row == "float" else f"{paired.mean():+.2f}{deviation}"
        convolutions = (
            f"{one['int8']} of {one['convolutions']} | {one['int8_to_int8']} | {one['conversions']}"
        )
        lines.append(
            f"| {name} | {scores.mean():.2f} | {difference} | {convolutions} | {one['built']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
