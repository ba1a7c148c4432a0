import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.commands.cli import run
from qdqtool.errors import QdqtoolError
from tests.errors import has
from tests.insertion.nets import detector

IMAGES = np.random.default_rng(0).random((4, 3, 64, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def insertion() -> qdqtool.Insertion:
    return qdqtool.insert(detector(), IMAGES)


@pytest.fixture(scope="module")
def results(insertion: qdqtool.Insertion) -> dict[str, Any]:
    model = insertion.model
    return {
        "insert": insertion,
        "predict": qdqtool.predict(model),
        "fix": qdqtool.fix(model),
        "compare": qdqtool.compare(detector(), model),
        "extract": qdqtool.extract(model, node="/model.0/conv/Conv"),
    }


@pytest.mark.parametrize("name", ["insert", "predict", "fix", "compare", "extract"])
def test_results_have_the_same_members(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert isinstance(result.ok, bool) and isinstance(result.notes, list)
    assert result.summary() and result.as_json()["schema"] and len(repr(result)) < 200


def test_members_of_results_have_short_texts(insertion: qdqtool.Insertion) -> None:
    prediction = insertion.prediction
    for item in (*insertion.skipped, *prediction.findings, *prediction.convolutions):
        assert len(repr(item)) < 150 and "\n" not in repr(item)
    finding = prediction.findings[0]
    assert finding.code in repr(finding) and finding.node in repr(finding)
    assert insertion.skipped[0].node in repr(insertion.skipped[0])


def test_insert_has_the_warnings_of_the_command(insertion: qdqtool.Insertion) -> None:
    (warning,) = (w for w in insertion.warnings if w.code == "few-images")
    assert warning.values["images"] == len(IMAGES) and warning in insertion.as_json()["warnings"]


# Times of predict ---------------------------------------------------------------------------------


def test_predict_with_gpu_has_times(insertion: qdqtool.Insertion) -> None:
    prediction = qdqtool.predict(insertion.model, gpu="T4", clock=1000)
    time = prediction.time
    assert time is not None and time["gpu"] == "Tesla T4" and time["clock_mhz"] == 1000
    assert time["low_ms"] < time["total_ms"] < time["high_ms"]
    assert all(layer.ms is not None for layer in prediction.layers)
    slow = qdqtool.predict(insertion.model, gpu="T4", clock=500).time
    assert slow is not None and slow["total_ms"] > time["total_ms"]
    assert qdqtool.predict(insertion.model).time is None


def test_predict_has_the_time_of_the_command(
    insertion: qdqtool.Insertion, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(insertion.model, path)
    assert run(["predict", str(path), "--gpu", "T4", "--batch", "2", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    prediction = qdqtool.predict(path, gpu="T4", batch=2)
    assert json.loads(json.dumps(prediction.as_json())) == printed
    prediction.save(tmp_path / "answer.json")
    with pytest.raises(QdqtoolError, check=has("output-is-input", path=str(path))):
        prediction.save(path)


def test_predict_with_compute_capability_has_findings_only(insertion: qdqtool.Insertion) -> None:
    prediction = qdqtool.predict(insertion.model, sm="6.1")
    assert prediction.time is None and prediction.compute_capabilities == ["6.1"]
    assert any(f.code.startswith("GPU-") for f in prediction.findings)


def test_predict_on_a_list_of_gpus_has_the_times_of_the_command(
    insertion: qdqtool.Insertion, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q.onnx"
    insertion.save(path)
    prediction = qdqtool.predict(path, gpu=["L4", "GTX 1080", "L4", "RTX 3060"])
    gpus = ["--gpu=L4", "--gpu=L4", "--gpu=GTX 1080", "--gpu=RTX 3060"]
    assert run(["predict", str(path), "--format", "json", *gpus]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert prediction.times == answer["times"] == prediction.as_json()["times"]
    assert [time["gpu"] for time in prediction.times] == ["L4", "GTX 1080", "RTX 3060"]
    assert prediction.time == answer["time"] == prediction.times[0]
    assert (
        prediction.compute_capabilities == answer["compute_capabilities"] == ["8.9", "6.1", "8.6"]
    )
    assert qdqtool.predict(path, gpu="L4").times is None
    assert qdqtool.predict(path, gpu=("L4",)).times == [prediction.time]


@pytest.mark.parametrize(
    ("options", "code", "parameter"),
    [
        ({"clock": 1000.0}, "option-without-effect", "clock"),
        ({"batch": 2}, "option-without-effect", "batch"),
        ({"no_fp16": True}, "option-without-effect", "no_fp16"),
        ({"gpu": []}, "wrong-type", "gpu"),
        ({"gpu": [None, "L4"]}, "wrong-type", "gpu"),
        ({"gpu": ["L4", "T4"], "clock": 1000.0}, "option-conflict", "gpu"),
    ],
)
def test_predict_refuses_options_without_gpu_and_lists_of_gpus(
    options: dict[str, Any], code: str, parameter: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter)):
        qdqtool.predict(b"", **options)
