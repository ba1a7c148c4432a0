"""Compare detectors before and after `fix`: docs/fix.md, docs/other-tools.md.

    python benchmarks/fix.py --network NAME MODEL.onnx CALIBRATION EVALUATION
                             [--page docs/fix.md docs/other-tools.md] [--json FILE]

MODEL.onnx is a float detector. CALIBRATION and EVALUATION are folders of different images. The
option may be repeated. You provide models and images: the script downloads nothing.

Method:

* onnxruntime's `quantize_static` makes a Q/DQ model for each of SETTINGS, from the images of
  CALIBRATION. `qdqtool.fix` repairs the model and compares its outputs on these images.
* The agreement is that of `qdqtool.compare` (`compare --calib`) with the float model, on the images
  of EVALUATION: the agreement mAP and its 95 % interval. It is 0 for a model that onnxruntime
  cannot run, and for a model without detections.
* Fixes are the findings that `fix` removes. INT8 convolutions are counted in the prediction for the
  fixed model.

With --json, each row is kept as soon as it is measured, so that an interrupted run can continue.
"""

import importlib.metadata
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import common

import qdqtool
from qdqtool.errors import ModelError

SYMMETRIC = {"ActivationSymmetric": True, "WeightSymmetric": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "symmetric INT8": {"extra_options": SYMMETRIC},
    "symmetric INT8, per channel": {"per_channel": True, "extra_options": SYMMETRIC},
    "UINT8 activations, per channel": {"per_channel": True, "activation_type": "QUInt8"},
    "defaults, head excluded": {"exclude": True},
}


class Network(NamedTuple):
    """A float detector, with folders of images for calibration and evaluation."""

    name: str
    model: Path
    calibration: Path
    evaluation: Path


def quantize(network: Network, setting: str, head: str, output: Path) -> None:
    """Write the model of `quantize_static` with one of SETTINGS.

    Args:
        network: The float detector and its images.
        setting: Name of the setting.
        head: Regular expression on the names of the nodes in the head.
        output: File of the Q/DQ model.
    """
    import onnx
    from onnxruntime.quantization import QuantType

    options = dict(SETTINGS[setting])
    if "activation_type" in options:
        options["activation_type"] = getattr(QuantType, options["activation_type"])
    if options.pop("exclude", False):
        nodes = onnx.load(network.model, load_external_data=False).graph.node
        options["nodes_to_exclude"] = [n.name for n in nodes if re.match(head, n.name)]
        if not options["nodes_to_exclude"]:
            sys.exit(f"{network.model}: no node name matches '{head}'; set --head")
    calibration = common.load_samples(network.model, network.calibration)
    common.quantize_static(network.model, output, calibration, **options)


def agreement(network: Network, model: Path) -> dict[str, Any]:
    """Return the agreement of a model with its float model, and the numbers of images and boxes."""
    try:
        compared = qdqtool.compare(network.model, model, data=network.evaluation).agreement
    except ModelError as error:
        print(f"{model}: {common.failure(error)}", file=sys.stderr, flush=True)
        return {"value": 0.0, "low": 0.0, "high": 0.0}
    assert compared is not None
    measure = compared.measure
    if measure.metric != "agreement-map" or not measure.count:
        sys.exit(
            f"{network.model}: not a detector, or it detects nothing in {network.evaluation}; "
            "give a detector, and images with objects that it detects"
        )
    interval = {n: getattr(measure, n) or 0.0 for n in ("value", "low", "high")}
    return {**interval, "images": compared.images, "boxes": measure.count}


def measure(network: Network, setting: str, head: str) -> dict[str, Any]:
    """Return the agreement before and after `fix`, and the numbers of fixes and convolutions."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made, repaired = Path(folder) / "qdq.onnx", Path(folder) / "fixed.onnx"
        quantize(network, setting, head, made)
        fixed = qdqtool.fix(made, data=network.calibration, progress=True)
        fixed.save(repaired)
        print(f"{network.name}, {setting}: {fixed}", file=sys.stderr, flush=True)
        before, after = agreement(network, made), agreement(network, repaired)
    return {
        "before": before,
        "after": after,
        "fixes": fixed.fixed_places().total(),
        "int8": fixed.after.summary()["int8"],
        "convolutions": fixed.after.summary()["convolutions"],
        "seconds": round(time.perf_counter() - begin),
    }


def list_rows(network: Network, head: str, file: Path | None) -> list[tuple[object, ...]]:
    """Return the rows of the table for a network.

    Args:
        network: The float detector and its images.
        head: Regular expression on the names of the nodes in the head.
        file: JSON file that keeps the figures; None for no file.
    """
    settings = {f"{network.name}, {setting}": setting for setting in SETTINGS}
    rows = common.kept_rows(settings, file, lambda name: measure(network, settings[name], head))
    calibration = len(common.load_samples(network.model, network.calibration))
    lines: list[tuple[object, ...]] = []
    for name, row in rows.items():
        before, after = row["before"], row["after"]
        run = {**before, **after}
        images = f"{calibration}, {run['images']}, {run['boxes']}" if "images" in run else "-"
        lines.append(
            (
                f"{network.name} ({images})",
                settings[name],
                *(f"{r['value']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in (before, after)),
                row["fixes"],
                f"{row['int8']} of {row['convolutions']}",
            )
        )
    return lines


def main() -> None:
    parser = common.parser_of(__doc__, pages="+")
    parser.add_argument(
        "--network", nargs=4, action="append", required=True, metavar="VALUE", help="see above"
    )
    parser.add_argument(
        "--head",
        default=r"/model\.22/",
        metavar="REGEX",
        help="start of the names of nodes in the head (default: %(default)s, of YOLOv8)",
    )
    parser.add_argument("--json", type=Path, help="keep the figures in this JSON file")
    given = parser.parse_args()
    networks = [Network(name, *map(Path, paths)) for name, *paths in given.network]
    lines = [line for n in networks for line in list_rows(n, given.head, given.json)]
    version = importlib.metadata.version("onnxruntime")
    network = "network (images for calibration, for evaluation, detections)"
    head = (network, f"onnxruntime {version} `quantize_static`", "before `fix`", "after `fix`")
    text = common.table((*head, "fixes", "INT8 convolutions"), lines)
    for page in given.page or [None]:
        common.publish("fix", text, page)


if __name__ == "__main__":
    main()
