"""The network stays one graph: after every pass, who writes and who reads a tensor is told the same from both sides."""

from __future__ import annotations

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
from qdqtool.trt.layers import Layer, Tensor
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, PassResult
from qdqtool.trt.pipeline import PassError
from qdqtool.trt.targets import TARGETS, target_named
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import HOME, QUICK_FIRST
from tests.trt.random_graphs import FORKS, models
from tests.trt.test_spellings import FLOAT, INT8, conv_names, outcomes

CLASSIC = sorted(t for t in TARGETS if not t.startswith("rtx"))


def inconsistencies(network: Network) -> list[str]:
    """Tensors whose producer or consumers are not those that write or read them."""
    found = []
    layers = list(network.layers.values())
    for layer in layers:
        found += [f"{t.name}: written by {layer.name}, says {t.producer}" for t in layer.outputs
                  if t.producer is not layer]  # fmt: skip
        for tensor in layer.inputs:
            if tensor.consumers.get(layer, 0) != sum(t is tensor for t in layer.inputs):
                found.append(f"{tensor.name}: read by {layer.name}, says {tensor.consumers}")
    here = {id(layer) for layer in layers}
    for tensor in {id(t): t for layer in layers for t in (*layer.inputs, *layer.outputs)}.values():
        found += [f"{tensor.name}: says that {c.name} reads it" for c in tensor.consumers
                  if id(c) not in here or not any(t is tensor for t in c.inputs)]  # fmt: skip
        if tensor.producer is not None and id(tensor.producer) not in here:
            found.append(f"{tensor.name}: says that {tensor.producer.name} writes it, which is gone")
    return found


def small() -> tuple[Network, dict[str, Layer], dict[str, Tensor]]:
    """x -> split -> (a, b); add(a, b) -> c; neg(c) -> d, the output."""
    network, layers = Network(), {}
    tensors = {name: Tensor(name) for name in "xabcd"}
    network.inputs, network.outputs = [tensors["x"]], [tensors["d"]]
    tensors["d"].is_output = True
    for name, kind, inputs, outputs in (
        ("split", LayerKind.SLICE, "x", "ab"), ("add", LayerKind.ELEMENTWISE, "ab", "c"),
        ("neg", LayerKind.UNARY, "c", "d"),
    ):  # fmt: skip
        layers[name] = network.add(Layer(kind, name), [tensors[t] for t in inputs], [tensors[t] for t in outputs])
    return network, layers, tensors


def test_a_layer_that_writes_another_tensor_lets_go_of_its_own() -> None:
    """The first output alone; what another layer writes by now stays that one's."""
    network, layers, tensors = small()
    new = Tensor("n")
    network.set_output(layers["split"], new)
    assert layers["split"].outputs == [new, tensors["b"]]
    assert (new.producer, tensors["a"].producer, tensors["b"].producer) == (layers["split"], None, layers["split"])
    assert new in network.touched
    network.set_output(layers["neg"], tensors["a"])  # takes it over, as a swap of two layers does
    assert (tensors["a"].producer, tensors["d"].producer) == (layers["neg"], None)
    layers["add"].outputs[0].producer = layers["neg"]
    network.set_output(layers["add"], tensors["d"])
    assert tensors["c"].producer is layers["neg"], "it is another layer's by now"
    assert (layers["add"].outputs, tensors["d"].producer) == ([tensors["d"]], layers["add"])


def test_one_of_several_outputs_is_exchanged() -> None:
    network, layers, tensors = small()
    new = Tensor("n")
    network.set_output_of(layers["split"], tensors["b"], new)
    assert layers["split"].outputs == [tensors["a"], new]
    assert (new.producer, tensors["b"].producer) == (layers["split"], None)


