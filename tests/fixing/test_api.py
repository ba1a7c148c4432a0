from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings, strategies as st

import qdqtool
from qdqtool.commands import cli
from qdqtool.errors import DataError, ModelError, QdqtoolError
from qdqtool.findings.rules import reason_classes
from qdqtool.fixing import pairs
from qdqtool.fixing.steps import MODEL_STEPS, STEPS
from qdqtool.ir.graph import Model
from qdqtool.reasons.conversions import RemainingConversion
from qdqtool.reasons.finding import split_fixable
from qdqtool.reasons.quantizers import AxisOpset, FakeQuantizers
from qdqtool.reasons.scales import ScalesDiffer
from qdqtool.trt.targets import target_named
from tests.calibration.nets import write_pictures
from tests.errors import has
from tests.findings.graphs import GRAPHS
from tests.findings.lint.test_api import shared_model
from tests.findings.test_causes import concat, residual, split
from tests.findings.test_producers import models, predictions, views
from tests.fixing.steps import apply_site
from tests.insertion import nets
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.test_cases import model_of
from tools.fuzz.fp8 import convert_to_fp8
from tools.fuzz.grammar import network
from tools.growth.families import FAMILIES


def run(proto, **inputs):
    return nets.run(proto, inputs)


def image(*shape, seed=5):
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def assert_equal_outputs(one, other, atol=0.0):
    x = image(1, 16, 8, 8)
    np.testing.assert_allclose(run(one, x=x)[0], run(other, x=x)[0], rtol=0, atol=atol)


def codes(prediction):
    return {f.code for f in prediction.findings}


def quantize(x, scale, zero, low, high):
    return (np.clip(np.rint(x / np.float32(scale)) + zero, low, high) - zero).astype(
        np.float32
    ) * np.float32(scale)


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_fix_keeps_one_pair_before_a_sum_of_two_convolutions(g, target):
    """The other convolution fuses the Add, as in the first block of a stage of a ResNet."""
    x = g.pair(g.relu(g.conv(g.input(1, 8, 16, 16), "c0", 16), "r0"), "in", 0.1)
    g.channels[x] = 16
    sides = [g.pair(g.conv(x, name, 16, scale=None), f"{name}.out", 0.1) for name in ("c1", "c2")]
    total = g.relu(g.add(*sides, "sum"), "r1")
    g.channels[total] = 16
    fixed = qdqtool.fix(g.model(g.conv(total, "c3", 16)), target)
    marked = [f for f in fixed.before.findings if f.code == "ADD-BOTH"]
    assert [(f.node, f.automatic) for f in marked] == [("sum", True)]
    assert [c.code for c in fixed.applied] == ["ADD-BOTH"] and not fixed.refused
    left = {n.name for n in fixed.proto.graph.node} & {"c1.out.Q", "c2.out.Q"}
    assert len(left) == 1 and "ADD-BOTH" not in codes(fixed.after)
    assert fixed.after.summary()["int8_to_int8"] == fixed.before.summary()["int8_to_int8"]


def test_fix_applies_residual_fixes():
    fixed = qdqtool.fix(residual("float"), "trt8.5")
    assert [c.code for c in fixed.applied] == ["SKIP-FLOAT"] and not fixed.refused
    one, two = fixed.before.summary(), fixed.after.summary()
    assert [two[k] - one[k] for k in ("int8_to_int8", "conversions")] == [2, -2]
    model = Model(fixed.proto)
    dq = model.producers[model.node("sum").input(1)]
    assert (dq.op, dq.input(0)) == ("DequantizeLinear", "c1.in.Q:0")
    onnx.checker.check_model(fixed.proto, full_check=True)


@pytest.mark.parametrize(
    ("proto", "code", "largest"),
    [
        (concat((0.0213, 0.0213, 0.048), 0.048), "CONCAT-SCALE", 0.048),
        (split(0.02, 0.05), "SPLIT-SCALE", 0.05),
        (convert_to_fp8(split(0.02, 0.05)), "SPLIT-SCALE", 0.0141741065),
    ],
)
def test_fix_unifies_scales(proto, code, largest):
    fixed = qdqtool.fix(proto, "trt10")
    onnx.checker.check_model(fixed.proto, full_check=True)
    assert {c.code for c in fixed.applied} == {code} and fixed.after.summary()["conversions"] == 1
    tensors = [t for t in fixed.proto.graph.initializer if t.name.endswith("/scale")]
    assert {float(onnx.numpy_helper.to_array(t)) for t in tensors} == {np.float32(largest)}


