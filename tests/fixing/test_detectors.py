import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import qdqtool
from qdqtool.commands.cli import run as run_command
from qdqtool.demo.network import yolov8n
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.findings.obstacles import onnxruntime_recipe
from qdqtool.fixing.api import Fixed, fix
from qdqtool.fixing.outputs import (
    OutputNoise,
    OutputPart,
    find_worst_part,
    is_growth_permitted,
    measure_noise,
)
from qdqtool.formats.fix_text import render
from qdqtool.formats.verdicts import describe_rejection
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_head
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Severity
from tests.calibration.nets import write_pictures
from tests.errors import has
from tests.insertion.nets import detector as small_detector, value_of
from tests.slow import slow_after
from tests.trt.builder import Graph

quantization = pytest.importorskip("onnxruntime.quantization")


def run(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: x})


def image(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def codes(fixed: Fixed) -> list[str]:
    return [c.code for c in fixed.applied]


def head(
    scale: float = 5.0, own: float = 0.008, zero: int = 0, factor: str = "stride"
) -> onnx.ModelProto:
    g = Graph()
    stem = g.relu(
        g.conv(g.pair(g.input(1, 16, 8, 8), "stem.in", zero=zero), "stem", 16, scale=None), "r"
    )
    box, score = (g.conv(stem, name, 8, k=1) for name in ("box", "score"))
    g.const("stride", np.float32(32))
    if factor == "rounded":
        factor = g.pair("stride", "factor", 0.3)
    pixels = g.pair(g.op("Mul", [box, factor], "decode"), "b", 5.0, zero=zero)
    scores = g.pair(g.op("Sigmoid", score, "probability"), "s", own)
    return g.model(g.pair(g.concat([pixels, scores], "all"), "behind", scale))


@pytest.mark.parametrize("factor", ["stride", "rounded"])
def test_fix_keeps_scores(factor: str) -> None:
    proto, x = head(factor=factor), image(1, 16, 8, 8)
    assert not run(proto, x)[0][:, 8:].any()
    fixed = fix(proto)
    assert codes(fixed)[0] == "HEAD-CONCAT" and fixed.ok
    scores = run(fixed.proto, x)[0][:, 8:]
    assert scores.std() > 0.1 and len(np.unique(scores)) > 100
    assert not {n.name for n in fixed.proto.graph.node} & {"b.Q", "s.Q", "behind.Q", "factor.Q"}
    assert fixed.after.summary()["int8"] == fixed.before.summary()["int8"]


@pytest.mark.parametrize(("factor", "relus"), [("stride", [1]), ("box:0", [])])
def test_relu_of_a_removed_quantizer_is_kept_if_it_clips(factor: str, relus: list[int]) -> None:
    """A square is not negative, but a product with the stride is. The input gets no Relu."""
    fixed = fix(head(zero=-128, factor=factor))
    assert {"ZP-NONZERO", "HEAD-CONCAT"} <= set(codes(fixed))
    assert describe_rejection(fixed.before).endswith("; further errors: HEAD-CONCAT")
    assert [n.op_type for n in fixed.proto.graph.node].count("Relu") == 1 + len(relus)
    assert [n.values["count"] for n in fixed.notes if n.code == "relus-added"] == relus


def test_fix_removes_the_pairs_of_a_head_that_keeps_its_scores() -> None:
    """Boxes and scores that share a scale lose accuracy, even if the scores do not become 0."""
    fixed = fix(head(scale=0.01, factor="box:0"))
    severities = {f.severity for f in fixed.before.findings if f.code == "HEAD-CONCAT"}
    assert severities == {Severity.WARNING} and "HEAD-CONCAT" in codes(fixed)


def joined(*scales: float, behind: float, converted: bool = True) -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r0")
    parts = [
        g.pair(g.relu(g.conv(x, f"c{i}", 16), f"r{i + 1}"), f"p{i}", scale)
        for i, scale in enumerate(scales)
    ]
    cat = g.concat(parts, "cat")
    g.channels[cat] = 16 * len(scales)
    # Because of the other consumers, no layer absorbs the conversions before the Concat.
    others = [g.op("Neg", part, f"n{i}") for i, part in enumerate(parts) if converted]
    return g.model(g.conv(cat, "last", 16, scale=behind), *others)


@pytest.mark.parametrize(
    ("scales", "behind", "applied"),
    [
        ((0.1, 0.2), 0.4, True),
        ((0.1, 0.1), 0.4, True),
        ((0.09, 0.4), 0.4, False),
        ((0.1, 5.0), 5.0, False),
    ],
)
def test_one_scale_costs_at_most_two_bits(
    scales: tuple[float, ...], behind: float, applied: bool
) -> None:
    fixed = fix(joined(*scales, behind=behind))
    assert ("CONCAT-SCALE" in codes(fixed)) == applied
    (finding,) = (f for f in fixed.before.findings if f.code == "CONCAT-SCALE")
    assert finding.automatic == applied and ("keep separate scales" in finding.fix) != applied
    refused = [c.why_not for c in fixed.refused if c.code == "CONCAT-SCALE"]
    assert [why.code for why in refused] == ["scale-too-coarse"] * (not applied)
    for why in refused:
        assert why.values["bits"] == pytest.approx(np.log2(behind / min(scales)), rel=1e-6)
        assert {
            float(onnx.numpy_helper.to_array(t))
            for t in fixed.proto.graph.initializer
            if re.fullmatch(r"p\d\..*scale", t.name)
        } == {float(np.float32(s)) for s in scales}


@pytest.mark.parametrize(
    ("metadata", "lost_bits"),
    [
        (None, [np.log2(0.6 / 0.1)]),
        ("{", []),
        ("[" * 9999, []),
        ("[1]", []),
        ('{"p0.Q": ["0.1", 0.3]}', []),
        ('{"p0.Q": [0.1, 0.2]}', []),  # the quantizer has another scale
        ('{"p0.Q": [0.4, 0.3]}', []),
    ],
)
def test_loss_of_a_common_scale_counts_earlier_calls(
    metadata: str | None, lost_bits: list[float]
) -> None:
    """The second call would raise the scale from 0.3 to 0.6, and the first raised it from 0.1."""
    model = fix(joined(0.1, 0.2, behind=0.3)).proto
    (entry,) = model.metadata_props
    entry.value = entry.value if metadata is None else metadata
    for node in model.graph.node:
        if node.name in ("last.in.Q", "last.in.DQ"):
            node.input[1] = "coarse"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.6), "coarse"))
    fixed, prediction = fix(model), qdqtool.predict(model)
    refused = [change.why_not.values["bits"] for change in fixed.refused]
    assert refused == pytest.approx(lost_bits, rel=1e-6)
    assert any(f.automatic for f in prediction.findings) == (not lost_bits)


