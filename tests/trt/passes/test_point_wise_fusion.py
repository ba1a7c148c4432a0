"""PointWiseFusion: decomposed BatchNormalization (yolo line 5233), Add_5 with Div_1 (yolov8), SiLU."""

import numpy as np
import pytest

from qdqtool.model.modelfile import load
from qdqtool.model.operators import LayerKind
from qdqtool.prediction import predict
from qdqtool.trt import importer
from qdqtool.trt.passes._infra import MAX_JOINED
from qdqtool.trt.passes.point_wise_fusion import PointWiseFusion
from qdqtool.trt.refusals import InsideActivation
from qdqtool.trt.targets import TARGETS, target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import step


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
def test_silu(g: Graph, target: str, name: str) -> None:
    found = step(
        g.model(g.silu(g.conv(g.input(1, 3, 8, 8), "c"), "a")), PointWiseFusion, target=target
    )
    assert found.rows == [("Running", "a.s"), ("Fusing", "a.s", "a.m")]
    layer = found.layer(name)
    assert layer.kind == LayerKind.POINTWISE
    assert [t.source for t in layer.inputs] == ["c:0"]


def test_sums_products_and_squares(g: Graph) -> None:
    """yolov8-orin-trt8412-excerpts: Add_5 with Div_1."""
    total = g.add(
        g.op("Softmax", g.input(1, 8), "s1"),
        g.op("Softmax", g.input(1, 8, name="y"), "s2"),
        "Add_5",
    )
    found = step(g.model(g.op("Div", [total, g.const("two", [[2.0]])], "Div_1")), PointWiseFusion)
    assert found.rows == [("Running", "Add_5"), ("Fusing", "Add_5", "Div_1")]
    assert found.has("PWN(Add_5, Div_1)")
    g = Graph()
    x = g.op("Exp", g.input(1, 8), "e")
    found = step(g.model(g.op("Mul", [x, x], "m")), PointWiseFusion)
    assert found.rows == [("Running", "e"), ("Fusing", "e", "m")]
    assert len(found.layer("PWN(e, m)").inputs) == 1
    g = Graph()
    x = g.relu(g.op("Exp", g.input(1, 8), "e"), "r")
    assert step(g.model(g.op("Neg", x, "n")), PointWiseFusion).rows == []
    g = Graph()
    x = g.op("Exp", g.input(1, 8), "e")
    assert step(g.model(g.op("Neg", x, "n"), g.op("Softmax", x, "s")), PointWiseFusion).rows == []
    assert step(g.model(g.nodes[1].output[0], x), PointWiseFusion).rows == []
    g = Graph()
    x = g.input(1, 8, 8, 8)
    total = g.add(g.bn(g.conv(x, "c"), "bn"), x, "add")
    assert step(g.model(g.op("Exp", total, "e")), PointWiseFusion).rows == []
    g = Graph()
    a = g.pair(g.op("Softmax", g.input(1, 8), "s1"), "p")
    b = g.pair(g.op("Softmax", g.input(1, 8, name="y"), "s2"), "q")
    assert step(g.model(g.op("Exp", g.add(a, b, "add"), "e")), PointWiseFusion).rows == []


def test_nesting_and_unknown_sizes(g: Graph) -> None:
    """yolo-resnet18-orin-trt8502, lines 5233 to 5236: PWN(PWN(a, b), c)."""
    x = g.op("Neg", g.op("Exp", g.op("Abs", g.input(1, 8), "a"), "b"), "c")
    found = step(g.model(x), PointWiseFusion)
    assert found.rows == [
        ("Running", "a"),
        ("Fusing", "a", "b"),
        ("Running", "PWN(a, b)"),
        ("Fusing", "PWN(a, b)", "c"),
    ]
    assert found.has("PWN(PWN(a, b), c)")
    g = Graph()
    # Its data may lie in a file that is not at hand
    model = g.model(g.op("Max", [g.op("Softmax", g.input(1, 8), "s"), g.const("k", [[2.0]])], "m"))
    for known in (True, False):
        network = importer.build(load(model))
        network.order()
        (constant,) = network.of_kind(LayerKind.CONSTANT)
        constant.dims = constant.dims if known else None
        PointWiseFusion(target_named("trt8.5")).run(network)
        assert network.alive(constant) is not known


