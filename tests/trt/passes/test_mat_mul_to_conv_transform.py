import numpy as np
import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt.passes.mat_mul_to_conv_transform import MatMulToConvTransform
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


@pytest.mark.parametrize("bias", [False, True])
def test_gemm_with_quantized_weights_becomes_convolution(g: Graph, bias: bool) -> None:
    result = run_pass(
        g.model(g.gemm(g.input(1, 8), "Gemm_311", 8, bias=bias)), MatMulToConvTransform
    )
    assert result.lines == [
        ("Running", "Gemm_311"),
        ("Convert layer type", "Gemm_311", "MATRIX_MULTIPLY to CONVOLUTION"),
    ]
    gemm = result.layer("Gemm_311")
    assert gemm.kind == LayerKind.CONVOLUTION
    weights = gemm.weights
    assert (weights.kernel, weights.strides, weights.pads, weights.dilations) == (
        (1, 1),
        (1, 1),
        (0, 0, 0, 0),
        (1, 1),
    )
    assert (weights.from_matmul, weights.in_layer, weights.group) == (True, False, 1)
    shuffles = [gemm.data.producer, gemm.inputs[1].producer, gemm.out.single_consumer()]
    assert [s and s.name for s in shuffles] == [
        "reshape_before_Gemm_311",
        "transpose_before_Gemm_311",
        "reshape_after_Gemm_311",
    ]


def shared_transpose(g: Graph) -> list[str]:
    weights = g.pair(g.const("w", g.random.normal(0, 1, (4, 8))), "w")
    turned = g.op("Transpose", weights, "t", perm=[1, 0])
    return [g.op("MatMul", [g.pair(g.input(2, 3, 8), "x"), turned], "m"), g.op("Neg", turned, "n")]


@pytest.mark.parametrize(
    "build",
    [
        lambda g: [g.gemm(g.input(1, 8), "m", 8, weights="float")],
        shared_transpose,
        lambda g: [
            g.op(
                "MatMul",
                [
                    g.pair(g.input(2, 3, 8), "x"),
                    g.pair(g.const("w", g.random.normal(0, 1, (2, 8, 4))), "w"),
                ],
                "m",
            )
        ],
        lambda g: [
            g.op(
                "Gemm",
                [
                    g.pair(g.input(1, 8), "x"),
                    g.pair(g.relu(g.input(8, 4, name="y"), "r"), "w"),
                ],
                "m",
            )
        ],
    ],
    ids=["float", "shared transpose", "several matrices", "computed"],
)
def test_product_with_other_weights_stays(g: Graph, build: Build) -> None:
    result = run_pass(g.model(*build(g)), MatMulToConvTransform)
    assert (result.lines, result.layer("m").kind) == ([], LayerKind.MATRIX_MULTIPLY)


@pytest.mark.parametrize(
    ("shape", "read", "moves"),
    [
        ((6, 8), (6, 8, 1, 1), False),
        ((2, 3, 8), (6, 8, 1, 1), False),
        ((2, 3, 5, 8), (2, 8, 3, 5), True),
        ((2, 3, 5, 7, 8), (210, 8, 1, 1), False),
    ],
)
def test_matmul_of_any_rank_becomes_convolution(
    g: Graph, shape: tuple[int, ...], read: tuple[int, ...], moves: bool
) -> None:
    # An image with channels last is transposed to channels first and back.
    weights = g.pair(g.const("w", g.random.normal(0, 1, (8, 4))), "w")
    result = run_pass(
        g.model(g.op("MatMul", [g.pair(g.input(*shape), "x"), weights], "m")), MatMulToConvTransform
    )
    assert result.lines[-1] == ("Convert layer type", "m", "MATRIX_MULTIPLY to CONVOLUTION")
    product = result.layer("m")
    before, after = product.data.producer, product.out.single_consumer()
    assert (
        product.data.shape,
        before.shuffling.reorders_values,
        after.shuffling.reorders_values,
    ) == (
        read,
        moves,
        moves,
    )
    assert product.inputs[1].producer is result.layer("transpose_before_m")
    if moves:
        assert product.out.shape == (2, 4, 3, 5)
        turned = np.transpose(np.zeros(shape), before.shuffling.perm)
        assert turned.shape == read and np.transpose(turned, after.shuffling.perm).shape == shape


@pytest.mark.parametrize(("turned", "shuffle"), [(True, False), (False, True)])
def test_transpose_of_weights_replaces_inserted_shuffle(
    g: Graph, turned: bool, shuffle: bool
) -> None:
    # PyTorch exports Q, DQ, Transpose, MatMul.
    weights = g.pair(g.const("w", g.random.normal(0, 1, (4, 8) if turned else (8, 4))), "w")
    weights = g.op("Transpose", weights, "t", perm=[1, 0]) if turned else weights
    result = run_pass(
        g.model(g.op("MatMul", [g.pair(g.input(2, 3, 8), "x"), weights], "m")),
        MatMulToConvTransform,
    )
    assert result.lines[-1] == ("Convert layer type", "m", "MATRIX_MULTIPLY to CONVOLUTION")
    assert result.has_layer("transpose_before_m") is shuffle and not result.has_layer("t")
    assert ("t" in result.layer("m").nodes) is turned


def test_linear_layer_between_transposes_writes_float(g: Graph) -> None:
    # A point pillar's linear layer, engine listed in NVIDIA/TensorRT issue 2627 (8.4.1):
    # CaskConvolution weight + Q + MatMul, Int8(1,10,8000,20) to Float(1,16,8000,20), with
    # BatchNormalization and Relu fused. After it CudnnPooling ReduceMax in float, Slice Tile in
    # float, and conversions <Q>_clone_0 and <Q>_clone_1 into the next INT8 tensor.
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
    assert [
        (x.type, x.name, [str(t.precision) for t in (*x.inputs, *x.outputs)])
        for x in prediction.layers
    ][:6] == [
        ("Conversion", "in.Q", ["FP32", "INT8"]),
        ("Convolution", "w + wq.Q + MatMul_10", ["INT8", "FLOAT"]),
        ("Pooling", "ReduceMax_15", ["FLOAT", "FLOAT"]),
        ("Conversion", "next.in.Q_clone_0", ["FLOAT", "INT8"]),
        ("Slice", "Tile_28", ["FLOAT", "FLOAT"]),
        ("Conversion", "next.in.Q_clone_1", ["FLOAT", "INT8"]),
    ]
    assert "relu" in outcome.fused
