"""``qdqtool.extract``: parts that stand on their own and show the same."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qdqtool
import qdqtool.errors
from qdqtool import extract
from qdqtool.base import budgets
from qdqtool.base.notes import Remark, remarks
from qdqtool.errors import BuilderError, ModelError, QdqtoolError
from qdqtool.extraction import checks, job
from qdqtool.extraction.cut import Cutter
from qdqtool.extraction.moves import ALL, channels, spatial
from qdqtool.extraction.private import masked
from qdqtool.extraction.select import Shrinker
from qdqtool.model.graph import Model
from qdqtool.model.qdq import DQ, Q, quantizers, read_params
from qdqtool.trt.refusals import ConcatScales
from tests.explain.graphs import concat
from tests.extraction.networks import SECRET, residual, secretive
from tests.insertion.nets import run
from tests.raising import raises
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import HOME
from tools.growth.families import split_joined, wide_split

YOLO = HOME / "yolo-resnet18-orin-trt8502" / "model.onnx.gz"


def told(prediction: qdqtool.Prediction, code: str) -> list[tuple[str, str, list[str]]]:
    """Where a code is reported, how badly, and of which refusals."""
    return [
        (f.node, str(f.severity), [type(c.refusal).__name__ for c in f.causes])
        for f in prediction.findings
        if f.code == code
    ]


def test_a_finding_and_its_names() -> None:
    model = residual(3)
    whole = qdqtool.predict(model)
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    onnx.checker.check_model(result.proto, full_check=True)
    small = qdqtool.predict(result.proto)
    assert told(small, "SKIP-FLOAT") == told(whole, "SKIP-FLOAT")[:1]
    one, two = whole.convolution("b1.c1"), small.convolution("b1.c1")
    assert (one.precision, one.inputs, one.output) == (two.precision, two.inputs, two.output)
    assert (
        len(result.proto.graph.node) == result.nodes[0] < result.nodes[1] == len(model.graph.node)
    )
    names = {n.name for n in result.proto.graph.node}
    assert "b1.sum" in names and "b0.c0" not in names and "last" not in names
    assert [(f.code, f.node) for f in result.shown.findings] == [("SKIP-FLOAT", "b1.sum")]


@pytest.mark.parametrize(
    "code", slow_after(1, ["OUT-FLOAT", "CONCAT-SCALE:2", "BN-UNFOLDED", "SKIP-FLOAT:8"])
)
def test_findings_of_a_real_network(code: str) -> None:
    result = qdqtool.extract(str(YOLO), finding=code, private=True)
    onnx.checker.check_model(
        result.proto
    )  # not its shapes: those of the whole, rebuilt, are at odds in the head
    assert result.private is not None
    (wanted,), names = result.shown.findings, result.private.names
    assert (
        [t for t in told(result.prediction, wanted.code) if t[0] == wanted.node]
        == [
            (wanted.node, *t[1:])
            for t in told(result.whole, wanted.code)
            if names.get(t[0]) == wanted.node
        ]
        != []
    )
    assert result.nodes[0] < 80
    whole = onnx.load_from_string(gzip.decompress(YOLO.read_bytes()))
    data = result.proto.SerializeToString()
    there = {n.name for n in whole.graph.node} | {
        t for n in whole.graph.node for t in (*n.input, *n.output)
    }
    assert not [n for n in there if len(n) > 4 and n.encode() in data]


def test_cuts_compute_what_the_whole_does() -> None:
    """Held against onnxruntime on the whole network, with the tensors at the cut read out."""
    model = residual(3)
    model.graph.value_info.append(
        helper.make_tensor_value_info("b1.r0:0", onnx.TensorProto.FLOAT, ["n", 8, 16, 16])
    )
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    inputs = [v.name for v in result.proto.graph.input]
    outputs = [v.name for v in result.proto.graph.output]
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    have = {o.name for o in opened.graph.output} | {i.name for i in opened.graph.input}
    opened.graph.output.extend(
        onnx.ValueInfoProto(name=t) for t in (*inputs, *outputs) if t not in have
    )
    image = np.random.default_rng(0).standard_normal((1, 8, 16, 16)).astype(np.float32)
    names = [t for t in (*inputs, *outputs) if t != "x"]
    values = dict(zip(names, run(opened, {"x": image}, names), strict=True)) | {"x": image}
    part = run(result.proto, {t: values[t] for t in inputs}, outputs)
    for name, value in zip(outputs, part, strict=True):
        np.testing.assert_array_equal(value, values[name])
    proto = result.proto
    assert {p.key: p.value for p in proto.metadata_props} == {"stride": "32"}
    assert (proto.producer_name, proto.doc_string, proto.ir_version) == (
        "maker",
        "about it",
        model.ir_version,
    )
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


def test_what_is_not_cut_or_changed() -> None:
    model = residual()
    for hops in range(4):
        proto = qdqtool.extract(model, node="b1.c1", hops=hops).proto
        made = {o for n in proto.graph.node for o in n.output if n.op_type == Q}
        read = {n.input[0] for n in proto.graph.node if n.op_type == DQ}
        assert made == read
        assert all(
            v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for v in proto.graph.input
        )
    model = residual()
    before = model.SerializeToString(deterministic=True)
    first, second = (
        qdqtool.extract(model, finding="SKIP-FLOAT", minimize=True, private=True, limit=5)
        for _ in range(2)
    )
    assert model.SerializeToString(deterministic=True) == before
    assert first.proto.SerializeToString(deterministic=True) == second.proto.SerializeToString(
        deterministic=True
    )
    result = qdqtool.extract(residual(), inputs=["stem.r:0"], outputs=["b0.r1:0"])
    assert [v.name for v in result.proto.graph.input] == ["stem.r:0"]
    assert [v.name for v in result.proto.graph.output] == ["b0.r1:0"]
    assert {n.name.split(".")[0] for n in result.proto.graph.node} == {"b0"}
    assert {c.name for c in result.prediction.convolutions} == {"b0.c0", "b0.c1"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "Job.select"),
        ({"finding": "NOPE"}, "choose NOPE trt10"),
        ({"finding": "SKIP-FLOAT:9"}, "choose SKIP-FLOAT:9 1"),
        ({"finding": "SKIP-FLOAT:x"}, "choose SKIP-FLOAT:x 1"),
        ({"finding": "SKIP-FLOAT:0"}, "choose SKIP-FLOAT:0 1"),
        ({"node": "b1.c11"}, "Job._node 'b1.c11' b1.c1"),
        ({"node": "b1."}, "Job._node 'b1.' 13"),
        ({"inputs": ["b1.r1:0"], "outputs": ["b0.r1:0"]}, "Cutter.between 'b0.r1:0' 'b1.r1:0'"),
        (
            {"inputs": ["b0.skip.DQ:0"], "outputs": ["b0.r0:0"]},
            "Cutter.between 'b0.r0:0' 'b0.skip.DQ:0'",
        ),
        ({"inputs": ["b1.c1"]}, "Cutter.between 'b1.c1'"),
        ({"inputs": ["b1.r0:0"], "outputs": ["b1.r1:0"]}, "Cutter.between 'b1.r1:0' 'x' `inputs`"),
        ({"inputs": ["x", "b1.r1:0"], "outputs": ["b0.r1:0"]}, "Cutter.between 'b1.r1:0' `inputs`"),
        ({"outputs": ["x"]}, "Cutter.between nothing"),
        ({"finding": "SKIP-FLOAT", "inputs": ["x"]}, "Job.select both"),
        ({"finding": "SKIP-FLOAT", "hops": 2}, "Job.select hops"),
        ({"finding": "SKIP-FLOAT", "builder": "trtexec", "check": "true"}, "extract both"),
        ({"finding": ""}, "extract empty"),
        ({"node": " "}, "extract empty"),
        ({"finding": "SKIP-FLOAT", "limit": 0}, "extract limit 1"),
    ],
)
def test_bad_requests(arguments: dict[str, object], told: str) -> None:
    with raises(QdqtoolError, told) as caught:
        qdqtool.extract(residual(), **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_minimize_keeps_finding_fix_and_outcomes() -> None:
    model = residual()
    whole = qdqtool.predict(model)
    small = qdqtool.extract(model, finding="SKIP-FLOAT", minimize=True)
    onnx.checker.check_model(small.proto, full_check=True)
    prediction = qdqtool.predict(small.proto)
    assert told(prediction, "SKIP-FLOAT") == told(whole, "SKIP-FLOAT")
    one, two = whole.convolution("b1.c1"), prediction.convolution("b1.c1")
    assert (one.precision, one.inputs, one.output) == (two.precision, two.inputs, two.output)
    assert small.nodes[0] <= 12
    assert all(
        max((d.dim_value for d in v.type.tensor_type.shape.dim), default=0) <= 2
        for v in small.proto.graph.input
    )
    assert sum(numpy_helper.to_array(t).size for t in small.proto.graph.initializer) < 200
    result = qdqtool.extract(model, outputs=[model.graph.output[0].name], minimize=True, limit=3)
    assert Remark.STOPPED(tries=3) in result.notes
    assert told(result.prediction, "SKIP-FLOAT")


def test_external_weights_and_files(tmp_path: Path) -> None:
    model = residual()
    onnx.save(
        model,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    result = qdqtool.extract(str(tmp_path / "m.onnx"), node="b1.c1", hops=1)
    assert len(result.proto.graph.initializer) > 5
    constants = {t.name: numpy_helper.to_array(t) for t in residual().graph.initializer}
    for tensor in result.proto.graph.initializer:
        assert not tensor.external_data
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), constants[tensor.name])
    (tmp_path / "weights.bin").unlink()
    with raises(ModelError, "load_full weights.bin"):
        qdqtool.extract(str(tmp_path / "m.onnx"), node="b1.c1", hops=1)
    model = residual()
    onnx.save(
        model,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location=f"{SECRET}.bin",
        size_threshold=0,
    )
    result = qdqtool.extract(str(tmp_path / "m.onnx"), node="b1.c1", hops=1, private=True)
    assert SECRET.encode() not in result.proto.SerializeToString()
    assert all(t.raw_data for t in result.proto.graph.initializer)
    model = residual()
    for letter in "bcdfghjklmnpqrstvwxz":
        model.metadata_props.add(key=f"t_{letter}", value=f"n_{letter}")
    with pytest.raises(qdqtool.errors.ModelError, match="leave none free"):
        qdqtool.extract(model, node="b1.c1", hops=1, private=True)


def test_doubled_names_and_plugins() -> None:
    model = residual()
    for node in model.graph.node:
        node.name = "" if node.op_type == "Relu" else node.op_type
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    names = [n.name for n in result.proto.graph.node if n.op_type != "Relu"]
    assert len(set(names)) == len(names) and "" not in names
    assert told(result.prediction, "SKIP-FLOAT") == told(qdqtool.predict(model), "SKIP-FLOAT")
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
    model = residual()
    result = qdqtool.extract(model, finding=["SKIP-FLOAT", "OUT-FLOAT"])
    assert {"SKIP-FLOAT", "OUT-FLOAT"} <= {f.code for f in result.prediction.findings}
    assert [(f.code, f.node) for f in result.shown.findings] == [
        ("SKIP-FLOAT", "b1.sum"),
        ("OUT-FLOAT", "last"),
    ]
    assert {"b1.sum", "last"} < {n.name for n in result.proto.graph.node}
    assert result.nodes[0] < len(model.graph.node)


def _function(name: str, *calls: str) -> onnx.FunctionProto:
    nodes = [helper.make_node("Neg", ["x"], ["0"])]
    nodes += [
        helper.make_node(call, [str(i)], [str(i + 1)], domain="own") for i, call in enumerate(calls)
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["x"], [str(len(calls))], nodes, opsets)


@pytest.mark.parametrize("inside", [False, True], ids=["called", "called from a subgraph"])
def test_functions_that_the_part_calls_stay_and_no_others(inside: bool) -> None:
    model = residual()
    end = model.graph.output[0].name
    call = helper.make_node("Outer", [end], ["done"], "outer", domain="own")
    if inside:
        branches = [
            helper.make_graph(
                [helper.make_node("Outer", [end], [f"in{i}"], domain="own")],
                f"g{i}",
                [],
                [helper.make_tensor_value_info(f"in{i}", onnx.TensorProto.FLOAT, None)],
            )
            for i in range(2)
        ]
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "which"))
        call = helper.make_node(
            "If", ["which"], ["done"], "outer", then_branch=branches[0], else_branch=branches[1]
        )
    model.graph.node.append(call)
    model.graph.output[0].name = "done"
    model.functions.extend(
        [_function("Unused"), _function("Outer", "Inner", "Inner"), _function("Inner")]
    )
    model.opset_import.append(helper.make_opsetid("own", 1))
    part = qdqtool.extract(model, node="outer", hops=1).proto
    assert [f.name for f in part.functions] == ["Outer", "Inner"]
    onnx.checker.check_model(part, full_check=True)
    assert not qdqtool.extract(model, node="b1.c0", hops=1).proto.functions


def test_trimming_a_wide_part_ends_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a message counts every reader of a tensor no reader can go: trying each one would take the square."""
    scale, zero = (
        numpy_helper.from_array(np.float32(0.02), "s"),
        numpy_helper.from_array(np.int8(0), "z"),
    )
    weight = numpy_helper.from_array(np.full((4, 3, 1, 1), 0.1, np.float32), "w")
    nodes = []
    for tensor in ("x", "w"):
        nodes.append(
            helper.make_node(
                "QuantizeLinear", [tensor, "s", "z"], [f"{tensor}_q"], name=f"{tensor}_Q"
            )
        )
        nodes.append(
            helper.make_node("DequantizeLinear", [f"{tensor}_q", "s", "z"], [f"{tensor}_d"])
        )
    nodes += [
        helper.make_node("Conv", ["x_d", "w_d"], [f"y{i}"], name=f"conv{i}") for i in range(60)
    ]
    ends = [
        helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, [1, 4, 8, 8])
        for i in range(60)
    ]
    start = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 8, 8])
    graph = helper.make_graph(nodes, "g", [start], ends, [weight, scale, zero])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    monkeypatch.setattr(budgets, "TRIMMED_NODES", 500)
    drawn = []
    sketch = Cutter.sketch
    monkeypatch.setattr(
        Cutter, "sketch", lambda self, part: drawn.append(len(part.nodes)) or sketch(self, part)
    )
    found = extract(proto, node="conv7")
    assert sum(drawn) < 500 + 3 * 64
    assert Remark.TRIMMING_ENDED in remarks(found.notes)
    assert {c.name for c in found.shown.convolutions} >= {"conv7"}


