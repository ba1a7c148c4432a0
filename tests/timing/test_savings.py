"""Time that the fix of a finding saves."""

import numpy as np
import pytest

import qdqtool
from qdqtool.findings import codes
from qdqtool.timing.estimate import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.result import Prediction
from tests.insertion.nets import detector


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    data = np.random.default_rng(0).random((2, 3, 64, 64)).astype(np.float32)
    model = qdqtool.insert(detector(), data, predict=False).model
    return predict_on_gpu(model, "trt10", TimingOptions(gpu="T4"))[0]


def test_fix_for_accuracy_saves_no_time(prediction: Prediction) -> None:
    """Keeping quantized class outputs in float makes nothing faster."""
    savings = {f.code: f.saves_ms for f in prediction.findings}
    assert savings["HEAD-SCORE"] is None and savings["CH-SMALL"] is None
    assert all(codes.get(code).saves_time for code, ms in savings.items() if ms)
    (layer,) = (c.layer for c in prediction.convolutions if c.name.endswith("cv2.0/cv2.0.2/Conv"))
    assert layer and savings["NOT-QUANTIZED"] is not None


def test_conversions_have_one_time(prediction: Prediction) -> None:
    (finding,) = (f for f in prediction.findings if f.code == "INPUT-CONVERSION")
    (layer,) = (x for x in prediction.layers if x.type == "Conversion")
    assert finding.saves_ms == layer.ms == prediction.conversions_ms


def test_possible_time_does_not_depend_on_how_the_model_was_quantized() -> None:
    """Another tool also quantizes the bins of the head, by which the head is recognized."""
    data = np.random.default_rng(0).random((2, 3, 64, 64)).astype(np.float32)
    numbers = []
    for options in ({}, {"head": "none", "weights": "int8"}):
        model = qdqtool.insert(detector(), data, predict=False, **options).model
        time = qdqtool.predict(model, gpu="T4").time
        assert time is not None
        numbers.append((time["best"]["int8"], time["best"]["total_ms"]))
    assert numbers[0] == numbers[1]