@pytest.mark.parametrize("edit", ["set_input", "drop_input", "add_input", "replace_reader", "retarget", "remove",
                                  "absorb_reader", "insert_before"])  # fmt: skip
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
    elif edit == "replace_reader":
        network.set_input(add, 1, tensors["a"])
        network.replace_reader(tensors["a"], tensors["x"], add)
        assert add.inputs == [tensors["x"]] * 2 and tensors["x"].consumers == {split: 1, add: 2}
    elif edit == "retarget":
        network.set_input(add, 1, tensors["a"])
        network.retarget(tensors["a"], tensors["b"])
        assert add.inputs == [tensors["b"]] * 2 and tensors["b"].consumers == {add: 2}
        network.retarget(tensors["d"], tensors["c"])
        assert network.outputs == [tensors["c"]] and (tensors["c"].is_output, tensors["d"].is_output) == (True, False)
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
        assert [t.name for t in add.inputs] == ["a", "m"] and add.inputs[1].producer.inputs == [tensors["b"]]  # type: ignore[union-attr]
    assert inconsistencies(network) == []


def test_what_no_output_depends_on_is_dead() -> None:
    network, layers, tensors = small()
    network.add(Layer(LayerKind.UNARY, "dead"), [tensors["a"]], [Tensor("e")])
    network.remove_dead()
    assert [layer.name for layer in network.layers.values()] == list(layers)


def test_a_layer_is_visited_behind_all_that_it_reads() -> None:
    """Breadth first, whatever the order of creation; the merging of convolutions goes depth first from the outputs."""
    network = Network()
    t = {name: Tensor(name) for name in "xabcde"}
    for name, inputs in (("last", "bd"), ("d", "c"), ("c", "x"), ("b", "a"), ("a", "x")):
        network.add(Layer(LayerKind.UNARY, name), [t[i] for i in inputs], [t["e" if name == "last" else name]])
    network.outputs = [t["e"]]
    assert [layer.name for layer in network.in_order()] == ["c", "a", "d", "b", "last"]
    assert [layer.name for layer in network.depth_first()] == ["c", "d", "a", "b", "last"]
    network.order()
    assert [layer.name for layer in network.of_kind(LayerKind.UNARY)] == ["c", "a", "d", "b", "last"]
    network.focus = {t["d"]: None}
    assert [layer.name for layer in network.near(LayerKind.UNARY)] == ["d", "last"]
    assert network.near(LayerKind.SLICE) == []


def run_checked(model: onnx.ModelProto, target: str) -> None:
    network = importer.build(load(model))
    assert inconsistencies(network) == []
    run = Pass.run

    def checked(self: Pass, edited: Network) -> PassResult:
        result = run(self, edited)
        assert inconsistencies(edited) == [], self.name
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "run", checked)
        pipeline.run(network, target_named(target))


@given(models(max_steps=8, steps=FORKS), st.sampled_from(CLASSIC))
def test_every_pass_leaves_one_graph(model: onnx.ModelProto, target: str) -> None:
    run_checked(model, target)


@pytest.mark.parametrize("case", QUICK_FIRST)
def test_every_pass_leaves_one_graph_of_a_built_network(case: str) -> None:
    run_checked(load(HOME / case / "model.onnx.gz").proto, "trt8.5")


@pytest.mark.parametrize("target", CLASSIC)
def test_weights_that_two_matrix_products_read(target: str) -> None:
    """The first that becomes a convolution takes its weights in; the constant stays for the other."""
    g = Graph()
    g.input(2, 16)
    weights = g.const("w", np.ones((16, 16), np.float32))
    for op in ("Gemm", "MatMul"):
        first = g.op(op, ["x", weights], f"{op}1")
        run_checked(g.model(first, g.op(op, [g.op("Tanh", "x", f"t{op}"), weights], f"{op}2")), target)


