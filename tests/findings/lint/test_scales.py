import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.commands.cli import run
from qdqtool.findings.lint import weight_scales
from qdqtool.findings.lint.activation_scales import find_common_factor
from qdqtool.findings.report import FindingReport
from qdqtool.formats.output import as_options
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.prediction import check_activations
from qdqtool.reasons.scales import ActivationFit, ActivationScales, OutlierScales
from qdqtool.reasons.weights import WeightScales, WeightScalesCause
from tests.comparison.networks import quantize
from tests.insertion.nets import copy_model, detector, set_value, value_of
from tests.insertion.transformers import samples, vit
from tests.slow import slow_after
from tests.trt.builder import Graph

RNG = np.random.default_rng(0)
DATA = [{"x": RNG.normal(0, 1, (1, 8, 16, 16)).astype(np.float32)} for _ in range(4)]


def float_network(layers: int = 3) -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 8, 16, 16)
    for i in range(layers):
        x = g.relu(g.conv(x, f"c{i}", scale=None, weights="float"), f"r{i}")
    return g.model(x)


def with_scale(proto: onnx.ModelProto, name: str, factor: float) -> onnx.ModelProto:
    copy = copy_model(proto)
    scale = next(n.input[1] for n in copy.graph.node if n.name == name)
    set_value(copy, scale, value_of(copy, scale) * np.float32(factor))
    return copy


def reasons(
    code: str, proto: onnx.ModelProto, data: list[dict[str, np.ndarray]] | None
) -> list[Any]:
    prediction = qdqtool.predict(proto)
    if data is not None:
        check_activations(proto, prediction, data)
    assert all(f.id == i for i, f in enumerate(prediction.findings))
    return [c.reason for f in prediction.findings if f.code == code for c in f.causes]


def activation_scales(proto: onnx.ModelProto) -> ActivationScales | None:
    return next(iter(reasons("ACT-SCALE", proto, DATA)), None)


def quantizer_of_input(proto: onnx.ModelProto) -> str:
    quantizers = (n for n in proto.graph.node if n.op_type == "QuantizeLinear")
    return next(str(n.name) for n in quantizers if n.input[0] == "x")


def has_outliers(inserted: qdqtool.Insertion) -> bool:
    return any(f.code == "ACT-OUTLIER" for f in inserted.findings)


def insert_max(
    proto: onnx.ModelProto, data: list[dict[str, np.ndarray]] = DATA
) -> qdqtool.Insertion:
    return qdqtool.insert(proto, data, method="max", predict=False)


def test_scales_from_zero_fit_without_the_removed_relus(g: Graph) -> None:
    """onnxruntime removes a Relu before a quantizer whose range starts at 0.

    A convolution of 72 weights with the deviation 0.3 multiplies the mean square by 6.48. A Relu
    halves the mean square.
    """
    x, square = g.input(1, 8, 16, 16), 2.0
    for i in range(10):
        square *= 72 * 0.3**2 / 2
        x = g.conv(x, f"c{i}", scale=None, weights="float")
        x = g.pair(x, f"p{i}", 3 * square**0.5 / 255, zero=-128)
    assert activation_scales(g.model(g.conv(x, "last", scale=None, weights="float"))) is None


@pytest.mark.parametrize(
    ("offset", "zero", "scale", "fits"),
    [
        pytest.param(0.0, -128, 1 / 255, True, id="positive-fits"),
        pytest.param(0.0, -128, 0.3 / 255, False, id="positive-too-small"),
        pytest.param(0.0, 0, 1 / 255, False, id="positive-half-of-the-steps"),
        pytest.param(0.0, 127, 1 / 255, False, id="positive-no-steps"),
        pytest.param(-1.0, 127, 1 / 255, True, id="negative-fits"),
        pytest.param(-1.0, 64, 0.3 / 255, False, id="negative-too-small"),
        pytest.param(-0.2, -77, 1 / 255, True, id="mixed-fits"),
        pytest.param(-0.2, 27, 0.004, False, id="mixed-too-small"),
    ],
)
def test_zero_point_moves_the_range(
    g: Graph, offset: float, zero: int, scale: float, fits: bool
) -> None:
    shifted = [g.op("Sigmoid", [g.input(1, 8, 16, 16)], "s"), g.const("o", np.float32(offset))]
    x = g.pair(g.op("Add", shifted, "shifted"), "p", scale, zero=zero)
    reason = activation_scales(g.model(g.conv(x, "c", scale=None, weights="float")))
    steps = (1 / (1 + np.exp(-np.stack([d["x"] for d in DATA]))) + offset) / scale + zero
    clipped = float(np.mean((steps < -128.5) | (steps > 127.5)))
    reported = [f.clipped for f in reason.worst if f.used > 1] if reason else []
    assert reported == pytest.approx([] if fits else [clipped], abs=0.01)
    assert (clipped == 0) is fits


