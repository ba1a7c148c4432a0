from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpus import Gpu, find_gpu
from qdqtool.timing.workload import EngineWorkload, predict_workload
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target, target_named
from tests.trt.builder import Graph

TARGET = target_named("trt8.5")
GPU = find_gpu("RTX 3060")
SHARED = Path(__file__).parents[3] / "shared" / "evidence"  # profiles outside the repository


def convolution_chain(
    convolutions: int = 3,
    channels: int = 64,
    size: int = 56,
    batch: int = 1,
    quantized: bool = True,
    dynamic: bool = False,
) -> onnx.ModelProto:
    g = Graph(opset=17)
    x = g.input("N" if dynamic else batch, channels, size, size)
    for i in range(convolutions):
        weight = g.const(f"w{i}", np.full((channels, channels, 3, 3), 0.03, np.float32))
        if quantized:
            x, weight = g.pair(x, f"in{i}", 0.05), g.pair(weight, f"we{i}", 0.05)
        x = g.relu(g.op("Conv", [x, weight], f"conv{i}", pads=[1] * 4), f"relu{i}")
    return g.model(g.op("Sigmoid", x, "last"))


def save_model(folder: Path, model: onnx.ModelProto, name: str = "model.onnx") -> str:
    onnx.save(model, folder / name)
    return str(folder / name)


def estimate_model(
    proto: onnx.ModelProto | Model, gpu: Gpu = GPU, advice: bool = True, **options: Any
) -> tuple[Prediction, Any]:
    model = load(proto)
    prediction = predict(model, TARGET, advice=advice)
    return prediction, estimate_time(model, prediction, gpu, TARGET, **options)


def model_workload(
    source: onnx.ModelProto | Model, target: str | Target = TARGET, **options: Any
) -> EngineWorkload:
    model = Model(source) if not isinstance(source, Model) else source
    return predict_workload(model, predict(model, target, advice=False), **options)
