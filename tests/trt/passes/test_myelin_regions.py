from typing import Any

import numpy as np
import pytest

from qdqtool import Precision, Prediction
from qdqtool.evidence import Evidence
from qdqtool.formats.predict_text import render
from qdqtool.formats.verdicts import verdict
from qdqtool.prediction import predict
from tests.trt.builder import Graph


def predict_graph(g: Graph, *outputs: str, target: str = "trt10") -> Prediction:
    return predict(g.model(*outputs), target)


def outcomes(prediction: Prediction) -> list[tuple[str, str, str, str | None]]:
    return [(c.name, str(c.inputs[0]), str(c.output), c.layer) for c in prediction.convolutions]


def test_region_of_three_quantized_gemms(g: Graph) -> None:
    # input -> kgen Q -> gemm, gemm, gemm, all Int8 to Int8 -> kgen DQ -> logits.
    x = g.gemm(g.gemm(g.input(1, 16), "fc1", 16, 32), "fc2", 32, 32)
    x = g.pair(g.gemm(x, "fc3", 32, 10), "end", 0.2)
    result = predict_graph(g, x)
    assert outcomes(result) == [(name, "INT8", "INT8", None) for name in ("fc1", "fc2", "fc3")]
    assert result.conversions == 0 and result.conversion_nodes == []
    (region,) = result.regions
    assert region.nodes == ["fc1", "fc2", "fc3"] and region.trigger == "fc1"
    assert region.kernels == ["fc1.in.Q", "end.DQ"] and region.uncertain == 0
    assert {"fc2.in.Q", "fc3.in.Q", "end.Q"} <= set(region.fused)


def test_region_with_float_product(g: Graph) -> None:
    # fc2 of linear-orinnano-trt103: Float to Float, TF32.
    x = g.op("Softmax", g.gemm(g.input(1, 16), "fc1", 16, 32), "soft")
    result = predict_graph(g, g.pair(g.gemm(x, "fc2", 32, 10, scale=None), "end", 0.2))
    assert outcomes(result) == [("fc1", "INT8", "FLOAT", None), ("fc2", "FLOAT", "FLOAT", None)]
    assert result.conversions == 0
    (region,) = result.regions
    assert set(region.kernels) == {"fc1.in.Q", "end.DQ"} and "end.Q" in region.fused


def test_matmul_of_quantized_input_writes_float(g: Graph) -> None:
    # linear-orinnano-trt103: kgen Half to Int8, then FcCas Int8 to Half.
    w = g.pair(g.const("w", np.ones((64, 32), np.float32)), "wq", np.full(32, 0.01), axis=1)
    result = predict_graph(g, g.op("MatMul", [g.pair(g.input(1, 8, 64), "in", 0.05), w], "q_proj"))
    assert outcomes(result) == [("q_proj", "INT8", "FLOAT", None)] and result.conversions == 0
    assert [r.kernels for r in result.regions] == [["in.Q"]]


def test_engine_nodes_count_a_region_as_one_layer(g: Graph) -> None:
    """Published counts of a DETR are 57 to 72 engine nodes; its listing has hundreds of kernels."""
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "a", 16), "r")
    w = g.pair(g.const("w", np.ones((8, 8), np.float32)), "wq", np.full(8, 0.01), axis=1)
    result = predict_graph(g, g.op("MatMul", [g.pair(x, "in", 0.05), w], "product"))
    assert [layer.type for layer in result.layers][-1] == "MatrixMultiply"
    (region,) = result.regions
    inside = {*region.nodes, *region.kernels}
    outside = [layer for layer in result.layers if inside.isdisjoint(layer.nodes)]
    assert result.engine_nodes == len(outside) + 1
    assert result.as_json()["summary"]["engine_nodes"] == result.engine_nodes


def test_layers_of_a_region_are_listed_below_it(g: Graph) -> None:
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "a", 16), "r")
    x = g.op("Softmax", g.gemm(g.op("Flatten", [x], "flat"), "fc1", 1024, 32), "soft")
    result = predict_graph(g, g.gemm(x, "fc2", 32, 10))
    products = [layer.name for layer in result.layers if layer.type == "MatrixMultiply"]
    assert products == ["fc1", "fc2"]
    layers = result.as_json()["layers"]
    assert [x["region"] for x in layers if x["name"] in products] == [0, 0]
    assert all("region" not in x for x in layers if x["type"] == "Convolution")
    text = str(render(result, 100, layers=True))
    start = text.index("  Myelin: ")
    outside, inside = text[:start], text[start:]
    assert "{ForeignNode[flat...fc2]}" in inside
    assert all(f"    MatrixMultiply: INT8 -> FP16, {name}\n" in inside for name in products)
    assert "  Convolution: " in outside and "MatrixMultiply" not in outside


