"""What `qdqtool build` costs over the bare compiler, TensorRT-RTX on the demo's YOLOv8n: seconds and peak memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx

from qdqtool.builders.child import WORKER, is_installed
from qdqtool.demo.model import yolov8n

ROUNDS = 5
MOST_SECONDS = 0.5
MOST_MEGABYTES = 100

# The compiler alone: parse, build, nothing else; the same settings.
BARE = """
import sys
import tensorrt_rtx as trt
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
assert parser.parse_from_file(sys.argv[1])
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM86, 0)
plan = builder.build_serialized_network(network, config)
assert plan is not None
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]))
"""
OURS = """
import resource, sys
from qdqtool.cli import run
code = run(["build", sys.argv[1], "-o", sys.argv[2], "--format", "json"])
assert code == 0, code
# Not getrusage's own peak: that one still counts the process that started this one.
own = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print()
print(own + child)
"""


def measure(script: str, *arguments: str) -> tuple[float, float]:
    """Seconds, and peak megabytes of all processes together."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, int(done.stdout.split()[-1]) / 1024


def main() -> int:
    if not is_installed("tensorrt_rtx"):
        print("TensorRT-RTX is not installed: nothing to measure")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model, out = str(Path(folder) / "yolov8n.onnx"), str(Path(folder) / "out")
        onnx.save(yolov8n(640), model)
        rounds = [(measure(BARE, model), measure(OURS, model, out)) for _ in range(ROUNDS)]
    bare_seconds, seconds = (statistics.median(r[i][0] for r in rounds) for i in (0, 1))
    bare_memory, memory = (statistics.median(r[i][1] for r in rounds) for i in (0, 1))
    result = {
        "worker": WORKER.name, "rounds": ROUNDS,
        "seconds": {"bare": round(bare_seconds, 2), "qdqtool": round(seconds, 2),
                    "overhead": round(seconds - bare_seconds, 2), "goal": MOST_SECONDS},
        "megabytes": {"bare": round(bare_memory), "qdqtool": round(memory),
                      "overhead": round(memory - bare_memory), "goal": MOST_MEGABYTES},
    }
    print(json.dumps(result, indent=1))
    return 0 if seconds - bare_seconds <= MOST_SECONDS and memory - bare_memory <= MOST_MEGABYTES else 1


if __name__ == "__main__":
    sys.exit(main())
