import cProfile
import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.ir.qdq import ParameterValues, PerChannel, QuantParams, read_params
from qdqtool.patterns import pointwise
from qdqtool.patterns.heads import (
    find_attentions,
    find_coordinates,
    is_attention_probability,
    is_computed_product,
)
from qdqtool.patterns.layernorm import find_decomposed_layer_norms, layer_norm_inputs
from qdqtool.prediction import predict
from qdqtool.proto.subgraphs import find_dependencies, nested_graphs, with_subgraph_nodes
from qdqtool.reasons.text import format_scale
from tests.errors import has
from tests.insertion.nets import Net
from tests.insertion.transformers import Tokens, vit

# Attention and layer normalization


def test_attentions_of_vision_transformer() -> None:
    model = Model(vit())
    assert [
        (a.scores.name, a.softmax.name, a.values.name, a.probabilities)
        for a in find_attentions(model)
    ] == [
        (f"b{i}.attn.qk", f"b{i}.attn.soft", f"b{i}.attn.av", f"b{i}.attn.soft.out") for i in (0, 1)
    ]
    assert sum(is_computed_product(model, n) for n in model.nodes) == 4
    shares = [n.output for n in model.nodes if is_attention_probability(model, n.output)]
    assert shares == ["b0.attn.soft.out", "b1.attn.soft.out"]


def test_attention_through_mask_transpose_and_pair() -> None:
    # YOLO11 transposes the result of the Softmax and makes it the second operand.
    net = Tokens(4, 4)
    q, k, v = (
        net.op("Reshape", n, "x", net.const(f"{n}.shape", [1, 4, 16], np.int64)) for n in "qkv"
    )
    scores = net.op("MatMul", "qk", net.op("Transpose", "qt", q, perm=[0, 2, 1]), k)
    masked = net.op(
        "Add",
        "masked",
        net.op("Mul", "by", scores, net.const("s", 0.5)),
        net.const("m", np.zeros(16)),
    )
    soft = net.op("Softmax", "soft", masked, axis=-1)
    never = net.const("never", np.zeros((1, 16, 16), bool), bool)
    soft = net.op("Where", "where", never, net.const("zero", 0.0), soft)
    pair = net.op(
        "QuantizeLinear", "Q", soft, net.const("scale", 1 / 127), net.const("zp", 0, np.int8)
    )
    pair = net.op("DequantizeLinear", "DQ", pair, "scale", "zp")
    model = net.output(
        net.op("MatMul", "av", v, net.op("Transpose", "turned", pair, perm=[0, 2, 1]))
    ).index()
    (attention,) = find_attentions(model)
    assert (attention.scores.name, attention.values.name) == ("qk", "av")
    assert attention.probabilities == "turned.out"
    assert is_attention_probability(model, "turned.out") and not is_attention_probability(
        model, "v.out"
    )


def flat(net: Net) -> str:
    return net.reshape("flat", "x", 1, 4, 16)


def probabilities(net: Net) -> str:
    turned = net.op("Transpose", "t", flat(net), perm=[0, 2, 1])
    return net.op("Softmax", "soft", net.op("MatMul", "qk", "flat.out", turned), axis=-1)


@pytest.mark.parametrize(
    "build",
    [
        lambda net: net.op("MatMul", "av", probabilities(net), net.const("w", np.ones((4, 3)))),
        lambda net: net.op(
            "MatMul",
            "av",
            net.op("Softmax", "soft", net.op("Relu", "relu", flat(net)), axis=-1),
            net.op("Transpose", "v", "flat.out", perm=[0, 2, 1]),
        ),
        lambda net: net.op("Mul", "av", probabilities(net), "qk.out"),
    ],
    ids=["constant values", "no product above", "multiplied, not a product"],
)
def test_other_products_are_not_attention(build: Callable[[Net], str]) -> None:
    net = Tokens(4, 4)
    assert find_attentions(net.output(build(net)).index()) == []


