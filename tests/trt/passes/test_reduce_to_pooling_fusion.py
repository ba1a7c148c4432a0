import numpy as np
import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.prediction import predict
from qdqtool.trt.passes.reduce_to_pooling_fusion import ReduceToPoolingFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize(
    ("op", "pooling"), [("GlobalAveragePool", "AVERAGE"), ("GlobalMaxPool", "MAX")]
)
def test_global_pooling_becomes_pooling(g: Graph, op: str, pooling: str) -> None:
    result = run_pass(
        g.model(g.op(op, g.input(1, 3, 4, 4), "GlobalAveragePool_300")), ReduceToPoolingFusion
    )
    assert result.lines == [
        ("Running", "GlobalAveragePool_300"),
        ("Swap the layer type", "GlobalAveragePool_300", "REDUCE to POOLING"),
    ]
    layer = result.layer("GlobalAveragePool_300")
    assert (layer.kind, layer.window.type) == (LayerKind.POOLING, pooling)


@pytest.mark.parametrize(
    ("axes", "keepdims", "opset", "pooled"),
    [
        ([2, 3], 1, 13, True),
        ([-1, -2], 1, 13, True),
        ([2, 3], 1, 18, True),
        ([2, 3], 0, 13, False),
        ([1, 2], 1, 13, False),
        ([3], 1, 13, False),
        (None, 1, 13, False),
    ],
)
def test_reduce_mean_over_height_and_width_becomes_pooling(
    axes: list[int] | None, keepdims: int, opset: int, pooled: bool
) -> None:
    # NVIDIA's guide: a Reduce becomes a Pooling if it averages over H and W and keeps its
    # dimensions.
    g = Graph(opset)
    attributes: dict[str, object] = {"keepdims": keepdims}
    inputs = [g.input(1, 3, 4, 4)]
    if axes is not None and opset >= 18:
        inputs.append(g.const("axes", np.array(axes, np.int64)))
    elif axes is not None:
        attributes["axes"] = axes
    result = run_pass(g.model(g.op("ReduceMean", inputs, "m", **attributes)), ReduceToPoolingFusion)
    assert bool(result.lines) is pooled
    assert result.layer("m").kind == (LayerKind.POOLING if pooled else LayerKind.REDUCE)


@pytest.mark.parametrize(
    ("axes", "keepdims", "pooled"),
    [
        ([3], 1, True),
        ([2], 1, True),
        ([-1, -2], 1, True),
        ([3], 0, False),
        ([1], 1, False),
        ([1, 3], 1, False),
    ],
)
def test_reduce_max_over_height_or_width_becomes_pooling(
    g: Graph, axes: list[int], keepdims: int, pooled: bool
) -> None:
    # NVIDIA/TensorRT issue 2627: over the width, a CudnnPooling in float, its Q after it.
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "c", 16), "r")
    proto = g.model(
        g.op("Softmax", g.pair(g.op("ReduceMax", x, "m", axes=axes, keepdims=keepdims), "q"), "end")
    )
    result = run_pass(proto, ReduceToPoolingFusion)
    assert bool(result.lines) is pooled
    assert result.layer("m").kind == (LayerKind.POOLING if pooled else LayerKind.REDUCE)
    prediction = predict(proto, "trt8.5")
    assert prediction.conversion_nodes == ["c.in.Q", "q.Q", "q.DQ"]
    assert str(prediction.convolutions[0].output) == "FLOAT"


def test_quantized_reduce_mean_leaves_no_conversion(g: Graph) -> None:
    x = g.conv(g.input(1, 3, 8, 8), "c", 8)
    y = g.op(
        "Flatten", g.op("ReduceMean", g.pair(x, "pool"), "mean", axes=[2, 3], keepdims=1), "flat"
    )
    assert predict(g.model(g.gemm(y, "fc", 8))).conversion_nodes == ["c.in.Q"]
