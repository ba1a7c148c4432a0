"""Compare the front of `qdqtool tune` with simple placements, on images unknown to tune.

    python benchmarks/tune.py SPLITS.toml [--gpu NAME] [--work FOLDER] [--only REGEX]
                              [--chosen-on N] [--judge N] [--json FILE]
                              [--page docs/tune-results.md]

SPLITS.toml lists the splits. Paths are relative to SPLITS.toml. You provide the models and images;
the script downloads nothing.

    [[split]]
    name = "people"
    model = "yolov8s.onnx"        # float, output [1, 4 + classes, anchors]
    calibration = "photographs"   # images for ranges: a folder, or an npy of inputs
    choose = "photographs-2"      # --eval of tune: half for the search, half for the check
    judge = "video"               # images for the table, which tune does not use
    others = { "ModelOpt entropy" = "modelopt.onnx" }   # optional: Q/DQ models of other tools

Each simple placement is compared with the most accurate point of the front that does not cost more
than the placement. Points are chosen by their accuracy on the images of the search. The interval is
that of a paired bootstrap over the images of `judge`. The work folder keeps the measurements.
"""

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from common import Images

import qdqtool
from qdqtool.accuracy.detections import DetectionMatches
from qdqtool.tuning.planner import PlacementCost

FILES = ("model", "calibration", "choose", "judge")
OBVIOUS = re.compile("INT8 by default|worst|head|last|float")  # names of simple placements


@dataclass
class Row:
    """Result of one placement on the images of `judge`.

    The difference is the metric of the best point of the front with the same cost or less, minus
    the metric of this placement.
    """

    split: str
    name: str
    int8: int
    conversions: int
    cost: float
    mark: str
    chosen_on: float | None
    metric: float
    against: str = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None


def measured(entry: dict[str, Any], options: argparse.Namespace) -> list[Row]:
    """Run tune for one split, and return the rows of its front and of other placements."""
    model: Path = entry["model"]
    name = common.input_name(model)
    calibration, choose, unseen = (common.load_samples(model, entry[k]) for k in FILES[1:])

    def feeds(array: Images, wanted: int) -> list[dict[str, Images]]:
        return [{name: x} for x in common.evenly(array, wanted)]

    began = time.process_time()
    tuning = qdqtool.tune(
        model,
        feeds(calibration, 512),
        evaluation=feeds(choose, 2 * max(options.chosen_on, options.judged_on)),
        keep=entry.get("keep", 0.97),
        gpu=options.gpu,
        chosen_on=options.chosen_on,
        judged_on=options.judged_on,
        swept_on=options.swept_on,
        workers=options.workers,
        whole_front=True,
        say=print,
        progress=True,
        state=options.work / f"{re.sub(r'[^a-z0-9]+', '-', entry['name'])}.tuning",
    )
    print(
        f"{entry['name']}: {tuning.effort}, {time.process_time() - began:.0f} s of processor time",
        flush=True,
    )
    judged = [image[0] for image in common.evenly(unseen, options.judge)]
    samples = common.exclude_images(judged, [*calibration, *choose])
    if not samples:
        sys.exit(
            f"{entry['name']}: every image of `judge` is also an image of tune; give other images"
        )
    judge = common.judge_of(model, samples, options.work, 2)
    found: list[tuple[Row, list[DetectionMatches]]] = []

    def add(
        name: str, cost: PlacementCost, mark: str, chosen_on: float | None, made: bytes
    ) -> None:
        matches = judge(made)
        row = Row(
            entry["name"],
            name,
            cost.int8,
            cost.conversions,
            cost.value,
            mark,
            chosen_on,
            common.pooled(matches),
        )
        fits = [f for f in found if f[0].mark and f[0].cost <= row.cost + 1e-9]
        if not mark and fits:
            row.against = fits[-1][0].name
            row.difference, row.low, row.high = common.paired(
                [(fits[-1][1], matches)], common.pooled
            )
        found.append((row, matches))
        print(f"  {row}", flush=True)

    front = [p for p in tuning.front if p.chosen_on is not None]
    for point in [*front, *(p for p in tuning.others if OBVIOUS.search(p.name))]:
        mark = (
            "chosen"
            if point is tuning.chosen
            else "front"
            if any(p is point for p in front)
            else ""
        )
        made = tuning.model_of(point).SerializeToString(deterministic=True)
        add(point.name, point.cost, mark, point.chosen_on, made)
    for other, path in entry.get("others", {}).items():
        made = (options.splits.parent / path).read_bytes()
        add(other, PlacementCost.from_prediction(qdqtool.predict(made), None), "", None, made)
    return [row for row, _ in found]


def page(rows: list[Row]) -> str:
    lines = []
    for r in sorted(rows, key=lambda r: (r.split, r.cost, r.name)):
        chosen = "-" if r.chosen_on is None else f"{r.chosen_on:.3f}"
        against = r.mark or "-"
        if r.difference is not None:
            against = f"{r.difference:+.3f} ({r.low:+.3f} to {r.high:+.3f})"
        lines.append(
            (
                r.split,
                r.name,
                r.int8,
                r.conversions,
                f"{r.cost:.4g}",
                chosen,
                f"{r.metric:.3f}",
                against,
            )
        )
    head = (
        "split",
        "placement",
        "INT8",
        "conversions",
        "cost",
        "selection",
        "held-out",
        "front at the same cost or less",
    )
    return common.table(head, lines)


def main() -> int:
    parser = common.parser_of(__doc__)
    parser.add_argument("splits", type=Path, help="the TOML file, see above")
    parser.add_argument("--gpu")
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--chosen-on", type=int, default=16)
    parser.add_argument("--swept-on", type=int, help="images for the sensitivity of single sites")
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--judged-on",
        type=int,
        default=4,
        help="held-out images of tune; the table has other images",
    )
    parser.add_argument("--judge", type=int, default=24, help="number of images for the table")
    parser.add_argument("--work", type=Path, default=Path("tune-work"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.work = common.open_work_folder(options.work)
    entries = common.read_splits(options.splits, FILES, options.only)
    rows = [row for entry in entries for row in measured(entry, options)]
    common.publish("tune", page(rows), options.page, options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