@pytest.mark.parametrize("method", ["focus", "mse", "percentile", "entropy", "max"])
def test_scales_of_insert_fit(method: str) -> None:
    assert (
        activation_scales(qdqtool.insert(float_network(), DATA, method=method, predict=False).model)
        is None
    )


@pytest.mark.parametrize(("shared", "others", "fits"), [(2, 1, True), (3, 6, True), (3, 5, False)])
def test_scale_that_a_concat_shares_fits(g: Graph, shared: int, others: int, fits: bool) -> None:
    """Two quantizers, or a third of all, may have the scale of the largest part."""
    x, tenth = g.input(1, 8, 16, 16), g.const("tenth", np.float32(0.1))
    small = [g.op("Mul", [x, tenth], f"small{i}") for i in range(1, shared)]
    joined = g.concat([g.pair(part, f"p{i}", 0.03) for i, part in enumerate([x, *small])], "cat")
    outputs = [g.conv(x, f"c{i}", scale=0.031 + i / 1000) for i in range(others)]
    assert (activation_scales(g.model(joined, *outputs)) is None) is fits


@pytest.mark.parametrize("factor", [0.25, 1 / 16])
def test_small_scale_is_reported_with_its_clipping(factor: float) -> None:
    model = insert_max(float_network()).model
    name = quantizer_of_input(model)
    (fit,) = activation_scales(with_scale(model, name, factor)).worst
    values = np.abs([d["x"] for d in DATA])
    assert fit.quantizer == name
    assert fit.clipped == pytest.approx(float(np.mean(values > 127.5 * fit.scale)), abs=2e-3)


def test_large_scale_is_reported_with_its_use() -> None:
    model = insert_max(float_network()).model
    reason = activation_scales(with_scale(model, quantizer_of_input(model), 8.0))
    assert reason is not None and reason.worst[0].used == pytest.approx(1 / 8, rel=1e-3)


def test_percentile_leaves_no_outliers() -> None:
    options: Any = {"method": "percentile", "percentile": 99.0, "predict": False}
    assert not has_outliers(qdqtool.insert(float_network(), outliers(0.005, 300.0), **options))


@pytest.mark.parametrize(
    ("used", "factor"),
    [
        ([2.0, 1.9, 2.2, 2.0, 9.0], 2.0),
        ([0.25, 0.24, 0.26], 0.25),
        ([1.0, 1.1, 0.9, 1.0], 0.0),
        ([2.0, 0.5, 1.0, 4.0], 0.0),
        ([2.0, 2.0], 0.0),
    ],
)
def test_factor_that_all_scales_share(used: list[float], factor: float) -> None:
    assert (
        find_common_factor([ActivationFit("q", 0.1, 0.0, 0.0, share) for share in used]) == factor
    )


def test_predict_command_reports_scale_of_calibration_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = insert_max(float_network()).model
    name, path, data = quantizer_of_input(model), tmp_path / "bad.onnx", tmp_path / "data.npz"
    onnx.save(with_scale(model, name, 0.2), path)
    np.savez(data, x=np.concatenate([d["x"] for d in DATA]))
    assert run(["predict", str(path), "--calib", str(data), "--fail-on", "ACT-SCALE"]) == 1
    assert f"{name} (scale" in capsys.readouterr().out.replace("\n     ", "")


def outliers(share: float, factor: float, *, channels: int = 0) -> list[dict[str, np.ndarray]]:
    """Return normal values [1, 8, 16, 16] with a share of outliers.

    Args:
        channels: Number of channels along the last axis, of which `share` are outliers. With 0,
            `share` is a share of the single values.
    """
    rng = np.random.default_rng(5)
    x = rng.normal(0, 1, (4, 1, 8, 16, 16)).astype(np.float32)
    large = rng.random(x.shape) < share
    if channels:
        large = np.resize(np.arange(channels) < round(share * channels), x.shape)
    return [{"x": sample} for sample in np.where(large, x * np.float32(factor), x)]


