"""ACT-SCALE: scales of activations against images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

import qdqtool
from qdqtool.commands.cli import run
from qdqtool.explain.lint import weight_scales
from qdqtool.explain.lint.activation_scales import one_factor
from qdqtool.explain.report import Report
from qdqtool.model.graph import Model
from qdqtool.model.view import View
from qdqtool.prediction import check_activations
from qdqtool.trt.faults import (
    ActivationFit,
    ActivationScales,
    OutlierScales,
    WeightScales,
    WeightScalesCause,
)
from tests.insertion.nets import detector
from tests.insertion.transformers import samples, vit
from tests.slow import slow_after
from tests.trt.builder import Graph

RNG = np.random.default_rng(0)
DATA = [{"x": RNG.normal(0, 1, (1, 8, 16, 16)).astype(np.float32)} for _ in range(4)]


def float_network() -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 8, 16, 16)
    for i in range(3):
        x = g.relu(g.conv(x, f"c{i}", scale=None, weights="float"), f"r{i}")
    return g.model(x)


def scaled(proto: onnx.ModelProto, name: str, factor: float) -> onnx.ModelProto:
    """A copy in which the scale of one quantizer pair is another."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    node = next(n for n in copy.graph.node if n.name == name)
    for tensor in copy.graph.initializer:
        if tensor.name == node.input[1]:
            tensor.CopyFrom(
                numpy_helper.from_array(
                    numpy_helper.to_array(tensor) * np.float32(factor), tensor.name
                )
            )
    return copy


def told(code: str, proto: onnx.ModelProto, data: list[dict[str, np.ndarray]] | None) -> list[Any]:
    """The refusals behind the findings of a code, with data or without."""
    prediction = qdqtool.predict(proto)
    if data is not None:
        check_activations(proto, prediction, data)
    assert all(f.id == i for i, f in enumerate(prediction.findings))
    return [c.refusal for f in prediction.findings if f.code == code for c in f.causes]


def reported(proto: onnx.ModelProto) -> ActivationScales | None:
    return next(iter(told("ACT-SCALE", proto, DATA)), None)


def placed_by_max() -> tuple[onnx.ModelProto, str]:
    """The network with Q/DQ, and the Q of its input."""
    model = qdqtool.insert(float_network(), DATA, method="max", predict=False).model
    return model, next(
        n.name for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x"
    )


@pytest.mark.parametrize("method", ["focus", "mse", "percentile", "entropy", "max"])
def test_what_insert_calibrates_fits(method: str) -> None:
    model = qdqtool.insert(float_network(), DATA, method=method, predict=False).model
    assert reported(model) is None


def test_shared_scales_and_clipping(g: Graph) -> None:
    x = g.input(1, 8, 16, 16)
    parts = [g.conv(x, f"c{i}", scale=None, weights="float") for i in range(2)]
    joined = g.concat(
        [parts[0], g.op("Mul", [parts[1], g.const("tenth", np.float32(0.1))], "small")], "cat"
    )
    model = qdqtool.insert(
        g.model(g.conv(joined, "last", scale=None, weights="float")),
        DATA,
        method="max",
        predict=False,
    ).model
    assert reported(model) is None
    model, name = placed_by_max()
    small, large = reported(scaled(model, name, 0.25)), reported(scaled(model, name, 8.0))
    assert small is not None and small.worst[0].quantizer == name
    scale = small.worst[0].scale
    values = np.abs(np.concatenate([d["x"].ravel() for d in DATA]))
    assert small.worst[0].clipped == pytest.approx(float(np.mean(values > 127.5 * scale)), abs=2e-3)
    assert large is not None and large.worst[0].used == pytest.approx(1 / 8, rel=1e-3)
    found = reported(scaled(model, name, 1 / 16))
    assert found is not None and [f.quantizer for f in found.worst] == [name]
    data = outlying(0.005, 300.0)
    inserted = qdqtool.insert(
        float_network(), data, method="percentile", percentile=99.0, predict=False
    )
    assert not any(f.code == "ACT-OUTLIER" for f in inserted.findings)


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
def test_all_scales_off_by_one_factor(used: list[float], factor: float) -> None:
    assert one_factor([ActivationFit("q", 0.1, 0.0, 0.0, share) for share in used]) == factor


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, name = placed_by_max()
    onnx.save(scaled(model, name, 0.2), tmp_path / "bad.onnx")
    np.savez(tmp_path / "data.npz", x=np.concatenate([d["x"] for d in DATA]))
    arguments = ["predict", str(tmp_path / "bad.onnx"), "--calib", str(tmp_path / "data.npz")]
    assert run([*arguments, "--fail-on", "ACT-SCALE"]) == 1
    assert f"{name} (scale" in capsys.readouterr().out.replace("\n     ", "")


