from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qdqtool.ir.modelfile import load
from qdqtool.ir.operators import LayerKind
from qdqtool.prediction import predict
from qdqtool.reasons.fusions import QuantizerInsideActivation
from qdqtool.trt import importer
from qdqtool.trt.passes.point_wise_fusion import PointWiseFusion
from qdqtool.trt.targets import TARGETS, target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (
            "trt8.5",
            "PWN(a.s, a.m)",
        ),  # TensorRT issue 3385: PWN(node_of_swish.sigmoid, node_of_swish.mul)
        ("trt8.4", "PWN(a.s, a.m)"),
        (
            "trt10",
            "PWN(PWN(a.s), PWN(a.m))",
        ),  # PWN(PWN(/model.0/act/Sigmoid), PWN(/model.0/act/Mul))
    ],
)
def test_silu_becomes_one_layer(g: Graph, target: str, name: str) -> None:
    result = run_pass(
        g.model(g.silu(g.conv(g.input(1, 3, 8, 8), "c"), "a")), PointWiseFusion, target=target
    )
    assert result.lines == [("Running", "a.s"), ("Fusing", "a.s", "a.m")]
    layer = result.layer(name)
    assert (layer.kind, [t.source for t in layer.inputs]) == (LayerKind.POINTWISE, ["c:0"])


@pytest.mark.parametrize(
    ("build", "lines", "layer", "inputs"),
    [
        # yolov8-orin-trt8412-excerpts: Add_5 with Div_1.
        pytest.param(
            lambda g: [
                g.op(
                    "Div",
                    [
                        g.add(
                            *(g.op("Softmax", g.input(1, 8, name=x), f"s{x}") for x in "xy"), "add"
                        ),
                        g.const("two", [[2.0]]),
                    ],
                    "div",
                )
            ],
            [("Running", "add"), ("Fusing", "add", "div")],
            "PWN(add, div)",
            2,
            id="division of a sum",
        ),
        pytest.param(
            lambda g: [g.op("Mul", [g.op("Exp", g.input(1, 8), "e"), "e:0"], "m")],
            [("Running", "e"), ("Fusing", "e", "m")],
            "PWN(e, m)",
            1,
            id="square",
        ),
        # yolo-resnet18-orin-trt8502, lines 5233 to 5236: PWN(PWN(a, b), c).
        pytest.param(
            lambda g: [g.op("Neg", g.op("Exp", g.op("Abs", g.input(1, 8), "a"), "b"), "c")],
            [
                ("Running", "a"),
                ("Fusing", "a", "b"),
                ("Running", "PWN(a, b)"),
                ("Fusing", "PWN(a, b)", "c"),
            ],
            "PWN(PWN(a, b), c)",
            1,
            id="chain",
        ),
    ],
)
def test_pointwise_operators_become_one_layer(
    g: Graph, build: Build, lines: list[Line], layer: str, inputs: int
) -> None:
    result = run_pass(g.model(*build(g)), PointWiseFusion)
    assert (result.lines, len(result.layer(layer).inputs)) == (lines, inputs)


@pytest.mark.parametrize("has_size", [True, False])
def test_constant_of_unknown_size_is_not_fused(g: Graph, has_size: bool) -> None:
    # The constant's data may be in a file that is missing.
    model = g.model(g.op("Max", [g.op("Softmax", g.input(1, 8), "s"), g.const("k", [[2.0]])], "m"))
    network = importer.build(load(model))
    network.rank_layers()
    (constant,) = network.layers_of_kind(LayerKind.CONSTANT)
    constant.dims = constant.dims if has_size else None
    PointWiseFusion(target_named("trt8.5")).run(network)
    assert (constant.id in network.layers) is not has_size


@pytest.mark.parametrize("target", ["trt8.4", "trt8.5", "trt10"])
@pytest.mark.parametrize(("shape", "fused"), [((1,), True), ((8, 1, 1), False)])
def test_scalar_constant_is_fused_with_its_reshape(
    g: Graph, shape: tuple[int, ...], fused: bool, target: str
) -> None:
    # A constant with one number for each channel stays a layer.
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    to = np.array([1, *shape] if len(shape) > 1 else [1, 1, 1, 1])
    shaped = g.op("Reshape", [g.const("k", np.full(shape, 2.0)), g.const("to", to)], "shape")
    result = run_pass(
        g.model(g.op("Tanh", g.op("Max", [x, shaped], "m"), "t")), PointWiseFusion, target
    )
    kinds = {layer.kind for layer in result.network.layers.values()}
    assert (LayerKind.CONSTANT not in kinds and LayerKind.SHUFFLE not in kinds) is fused
    assert next(line for line in result.lines if line[0] == "Fusing")[1].startswith("k") is (
        fused and target_named(target).constants_first
    )


