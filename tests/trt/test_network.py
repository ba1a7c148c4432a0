"""The network stays one graph: after every pass, who writes and who reads a tensor is told the same from both sides."""

import itertools
import random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from qdqtool.errors import QdqtoolError
from qdqtool.model.modelfile import load
from qdqtool.model.operators import LayerKind
from qdqtool.prediction import predict
from qdqtool.trt import importer, pipeline
from qdqtool.trt.layers import WEIGHTED, Layer, Tensor, Weighted
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.pipeline import PassError
from qdqtool.trt.targets import TARGETS, target_named
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import DIFFERENT
from tests.trt.evidence import graph as published
from tests.trt.random_graphs import FORKS, models
from tests.trt.test_spellings import FLOAT, INT8, conv_names, outcomes

CLASSIC = sorted(t for t in TARGETS if not t.startswith("rtx"))


def inconsistencies(network: Network) -> list[str]:
    """Tensors whose producer or consumers are not those that write or read them."""
    found = []
    layers = list(network.layers.values())
    for layer in layers:
        found += [
            f"{t.name}: written by {layer.name}, says {t.producer}"
            for t in layer.outputs
            if t.producer is not layer
        ]
        for tensor in layer.inputs:
            if tensor.consumers.get(layer, 0) != sum(t is tensor for t in layer.inputs):
                found.append(f"{tensor.name}: read by {layer.name}, says {tensor.consumers}")
    here = {id(layer) for layer in layers}
    for tensor in {id(t): t for layer in layers for t in (*layer.inputs, *layer.outputs)}.values():
        found += [
            f"{tensor.name}: says that {c.name} reads it"
            for c in tensor.consumers
            if id(c) not in here or not any(t is tensor for t in c.inputs)
        ]
        if tensor.producer is not None and id(tensor.producer) not in here:
            found.append(
                f"{tensor.name}: says that {tensor.producer.name} writes it, which is gone"
            )
    return found


def small() -> tuple[Network, dict[str, Layer], dict[str, Tensor]]:
    """x -> split -> (a, b); add(a, b) -> c; neg(c) -> d, the output."""
    network, layers = Network(), {}
    tensors = {name: Tensor(name) for name in "xabcd"}
    network.inputs, network.outputs = [tensors["x"]], [tensors["d"]]
    tensors["d"].is_output = True
    for name, kind, inputs, outputs in (
        ("split", LayerKind.SLICE, "x", "ab"),
        ("add", LayerKind.ELEMENTWISE, "ab", "c"),
        ("neg", LayerKind.UNARY, "c", "d"),
    ):
        layers[name] = network.add(
            Layer(kind, name), [tensors[t] for t in inputs], [tensors[t] for t in outputs]
        )
    return network, layers, tensors


def test_what_stands_alone_and_in_order() -> None:
    """The first output alone; what another layer writes by now stays that one's."""
    network, layers, tensors = small()
    new = Tensor("n")
    network.set_output(layers["split"], new)
    assert layers["split"].outputs == [new, tensors["b"]]
    assert (new.producer, tensors["a"].producer, tensors["b"].producer) == (
        layers["split"],
        None,
        layers["split"],
    )
    assert new in network.touched
    network.set_output(layers["neg"], tensors["a"])  # takes it over, as a swap of two layers does
    assert (tensors["a"].producer, tensors["d"].producer) == (layers["neg"], None)
    layers["add"].outputs[0].producer = layers["neg"]
    network.set_output(layers["add"], tensors["d"])
    assert tensors["c"].producer is layers["neg"], "it is another layer's by now"
    assert (layers["add"].outputs, tensors["d"].producer) == ([tensors["d"]], layers["add"])
    network, layers, tensors = small()
    new = Tensor("n")
    network.set_output(layers["split"], new, 1)
    assert layers["split"].outputs == [tensors["a"], new]
    assert (new.producer, tensors["b"].producer) == (layers["split"], None)
    network, layers, tensors = small()
    network.add(Layer(LayerKind.UNARY, "dead"), [tensors["a"]], [Tensor("e")])
    network.remove_dead()
    assert [layer.name for layer in network.layers.values()] == list(layers)
    network = Network()
    t = {name: Tensor(name) for name in "xabcde"}
    for name, inputs in (("last", "bd"), ("d", "c"), ("c", "x"), ("b", "a"), ("a", "x")):
        network.add(
            Layer(LayerKind.UNARY, name),
            [t[i] for i in inputs],
            [t["e" if name == "last" else name]],
        )
    network.outputs = [t["e"]]
    assert [layer.name for layer in network.in_order()] == ["c", "a", "d", "b", "last"]
    assert [layer.name for layer in network.depth_first()] == ["c", "d", "a", "b", "last"]
    network.order()
    assert [layer.name for layer in network.of_kind(LayerKind.UNARY)] == [
        "c",
        "a",
        "d",
        "b",
        "last",
    ]
    network.focus = {t["d"]: None}
    assert [layer.name for layer in network.near(LayerKind.UNARY)] == ["d", "last"]
    assert network.near(LayerKind.SLICE) == []
    network.touched = dict.fromkeys(
        Tensor(str(i)) for i in range(9)
    )  # more tensors than layers: those are walked
    assert [layer.name for layer in network.near(LayerKind.UNARY)] == ["d", "last"]


