"""``qdqtool predict --gpu``, ``qdqtool gpus``, times in ``verify`` and ``engine``: what users type and see."""

import json
from pathlib import Path

import pytest

from qdqtool.cli import run
from tests.tables import cases
from tests.timing.models import chain, saved
from tests.trt import evidence


@pytest.fixture
def model(tmp_path):
    return saved(tmp_path, chain())


def test_answers_with_times(model, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["predict", model, "--gpu", "rtx 3060"]) == 0
    out = capsys.readouterr().out
    assert "ms on RTX 3060 (1777 MHz), estimated" in out
    assert out.startswith("INT8 as placed: ") and "; FP16: " in out.splitlines()[0]
    assert "What each fix saves at most" in out and "Slowest layers" not in out
    assert run(["predict", model, "--gpu", "rtx 3060", "--layers"]) == 0 and "Slowest layers" in capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if not line.startswith("build: ")) <= 80  # a command is one line
    assert run(["predict", model, "--gpu", "Jetson Orin Nano", "--clock", "600", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["time"]["gpu"] == "Jetson Orin Nano 8GB" and data["time"]["clock_mhz"] == 600
    assert 0 < data["time"]["low_ms"] < data["time"]["total_ms"] < data["time"]["high_ms"]
    assert all(isinstance(layer["ms"], float) for layer in data["layers"])
    assert run(["predict", model, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "time" not in data and all(layer["ms"] is None for layer in data["layers"])
    assert run(["predict", model, "--gpu", "T4", "--format", "markdown"]) == 0
    assert "INT8 as placed: " in capsys.readouterr().out.splitlines()[2]
    assert run(["predict", model, "--target", "trt8.6", "--gpu", "T4", "--layers"]) == 0
    layers = capsys.readouterr().out.partition("Engine layers")[2].partition("\n\n")[0].splitlines()[1:]
    assert layers and all(line.endswith(" ms") for line in layers)
    assert run(["predict", saved(tmp_path, chain(quantized=False, batch=16)), "--gpu", "A100"]) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0].startswith("FP16: ") and "INT8 would be" in first[1]


@pytest.mark.parametrize(("options", "flag"), [([], True), (["--gpu", "T4", "--no-fp16"], False)])
def test_the_build_line_is_of_the_build_that_was_estimated(model, capsys, options, flag):
    assert run(["predict", model, "--target", "trt8.6", *options]) == 0
    assert ("--fp16" in next(x for x in capsys.readouterr().out.splitlines() if x.startswith("build: "))) is flag


def test_calibrations_versions_and_gains(model, tmp_path, capsys):
    kept = tmp_path / "machine.json"
    assert run(["predict", model, "--gpu", "T4", "--calibrate", "0.2ms", "--save-calibration", str(kept)]) == 0
    assert "0.200 ms on Tesla T4" in capsys.readouterr().out
    assert run(["predict", model, "--gpu", "T4", "--calibrate", str(kept), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["total_ms"] == pytest.approx(0.2, rel=1e-3)
    before = Path(model).read_bytes()
    assert run(["predict", model, "--gpu", "T4", "--calibrate", "1ms", "--save-calibration", model]) == 2
    assert Path(model).read_bytes() == before
    assert run(["predict", model, "--gpu", "RTX 5090", "--target", "trt8.5", "--format", "json"]) == 0
    assert "GPU-VERSION" in {f["code"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert run(["predict", model, "--gpu", "RTX 5090", "--target", "trt10", "--format", "json"]) == 0
    assert "GPU-VERSION" not in {f["code"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert run(["predict", model, "--require-gain", "1.1"]) == 2
    plain = saved(tmp_path, chain(quantized=False), "float.onnx")
    assert run(["predict", plain, "--gpu", "rtx 3060", "--require-gain", "1.1"]) == 1
    assert "no Q/DQ" in capsys.readouterr().err
    assert run(["predict", saved(tmp_path, chain(quantized=False)), "--gpu", "P100", "--format", "json"]) == 0
    assert not [f for f in json.loads(capsys.readouterr().out)["findings"] if f["code"] == "GPU-NO-INT8"]


@pytest.mark.parametrize(*cases("commands/predict-time-mistakes-are-one-line-and"))
def test_mistakes_are_one_line_and_exit_2(model, capsys, arguments, words):
    assert run(["predict", model, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(("capability", "code"), [
    ("6.0", "GPU-NO-INT8"), ("5.3", "GPU-NO-INT8"), ("70", "GPU-DP4A"), ("6.1", "GPU-DP4A"),
    ("8.6", None), ("7.5", None),
])  # fmt: skip
def test_what_a_compute_capability_cannot_do(model, capsys, capability, code):
    assert run(["predict", model, "--target", "trt8.5", "--sm", capability, "--format", "json"]) == 0
    found = [f["code"] for f in json.loads(capsys.readouterr().out)["findings"] if f["code"].startswith("GPU-")]
    assert found == ([code] if code else [])


@pytest.mark.parametrize("target", ["trt8.0", "trt8.4", "trt8.6", "trt10", "trt11", "rtx1.7"])
def test_every_target_has_a_time(model, capsys, target):
    assert run(["predict", model, "--gpu", "RTX 3060", "--target", target, "--format", "json"]) == 0
    assert 0.01 < json.loads(capsys.readouterr().out)["time"]["total_ms"] < 1


def test_gpus(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["gpus"]) == 0
    out = capsys.readouterr().out
    assert "Jetson Orin NX 16GB" in out and max(map(len, out.splitlines())) <= 80
    assert run(["gpus", "orin-nx", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["gpus"]
    assert [g["name"] for g in found] == ["Jetson Orin NX 16GB"] and found[0]["source"]
    assert run(["gpus", "nonsense"]) == 2


def profile_of(case, tmp_path, factor=1.0):
    """A profile with the layers of a prediction, as if it had been measured."""
    from qdqtool.prediction import predict
    from qdqtool.timing.estimate import estimate
    from qdqtool.timing.gpus import find
    from qdqtool.trt.targets import target_named

    index = evidence.model(case)
    target = target_named("trt8.4")
    prediction = predict(index, target)
    times = estimate(index, prediction, find("A100 80GB PCIe"), target).layers
    keys = ("timeMs", "averageMs", "medianMs")
    rows = [{"name": layer.name, **dict.fromkeys(keys, t * factor), "percentage": 1.0}
            for layer, t in zip(prediction.layers, times, strict=True)]
    listing = {"Layers": [{"Name": layer.name, "LayerType": "CaskConvolution"} for layer in prediction.layers]}
    (tmp_path / "layers.json").write_text(json.dumps(listing))
    (tmp_path / "profile.json").write_text(json.dumps([{"count": 1}, *rows]))
    return str(evidence.HOME / case / "model.onnx.gz"), str(tmp_path / "layers.json"), str(tmp_path / "profile.json")


def test_verify_compares_times(tmp_path, capsys):
    files = profile_of("resnet18-a100-qat-residual", tmp_path)
    run(["verify", *files, "--gpu", "A100 80GB PCIe", "--format", "json"])
    times = json.loads(capsys.readouterr().out)["times"]
    assert times["within"] and times["layers"]["median_error"] < 0.01 and not times["slow"]
    files = profile_of("resnet18-a100-qat-residual", tmp_path, 3.0)
    run(["verify", *files, "--gpu", "A100 80GB PCIe"])
    out = capsys.readouterr().out
    assert "outside the range" in out and "slow:" in out


def test_engine_says_what_layers_usually_take(tmp_path, capsys):
    wide = "Thirty-two wide channel vectorized row major Int8 format"
    layer = {
        "Name": "conv", "LayerType": "CaskConvolution", "ParameterType": "Convolution", "Kernel": [3, 3], "Groups": 1,
        "OutMaps": 64, "Weights": {"Type": "Int8", "Count": 36864}, "TacticName": "slow_tactic",
        "Inputs": [{"Name": "a", "Dimensions": [8, 64, 56, 56], "Format/Datatype": wide}],
        "Outputs": [{"Name": "b", "Dimensions": [8, 64, 56, 56], "Format/Datatype": wide}],
    }
    (tmp_path / "g.json").write_text(json.dumps({"Layers": [layer]}))
    (tmp_path / "p.json").write_text(json.dumps([{"count": 1}, {"name": "conv", "timeMs": 5.0, "averageMs": 5.0,
                                                                "medianMs": 5.0, "percentage": 100.0}]))
    assert run(["engine", str(tmp_path / "g.json"), str(tmp_path / "p.json"), "--gpu", "RTX 3060"]) == 0
    out = capsys.readouterr().out
    assert "Slower than such layers usually are on RTX 3060" in out and "slow_tactic" in out
    assert run(["engine", str(tmp_path / "g.json"), str(tmp_path / "p.json"), "--gpu", "T4", "--format", "json"]) == 0
    row = json.loads(capsys.readouterr().out)["layers"][0]
    assert 0 < row["best_ms"] < row["expected_ms"] < 5 and row["times_expected"] > 10


def test_the_decision_comes_first_and_has_a_range(model, capsys):
    assert run(["predict", model, "--gpu", "rtx 3060", "--format", "json"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    gain = time["gain"]
    assert gain["low"] < gain["value"] < gain["high"]
    assert gain["value"] == pytest.approx(time["float"]["total_ms"] / time["total_ms"], rel=1e-2)
    assert gain["faster"] == ("INT8" if gain["value"] > 1 else "FP16")
    assert 0 < gain["signs_right"] <= gain["signs_measured"]
    assert time["layouts_ms"] >= 0


@pytest.mark.parametrize(("share", "code"), [(0.9, 0), (1.1, 1)])
def test_require_gain_is_judged_by_the_low_end(model, capsys, share, code):
    assert run(["predict", model, "--gpu", "rtx 3060", "--format", "json"]) == 0
    low = json.loads(capsys.readouterr().out)["time"]["gain"]["low"]
    assert run(["predict", model, "--gpu", "rtx 3060", "--require-gain", str(share * low)]) == code
    assert ("--require-gain" in capsys.readouterr().err) is bool(code)
