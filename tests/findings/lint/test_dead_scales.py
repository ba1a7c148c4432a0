import numpy as np
import pytest
from onnx.numpy_helper import from_array

from qdqtool.ir.metadata import mark_part
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.reasons.heads import describe_destroyed_results
from tests.trt.builder import Graph


def findings(g: Graph, out: str, code: str, target: str = "trt10") -> list[Finding]:
    return [f for f in predict(g.model(out), target).findings if f.code == code]


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11", "rtx1.7"])
@pytest.mark.parametrize("op", ["Sigmoid", "HardSigmoid", "Softmax"])
def test_scale_dead_is_an_error(g: Graph, op: str, target: str) -> None:
    gate = g.op(op, g.conv(g.input(1, 16, 8, 8), "c", 16), "gate")
    g.channels[gate] = 16
    (found,) = findings(g, g.conv(gate, "next", 16, scale=2.0), "SCALE-DEAD", target)
    assert (found.node, found.convolutions) == ("next.in.Q", ["next"])
    r = found.causes[0].reason
    assert (found.severity, r.scale, r.whole) == (Severity.ERROR, 2.0, True)
    assert [(p.tensor, p.low, p.high, p.value) for p in r.parts] == [(gate, 0.0, 1.0, 0.0)]


@pytest.mark.parametrize(
    ("op", "scale"), [("Sigmoid", 1.9), ("Sigmoid", 1 / 127), ("Sigmoid", 0.003), ("Relu", 1e6)]
)
def test_scale_dead_needs_a_proof(g: Graph, op: str, scale: float) -> None:
    x = g.op(op, g.conv(g.input(1, 16, 8, 8), "c", 16), "gate")
    g.channels[x] = 16
    assert findings(g, g.conv(x, "next", 16, scale=scale), "SCALE-DEAD") == []


def test_scale_dead_behind_what_moves_values(g: Graph) -> None:
    """The bounds of a Sigmoid also hold after a Transpose, a MaxPool and a Q/DQ pair."""
    x = g.pair(g.op("Sigmoid", g.conv(g.input(1, 16, 8, 8), "c", 16), "gate"), "own", 1 / 127)
    g.channels[x] = 16
    x = g.pool(g.op("Transpose", x, "t", perm=[0, 1, 3, 2]), "m", k=3, stride=1)
    g.channels[x] = 16
    assert [f.node for f in findings(g, g.conv(x, "next", 16, scale=3.0), "SCALE-DEAD")] == [
        "next.in.Q"
    ]


@pytest.mark.parametrize("count", [1, 9])
def test_scale_dead_of_parts(g: Graph, count: int) -> None:
    """A Concat of gates and other values before a convolution is not a head."""
    x = g.conv(g.input(1, 16, 8, 8), "c", 16)
    gates = [g.op("Sigmoid", x, f"gate{i}") for i in range(count)]
    joined = g.concat([*gates, g.relu(x, "r")], "cat")
    g.channels[joined] = 16 * (count + 1)
    (found,) = findings(g, g.conv(joined, "next", 16, scale=4.0), "SCALE-DEAD")
    r = found.causes[0].reason
    assert [p.tensor for p in r.parts] == gates[:8] and not r.whole and not found.automatic


def branches(g: Graph) -> list[str]:
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    return [g.conv(stem, name, 16, k=1) for name in ("box", "score")]


def head(g: Graph, scale: float, sigmoid: bool = True, own: float | None = None) -> str:
    box, score = branches(g)
    score = g.op("Sigmoid", score, "probability") if sigmoid else score
    score = score if own is None else g.pair(score, "own", own)
    return g.pair(g.concat([box, score], "all"), "behind", scale)


@pytest.mark.parametrize(
    ("scale", "severity", "lost"),
    [
        (5.2, Severity.ERROR, 2.6),
        (2.0, Severity.ERROR, 1.0),
        (0.5, Severity.ERROR, 0.25),
        (0.4, Severity.WARNING, 0.2),
        (1 / 127, Severity.WARNING, 0.5 / 127),
    ],
)
def test_head_concat_severity_follows_the_scale(
    g: Graph, scale: float, severity: Severity, lost: float
) -> None:
    """A detector reports scores above 0.25."""
    (found,) = findings(g, head(g, scale, own=0.004), "HEAD-CONCAT")
    r = found.causes[0].reason
    assert (found.node, found.severity) == ("behind.Q", severity)
    assert r.zero_limit == pytest.approx(lost, rel=1e-6)
    assert r.scale == pytest.approx(scale) and r.own == pytest.approx(0.004)
    assert findings(g, "behind.DQ:0", "SCALE-DEAD") == []  # reported once


@pytest.mark.parametrize(
    ("scale", "severity", "change"),
    [
        (5.2, Severity.ERROR, 0.8617),
        (1.0, Severity.ERROR, 0.2449),
        (0.99, Severity.WARNING, 0.2426),
    ],
)
def test_head_concat_of_logits(g: Graph, scale: float, severity: Severity, change: float) -> None:
    """Between logits of half a step below and above 0, the Sigmoid changes by `change`."""
    (found,) = findings(g, head(g, scale, sigmoid=False), "HEAD-CONCAT")
    assert found.severity == severity
    assert found.causes[0].reason.score_step == pytest.approx(change, abs=1e-4)


@pytest.mark.parametrize(("sigmoid", "count"), [(True, 1), (False, 0)])
def test_part_of_a_model_has_a_head_if_scores_show_it(g: Graph, sigmoid: bool, count: int) -> None:
    proto = g.model(head(g, 5.2, sigmoid))
    mark_part(proto)
    assert [f.code for f in predict(proto).findings].count("HEAD-CONCAT") == count