@pytest.mark.parametrize(
    "edit",
    [
        "set_input",
        "drop_input",
        "add_input",
        "drop_reader",
        "retarget",
        "remove",
        "absorb_reader",
        "insert_before",
    ],
)
def test_what_an_edit_touches_is_seen_by_the_next_round(edit: str) -> None:
    """A loop's later rounds look at touched tensors alone; both sides of a tensor tell the same behind each edit."""
    network, layers, tensors = small()
    split, add, neg = layers.values()
    if edit == "set_input":
        network.set_input(add, 1, tensors["a"])
        assert tensors["a"].consumers == {add: 2} and tensors["b"].consumers == {}
        assert set(network.touched) == {tensors["a"], tensors["b"]}
    elif edit == "drop_input":
        network.drop_input(add, 0)
        assert add.inputs == [tensors["b"]] and set(network.touched) == {tensors["a"]}
    elif edit == "add_input":
        network.add_input(neg, tensors["a"])
        assert neg.inputs == [tensors["c"], tensors["a"]] and set(network.touched) == {tensors["a"]}
    elif edit == "drop_reader":
        network.set_input(add, 1, tensors["a"])
        assert network.drop_reader(split, add) and not network.alive(split)
        assert add.inputs == [tensors["x"]] * 2 and tensors["x"].consumers == {add: 2}
    elif edit == "retarget":
        network.set_input(add, 1, tensors["a"])
        network.retarget(tensors["a"], tensors["b"])
        assert add.inputs == [tensors["b"]] * 2 and tensors["b"].consumers == {add: 2}
        network.retarget(tensors["d"], tensors["c"])
        assert network.outputs == [tensors["c"]] and (
            tensors["c"].is_output,
            tensors["d"].is_output,
        ) == (True, False)
    elif edit == "remove":
        network.remove(neg)
        assert not network.alive(neg) and network.of_kind(LayerKind.UNARY) == []
        assert tensors["d"].producer is None and tensors["c"] in network.touched
    elif edit == "absorb_reader":
        network.add_input(neg, tensors["x"])
        network.absorb_reader(add, neg, "both")
        assert (add.name, add.outputs, add.inputs[2:]) == ("both", [tensors["d"]], [tensors["x"]])
        assert tensors["c"].producer is None and tensors["d"].producer is add
    else:
        network.insert_before(add, 1, Layer(LayerKind.SHUFFLE, "between"), Tensor("m"))
        assert [t.name for t in add.inputs] == ["a", "m"] and add.inputs[1].producer.inputs == [
            tensors["b"]
        ]  # type: ignore[union-attr]
    assert inconsistencies(network) == []


def run_checked(model: onnx.ModelProto, target: str) -> None:
    network = importer.build(load(model))
    assert inconsistencies(network) == []
    run = Pass.run

    def checked(self: Pass, edited: Network) -> Pass:
        result = run(self, edited)
        assert inconsistencies(edited) == [], self.name
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "run", checked)
        pipeline.run(network, target_named(target))


