from collections.abc import Callable

import pytest

from qdqtool.evidence import Evidence
from qdqtool.prediction import predict
from qdqtool.trt.passes.vanilla_swap_with_preceeding_dq import VanillaSwapWithPreceedingDQ
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass, weakest_evidence


def test_dqs_move_down_past_shuffles_of_gemm(g: Graph) -> None:
    result = run_pass(
        g.model(g.gemm(g.relu(g.input(1, 8), "r"), "Gemm_311", 8)), VanillaSwapWithPreceedingDQ
    )
    assert sorted(result.lines) == [
        ("Running", "Gemm_311.in.DQ"),
        ("Running", "Gemm_311.w.DQ"),
        ("Swapping", "Gemm_311.in.DQ", "reshape_before_Gemm_311"),
        ("Swapping", "Gemm_311.w.DQ", "transpose_before_Gemm_311"),
    ]
    assert [t.producer.name for t in result.layer("Gemm_311").inputs if t.producer] == [
        "Gemm_311.in.DQ",
        "Gemm_311.w.DQ",
    ]


def dequantized(g: Graph) -> str:
    return g.pair(g.relu(g.input(1, 3, 4, 4), "r"), "p")


@pytest.mark.parametrize(
    "build",
    [
        lambda g: g.pool(dequantized(g), "op"),
        lambda g: g.resize(dequantized(g), "op"),
        lambda g: g.slice(dequantized(g), "op", 0, 2),
        lambda g: g.reshape(dequantized(g), "op", 1, 48),
    ],
    ids=["MaxPool", "Resize", "Slice", "Reshape"],
)
def test_dq_moves_down_past_commuting_operator(g: Graph, build: Callable[[Graph], str]) -> None:
    # Documented: DQ moves forward over layers that commute with it.
    result = run_pass(g.model(g.op("Neg", build(g), "n")), VanillaSwapWithPreceedingDQ)
    assert result.lines == [("Running", "p.DQ"), ("Swapping", "p.DQ", "op")]
    assert result.layer("op").data.producer is result.layer("p.Q")
    assert weakest_evidence(result.layer("op")) == Evidence.DOCUMENTED


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [g.pool(dequantized(g), "op"), g.op("Neg", "p.DQ:0", "n")],
            id="second consumer",
        ),
        pytest.param(lambda g: [g.pool(dequantized(g), "op", "AveragePool")], id="AveragePool"),
        pytest.param(lambda g: [g.relu(dequantized(g), "op")], id="Relu"),
        pytest.param(lambda g: [g.add(dequantized(g), "p.DQ:0", "op")], id="Add"),
        pytest.param(
            lambda g: [
                g.op(
                    "Neg",
                    g.reshape(
                        g.pair(g.const("w", g.random.normal(0, 1, (8, 4))), "w", [0.1] * 8, axis=0),
                        "op",
                        4,
                        8,
                    ),
                    "n",
                )
            ],
            id="Reshape of channels with scales",
        ),
    ],
)
def test_dq_does_not_move(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), VanillaSwapWithPreceedingDQ).lines == []


def test_dq_with_several_consumers_is_reported(g: Graph) -> None:
    # No log shows whether a DQ is copied for each consumer: the outcome rests on an assumption.
    x = g.pair(g.relu(g.input(1, 4, 4, 4), "r"), "p")
    left, right = g.ops("Split", [x], "Split", count=2, axis=1)
    outputs = [g.conv(left, "a", scale=None), g.conv(right, "b", scale=None)]
    result = run_pass(g.model(*outputs), VanillaSwapWithPreceedingDQ)
    assert (result.lines, result.reasons) == ([], [("p.DQ", "many-consumers")])
    assert {c.name: c.evidence for c in predict(g.model(*outputs), advice=False).convolutions} == {
        "a": Evidence.ASSUMED,
        "b": Evidence.ASSUMED,
    }


@pytest.mark.parametrize(("perm", "axis"), [([3, 2, 0, 1], 0), ([2, 3, 0, 1], 1)])
def test_axis_of_scales_follows_transpose(g: Graph, perm: list[int], axis: int) -> None:
    # TensorFlow stores weights as HWIO with the output channels last.
    weights = g.pair(g.const("w", g.random.normal(0, 1, (3, 3, 4, 8))), "w", [0.1] * 8, axis=3)
    result = run_pass(
        g.model(g.op("Neg", g.op("Transpose", weights, "t", perm=perm), "n")),
        VanillaSwapWithPreceedingDQ,
    )
    assert result.lines == [("Running", "w.DQ"), ("Swapping", "w.DQ", "t")]
    assert result.layer("w.DQ").quant.axis == axis


def requantized_pool(g: Graph) -> list[str]:
    y = g.pool(g.pair(g.op("Sigmoid", g.input(1, 8, 8, 8), "before"), "p", 0.1), "pool")
    return [g.conv(y, "a", scale=0.2), g.conv(y, "b", k=1, scale=0.2)]


GRAPHS = {
    "VanillaSwapWithPreceedingDQ/requantized": (requantized_pool, "trt10"),
    "VanillaSwapWithPreceedingDQ/requantized-elsewhere": (requantized_pool, "10.3"),
}


@pytest.mark.parametrize(
    ("target", "conversions"),
    [
        ("trt8.5", ["p.Q", "p.DQ + a.in.Q"]),
        ("trt10", ["p.Q", "p.DQ_clone_0 + a.in.Q", "p.DQ_clone_1 + b.in.Q"]),
    ],
)
def test_dq_after_pool_is_copied_for_each_q(g: Graph, target: str, conversions: list[str]) -> None:
    # unet-resnet50-orinnano-trt10162: /pool/input_quantizer/DequantizeLinear_clone_0 + ...
    assert (
        predict(g.model(*requantized_pool(g)), target, advice=False).conversion_nodes == conversions
    )
