"""Branches of If and bodies of Loop: folded if the condition is constant, else counted."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import qdqtool
from qdqtool.ir.branches import find_subgraph_contents
from qdqtool.ir.modelfile import load
from tests.trt.builder import Graph

FLOAT = onnx.TensorProto.FLOAT
IMAGE = [1, 16, 8, 8]


def branch(name: str, x: str, result: str, *, quantized: bool = True) -> onnx.GraphProto:
    """Return a graph with a convolution of an outer tensor. Tensors have the same names in all."""
    g = Graph(opset=17)
    data = g.pair(x, "in") if quantized else x
    g.channels[data] = 16
    weights = "qdq" if quantized else "float"
    y = g.conv(data, f"{name}_conv", 16, k=1, scale=None, weights=weights)
    y = g.relu(y, f"{name}_relu")
    inner = g.model(y).graph
    nodes = [*inner.node, helper.make_node("Identity", [y], [result])]
    value = helper.make_tensor_value_info(result, FLOAT, IMAGE)
    return helper.make_graph(nodes, name, [], [value], list(inner.initializer))


def model_with(
    node: onnx.NodeProto,
    *initializers: onnx.TensorProto,
    before: tuple[onnx.NodeProto, ...] = (),
    flag: bool = False,
) -> onnx.ModelProto:
    """Return a network of one node with subgraphs and a Relu after it."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, IMAGE)]
    if flag:
        inputs.append(helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, []))
    nodes = [*before, node, helper.make_node("Relu", [node.output[0]], ["end"], "end")]
    outputs = [helper.make_tensor_value_info("end", FLOAT, IMAGE)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def conditional(
    condition: str, *, x: str = "x", output: str = "y", name: str = "if"
) -> onnx.NodeProto:
    return helper.make_node(
        "If",
        [condition],
        [output],
        name,
        then_branch=branch("yes", x, f"{output}_then"),
        else_branch=branch("no", x, f"{output}_else"),
    )


def boolean(name: str, value: bool) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(value), name)


def run(proto: onnx.ModelProto) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    x = np.random.default_rng(0).normal(0, 1, IMAGE).astype(np.float32)
    return session.run(None, {"x": x})[0]


def loop() -> onnx.ModelProto:
    """Return a network with a convolution in the body of a Loop."""
    body = branch("body", "state", "next")
    body.node.add(op_type="Identity", input=["go"], output=["go_on"])
    body.input.extend(
        [
            helper.make_tensor_value_info("i", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, IMAGE),
        ]
    )
    body.output.insert(0, helper.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []))
    count = onnx.numpy_helper.from_array(np.asarray(3, np.int64), "count")
    node = helper.make_node("Loop", ["count", "", "x"], ["y"], "loop", body=body)
    return model_with(node, count)


@pytest.mark.parametrize("condition", [True, False])
def test_if_with_constant_condition_becomes_its_branch(condition: bool) -> None:
    proto = model_with(conditional("flag"), boolean("flag", condition))
    text = proto.SerializeToString()
    model = load(proto)
    assert proto.SerializeToString() == text
    assert "If" not in [n.op for n in model.nodes]
    assert ("yes_conv" if condition else "no_conv") in [n.name for n in model.nodes]
    np.testing.assert_array_equal(run(model.proto), run(proto))
    assert qdqtool.predict(proto).summary()["int8"] == 1


def test_condition_may_follow_from_a_static_shape() -> None:
    """Exporters ask for the rank or a dimension before they squeeze."""
    before = (
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Size", ["shape"], ["rank"]),
        helper.make_node("Equal", ["rank", "four"], ["flag"]),
    )
    four = onnx.numpy_helper.from_array(np.asarray(4, np.int64), "four")
    proto = model_with(conditional("flag"), four, before=before)
    assert "yes_conv" in [n.name for n in load(proto).nodes]
    np.testing.assert_array_equal(run(load(proto).proto), run(proto))


def test_two_ifs_may_use_the_same_names_inside() -> None:
    first = conditional("flag", output="t", name="first")
    second = conditional("flag", x="t", output="y", name="second")
    proto = model_with(second, boolean("flag", True), before=(first,))
    model = load(proto)
    assert [n.op for n in model.nodes].count("Conv") == 2
    np.testing.assert_array_equal(run(model.proto), run(proto))


def test_if_in_a_branch_is_folded() -> None:
    inner = conditional("flag", output="inner", name="inner")
    value = helper.make_tensor_value_info("inner", FLOAT, IMAGE)
    outer = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        "outer",
        then_branch=helper.make_graph([inner], "then", [], [value]),
        else_branch=branch("no", "x", "y_else"),
    )
    proto = model_with(outer, boolean("flag", True))
    model = load(proto)
    assert [n.op for n in model.nodes].count("Conv") == 1
    np.testing.assert_array_equal(run(model.proto), run(proto))


def test_branch_that_passes_a_tensor_on() -> None:
    passed = helper.make_graph([], "then", [], [helper.make_tensor_value_info("x", FLOAT, IMAGE)])
    node = helper.make_node(
        "If", ["flag"], ["y"], "if", then_branch=passed, else_branch=branch("no", "x", "e")
    )
    model = load(model_with(node, boolean("flag", True)))
    assert [n.op for n in model.nodes] == ["Identity", "Relu"]


@pytest.mark.parametrize("target", ["trt8.6", "trt10", "rtx1.7"])
def test_branches_of_the_data_are_counted(target: str) -> None:
    prediction = qdqtool.predict(model_with(conditional("flag"), flag=True), target)
    (finding,) = (f for f in prediction.findings if f.code == "SUBGRAPH")
    reason = finding.causes[0].reason
    assert (reason.node, reason.convolutions, reason.quantizers) == ("if", 2, 8)
    assert reason.int8 == 2


def test_body_of_a_loop_is_counted() -> None:
    prediction = qdqtool.predict(loop())
    (finding,) = (f for f in prediction.findings if f.code == "SUBGRAPH")
    reason = finding.causes[0].reason
    assert (reason.op, reason.convolutions, reason.int8) == ("Loop", 1, 1)


def test_nested_branches_count() -> None:
    inner = conditional("flag", output="inner", name="inner")
    value = helper.make_tensor_value_info("inner", FLOAT, IMAGE)
    outer = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        "outer",
        then_branch=helper.make_graph([inner], "then", [], [value]),
        else_branch=branch("no", "x", "y_else"),
    )
    (content,) = find_subgraph_contents(load(model_with(outer, flag=True)))
    assert (content.convolutions, content.quantizers) == (3, 12)


def test_insert_says_that_branches_stay_float() -> None:
    node = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        "if",
        then_branch=branch("yes", "r", "t", quantized=False),
        else_branch=branch("no", "r", "e", quantized=False),
    )
    g = Graph(opset=17)
    stem = g.model(g.conv(g.input(*IMAGE), "stem", 16, weights="float", scale=None)).graph
    before = (*stem.node, helper.make_node("Relu", [stem.node[-1].output[0]], ["r"]))
    proto = model_with(node, *stem.initializer, before=before, flag=True)
    feeds = {"x": np.zeros(IMAGE, np.float32), "flag": np.asarray(True)}
    insertion = qdqtool.insert(proto, [feeds])
    (warning,) = (w for w in insertion.warnings if w.code == "subgraph-float")
    assert warning.values["count"] == 2