def test_different_scales_that_cost_no_conversion_stay() -> None:
    """The convolutions before the Concat write the scale of its result."""
    fixed = fix(joined(0.1, 0.2, behind=0.4, converted=False))
    (finding,) = (f for f in fixed.before.findings if f.code == "CONCAT-SCALE")
    assert (finding.severity, finding.automatic, finding.fix) == (Severity.INFO, False, "")
    assert not (fixed.applied or fixed.refused)


@pytest.mark.parametrize(
    ("integer", "scale", "why"),
    [(np.int16, 0.15, "not-symmetric-int8"), (np.int8, 0.4, "scale-too-coarse")],
)
def test_common_scale_that_fix_refuses_is_not_promised(
    g: Graph, integer: type, scale: float, why: str
) -> None:
    """The Split connects the scales of the Concat with `scale`."""
    x = g.pair(g.relu(g.conv(g.input(1, 16, 8, 8), "c", 16), "r"), "p", scale, integer=integer)
    parts = g.ops("Split", [x], "split", 2, axis=1)
    pairs = [
        g.pair(x, *pair, integer=integer)
        for x, pair in zip(parts, [("a", 0.15), ("b", 0.09)], strict=True)
    ]
    proto = g.model(g.conv(g.concat(pairs, "cat"), "last", 16, scale=0.15))
    findings = {f.code: f for f in qdqtool.predict(proto).findings}
    assert ("SPLIT-SCALE" in findings and "2.2 bits" in findings["SPLIT-SCALE"].fix) == (
        scale == 0.4
    )
    fixed = fix(proto)
    assert ("CONCAT-SCALE", why) in {(c.code, c.why_not.code) for c in fixed.refused}
    assert not any(
        f.automatic for f in (*findings.values(), *fixed.after.findings) if f.code == "CONCAT-SCALE"
    )
    assert "SPLIT-SCALE (1): see CONCAT-SCALE above" in str(render(fixed, "f.onnx", 80))


