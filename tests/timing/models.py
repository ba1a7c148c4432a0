"""Small networks for tests of time estimates."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import find
from qdqtool.trt.targets import target_named

TARGET = target_named("trt8.5")
GPU = find("RTX 3060")
SHARED = Path(__file__).parents[3] / "shared" / "evidence"  # published profiles, not in the repository


def chain(convolutions=3, channels=64, size=56, batch=1, quantized=True, kernel=3, last="float", dynamic=False):
    """Convolutions with Relu in a row, each with Q/DQ on input and weights where ``quantized``."""
    nodes, weights = [], [numpy_helper.from_array(np.float32(0.05), "s"), numpy_helper.from_array(np.int8(0), "z")]
    first = "N" if dynamic else batch
    tensor = "x"
    for i in range(convolutions):
        name = f"w{i}"
        weights.append(numpy_helper.from_array(np.full((channels, channels, kernel, kernel), 0.01, np.float32), name))
        if quantized:
            for source, base in ((tensor, f"in{i}"), (name, f"we{i}")):
                nodes.append(helper.make_node("QuantizeLinear", [source, "s", "z"], [f"{base}_q"], f"{base}/Q"))
                nodes.append(
                    helper.make_node("DequantizeLinear", [f"{base}_q", "s", "z"], [f"{base}_dq"], f"{base}/DQ")
                )
            tensor, name = f"in{i}_dq", f"we{i}_dq"
        nodes.append(helper.make_node("Conv", [tensor, name], [f"c{i}"], f"conv{i}", pads=[kernel // 2] * 4))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"relu{i}"))
        tensor = f"r{i}"
    if last == "float":
        nodes.append(helper.make_node("Sigmoid", [tensor], ["y"], "last"))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [first, channels, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [first, channels, size, size])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def saved(folder, model, name="model.onnx"):
    path = folder / name
    onnx.save(model, path)
    return str(path)


def timed(proto, gpu=GPU, **options):
    model = load(proto)
    prediction = predict(model, TARGET)
    return prediction, estimate(model, prediction, gpu, TARGET, **options)