@pytest.mark.parametrize("target", ["trt8.4", "trt8.5", "trt10"])
@pytest.mark.parametrize(("shape", "taken"), [((1,), True), ((8, 1, 1), False)])
def test_one_number_is_taken_in_with_what_shaped_it(
    g: Graph, shape: tuple[int, ...], taken: bool, target: str
) -> None:
    """Before the chains or behind them, as the target does it; one number for each channel stays a constant."""
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    to = np.array([1, *shape] if len(shape) > 1 else [1, 1, 1, 1])
    shaped = g.op("Reshape", [g.const("k", np.full(shape, 2.0)), g.const("to", to)], "shape")
    found = step(g.model(g.op("Tanh", g.op("Max", [x, shaped], "m"), "t")), PointWiseFusion, target)
    kinds = {layer.kind for layer in found.network.layers.values()}
    assert (LayerKind.CONSTANT not in kinds and LayerKind.SHUFFLE not in kinds) is taken
    first = next(row for row in found.rows if row[0] == "Fusing")
    assert first[1].startswith("k") is (taken and target_named(target).constants_first)


@pytest.mark.parametrize("target", sorted(t for t in TARGETS if not t.startswith("rtx")))
def test_an_add_that_a_convolution_may_take_is_left_to_it(g: Graph, target: str) -> None:
    """Where convolutions take a residual through their activation, the pointwise chain ends in front of the Add."""
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    out = g.add(g.silu(g.conv(x, "c"), "a"), g.pair(x, "skip", 0.07), "sum")
    rows = step(g.model(g.op("Neg", g.pair(out, "next"), "n")), PointWiseFusion, target).rows
    assert (
        any("sum" in part for row in rows for part in row)
        is not target_named(target).residual_through_activation
    )


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_of_several_numbers_one_operand_stays_computed(g: Graph, target: str) -> None:
    """Every number of a chain is taken in, but never all operands of a layer: nothing would be left to compute from."""
    x = g.op("Softmax", g.input(1, 8), "s")
    x = g.op("Max", [g.const("a", [[2.0]]), x], "m")
    found = step(g.model(g.op("Min", [x, g.const("b", [[3.0]])], "n")), PointWiseFusion, target)
    layer = next(
        layer for layer in found.network.layers.values() if layer.kind == LayerKind.POINTWISE
    )
    assert [t.source for t in layer.inputs] == ["s:0"]
    assert not any(layer.kind == LayerKind.CONSTANT for layer in found.network.layers.values())
    taken = [row[1:] for row in found.rows if row[0] == "Fusing"][:-1]
    assert taken == ([("a", "m"), ("b", "n")] if target_named(target).constants_first else [])
    assert "constant-operand" in [case.name for case in layer.cases]
    g = Graph()
    found = step(
        g.model(g.op("Max", [g.const("a", [[2.0]]), g.const("b", [[3.0]])], "m")),
        PointWiseFusion,
        target,
    )
    assert found.rows == [] and len(found.network.layers) == 3, (
        "nothing would be left to compute from"
    )


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
@pytest.mark.parametrize("why", ["relu", "myelin"])
def test_what_another_owns_takes_no_constant(g: Graph, why: str, target: str) -> None:
    """A sum that took its Relu has a kernel of its own; what Myelin took is Myelin's."""
    x = g.op("Softmax", g.input(1, 8), "s")
    model = g.model(g.op("Softmax", g.op("Max", [x, g.const("k", [[2.0]])], "m"), "t"))
    for owned in (False, True):
        network = importer.build(load(model))
        network.order()
        layer = next(layer for layer in network.layers.values() if layer.name == "m")
        if owned and why == "relu":
            layer.relu = "r"
        layer.in_myelin = owned and why == "myelin"
        result = PointWiseFusion(target_named(target)).run(network)
        assert (layer.kind == LayerKind.POINTWISE) is not owned
        assert len(layer.inputs) == 1 + owned
        assert bool(result.events) is (target_named(target).constants_first and not owned)


