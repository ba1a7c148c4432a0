"""DqQFusion: both BEVFusion logs; scales decide."""

from qdqtool.trt.passes.dq_q_fusion import DqQFusion
from qdqtool.types import Evidence
from tests.trt.builder import Graph
from tests.trt.passes.step import evidence_of, step


def test_equal_scales_and_what_stays(g: Graph) -> None:
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    found = step(g.model(g.conv(x, "c")), DqQFusion)
    assert found.rows == [("Running", "a.DQ")]
    reader = found.layer("c.in.DQ")
    assert reader.data.producer is found.layer("a.Q")
    assert (
        reader.data.name == "c.in.Q:0"
    )  # as Concat_779_1400_clone_0 of bevfusion-camera-orin-trt8502
    assert not found.has("a.DQ") and not found.has("c.in.Q")
    assert evidence_of(reader) == Evidence.SEEN
    g = Graph()
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    found = step(g.model(g.conv(x, "c"), g.op("Neg", x, "n")), DqQFusion)
    assert found.rows == [("Running", "a.DQ")]
    assert found.has("a.DQ") and not found.has("c.in.Q")
    assert evidence_of(found.layer("c.in.DQ")) == Evidence.ASSUMED
    g = Graph()
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a", 0.2)
    found = step(g.model(g.conv(x, "c")), DqQFusion)
    assert (found.rows, found.reasons) == ([], [("c.in.Q", "scales-differ")])
    g = Graph()
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    assert step(g.model(g.q(x, "out")), DqQFusion).rows == []
    g = Graph()
    assert step(g.model(g.conv(g.relu(g.input(1, 3, 4, 4), "r"), "c")), DqQFusion).rows == []