@given(models(max_steps=8, steps=FORKS), st.sampled_from(CLASSIC))
def test_every_pass_leaves_one_graph(model: onnx.ModelProto, target: str) -> None:
    run_checked(model, target)


@pytest.mark.parametrize("case", slow_after(4, DIFFERENT))
def test_every_pass_leaves_one_graph_of_a_built_network(case: str) -> None:
    run_checked(published(case).proto, "trt8.5")


@pytest.mark.parametrize("target", CLASSIC)
def test_weights_that_two_matrix_products_read(g: Graph, target: str) -> None:
    """The first that becomes a convolution takes its weights in; the constant stays for the other."""
    g.input(2, 16)
    weights = g.const("w", np.ones((16, 16), np.float32))
    for op in ("Gemm", "MatMul"):
        first = g.op(op, ["x", weights], f"{op}1")
        run_checked(
            g.model(first, g.op(op, [g.op("Tanh", "x", f"t{op}"), weights], f"{op}2")), target
        )


@pytest.mark.parametrize(
    ("op", "attributes", "kind"),
    [
        ("LRN", {"size": 3}, "LRN"),
        ("GlobalMaxPool", {}, "Pooling"),
        ("MaxPool", {"kernel_shape": [2, 2]}, "Pooling"),
        ("Softmax", {}, "Softmax"),
    ],
)
def test_a_layer_of_no_known_type_has_its_operators_name(
    op: str, attributes: dict[str, object], kind: str
) -> None:
    g = Graph()
    layers = predict(g.model(g.op(op, g.input(1, 8, 4, 4), "n", **attributes))).layers
    assert [layer.type for layer in layers if layer.nodes == ["n"]] == [kind]


OPERATORS = (
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "Split",
    "Slice",
    "Concat",
    "Pad",
    "BatchNormalization",
    "Cast",
    "Softmax",
    "MaxPool",
    "Resize",
    "Transpose",
    "Identity",
    "QuantizeLinear",
    "DequantizeLinear",
    "Add",
    "If",
)


def whole() -> onnx.ModelProto:
    g = Graph()
    x = g.silu(g.bn(g.conv(g.input(1, 4, 8, 8), "a"), "bn"), "act")
    left, right = g.ops("Split", [x], "split", count=2, axis=1)
    y = g.add(g.pair(g.pool(x, "pool", k=3, stride=1), "skip"), g.conv(x, "b"), "add")
    z = g.conv(
        g.concat([left, right, g.resize(g.pool(y, "down"), "up")], "cat"), "c", weights="int8"
    )
    return g.model(g.gemm(g.op("Flatten", z, "flat"), "fc", 8 * 8 * 8))


def damage(model: onnx.ModelProto, dice: random.Random) -> None:
    graph = model.graph
    node, tensor = dice.choice(graph.node), dice.choice(graph.initializer)
    names = [name for n in graph.node for name in (*n.input, *n.output)]
    kind = dice.randrange(9)
    if kind == 0 and node.input:
        node.input[dice.randrange(len(node.input))] = dice.choice([*names, "", "nowhere"])
    elif kind == 1 and node.output:
        node.output[dice.randrange(len(node.output))] = dice.choice(["", "elsewhere"])
    elif kind == 2 and node.attribute:
        attribute = dice.choice(node.attribute)
        attribute.i, attribute.type = (
            dice.choice([-1, 0, 99, 2**40]),
            dice.choice([0, 1, 2, 3, 4, 6, 7]),
        )
    elif kind == 3 and node.attribute:
        del node.attribute[dice.randrange(len(node.attribute))]
    elif kind == 4:
        node.op_type = dice.choice(OPERATORS)
    elif kind == 5 and node.input:
        del node.input[dice.randrange(len(node.input))]
    elif kind == 6:
        tensor.data_type = dice.choice([0, 1, 2, 3, 6, 7, 9, 10, 16, 17, 99])
    elif kind == 7:
        del tensor.dims[:]
        tensor.dims.extend([dice.choice([0, 1, 3, -1, 2**40])])
    else:
        node.input.append(dice.choice([*names, ""]))


