"""``qdqtool.extract``: parts that stand on their own and show the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import qdqtool
from qdqtool import budgets, extract
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.extraction.cut import Cutter
from qdqtool.qdq import DQ, Q
from tests.extraction.networks import residual
from tests.trt.builder import Graph
from tests.trt.evidence import HOME

YOLO = HOME / "yolo-resnet18-orin-trt8502" / "model.onnx.gz"


def told(prediction: qdqtool.Prediction, code: str) -> list[tuple[str, str]]:
    return [(f.node, f.fix) for f in prediction.findings if f.code == code]


def test_a_finding_with_what_it_depends_on() -> None:
    model = residual()
    whole = qdqtool.predict(model)
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    onnx.checker.check_model(result.proto, full_check=True)
    small = qdqtool.predict(result.proto)
    assert told(small, "SKIP-FLOAT") == told(whole, "SKIP-FLOAT")[:1]
    for name in ("b1.c1",):
        one, two = whole.convolution(name), small.convolution(name)
        assert (one.precision, one.inputs, one.output) == (two.precision, two.inputs, two.output)
    assert len(result.proto.graph.node) == result.nodes[0] < result.nodes[1] == len(model.graph.node)
    names = {n.name for n in result.proto.graph.node}
    assert "b1.sum" in names and "b0.c0" not in names and "last" not in names
    assert result.kept.startswith(f"kept {len(names)} of {len(model.graph.node)} nodes: what SKIP-FLOAT at b1.sum")


@pytest.mark.parametrize("code", ["CONCAT-SCALE:2", "BN-UNFOLDED", "OUT-FLOAT", "SKIP-FLOAT:8"])
def test_findings_of_a_real_network(code: str) -> None:
    result = qdqtool.extract(str(YOLO), finding=code)
    onnx.checker.check_model(result.proto)  # not its shapes: those of the whole, rebuilt, are at odds in the head
    (wanted,) = result.shown.findings
    found = [f for f in result.prediction.findings if (f.code, f.node, f.fix) == (wanted.code, wanted.node, wanted.fix)]
    assert len(found) == 1
    assert result.nodes[0] < 80


def test_the_cut_computes_what_the_whole_does() -> None:
    """Held against onnxruntime on the whole network, with the tensors at the cut read out."""
    model = residual()
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    inputs = [v.name for v in result.proto.graph.input]
    outputs = [v.name for v in result.proto.graph.output]
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    have = {o.name for o in opened.graph.output} | {i.name for i in opened.graph.input}
    opened.graph.output.extend(onnx.ValueInfoProto(name=t) for t in (*inputs, *outputs) if t not in have)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    image = np.random.default_rng(0).standard_normal((1, 8, 16, 16)).astype(np.float32)
    run = ort.InferenceSession(opened.SerializeToString(), options).run
    names = [t for t in (*inputs, *outputs) if t != "x"]
    values = dict(zip(names, run(names, {"x": image}), strict=True)) | {"x": image}
    part = ort.InferenceSession(result.proto.SerializeToString(), options)
    for name, value in zip(outputs, part.run(outputs, {t: values[t] for t in inputs}), strict=True):
        np.testing.assert_array_equal(value, values[name])


def test_everything_the_original_says_is_kept() -> None:
    model = residual()
    model.graph.value_info.append(helper.make_tensor_value_info("b1.r0:0", onnx.TensorProto.FLOAT, ["n", 8, 16, 16]))
    proto = qdqtool.extract(model, finding="SKIP-FLOAT").proto
    assert {p.key: p.value for p in proto.metadata_props} == {"stride": "32"}
    assert (proto.producer_name, proto.doc_string, proto.ir_version) == ("maker", "about it", model.ir_version)
    assert proto.opset_import == model.opset_import
    before = {n.name: n for n in model.graph.node}
    assert all(n == before[n.name] for n in proto.graph.node)
    order = [n.name for n in model.graph.node]
    places = [order.index(n.name) for n in proto.graph.node]
    assert places == sorted(places)
    constants = {t.name: t for t in model.graph.initializer}
    assert all(t == constants[t.name] for t in proto.graph.initializer)
    kept = {v.name: v for v in (*proto.graph.value_info, *proto.graph.input)}
    assert kept["b1.r0:0"].type.tensor_type.shape.dim[0].dim_param == "n"
    made = {o for n in model.graph.node for o in n.output} | {v.name for v in model.graph.input}
    assert {v.name for v in (*proto.graph.input, *proto.graph.output)} <= made


def test_nothing_is_cut_between_q_and_dq() -> None:
    model = residual()
    for hops in range(6):
        proto = qdqtool.extract(model, node="b1.c1", hops=hops).proto
        made = {o for n in proto.graph.node for o in n.output if n.op_type == Q}
        read = {n.input[0] for n in proto.graph.node if n.op_type == DQ}
        assert made == read
        assert all(v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for v in proto.graph.input)


def test_between_tensors() -> None:
    result = qdqtool.extract(residual(), inputs=["stem.r:0"], outputs=["b0.r1:0"])
    assert [v.name for v in result.proto.graph.input] == ["stem.r:0"]
    assert [v.name for v in result.proto.graph.output] == ["b0.r1:0"]
    assert {n.name.split(".")[0] for n in result.proto.graph.node} == {"b0"}
    assert {c.name for c in result.prediction.convolutions} == {"b0.c0", "b0.c1"}


@pytest.mark.parametrize(("arguments", "said"), [
    ({}, "say what to extract"),
    ({"finding": "NOPE"}, "has no finding NOPE on trt10; its findings: "),
    ({"finding": "SKIP-FLOAT:9"}, "there is 1 of SKIP-FLOAT"),
    ({"finding": "SKIP-FLOAT:x"}, "there is 1 of SKIP-FLOAT"),
    ({"finding": "SKIP-FLOAT:0"}, "counted from 1"),
    ({"node": "b1.c11"}, "has no node 'b1.c11'; nearest: b1.c1"),
    ({"node": "b1."}, "has no node 'b1.'; 13 begin so: "),
    ({"inputs": ["b1.r1:0"], "outputs": ["b0.r1:0"]}, "does not depend on 'b1.r1:0', but the other way round"),
    ({"inputs": ["b2.skip.DQ:0"], "outputs": ["b2.r0:0"]}, "does not depend on 'b2.skip.DQ:0'; give a tensor on the w"),
    ({"inputs": ["b1.c1"]}, "has no tensor 'b1.c1'"),
    ({"inputs": ["b1.r0:0"], "outputs": ["b1.r1:0"]}, "also depends on network input 'x'"),
    ({"inputs": ["x", "b1.r1:0"], "outputs": ["b0.r1:0"]}, "no output depends on 'b1.r1:0'"),
    ({"outputs": ["x"]}, "nothing lies between"),
    ({"finding": "SKIP-FLOAT", "inputs": ["x"]}, "not both"),
    ({"finding": "SKIP-FLOAT", "hops": 2}, "hops are counted from a node"),
    ({"finding": "SKIP-FLOAT", "builder": "trtexec", "check": "true"}, "not both"),
    ({"finding": ""}, "a name or command is empty"),
    ({"node": " "}, "a name or command is empty"),
    ({"finding": "SKIP-FLOAT", "limit": 0}, "limit is at least 1"),
])  # fmt: skip
def test_bad_requests(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(QdqtoolError, match=said.replace("(", r"\(")) as caught:
        qdqtool.extract(residual(), **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_model_given_is_not_changed() -> None:
    model = residual()
    before = model.SerializeToString(deterministic=True)
    qdqtool.extract(model, finding="SKIP-FLOAT", minimize=True, private=True)
    assert model.SerializeToString(deterministic=True) == before


def test_the_same_bytes_each_time() -> None:
    first, second = (qdqtool.extract(residual(), finding="SKIP-FLOAT", minimize=True, private=True) for _ in range(2))
    assert first.proto.SerializeToString(deterministic=True) == second.proto.SerializeToString(deterministic=True)


def test_minimize_keeps_finding_fix_and_outcomes() -> None:
    model = residual()
    whole = qdqtool.predict(model)
    cut = qdqtool.extract(model, finding="SKIP-FLOAT")
    small = qdqtool.extract(model, finding="SKIP-FLOAT", minimize=True)
    onnx.checker.check_model(small.proto, full_check=True)
    prediction = qdqtool.predict(small.proto)
    assert told(prediction, "SKIP-FLOAT") == told(whole, "SKIP-FLOAT")
    one, two = whole.convolution("b1.c1"), prediction.convolution("b1.c1")
    assert (one.precision, one.inputs, one.output) == (two.precision, two.inputs, two.output)
    assert small.nodes[0] <= cut.nodes[0]
    assert all(max((d.dim_value for d in v.type.tensor_type.shape.dim), default=0) <= 2
               for v in small.proto.graph.input)
    assert sum(numpy_helper.to_array(t).size for t in small.proto.graph.initializer) < 200


def test_a_limit_is_told() -> None:
    result = qdqtool.extract(residual(), finding="SKIP-FLOAT", minimize=True, limit=3)
    assert any("stopped after 3 tries" in n for n in result.notes)
    assert told(result.prediction, "SKIP-FLOAT")


def test_external_weights_are_read_in(tmp_path: Path) -> None:
    model = residual()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    result = qdqtool.extract(str(tmp_path / "m.onnx"), finding="SKIP-FLOAT")
    constants = {t.name: numpy_helper.to_array(t) for t in residual().graph.initializer}
    for tensor in result.proto.graph.initializer:
        assert not tensor.external_data
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), constants[tensor.name])
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weight file 'weights.bin' of tensor .* is missing"):
        qdqtool.extract(str(tmp_path / "m.onnx"), node="b1.c1")


def test_doubled_and_missing_node_names() -> None:
    model = residual()
    for node in model.graph.node:
        node.name = "" if node.op_type == "Relu" else node.op_type
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    names = [n.name for n in result.proto.graph.node]
    assert len(set(names)) == len(names)
    assert told(result.prediction, "SKIP-FLOAT") == told(qdqtool.predict(model), "SKIP-FLOAT")


def test_plugins_and_half_precision_are_cut() -> None:
    g = Graph(half=True)
    x = g.conv(g.input(1, 8, 8, 8), "c0", scale=None, weights="float")
    model = g.model(g.conv(x, "c1", scale=None, weights="float"))
    end = model.graph.output[0].name
    model.graph.node.append(helper.make_node("Own", [end], ["own"], "own", domain="mine"))
    model.graph.output[0].name = "own"
    model.opset_import.append(helper.make_opsetid("mine", 1))
    result = qdqtool.extract(model, node="c1", hops=1)
    assert {o.domain for o in result.proto.opset_import} == {"", "mine"}
    assert result.proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert [n.name for n in result.proto.graph.node] == ["c0", "c1", "own"]


def test_several_findings_in_one_part() -> None:
    model = residual()
    result = qdqtool.extract(model, finding=["SKIP-FLOAT", "OUT-FLOAT"])
    assert {"SKIP-FLOAT", "OUT-FLOAT"} <= {f.code for f in result.prediction.findings}
    assert "what SKIP-FLOAT at b1.sum, OUT-FLOAT at last depends on" in result.kept
    one, two = (qdqtool.extract(model, finding=c).nodes[0] for c in ("SKIP-FLOAT", "OUT-FLOAT"))
    assert max(one, two) < result.nodes[0] < len(model.graph.node)


def _function(name: str, *calls: str) -> onnx.FunctionProto:
    nodes = [helper.make_node("Neg", ["x"], ["0"])]
    nodes += [helper.make_node(call, [str(i)], [str(i + 1)], domain="own") for i, call in enumerate(calls)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["x"], [str(len(calls))], nodes, opsets)


@pytest.mark.parametrize("inside", [False, True], ids=["called", "called from a subgraph"])
def test_functions_that_the_part_calls_stay_and_no_others(inside: bool) -> None:
    model = residual()
    end = model.graph.output[0].name
    call = helper.make_node("Outer", [end], ["done"], "outer", domain="own")
    if inside:
        branches = [helper.make_graph([helper.make_node("Outer", [end], [f"in{i}"], domain="own")], f"g{i}", [],
                                      [helper.make_tensor_value_info(f"in{i}", onnx.TensorProto.FLOAT, None)])
                    for i in range(2)]
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "which"))
        call = helper.make_node("If", ["which"], ["done"], "outer", then_branch=branches[0], else_branch=branches[1])
    model.graph.node.append(call)
    model.graph.output[0].name = "done"
    model.functions.extend([_function("Unused"), _function("Outer", "Inner", "Inner"), _function("Inner")])
    model.opset_import.append(helper.make_opsetid("own", 1))
    part = qdqtool.extract(model, node="outer", hops=1).proto
    assert [f.name for f in part.functions] == ["Outer", "Inner"]
    onnx.checker.check_model(part, full_check=True)
    assert not qdqtool.extract(model, finding="SKIP-FLOAT").proto.functions


def test_trimming_a_wide_part_ends_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a message counts every reader of a tensor no reader can go: trying each one would take the square."""
    scale, zero = numpy_helper.from_array(np.float32(0.02), "s"), numpy_helper.from_array(np.int8(0), "z")
    weight = numpy_helper.from_array(np.full((4, 3, 1, 1), 0.1, np.float32), "w")
    nodes = []
    for tensor in ("x", "w"):
        nodes.append(helper.make_node("QuantizeLinear", [tensor, "s", "z"], [f"{tensor}_q"], name=f"{tensor}_Q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{tensor}_q", "s", "z"], [f"{tensor}_d"]))
    nodes += [helper.make_node("Conv", ["x_d", "w_d"], [f"y{i}"], name=f"conv{i}") for i in range(60)]
    ends = [helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, [1, 4, 8, 8]) for i in range(60)]
    start = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 8, 8])
    graph = helper.make_graph(nodes, "g", [start], ends, [weight, scale, zero])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    monkeypatch.setattr(budgets, "TRIMMED_NODES", 500)
    drawn = []
    sketch = Cutter.sketch
    monkeypatch.setattr(Cutter, "sketch", lambda self, part: drawn.append(len(part.nodes)) or sketch(self, part))
    found = extract(proto, node="conv7")
    assert sum(drawn) < 500 + 3 * 64
    assert any("trimming ended" in n for n in found.notes)
    assert {c.name for c in found.shown.convolutions} >= {"conv7"}