def tokens(data: list[dict[str, np.ndarray]], *shape: int) -> list[dict[str, np.ndarray]]:
    return [{"x": sample["x"].reshape(1, *shape)} for sample in data]


def linear(g: Graph, rows: int, columns: int) -> onnx.ModelProto:
    weights = g.const("w", RNG.normal(0, 1, (columns, 16)), np.float32)
    return g.model(g.op("MatMul", [g.input(1, rows, columns), weights], "fc"))


@pytest.mark.parametrize(
    ("share", "factor", "reported"),
    [
        (0.005, 300.0, True),
        (0.02, 300.0, True),
        (0.1, 200.0, True),
        (0.3, 150.0, True),
        (0.005, 10.0, False),
        (0.3, 10.0, False),
        (0.0, 1.0, False),
    ],
)
def test_outliers_are_reported_with_their_ratio(
    share: float, factor: float, reported: bool
) -> None:
    """The ratio is the largest value over the value below which two thirds of the values lie."""
    data = outliers(share, factor)
    inserted = insert_max(float_network(), data)
    scales = outlier_scales(inserted.model, data)
    assert has_outliers(inserted) is bool(scales) is reported
    for reason in scales:
        ratios = {q: ratio for q, _, ratio in reason.worst}
        values = np.abs([d["x"] for d in data])
        expected = pytest.approx(values.max() / np.quantile(values, 2 / 3), rel=0.02)
        assert not reason.linear and ratios[quantizer_of_input(inserted.model)] == expected


@pytest.mark.parametrize(
    ("zero", "largest", "reported"),
    [(-128, 150.0, True), (-100, 150.0, True), (100, -150.0, True), (100, 150.0, False)],
)
def test_outliers_are_compared_with_the_range_of_their_sign(
    g: Graph, zero: int, largest: float, reported: bool
) -> None:
    """With zero point 100, the range ends at 27 / 227 of the largest negative magnitude."""
    data = outliers(0.0, 1.0)
    data[0]["x"][..., 0, 0] = largest
    x = g.pair(g.input(1, 8, 16, 16), "p", 150 / (127 + abs(zero)), zero=zero)
    scales = outlier_scales(g.model(g.conv(x, "c", scale=None, weights="float")), data)
    ratio = 150 / np.quantile(np.abs([d["x"] for d in data]), 2 / 3)
    assert [r.worst[0][2] for r in scales] == pytest.approx([ratio] * reported, rel=0.02)


def test_high_scores_of_few_objects_are_no_outliers(g: Graph) -> None:
    logits = np.full((1, 8, 16, 16), -12.0, np.float32)
    logits[..., 0, 0] = 5.0
    scores = g.pair(g.op("Sigmoid", [g.input(1, 8, 16, 16)], "scores"), "p", 1 / 127)
    assert not outlier_scales(g.model(scores), [{"x": logits}])


@pytest.mark.parametrize("largest", [2000.0, 150.0])
def test_outlier_fix_has_options_to_paste_and_only_smaller_ranges(g: Graph, largest: float) -> None:
    data, x = outliers(1 / 8, 300.0), g.pair(g.input(1, 8, 16, 16), "p", largest / 127)
    ends = [g.conv(x, name, scale=None, weights="float") for name in ("c.0", "d")]
    prediction = qdqtool.predict(model := g.model(*ends))
    check_activations(model, prediction, data)
    finding = next(f for f in prediction.findings if f.code == "ACT-OUTLIER")
    fix, values = as_options(finding.fix), np.abs([d["x"] for d in data])
    steps = 127 * np.quantile(values, 2 / 3) / min(largest, values.max())
    (printed,) = re.findall(r"value is at most (\S+) of the 127 steps", finding.message)
    assert float(printed) == pytest.approx(steps, rel=0.05)
    assert r"(insert --exclude '^(c\.0|d)$')" in fix
    is_smaller = np.quantile(values, 0.999) < largest
    assert ("--method-for '^x$=percentile' --percentile 99.9" in fix) == is_smaller


