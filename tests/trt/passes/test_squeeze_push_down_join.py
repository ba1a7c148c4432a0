import pytest
from onnx import helper

from qdqtool.evidence import Evidence
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt.passes.squeeze_push_down_join import SqueezePushDownJoin
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


def test_reshape_moves_past_gemm_bias(g: Graph) -> None:
    result = run_pass(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8)), SqueezePushDownJoin)
    assert result.lines[0] == ("Running", "reshape_after_Gemm_311")
    kind, subject, rest = result.lines[1]
    assert (kind, subject) == ("SqueezePushDown kSQUEEZE_JOIN", "Gemm_311")
    assert rest.startswith("reshape_after_Gemm_311 --> (Unnamed Layer* ") and rest.endswith(
        "[ElementWise]"
    )
    assert not result.has_layer("reshape_after_Gemm_311")
    assert any(
        layer.name.startswith("copied_squeeze_after_") for layer in result.network.layers.values()
    )


@pytest.mark.parametrize("first", [True, False])
def test_bias_may_be_either_operand(g: Graph, first: bool) -> None:
    # The other operand gets the rank that the convolution writes.
    out, bias = g.gemm(g.input(1, 8), "fc", 8, bias=False), g.const("b", [[1.0] * 4])
    result = run_pass(
        g.model(g.op("Add", [bias, out] if first else [out, bias], "add")), SqueezePushDownJoin
    )
    assert result.lines == [
        ("Running", "reshape_after_fc"),
        ("SqueezePushDown kSQUEEZE_JOIN", "fc", "reshape_after_fc --> add"),
    ]
    operands = [t.producer.name for t in result.layer("add").inputs if t.producer is not None]
    assert [name.partition("_after_")[0] for name in operands] == (
        ["unsqueeze_node", "fc"] if first else ["fc", "unsqueeze_node"]
    )
    squeeze = result.layer("copied_squeeze_after_add")
    assert squeeze.data.producer is result.layer("add") and squeeze.out.source == "add:0"
    assert (squeeze.shuffling.after_matmul, squeeze.shuffling.is_pushed_down) == (True, True)
    assert SqueezePushDownJoin(target_named("trt8.5")).run(result.network).events == [], (
        "pushed once"
    )


@pytest.mark.parametrize(("scale", "moves"), [(0.1, True), ([0.1, 0.2, 0.3, 0.4], False)])
def test_q_moves_up_past_reshape_if_per_tensor(
    g: Graph, scale: float | list[float], moves: bool
) -> None:
    x = g.q(g.gemm(g.input(1, 8), "fc", 8), "q", scale, axis=None if moves else 1)
    result = run_pass(g.model(g.dq(x, "dq", scale, axis=None if moves else 1)), SqueezePushDownJoin)
    assert ("VanillaSwapWithFollowingQ: Swapping" in {line[0] for line in result.lines}) is moves
    squeeze = next(
        layer for layer in result.network.layers.values() if layer.name.startswith("copied_squeeze")
    )
    assert (squeeze.data.producer.name == "q") is moves


@pytest.mark.parametrize(
    ("bias", "activation"),
    [
        ("in the Gemm", "Relu"),
        ("in the Gemm", ""),
        ("Add after a MatMul", "Relu"),
        ("Add after a MatMul", ""),
        ("", "Relu"),
        ("", "LeakyRelu"),
    ],
)
def test_hidden_gemm_writes_int8(g: Graph, activation: str, bias: str) -> None:
    # Bias and activation are folded, and a Q is the only consumer (VGG, AlexNet).
    x = g.gemm(g.input(1, 8), "fc1", 8, 8, bias=bias == "in the Gemm")
    if bias == "Add after a MatMul":
        g.nodes[-1] = helper.make_node("MatMul", g.nodes[-1].input[:2], ["fc1:0"], "fc1")
        x = g.add("fc1:0", g.const("b", [0.5] * 8), "bias")
    x = g.op(activation, x, "act") if activation else x
    prediction = predict(g.model(g.gemm(x, "fc2", 8)), "trt8.5")
    first, last = prediction.convolutions
    assert (first.output, last.output) == (Precision.INT8, Precision.FLOAT)
    assert first.evidence == Evidence.ASSUMED  # no published engine has such a layer
    assert ("act" in first.fused) is bool(activation)
    assert prediction.conversion_nodes == ["fc1.in.Q"]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda g: [g.gemm(g.input(1, 8), "fc", 8, bias=False)], id="no bias"),
        pytest.param(
            lambda g: [
                g.add(
                    g.gemm(g.input(1, 8), "fc", 8, bias=False),
                    g.op("Softmax", g.input(1, 4, name="y"), "soft"),
                    "add",
                )
            ],
            id="Add of a computed tensor",
        ),
        pytest.param(
            lambda g: [g.op("Softmax", g.gemm(g.input(1, 8), "fc", 8, bias=False), "s")],
            id="Softmax",
        ),
        pytest.param(
            lambda g: [
                g.op(
                    "Add",
                    [g.gemm(g.input(1, 8), "fc", 8, bias=False), g.const("b", [[1.0] * 4])],
                    "add",
                ),
                g.relu("fc:0", "r"),
            ],
            id="second consumer",
        ),
    ],
)
def test_reshape_does_not_move(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), SqueezePushDownJoin).lines == []
