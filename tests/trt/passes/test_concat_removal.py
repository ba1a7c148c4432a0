from collections.abc import Callable

import pytest

from qdqtool.trt.passes.concat_removal import ConcatRemoval
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass

STRIDING = "Generating copy because input does not support striding"
STOMPING = "Generating copy because of stomping hazard"


@pytest.mark.parametrize(
    ("build", "lines"),
    [
        # yolo-resnet18-orin-trt8502, /neck/Concat. Names are those of the quantized network.
        pytest.param(
            lambda g: [
                g.op(
                    "Elu",
                    g.pair(
                        g.concat(
                            [
                                g.resize(g.op("Sigmoid", g.input(1, 8, 2, 2), "s"), "Resize"),
                                g.op("Tanh", g.input(1, 8, 4, 4, name="y"), "t"),
                            ],
                            "Concat",
                        ),
                        "p",
                    ),
                    "e",
                )
            ],
            [
                (STRIDING, "Concat_Resize:0_clone_0", "p.Q:0"),
                ("Retargeting", "Concat_t:0_clone_1", "p.Q:0"),
            ],
            id="Resize is copied",
        ),
        # Both BEVFusion builds.
        pytest.param(
            lambda g: [
                g.op(
                    "Tanh",
                    g.concat(
                        [
                            g.conv(x := g.input(1, 8, 4, 4), "alone", scale=None, weights="float"),
                            y := g.conv(x, "shared", scale=None, weights="float"),
                        ],
                        "Concat",
                    ),
                    "t",
                ),
                g.op("Sigmoid", y, "s"),
            ],
            [("Retargeting", "alone:0", "Concat:0"), (STRIDING, "shared:0", "Concat:0")],
            id="convolution with another consumer is copied",
        ),
    ],
)
def test_input_is_copied_and_other_input_retargeted(
    g: Graph, build: Build, lines: list[tuple[str, str, str]]
) -> None:
    assert run_pass(g.model(*build(g)), ConcatRemoval).lines == [
        ("Eliminating concatenation", "Concat"),
        *lines,
    ]


def test_shared_tensor_and_network_input_are_copied(g: Graph) -> None:
    # Assumed, no log shows it.
    x = g.input(1, 8, 4, 4)
    part = g.op("Sigmoid", x, "s")
    outputs = [g.op("Tanh", g.concat([part, x], n), f"t{n}") for n in ("A", "B")]
    rows = run_pass(g.model(*outputs), ConcatRemoval).lines
    assert sorted(r[0] for r in rows if r[1] == "s:0") == [STOMPING, "Retargeting"]
    assert [r[0] for r in rows if r[1] == "x"] == [STOMPING, STOMPING]


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        # An 8.5.2 build.
        pytest.param(
            lambda g: g.input(1, 8, 4, 4),
            lambda g: g.conv(g.input(1, 8, 4, 4, name="y"), "c", scale=None, weights="float"),
            [(STOMPING, True), ("Retargeting", False)],
            id="network input next to a convolution",
        ),
        # Builds of 8.5.2 and 8.6.0.
        pytest.param(
            lambda g: g.pair(g.input(1, 8, 4, 4), "px", 0.1),
            lambda g: g.pair(g.input(1, 8, 4, 4, name="y"), "py", 0.1),
            [(STOMPING, True), ("Retargeting", False)],
            id="two quantized network inputs",
        ),
        pytest.param(
            lambda g: g.op("Sigmoid", g.input(1, 8, 4, 4), "s"),
            lambda g: "s:0",
            [("Retargeting", True), (STOMPING, True)],
            id="tensor concatenated with itself",
        ),
    ],
)
def test_one_of_two_inputs_is_copied(
    g: Graph,
    first: Callable[[Graph], str],
    second: Callable[[Graph], str],
    rows: list[tuple[str, bool]],
) -> None:
    out = g.conv(g.concat([first(g), second(g)], "Concat"), "d", 8)
    lines = run_pass(g.model(out), ConcatRemoval).lines
    assert [(line[0], "clone_0" in line[1]) for line in lines[1:]] == rows