def test_scale_that_other_fixes_make_too_coarse_is_not_promised(g: Graph) -> None:
    """The pair inside the SiLU moves before the slices, whose scales differ less."""
    y = g.pair(g.conv(g.input(1, 16, 16, 16), "c0", 16), "inner", 0.5)
    y = g.op("Mul", [y, g.op("Sigmoid", y, "s")], "m")
    low, high = g.slice(y, "low", 0, 8), g.slice(y, "high", 8, 16)
    z = g.conv(g.pair(high, "p1", 0.2), "c1", 8, scale=None)
    parts = [g.pair(low, "p0", 0.1), g.pair(high, "p2", 0.4), g.pair(g.silu(z, "s1"), "p3", 0.3)]
    model = g.model(g.conv(g.concat(parts, "cat"), "c2", 8, scale=0.1))
    fixed = fix(model)
    assert [c.why_not.code for c in fixed.refused] == ["scale-too-coarse"]
    marked = {(f.code, f.node) for f in qdqtool.predict(model).findings if f.automatic}
    assert fixed.refused[0].places.isdisjoint(marked)
    assert {code for code, _ in marked} == set(codes(fixed))


def test_scales_become_common_before_a_pair_of_another_scale_moves_there(g: Graph) -> None:
    x = g.silu(g.pair(g.conv(g.input(1, 16, 8, 8), "stem", 16), "inner", 0.47), "silu")
    parts = g.ops("Split", [x], "split", 2, axis=1)
    g.channels |= dict.fromkeys(parts, 8)
    low = g.pair(parts[1], "low", 0.08)
    high = g.pair(g.relu(g.conv(low, "middle", 8, scale=None), "r"), "high", 0.17)
    proto = g.model(g.conv(g.concat([parts[0], low, high], "cat"), "last", 16, scale=0.17))
    prediction, fixed = qdqtool.predict(proto, gpu="RTX 3060"), fix(proto, gpu="RTX 3060")
    promised = Counter(f.code for f in prediction.findings if f.automatic)
    assert promised == fixed.fixed_places() == {"CONCAT-SCALE": 1, "SILU-INNER-Q": 1}
    assert fixed.summary()["places"] == 2
    assert fixed.after.conversions == 1 and prediction.time is not None and fixed.time is not None
    assert prediction.time["fixed_ms"] == pytest.approx(fixed.time.total_ms, rel=1e-3)


def test_dead_scale_gets_the_range_of_its_operator(g: Graph) -> None:
    gate = g.op("Sigmoid", g.conv(g.input(1, 16, 8, 8), "c", 16), "gate")
    g.channels[gate] = 16
    proto = g.model(g.conv(gate, "next", 16, scale=5.0), "next.in.DQ:0")
    x = image(1, 16, 8, 8)
    assert not run(proto, x)[1].any()
    fixed = fix(proto)
    assert codes(fixed) == ["SCALE-DEAD"] and fixed.ok
    values = run(fixed.proto, x)[1]
    assert values.max() <= 1.0 and len(np.unique(values)) > 64
    assert np.allclose(values * 127, np.rint(values * 127), atol=1e-4)


