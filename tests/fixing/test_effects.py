from dataclasses import replace

import numpy as np
import pytest
from onnx import numpy_helper

import qdqtool
from qdqtool.fixing import weights
from qdqtool.fixing.api import fix
from qdqtool.fixing.common_scale import CommonScale, ReplacedScale, ScaleHistory
from qdqtool.fixing.gains import NO_GAIN, find_objection, find_worsening_changes
from qdqtool.fixing.savings import add_fix_savings
from qdqtool.fixing.site import FixCriteria
from qdqtool.formats.annotations import ModelReview, to_sarif
from qdqtool.formats.fix_text import render
from qdqtool.formats.time_text import describe_saving
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import read_params
from qdqtool.patterns.view import View
from qdqtool.reasons.finding import Severity
from qdqtool.reasons.residuals import ResidualFloat
from qdqtool.timing.estimate import TimeEstimate, estimate_time
from qdqtool.timing.gpus import find_gpu
from qdqtool.trt.targets import strongly_typed, target_named
from qdqtool.util.text import round_significant
from tests.fixing.steps import apply_site, find_sites
from tests.fixing.test_compare import chain_of_silus
from tests.insertion.nets import run
from tests.trt import evidence
from tests.trt.builder import Graph
from tools.fuzz.fp8 import convert_to_fp8
from tools.growth.families import Net, convolutions

AIM = FixCriteria((ResidualFloat,), noise_factor=1.0)


def remove_pairs(count: int, places: list[int]) -> tuple[Model, Model, list[set[int]]]:
    model = Model(convolutions(6 * count))
    editor, edited = Editor(model.copy()), []
    for place in places:
        dq = model.producer([n for n in model.nodes if n.op == "Conv"][place].input(0))
        editor.edited = set()
        editor.remove_pairs(model.producer(dq.input(0)), [dq])
        edited.append(editor.edited)
    return model, editor.finish(), edited


@pytest.mark.parametrize(("places", "other"), [([2], 6), ([1, 6], 4), ([0, 3, 7], 5)])
def test_culprits_are_next_to_lost_convolutions(places: list[int], other: int) -> None:
    model, candidate, edited = remove_pairs(9, places)
    harmless = [n for n in model.nodes if n.op == "Conv"][other]
    before, after = qdqtool.predict(model, "trt8.5"), qdqtool.predict(candidate, "trt8.5")
    assert after.summary()["int8"] == before.summary()["int8"] - len(places)
    changes = [*edited, {harmless.index}]
    culprits = find_worsening_changes(model, candidate, changes, before, after, AIM)
    assert set(culprits) == set(range(len(places)))


def test_change_without_gain_is_refused() -> None:
    model, candidate, edited = remove_pairs(9, [4])
    predictions = qdqtool.predict(model, "trt8.5"), qdqtool.predict(candidate, "trt8.5")
    changes = [*edited, edited[0]]
    assert set(find_worsening_changes(model, candidate, changes, *predictions, AIM)) == {0, 1}
    prediction = qdqtool.predict(convolutions(12), "trt8.5")
    assert find_objection(prediction, prediction, AIM) == NO_GAIN


def concats(count: int, apart: set[int]):
    net = Net()
    for name, value in (("w", np.eye(8)), ("w16", np.concatenate([np.eye(8), np.eye(8)], 1) / 2)):
        weights = value.astype(np.float32)[:, :, None, None]
        net.weights[name] = numpy_helper.from_array(weights, name)
    ends = []
    for place in range(count):
        scales = 0.01, 2.0 if place in apart else 0.011
        parts = [net.pair(net.conv("x", 0.01), scale) for scale in scales]
        joined = net.pair(net.add("Concat", *parts, axis=1), 0.01)
        ends.append(net.add("Conv", joined, net.pair("w16", 0.25)))
        # Because of this consumer, no layer absorbs the conversion before the Concat.
        ends.append(net.add("Conv", parts[1], net.pair("w", 0.01)))
    return net.done(*ends)


@pytest.mark.parametrize("apart", [set(), {4}, set(range(0, 6, 2))])
def test_tries_depend_on_culprits_not_on_places(apart: set[int], monkeypatch) -> None:
    predictions = []

    def count(model, target):
        predictions.append(model)
        return qdqtool.predict(model, target)

    monkeypatch.setattr("qdqtool.fixing.session.predict", count)
    fixed = fix(concats(6, apart), "trt8.5", ["CONCAT-SCALE"])
    assert (len(fixed.applied), len(fixed.refused)) == (6 - len(apart), len(apart))
    assert len(predictions) <= 2 + 5 * len(apart)  # the first is of the model without fixes


