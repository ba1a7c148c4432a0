"""The front of `qdqtool tune` against what one would try without it, on images that tune never saw.

    python benchmarks/tune.py SPLITS.toml [--gpu NAME] [--work FOLDER] [--only REGEX] [--chosen-on N] [--judge N]
                              [--json FILE] [--docs FILE]

SPLITS.toml lists the splits; paths are relative to it. Models and images are the user's: nothing is downloaded.

    [[split]]
    name = "people"
    model = "yolov8s.onnx"              # float, output [1, 4 + classes, anchors]
    calibration = "photographs"         # ranges are made from these: a folder of images, or an npy of inputs
    choose = "photographs-2"            # tune gets these as --eval: it chooses on one half and judges on the other
    judge = "video"                     # nothing is chosen by these: what the table shows is measured here
    others = { "ModelOpt entropy" = "modelopt.onnx" }   # finished Q/DQ models to hold against the front, if any

Held against every placement is the most accurate point of the front (by the images that were chosen on) that costs no
more; the interval is that of a paired bootstrap over the images to judge. What was measured is kept in the work folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from detectors import load_samples, run_model
from marked import publish

import qdqtool
from qdqtool.tuning.configuration import cost_of
from qdqtool.tuning.detection import Matches, match, precision
from qdqtool.tuning.result import Point

RESAMPLES = 500
BEGIN, END = "<!-- tune: written by benchmarks/tune.py -->", "<!-- end of tune -->"


@dataclass
class Held:
    """One placement on the images to judge, and the point of the front that it is held against."""

    split: str
    name: str
    int8: int
    conversions: int
    cost: float
    on_front: bool
    chosen_on: float | None
    metric: float
    against: str = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass
class Judge:
    """Detections on the images to judge, kept by model."""

    samples: list[npt.NDArray[np.float32]]
    work: Path
    references: list[Any] = field(default_factory=list)

    def matches(self, model: onnx.ModelProto | bytes) -> list[Matches]:
        data = model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)
        digest = hashlib.sha256(data)
        for sample in self.samples:
            digest.update(sample.tobytes())
        path = self.work / f"{digest.hexdigest()[:24]}.matches.json"
        if not path.exists():
            found = run_model(data, self.samples, 2)
            if not self.references:
                return [match(f.above(0.25), f) for f in found]
            rows = [match(r, f).as_json() for r, f in zip(self.references, found, strict=True)]
            path.with_suffix(".part").write_text(json.dumps(rows), "utf-8")
            path.with_suffix(".part").rename(path)
        return [Matches.from_json(row) for row in json.loads(path.read_text("utf-8"))]


def value(matches: Sequence[Matches]) -> float:
    return float(precision(matches, True).mean())


def evenly(array: npt.NDArray[np.float32], wanted: int) -> list[npt.NDArray[np.float32]]:
    chosen = np.unique(np.linspace(0, len(array) - 1, min(wanted, len(array))).astype(int))
    return [np.ascontiguousarray(array[i : i + 1]) for i in chosen]


def digest_of(image: npt.NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()


def measure(entry: dict[str, Any], home: Path, options: argparse.Namespace) -> list[Held]:
    """One split: tune, then everything on the images to judge."""
    model = home / entry["model"]
    name = onnx.load(model, load_external_data=False).graph.input[0].name
    calibration, choose, unseen = (load_samples(model, home / entry[k]) for k in ("calibration", "choose", "judge"))

    def feeds(array: npt.NDArray[np.float32], wanted: int) -> list[dict[str, npt.NDArray[np.float32]]]:
        return [{name: x} for x in evenly(array, wanted)]

    began = time.process_time()
    tuning = qdqtool.tune(
        model, feeds(calibration, 512), evaluation=feeds(choose, 2 * max(options.chosen_on, options.judged_on)),
        keep=entry.get("keep", 0.97), gpu=options.gpu, chosen_on=options.chosen_on, judged_on=options.judged_on,
        swept_on=options.swept_on, workers=options.workers, whole_front=True, say=print, progress=True,
        state=options.work / f"{re.sub(r'[^a-z0-9]+', '-', entry['name'])}.tuning",
    )  # fmt: skip
    print(f"{entry['name']}: {tuning.effort}, {time.process_time() - began:.0f} s of processor time", flush=True)
    seen = {digest_of(x) for array in (calibration, choose) for x in array}
    samples = [x for x in evenly(unseen, options.judge) if digest_of(x[0]) not in seen]
    judge = Judge(samples, options.work)
    judge.references = [d.above(0.25) for d in run_model(model.read_bytes(), samples, 2)]
    boxes = sum(len(r.scores) for r in judge.references)
    left = min(options.judge, len(unseen)) - len(samples)
    print(f"judged on {len(samples)} images, {boxes} boxes{f'; {left} that tune was given left out' * bool(left)}",
          flush=True)  # fmt: skip
    front = [p for p in tuning.front if p.chosen_on is not None]
    measured: list[tuple[Held, list[Matches]]] = []
    of_front: list[tuple[Point, list[Matches]]] = []
    for point in [*front, *(p for p in tuning.others if "worst" in p.name or "head" in p.name or "last" in p.name)]:
        matches = judge.matches(tuning.model_of(point))
        on_front = any(p is point for p in front)
        if on_front:
            of_front.append((point, matches))
        measured.append((held(entry["name"], point, on_front, value(matches)), matches))
        print(f"  {measured[-1][0]}", flush=True)
    for other, path in entry.get("others", {}).items():
        data = (home / path).read_bytes()
        predicted = qdqtool.predict(data)
        cost = cost_of(predicted, None)
        matches = judge.matches(data)
        measured.append((Held(entry["name"], other, cost.int8, cost.conversions, cost.value, False, None,
                              value(matches)), matches))  # fmt: skip
    for row, matches in measured:
        fits = [(p, m) for p, m in of_front if p.cost.value <= row.cost + 1e-9]
        if not row.on_front and fits:
            compare(row, *fits[-1], matches)
    return [row for row, _ in measured]


def held(split: str, point: Point, on_front: bool, metric: float) -> Held:
    return Held(split, point.name, point.cost.int8, point.cost.conversions, point.cost.value, on_front,
                point.chosen_on, metric)  # fmt: skip


def compare(row: Held, point: Point, mine: Sequence[Matches], theirs: Sequence[Matches]) -> None:
    """The front's point minus the placement, with the 95 % interval of a paired bootstrap over the images."""
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(RESAMPLES):
        images = rng.integers(0, len(mine), len(mine))
        gains.append(value([mine[i] for i in images]) - value([theirs[i] for i in images]))
    row.against, row.difference = point.name, value(mine) - value(theirs)
    row.low, row.high = (float(v) for v in np.nanpercentile(gains, [2.5, 97.5]))


