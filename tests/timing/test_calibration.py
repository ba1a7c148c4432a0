"""One measured time, or a profile, that corrects the estimate."""

import json

import pytest

from qdqtool.errors import QdqtoolError
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing import calibration
from qdqtool.timing.gpus import find
from qdqtool.timing.physics import seconds
from tests.timing.models import GPU, SHARED, TARGET, chain, timed
from tests.trt import evidence


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


@pytest.mark.parametrize(("more", "kernel"), [(4.0, 0.0), (9.5, 2.0)])
def test_a_profile_gives_both_the_factor_and_its_own_overhead(tmp_path, more, kernel):
    """Layers that take 1.5 times the estimate and some us more: the profile's doing up to 7.5 us, then the kernels'."""
    names = [layer.name for layer in predict(load(chain(12, batch=8)), TARGET).layers]
    raw = seconds(timed(chain(12, batch=8))[1].load.layers, GPU) * 1e3
    rows = [
        {"count": 1},
        *(
            {
                "name": n,
                "timeMs": 1.5 * t + more * 1e-3,
                "averageMs": 1.5 * t + more * 1e-3,
                "medianMs": 1.5 * t + more * 1e-3,
                "percentage": 1.0,
            }
            for n, t in zip(names, raw, strict=True)
        ),
    ]
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(rows))
    _, time = timed(chain(12, batch=8), calibrate=str(file))
    assert time.calibration.factor == pytest.approx(1.5, rel=0.05)
    assert time.calibration.overhead_us == pytest.approx(more - kernel, abs=0.5)
    assert time.calibration.kernel_us == pytest.approx(kernel, abs=0.5)
    assert time.high_ms - 1.05 * time.total_ms == pytest.approx(len(names) * (more - kernel) * 1e-3, rel=0.3)


# Engines that were timed with a profile and without: milliseconds of one execution without it.
@pytest.mark.parametrize(("case", "gpu", "measured"), [
    ("resnet18-a100-qat", "A100 80GB PCIe", 0.882), ("resnet18-a100-qat-residual", "A100 80GB PCIe", 0.546),
    ("resnet18-a100-qat-residual-qgap", "A100 80GB PCIe", 0.500),
])  # fmt: skip
def test_a_real_profile_leads_to_the_time_without_it(case, gpu, measured):
    profile = SHARED / case / "profile.json"
    if not profile.exists():
        pytest.skip("the published profiles are not available")
    _, time = timed(evidence.HOME / case / "model.onnx.gz", find(gpu), calibrate=str(profile))
    assert time.total_ms == pytest.approx(measured, rel=0.07)
    assert time.low_ms <= 1.02 * measured and measured <= time.high_ms


def test_a_profile_of_another_engine_is_refused(tmp_path):
    names = [layer.name for layer in predict(load(chain(12)), TARGET).layers]
    rows = [{"name": n if i == 3 else f"other{i}", "timeMs": 1.0, "averageMs": 1.0, "percentage": 1.0}
            for i, n in enumerate(names)]
    file = tmp_path / "profile.json"
    file.write_text(json.dumps([{"count": 1}, *rows]))
    with pytest.raises(QdqtoolError, match=r"only 1 of its \d+ layers are in the prediction"):
        timed(chain(12), calibrate=str(file))


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
