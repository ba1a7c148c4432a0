from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.fixing.runner import cut_runnable_part
from qdqtool.formats.verdicts import verdict
from qdqtool.ir.branches import find_subgraph_contents
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from tests.errors import has
from tests.insertion import nets
from tests.trt.builder import Graph

FLOAT = TensorProto.FLOAT
IMAGE = [1, 16, 8, 8]


def image(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, IMAGE)


def branch(name: str, x: str, result: str, *, quantized: bool = True) -> GraphProto:
    """Return a graph with a convolution of an outer tensor. All graphs use equal tensor names."""
    g = Graph(opset=17)
    data = g.pair(x, "in") if quantized else x
    g.channels[data] = 16
    weights = "qdq" if quantized else "float"
    y = g.relu(g.conv(data, f"{name}_conv", 16, k=1, scale=None, weights=weights), f"{name}_relu")
    inner = g.model(y).graph
    nodes = [*inner.node, helper.make_node("Identity", [y], [result])]
    return helper.make_graph(nodes, name, [], [image(result)], list(inner.initializer))


def model_with(
    node: NodeProto,
    *initializers: TensorProto,
    before: tuple[NodeProto, ...] = (),
    flag: bool = False,
) -> ModelProto:
    inputs = [image("x")]
    if flag:
        inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    nodes = [*before, node, helper.make_node("Relu", [node.output[0]], ["end"], "end")]
    graph = helper.make_graph(nodes, "g", inputs, [image("end")], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def conditional(
    *, x: str = "x", output: str = "y", name: str = "if", **branches: GraphProto
) -> NodeProto:
    graphs = {
        "then_branch": branch("yes", x, f"{output}_then"),
        "else_branch": branch("no", x, f"{output}_else"),
        **branches,
    }
    return helper.make_node("If", ["flag"], [output], name, **graphs)


def nested() -> NodeProto:
    inner = conditional(output="inner", name="inner")
    return conditional(then_branch=helper.make_graph([inner], "then", [], [image("inner")]))


def float_branches(x: str) -> dict[str, GraphProto]:
    return {
        "then_branch": branch("yes", x, "t", quantized=False),
        "else_branch": branch("no", x, "e", quantized=False),
    }


def after_stem(node: NodeProto, weights: str, scale: float | None) -> ModelProto:
    g = Graph(opset=17)
    stem = g.model(g.conv(g.input(*IMAGE), "stem", 16, weights=weights, scale=scale)).graph
    before = (*stem.node, helper.make_node("Relu", [stem.node[-1].output[0]], ["r"]))
    return model_with(node, *stem.initializer, before=before, flag=True)


def boolean(name: str, value: bool) -> TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def run(proto: ModelProto) -> np.ndarray:
    return nets.run(proto, {"x": np.random.default_rng(0).normal(0, 1, IMAGE).astype("float32")})[0]


def model_with_loop(body: GraphProto) -> ModelProto:
    body.node.add(op_type="Identity", input=["go"], output=["go_on"])
    body.input.extend(
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            image("state"),
        ]
    )
    body.output.insert(0, helper.make_tensor_value_info("go_on", TensorProto.BOOL, []))
    return model_with(
        helper.make_node("Loop", ["count", "", "x"], ["y"], "loop", body=body),
        numpy_helper.from_array(np.asarray(3, np.int64), "count"),
    )


def loop() -> ModelProto:
    return model_with_loop(branch("body", "state", "next"))


def loop_with_if(*, quantized: bool = True) -> ModelProto:
    then = branch("yes", "state", "t", quantized=quantized)
    other = helper.make_graph([helper.make_node("Relu", ["state"], ["e"])], "no", [], [image("e")])
    node = helper.make_node("If", ["go"], ["r"], "if", then_branch=then, else_branch=other)
    return model_with_loop(helper.make_graph([node], "body", [], [image("r")]))