def random_integers(*shape):
    return np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)


def convolution_of(g, weights, *bias):
    x = g.pair(g.input(1, 16, 8, 8), "in")
    return g.model(g.op("Conv", [x, weights, *bias], "c", kernel_shape=[1, 1]))


def integer_bias(g):
    stored = np.random.default_rng(0).integers(-5000, 5000, 16).astype(np.int32)
    scale = np.random.default_rng(1).uniform(1e-4, 2e-4, 16)
    bias = g.dq(g.const("b", stored), "bdq", scale, axis=0, integer=np.int32)
    return convolution_of(g, g.weights("w", (16, 16, 1, 1), "qdq"), bias)


def transposed_integers(g):
    moved = g.op(
        "Transpose", g.const("w", random_integers(16, 16, 1, 1)), "between", perm=[1, 0, 2, 3]
    )
    return convolution_of(g, g.dq(moved, "wdq", np.full(16, 0.02), axis=0))


def scale_of_shape_1(g):
    y = g.pair(g.input(1, 16, 8, 8), "p", [0.05])
    return g.model(g.op("Conv", [y, g.weights("w", (16, 16, 1, 1), "qdq")], "c"))


@pytest.mark.parametrize(
    ("make", "target", "code"),
    [
        (lambda g: shared_model(), "trt8.5", "W-SHARED"),
        (
            lambda g: g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, weights="int8")),
            "trt8.4",
            "WEIGHT-PREQUANT",
        ),
        (
            lambda g: convolution_of(
                g,
                g.dq(
                    g.const("w", random_integers(16, 16, 1, 1)),
                    "wdq",
                    np.full(16, 0.01),
                    axis=0,
                    zero=None,
                ),
            ),
            "trt8.5",
            "DQ-3-INPUTS",
        ),
        (integer_bias, "trt8.5", "BIAS-DQ"),
        (
            lambda g: convolution_of(
                g,
                g.pair(g.op("Identity", g.const("w", image(16, 16, 1, 1)), "between"), "wq", 0.02),
            ),
            "trt8.5",
            "W-NONCONST",
        ),
        (transposed_integers, "trt10", "WEIGHT-INDIRECT"),
        (transposed_integers, "rtx1.7", "WEIGHT-INDIRECT"),
        (scale_of_shape_1, "rtx1.7", "SCALE-SHAPE1"),
    ],
)
def test_exact_fix_keeps_outputs(g, make, target, code):
    proto = make(g)
    fixed = qdqtool.fix(proto, target, [code])
    assert codes(fixed.before) - codes(fixed.after) >= {c.code for c in fixed.applied} == {code}
    assert_equal_outputs(proto, fixed.proto)


def pair_only(zero, integer, scale=0.05):
    g = Graph()
    y = g.pair(g.op("Neg", g.input(1, 16, 8, 8), "neg"), "p", scale, zero=zero, integer=integer)
    y = g.op("Conv", [y, g.weights("w", (16, 16, 1, 1), "qdq")], "c", kernel_shape=[1, 1])
    return g.model(y, "p.DQ:0")


def test_fix_keeps_dead_channels_zero(g):
    weights = np.random.default_rng(0).normal(0, 0.3, (16, 16, 1, 1)).astype(np.float32)
    weights[3] = 0
    proto = convolution_of(
        g, g.pair(g.const("w", weights), "wq", np.abs(weights).max(axis=(1, 2, 3)) / 127, axis=0)
    )
    assert "SCALE-NONPOS" in codes(qdqtool.predict(proto, "trt8.5"))
    fixed = qdqtool.fix(proto, "trt8.5")
    assert [c.code for c in fixed.applied] == ["SCALE-NONPOS"]
    assert np.all(run(fixed.proto, x=image(1, 16, 8, 8))[0][:, 3] == 0)


def test_fix_stores_integers_without_zero_point(g):
    stored = np.random.default_rng(0).integers(0, 256, (16, 16, 1, 1)).astype(np.uint8)
    parameters = {"axis": 0, "zero": 128, "integer": np.uint8}
    proto = convolution_of(g, g.dq(g.const("w", stored), "wdq", np.full(16, 0.01), **parameters))
    fixed = qdqtool.fix(proto, "trt10")
    model = Model(fixed.proto)
    value = model.constant(model.node("wdq").input(0))
    assert value.dtype == np.int8 and np.array_equal(value.astype(int), stored.astype(int) - 128)
    assert_equal_outputs(proto, fixed.proto, atol=1e-5)


