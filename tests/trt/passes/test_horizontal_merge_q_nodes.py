import numpy as np
import onnx
import pytest

from qdqtool.ir.modelfile import load
from qdqtool.trt.outcome import simulate
from qdqtool.trt.passes.horizontal_merge_q_nodes import HorizontalMergeQNodes
from qdqtool.trt.passes.split_q_across_preceding_fan_in import SplitQAcrossPrecedingFanIn
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, build_model, run_pass


def negated(g: Graph, **scales: float) -> list[str]:
    x = g.op("Sigmoid", g.input(1, 3, 4, 4), "s")
    return [g.op("Neg", g.pair(x, name, scale), f"n{name}") for name, scale in scales.items()]


def before_topk(g: Graph) -> list[str]:
    (first, second) = negated(g, a=0.1, b=0.1)
    g.op("TopK", [first, g.const("k", np.array([1], np.int64))], "top", axis=3)
    g.nodes[-1].output.append("indices")
    return ["top:0", "indices", second]


@pytest.mark.parametrize(
    ("build", "kept", "removed", "reasons"),
    [
        # resnet18-qat-rtx2000-trt8510, line 2541.
        pytest.param(lambda g: negated(g, a=0.1, b=0.1), "a.Q", "b.Q", [], id="earlier"),
        pytest.param(before_topk, "b.Q", "a.Q", [], id="nearer to the output than a TopK"),
        pytest.param(
            lambda g: negated(g, a=0.1, b=0.2, c=0.1),
            "a.Q",
            "c.Q",
            [("a.Q", "scales-differ")],
            id="one of three has another scale",
        ),
        pytest.param(
            lambda g: [*negated(g, a=0.1), g.q("s:0", "first"), g.q("s:0", "second")],
            "first",
            "a.Q",
            [],
            id="network output",
        ),
    ],
)
def test_one_of_two_equal_qs_survives(
    g: Graph, build: Build, kept: str, removed: str, reasons: list[tuple[str, str]]
) -> None:
    outputs = build(g)
    result = run_pass(g.model(*outputs), HorizontalMergeQNodes)
    assert result.lines == [
        ("Running", kept),
        ("Eliminating", removed, kept),
        ("Removing", removed),
    ]
    assert removed.replace(".Q", ".DQ") in {r.name for r in result.layer(kept).out.consumers}
    assert (result.reasons, [t.name for t in result.network.outputs]) == (reasons, outputs)


def test_qs_of_different_scales_are_reported(g: Graph) -> None:
    # yolo-resnet18-orin-trt8502, layer2.1/relu_1: both stay.
    result = run_pass(g.model(*negated(g, a=0.1, b=0.2)), HorizontalMergeQNodes)
    assert (result.lines, result.reasons) == ([], [("a.Q", "scales-differ")])
    record = result.records[0]
    assert (record.tensor, record.quantizers, record.scales) == (
        "s:0",
        ("a.Q", "b.Q"),
        (np.float32(0.1), np.float32(0.2)),
    )


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
    outputs = [*negated(g, a=0.1), g.op("Neg", g.pair("s:0", "b", zero=zero), "nb")]
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


@pytest.mark.parametrize(
    ("model", "case"),
    [
        (build_model(lambda g: negated(g, a=0.1, b=0.1)), "earlier-survives"),
        (build_model(clone_and_q), "clone"),
        (build_model(two_clones), "earlier-survives"),
        (build_model(lambda g: [*negated(g, a=0.1), g.q("s:0", "out")]), "network-output"),
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


@pytest.mark.parametrize(
    ("others", "target", "kept"),
    [
        # 8.5.2: yolo-resnet18-orin-trt8502 merges them; 10.16.2: unet-resnet50-orinnano-trt10162.
        pytest.param(beside_float, "trt8.5", ["a.in.Q"], id="float consumer, 8.5"),
        pytest.param(beside_float, "trt8.6", ["a.in.Q"], id="float consumer, 8.6"),
        pytest.param(beside_float, "trt10", ["a.in.Q", "b.in.Q"], id="float consumer, 10"),
        pytest.param(
            lambda g: [
                *beside_float(g)[:2],
                g.conv(g.concat(["s:0", g.op("Neg", "s:0", "m")], "cat"), "c", 16, scale=0.2),
            ],
            "trt10",
            ["a.in.Q", "b.in.Q"],
            id="concat, which was split",
        ),
        pytest.param(lambda g: beside_float(g)[:2], "trt10", ["a.in.Q"], id="alone, 10"),
    ],
)
def test_equal_qs_beside_another_consumer(
    g: Graph, others: Build, target: str, kept: list[str]
) -> None:
    nodes = simulate(load(g.model(*others(g))), target_named(target)).conversion_nodes
    assert [name for name in nodes if name in ("a.in.Q", "b.in.Q")] == kept