def test_dead_scale_of_a_part_is_left(g: Graph) -> None:
    """No single scale fits both a gate and the tensor that a Concat joins with the gate."""
    x = g.conv(g.input(1, 16, 8, 8), "c", 16)
    cat = g.concat([g.op("Sigmoid", x, "gate"), g.relu(x, "r")], "cat")
    g.channels[cat] = 32
    fixed = fix(g.model(g.conv(cat, "next", 16, scale=4.0)))
    assert not fixed.applied and not fixed.ok
    assert [f.code for f in fixed.after.findings if f.severity == Severity.ERROR] == ["SCALE-DEAD"]


def test_dead_part_that_no_layer_reads_becomes_float(g: Graph) -> None:
    """An end-to-end head joins boxes, the best scores and their classes."""
    x = g.op(
        "MatMul", [g.pair(g.input(1, 20, 16), "in"), g.weights("w", (16, 8), "qdq", axis=1)], "fc"
    )
    scores, _ = g.ops("TopK", [g.op("Sigmoid", x, "s"), g.const("k", np.array([4]))], "top", 2)
    boxes = g.op("Mul", [x, g.const("size", np.float32(640))], "boxes")
    proto = g.model(g.pair(g.op("Concat", [boxes, scores], "all", axis=2), "behind", 5.0))
    x = image(1, 20, 16)
    assert not run(proto, x)[0][..., 8:].any()
    fixed = fix(proto)
    assert codes(fixed) == ["SCALE-DEAD"] and fixed.ok
    assert np.unique(run(fixed.proto, x)[0][..., 8:]).size > 10


def test_pair_moves_behind_sigmoid_with_a_scale_for_its_range(g: Graph) -> None:
    """The scale of a Sigmoid's input is ten times too coarse for its output."""
    x = g.op("Sigmoid", g.pair(g.conv(g.input(1, 16, 8, 8), "c", 16), "inner", 0.1), "gate")
    g.channels[x] = 16
    fixed = fix(g.model(g.conv(x, "next", 16, scale=None)), "trt8.5")
    assert codes(fixed) == ["ACT-INNER-Q"]
    q = next(n for n in fixed.proto.graph.node if n.name == "inner.Q_moved")
    assert value_of(fixed.proto, q.input[1]) == pytest.approx(1 / 127, rel=1e-6)


def test_pair_moves_behind_activation_whose_consumers_need_two_scales(g: Graph) -> None:
    """Without the pair, the convolution would write float. A Relu and a rounding commute."""
    x = g.relu(g.pair(g.conv(g.input(1, 16, 8, 8), "c", 16), "inner", 0.02), "r")
    g.channels[x] = 16
    ends = [g.conv(x, name, 16, scale=scale) for name, scale in (("a", 0.02), ("b", 0.11))]
    fixed = fix(proto := g.model(*ends), "trt8.5")
    assert codes(fixed) == ["ACT-INNER-Q"]
    outputs = [run(p, image(1, 16, 8, 8)) for p in (proto, fixed.proto)]
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))


def per_tensor_weights(weights: np.ndarray, scale: float) -> onnx.ModelProto:
    g = Graph()
    inputs = g.pair(g.input(1, 16, 8, 8), "in", 0.05), g.pair(g.const("w", weights), "wq", scale)
    return g.model(g.op("Conv", [*inputs], "c", kernel_shape=[1, 1]))


def uneven_weights() -> np.ndarray:
    divisors = np.repeat(np.float32([1, 50]), 8).reshape(16, 1, 1, 1)
    return np.random.default_rng(0).uniform(-1, 1, (16, 16, 1, 1)).astype(np.float32) / divisors