def test_of_many_branches_beside_each_other_a_group_is_tried_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taking away the farthest nodes, the ends of all branches, leaves each of them: that took five times the whole."""
    proto = split_joined(210)
    drawn = []
    sketch = Cutter.sketch
    monkeypatch.setattr(
        Cutter, "sketch", lambda self, part: drawn.append(len(part.nodes)) or sketch(self, part)
    )
    concat = [n.name for n in proto.graph.node if n.op_type == "Concat"][3]
    found = extract(proto, node=concat, target="trt8.5")
    assert [f.code for f in found.shown.findings] == ["CONCAT-SCALE"] and len(
        found.proto.graph.node
    ) == 7
    assert sum(drawn) < 2.5 * len(proto.graph.node)


def test_a_part_without_a_reader_that_a_finding_lists_is_not_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In front of a wide Split nearly all tries lacked one, and used up what trimming may take."""
    proto = wide_split(40)
    last = proto.graph.output[0].name
    proto.graph.node.extend(
        helper.make_node("Relu", [n], [f"{n}r"], name=f"{n}r") for n in (last, f"{last}r")
    )
    proto.graph.output[0].name = f"{last}rr"
    tried: list[set[str]] = []
    sketch = Cutter.sketch
    monkeypatch.setattr(
        Cutter,
        "sketch",
        lambda self, part: (
            tried.append({self.model.nodes[i].name for i in part.nodes}) or sketch(self, part)
        ),
    )
    found = extract(proto, node="n4", target="trt8.5")
    assert found.shown.needed() == {
        n.name for n in proto.graph.node[7:] if n.op_type == "QuantizeLinear"
    }
    assert tried and all(names >= found.shown.needed() for names in tried)


