"""Facts of every operator, which importer, placement, fixes and scales share.

A new operator with further inputs or attributes needs a line in ``RECIPES``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from qdqtool.evidence import Case
from qdqtool.fixing import pairs
from qdqtool.insertion.placement import is_average_pooling
from qdqtool.insertion.scales import find_scale_groups
from qdqtool.ir import operators, qdq
from qdqtool.ir.graph import Model
from qdqtool.ir.operators import OPERATORS, LayerKind, Operator, weight_scale_axis
from qdqtool.patterns.pointwise import activation_input
from qdqtool.patterns.view import View, find_consumers
from qdqtool.trt import importer
from qdqtool.trt.float_fusions import FloatFusions
from qdqtool.trt.outcome import simulate
from qdqtool.trt.pipeline import case_id
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import target_named
from qdqtool.trt.trace import RUNNING, SWAPPING
from tests.fixing.steps import find_sites
from tests.insertion.nets import run
from tests.trt.builder import Graph

Recipe = Callable[[Graph, str], list[str]]
TARGET = target_named("trt8.5")
OPSET = 19
SHAPE = (1, 8, 8, 8)


def _plain(op: str, **attributes: Any) -> Recipe:
    return lambda g, x: [g.op(op, x, "op", **attributes)]


def _with(op: str, constants: dict[str, Any], **attributes: Any) -> Recipe:
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
        _with("Resize", {"roi": None, "scales": np.array([1, 1, 2, 2], np.float32)}, mode="cubic"),
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
# Latest opset of standard operators that newer opsets do not have.
OLD = {"Upsample": 9}


@pytest.fixture
def g() -> Graph:
    return Graph(opset=OPSET)


def is_standard(operator: Operator) -> bool:
    return onnx.defs.has(operator.name, 20)


def recipes(operator: Operator) -> list[Recipe]:
    return RECIPES.get(operator.name) or [_plain(operator.name)]


def forms(matches: Callable[[Operator], object]) -> list[Any]:
    return [
        pytest.param(operator, recipe, id=f"{operator.name} {number}")
        for operator in OPERATORS.values()
        if matches(operator)
        for number, recipe in enumerate(recipes(operator))
    ]


def build_quantized(recipe: Recipe, second: float = 0.1) -> tuple[Model, list[str]]:
    g = Graph(opset=OPSET)
    results = recipe(g, g.conv(g.input(*SHAPE), "before"))
    outputs = [
        g.op("Neg", g.pair(t, f"q{i}", second if i else 0.1), f"end{i}")
        for i, t in enumerate(results)
    ]
    return Model(g.model(*outputs)), results


def find_passed_operators(prediction: Prediction) -> list[str]:
    return [
        e.subject
        for e in prediction.trace
        if (e.pass_name, e.kind)
        in (("VanillaSwapWithFollowingQ", SWAPPING), ("SplitQAcrossPrecedingFanIn", RUNNING))
    ]


def has_one_input(operator: Operator) -> bool:
    return (
        operator.weights is None
        and not operator.operation
        and not operator.myelin
        and operator.name not in ("PRelu", "BatchNormalization", "LayerNormalization")
        and operator.kind not in (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE, LayerKind.SHAPE)
    )


# Operators that a Q passes ------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.passage))
def test_q_passes_operator_in_simulation_and_placement(operator: Operator, recipe: Recipe) -> None:
    model, results = build_quantized(recipe)
    node = model.node("op")
    assert operators.find_passage(model, node) is not None
    assert operators.commuting_inputs(model, node)
    prediction = simulate(model, TARGET)
    is_layer = any("op" in layer.nodes for layer in prediction.layers)  # an Identity is not
    assert "op" in find_passed_operators(prediction) or not is_layer
    assert str(next(c for c in prediction.convolutions if c.name == "before").output) == "INT8"
    (group,) = find_scale_groups(model, ["before:0", *results])
    assert set(group.quantized) == {"before:0", *results}
    assert {u.kind for u in find_consumers(View(model), "before:0")} == {"q"}


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.passage))
def test_fix_unifies_scales_across_operator_that_a_q_passes(
    g: Graph, operator: Operator, recipe: Recipe
) -> None:
    before = g.relu(g.conv(g.input(*SHAPE), "before"), "relu")
    ends = [
        g.op("Neg", g.pair(t, f"q{i}", 0.2), f"end{i}") for i, t in enumerate(recipe(g, before))
    ]
    model = Model(g.model(*ends, g.op("Neg", g.pair(before, "own", 0.1), "last")))
    (site,) = [
        s for s in find_sites(pairs.find_different_scales, model) if "quantizers" in s.description
    ]
    assert "instead of" in site.description


@pytest.mark.parametrize(
    ("operator", "recipe"), forms(lambda o: not o.passage and has_one_input(o))
)
def test_q_does_not_pass_other_operator(operator: Operator, recipe: Recipe) -> None:
    model, results = build_quantized(recipe)
    assert operators.commuting_inputs(model, model.node("op")) == ()
    assert "op" not in find_passed_operators(simulate(model, TARGET))
    assert len(find_scale_groups(model, ["before:0", *results])) == 1 + len(results)


SCALE = np.float32(2.0**-5)
VALUES = np.random.default_rng(0).normal(0, 1.5, SHAPE).astype(np.float32)


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.passage and is_standard(o)))
def test_q_commutes_with_operator_that_it_passes(operator: Operator, recipe: Recipe) -> None:
    # Q(op(x)) equals op(Q(x)) if the passage is exact. Otherwise both differ by at most a step.
    g = Graph(opset=OLD.get(operator.name, OPSET))
    proto = g.model(*recipe(g, g.input(*SHAPE)))
    passage = operators.find_passage(Model(proto), Model(proto).node("op"))
    # A mean of saturated values is not the saturated mean.
    x = VALUES if passage.exact else VALUES.clip(-127 * SCALE, 127 * SCALE)
    plain, quantized = run(proto, {"x": x}), run(proto, {"x": fake_quantize(x)})
    for q_after, q_before in zip(map(fake_quantize, plain), quantized, strict=True):
        if passage.exact:
            assert np.array_equal(q_after, q_before)
        else:
            assert np.abs(q_after - fake_quantize(q_before)).max() <= SCALE


def fake_quantize(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (np.clip(np.rint(x / SCALE), -128, 127) * SCALE).astype(np.float32)


def test_linear_resize_does_not_commute_with_q(g: Graph) -> None:
    proto = g.model(*RECIPES["Resize"][1](g, g.input(*SHAPE)))
    (plain,), (quantized,) = (run(proto, {"x": x}) for x in (VALUES, fake_quantize(VALUES)))
    assert not np.array_equal(fake_quantize(plain), fake_quantize(quantized))


@pytest.mark.parametrize("name", [o.name for o in OPERATORS.values() if o.joins])
def test_q_passes_operator_that_joins(g: Graph, name: str) -> None:
    x = g.input(*SHAPE)
    a, b = g.conv(x, "a"), g.conv(x, "b")
    model = Model(g.model(g.op("Neg", g.pair(g.op(name, [a, b], "op", axis=1), "q"), "end")))
    assert operators.commuting_inputs(model, model.node("op")) == (a, b)
    assert [str(c.output) for c in simulate(model, TARGET).convolutions] == ["INT8", "INT8"]
    (group,) = find_scale_groups(model, ["op:0"])
    assert set(group.sources) == {a, b}


# Joins and cuts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.cuts))
def test_operator_that_cuts_returns_values_of_its_input(
    g: Graph, operator: Operator, recipe: Recipe
) -> None:
    proto = g.model(*recipe(g, g.input(*SHAPE)))
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    for part in run(proto, {"x": x}):
        assert np.isin(part, x).all()


# Activations --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operator", [o for o in OPERATORS.values() if o.activation], ids=lambda o: o.name
)
def test_all_packages_recognize_activation(g: Graph, operator: Operator) -> None:
    out = g.op(operator.name, g.conv(g.input(*SHAPE), "c"), "act")
    model = Model(g.model(g.op("Neg", g.pair(out, "q"), "end")))
    (conv,) = simulate(model, TARGET).convolutions
    assert (str(conv.output), conv.fused) == ("INT8", ["act"])
    assert activation_input(model, model.node("act")) == "c:0"
    layer = FloatFusions(model).layers["c"]
    assert (layer.nodes, layer.out.source) == (["c", "act"], "act:0")


@pytest.mark.parametrize(
    ("build", "is_activation"),
    [
        *(
            pytest.param(
                lambda g, x, name=o.name: g.op("Mul", [x, g.op(name, x, "gate")], "act"),
                True,
                id=f"product with {o.name}",
            )
            for o in OPERATORS.values()
            if o.activation and o.activation.gate
        ),
        pytest.param(
            lambda g, x: g.op(
                "PRelu", [x, g.const("slope", np.full((8, 1, 1), 0.1, np.float32))], "act"
            ),
            False,
            id="PRelu",
        ),
        pytest.param(lambda g, x: g.op("Softmax", x, "act"), False, id="Softmax"),
        pytest.param(lambda g, x: g.op("LogSoftmax", x, "act"), False, id="LogSoftmax"),
    ],
)
def test_product_with_gate_is_an_activation_but_other_operators_are_not(
    g: Graph, build: Callable[[Graph, str], str], is_activation: bool
) -> None:
    model = Model(g.model(g.op("Neg", g.pair(build(g, g.conv(g.input(*SHAPE), "c")), "q"), "end")))
    (outcome,) = simulate(model, TARGET).convolutions
    assert (str(outcome.output) == "INT8" and "act" in outcome.fused) is is_activation
    assert activation_input(model, model.node("act")) == ("c:0" if is_activation else None)


@pytest.mark.parametrize(
    ("operator", "recipe"),
    forms(lambda o: o.kind in (LayerKind.ACTIVATION, LayerKind.UNARY) and is_standard(o)),
)
def test_pointwise_operator_commutes_with_permutation(operator: Operator, recipe: Recipe) -> None:
    # Each value depends on the value at the same place only.
    g = Graph(opset=20)
    proto = g.model(*recipe(g, g.input(*SHAPE)))
    proto.ir_version = 9
    x = np.random.default_rng(0).uniform(0.1, 2.0, SHAPE).astype(np.float32)
    order = np.random.default_rng(1).permutation(x.size)
    (plain,) = run(proto, {"x": x})
    (permuted,) = run(proto, {"x": x.reshape(-1)[order].reshape(SHAPE)})
    assert np.allclose(plain.reshape(-1)[order], permuted.reshape(-1), rtol=1e-6, atol=1e-7)


# Averages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "recipe"), forms(lambda o: o.averages))
def test_average_runs_in_int8_like_pooling(g: Graph, operator: Operator, recipe: Recipe) -> None:
    (out,) = recipe(g, g.pair(g.conv(g.input(*SHAPE), "c"), "in"))
    model = Model(g.model(g.op("Neg", g.pair(out, "q"), "end")))
    assert is_average_pooling(model, model.node("op"))
    layer = next(la for la in simulate(model, TARGET).layers if "op" in la.nodes)
    assert {str(t.precision) for t in (*layer.inputs, *layer.outputs)} == {"INT8"}


# Weights ------------------------------------------------------------------------------------------


def build_with_weights(operator: Operator) -> tuple[onnx.ModelProto, int]:
    shapes = {"Conv": (4, 3, 3, 3), "ConvTranspose": (3, 4, 2, 2), "Gemm": (3, 4), "MatMul": (3, 4)}
    shape = shapes[operator.name]
    data = (1, 3, 6, 6) if len(shape) == 4 else (2, 3)
    value = np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node(operator.name, ["x", "w"], ["y"], "n")],
            "g",
            [onnx.helper.make_tensor_value_info("x", 1, data)],
            [onnx.helper.make_tensor_value_info("y", 1, None)],
            [onnx.numpy_helper.from_array(value, "w")],
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=9,
    ), len(shape)


@pytest.mark.parametrize(
    "operator", [o for o in OPERATORS.values() if o.weights], ids=lambda o: o.name
)
def test_output_axis_of_weights(operator: Operator) -> None:
    # A factor for each index along the axis becomes a factor for each output channel.
    proto, rank = build_with_weights(operator)
    model = Model(proto)
    node = model.node("n")
    axis = operators.output_axis(node, rank)
    assert weight_scale_axis(node, rank, True) == axis is not None
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


@pytest.mark.parametrize(
    "operator",
    [o for o in OPERATORS.values() if o.weights and o.kind != LayerKind.MATRIX_MULTIPLY],
    ids=lambda o: o.name,
)
@pytest.mark.parametrize("axis", [0, 1])
def test_weights_quantized_along_outputs_run_in_int8(
    g: Graph, operator: Operator, axis: int
) -> None:
    data, weights = g.pair(g.input(1, 8, 8, 8), "in"), g.weights("n", (8, 8, 3, 3), "qdq", axis)
    model = Model(g.model(g.op(operator.name, [data, weights], "n", kernel_shape=[3, 3])))
    (outcome,) = simulate(model, TARGET).convolutions
    # TensorRT requires scales along the output channels: axis 0 of a Conv, axis 1 of a ConvTranspose.
    assert (str(outcome.precision) == "INT8") is (axis == operators.output_axis(model.node("n"), 4))


# The table itself ---------------------------------------------------------------------------------


def test_cases_of_operators_state_their_evidence() -> None:
    for operator in OPERATORS.values():
        for case in operator.cases:
            assert isinstance(case, Case) and case.says and (case.builds or case.source)
            assert case_id(case)


def test_quantizers_are_q_and_dq() -> None:
    kinds = (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE)
    assert {o.name for o in OPERATORS.values() if o.kind in kinds} == {qdq.Q, qdq.DQ}


@pytest.mark.parametrize("name", sorted(OPERATORS))
@pytest.mark.parametrize("domain", ["", "my.plugins"])
def test_of_depends_on_domain(name: str, domain: str) -> None:
    node = onnx.helper.make_node(name, ["x"], ["y"], "n", domain=domain)
    model = Model(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [])))
    assert operators.operator_of(model.node("n")).name == ("" if domain else name)