def test_weights_get_a_scale_for_each_channel() -> None:
    weights, data = uneven_weights(), image(1, 16, 8, 8)
    proto = per_tensor_weights(weights, np.abs(weights).max() / 127)
    fixed = fix(proto)
    assert codes(fixed) == ["W-PER-TENSOR"]
    inputs = np.clip(np.rint(data / np.float32(0.05)), -128, 127) * np.float32(0.05)
    step = np.abs(weights).max(axis=(1, 2, 3), keepdims=True) / 127
    expected = np.einsum("oi,nihw->nohw", (np.rint(weights / step) * step)[:, :, 0, 0], inputs)
    assert np.allclose(run(fixed.proto, data)[0], expected, atol=1e-4)
    exact = np.einsum("oi,nihw->nohw", weights[:, :, 0, 0], inputs)
    errors = [np.abs(run(p, data)[0] - exact)[:, 8:].mean() for p in (proto, fixed.proto)]
    assert errors[1] < errors[0] / 10


def test_scales_for_each_channel_keep_a_trained_range() -> None:
    """Training chose a range that clips the largest weights; the network relies on it."""
    weights = uneven_weights()
    weights[0, 0] = 3
    fixed = fix(proto := per_tensor_weights(weights, 1 / 127))
    assert codes(fixed) == ["W-PER-TENSOR"]
    outputs = [run(p, image(1, 16, 8, 8))[0][:, 0] for p in (proto, fixed.proto)]
    np.testing.assert_allclose(*outputs, atol=0.02 * float(outputs[0].std()))


def test_fix_names_the_layer_that_it_changed_if_the_finding_remains() -> None:
    """The finding W-PER-TENSOR is about both layers. Only "b" has float weights in the file."""
    g, step = Graph(), np.float32(1 / 127)
    y = g.op(
        "Conv",
        [
            g.pair(g.input(1, 16, 8, 8), "a.in", 0.05),
            g.dq(g.const("a.w", np.rint(uneven_weights() / step).astype(np.int8)), "a.dq", step),
        ],
        "a",
        kernel_shape=[1, 1],
    )
    # The finding names "a", because its spread is larger.
    weights = g.pair(g.const("b.w", np.sqrt(np.abs(uneven_weights()))), "b.q", step)
    y = g.op("Conv", [g.pair(y, "b.in", 0.05), weights], "b", kernel_shape=[1, 1])
    fixed = qdqtool.fix(g.model(y), only=["W-PER-TENSOR"])
    assert [(c.node, str(c.why_not)) for c in (*fixed.applied, *fixed.refused)] == [
        ("b", ""),
        ("a", "the fix was applied at b, but the finding remains"),
    ]


# Errors of outputs --------------------------------------------------------------------------------


def test_errors_of_boxes_and_scores() -> None:
    """The error of scores is separate from that of boxes, which are a hundred times as large."""
    proto, x = head(), image(1, 16, 8, 8)
    fixed = fix(proto, only=["HEAD-CONCAT"], inputs={"x": x})
    boxes, scores = fixed.errors
    assert [(e.output, e.tensor, e.channels) for e in (boxes, scores)] == [
        ("behind.DQ:0", "decode:0", (0, 7)),
        ("behind.DQ:0", "probability:0", (8, 15)),
    ]
    reference = run(without_pairs(head(), ("stem.in", "box.in", "score.in", "b", "s", "behind")), x)
    for error, part in ((boxes, slice(0, 8)), (scores, slice(8, 16))):
        exact = reference[0][:, part].astype(np.float64)
        for value, model in ((error.before, proto), (error.after, fixed.proto)):
            off = run(model, x)[0][:, part] - exact
            assert value == pytest.approx(
                np.sqrt(np.mean(off**2)) / np.sqrt(np.mean(exact**2)), rel=1e-4
            )
    assert scores.before == 1.0 and scores.after < 0.1 and not scores.lost


def without_pairs(proto: onnx.ModelProto, names: tuple[str, ...]) -> onnx.ModelProto:
    for node in proto.graph.node:
        if node.name.rpartition(".")[0] in names and node.op_type.endswith("Linear"):
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    return proto


BOXES, SCORES = ("out", "boxes"), ("out", "scores")


