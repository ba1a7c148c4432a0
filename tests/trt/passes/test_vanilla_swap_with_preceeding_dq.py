"""VanillaSwapWithPreceedingDQ: resnet18-qat-rtx2000-trt8510, lines 2533 to 2536."""

import pytest

from qdqtool.prediction import predict
from qdqtool.trt.passes.vanilla_swap_with_preceeding_dq import VanillaSwapWithPreceedingDQ
from qdqtool.types import Evidence
from tests.trt.builder import Graph
from tests.trt.passes.step import evidence_of, step


def test_around_a_gemm(g: Graph) -> None:
    found = step(
        g.model(g.gemm(g.relu(g.input(1, 8), "r"), "Gemm_311", 8)), VanillaSwapWithPreceedingDQ
    )
    assert sorted(found.rows) == [
        ("Running", "Gemm_311.in.DQ"),
        ("Running", "Gemm_311.w.DQ"),
        ("Swapping", "Gemm_311.in.DQ", "reshape_before_Gemm_311"),
        ("Swapping", "Gemm_311.w.DQ", "transpose_before_Gemm_311"),
    ]
    gemm = found.layer("Gemm_311")
    assert [t.producer.name for t in gemm.inputs if t.producer] == [
        "Gemm_311.in.DQ",
        "Gemm_311.w.DQ",
    ]


@pytest.mark.parametrize("op", ["MaxPool", "Resize", "Slice", "Reshape"])
def test_commuting_operators(g: Graph, op: str) -> None:
    """Documented: DQ moves forward over layers that commute with it."""
    x = g.pair(g.relu(g.input(1, 3, 4, 4), "r"), "p")
    made = {
        "MaxPool": lambda: g.pool(x, "op"),
        "Resize": lambda: g.resize(x, "op"),
        "Slice": lambda: g.slice(x, "op", 0, 2),
        "Reshape": lambda: g.reshape(x, "op", 1, 48),
    }[op]()
    found = step(g.model(g.op("Neg", made, "n")), VanillaSwapWithPreceedingDQ)
    assert found.rows == [("Running", "p.DQ"), ("Swapping", "p.DQ", "op")]
    assert found.layer("op").data.producer is found.layer("p.Q")
    assert evidence_of(found.layer("op")) == Evidence.DOCUMENTED


@pytest.mark.parametrize("case", ["second-reader", "average-pool", "relu", "add"])
def test_left_alone(g: Graph, case: str) -> None:
    x = g.pair(g.relu(g.input(1, 3, 4, 4), "r"), "p")
    if case == "second-reader":
        outputs = [g.pool(x, "op"), g.op("Neg", x, "n")]
    elif case == "average-pool":
        outputs = [g.pool(x, "op", "AveragePool")]
    else:
        outputs = [g.relu(x, "op") if case == "relu" else g.add(x, x, "op")]
    assert step(g.model(*outputs), VanillaSwapWithPreceedingDQ).rows == []


def test_several_readers_are_refused(g: Graph) -> None:
    """No log shows that a DQ is copied for each reader: what is behind them rests on an assumption."""
    x = g.pair(g.relu(g.input(1, 4, 4, 4), "r"), "p")
    left, right = g.ops("Split", [x], "Split", count=2, axis=1)
    outputs = [g.conv(left, "a", scale=None), g.conv(right, "b", scale=None)]
    found = step(g.model(*outputs), VanillaSwapWithPreceedingDQ)
    assert (found.rows, found.reasons) == ([], [("p.DQ", "many-consumers")])
    assert {c.name: c.evidence for c in predict(g.model(*outputs), advice=False).convolutions} == {
        "a": Evidence.ASSUMED,
        "b": Evidence.ASSUMED,
    }


@pytest.mark.parametrize(("perm", "axis"), [([3, 2, 0, 1], 0), ([2, 3, 0, 1], 1)])
def test_channels_follow_a_transpose(g: Graph, perm: list[int], axis: int) -> None:
    """TensorFlow keeps weights as HWIO; the output channels, axis 3, become the axis that the Transpose says."""
    weights = g.pair(g.const("w", g.random.normal(0, 1, (3, 3, 4, 8))), "w", [0.1] * 8, axis=3)
    found = step(
        g.model(g.op("Neg", g.op("Transpose", weights, "t", perm=perm), "n")),
        VanillaSwapWithPreceedingDQ,
    )
    assert found.rows == [("Running", "w.DQ"), ("Swapping", "w.DQ", "t")]
    quant = found.layer("w.DQ").quant
    assert quant is not None and quant.axis == axis
    g = Graph()
    weights = g.pair(g.const("w", g.random.normal(0, 1, (8, 4))), "w", [0.1] * 8, axis=0)
    assert (
        step(
            g.model(g.op("Neg", g.reshape(weights, "r", 4, 8), "n")), VanillaSwapWithPreceedingDQ
        ).rows
        == []
    )
