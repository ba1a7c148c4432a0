"""Measure the agreement of quantized YOLOv8-style detectors with the float model.

    python benchmarks/accuracy.py SPLITS.toml [--methods focus,mse,max] [--modelopt PYTHON]
                                  [--onnxruntime] [--work FOLDER] [--limit N] [--json FILE]
                                  [--page docs/accuracy.md] [--errors]

SPLITS.toml lists the splits; paths are relative to this file. You provide models and images: the
script downloads nothing.

    [[split]]
    name = "people, other kind"
    model = "yolov8s.onnx"      # float, output [1, 4 + classes, anchors]
    calibration = "photographs" # folder of images, or an npy of inputs [n, 3, h, w]
    evaluation = "street"       # folder or npy of other images, preferably from another source
    judge = true                # false if settings of qdqtool were chosen with this split
    limit = 60                  # maximum number of evaluation images, evenly spread (as --limit)

Method:

* The reference is the float model's detections with a score of at least 0.25. The result is
  therefore an agreement, not an accuracy.
* The metric is AP over IoU 0.50 to 0.95 with 101 points. For "pooled", the detections of all
  classes are ranked together, which varies less if classes are rare. "classes" is the mean over the
  classes.
* All tools get the same arrays: qdqtool, ModelOpt (`--modelopt` names an interpreter with ModelOpt)
  and quantize_static of onnxruntime. With the other tools, the nodes that Ultralytics excludes
  remain float: the last convolutions of the head, and the DFL.
* Quantized models run in onnxruntime on the CPU, with all graph optimizations except those that
  replace Q/DQ.
* Differences are paired: both methods are evaluated on the same resampled images. "all splits" is
  the mean over the splits. The images of each split are resampled.

With --errors, the table compares the agreement of each model of qdqtool with the output error that
`insert` measures on 8 of the calibration images.

The folder of `--work` keeps detections and calibration statistics, so that an interrupted run can
continue.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Images

import qdqtool
from qdqtool.accuracy.detections import DetectionMatches, compute_average_precision

EXCLUDED = (r".*\.2/Conv$", r".*/dfl/.*")  # nodes that Ultralytics excludes if it calls ModelOpt
FILES = ("model", "calibration", "evaluation")
MODELOPT = """
import sys, numpy
from modelopt.onnx.quantization import quantize
model, data, name, method, output, *excluded = sys.argv[1:]
quantize(model, quantize_mode="int8", calibration_data={name: numpy.load(data)}, calibration_method=method,
         calibration_eps=["cpu"], high_precision_dtype="fp32", output_path=output, nodes_to_exclude=excluded)
