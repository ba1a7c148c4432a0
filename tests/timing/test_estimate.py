"""Whole engines: what is counted, what the range says, what fixes save."""

import json

import pytest

from qdqtool.errors import QdqtoolError
from qdqtool.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing import calibration, twin, work
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import find
from qdqtool.timing.physics import constants, seconds
from qdqtool.timing.predicted import workload_of
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision
from tests.timing.models import chain, saved
from tests.trt import evidence

TARGET = target_named("trt8.5")
GPU = find("RTX 3060")


def timed(proto, gpu=GPU, **options):
    model = load(proto)
    prediction = predict(model, TARGET)
    return prediction, estimate(model, prediction, gpu, TARGET, **options)


def test_work_of_a_chain_by_hand():
    """Three 3x3 convolutions of 64 channels at 56x56: MACs, bytes and types of each."""
    model = load(chain())
    found = workload_of(model, predict(model, TARGET), Precision.FP16)
    convs = [w for w in found.layers if w.kind == work.CONV]
    assert [w.macs for w in convs] == [56 * 56 * 64 * 64 * 9] * 3
    assert [(w.read, w.weights) for w in convs] == [(56 * 56 * 64, 64 * 64 * 9)] * 3
    assert [w.written for w in convs] == [56 * 56 * 64, 56 * 56 * 64, 2 * 56 * 56 * 64]
    first = next(w for w in found.layers if w.kind == work.CONVERSION)
    assert (first.read, first.written) == (4 * 56 * 56 * 64, 56 * 56 * 64)
    assert not found.unknown


def test_the_total_is_the_sum_of_its_kernels():
    _, time = timed(chain())
    overhead = constants().overhead_us * 1e-3
    assert sum(k.ms - overhead for k in time.kernels) == pytest.approx(time.total_ms, rel=1e-6)
    assert time.low_ms < time.total_ms < time.high_ms
    assert time.high_ms / time.total_ms == pytest.approx(constants().spreads["total"])
    assert 0 < time.conversions_ms < time.total_ms


def test_the_float_twin_is_the_network_without_its_quantizers():
    model = load(chain())
    found = twin.float_twin(model)
    assert not twin.has_qdq(found)
    assert [n.op for n in found.nodes] == [n.op for n in load(chain(quantized=False)).nodes]
    assert twin.has_qdq(model), "the model itself is not changed"
    quantized, plain = timed(chain(batch=32))[1], timed(chain(batch=32, quantized=False))[1]
    assert quantized.float_time.total_ms == pytest.approx(plain.total_ms, rel=1e-6)
    assert quantized.gain > 1.2


def test_integer_weights_have_a_twin_too():
    from qdqtool.insertion.api import insert

    done = insert(
        load(chain(quantized=False)),
        calib_table=None,
        data=[{"x": __import__("numpy").ones((1, 64, 56, 56), "float32")}],
        weights="int8",
    )
    assert timed(done.model)[1].float_time.total_ms > 0


def test_a_float_model_says_what_int8_could_gain():
    _, time = timed(chain(batch=32, quantized=False))
    assert time.best is not None and time.best.int8 == 3 and time.gain is None
    assert time.best.gain == pytest.approx(time.total_ms / time.best.total_ms)
    quantized = timed(chain(batch=32))[1]
    assert time.best.total_ms == pytest.approx(quantized.total_ms, rel=0.05)


def test_no_gain_without_int8():
    _, time = timed(chain(quantized=False), find("P100"))
    assert time.best is None and any("no INT8" in n for n in time.notes)


def test_batch_scales_activations_and_not_weights():
    _, one = timed(chain(batch=1), batch=32)
    _, own = timed(chain(batch=32))
    assert one.total_ms == pytest.approx(own.total_ms, rel=1e-6)
    _, dynamic = timed(chain(dynamic=True), batch=32)
    assert dynamic.total_ms == pytest.approx(own.total_ms, rel=1e-6)
    assert any("taken as 32x64x56x56" in n for n in dynamic.notes)


def test_fixes_save_no_more_than_there_is():
    for case in evidence.CASES:
        model = load(evidence.HOME / case / "model.onnx.gz")
        prediction = predict(model, TARGET)
        time = estimate(model, prediction, find("A100"), TARGET)
        for finding in prediction.findings:
            assert finding.saves_ms is None or 0 < finding.saves_ms < time.total_ms, finding


def test_quantized_skips_are_faster_and_the_fix_says_so():
    """The measured order of four placements of one network on an A100 (0.882, 0.546, 0.500 ms)."""
    gpu, totals, saved_ms = find("A100 80GB PCIe"), [], 0.0
    for case in ("resnet18-a100-qat", "resnet18-a100-qat-residual", "resnet18-a100-qat-residual-qgap"):
        model = load(evidence.HOME / case / "model.onnx.gz")
        prediction = predict(model, TARGET)
        totals.append(estimate(model, prediction, gpu, TARGET).total_ms)
        if case == "resnet18-a100-qat":
            saved_ms = sum(f.saves_ms or 0 for f in prediction.findings if f.code == "SKIP-FLOAT")
    assert totals[0] > 1.3 * totals[1] > 1.3 * totals[2]
    assert 0.05 < saved_ms < totals[0] - totals[1]


