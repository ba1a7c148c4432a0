"""What is recognized in a graph: attention, pointwise chains, Q/DQ."""

import cProfile
import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.explain.messages import scale_words
from qdqtool.model import pointwise
from qdqtool.model.graph import Model
from qdqtool.model.heads import attentions, holds_shares, is_computed_product
from qdqtool.model.layernorm import as_one, layer_norms
from qdqtool.model.modelfile import load
from qdqtool.model.qdq import Numbers, PerChannel, QuantParams, read_params
from qdqtool.model.subgraphs import inner_graphs, leading_to, with_inner
from qdqtool.prediction import predict
from tests.insertion.nets import Net
from tests.insertion.transformers import Tokens, vit
from tests.raising import raises

# Attention and layer normalizations, found by structure.


def test_attentions_and_what_is_told() -> None:
    model = Model(vit())
    found = attentions(model)
    assert [(a.scores.name, a.softmax.name, a.values.name, a.shares) for a in found] == [
        (f"b{i}.attn.qk", f"b{i}.attn.soft", f"b{i}.attn.av", f"b{i}.attn.soft.out") for i in (0, 1)
    ]
    assert sum(is_computed_product(model, n) for n in model.nodes) == 4
    assert [t for t in (f"{n.name}.out" for n in model.nodes) if holds_shares(model, t)] == [
        "b0.attn.soft.out",
        "b1.attn.soft.out",
    ]
    assert Numbers(np.array([0.5])).summary == 0.5
    told = Numbers(np.array([0.5, 0.125, 2.0])).summary
    assert isinstance(told, PerChannel) and (told.count, told.least, told.greatest) == (
        3,
        0.125,
        2.0,
    )
    assert (
        told == Numbers(np.array([0.5, 0.125, 2.0])).summary and scale_words(told) == "0.125 to 2"
    )
    assert told != Numbers(np.array([0.125, 0.5, 2.0])).summary
    assert Numbers(np.full(2, 0.5)).summary != Numbers(np.full(3, 0.5)).summary
    assert scale_words(Numbers(np.array([])).summary) == "unknown"


def test_past_masks_transposes_and_pairs() -> None:
    """As YOLO11 writes it: the Softmax's result is transposed, and the second operand."""
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
    turned = net.op("Transpose", "turned", pair, perm=[0, 2, 1])
    net.output(net.op("MatMul", "av", v, turned))
    model = net.index()
    (found,) = attentions(model)
    assert (found.scores.name, found.values.name, found.shares) == ("qk", "av", "turned.out")
    assert holds_shares(model, "turned.out") and not holds_shares(model, "v.out")


@pytest.mark.parametrize(
    "kind", ["constant values", "no product above", "multiplied, not a product"]
)
def test_what_is_no_attention(kind: str) -> None:
    net = Tokens(4, 4)
    flat = net.op("Reshape", "flat", "x", net.const("shape", [1, 4, 16], np.int64))
    above = (
        net.op("Relu", "relu", flat)
        if kind == "no product above"
        else net.op("MatMul", "qk", flat, net.op("Transpose", "t", flat, perm=[0, 2, 1]))
    )
    soft = net.op("Softmax", "soft", above, axis=-1)
    if kind == "constant values":
        wide = 16 if kind == "no product above" else 4
        net.output(net.op("MatMul", "av", soft, net.const("w", np.ones((wide, 3)))))
    elif kind == "no product above":
        net.output(net.op("MatMul", "av", soft, net.op("Transpose", "v", flat, perm=[0, 2, 1])))
    else:
        net.output(net.op("Mul", "av", soft, above))
    assert attentions(net.index()) == []


