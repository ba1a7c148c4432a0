"""Compare the accuracy of networks in FP32, INT8 and FP8: docs/fp8.md.

    python benchmarks/fp8.py [--page docs/fp8.md]
    python benchmarks/fp8.py --network NAME MODEL.onnx CALIBRATION TEST PREPROCESS
                             [--page docs/fp8.md]

Without --network, a small vision transformer is trained on generated images
(benchmarks/attention.py), three times for each kind of outlier channels. With --network, the
agreement of a trained network with its float model is measured. The option may be repeated.
CALIBRATION and TEST are folders or lists of images. PREPROCESS is yolo, imagenet or half (mean and
standard deviation 0.5).
"""

import tempfile
from pathlib import Path

import attention
import numpy as np
import onnx
import torch
from common import parser_of, publish, table

import qdqtool
from calibration import Preprocess

SEEDS, STEPS = 3, 350
# Number of outlier channels, offset of their tokens, and gain of their normalizations
CASES = {"none": (0, 8.0, 20.0), "7 of 48": (7, 8.0, 20.0), "1 of 48, larger": (1, 20.0, 20.0)}
PREPROCESS = {
    "yolo": Preprocess(),
    "imagenet": Preprocess("stretch", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    "half": Preprocess("stretch", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
}
FORMATS = {
    "INT8": {"method": "focus"},
    "INT8 by max": {"method": "max"},
    "INT8, --smooth": {"smooth": 0.5},
    "FP8": {"precision": "fp8", "high_precision": "fp32"},
}


def output_error(floats: onnx.ModelProto, model: onnx.ModelProto) -> float:
    """Return the root mean square difference of outputs, divided by their standard deviation.

    The images were not used for the training.
    """
    images = attention.pictures(attention.CALIBRATING, 2)[0]
    first, other = (
        np.concatenate([o[0] for o in attention.outputs(m, images)]) for m in (floats, model)
    )
    return float(np.sqrt(np.mean((other - first) ** 2)) / first.std())


def transformers() -> str:
    """Return a table of correct directions (mean, minimum and maximum) and mean output errors."""
    lines = []
    for case, (count, offset, gain) in CASES.items():
        attention.OFFSET, attention.GAIN = offset, gain
        right: dict[str, list[float]] = {name: [] for name in ("FP32", *FORMATS)}
        errors: dict[str, list[float]] = {name: [] for name in FORMATS}
        for seed in range(SEEDS):
            floats = attention.exported(attention.trained(0, STEPS, seed, count))
            right["FP32"].append(attention.judged(floats)[0])
            for name, options in FORMATS.items():
                model, _ = attention.inserter(floats, attention.calibrating())(**options)
                right[name].append(attention.judged(model)[0])
                errors[name].append(output_error(floats, model))
                print(case, seed, name, right[name][-1], errors[name][-1], flush=True)
        for name, shares in right.items():
            error = f"{np.mean(errors[name]):.1%}" if name in errors else ""
            span = f"{np.mean(shares):.1%} ({np.min(shares):.1%} to {np.max(shares):.1%})"
            lines.append((case, name, span, error))
    return table(("outlier channels", "format", "correct directions", "output error"), lines)


def networks(given: list[list[str]]) -> str:
    """Return a table of the agreement of each network and format with the float model.

    The table also shows the choice of ``precision="auto"``.

    Args:
        given: Name, model, calibration images, test images and preprocessing of each network.
    """
    lines = []
    for name, path, calibration, test, preprocess in given:
        prepared = PREPROCESS[preprocess]
        options = {"preprocess": prepared, "predict": False}
        auto = qdqtool.insert(path, calibration, precision="auto", **options)
        for precision in ("int8", "fp8"):
            result = qdqtool.insert(path, calibration, precision=precision, **options)
            with tempfile.TemporaryDirectory() as folder:
                result.save(Path(folder) / "qdq.onnx")
                compared = qdqtool.compare(
                    path, Path(folder) / "qdq.onnx", data=test, preprocess=prepared
                )
            assert compared.agreement is not None and auto.choice is not None
            measure = compared.agreement.measures[0]
            value = f"{measure.value:.3f} ({measure.low:.3f} to {measure.high:.3f})"
            error = auto.choice.errors[precision]
            wide = sum(fit.is_fp8_better for fit in auto.fits) / len(auto.fits)
            chosen = {precision: "chosen", "fp16": "FP16 chosen"}.get(auto.precision, "")
            lines.append(
                (
                    name,
                    precision.upper(),
                    measure.metric,
                    value,
                    f"{error:.1%}",
                    chosen,
                    f"{wide:.0%}",
                )
            )
            print(*lines[-1], flush=True)
    head = ("network", "format", "metric", "agreement (95 % interval)", "output error", "`auto`")
    return table((*head, "activations that suit FP8"), lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--network", nargs=5, action="append", default=[], metavar="VALUE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.network:
        publish("networks", networks(given.network), given.page)
    else:
        publish("transformers", transformers(), given.page)


if __name__ == "__main__":
    main()
