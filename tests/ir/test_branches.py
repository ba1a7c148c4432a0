"""Branches of If and bodies of Loop: folded if the condition is constant, else counted."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.formats.verdicts import verdict
from qdqtool.ir.branches import find_subgraph_contents
from qdqtool.ir.modelfile import load
from tests.trt.builder import Graph

FLOAT = onnx.TensorProto.FLOAT
IMAGE = [1, 16, 8, 8]


def branch(name: str, x: str, result: str, *, quantized: bool = True) -> onnx.GraphProto:
    """Return a graph with a convolution of an outer tensor. All graphs use equal tensor names."""
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
    """Return a network of a node with subgraphs and of a Relu after this node."""
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
    """Exporters compare the rank or a dimension in the condition of a Squeeze."""
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


def body_of(*nodes: onnx.NodeProto, inner: onnx.GraphProto) -> onnx.GraphProto:
    """Return a Loop's body of some nodes, with the output and initializers of `inner`."""
    nodes += (helper.make_node("Identity", ["go"], ["go_on"]),)
    inputs = [
        helper.make_tensor_value_info("i", onnx.TensorProto.INT64, []),
        helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []),
        helper.make_tensor_value_info("state", FLOAT, IMAGE),
    ]
    outputs = [helper.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []), inner.output[0]]
    return helper.make_graph(nodes, "body", inputs, outputs, list(inner.initializer))


def loop_with_if(*, quantized: bool = True) -> onnx.ModelProto:
    """Return a network with an If inside a Loop; one of its branches has a convolution."""
    then = branch("yes", "state", "t", quantized=quantized)
    other = helper.make_graph(
        [helper.make_node("Relu", ["state"], ["e"])],
        "no",
        [],
        [helper.make_tensor_value_info("e", FLOAT, IMAGE)],
    )
    result = helper.make_graph([], "", [], [helper.make_tensor_value_info("r", FLOAT, IMAGE)])
    node = helper.make_node("If", ["go"], ["r"], "if", then_branch=then, else_branch=other)
    count = onnx.numpy_helper.from_array(np.asarray(3, np.int64), "count")
    body = body_of(node, inner=result)
    return model_with(helper.make_node("Loop", ["count", "", "x"], ["y"], "loop", body=body), count)


def scan() -> onnx.ModelProto:
    """Return a network with a convolution in the body of a Scan."""
    body = branch("body", "state", "next")
    body.input.extend(
        helper.make_tensor_value_info(name, FLOAT, IMAGE) for name in ("state", "row")
    )
    body.node.add(op_type="Identity", input=["row"], output=["row_out"])
    body.output.append(helper.make_tensor_value_info("row_out", FLOAT, IMAGE))
    node = helper.make_node("Scan", ["x", "rows"], ["y", ""], "scan", body=body, num_scan_inputs=1)
    rows = onnx.numpy_helper.from_array(np.zeros([2, *IMAGE], np.float32), "rows")
    return model_with(node, rows)


@pytest.mark.parametrize("make", [loop, loop_with_if, scan])
def test_quantizers_in_bodies_are_predicted_alone(make) -> None:
    proto = make()
    prediction = qdqtool.predict(proto)
    (finding,) = (f for f in prediction.findings if f.code == "SUBGRAPH")
    reason = finding.causes[0].reason
    assert (reason.convolutions, reason.quantizers, reason.int8) == (1, 4, 1)
    assert prediction.model.subgraphs == {
        "convolutions": 1,
        "matrix_products": 0,
        "quantizers": 4,
    }
    assert "NO-QDQ" not in [f.code for f in prediction.findings]