@pytest.mark.parametrize("seed", slow_after(1, range(4)))
def test_no_other_exception(seed: int) -> None:
    dice, answered, refused = random.Random(seed), 0, 0
    for _ in range(40):
        model = whole()
        for _ in range(dice.randint(1, 4)):
            damage(model, dice)
        try:
            predict(model, dice.choice(["trt8.0", "trt8.5", "trt11"]), advice=False)
            answered += 1
        except PassError:
            raise  # a defect of a pass
        except QdqtoolError as error:
            refused += 1
            if "\n" in str(error):
                raise
    assert answered and refused


@pytest.mark.parametrize("op", ["Custom", "GridSample", "Einsum"])
def test_unknown_operators(g: Graph, op: str) -> None:
    conv = g.conv(g.input(1, 3, 8, 8), "c")
    g.nodes.append(
        helper.make_node(op, [conv], ["u:0"], "u", domain="my.plugins" if op == "Custom" else "")
    )
    g.channels["u:0"] = 8
    prediction = predict(g.model(g.op("Softmax", g.conv("u:0", "d"), "s")), "trt8.5", advice=False)
    assert outcomes(prediction) == {"c": ([INT8], FLOAT), "d": ([INT8], FLOAT)}
    assert prediction.conversions == 2


@pytest.mark.parametrize(
    "scale",
    [np.float32(0), np.float32(-1), np.float32("nan"), np.float32("inf"), np.zeros(0, np.float32)],
    ids=["0", "-1", "nan", "inf", "empty"],
)
def test_senseless_scales(g: Graph, scale: Any) -> None:
    """The advice complains; the simulation must only not fail."""
    x = g.input(1, 3, 8, 8)
    quantized = g.op("QuantizeLinear", [x, g.const("s", scale), g.const("z", np.int8(0))], "Q")
    data = g.op("DequantizeLinear", [quantized, "s", "z"], "DQ")
    assert conv_names(predict(g.model(g.conv(data, "c", scale=None)), advice=False)) == ["c"]
    g = Graph()
    x = g.input(1, 3, 8, 8)
    g.nodes.append(helper.make_node("Constant", [], ["s"], value_string="0.1"))
    quantized = g.op("QuantizeLinear", [x, "s"], "Q")
    data = g.op("DequantizeLinear", [quantized, "nowhere"], "DQ")
    assert conv_names(predict(g.model(g.conv(data, "c", scale=None)), advice=False)) == ["c"]


@pytest.mark.parametrize(
    ("op", "attribute", "value"),
    [
        ("Conv", "group", "two"),
        ("Conv", "group", [1, 2]),
        ("Conv", "strides", 1),
        ("MaxPool", "kernel_shape", 3.0),
        ("Concat", "axis", "one"),
    ],
)
def test_attribute_of_the_wrong_type(g: Graph, op: str, attribute: str, value: Any) -> None:
    """One line that names the node."""
    x = g.conv(g.input(1, 3, 8, 8), "c", scale=None)
    g.nodes.append(helper.make_node(op, [x, x], ["n:0"], "n", **{attribute: value}))
    model = helper.make_model(
        helper.make_graph(
            g.nodes, "g", g.inputs, [helper.make_empty_tensor_value_info("n:0")], g.initializers
        ),
        opset_imports=[helper.make_opsetid("", 13)],
    )
    with pytest.raises(QdqtoolError, match=rf"^[^\n]*node 'n' \({op}\) is damaged[^\n]*$"):
        predict(model, advice=False)


