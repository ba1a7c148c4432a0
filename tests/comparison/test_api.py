import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

import qdqtool
from qdqtool.comparison.matching import match_nodes
from qdqtool.comparison.result import (
    ChangeKind,
    Comparison,
    LossReason,
    NodeChange,
    NodeSide,
    SideSummary,
)
from qdqtool.comparison.text import summarize_comparison
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.formats.build_text import render_comparison
from qdqtool.formats.verdicts import verdict
from qdqtool.gpu_prediction import predict_on_gpus
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.timing.options import TimingOptions
from tests.comparison.networks import float_network, names_of, network, quantize, with_dynamic_size
from tests.comparison.test_fp8 import quantized, three_convolutions
from tests.errors import has
from tests.insertion.transformers import samples, vit
from tests.trt.builder import Graph

TARGET = "trt8.5"


def compare(a: onnx.ModelProto, b: onnx.ModelProto) -> Comparison:
    return qdqtool.compare(a, b, target=TARGET)


def changed(result: Comparison) -> dict[str, tuple[ChangeKind, ...]]:
    return {n.name: n.changes for n in result.changed}


def node_of(result: Comparison, name: str) -> NodeChange:
    return next(n for n in result.nodes if n.name == name)


def network_after_constants(scale: float | None) -> onnx.ModelProto:
    g = Graph()
    size = g.op("Cast", g.const("size", np.array([4], np.int64)), "cast", to=1)
    x = g.op("Div", [g.input(1, 4, 16, 16), g.op("Sqrt", size, "root")], "scaled")
    weights = "float" if scale is None else "qdq"
    x = g.relu(g.conv(x, "a", scale=scale, weights=weights), "relu")
    return g.model(g.conv(x, "b", scale=scale, weights=weights))


def product_of_activations(scale: float | None) -> onnx.ModelProto:
    g = Graph(opset=19)
    x = g.input(1, 4, 16, 16)
    sides = [x, g.relu(x, "relu")]
    if scale is not None:
        sides = [g.pair(tensor, f"q{i}", scale) for i, tensor in enumerate(sides)]
    return g.model(g.op("MatMul", sides, "product"))


@pytest.mark.parametrize(
    ("make", "target", "names"),
    [
        (network_after_constants, TARGET, ["a", "b"]),
        *((product_of_activations, target, ["product"]) for target in ("trt10", "trt11", "rtx1.7")),
    ],
)
def test_compare_counts_layers_that_gain_or_lose_int8(
    make: Callable[[float | None], onnx.ModelProto], target: str, names: list[str]
) -> None:
    """Nodes that compute constants are not counted; products of two activations are."""
    floats, quantized = make(None), make(0.1)
    result = qdqtool.compare(floats, quantized, target=target)
    count = qdqtool.predict(quantized, target).summary()["int8"]
    assert (result.a.quantized, result.b.quantized, result.ok) == (False, True, True)
    assert (result.a.int8, result.b.int8) == (0, len(names)) == (0, count)
    assert names_of(result, ChangeKind.GAINED_INT8) == set(names) and not result.unknown
    assert names_of(qdqtool.compare(quantized, floats, target=target), ChangeKind.LOST_INT8) == set(
        names
    )


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            network(2),
            {ChangeKind.ONLY_IN_A: {"b2.a", "b2.b"}, ChangeKind.LOST_QDQ: {"b2.add"}},
        ),
        (
            network(residual=False),
            {
                ChangeKind.LOST_INT8_OUTPUT: {"b.stem", "b0.b", "b1.b", "b2.b"},
                ChangeKind.LOST_QDQ: {"b0.add", "b1.add", "b2.add"},
                ChangeKind.RESIDUAL: {"b0.b", "b1.b", "b2.b"},
            },
        ),
        (network(spoilt=[2], spoilt_weights="tensor"), {ChangeKind.WEIGHTS_SCALE: {"b2.a"}}),
    ],
    ids=["missing block", "no residual pairs", "one scale for weights"],
)
def test_compare_names_changes(
    second: onnx.ModelProto, expected: dict[ChangeKind, set[str]]
) -> None:
    result = compare(network(3), second)
    assert {kind: names_of(result, kind) for kind in ChangeKind if result.where(kind)} == expected