def table(rows: Sequence[Held]) -> str:
    lines = ["| split | placement | INT8 | conversions | cost | chosen on | judged on | front at no more cost |",
             "|---" * 8 + "|"]  # fmt: skip
    for r in sorted(rows, key=lambda r: (r.split, r.cost, r.name)):
        chosen = "-" if r.chosen_on is None else f"{r.chosen_on:.3f}"
        against = "front" if r.on_front else "-"
        if r.difference is not None:
            against = f"{r.difference:+.3f} ({r.low:+.3f} to {r.high:+.3f})"
        lines.append(f"| {r.split} | {r.name} | {r.int8} | {r.conversions} | {r.cost:.4g} | {chosen} | {r.metric:.3f} "
                     f"| {against} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("splits", type=Path)
    parser.add_argument("--gpu")
    parser.add_argument("--only", metavar="REGEX")
    parser.add_argument("--chosen-on", type=int, default=16)
    parser.add_argument("--swept-on", type=int, help="of these, for the sensitivity of single sites")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--judged-on", type=int, default=4, help="of tune itself; the table has images of its own")
    parser.add_argument("--judge", type=int, default=24, help="images that the table is measured on")
    parser.add_argument("--work", type=Path, default=Path("tune-work"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="write the table between its marks")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[Held] = []
    for entry in tomllib.loads(options.splits.read_text("utf-8"))["split"]:
        if not options.only or re.search(options.only, entry["name"]):
            rows += measure(entry, options.splits.parent, options)
    publish(rows, table(rows), options.json, options.docs, BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
