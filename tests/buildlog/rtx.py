"""A small model, built if TensorRT-RTX is installed.

The license of TensorRT-RTX does not allow to distribute its logs.
"""

from pathlib import Path

import onnx
import pytest

from qdqtool import builders
from qdqtool.builders.compiler_process import is_installed
from tools.fuzz.net import Net


def c2f_split() -> onnx.ModelProto:
    net = Net()

    def conv(x: str, channels: int, k: int, name: str) -> str:
        y = net.conv(net.qdq(x), channels, k, name=name)
        return net.op("Mul", y, net.op("Sigmoid", y))

    a, b = net.ops(
        "Split",
        conv(net.input((1, 32, 32, 32)), 64, 1, "cv1"),
        net.const([32, 32], stem="parts"),
        outputs=2,
        name="Split",
        axis=1,
    )
    added = net.op("Add", b, conv(conv(b, 32, 3, "m0"), 32, 3, "m1"))
    return net.model(conv(net.op("Concat", a, b, added, name="Concat", axis=1), 64, 1, "cv2"))


def build_log(folder: Path) -> Path:
    if not is_installed("tensorrt_rtx"):
        pytest.skip("TensorRT-RTX is not installed")
    model = folder / "c2f_split.onnx"
    onnx.save(c2f_split(), model)
    result = builders.build(model, output=folder / "out")
    assert result.status == "built", result.message
    return folder / "out" / "build.log"