@pytest.mark.parametrize(
    ("op", "attributes", "kind"),
    [("LRN", {"size": 3}, "LRN"), ("GlobalMaxPool", {}, "Pooling"), ("MaxPool", {"kernel_shape": [2, 2]}, "Pooling"),
     ("Softmax", {}, "Softmax")],
)  # fmt: skip
def test_a_layer_of_no_known_type_has_its_operators_name(op: str, attributes: dict[str, object], kind: str) -> None:
    g = Graph()
    layers = predict(g.model(g.op(op, g.input(1, 8, 4, 4), "n", **attributes))).layers
    assert [layer.type for layer in layers if layer.nodes == ["n"]] == [kind]


OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Split", "Slice", "Concat", "Pad", "BatchNormalization", "Cast",
             "Softmax", "MaxPool", "Resize", "Transpose", "Identity", "QuantizeLinear", "DequantizeLinear", "Add", "If")


def whole() -> onnx.ModelProto:
    g = Graph()
    x = g.silu(g.bn(g.conv(g.input(1, 4, 8, 8), "a"), "bn"), "act")
    left, right = g.ops("Split", [x], "split", count=2, axis=1)
    y = g.add(g.pair(g.pool(x, "pool", k=3, stride=1), "skip"), g.conv(x, "b"), "add")
    z = g.conv(g.concat([left, right, g.resize(g.pool(y, "down"), "up")], "cat"), "c", weights="int8")
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
        attribute.i, attribute.type = dice.choice([-1, 0, 99, 2**40]), dice.choice([0, 1, 2, 3, 4, 6, 7])
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


@pytest.mark.parametrize("seed", slow_after(3, range(8)))
def test_no_other_exception(seed: int) -> None:
    dice, answered, refused = random.Random(seed), 0, 0
    for _ in range(60):
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
def test_unknown_operators(op: str) -> None:
    g = Graph()
    conv = g.conv(g.input(1, 3, 8, 8), "c")
    g.nodes.append(helper.make_node(op, [conv], ["u:0"], "u", domain="my.plugins" if op == "Custom" else ""))
    g.channels["u:0"] = 8
    prediction = predict(g.model(g.op("Softmax", g.conv("u:0", "d"), "s")), "trt8.5", advice=False)
    assert outcomes(prediction) == {"c": ([INT8], FLOAT), "d": ([INT8], FLOAT)}
    assert prediction.conversions == 2


@pytest.mark.parametrize(
    "scale",
    [np.float32(0), np.float32(-1), np.float32("nan"), np.float32("inf"), np.zeros(0, np.float32)],
    ids=["0", "-1", "nan", "inf", "empty"],
)
def test_senseless_scales(scale: Any) -> None:
    """The advice complains; the simulation must only not fail."""
    g = Graph()
    x = g.input(1, 3, 8, 8)
    quantized = g.op("QuantizeLinear", [x, g.const("s", scale), g.const("z", np.int8(0))], "Q")
    data = g.op("DequantizeLinear", [quantized, "s", "z"], "DQ")
    assert conv_names(predict(g.model(g.conv(data, "c", scale=None)), advice=False)) == ["c"]


@pytest.mark.parametrize(
    ("op", "attribute", "value"),
    [("Conv", "group", "two"), ("Conv", "group", [1, 2]), ("Conv", "strides", 1), ("MaxPool", "kernel_shape", 3.0),
     ("Concat", "axis", "one")],
)
def test_attribute_of_the_wrong_type(op: str, attribute: str, value: Any) -> None:
    """One line that names the node."""
    g = Graph()
    x = g.conv(g.input(1, 3, 8, 8), "c", scale=None)
    g.nodes.append(helper.make_node(op, [x, x], ["n:0"], "n", **{attribute: value}))
    model = helper.make_model(
        helper.make_graph(g.nodes, "g", g.inputs, [helper.make_empty_tensor_value_info("n:0")], g.initializers),
        opset_imports=[helper.make_opsetid("", 13)],
    )
    with pytest.raises(QdqtoolError, match=rf"^[^\n]*node 'n' \({op}\) is damaged[^\n]*$"):
        predict(model, advice=False)


