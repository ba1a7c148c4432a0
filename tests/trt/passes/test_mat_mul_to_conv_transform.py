"""MatMulToConvTransform: resnet18-qat-rtx2000-trt8510, line 2531."""

from __future__ import annotations

import numpy as np
import pytest

from qdqtool.operator_facts import LayerKind
from qdqtool.trt.passes.mat_mul_to_conv_transform import MatMulToConvTransform
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize("bias", [False, True])
def test_gemm_with_quantized_weights(bias: bool) -> None:
    g = Graph()
    found = step(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8, bias=bias)), MatMulToConvTransform)
    assert found.rows == [
        ("Running", "Gemm_311"),
        ("Convert layer type", "Gemm_311", "MATRIX_MULTIPLY to CONVOLUTION"),
    ]
    gemm = found.layer("Gemm_311")
    assert gemm.kind == LayerKind.CONVOLUTION
    known = gemm.weights
    assert (known.kernel, known.strides, known.pads, known.dilations) == ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1))
    assert (known.from_matmul, known.inside, known.group) == (True, False, 1)
    shuffles = [gemm.data.producer, gemm.inputs[1].producer, gemm.out.only_reader()]
    assert [s and s.name for s in shuffles] == [
        "reshape_before_Gemm_311",
        "transpose_before_Gemm_311",
        "reshape_after_Gemm_311",
    ]


def test_float_weights_are_left() -> None:
    g = Graph()
    found = step(g.model(g.gemm(g.input(1, 8), "fc", 8, weights="float")), MatMulToConvTransform)
    assert found.rows == []
    assert found.layer("fc").kind == LayerKind.MATRIX_MULTIPLY


def test_batched_matmul_is_left() -> None:
    g = Graph()
    weights = g.pair(g.const("w", g.random.normal(0, 1, (8, 4))), "w")
    out = g.op("MatMul", [g.pair(g.input(2, 3, 8), "x"), weights], "m")
    assert step(g.model(out), MatMulToConvTransform).rows == []


def test_computed_weights_are_left() -> None:
    g = Graph()
    other = g.pair(g.relu(g.input(8, 4, name="y"), "r"), "w")
    out = g.op("Gemm", [g.pair(g.input(1, 8), "x"), other], "m", alpha=float(np.float32(1)))
    assert step(g.model(out), MatMulToConvTransform).rows == []
