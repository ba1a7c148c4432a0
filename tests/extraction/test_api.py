import gzip
import json
import os
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.extraction import api
from qdqtool.extraction.cut import ModelCutter, ModelPart
from qdqtool.extraction.invariants import choose_finding
from qdqtool.extraction.private import PrivateNames, find_changed_fixes, mask_numbers
from qdqtool.extraction.shrinking import ModelShrinker
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import DQ, Q, quantizers, read_params
from qdqtool.reasons.scales import ConcatScales
from qdqtool.trt.targets import Target
from qdqtool.util import limits
from tests.errors import has
from tests.extraction.networks import SECRET, residual, secretive
from tests.findings import test_causes
from tests.findings.graphs import GRAPHS, concat
from tests.insertion.nets import run
from tests.notes import note, note_codes
from tests.patterns.test_fake_quantizers import OPERATORS, network
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import HOME
from tools.growth.families import split_joined, wide_split

YOLO = HOME / "yolo-resnet18-orin-trt8502" / "model.onnx.gz"


def reports(prediction: qdqtool.Prediction, code: str) -> list[tuple[str, str, list[str]]]:
    return [
        (f.node, str(f.severity), [type(c.reason).__name__ for c in f.causes])
        for f in prediction.findings
        if f.code == code
    ]


def outcome(prediction: qdqtool.Prediction, name: str) -> tuple[object, ...]:
    convolution = prediction.convolution(name)
    return convolution.precision, convolution.inputs, convolution.output


def node_names(proto: onnx.ModelProto) -> list[str]:
    return [node.name for node in proto.graph.node]


def test_extract_finding_keeps_finding_and_outcomes() -> None:
    model = residual(3)
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    onnx.checker.check_model(result.proto, full_check=True)
    whole, small = qdqtool.predict(model), qdqtool.predict(result.proto)
    assert reports(small, "SKIP-FLOAT") == reports(whole, "SKIP-FLOAT")[:1]
    assert outcome(small, "b1.c1") == outcome(whole, "b1.c1")
    names = node_names(result.proto)
    assert len(names) == result.nodes[0] < result.nodes[1] == len(model.graph.node)
    assert "b1.sum" in names and "b0.c0" not in names and "last" not in names
    assert [(f.code, f.node) for f in result.shown.findings] == [("SKIP-FLOAT", "b1.sum")]


@pytest.mark.parametrize(
    "code", slow_after(1, ["OUT-FLOAT", "CONCAT-SCALE:2", "BN-UNFOLDED", "SKIP-FLOAT:8"])
)
def test_extract_private_finding_of_a_real_network(code: str) -> None:
    result = qdqtool.extract(str(YOLO), finding=code, private=True)
    # Shapes are not checked, because those of the whole model contradict each other in the head.
    onnx.checker.check_model(result.proto)
    assert result.private is not None and result.nodes[0] < 80
    (finding,), names = result.shown.findings, result.private.names
    whole = [r for r in reports(result.whole, finding.code) if names.get(r[0]) == finding.node]
    part = [r for r in reports(result.prediction, finding.code) if r[0] == finding.node]
    assert part == [(finding.node, *report[1:]) for report in whole] != []
    data = result.proto.SerializeToString()
    nodes = onnx.load_from_string(gzip.decompress(YOLO.read_bytes())).graph.node
    texts = {text for n in nodes for text in (n.name, *n.input, *n.output) if len(text) > 4}
    assert not [text for text in texts if text.encode() in data]


def test_part_computes_what_the_whole_model_does() -> None:
    model = residual(3)
    proto = qdqtool.extract(model, finding="SKIP-FLOAT").proto
    inputs, outputs = ([v.name for v in ends] for ends in (proto.graph.input, proto.graph.output))
    image = np.random.default_rng(0).standard_normal((1, 8, 16, 16)).astype(np.float32)
    ends = [v.name for v in (*model.graph.output, *model.graph.input)]
    names = [t for t in (*inputs, *outputs) if t != "x"]
    model.graph.output.extend(onnx.ValueInfoProto(name=t) for t in names if t not in ends)
    values = dict(zip(names, run(model, {"x": image}, names), strict=True)) | {"x": image}
    part = run(proto, {t: values[t] for t in inputs}, outputs)
    for name, value in zip(outputs, part, strict=True):
        np.testing.assert_array_equal(value, values[name])


