from pathlib import Path

import onnx
import pytest

from qdqtool.builders.compiler_process import is_installed
from tools.fuzz.net import Net

needs_compiler = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)

NASTY = "/a b/[x], Name: {y}, LayerType: z\n\x1e/Conv"


def two_convolutions(*names: str, bad_zero_point: bool = False) -> onnx.ModelProto:
    net = Net()
    x, zero = net.input((1, 8, 8, 8)), (3 if bad_zero_point else 0)
    x = net.conv(net.dq(net.q(x, zero=zero), zero=zero), 8, name="first")
    x = net.conv(net.op("Relu", x), 4, weights="none", name="second")
    model = net.model(x)
    for node in model.graph.node:
        if node.name in ("first", "second") and names:
            node.name = names[("first", "second").index(node.name)]
    return model


def saved(model: onnx.ModelProto, folder: Path) -> str:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return str(path)