def test_scale_without_a_value() -> None:
    """A Constant node with a string, a scale that is not there at all."""
    g = Graph()
    x = g.input(1, 3, 8, 8)
    g.nodes.append(helper.make_node("Constant", [], ["s"], value_string="0.1"))
    quantized = g.op("QuantizeLinear", [x, "s"], "Q")
    data = g.op("DequantizeLinear", [quantized, "nowhere"], "DQ")
    assert conv_names(predict(g.model(g.conv(data, "c", scale=None)), advice=False)) == ["c"]


def _small(name: str) -> onnx.ModelProto:
    """The four graphs of small-graphs-orinnano-trt103, built on TensorRT 10.3."""
    g = Graph()
    x = g.input(1, 32, 32, 32) if name != "symmetric_matmul" else g.input(32, 64)
    if name == "per_channel_conv":
        y = g.conv(x, "c", 32)
    elif name == "symmetric_matmul":
        y = g.op("MatMul", [g.pair(x, "a", 0.03), g.pair(g.const("w", np.ones((64, 64), np.float32)), "w", 0.01)], "m")
    elif name == "residual_branches":
        branches = [g.conv(x, c, 32, scale=None, weights="float") for c in ("c1", "c2")]
        y = g.op("Add", [g.pair(b, f"b{i}", 0.02) for i, b in enumerate(branches)], "add")
    else:
        y = g.relu(g.bn(g.conv(x, "c", 32, scale=None, weights="float"), "bn"), "r")
    return g.model(y)


@pytest.mark.parametrize(("name", "int8", "computing", "conversions"), [
    ("per_channel_conv", 1, [("Convolution", ["INT8"], "FLOAT")], ["c.in.Q"]),
    ("symmetric_matmul", 1, [("kgen", ["FLOAT"], "INT8"), ("MatrixMultiply", ["INT8"], "FLOAT")], []),
    ("residual_branches", 0, [("Convolution", ["FLOAT"], "FLOAT"), ("PointWise", ["INT8", "INT8"], "FLOAT")],
     ["b0.Q", "b1.Q"]),
    ("conv_bn_relu", 0, [("Convolution", ["FLOAT"], "FLOAT")], []),
])  # fmt: skip
def test_four_small_graphs_as_10_3_built_them(
    name: str, int8: int, computing: list[tuple[str, list[str], str]], conversions: list[str]
) -> None:
    """Two of them are told layer by layer there: an INT8 convolution behind a Q, and an Add that reads two INT8."""
    found = predict(_small(name), "10.3")
    told = [(x.type, [str(t.precision) for t in x.inputs], str(x.outputs[0].precision)) for x in found.layers
            if x.type in ("Convolution", "PointWise", "MatrixMultiply", "NoOp", "kgen")]
    assert (found.summary()["int8"], told, found.conversion_nodes) == (int8, computing, conversions)


def test_layers_of_matrix_products_are_those_that_10_lists() -> None:
    """gemm-mlp-trt10: kgen, three gemm, kgen; and a float product whose Q and DQ are one kernel of floats."""
    g = Graph()
    x = g.input(8, 16)
    for i in range(3):
        weights = g.pair(g.const(f"w{i}", np.ones((16, 16), np.float32)), f"w{i}p", 0.01)
        x = g.op("MatMul", [g.pair(x, f"q{i}"), weights], f"m{i}")
    found = predict(g.model(g.pair(x, "out")), "trt10", advice=False)
    told = [(x.type, *(str(t.precision) for t in (*x.inputs, *x.outputs))) for x in found.layers]
    assert told == [("kgen", "FLOAT", "INT8"), *[("MatrixMultiply", "INT8", "INT8")] * 3, ("kgen", "INT8", "FLOAT")]
    assert [b.inputs[0].tensor for b in found.layers[1:]] == [a.outputs[0].tensor for a in found.layers[:-1]]