@pytest.mark.parametrize("root", ["variance", "standard deviation", "squares"])
@pytest.mark.parametrize("inverse", [True, False])
def test_layer_norm_with_gain_before_division_is_not_fused(root: str, inverse: bool) -> None:
    # The Annotated Transformer and BERT-pytorch: gain * (x - mean) / (std + epsilon) + bias.
    net = Tokens(4, 4)
    mean = net.op("ReduceMean", "mean", "x", axes=[-1])
    less = net.op("Sub", "less", "x", mean)
    gain, epsilon = (
        net.const(name, np.full(size, value, np.float32))
        for name, size, value in (("gain", 4, 2.0), ("epsilon", 1, 1e-6))
    )
    if root == "squares":
        squares = net.op("ReduceMean", "m2", net.op("Mul", "x2", "x", "x"), axes=[-1])
        variance = net.op("Sub", "variance", squares, net.op("Mul", "2m", mean, mean))
    else:
        variance = net.op("ReduceMean", "variance", net.op("Mul", "square", less, less), axes=[-1])
    below = (
        net.op("Add", "eps", net.op("Sqrt", "root", variance), epsilon)
        if root == "standard deviation"
        else net.op("Sqrt", "root", net.op("Add", "eps", variance, epsilon))
    )
    scaled = net.op("Mul", "scaled", gain, less)
    net.output(
        net.op("Mul", "out", scaled, net.op("Reciprocal", "inverse", below))
        if inverse
        else net.op("Div", "out", scaled, below)
    )
    model = net.index()
    (norm,) = find_decomposed_layer_norms(model)
    assert norm.square.name == ("x2" if root == "squares" else "square")
    assert layer_norm_inputs(model, norm) is None
    assert {"root", "out"} <= {n.name for n in norm.fp32_nodes}


@pytest.mark.parametrize(
    "axes", [np.float32(-1), np.int64(-1), np.zeros((2, 2), np.int64)], ids=["float", "0-d", "2-d"]
)
def test_placement_accepts_damaged_axes(net: Net, axes: np.ndarray) -> None:
    net.output(net.conv("c", net.op("ReduceMean", "m", "x", net.const("axes", axes, axes.dtype))))
    compute_placement(Model(net.open_model(18)), PlacementRules())


def test_coordinates_from_weights_without_output_axis() -> None:
    net = Net(2, 4)
    grid = net.op("ConvTranspose", "up", "x", net.const("w", np.ones(3)))
    model = Model(net.output(net.op("GridSample", "s", "x", grid)).open_model())
    assert find_coordinates(model, ()).producers == {model.node("up").index}


# Activations: pointwise subgraphs of one run-time tensor


def gelu(net: Net, tensor: str) -> str:
    erf = net.op("Erf", "erf", net.op("Div", "div", tensor, net.const("root", np.sqrt(2.0))))
    return net.op(
        "Mul",
        "half",
        net.op("Mul", "mul", tensor, net.op("Add", "plus", erf, net.const("one", 1.0))),
        net.const("0.5", 0.5),
    )


def hard_swish(net: Net, tensor: str) -> str:
    """Add x * clip(x + 3, 0, 6) / 6, as MobileNetV3 has it before opset 14."""
    shifted = net.op("Add", "shift", tensor, net.const("three", 3.0))
    clipped = net.op("Clip", "clip", shifted, net.const("zero", 0.0), net.const("six", 6.0))
    return net.op("Div", "sixth", net.op("Mul", "gate", tensor, clipped), "six")


@pytest.mark.parametrize(
    ("form", "count"),
    [
        (lambda net, t: net.op("Relu", "r", t), 1),
        (lambda net, t: net.silu("s", t), 2),
        (gelu, 5),
        (hard_swish, 4),
        (lambda net, t: net.op("Mul", "m", net.op("Tanh", "t", net.op("Softplus", "sp", t)), t), 3),
        (lambda net, t: net.op("Pow", "p", t, net.const("two", 2.0)), 1),
    ],
    ids=["relu", "silu", "gelu", "hard_swish", "mish", "power"],
)
def test_activation_is_function_of_convolution_output(
    form: Callable[[Net, str], str], count: int, net: Net
) -> None:
    out = form(net, net.conv("c", "x"))
    model = net.output(net.conv("next", out)).index()
    assert list(pointwise.activation_outputs(model, "c.out")) == [out]
    tensor, nodes = out, 0
    while tensor != "c.out":
        node = model.producer(tensor)
        source = pointwise.activation_input(model, node)
        nodes += len(pointwise.pointwise_region(model, source, node))
        tensor = source
    assert nodes == count


@pytest.mark.parametrize(
    ("build", "node", "expected"),
    [
        (lambda net: net.op("Mul", "m", net.op("Sigmoid", "g", "a.out"), "b.out"), "m", None),
        (lambda net: net.op("Mul", "m", net.op("Sigmoid", "g", "a.out"), "b.out"), "g", "a.out"),
        (lambda net: net.op("Softmax", "s", "a.out"), "s", None),
    ],
    ids=["product with the gate of another tensor", "gate", "Softmax"],
)
def test_input_of_activation(
    net: Net, build: Callable[[Net], str], node: str, expected: str | None
) -> None:
    model = net.output(net.conv("a", "x"), net.conv("b", "x"), build(net)).index()
    assert pointwise.activation_input(model, model.node(node)) == expected