@pytest.mark.parametrize("square", ["Pow", "Mul"])
def test_layer_norms_in_pieces(square: str) -> None:
    model = Model(vit(pieces=True, square=square))
    found = layer_norms(model)
    assert [p.nodes[0].name for p in found] == [
        "b0.ln1.mean",
        "b0.ln2.mean",
        "b1.ln1.mean",
        "b1.ln2.mean",
        "ln.mean",
    ]
    first = found[0]
    assert (first.tensor, first.output, first.square.name, first.axes) == (
        "embed.tokens.out",
        "b0.ln1.shift.out",
        "b0.ln1.square",
        (-1,),
    )
    assert first.epsilon == pytest.approx(1e-6) and (first.scale, first.bias) == (
        "b0.ln1.gamma",
        "b0.ln1.beta",
    )
    assert layer_norms(Model(vit())) == []


@pytest.mark.parametrize("root", ["variance", "standard deviation", "squares"])
@pytest.mark.parametrize("inverse", [True, False])
def test_a_gain_in_front_of_the_division_is_seen_and_not_rewritten(
    root: str, inverse: bool
) -> None:
    """As the Annotated Transformer and BERT-pytorch write it: gain * (x - mean) / (std + epsilon) + bias."""
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
    found = layer_norms(model)
    assert [p.square.name for p in found] == ["x2" if root == "squares" else "square"]
    assert as_one(model, found[0]) is None and {"root", "out"} <= {n.name for n in found[0].wide}


@pytest.mark.parametrize("change", ["cube", "another mean", "other axes", "no epsilon"])
def test_what_is_no_layer_norm(change: str) -> None:
    proto = vit(pieces=True)
    copy = type(proto)()
    copy.CopyFrom(proto)
    nodes = {n.name: n for n in copy.graph.node}
    expected = 4
    if change == "cube":
        next(t for t in copy.graph.initializer if t.name == "b0.ln1.two").raw_data = np.float32(
            3
        ).tobytes()
    elif change == "another mean":
        nodes["b0.ln1.mean"].input[0] = (
            "b0.attn.q.out" if "b0.attn.q.out" in nodes else "embed.shape"
        )
        expected = 5  # one, of which the root mean square is normalized
    elif change == "other axes":
        nodes["b0.ln1.mean"].attribute[0].ints[:] = [1]
        expected = 5  # one, whose axes are not known to be the same
    else:
        nodes["b0.ln1.eps"].op_type = "Mul"
        expected = 5
    found = layer_norms(Model(copy))
    assert len(found) == expected
    assert expected == 4 or as_one(Model(copy), found[0]) is None


def test_damaged_graphs_have_nothing_in_them() -> None:
    """Axes of another type or rank, and weights without the axis of their outputs."""
    from qdqtool.insertion.placement import Rules, place
    from qdqtool.model.heads import find_coordinates
    from tests.insertion.nets import Net

    for axes in (np.float32(-1), np.int64(-1), np.zeros((2, 2), np.int64)):
        net = Net()
        net.output(
            net.conv("c", net.op("ReduceMean", "m", "x", net.const("axes", axes, axes.dtype)))
        )
        place(Model(net.open_model(18)), Rules())
    net = Net(2, 4)
    grid = net.op("ConvTranspose", "up", "x", net.const("w", np.ones(3)))
    net.output(net.op("GridSample", "s", "x", grid))
    model = Model(net.open_model())
    assert find_coordinates(model, ()).makers == {model.node("up").index}


# An activation is a pointwise subgraph of one run-time tensor, however it is written.


def gelu(net: Net, tensor: str) -> str:
    """Erf form, as torch exports it: Div, Erf, Add, Mul, Mul."""
    erf = net.op("Erf", "erf", net.op("Div", "div", tensor, net.const("root", np.sqrt(2.0))))
    return net.op(
        "Mul",
        "half",
        net.op("Mul", "mul", tensor, net.op("Add", "plus", erf, net.const("one", 1.0))),
        net.const("0.5", 0.5),
    )


