from collections.abc import Callable

import pytest

from qdqtool.ir.modelfile import load
from qdqtool.reasons.scales import ConcatScales
from qdqtool.trt import importer, pipeline
from qdqtool.trt.passes.split_q_across_preceding_fan_in import SplitQAcrossPrecedingFanIn
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


def concat_of_two(g: Graph) -> str:
    first = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    return g.concat([first, g.op("Tanh", g.input(1, 3, 4, 4, name="y"), "t")], "Concat")


def test_each_input_gets_a_clone(g: Graph) -> None:
    result = run_pass(
        g.model(g.op("Neg", g.pair(concat_of_two(g), "p"), "n")), SplitQAcrossPrecedingFanIn
    )
    assert result.lines == [("Running", "Concat")]
    concat = result.layer("Concat")
    assert [t.producer.name for t in concat.inputs if t.producer] == ["p.Q_clone_0", "p.Q_clone_1"]
    # Names as in the yolo engine listing: /neck/Concat_/neck/Resize_output_0_clone_0, and the Q's output.
    assert [t.name for t in concat.inputs] == ["Concat_s:0_clone_0", "Concat_t:0_clone_1"]
    assert concat.out.name == "p.Q:0" and not result.has_layer("p.Q")


def test_nested_concat_gets_nested_clones(g: Graph) -> None:
    # NVIDIA/TensorRT issue 2131: QuantizeLinear_7751_clone_1_clone_2.
    outer = g.concat([g.op("Abs", g.input(1, 3, 4, 4, name="z"), "abs"), concat_of_two(g)], "Outer")
    network = importer.build(load(g.model(g.op("Neg", g.pair(outer, "p"), "n"))))
    pipeline.run(network, target_named("trt8.5"))
    names = {layer.name for layer in network.layers.values()}
    assert {"p.Q_clone_0", "p.Q_clone_1_clone_0", "p.Q_clone_1_clone_1"} <= names


def two_qs(g: Graph) -> list[str]:
    tensor = concat_of_two(g)
    return [g.op("Neg", g.pair(tensor, n, s), f"n{n}") for n, s in (("p", 0.1), ("q", 0.2))]


@pytest.mark.parametrize(
    ("build", "consumers"),
    [
        pytest.param(lambda g: [concat_of_two(g)], set(), id="no Q"),
        pytest.param(
            lambda g: [g.op("Neg", g.pair(concat_of_two(g), "p", [0.1] * 6, axis=1), "n")],
            set(),
            id="scales per channel",
        ),
        pytest.param(
            lambda g: [
                g.op("Neg", g.pair(concat_of_two(g), "p"), "n"),
                g.op("Abs", "Concat:0", "a"),
            ],
            {("p.Q", "QuantizeLinear"), ("a", "Abs")},
            id="float consumer",
        ),
        pytest.param(two_qs, {("p.Q", "QuantizeLinear"), ("q.Q", "QuantizeLinear")}, id="second Q"),
    ],
)
def test_q_does_not_move(g: Graph, build: Build, consumers: set[tuple[str, str]]) -> None:
    result = run_pass(g.model(*build(g)), SplitQAcrossPrecedingFanIn)
    reasons = [("Concat", "output-not-only-quantized")] if consumers else []
    assert (result.lines, result.reasons) == ([], reasons)
    assert {(c.node, c.op) for r in result.records for c in r.consumers} == consumers


@pytest.mark.parametrize(
    ("first", "scales"),
    [
        pytest.param(lambda g, x: [g.pair(x, "a", 0.3)], [[0.3, None]], id="pair"),
        pytest.param(
            lambda g, x: [x, g.op("Neg", g.pair(x, "a", 0.3), "m"), g.op("Abs", x, "abs")],
            [[0.3, None]],
            id="second Q",
        ),
        pytest.param(
            lambda g, x: [x, g.op("Neg", g.pair(x, "a", 0.1), "m"), g.op("Abs", x, "abs")],
            [],
            id="same scale",
        ),
        pytest.param(lambda g, x: [x], [], id="plain"),
        pytest.param(lambda g, x: [x, g.op("Abs", x, "abs")], [], id="float consumer"),
    ],
)
def test_report_names_scales_of_concat_inputs(
    g: Graph, first: Callable[[Graph, str], list[str]], scales: list[list[float | None]]
) -> None:
    # An input has another scale if it comes from a DQ or another Q consumes it.
    x, *outputs = first(g, g.op("Sigmoid", g.input(1, 3, 4, 4), "s"))
    joined = g.concat([x, g.op("Tanh", g.input(1, 3, 4, 4, name="y"), "t")], "Concat")
    network = importer.build(load(g.model(g.op("Neg", g.pair(joined, "p", 0.1), "n"), *outputs)))
    network.rank_layers()
    reasons = []
    for _ in range(2):  # first the Q moves up; then its scale is compared with those of the inputs
        reasons += SplitQAcrossPrecedingFanIn(target_named("trt8.5")).run(network).reasons
    assert [
        [None if p is None else round(float(p), 6) for p in r.parts]
        for r in reasons
        if isinstance(r, ConcatScales)
    ] == scales
