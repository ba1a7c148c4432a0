import pytest

from qdqtool.evidence import Evidence
from qdqtool.trt.passes.dq_q_fusion import DqQFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass, weakest_evidence


@pytest.mark.parametrize(
    ("others", "evidence"), [([], Evidence.SEEN), (["a.DQ:0"], Evidence.ASSUMED)]
)
def test_equal_scales_cancel(g: Graph, others: list[str], evidence: Evidence) -> None:
    # A DQ with another consumer stays.
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    result = run_pass(g.model(g.conv(x, "c"), *(g.op("Neg", t, "n") for t in others)), DqQFusion)
    assert result.lines == [("Running", "a.DQ")]
    dq = result.layer("c.in.DQ")
    assert dq.data.producer is result.layer("a.Q")
    assert dq.data.name == "c.in.Q:0"  # as Concat_779_1400_clone_0 of bevfusion-camera-orin-trt8502
    assert result.has_layer("a.DQ") is bool(others) and not result.has_layer("c.in.Q")
    assert weakest_evidence(dq) == evidence


@pytest.mark.parametrize(
    ("build", "reasons"),
    [
        pytest.param(
            lambda g: [g.conv(g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a", 0.2), "c")],
            [("c.in.Q", "scales-differ")],
            id="other scale",
        ),
        pytest.param(
            lambda g: [g.q(g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a"), "out")],
            [],
            id="Q of a network output",
        ),
        pytest.param(
            lambda g: [g.conv(g.relu(g.input(1, 3, 4, 4), "r"), "c")],
            [],
            id="Q after a computed tensor",
        ),
    ],
)
def test_other_pairs_stay(g: Graph, build: Build, reasons: list[tuple[str, str]]) -> None:
    result = run_pass(g.model(*build(g)), DqQFusion)
    assert (result.lines, result.reasons) == ([], reasons)
