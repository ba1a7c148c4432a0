import functools
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import qdqtool
from qdqtool.findings import codes
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.result import Prediction
from tests.findings.graphs import GRAPHS
from tests.insertion.nets import detector
from tests.slow import slow_after
from tests.trt.builder import Graph


@functools.cache
def quantized_detector(**options: Any) -> ModelProto:
    """Return a YOLOv8 with Q/DQ, which tests must not change."""
    data = np.random.default_rng(0).random((2, 3, 64, 64)).astype(np.float32)
    return qdqtool.insert(detector(), data, predict=False, **options).model


def _predict_time(model: ModelProto) -> tuple[Prediction, float]:
    prediction, time = predict_on_gpu(model, "trt10", TimingOptions(gpu="T4"))
    return prediction, time.total_ms


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return _predict_time(quantized_detector())[0]


def test_fix_for_accuracy_saves_no_time(prediction: Prediction) -> None:
    savings = {f.code: f.saves_ms for f in prediction.findings}
    assert savings["HEAD-SCORE"] is None and savings["CH-SMALL"] is None
    assert all(codes.get(code).saves_time for code, ms in savings.items() if ms)
    (layer,) = (c.layer for c in prediction.convolutions if c.name.endswith("cv2.0/cv2.0.2/Conv"))
    assert layer and savings["NOT-QUANTIZED"] is not None


def test_advice_on_few_channels_agrees_with_times(prediction: Prediction) -> None:
    small = {f.node: f for f in prediction.findings if f.code == "CH-SMALL"}
    others, _ = _predict_time(quantized_detector(exclude=tuple(small)))
    savings = {f.node: f.saves_ms or 0 for f in others.findings if f.code == "NOT-QUANTIZED"}
    assert (
        small
        and all(savings[node] > 0 for node in small)
        and all("leave the convolution quantized" in f.fix for f in small.values())
    )


def test_fix_of_a_failing_build_saves_no_time() -> None:
    """A float stem avoids the failure and is not faster."""
    prediction, _ = predict_on_gpu(GRAPHS["stem-before-pool"](), "trt10", TimingOptions(gpu="T4"))
    assert {f.code: f.saves_ms for f in prediction.findings}["STEM-POOL"] is None


def test_conversions_have_one_time(prediction: Prediction) -> None:
    (finding,) = (f for f in prediction.findings if f.code == "INPUT-CONVERSION")
    (layer,) = (x for x in prediction.layers if x.type == "Conversion")
    assert finding.saves_ms == layer.ms == prediction.conversions_ms
    assert prediction.time["conversions_ms"] == pytest.approx(layer.ms, rel=1e-3)


def test_possible_time_does_not_depend_on_how_the_model_was_quantized() -> None:
    """Another tool also quantizes the bins of the head, by which the head is recognized."""
    numbers = []
    for model in (quantized_detector(), quantized_detector(head="none", weights="int8")):
        time = qdqtool.predict(model, gpu="T4").time
        numbers.append((time["best"]["int8"], time["best"]["total_ms"]))
    assert numbers[0] == numbers[1]


def test_float_network_saves_what_insert_saves() -> None:
    prediction, time = predict_on_gpu(detector(), "trt10", TimingOptions(gpu="T4"))
    saved_ms = pytest.approx(time.total_ms - time.best.total_ms, abs=1e-5)
    savings = {f.code: f.saves_ms for f in prediction.findings}
    assert saved_ms == savings["NO-QDQ"]
    layers = [f.saves_ms or 0.0 for f in prediction.findings if f.code == "NOT-QUANTIZED"]
    assert sum(layers) == pytest.approx(savings["NO-QDQ"], abs=1e-5 * len(layers))
    assert max(layers) < 0.5 * sum(layers) and min(savings["NO-QDQ"] or 0.0, time.total_ms) > 0


