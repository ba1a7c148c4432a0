"""MatMulToConvTransform: resnet18-qat-rtx2000-trt8510, line 2531; NVIDIA/TensorRT#2627."""

import numpy as np
import pytest

from qdqtool.model.operators import LayerKind
from qdqtool.prediction import predict
from qdqtool.trt.passes.mat_mul_to_conv_transform import MatMulToConvTransform
from qdqtool.types import Precision
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize("bias", [False, True])
def test_gemm_with_quantized_weights(g: Graph, bias: bool) -> None:
    found = step(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8, bias=bias)), MatMulToConvTransform)
    assert found.rows == [
        ("Running", "Gemm_311"),
        ("Convert layer type", "Gemm_311", "MATRIX_MULTIPLY to CONVOLUTION"),
    ]
    gemm = found.layer("Gemm_311")
    assert gemm.kind == LayerKind.CONVOLUTION
    known = gemm.weights
    assert (known.kernel, known.strides, known.pads, known.dilations) == (
        (1, 1),
        (1, 1),
        (0, 0, 0, 0),
        (1, 1),
    )
    assert (known.from_matmul, known.inside, known.group) == (True, False, 1)
    shuffles = [gemm.data.producer, gemm.inputs[1].producer, gemm.out.only_reader()]
    assert [s and s.name for s in shuffles] == [
        "reshape_before_Gemm_311",
        "transpose_before_Gemm_311",
        "reshape_after_Gemm_311",
    ]


def test_what_is_left(g: Graph) -> None:
    found = step(g.model(g.gemm(g.input(1, 8), "fc", 8, weights="float")), MatMulToConvTransform)
    assert found.rows == []
    assert found.layer("fc").kind == LayerKind.MATRIX_MULTIPLY
    g = Graph()
    # Its weights do not come from a DQ then, and nothing is converted
    weights = g.op(
        "Transpose", g.pair(g.const("w", g.random.normal(0, 1, (4, 8))), "w"), "t", perm=[1, 0]
    )
    out = g.op("MatMul", [g.pair(g.input(2, 3, 8), "x"), weights], "m")
    found = step(g.model(out, g.op("Neg", weights, "n")), MatMulToConvTransform)
    assert found.rows == [] and found.has("t")
    g = Graph()
    # A product with several matrices is no convolution with one kernel
    weights = g.pair(g.const("w", g.random.normal(0, 1, (2, 8, 4))), "w")
    out = g.op("MatMul", [g.pair(g.input(2, 3, 8), "x"), weights], "m")
    assert step(g.model(out), MatMulToConvTransform).rows == []
    g = Graph()
    other = g.pair(g.relu(g.input(8, 4, name="y"), "r"), "w")
    out = g.op("Gemm", [g.pair(g.input(1, 8), "x"), other], "m", alpha=float(np.float32(1)))
    assert step(g.model(out), MatMulToConvTransform).rows == []


@pytest.mark.parametrize(
    ("shape", "read", "moves"),
    [
        ((6, 8), (6, 8, 1, 1), False),
        ((2, 3, 8), (6, 8, 1, 1), False),
        ((2, 3, 5, 8), (2, 8, 3, 5), True),
        ((2, 3, 5, 7, 8), (210, 8, 1, 1), False),
    ],
)
def test_matmul_of_data_of_any_rank(
    g: Graph, shape: tuple[int, ...], read: tuple[int, ...], moves: bool
) -> None:
    """Rows of the last dimension; an image with channels last is turned to channels first and back."""
    weights = g.pair(g.const("w", g.random.normal(0, 1, (8, 4))), "w")
    found = step(
        g.model(g.op("MatMul", [g.pair(g.input(*shape), "x"), weights], "m")), MatMulToConvTransform
    )
    assert found.rows[-1] == ("Convert layer type", "m", "MATRIX_MULTIPLY to CONVOLUTION")
    product = found.layer("m")
    before, after = product.data.producer, product.out.only_reader()
    assert before is not None and after is not None
    assert (product.data.shape, before.shuffling.moves, after.shuffling.moves) == (
        read,
        moves,
        moves,
    )
    assert product.inputs[1].producer is found.layer("transpose_before_m")
    if moves:
        assert product.out.shape == (2, 4, 3, 5)
        turned = np.transpose(np.zeros(shape), before.shuffling.perm)
        assert turned.shape == read and np.transpose(turned, after.shuffling.perm).shape == shape


