"""MyelinRegions: the layer listings of gemm-mlp-trt10 and linear-orinnano-trt103, as tables of our own."""

import numpy as np
import pytest

from qdqtool.prediction import predict
from qdqtool.types import Prediction
from tests.trt.builder import Graph


def _gemm(
    g: Graph,
    x: str,
    name: str,
    inputs: int,
    outputs: int,
    *,
    data: bool = True,
    weights: bool = True,
) -> str:
    x = g.pair(x, f"{name}.in", 0.05) if data else x
    w = g.const(f"{name}.w", np.ones((outputs, inputs), np.float32))
    w = g.pair(w, f"{name}.wq", np.full(outputs, 0.01), axis=0) if weights else w
    return g.op("Gemm", [x, w, g.const(f"{name}.b", np.zeros(outputs, np.float32))], name, transB=1)


def _of(g: Graph, *outputs: str, target: str = "trt10") -> Prediction:
    return predict(g.model(*outputs), target)


def _told(prediction: Prediction) -> list[tuple[str, str, str, str | None]]:
    return [(c.name, str(c.inputs[0]), str(c.output), c.layer) for c in prediction.convolutions]


def test_three_gemms_with_a_q_behind_each(g: Graph) -> None:
    """input -> kgen Q -> gemm, gemm, gemm, all Int8 to Int8 -> kgen DQ -> logits."""
    x = _gemm(g, g.input(1, 16), "fc1", 16, 32)
    x = _gemm(g, x, "fc2", 32, 32)
    x = g.pair(_gemm(g, x, "fc3", 32, 10), "end", 0.2)
    found = _of(g, x)
    assert _told(found) == [(name, "INT8", "INT8", None) for name in ("fc1", "fc2", "fc3")]
    assert found.conversions == 0 and found.conversion_nodes == []
    (region,) = found.regions
    assert region.nodes == ["fc1", "fc2", "fc3"] and region.trigger == "fc1"
    assert region.kernels == ["fc1.in.Q", "end.DQ"]
    assert {"fc2.in.Q", "fc3.in.Q", "end.Q"} <= set(region.fused)
    assert region.uncertain == 0


def test_products_of_floats(g: Graph) -> None:
    """fc2 of the second network: Float to Float, TF32."""
    x = g.op("Softmax", _gemm(g, g.input(1, 16), "fc1", 16, 32), "soft")
    found = _of(g, g.pair(_gemm(g, x, "fc2", 32, 10, data=False), "end", 0.2))
    assert _told(found) == [("fc1", "INT8", "FLOAT", None), ("fc2", "FLOAT", "FLOAT", None)]
    assert found.conversions == 0
    (region,) = found.regions
    assert set(region.kernels) == {"fc1.in.Q", "end.DQ"}
    assert "end.Q" in region.fused
    g = Graph()
    found = _of(g, _gemm(g, g.input(1, 16), "fc", 16, 32, data=False))
    assert _told(found) == [("fc", "FLOAT", "FLOAT", None)] and found.conversions == 0
    g = Graph()
    # half -> Q -> DQ -> MatMul: kgen Half to Int8, then FcCas Int8 to Half
    x = g.pair(g.input(1, 8, 64), "in", 0.05)
    w = g.pair(g.const("w", np.ones((64, 32), np.float32)), "wq", np.full(32, 0.01), axis=1)
    found = _of(g, g.op("MatMul", [x, w], "q_proj"))
    assert _told(found) == [("q_proj", "INT8", "FLOAT", None)]
    assert [r.kernels for r in found.regions] == [["in.Q"]] and found.conversions == 0


def test_how_far_a_region_reaches(g: Graph) -> None:
    x = g.op("Softmax", g.conv(g.input(1, 16, 8, 8), "a", 16), "soft")
    found = _of(g, g.conv(x, "b", 16))
    assert found.conversion_nodes == ["a.in.Q"]
    assert [r.fused for r in found.regions] == [["b.in.Q"]]
    assert _of(g, "b:0", target="trt8.5").conversion_nodes == ["a.in.Q", "b.in.Q"]
    g = Graph()
    # A pointwise layer behind a product: its Q is taken in, or stays
    x = g.op("Softmax", g.conv(g.input(1, 16, 8, 8), "a", 16), "soft")
    x = g.op("Tanh", x, "tanh")
    found = _of(g, g.conv(x, "b", 16))
    assert found.conversion_nodes == ["a.in.Q"] and found.regions[0].uncertain == 1
    from qdqtool.render.predict_text import verdict

    assert "1 to 2 conversions, depending on how much Myelin takes in" in verdict(found)
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "a", 16), "r")
    q = g.q(g.op("AveragePool", x, "pool", kernel_shape=[3, 3], pads=[1] * 4), "shared")
    dq = g.dq(q, "first")
    w = g.pair(g.const("w", np.ones((8, 32), np.float32)), "wq", 0.01)
    end = g.op("MatMul", [dq, w], "fc")
    found = _of(g, end, g.conv(g.dq(q, "second"), "b", 16, scale=None))
    assert "shared" in found.conversion_nodes
    g = Graph()
    told = _of(g, _gemm(g, g.input(1, 16), "fc", 16, 32)).as_json()["regions"]
    assert told == [
        {
            "trigger": "fc",
            "op": "Gemm",
            "nodes": ["fc"],
            "fused": [],
            "kernels": ["fc.in.Q"],
            "uncertain": 0,
            "possible": [],
            "matrix_products": 1,
            "matrix_products_int8": 1,
            "softmax": 0,
            "normalizations": 0,
        }
    ]


@pytest.mark.parametrize("target", ["trt8.5", "trt8.6"])
def test_before_10_a_gemm_is_a_convolution_and_its_q_a_conversion(g: Graph, target: str) -> None:
    found = _of(g, _gemm(g, g.input(1, 16), "fc", 16, 32), target=target)
    assert found.regions == [] and found.conversions == 1
    assert found.convolutions[0].layer is not None