@pytest.mark.parametrize(
    ("zero", "integer", "reach"),
    [(0, np.uint8, 255), (3, np.int8, 131), (100, np.uint8, 155), (128, np.uint8, 127)],
)
def test_asymmetric_pairs_get_the_scale_that_holds_their_range(zero, integer, reach):
    fixed = qdqtool.fix(pair_only(zero, integer), "trt8.5")
    assert {c.code for c in fixed.applied} <= {"ZP-NONZERO", "ZP-UINT8"} and fixed.applied
    assert not {"ZP-NONZERO", "ZP-UINT8"} & codes(fixed.after)
    x = image(1, 16, 8, 8)
    # A range from 0 clips as a Relu.
    expected = quantize(np.maximum(-x, 0) if reach == 255 else -x, 0.05 * reach / 127, 0, -128, 127)
    assert np.allclose(run(fixed.proto, x=x)[1], expected, atol=1e-6)


def test_added_relu_takes_no_time_in_the_float_network():
    """The FP16 time is that of the network before quantization, which lacks the added Relu."""
    proto = pair_only(0, np.uint8)
    fixed = qdqtool.fix(proto, "trt8.5")
    assert [n.op_type for n in fixed.proto.graph.node].count("Relu") == 1
    assert [n.values["count"] for n in fixed.notes if n.code == "relus-added"] == [1]
    before, after = (qdqtool.predict(model, gpu="T4").time for model in (proto, fixed.proto))
    assert before["float"]["total_ms"] == after["float"]["total_ms"]


def test_fix_quantizes_weights_for_each_channel(g):
    x = g.input(1, 16, 8, 8)
    y = g.conv(x, "slow", 16, weights="float", k=1)
    slow = g.op("Mul", [y, g.op("Sigmoid", y, "s")], "m")
    proto = g.model(g.conv(x, "c", 16, weights="float", k=1), slow)
    on_request, fixed = (qdqtool.fix(proto, "trt8.5", only) for only in (["W-NO-DQ"], []))
    assert {c.node for c in on_request.applied} == {"c", "slow"}  # SiLU is then a separate kernel
    assert [c.code for c in fixed.applied] == ["W-NO-DQ"] and not fixed.before.summary()["int8"]
    assert [c.name for c in fixed.after.convolutions if c.is_int8] == ["c"]
    weights, x = Model(proto).constant("c.weight")[:, :, 0, 0], image(1, 16, 8, 8)
    scale = (np.abs(weights).max(axis=1, keepdims=True) / 127).astype(np.float32)
    rounded = np.rint(weights / scale) * scale
    wanted = np.einsum("oi,nihw->nohw", rounded, quantize(x, 0.1, 0, -128, 127))
    assert np.allclose(run(fixed.proto, x=x)[0], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("fp8", "channels", "nodes"),
    [(False, 16, ["c", "fc"]), (True, 32, ["c", "fc"]), (True, 16, ["fc"])],
)
@pytest.mark.parametrize("target", ["trt10", "rtx1.7"])
def test_weights_get_the_format_of_the_input(fp8, channels, nodes, target):
    """FP8 convolutions of 16 channels are slow. A Flatten may be between the DQ and the Gemm."""
    g = Graph(opset=19, fp8=fp8)
    x = g.relu(g.conv(g.input(1, channels, 8, 8), "c", channels, weights="float"), "r")
    y = g.op("Flatten", g.pair(g.op("GlobalAveragePool", x, "pool"), "p", 0.02), "flat")
    model = g.model(g.op("Gemm", [y, g.weights("fc", (channels, 32), "float")], "fc"))
    promised = {f.node for f in qdqtool.predict(model, target).findings if f.automatic}
    fixed = qdqtool.fix(model, target, only=["W-NO-DQ"])
    assert sorted(c.node for c in fixed.applied) == nodes and promised >= set(nodes)
    assert len(nodes) == 2 or not {"c", "FP8-SLOW"} & (promised | codes(fixed.after))
    for node, axes in [("c", (1, 2, 3)), ("fc", 0)][-len(nodes) :]:
        largest = np.abs(Model(model).constant(f"{node}.weight")).max(axis=axes)
        scales = Model(fixed.proto).constant(f"{node}/weight_scale")
        assert np.allclose(scales * (448 if fp8 else 127), largest)


