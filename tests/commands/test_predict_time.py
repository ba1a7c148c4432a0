"""``qdqtool predict --gpu``, ``qdqtool gpus``, times in ``verify`` and ``engine``: what users type and see."""

import json
from pathlib import Path

import pytest

from tests.timing.models import chain, saved


@pytest.fixture
def model(tmp_path):
    return saved(tmp_path, chain())


def test_answers_with_times(model, cli, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("predict", model, "--gpu", "rtx 3060")
    assert "ms on RTX 3060 (1777 MHz), estimated" in out
    assert out.startswith("INT8 as placed: ") and "; FP16: " in out.splitlines()[0]
    assert "What each fix saves at most" in out and "Slowest layers" not in out
    assert "Slowest layers" in cli("predict", model, "--gpu", "rtx 3060", "--layers")
    assert (
        max(len(line) for line in out.splitlines() if not line.startswith("build: ")) <= 80
    )  # a command is one line
    data = cli.json("predict", model, "--gpu", "Jetson Orin Nano", "--clock", "600")
    assert data["time"]["gpu"] == "Jetson Orin Nano 8GB" and data["time"]["clock_mhz"] == 600
    assert 0 < data["time"]["low_ms"] < data["time"]["total_ms"] < data["time"]["high_ms"]
    assert all(isinstance(layer["ms"], float) for layer in data["layers"])
    data = cli.json("predict", model)
    assert "time" not in data and all(layer["ms"] is None for layer in data["layers"])
    assert (
        "INT8 as placed: "
        in cli("predict", model, "--gpu", "T4", "--format", "markdown").splitlines()[2]
    )
    out = cli("predict", model, "--target", "trt8.6", "--gpu", "T4", "--layers")
    layers = out.partition("Engine layers")[2].partition("\n\n")[0].splitlines()[1:]
    assert layers and all(line.endswith(" ms") for line in layers)
    first = cli(
        "predict", saved(tmp_path, chain(quantized=False, batch=16)), "--gpu", "A100"
    ).splitlines()
    assert first[0].startswith("FP16: ") and "INT8 would be" in first[1]


@pytest.mark.parametrize(("options", "flag"), [([], True), (["--gpu", "T4", "--no-fp16"], False)])
def test_the_build_line_is_of_the_build_that_was_estimated(model, cli, options, flag):
    out = cli("predict", model, "--target", "trt8.6", *options)
    assert ("--fp16" in next(x for x in out.splitlines() if x.startswith("build: "))) is flag


def test_calibrations_versions_and_gains(model, tmp_path, cli):
    kept = tmp_path / "machine.json"
    on = ("predict", model, "--gpu", "T4", "--calibrate")
    assert "0.200 ms on Tesla T4" in cli(*on, "0.2ms", "--save-calibration", kept)
    assert cli.json(*on, kept)["time"]["total_ms"] == pytest.approx(0.2, rel=1e-3)
    before = Path(model).read_bytes()
    cli(*on, "1ms", "--save-calibration", model, code=2)
    assert Path(model).read_bytes() == before
    for target in ("trt8.5", "trt10"):
        found = cli.json("predict", model, "--gpu", "RTX 5090", "--target", target)["findings"]
        assert ("GPU-VERSION" in {f["code"] for f in found}) is (target == "trt8.5")
    cli("predict", model, "--require-gain", "1.1", code=2)
    plain = saved(tmp_path, chain(quantized=False), "float.onnx")
    cli("predict", plain, "--gpu", "rtx 3060", "--require-gain", "1.1", code=1)
    assert "no Q/DQ" in cli.err
    found = cli.json("predict", saved(tmp_path, chain(quantized=False)), "--gpu", "P100")[
        "findings"
    ]
    assert "GPU-NO-INT8" not in {f["code"] for f in found}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "rtx 9999"], "not in the table"),
        (["--clock", "1000"], "need --gpu"),
        (["--gpu", "T4", "--clock", "5"], "--clock"),
        (["--gpu", "T4", "--calibrate", "nothing.json"], "nothing.json"),
        (["--gpu", "T4", "--save-calibration", "x.json"], "give both"),
        (["--sm", "banana"], "not in the table"),
        (["--gpu", "T4", "--require-gain", "nan"], "--require-gain"),
        (["--gpu", "T4", "--sm", "8.6"], "give one of the two"),
        (["--gpu", "T4", "--power", "x"], "watts"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(model, cli, arguments, words):
    assert words in cli.refused("predict", model, *arguments)


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        ("6.0", "GPU-NO-INT8"),
        ("5.3", "GPU-NO-INT8"),
        ("70", "GPU-DP4A"),
        ("6.1", "GPU-DP4A"),
        ("8.6", None),
        ("7.5", None),
    ],
)
def test_what_a_compute_capability_cannot_do(model, cli, capability, code):
    found = cli.json("predict", model, "--target", "trt8.5", "--sm", capability)["findings"]
    assert [f["code"] for f in found if f["code"].startswith("GPU-")] == ([code] if code else [])