def test_common_scales_state_the_loss_of_all_changes() -> None:
    first = CommonScale(0.2, (ReplacedScale("a.Q", "a", 0.1), ReplacedScale("b.Q", "b", 0.2)))
    second = CommonScale(0.5, (*(r._replace(scale=0.2) for r in first.replaced),))
    history = ScaleHistory()
    for common in (first, second):
        assert not common.find_obstacle()
        history.record(common)
    assert history.add_later(first) == history.add_earlier(second) == replace(first, scale=0.5)
    total = history.add_earlier(second)
    assert total.find_obstacle().values == {"bits": pytest.approx(np.log2(5))}
    assert total.describe().endswith(
        "instead of 0.1, 0.2 for 2 quantizers (a.Q, b.Q), at most 2.3 bits lost"
    )
    assert replace(total, scale=0.101).describe().endswith(", less than 0.1 bit lost")


TARGET = target_named("trt8.5")


def estimate_savings(model: Model, gpu: str) -> tuple[qdqtool.Prediction, TimeEstimate]:
    prediction = qdqtool.predict(model, TARGET)
    time = estimate_time(model, prediction, find_gpu(gpu), TARGET, compare=False)
    add_fix_savings(model, prediction, time, TARGET)
    return prediction, time


def test_savings_of_fixes_match_estimates() -> None:
    """A float pooling reads the last sum, so a quantized residual of this sum saves nothing."""
    proto = evidence.model("resnet18-a100-qat").copy().proto
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4  # 32 images take seconds
    del proto.graph.value_info[:]
    model = Model(proto)
    prediction, time = estimate_savings(model, "RTX 3060")
    (skips,) = time.fixes
    fixed = fix(model, TARGET, gpu="RTX 3060")
    assert skips.nodes == [change.node for change in fixed.applied] and len(skips.nodes) == 4
    assert [(c.node, c.why_not.code) for c in fixed.refused] == [("Add_244", "more-conversions")]
    assert skips.saves_ms == pytest.approx(time.total_ms - fixed.time.total_ms)
    assert time.fixed_ms == pytest.approx(fixed.time.total_ms)
    assert time.as_json()["fixes"] == [skips.as_json()]
    # The conversion at the pooling after the stem is saved too.
    savings = {(f.code, f.node): f.saves_ms for f in prediction.findings}
    assert savings["POOL-MIXED", "MaxPool_12"] > 0.5 * skips.saves_ms
    assert savings["SKIP-FLOAT", "Add_36"] and savings["SKIP-FLOAT", "Add_244"] is None


def test_refused_fix_promises_no_saving(g: Graph) -> None:
    """The pair would move before a float convolution, where it is one more Q/DQ layer."""
    y = g.pair(g.conv(g.input(1, 16, 8, 8), "c0", 16), "inner", 0.05)
    y = g.op("Mul", [y, g.pair(g.op("Sigmoid", y, "s"), "gate", 0.008)], "m")
    model = Model(g.model(g.conv(y, "c1", 16, scale=None, weights="float")))
    prediction, time = estimate_savings(model, "T4")
    assert {f.saves_ms for f in prediction.findings if f.automatic} == {None}
    assert not time.fixes and not fix(model, TARGET).applied


def test_common_scale_without_fewer_conversions_is_refused(g: Graph) -> None:
    """Each Concat in FP8 keeps its conversions with one scale as well."""
    p = g.pair(g.silu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "s0"), "p0", 0.05)
    q = g.pair(g.silu(g.conv(p, "c1", 16, scale=None), "s1"), "p1", 0.06)
    low = g.concat([p, q], "cat0")
    high = g.concat([g.resize(low, "up0"), g.resize(q, "up1")], "cat1")
    model = convert_to_fp8(
        g.model(g.conv(low, "c2", 16, scale=0.06), g.conv(high, "c3", 16, scale=0.07))
    )
    fixed, report = fix(model), qdqtool.report(model, gpu="L4").page.model
    for result in (qdqtool.predict(model, gpu="L4"), report):
        (finding,) = (f for f in result.findings if f.code == "CONCAT-SCALE")
        assert not finding.automatic and finding.saves_ms is None
    assert [(c.node, c.why_not.code) for c in fixed.refused] == [("cat1", "no-better")]


