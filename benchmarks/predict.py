"""Time of `qdqtool predict`: the whole process on a YOLOv8n with Q/DQ, and the growth from 1,000 to 100,000 nodes.

usage: python benchmarks/predict.py [--nodes 1000 10000 100000] [--repeat 5]

Targets on two idle cores: 0.5 s for the process; 20 s for 100,000 nodes, time per node at most twice that at 1,000.
Beside the wall time stands the processor's own, which other programs on the machine change less.
The generated graph repeats residual blocks, C2f blocks (Split, Add with SiLU, Concat) and upsampling, all quantized.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.demo.model import yolov8n
from qdqtool.insertion.api import insert
from qdqtool.prediction import predict

PROCESS_SECONDS = 0.5
LARGE_SECONDS = 20.0
GROWTH = 2.0
CHANNELS = 4


class Blocks:
    """A long quantized network of small tensors."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._constant("scale", np.float32(0.05))
        self._constant("zero", np.int8(0))
        self._constant("up.scales", np.array([1, 1, 2, 2], np.float32))

    def _constant(self, name: str, value: object) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def op(self, op: str, inputs: list[str], count: int = 1, **attributes: Any) -> list[str]:
        name = f"{op}_{len(self.nodes)}"
        outputs = [f"{name}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(op, inputs, outputs, name, **attributes))
        return outputs

    def pair(self, x: str, scale: str = "scale", zero: str = "zero", **attributes: Any) -> str:
        quantized = self.op("QuantizeLinear", [x, scale, zero], **attributes)[0]
        return self.op("DequantizeLinear", [quantized, scale, zero], **attributes)[0]

    def conv(self, x: str, from_: int, to: int, act: str = "Relu", norm: bool = True) -> str:
        stem = f"w{len(self.nodes)}"
        weights = self._constant(stem, np.full((to, from_, 1, 1), 0.1, np.float32))
        scales = self._constant(f"{stem}.s", np.full(to, 0.01, np.float32))
        zeros = self._constant(f"{stem}.z", np.zeros(to, np.int8))
        out = self.op("Conv", [self.pair(x), self.pair(weights, scales, zeros, axis=0)], kernel_shape=[1, 1])[0]
        if norm:
            inputs = [self._constant(f"{stem}.bn{i}", np.ones(to, np.float32)) for i in range(4)]
            out = self.op("BatchNormalization", [out, *inputs])[0]
        if act == "SiLU":
            return self.op("Mul", [out, self.op("Sigmoid", [out])[0]])[0]
        return self.op(act, [out])[0] if act else out

    def residual(self, x: str) -> str:
        inner = self.conv(self.conv(x, CHANNELS, CHANNELS), CHANNELS, CHANNELS, act="")
        return self.op("Relu", self.op("Add", [inner, self.pair(x)]))[0]

    def c2f(self, x: str) -> str:
        left, right = self.op("Split", [self.conv(x, CHANNELS, CHANNELS, act="SiLU")], 2, axis=1)
        half = CHANNELS // 2
        inner = self.conv(right, half, half, act="SiLU")
        total = self.op("Add", [self.pair(right), self.pair(inner)])[0]
        joined = self.op("Concat", [left, right, total], axis=1)[0]
        return self.conv(joined, half * 3, CHANNELS, act="SiLU")

    def bend(self, x: str) -> str:
        small = self.op("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2])[0]
        large = self.op("Resize", [small, "", "up.scales"], mode="nearest")[0]
        return self.conv(self.op("Concat", [large, x], axis=1)[0], CHANNELS * 2, CHANNELS, norm=False)

    def model(self, nodes: int) -> onnx.ModelProto:
        x = "x"
        while len(self.nodes) < nodes:
            x = self.bend(self.c2f(self.residual(x)))
        ends = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, CHANNELS, 8, 8]) for n in ("x", x)
        ]
        graph = helper.make_graph(self.nodes, "blocks", ends[:1], ends[1:], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def process_seconds(repeat: int) -> tuple[list[float], list[float]]:
    """Wall and processor times of whole processes: interpreter, imports, reading, simulation, advice and text."""
    data = np.random.default_rng(0).uniform(0, 1, (1, 3, 640, 640)).astype(np.float32)
    model = insert(yolov8n(), data, method="max", predict=False)
    times, processor = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "yolov8n_qdq.onnx"
        model.save(path)
        command = [sys.executable, "-m", "qdqtool.cli", "predict", str(path)]
        for _ in range(repeat + 1):  # the first one fills the caches
            start, used = time.perf_counter(), children()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
            processor.append(children() - used)
    return times[1:], processor[1:]


def children() -> float:
    """Processor seconds of the processes that this one started."""
    spent = os.times()
    return spent.children_user + spent.children_system


def simulation_seconds(nodes: int, repeat: int, advice: bool) -> tuple[int, float, float]:
    """Real node count, best wall and best processor time of reading and predicting a model of about that many nodes."""
    data = Blocks().model(nodes).SerializeToString()
    best = used = float("inf")
    for _ in range(repeat):
        start, before = time.perf_counter(), time.process_time()
        prediction = predict(data, advice=advice)
        best, used = min(best, time.perf_counter() - start), min(used, time.process_time() - before)
    return prediction.model.nodes, best, used


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-advice", action="store_true", help="the simulation alone")
    options = parser.parse_args()
    times, processor = process_seconds(options.repeat)
    missed = min(times) > PROCESS_SECONDS
    print(f"YOLOv8n with Q/DQ, whole process: best {min(times):.2f} s, median {statistics.median(times):.2f} s, "
          f"processor {min(processor):.2f} s (target {PROCESS_SECONDS} s)")
    first = None
    for nodes in options.nodes:
        count, seconds, used = simulation_seconds(nodes, 1 if nodes > 20_000 else options.repeat, not options.no_advice)
        each = used / count * 1e6
        first = first or each
        print(f"{count:>8} nodes: {seconds:7.2f} s, processor {used:6.2f} s, {each:6.1f} us a node, "
              f"{each / first:.2f} times the first")
        missed = missed or each > GROWTH * first or (nodes >= 100_000 and seconds > LARGE_SECONDS)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