def test_what_trimming_may_take_counts_findings_where_they_are_more_than_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each Q behind eight parts of a Split becomes eight: a part of 900 nodes took as long as one of 4,000."""
    proto = split_joined(96)
    counted = []
    predicted = job.of_part

    def counting(model, target):
        prediction = predicted(model, target)
        counted.append((len(model.nodes), len(prediction.findings)))
        return prediction

    monkeypatch.setattr(budgets, "TRIMMED_NODES", 600)
    monkeypatch.setattr(job, "of_part", counting)
    extract(proto, node="n4", target="trt8.5")
    largest = max(map(max, counted))
    assert largest > 1.5 * len(proto.graph.node)
    assert sum(map(max, counted)) < 600 + largest


def test_minimizing_ends_within_its_budget_unless_a_limit_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,000 tries on 40 MB, or on thousands of nodes, would take an hour."""
    model = residual(0)

    def minimized(**options: int) -> qdqtool.Extraction:
        return qdqtool.extract(
            model, outputs=[model.graph.output[0].name], minimize=True, **options
        )

    whole = minimized()
    assert not whole.notes
    limits = {"MINIMIZED_NODES": 3 * len(model.graph.node), "MINIMIZED_BYTES": 3 * model.ByteSize()}
    for limit, value in limits.items():
        with monkeypatch.context() as patch:
            patch.setattr(budgets, limit, value)
            bounded = minimized()
        assert Remark.STOPPED_EARLY in remarks(bounded.notes)
        assert len(whole.proto.graph.node) < len(bounded.proto.graph.node)
    for limit, value in limits.items():
        monkeypatch.setattr(budgets, limit, value)
    assert Remark.STOPPED(tries=20) in minimized(limit=20).notes