def outlying(share: float, factor: float, *, channels: int = 0) -> list[dict[str, np.ndarray]]:
    """Normal values [1, 8, 16, 16], a share of them (or of so many channels behind one another) many times as large."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(4):
        x = rng.normal(0, 1, (1, 8, 16, 16)).astype(np.float32)
        large = rng.random(x.shape) < share
        if channels:
            large = np.resize(np.arange(channels) < round(share * channels), x.size).reshape(
                x.shape
            )
        found.append({"x": np.where(large, x * np.float32(factor), x)})
    return found


@pytest.mark.parametrize(
    ("share", "factor", "named"),
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
def test_outliers_that_a_scale_covers(share: float, factor: float, named: bool) -> None:
    """At insert and at predict alike; the ratio is that of the values, to the one that two thirds are below."""
    data = outlying(share, factor)
    inserted = qdqtool.insert(float_network(), data, method="max", predict=False)
    assert any(f.code == "ACT-OUTLIER" for f in inserted.findings) is named
    refusals = named_by(inserted.model, data)
    assert bool(refusals) is named
    if named:
        (found,) = refusals
        assert not found.linear
        ratios = {q: ratio for q, _, ratio in found.worst}
        q = next(
            n.name
            for n in inserted.model.graph.node
            if n.op_type == "QuantizeLinear" and n.input[0] == "x"
        )
        values = np.sort(np.abs(np.concatenate([d["x"].ravel() for d in data])))
        assert ratios[q] == pytest.approx(values[-1] / np.quantile(values, 2 / 3), rel=0.02)


@pytest.mark.parametrize("share", [1 / 64, 0.05, 0.1, 0.2, 0.3])
def test_outlier_channels_of_any_share_are_seen(g: Graph, share: float) -> None:
    """From one of 64 channels to almost a third of them."""
    weights = g.const("w", RNG.normal(0, 1, (64, 16)), np.float32)
    model = g.model(g.op("MatMul", [g.input(1, 32, 64), weights], "fc"))
    for factor, named in ((100.0, True), (5.0, False)):
        data = [{"x": d["x"].reshape(1, 32, 64)} for d in outlying(share, factor, channels=64)]
        inserted = qdqtool.insert(model, data, method="max", predict=False)
        assert any(f.code == "ACT-OUTLIER" for f in inserted.findings) is named


def behind_norm(g: Graph, gains: np.ndarray, shift: np.ndarray) -> onnx.ModelProto:
    """A Linear behind a LayerNormalization of 64 channels, whose gains and whose inputs' offsets are given."""
    x = g.op("Add", [g.input(1, 32, 64), g.const("shift", shift, np.float32)], "shifted")
    normal = g.op("LayerNormalization", [x, g.const("gains", gains, np.float32)], "norm", axis=-1)
    moved = g.op("Reshape", [normal, g.const("to", np.asarray([1, 4, 8, 64]))], "windows")
    return g.model(
        g.op("MatMul", [moved, g.const("w", RNG.normal(0, 1, (64, 16)), np.float32)], "fc")
    )


def named_by(
    model: onnx.ModelProto, data: list[dict[str, np.ndarray]] | None = None
) -> list[OutlierScales]:
    """What ``predict`` says of outliers, with data or without."""
    return told("ACT-OUTLIER", model, data)


