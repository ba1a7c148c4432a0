"""HorizontalMergeQNodes: Qs on one tensor with one scale."""

import numpy as np
import pytest

from qdqtool.model.modelfile import load
from qdqtool.trt.outcome import simulate
from qdqtool.trt.passes.horizontal_merge_q_nodes import HorizontalMergeQNodes
from qdqtool.trt.passes.split_q_across_preceding_fan_in import SplitQAcrossPrecedingFanIn
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def two(second: float, tail: str = "Neg") -> Graph:
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    g.op("Neg", g.pair(x, "a", 0.1), "na")
    g.op(tail, g.pair(x, "b", second), "nb")
    return g


def test_scales_that_differ_or_are_equal() -> None:
    """resnet18-qat-rtx2000-trt8510, line 2541: the earlier Q survives."""
    g = two(0.1)
    found = step(g.model("na:0", "nb:0"), HorizontalMergeQNodes)
    assert found.rows == [("Running", "a.Q"), ("Eliminating", "b.Q", "a.Q"), ("Removing", "b.Q")]
    assert {r.name for r in found.layer("a.Q").out.consumers} == {"a.DQ", "b.DQ"}
    g = two(0.1)
    g.op("TopK", ["na:0", g.const("k", np.array([1], np.int64))], "top", axis=3)
    g.nodes[-1].output.append("indices")
    found = step(g.model("top:0", "indices", "nb:0"), HorizontalMergeQNodes)
    assert found.rows == [("Running", "b.Q"), ("Eliminating", "a.Q", "b.Q"), ("Removing", "a.Q")]
    # layer2.1/relu_1 of yolo-resnet18-orin-trt8502: both stay
    g = two(0.2)
    found = step(g.model("na:0", "nb:0"), HorizontalMergeQNodes)
    assert (found.rows, found.reasons) == ([], [("a.Q", "scales-differ")])
    refusal = found.refusals[0]
    assert refusal.tensor == "s:0"
    assert refusal.quantizers == ("a.Q", "b.Q")
    assert refusal.scales == (np.float32(0.1), np.float32(0.2))
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    outputs = [
        g.op("Neg", g.pair(x, n, s), f"n{n}") for n, s in (("a", 0.1), ("b", 0.2), ("c", 0.1))
    ]
    found = step(g.model(*outputs), HorizontalMergeQNodes)
    assert found.rows == [("Running", "a.Q"), ("Eliminating", "c.Q", "a.Q"), ("Removing", "c.Q")]
    assert found.reasons == [("a.Q", "scales-differ")]
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    inner = g.op("Neg", g.pair(x, "a"), "n")
    outputs = [g.q(x, "first"), g.q(x, "second")]
    found = step(g.model(inner, *outputs), HorizontalMergeQNodes)
    assert found.rows == [
        ("Running", "first"),
        ("Eliminating", "a.Q", "first"),
        ("Removing", "a.Q"),
    ]
    assert found.reasons == []
    assert [t.name for t in found.network.outputs] == ["n:0", *outputs]


def test_clone_is_merged_into_the_original(g: Graph) -> None:
    """yolov8-orin-trt8412-excerpts: ``cv2/..._clone_1`` into ``m.0/cv1/...``; here the clone's Q comes first."""
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    other = g.op("Sigmoid", g.input(1, 3, 4, 4, name="y"), "t")
    joined = g.op("Neg", g.pair(g.concat([other, x], "cat"), "cv2"), "n1")
    direct = g.op("Neg", g.pair(x, "cv1"), "n2")
    first = step(g.model(joined, direct), HorizontalMergeQNodes)
    assert first.rows == []
    # SplitQAcrossPrecedingFanIn clones in the same round, so the merge comes in the next.
    target = target_named("trt8.4")
    SplitQAcrossPrecedingFanIn(target).run(first.network)
    events = HorizontalMergeQNodes(target).run(first.network).events
    assert [(e.kind, e.subject, e.object) for e in events] == [
        ("Running", "cv1.Q", ""),
        ("Eliminating", "cv2.Q_clone_1", "cv1.Q"),
        ("Removing", "cv2.Q_clone_1", ""),
    ]


@pytest.mark.parametrize(("zero", "merged"), [(0, True), (3, False)])
def test_zero_points_count(g: Graph, zero: int, merged: bool) -> None:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    outputs = [g.op("Neg", g.pair(x, "a"), "na"), g.op("Neg", g.pair(x, "b", zero=zero), "nb")]
    assert bool(step(g.model(*outputs), HorizontalMergeQNodes).rows) is merged


def fired(*outputs: str, g: Graph) -> set[str]:
    """The cases that the pass's lines of a prediction rest on."""
    trace = simulate(load(g.model(*outputs)), target_named("trt8.4")).trace
    return {e.case.partition("/")[2] for e in trace if e.case.startswith("HorizontalMergeQNodes/")}


def test_the_case_that_a_merge_rests_on(g: Graph) -> None:
    assert fired("na:0", "nb:0", g=two(0.1)) == {"earlier-survives"}
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    other = g.op("Sigmoid", g.input(1, 3, 4, 4, name="y"), "t")
    joined = g.op("Neg", g.pair(g.concat([other, x], "cat"), "cv2"), "n1")
    assert fired(joined, g.op("Neg", g.pair(x, "cv1"), "n2"), g=g) == {"clone"}
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    first = g.op("Neg", g.pair(g.concat([x, g.op("Tanh", x, "t")], "cat1"), "cv1"), "n1")
    second = g.op("Neg", g.pair(g.concat([x, g.op("Cos", x, "c")], "cat2"), "cv2"), "n2")
    assert fired(first, second, g=g) == {
        "earlier-survives"
    }  # of two clones none is the model's own
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    assert fired(g.q(x, "out"), g.op("Neg", g.pair(x, "a"), "na"), g=g) == {"network-output"}
