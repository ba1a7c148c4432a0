"""W-SCALE: quiet on what quantizers write, and found where scales and weights are of different origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

import qdqtool
from qdqtool.demo.model import yolov8n
from qdqtool.trt.faults import WeightScales, WeightScalesCause

Array = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def placed() -> onnx.ModelProto:
    data = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]
    return qdqtool.insert(yolov8n(size=64), data, method="max", target="trt8.5", predict=False).model


def reported(proto: onnx.ModelProto) -> WeightScales | None:
    found = [c.refusal for f in qdqtool.predict(proto).findings if f.code == "W-SCALE" for c in f.causes]
    assert len(found) <= 1
    assert not found or isinstance(found[0], WeightScales)
    return found[0] if found else None  # type: ignore[return-value]


def spoilt(proto: onnx.ModelProto, change: Callable[[Array, Array, int], Array]) -> onnx.ModelProto:
    """A copy whose weight scales are others: ``change`` gets scales, weights and the layer's number."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    tensors = {t.name: t for t in copy.graph.initializer}
    number = 0
    for q in copy.graph.node:
        if q.op_type == "QuantizeLinear" and q.input[0] in tensors:
            scale = tensors[q.input[1]]
            weights, old = (numpy_helper.to_array(tensors[t]).astype(np.float64) for t in q.input[:2])
            new = change(old, weights, number).astype(np.float32).reshape(old.shape)
            scale.CopyFrom(numpy_helper.from_array(new, scale.name))
            number += 1
    assert number > 20
    return copy