@pytest.mark.parametrize(
    ("weights", "data", "lost"),
    [
        ("float", 0.1, LossReason.WEIGHTS),
        ("qdq", None, LossReason.DATA),
        ("float", None, LossReason.PAIRS),
    ],
)
def test_compare_names_missing_pairs(weights: str, data: float | None, lost: LossReason) -> None:
    result = compare(network(), network(spoilt=[1], spoilt_weights=weights, data=data))
    losses = [(node.name, node.lost) for node in result.where(ChangeKind.LOST_INT8)]
    assert (losses, result.ok) == ([("b1.a", lost)], False)


@pytest.mark.parametrize(("scale", "factor"), [(0.25, 2.5), (0.10005, 1.0005)])
def test_compare_scales_of_data(scale: float, factor: float) -> None:
    result = compare(network(scale=0.1), network(scale=scale))
    # 7 convolutions, 3 Adds
    assert [result.count(k) for k in (ChangeKind.SCALE, ChangeKind.WEIGHTS_SCALE)] == [10, 0]
    assert node_of(result, "b0.a").factor == pytest.approx(factor)


def test_compare_names_the_finding_of_a_lost_convolution() -> None:
    """A zero point other than 0 prevents INT8 although both pairs are present."""
    spoilt = network()
    for tensor in spoilt.graph.initializer:
        if tensor.name in ("b1.a.in.Q.zero", "b1.a.in.DQ.zero"):
            tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, onnx.TensorProto.INT8, [], [3]))
    node = node_of(compare(network(), spoilt), "b1.a")
    assert (node.lost, node.finding) == (LossReason.FINDING, "ZP-NONZERO")


def two_convolutions(scale: float | None) -> onnx.ModelProto:
    """Return a convolution whose weights have one scale for all channels, and a float convolution.

    Args:
        scale: Scale of the tensor between them; None without a Q/DQ pair.
    """
    g = Graph()
    values = np.where(np.arange(16) < 4, 1, 0.02)[:, None, None, None] * np.ones((16, 16, 3, 3))
    inputs = [g.pair(g.input(1, 16, 8, 8), "in"), g.pair(g.const("w", values), "wq", 1 / 127)]
    return g.model(
        g.conv(g.op("Conv", inputs, "a", kernel_shape=[3, 3]), "b", scale=scale, weights="float")
    )


def test_finding_on_accuracy_explains_no_float_output() -> None:
    """The weights with one scale cost accuracy, but the cause is the next convolution."""
    models = two_convolutions(0.1), two_convolutions(None)
    assert "W-PER-TENSOR" in qdqtool.predict(models[1], TARGET).findings_by_code()
    node = node_of(compare(*models), "a")
    assert (node.changes, node.finding) == ((ChangeKind.LOST_INT8_OUTPUT,), "OUT-FLOAT")
    reason = "(16x6x6): b (Conv) reads the result as float (that layer is not quantized)."
    assert node.why == f"wrote INT8, writes float {reason}"


def test_match_branches_in_another_order() -> None:
    def branches(order: list[str]) -> onnx.ModelProto:
        g = Graph()
        x = g.input(1, 4, 8, 8)
        outputs = {name: g.conv(x, name, scale=None, weights="float") for name in order}
        return g.model(g.concat([outputs["p"], outputs["q"], outputs["r"]], "cat"))

    assert pairs(branches(["p", "q", "r"]), branches(["r", "p", "q"])) == {
        n: n for n in ("p", "q", "r", "cat")
    }


def other_convolution() -> onnx.ModelProto:
    g = Graph()
    return g.model(g.conv(g.input(1, 3, 9, 9), "c", 5, k=5, scale=None, weights="float"))


def similar_network() -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 4, 16, 16), "b.stem", scale=None, weights="float"), "b.stem.relu")
    for i, (channels, k) in enumerate([(8, 5), (16, 3), (8, 1), (8, 3), (8, 5), (32, 1), (8, 3)]):
        x = g.relu(g.conv(x, f"b{i}.a", channels, k=k, scale=None, weights="float"), f"b{i}.ra")
    return g.model(x)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (network(), other_convolution()),
        (float_network(), similar_network()),
        (similar_network(), float_network()),
        (network(4), similar_network()),
    ],
    ids=["no layer in common", "float, similar", "similar, float", "quantized, similar"],
)
def test_compare_rejects_different_networks(a: onnx.ModelProto, b: onnx.ModelProto) -> None:
    with pytest.raises(QdqtoolError, check=has("different-models")):
        compare(a, b)


