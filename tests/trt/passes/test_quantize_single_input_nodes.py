import pytest

from qdqtool.trt.passes.quantize_single_input_nodes import QuantizeSingleInputNodes
from tests.trt.builder import Graph
from tests.trt.passes.step import end_of, run_pass


def pooled(op: str, before: bool, after: bool, fp8: bool = False) -> Graph:
    g = Graph(opset=19 if fp8 else 13, fp8=fp8)
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    x = g.pair(x, "a") if before else x
    x = g.op("GlobalAveragePool", x, "pool") if op == "GlobalAveragePool" else g.pool(x, "pool", op)
    g.op("Tanh", g.pair(x, "b") if after else x, "end")
    return g


@pytest.mark.parametrize("op", ["GlobalAveragePool", "AveragePool"])
def test_average_pooling_between_pairs_runs_in_int8(op: str) -> None:
    result = run_pass(pooled(op, True, True).model("end:0"), QuantizeSingleInputNodes)
    assert result.lines == [("Running", "pool"), ("Removing", "b.Q"), ("Removing", "a.DQ")]
    layer = result.layer("pool")
    assert layer.int8 and layer.int8_out and layer.out.name == "b.Q:0"


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (True, False, [("pool", "pooling-one-side", True)]),
        (
            False,
            True,
            [("pool", "pooling-one-side", False)],
        ),  # resnet18-a100-qat: a Reformat before fc
        (False, False, []),
    ],
)
def test_pooling_quantized_on_one_side_is_reported(
    before: bool, after: bool, reasons: list[tuple[str, str, bool]]
) -> None:
    result = run_pass(
        pooled("GlobalAveragePool", before, after).model("end:0"), QuantizeSingleInputNodes
    )
    assert result.lines == []
    assert [(r.node, r.key, r.quantized_input) for r in result.records] == reasons


@pytest.mark.parametrize(
    ("op", "fp8", "target"), [("MaxPool", False, "trt8.5"), ("AveragePool", True, "trt10")]
)
def test_max_pool_and_pooling_of_fp8_stay(op: str, fp8: bool, target: str) -> None:
    # A MaxPool is left to Q motion.
    result = run_pass(
        pooled(op, True, True, fp8).model("end:0"), QuantizeSingleInputNodes, target=target
    )
    assert (result.layer("pool").int8, result.lines, result.reasons) == (False, [], [])


GRAPHS = {
    "QuantizeSingleInputNodes/fp8": (end_of(pooled("AveragePool", True, True, fp8=True)), "trt10")
}