def test_region_is_not_before_and_after_a_layer_outside(g: Graph) -> None:
    # A detection head with a DFL: boxes and scores are parts of one tensor, and are joined again.
    both = g.conv(g.input(1, 16, 8, 8), "head", 32)
    soft = g.op("Softmax", g.slice(both, "box", 0, 16), "soft", axis=1)
    boxes = g.op("Sub", [g.const("anchors", 8.0), g.conv(soft, "dfl", 16)], "boxes")
    scores = g.op("Sigmoid", g.slice(both, "cls", 16, 32), "sigmoid")
    result = predict_graph(g, g.concat([boxes, scores], "end"))
    (region,) = result.regions
    assert region.nodes == ["box", "soft"] and region.fused == ["dfl.in.Q"]
    assert [x["nodes"][-1] for x in result.as_json()["layers"] if "region" in x] == region.nodes


def test_q_after_softmax_is_fused_into_region(g: Graph) -> None:
    result = predict_graph(
        g, g.conv(g.op("Softmax", g.conv(g.input(1, 16, 8, 8), "a", 16), "soft"), "b", 16)
    )
    assert result.conversion_nodes == ["a.in.Q"]
    assert [r.fused for r in result.regions] == [["b.in.Q"]]
    assert predict_graph(g, "b:0", target="trt8.5").conversion_nodes == ["a.in.Q", "b.in.Q"]


def test_kernel_at_softmax_is_not_described_as_matrix_product(g: Graph) -> None:
    x = g.op("Softmax", g.op("Flatten", g.pair(g.input(1, 16, 8, 8), "in"), "flat"), "soft")
    assert verdict(predict_graph(g, g.conv(x, "b", 16))).endswith(
        "1 Q/DQ node runs inside Myelin's layers (Softmax)"
    )


def test_q_that_is_copied_to_the_inputs_of_a_concat_is_one_node(g: Graph) -> None:
    x = g.input(1, 16, 8, 8)
    floats = (g.conv(x, name, 16, scale=None, weights="float") for name in "ab")
    parts = [g.pair(part, f"{part}.out") for part in floats]
    both = g.pair(g.op("Concat", parts, "cat", axis=1), "c", 0.3)
    result = predict_graph(g, g.op("Softmax", both, "soft"))
    assert sorted(result.regions[0].kernels) == ["a:0.out.DQ", "b:0.out.DQ", "c.Q"]
    assert "3 Q/DQ nodes run inside Myelin's layers (Softmax)" in verdict(result)


def test_q_after_pointwise_layer_may_remain(g: Graph) -> None:
    x = g.op("Tanh", g.op("Softmax", g.conv(g.input(1, 16, 8, 8), "a", 16), "soft"), "tanh")
    result = predict_graph(g, g.conv(x, "b", 16))
    assert result.conversion_nodes == ["a.in.Q"] and result.regions[0].uncertain == 1
    assert result.as_json()["uncertain_conversions"] == ["b.in.Q"]
    reason = "depending on how many of them Myelin absorbs (uncertain: b.in.Q)"
    assert f"1 to 2 Q/DQ layers remain, {reason}" in verdict(result)
    assert "uncertain: b.in.Q\n" in str(render(result, 200))


def test_q_with_consumer_outside_region_remains(g: Graph) -> None:
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "a", 16), "r")
    q = g.q(g.op("AveragePool", x, "pool", kernel_shape=[3, 3], pads=[1] * 4), "shared")
    dq = g.dq(q, "first")
    end = g.op("MatMul", [dq, g.pair(g.const("w", np.ones((8, 32), np.float32)), "wq", 0.01)], "fc")
    result = predict_graph(g, end, g.conv(g.dq(q, "second"), "b", 16, scale=None))
    assert "shared" in result.conversion_nodes


def test_region_as_json(g: Graph) -> None:
    assert predict_graph(g, g.gemm(g.input(1, 16), "fc", 16, 32)).as_json()["regions"] == [
        {
            "trigger": "fc",
            "op": "Gemm",
            "nodes": ["fc"],
            "fused": [],
            "kernels": ["fc.in.Q"],
            "uncertain": 0,
            "uncertain_nodes": [],
            "possible": [],
            "matrix_products": 1,
            "matrix_products_int8": 1,
            "matrix_products_fp8": 0,
            "softmax": 0,
            "normalizations": 0,
        }
    ]


@pytest.mark.parametrize("target", ["trt8.5", "trt8.6"])
def test_gemm_before_trt10_is_convolution_with_conversion(g: Graph, target: str) -> None:
    result = predict_graph(g, g.gemm(g.input(1, 16), "fc", 16, 32), target=target)
    assert result.regions == [] and result.conversions == 1
    assert result.convolutions[0].layer is not None


# Kernels of transformers: a ViTPose on 11.3 --------------------------------------------------


def projections(g: Graph, *names: str) -> list[str]:
    x, outputs = g.pair(g.op("Softmax", g.input(1, 16, 32), "before"), "in"), []
    for name in names:
        weights = g.pair(g.const(f"{name}.w", np.ones((32, 32), np.float32)), f"{name}.wq", 0.01)
        outputs.append(g.op("MatMul", [x, weights], name))
    return outputs


