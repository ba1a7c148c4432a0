from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from calibration import PRESETS, Preprocess
from qdqtool.ir.graph import Model
from qdqtool.patterns.input_values import find_normalized_inputs, warn_own_normalization
from qdqtool.patterns.network_kind import warn_preprocess
from qdqtool.quantization.api import insert
from tests.insertion.nets import detector
from tests.trt.builder import Graph

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def channels(values: Any) -> Any:
    return np.asarray(values, np.float64).reshape(1, -1, 1, 1)


def by_255(g: Graph, x: str) -> str:
    return g.op("Div", [x, g.const("divisor", 255.0)], "div")


def after_other_nodes(g: Graph, x: str) -> str:
    """Rescale as Keras does, by 1/127.5 and an offset of -1, after a Q/DQ pair."""
    moved = g.op("Identity", g.dq(g.q(x, "q", 1.0), "dq", 1.0), "same")
    scaled = g.op("Mul", [moved, g.const("factor", 1 / 127.5)], "mul")
    return g.op("Add", [scaled, g.const("offset", -1.0)], "add")


def standardize(g: Graph, x: str, largest: float) -> str:
    centered = g.op("Sub", [x, g.const("mean", channels(MEAN * largest))], "sub")
    return g.op("Div", [centered, g.const("std", channels(STD * largest))], "div")


def imagenet(g: Graph, x: str) -> str:
    return standardize(g, x, 1)


Normalization = Callable[[Graph, str], str]


def build(normalization: Normalization, shape: tuple[int, ...] = (1, 3, 32, 32)) -> onnx.ModelProto:
    g = Graph(opset=17)
    weights = np.random.default_rng(0).normal(size=(64, 3, 3, 3)).astype(np.float32)
    pixels = normalization(g, g.input(*shape))
    return g.model(g.op("Conv", [pixels, g.const("weights", weights)], "stem"))


def used(name: str) -> dict[str, Any]:
    return {"name": name, "origin": "option", **PRESETS[name].preprocess.as_json()}


PIXELS = (255, "preprocess='none'", ["yolo", "imagenet", "vit"], ["none", "yolox"])
UNIT = (
    1,
    "preprocess='rtdetr'",
    ["imagenet", "inception", "none", "caffe"],
    ["yolo", "rtdetr", "ultralytics-classify"],
)


@pytest.mark.parametrize(
    ("normalization", "highest", "advice", "wrong", "right"),
    [
        pytest.param(by_255, *PIXELS, id="by 255"),
        pytest.param(
            lambda g, x: g.op("Mul", [g.const("factor", 1 / 255), x], "mul"),
            *PIXELS,
            id="by a factor",
        ),
        pytest.param(after_other_nodes, *PIXELS, id="after other nodes"),
        pytest.param(
            lambda g, x: g.op(
                "Sub", [x, g.const("mean", channels([103.939, 116.779, 123.68]))], "sub"
            ),
            *PIXELS,
            id="mean",
        ),
        pytest.param(lambda g, x: standardize(g, x, 255), *PIXELS, id="mean and deviation"),
        pytest.param(imagenet, *UNIT, id="imagenet"),
        pytest.param(
            lambda g, x: standardize(g, g.op("Mul", [x, g.const("factor", 255.0)], "mul"), 255),
            *UNIT,
            id="back to pixels",
        ),
        pytest.param(
            lambda g, x: g.op(
                "Sub", [g.op("Mul", [x, g.const("two", 2.0)], "mul"), g.const("one", 1.0)], "sub"
            ),
            *UNIT,
            id="minus one to one",
        ),
    ],
)
def test_networks_that_normalize_their_input(
    normalization: Normalization, highest: int, advice: str, wrong: list[str], right: list[str]
) -> None:
    model = Model(build(normalization))
    assert find_normalized_inputs(model) == {"x": highest}
    for name in wrong:
        (warning,) = warn_own_normalization(model, used(name))
        assert (warning.code, warning.values["highest"]) == ("own-normalization", highest)
        assert "(-0 to" not in warning and advice in warning
    for name in right:
        assert warn_own_normalization(model, used(name)) == []


@pytest.mark.parametrize(
    "normalization",
    [
        lambda g, x: x,
        lambda g, x: g.op("Div", [g.const("one", 1.0), x], "div"),
        lambda g, x: g.op("Add", [x, g.const("bias", 0.1)], "add"),
    ],
    ids=["nothing", "other_arithmetic", "a_bias"],
)
def test_other_networks(normalization: Normalization) -> None:
    model = Model(build(normalization))
    assert find_normalized_inputs(model) == {}
    assert all(warn_own_normalization(model, used(name)) == [] for name in PRESETS)


def test_feature_maps_and_functions_are_not_judged() -> None:
    assert find_normalized_inputs(Model(build(by_255, (1, 16, 32, 32)))) == {}
    assert warn_preprocess(Model(build(by_255)), {"name": "own", "origin": "option"}) == []


@pytest.mark.parametrize(
    ("normalization", "elem_type", "is_warned"),
    [
        (by_255, onnx.TensorProto.FLOAT, False),
        (lambda g, x: g.op("Cast", [x], "cast", to=1), onnx.TensorProto.UINT8, False),
        (lambda g, x: x, onnx.TensorProto.FLOAT, True),
    ],
    ids=["divides", "uint8", "no normalization"],
)
def test_pixels_do_not_fit_metadata_of_ultralytics_unless_the_network_takes_them(
    normalization: Normalization, elem_type: int, is_warned: bool
) -> None:
    onnx.helper.set_model_props(model := build(normalization), {"task": "detect", "stride": "32"})
    model.graph.input[0].type.tensor_type.elem_type = elem_type
    codes = [warning.code for warning in warn_preprocess(Model(model), used("none"))]
    assert codes == ["preprocess-of-task"] * is_warned


def test_detectors_of_yolo_take_no_pixels() -> None:
    assert warn_preprocess(Model(detector()), used("yolo")) == []


def test_classifier_with_its_own_normalization_is_not_sent_to_a_mean() -> None:
    g = Graph(opset=17)
    features = g.conv(imagenet(g, g.input(1, 3, 32, 32)), "stem")
    pooled = g.op("Flatten", g.op("GlobalAveragePool", features, "pool"), "flat")
    model = Model(g.model(g.gemm(pooled, "fc", 8)))
    (warning,) = warn_preprocess(model, {**used("yolo"), "origin": "default"})
    assert warning.code == "default-preprocess"
    assert "imagenet" not in warning and "without mean and std" in warning


def test_insert_warns(tmp_path: Any) -> None:
    from PIL import Image

    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    model = build(by_255)
    assert "own-normalization" in {
        w.code for w in insert(model, tmp_path, include=["stem"]).warnings
    }
    for preprocess in ("none", Preprocess(scale=1.0)):
        found = insert(model, tmp_path, preprocess=preprocess, include=["stem"]).warnings
        assert "own-normalization" not in {w.code for w in found}
    arrays = [{"x": np.ones((1, 3, 32, 32), np.float32)}]
    assert "own-normalization" not in {
        w.code for w in insert(model, arrays, include=["stem"]).warnings
    }
