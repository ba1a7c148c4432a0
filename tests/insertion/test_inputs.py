from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import qdqtool
from calibration import Preprocess
from qdqtool.demo.model import yolov8n
from qdqtool.errors import ModelError, QdqtoolError
from tests.insertion.nets import Net, check, images, in_half, nodes_of, run, value_of

PIXELS = np.random.default_rng(3).integers(0, 256, (1, 16, 8, 8), np.uint8)


def two_layers() -> onnx.ModelProto:
    made = Net()
    made.output(made.conv("b", made.op("Relu", "relu", made.conv("a", "x"))))
    return made.model()


def inserted(kind: str, **options: Any) -> qdqtool.Insertion:
    return qdqtool.insert(two_layers(), images(), input_type=kind, predict=False, **options)


def test_int8_input_gives_the_same_outputs() -> None:
    plain, changed = inserted("float"), inserted("int8")
    check(changed.model)
    assert changed.model.graph.input[0].type.tensor_type.elem_type == TensorProto.INT8
    assert len(nodes_of(changed.model, "QuantizeLinear")) == len(nodes_of(plain.model, "QuantizeLinear")) - 1
    x = PIXELS.astype(np.float32) / 255
    scale = value_of(plain.model, "a/_input_quantizer/scale")
    codes = np.clip(np.rint(x / scale), -128, 127).astype(np.int8)
    np.testing.assert_array_equal(run(changed.model, {"x": codes})[0], run(plain.model, {"x": x})[0])
    factor = float(changed.notes[-1].split("pixel * ")[1].rstrip(")"))
    np.testing.assert_array_equal(np.clip(np.rint(PIXELS * factor), -128, 127).astype(np.int8), codes)


def test_uint8_input_folds_the_factor_into_the_first_scale() -> None:
    plain, changed = inserted("float"), inserted("uint8")
    check(changed.model)
    assert changed.model.graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8
    assert not nodes_of(changed.model, "Mul", "Add", "Div") and len(nodes_of(changed.model, "Cast")) == 1
    expected = run(plain.model, {"x": PIXELS.astype(np.float32) / 255})[0]
    np.testing.assert_array_equal(run(changed.model, {"x": PIXELS})[0], expected)


def test_uint8_input_with_mean_and_deviation_by_channel() -> None:
    made = Net(channels=3)
    made.output(made.conv("a", "x", cin=3))
    preprocess = Preprocess(mean=(0.3, 0.4, 0.5), std=(0.2, 0.25, 0.3))
    mean, std = (np.asarray(v, np.float32).reshape(1, -1, 1, 1) for v in (preprocess.mean, preprocess.std))
    data = [{"x": (i["x"] - mean) / std} for i in images(channels=3)]
    plain = qdqtool.insert(made.model(), data, predict=False)
    changed = qdqtool.insert(made.model(), data, predict=False, input_type="uint8", preprocess=preprocess)
    check(changed.model)
    pixels = PIXELS[:, :3]
    x = (pixels.astype(np.float32) / 255 - mean) / std
    wanted, found = run(plain.model, {"x": x})[0], run(changed.model, {"x": pixels})[0]
    assert np.mean(np.abs(wanted - found) > 1e-4) < 0.02  # one code more or less at ties
    with pytest.raises(ModelError, match="has not the 3 channels"):
        inserted("uint8", preprocess=preprocess)


def test_float_reader_of_the_input() -> None:
    made = Net()
    made.output(made.op("Relu", "relu", made.conv("a", "x")), made.op("Sin", "other", "x"))
    with pytest.raises(ModelError, match="'other' reads it as float; use uint8"):
        qdqtool.insert(made.model(), images(), input_type="int8", predict=False)
    changed = qdqtool.insert(made.model(), images(), input_type="uint8", predict=False)
    check(changed.model)
    found = run(changed.model, {"x": PIXELS})[1]
    np.testing.assert_allclose(found, np.sin(PIXELS.astype(np.float32) / 255), atol=1e-6)


