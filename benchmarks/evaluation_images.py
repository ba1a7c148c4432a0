"""Compare the agreement of one detector on several kinds of images: docs/accuracy.md.

    python benchmarks/evaluation_images.py MODEL.onnx CALIBRATION --evaluation NAME IMAGES
                                           [--numbers 12,24,48] [--work FOLDER] [--json FILE]
                                           [--page docs/accuracy.md]

MODEL.onnx is a float detector with output [1, 4 + classes, anchors]. CALIBRATION and IMAGES are
folders of images, or text files with one image path in each line. The option --evaluation may be
repeated. You provide model and images: the script downloads nothing.

Method:

* `insert` with its default options makes an INT8 model for each number of calibration images. The
  images are spread evenly over CALIBRATION.
* The measurement is that of `compare --calib`: the agreement mAP with the float model, and its 95 %
  interval.
* Evaluation images that are also in CALIBRATION are left out.

The folder of `--work` keeps detections, so that an interrupted run can continue.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np
from common import Images

import qdqtool
from qdqtool.accuracy.detections import (
    IOUS,
    DetectionMatches,
    Detections,
    compute_average_precision,
)
from qdqtool.accuracy.metrics import DetectionAgreementMetric, estimate_interval

LOW_SCORE = 0.45  # detections with a lower score are close to the lowest score of the reference


@dataclass
class EvaluationSet:
    """Images of one kind, and the detections of the float model on them.

    Attributes:
        name: Name of the kind in the table.
        samples: Inputs of the model, [1, 3, h, w] each.
        references: Detections of the float model that count as truth, for each image.
    """

    name: str
    samples: list[Images]
    references: list[Detections]

    @property
    def detections(self) -> int:
        return sum(len(image.scores) for image in self.references)

    @property
    def empty_images(self) -> int:
        """Number of images on which the float model detects nothing."""
        return sum(not len(image.scores) for image in self.references)

    @property
    def low_scores(self) -> float:
        """Share of the detections with a score below LOW_SCORE."""
        return float(np.mean(np.concatenate([i.scores for i in self.references]) < LOW_SCORE))


@dataclass
class Agreement:
    """Agreement of an INT8 model with the float model on one kind of images.

    Attributes:
        images: Number of calibration images.
        evaluation: Name of the evaluation images.
        value: Agreement mAP, with the 95 % interval from `low` to `high`.
        by_iou: Agreement at each IoU threshold of `IOUS`.
    """

    images: int
    evaluation: str
    value: float
    low: float
    high: float
    by_iou: list[float]

    def at_iou(self, threshold: float) -> float:
        return self.by_iou[int(np.abs(IOUS - threshold).argmin())]


def summarize(images: int, evaluation: str, matches: Sequence[DetectionMatches]) -> Agreement:
    """Return the agreement of an INT8 model whose detections were matched with the float model's.

    Args:
        images: Number of calibration images.
        evaluation: Name of the evaluation images.
        matches: Matches of each evaluation image.
    """
    by_iou = compute_average_precision(matches, True)
    metric = DetectionAgreementMetric(output="", classes=0)  # its value needs the matches only
    low, high = estimate_interval(metric, [[m.as_json()] for m in matches])
    return Agreement(images, evaluation, float(by_iou.mean()), low, high, by_iou.tolist())


def quantize(model: Path, calibration: Sequence[Images]) -> bytes:
    name = common.input_name(model)
    samples = [{name: sample} for sample in calibration]
    insertion = qdqtool.insert(model, samples, predict=False, losses=0, progress=True)
    return bytes(insertion.model.SerializeToString())


def format_tables(sets: Sequence[EvaluationSet], agreements: Sequence[Agreement]) -> str:
    """Return the table of the agreements, and the table of the evaluation images."""
    cells = {(a.images, a.evaluation): a for a in agreements}
    numbers = sorted({a.images for a in agreements})
    rows = [(n, [cells[n, s.name] for s in sets]) for n in numbers]
    heads = [f"{len(s.samples)} {s.name} ({s.detections} detections)" for s in sets]
    values = common.table(
        ("calibration images", *heads),
        [(n, *(f"{a.value:.3f} ({a.low:.3f} to {a.high:.3f})" for a in row)) for n, row in rows],
    )
    kinds = common.table(
        (
            "evaluation images",
            "without detections",
            f"scores below {LOW_SCORE}",
            *(f"agreement at IoU {iou:.2f} alone" for iou in (IOUS[0], IOUS[-1])),
        ),
        [
            (
                s.name,
                f"{s.empty_images} of {len(s.samples)}",
                f"{s.low_scores:.0%}".replace("%", " %"),
                *(f"{cells[numbers[-1], s.name].at_iou(iou):.2f}" for iou in (IOUS[0], IOUS[-1])),
            )
            for s in sets
        ],
    )
    return f"{values}\n\nWith {numbers[-1]} calibration images:\n\n{kinds}"


def main() -> int:
    parser = common.parser_of(__doc__)
    parser.add_argument("model", type=Path, help="float ONNX detector")
    parser.add_argument("calibration", type=Path, help="images for calibration")
    parser.add_argument(
        "--evaluation",
        nargs=2,
        action="append",
        required=True,
        metavar=("NAME", "IMAGES"),
        help="name and images of one kind",
    )
    parser.add_argument(
        "--numbers", default="12,24,48", help="numbers of calibration images (default: %(default)s)"
    )
    common.add_measurement_options(parser)
    options = parser.parse_args()
    options.work = common.open_work_folder(options.work)
    calibration = common.load_samples(options.model, options.calibration)
    numbers = sorted({min(int(n), len(calibration)) for n in options.numbers.split(",")})
    models = {n: quantize(options.model, common.evenly(calibration, n)) for n in numbers}
    sets, agreements = [], []
    for name, data in options.evaluation:
        samples = common.exclude_images(common.load_samples(options.model, data), calibration)
        if not samples:
            sys.exit(f"{data}: every image is also in {options.calibration}; give other images")
        references = common.find_references(options.model, samples, options.work, options.threads)
        sets.append(EvaluationSet(name, samples, references))
        if not sets[-1].detections:
            sys.exit(f"{data}: {options.model} detects nothing on these images; give other images")
        judge = common.judge_of(options.model, samples, options.work, options.threads)
        agreements += [summarize(n, name, judge(model)) for n, model in models.items()]
    text = format_tables(sets, agreements)
    common.publish("evaluation-images", text, options.page, options.json, agreements)
    return 0


if __name__ == "__main__":
    sys.exit(main())