@pytest.mark.parametrize(("factor", "reported"), [(100.0, True), (5.0, False)])
@pytest.mark.parametrize("share", [1 / 64, 0.05, 0.1, 0.2, 0.3])
def test_outlier_channels_of_any_share_are_reported(
    g: Graph, share: float, factor: float, reported: bool
) -> None:
    data = tokens(outliers(share, factor, channels=64), 32, 64)
    assert has_outliers(insert_max(linear(g, 32, 64), data)) is reported


def norm_and_linear(g: Graph, gains: np.ndarray, shift: np.ndarray) -> onnx.ModelProto:
    x = g.op("Add", [g.input(1, 32, 64), g.const("shift", shift, np.float32)], "shifted")
    normal = g.op("LayerNormalization", [x, g.const("gains", gains, np.float32)], "norm", axis=-1)
    moved = g.op("Reshape", [normal, g.const("to", np.asarray([1, 4, 8, 64]))], "windows")
    weights = g.const("w", RNG.normal(0, 1, (64, 16)), np.float32)
    return g.model(g.op("MatMul", [moved, weights], "fc"))


def outlier_scales(
    model: onnx.ModelProto, data: list[dict[str, np.ndarray]] | None = None
) -> list[OutlierScales]:
    return reasons("ACT-OUTLIER", model, data)


@pytest.mark.parametrize("by_gain", [True, False])
@pytest.mark.parametrize("count", [0, 1, 6, 16])
def test_outliers_after_a_normalization_are_reported_unless_smoothed(
    count: int, by_gain: bool
) -> None:
    """Outliers of one sign move the mean, and so all other channels.

    Without gains, the normalization keeps them within a few times the others.
    """
    large, data = np.arange(64) < count, tokens(outliers(0.0, 1.0), 32, 64)
    gains, shift = np.where(large & by_gain, 60.0, 1.0), np.where(large, 20.0, 0.0)
    model = norm_and_linear(Graph(17), gains, shift)
    for inserted, reported in (
        (insert_max(model, data), by_gain and count > 0),
        (qdqtool.insert(model, data, method="max", smooth=0.5, predict=False), False),
    ):
        assert has_outliers(inserted) is reported
        for count_of_samples, images in ((0, None), (4, data)):
            scales = [(r.samples, r.linear) for r in outlier_scales(inserted.model, images)]
            assert scales == [(count_of_samples, True)] * reported


@pytest.mark.parametrize(
    ("factor", "samples"),
    [
        pytest.param(None, [0], id="no-data"),
        pytest.param(0.01, [], id="channels-hardly-vary"),
        pytest.param(0.0, [0], id="zeros-say-nothing"),
    ],
)
def test_data_decides_over_gains(factor: float | None, samples: list[int]) -> None:
    large = np.arange(64) < 6
    model = norm_and_linear(Graph(17), np.where(large, 60.0, 1.0), np.zeros(64))
    data = tokens(outliers(0.0, 1.0), 32, 64)
    inserted = insert_max(model, data).model
    scale = np.where(large, factor or 0.0, 1.0 if factor else 0.0).astype(np.float32)
    images = None if factor is None else [{"x": d["x"] * scale} for d in data]
    assert [r.samples for r in outlier_scales(inserted, images)] == samples


@pytest.mark.parametrize("channels", [32, 768])
@pytest.mark.parametrize(
    ("spread", "factor", "reported"),
    [
        (0.0, 1.0, False),
        (0.5, 1.0, False),
        (1.0, 1.0, False),
        (0.0, 200.0, True),
        (0.3, 200.0, True),
    ],
)
def test_gains_that_spread_are_not_reported(
    g: Graph, channels: int, spread: float, factor: float, reported: bool
) -> None:
    """The largest of 768 lognormal gains is 17 times the median."""
    gains = np.exp(spread * RNG.normal(0, 1, channels))
    gains[:2] *= factor
    inputs = [g.input(1, 8, channels), g.const("gains", gains, np.float32)]
    x = g.pair(
        g.op("LayerNormalization", inputs, "norm", axis=-1), "x", float(4 * gains.max() / 127)
    )
    weights = g.pair(g.const("w", RNG.normal(0, 1, (channels, 4)), np.float32), "wq")
    assert bool(outlier_scales(g.model(g.op("MatMul", [x, weights], "fc")))) is reported