@pytest.mark.parametrize("by_gain", [True, False])
@pytest.mark.parametrize("count", [0, 1, 6, 16])
def test_outliers_of_one_sign_behind_a_normalization(count: int, by_gain: bool) -> None:
    """They move the mean, and with it all other channels: seen by channel, and without data by gains alone.

    Without gains the normalization holds them to a few times the others. Smoothed ones are none any more, for insert
    and predict alike.
    """
    named = by_gain and count > 0
    large = np.arange(64) < count
    data = [{"x": d["x"].reshape(1, 32, 64)} for d in outlying(0.0, 1.0)]
    model = behind_norm(Graph(17), np.where(large & by_gain, 60.0, 1.0), np.where(large, 20.0, 0.0))
    inserted = qdqtool.insert(model, data, method="max", predict=False)
    smoothed = qdqtool.insert(model, data, method="max", smooth=0.5, predict=False)
    for changed in (inserted, smoothed):
        bad = changed is inserted and named
        assert any(f.code == "ACT-OUTLIER" for f in changed.findings) is bad
        assert [(r.samples, r.linear) for r in named_by(changed.model)] == [(0, True)] * bad
        assert [(r.samples, r.linear) for r in named_by(changed.model, data)] == [(4, True)] * bad


def test_data_refute_what_gains_let_guess() -> None:
    """Where channels with large gains hardly vary; a tensor that is always zero on the data is not judged by these."""
    large = np.arange(64) < 6
    model = behind_norm(Graph(17), np.where(large, 60.0, 1.0), np.zeros(64))
    data = [{"x": d["x"].reshape(1, 32, 64)} for d in outlying(0.0, 1.0)]
    inserted = qdqtool.insert(model, data, method="max", predict=False).model
    assert [r.samples for r in named_by(inserted)] == [0]
    assert (
        named_by(
            inserted, [{"x": d["x"] * np.where(large, 0.01, 1.0).astype(np.float32)} for d in data]
        )
        == []
    )
    assert [r.samples for r in named_by(inserted, [{"x": np.zeros((1, 32, 64), np.float32)}])] == [
        0
    ]


@pytest.mark.parametrize("channels", [32, 768])
@pytest.mark.parametrize(
    ("spread", "factor", "named"),
    [
        (0.0, 1.0, False),
        (0.5, 1.0, False),
        (1.0, 1.0, False),
        (0.0, 200.0, True),
        (0.3, 200.0, True),
    ],
)
def test_gains_that_spread_are_no_outliers(
    g: Graph, channels: int, spread: float, factor: float, named: bool
) -> None:
    """The largest of many lognormal gains is many times the one in the middle: 17 times of 768."""
    gains = np.exp(spread * RNG.normal(0, 1, channels))
    gains[:2] *= factor
    x = g.op(
        "LayerNormalization",
        [g.input(1, 8, channels), g.const("gains", gains, np.float32)],
        "norm",
        axis=-1,
    )
    q = g.q(x, "q", float(4 * gains.max() / 127))
    weights = g.pair(g.const("w", RNG.normal(0, 1, (channels, 4)), np.float32), "wq")
    model = g.model(g.op("MatMul", [g.dq(q, "dq", float(4 * gains.max() / 127)), weights], "fc"))
    assert bool(named_by(model)) is named


def test_insert_and_predict_judge_the_same_tensors_alike() -> None:
    """Also where values are moved in front of a Linear, as those of attention are, shares left out."""
    model = vit()
    data = samples(model, 16)
    for name, rows in (
        ("b0.attn.v.weight", slice(0, 1)),
        ("b0.fc1.weight", slice(0, 2)),
        ("", slice(0)),
    ):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        for tensor in changed.graph.initializer:
            if tensor.name == name:
                value = numpy_helper.to_array(tensor).copy()
                value[:, rows] *= 1000.0
                tensor.CopyFrom(numpy_helper.from_array(value, name))
        inserted = qdqtool.insert(changed, data, method="max", attention="int8", predict=False)
        said = [c.refusal for f in inserted.findings for c in f.causes]
        found = named_by(inserted.model, data)
        assert len(said) == len(found) == bool(name)
        for one, r in zip(said, found, strict=True):
            assert isinstance(one, OutlierScales) and (one.bad, one.total) == (r.bad, r.total)
            assert [q for q, _, _ in one.worst] == [q for q, _, _ in r.worst]
            assert [ratio for *_, ratio in one.worst] == pytest.approx(
                [ratio for *_, ratio in r.worst], rel=0.01
            )


