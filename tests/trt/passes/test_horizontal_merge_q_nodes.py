import numpy as np
import onnx
import pytest

from qdqtool.ir.modelfile import load
from qdqtool.trt.outcome import simulate
from qdqtool.trt.passes.horizontal_merge_q_nodes import HorizontalMergeQNodes
from qdqtool.trt.passes.split_q_across_preceding_fan_in import SplitQAcrossPrecedingFanIn
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import build_model, run_pass


def two_quantizers(second: float, tail: str = "Neg") -> Graph:
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    g.op("Neg", g.pair(x, "a", 0.1), "na")
    g.op(tail, g.pair(x, "b", second), "nb")
    return g


def test_earlier_q_survives() -> None:
    # resnet18-qat-rtx2000-trt8510, line 2541.
    result = run_pass(two_quantizers(0.1).model("na:0", "nb:0"), HorizontalMergeQNodes)
    assert result.lines == [("Running", "a.Q"), ("Eliminating", "b.Q", "a.Q"), ("Removing", "b.Q")]
    assert {r.name for r in result.layer("a.Q").out.consumers} == {"a.DQ", "b.DQ"}


def test_q_nearer_to_output_survives_topk() -> None:
    g = two_quantizers(0.1)
    g.op("TopK", ["na:0", g.const("k", np.array([1], np.int64))], "top", axis=3)
    g.nodes[-1].output.append("indices")
    result = run_pass(g.model("top:0", "indices", "nb:0"), HorizontalMergeQNodes)
    assert result.lines == [("Running", "b.Q"), ("Eliminating", "a.Q", "b.Q"), ("Removing", "a.Q")]


def test_qs_of_different_scales_are_reported() -> None:
    # yolo-resnet18-orin-trt8502, layer2.1/relu_1: both stay.
    result = run_pass(two_quantizers(0.2).model("na:0", "nb:0"), HorizontalMergeQNodes)
    assert (result.lines, result.reasons) == ([], [("a.Q", "scales-differ")])
    record = result.records[0]
    assert record.tensor == "s:0"
    assert record.quantizers == ("a.Q", "b.Q")
    assert record.scales == (np.float32(0.1), np.float32(0.2))


def test_equal_pair_among_three_qs_is_merged(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    outputs = [
        g.op("Neg", g.pair(x, n, s), f"n{n}") for n, s in (("a", 0.1), ("b", 0.2), ("c", 0.1))
    ]
    result = run_pass(g.model(*outputs), HorizontalMergeQNodes)
    assert result.lines == [("Running", "a.Q"), ("Eliminating", "c.Q", "a.Q"), ("Removing", "c.Q")]
    assert result.reasons == [("a.Q", "scales-differ")]


def test_q_of_network_output_survives(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    inner = g.op("Neg", g.pair(x, "a"), "n")
    outputs = [g.q(x, "first"), g.q(x, "second")]
    result = run_pass(g.model(inner, *outputs), HorizontalMergeQNodes)
    assert result.lines == [
        ("Running", "first"),
        ("Eliminating", "a.Q", "first"),
        ("Removing", "a.Q"),
    ]
    assert result.reasons == []
    assert [t.name for t in result.network.outputs] == ["n:0", *outputs]


def test_clone_is_merged_into_original() -> None:
    # yolov8-orin-trt8412-excerpts: cv2/..._clone_1 into m.0/cv1/... Here the clone's Q comes first.
    first = run_pass(build_model(clone_and_q), HorizontalMergeQNodes)
    assert first.lines == []
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
def test_qs_of_different_zero_points_stay(g: Graph, zero: int, merged: bool) -> None:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    outputs = [g.op("Neg", g.pair(x, "a"), "na"), g.op("Neg", g.pair(x, "b", zero=zero), "nb")]
    assert bool(run_pass(g.model(*outputs), HorizontalMergeQNodes).lines) is merged


def clone_and_q(g: Graph) -> list[str]:
    """Return a Q that a Concat moves up to a tensor, and a Q of this tensor."""
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    other = g.op("Sigmoid", g.input(1, 3, 4, 4, name="y"), "t")
    joined = g.op("Neg", g.pair(g.concat([other, x], "cat"), "cv2"), "n1")
    return [joined, g.op("Neg", g.pair(x, "cv1"), "n2")]


def two_clones(g: Graph) -> list[str]:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    first = g.op("Neg", g.pair(g.concat([x, g.op("Tanh", x, "t")], "cat1"), "cv1"), "n1")
    return [first, g.op("Neg", g.pair(g.concat([x, g.op("Cos", x, "c")], "cat2"), "cv2"), "n2")]


def network_output(g: Graph) -> list[str]:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    return [g.q(x, "out"), g.op("Neg", g.pair(x, "a"), "na")]


@pytest.mark.parametrize(
    ("model", "case"),
    [
        (two_quantizers(0.1).model("na:0", "nb:0"), "earlier-survives"),
        (build_model(clone_and_q), "clone"),
        (build_model(two_clones), "earlier-survives"),
        (build_model(network_output), "network-output"),
    ],
    ids=["two Qs", "clone", "two clones", "network output"],
)
def test_merge_rests_on_case(model: onnx.ModelProto, case: str) -> None:
    trace = simulate(load(model), target_named("trt8.4")).trace
    assert {e.case for e in trace if e.case.startswith("HorizontalMergeQNodes/")} == {
        f"HorizontalMergeQNodes/{case}"
    }


# TensorRT 10 --------------------------------------------------------------------------------


def beside_float(g: Graph) -> list[str]:
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    return [g.conv(x, "a", scale=0.1), g.conv(x, "b", k=1, scale=0.1), g.op("Neg", x, "n")]


GRAPHS = {
    "HorizontalMergeQNodes/beside-float": (beside_float, "trt10"),
    "HorizontalMergeQNodes/beside-float-elsewhere": (beside_float, "10.3"),
}


@pytest.mark.parametrize(("target", "conversions"), [("trt8.5", 1), ("trt8.6", 1), ("trt10", 2)])
def test_equal_qs_beside_a_float_consumer(g: Graph, target: str, conversions: int) -> None:
    # 8.5.2: yolo-resnet18-orin-trt8502 merges them; 10.16.2: unet-resnet50-orinnano-trt10162.
    prediction = simulate(load(g.model(*beside_float(g))), target_named(target))
    assert prediction.conversions == conversions


def test_equal_qs_beside_a_concat_stay_apart_after_it_was_split(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    outputs = [
        g.conv(x, "a", scale=0.1),
        g.conv(x, "b", k=1, scale=0.1),
        g.conv(g.concat([x, g.op("Neg", x, "n")], "cat"), "c", 16, scale=0.2),
    ]
    conversions = simulate(load(g.model(*outputs)), target_named("trt10")).conversion_nodes
    assert {"a.in.Q", "b.in.Q"} <= {*conversions}


def test_equal_qs_alone_on_a_tensor_are_merged_on_10(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    outputs = [g.conv(x, "a", scale=0.1), g.conv(x, "b", k=1, scale=0.1)]
    assert simulate(load(g.model(*outputs)), target_named("trt10")).conversions == 1