def hard_swish(net: Net, tensor: str) -> str:
    """x * clip(x + 3, 0, 6) / 6, as MobileNetV3 exports it below opset 14."""
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
def test_every_form_is_one_function_of_the_convolutions_result(
    form: Callable[[Net, str], str], count: int, net: Net
) -> None:
    out = form(net, net.conv("c", "x"))
    net.output(net.conv("next", out))
    model = net.index()
    assert list(pointwise.activation_outputs(model, "c.out")) == [out]
    tensor, nodes = out, 0
    while tensor != "c.out":
        node = model.producer(tensor)
        assert node is not None
        source = pointwise.activation_input(model, node)
        assert source is not None
        nodes += len(pointwise.region(model, source, node))
        tensor = source
    assert nodes == count


def test_what_is_no_activation(net: Net) -> None:
    a, b = net.conv("a", "x"), net.conv("b", "x")
    net.output(net.op("Mul", "m", net.op("Sigmoid", "g", a), b))
    model = net.index()
    assert pointwise.activation_input(model, model.node("m")) is None
    assert pointwise.activation_input(model, model.node("g")) == "a.out"
    net = Net()
    gate = net.op("Sigmoid", "g", net.conv("c", "x"))
    net.output(net.op("Mul", "m", "c.out", gate), net.conv("other", gate))
    model = net.index()
    assert list(pointwise.activation_outputs(model, "c.out")) == ["g.out", "m.out"]
    net = Net()
    net.output(net.op("Softmax", "s", net.conv("c", "x")))
    model = net.index()
    assert pointwise.activation_input(model, model.node("s")) is None
    net = Net()
    net.const("k", np.ones(16))
    shaped = net.op("Reshape", "shape", "k", net.const("to", [1, 16, 1, 1], np.int64))
    net.output(net.op("Add", "add", net.conv("c", "x"), shaped))
    model = net.index()
    add = model.node("add")
    assert pointwise.run_time_inputs(model, add) == ["c.out"]
    assert pointwise.is_bias(model, add)
    assert not pointwise.is_bias(model, model.node("c"))


def test_two_functions_of_the_same_two_tensors_again_and_again(net: Net) -> None:
    """There are as many ways up as 2 to the number of levels: 18 took 7 seconds, each two more four times that."""
    a, b = net.conv("a", "x"), net.conv("b", "x")
    for i in range(40):
        a, b = net.op("Add", f"p{i}", a, b), net.op("Mul", f"m{i}", a, b)
    net.output(net.op("Add", "last", a, b))
    model = net.index()
    profile = cProfile.Profile()
    found = profile.runcall(pointwise.activation_input, model, model.node("last"))
    assert found is None and sum(entry.callcount for entry in profile.getstats()) < 5000


def test_the_nearest_tensor_of_which_it_is_a_function_whatever_the_order_of_nodes(net: Net) -> None:
    start = net.op("Relu", "r", net.conv("c", "x"))
    net.output(net.op("Mul", "m", start, net.op("Sigmoid", "g", start)))
    proto = net.index().proto
    nodes = list(proto.graph.node)
    for _ in range(2):
        model = Model(proto)
        assert pointwise.activation_input(model, model.node("m")) == "r.out"
        del proto.graph.node[:]
        proto.graph.node.extend(reversed(nodes))


# Scales and zero points: what is told of them, when two are alike, and that a large one is held once.

COUNT = 50_000


def pairs(count: int, scale: np.ndarray, zeros: bool = True) -> onnx.ModelProto:
    """Pairs in a row that all read one scale and, where wanted, one zero point."""
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
    found = read_params(model, model.node("Q0"))
    numbers = Numbers(np.array(zeros, np.int64))
    return QuantParams(
        found.scales, found.scale_shape, 1, numbers, True, found.precision, axis, True
    )


@pytest.mark.parametrize("zeros", [True, False])
def test_nodes_that_share_a_tensor_share_its_values(zeros: bool) -> None:
    model = Model(pairs(3, np.array([0.5, 0.25]), zeros))
    found = [read_params(model, model.node(n)) for n in ("Q0", "D0", "Q2")]
    assert len({id(p.scales) for p in found}) == 1 and found[0].key == found[2].key
    assert all(p.scale is not None and p.scale.tolist() == [0.5, 0.25] for p in found)
    assert all(p.zero_point is not None and p.zero_point.tolist() == [0, 0] for p in found)
    assert found[0].scales is not None and found[0].scales.summary is found[0].scales.summary