def test_targets_without_uint8_and_models_without_a_quantized_input() -> None:
    with pytest.raises(QdqtoolError, match=r"trt8.4 has no UINT8 inputs"):
        inserted("uint8", target="trt8.4")
    with pytest.raises(ModelError, match="no float input of the model is quantized"):
        inserted("int8", exclude=["^a$"])


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_the_prediction_stays(kind: str) -> None:
    data = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]
    plain = qdqtool.insert(yolov8n(64, classes=2), data).prediction
    changed = qdqtool.insert(yolov8n(64, classes=2), data, input_type=kind).prediction
    assert plain is not None and changed is not None
    before, after = plain.summary(), changed.summary()
    assert after["int8"] == before["int8"] == 60
    assert after["conversions"] == before["conversions"] - (kind == "int8")


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("mean", [0.0, 0.25])
def test_several_inputs_are_all_changed(kind: str, mean: float) -> None:
    made = Net()
    made.inputs.append(onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 8, 8]))
    made.output(made.conv("a", "x"), made.conv("b", "y"))
    first, second = images(), images(seed=2)
    data = [{"x": a["x"] - mean, "y": b["x"] - mean} for a, b in zip(first, second, strict=True)]
    preprocess = Preprocess(mean=(mean,) * 3)
    plain = qdqtool.insert(made.model(), data, predict=False, head="none")
    changed = qdqtool.insert(
        made.model(), data, predict=False, head="none", input_type=kind, preprocess=preprocess
    )
    check(changed.model)
    wanted = TensorProto.INT8 if kind == "int8" else TensorProto.UINT8
    assert [i.type.tensor_type.elem_type for i in changed.model.graph.input] == [wanted, wanted]
    pixels = {"x": PIXELS, "y": PIXELS[:, ::-1]}
    floats = {n: p.astype(np.float32) / 255 - np.float32(mean) for n, p in pixels.items()}
    fed = dict(pixels)
    if kind == "int8":
        scales = {n: value_of(plain.model, f"{c}/_input_quantizer/scale") for n, c in (("x", "a"), ("y", "b"))}
        fed = {n: np.clip(np.rint(v / scales[n]), -128, 127).astype(np.int8) for n, v in floats.items()}
    for found, expected in zip(run(changed.model, fed), run(plain.model, floats), strict=True):
        assert np.mean(np.abs(found - expected) > 1e-4) < (0.02 if kind == "uint8" and mean else 1e-9)


@pytest.mark.parametrize("mean", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_inputs_of_a_float16_model(target: str, kind: str, mean: float) -> None:
    """Its input becomes integers too; the Cast to float that widening puts there (8.5) is the one Cast or goes."""
    model, preprocess = in_half(two_layers()), Preprocess(mean=(mean,) * 3)
    data = [{"x": (i["x"] - mean).astype(np.float16)} for i in images()]
    plain = qdqtool.insert(model, data, predict=False, preprocess=preprocess, target=target)
    changed = qdqtool.insert(model, data, predict=False, preprocess=preprocess, target=target, input_type=kind)
    check(changed.model)
    wanted_type = TensorProto.INT8 if kind == "int8" else TensorProto.UINT8
    assert changed.model.graph.input[0].type.tensor_type.elem_type == wanted_type
    casts = [n for n in nodes_of(changed.model, "Cast") if n.input[0] == "x"]
    assert len(casts) == (kind == "uint8")
    x = (PIXELS.astype(np.float32) / 255 - mean).astype(np.float16)
    scale = value_of(plain.model, "a/_input_quantizer/scale")
    codes = np.clip(np.rint(x.astype(np.float32) / scale), -128, 127).astype(np.int8)
    wanted = run(plain.model, {"x": x})[0].astype(np.float32)
    found = run(changed.model, {"x": codes if kind == "int8" else PIXELS})[0].astype(np.float32)
    # A float16 pixel is off by up to a half of a thousandth, and 10 divides in float16: one code more or less at ties.
    exact = kind == "int8" and target == "trt8.5"
    assert np.mean(np.abs(wanted - found) > (0.0 if exact else 0.01)) < (1e-9 if exact else 0.1)


@pytest.mark.parametrize(
    ("low", "high", "good"), [(0.0, 1.0, True), (0.2, 0.9, True), (-1.0, 1.0, False), (0, 255, False)]
)
def test_arrays_that_cannot_be_pixels_are_refused(low: float, high: float, good: bool) -> None:
    data = [{"x": np.linspace(low, high, 1024, dtype=np.float32).reshape(1, 16, 8, 8)}]
    if good:
        assert "feed pixels" in qdqtool.insert(two_layers(), data, input_type="uint8", predict=False).notes[-1]
        return
    told = rf"from {low:g} to {high:g} in 'x', and pixels become 0 to 1; give the `scale`"
    with pytest.raises(ModelError, match=told):
        qdqtool.insert(two_layers(), data, input_type="uint8", predict=False)
    scaled = Preprocess(scale=1.0) if high > 1 else Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)
    assert qdqtool.insert(two_layers(), data, input_type="uint8", predict=False, preprocess=scaled)
    assert qdqtool.insert(two_layers(), data, input_type="int8", predict=False)