def test_fix_of_a_note_is_refused_if_it_adds_a_conversion(g: Graph) -> None:
    """Near the second sum of this C2f, SKIP-FLOAT at the first sum saves what ADD-ACT costs."""
    x = g.conv(g.input(1, 3, 32, 32), "cv1", 32)
    parts, y = [g.slice(x, "first", 0, 16)], g.slice(x, "second", 16, 32)
    for n in range(2):
        inner = g.silu(g.conv(y, f"a{n}", 16), f"as{n}")
        parts.append(g.op("Cast", y, f"cast{n}", to=1))
        y = g.add(parts[-1], g.silu(g.conv(inner, f"b{n}", 16), f"bs{n}"), f"sum{n}")
    model = g.model(g.conv(g.concat([*parts, y], "cat"), "cv2", 16))
    text = str(render(fix(model, only=["ADD-ACT"]), "f.onnx", 80))
    assert "Applied\n  ADD-ACT (2 changes, finding remains)" in text
    fixed = fix(model)
    assert [(c.code, c.node) for c in fixed.applied] == [("SKIP-FLOAT", "sum0")]
    assert [(c.code, c.why_not.code) for c in fixed.refused] == [("ADD-ACT", "more-conversions")]
    fixed.refused.append(replace(fixed.refused[0], why_not="another reason"))
    text = str(render(fixed, "f.onnx", 80))
    assert "Not applied\n  ADD-ACT (2)\n    - 1: another reason\n" in text
    assert "Left\n  ADD-ACT (2): reason above for 1\n" in text and text.count("ADD-ACT (") == 2


def test_pairs_that_a_convolution_fuses_keep_their_scales(g: Graph) -> None:
    """Only the pairs at the input cost a conversion."""
    x = g.pair(g.pair(g.input(1, 16, 8, 8), "a", 0.05), "b", 0.04)
    x = g.relu(g.op("Conv", [x, g.weights("c", (16, 16, 1, 1), "qdq")], "c"), "r")
    x = g.pair(g.pair(x, "d", 0.03), "e", 0.02)
    fixed = fix(g.model(g.op("Conv", [x, g.weights("end", (16, 16, 1, 1), "qdq")], "end")))
    reported = [f.node for f in fixed.before.findings if f.code == "DOUBLE-QDQ"]
    assert [change.node for change in fixed.applied] == reported == ["b.Q"]


def test_slower_common_scale_is_left_if_another_saves_more(g: Graph) -> None:
    """On this GPU, one scale costs time at `cat0`, and saves more time at `cat2`."""
    x = g.pair(g.silu(g.conv(g.input(1, 64, 160, 160), "c0", 64), "s0"), "p0", 0.055)
    y = g.pair(g.silu(g.conv(x, "c1", 64, stride=2, scale=None), "s1"), "p1", 0.0476)
    z = g.conv(g.concat([g.resize(y, "up"), x], "cat0"), "c2", 64, stride=2, scale=0.055)
    z = g.conv(g.concat([z, y], "cat1"), "c3", 80, scale=0.0476)
    z = g.pair(g.silu(z, "s3"), "p3", 0.03)
    u = g.pair(g.add(g.silu(g.conv(z, "c4", 80, scale=None), "s4"), z, "sum"), "p4", 0.04)
    v = g.pair(g.silu(g.conv(u, "c5", 64, scale=None), "s5"), "p5", 0.05)
    model = g.model(g.conv(g.concat([z, u, v], "cat2"), "c6", 64, scale=0.05))
    fixed, prediction = (f(model, gpu="Orin Nano 8GB") for f in (fix, qdqtool.predict))
    assert [(c.node, c.why_not.code) for c in fixed.refused] == [("cat0", "slower")]
    (saving,) = prediction.time["fixes"]
    fixable = [f.node for f in prediction.findings if f.automatic]
    assert fixable == saving["nodes"] == [change.node for change in fixed.applied] == ["cat2"]
    assert saving["saves_ms"] == pytest.approx(fixed.time_before_ms - fixed.time.total_ms, rel=1e-3)
    assert prediction.time["fixed_ms"] == pytest.approx(fixed.time.total_ms, rel=1e-3)


