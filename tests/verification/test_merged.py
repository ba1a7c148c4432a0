"""Convolutions merged side by side (``A || B``): each place in the merged layer is looked at."""

from __future__ import annotations

import io
import re

import onnx
import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.verification.api import exit_code, verify
from tests.fuzz.net import Net
from tests.verification.synthetic import log_of


def two_branches() -> onnx.ModelProto:
    """Two 3x3 convolutions that read one Q/DQ pair, each followed by a quantized 1x1 convolution."""
    net = Net()
    x = net.qdq(net.input((1, 8, 16, 16)))
    heads = [net.op("Relu", net.conv(x, 16, 3, name=f"c{i}")) for i in range(2)]
    return net.model(*(net.conv(net.qdq(head), 8, 1, name=f"d{i}") for i, head in enumerate(heads)))


MODEL = two_branches()
LINES = log_of(predict(Model(MODEL), TARGETS["trt8.5"]))
MERGED = next(i for i, line in enumerate(LINES) if line.startswith("Layer(") and " || " in line)


def check(lines: list[str]) -> tuple[int, set[str]]:
    result = verify(MODEL, read_build(io.BytesIO("\n".join(lines).encode())))
    return exit_code(result), {m.name for m in result.mismatches if m.kind == "convolution"}


def test_as_predicted() -> None:
    assert check(LINES) == (0, set())


@pytest.mark.parametrize(("place", "wrong"), [(0, {"c0", "c1"}), (1, {"c0"}), (2, {"c1"})])
def test_one_tensor_of_the_merged_layer_changed(place: int, wrong: set[str]) -> None:
    line = LINES[MERGED]
    tensors = list(re.finditer(r"Int8(?=\[)", line))
    assert len(tensors) == 3  # one input, two outputs
    found = tensors[place]
    changed = line[: found.start()] + "Float" + line[found.end() :]
    assert check([*LINES[:MERGED], changed, *LINES[MERGED + 1 :]]) == (1, wrong)