@pytest.mark.parametrize(
    ("scores", "lost", "worst"),
    [
        (0.1, (), None),
        (0.16, (), None),
        (0.2, (), SCORES),
        (0.1, (SCORES,), SCORES),
    ],
    ids=["same", "within a factor", "grown", "one value only"],
)
def test_part_that_gets_worse(
    scores: float, lost: tuple[tuple[str, str], ...], worst: tuple[str, str] | None
) -> None:
    before = OutputNoise({"out": 0.02}, True, {BOXES: 0.02, SCORES: 0.1})
    after = OutputNoise({"out": 0.02}, True, {BOXES: 0.02, SCORES: scores}, frozenset(lost))
    assert find_worst_part(before, after, 1.5) == worst and is_growth_permitted(before, after, 1.5)
    assert is_growth_permitted(before, after, 1.5, parts=True) == (worst is None)


@pytest.mark.parametrize("count", [1, 3])
def test_noise_over_samples(count: int) -> None:
    """The squares of all samples are summed before the root is taken."""
    values, level = np.random.default_rng(0).normal(0, 1, (2, count, 4)).astype(np.float32)
    pairs = [({"y": a[None]}, {"y": b[None]}) for a, b in zip(values, level, strict=True)]
    off = values - level
    part = OutputPart("y", "first", (0, 1), 1, np.array([[True, True, False, False]]))
    found = measure_noise(pairs, [part])
    assert found.each["y"] == pytest.approx(np.sqrt(np.sum(off**2) / np.sum(level**2)), rel=1e-6)
    assert found.parts["y", "first"] == pytest.approx(
        np.sqrt(np.sum(off[:, :2] ** 2) / np.sum(level[:, :2] ** 2)), rel=1e-6
    )
    assert found.lost == frozenset()
    dead = [({"y": np.zeros((1, 4), np.float32)}, b) for _, b in pairs]
    assert measure_noise(dead, [part]).lost == {("y", "first")}


def test_levels_of_a_head_are_compared_apart(g: Graph) -> None:
    """Boxes and scores of two levels, joined along the last axis and reshaped in between."""
    x, levels = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r"), []
    for i in range(2):
        box, score = (g.conv(x, f"{name}{i}", 4, k=1) for name in ("box", "score"))
        both = g.op("Concat", [box, g.op("Sigmoid", score, f"s{i}")], f"cat{i}", axis=1)
        shape = g.const(f"shape{i}", np.array([1, 8, -1], np.int64))
        levels.append(g.op("Reshape", [both, shape], f"flat{i}"))
    proto = g.model(g.op("Transpose", g.op("Concat", levels, "all", axis=2), "t", perm=[0, 2, 1]))
    assert [
        (e.tensor, e.channels) for e in fix(proto, inputs={"x": image(1, 16, 8, 8)}).errors
    ] == [
        ("box0:0", None),
        ("s0:0", None),
        ("box1:0", None),
        ("s1:0", None),
    ]


def test_fix_compares_on_images(tmp_path: Path) -> None:
    write_pictures(tmp_path, 3, 64, 64)
    proto = quantize(small_detector(), tmp_path, "images")
    fixed = fix(proto, data=tmp_path)
    assert fixed.samples == 3 and fixed.ok
    boxes, scores = fixed.errors
    assert scores.has_fallen and not scores.has_grown
    assert scores.before > 0.9 and scores.after < 0.5 and boxes.after < 0.5
    assert fixed.as_json()["samples"] == 3
    whole = replace(fixed, errors=[replace(scores, tensor="")])
    has_remark = [
        "although most detections agree" in str(render(r, "f.onnx", 300)) for r in (fixed, whole)
    ]
    assert has_remark == [True, False]
    with pytest.raises(QdqtoolError, check=has("options-exclude-each-other", parameter="inputs")):
        fix(proto, data=tmp_path, inputs={"images": image(1, 3, 64, 64)})
    with pytest.raises(DataError, check=has("file-missing")):
        fix(proto, data=tmp_path / "missing")


# onnxruntime's quantizer --------------------------------------------------------------------------