def test_fix_of_a_note_is_announced_if_it_saves_time(g: Graph) -> None:
    """Pairs of both inputs of each sum exist, but the sums read float."""
    y = g.silu(g.conv(g.input(1, 3, 64, 64), "stem", 16), "s")
    for n in range(2):
        last = g.silu(g.conv(g.relu(g.conv(y, f"a{n}", 16), f"r{n}"), f"b{n}", 16), f"s{n}")
        g.pair(last, f"residual{n}", 0.05)
        y = g.add(y, last, f"sum{n}")
    model = g.model(g.conv(y, "last", 16))
    first = fix(model, TARGET, ["SKIP-FLOAT"])
    assert "Left\n  ADD-ACT (1): not named with --only" in str(render(first, "f.onnx", 80))
    both = {("SKIP-FLOAT", "sum0"), ("ADD-ACT", "sum1")}
    for proto, places in (model, both), (first.proto, {("ADD-ACT", "sum1")}):
        fixed, prediction = fix(proto, TARGET, gpu="T4"), qdqtool.predict(proto, TARGET, gpu="T4")
        marked = {(f.code, f.node): f for f in prediction.findings if f.automatic}
        assert marked.keys() == {(c.code, c.node) for c in fixed.applied} == places
        assert f"Fixed {len(places)} place" in str(render(fixed, "f.onnx", 80))
        assert {f.severity for f in marked.values()} == {"warning"}
        assert prediction.time["fixed_ms"] == round_significant(fixed.time.total_ms)
        saved_ms = fixed.time_before_ms - fixed.time.total_ms
        assert [f.saves_ms for f in marked.values()] == pytest.approx(
            [saved_ms] * len(marked), abs=1e-5
        )
        times = [estimate_savings(Model(proto), "T4")[1]]
        text = describe_saving([marked["ADD-ACT", "sum1"]], times)
        assert ("together with SKIP-FLOAT" in text) == (places == both)
        times[0].total_ms *= 1000
        text = describe_saving([marked["ADD-ACT", "sum1"]], times)
        assert text == "less than 0.2 % of the time by qdqtool fix (estimated)"


@pytest.mark.parametrize(("gpu", "is_slower"), [("Orin Nano 8GB", True), ("RTX 4090", False)])
def test_slower_fix_needs_a_request(g: Graph, gpu: str, is_slower: bool) -> None:
    """With one scale, copies of the resized tensors replace conversions before each Resize."""
    x = g.pair(g.silu(g.conv(g.input(1, 64, 160, 160), "c0", 64), "s0"), "p0", 0.055)
    ends = []
    for i, scale in enumerate((0.0476, 0.0466)):
        y = g.silu(g.conv(x, f"a{i}", 64, stride=2, scale=None), f"s1{i}")
        y = g.pair(y, f"p1{i}", scale)
        z = g.concat([g.resize(y, f"up{i}"), x], f"cat{i}")
        z = g.conv(z, f"b{i}", 64, stride=2, scale=0.055)
        ends.append(g.conv(g.concat([z, y], f"last{i}"), f"d{i}", 64, scale=scale))
    model = Model(g.model(g.add(*ends, "sum")))
    fixed, requested = fix(model, gpu=gpu), fix(model, only=["CONCAT-SCALE"], gpu=gpu)
    text, note = str(render(fixed, "f.onnx", 80)), f"would make the model slower on Jetson {gpu}."
    review = ModelReview("f.onnx", "trt10", fixed.after, [], [fixed.time])
    assert (note in str(to_sarif([review]))) == is_slower
    assert text.count("CONCAT-SCALE (2):") == 2 * is_slower  # not applied, and left
    assert is_slower == any(
        f"CONCAT-SCALE (2 places) {note}" in n
        for n in qdqtool.predict(model, gpu=gpu).time["notes"]
    )
    assert [c.why_not.code for c in fixed.refused] == ["slower"] * is_slower
    assert len(fixed.applied) + len(fixed.refused) == len(requested.applied) == 1
    assert (requested.time.total_ms > requested.time_before_ms) == is_slower
    assert ("warning" in str(render(requested, "f.onnx", 80))) == is_slower
    other = fix(model, only=["SILU-INNER-Q"], gpu=gpu)
    other.time_before = replace(other.time_before, fp32_layers=0)
    before, after = str(render(other, "f.onnx", 80)).split("\n  After ")
    assert "FP32" not in before and "FP32 output" in after
    assert ("--only CONCAT-SCALE" in after) != is_slower
    for result in (
        qdqtool.predict(model, gpu=gpu),
        page := qdqtool.report(model.proto, gpu=gpu).page.model,
    ):
        findings = [f for f in result.findings if f.code in ("CONCAT-SCALE", "CONVERSION")]
        largest = max(f.saves_ms or 0 for f in findings)
        assert any(f.automatic for f in findings) == (largest > 0) != is_slower
        assert largest <= fixed.time_before_ms - fixed.time.total_ms + 1e-5
    assert [note in f.fix for f in page.findings if f.code == "CONCAT-SCALE"] == [is_slower] * 2
    # TensorRT 10 does not support the GPU, so no time decides on fixes.
    assert {c.code for c in fix(model, gpu="AGX Xavier").applied} == {
        f.code
        for f in qdqtool.predict(model, gpu="AGX Xavier").findings
        if f.automatic and f.code != "HEAD-QUANT"
    }
    for finding in [f for f in fixed.after.findings if f.code == "CONCAT-SCALE"][:1]:
        finding.severity = Severity.INFO
        assert "CONCAT-SCALE (2, including 1 note): reason" in str(render(fixed, "f.onnx", 80))


