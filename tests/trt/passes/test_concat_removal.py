from qdqtool.trt.passes.concat_removal import ConcatRemoval
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass

STRIDING = "Generating copy because input does not support striding"
STOMPING = "Generating copy because of stomping hazard"


def test_resize_is_copied_and_other_input_retargeted(g: Graph) -> None:
    # yolo-resnet18-orin-trt8502, /neck/Concat. Names are those of the quantized network.
    left = g.resize(g.op("Sigmoid", g.input(1, 8, 2, 2), "s"), "Resize")
    right = g.op("Tanh", g.input(1, 8, 4, 4, name="y"), "t")
    out = g.op("Elu", g.pair(g.concat([left, right], "Concat"), "p"), "e")
    assert run_pass(g.model(out), ConcatRemoval).lines == [
        ("Eliminating concatenation", "Concat"),
        (STRIDING, "Concat_Resize:0_clone_0", "p.Q:0"),
        ("Retargeting", "Concat_t:0_clone_1", "p.Q:0"),
    ]


def test_shared_tensor_and_network_input_are_copied(g: Graph) -> None:
    # Assumed, no log shows it.
    x = g.input(1, 8, 4, 4)
    part = g.op("Sigmoid", x, "s")
    outputs = [g.op("Tanh", g.concat([part, x], n), f"t{n}") for n in ("A", "B")]
    rows = run_pass(g.model(*outputs), ConcatRemoval).lines
    assert sorted(r[0] for r in rows if r[1] == "s:0") == [STOMPING, "Retargeting"]
    assert [r[0] for r in rows if r[1] == "x"] == [STOMPING, STOMPING]


def test_convolution_read_by_concat_alone_is_retargeted(g: Graph) -> None:
    # Both BEVFusion builds.
    x = g.input(1, 8, 4, 4)
    alone = g.conv(x, "alone", scale=None, weights="float")
    shared = g.conv(x, "shared", scale=None, weights="float")
    out = g.op("Tanh", g.concat([alone, shared], "Concat"), "t")
    assert run_pass(g.model(out, g.op("Sigmoid", shared, "s")), ConcatRemoval).lines == [
        ("Eliminating concatenation", "Concat"),
        ("Retargeting", "alone:0", "Concat:0"),
        (STRIDING, "shared:0", "Concat:0"),
    ]


def test_network_input_is_copied_next_to_convolution(g: Graph) -> None:
    # An 8.5.2 build.
    x = g.input(1, 8, 4, 4)
    inner = g.conv(g.input(1, 8, 4, 4, name="y"), "c", scale=None, weights="float")
    rows = run_pass(g.model(g.conv(g.concat([x, inner], "Concat"), "d", 8)), ConcatRemoval).lines
    assert [(r[0], "clone_0" in r[1]) for r in rows[1:]] == [
        (STOMPING, True),
        ("Retargeting", False),
    ]


def test_tensor_concatenated_with_itself_is_copied_once(g: Graph) -> None:
    part = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    rows = run_pass(
        g.model(g.op("Tanh", g.concat([part, part], "Twice"), "t")), ConcatRemoval
    ).lines
    assert sorted(r[0] for r in rows[1:]) == [STOMPING, "Retargeting"]


def test_second_of_two_quantized_network_inputs_is_retargeted(g: Graph) -> None:
    # Builds of 8.5.2 and 8.6.0.
    x, y = g.input(1, 8, 4, 4), g.input(1, 8, 4, 4, name="y")
    out = g.conv(g.concat([g.pair(x, "px", 0.1), g.pair(y, "py", 0.1)], "Concat"), "d", 8)
    rows = run_pass(g.model(out), ConcatRemoval).lines
    assert [r[0] for r in rows[1:]] == [STOMPING, "Retargeting"]