def test_part_keeps_nodes_constants_types_and_metadata() -> None:
    model = residual(3)
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info("b1.r0:0", onnx.TensorProto.FLOAT, ["n", 8, 16, 16])
    )
    proto = qdqtool.extract(model, finding="SKIP-FLOAT").proto
    assert {p.key: p.value for p in proto.metadata_props} == {"stride": "32"}
    assert (proto.producer_name, proto.doc_string, proto.ir_version, proto.opset_import) == (
        "maker",
        "about it",
        model.ir_version,
        model.opset_import,
    )
    names = node_names(proto)
    assert list(proto.graph.node) == [n for n in model.graph.node if n.name in names]
    constants = {t.name: t for t in model.graph.initializer}
    assert all(t == constants[t.name] for t in proto.graph.initializer)
    values = {v.name: v for v in (*proto.graph.value_info, *proto.graph.input)}
    assert values["b1.r0:0"].type.tensor_type.shape.dim[0].dim_param == "n"
    tensors = {o for n in model.graph.node for o in n.output} | {v.name for v in model.graph.input}
    assert {v.name for v in (*proto.graph.input, *proto.graph.output)} <= tensors


@pytest.mark.parametrize("hops", range(4))
def test_part_never_divides_a_pair(hops: int) -> None:
    proto = qdqtool.extract(residual(), node="b1.c1", hops=hops).proto
    quantized = {o for n in proto.graph.node for o in n.output if n.op_type == Q}
    assert quantized == {n.input[0] for n in proto.graph.node if n.op_type == DQ}
    assert {v.type.tensor_type.elem_type for v in proto.graph.input} == {onnx.TensorProto.FLOAT}


@pytest.fixture
def model() -> onnx.ModelProto:
    return residual()


def test_extract_leaves_the_model_and_repeats_itself(model: onnx.ModelProto) -> None:
    before = model.SerializeToString(deterministic=True)
    first, second = (
        qdqtool.extract(
            model, finding="SKIP-FLOAT", minimize=True, private=True, limit=5
        ).proto.SerializeToString(deterministic=True)
        for _ in range(2)
    )
    assert model.SerializeToString(deterministic=True) == before and first == second


@pytest.mark.parametrize("private", [False, True])
def test_nodes_at_a_cut_are_no_head(g: Graph, private: bool) -> None:
    x = g.input(1, 4, 8, 8)
    cut = g.pair(g.concat([g.conv(x, n, scale=0.05) for n in ("a", "b")], "joined"), "cut", 0.1)
    model = g.model(g.conv(g.relu(cut, "relu"), "last", scale=0.05))
    part = qdqtool.extract(model, inputs=["x"], outputs=[cut], private=private)
    again = qdqtool.extract(part.model, node=node_names(part.model)[-1], private=private)
    codes = ("HEAD-QUANT", "HEAD-CONCAT")
    assert not any(reports(p.prediction, code) for p in (part, again) for code in codes)
    part.model.ClearField("metadata_props")  # without the mark, the model may be a detector
    assert [len(reports(qdqtool.predict(part.model), code)) for code in codes] == [2, 1]
    for code in codes:
        assert reports(qdqtool.extract(part.model, finding=code).prediction, code)


def test_extract_between_tensors() -> None:
    result = qdqtool.extract(residual(), inputs=["stem.r:0"], outputs=["b0.r1:0"])
    assert [
        [v.name for v in values] for values in (result.proto.graph.input, result.proto.graph.output)
    ] == [["stem.r:0"], ["b0.r1:0"]]
    assert {name.split(".")[0] for name in node_names(result.proto)} == {"b0"}
    assert {c.name for c in result.prediction.convolutions} == {"b0.c0", "b0.c1"}