@pytest.mark.parametrize(
    ("unit", "scale", "stride", "end", "expected"),
    [
        ("cells", 0.25, (8, 16), "", [(Severity.ERROR, 2.0)]),
        ("cells", 0.24, (8, 16), "", [(Severity.WARNING, 1.92)]),
        ("pixels", 2.0, (8, 16), "Neg", [(Severity.ERROR, 2.0)]),
        ("pixels", 1.9, (8, 16), "Neg", [(Severity.WARNING, 1.9)]),
        ("center", 0.5, (8, 16), "", [(Severity.ERROR, 2.0)]),
        ("center", 0.49, (8, 16), "", [(Severity.WARNING, 1.96)]),
        ("corner", 0.25, (8, 16), "", [(Severity.ERROR, 2.0)]),
        ("pixels", 5.0, (2, 4), "", []),
        ("pixels", 5.0, (8, 16), "Sigmoid", []),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_head_concat_of_boxes(
    g: Graph,
    unit: str,
    scale: float,
    stride: tuple[int, int],
    end: str,
    expected: list[tuple[Severity, float]],
    stored: bool,
) -> None:
    """A cell has at least the smallest stride in pixels. A factor of logits is not a stride."""

    def pair(tensor: str, name: str) -> str:
        return g.pair(tensor, "q", scale) if name == unit else tensor

    box, score = branches(g)
    strides = np.resize(stride, (1, 1, 8, 8))
    levels = g.const("levels", (strides * 5).astype(np.int8))
    factor = g.dq(levels, "DQ", 0.2) if stored else g.const("stride", np.float32(strides))
    corner = pair(g.op("Sub", [g.const("anchor", 0.5), box], "anchor.box"), "corner")
    total = pair(g.op("Add", [corner, box], "sum"), "center")
    center = g.op("Div", [total, g.const("two", 2.0)], "half")
    cells = pair(g.concat([center, g.op("Sub", [box, corner], "size")], "both"), "cells")
    boxes = pair(g.op("Mul", [cells, factor], "decode"), "pixels")
    boxes = g.op(end or "Identity", boxes, "end")
    found = findings(g, g.concat([boxes, score], "all"), "HEAD-CONCAT")
    assert [f.node for f in found] == ["q.Q"] * len(expected)
    assert [(f.severity, f.causes[0].reason.box_step) for f in found] == [
        (severity, pytest.approx(step)) for severity, step in expected
    ]


def test_destroyed_results_have_their_numbers_of_places(g: Graph) -> None:
    box, score = branches(g)
    boxes = g.op("Mul", [box, g.const("stride", np.float32(32))], "decode")
    parts = [g.pair(boxes, "pixels", 5.0), g.op("Sigmoid", score, "probability")]
    found = findings(g, g.pair(g.concat(parts, "all"), "behind", 5.0), "HEAD-CONCAT")
    assert sorted(describe_destroyed_results(found).split("; ")) == [
        "at 1 place, all scores become 0, and the detector finds nothing (the scale is 5)",
        "at 1 place, one step of a box is 5 pixels or more",
    ]


def per_tensor(g: Graph, spread: float, rounded: bool = False, stored: bool = False) -> str:
    weights = np.random.default_rng(0).uniform(-1, 1, (16, 16, 3, 3)).astype(np.float32)
    weights /= np.abs(weights).max(axis=(1, 2, 3), keepdims=True)
    weights[4:] /= spread
    step = np.float32(1 / 127)
    integers = np.rint(weights / step).astype(np.int8)
    w = (
        g.dq(g.const("w", integers), "wdq", step)
        if stored
        else g.pair(g.const("w", integers * step if rounded else weights), "wq", step)
    )
    return g.op("Conv", [g.pair(g.input(1, 16, 8, 8), "in"), w], "c", kernel_shape=[3, 3])


@pytest.mark.parametrize(
    ("spread", "severity"),
    [(4.0, Severity.WARNING), (40.0, Severity.WARNING), (3.0, Severity.INFO), (1.0, None)],
)
def test_weights_per_tensor(g: Graph, spread: float, severity: Severity | None) -> None:
    found = findings(g, per_tensor(g, spread), "W-PER-TENSOR")
    assert [f.severity for f in found] == [severity] * (severity is not None)
    for f in found:
        assert f.causes[0].reason.spread == pytest.approx(spread, rel=1e-5)
        assert f.causes[0].reason.layers == ("c",) and f.convolutions == ["c"]


@pytest.mark.parametrize("kind", ["float", "rounded", "stored"])
def test_weights_per_tensor_are_fixed_from_float_weights_alone(g: Graph, kind: str) -> None:
    out = per_tensor(g, 8.0, rounded=kind == "rounded", stored=kind == "stored")
    (found,) = findings(g, out, "W-PER-TENSOR")
    facts = found.severity, found.automatic, "approximate" in found.message, "images/" in found.fix
    assert facts == (Severity.WARNING, kind == "float", kind != "float", False)
    assert found.causes[0].reason.rounded == (kind != "float")


def test_weights_with_an_empty_zero_point_have_no_finding(g: Graph) -> None:
    proto = g.model(per_tensor(g, 8.0, stored=True))
    dequantizer = next(n for n in proto.graph.node if n.name == "wdq")
    proto.graph.initializer.append(from_array(np.empty(0, np.int8), "empty"))
    dequantizer.input[2:] = ["empty"]
    assert "W-PER-TENSOR" not in {f.code for f in predict(proto).findings}


def test_weights_per_tensor_where_the_target_takes_no_other(g: Graph) -> None:
    out = g.conv(g.input(1, 16, 8, 8), "c", 16, weights="tensor", op="ConvTranspose", k=2, stride=2)
    assert findings(g, out, "W-PER-TENSOR") == []