@pytest.mark.parametrize(("name", "rows"), [("b0.attn.v.weight", 1), ("b0.fc1.weight", 2), ("", 0)])
def test_insert_and_predict_report_the_same_outliers(name: str, rows: int) -> None:
    """Values of attention are moved before a Linear."""
    model = onnx.ModelProto.FromString(vit().SerializeToString())
    data = samples(model, 16)
    for tensor in model.graph.initializer:
        if tensor.name == name:
            value = onnx.numpy_helper.to_array(tensor).copy()
            value[:, :rows] *= 1000.0
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, name))
    inserted = qdqtool.insert(model, data, method="max", attention="int8", predict=False)
    by_insert = [c.reason for f in inserted.findings for c in f.causes]
    by_predict = outlier_scales(inserted.model, data)
    assert len(by_insert) == len(by_predict) == bool(name)
    for left, right in zip(by_insert, by_predict, strict=True):
        assert isinstance(left, OutlierScales)
        checked = len(inserted.activations) - 1  # the classifier reads too few values to check
        assert left.bad == right.bad and left.total == right.total == checked
        ratios, expected = ({q: ratio for q, _, ratio in r.worst} for r in (left, right))
        assert ratios == pytest.approx(expected, rel=0.01)


# W-SCALE: no finding for the scales of known quantizers, a finding if scales do not belong to the weights.

Array = np.ndarray


@pytest.fixture(scope="module")
def placed() -> onnx.ModelProto:
    data = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]
    choices = {"method": "max", "target": "trt8.5", "residual": "both", "losses": 0}
    return qdqtool.insert(detector(), data, predict=False, **choices).model


def weight_scales_of(proto: onnx.ModelProto) -> WeightScales | None:
    report = FindingReport("trt10")
    weight_scales.run(View(Model(proto)), report)
    causes = [c.reason for f in report.findings if f.code == "W-SCALE" for c in f.causes]
    assert len(causes) <= 1
    return causes[0] if causes else None  # type: ignore[return-value]


def rescaled(
    proto: onnx.ModelProto, change: Callable[[Array, Array, int], Array]
) -> onnx.ModelProto:
    """Return a copy with other weight scales.

    `change` gets the scales, the weights and the number of the layer, and returns new scales.
    """
    copy, pairs = with_weights(proto)
    for number, (scale, weights) in enumerate(pairs):
        old, values = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in (scale, weights))
        new = change(old, values, number).astype(np.float32).reshape(old.shape)
        scale.CopyFrom(onnx.numpy_helper.from_array(new, scale.name))
    assert len(pairs) > 20
    return copy


def reweighted(proto: onnx.ModelProto, change: Callable[[Array], Array]) -> onnx.ModelProto:
    copy, pairs = with_weights(proto)
    for _, weights in pairs:
        new = change(onnx.numpy_helper.to_array(weights)).astype(np.float32)
        weights.CopyFrom(onnx.numpy_helper.from_array(new, weights.name))
    return copy


def with_weights(
    proto: onnx.ModelProto,
) -> tuple[onnx.ModelProto, list[tuple[onnx.TensorProto, onnx.TensorProto]]]:
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    tensors = {t.name: t for t in copy.graph.initializer}
    return copy, [
        (tensors[q.input[1]], tensors[q.input[0]])
        for q in copy.graph.node
        if q.op_type == "QuantizeLinear" and q.input[0] in tensors
    ]


def largest(weights: Array) -> Array:
    return np.maximum(np.abs(weights).reshape(len(weights), -1).max(axis=1), 1e-9)


def test_scales_of_other_weights_are_reported(placed: onnx.ModelProto) -> None:
    rng = np.random.default_rng(1)
    reason = weight_scales_of(
        rescaled(placed, lambda s, w, n: s / np.exp(rng.normal(0.3, 0.9, s.shape)))
    )
    assert reason is not None and reason.cause == WeightScalesCause.OTHER_WEIGHTS
    assert reason.clipped > 0.2


