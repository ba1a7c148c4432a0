"""Agreement of quantized YOLOv8-style detectors with the float model's own detections, on data of any kind.

    python benchmarks/accuracy.py SPLITS.toml [--methods focus,mse,max] [--modelopt PYTHON] [--onnxruntime]
                                  [--work FOLDER] [--limit N] [--json FILE] [--readme README.md]

SPLITS.toml lists the splits; paths are relative to it. Models and images are the user's: nothing is downloaded.

    [[split]]
    name = "people, other kind"
    model = "yolov8s.onnx"              # float, output [1, 4 + classes, anchors]
    calibration = "photographs"         # folder of images, or an npy of inputs [n, 3, h, w]
    evaluation = "street"               # the same; other images, best from another source
    judge = true                        # false: settings were chosen while looking at this split
    limit = 60                          # at most so many evaluation images, evenly spread (as --limit)

How it is measured:

* The reference is what the float model detects with a score of at least 0.25; it measures change, not accuracy.
* AP over IoU 0.50 to 0.95, 101 points. "pooled" ranks the detections of all classes together, which is steadier where
  classes are rare; "classes" is the mean over the classes.
* All tools get the same arrays: ours, ModelOpt (`--modelopt`: an interpreter that has it) and onnxruntime's
  quantize_static. The peers leave float what Ultralytics excludes (last convolutions of the head and the DFL).
* Quantized models run in onnxruntime on the CPU without graph optimizations, which would replace Q/DQ.
* Differences are paired: the same resampled images for both. "all splits" is the mean over the splits, each resampled.

`--work` keeps detections and calibration statistics, so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent))

from detectors import load_samples, run_model
from marked import replace_between, write_rows

from qdqtool.tuning.detection import Detections, Matches, match, precision

RESAMPLES = 500
EXCLUDED = (r".*\.2/Conv$", r".*/dfl/.*")  # Ultralytics' exclusions for ModelOpt, on its own names
BEGIN, END = "<!-- accuracy: written by benchmarks/accuracy.py -->", "<!-- end of accuracy -->"
Floats = npt.NDArray[np.float64]

MODELOPT = """
import sys, numpy
from modelopt.onnx.quantization import quantize
model, data, name, method, output, *excluded = sys.argv[1:]
quantize(model, quantize_mode="int8", calibration_data={name: numpy.load(data)}, calibration_method=method,
         calibration_eps=["cpu"], high_precision_dtype="fp32", output_path=output, nodes_to_exclude=excluded)