SKIP = "SKIP-FLOAT"
BAD_ARGUMENTS: dict[str, tuple[dict[str, object], Callable[[BaseException], bool]]] = {
    "none": ({}, has("missing-argument", "`finding`", "`node`", "`inputs`", "`builder`")),
    "code-unknown": (
        {"finding": "NOPE"},
        has("unknown-choice", "NOPE", "trt10", parameter="finding"),
    ),
    "number-high": (
        {"finding": f"{SKIP}:9"},
        has("out-of-range", "SKIP-FLOAT:9", "1", parameter="finding"),
    ),
    "number-zero": (
        {"finding": f"{SKIP}:0"},
        has("out-of-range", "SKIP-FLOAT:0", "1", parameter="finding"),
    ),
    "number-word": (
        {"finding": f"{SKIP}:x"},
        has("out-of-range", "SKIP-FLOAT:x", "1", parameter="finding"),
    ),
    "node-unknown": (
        {"node": "b1.c11"},
        has("unknown-choice", "b1.c1", parameter="node", node="b1.c11"),
    ),
    "node-prefix": ({"node": "b1."}, has("unknown-choice", "13", parameter="node", node="b1.")),
    "tensor-unknown": (
        {"inputs": ["b1.c1"]},
        has("unknown-choice", "tensor", parameter="inputs", node="b1.c1"),
    ),
    "ends-exchanged": (
        {"inputs": ["b1.r1:0"], "outputs": ["b0.r1:0"]},
        has("ends-exchanged", "'b1.r1:0'", node="b0.r1:0"),
    ),
    "ends-unconnected": (
        {"inputs": ["b0.skip.DQ:0"], "outputs": ["b0.r0:0"]},
        has("ends-unconnected", "'b0.skip.DQ:0'", node="b0.r0:0"),
    ),
    "input-missing": (
        {"inputs": ["b1.r0:0"], "outputs": ["b1.r1:0"]},
        has("missing-argument", "'b1.r1:0'", "`inputs`", parameter="inputs", node="x"),
    ),
    "input-unused": (
        {"inputs": ["x", "b1.r1:0"], "outputs": ["b0.r1:0"]},
        has("option-without-effect", "`inputs`", parameter="inputs", node="b1.r1:0"),
    ),
    "nothing-between": ({"outputs": ["x"]}, has("empty", "no node", path="model")),
    "finding-and-inputs": (
        {"finding": SKIP, "inputs": ["x"]},
        has("option-conflict", "`finding`", parameter="inputs"),
    ),
    "finding-and-hops": (
        {"finding": SKIP, "hops": 2},
        has("option-conflict", "`finding`", parameter="hops"),
    ),
    "hops-alone": ({"hops": 2}, has("missing-argument", "`hops`", parameter="node")),
    "builder-and-check": (
        {"finding": SKIP, "builder": "trtexec", "check": "true"},
        has("option-conflict", "`builder`", parameter="check"),
    ),
    "finding-empty": ({"finding": ""}, has("empty", "`finding`", parameter="finding")),
    "node-empty": ({"node": " "}, has("empty", "`node`", parameter="node")),
    "says-alone": (
        {"finding": SKIP, "says": "pooling"},
        has("missing-argument", "`says`", parameter="check"),
    ),
    "timeout-zero": (
        {"check": "true", "check_timeout": 0},
        has("out-of-range", "check_timeout=0", parameter="check_timeout"),
    ),
    "limit-zero": ({"finding": SKIP, "limit": 0}, has("out-of-range", "1", parameter="limit")),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_extract_refuses_arguments(
    arguments: dict[str, object], expected: Callable[[BaseException], bool]
) -> None:
    with pytest.raises(QdqtoolError, check=expected):
        qdqtool.extract(residual(), **arguments)  # type: ignore[arg-type]


def test_minimize_keeps_finding_and_outcomes(model: onnx.ModelProto) -> None:
    small = qdqtool.extract(model, finding="SKIP-FLOAT", minimize=True)
    onnx.checker.check_model(small.proto, full_check=True)
    whole, part = (
        (reports(prediction, "SKIP-FLOAT"), outcome(prediction, "b1.c1"))
        for prediction in map(qdqtool.predict, (model, small.proto))
    )
    assert part == whole and small.nodes[0] <= 12
    for value in small.proto.graph.input:
        assert max((d.dim_value for d in value.type.tensor_type.shape.dim), default=0) <= 2
    assert sum(onnx.numpy_helper.to_array(t).size for t in small.proto.graph.initializer) < 200


def same_values(a: onnx.TensorProto, b: onnx.TensorProto) -> bool:
    return np.array_equal(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b))


def save_with_weights(path: Path, weights: str) -> None:
    onnx.save(residual(), path, save_as_external_data=True, location=weights, size_threshold=0)