def test_weights_with_quantizers_outside_of_the_branch() -> None:
    """A branch reads the dequantized weights of the main graph."""
    graph = branch("yes", "x", "t")
    conv = next(n for n in graph.node if n.op_type == "Conv")
    producers = {n.output[0]: n for n in graph.node}
    dq = producers[conv.input[1]]
    q = producers[dq.input[0]]
    for node in (q, dq):
        graph.node.remove(node)
    constants = [t for t in graph.initializer if t.name in (*q.input, *dq.input)]
    other = branch("no", "x", "e", quantized=False)
    node = helper.make_node("If", ["flag"], ["y"], "if", then_branch=graph, else_branch=other)
    prediction = qdqtool.predict(model_with(node, *constants, before=(q, dq), flag=True))
    (finding,) = (f for f in prediction.findings if f.code == "SUBGRAPH")
    assert finding.causes[0].reason.int8 == 1


@pytest.mark.parametrize("make", [loop, loop_with_if, scan])
def test_fix_and_insert_refuse_quantizers_in_bodies(make) -> None:
    with pytest.raises(QdqtoolError) as fix_error:
        qdqtool.fix(make())
    assert fix_error.value.code == "subgraph-quantized"
    with pytest.raises(QdqtoolError) as insert_error:
        qdqtool.insert(make(), [{"x": np.zeros(IMAGE, np.float32)}])
    assert insert_error.value.code == "already-quantized"


def test_comparison_of_bodies_is_incomplete() -> None:
    float_model, quantized = loop_with_if(quantized=False), loop_with_if()
    comparison = qdqtool.compare(float_model, quantized)
    assert comparison.partial
    assert not comparison.ok
    assert (comparison.a.subgraphs["quantizers"], comparison.b.subgraphs["quantizers"]) == (0, 4)


def test_headline_states_what_was_not_analyzed() -> None:
    text = verdict(qdqtool.predict(loop()))
    assert "Not analyzed: 1 convolution" in text
    assert "Nothing is" not in text


def test_bfloat16_in_a_branch_is_found() -> None:
    bfloat16 = onnx.TensorProto.BFLOAT16
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=bfloat16),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("Cast", ["r"], ["t"], to=FLOAT),
    ]
    then = helper.make_graph(nodes, "then", [], [helper.make_tensor_value_info("t", FLOAT, IMAGE)])
    node = helper.make_node(
        "If", ["flag"], ["y"], "if", then_branch=then, else_branch=branch("no", "x", "e")
    )
    proto = model_with(node, flag=True)
    assert "FLOAT-BF16" in [f.code for f in qdqtool.predict(proto, "8.6").findings]
    prediction = qdqtool.predict(proto, "10.3")
    assert "FLOAT-BF16" not in [f.code for f in prediction.findings]
    assert prediction.model.has_bfloat16


def test_simulated_quantizers_in_a_branch_are_found() -> None:
    nodes = [
        helper.make_node("QcQuantizeOp", ["x"], ["t"], "quantizer", domain="aimet.customop.cpu")
    ]
    then = helper.make_graph(nodes, "then", [], [helper.make_tensor_value_info("t", FLOAT, IMAGE)])
    node = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        "if",
        then_branch=then,
        else_branch=branch("no", "x", "e", quantized=False),
    )
    proto = model_with(node, flag=True)
    assert "FAKE-QUANT" in [f.code for f in qdqtool.predict(proto).findings]
    feeds = {"x": np.zeros(IMAGE, np.float32), "flag": np.asarray(True)}
    with pytest.raises(QdqtoolError) as error:
        qdqtool.insert(proto, [feeds])
    assert error.value.code == "already-quantized"


def test_fix_states_that_branches_are_unchanged() -> None:
    g = Graph(opset=17)
    stem = g.model(g.conv(g.input(*IMAGE), "stem", 16)).graph
    before = (*stem.node, helper.make_node("Relu", [stem.node[-1].output[0]], ["r"]))
    proto = model_with(conditional("flag", x="r"), *stem.initializer, before=before, flag=True)
    (note,) = (n for n in qdqtool.fix(proto).notes if n.code == "subgraphs-unchanged")
    assert note.values["count"] == 8
