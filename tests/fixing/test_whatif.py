"""What the automatic fixes save: the simulated figure is the difference of two whole estimates."""

from __future__ import annotations

import pytest

from qdqtool.fixing.api import fix
from qdqtool.fixing.whatif import add_fixes
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import find
from qdqtool.trt.targets import target_named
from tests.trt import evidence

TARGET = target_named("trt8.5")


def test_the_skips_of_resnet_are_worth_a_third_of_its_time() -> None:
    model = load(evidence.HOME / "resnet18-a100-qat" / "model.onnx.gz")
    gpu = find("RTX 3060")
    prediction = predict(model, TARGET)
    time = estimate(model, prediction, gpu, TARGET)
    add_fixes(model, prediction, time, TARGET)
    (skips,) = time.fixes
    assert set(skips.codes) <= {"SKIP-FLOAT", "POOL-MIXED"} and len(skips.nodes) == 5
    assert 0.2 * time.total_ms < skips.saves_ms < 0.6 * time.total_ms
    assert time.as_json()["fixes"] == [skips.as_json()]
    stem = max((f for f in prediction.findings if f.code == "POOL-MIXED"), key=lambda f: f.saves_ms or 0)
    assert stem.saves_ms is not None and stem.saves_ms > 0.5 * skips.saves_ms  # the pooling behind the stem goes too


def test_the_figure_is_that_of_the_fixed_model() -> None:
    fixed = fix(evidence.HOME / "resnet18-qat-rtx2000-trt8510" / "model.onnx.gz", "trt8.5")
    model = load(evidence.HOME / "resnet18-qat-rtx2000-trt8510" / "model.onnx.gz")
    prediction = predict(model, TARGET)
    time = estimate(model, prediction, find("RTX 3060"), TARGET)
    add_fixes(model, prediction, time, TARGET)
    after = estimate(load(fixed.proto), fixed.after, find("RTX 3060"), TARGET, compare=False)
    if fixed.applied:
        assert time.fixes and time.total_ms - sum(f.saves_ms for f in time.fixes) == pytest.approx(
            after.total_ms, rel=0.05)
    else:
        assert after.total_ms == pytest.approx(time.total_ms)


def test_nothing_to_fix_and_gpus_without_int8_have_no_fixes() -> None:
    for case, gpu in (("resnet18-a100-qat-residual-qgap", "RTX 3060"), ("resnet18-a100-qat", "P100")):
        model = load(evidence.HOME / case / "model.onnx.gz")
        prediction = predict(model, TARGET)
        time = estimate(model, prediction, find(gpu), TARGET)
        add_fixes(model, prediction, time, TARGET)
        assert time.fixes == []