@pytest.mark.parametrize("channels", [128, 256])
def test_fix_on_request_saves_time_after_the_default_fixes(channels: int, g: Graph) -> None:
    """In FP32, INT8 saves much of a head. In FP16, it saves little, or nothing."""
    x = g.silu(g.conv(g.input(1, channels, 40, 40), "c", channels), "s")
    x = g.conv(g.pair(x, "p", 0.05), "slow", channels, scale=None, weights="float")
    model = g.model(g.conv(g.silu(x, "s1"), "end", channels, scale=None, weights="float"))
    target, gpu = strongly_typed(target_named("10.3")), "RTX 3060"
    fixed = fix(model, target, gpu=gpu).proto
    before, after = (qdqtool.predict(m, target, gpu=gpu) for m in (model, fixed))
    assert [saving["codes"] for saving in before.time["fixes"]] == [["FLOAT-FP32"]]
    assert before.time["further_fixes"] == after.time["fixes"]
    first, second = ({f.node: f.saves_ms for f in p.findings}["slow"] for p in (before, after))
    assert first == second and (first is None) == (channels == 128)


def test_savings_name_each_place_once() -> None:
    (silus,) = estimate_savings(Model(chain_of_silus(2, (0.05, 0.05))), "RTX 3060")[1].fixes
    assert silus.nodes == ["inner0.Q", "inner1.Q"]


def test_transposed_weights_with_supported_axis_are_left() -> None:
    assert find_sites(weights.find_transposed_weights, network(None)) == []
    assert [s.code for s in find_sites(weights.find_transposed_weights, network(0))] == ["CT-AXIS"]
    proven = replace(TARGET, transposed_per_channel=True)
    assert find_sites(weights.find_transposed_weights, network(1), proven) == []
    assert [s.code for s in find_sites(weights.find_transposed_weights, network(0), proven)] == [
        "CT-AXIS"
    ]


@pytest.mark.parametrize(
    ("case", "gpu"),
    [
        ("resnet18-a100-qat-residual-qgap", "RTX 3060"),
        ("resnet18-a100-qat", "P100"),
    ],
)
def test_fixes_that_save_nothing_are_left_out(case: str, gpu: str) -> None:
    assert estimate_savings(evidence.model(case), gpu)[1].fixes == []


def network(axis: int | None, form: str = "qdq", half: bool = False) -> Model:
    g = Graph(opset=19 if half else 13, half=half)
    data = g.pair(g.relu(g.input(1, 8, 6, 6), "r"), "in", 0.05)
    stored = g.weights("up", (8, 8, 2, 2), form if axis is not None else "tensor", axis or 0)
    out = g.op("ConvTranspose", [data, stored], "up", kernel_shape=[2, 2], strides=[2, 2])
    return Model(g.model(g.op("Neg", g.pair(out, "q", 0.05), "end")))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", ["qdq", "int8"])
@pytest.mark.parametrize("half", [False, True])
def test_transposed_weights_get_scale_of_largest_weight(axis: int, form: str, half: bool) -> None:
    model = network(axis, form, half)
    old = View(model).weights(model.node("up"))
    real = model.constant(old.source).astype(np.float64)
    if form == "int8":
        scales = read_params(model, old.dq).scale
        real = real * scales.reshape([-1 if i == axis else 1 for i in range(4)])
    (site,) = find_sites(weights.find_transposed_weights, model)
    assert (site.code, site.node) == ("CT-AXIS", "up")
    result = apply_site(model, weights.find_transposed_weights)
    params = read_params(result, View(result).weights(result.node("up")).dq)
    assert (params.axis, params.scale_shape) == (None, ())
    assert params.scale[0] == pytest.approx(np.abs(real).max() / 127, rel=1e-3)
    x = np.random.default_rng(0).random((1, 8, 6, 6)).astype(np.float16 if half else np.float32)
    (before,), (after,) = run(model.proto, {"x": x}), run(result.proto, {"x": x})
    # The outputs differ by a few steps of the output's quantizer.
    assert np.abs(before.astype(np.float64) - after).max() <= 0.05 * 4 and before.any()