def test_gate_with_other_consumer_is_an_activation_output(net: Net) -> None:
    gate = net.op("Sigmoid", "g", net.conv("c", "x"))
    net.output(net.op("Mul", "m", "c.out", gate), net.conv("other", gate))
    assert list(pointwise.activation_outputs(net.index(), "c.out")) == ["g.out", "m.out"]


def test_add_of_reshaped_constant_is_a_bias(net: Net) -> None:
    net.const("k", np.ones(16))
    shaped = net.op("Reshape", "shape", "k", net.const("to", [1, 16, 1, 1], np.int64))
    model = net.output(net.op("Add", "add", net.conv("c", "x"), shaped)).index()
    assert pointwise.run_time_inputs(model, model.node("add")) == ["c.out"]
    assert [pointwise.is_bias(model, model.node(name)) for name in ("add", "c")] == [True, False]


def test_search_for_activation_is_linear_in_levels(net: Net) -> None:
    # 40 levels of two tensors have 2^40 paths.
    a, b = net.conv("a", "x"), net.conv("b", "x")
    for i in range(40):
        a, b = net.op("Add", f"p{i}", a, b), net.op("Mul", f"m{i}", a, b)
    model, profile = net.output(net.op("Add", "last", a, b)).index(), cProfile.Profile()
    assert profile.runcall(pointwise.activation_input, model, model.node("last")) is None
    assert sum(entry.callcount for entry in profile.getstats()) < 5000


def test_activation_input_is_the_nearest_tensor_in_any_order_of_nodes(net: Net) -> None:
    start = net.op("Relu", "r", net.conv("c", "x"))
    proto = net.output(net.op("Mul", "m", start, net.op("Sigmoid", "g", start))).index().proto
    nodes = list(proto.graph.node)
    for _ in range(2):
        model = Model(proto)
        assert pointwise.activation_input(model, model.node("m")) == "r.out"
        del proto.graph.node[:]
        proto.graph.node.extend(reversed(nodes))


# Scales and zero points


@pytest.mark.parametrize(("scales", "text"), [([0.5, 0.125, 2.0], "0.125 to 2"), ([], "unknown")])
def test_text_of_scales_has_least_and_greatest(scales: list[float], text: str) -> None:
    assert format_scale(ParameterValues(np.array(scales)).summary) == text


@pytest.mark.parametrize(
    ("scales", "count", "least", "greatest"),
    [([0.5, 0.125, 2.0], 3, 0.125, 2.0), ([2.0, 0.125, 0.5], 3, 0.125, 2.0)],
)
def test_summary_of_scales_per_channel(
    scales: list[float], count: int, least: float, greatest: float
) -> None:
    summary = ParameterValues(np.array(scales)).summary
    assert isinstance(summary, PerChannel)
    assert (summary.count, summary.least, summary.greatest) == (count, least, greatest)


@pytest.mark.parametrize(
    ("scales", "other", "is_equal"),
    [
        ([0.5, 0.125, 2.0], [0.5, 0.125, 2.0], True),
        ([0.5, 0.125, 2.0], [0.125, 0.5, 2.0], False),
        ([0.5, 0.5], [0.5, 0.5, 0.5], False),
    ],
    ids=["equal", "another order", "another count"],
)
def test_summaries_are_equal_for_equal_scales(
    scales: list[float], other: list[float], is_equal: bool
) -> None:
    summaries = [ParameterValues(np.array(values)).summary for values in (scales, other)]
    assert (summaries[0] == summaries[1]) is is_equal