def test_quantizers_alike_have_one_key_and_their_scales_are_held_once() -> None:
    base = params(0.5, 0.25)
    for other, same in [
        (params(0.5, 0.25), True),
        (params(0.5, 0.25, zeros=(0, 0, 0)), True),
        (params(0.25, 0.5), False),
        (params(0.5, 0.25, axis=0), False),
        (params(0.5, 0.25, zeros=(0, 1)), False),
        (params(0.5, 0.25, zeros=(0, 1, 2)), False),
        (params(0.5), False),
    ]:
        assert (base.key == other.key) is same
        assert base.same_as(other) is same
    assert params(0.5).key != params(0.5, 0.5).key
    assert params(0.5, axis=0).key == params(0.5, axis=1).key, "one scale has no axis"
    assert params(math.nan).key is None
    # Each further pair takes what its nodes, layers and findings take, which is far below the scale's own size
    scale = np.linspace(0.01, 0.02, COUNT)
    predict(pairs(1, scale))  # imports
    peaks = []
    for count in (4, 36):
        model = pairs(count, scale)
        tracemalloc.start()
        predict(model)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 32 < COUNT, f"{peaks}: more than a byte a channel for each pair"


def test_depths_and_dependences() -> None:
    deep = helper.make_graph([], "deep", [], [])
    loop = helper.make_node("Loop", [], [], body=deep)
    then, otherwise = (
        helper.make_graph([loop], "then", [], []),
        helper.make_graph([], "else", [], []),
    )
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)
    several = helper.make_node("Own", [], [], domain="own", graphs=[deep, otherwise])
    nodes = [helper.make_node("Relu", ["x"], ["c"]), branch, several]
    names = [g.name for g in inner_graphs(nodes)]
    assert sorted(names[:3]) == ["deep", "else", "then"] and names.index("then") + 1 == names.index(
        "deep"
    )
    assert names[3:] == ["deep", "else"]
    # Calls of functions are counted over the same nodes, none of them twice.
    counted = [
        n.op_type
        for n in with_inner([helper.make_node("Own", [], [], domain="own", graphs=[then])])
    ]
    assert counted == ["Own", "Loop"]
    # Through subgraphs too; unset inputs and outputs connect nothing, and what is given needs no node
    inner = helper.make_graph([helper.make_node("Neg", ["b"], ["in"])], "g", [], [])
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Abs", ["x"], ["b"]),
        helper.make_node("If", ["a"], ["c"], then_branch=inner, else_branch=inner),
        helper.make_node("Clip", ["c", "", "max"], ["d"]),
        helper.make_node("Dropout", ["x"], ["e", ""]),
    ]
    assert leading_to(nodes, ["d"]) == (nodes[:4], {"d", "c", "", "max", "a", "b", "x"})
    assert leading_to(nodes, ["d", "b"], {"a", "b"})[0] == nodes[2:4]


@pytest.mark.parametrize(
    "text", [b"name-1", b"Operat1", b"domai-1", b"reads-1", b"makes-1", b"given-1", b"inner-1"]
)
def test_texts_of_nodes_are_utf_8(text: bytes) -> None:
    """Those of the main graph are looked at by the index, those of attributes before it."""
    inner = helper.make_graph([helper.make_node("Relu", ["reads-1"], ["inner-1"])], "g", [], [])
    node = helper.make_node("Operat1", ["reads-1"], ["makes-1"], "name-1", domain="domai-1")
    node.attribute.append(helper.make_attribute("given-1", inner))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "makes-2")]
    proto = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]))
    data = proto.SerializeToString()
    assert load(data).nodes[0].inputs == ("reads-1",)
    with raises(ModelError, "require_texts"):
        load(data.replace(text, text[:-1] + b"\xff"))
