"""Processor time of the sensitivity pass of `qdqtool tune` on YOLOv8n (random weights: the same work as trained ones).

    python benchmarks/tune_speed.py [--size 640] [--images 32] [--workers 2]

Every choice is measured on every image. The pass is linear in the images: fewer are measured on a busy machine and told
with what 32 would take. Processor time of all threads is told beside wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

import qdqtool
from qdqtool.demo.images import make_image
from qdqtool.demo.model import yolov8n
from qdqtool.tuning.mapper import local
from qdqtool.tuning.measure import Job, Result, Task


class Swept(BaseException):
    """The pass is over."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    name = "images"
    data = [{name: np.asarray(make_image(options.size, i), np.float32).transpose(2, 0, 1)[None] / 255}
            for i in range(2 * options.images + 2)]  # fmt: skip
    found: dict[str, float] = {}

    def timed(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        wall, cpu = time.monotonic(), time.process_time()
        yield from local(options.workers)(job, tasks)
        if len(tasks) and len(tasks[0].candidates) > 8:
            found.update(wall=time.monotonic() - wall, cpu=time.process_time() - cpu,
                         choices=len(tasks[0].candidates), images=sum(len(t.images) for t in tasks))  # fmt: skip
            raise Swept

    began = time.process_time()
    with contextlib.suppress(Swept):
        qdqtool.tune(yolov8n(options.size), data[:2], evaluation=data[2:], chosen_on=options.images, judged_on=1,
                     whole_front=True, mapper=timed, workers=options.workers, say=print)  # fmt: skip
    whole = time.process_time() - began
    scale = 32 / found["images"]
    print(f"{found['choices']:.0f} choices on {found['images']:.0f} images at {options.size}: {found['cpu']:.0f} s of "
          f"processor time ({found['wall']:.0f} s on this machine now), everything in front of it "
          f"{whole - found['cpu']:.0f} s; 32 images would take {found['cpu'] * scale:.0f} s, on two idle cores "
          f"{found['cpu'] * scale / 2 / 60:.1f} minutes")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