@pytest.mark.parametrize("target", sorted(t for t in TARGETS if not t.startswith("rtx")))
def test_add_after_silu_is_left_to_convolution_where_target_fuses_it(g: Graph, target: str) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    out = g.add(g.silu(g.conv(x, "c"), "a"), g.pair(x, "skip", 0.07), "sum")
    lines = run_pass(g.model(g.op("Neg", g.pair(out, "next"), "n")), PointWiseFusion, target).lines
    assert (
        any("sum" in part for line in lines for part in line)
        is not target_named(target).residual_through_activation
    )


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_all_scalar_constants_of_chain_are_fused(g: Graph, target: str) -> None:
    x = g.op("Max", [g.const("a", [[2.0]]), g.op("Softmax", g.input(1, 8), "s")], "m")
    result = run_pass(
        g.model(g.op("Min", [x, g.const("b", [[3.0]])], "n")), PointWiseFusion, target
    )
    (layer,) = result.network.layers_of_kind(LayerKind.POINTWISE)
    assert [t.source for t in layer.inputs] == ["s:0"]
    assert not any(layer.kind == LayerKind.CONSTANT for layer in result.network.layers.values())
    fused = [line[1:] for line in result.lines if line[0] == "Fusing"][:-1]
    assert fused == ([("a", "m"), ("b", "n")] if target_named(target).constants_first else [])
    assert "constant-operand" in [case.name for case in layer.cases]


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_layer_with_constant_operands_only_is_not_fused(g: Graph, target: str) -> None:
    result = run_pass(
        g.model(g.op("Max", [g.const("a", [[2.0]]), g.const("b", [[3.0]])], "m")),
        PointWiseFusion,
        target,
    )
    assert (result.lines, len(result.network.layers)) == ([], 3)


@pytest.fixture
def x(g: Graph) -> str:
    return g.op("Softmax", g.input(1, 8), "s")


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
@pytest.mark.parametrize("owner", ["", "relu", "myelin"])
def test_layer_of_other_kernel_fuses_no_constant(g: Graph, x: str, owner: str, target: str) -> None:
    # A sum fused with its Relu has a kernel of its own. Layers of a Myelin region belong to Myelin.
    model = g.model(g.op("Softmax", g.op("Max", [x, g.const("k", [[2.0]])], "m"), "t"))
    network = importer.build(load(model))
    network.rank_layers()
    layer = next(layer for layer in network.layers.values() if layer.name == "m")
    layer.relu_name, layer.in_myelin = ("r" if owner == "relu" else ""), owner == "myelin"
    result = PointWiseFusion(target_named(target)).run(network)
    assert (layer.kind == LayerKind.POINTWISE) is not bool(owner)
    assert len(layer.inputs) == (2 if owner else 1)
    assert bool(result.events) is (target_named(target).constants_first and not owner)


def test_last_consumer_fuses_shared_constant(g: Graph, x: str) -> None:
    shaped = g.op("Reshape", [g.const("two", [[2.0]]), g.const("to", np.array([1, 1]))], "shape")
    out, other = g.op("Max", [x, shaped], "m"), g.op("Min", [g.op("Softmax", x, "t"), shaped], "n")
    result = run_pass(g.model(out, g.op("Softmax", other, "u")), PointWiseFusion)
    kinds = [layer.kind for layer in result.network.layers.values()]
    assert LayerKind.CONSTANT not in kinds and LayerKind.SHUFFLE not in kinds