# Measured milliseconds (GPU compute time without a profiler), published with the builds.
@pytest.mark.parametrize(("case", "gpu", "measured"), [
    ("resnet18-a100-qat", "A100 80GB PCIe", 0.882), ("resnet18-a100-qat-residual", "A100 80GB PCIe", 0.546),
    ("resnet18-a100-qat-residual-qgap", "A100 80GB PCIe", 0.500),
    ("mobilenetv2-titanrtx-qat-residual", "TITAN RTX", 0.264),
    ("resnet18-qat-rtx2000-trt8510", "RTX 2000 Ada Laptop", 0.134),
])  # fmt: skip
def test_measured_engines_lie_in_the_range(case, gpu, measured):
    model = load(evidence.HOME / case / "model.onnx.gz")
    time = estimate(model, predict(model, TARGET), find(gpu), TARGET)
    assert time.low_ms <= measured <= time.high_ms
    assert time.total_ms == pytest.approx(measured, rel=0.3)


def test_what_is_not_known_widens_the_range():
    known, unknown = timed(chain())[1], timed(chain(), find("RTX 5090"))[1]
    assert unknown.high_ms / unknown.total_ms >= known.high_ms / known.total_ms
    assert any("no Blackwell" in n for n in unknown.notes)


# Calibration ----------------------------------------------------------------------------------------------------


def test_one_measured_time_corrects_the_rest(tmp_path):
    _, plain = timed(chain(batch=8))
    measured = plain.total_ms * 1.3
    _, time = timed(chain(batch=8), calibrate=f"{measured}ms")
    assert time.total_ms == pytest.approx(measured, rel=1e-6)
    assert time.high_ms / time.low_ms < plain.high_ms / plain.low_ms
    kept = tmp_path / "machine.json"
    kept.write_text(json.dumps(time.calibration.as_json()))
    _, other = timed(chain(2, batch=16), calibrate=str(kept))
    assert other.total_ms == pytest.approx(1.3 * timed(chain(2, batch=16))[1].total_ms, rel=1e-6)
    with pytest.raises(QdqtoolError, match="calibration for 'RTX 3060'"):
        timed(chain(), find("T4"), calibrate=str(kept))


def test_a_profile_gives_both_the_factor_and_the_time_of_a_kernel(tmp_path):
    """Layers that take 1.5 times the estimate and 2 us more, as a profile with its overhead shows them."""
    names = [layer.name for layer in predict(load(chain(12, batch=8)), TARGET).layers]
    model = load(chain(12, batch=8))
    raw = seconds(workload_of(model, predict(model, TARGET)).layers, GPU) * 1e3
    overhead = constants().overhead_us * 1e-3
    rows = [
        {"count": 1},
        *(
            {
                "name": n,
                "timeMs": 1.5 * t + 0.002 + overhead,
                "averageMs": 1.5 * t + 0.002 + overhead,
                "medianMs": 1.5 * t + 0.002 + overhead,
                "percentage": 1.0,
            }
            for n, t in zip(names, raw, strict=True)
        ),
    ]
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(rows))
    _, time = timed(chain(12, batch=8), calibrate=str(file))
    assert time.calibration.factor == pytest.approx(1.5, rel=0.05)
    assert time.calibration.kernel_us == pytest.approx(2.0, abs=0.5)


@pytest.mark.parametrize("text", ["0", "0ms", "1e9s", "nothing.json", "5 parsecs", "-3"])
def test_bad_calibrations(text):
    with pytest.raises(QdqtoolError):
        timed(chain(), calibrate=text)


@pytest.mark.parametrize(
    "content",
    [
        '{"schema": "qdqtool/time-calibration/1"}',
        '{"schema": "qdqtool/time-calibration/1", "gpu": "RTX 3060", "factor": NaN, "kernel_us": 0}',
        '{"schema": "qdqtool/time-calibration/1", "gpu": "RTX 3060", "factor": 1e9, "kernel_us": 0}',
        "[",
        "{}",
        "",
    ],
)
def test_damaged_calibration_files(tmp_path, content):
    file = tmp_path / "c.json"
    file.write_text(content)
    with pytest.raises(QdqtoolError):
        timed(chain(), calibrate=str(file))


def test_measured_time_texts():
    assert calibration.measured_time("5.3") == calibration.measured_time("5.3 ms") == 5.3
    assert calibration.measured_time("950us") == pytest.approx(0.95)
    assert calibration.measured_time("0.8 s") == 800
    assert calibration.measured_time("profile.json") is None


def test_json_has_the_published_fields(tmp_path):
    from qdqtool.timing.ask import Request, predict_on

    prediction, _ = predict_on(saved(tmp_path, chain()), "trt8.5", Request(gpu="rtx 3060"))
    data = json.loads(json.dumps(prediction.as_json()))
    assert {"gpu", "total_ms", "low_ms", "high_ms", "conversions_ms", "float"} <= set(data["time"])
    assert data["time"]["gpu"] == "RTX 3060" and data["time"]["float"]["precision"] == "FP16"
    assert all(layer["ms"] is not None for layer in data["layers"])
    assert any(f["saves_ms"] for f in data["findings"])