def test_fix_counts_the_images_of_a_fixed_batch(g, tmp_path):
    write_pictures(tmp_path, 3, 16, 16)
    y = g.conv(g.pair(g.input(2, 3, 16, 16), "q", 0.1), "c", 16, weights="float")
    assert qdqtool.fix(g.model(y), data=tmp_path).samples == 3


def test_fix_folds_batch_norm_after_conv_transpose(g):
    y = g.conv(g.input(1, 16, 8, 8), "ct", 16, k=2, stride=2, op="ConvTranspose", weights="qdq")
    proto = g.model(g.conv(g.relu(g.bn(y, "bn"), "r"), "next", 16, scale=0.2))
    fixed = qdqtool.fix(
        proto, "trt8.5", only=["CT-BN"]
    )  # CT-AXIS would give up a bit of the weights
    assert "CT-BN" in {c.code for c in fixed.applied} and "bn" not in {
        n.name for n in fixed.proto.graph.node
    }
    assert_equal_outputs(proto, fixed.proto, atol=0.3)
    assert fixed.after.convolution("ct").int8_in_int8_out


@pytest.mark.parametrize(("behind", "pooled"), [(0.3, False), (None, False), (0.3, True)])
@pytest.mark.parametrize("dedicated", [True, False])
def test_pair_inside_silu_is_moved_or_removed(g, behind, pooled, dedicated):
    """If the scales of the consumers cannot be shared, c0 needs the moved pair to write INT8."""
    c0 = g.conv(g.input(1, 16, 8, 8), "c0", 16)
    y = x = g.pair(c0, "inner", 0.3)
    if dedicated:  # each consumer has a pair of its own
        x = g.pair(c0, "inner2", 0.3)
    m = g.op("Mul", [x, g.pair(g.op("Sigmoid", y, "sig"), "gate", 0.008)], "mul")
    outputs = [g.conv(m, "c1", 16, scale=behind)]
    if pooled:
        outputs.append(g.conv(g.pool(g.pair(m, "other", 0.2), "pool"), "c2", 16, scale=0.05))
    fixed = qdqtool.fix(g.model(*outputs), "trt8.5")
    assert (
        {c.code for c in fixed.applied}
        == {"SILU-INNER-Q"}
        <= codes(fixed.before) - codes(fixed.after)
    )
    model = Model(fixed.proto)
    assert {n.op for n in model.consumers(model.node("c0").output)} == {"Sigmoid", "Mul"}
    assert fixed.after.convolution("c0").int8_in_int8_out
    onnx.checker.check_model(fixed.proto, full_check=True)


def test_pair_moves_before_pad(g):
    x = g.relu(g.input(1, 16, 8, 8), "r")
    y = g.op("Pad", [x, g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))], "pad")
    proto = g.model(g.conv(y, "c", 16))
    changed = apply_site(Model(proto), pairs.find_pairs_after_pads)
    assert [n.name for n in changed.nodes if n.op == "Pad"] == ["pad"]
    assert changed.producers[changed.node("pad").input(0)].op == "DequantizeLinear"
    assert_equal_outputs(proto, changed.proto)


@pytest.mark.parametrize(("float_layers", "applied"), [(0, []), (1, ["FLOAT-FP32"])])
@pytest.mark.parametrize(("fp8", "target"), [(False, "trt11"), (True, "trt10")])
def test_float_layers_become_fp16_by_default_if_some_are_not_quantized(
    float_layers, applied, fp8, target
):
    g = Graph(opset=19, fp8=fp8)
    y = g.input(1, 16, 8, 8)
    for i in range(6):
        y = g.relu(g.conv(y, f"c{i}", 16), f"r{i}")
    for i in range(float_layers):
        y = g.conv(y, f"f{i}", 16, scale=None, weights="float")
    assert [c.code for c in qdqtool.fix(g.model(y), target).applied] == applied


def test_float_layers_become_fp16_for_strongly_typed_targets():
    fixed = qdqtool.fix(residual("own"), "trt11", ["FLOAT-FP32"])
    assert (
        {c.code for c in fixed.applied}
        == {"FLOAT-FP32"}
        <= codes(fixed.before) - codes(fixed.after)
    )
    assert {t.data_type for t in fixed.proto.graph.initializer if t.name.endswith(".scale")} == {
        onnx.TensorProto.FLOAT16
    }