def test_scales_that_clip_outliers_are_not_reported(placed: onnx.ModelProto) -> None:
    rng = np.random.default_rng(0)

    def clip(scale: Array, weights: Array, number: int) -> Array:
        quantiles = np.quantile(np.abs(weights).reshape(len(weights), -1), 0.99, axis=1)
        return np.maximum(quantiles, 1e-9) / 127

    assert (
        weight_scales_of(rescaled(reweighted(placed, lambda w: rng.standard_t(3, w.shape)), clip))
        is None
    )


@pytest.mark.parametrize(
    ("factors", "seed"),
    [
        *((lambda rng, shape: np.exp(rng.normal(0, 0.08, shape)), seed) for seed in range(3)),
        # Half of the channels keep their largest weight, the others are clipped by up to a third.
        (lambda rng, shape: np.minimum(1, rng.uniform(0.67, 1.33, shape)), 3),
    ],
    ids=["drift 0", "drift 1", "drift 2", "clipping"],
)
def test_drift_of_training_is_not_reported(
    placed: onnx.ModelProto, factors: Callable[..., Array], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    assert weight_scales_of(rescaled(placed, lambda s, w, n: s * factors(rng, s.shape))) is None


@pytest.mark.parametrize("factor", [0.5, 0.7, 2.0])
@pytest.mark.parametrize("channels", [1, 5, 1000])
def test_channels_of_one_layer_are_reported(
    placed: onnx.ModelProto, channels: int, factor: float
) -> None:
    rng = np.random.default_rng(channels)

    def change(scale: Array, weights: Array, number: int) -> Array:
        changed = scale.copy()
        changed[rng.permutation(scale.size)[:channels]] *= factor if number == 11 else 1.0
        return changed

    reason = weight_scales_of(rescaled(placed, change))
    assert reason is not None and reason.cause == WeightScalesCause.EXCEPTION
    assert len(reason.layers) == 1 and 0 < reason.channels <= channels
    assert reason.worst == pytest.approx(1 / factor, rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_layer_is_reported_amid_drift_of_training(placed: onnx.ModelProto, seed: int) -> None:
    rng = np.random.default_rng(seed)

    reason = weight_scales_of(
        rescaled(
            placed,
            lambda s, w, n: s * np.exp(rng.normal(0, 0.05, s.shape)) * (0.5 if n == 7 else 1),
        )
    )
    assert reason is not None and reason.cause == WeightScalesCause.EXCEPTION
    assert len(reason.layers) == 1


@pytest.mark.parametrize("per_channel", slow_after(1, [True, False]))
def test_scales_of_onnxruntime_are_not_reported(per_channel: bool, tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "float.onnx")
    path = quantize(
        tmp_path / "float.onnx",
        "QDQ",
        "QInt8",
        [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}],
        per_channel=per_channel,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )
    assert weight_scales_of(onnx.load(path)) is None


@pytest.mark.parametrize("factor", [2.0, 0.5, 127 / 128])
def test_factor_of_all_weight_scales_is_reported(placed: onnx.ModelProto, factor: float) -> None:
    reason = weight_scales_of(rescaled(placed, lambda s, w, n: s * factor))
    assert reason is not None and reason.cause == WeightScalesCause.FACTOR
    assert reason.factor == pytest.approx(1 / factor, rel=1e-3)


def test_learned_scales_are_not_reported(placed: onnx.ModelProto) -> None:
    """Training with LSQ hardly changes the initial scale, 2 mean|w| / sqrt(127).

    This scale uses a fifth of the steps.
    """
    rng = np.random.default_rng(0)

    def learn(scale: Array, weights: Array, number: int) -> Array:
        mean = np.abs(weights).reshape(len(weights), -1).mean(axis=1)
        drift = np.exp(rng.normal(0, 0.1, scale.shape)).astype(scale.dtype)
        return 2 * mean.astype(scale.dtype) / np.sqrt(np.float32(127)) * drift

    learned = rescaled(placed, learn)
    assert weight_scales_of(learned) is None
    coarse = weight_scales_of(rescaled(placed, lambda s, w, n: learn(s, w, n) * 3))
    assert coarse is not None and coarse.cause == WeightScalesCause.TOO_LARGE
    assert "W-SCALE" not in {a.code for a in qdqtool.fix(learned).applied}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("factors", "cause"),
    [((1, 1, 1, 1), None), ((0.05, 0.15, 0.1, 0.2), WeightScalesCause.TENSOR)],
    ids=["learned", "too small"],
)
def test_one_scale_for_the_tensor_is_compared_with_learned_scales(
    g: Graph, shape: tuple[int, ...], factors: tuple[float, ...], cause: WeightScalesCause | None
) -> None:
    x = g.input(1, 16, 8, 8)
    for number, factor in enumerate(factors):
        weights = np.random.default_rng(number).normal(0, 0.1, (16, 16, 1, 1)).astype(np.float32)
        scale = np.full(shape, factor * 2 * np.abs(weights).mean() / np.sqrt(127), np.float32)
        w = g.pair(g.const(f"w{number}", weights), f"q{number}", scale)
        x = g.op("Conv", [g.pair(x, f"x{number}", 0.05), w], f"c{number}", kernel_shape=[1, 1])
    assert getattr(weight_scales_of(g.model(x)), "cause", None) == cause