def pairs(count: int, scale: np.ndarray, zeros: bool = True) -> ModelProto:
    constants = [numpy_helper.from_array(scale.astype(np.float32), "s")]
    constants += [numpy_helper.from_array(np.zeros(scale.size, np.int8), "z")] if zeros else []
    nodes, tensor = [], "x"
    for k in range(count):
        for op, source, result in (
            ("QuantizeLinear", tensor, f"q{k}"),
            ("DequantizeLinear", f"q{k}", f"d{k}"),
        ):
            nodes.append(
                helper.make_node(op, [source, "s"] + ["z"] * zeros, [result], f"{op[0]}{k}", axis=1)
            )
        nodes.append(helper.make_node("Relu", [f"d{k}"], [f"r{k}"], f"R{k}"))
        tensor = f"r{k}"
    values = [
        helper.make_tensor_value_info(t, TensorProto.FLOAT, [1, scale.size, 1, 1])
        for t in ("x", tensor)
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def params(*scales: float, zeros: tuple[int, ...] = (0,), axis: int | None = 1) -> QuantParams:
    model = Model(pairs(1, np.array(scales)))
    q = read_params(model, model.node("Q0"))
    return QuantParams(
        q.scales,
        q.scale_shape,
        1,
        ParameterValues(np.array(zeros, np.int64)),
        True,
        q.precision,
        axis,
        True,
    )


@pytest.mark.parametrize("zeros", [True, False])
def test_nodes_that_share_a_scale_share_its_values(zeros: bool) -> None:
    model = Model(pairs(3, np.array([0.5, 0.25]), zeros))
    quantizers = [read_params(model, model.node(n)) for n in ("Q0", "D0", "Q2")]
    assert len({id(q.scales) for q in quantizers}) == 1 and quantizers[0].key == quantizers[2].key
    for q in quantizers:
        assert (q.scale.tolist(), q.zero_point.tolist()) == ([0.5, 0.25], [0, 0])
    assert quantizers[0].scales.summary is quantizers[0].scales.summary


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (params(0.5, 0.25), True),
        (params(0.5, 0.25, zeros=(0, 0, 0)), True),
        (params(0.25, 0.5), False),
        (params(0.5, 0.25, axis=0), False),
        (params(0.5, 0.25, zeros=(0, 1)), False),
        (params(0.5, 0.25, zeros=(0, 1, 2)), False),
        (params(0.5), False),
    ],
    ids=["equal", "zeros", "scales", "axis", "zero point", "zero points", "one scale"],
)
def test_equal_quantizers_have_one_key(other: QuantParams, same: bool) -> None:
    base = params(0.5, 0.25)
    assert (base.key == other.key) is base.same_as(other) is same


def test_key_of_one_scale_has_no_axis() -> None:
    assert params(0.5).key != params(0.5, 0.5).key
    assert params(0.5, axis=0).key == params(0.5, axis=1).key


def test_scale_that_is_not_a_number_has_no_key() -> None:
    assert params(math.nan).key is None


def test_shared_scales_are_held_once() -> None:
    channels = 50_000
    scale = np.linspace(0.01, 0.02, channels)
    predict(pairs(36, scale))  # imports modules and fills caches
    peaks = []
    for count in (4, 36):
        model = pairs(count, scale)
        tracemalloc.start()
        predict(model)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 32 < channels, f"{peaks}: a byte per channel for each pair"


# Subgraphs


def test_inner_graphs_are_listed_with_those_inside_of_them() -> None:
    deep, otherwise = (helper.make_graph([], name, [], []) for name in ("deep", "else"))
    then = helper.make_graph([helper.make_node("Loop", [], [], body=deep)], "then", [], [])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)
    several = helper.make_node("Own", [], [], domain="own", graphs=[deep, otherwise])
    nodes = [helper.make_node("Relu", ["x"], ["c"]), branch, several]
    assert [g.name for g in nested_graphs(nodes)] in (
        ["then", "deep", "else", "deep", "else"],
        ["else", "then", "deep", "deep", "else"],
    )
    node = helper.make_node("Own", [], [], domain="own", graphs=[then])
    assert [n.op_type for n in with_subgraph_nodes([node])] == ["Own", "Loop"]


def test_leading_to_returns_upstream_nodes() -> None:
    inner = helper.make_graph([helper.make_node("Neg", ["b"], ["in"])], "g", [], [])
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Abs", ["x"], ["b"]),
        helper.make_node("If", ["a"], ["c"], then_branch=inner, else_branch=inner),
        helper.make_node("Clip", ["c", "", "max"], ["d"]),
        helper.make_node("Dropout", ["x"], ["e", ""]),  # an unset output connects nothing
    ]
    assert find_dependencies(nodes, ["d"]) == (nodes[:4], {"d", "c", "", "max", "a", "b", "x"})
    assert find_dependencies(nodes, ["d", "b"], {"a", "b"})[0] == nodes[2:4]


@pytest.mark.parametrize(
    "text", [b"name-1", b"Operat1", b"domai-1", b"reads-1", b"makes-1", b"given-1", b"inner-1"]
)
def test_text_of_node_that_is_not_utf_8_is_an_error(text: bytes) -> None:
    inner = helper.make_graph([helper.make_node("Relu", ["reads-1"], ["inner-1"])], "g", [], [])
    node = helper.make_node("Operat1", ["reads-1"], ["makes-1"], "name-1", domain="domai-1")
    node.attribute.append(helper.make_attribute("given-1", inner))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "makes-2")]
    data = helper.make_model(
        helper.make_graph([node], "g", values[:1], values[1:])
    ).SerializeToString()
    assert load(data).nodes[0].inputs == ("reads-1",)
    with pytest.raises(ModelError, check=has("wrong-encoding", path="model in memory")):
        load(data.replace(text, text[:-1] + b"\xff"))