def test_errors_refer_to_the_float_network_with_new_weights(g):
    """The scale of the weights is so small that most weights are clipped."""
    weights, x = image(16, 16, 1, 1), image(1, 16, 8, 8)
    pairs = [g.pair(g.input(1, 16, 8, 8), "in"), g.pair(g.const("w", weights), "w", 0.0003)]
    proto = g.model(g.op("Conv", pairs, "c"))
    fixed = qdqtool.fix(proto, only=["W-SCALE"], inputs={"x": x})
    step = np.abs(weights).max() / 127
    expected = np.einsum("oi,nihw->nohw", (np.rint(weights / step) * step)[:, :, 0, 0], x)
    outputs = [run(model, x=x)[0] for model in (proto, fixed.proto)]
    errors = [np.std(output - expected) / np.std(expected) for output in outputs]
    assert [fixed.noise_before, fixed.noise_after] == pytest.approx(errors, rel=0.02)


def test_fix_of_a_head_only_on_request(g):
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    moved = g.op("Transpose", g.pair(g.op("Sigmoid", stem, "s"), "p", 0.01), "t", perm=[0, 1, 3, 2])
    proto = g.model(g.conv(moved, "box", 16, k=1), g.conv(stem, "score", 16, k=1))
    assert {change.code for change in qdqtool.fix(proto, "trt8.5").applied} <= {"W-SCALE"}
    fixed = qdqtool.fix(proto, "trt8.5", ["HEAD-QUANT"])
    assert {c.node for c in fixed.applied} == {"box", "score"}
    assert "W-NO-DQ" not in codes(fixed.after)
    assert not fixed.after.convolution("box").is_int8 and fixed.after.convolution("stem").is_int8


def test_fix_that_a_float16_scale_prevents_is_tried_in_float32():
    g = Graph(opset=19, half=True)
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r")
    fixed = qdqtool.fix(g.model(g.conv(x, "c1", 16, weights="float")), "trt8.5")
    assert [c.code for c in fixed.applied] == ["SCALE-FP16", "W-NO-DQ"]


# Findings with a fix ------------------------------------------------------------------------------


def test_each_refusal_class_has_one_step():
    """A remaining conversion has two possible causes, and one step for each.

    No step handles `AxisOpset` and `FakeQuantizers`: `fix` repairs these models before the steps.
    """
    taken = Counter(kind for step in (*STEPS, *MODEL_STEPS) for kind in step.reason_types)
    assert taken.keys() | {AxisOpset, FakeQuantizers} == {
        kind for kind in reason_classes() if any(rule.is_attempted for rule in kind.rules)
    }
    assert {kind: times for kind, times in taken.items() if times > 1} == {RemainingConversion: 2}
    proto = model_of("RequantizeFusion/into-convolution")
    prediction = qdqtool.predict(proto, "trt10")
    assert not codes(prediction) & {"DOUBLE-QDQ", "CONVERSION"}
    assert any(isinstance(r, ScalesDiffer) for r in prediction.refusals)
    fixed = qdqtool.fix(proto, "trt10")
    assert {c.code for c in (*fixed.applied, *fixed.refused)} <= {"FLOAT-FP32"}


@pytest.mark.parametrize(
    ("target", "times"),
    slow_after(2, [("trt8.5", 1), ("rtx1.7", 1), ("trt10", 2), ("trt8.4", 1), ("trt11", 1)]),
)
def test_each_automatic_finding_is_tried(target, times):
    """A step finds the place of each automatic finding.

    `fix` tries the code on the first `times` models that have such a finding.
    """
    promised: Counter[str] = Counter()
    chosen, whole = target_named(target), {code for step in MODEL_STEPS for code in step.codes}
    for proto, view, prediction in zip(models(), views(), predictions(target), strict=True):
        marked = {(f.code, f.node) for f in prediction.findings if f.automatic}
        steps = [s for s in STEPS if any(code in s.codes for code, _ in marked)]
        assert {(code, node) for code, node in marked if code not in whole} <= {
            a
            for step in steps
            for s in step.find_sites(view, chosen, prediction, step.codes)
            for a in s.findings
        }
        for code in {code for code, _ in marked}:
            promised[code] += 1
            if promised[code] <= times:
                done = qdqtool.fix(proto, target, [code])
                assert code in {c.code for c in (*done.applied, *done.refused)}
    assert len(promised) >= (4 if chosen.is_rtx else 12)