def test_external_weights_are_read(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    save_with_weights(model, "weights.bin")
    tensors = qdqtool.extract(model, node="b1.c1", hops=1).proto.graph.initializer
    constants = {t.name: t for t in residual().graph.initializer}
    assert len(tensors) > 5 and not any(tensor.external_data for tensor in tensors)
    assert all(same_values(t, constants[t.name]) for t in tensors)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights\.bin"):
        qdqtool.extract(model, node="b1.c1", hops=1)


def test_private_part_hides_the_file_of_weights(tmp_path: Path) -> None:
    save_with_weights(tmp_path / "m.onnx", f"{SECRET}.bin")
    result = qdqtool.extract(tmp_path / "m.onnx", node="b1.c1", hops=1, private=True)
    assert SECRET.encode() not in result.proto.SerializeToString()
    assert all(t.raw_data for t in result.proto.graph.initializer)


def test_private_part_needs_free_names(model: onnx.ModelProto) -> None:
    for letter in "bcdfghjklmnpqrstvwxz":
        model.metadata_props.add(key=f"t_{letter}", value=f"n_{letter}")
    with pytest.raises(ModelError, check=has("no-name-left")):
        qdqtool.extract(model, node="b1.c1", hops=1, private=True)


def test_extract_makes_equal_names_unique(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = "" if node.op_type == "Relu" else node.op_type
    result = qdqtool.extract(model, finding="SKIP-FLOAT")
    names = [n.name for n in result.proto.graph.node if n.op_type != "Relu"]
    assert len(set(names)) == len(names) and "" not in names
    assert reports(result.prediction, "SKIP-FLOAT") == reports(qdqtool.predict(model), "SKIP-FLOAT")


def test_extract_keeps_plugin_and_type_of_inputs() -> None:
    g = Graph(half=True)
    x = g.conv(g.input(1, 8, 8, 8), "c0", scale=None, weights="float")
    model = g.model(g.conv(x, "c1", scale=None, weights="float"))
    append_node(
        model, onnx.helper.make_node("Own", [output_of(model)], ["own"], "own", domain="mine")
    )
    proto = qdqtool.extract(model, node="c1", hops=1).proto
    assert {o.domain for o in proto.opset_import} == {"", "mine"}
    assert proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert node_names(proto) == ["c0", "c1", "own"]


def output_of(model: onnx.ModelProto) -> str:
    return str(model.graph.output[0].name)


def append_node(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.node.append(node)
    model.graph.output[0].name = node.output[0]
    if node.domain:
        model.opset_import.append(onnx.helper.make_opsetid(node.domain, 1))


def test_extract_several_findings(model: onnx.ModelProto) -> None:
    result = qdqtool.extract(model, finding=["SKIP-FLOAT", "OUT-FLOAT"])
    assert {"SKIP-FLOAT", "OUT-FLOAT"} <= {f.code for f in result.prediction.findings}
    places = {f.code: f.node for f in result.shown.findings}
    assert places == {"SKIP-FLOAT": "b1.sum", "OUT-FLOAT": "last"}
    assert {*places.values()} < {*node_names(result.proto)} < {*node_names(model)}


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    parts: list[set[str]] = []
    sketch = ModelCutter.sketch_model

    def record(self: ModelCutter, part: ModelPart) -> Model:
        parts.append({self.model.nodes[index].name for index in part.nodes})
        return sketch(self, part)

    monkeypatch.setattr(ModelCutter, "sketch_model", record)
    return parts


def test_trimming_ends_within_its_budget(
    g: Graph, sketches: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message contains the number of consumers of a tensor, so no consumer can be removed."""
    inputs = [g.pair(g.input(1, 3, 8, 8), "in"), g.weights("w", (4, 3, 1, 1), "tensor")]
    ends = [g.op("Conv", inputs, f"conv{i}") for i in range(60)]
    monkeypatch.setattr(limits, "TRIMMED_NODES", 500)
    result = qdqtool.extract(g.model(*ends), node="conv7")
    assert sum(map(len, sketches)) < 500 + 3 * 64 and "trimming-ended" in note_codes(result.notes)
    assert "conv7" in {c.name for c in result.shown.convolutions}


def test_trimming_predicts_no_part_without_nodes_of_the_finding(sketches: list[set[str]]) -> None:
    proto = wide_split(40)
    for i in range(2):
        end = output_of(proto)
        append_node(proto, onnx.helper.make_node("Relu", [end], [f"{end}r"], f"relu{i}"))
    needed = qdqtool.extract(proto, node="n4", target="trt8.5").shown.required_nodes()
    assert needed == {n.name for n in proto.graph.node[7:] if n.op_type == Q}
    assert sketches and all(needed <= names for names in sketches)


def test_trimming_budget_counts_findings_if_they_are_more_than_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Q after a Split into eight parts becomes eight Qs."""
    proto = split_joined(96)
    costs: list[int] = []
    predict = api.predict_part

    def count(model: Model, target: Target) -> qdqtool.Prediction:
        prediction = predict(model, target)
        costs.append(max(len(model.nodes), len(prediction.findings)))
        return prediction

    monkeypatch.setattr(limits, "TRIMMED_NODES", 600)
    monkeypatch.setattr(api, "predict_part", count)
    qdqtool.extract(proto, node="n4", target="trt8.5")
    assert max(costs) > 1.5 * len(proto.graph.node) and sum(costs) < 600 + max(costs)


def minimize(model: onnx.ModelProto, **options: Any) -> qdqtool.Extraction:
    return qdqtool.extract(model, outputs=[output_of(model)], minimize=True, **options)


@pytest.mark.parametrize("budget", ["MINIMIZED_NODES", "MINIMIZED_BYTES"])
def test_minimize_ends_within_its_budget(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual(0)
    whole = minimize(model)
    size = len(model.graph.node) if budget == "MINIMIZED_NODES" else model.ByteSize()
    monkeypatch.setattr(limits, budget, 3 * size)
    bounded = minimize(model)
    assert not whole.notes and "stopped-early" in note_codes(bounded.notes)
    assert len(whole.proto.graph.node) < len(bounded.proto.graph.node)
    shown = [{f.code for f in result.shown.findings} for result in (whole, bounded)]
    assert shown[0] == shown[1] != set()
    assert note("stopped", tries=20) in minimize(model, limit=20).notes  # a limit replaces it


def test_minimize_removes_large_weights_first(g: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights count only in models that are tried, not in invalid candidates."""
    x = g.input(1, 256, 8, 8)
    for i in range(4):
        x = g.relu(g.conv(x, f"conv{i}", 256, scale=0.05 if i != 2 else None), f"r{i}")
    model = g.model(x)
    size = model.ByteSize()
    assert size > 4 * 256 * 256 * 9 * 4
    monkeypatch.setattr(limits, "MINIMIZED_BYTES", size // 4)
    small = minimize(model, target="trt8.6")
    assert not small.notes and small.proto.ByteSize() < size / 1000


def test_shrinker_keeps_values_of_large_weights_at_first(g: Graph) -> None:
    model = g.model(g.relu(g.conv(g.input(1, 64, 8, 8), "conv", 64, scale=0.05), "r"))
    values = {t.name: t for t in model.graph.initializer}
    tried: list[onnx.ModelProto] = []
    list(ModelShrinker(model, lambda proto: not tried.append(proto), limit=3).steps())  # type: ignore[func-returns-value]
    tensors = [tensor for proto in tried for tensor in proto.graph.initializer]
    assert tensors and all(same_values(t, values[t.name]) for t in tensors)


Parts = tuple[qdqtool.Extraction, qdqtool.Extraction]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return (
        qdqtool.extract(secretive(), outputs=[f"{SECRET}/done"]),
        qdqtool.extract(secretive(), outputs=[f"{SECRET}/done"], private=True),
    )


def test_private_part_has_no_original_text(parts: Parts) -> None:
    plain, private = parts
    assert plain.proto.SerializeToString().count(SECRET.encode()) > 100
    assert SECRET.lower().encode() not in private.proto.SerializeToString().lower()
    assert SECRET not in private.kept and SECRET not in str(private.as_json())


def test_private_part_has_the_same_prediction(parts: Parts) -> None:
    names = parts[1].private.names
    assert len(set(names.values())) == len(names)
    before, after = parts[0].prediction, qdqtool.predict(parts[1].proto)
    assert [(names[c.name], *outcome(before, c.name)) for c in before.convolutions] == [
        (c.name, *outcome(after, c.name)) for c in after.convolutions
    ]
    assert sorted((f.code, names.get(f.node, "")) for f in before.findings) == sorted(
        (f.code, f.node) for f in after.findings
    )
    assert before.conversions == after.conversions


def test_private_part_has_the_same_structure(parts: Parts) -> None:
    names = parts[1].private.names
    for before, after in zip(*[p.proto.graph.node for p in parts], strict=True):
        assert [names.get(t, t) for t in before.input] == list(after.input)
        assert before.op_type == after.op_type or before.op_type.startswith(SECRET)
    for old, new in zip(*[p.proto.graph.initializer for p in parts], strict=True):
        assert (old.dims, old.data_type) == (new.dims, new.data_type)


def test_private_scales_differ_and_stay_equal_to_each_other(parts: Parts) -> None:
    old, new = (
        [np.asarray(read_params(model, n).scale) for n in quantizers(model)]
        for model in (Model(part.proto) for part in parts)
    )
    assert len({a.tobytes() for a in old}) == len({a.tobytes() for a in new}) > 2
    assert not any(np.any(a == b) for a, b in zip(old, new, strict=True))
    for i, j in combinations(range(len(old)), 2):
        assert np.array_equal(old[i], old[j]) == np.array_equal(new[i], new[j])


def test_private_weights_differ(parts: Parts) -> None:
    old, new = (map(onnx.numpy_helper.to_array, part.proto.graph.initializer) for part in parts)
    weights = [pair for pair in zip(old, new, strict=True) if pair[0].ndim == 4]
    assert len(weights) > 4
    for before, after in weights:
        assert np.mean(before == after) < 0.01
        assert abs(np.corrcoef(before.reshape(-1), after.reshape(-1))[0, 1]) < 0.2


def test_private_weights_have_the_range_of_their_scales() -> None:
    def ranges(private: bool) -> list[np.ndarray]:
        model = Model(qdqtool.extract(residual(), node="b0.c1", hops=2, private=private).proto)
        quotients = [
            (value / np.reshape(read_params(model, q).scale, (-1, 1, 1, 1))).reshape(len(value), -1)
            for q in quantizers(model)
            if q.op == Q and (value := model.constant(q.input(0))) is not None
        ]
        return [np.stack([q.min(axis=1), q.max(axis=1)]) for q in quotients]

    plain, private = ranges(False), ranges(True)
    assert plain
    for before, after in zip(plain, private, strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5)


def test_mask_keeps_counting_constants() -> None:
    """A YOLOv8 head is recognized by the weights of its DFL, 0 to 15."""
    weights = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    bins = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    tensors = [
        onnx.numpy_helper.from_array(bins, "bins"),
        onnx.numpy_helper.from_array(weights, "weights"),
    ]
    proto = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors))
    mask_numbers(proto, np.random.default_rng(0))
    new_bins, new_weights = map(onnx.numpy_helper.to_array, proto.graph.initializer)
    np.testing.assert_array_equal(new_bins, bins)
    assert np.mean(new_weights == weights) < 0.2


def test_private_result_has_no_name_from_builder_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of dimensions and graphs are replaced too, also next to a `+`."""
    model = residual(1)
    model.graph.name = "secretgraph"
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "secretbatch"
    program = tmp_path / "trtexec"
    program.write_text("""#!/bin/sh
echo '&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec --verbose'
echo '[E] shapes differ: secretgraph: secretbatch + secretbatch + 1'
exit 1
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = qdqtool.extract(
        model,
        inputs=[model.graph.input[0].name],
        outputs=[output_of(model)],
        builder="trtexec",
        private=True,
        limit=1,
    )
    assert "shapes differ" in result.checked.values["message"]
    assert "secret" not in json.dumps(result.as_json()) + str(result.proto)


def test_replace_names_replaces_whole_names_and_the_longest_first() -> None:
    names = PrivateNames(set())
    conv, out, short = (names.rename(name) for name in ("conv", "conv/out", "a"))
    text = names.replace_names("conv/out: conv + conv (conv2, a) at 'conv_clone_1', a.b")
    assert text == f"{out}: {conv} + {conv} (conv2, {short}) at '{conv}_clone_1', a.b"


def test_private_concat_scales_differ_in_the_same_order() -> None:
    result = qdqtool.extract(concat((0.02, 0.05, 0.05), 0.1), finding="CONCAT-SCALE", private=True)

    def scales(prediction: qdqtool.Prediction) -> list[float]:
        (finding,) = (f for f in prediction.findings if f.code == "CONCAT-SCALE")
        reasons = [r for c in finding.causes for r in c.also if isinstance(r, ConcatScales)]
        return [scale for r in reasons for scale in (*r.parts, r.output_scale)]

    new, old = scales(result.prediction), scales(result.whole)
    assert len(new) == len(old) == 4 and not set(new) & set(old)
    for i, j in combinations(range(4), 2):
        assert (new[i] < new[j], new[i] == new[j]) == (old[i] < old[j], old[i] == old[j])


def test_minimized_private_part_keeps_the_kind_of_the_fix() -> None:
    model = concat((0.05, 0.1, 0.057), 0.1)
    result = qdqtool.extract(model, finding="CONCAT-SCALE", minimize=True, private=True)
    (finding,) = (f for f in qdqtool.predict(result.proto).findings if f.code == "CONCAT-SCALE")
    assert finding.automatic and finding.fix.startswith("Use one scale for all")
    assert "the finding CONCAT-SCALE with the same fix" in result.kept


def test_changed_fixes_are_those_of_another_kind() -> None:
    close, distant = (qdqtool.predict(concat((low, 0.1), 0.1)) for low in (0.05, 0.01))
    changed = find_changed_fixes(close, distant, PrivateNames(set()))
    assert [f.code for f in changed] == ["CONCAT-SCALE"]
    assert find_changed_fixes(close, close, PrivateNames(set())) == []


def test_extract_names_findings_that_only_the_part_has() -> None:
    """The part has the weights of the finding, but not the pair of the input."""
    model = GRAPHS["weights-axis"]()
    result = qdqtool.extract(model, finding="W-AXIS", minimize=True)
    whole, part = (reports(qdqtool.predict(m), "IN-FLOAT") for m in (model, result.proto))
    assert not whole and part and result.kept.endswith(". Only in the part: IN-FLOAT")


def test_finding_on_many_layers_is_not_new_in_the_part(g: Graph) -> None:
    """W-PER-TENSOR is at the worst of all layers, which is not in the part."""
    x = g.input(1, 16, 8, 8)
    for name, spread in (("mild", 4), ("worst", 40)):
        weights = g.random.uniform(0.5, 1, (3, 3, 16, 16)) / np.repeat((1, spread), (4, 12))
        w = g.pair(g.const(f"{name}.w", weights.T), f"{name}.wq", 1 / 127)
        x = g.op("Conv", [g.pair(x, f"{name}.in"), w], name, kernel_shape=[3, 3])
    by_finding = qdqtool.extract(g.model(x), finding="INPUT-CONVERSION")
    for result in (by_finding, qdqtool.extract(g.model(x), node="mild", hops=1)):
        places = [reports(p, "W-PER-TENSOR")[0][0] for p in (result.whole, result.prediction)]
        assert places == ["worst", "mild"]
        assert "Only in the part" not in result.kept and "not-shown" not in note_codes(result.notes)


def test_finding_that_names_only_the_first_node_is_not_new_in_the_part() -> None:
    """FAKE-QUANT names the first of six quantizers, which is not in the part."""
    result = qdqtool.extract(network(OPERATORS["QCDQ"][0], count=3), node="c2", hops=1)
    assert reports(result.whole, "FAKE-QUANT") != reports(result.prediction, "FAKE-QUANT") != []
    assert "Only in the part" not in result.kept


def with_head(op: str = "AcmeHead", domain: str = "acme", **attributes: object) -> onnx.ModelProto:
    model = residual(1)
    ends = [output_of(model)], ["done"]
    append_node(model, onnx.helper.make_node(op, *ends, "head", domain=domain, **attributes))
    return model


def extract_head(model: onnx.ModelProto) -> onnx.ModelProto:
    return qdqtool.extract(model, outputs=["done"], private=True).proto


@pytest.mark.parametrize("words", [("graph", "t_b"), ("attr", "domain", "Opb", "main")])
def test_private_names_avoid_original_ones(words: tuple[str, ...]) -> None:
    model = with_head(rate=3.0)
    model.graph.name = words[0]
    for word in words:
        model.metadata_props.add(key=word, value="1")
    assert not any(word.encode() in extract_head(model).SerializeToString() for word in words)


@pytest.mark.parametrize(("op", "public"), [("FusedConv", True), ("AcmeDetector", False)])
def test_private_part_keeps_operators_of_onnxruntime(op: str, public: bool) -> None:
    """Operators that onnxruntime does not define are renamed, even in its domain."""
    proto = extract_head(with_head(op, "com.microsoft", acme_rate=2.0, activation="Relu"))
    node = proto.graph.node[-1]
    assert (node.op_type == op) == public and node.domain == "com.microsoft"
    assert sum(a.name == "activation" and a.s == b"Relu" for a in node.attribute) == public
    assert b"cme" not in proto.SerializeToString()


def test_private_tables_in_attributes_differ() -> None:
    """An unset input of a Resize and a tensor in an attribute both have an empty name."""
    anchors, table = np.linspace(1.1, 9.3, 12, dtype=np.float32), list(range(1000, 1100))
    tensor = onnx.numpy_helper.from_array(anchors, "tensor")
    model = with_head(anchors=anchors.tolist(), table=table, tensor=tensor)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1, 1, 2, 2]), "sizes"))
    append_node(
        model, onnx.helper.make_node("Resize", ["done", "", "sizes"], ["resized"], "resize")
    )
    proto = qdqtool.extract(model, outputs=["resized"], private=True).proto
    floats, ints, values = proto.graph.node[-2].attribute
    for numbers in (floats.floats, onnx.numpy_helper.to_array(values.t)):
        assert len(numbers) == 12 and np.isin(np.float32(numbers), anchors).sum() <= 2
    assert len(ints.ints) == 100 and list(ints.ints) != table


def test_private_attributes_keep_only_public_words(model: onnx.ModelProto) -> None:
    conv = next(n for n in model.graph.node if n.op_type == "Conv")
    attributes = {"acme_note": 1.0, "mode": "acme way", "auto_pad": "NOTSET"}
    conv.attribute.extend(onnx.helper.make_attribute(*item) for item in attributes.items())
    data = qdqtool.extract(model, node=conv.name, hops=1, private=True).proto.SerializeToString()
    assert b"acme" not in data and b"NOTSET" in data


def test_private_slopes_with_one_value_per_channel_differ() -> None:
    """With one value per channel, the range of each channel would reveal the value."""
    model, slopes = residual(1), np.random.default_rng(1).random((8, 1, 1)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(slopes, "slopes"))
    append_node(
        model, onnx.helper.make_node("PRelu", [output_of(model), "slopes"], ["done"], "prelu")
    )
    tensors = map(onnx.numpy_helper.to_array, extract_head(model).graph.initializer)
    values = np.concatenate([t.reshape(-1) for t in tensors if t.dtype == np.float32])
    assert np.isin(slopes, values).sum() <= 2


def test_private_functions_are_inlined() -> None:
    model, table = with_head("AcmeBlock", "acme.fn"), np.linspace(1, 9, 32, dtype=np.float32)
    constant = onnx.numpy_helper.from_array(table, "AcmeTable")
    nodes = [
        onnx.helper.make_node("Relu", ["AcmeX"], ["AcmeR"], "AcmeRelu", doc_string="Acme"),
        onnx.helper.make_node("Constant", [], ["AcmeC"], "AcmeConstant", value=constant),
        onnx.helper.make_node("Mul", ["AcmeR", "AcmeC"], ["AcmeY"], "AcmeMul"),
    ]
    ends = ["AcmeX"], ["AcmeY"]
    opsets = list(model.opset_import[:1])
    model.functions.append(onnx.helper.make_function("acme.fn", "AcmeBlock", *ends, nodes, opsets))
    proto = extract_head(model)
    assert b"cme" not in proto.SerializeToString() and not proto.functions
    (constant,) = (n for n in proto.graph.node if n.op_type == "Constant")
    assert np.isin(onnx.numpy_helper.to_array(constant.attribute[0].t), table).sum() <= 2


@pytest.mark.parametrize("private", [False, True])
def test_part_may_have_nodes_without_a_name(private: bool) -> None:
    """TensorRT names a node without a name after the node's output."""
    model = residual(1)
    for node in model.graph.node:
        node.name = node.name if node.op_type == "Conv" else ""
    result = qdqtool.extract(model, finding="INPUT-CONVERSION", private=private)
    assert [f.node for f in result.whole.findings if f.node.startswith("node_of_")] == [
        "node_of_stem.in.Q:0"
    ]
    names = result.private or PrivateNames(set())
    message = names.replace_names("node_of_stem.in.Q:0 (stem.in.Q:0): no kernel")
    name = f"node_of_{names.names.get('stem.in.Q:0', 'stem.in.Q:0')}"
    assert message == f"{name} ({name.removeprefix('node_of_')}): no kernel"
    assert name in {f.node for f in result.shown.findings} and name in result.kept
    assert "" in {n.name for n in result.proto.graph.node if n.op_type == Q}


def test_private_layer_of_two_nodes_has_both_new_names(g: Graph) -> None:
    """TensorRT fuses a copy of a Q with the DQ before a Concat, and names the layer after both."""
    first = g.pair(g.input(1, 8, 16, 16, name="one"), "acme.first", 0.048)
    second = g.pair(g.input(1, 8, 8, 8, name="two"), "acme.second", 0.045)
    joined = g.concat([g.resize(second, "acme.resize"), first], "acme.concat")
    ends = [
        g.pair(joined, "acme.joined", 0.048),
        g.concat([g.input(1, 8, 8, 8, name="three"), second], "acme.other"),
    ]
    model = g.model(*ends)
    assert [f.node for f in qdqtool.predict(model).findings if " + " in f.node] == [
        "acme.second.DQ + acme.joined.Q_clone_0"
    ]
    result = qdqtool.extract(model, outputs=ends, private=True)
    names = result.private.names
    layer = f"{names['acme.second.DQ']} + {names['acme.joined.Q']}_clone_0"
    assert [f.node for f in result.prediction.findings if " + " in f.node] == [layer]
    assert layer in {f.node for f in result.shown.findings} and "acme" not in str(result.as_json())


def test_choose_finding_counts_conversions_from_the_largest() -> None:
    prediction = qdqtool.predict(test_causes.residual("float", channels=24))
    first, second = (f for f in prediction.findings if f.code == "CONVERSION")
    first.values = 1
    assert [choose_finding(prediction, f"CONVERSION:{n}", None) for n in (1, 2)] == [second, first]