Values = np.ndarray


def with_fourth_scale(value: float) -> Callable[[Values], Values]:
    return lambda scales: np.where(np.arange(scales.size) == 3, np.float32(value), scales)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda scales: scales, []),
        (lambda scales: scales[::-1], ["b1.a"]),
        (lambda scales: np.roll(scales, 1), ["b1.a"]),
        *((with_fourth_scale(value), ["b1.a"]) for value in (0, -0.1, np.nan, np.inf)),
    ],
    ids=["same", "reversed", "rolled", "zero", "negative", "NaN", "infinite"],
)
def test_compare_scales_of_channels(
    change: Callable[[Values], Values], expected: list[str]
) -> None:
    proto = network()
    for tensor in proto.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if tensor.name.startswith("b1.a.w") and values.dtype == np.float32 and values.ndim == 1:
            tensor.CopyFrom(onnx.numpy_helper.from_array(change(values.copy()), tensor.name))
    result = compare(network(), proto)
    assert [n.name for n in result.where(ChangeKind.WEIGHTS_SCALE)] == expected
    json.dumps(result.as_json(), allow_nan=False)


def test_comparison_json() -> None:
    result = compare(network(), network(spoilt=[0]))
    data = json.loads(json.dumps(result.as_json()))
    expected = {"lost_int8": 1, "conversions": [result.a.conversions, result.b.conversions]}
    assert data["schema"] == "qdqtool/comparison/1" and data["summary"].items() >= expected.items()
    node = next(n for n in data["nodes"] if n["name"] == "b0.a")
    assert [node["a"]["precision"], node["b"]["precision"], node["lost"]] == [
        "INT8",
        "FLOAT",
        "weights",
    ]
    assert [node[s]["quantized"] for s in "ab"] == [
        {"data": True, "weights": w} for w in (True, False)
    ]


@pytest.mark.parametrize(("value", "nodes"), [(8.03, ["m"]), (8.004, [])])
def test_compare_notes_other_constants(value: float, nodes: list[str]) -> None:
    """FP16 rounds 8.004 to 8."""
    models = []
    for constant in (8.0, value):
        g = Graph()
        x = g.op("Mul", [g.input(1, 1, 8, 8), g.const("stride", np.float32([constant]))], "m")
        models.append(g.model(g.conv(x, "c")))
    assert [
        n.values["node"] for n in compare(*models).notes if n.code == "other-constants"
    ] == nodes


def test_compare_layout_changes() -> None:
    models = wide_network(0.1), wide_network(0.1, floats=[1])
    result = qdqtool.compare(*models, target=TARGET, gpu="T4")
    ms = qdqtool.predict(models[1], TARGET, gpu="T4").time["layouts_ms"]
    sides = [[s.as_json()[k] for k in ("layouts", "layouts_ms")] for s in (result.a, result.b)]
    assert sides == [[0, 0.0], [1, ms]] and ms > 0 and not result.a.measured
    assert f"(reformats): 0 -> 1 ({ms:.3g} ms)." in str(render_comparison(result))


@pytest.mark.parametrize(("target", "floats"), [("trt10", ()), ("trt10", (0, 1)), ("trt11", ())])
def test_compare_times_a_float_model_as_predict_does(target: str, floats: Sequence[int]) -> None:
    """A strongly typed build of an FP32 file computes in FP32, but INT8 is compared with FP16."""
    models, gpu = [wide_network(None), wide_network(0.1, floats)], "RTX 4090"
    floating, quantized = (qdqtool.predict(m, target, gpu=gpu).time for m in models)
    assert floating and quantized
    result = qdqtool.compare(*models, target=target, gpu=gpu)
    shown = [result.summary()["ms"], [side.as_json()["ms"] for side in (result.a, result.b)]]
    assert shown == [[floating["float"]["total_ms"], quantized["total_ms"]]] * 2
    _, (time,) = predict_on_gpus(models[1], target, [TimingOptions(gpu)])
    assert result.b.ms == time.total_ms  # not rounded twice
    assert qdqtool.compare(*models[::-1], target=target, gpu=gpu).b.ms == result.a.ms
    fp32_ms = floating["float"]["fp32_ms"]
    assert (fp32_ms is None) == (target == "trt10") == (result.time_change is not None)
    notes = [note for note in result.notes if note.code == "float-time"]
    assert [note.values["fp32_ms"] for note in notes] == [fp32_ms] * (fp32_ms is not None)
    assert (" ms in FP16 on RTX 4090" in str(render_comparison(result))) == bool(notes)
    assert (quantized["gain"]["low"] < 1) == bool(floats)
    assert ("uncertain" in str(render_comparison(result))) == bool(floats)
    both_float = qdqtool.compare(models[0], models[0], target=target, gpu=gpu)
    assert both_float.a.ms == both_float.b.ms == pytest.approx(floating["total_ms"], rel=5e-4)