def crossed(pooled):
    g = Graph()
    x = g.input(1, 16, 8, 8)
    parts = [g.pair(g.conv(g.pair(x, f"in{i}"), f"c{i}", 16), f"part{i}", 0.1) for i in range(2)]
    y = g.pair(g.op("Concat", parts, "cat", axis=1), "whole", 0.1)
    g.channels[y] = 32
    y = g.pair(g.pool(y, "pool") if pooled else y, "behind", 0.3)
    g.channels[y] = 32
    return g.model(g.op("Softmax", g.conv(y, "c", 16, scale=None), "end"))


@pytest.mark.parametrize(
    ("proto", "code", "node"),
    [
        (crossed(True), "POOL-SCALE", "pool"),
        (crossed(False), "DOUBLE-QDQ", "behind.Q"),
        (GRAPHS["scales-differ"](), "DOUBLE-QDQ", "end.in.Q"),
    ],
)
@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_change_has_code_and_node_of_finding(proto, code, node, target):
    (found,) = (
        f for f in qdqtool.predict(proto, target).findings if f.automatic and f.code != "FLOAT-FP32"
    )
    assert (found.code, found.node) == (code, node)
    for only in ((), (code,)):
        fixed = qdqtool.fix(proto, target, only)
        assert [(c.code, c.node) for c in fixed.applied] == [(code, node)]
        assert code not in codes(fixed.after)


def test_fix_reports_unfixed_places():
    """Weights that are a network input cannot be folded. Weights after an Identity can."""
    proto = GRAPHS["weights-not-constant"]()
    assert not qdqtool.fix(proto, "trt8.5").refused
    fixed = qdqtool.fix(proto, "trt8.5", ["W-NONCONST", "ADD-BOTH"])
    (found,) = (f for f in fixed.before.findings if f.code == "W-NONCONST")
    (change,) = fixed.refused
    assert (change.code, change.node, change.what) == ("W-NONCONST", found.node, found.fix)
    assert change.why_not and not found.automatic and not fixed.applied
    assert [n.values["finding"] for n in fixed.notes if n.code == "code-not-found"] == ["ADD-BOTH"]


def test_fix_refuses_changes_that_make_outputs_worse(monkeypatch):
    monkeypatch.setattr("qdqtool.fixing.judge.is_growth_permitted", lambda *_, **__: False)
    proto = FAMILIES["residual"](50)
    fixed = qdqtool.fix(proto, "trt8.5")
    assert not fixed.applied and fixed.proto == proto
    assert "distance-grows" in {c.why_not.code for c in fixed.refused}


def test_later_fix_refuses_what_the_outputs_on_images_refused(monkeypatch):
    """Without the record, the second call would measure the error from the new model."""
    with monkeypatch.context() as patch:
        patch.setattr("qdqtool.fixing.judge.is_growth_permitted", lambda *_, **__: False)
        proto = qdqtool.fix(residual("float"), "trt8.5", inputs={"x": image(1, 16, 16, 16)}).proto
    assert not any(f.automatic for f in qdqtool.predict(proto, "trt8.5").findings)
    for model in (proto, qdqtool.fix(proto, "trt8.5", ["ADD-BOTH"]).proto):
        assert {c.why_not.code for c in qdqtool.fix(model, "trt8.5").refused} == {"refused-earlier"}
    fixed = qdqtool.fix(proto, "trt8.5", ["SKIP-FLOAT"])
    assert fixed.applied and not fixed.proto.metadata_props


# Reasons -----------------------------------------------------------------------------------------


def test_fix_compares_on_given_inputs():
    with pytest.raises(DataError, check=has("missing-input", parameter="inputs", node="x")):
        qdqtool.fix(residual("float"), inputs={"y": image(1)})
    with pytest.raises(DataError, check=has("wrong-rank", parameter="inputs", node="x")):
        qdqtool.fix(residual("float"), inputs={"x": image(1, 16)})
    fixed = qdqtool.fix(residual("float"), inputs={"x": image(1, 16, 16, 16)})
    assert fixed.applied and fixed.noise_before is not None and fixed.noise_before > 0