def _small(name: str) -> onnx.ModelProto:
    """The four graphs of small-graphs-orinnano-trt103, built on TensorRT 10.3."""
    g = Graph()
    x = g.input(1, 32, 32, 32) if name != "symmetric_matmul" else g.input(32, 64)
    if name == "per_channel_conv":
        y = g.conv(x, "c", 32)
    elif name == "symmetric_matmul":
        y = g.op(
            "MatMul",
            [g.pair(x, "a", 0.03), g.pair(g.const("w", np.ones((64, 64), np.float32)), "w", 0.01)],
            "m",
        )
    elif name == "residual_branches":
        branches = [g.conv(x, c, 32, scale=None, weights="float") for c in ("c1", "c2")]
        y = g.op("Add", [g.pair(b, f"b{i}", 0.02) for i, b in enumerate(branches)], "add")
    else:
        y = g.relu(g.bn(g.conv(x, "c", 32, scale=None, weights="float"), "bn"), "r")
    return g.model(y)


@pytest.mark.parametrize(
    ("name", "int8", "computing", "conversions"),
    [
        ("per_channel_conv", 1, [("Convolution", ["INT8"], "FLOAT")], ["c.in.Q"]),
        (
            "symmetric_matmul",
            1,
            [("kgen", ["FLOAT"], "INT8"), ("MatrixMultiply", ["INT8"], "FLOAT")],
            [],
        ),
        (
            "residual_branches",
            0,
            [("Convolution", ["FLOAT"], "FLOAT"), ("PointWise", ["INT8", "INT8"], "FLOAT")],
            ["b0.Q", "b1.Q"],
        ),
        ("conv_bn_relu", 0, [("Convolution", ["FLOAT"], "FLOAT")], []),
    ],
)
def test_four_small_graphs_as_10_3_built_them(
    name: str, int8: int, computing: list[tuple[str, list[str], str]], conversions: list[str]
) -> None:
    """Two of them are told layer by layer there: an INT8 convolution behind a Q, and an Add that reads two INT8."""
    found = predict(_small(name), "10.3")
    told = [
        (x.type, [str(t.precision) for t in x.inputs], str(x.outputs[0].precision))
        for x in found.layers
        if x.type in ("Convolution", "PointWise", "MatrixMultiply", "NoOp", "kgen")
    ]
    assert (found.summary()["int8"], told, found.conversion_nodes) == (int8, computing, conversions)


def test_products_and_defaults(g: Graph) -> None:
    """gemm-mlp-trt10: kgen, three gemm, kgen; and a float product whose Q and DQ are one kernel of floats."""
    x = g.input(8, 16)
    for i in range(3):
        weights = g.pair(g.const(f"w{i}", np.ones((16, 16), np.float32)), f"w{i}p", 0.01)
        x = g.op("MatMul", [g.pair(x, f"q{i}"), weights], f"m{i}")
    found = predict(g.model(g.pair(x, "out")), "trt10", advice=False)
    told = [(x.type, *(str(t.precision) for t in (*x.inputs, *x.outputs))) for x in found.layers]
    assert told == [
        ("kgen", "FLOAT", "INT8"),
        *[("MatrixMultiply", "INT8", "INT8")] * 3,
        ("kgen", "INT8", "FLOAT"),
    ]
    assert [b.inputs[0].tensor for b in found.layers[1:]] == [
        a.outputs[0].tensor for a in found.layers[:-1]
    ]
    # Kernel from the weights, strides and dilations 1, pads 0, one group, no automatic padding
    spelled = {
        "kernel_shape": [3, 3],
        "strides": [1, 1],
        "dilations": [1, 1],
        "pads": [0] * 4,
        "group": 1,
        "auto_pad": "NOTSET",
    }
    known, same = weights_of(bare(), "c"), weights_of(bare(**spelled), "c")
    for name in ("kernel", "strides", "pads", "dilations", "group", "auto_pad"):
        assert getattr(known, name) == getattr(same, name), name
    assert (known.kernel, known.strides, known.pads) == ((3, 3), (1, 1), (0, 0, 0, 0))
    assert (known.dilations, known.group, known.auto_pad) == ((1, 1), 1, "NOTSET")
    assert (known.dims, known.axis, known.constant) == ((8, 8, 3, 3), 0, True)


# What the importer reads out of a model: geometry with ONNX's defaults, and the parser's own decompositions.


def imported(model: onnx.ModelProto) -> Network:
    return importer.build(load(model))