def test_numbers_and_members_of_chains(g: Graph) -> None:
    x = g.op("Softmax", g.input(1, 8), "s")
    two = g.const("two", [[2.0]])
    shaped = g.op("Reshape", [two, g.const("to", np.array([1, 1]))], "shape")
    out = g.op("Max", [x, shaped], "m")
    other = g.op("Min", [g.op("Softmax", x, "t"), shaped], "n")
    found = step(g.model(out, g.op("Softmax", other, "u")), PointWiseFusion)
    kinds = [layer.kind for layer in found.network.layers.values()]
    assert LayerKind.CONSTANT not in kinds and LayerKind.SHUFFLE not in kinds, (
        "the last reader takes it along"
    )
    g = Graph()
    x, two = g.op("Softmax", g.input(1, 8), "s"), g.const("two", [2.0])
    shaped = g.op(
        "Unsqueeze", [g.op("Identity", two, "i"), g.const("axes", np.array([0]))], "shape"
    )
    found = step(g.model(g.op("Max", [x, shaped], "m"), shaped), PointWiseFusion)
    left = found.network.of_kind(LayerKind.SHUFFLE, LayerKind.CONSTANT)
    assert any(layer.out.is_output for layer in left), "a network output is read as well"
    g = Graph()
    # MAX_JOINED layers become one and no more; the rest begins a chain of its own
    x = g.op("Softmax", g.input(1, 8), "s")
    for i in range(MAX_JOINED + 2):
        x = g.op("Neg", x, f"n{i}")
    found = step(g.model(x), PointWiseFusion)
    sizes = [
        len(layer.nodes)
        for layer in found.network.layers.values()
        if layer.kind == LayerKind.POINTWISE
    ]
    assert sizes == [MAX_JOINED, 2]


@pytest.mark.parametrize(
    ("case", "joined"),
    [
        ("per-channel", False),
        ("one-number", True),
        ("leaky", True),
        ("concat", False),
        ("relu-add", False),
    ],
)
def test_what_is_pointwise(g: Graph, case: str, joined: bool) -> None:
    """A scale of one number and every activation but Relu; not a scale for each channel, nor what moves data."""
    x = g.op("Exp", g.op("Softmax", g.input(1, 8, 4, 4), "s"), "e")
    if case == "per-channel":
        x = g.op("Mul", [x, g.const("k", np.linspace(1, 2, 8).reshape(1, 8, 1, 1))], "last")
    elif case == "one-number":
        x = g.op("Mul", [x, g.const("k", [2.0])], "last")
    elif case == "leaky":
        x = g.op("LeakyRelu", x, "last")
    elif case == "concat":
        x = g.concat([x], "last")
    else:
        x = g.relu(x, "last")
    rows = step(g.model(g.op("Softmax", x, "end")), PointWiseFusion).rows
    assert any(row[0] == "Fusing" and "last" in row[2] for row in rows) is joined


@pytest.mark.parametrize(
    ("form", "left"),
    [("bare", True), ("normalized", True), ("activated", False), ("read twice", False)],
)
def test_which_sums_are_left_for_a_convolution(g: Graph, form: str, left: bool) -> None:
    """A sum with a convolution's own output, through a BatchNormalization that it alone reads; not an activation."""
    x = g.op("Softmax", g.input(1, 8, 8, 8), "s")
    conv = g.conv(x, "c")
    if form in ("normalized", "read twice"):
        conv = g.bn(conv, "bn")
    if form == "activated":
        conv = g.op("Sigmoid", conv, "act")
    outputs = [g.op("Exp", g.add(conv, x, "add"), "e")]
    if form == "read twice":
        outputs.append(g.op("Softmax", conv, "other"))
    rows = step(g.model(*outputs), PointWiseFusion).rows
    assert any(row[0] == "Fusing" and "add" in "".join(row[1:]) for row in rows) is not left


@pytest.mark.parametrize(
    ("operand", "joined"), [("computed", ("a.m", "add")), ("itself", None), ("a product", None)]
)
def test_an_add_behind_an_activation_is_noted(
    g: Graph, operand: str, joined: tuple[str, str] | None
) -> None:
    """The node in front of the Add and the Add, where it joins two computed tensors: findings name them."""
    x = g.op("Softmax", g.input(1, 8), "s")
    act = g.silu(x, "a")
    other = {
        "computed": g.op("Softmax", x, "t"),
        "itself": act,
        "a product": g.op("Softmax", x, "u"),
    }[operand]
    out = g.op("Mul" if operand == "a product" else "Add", [act, other], "add")
    found = step(g.model(g.op("Softmax", g.op("Neg", out, "n"), "end")), PointWiseFusion)
    layer = next(
        layer for layer in found.network.layers.values() if layer.kind == LayerKind.POINTWISE
    )
    assert layer.joined == joined
    assert ("a.m" in layer.nodes, "add" in layer.nodes, "n" in layer.nodes) == (True, True, True)


