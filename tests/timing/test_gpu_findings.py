"""What a named GPU cannot do with a prediction, each with a GPU or network where it is not told."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from qdqtool.cli import run
from qdqtool.timing.ask import Request, predict_on
from tests.trt.builder import Graph


def network(act: str = "Relu", groups: int = 1) -> onnx.ModelProto:
    g = Graph()
    x = g.conv(g.input(1, 32, 16, 16), "a", 32, groups=groups)
    x = g.relu(x, "r") if act == "Relu" else g.silu(x, "s") if act == "SiLU" else g.op(act, x, "act")
    return g.model(g.conv(x, "b", 32, scale=0.05))


def codes(proto: onnx.ModelProto, sm: str, target: str = "trt8.5") -> set[str]:
    prediction, _ = predict_on(proto, target, Request(sm=sm))
    return {f.code for f in prediction.findings if f.code.startswith("GPU-")}


@pytest.mark.parametrize(("sm", "told"), [
    ("GTX 1660", {"GPU-DP4A", "GPU-FUSION"}), ("6.1", {"GPU-DP4A", "GPU-FUSION"}), ("7.0", {"GPU-DP4A", "GPU-FUSION"}),
    ("7.5", set()), ("T4", set()), ("8.6", set()), ("6.0", {"GPU-NO-INT8"}), ("6.2", {"GPU-NO-INT8"}),
    ("5.3", {"GPU-NO-INT8"}), ("AGX Orin", {"GPU-JETSON"}), ("8.7", set()),
])
@pytest.mark.parametrize("act", ["LeakyRelu", "SiLU"])
def test_gpus(sm: str, told: set[str], act: str) -> None:
    assert codes(network(act), sm) - {"GPU-NO-FP16"} == told


def test_relu_is_fused_everywhere() -> None:
    assert "GPU-FUSION" not in codes(network("Relu"), "6.1")


def test_depthwise() -> None:
    assert "GPU-KERNELS" in codes(network("Relu", groups=32), "GTX 1650")
    assert "GPU-KERNELS" not in codes(network("Relu", groups=32), "TITAN RTX")
    assert "GPU-KERNELS" not in codes(network("Relu", groups=1), "GTX 1650")
    assert "GPU-KERNELS" not in codes(network("Relu", groups=2), "GTX 1650")


def test_a_float_network_is_told_nothing_of_int8() -> None:
    g = Graph()
    proto = g.model(g.conv(g.input(1, 16, 8, 8), "a", 16, scale=None, weights="float"))
    assert not codes(proto, "6.0") and not codes(proto, "AGX Orin")


def test_unknown_names_are_one_line_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(network(), tmp_path / "m.onnx")
    assert run(["predict", str(tmp_path / "m.onnx"), "--sm", "GTX 1666"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and "GTX 1660" in told.err