def test_scales_of_other_tensors_are_reported(placed: onnx.ModelProto) -> None:
    scales: list[Array] = []

    def other(scale: Array, weights: Array, number: int) -> Array:
        scales.append(scale)
        return np.resize(scales[(number * 7) // 11], scale.shape) * (0.4 if number % 3 else 1.6)

    reason = weight_scales_of(rescaled(placed, other))
    assert reason is not None and reason.layers


def test_scales_of_another_axis_are_reported(placed: onnx.ModelProto) -> None:
    crossed = rescaled(
        placed,
        lambda s, w, n: largest(w.swapaxes(0, 1)) / 127 if w.shape[0] == w.shape[1] else s,
    )
    reason = weight_scales_of(crossed)
    assert reason is not None and reason.cause == WeightScalesCause.AXIS


@pytest.fixture(scope="module")
def uneven(placed: onnx.ModelProto) -> onnx.ModelProto:
    rng = np.random.default_rng(2)
    return reweighted(placed, lambda w: w * rng.uniform(0.5, 1.5, (len(w), *(1,) * (w.ndim - 1))))


@pytest.mark.parametrize(
    ("choose", "cause"),
    [
        (np.mean, WeightScalesCause.TENSOR),
        (np.max, WeightScalesCause.TOO_LARGE),
        (np.array, None),
    ],
    ids=["mean", "largest", "per channel"],
)
def test_mean_scale_in_all_channels_is_reported(
    uneven: onnx.ModelProto, choose: Callable[[Array], Array], cause: WeightScalesCause | None
) -> None:
    """The mean clips few weights, but is equal in all channels."""
    model = rescaled(uneven, lambda s, w, n: np.ones_like(s) * choose(largest(w)) / 127)
    assert getattr(weight_scales_of(model), "cause", None) == cause


@pytest.mark.parametrize("period", [1, 2], ids=["as inserted", "dead channels"])
def test_scales_of_insert_are_not_reported(placed: onnx.ModelProto, period: int) -> None:
    """Every second channel may be zero."""
    weights = reweighted(placed, lambda w: (w.T * (np.arange(len(w)) % period == 0)).T)
    assert weight_scales_of(weights) is None


def test_scales_that_contradict_the_weights_are_left_to_other_checks(
    placed: onnx.ModelProto,
) -> None:
    copy, pairs = with_weights(placed)
    bad = (np.ones(0), np.ones(3), np.full(1, np.nan), np.zeros(4), np.full(16, np.inf))
    for (scale, _), values in zip(pairs, bad, strict=False):
        scale.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), scale.name))
    assert weight_scales_of(copy) is None


@pytest.mark.parametrize("factor", [1 / 20, 1 / 4, 20.0])
@pytest.mark.parametrize("layers", [1, 2])
def test_one_layer_shows_that_all_its_scales_are_wrong(factor: float, layers: int) -> None:
    model = insert_max(float_network(layers)).model
    name = next(n.name for n in model.graph.node if n.op_type == "QuantizeLinear" and "w" in n.name)
    assert not reasons("W-SCALE", model, None)
    damaged = with_scale(model, name, factor)
    (reason,) = reasons("W-SCALE", damaged, None)
    assert reason.cause == WeightScalesCause.FACTOR and len(reason.layers) == 1
    fixed = qdqtool.fix(damaged)
    assert [change.code for change in fixed.applied] == ["W-SCALE"]
    assert not reasons("W-SCALE", fixed.proto, None)
