"""How processor time and memory grow with a graph: ``python -m benchmarks.growth predict 500 1000 2000 4000``.

One process for each run, in which the same work was done on a graph of one node before. The exponent is that of the
last doubling; above 1.3 a family grows too fast.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnx

import qdqtool
from qdqtool.errors import QdqtoolError
from tests.growth import FAMILIES

MEMORY = 3 << 30
SECONDS = 120


def _work(command: str, folder: Path) -> Callable[[onnx.ModelProto], object]:
    if command == "predict":
        return lambda proto: qdqtool.predict(proto, target="trt8.5").as_json()
    if command == "fix":
        from qdqtool.fixing.api import fix

        return lambda proto: fix(proto, target="trt8.5").as_json()
    if command == "extract":
        return _extract
    return lambda proto: qdqtool.report(proto, target="trt8.5").save(folder / "page.html")


def _extract(proto: onnx.ModelProto) -> None:
    """What a network in the middle and at the end depends on, and the first finding of each code."""
    found = qdqtool.predict(proto, target="trt8.5")
    for place in {len(found.convolutions) // 2, len(found.convolutions) - 1}:
        if found.convolutions:
            qdqtool.extract(proto, node=found.convolutions[place].name, target="trt8.5")
    for code in found.findings_by_code():
        qdqtool.extract(proto, finding=code, target="trt8.5")


def _measure(command: str, family: str, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        work, proto = _work(command, Path(folder)), FAMILIES[family](size)
        work(FAMILIES["Relu"](1))
        memory, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            work(proto)
        except QdqtoolError as error:
            print(f"refused: {error}")
            return
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        print(time.process_time() - begin, taken / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", default="predict", choices=["predict", "fix", "extract", "report"])
    parser.add_argument("sizes", nargs="*", type=int, default=[500, 1000, 2000, 4000])
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        _measure(options.command, options.measure, options.sizes[0])
        return
    for family in options.family or FAMILIES:
        shown, known = [], []
        for size in options.sizes:
            run = subprocess.run(
                [sys.executable, "-m", "benchmarks.growth", options.command, str(size), "--measure", family],
                capture_output=True, text=True, check=False,
            )
            words = run.stdout.split()
            if run.returncode or words[:1] == ["refused:"]:
                shown.append((run.stdout or run.stderr or f"ended with {run.returncode}").strip().splitlines()[-1][:60])
                break
            known.append([size, *map(float, words)])
            shown.append(f"{float(words[0]):.2f} s {float(words[1]):.0f} MB")
        exponent = ""
        if len(known) > 1:
            (n, *small), (m, *large) = known[-2:]
            exponent = ", memory ".join(f"n^{math.log(max(b, 1e-3) / max(a, 1e-3)) / math.log(m / n):.2f}"
                                        for a, b in zip(small, large, strict=True))
        print(f"{family:22}", *shown, exponent, sep="  ", flush=True)


if __name__ == "__main__":
    main()
