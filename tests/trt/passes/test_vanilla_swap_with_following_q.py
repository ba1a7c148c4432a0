"""VanillaSwapWithFollowingQ: Resize (yolo 5229), MaxPool and Flatten (resnet18 lines 2539 and 2565), Slice (yolov8)."""

import pytest
from onnx import TensorProto, helper

from qdqtool.trt.passes.vanilla_swap_with_following_q import VanillaSwapWithFollowingQ
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def made(g: Graph, op: str, x: str) -> str:
    return {
        "MaxPool": lambda: g.pool(x, "op"),
        "Resize": lambda: g.resize(x, "op"),
        "Slice": lambda: g.slice(x, "op", 0, 2),
        "Flatten": lambda: g.op("Flatten", x, "op"),
        "Reshape": lambda: g.reshape(x, "op", 1, 48),
        "Transpose": lambda: g.op("Transpose", x, "op", perm=[0, 2, 3, 1]),
        "AveragePool": lambda: g.pool(x, "op", "AveragePool"),
        "linear Resize": lambda: g.resize(x, "op", mode="linear"),
        "Relu": lambda: g.relu(x, "op"),
    }[op]()


@pytest.mark.parametrize("op", ["MaxPool", "Resize", "Slice", "Flatten", "Reshape", "Transpose"])
def test_commuting_operators(g: Graph, op: str) -> None:
    between = made(g, op, g.op("Sigmoid", g.input(1, 3, 4, 4), "before"))
    out = g.op("Neg", g.pair(between, "p"), "n")
    found = step(g.model(out), VanillaSwapWithFollowingQ)
    assert found.rows == [("Running", "op"), ("Swapping", "op", "p.Q")]
    # Names stay with the position: what the operator wrote is now what the Q writes (yolo engine, /neck/Resize).
    assert found.layer("p.Q").out.name == between
    assert found.layer("p.Q").data.producer is found.layer("before")
    assert found.layer("op").out.name == "p.Q:0"


def test_chains_and_linear_resizes(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "before")
    out = g.op("Neg", g.pair(g.reshape(g.pool(x, "pool"), "r", 1, 12), "p"), "n")
    found = step(g.model(out), VanillaSwapWithFollowingQ)
    assert found.rows == [
        ("Running", "r"),
        ("Swapping", "r", "p.Q"),
        ("Running", "pool"),
        ("Swapping", "pool", "p.Q"),
    ]
    g = Graph()
    # Resize_724 of bevfusion-camera-orin-trt8502 is linear: TensorRT goes by the operator, not by exactness
    out = g.op("Neg", g.pair(made(g, "linear Resize", g.input(1, 3, 4, 4)), "p"), "n")
    found = step(g.model(out), VanillaSwapWithFollowingQ)
    assert found.rows == [("Running", "op"), ("Swapping", "op", "p.Q")]
    assert [s.op for s in found.layer("p.Q").passed.steps()] == ["Resize"]


def test_second_reader_is_refused(g: Graph) -> None:
    """/backbone/maxpool/MaxPool of yolo-resnet18-orin-trt8502 is read by an Add as well: never swapped."""
    pooled = g.pool(g.input(1, 3, 4, 4), "MaxPool")
    outputs = [g.op("Neg", g.pair(pooled, "p"), "n"), g.add(pooled, pooled, "Add")]
    found = step(g.model(*outputs), VanillaSwapWithFollowingQ)
    assert (found.rows, found.reasons) == ([], [("MaxPool", "many-consumers")])
    assert ("Add", "Add") in [(r.node, r.op) for r in found.refusals[0].readers]
    g = Graph()
    pads = g.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], "int64")
    padded = g.op("Pad", [g.input(1, 3, 4, 4), pads, g.const("value", 1.0)], "op")
    found = step(g.model(g.op("Neg", g.pair(padded, "p"), "n")), VanillaSwapWithFollowingQ)
    assert (found.rows, found.reasons) == ([], [("op", "not-commuting")])


@pytest.mark.parametrize("op", ["AveragePool", "Relu"])
def test_operators_that_compute(g: Graph, op: str) -> None:
    out = g.op("Neg", g.pair(made(g, op, g.input(1, 3, 4, 4)), "p"), "n")
    assert step(g.model(out), VanillaSwapWithFollowingQ).rows == []
    g = Graph()
    out = g.op("Neg", g.pair(made(g, "Reshape", g.input(1, 3, 4, 4)), "p", [0.1] * 48, axis=1), "n")
    assert step(g.model(out), VanillaSwapWithFollowingQ).rows == []


@pytest.mark.parametrize(
    ("from_", "swaps"),
    [(TensorProto.FLOAT16, True), (TensorProto.UINT8, False), (TensorProto.INT32, False)],
    ids=["float16", "uint8", "int32"],
)
def test_cast(g: Graph, from_: int, swaps: bool) -> None:
    """A Q reads floats: it cannot move in front of a Cast from an image's bytes."""
    g.inputs.append(helper.make_tensor_value_info("i", from_, [1, 3, 4, 4]))
    out = g.op("Neg", g.pair(g.op("Cast", "i", "cast", to=TensorProto.FLOAT), "p"), "n")
    assert bool(step(g.model(out), VanillaSwapWithFollowingQ).rows) is swaps