def test_smoothing_is_advised_where_a_matrix_product_reads_outliers(g: Graph) -> None:
    weights = g.const("w", RNG.normal(0, 1, (32, 16)), np.float32)
    model = g.model(g.op("MatMul", [g.input(1, 64, 32), weights], "fc"))
    data = [{"x": d["x"].reshape(1, 64, 32)} for d in outlying(0.005, 300.0)]
    inserted = qdqtool.insert(model, data, method="max", predict=False)
    assert any(f.code == "ACT-OUTLIER" for f in inserted.findings)
    (found,) = named_by(inserted.model, data)
    assert found.linear


# W-SCALE: quiet on what quantizers write, and found where scales and weights are of different origin.

Array = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def placed() -> onnx.ModelProto:
    data = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]
    choices = {"method": "max", "target": "trt8.5", "residual": "both", "losses": 0}
    return qdqtool.insert(detector(), data, predict=False, **choices).model


def named(proto: onnx.ModelProto) -> WeightScales | None:
    report = Report("trt10")
    weight_scales.run(View(Model(proto)), report)
    found = [c.refusal for f in report.findings if f.code == "W-SCALE" for c in f.causes]
    assert len(found) <= 1
    assert not found or isinstance(found[0], WeightScales)
    return found[0] if found else None  # type: ignore[return-value]


def spoilt(proto: onnx.ModelProto, change: Callable[[Array, Array, int], Array]) -> onnx.ModelProto:
    """A copy whose weight scales are others: ``change`` gets scales, weights and the layer's number."""
    copy, pairs = with_weights(proto)
    for number, (scale, weights) in enumerate(pairs):
        old = numpy_helper.to_array(scale).astype(np.float64)
        new = change(old, numpy_helper.to_array(weights).astype(np.float64), number)
        scale.CopyFrom(
            numpy_helper.from_array(new.astype(np.float32).reshape(old.shape), scale.name)
        )
    assert len(pairs) > 20
    return copy


def reweighted(proto: onnx.ModelProto, change: Callable[[Array], Array]) -> onnx.ModelProto:
    """A copy with other weights and the same scales."""
    copy, pairs = with_weights(proto)
    for _, weights in pairs:
        new = change(numpy_helper.to_array(weights)).astype(np.float32)
        weights.CopyFrom(numpy_helper.from_array(new, weights.name))
    return copy


