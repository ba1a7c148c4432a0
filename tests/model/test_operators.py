"""Every operator of the table, walked: importer, placement, fixing and flow agree about it, and numbers prove its laws.

A new operator needs a line in ``RECIPES`` only where one input and no attributes do not make it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

from qdqtool.fixing import pairs
from qdqtool.insertion.placement import is_averaging
from qdqtool.insertion.scales import scale_groups
from qdqtool.insertion.structure import weight_scale_axis
from qdqtool.knowledge.tables import Case
from qdqtool.model import operators, qdq
from qdqtool.model.graph import Model
from qdqtool.model.operators import OPERATORS, LayerKind, Operator
from qdqtool.model.pointwise import activation_input
from qdqtool.model.view import View, uses
from qdqtool.trt import importer
from qdqtool.trt.outcome import simulate
from qdqtool.trt.pipeline import id_of
from qdqtool.trt.taken import Taken
from qdqtool.trt.targets import target_named
from qdqtool.trt.trace import RUNNING, SWAPPING
from qdqtool.types import Prediction
from tests.fixing.steps import sites
from tests.insertion.nets import run
from tests.trt.builder import Graph

Recipe = Callable[[Graph, str], list[str]]
TARGET = target_named("trt8.5")
OPSET = 19
SHAPE = (1, 8, 8, 8)


def _plain(op: str, **attributes: Any) -> Recipe:
    return lambda g, x: [g.op(op, x, "op", **attributes)]


def _with(op: str, constants: dict[str, Any], **attributes: Any) -> Recipe:
    """An operator whose further inputs are constants; an empty name leaves one out."""
    return lambda g, x: [
        g.op(
            op,
            [x, *("" if v is None else g.const(f"op.{k}", v) for k, v in constants.items())],
            "op",
            **attributes,
        )
    ]


def _ints(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


PADS = _ints(0, 0, 1, 1, 0, 0, 1, 1)
RECIPES: dict[str, list[Recipe]] = {
    "Pad": [
        _with("Pad", {"pads": PADS, "value": np.float32(0)}),
        _with("Pad", {"pads": PADS}, mode="reflect"),
        _with("Pad", {"pads": PADS}, mode="edge"),
        _with("Pad", {"pads": PADS}, mode="wrap"),
    ],
    "Resize": [
        _with(
            "Resize", {"roi": None, "scales": np.array([1, 1, 2, 2], np.float32)}, mode="nearest"
        ),
        _with("Resize", {"roi": None, "scales": np.array([1, 1, 2, 2], np.float32)}, mode="linear"),
    ],
    "Upsample": [_with("Upsample", {"scales": np.array([1, 1, 2, 2], np.float32)}, mode="nearest")],
    "MaxPool": [_plain("MaxPool", kernel_shape=[2, 2], strides=[2, 2])],
    "AveragePool": [_plain("AveragePool", kernel_shape=[2, 2], strides=[2, 2])],
    "ReduceMean": [_with("ReduceMean", {"axes": _ints(2, 3)}, keepdims=1)],
    "Concat": [lambda g, x: [g.concat([x, x], "op")]],
    "Slice": [lambda g, x: [g.slice(x, "op", 0, 4)]],
    "Tile": [_with("Tile", {"repeats": _ints(1, 1, 1, 2)})],
    "Split": [lambda g, x: g.ops("Split", [x, g.const("op.parts", _ints(4, 4))], "op", 2, axis=1)],
    "Reshape": [_with("Reshape", {"shape": _ints(1, 8, 4, 16)})],
    "Transpose": [_plain("Transpose", perm=[0, 2, 3, 1])],
    "Squeeze": [_with("Squeeze", {"axes": _ints(0)})],
    "Unsqueeze": [_with("Unsqueeze", {"axes": _ints(0)})],
    "DepthToSpace": [_plain("DepthToSpace", blocksize=2)],
    "SpaceToDepth": [_plain("SpaceToDepth", blocksize=2)],
    "Cast": [_plain("Cast", to=1)],
}
# Which standard operators onnxruntime cannot run as they are: older than its models' opset.
OLD = {"Upsample": 9}


def is_standard(operator: Operator) -> bool:
    """Not one that is known from exporters of other frameworks alone."""
    return onnx.defs.has(operator.name, 20)


def recipes(operator: Operator) -> list[Recipe]:
    return RECIPES.get(operator.name) or [_plain(operator.name)]


def forms(chosen: Callable[[Operator], object]) -> list[tuple[Operator, Recipe]]:
    """Each operator that is chosen, in each of its forms."""
    return [
        (operator, recipe)
        for operator in OPERATORS.values()
        if chosen(operator)
        for recipe in recipes(operator)
    ]


def quantized(recipe: Recipe, second: float = 0.1) -> tuple[Model, list[str]]:
    """A convolution, the operator, and a convolution that reads each result through a pair."""
    g = Graph(opset=OPSET)
    before = g.conv(g.input(*SHAPE), "before")
    results = recipe(g, before)
    outputs = [
        g.op("Neg", g.pair(t, f"q{i}", second if i else 0.1), f"end{i}")
        for i, t in enumerate(results)
    ]
    return Model(g.model(*outputs)), results


def moved(prediction: Prediction) -> list[str]:
    """What a Q moved up past."""
    return [
        e.subject
        for e in prediction.trace
        if (e.pass_name, e.kind)
        in (("VanillaSwapWithFollowingQ", SWAPPING), ("SplitQAcrossPrecedingFanIn", RUNNING))
    ]


def _one_input(operator: Operator) -> bool:
    """Whether one input makes the operator; the others are tested where their facts are."""
    two = ("PRelu", "BatchNormalization", "LayerNormalization")
    return (
        operator.weights is None
        and not operator.operation
        and not operator.myelin
        and operator.name not in two
        and operator.kind not in (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE, LayerKind.SHAPE)
    )


# What a Q passes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.passage))
def test_all_rooms_let_a_q_pass_and_fix_unifies_across_it(
    operator: Operator, recipe: Recipe
) -> None:
    model, results = quantized(recipe)
    node = model.node("op")
    assert operators.passage(model, node) is not None
    assert operators.inputs_behind_q(model, node)
    prediction = simulate(model, TARGET)
    gone = not any(
        "op" in layer.nodes for layer in prediction.layers
    )  # an Identity is no layer at all
    assert "op" in moved(prediction) or gone, "the simulator does not move the Q"
    outcome = next(c for c in prediction.convolutions if c.name == "before")
    assert str(outcome.output) == "INT8"
    (group,) = scale_groups(model, ["before:0", *results])
    assert set(group.quantized) == {"before:0", *results}
    view = View(model)
    assert {u.kind for u in uses(view, "before:0")} == {"q"}
    g = Graph(opset=OPSET)
    before = g.relu(g.conv(g.input(*SHAPE), "before"), "relu")
    ends = [
        g.op("Neg", g.pair(t, f"q{i}", 0.2), f"end{i}") for i, t in enumerate(recipe(g, before))
    ]
    model = Model(g.model(*ends, g.op("Neg", g.pair(before, "own", 0.1), "last")))
    (site,) = [s for s in sites(pairs.scales, model) if "quantizers" in s.what]
    assert "instead of" in site.what


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: not o.passage and _one_input(o)))
def test_no_room_lets_a_q_pass_what_is_not_listed(operator: Operator, recipe: Recipe) -> None:
    model, results = quantized(recipe)
    node = model.node("op")
    assert operators.inputs_behind_q(model, node) == ()
    assert "op" not in moved(simulate(model, TARGET))
    assert len(scale_groups(model, ["before:0", *results])) == 1 + len(results)


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.passage and is_standard(o)))
def test_the_law_of_passing_holds_in_numbers(operator: Operator, recipe: Recipe) -> None:
    """Q(op(x)) is op(Q(x)) where the passage is exact, and a step apart at most where it is not."""
    g = Graph(opset=OLD.get(operator.name, OPSET))
    results = recipe(g, g.input(*SHAPE))
    proto = g.model(*results)
    passage = operators.passage(Model(proto), Model(proto).node("op"))
    assert passage is not None
    random = np.random.default_rng(0)
    scale = np.float32(2.0**-5)
    x = random.normal(0, 1.5, SHAPE).astype(np.float32)
    if not passage.exact:  # a mean of saturated values is not the saturated mean
        x = x.clip(-127 * scale, 127 * scale)
    for behind, in_front in zip(
        run(proto, {"x": x}), run(proto, {"x": _fake(x, scale)}), strict=True
    ):
        distance = np.abs(_fake(behind, scale) - _fake(in_front, scale)).max()
        assert distance <= (0 if passage.exact else scale)
        if passage.exact:
            assert np.array_equal(_fake(behind, scale), in_front)


def _fake(x: npt.NDArray[np.float32], scale: np.float32) -> npt.NDArray[np.float32]:
    """Q and DQ as ONNX defines them, symmetric int8."""
    return (np.clip(np.rint(x / scale), -128, 127) * scale).astype(np.float32)


def test_what_joins_and_what_is_inexact() -> None:
    """The table says so; were it exact, the entry would be wrong."""
    g = Graph(opset=OPSET)
    proto = g.model(*RECIPES["Resize"][1](g, g.input(*SHAPE)))
    scale = np.float32(2.0**-5)
    x = np.random.default_rng(0).normal(0, 1.5, SHAPE).astype(np.float32)
    (behind,), (in_front,) = run(proto, {"x": x}), run(proto, {"x": _fake(x, scale)})
    assert not np.array_equal(_fake(behind, scale), _fake(in_front, scale))
    for operator in OPERATORS.values():
        if not operator.joins:
            continue
        g = Graph(opset=OPSET)
        x = g.input(*SHAPE)
        a, b = g.conv(x, "a"), g.conv(x, "b")
        model = Model(
            g.model(g.op("Neg", g.pair(g.op(operator.name, [a, b], "op", axis=1), "q"), "end"))
        )
        assert operators.inputs_behind_q(model, model.node("op")) == (a, b)
        assert [str(c.output) for c in simulate(model, TARGET).convolutions] == ["INT8", "INT8"]
        (group,) = scale_groups(model, ["op:0"])
        assert set(group.sources) == {a, b}


# Joins and cuts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.cuts))
def test_what_cuts_gives_parts(operator: Operator, recipe: Recipe) -> None:
    g = Graph(opset=OPSET)
    proto = g.model(*recipe(g, g.input(*SHAPE)))
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    for part in run(proto, {"x": x}):
        assert np.isin(part, x).all()


# Activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operator", [o for o in OPERATORS.values() if o.activation], ids=lambda o: o.name
)
def test_all_rooms_take_an_activation_for_one(operator: Operator) -> None:
    g = Graph(opset=OPSET)
    out = g.op(operator.name, g.conv(g.input(*SHAPE), "c"), "act")
    model = Model(g.model(g.op("Neg", g.pair(out, "q"), "end")))
    act = model.node("act")
    (found,) = simulate(model, TARGET).convolutions
    assert (str(found.output), found.fused) == ("INT8", ["act"])
    assert activation_input(model, act) == "c:0"
    layer = Taken(model).nodes["c"]
    assert (layer.nodes, layer.out.source) == (["c", "act"], "act:0")


@pytest.mark.parametrize(
    "operator",
    [o for o in OPERATORS.values() if o.activation and o.activation.gate],
    ids=lambda o: o.name,
)
def test_x_times_its_gate_is_an_activation(operator: Operator) -> None:
    g = Graph(opset=OPSET)
    conv = g.conv(g.input(*SHAPE), "c")
    out = g.op("Mul", [conv, g.op(operator.name, conv, "gate")], "mul")
    model = Model(g.model(g.op("Neg", g.pair(out, "q"), "end")))
    (found,) = simulate(model, TARGET).convolutions
    assert (str(found.output), sorted(found.fused)) == ("INT8", ["gate", "mul"])
    assert activation_input(model, model.node("mul")) == "c:0"


@pytest.mark.parametrize("name", ["PRelu", "Softmax", "LogSoftmax"])
def test_what_is_no_activation_is_none_anywhere(name: str) -> None:
    g = Graph(opset=OPSET)
    conv = g.conv(g.input(*SHAPE), "c")
    inputs = (
        [conv, g.const("slope", np.full((8, 1, 1), 0.1, np.float32))] if name == "PRelu" else [conv]
    )
    model = Model(g.model(g.op("Neg", g.pair(g.op(name, inputs, "act"), "q"), "end")))
    (found,) = simulate(model, TARGET).convolutions
    assert (found.output, found.fused) != ("INT8", ["act"])
    assert activation_input(model, model.node("act")) is None


@pytest.mark.parametrize(
    ("operator", "recipe"),
    forms(lambda o: o.kind in (LayerKind.ACTIVATION, LayerKind.UNARY) and is_standard(o)),
)
def test_what_is_called_pointwise_is(operator: Operator, recipe: Recipe) -> None:
    """Each value depends on the value at its place alone: what is permuted in front comes out permuted."""
    g = Graph(opset=20)
    proto = g.model(*recipe(g, g.input(*SHAPE)))
    proto.ir_version = 9
    x = np.random.default_rng(0).uniform(0.1, 2.0, SHAPE).astype(np.float32)
    order = np.random.default_rng(1).permutation(x.size)
    (plain,) = run(proto, {"x": x})
    (permuted,) = run(proto, {"x": x.reshape(-1)[order].reshape(SHAPE)})
    assert np.allclose(plain.reshape(-1)[order], permuted.reshape(-1), rtol=1e-6, atol=1e-7)


# Averages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.averages))
def test_all_rooms_take_an_average_for_a_pooling(operator: Operator, recipe: Recipe) -> None:
    g = Graph(opset=OPSET)
    (out,) = recipe(g, g.pair(g.conv(g.input(*SHAPE), "c"), "in"))
    model = Model(g.model(g.op("Neg", g.pair(out, "q"), "end")))
    node = model.node("op")
    assert is_averaging(model, node)
    layer = next(la for la in simulate(model, TARGET).layers if "op" in la.nodes)
    assert {str(t.precision) for t in (*layer.inputs, *layer.outputs)} == {"INT8"}


# Weights --------------------------------------------------------------------------------------------------------


def weighted(operator: Operator) -> tuple[onnx.ModelProto, int]:
    """A node with constant weights, float, and their rank; four outputs of three inputs."""
    shapes = {"Conv": (4, 3, 3, 3), "ConvTranspose": (3, 4, 2, 2), "Gemm": (3, 4), "MatMul": (3, 4)}
    shape = shapes[operator.name]
    data = (1, 3, 6, 6) if len(shape) == 4 else (2, 3)
    value = np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)
    node = helper.make_node(operator.name, ["x", "w"], ["y"], "n")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, data)],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(value, "w")],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9
    ), len(shape)


@pytest.mark.parametrize(
    "operator", [o for o in OPERATORS.values() if o.weights], ids=lambda o: o.name
)
def test_the_axis_of_weights_is_that_of_the_outputs(operator: Operator) -> None:
    """A factor for each index along the axis comes out as a factor for each output channel."""
    proto, rank = weighted(operator)
    model = Model(proto)
    node = model.node("n")
    axis = operators.output_axis(node, rank)
    assert axis is not None
    assert weight_scale_axis(node, rank, True) == axis
    assert (
        next(la for la in importer.build(model).layers.values() if la.name == "n").weights.axis
        == axis
    )
    factor = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    x = np.random.default_rng(1).normal(
        0, 1, [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    )
    (plain,) = run(proto, {"x": x.astype(np.float32)})
    value = onnx.numpy_helper.to_array(proto.graph.initializer[0])
    scaled = value * factor.reshape([-1 if i == axis else 1 for i in range(rank)])
    proto.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(scaled.astype(np.float32), "w")
    )
    (outputs,) = run(proto, {"x": x.astype(np.float32)})
    channel = 1 if rank == 4 else outputs.ndim - 1
    expected = plain * factor.reshape([-1 if i == channel else 1 for i in range(outputs.ndim)])
    assert np.allclose(outputs, expected, rtol=1e-5, atol=1e-5)


def test_a_weight_quantizer_along_the_inputs_is_refused() -> None:
    for operator in (
        o for o in OPERATORS.values() if o.weights and o.kind != LayerKind.MATRIX_MULTIPLY
    ):
        outcomes = []
        for axis in (0, 1):
            g = Graph(opset=OPSET)
            data = g.pair(g.input(1, 8, 8, 8), "in")
            weights = g.weights("n", (8, 8, 3, 3), "qdq", axis)
            model = Model(g.model(g.op(operator.name, [data, weights], "n", kernel_shape=[3, 3])))
            (found,) = simulate(model, TARGET).convolutions
            outcomes.append(str(found.precision))
        wanted = operators.output_axis(model.node("n"), 4)
        assert outcomes[wanted or 0] == "INT8"


# The table itself -----------------------------------------------------------------------------------------------


def test_facts_and_names_of_operators() -> None:
    for operator in OPERATORS.values():
        for case in operators.cases_of(operator):
            assert isinstance(case, Case) and case.says and (case.builds or case.source)
            assert id_of(case)
    assert {
        o.name for o in OPERATORS.values() if o.kind in (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE)
    } == {qdq.Q, qdq.DQ}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_of_asks_for_the_domain(name: str) -> None:
    own = Model(
        helper.make_model(
            helper.make_graph([helper.make_node(name, ["x"], ["y"], "n")], "g", [], [])
        )
    )
    foreign = Model(
        helper.make_model(
            helper.make_graph(
                [helper.make_node(name, ["x"], ["y"], "n", domain="my.plugins")], "g", [], []
            )
        )
    )
    assert operators.of(own.node("n")).name == name
    assert operators.of(foreign.node("n")).name == ""