def test_minimizing_a_model_of_large_weights_sheds_them_first(
    g: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count where a model is tried, not where one is made that is none: each of hundreds copied them all."""
    x = g.input(1, 256, 8, 8)
    for place in range(4):
        x = g.relu(g.conv(x, f"conv{place}", 256, scale=0.05 if place != 2 else None), f"r{place}")
    model = g.model(x)
    size = model.ByteSize()
    assert size > 4 * 256 * 256 * 9 * 4
    tried: list[int] = []
    steps = Shrinker.steps

    def counted(self: Shrinker) -> Iterator[bool]:
        holds = self._holds
        self._holds = lambda proto: tried.append(proto.ByteSize()) or holds(proto)
        yield from steps(self)

    monkeypatch.setattr(Shrinker, "steps", counted)
    monkeypatch.setattr(budgets, "MINIMIZED_BYTES", size)
    small = qdqtool.extract(
        model, outputs=[model.graph.output[0].name], target="trt8.6", minimize=True
    )
    assert not small.notes and small.proto.ByteSize() < size / 1000
    assert tried[0] < size / 100 and sum(tried) < size / 4
    given = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    same = []
    Shrinker(
        model,
        lambda proto: (
            same.append(
                [
                    np.array_equal(numpy_helper.to_array(t), given[t.name])
                    for t in proto.graph.initializer
                ]
            )
            or True
        ),
        limit=3,
    ).run()
    assert any(map(len, same)) and all(map(all, same))  # before channels are fewer


@pytest.fixture(scope="module")
def pair() -> tuple[qdqtool.Extraction, qdqtool.Extraction]:
    """The same part, as it is and made private."""
    plain, hidden = (
        qdqtool.extract(secretive(), outputs=[f"{SECRET}/done"], private=p) for p in (False, True)
    )
    return plain, hidden


def test_parts_without_original_text(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    plain, hidden = pair
    assert plain.proto.SerializeToString().count(SECRET.encode()) > 100
    assert SECRET.lower().encode() not in hidden.proto.SerializeToString().lower()
    assert SECRET not in hidden.kept and SECRET not in str(hidden.as_json())
    plain, hidden = pair
    assert hidden.private is not None
    names = hidden.private.names
    assert len(set(names.values())) == len(names)
    one, two = plain.prediction, qdqtool.predict(hidden.proto)
    assert [(names[c.name], c.precision, c.inputs, c.output) for c in one.convolutions] == [
        (c.name, c.precision, c.inputs, c.output) for c in two.convolutions
    ]
    assert sorted((f.code, names.get(f.node, "")) for f in one.findings) == sorted(
        (f.code, f.node) for f in two.findings
    )
    assert one.conversions == two.conversions
    plain, hidden = pair
    assert hidden.private is not None
    names = hidden.private.names
    for before, after in zip(plain.proto.graph.node, hidden.proto.graph.node, strict=True):
        assert [names.get(t, t) for t in before.input] == list(after.input)
        assert before.op_type == after.op_type or before.op_type.startswith(SECRET)
    for one, two in zip(plain.proto.graph.initializer, hidden.proto.graph.initializer, strict=True):
        assert (one.dims, one.data_type) == (two.dims, two.data_type)


def test_private_parts_keep_weights_apart(
    pair: tuple[qdqtool.Extraction, qdqtool.Extraction],
) -> None:
    """Equal scales stay equal and different ones different; of each weight next to nothing is as it was."""
    plain, hidden = (Model(e.proto) for e in pair)
    old = [read_params(plain, n).scale for n in quantizers(plain)]
    new = [read_params(hidden, n).scale for n in quantizers(hidden)]
    assert (
        len({a.tobytes() for a in old if a is not None})
        == len({a.tobytes() for a in new if a is not None})
        > 2
    )
    for a, b in zip(old, new, strict=True):
        assert a is not None and b is not None and not np.any(a == b)
    for i, a in enumerate(old):
        for j in range(i):
            assert (a is not None and np.array_equal(a, old[j])) == np.array_equal(new[i], new[j])  # type: ignore[arg-type]
    weights = [
        (numpy_helper.to_array(a), numpy_helper.to_array(b))
        for a, b in zip(plain.proto.graph.initializer, hidden.proto.graph.initializer, strict=True)
        if len(a.dims) == 4
    ]
    assert len(weights) > 4
    for before, after in weights:
        assert (
            np.mean(before == after) < 0.01
            and abs(np.corrcoef(before.reshape(-1), after.reshape(-1))[0, 1]) < 0.2
        )
    plain, hidden = (
        Model(qdqtool.extract(residual(), node="b0.c1", hops=2, private=p).proto)
        for p in (False, True)
    )
    checked = 0
    for one, two in zip(quantizers(plain), quantizers(hidden), strict=True):
        before, after = plain.constant(one.input(0)), hidden.constant(two.input(0))
        if one.op != "QuantizeLinear" or before is None or after is None:
            continue
        shape = (-1, *[1] * (before.ndim - 1))
        scales = [read_params(m, n).scale for m, n in ((plain, one), (hidden, two))]
        assert scales[0] is not None and scales[1] is not None
        low, high = (
            (v / s.reshape(shape)).reshape(len(v), -1)
            for v, s in zip((before, after), scales, strict=True)
        )
        np.testing.assert_allclose(low.max(axis=1), high.max(axis=1), rtol=1e-5)
        np.testing.assert_allclose(low.min(axis=1), high.min(axis=1), rtol=1e-5)
        checked += 1
    assert checked


def test_counts_and_names_of_structure() -> None:
    """The DFL's weights, 0 to 15, by which a YOLOv8 head is recognized."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((4, 4)).astype(np.float32)
    bins = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    graph = onnx.helper.make_graph(
        [],
        "g",
        [],
        [],
        [numpy_helper.from_array(bins, "bins"), numpy_helper.from_array(weights, "weights")],
    )
    proto = onnx.helper.make_model(graph)
    masked(proto, random)
    one, two = map(numpy_helper.to_array, proto.graph.initializer)
    np.testing.assert_array_equal(one, bins)
    assert np.mean(two == weights) < 0.2
    first = next(channels(residual()))
    typed = onnx.shape_inference.infer_shapes(first, check_type=True, strict_mode=True)
    dims = [
        [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*typed.graph.input, *typed.graph.output)
    ]
    assert dims == [[1, 1, 16, 16], [1, 1, 16, 16]]
    small = next(spatial(residual()))
    typed = onnx.shape_inference.infer_shapes(small, check_type=True, strict_mode=True)
    assert [d.dim_value for d in typed.graph.output[0].type.tensor_type.shape.dim] == [1, 8, 1, 1]


def test_what_a_builder_says_names_nothing_in_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of dimensions and graphs too, beside a name that stands as a layer of several does."""
    model = residual(1)
    model.graph.name = "secretgraph"
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "secretbatch"
    says = "shapes differ: secretgraph: secretbatch + secretbatch + 1"
    failed = checks.Behaviour("failed", says, "10.3", frozenset())
    monkeypatch.setattr(checks.BuilderCheck, "behaviour", lambda *_: failed)
    result = qdqtool.extract(
        model,
        inputs=[model.graph.input[0].name],
        outputs=[model.graph.output[0].name],
        builder="trtexec",
        private=True,
        limit=1,
    )
    assert result.checked and "secret" not in json.dumps(result.as_json()) + str(result.proto)


def test_scales_that_a_concat_joins_differ_in_private_too() -> None:
    """Each of them is another number, in the same order."""
    result = qdqtool.extract(concat((0.02, 0.05, 0.05), 0.1), finding="CONCAT-SCALE", private=True)
    (finding,) = (f for f in result.prediction.findings if f.code == "CONCAT-SCALE")
    (whole,) = (f for f in result.whole.findings if f.code == "CONCAT-SCALE")
    told, given = (
        [
            p
            for c in f.causes
            for r in c.also
            if isinstance(r, ConcatScales)
            for p in (*r.parts, r.behind)
        ]
        for f in (finding, whole)
    )
    assert len(told) == len(given) == 4 and not set(told) & set(given)
    assert [(a < b, a == b) for a in told for b in told] == [
        (a < b, a == b) for a in given for b in given
    ]


def with_head(op: str = "AcmeHead", domain: str = "acme", **attributes: object) -> onnx.ModelProto:
    """A network that ends in an operator of somebody's own."""
    model = residual(1)
    node = onnx.helper.make_node(
        op, [model.graph.output[0].name], ["done"], "head", domain=domain, **attributes
    )
    model.graph.node.append(node)
    model.graph.output[0].name = "done"
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return model


@pytest.mark.parametrize("words", [("graph", "t_b"), ("attr", "domain", "Opb", "main")])
def test_names_that_ours_could_be(words: tuple[str, ...]) -> None:
    """An original name that stands in a name that would be given only costs that one."""
    model = with_head(rate=3.0)
    model.graph.name = words[0]
    for word in words:
        model.metadata_props.add(key=word, value="1")
    data = qdqtool.extract(model, outputs=["done"], private=True).proto.SerializeToString()
    assert not [word for word in words if word.encode() in data]


@pytest.mark.parametrize(("op", "kept"), [("FusedConv", True), ("AcmeDetector", False)])
def test_operators_of_a_public_domain(op: str, kept: bool) -> None:
    """onnxruntime's own keep their names; what somebody put into its domain does not."""
    model = with_head(op, "com.microsoft", acme_rate=2.0, activation="Relu")
    result = qdqtool.extract(model, outputs=["done"], private=True)
    last = result.proto.graph.node[-1]
    assert (last.op_type == op) == kept and last.domain == "com.microsoft"
    assert sum(a.name == "activation" and a.s == b"Relu" for a in last.attribute) == kept
    assert b"cme" not in result.proto.SerializeToString()


def test_tables_and_words_are_others() -> None:
    anchors = [float(np.float32(x)) for x in np.linspace(1.1, 9.3, 12)]
    result = qdqtool.extract(
        with_head(anchors=anchors, table=list(range(1000, 1100))), outputs=["done"], private=True
    )
    tables = result.proto.graph.node[-1].attribute
    floats, ints = list(tables[0].floats), list(tables[1].ints)
    assert len(floats) == 12 and len(set(floats) & set(anchors)) <= 2
    assert len(ints) == 100 and ints != list(range(1000, 1100))
    model = residual()
    conv = next(n for n in model.graph.node if n.op_type == "Conv")
    conv.attribute.extend(
        [
            onnx.helper.make_attribute("acme_note", 1.0),
            onnx.helper.make_attribute("mode", "acme way"),
            onnx.helper.make_attribute("auto_pad", "NOTSET"),
        ]
    )
    result = qdqtool.extract(model, node=conv.name, hops=1, private=True)
    data = result.proto.SerializeToString()
    assert b"acme" not in data and b"NOTSET" in data
    # Slopes of a PRelu or a depthwise 1x1 kernel: a range for each channel would be the number itself
    model = residual(1)
    slopes = np.random.default_rng(1).random((8, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(slopes, "slopes"))
    model.graph.node.append(
        onnx.helper.make_node("PRelu", [model.graph.output[0].name, "slopes"], ["done"], "prelu")
    )
    model.graph.output[0].name = "done"
    result = qdqtool.extract(model, outputs=["done"], private=True)
    new = np.concatenate(
        [
            numpy_helper.to_array(t).reshape(-1)
            for t in result.proto.graph.initializer
            if t.data_type == onnx.TensorProto.FLOAT
        ]
    )
    assert np.isin(slopes, new).sum() <= 2


def test_functions_go_by_other_names() -> None:
    model = with_head("AcmeBlock", "acme.fn")
    table = numpy_helper.from_array(np.linspace(1, 9, 32, dtype=np.float32), "AcmeTable")
    inside = [
        onnx.helper.make_node("Relu", ["AcmeX"], ["AcmeR"], "AcmeRelu", doc_string="Acme"),
        onnx.helper.make_node("Constant", [], ["AcmeC"], "AcmeConstant", value=table),
        onnx.helper.make_node("Mul", ["AcmeR", "AcmeC"], ["AcmeY"], "AcmeMul"),
    ]
    model.functions.append(
        onnx.helper.make_function(
            "acme.fn", "AcmeBlock", ["AcmeX"], ["AcmeY"], inside, list(model.opset_import[:1])
        )
    )
    proto = qdqtool.extract(model, outputs=["done"], private=True).proto
    (function,) = proto.functions
    assert b"cme" not in proto.SerializeToString()
    assert (function.domain, function.name) == (
        proto.graph.node[-1].domain,
        proto.graph.node[-1].op_type,
    )
    left = np.isin(
        numpy_helper.to_array(function.node[1].attribute[0].t), numpy_helper.to_array(table)
    )
    assert left.sum() <= 2


def test_a_layer_made_of_two_nodes_goes_by_both_new_names(g: Graph) -> None:
    """A DQ that the copy of another Q in front of a Concat was fused into is one layer, named after both."""
    one, two = g.input(1, 8, 16, 16, name="one"), g.input(1, 8, 8, 8, name="two")
    first, second = g.pair(one, "acme.first", 0.048), g.pair(two, "acme.second", 0.045)
    joined = g.pair(
        g.concat([g.resize(second, "acme.resize"), first], "acme.concat"), "acme.joined", 0.048
    )
    other = g.concat([g.input(1, 8, 8, 8, name="three"), second], "acme.other")
    model = g.model(joined, other)
    whole = qdqtool.predict(model)
    places = [f.node for f in whole.findings if " + " in f.node]
    assert places == ["acme.second.DQ + acme.joined.Q_clone_0"]
    result = qdqtool.extract(model, outputs=[joined, other], private=True)
    assert result.private is not None
    new = f"{result.private.names['acme.second.DQ']} + {result.private.names['acme.joined.Q']}_clone_0"
    assert [f.node for f in result.prediction.findings if " + " in f.node] == [new]
    assert new in {f.node for f in result.shown.findings}
    assert "acme" not in str(result.as_json())


def has_add(model: onnx.ModelProto) -> bool:
    return any(n.op_type == "Add" for n in model.graph.node)


def test_to_the_last_node() -> None:
    small = Shrinker(residual(), has_add).run()
    onnx.checker.check_model(small, full_check=True)
    assert [n.op_type for n in small.graph.node] == ["Add"]
    assert all(
        max(d.dim_value for d in v.type.tensor_type.shape.dim) == 1 for v in small.graph.input
    )


def test_searches_hold() -> None:
    def holds(model: onnx.ModelProto) -> bool:
        onnx.checker.check_model(model, full_check=True)
        return sum(n.op_type == "Conv" for n in model.graph.node) >= 2

    shrinker = Shrinker(residual(), holds)
    for answer in shrinker.steps():
        assert holds(shrinker.proto)
        assert isinstance(answer, bool)
    assert sum(n.op_type == "Conv" for n in shrinker.proto.graph.node) == 2
    seen: list[bytes] = []

    def holds(model: onnx.ModelProto) -> bool:
        seen.append(model.SerializeToString(deterministic=True))
        return has_add(model)

    Shrinker(residual(), holds, ALL, limit=40).run()
    assert len(seen) == len(set(seen)) <= 40

    def fails(model: onnx.ModelProto) -> bool:
        raise ValueError("no")

    assert len(Shrinker(residual(), fails, limit=5).run().graph.node) == len(residual().graph.node)

    def lost(model: onnx.ModelProto) -> bool:
        raise BuilderError("gone")

    with pytest.raises(BuilderError, match="gone"):
        Shrinker(residual(), lost).run()
