import pytest

from qdqtool.evidence import Evidence
from qdqtool.trt.passes.dq_q_fusion import DqQFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass, weakest_evidence


def test_equal_scales_cancel(g: Graph) -> None:
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    result = run_pass(g.model(g.conv(x, "c")), DqQFusion)
    assert result.lines == [("Running", "a.DQ")]
    dq = result.layer("c.in.DQ")
    assert dq.data.producer is result.layer("a.Q")
    assert dq.data.name == "c.in.Q:0"  # as Concat_779_1400_clone_0 of bevfusion-camera-orin-trt8502
    assert not result.has_layer("a.DQ") and not result.has_layer("c.in.Q")
    assert weakest_evidence(dq) == Evidence.SEEN


def test_dq_with_other_consumer_stays(g: Graph) -> None:
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    result = run_pass(g.model(g.conv(x, "c"), g.op("Neg", x, "n")), DqQFusion)
    assert result.lines == [("Running", "a.DQ")]
    assert result.has_layer("a.DQ") and not result.has_layer("c.in.Q")
    assert weakest_evidence(result.layer("c.in.DQ")) == Evidence.ASSUMED


def test_different_scales_are_reported(g: Graph) -> None:
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a", 0.2)
    result = run_pass(g.model(g.conv(x, "c")), DqQFusion)
    assert (result.lines, result.reasons) == ([], [("c.in.Q", "scales-differ")])


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [g.q(g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a"), "out")],
            id="Q of a network output",
        ),
        pytest.param(
            lambda g: [g.conv(g.relu(g.input(1, 3, 4, 4), "r"), "c")],
            id="Q after a computed tensor",
        ),
    ],
)
def test_other_pairs_stay(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), DqQFusion).lines == []