class Reader(quantization.CalibrationDataReader):
    def __init__(self, name: str, shape: list[int]) -> None:
        generator = np.random.default_rng(0)
        self.items = iter([{name: generator.random(shape).astype(np.float32)} for _ in range(2)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.items, None)


def quantize(
    proto: onnx.ModelProto, folder: Path, name: str = "images", **options: Any
) -> onnx.ModelProto:
    onnx.save(proto, folder / "float.onnx")
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    quantization.quantize_static(
        str(folder / "float.onnx"), str(folder / "q.onnx"), Reader(name, shape), **options
    )
    (folder / "float.onnx").unlink()
    quantized = onnx.load(folder / "q.onnx")
    (folder / "q.onnx").unlink()
    return quantized


SYMMETRIC: dict[str, Any] = {
    "activation_type": quantization.QuantType.QInt8,
    "weight_type": quantization.QuantType.QInt8,
    "extra_options": {"ActivationSymmetric": True},
}

HEAD_EXCLUDED = {
    "nodes_to_exclude": [n.name for n in small_detector().graph.node if "/model.22/" in n.name]
}


@pytest.mark.parametrize(
    "options",
    slow_after(
        1,
        [
            {},
            {**SYMMETRIC, "per_channel": True},
            SYMMETRIC,
            {"activation_type": quantization.QuantType.QUInt8, "per_channel": True},
        ],
    ),
    ids=["default", "symmetric per channel", "symmetric", "uint8 per channel"],
)
def test_detector_of_onnxruntime_keeps_its_scores(options: dict[str, Any], tmp_path: Path) -> None:
    """Every recipe quantizes the last Concat, which makes all scores 0."""
    floats = small_detector()
    x = np.random.default_rng(0).random((1, 3, 64, 64)).astype(np.float32)
    proto = quantize(floats, tmp_path, **options)
    exact = run(floats, x)[0][:, 4:]
    assert not run(proto, x)[0][:, 4:].any() and exact.min() > 0
    fixed = fix(proto)
    assert fixed.ok and "HEAD-CONCAT" in codes(fixed)
    promised = Counter(f.code for f in fixed.before.findings if f.automatic)
    assert fixed.fixed_places()["CONCAT-SCALE"] <= promised["CONCAT-SCALE"]
    scores = run(fixed.proto, x)[0][:, 4:]
    assert np.sqrt(np.mean((scores - exact) ** 2)) < 0.2 * np.sqrt(np.mean(exact**2))
    before, after = fixed.before.summary(), fixed.after.summary()
    assert options or (before["int8"] == 0 and before["conversions"] > 60)
    assert after["int8"] == after["convolutions"] == 31 and after["conversions"] < 5
    assert not {"SILU-INNER-Q", "CONCAT-SCALE", "BIAS-DQ"} & {f.code for f in fixed.after.findings}
    onnx.checker.check_model(fixed.proto, full_check=True)
    assert "insert-is-better" in {n.code for n in fixed.notes} or not (
        {"ZP-NONZERO", "ZP-UINT8"} & set(codes(fixed))
    )


@pytest.mark.parametrize(
    ("make", "form"),
    slow_after(
        2,
        [
            (small_detector, HEAD_EXCLUDED),
            (small_detector, SYMMETRIC),
            (small_detector, {}),
            (lambda: yolov8n(64), {}),
        ],
    ),
    ids=["head-excluded", "symmetric", "small detector", "demo"],
)
def test_printed_recipe_leaves_no_error_and_no_warning(
    make: Any, form: dict[str, Any], current_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run both steps that `predict` prints, as a user would paste them."""
    floats = make()
    shape = [d.dim_value for d in floats.graph.input[0].type.tensor_type.shape.dim]
    onnx.save(quantize(floats, current_folder, **form), "first.onnx")
    onnx.save(floats, "FLOAT.onnx")
    (current_folder / "images").mkdir()
    write_pictures(current_folder / "images", 2, *shape[2:])
    assert run_command(["predict", "first.onnx"]) == 0
    steps = r"^1\. .*\n((?:.+\n)*?)2\. .*\n  qdqtool (.*\.onnx) "
    (python, command) = re.findall(steps, capsys.readouterr().out, re.MULTILINE)[0]
    exec(python, {"reader": Reader("images", shape)})
    proto = onnx.load("QDQ.onnx")
    model, ends = Model(floats), find_head(Model(floats))
    float_names = {model.nodes[i].name for i in ends.boxes | ends.dfl}
    prediction = predict(proto)
    assert {f.code for f in prediction.findings if f.severity != Severity.INFO} <= {"CONCAT-SCALE"}
    assert {c.name for c in prediction.convolutions if c.precision.is_float} == float_names
    assert run_command([*command.split(), "--calib", "images"]) == 0
    after = predict("QDQ_fixed.onnx")
    assert [f.code for f in after.findings if f.severity != Severity.INFO] == []
    summary = after.summary()
    assert summary["float"] == len(float_names) and summary["conversions"] <= 2


def test_recipe_without_a_head_excludes_nothing() -> None:
    assert "nodes_to_exclude" not in onnxruntime_recipe("float.onnx", "qdq.onnx")


def test_anchors_with_a_zero_point_become_exact_floats(g: Graph) -> None:
    """Symmetric INT8 has half the steps: anchors would move by half a cell."""
    stored = np.arange(1, 256, 2).astype(np.uint8).reshape(1, 1, 1, 128)
    x = g.relu(g.conv(g.input(1, 16, 1, 128), "c", 1), "r")
    grid = g.dq(g.const("grid", stored), "gdq", 0.5, zero=1, integer=np.uint8)
    proto = g.model(g.add(x, grid, "sum"))
    fixed = fix(proto)
    assert "ZP-NONZERO" in codes(fixed) and "gdq" not in {n.name for n in fixed.proto.graph.node}
    assert np.array_equal(*(run(p, image(1, 16, 1, 128))[0] for p in (proto, fixed.proto)))


@pytest.mark.parametrize(
    ("shift", "moved", "only"), [(0, 0, ""), (0.1, 0, ""), (0, 0.2, "BIAS-DQ")]
)
@pytest.mark.parametrize("form", ["DQ", "float"])
def test_rounded_anchors_are_restored_or_reported(
    g: Graph, shift: float, moved: float, only: str, form: str
) -> None:
    """Only values that are all centers of cells, rounded to a step, are restored."""
    x = g.input(1, 3, 32, 64)
    maps = [g.reshape(g.conv(x, f"c{s}", 2, 1, s), f"r{s}", 1, 2, -1) for s in (8, 16)]
    cells = [(x, y) for w, h in ((8, 4), (4, 2)) for y in range(h) for x in range(w)]
    anchors = np.array(cells).T[None] + 0.5 + shift
    anchors[0, 0, 0] += moved
    x = g.concat(maps, "maps", axis=2)
    for op, value in (("Add", anchors), ("Mul", np.repeat([8.0, 16.0], [32, 8])[None])):
        step = value.max() / 127
        levels = np.rint(value / step).astype(np.int8 if form == "DQ" else np.float32)
        stored = g.const(f"{op}.stored", levels if form == "DQ" else levels * np.float32(step))
        x = g.op(op, [x, g.dq(stored, f"{op}.DQ", step) if form == "DQ" else stored], op)
    fixed = fix(g.model(x), only=filter(None, [only]))
    notes = {n.code: n.values for n in fixed.notes}
    kept = {t.name: onnx.numpy_helper.to_array(t) for t in fixed.proto.graph.initializer}
    lost, end = (["Add.stored"] if shift or moved else []), "_float" if form == "DQ" else ""
    assert notes["constants-restored"]["tensors"] == ["Add.stored", "Mul.stored"][len(lost) :]
    assert set(kept[f"Mul.stored{end}"][0]) == {8, 16}
    assert lost or np.array_equal(kept[f"Add.stored{end}"], anchors)
    reported = [v["tensor"] for code, v in notes.items() if code == "constants-rounded"]
    assert reported == (lost if end else []) and ("insert-is-better" in notes) == bool(reported)