@pytest.mark.parametrize(("turned", "shuffle"), [(True, False), (False, True)])
def test_weights_that_pytorch_exports_turned(g: Graph, turned: bool, shuffle: bool) -> None:
    """Q, DQ, Transpose, MatMul: that Transpose gives a convolution's order, and no shuffle is put in front."""
    weights = g.pair(g.const("w", g.random.normal(0, 1, (4, 8) if turned else (8, 4))), "w")
    weights = g.op("Transpose", weights, "t", perm=[1, 0]) if turned else weights
    found = step(
        g.model(g.op("MatMul", [g.pair(g.input(2, 3, 8), "x"), weights], "m")),
        MatMulToConvTransform,
    )
    assert found.rows[-1] == ("Convert layer type", "m", "MATRIX_MULTIPLY to CONVOLUTION")
    assert found.has("transpose_before_m") is shuffle and not found.has("t")
    assert ("t" in found.layer("m").nodes) is turned


def test_linear_layer_between_transposes(g: Graph) -> None:
    """The engine listed in NVIDIA/TensorRT#2627 (8.4.1), a point pillar's linear layer.

    CaskConvolution ``weight + Q + MatMul``, Int8(1,10,8000,20) to Float(1,16,8000,20) with BatchNormalization and Relu
    gone; behind it CudnnPooling ReduceMax in float, Slice Tile in float, and ``<Q>_clone_0`` of the first part,
    ``<Q>_clone_1`` of the Tile's as conversions into the next INT8 tensor.
    """
    x = g.op("Transpose", g.input(1, 10, 80, 20), "turn", perm=[0, 2, 3, 1])
    weights = g.op(
        "Transpose", g.pair(g.const("w", g.random.normal(0, 1, (16, 10))), "wq"), "wt", perm=[1, 0]
    )
    x = g.op("MatMul", [g.pair(x, "in"), weights], "MatMul_10")
    x = g.op("Transpose", x, "back", perm=[0, 3, 1, 2])
    g.channels[x] = 16
    x = g.relu(g.bn(x, "bn"), "relu")
    top = g.op("ReduceMax", x, "ReduceMax_15", axes=[3], keepdims=1)
    tile = g.op("Tile", [top, g.const("times", np.array([1, 1, 1, 20], np.int64))], "Tile_28")
    joined = g.concat([x, tile], "Concat_29")
    g.channels[joined] = 32
    prediction = predict(g.model(g.conv(joined, "next", 8)), "trt8.4")
    outcome = prediction.convolutions[0]
    assert (outcome.precision, outcome.output, outcome.evidence) == (
        Precision.INT8,
        Precision.FLOAT,
        "documented",
    )
    layers = [
        (x.type, x.name, [str(t.precision) for t in (*x.inputs, *x.outputs)])
        for x in prediction.layers
    ]
    assert layers[:6] == [
        ("Conversion", "in.Q", ["FLOAT", "INT8"]),
        ("Convolution", "w + wq.Q + MatMul_10", ["INT8", "FLOAT"]),
        ("Pooling", "ReduceMax_15", ["FLOAT", "FLOAT"]),
        ("Conversion", "next.in.Q_clone_0", ["FLOAT", "INT8"]),
        ("Slice", "Tile_28", ["FLOAT", "FLOAT"]),
        ("Conversion", "next.in.Q_clone_1", ["FLOAT", "INT8"]),
    ]
    assert "relu" in outcome.fused