def test_fixed_model_is_saved_with_the_predicted_findings(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(shared_model(), path)
    fixed = qdqtool.fix(path, "trt8.5", ["W-SHARED"])
    with pytest.raises(QdqtoolError, match=r"model\.onnx"):
        fixed.save(path)
    fixed.save(tmp_path / "fixed.onnx")
    again = qdqtool.predict(tmp_path / "fixed.onnx", "trt8.5")
    assert codes(again) == codes(fixed.after) and "W-SHARED" in codes(
        qdqtool.predict(path, "trt8.5")
    )
    assert fixed.ok is all(f.severity != "error" for f in again.findings)
    places = len(fixed.before.findings) - len(fixed.after.findings)
    assert fixed.fixed_places().total() == places
    assert f": {places} place" in repr(fixed) and "by 1 change, 0 refused>" in repr(fixed)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("SKIP-FLAOT", "unknown-finding-code"),
        ("CH-ALIGN", "no-automatic-fix"),
        ("INPUT-CONVERSION", "no-automatic-fix"),
    ],
)
def test_fix_refuses_codes_without_a_fix(code, cause):
    with pytest.raises(QdqtoolError, check=has(cause, code, parameter="only")):
        qdqtool.fix(residual("float"), only=[code])


def test_fix_refuses_a_float_model(g):
    with pytest.raises(ModelError, check=has("not-quantized")):
        qdqtool.fix(g.model(g.relu(g.input(1, 16, 8, 8), "r")))


def test_fix_compares_in_front_of_a_plugin():
    proto = residual("float")
    last = proto.graph.output[0].name
    proto.graph.node.append(onnx.helper.make_node("EfficientNMS_TRT", [last], ["boxes"], "nms"))
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("boxes", 1, None))
    fixed = qdqtool.fix(proto, "trt8.5")
    assert [c.code for c in fixed.applied] == ["SKIP-FLOAT"]
    assert [n.values["nodes"] for n in fixed.notes if n.code == "compared-in-front"] == [["nms"]]


def test_fix_refuses_changes_of_a_model_that_does_not_run():
    proto = residual("float")
    next(n for n in proto.graph.node if n.name == "c0").attribute.append(
        onnx.helper.make_attribute("unheard_of", 1)
    )
    fixed = qdqtool.fix(proto, "trt8.5")
    why = fixed.refused[0].why_not  # with onnxruntime's message
    assert not fixed.applied and why.code == "not-comparable" and "unheard_of" in why


@pytest.mark.parametrize("target", ["trt8.5", "rtx1.7"])
@pytest.mark.parametrize("zero", [np.zeros(0, np.uint8), None])
def test_quantizers_without_values_are_left_alone(g, zero, target):
    """An empty zero point, and a scale without a name."""
    given = [g.const("s", np.float32(0.1)), g.const("z", zero)] if zero is not None else [""]
    q = g.op("QuantizeLinear", [g.input(1, 16, 8, 8), *given], "q")
    proto = g.model(g.conv(g.op("DequantizeLinear", [q, *given], "dq"), "c", scale=None))
    assert qdqtool.predict(proto, target).convolutions and qdqtool.fix(proto, target).applied == []


@pytest.mark.parametrize(("count", "axis"), [(16, 0), (8, 1), (5, 0), (8, 9), (8, -5), (0, 0)])
@pytest.mark.parametrize("parameters", ["zero point", "negative scale", "pair"])
def test_scales_that_do_not_fit_their_tensor_are_left_alone(g, count, axis, parameters):
    weights = g.const("w.stored", np.ones((8, 16, 1, 1), np.int8))
    scale = np.full(count, -0.1 if parameters == "negative scale" else 0.1, np.float32)
    zero = np.full(count, 3 if parameters == "zero point" else 0, np.int8)
    parameters = [g.const("w.s", scale), g.const("w.z", zero)]
    dq = g.op("DequantizeLinear", [weights, *parameters], "w.dq", axis=axis)
    x = g.pair(g.input(1, 16, 8, 8), "in", 0.05)
    assert qdqtool.fix(g.model(g.op("Conv", [x, dq], "conv", kernel_shape=[1, 1]))).applied == []


# On random Q/DQ networks a fix never makes the prediction worse, and the fixed model is valid.

SCALES = (0.02, 0.05, 0.05, 0.11)