def wide_network(scale: float | None, floats: Sequence[int] = ()) -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 256, 56, 56)
    for i, step in enumerate(None if i in floats else scale for i in range(3)):
        weights = "float" if step is None else "qdq"
        x = g.relu(g.conv(x, f"c{i}", channels=256, scale=step, weights=weights), f"r{i}")
    return g.model(x)


@pytest.mark.parametrize("name", ["b.onnx.gz", "c.bin"])
def test_compare_files_of_models(name: str, tmp_path: Path) -> None:
    data = network().SerializeToString()
    (tmp_path / "a.onnx").write_bytes(data)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    result = qdqtool.compare(tmp_path / "a.onnx", tmp_path / name)
    assert (result.changed, result.ok, result.matched_by) == ([], True, "names")
    assert result.summary()["matched_by"] == "structure and names"
    assert result.as_json()["summary"]["matched_by"] == "names"


# Models that onnxruntime quantized.


@pytest.fixture
def float_path(tmp_path: Path) -> Path:
    onnx.save(float_network(), tmp_path / "float.onnx")
    return tmp_path / "float.onnx"


@pytest.mark.parametrize(
    ("quant_format", "activations", "operator"),
    [("dynamic", "", "DynamicQuantizeLinear"), ("QOperator", "QUInt8", "QLinearConv")],
)
def test_compare_rejects_integer_operators(
    quant_format: str, activations: str, operator: str, float_path: Path
) -> None:
    path = quantize(float_path, quant_format, activations)
    assert "QOPERATOR" in verdict(qdqtool.predict(path, TARGET))
    for a, b in ((float_path, path), (path, float_path)):
        with pytest.raises(QdqtoolError, match=operator, check=has("unsupported")):
            qdqtool.compare(a, b)


@pytest.mark.parametrize(
    ("activations", "code", "obstacle", "is_rejected"),
    [
        ("QUInt8", "ZP-UINT8", "{} UINT8 Q or DQ nodes", lambda zero: zero.dtype == np.uint8),
        ("QInt8", "ZP-NONZERO", "zero points other than 0 at {} Q or DQ nodes", np.any),
    ],
)
def test_compare_names_an_obstacle_first_and_counts_its_nodes(
    activations: str,
    code: str,
    obstacle: str,
    is_rejected: Callable[[np.ndarray], bool],
    float_path: Path,
) -> None:
    path = quantize(float_path, "QDQ", activations)
    graph = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    zeros = [constants[n.input[2]] for n in graph.node if "uantizeLinear" in n.op_type]
    result = qdqtool.compare(float_path, path, target=TARGET)
    assert obstacle.format(sum(map(is_rejected, zeros))) in result.b.obstacle
    assert summarize_comparison(result).startswith(f"B has {result.b.obstacle}")
    assert (result.a.obstacle, result.b.int8, result.count(ChangeKind.GAINED_INT8)) == ("", 0, 0)
    assert code in qdqtool.predict(path, TARGET).findings_by_code()


def test_rejected_model_has_no_times_and_no_qdq_layers(float_path: Path) -> None:
    """No engine exists whose Q/DQ layers could be counted."""
    result = qdqtool.compare(
        quantize(float_path, "QDQ", "QInt8"), float_path, target=TARGET, gpu="T4"
    )
    assert result.a.rejected and not result.b.rejected and result.a.conversions and result.b.ms
    assert {result.a.ms, result.times_as_long, *(n.change_ms for n in result.nodes)} == {None}
    facts = ("convolutions, TensorRT will reject it", "Q/DQ layer", "faster")
    assert [str(render_comparison(result)).count(fact) for fact in facts] == [1, 0, 0]