def with_weights(
    proto: onnx.ModelProto,
) -> tuple[onnx.ModelProto, list[tuple[onnx.TensorProto, onnx.TensorProto]]]:
    """A copy, and its scales of weights with these."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    tensors = {t.name: t for t in copy.graph.initializer}
    return copy, [
        (tensors[q.input[1]], tensors[q.input[0]])
        for q in copy.graph.node
        if q.op_type == "QuantizeLinear" and q.input[0] in tensors
    ]


def test_scales_far_off_and_clipped_on_purpose(placed: onnx.ModelProto) -> None:
    found = named(spoilt(placed, lambda s, w, n: np.full_like(s, 0.1)))
    assert found is not None and found.wasted > 0.5
    rng = np.random.default_rng(1)
    found = named(spoilt(placed, lambda s, w, n: s / np.exp(rng.normal(0.3, 0.9, s.shape))))
    assert (
        found is not None and found.cause == WeightScalesCause.OTHER_WEIGHTS and found.clipped > 0.2
    )
    # Half of the channels keep their largest weight, the others are clipped by up to a third
    rng = np.random.default_rng(3)
    assert (
        named(spoilt(placed, lambda s, w, n: s * np.minimum(1, rng.uniform(0.67, 1.33, s.shape))))
        is None
    )
    assert named(placed) is None

    def clip(scale: Array, weights: Array, number: int) -> Array:
        return (
            np.maximum(np.quantile(np.abs(weights).reshape(len(weights), -1), 0.99, axis=1), 1e-9)
            / 127
        )

    rng = np.random.default_rng(0)
    assert named(spoilt(reweighted(placed, lambda w: rng.standard_t(3, w.shape)), clip)) is None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drift_of_training_is_not_reported(placed: onnx.ModelProto, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert named(spoilt(placed, lambda s, w, n: s * np.exp(rng.normal(0, 0.08, s.shape)))) is None


@pytest.mark.parametrize("factor", [0.5, 0.7, 2.0])
@pytest.mark.parametrize("channels", [1, 5, 1000])
def test_a_few_channels_and_one_layer_amid_exact_scales(
    placed: onnx.ModelProto, channels: int, factor: float
) -> None:
    rng = np.random.default_rng(channels)

    def change(scale: Array, weights: Array, number: int) -> Array:
        if number == 11:
            scale = scale.copy()
            scale[rng.permutation(scale.size)[:channels]] *= factor
        return scale

    found = named(spoilt(placed, change))
    assert found is not None and (found.cause, len(found.layers)) == (
        WeightScalesCause.EXCEPTION,
        1,
    )
    assert found.worst == pytest.approx(1 / factor, rel=1e-3) and 0 < found.channels <= channels


@pytest.mark.parametrize("seed", range(3))
def test_one_layer_amid_the_drift_of_training(placed: onnx.ModelProto, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = named(
        spoilt(
            placed,
            lambda s, w, n: s * np.exp(rng.normal(0, 0.05, s.shape)) * (0.5 if n == 7 else 1),
        )
    )
    assert found is not None and (found.cause, len(found.layers)) == (
        WeightScalesCause.EXCEPTION,
        1,
    )


@pytest.mark.parametrize("per_channel", slow_after(1, [True, False]))
def test_onnxruntime_is_not_reported(per_channel: bool, tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    onnx.save(detector(), tmp_path / "float.onnx")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.left = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]

        def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
            return self.left.pop() if self.left else None

    quantization.quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "q.onnx",
        Reader(),
        per_channel=per_channel,
        weight_type=quantization.QuantType.QInt8,
        activation_type=quantization.QuantType.QInt8,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )
    assert named(onnx.load(tmp_path / "q.onnx")) is None


@pytest.mark.parametrize("factor", [2.0, 0.5, 127 / 128])
def test_one_factor(placed: onnx.ModelProto, factor: float) -> None:
    found = named(spoilt(placed, lambda s, w, n: s * factor))
    assert found is not None and found.cause == WeightScalesCause.FACTOR
    assert found.factor == pytest.approx(1 / factor, rel=1e-3)


def test_scales_of_other_tensors_and_axes(placed: onnx.ModelProto) -> None:
    kept: list[Array] = []

    def other(scale: Array, weights: Array, number: int) -> Array:
        kept.append(scale)
        return np.resize(kept[(number * 7) // 11], scale.shape) * (0.4 if number % 3 else 1.6)

    found = named(spoilt(placed, other))
    assert found is not None and found.layers

    def crossed(scale: Array, weights: Array, number: int) -> Array:
        if weights.shape[0] != weights.shape[1]:
            return scale
        return np.abs(np.moveaxis(weights, 1, 0)).reshape(len(scale), -1).max(axis=1) / 127

    found = named(spoilt(placed, crossed))
    assert found is not None and found.cause == WeightScalesCause.AXIS


def test_one_scale_in_all_channels(placed: onnx.ModelProto) -> None:
    """The mean of them clips too few weights to be told from clipping on purpose, but that it is the same tells it."""
    rng = np.random.default_rng(2)
    uneven = reweighted(placed, lambda w: w * rng.uniform(0.5, 1.5, (len(w), *(1,) * (w.ndim - 1))))

    def own(scale: Array, weights: Array, number: int) -> Array:
        return np.maximum(np.abs(weights).reshape(len(weights), -1).max(axis=1), 1e-9) / 127

    assert named(spoilt(uneven, own)) is None
    found = named(spoilt(uneven, lambda s, w, n: np.full_like(s, own(s, w, n).mean())))
    assert found is not None and found.cause == WeightScalesCause.TENSOR
    largest = named(spoilt(uneven, lambda s, w, n: np.full_like(s, own(s, w, n).max())))
    assert largest is None or largest.cause != WeightScalesCause.TENSOR, (
        "of the tensor: nothing is clipped"
    )


def test_dead_channels_and_contradictions(placed: onnx.ModelProto) -> None:
    dead = reweighted(
        placed, lambda w: np.where(np.arange(len(w)).reshape(-1, *(1,) * (w.ndim - 1)) % 2, w, 0.0)
    )
    assert named(dead) is None
    copy, pairs = with_weights(placed)
    bad = (np.ones(0), np.ones(3), np.full(1, np.nan), np.zeros(4), np.full(16, np.inf))
    for (scale, _), values in zip(pairs, bad, strict=False):
        scale.CopyFrom(numpy_helper.from_array(values.astype(np.float32), scale.name))
    assert named(copy) is None
