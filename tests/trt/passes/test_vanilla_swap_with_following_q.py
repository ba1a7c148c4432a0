import pytest
from onnx import TensorProto, helper

from qdqtool.trt.passes.vanilla_swap_with_following_q import VanillaSwapWithFollowingQ
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


def operator(g: Graph, op: str, x: str) -> str:
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
def test_q_moves_up_past_commuting_operator(g: Graph, op: str) -> None:
    between = operator(g, op, g.op("Sigmoid", g.input(1, 3, 4, 4), "before"))
    result = run_pass(g.model(g.op("Neg", g.pair(between, "p"), "n")), VanillaSwapWithFollowingQ)
    assert result.lines == [("Running", "op"), ("Swapping", "op", "p.Q")]
    # Names stay at their place: the Q writes the tensor that the operator wrote (yolo engine, /neck/Resize).
    assert result.layer("p.Q").out.name == between
    assert result.layer("p.Q").data.producer is result.layer("before")
    assert result.layer("op").out.name == "p.Q:0"


@pytest.mark.parametrize(
    ("op", "is_passed"),
    [("MaxPool", False), ("Resize", False), ("Slice", True), ("Transpose", True)],
)
def test_fp8_q_moves_up_past_operators_without_arithmetic(op: str, is_passed: bool) -> None:
    g = Graph(opset=19, fp8=True)
    between = operator(g, op, g.op("Sigmoid", g.input(1, 3, 4, 4), "before"))
    result = run_pass(
        g.model(g.op("Neg", g.pair(between, "p"), "n")), VanillaSwapWithFollowingQ, "trt10"
    )
    assert bool(result.lines) == is_passed != (("op", "not-commuting") in result.reasons)


def test_q_moves_up_past_chain(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "before")
    out = g.op("Neg", g.pair(g.reshape(g.pool(x, "pool"), "r", 1, 12), "p"), "n")
    assert run_pass(g.model(out), VanillaSwapWithFollowingQ).lines == [
        ("Running", "r"),
        ("Swapping", "r", "p.Q"),
        ("Running", "pool"),
        ("Swapping", "pool", "p.Q"),
    ]


def test_q_moves_up_past_linear_resize(g: Graph) -> None:
    # Resize_724 of bevfusion-camera-orin-trt8502 is linear. A Q passes it although the values change.
    out = g.op("Neg", g.pair(operator(g, "linear Resize", g.input(1, 3, 4, 4)), "p"), "n")
    result = run_pass(g.model(out), VanillaSwapWithFollowingQ)
    assert result.lines == [("Running", "op"), ("Swapping", "op", "p.Q")]
    assert [s.op for s in result.layer("p.Q").path.steps()] == ["Resize"]


def test_second_consumer_is_reported(g: Graph) -> None:
    # yolo-resnet18-orin-trt8502 never swaps /backbone/maxpool/MaxPool, because an Add reads it as
    # well.
    pooled = g.pool(g.input(1, 3, 4, 4), "MaxPool")
    outputs = [g.op("Neg", g.pair(pooled, "p"), "n"), g.add(pooled, pooled, "Add")]
    result = run_pass(g.model(*outputs), VanillaSwapWithFollowingQ)
    assert (result.lines, result.reasons) == ([], [("MaxPool", "many-consumers")])
    assert ("Add", "Add") in [(r.node, r.op) for r in result.records[0].consumers]


def test_pad_with_other_value_is_reported(g: Graph) -> None:
    pads = g.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], "int64")
    padded = g.op("Pad", [g.input(1, 3, 4, 4), pads, g.const("value", 1.0)], "op")
    result = run_pass(g.model(g.op("Neg", g.pair(padded, "p"), "n")), VanillaSwapWithFollowingQ)
    assert (result.lines, result.reasons) == ([], [("op", "not-commuting")])


@pytest.mark.parametrize(
    ("from_", "swaps"),
    [(TensorProto.FLOAT16, True), (TensorProto.UINT8, False), (TensorProto.INT32, False)],
    ids=["float16", "uint8", "int32"],
)
def test_q_moves_up_past_cast_from_float_only(g: Graph, from_: int, swaps: bool) -> None:
    # A Q reads floats, not an image's bytes.
    g.inputs.append(helper.make_tensor_value_info("i", from_, [1, 3, 4, 4]))
    out = g.op("Neg", g.pair(g.op("Cast", "i", "cast", to=TensorProto.FLOAT), "p"), "n")
    assert bool(run_pass(g.model(out), VanillaSwapWithFollowingQ).lines) is swaps


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [
                g.op("Neg", g.pair(operator(g, "AveragePool", g.input(1, 3, 4, 4)), "p"), "n")
            ],
            id="AveragePool",
        ),
        pytest.param(
            lambda g: [g.op("Neg", g.pair(operator(g, "Relu", g.input(1, 3, 4, 4)), "p"), "n")],
            id="Relu",
        ),
        pytest.param(
            lambda g: [
                g.op(
                    "Neg",
                    g.pair(operator(g, "Reshape", g.input(1, 3, 4, 4)), "p", [0.1] * 48, axis=1),
                    "n",
                )
            ],
            id="scale per channel",
        ),
    ],
)
def test_q_does_not_move(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), VanillaSwapWithFollowingQ).lines == []