@pytest.mark.parametrize(
    ("ratio", "measured", "text", "is_slower"),
    [
        (1.05, False, "5 % slower (estimated)", True),
        (1.0098, False, "1 % slower (estimated)", True),
        (1 / 1.05, False, "5 % faster (estimated)", False),
        (1.14, True, "14 % slower", True),
        (1.194, True, "19 % slower", True),
        (1.196, True, "1.2x slower", True),
        (1.7, True, "1.7x slower", True),
        (1.0214, True, "2 % slower", True),
        (1.004, False, "as fast (estimated)", False),
        (1.0145, True, "as fast (the times differ by less than 2 %)", False),
    ],
)
def test_speed_of_b_is_a_factor_or_a_percentage(
    ratio: float, measured: bool, text: str, is_slower: bool
) -> None:
    sides = [SideSummary("build", "", False, 1, ms=ms, measured=measured) for ms in (1, ratio)]
    node = NodeSide("n", "Conv")
    comparison = Comparison(*sides, [NodeChange(node, node)])
    equal = "no difference" if "as fast" in text else "no difference at layers with weights or Q/DQ"
    assert summarize_comparison(comparison) == f"{equal}; {text}"
    assert comparison.is_slower == is_slower


def test_compare_symmetric_int8_has_no_obstacle(float_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime.quantization")
    options = {"weight_type": ort.QuantType.QInt8, "extra_options": {"ActivationSymmetric": True}}
    result = qdqtool.compare(
        float_path, quantize(float_path, "QDQ", "QInt8", **options), target=TARGET
    )
    assert not result.b.obstacle and result.count(ChangeKind.GAINED_INT8)


def with_old_opset() -> onnx.ModelProto:
    """Return a model with per-channel Q/DQ in opset 12, as of onnxruntime's quantize_static."""
    model = onnx.ModelProto()
    model.CopyFrom(quantized("int8"))
    model.opset_import[0].version = 12
    return model


def test_compare_names_a_rejected_model_first() -> None:
    old, new = with_old_opset(), quantized("int8")
    assert "OPSET-AXIS" in qdqtool.predict(old).findings_by_code()
    for models, name, int8 in (((new, old), "B", [3, 0]), ((old, new), "A", [0, 3])):
        result = qdqtool.compare(*models)
        assert summarize_comparison(result).startswith(f"TensorRT will reject {name} (")
        assert (result.summary()["int8"], result.ok) == (int8, name == "A")
        assert [n.finding for n in result.where(ChangeKind.LOST_INT8)] == ["OPSET-AXIS"] * (
            3 if name == "B" else 0
        )
    assert "TensorRT" not in summarize_comparison(qdqtool.compare(new, new))


def test_agreement_with_old_opset_is_refused_with_advice() -> None:
    data = np.zeros((1, 32, 8, 8), np.float32)
    with pytest.raises(ModelError, match="qdqtool fix", check=has("axis-opset")):
        qdqtool.compare(three_convolutions(), with_old_opset(), data=data)
    assert qdqtool.compare(
        three_convolutions(), qdqtool.fix(with_old_opset()).proto, data=data
    ).agreement


# Matching of nodes.


def pairs(first: onnx.ModelProto, second: onnx.ModelProto) -> dict[str, str]:
    model = Model(first)
    return {
        model.nodes[i].name: node.name
        for i, node in match_nodes(View(model), View(Model(second))).pairs.items()
    }


@pytest.mark.parametrize("other", [float_network(), network()], ids=["float", "quantized"])
def test_match_equal_networks(other: onnx.ModelProto) -> None:
    assert pairs(float_network(), other) == {n.name: n.name for n in float_network().graph.node}


def test_match_with_a_missing_block() -> None:
    partners = pairs(network(4), network(4, left_out=3))
    assert not {"b3.a", "b3.b"} & set(partners) and all(a == b for a, b in partners.items())
    assert {"b.stem", "b0.a", "b0.b", "b1.a", "b1.b", "b2.a", "b2.b"} <= set(partners)


def test_match_numbered_names_with_a_missing_convolution() -> None:
    def chain(sizes: list[int]) -> onnx.ModelProto:
        g = Graph()
        x = g.input(1, 3, 8, 8)
        for i, size in enumerate(sizes):
            x = g.relu(g.conv(x, f"Conv_{i}", size, scale=None, weights="float"), f"Relu_{i}")
        return g.model(x)

    sizes = [4, 8, 8, 8, 16, 32, 16, 8, 4, 12]
    partners = pairs(chain(sizes), chain(sizes[1:]))
    assert all(partners[f"Conv_{i}"] == f"Conv_{i - 1}" for i in range(4, 10))


@pytest.mark.parametrize("blocks", [1, 3, 12])
def test_match_by_structure(blocks: int) -> None:
    partners = pairs(network(blocks, names="b"), network(blocks, names="layer", scale=0.3))
    nodes = float_network(blocks).graph.node
    assert partners == {node.name: node.name.replace("b", "layer", 1) for node in nodes}


@given(st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from(["b", "x/y"]))
def test_match_is_one_to_one_and_keeps_operators(
    blocks: int, has_more: bool, quantized: bool, names: str
) -> None:
    first = Model(network(blocks) if quantized else float_network(blocks))
    partners = match_nodes(View(first), View(Model(network(blocks + has_more, names=names)))).pairs
    assert len({n.index for n in partners.values()}) == len(partners)
    assert all(first.nodes[i].op == n.op for i, n in partners.items())


def test_largest_scales_are_no_claim_about_all_channels_of_weights() -> None:
    """One scale for a tensor is the largest of its channels, but 3 of 4 channels differ."""
    models = []
    for scales in ([0.01, 0.001, 0.002, 0.003], 0.01):
        g, axis = Graph(), (None if isinstance(scales, float) else 0)
        weights = g.pair(g.const("w", np.ones((4, 4, 3, 3), np.float32)), "w", scales, axis)
        inputs = [g.pair(g.input(1, 4, 8, 8), "in", 0.1), weights]
        models.append(g.model(g.op("Conv", inputs, "c", kernel_shape=[3, 3], pads=[1] * 4)))
    comparison = qdqtool.compare(*models)
    assert comparison.count(ChangeKind.WEIGHTS_SCALE) == 1
    text = summarize_comparison(comparison)
    assert "scales of weights differ at 1 node" in text and "less than" not in text


def test_range_of_conversions_of_a_transformer_is_shown() -> None:
    """How much of a transformer Myelin absorbs is unknown, as in the output of predict."""
    model = vit(1)
    quantized = qdqtool.insert(model, samples(model, 2), method="max", losses=0).model
    low, high = qdqtool.predict(quantized).conversions_range or (0, 0)
    comparison = qdqtool.compare(model, quantized)
    assert comparison.b.as_json()["conversions_range"] == [low, high] and low < high
    assert f"{low} to {high} Q/DQ layers" in str(render_comparison(comparison))
    assert f"Q/DQ layers: 0 in A, {low} to {high} in B" in summarize_comparison(comparison)


def times_of(*models: onnx.ModelProto, size: tuple[int, int] | None = None) -> list[float | None]:
    result = qdqtool.compare(*models, gpu="RTX 3060", size=size)
    return [result.a.ms, result.b.ms]


def test_compare_estimates_both_models_for_one_image_size() -> None:
    """A dynamic image size becomes the recorded, fixed or given size of the other model."""
    first, second = float_network(), network()  # 16x16
    expected = times_of(first, second)
    open_first, open_second = with_dynamic_size(first), with_dynamic_size(second)
    recorded = with_dynamic_size(second, "[16, 16]")
    assert times_of(open_first, recorded) == times_of(open_first, second) == expected
    assert times_of(recorded, open_first) == expected[::-1]
    assert times_of(open_first, open_second, size=(16, 16)) == expected


@pytest.mark.parametrize(("size", "count"), [(None, 1), ((16, 16), 0)])
def test_compare_notes_an_assumed_image_size(size: tuple[int, int] | None, count: int) -> None:
    models = with_dynamic_size(float_network()), with_dynamic_size(network())
    assert [n.code for n in qdqtool.compare(*models, gpu="RTX 3060", size=size).notes].count(
        "size-assumed"
    ) == count


def test_compare_refuses_a_size_that_no_input_has() -> None:
    with pytest.raises(QdqtoolError, match="16x16"):
        times_of(float_network(), network(), size=(32, 32))
