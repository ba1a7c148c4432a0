"""Small networks for tests of time estimates."""

from pathlib import Path

import numpy as np
import onnx

from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import find
from qdqtool.timing.predicted import workload_of
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph

TARGET = target_named("trt8.5")
GPU = find("RTX 3060")
SHARED = (
    Path(__file__).parents[3] / "shared" / "evidence"
)  # published profiles, not in the repository


def chain(convolutions=3, channels=64, size=56, batch=1, quantized=True, dynamic=False):
    """Convolutions with Relu in a row, each with Q/DQ on input and weights where ``quantized``."""
    g = Graph(opset=17)
    x = g.input("N" if dynamic else batch, channels, size, size)
    for i in range(convolutions):
        weight = g.const(f"w{i}", np.full((channels, channels, 3, 3), 0.01, np.float32))
        if quantized:
            x, weight = g.pair(x, f"in{i}", 0.05), g.pair(weight, f"we{i}", 0.05)
        x = g.relu(g.op("Conv", [x, weight], f"conv{i}", pads=[1] * 4), f"relu{i}")
    return g.model(g.op("Sigmoid", x, "last"))


def saved(folder, model, name="model.onnx"):
    onnx.save(model, folder / name)
    return str(folder / name)


def timed(proto, gpu=GPU, advice=True, **options):
    model = load(proto)
    prediction = predict(model, TARGET, advice=advice)
    return prediction, estimate(model, prediction, gpu, TARGET, **options)


def workload(source, target=TARGET, **options):
    """What a model's engine does."""
    model = Model(source) if not isinstance(source, Model) else source
    return workload_of(model, predict(model, target, advice=False), **options)