def weights_of(model: onnx.ModelProto, node: str) -> Weighted:
    """How the importer read the weights of a node."""
    layers = imported(model).layers.values()
    return next(layer.weights for layer in layers if node in layer.nodes and layer.kind in WEIGHTED)


def bare(**attributes: object) -> onnx.ModelProto:
    g = Graph()
    weights = g.const("w", np.zeros((8, 8, 3, 3), np.float32))
    return g.model(g.op("Conv", [g.input(1, 8, 8, 8), weights], "c", **attributes))


@pytest.mark.parametrize(
    ("key", "value"), [("strides", [2, 2]), ("dilations", [2, 2]), ("pads", [1] * 4)]
)
def test_what_is_given_is_read(key: str, value: list[int]) -> None:
    assert getattr(weights_of(bare(**{key: value}), "c"), key) == tuple(value)


@pytest.mark.parametrize(
    ("op", "attributes", "axis"),
    [
        ("MatMul", {}, 1),
        ("Gemm", {}, 1),
        ("Gemm", {"transB": 1}, 0),
    ],
)
def test_outputs_of_a_matrix_product_lie_along_the_axis_of_its_weights(
    op: str, attributes: dict, axis: int
) -> None:
    g = Graph()
    g.input(2, 16)
    shape = (4, 16) if attributes else (16, 4)
    product = g.op(op, ["x", g.const("w", np.zeros(shape, np.float32))], "m", **attributes)
    known = weights_of(g.model(product), "m")
    assert (known.dims, known.axis, known.name, known.constant) == (shape, axis, "w", True)
    assert known.inside is False, "its weights are an input; those of a convolution lie in it"
    assert weights_of(bare(), "c").inside is True


def test_a_batch_normalization_with_computed_parameters_is_taken_apart(g: Graph) -> None:
    """(x - mean) / sqrt(var + epsilon) * scale + bias; each parameter passes a shuffle, the bias is added last."""
    x = g.input(1, 4, 8, 8)
    names = [
        g.op("Abs", g.const(n, np.ones(4, np.float32)), f"abs_{n}")
        for n in ("scale", "bias", "mean", "var")
    ]
    network = imported(g.model(g.op("BatchNormalization", [x, *names], "bn")))
    last = next(layer for layer in network.layers.values() if layer.out.name == "bn:0")

    def sources(layer: Layer) -> list[str]:
        """The ONNX tensors behind an elementwise layer's inputs, through the shuffles."""
        found = []
        for tensor in layer.inputs:
            maker = tensor.producer
            found.append(
                maker.inputs[0].name
                if maker is not None and maker.kind == LayerKind.SHUFFLE
                else "computed"
            )
        return found

    assert last.operation == "SUM"
    assert sources(last) == ["computed", "abs_bias:0"]
    scaled = last.inputs[0].producer
    assert (
        scaled is not None
        and scaled.operation == "PROD"
        and sources(scaled) == ["abs_scale:0", "computed"]
    )
    divided = scaled.inputs[1].producer
    assert divided is not None and divided.operation == "DIV"
    centred = divided.inputs[0].producer
    assert (
        centred is not None
        and centred.operation == "SUB"
        and sources(centred) == ["computed", "abs_mean:0"]
    )
    for layer in (
        network.layers.values()
    ):  # the constant epsilon has no type of its own: what adds it has that of var
        if layer.kind in (LayerKind.ELEMENTWISE, LayerKind.UNARY):
            assert layer.out.elem_type == onnx.TensorProto.FLOAT, layer
    deviation = divided.inputs[1].producer
    assert deviation is not None and (deviation.out.shape, centred.out.shape) == (
        (4,),
        (1, 4, 8, 8),
    )