@pytest.mark.parametrize(
    "options", [{"exclude": ("/model.4/m.0/cv2/conv/Conv",)}, {"residual": "none"}]
)
def test_fix_saves_at_most_what_is_estimated(options: dict[str, Any]) -> None:
    best_ms = _predict_time(quantized_detector())[1]
    prediction, partial_ms = _predict_time(quantized_detector(**options))
    code = "NOT-QUANTIZED" if "exclude" in options else "SKIP-FLOAT"
    savings = [f.saves_ms or 0.0 for f in prediction.findings if f.code == code]
    bound_ms = sum(savings)
    assert len(savings) == 1 or max(savings) < 0.9 * bound_ms  # each has its own saving
    assert bound_ms > 0.98 * (partial_ms - best_ms) > 0


def test_time_after_all_fixes_includes_fixes_accepted_only_after_others() -> None:
    """SKIP-FLOAT alone is refused, because a conversion for the Concat would be added."""
    model = quantized_detector(unify=False, residual="none")
    time = qdqtool.predict(model, gpu="T4").time
    (saving,) = time["fixes"]
    assert saving["codes"] == ["CONCAT-SCALE"]
    (further,) = time["further_fixes"]
    assert further["codes"] == ["SKIP-FLOAT"] and further["saves_ms"] > 0
    saved_ms = saving["saves_ms"] + further["saves_ms"]
    assert time["total_ms"] - time["fixed_ms"] == pytest.approx(saved_ms, abs=2e-4)
    fixed = qdqtool.fix(model, gpu="T4")
    assert {change.code for change in fixed.applied} == {"CONCAT-SCALE", "SKIP-FLOAT"}
    assert time["fixed_ms"] == pytest.approx(fixed.time.total_ms, rel=1e-3)


@pytest.mark.parametrize("gpu", slow_after(1, ["T4", "Orin Nano 8GB", "RTX 4090"]))
def test_float_head_saves_at_most_what_is_estimated(gpu: str) -> None:
    """The convolutions before the last ones then write INT8 too."""
    before = qdqtool.predict(quantized_detector(), gpu=gpu)
    after = qdqtool.predict(quantized_detector(head="none"), gpu=gpu)
    layers = {f.node: f.saves_ms or 0.0 for f in before.findings if f.code == "NOT-QUANTIZED"}
    assert len(layers) == 4 and "NOT-QUANTIZED" not in after.findings_by_code()
    saved_ms = before.time["total_ms"] - after.time["total_ms"]
    assert 2 * saved_ms > sum(layers.values()) > saved_ms > 0


def test_layers_without_qdq_do_not_repeat_savings_of_fixable_findings() -> None:
    layer = "/model.22/cv2.0/cv2.0.2/Conv"
    aligned, separate = (
        {(f.code, f.node): f.saves_ms for f in _predict_time(model)[0].findings}
        for model in (quantized_detector(), quantized_detector(unify=False))
    )
    assert any(code == "CONCAT-SCALE" and ms for (code, _), ms in separate.items())
    assert separate[("NOT-QUANTIZED", layer)] == aligned[("NOT-QUANTIZED", layer)]


@pytest.mark.parametrize(("pairs", "is_estimated"), [(20, True), (540, False)])
def test_saving_of_too_many_places_is_stated_as_unknown(
    pairs: int, is_estimated: bool, g: Graph
) -> None:
    x = g.input(1, 16, 8, 8)
    for i in range(pairs):
        x = g.pair(g.relu(g.pair(x, f"a{i}", 0.1), f"r{i}"), f"b{i}", 0.2)
        g.channels[x] = 16
        if i % 20 == 19:
            x = g.conv(x, f"c{i}", 16, scale=None)
    prediction = qdqtool.predict(g.model(g.relu(x, "end")), gpu="RTX 3060")
    saved = {code for fix in prediction.time["fixes"] for code in fix["codes"]}
    assert ("DOUBLE-QDQ" in saved) == is_estimated
    stated = [note for note in prediction.time["notes"] if "DOUBLE-QDQ" in note]
    assert len(stated) == (not is_estimated) == (prediction.time["fixed_ms"] is None)
    assert all("the time after all fixes" in note for note in stated)