def test_constant_that_is_network_output_stays(g: Graph) -> None:
    x, two = g.op("Softmax", g.input(1, 8), "s"), g.const("two", [2.0])
    shaped = g.op(
        "Unsqueeze", [g.op("Identity", two, "i"), g.const("axes", np.array([0]))], "shape"
    )
    layers = run_pass(
        g.model(g.op("Max", [x, shaped], "m"), shaped), PointWiseFusion
    ).network.layers_of_kind(LayerKind.SHUFFLE, LayerKind.CONSTANT)
    assert any(layer.out.is_output for layer in layers)


def test_chain_of_more_than_64_layers_is_cut(g: Graph, x: str) -> None:
    for i in range(66):
        x = g.op("Neg", x, f"n{i}")
    layers = run_pass(g.model(x), PointWiseFusion).network.layers_of_kind(LayerKind.POINTWISE)
    assert [len(layer.nodes) for layer in layers] == [64, 2]


@pytest.mark.parametrize(
    ("last", "fused"),
    [
        pytest.param(
            lambda g, x: g.op(
                "Mul", [x, g.const("k", np.linspace(1, 2, 8).reshape(1, 8, 1, 1))], "last"
            ),
            False,
            id="per-channel",
        ),
        pytest.param(
            lambda g, x: g.op("Mul", [x, g.const("k", [2.0])], "last"), True, id="one-number"
        ),
        pytest.param(lambda g, x: g.op("LeakyRelu", x, "last"), True, id="leaky"),
        pytest.param(lambda g, x: g.concat([x], "last"), False, id="concat"),
        pytest.param(lambda g, x: g.relu(x, "last"), False, id="relu-add"),
    ],
)
def test_which_operators_are_pointwise(
    g: Graph, last: Callable[[Graph, str], str], fused: bool
) -> None:
    # A scale of one number and every activation but Relu are. A scale per channel, and operators
    # that move data, are not.
    x = last(g, g.op("Exp", g.op("Softmax", g.input(1, 8, 4, 4), "s"), "e"))
    lines = run_pass(g.model(g.op("Softmax", x, "end")), PointWiseFusion).lines
    assert any(line[0] == "Fusing" and "last" in line[2] for line in lines) is fused


@pytest.mark.parametrize(
    ("added", "others", "fused"),
    [
        pytest.param(lambda g, x: x, [], False, id="bare"),
        pytest.param(lambda g, x: g.bn(x, "bn"), [], False, id="normalized"),
        pytest.param(lambda g, x: g.op("Sigmoid", x, "act"), [], True, id="activated"),
        pytest.param(lambda g, x: g.bn(x, "bn"), ["bn:0"], True, id="read twice"),
    ],
)
def test_add_is_fused_unless_convolution_may_fuse_it(
    g: Graph, added: Callable[[Graph, str], str], others: list[str], fused: bool
) -> None:
    # A convolution may fuse an Add that consumes its output, directly or through a BatchNormalization.
    x = g.op("Softmax", g.input(1, 8, 8, 8), "s")
    out = g.op("Exp", g.add(added(g, g.conv(x, "c")), x, "add"), "e")
    outputs = [g.op("Softmax", other, "other") for other in others]
    lines = run_pass(g.model(out, *outputs), PointWiseFusion).lines
    assert any(line[0] == "Fusing" and "add" in "".join(line[1:]) for line in lines) is fused


@pytest.mark.parametrize(
    ("operand", "joined"), [("computed", ("a.m", "add")), ("itself", None), ("a product", None)]
)
def test_add_after_activation_is_recorded_with_its_producer(
    g: Graph, x: str, operand: str, joined: tuple[str, str] | None
) -> None:
    # Findings name both nodes.
    act = g.silu(x, "a")
    other = act if operand == "itself" else g.op("Softmax", x, "t")
    out = g.op("Mul" if operand == "a product" else "Add", [act, other], "add")
    (layer,) = run_pass(
        g.model(g.op("Softmax", g.op("Neg", out, "n"), "end")), PointWiseFusion
    ).network.layers_of_kind(LayerKind.POINTWISE)
    assert layer.activation_and_add == joined and {"a.m", "add", "n"} <= set(layer.nodes)


