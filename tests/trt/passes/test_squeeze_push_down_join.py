"""SqueezePushDownJoin: resnet18-qat-rtx2000-trt8510, lines 2571 to 2573."""

import pytest
from onnx import helper

from qdqtool.prediction import predict
from qdqtool.trt.passes.squeeze_push_down_join import SqueezePushDownJoin
from qdqtool.trt.targets import target_named
from qdqtool.types import Evidence, Precision
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_bias_of_a_gemm(g: Graph) -> None:
    found = step(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8)), SqueezePushDownJoin)
    assert found.rows[0] == ("Running", "reshape_after_Gemm_311")
    kind, subject, rest = found.rows[1]
    assert (kind, subject) == ("SqueezePushDown kSQUEEZE_JOIN", "Gemm_311")
    assert rest.startswith("reshape_after_Gemm_311 --> (Unnamed Layer* ") and rest.endswith(
        "[ElementWise]"
    )
    assert not found.has("reshape_after_Gemm_311")
    assert any(
        layer.name.startswith("copied_squeeze_after_") for layer in found.network.layers.values()
    )
    g = Graph()
    found = step(g.model(g.gemm(g.input(1, 8), "fc", 8, bias=False)), SqueezePushDownJoin)
    assert found.rows == []
    assert found.has("reshape_after_fc")
    g = Graph()
    computed = g.op("Softmax", g.input(1, 4, name="y"), "soft")
    out = g.add(g.gemm(g.input(1, 8), "fc", 8, bias=False), computed, "add")
    assert step(g.model(out), SqueezePushDownJoin).rows == []
    g = Graph()
    out = g.op("Softmax", g.gemm(g.input(1, 8), "fc", 8, bias=False), "s")
    assert step(g.model(out), SqueezePushDownJoin).rows == []
    g = Graph()
    # The bias is then added by a second layer, which the shuffle must not pass
    out = g.gemm(g.input(1, 8), "fc", 8, bias=False)
    found = step(
        g.model(g.op("Add", [out, g.const("b", [[1.0] * 4])], "add"), g.relu(out, "r")),
        SqueezePushDownJoin,
    )
    assert found.rows == []


@pytest.mark.parametrize("first", [True, False])
def test_the_bias_may_be_either_operand(g: Graph, first: bool) -> None:
    """The other operand keeps its place and gets the rank of what the convolution writes."""
    out, bias = g.gemm(g.input(1, 8), "fc", 8, bias=False), g.const("b", [[1.0] * 4])
    found = step(
        g.model(g.op("Add", [bias, out] if first else [out, bias], "add")), SqueezePushDownJoin
    )
    assert found.rows == [
        ("Running", "reshape_after_fc"),
        ("SqueezePushDown kSQUEEZE_JOIN", "fc", "reshape_after_fc --> add"),
    ]
    operands = [t.producer.name for t in found.layer("add").inputs if t.producer is not None]
    assert [name.partition("_after_")[0] for name in operands] == (
        ["unsqueeze_node", "fc"] if first else ["fc", "unsqueeze_node"]
    )
    behind = found.layer("copied_squeeze_after_add")
    assert behind.data.producer is found.layer("add") and behind.out.source == "add:0"
    assert (behind.shuffling.after_matmul, behind.shuffling.pushed) == (True, True)
    assert SqueezePushDownJoin(target_named("trt8.5")).run(found.network).events == [], (
        "pushed once"
    )


@pytest.mark.parametrize(("scale", "moves"), [(0.1, True), ([0.1, 0.2, 0.3, 0.4], False)])
def test_a_q_of_one_scale_behind_moves_up_past_the_reshape(
    g: Graph, scale: float | list[float], moves: bool
) -> None:
    x = g.q(g.gemm(g.input(1, 8), "fc", 8), "q", scale, axis=None if moves else 1)
    found = step(g.model(g.dq(x, "dq", scale, axis=None if moves else 1)), SqueezePushDownJoin)
    swapped = [
        row for row in found.rows if row[0].startswith("VanillaSwapWithFollowingQ: Swapping")
    ]
    assert bool(swapped) is moves
    squeeze = next(
        layer for layer in found.network.layers.values() if layer.name.startswith("copied_squeeze")
    )
    above = squeeze.data.producer
    assert above is not None and (above.name == "q") is moves


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("matmul", [True, False])
def test_a_hidden_fully_connected_layer_writes_int8(g: Graph, relu: bool, matmul: bool) -> None:
    """Law 2 of the placement laws: bias and Relu folded, its tensor has one reader, a Q (VGG, AlexNet)."""
    x = g.gemm(g.input(1, 8), "fc1", 8, 8, bias=not matmul)
    if matmul:
        g.nodes[-1] = helper.make_node("MatMul", g.nodes[-1].input[:2], ["fc1:0"], "fc1")
        x = g.add("fc1:0", g.const("b", [0.5] * 8), "bias")
    x = g.relu(x, "r") if relu else x
    prediction = predict(g.model(g.gemm(x, "fc2", 8)), "trt8.5")
    first, last = prediction.convolutions
    assert (first.output, last.output) == (Precision.INT8, Precision.FLOAT)
    assert first.evidence == Evidence.ASSUMED  # no published engine has such a layer
    assert ("r" in first.fused) is relu
    assert prediction.conversion_nodes == ["fc1.in.Q"]


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu"])
def test_an_activation_in_place_of_the_bias(g: Graph, activation: str) -> None:
    """Law 2 again, no bias between the product and its activation."""
    x = g.gemm(g.input(1, 8), "fc1", 8, 8, bias=False)
    prediction = predict(g.model(g.gemm(g.op(activation, x, "act"), "fc2", 8)), "trt8.5")
    first, last = prediction.convolutions
    assert (first.output, last.output) == (Precision.INT8, Precision.FLOAT)
    assert first.fused == ["act"]
    assert first.evidence == Evidence.ASSUMED
    assert prediction.conversion_nodes == ["fc1.in.Q"]