@pytest.mark.parametrize("target", ["trt8.0", "trt8.4", "trt8.6", "trt10", "trt11", "rtx1.7"])
def test_every_target_has_a_time(model, cli, target):
    assert (
        0.01
        < cli.json("predict", model, "--gpu", "RTX 3060", "--target", target)["time"]["total_ms"]
        < 1
    )


def test_gpus(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("gpus")
    assert "Jetson Orin NX 16GB" in out and max(map(len, out.splitlines())) <= 80
    found = cli.json("gpus", "orin-nx")["gpus"]
    assert [g["name"] for g in found] == ["Jetson Orin NX 16GB"] and found[0]["source"]
    cli("gpus", "nonsense", code=2)


def profile_of(path, tmp_path, factor=1.0):
    """A profile with the layers of a prediction, as if it had been measured."""
    from qdqtool.model.modelfile import load
    from qdqtool.prediction import predict
    from qdqtool.timing.estimate import estimate
    from qdqtool.timing.gpus import find
    from qdqtool.trt.targets import target_named

    index = load(path)
    target = target_named("trt8.4")
    prediction = predict(index, target)
    times = estimate(index, prediction, find("A100 80GB PCIe"), target).layers
    keys = ("timeMs", "averageMs", "medianMs")
    rows = [
        {"name": layer.name, **dict.fromkeys(keys, t * factor), "percentage": 1.0}
        for layer, t in zip(prediction.layers, times, strict=True)
    ]
    listing = {
        "Layers": [
            {"Name": layer.name, "LayerType": "CaskConvolution"} for layer in prediction.layers
        ]
    }
    (tmp_path / "layers.json").write_text(json.dumps(listing))
    (tmp_path / "profile.json").write_text(json.dumps([{"count": 1}, *rows]))
    return path, str(tmp_path / "layers.json"), str(tmp_path / "profile.json")


def test_verify_compares_times(model, tmp_path, cli):
    files = profile_of(model, tmp_path)
    times = cli.json("verify", *files, "--gpu", "A100 80GB PCIe", code=1)["times"]
    assert times["within"] and times["layers"]["median_error"] < 0.01 and not times["slow"]
    files = profile_of(model, tmp_path, 3.0)
    out = cli("verify", *files, "--gpu", "A100 80GB PCIe", code=1)
    assert "outside the range" in out and "slow:" in out


def test_engine_says_what_layers_usually_take(tmp_path, cli):
    wide = "Thirty-two wide channel vectorized row major Int8 format"
    layer = {
        "Name": "conv",
        "LayerType": "CaskConvolution",
        "ParameterType": "Convolution",
        "Kernel": [3, 3],
        "Groups": 1,
        "OutMaps": 64,
        "Weights": {"Type": "Int8", "Count": 36864},
        "TacticName": "slow_tactic",
        "Inputs": [{"Name": "a", "Dimensions": [8, 64, 56, 56], "Format/Datatype": wide}],
        "Outputs": [{"Name": "b", "Dimensions": [8, 64, 56, 56], "Format/Datatype": wide}],
    }
    (tmp_path / "g.json").write_text(json.dumps({"Layers": [layer]}))
    (tmp_path / "p.json").write_text(
        json.dumps(
            [
                {"count": 1},
                {
                    "name": "conv",
                    "timeMs": 5.0,
                    "averageMs": 5.0,
                    "medianMs": 5.0,
                    "percentage": 100.0,
                },
            ]
        )
    )
    out = cli("engine", tmp_path / "g.json", tmp_path / "p.json", "--gpu", "RTX 3060")
    assert "Slower than such layers usually are on RTX 3060" in out and "slow_tactic" in out
    row = cli.json("engine", tmp_path / "g.json", tmp_path / "p.json", "--gpu", "T4")["layers"][0]
    assert 0 < row["best_ms"] < row["expected_ms"] < 5 and row["times_expected"] > 10


def test_the_decision_comes_first_and_has_a_range(model, cli):
    time = cli.json("predict", model, "--gpu", "rtx 3060")["time"]
    gain = time["gain"]
    assert gain["low"] < gain["value"] < gain["high"]
    assert gain["value"] == pytest.approx(time["float"]["total_ms"] / time["total_ms"], rel=1e-2)
    assert gain["faster"] == ("INT8" if gain["value"] > 1 else "FP16")
    assert 0 < gain["signs_right"] <= gain["signs_measured"]
    assert time["layouts_ms"] >= 0


@pytest.mark.parametrize(("share", "code"), [(0.9, 0), (1.1, 1)])
def test_require_gain_is_judged_by_the_low_end(model, cli, share, code):
    low = cli.json("predict", model, "--gpu", "rtx 3060")["time"]["gain"]["low"]
    cli("predict", model, "--gpu", "rtx 3060", "--require-gain", share * low, code=code)
    assert ("--require-gain" in cli.err) is bool(code)