def test_the_case_of_an_add_is_the_documented_one(g: Graph) -> None:
    """An Add behind a chain of several is the one of NVIDIA's answer; any other member of a chain is seen."""
    x = g.op("Softmax", g.input(1, 8), "s")
    out = g.add(g.silu(x, "a"), g.op("Softmax", x, "t"), "add")
    network = step(g.model(g.op("Softmax", out, "end")), PointWiseFusion).network
    layer = next(layer for layer in network.layers.values() if layer.kind == LayerKind.POINTWISE)
    assert [case.name for case in layer.cases] == ["chain", "with-add"]
    g = Graph()
    x = g.op("Softmax", g.input(1, 8), "s")
    out = g.add(g.op("Exp", x, "e"), g.op("Softmax", x, "t"), "add")
    network = step(g.model(g.op("Softmax", out, "end")), PointWiseFusion).network
    layer = next(layer for layer in network.layers.values() if layer.kind == LayerKind.POINTWISE)
    assert [case.name for case in layer.cases] == ["chain"]


@pytest.mark.parametrize(
    ("place", "act", "refused"),
    [
        ("inner", "Relu", ("p.Q", "act", False, False, "")),
        ("inner", "Clip", ("p.Q", "act", False, False, "")),
        ("inner", "Sigmoid", ("p.Q", "act", True, False, "")),
        ("gate", "Sigmoid", ("gate.Q", "act", True, True, "")),
        ("inner gate", "Sigmoid", ("p.Q", "act", True, False, "gate.Q")),
        ("behind", "Sigmoid", None),
        ("behind", "Relu", None),
        ("inner", "Softmax", None),
        ("gate", "Tanh", None),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("weights", ["qdq", "float"])
def test_a_pair_inside_an_activation_is_refused(
    g: Graph,
    place: str,
    act: str,
    refused: tuple[object, ...] | None,
    norm: bool,
    weights: str,
) -> None:
    """In front of the activation or of a SiLU's Mul, also behind a BatchNormalization; of INT8 convolutions alone."""
    x = g.conv(g.input(1, 8, 4, 4), "c", weights=weights)
    x = g.bn(x, "bn") if norm else x
    x = g.pair(x, "p", 0.1) if "inner" in place else x
    y = g.op(act, x, "act")
    y = g.pair(y, "gate", 0.01) if "gate" in place else y
    y = g.op("Mul", [x, y], "mul") if act in ("Sigmoid", "Tanh") else y
    y = g.pair(y, "p", 0.1) if place == "behind" else y
    refusals = step(g.model(y), PointWiseFusion).refusals
    found = [
        (r.node, r.activation, r.silu, r.gate, r.second)
        for r in refusals
        if isinstance(r, InsideActivation)
    ]
    assert found == ([refused] if refused is not None and weights == "qdq" else [])
    assert all(r.convolution == "c" for r in refusals if isinstance(r, InsideActivation))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("place", ["inner", "gate"])
def test_a_pair_inside_the_activation_of_a_matrix_product_is_reported(
    g: Graph, place: str, bias: bool
) -> None:
    """Behind the reshape of a product that became a convolution."""
    weights = g.pair(g.const("w", np.ones((8, 8), np.float32)), "q", 0.1)
    x = g.op("MatMul", [g.pair(g.input(4, 8), "a", 0.1), weights], "c")
    x = g.op("Add", [x, g.const("b", np.ones(8, np.float32))], "bias") if bias else x
    x = g.pair(x, "p", 0.1) if place == "inner" else x
    y = g.op("Sigmoid", x, "act")
    y = g.op("Mul", [x, g.pair(y, "gate", 0.01) if place == "gate" else y], "mul")
    found = [
        f.node for f in predict(g.model(y), target="trt8.5").findings if f.code == "SILU-INNER-Q"
    ]
    assert found == ["p.Q" if place == "inner" else "gate.Q"]