def scan() -> ModelProto:
    body = branch("body", "state", "next")
    body.input.extend([image("state"), image("row")])
    body.node.add(op_type="Identity", input=["row"], output=["row_out"])
    body.output.append(image("row_out"))
    node = helper.make_node("Scan", ["x", "rows"], ["y", ""], "scan", body=body, num_scan_inputs=1)
    return model_with(node, numpy_helper.from_array(np.zeros([2, *IMAGE], np.float32), "rows"))


def subgraph_reason(proto: ModelProto, target: str = "trt8.5") -> Any:
    (finding,) = (f for f in qdqtool.predict(proto, target).findings if f.code == "SUBGRAPH")
    return finding.causes[0].reason


@pytest.mark.parametrize("condition", [True, False])
def test_if_with_constant_condition_becomes_its_branch(condition: bool) -> None:
    proto = model_with(conditional(), boolean("flag", condition))
    text = proto.SerializeToString()
    model = load(proto)
    assert proto.SerializeToString() == text and "If" not in [n.op for n in model.nodes]
    assert ("yes_conv" if condition else "no_conv") in [n.name for n in model.nodes]
    assert qdqtool.predict(proto).summary()["int8"] == 1


# Exporters compare the rank or a dimension in the condition of a Squeeze.
FOUR = numpy_helper.from_array(np.asarray(4, np.int64), "four")
STATIC = (
    helper.make_node("Shape", ["x"], ["shape"]),
    helper.make_node("Size", ["shape"], ["rank"]),
    helper.make_node("Equal", ["rank", "four"], ["flag"]),
)


@pytest.mark.parametrize(
    ("proto", "convolutions"),
    [
        pytest.param(model_with(conditional(), boolean("flag", True)), 1, id="first branch"),
        pytest.param(model_with(conditional(), boolean("flag", False)), 1, id="second branch"),
        pytest.param(model_with(conditional(), FOUR, before=STATIC), 1, id="static shape"),
        pytest.param(
            model_with(
                conditional(x="t", name="second"),
                boolean("flag", True),
                before=(conditional(output="t", name="first"),),
            ),
            2,
            id="same names in two Ifs",
        ),
        pytest.param(model_with(nested(), boolean("flag", True)), 1, id="If in a branch"),
    ],
)
def test_folded_branches_compute_the_same(proto: ModelProto, convolutions: int) -> None:
    model = load(proto)
    assert [n.op for n in model.nodes].count("Conv") == convolutions
    np.testing.assert_array_equal(run(model.proto), run(proto))


def test_branch_that_passes_a_tensor_on() -> None:
    node = conditional(then_branch=helper.make_graph([], "then", [], [image("x")]))
    assert [n.op for n in load(model_with(node, boolean("flag", True))).nodes] == [
        "Identity",
        "Relu",
    ]


@pytest.mark.parametrize("target", ["trt8.6", "trt10", "rtx1.7"])
def test_branches_of_the_data_are_counted(target: str) -> None:
    reason = subgraph_reason(model_with(conditional(), flag=True), target)
    assert (reason.node, reason.convolutions, reason.quantizers, reason.int8) == ("if", 2, 8, 2)


def test_nested_branches_count() -> None:
    (content,) = find_subgraph_contents(load(model_with(nested(), flag=True)))
    assert (content.convolutions, content.quantizers) == (3, 12)


FEEDS = {"x": np.zeros(IMAGE, np.float32), "flag": np.asarray(True)}


def test_insert_says_that_branches_stay_float() -> None:
    proto = after_stem(conditional(**float_branches("r")), "float", None)
    (warning,) = (w for w in qdqtool.insert(proto, [FEEDS]).warnings if w.code == "subgraph-float")
    assert warning.values["count"] == 2


