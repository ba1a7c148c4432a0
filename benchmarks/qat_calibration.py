"""What qat.calibrate costs, in float forward passes over the same images.

    pip install 'qdqtool[qat]' ultralytics            # AGPL-3.0: measured here, no part of qdqtool
    python benchmarks/qat_calibration.py --docs docs/qat.md

CPU time of all threads, calibration and forward passes of the float network in turns on the same batches; the median of
the pairs' ratios. Random weights, statistics of BatchNormalization from noise.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from marked import replace_between
from qat_models import built, call, settle

from qdqtool import qat
from qdqtool.qat.networks import unwrapped

BEGIN, END = "<!-- calibration: written by benchmarks/qat_calibration.py -->", "<!-- end of calibration -->"
NETWORKS = {
    "resnet18": 224, "mobilenet_v2": 224, "efficientnet_b0": 224, "shufflenet_v2_x1_0": 224, "squeezenet1_1": 224,
    "yolov8n": 320, "yolo11n": 320, "yolov9t": 320,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--docs", type=Path, help="a page whose table between markers is replaced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    head = " | ".join(f"in batches of {b}" for b in options.batch)
    lines = [f"| {options.images} images, method mse | tensors | {head} |", "|---|---|" + "---|" * len(options.batch)]
    for name in options.networks:
        tensors, ratios = measured(name, options)
        size = NETWORKS[name]
        lines.append(f"| {name}, {size} x {size} | {tensors} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines)
    print(text)
    if options.docs is not None:
        replace_between(options.docs, BEGIN, END, text)


def measured(name: str, options: argparse.Namespace) -> tuple[int, list[float]]:
    """How many tensors are calibrated, and the ratio for each size of batch."""
    torch.manual_seed(0)
    made, (channels, *_) = built(name)
    network = unwrapped(made)
    size = NETWORKS[name]
    settle(network, lambda: call(network, torch.rand(4, channels, size, size)))
    plain = copy.deepcopy(network).eval()
    plan = qat.prepare(made, torch.rand(1, channels, size, size), report=None)
    ratios = []
    for batch in options.batch:
        images = list(torch.rand(options.images, channels, size, size).split(batch))
        ratios.append(ratio(made, plain, images, options.pairs))
    return len(plan.activations), ratios


def ratio(made: Any, plain: torch.nn.Module, batches: list[torch.Tensor], pairs: int) -> float:
    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                plain(batch)

    forward()
    return statistics.median(seconds(lambda: qat.calibrate(made, batches)) / seconds(forward) for _ in range(pairs))


def seconds(run: Callable[[], object]) -> float:
    """CPU time of all threads."""
    before = time.process_time()
    run()
    return time.process_time() - before


if __name__ == "__main__":
    main()