"""


@dataclass
class Split:
    """One calibration and one evaluation set for a model."""

    name: str
    model: Path
    calibration: Path
    evaluation: Path
    judge: bool = True
    limit: int | None = None
    made_from: str = ""  # digest of the model and the calibration arrays
    images: tuple[int, int] = (0, 0)
    boxes: int = 0
    references: list[Detections] = field(default_factory=list)
    matches: dict[str, list[Matches]] = field(default_factory=dict)


@dataclass
class Result:
    """One method on one split: average precision from 0 to 1, and the difference to the method compared with."""

    split: str
    method: str
    int8: int
    pooled: float
    classes: float
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float = 0.0


def read_splits(path: Path) -> list[Split]:
    files = ("model", "calibration", "evaluation")
    try:
        entries = tomllib.loads(path.read_text("utf-8"))["split"]
        for number, entry in enumerate(entries, 1):
            missing = [f for f in ("name", *files) if f not in entry]
            if missing:
                sys.exit(f"{path}: split {number} has no '{missing[0]}'")
            for file in files:
                if not (path.parent / entry[file]).exists():
                    sys.exit(f"{path}: {file} of split '{entry['name']}', {path.parent / entry[file]}, does not exist")
    except OSError as error:
        sys.exit(f"{path}: cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        sys.exit(f"{path}: is no list of [[split]]: {error}")
    return [
        Split(e["name"], *(path.parent / e[f] for f in files), judge=e.get("judge", True), limit=e.get("limit"))
        for e in entries
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("splits", type=Path, help="the TOML file, see above")
    parser.add_argument("--methods", default="focus,mse,max",
                        help="of `insert`; first the one that the others are held against (default: %(default)s)")
    parser.add_argument("--modelopt", metavar="PYTHON", help="an interpreter with nvidia-modelopt[onnx]")
    parser.add_argument("--modelopt-methods", default="entropy,max")
    parser.add_argument("--onnxruntime", action="store_true", help="quantize_static, MinMax and Percentile")
    parser.add_argument("--only", metavar="REGEX", help="splits by name")
    parser.add_argument("--limit", type=int, help="at most so many evaluation images, evenly spread")
    parser.add_argument("--threads", type=int, default=0, help="of onnxruntime while evaluating")
    parser.add_argument("--work", type=Path, default=Path("accuracy-work"),
                        help="where detections and statistics are kept (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--readme", type=Path, help="write the table between its marks")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    splits = [s for s in read_splits(options.splits) if not options.only or re.search(options.only, s.name)]
    methods = options.methods.split(",")
    peers = [f"ModelOpt {m}" for m in options.modelopt_methods.split(",")] if options.modelopt else []
    if options.onnxruntime:
        peers += ["onnxruntime MinMax", "onnxruntime Percentile"]
    results: list[Result] = []
    for split in splits:
        results += measure(split, methods, peers, options)
    overall = [r for judge in (True, False) for r in across([s for s in splits if s.judge is judge], judge)]
    results += overall
    for result in overall:
        print(line(result))
    write_rows(options.json, results)
    if options.readme:
        write_table(options.readme, splits, results)
    return 0


def measure(split: Split, methods: Sequence[str], peers: Sequence[str], options: argparse.Namespace) -> list[Result]:
    """All methods on one split."""
    images = load_samples(split.model, split.evaluation)
    chosen = np.arange(len(images))
    limit = options.limit or split.limit
    if limit and limit < len(images):
        chosen = np.unique(np.linspace(0, len(images) - 1, limit).astype(int))
    samples = [np.ascontiguousarray(images[i : i + 1]) for i in chosen]
    calibration = load_samples(split.model, split.calibration)
    split.made_from = digest(split.model, calibration)
    floats = detect(split.model.read_bytes(), samples, options)
    split.references = [d.above(0.25) for d in floats]
    split.images, split.boxes = (len(calibration), len(samples)), sum(len(r.scores) for r in split.references)
    print(f"\n{split.name}: {len(calibration)} calibration and {len(samples)} evaluation images, {split.boxes} boxes"
          f"{'' if split.judge else '; settings were chosen on it'}")  # fmt: skip
    results = []
    for method in [*methods, *peers]:
        begin = time.perf_counter()
        try:
            model, int8 = quantized(split, method, calibration, options)
        except (OSError, RuntimeError, subprocess.CalledProcessError, ImportError) as error:
            print(f"{method:<24} failed: {' '.join(str(error).split())[:90]}")
            continue
        seconds = time.perf_counter() - begin
        found = detect(model, samples, options)
        split.matches[method] = [match(r, f) for r, f in zip(split.references, found, strict=True)]
        mine = split.matches[method]
        result = Result(split.name, method, int8, mean(mine, True), mean(mine, False), seconds=round(seconds, 1))
        if method != methods[0]:
            compare([split], methods[0], method, result)
        print(line(result), flush=True)
        results.append(result)
    return results


def mean(matches: Sequence[Matches], pooled: bool) -> float:
    return float(precision(matches, pooled).mean())


def compare(splits: Sequence[Split], first: str, other: str, result: Result) -> None:
    """The difference first - other of the pooled AP, with the 95 % interval of a paired bootstrap over the images."""
    rng = np.random.default_rng(0)
    values = np.zeros(RESAMPLES)
    result.difference = 0.0
    for split in splits:
        mine, theirs = split.matches[first], split.matches[other]
        result.difference += (mean(mine, True) - mean(theirs, True)) / len(splits)
        for k in range(RESAMPLES):
            images = rng.integers(0, len(mine), len(mine))
            gain = mean([mine[i] for i in images], True) - mean([theirs[i] for i in images], True)
            values[k] += gain / len(splits)
    result.low, result.high = (float(v) for v in np.nanpercentile(values, [2.5, 97.5]))


def across(splits: Sequence[Split], judge: bool) -> list[Result]:
    """Means over the splits, for the methods that all of them have."""
    if not splits:
        return []
    methods = [m for m in splits[0].matches if all(m in s.matches for s in splits)]
    results = []
    for method in methods:
        pooled = float(np.mean([mean(s.matches[method], True) for s in splits]))
        classes = float(np.mean([mean(s.matches[method], False) for s in splits]))
        name = f"all {len(splits)} splits {'kept for judging' if judge else 'used for choosing'}"
        results.append(Result(name, method, 0, pooled, classes))
        if method != methods[0]:
            compare(splits, methods[0], method, results[-1])
    return results


def line(result: Result) -> str:
    text = f"{result.method:<24} pooled {result.pooled:.3f}  classes {result.classes:.3f}  INT8 {result.int8 or '':>2}"
    if result.difference is not None:
        text += f"  first is better by {result.difference:+.3f} ({result.low:+.3f} to {result.high:+.3f})"
    return text


def quantized(
    split: Split, method: str, calibration: npt.NDArray[np.float32], options: argparse.Namespace
) -> tuple[bytes, int]:
    """The Q/DQ model of a method, and how many convolutions have Q/DQ on weights and input."""
    if method.startswith("ModelOpt "):
        make: Callable[[Path], None] = lambda p: modelopt(split, method.split()[1], calibration, options, p)  # noqa: E731
    elif method.startswith("onnxruntime "):
        make = lambda p: onnxruntime_static(split, method.split()[1], calibration, p)  # noqa: E731
    else:
        return ours(split, method, calibration, options)
    path = options.work / f"{key(split, method)}.onnx"
    if not path.exists():
        make(path)
    model = path.read_bytes()
    return model, count_int8(model)


def digest(model: Path, calibration: npt.NDArray[np.float32]) -> str:
    """What models are made from: a folder may get more images, a file another model."""
    data = hashlib.sha256(model.read_bytes())
    for sample in calibration:
        data.update(np.ascontiguousarray(sample).data)
    return data.hexdigest()


def key(split: Split, method: str = "") -> str:
    """Names what is kept of a split."""
    return hashlib.sha256(repr((split.made_from, method)).encode()).hexdigest()[:16]


def ours(
    split: Split, method: str, calibration: npt.NDArray[np.float32], options: argparse.Namespace
) -> tuple[bytes, int]:
    """``method[+option=value...]``, for example ``focus+residual=none``."""
    import qdqtool

    name, *rest = method.split("+")
    extra: dict[str, Any] = {k: v not in ("False", "no") if v in ("True", "False") else v
                             for k, v in (o.split("=") for o in rest)}  # fmt: skip
    inputs = input_name(split.model)
    made = qdqtool.insert(
        split.model, [{inputs: calibration[i : i + 1]} for i in range(len(calibration))], method=name, predict=False,
        max_images=10_000, calib_cache=options.work / f"{key(split)}.npz", **extra,
    )  # fmt: skip
    model = made.model.SerializeToString()
    return model, count_int8(model)


def input_name(model: Path) -> str:
    import onnx

    return str(onnx.load(model, load_external_data=False).graph.input[0].name)


def modelopt(
    split: Split, method: str, calibration: npt.NDArray[np.float32], options: argparse.Namespace, output: Path
) -> None:
    data = options.work / f"{key(split)}.npy"
    if not data.exists():
        np.save(data, calibration)
    part = output.with_suffix(".part.onnx")
    command = [options.modelopt, "-c", MODELOPT, split.model, data, input_name(split.model), method, part, *EXCLUDED]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part.rename(output)


def onnxruntime_static(split: Split, method: str, calibration: npt.NDArray[np.float32], output: Path) -> None:
    """In the form that TensorRT takes: symmetric, per channel, float bias, inputs of the convolutions only."""
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = output.with_suffix(".prepared.onnx")
    quant_pre_process(str(split.model), str(prepared), skip_symbolic_shape=True)
    names = [n.name for n in onnx.load(prepared).graph.node]
    inputs = input_name(split.model)
    rows = ({inputs: np.ascontiguousarray(calibration[i : i + 1])} for i in range(len(calibration)))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(rows, None)

    quantize_static(
        str(prepared), str(output), Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QInt8, weight_type=QuantType.QInt8, op_types_to_quantize=["Conv"],
        nodes_to_exclude=[n for n in names if any(re.match(p, n) for p in EXCLUDED)],
        calibrate_method=getattr(CalibrationMethod, method),
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
    )  # fmt: skip
    prepared.unlink()


def count_int8(model: bytes) -> int:
    """Convolutions that read data and weights through DequantizeLinear."""
    import onnx

    graph = onnx.load_model_from_string(model).graph
    dequantized = {o for n in graph.node if n.op_type == "DequantizeLinear" for o in n.output}
    return sum(n.op_type == "Conv" and n.input[0] in dequantized and n.input[1] in dequantized for n in graph.node)


def detect(
    model: bytes, samples: Sequence[npt.NDArray[np.float32]], options: argparse.Namespace
) -> list[Detections]:
    """Detections of a model, from the folder where they were kept if it has them."""
    digest = hashlib.sha256(model)
    for sample in samples:
        digest.update(sample.tobytes())
    path = options.work / f"{digest.hexdigest()[:24]}.detections.npz"
    if not path.exists():
        found = run_model(model, samples, options.threads)
        with open(path.with_suffix(".part"), "wb") as file:
            joined = {n: np.concatenate([getattr(d, n) for d in found]) for n in ("boxes", "scores", "classes")}
            np.savez(file, counts=[len(d.scores) for d in found], **joined)
        path.with_suffix(".part").rename(path)
    with np.load(path, allow_pickle=False) as kept:
        ends = np.cumsum(kept["counts"])[:-1]
        parts = zip(*(np.split(kept[n], ends) for n in ("boxes", "scores", "classes")), strict=True)
        return [Detections(*p) for p in parts]


def write_table(readme: Path, splits: Sequence[Split], results: Sequence[Result]) -> None:
    """Replaces what stands between the marks in the README."""
    methods = list(dict.fromkeys(r.method for r in results))
    names = list(dict.fromkeys(r.split for r in results))
    by = {(r.split, r.method): r for r in results}
    lines = ["| images: calibration, evaluation | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    known = {s.name: s for s in splits}
    for name in names:
        cells = []
        for method in methods:
            found = by.get((name, method))
            if found is None:
                cells.append("-")
                continue
            cell = f"{found.pooled:.3f}"
            if found.difference is not None:
                cell += f" ({-found.difference:+.3f}, {-(found.high or 0):+.3f} to {-(found.low or 0):+.3f})"
            else:
                cell = f"**{cell}**"
            cells.append(cell)
        label = name
        if name in known:
            split = known[name]
            label += f" ({split.images[0]}, {split.images[1]})" + ("" if split.judge else " *")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    replace_between(readme, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