@pytest.mark.parametrize(("make", "op"), [(loop, "Loop"), (loop_with_if, "Loop"), (scan, "Scan")])
def test_quantizers_in_bodies_are_predicted_alone(make: Callable[[], ModelProto], op: str) -> None:
    proto = make()
    reason = subgraph_reason(proto)
    assert (reason.op, reason.convolutions, reason.quantizers, reason.int8) == (op, 1, 4, 1)
    prediction = qdqtool.predict(proto)
    assert prediction.model.subgraphs == {
        "convolutions": 1,
        "matrix_products": 0,
        "quantizers": 4,
    }
    assert "NO-QDQ" not in [f.code for f in prediction.findings]


def test_weights_with_quantizers_outside_of_the_branch() -> None:
    """A branch reads the dequantized weights of the main graph."""
    graph = branch("yes", "x", "t")
    producers = {n.output[0]: n for n in graph.node}
    dq = producers[next(n for n in graph.node if n.op_type == "Conv").input[1]]
    q = producers[dq.input[0]]
    for node in (q, dq):
        graph.node.remove(node)
    constants = [t for t in graph.initializer if t.name in (*q.input, *dq.input)]
    node = conditional(then_branch=graph, else_branch=branch("no", "x", "e", quantized=False))
    assert subgraph_reason(model_with(node, *constants, before=(q, dq), flag=True)).int8 == 1


@pytest.mark.parametrize("make", [loop, loop_with_if, scan])
def test_fix_and_insert_refuse_quantizers_in_bodies(make: Callable[[], ModelProto]) -> None:
    with pytest.raises(QdqtoolError, check=has("subgraph-quantized")):
        qdqtool.fix(make())
    with pytest.raises(QdqtoolError, check=has("already-quantized")):
        qdqtool.insert(make(), [{"x": FEEDS["x"]}])


def test_comparison_of_bodies_is_incomplete() -> None:
    comparison = qdqtool.compare(loop_with_if(quantized=False), loop_with_if())
    assert comparison.partial and not comparison.ok
    assert (comparison.a.subgraphs["quantizers"], comparison.b.subgraphs["quantizers"]) == (0, 4)


def test_headline_states_what_was_not_analyzed() -> None:
    text = verdict(qdqtool.predict(loop()))
    assert "Not analyzed: 1 convolution" in text and "Nothing is" not in text


def test_bfloat16_in_a_branch_is_found() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("Cast", ["r"], ["t"], to=FLOAT),
    ]
    then = helper.make_graph(nodes, "then", [], [image("t")])
    proto = model_with(conditional(then_branch=then), flag=True)
    assert "FLOAT-BF16" in [f.code for f in qdqtool.predict(proto, "8.6").findings]
    prediction = qdqtool.predict(proto, "10.3")
    assert "FLOAT-BF16" not in [f.code for f in prediction.findings]
    assert prediction.model.has_bfloat16


def test_simulated_quantizers_in_a_branch_are_found() -> None:
    domain = "aimet.customop.cpu"
    quantizer = helper.make_node("QcQuantizeOp", ["x"], ["t"], "quantizer", domain=domain)
    then = helper.make_graph([quantizer], "then", [], [image("t")])
    proto = model_with(conditional(**{**float_branches("x"), "then_branch": then}), flag=True)
    assert "FAKE-QUANT" in [f.code for f in qdqtool.predict(proto).findings]
    with pytest.raises(QdqtoolError, check=has("already-quantized")):
        qdqtool.insert(proto, [FEEDS])


def test_fix_states_that_branches_are_unchanged() -> None:
    proto = after_stem(conditional(x="r"), "qdq", 0.1)
    (note,) = (n for n in qdqtool.fix(proto).notes if n.code == "subgraphs-unchanged")
    assert note.values["count"] == 8


def test_branches_that_read_a_plugin_are_not_run() -> None:
    relu = helper.make_node("Relu", ["x"], ["r"], "relu")
    plugin = helper.make_node("Plugin", ["r"], ["p"], "plugin", domain="custom")
    proto = model_with(conditional(x="p"), before=(relu, plugin), flag=True)
    part, _ = cut_runnable_part(Model(proto), body=False)
    assert [node.name for node in part.graph.node] == ["relu"]
