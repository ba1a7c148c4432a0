"""Builds with TensorRT-RTX (no GPU): models that it rejects are built in INT8 after `fix`."""

import numpy as np
import onnx
import pytest

from qdqtool.builders.compiler_process import is_installed
from qdqtool.findings import codes
from qdqtool.fixing.api import fix
from qdqtool.prediction import predict
from qdqtool.verification.local_build import build_model
from tests.fixing.test_quantizers import CHAINS, network

pytestmark = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)


def convolution_of(g, data, kernel):
    inputs = [data, g.weights("c", (16, 16, kernel, kernel), "qdq")]
    return g.op("Conv", inputs, "c", kernel_shape=[kernel, kernel])


def integer_bias(g):
    x = g.pair(g.input(1, 16, 8, 8), "p")
    bias = g.dq(
        g.const("b", np.arange(16, dtype=np.int32)),
        "bdq",
        np.full(16, 1e-3),
        axis=0,
        integer=np.int32,
    )
    return g.op("Conv", [x, g.weights("c", (16, 16, 1, 1), "qdq"), bias], "c", kernel_shape=[1, 1])


def dead_channel(g):
    weights = g.random.normal(0, 0.3, (16, 16, 1, 1)).astype(np.float32)
    weights[3] = 0
    w = g.pair(g.const("w", weights), "wq", np.abs(weights).max(axis=(1, 2, 3)) / 127, axis=0)
    return g.op("Conv", [g.pair(g.input(1, 16, 8, 8), "p"), w], "c", kernel_shape=[1, 1])


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("role", ["scale", "zero", "integers"])
def test_constants_behind_nodes_are_refused_as_predicted(tmp_path, role, chain):
    onnx.save(network(role, chain), tmp_path / "m.onnx")
    build = build_model(tmp_path / "m.onnx", timeout=120)
    is_refused = any(f.severity == "error" for f in predict(tmp_path / "m.onnx", "rtx1.7").findings)
    assert (build.status == "refused") == is_refused


@pytest.mark.parametrize(
    ("make", "code", "before"),
    [
        (
            lambda g: convolution_of(
                g, g.pair(g.input(1, 16, 8, 8), "p", 0.05, zero=114, integer=np.uint8), kernel=3
            ),
            "ZP-NONZERO",
            "refused",
        ),
        (integer_bias, "BIAS-DQ", "refused"),
        (dead_channel, "SCALE-NONPOS", "refused"),
        (
            lambda g: convolution_of(g, g.pair(g.input(1, 16, 8, 8), "p", [0.05]), kernel=1),
            "SCALE-SHAPE1",
            "FP32",
        ),
        (
            lambda g: g.conv(g.input(1, 16, 8, 8), "c", 16, weights="float"),
            "W-NO-DQ",
            "FP32",
        ),
    ],
)
def test_fixed_models_build_in_int8(g, tmp_path, make, code, before):
    proto = g.model(make(g))
    onnx.save(proto, tmp_path / "given.onnx")
    given = build_model(tmp_path / "given.onnx", timeout=120)
    assert (given.status if given.status != "built" else str(given.node("c").precision)) == before
    found = [f for f in predict(proto, "rtx1.7").findings if f.code == code]
    assert found
    if given.status == "refused":  # the finding quotes the compiler's own words
        quoted = codes.get(code).error_text("rtx1.7")
        assert quoted in given.message and quoted in found[0].message
    onnx.save(fix(proto, "rtx1.7").proto, tmp_path / "fixed.onnx")
    fixed = build_model(tmp_path / "fixed.onnx", timeout=120)
    assert fixed.status == "built", fixed.message
    assert fixed.node("c").precision == "INT8"