def linear_gelu(g: Graph) -> str:
    (x,) = projections(g, "fc1")
    x = g.op("Add", [x, g.const("fc1.b", np.zeros(32, np.float32))], "bias")
    gate = g.op("Erf", g.op("Div", [x, g.const("root", 1.41421)], "div"), "erf")
    product = g.op("Mul", [x, g.op("Add", [gate, g.const("one", 1.0)], "plus")], "times")
    y = g.pair(g.op("Mul", [product, g.const("half", 0.5)], "act"), "mid")
    weights = g.pair(g.const("fc2.w", np.ones((32, 8), np.float32)), "fc2.wq", 0.01)
    return g.op("MatMul", [y, weights], "fc2")


def fp8_attention(
    g: Graph, head: int = 64, keys: int = 16, *, probabilities: bool = True, after: bool = True
) -> str:
    g.opset, g.fp8 = 19, True
    q, k, v = (
        g.pair(g.op("Neg", g.input(1, 2, *shape, name=name), f"{name}n"), f"{name}.pair")
        for name, shape in (("q", (16, head)), ("k", (head, keys)), ("v", (keys, head)))
    )
    scores = g.op("Mul", [g.op("MatMul", [q, k], "scores"), g.const("scale", 0.125)], "scaled")
    softmax = g.op("Softmax", scores, "softmax", axis=-1)
    softmax = g.pair(softmax, "p.pair") if probabilities else softmax
    values = g.op("MatMul", [softmax, v], "values")
    return g.op("Neg", g.pair(values, "end.pair") if after else values, "end")


GRAPHS = {
    "MyelinRegions/fp8-attention": (fp8_attention, "trt10"),
    "MyelinRegions/side-by-side": (lambda g: projections(g, "q", "k", "v"), "trt10"),
    "MyelinRegions/activation": (linear_gelu, "trt10"),
}


def test_products_of_one_tensor_are_one_layer(g: Graph) -> None:
    prediction = predict(g.model(*projections(g, "q", "k", "v")), "trt10", advice=False)
    (product,) = (layer for layer in prediction.layers if layer.type == "MatrixMultiply")
    assert {"q", "k", "v"} <= {*product.nodes} and len(product.outputs) == 3
    assert [c.name for c in prediction.convolutions] == ["q", "k", "v"]


@pytest.mark.parametrize(("target", "is_fused"), [("trt8.6", False), ("trt10", True)])
def test_activation_is_part_of_the_product_on_10(g: Graph, target: str, is_fused: bool) -> None:
    prediction = predict(g.model(linear_gelu(g)), target, advice=False)
    owner = next(layer for layer in prediction.layers if "act" in layer.nodes)
    assert ("fc1" in owner.nodes) == is_fused and "fc2" not in owner.nodes
    assert sum(layer.type == "MatrixMultiply" for layer in prediction.layers) == 2 * is_fused


# FP8 attention: documented in the release notes of 10.6, seen on TensorRT-RTX ------------------


@pytest.mark.parametrize(
    ("target", "options", "is_fused"),
    [
        ("trt10", {}, True),
        ("trt11", {}, True),
        ("10.6", {}, True),
        ("10.5", {}, False),
        ("trt10", {"head": 16}, True),
        ("trt10", {"head": 8}, False),
        ("trt10", {"head": 80}, False),
        ("trt10", {"keys": 3072}, True),
        ("trt10", {"keys": 3073}, False),
        ("trt10", {"probabilities": False}, False),
        ("trt10", {"after": False}, False),
    ],
)
def test_fp8_attention_is_one_layer(
    g: Graph, target: str, options: dict[str, Any], is_fused: bool
) -> None:
    prediction = predict(g.model(fp8_attention(g, **options)), target)
    layers = [x for x in prediction.layers if {"scores", "softmax", "values"} & {*x.nodes}]
    assert len(layers) == (1 if is_fused else 3)
    scores = prediction.convolution("scores")
    assert scores.is_fp8 and scores.evidence == Evidence.ASSUMED
    if is_fused:
        assert {"scaled", "softmax", "values"} <= {*scores.fused}
        assert [str(edge.precision) for edge in layers[0].inputs] == ["FP8"] * 3
        assert scores.output == layers[0].outputs[0].precision == Precision.FP8
    codes = {f.code: f.message for f in prediction.findings}
    assert ("ATT-HEAD" in codes) != is_fused and "MATMUL-COMPUTED" not in codes
    assert "INT8" not in codes.get("ATT-HEAD", "")


def test_scores_with_another_consumer_are_written(g: Graph) -> None:
    output = fp8_attention(g)
    layers = predict(g.model(output, g.op("Abs", "scores:0", "abs")), "trt10", advice=False).layers
    assert len([x for x in layers if {"scores", "values"} & {*x.nodes}]) == 2