@st.composite
def networks(draw):
    g = Graph(seed=draw(st.integers(0, 99)))
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "stem", 8), "stem.r")
    for i, kind in enumerate(
        draw(
            st.lists(
                st.sampled_from(("plain", "residual", "concat", "pool", "silu", "split")),
                min_size=2,
                max_size=4,
            )
        )
    ):

        def scale():
            return draw(st.sampled_from(SCALES))

        def maybe(tensor, name):
            return g.pair(tensor, name, scale()) if draw(st.booleans()) else tensor

        y = g.conv(x, f"{i}a", 8, scale=scale())
        if kind == "plain":
            x = g.relu(maybe(y, f"{i}p"), f"{i}r")
        elif kind == "residual":
            y = g.conv(g.relu(y, f"{i}r"), f"{i}b", 8, scale=scale())
            x = g.relu(g.add(maybe(y, f"{i}y"), maybe(x, f"{i}x"), f"{i}s"), f"{i}rs")
        elif kind == "concat":
            both = g.concat([maybe(g.relu(y, f"{i}r"), f"{i}y"), maybe(x, f"{i}x")], f"{i}c")
            x = g.relu(g.conv(both, f"{i}b", 8, scale=scale()), f"{i}rb")
        elif kind == "pool":
            x = g.pool(maybe(g.relu(y, f"{i}r"), f"{i}y"), f"{i}m", k=3, stride=1)
        elif kind == "silu":
            inner = maybe(y, f"{i}y")
            x = g.op("Mul", [inner, g.op("Sigmoid", inner, f"{i}g")], f"{i}m")
        else:
            y = g.relu(y, f"{i}r")
            low, high = g.slice(y, f"{i}l", 0, 4), g.slice(y, f"{i}h", 4, 8)
            x = g.concat([maybe(low, f"{i}q"), high], f"{i}c")
    return g.model(g.conv(x, "last", 8, scale=draw(st.sampled_from(SCALES))))


def worth(prediction):
    summary = prediction.summary()
    errors = sum(f.severity == "error" for f in prediction.findings)
    return -errors, summary["int8"], summary["int8_to_int8"], -summary["conversions"]


def marked_places(prediction):
    return {(f.code, f.node) for f in split_fixable(prediction.findings)[0]}


@given(networks())
@settings(max_examples=settings.default.max_examples // 2)  # each is fixed three times
def test_fixed_model_is_valid_and_not_worse(proto):
    before = proto.SerializeToString(deterministic=True)
    fixed = qdqtool.fix(proto, "trt8.5")
    assert proto.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(fixed.proto, full_check=True)
    assert all(b >= a for a, b in zip(worth(fixed.before), worth(fixed.after), strict=True))
    assert [i.name for i in fixed.proto.graph.input] == [i.name for i in proto.graph.input]
    assert [o.name for o in fixed.proto.graph.output] == [o.name for o in proto.graph.output]
    assert all(c.why_not for c in fixed.refused) and not any(c.why_not for c in fixed.applied)
    assert fixed.noise_before is None or np.isfinite(fixed.noise_after)
    for again in (proto, fixed.proto):
        assert qdqtool.fix(again, "trt8.5").proto.SerializeToString(
            deterministic=True
        ) == fixed.proto.SerializeToString(deterministic=True)


@given(networks(), st.sampled_from(["trt8.5", "trt10"]))
@example(network(117), "trt8.5")  # W-SCALE: new scales of some weights show another misfit
@example(network(158), "trt8.5")  # ACT-INNER-Q: a moved pair adds a conversion
@example(network(207), "trt8.5")  # SKIP-FLOAT, and ACT-INNER-Q that makes an output float
@example(network(359), "trt8.5")  # SCALE-FP16: the outputs differ by the rounding of float16
@example(network(358), "trt8.5")  # CT-AXIS: float activations, so only the weights have an error
@example(network(212), "trt8.5")  # ADD-BOTH: a removed pair makes an output float
@example(network(1120), "trt10")  # W-SCALE: one of the misfits is of stored integers
def test_fix_keeps_the_promises_of_predict(proto, target):
    fixed, promised = qdqtool.fix(proto, target), marked_places(qdqtool.predict(proto, target))
    assert not promised & {(f.code, f.node) for f in fixed.after.findings}
    assert not marked_places(qdqtool.predict(fixed.proto, target))
    assert not qdqtool.fix(fixed.proto, target).applied


def test_fix_command_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(residual("own", conv_side=True), tmp_path / "model.onnx")
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr("qdqtool.util.progress.time.monotonic", lambda: float(next(clock)))
    assert cli.run(["fix", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "fixed.onnx")]) == 0
    lines = [x for x in capsys.readouterr().err.splitlines() if "attempts to fix" in x]
    assert lines and lines[0].startswith("qdqtool: attempts to fix: 0 after")
