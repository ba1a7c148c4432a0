"""Concatenation elimination: yolo-resnet18-orin-trt8502, lines 5779 to 5784; yolov8-orin-trt8412-excerpts."""

from qdqtool.trt.passes.concat_removal import ConcatRemoval
from tests.trt.builder import Graph
from tests.trt.passes.step import step

STRIDING = "Generating copy because input does not support striding"
STOMPING = "Generating copy because of stomping hazard"


def test_resizes_and_places(g: Graph) -> None:
    """/neck/Concat: the Resize's output is copied, the other input retargeted; names as of the quantized network."""
    left = g.resize(g.op("Sigmoid", g.input(1, 8, 2, 2), "s"), "Resize")
    right = g.op("Tanh", g.input(1, 8, 4, 4, name="y"), "t")
    out = g.op("Elu", g.pair(g.concat([left, right], "Concat"), "p"), "e")
    found = step(g.model(out), ConcatRemoval)
    assert found.rows == [
        ("Eliminating concatenation", "Concat"),
        (STRIDING, "Concat_Resize:0_clone_0", "p.Q:0"),
        ("Retargeting", "Concat_t:0_clone_1", "p.Q:0"),
    ]
    g = Graph()
    # One tensor in two concatenations, and the network's input, are copied (assumed)
    x = g.input(1, 8, 4, 4)
    part = g.op("Sigmoid", x, "s")
    outputs = [g.op("Tanh", g.concat([part, x], n), f"t{n}") for n in ("A", "B")]
    rows = step(g.model(*outputs), ConcatRemoval).rows
    assert sorted(r[0] for r in rows if r[1] == "s:0") == [STOMPING, "Retargeting"]
    assert [r[0] for r in rows if r[1] == "x"] == [STOMPING, STOMPING]


def test_copies(g: Graph) -> None:
    """Of two convolutions the one that the Concat alone reads is written into its place (BEVFusion's two builds)."""
    x = g.input(1, 8, 4, 4)
    alone = g.conv(x, "alone", scale=None, weights="float")
    shared = g.conv(x, "shared", scale=None, weights="float")
    out = g.op("Tanh", g.concat([alone, shared], "Concat"), "t")
    rows = step(g.model(out, g.op("Sigmoid", shared, "s")), ConcatRemoval).rows
    assert rows == [
        ("Eliminating concatenation", "Concat"),
        ("Retargeting", "alone:0", "Concat:0"),
        (STRIDING, "shared:0", "Concat:0"),
    ]
    g = Graph()
    # An 8.5.2 build copies the input's member, the convolution's beside it is retargeted
    x = g.input(1, 8, 4, 4)
    inner = g.conv(g.input(1, 8, 4, 4, name="y"), "c", scale=None, weights="float")
    out = g.conv(g.concat([x, inner], "Concat"), "d", 8)
    rows = step(g.model(out), ConcatRemoval).rows
    assert [(r[0], "clone_0" in r[1]) for r in rows[1:]] == [
        (STOMPING, True),
        ("Retargeting", False),
    ]
    g = Graph()
    part = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    rows = step(g.model(g.op("Tanh", g.concat([part, part], "Twice"), "t")), ConcatRemoval).rows
    assert sorted(r[0] for r in rows[1:]) == [STOMPING, "Retargeting"]