@pytest.mark.parametrize(
    ("activation", "cases"),
    [
        (lambda g, x: g.silu(x, "a"), ["chain", "with-add"]),  # documented
        (lambda g, x: g.op("Exp", x, "e"), ["chain"]),  # seen
    ],
    ids=["SiLU", "Exp"],
)
def test_add_after_activation_names_its_cases(
    g: Graph, x: str, activation: Any, cases: list[str]
) -> None:
    out = g.add(activation(g, x), g.op("Softmax", x, "t"), "add")
    network = run_pass(g.model(g.op("Softmax", out, "end")), PointWiseFusion).network
    (layer,) = network.layers_of_kind(LayerKind.POINTWISE)
    assert [case.name for case in layer.cases] == cases


@pytest.mark.parametrize(
    ("place", "act", "report"),
    [
        ("inner", "Relu", ("p.Q", "act", False, False, "")),
        ("inner", "Clip", ("p.Q", "act", False, False, "")),
        ("inner", "Sigmoid", ("p.Q", "act", True, False, "")),
        ("gate", "Sigmoid", ("gate.Q", "act", True, True, "")),
        ("inner gate", "Sigmoid", ("p.Q", "act", True, False, "gate.Q")),
        ("after", "Sigmoid", None),
        ("after", "Relu", None),
        ("inner", "Softmax", None),
        ("gate", "Tanh", None),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("weights", ["qdq", "float"])
def test_pair_inside_activation_is_reported(
    g: Graph, place: str, act: str, report: tuple[object, ...] | None, norm: bool, weights: str
) -> None:
    # Only INT8 convolutions are concerned.
    x = g.conv(g.input(1, 8, 4, 4), "c", weights=weights)
    x = g.bn(x, "bn") if norm else x
    x = g.pair(x, "p", 0.1) if "inner" in place else x
    y = g.op(act, x, "act")
    y = g.pair(y, "gate", 0.01) if "gate" in place else y
    y = g.op("Mul", [x, y], "mul") if act in ("Sigmoid", "Tanh") else y
    y = g.pair(y, "p", 0.1) if place == "after" else y
    records = run_pass(g.model(y), PointWiseFusion).records
    reports = [r for r in records if isinstance(r, QuantizerInsideActivation)]
    assert [(r.node, r.activation, r.silu, r.gate, r.second) for r in reports] == (
        [report] if report is not None and weights == "qdq" else []
    )
    assert all(r.convolution == "c" for r in reports)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("place", ["inner", "gate"])
def test_pair_inside_activation_of_matrix_product_is_reported(
    g: Graph, place: str, bias: bool
) -> None:
    weights = g.pair(g.const("w", np.ones((8, 8), np.float32)), "q", 0.1)
    x = g.op("MatMul", [g.pair(g.input(4, 8), "a", 0.1), weights], "c")
    x = g.op("Add", [x, g.const("b", np.ones(8, np.float32))], "bias") if bias else x
    x = g.pair(x, "p", 0.1) if place == "inner" else x
    y = g.op("Sigmoid", x, "act")
    y = g.op("Mul", [x, g.pair(y, "gate", 0.01) if place == "gate" else y], "mul")
    assert [
        f.node for f in predict(g.model(y), target="trt8.5").findings if f.code == "SILU-INNER-Q"
    ] == ["p.Q" if place == "inner" else "gate.Q"]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [g.op("Neg", g.relu(g.op("Exp", g.input(1, 8), "e"), "r"), "n")], id="Relu"
        ),
        pytest.param(
            lambda g: [
                g.op("Neg", g.op("Exp", g.input(1, 8), "e"), "n"),
                g.op("Softmax", "e:0", "s"),
            ],
            id="second consumer",
        ),
        pytest.param(
            lambda g: [g.op("Neg", g.op("Exp", g.input(1, 8), "e"), "n"), "e:0"],
            id="network output",
        ),
        pytest.param(
            lambda g: [
                g.op("Exp", g.add(g.bn(g.conv(g.input(1, 8, 8, 8), "c"), "bn"), "x", "add"), "e")
            ],
            id="residual Add of a convolution",
        ),
        pytest.param(
            lambda g: [
                g.op(
                    "Exp",
                    g.add(
                        g.pair(g.op("Softmax", g.input(1, 8), "s"), "p"),
                        g.pair(g.op("Tanh", "x", "t"), "q"),
                        "add",
                    ),
                    "e",
                )
            ],
            id="Add of two quantized tensors",
        ),
    ],
)
def test_layers_are_not_fused(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), PointWiseFusion).lines == []