"""


@dataclass
class Split:
    """Calibration and evaluation images of one model."""

    name: str
    model: Path
    calibration: Path
    evaluation: Path
    judge: bool = True
    limit: int | None = None
    made_from: str = ""  # hash of the model and the calibration arrays
    images: tuple[int, int] = (0, 0)
    matches: dict[str, list[DetectionMatches]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # output error by method of `insert`


@dataclass
class Result:
    """Result of one method on one split.

    Average precisions are from 0 to 1. The difference is the average precision of the first method
    minus that of this method.
    """

    split: str
    method: str
    int8: int
    pooled: float
    classes: float
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float = 0.0
    output_error: float | None = None


def main() -> int:
    parser = common.parser_of(__doc__)
    parser.add_argument("splits", type=Path, help="the TOML file, see above")
    parser.add_argument(
        "--methods",
        default="focus,mse,max",
        help="methods of `insert`; the first is the reference of the differences "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--modelopt", metavar="PYTHON", help="Python interpreter with nvidia-modelopt[onnx]"
    )
    parser.add_argument("--modelopt-methods", default="entropy,max")
    parser.add_argument(
        "--onnxruntime",
        action="store_true",
        help="measure quantize_static with MinMax and Percentile",
    )
    parser.add_argument(
        "--only", metavar="REGEX", default="", help="measure only the splits whose names match"
    )
    parser.add_argument(
        "--limit", type=int, help="maximum number of evaluation images, evenly spread"
    )
    parser.add_argument(
        "--errors", action="store_true", help="write the table of output errors instead"
    )
    common.add_measurement_options(parser)
    options = parser.parse_args()
    options.work = common.open_work_folder(options.work)
    splits = [
        Split(*(e[f] for f in ("name", *FILES)), judge=e.get("judge", True), limit=e.get("limit"))
        for e in common.read_splits(options.splits, FILES, options.only)
    ]
    methods = options.methods.split(",")
    methods += (
        [f"ModelOpt {m}" for m in options.modelopt_methods.split(",")] if options.modelopt else []
    )
    methods += ["onnxruntime MinMax", "onnxruntime Percentile"] if options.onnxruntime else []
    results = [r for split in splits for r in measure(split, methods, options)]
    for judge in (True, False):
        results += across([s for s in splits if s.judge is judge], judge)
    name, text = (
        ("output-error", format_errors(results))
        if options.errors
        else ("accuracy", page(splits, results))
    )
    common.publish(name, text, options.page, options.json, results)
    return 0


def measure(split: Split, methods: Sequence[str], options: argparse.Namespace) -> list[Result]:
    images = common.load_samples(split.model, split.evaluation)
    samples = common.evenly(images, options.limit or split.limit or len(images))
    calibration = common.load_samples(split.model, split.calibration)
    split.made_from = common.digest(split.model.read_bytes(), calibration)
    split.images = len(calibration), len(samples)
    print(
        f"\n{split.name}: {len(calibration)} images calibrate{'' if split.judge else '; settings were chosen on it'}"
    )
    judge = common.judge_of(split.model, samples, options.work, options.threads)
    results = []
    for method in methods:
        begin = time.perf_counter()
        try:
            model = quantized(split, method, calibration, options)
        except (OSError, RuntimeError, ImportError) as error:
            print(f"{method} failed: {' '.join(str(error).split())[:90]}")
            continue
        seconds = round(time.perf_counter() - begin, 1)
        split.matches[method] = judge(model)
        int8 = qdqtool.predict(model).summary()["int8"]
        results.append(result([split], split.name, method, methods[0], int8, seconds))
        results[-1].output_error = split.errors.get(method)
    return results


def result(
    splits: Sequence[Split], name: str, method: str, first: str, int8: int = 0, seconds: float = 0.0
) -> Result:
    mine = [s.matches[method] for s in splits]
    by_class = float(np.mean([compute_average_precision(m, False).mean() for m in mine]))
    made = Result(
        name,
        method,
        int8,
        float(np.mean([common.pooled(m) for m in mine])),
        by_class,
        seconds=seconds,
    )
    if method != first:
        pairs = [(s.matches[first], s.matches[method]) for s in splits]
        made.difference, made.low, made.high = common.paired(pairs, common.pooled)
    print(made, flush=True)
    return made


def across(splits: Sequence[Split], judge: bool) -> list[Result]:
    """Return mean results over the splits, for methods that were measured on all splits."""
    if not splits:
        return []
    methods = [m for m in splits[0].matches if all(m in s.matches for s in splits)]
    name = f"all {len(splits)} splits {'kept for judging' if judge else 'used for choosing'}"
    return [result(splits, name, method, methods[0]) for method in methods]


def quantized(split: Split, method: str, calibration: Images, options: argparse.Namespace) -> bytes:
    tool, _, how = method.partition(" ")
    if not how:
        return ours(split, method, calibration, options)
    path = options.work / f"{key(split, method)}.onnx"
    if not path.exists():
        if tool == "ModelOpt":
            modelopt(split, how, calibration, options, path)
        else:
            onnxruntime_static(split, how, calibration, path)
    return path.read_bytes()


def key(split: Split, method: str = "") -> str:
    return common.digest(repr((split.made_from, method)).encode(), ())[:16]


def ours(split: Split, method: str, calibration: Images, options: argparse.Namespace) -> bytes:
    """Return the model of `insert` for ``method[+option=value...]``."""
    name, *rest = method.split("+")
    extra: dict[str, Any] = {
        k: v not in ("False", "no") if v in ("True", "False") else v
        for k, v in (o.split("=") for o in rest)
    }
    inputs = common.input_name(split.model)
    made = qdqtool.insert(
        split.model,
        [{inputs: calibration[i : i + 1]} for i in range(len(calibration))],
        method=name,
        predict=False,
        losses=8,
        max_images=10_000,
        calib_cache=options.work / f"{key(split)}.npz",
        **extra,
    )
    if made.losses is not None:
        split.errors[method] = made.losses.error
    return bytes(made.model.SerializeToString())


def modelopt(
    split: Split, method: str, calibration: Images, options: argparse.Namespace, output: Path
) -> None:
    data = options.work / f"{key(split)}.npy"
    if not data.exists():
        np.save(data, calibration)
    part = output.with_suffix(".part.onnx")
    inputs = common.input_name(split.model)
    command = [options.modelopt, "-c", MODELOPT, split.model, data, inputs, method, part, *EXCLUDED]
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:  # the last line of a traceback names the error, such as a missing package
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    part.rename(output)


def onnxruntime_static(split: Split, method: str, calibration: Images, output: Path) -> None:
    """Quantize with settings that TensorRT supports.

    The quantization is symmetric and per channel. Biases remain float, and only the inputs of
    convolutions have Q/DQ.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = output.with_suffix(".prepared.onnx")
    quant_pre_process(str(split.model), str(prepared), skip_symbolic_shape=True)
    names = [n.name for n in onnx.load(prepared).graph.node]
    common.quantize_static(
        prepared,
        output,
        calibration,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["Conv"],
        nodes_to_exclude=[n for n in names if any(re.match(p, n) for p in EXCLUDED)],
        calibrate_method=getattr(CalibrationMethod, method),
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
    )
    prepared.unlink()


def page(splits: Sequence[Split], results: Sequence[Result]) -> str:
    methods = list(dict.fromkeys(r.method for r in results))
    by = {(r.split, r.method): r for r in results}
    labels = {s.name: f" ({s.images[0]}, {s.images[1]}){'' if s.judge else ' *'}" for s in splits}

    def cell(found: Result | None) -> str:
        if found is None:
            return "-"
        if found.difference is None:
            return f"**{found.pooled:.3f}**"
        low, high = -(found.high or 0), -(found.low or 0)
        return f"{found.pooled:.3f} ({-found.difference:+.3f}, {low:+.3f} to {high:+.3f})"

    return common.table(
        ["images: calibration, evaluation", *methods],
        [
            [name + labels.get(name, ""), *(cell(by.get((name, m))) for m in methods)]
            for name in dict.fromkeys(r.split for r in results)
        ],
    )


def format_errors(results: Sequence[Result]) -> str:
    return common.table(
        ["images", "ranges by", "output error", "agreement"],
        [
            [r.split, f"`{r.method}`", f"{r.output_error * 100:.1f} %", f"{r.pooled:.3f}"]
            for r in results
            if r.output_error is not None
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