def test_insert_is_not_reported(placed: onnx.ModelProto) -> None:
    assert reported(placed) is None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drift_of_training_is_not_reported(placed: onnx.ModelProto, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert reported(spoilt(placed, lambda s, w, n: s * np.exp(rng.normal(0, 0.08, s.shape)))) is None


def test_clipping_that_was_searched_for_each_channel_is_not_reported(placed: onnx.ModelProto) -> None:
    """Half of the channels keep their largest weight, the others are clipped by up to a third."""
    rng = np.random.default_rng(3)
    assert reported(spoilt(placed, lambda s, w, n: s * np.minimum(1, rng.uniform(0.67, 1.33, s.shape)))) is None


@pytest.mark.parametrize("factor", [0.5, 0.7, 2.0])
@pytest.mark.parametrize("channels", [1, 5, 1000])
def test_a_few_channels_and_one_layer_amid_exact_scales(placed: onnx.ModelProto, channels: int, factor: float) -> None:
    rng = np.random.default_rng(channels)

    def change(scale: Array, weights: Array, number: int) -> Array:
        if number == 11:
            scale = scale.copy()
            scale[rng.permutation(scale.size)[:channels]] *= factor
        return scale

    found = reported(spoilt(placed, change))
    assert found is not None and (found.cause, len(found.layers)) == (WeightScalesCause.EXCEPTION, 1)
    assert found.worst == pytest.approx(1 / factor, rel=1e-3) and 0 < found.channels <= channels


@pytest.mark.parametrize("seed", range(3))
def test_one_layer_amid_the_drift_of_training(placed: onnx.ModelProto, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = reported(spoilt(placed, lambda s, w, n: s * np.exp(rng.normal(0, 0.05, s.shape)) * (0.5 if n == 7 else 1)))
    assert found is not None and (found.cause, len(found.layers)) == (WeightScalesCause.EXCEPTION, 1)


def test_onnxruntime_is_not_reported(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    onnx.save(yolov8n(size=64), tmp_path / "float.onnx")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.left = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]

        def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
            return self.left.pop() if self.left else None

    for per_channel in (True, False):
        quantization.quantize_static(
            tmp_path / "float.onnx", tmp_path / "q.onnx", Reader(), per_channel=per_channel,
            weight_type=quantization.QuantType.QInt8, activation_type=quantization.QuantType.QInt8,
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
        )
        assert reported(onnx.load(tmp_path / "q.onnx")) is None


def test_a_hundredth_of_the_weights_clipped_on_purpose_is_not_reported(placed: onnx.ModelProto) -> None:
    def clip(scale: Array, weights: Array, number: int) -> Array:
        return np.maximum(np.quantile(np.abs(weights).reshape(len(weights), -1), 0.99, axis=1), 1e-9) / 127

    heavy = spoilt(placed, lambda s, w, n: s)
    tensors = {t.name: t for t in heavy.graph.initializer}
    rng = np.random.default_rng(0)
    for q in heavy.graph.node:
        if q.op_type == "QuantizeLinear" and q.input[0] in tensors:
            values = rng.standard_t(3, tuple(tensors[q.input[0]].dims)).astype(np.float32)
            tensors[q.input[0]].CopyFrom(numpy_helper.from_array(values, q.input[0]))
    assert reported(spoilt(heavy, clip)) is None


@pytest.mark.parametrize("factor", [2.0, 0.5, 127 / 128])
def test_one_factor(placed: onnx.ModelProto, factor: float) -> None:
    found = reported(spoilt(placed, lambda s, w, n: s * factor))
    assert found is not None and found.cause == WeightScalesCause.FACTOR
    assert found.factor == pytest.approx(1 / factor, rel=1e-3)


def test_scales_from_before_batch_normalization_was_folded(placed: onnx.ModelProto) -> None:
    rng = np.random.default_rng(1)
    found = reported(spoilt(placed, lambda s, w, n: s / np.exp(rng.normal(0.3, 0.9, s.shape))))
    assert found is not None and found.cause == WeightScalesCause.OTHER_WEIGHTS and found.clipped > 0.2


def test_scales_of_another_tensor(placed: onnx.ModelProto) -> None:
    kept: list[Array] = []

    def other(scale: Array, weights: Array, number: int) -> Array:
        kept.append(scale)
        return np.resize(kept[(number * 7) // 11], scale.shape) * (0.4 if number % 3 else 1.6)

    found = reported(spoilt(placed, other))
    assert found is not None and found.layers


def test_scales_along_the_other_axis(placed: onnx.ModelProto) -> None:
    def crossed(scale: Array, weights: Array, number: int) -> Array:
        if weights.shape[0] != weights.shape[1]:
            return scale
        return np.abs(np.moveaxis(weights, 1, 0)).reshape(len(scale), -1).max(axis=1) / 127

    found = reported(spoilt(placed, crossed))
    assert found is not None and found.cause == WeightScalesCause.AXIS


def test_one_scale_in_all_channels(placed: onnx.ModelProto) -> None:
    """The mean of them clips too few weights to be told from clipping on purpose, but that it is the same tells it."""
    rng = np.random.default_rng(2)
    uneven = spoilt(placed, lambda s, w, n: s)
    tensors = {t.name: t for t in uneven.graph.initializer}
    for q in uneven.graph.node:
        if q.op_type == "QuantizeLinear" and q.input[0] in tensors:
            weights = numpy_helper.to_array(tensors[q.input[0]])
            sizes = rng.uniform(0.5, 1.5, (len(weights), *(1,) * (weights.ndim - 1)))
            tensors[q.input[0]].CopyFrom(numpy_helper.from_array((weights * sizes).astype(np.float32), q.input[0]))

    def own(scale: Array, weights: Array, number: int) -> Array:
        return np.maximum(np.abs(weights).reshape(len(weights), -1).max(axis=1), 1e-9) / 127

    assert reported(spoilt(uneven, own)) is None
    found = reported(spoilt(uneven, lambda s, w, n: np.full_like(s, own(s, w, n).mean())))
    assert found is not None and found.cause == WeightScalesCause.TENSOR
    largest = reported(spoilt(uneven, lambda s, w, n: np.full_like(s, own(s, w, n).max())))
    assert largest is None or largest.cause != WeightScalesCause.TENSOR, "of the tensor: nothing is clipped"


def test_scales_far_too_large(placed: onnx.ModelProto) -> None:
    found = reported(spoilt(placed, lambda s, w, n: np.full_like(s, 0.1)))
    assert found is not None and found.wasted > 0.5


def test_dead_channels_count_for_nothing(placed: onnx.ModelProto) -> None:
    copy = onnx.ModelProto.FromString(placed.SerializeToString())
    tensors = {t.name: t for t in copy.graph.initializer}
    for q in copy.graph.node:
        if q.op_type == "QuantizeLinear" and q.input[0] in tensors:
            weights = numpy_helper.to_array(tensors[q.input[0]]).copy()
            weights[::2] = 0
            tensors[q.input[0]].CopyFrom(numpy_helper.from_array(weights, q.input[0]))
    assert reported(copy) is None


def test_a_file_that_contradicts_itself_is_left_to_the_other_checks(placed: onnx.ModelProto) -> None:
    copy = onnx.ModelProto.FromString(placed.SerializeToString())
    tensors = {t.name: t for t in copy.graph.initializer}
    q = [n for n in copy.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in tensors]
    bad = (np.ones(0), np.ones(3), np.full(1, np.nan), np.zeros(4), np.full(16, np.inf))
    for node, scale in zip(q, bad, strict=False):
        name = node.input[1]
        tensors[name].CopyFrom(numpy_helper.from_array(scale.astype(np.float32), name))
    assert reported(copy) is None
