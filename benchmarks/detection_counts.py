"""Count detections of Q/DQ models with two levels of optimization in onnxruntime: docs/compare.md.

    python benchmarks/detection_counts.py --case NAME FLOAT.onnx QDQ.onnx IMAGES
                                          [--page docs/compare.md] [--json FILE]

FLOAT.onnx and QDQ.onnx are detectors with output [1, 4 + classes, anchors]. IMAGES is a folder of
images. The option --case may be repeated. You provide models and images: the script downloads
nothing.

Method:

* The first counts are those of `compare --calib`: onnxruntime with all optimizations.
* The second counts are made in the same way, but without optimizations. Both computations are
  exact up to the rounding of sums.
* The scores of both are compared where one of them is above 0.05. The difference is the root mean
  square over these scores.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np
from common import Images

from qdqtool.accuracy.detections import (
    DetectionCounts,
    count_detections,
    decode_detections,
    match_detections,
)

LEVELS = ("all", "none")
LOW_SCORE, REFERENCE_SCORE = 0.05, 0.25


@dataclass
class Case:
    """Counts of one pair of models.

    Attributes:
        name: Name in the table.
        images: Number of images.
        counts: Counts for each level of optimization.
        difference: Root mean square of the difference of the scores between the levels.
    """

    name: str
    images: int
    counts: list[DetectionCounts]
    difference: float


def run_model(model: Path, samples: Sequence[Images], level: str) -> list[Images]:
    """Return the output of a model for each input [1, 3, h, w]."""
    from qdqtool.runtime.sessions import open_session

    session = open_session(str(model), 0, optimize=level, fold_qdq=False)
    name = session.get_inputs()[0].name
    return [session.run(None, {name: sample})[0] for sample in samples]


def measure(name: str, model: Path, qdq: Path, images: str) -> Case:
    inputs = common.load_samples(model, images)
    samples = common.evenly(inputs, len(inputs))
    counts, outputs = [], []
    for level in LEVELS:
        references = map(decode_detections, run_model(model, samples, level))
        outputs.append(run_model(qdq, samples, level))
        matches = [
            match_detections(reference.filter_by_score(REFERENCE_SCORE), decode_detections(output))
            for output, reference in zip(outputs[-1], references, strict=True)
        ]
        counts.append(count_detections(matches, REFERENCE_SCORE))
    first, second = (np.concatenate(values)[:, 4:] for values in outputs)
    counted = np.maximum(first, second) > LOW_SCORE
    difference = float(np.sqrt(np.mean((first - second)[counted] ** 2)))
    return Case(name, len(samples), counts, difference)


def format_table(cases: Sequence[Case]) -> str:
    return common.table(
        (
            "Q/DQ model",
            "images",
            "detections of A",
            "`compare`",
            "without optimizations",
            "difference of scores (RMS)",
        ),
        [
            (
                case.name,
                case.images,
                case.counts[0].reference,
                *(f"{count.found} and {count.extra}" for count in case.counts),
                f"{case.difference:.3f}",
            )
            for case in cases
        ],
    )


def main() -> int:
    parser = common.parser_of(__doc__)
    parser.add_argument(
        "--case",
        nargs=4,
        action="append",
        required=True,
        metavar=("NAME", "FLOAT", "QDQ", "IMAGES"),
        help="name in the table, float model, Q/DQ model and folder of images",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    cases = [measure(name, Path(a), Path(b), images) for name, a, b, images in options.case]
    common.publish("detection-counts", format_table(cases), options.page, options.json, cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