@pytest.mark.parametrize("where", ["plain", "captured", "mixed"])
def test_shape_arithmetic_is_no_layer(g: Graph, where: str) -> None:
    """It is folded while parsing; what reads another tensor as well, a subgraph included, is a layer."""
    x = g.input(1, 8, 4, 4)
    size = g.op("Gather", [g.op("Shape", x, "shape"), g.const("at", np.array([0]))], "gather")
    size = g.op("Mul", [size, g.const("two", np.array([1], np.int64))], "times")
    if where == "captured":
        body = onnx.helper.make_graph(
            [
                onnx.helper.make_node(
                    "Cast", ["captured"], ["inside"], "cast", to=onnx.TensorProto.INT64
                )
            ],
            "body",
            [],
            [onnx.helper.make_tensor_value_info("inside", onnx.TensorProto.INT64, [1])],
        )
        g.op("Softmax", g.reshape(x, "flat", 128), "s")
        g.slice("s:0", "captured", 0, 1, axis=0)
        g.nodes[-1].output[0] = "captured"
        flag = g.op("Cast", size, "flag", to=onnx.TensorProto.BOOL)
        size = g.op("If", flag, "mixed", then_branch=body, else_branch=body)
    elif where == "mixed":
        size = g.op(
            "Mul",
            [size, g.op("Cast", g.input(1, name="n"), "cast", to=onnx.TensorProto.INT64)],
            "mixed",
        )
    to = g.op("Concat", [size, g.const("rest", np.array([-1]))], "cat", axis=0)
    network = imported(
        g.model(
            g.op("Reshape", [g.op("Exp", x, "e"), to], "r"), *([] if where == "plain" else [size])
        )
    )
    names = {layer.name for layer in network.layers.values()}
    assert {"e", "r"} <= names and not names & {"shape", "gather", "times", "flag"}
    assert ("mixed" in names) is (where != "plain")


@pytest.mark.parametrize(
    "op",
    [
        "Relu",
        "HardSwish",
        "Softmax",
        "Sigmoid",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Exp",
        "Identity",
        "Dropout",
        "Flatten",
        "Softplus",
        "Celu",
    ],
)
def test_whatever_an_operator_becomes_reads_its_input(op: str) -> None:
    """Up from the output, layer by layer, one comes to the network's input."""
    g = Graph(opset=14)
    network = imported(g.model(g.op(op, g.input(1, 4, 8, 8), "n")))
    seen, queue = (
        set(),
        [next(layer.out for layer in network.layers.values() if layer.out.name == "n:0")],
    )
    for tensor in queue:
        seen.add(tensor.name)
        if tensor.producer is not None:
            queue.extend(tensor.producer.inputs)
    assert "x" in seen


def test_pairs_are_told_by_the_kind_of_the_reader() -> None:
    network, layers, _ = small()
    assert list(network.pairs(LayerKind.ELEMENTWISE)) == [(layers["add"], layers["neg"])]
    assert list(network.pairs(LayerKind.ELEMENTWISE, read_by=layers["neg"].kind)) == [
        (layers["add"], layers["neg"])
    ]
    network.add(Layer(LayerKind.SCALE, "scale"), [network.outputs[0]], [Tensor("e")])
    assert list(network.pairs(LayerKind.ELEMENTWISE, read_by=LayerKind.SCALE)) == []
    assert network.has(LayerKind.POOLING, LayerKind.SCALE)
    assert not network.has(LayerKind.POOLING)


def test_dead_layers_go_with_all_that_leads_to_them_alone() -> None:
    network, layers, tensors = small()
    made = [Tensor(name) for name in "efg"]
    network.add(Layer(LayerKind.UNARY, "first"), [tensors["a"]], made[:1])
    network.add(Layer(LayerKind.ELEMENTWISE, "twice"), [made[0], made[0]], made[1:2])
    network.add(Layer(LayerKind.UNARY, "none"), [made[1]], [])
    network.remove_dead()
    assert list(network.layers.values()) == list(layers.values())
    assert inconsistencies(network) == []


def test_a_view_of_a_view_lies_in_the_memory_of_the_last_one():
    """However many there are; each link is followed once."""
    tensors = [Tensor(str(i)) for i in range(3000)]
    for view, source in itertools.pairwise(tensors):
        view.view_of = source
    assert all(t.memory is tensors[-1] for t in tensors)
    assert all(t.view_of is tensors[-1] for t in tensors[:-1])
