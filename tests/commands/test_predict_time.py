import json
import re
from pathlib import Path

import pytest

import qdqtool
from qdqtool.timing.gpus import find_gpu
from tests.commands.conftest import Cli
from tests.timing.models import convolution_chain, save_model
from tests.trt.builder import Graph


@pytest.fixture
def model(current_folder: Path) -> str:
    return save_model(current_folder, convolution_chain())


def test_float_file_is_not_to_be_quantized_for_a_gpu_without_int8(
    model: str, cli: Cli, tmp_path: Path
) -> None:
    save_model(tmp_path, convolution_chain(quantized=False))
    arguments = ("predict", model, "--target", "8.5", "--gpu", "Jetson Nano")
    assert "qdqtool insert" not in cli(*arguments).split("Found")[1]
    assert "qdqtool insert" in cli(*arguments, "--gpu", "T4").split("Found")[1]


def test_input_conversion_is_a_note(model: str, cli: Cli) -> None:
    # The time next to the Q/DQ layers, the saving and JSON are the same number.
    text = cli("predict", model, "--gpu", "rtx 3060", "--all")
    (note,) = (part for part in text.split("\n\n") if part.startswith("note INPUT-CONVERSION"))
    (saving,) = re.findall(r"saves: at most ([\d.]+) ms", note)
    assert re.search(rf"Q/DQ layers .*[( ]{saving} ms\)", text)
    assert float(saving) == pytest.approx(
        cli.json("predict", model, "--gpu", "rtx 3060")["time"]["conversions_ms"], rel=1e-2
    )


@pytest.mark.parametrize("has_next", [True, False])
def test_saving_of_not_quantized_layer_includes_output_before(
    cli: Cli, current_folder: Path, has_next: bool
) -> None:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 64, 80, 80), "c0", 64), "r0")
    y = g.relu(g.conv(x, "c1", 64, scale=None, weights="float"), "r1") if has_next else x
    text = cli("predict", save_model(current_folder, g.model(y)), "--gpu", "rtx 3060", "--all")
    assert dict(re.findall(r" (OUT-FLOAT|NOT-QUANTIZED)  .*?\n  saves: (\w+)", text, re.S)) == (
        {"OUT-FLOAT": "included", "NOT-QUANTIZED": "at"} if has_next else {"OUT-FLOAT": "at"}
    )
    included = {f.saving_included_in for f in qdqtool.predict(g.model(y), gpu="T4").findings}
    assert included == ({None, "NOT-QUANTIZED"} if has_next else {None})
    page = qdqtool.report(g.model(y), gpu="rtx 3060").html
    assert ("; the time that the fix saves is included in" in page) == has_next


def test_predict_several_gpus_have_a_row_each(model: str, cli: Cli) -> None:
    gpus = ("Tesla T4", "RTX 3060", "Jetson Orin Nano 8GB")
    arguments = ["predict", model, *(word for gpu in gpus for word in ("--gpu", gpu))]
    data = cli.json(*arguments)
    assert data["time"] == data["times"][0] and [t["gpu"] for t in data["times"]] == list(gpus)
    text, markdown = cli(*arguments), cli(*arguments, "--format", "markdown")
    for gpu, time in zip(gpus, data["times"], strict=True):
        (shown,) = re.findall(rf"^  {gpu} +([\d.]+) +([\d.]+) ", text, re.MULTILINE)
        expected = time["float"]["total_ms"], time["total_ms"]
        assert [*map(float, shown)] == pytest.approx(expected, rel=5e-3) and gpu in markdown


def test_predict_gpu_markdown_has_the_times(model: str, cli: Cli) -> None:
    arguments = ["predict", model, "--gpu", "T4"]
    times = re.findall(r"^  (?:INT8|FP16) +([\d.]+ ms)", cli(*arguments), re.MULTILINE)
    markdown = cli(*arguments, "--format", "markdown")
    assert len(times) >= 2 and all(time in markdown for time in times)


def test_predict_gpu_of_float_model_counts_each_format(tmp_path: Path, cli: Cli) -> None:
    path = save_model(tmp_path, convolution_chain(quantized=False, batch=16, channels=64))
    time = cli.json("predict", path, "--gpu", "L4", "--target", "10.16")["time"]
    int8, fp8 = time["best"], time["best_fp8"]
    assert int8["int8"] > 0 == int8["fp8"] and fp8["fp8"] > 0 == fp8["int8"]
    assert fp8["gain_low"] < fp8["gain"] < fp8["gain_high"]
    assert "  FP8 by qdqtool insert --precision fp8 " in cli(
        "predict", path, "--gpu", "L4", "--target", "10.16"
    )


@pytest.mark.parametrize(("options", "flag"), [([], True), (["--gpu", "T4", "--no-fp16"], False)])
def test_predict_build_command_has_the_types_of_the_estimate(
    model: str, cli: Cli, options: list[str], flag: bool
) -> None:
    text = cli("predict", model, "--target", "trt8.6", *options)
    assert ("--fp16" in text[text.index("trtexec") : text.index("build.log")]) is flag


@pytest.mark.parametrize("page", ["--all", "--layers"])
@pytest.mark.parametrize(
    ("options", "noted"), [([], ["2"]), (["--no-fp16"], []), (["--strongly-typed"], [])]
)
def test_predict_states_the_number_of_layers_estimated_in_fp32(
    model: str, cli: Cli, page: str, options: list[str], noted: list[str]
) -> None:
    text = cli("predict", model, "--gpu", "L4", page, *options)
    assert re.findall(r"(\d+) float layers are estimated in FP32", text) == noted
    listed = re.findall(r"\n  [A-Z]\w+: (.* -> .*), [\d.]+ ms", text)
    assert listed == ["FP32 -> INT8", *2 * ["INT8 -> INT8"], "INT8 -> FP32", "FP32 -> FP32"] * (
        page == "--layers"
    )


def test_outputs_name_the_estimated_float_type(model: str, cli: Cli) -> None:
    command = ("predict", model, "--gpu", "L4")
    texts = cli(*command, "--all"), cli(*command, "--format", "markdown")
    for text in (*texts, qdqtool.report(model, gpu="L4").html):
        assert "(1 of them with FP32 output)" in text and "conv2 writes float" in text
    assert "  INT8 -> FP32  conv2  + relu2" in texts[0]
    assert all("2 float layers are estimated in FP32" in text for text in texts)
    assert cli.json(*command)["time"]["fp32_layers"] == 2  # conv2 and the Sigmoid after it


@pytest.mark.parametrize("form", ["markdown", "sarif"])
def test_formats_for_reviews_have_the_types_without_fp16(model: str, cli: Cli, form: str) -> None:
    text = cli("predict", model, "--no-fp16", "--format", form)
    assert "writes FP32" in text and "writes FP16" not in text


def test_markdown_warns_of_another_batch_than_that_of_the_file(model: str, cli: Cli) -> None:
    text = cli("predict", model, "--gpu", "L4", "--batch", "8", "--format", "markdown")
    assert "Warning: the times are for the model exported with batch 8" in text


def test_predict_calibrate_with_a_measured_time(model: str, tmp_path: Path, cli: Cli) -> None:
    calibration = tmp_path / "machine.json"
    arguments = ("predict", model, "--gpu", "T4", "--calibrate")
    time = cli.json(*arguments, "0.2ms", "--save-calibration", calibration)["time"]
    assert time["total_ms"] == pytest.approx(0.2, rel=1e-3)
    assert cli.json(*arguments, calibration)["time"]["total_ms"] == time["total_ms"]
    before = Path(model).read_bytes()
    cli.refuse(*arguments, "1ms", "--save-calibration", model)
    assert Path(model).read_bytes() == before


@pytest.mark.parametrize(
    ("gpu", "target", "severity"),
    [
        ("RTX 5090", "trt8.6", "error"),
        ("RTX 5090", "10.3", "error"),
        ("RTX 5090", "10.8", None),
        ("RTX 5090", "trt10", None),
        ("GTX 1080", "trt10", "error"),
        ("GTX 1080", "trt8.6", None),
        ("V100", "10.5", "error"),
        ("V100", "trt10", "warning"),  # until 10.4
        ("V100", "10.4", None),
        ("T4", "trt11", None),
        ("L4", "8.4", "error"),
    ],
)
def test_predict_gpu_that_the_target_does_not_support(
    model: str, cli: Cli, gpu: str, target: str, severity: str | None
) -> None:
    arguments = ("predict", model, "--gpu", gpu, "--target", target)
    severities = {f["code"]: f["severity"] for f in cli.json(*arguments)["findings"]}
    assert severities.get("GPU-VERSION") == severity
    text = cli(*arguments)
    assert (
        bool(re.search(r"^  INT8 +[\d.]+ ms", text, re.MULTILINE))
        is ("trtexec" in text)
        is (severity != "error")
    )


def test_predict_lists_a_gpu_without_int8_next_to_others(model: str, cli: Cli) -> None:
    arguments = (
        "predict",
        model,
        *(f"--gpu={gpu}" for gpu in ("Jetson Nano", "P100", "GTX 1080", "L4")),
    )
    assert "no engine: GPU-VERSION" in cli(*arguments)
    answer = cli.json(*arguments)
    nano, *_, l4 = answer["times"]
    assert [t["supported"] for t in answer["times"]] == [False, False, False, True]
    assert nano["total_ms"] is None and nano["gain"] is None and l4["total_ms"] > 0
    limits = [f["severity"] for f in answer["findings"] if f["code"] == "GPU-NO-INT8"]
    # One for each GPU.
    assert limits == ["error", "error"] and answer["time"]["gpu"] == "L4"


def test_predict_lists_a_gpu_without_fp8_next_to_others(tmp_path: Path, cli: Cli) -> None:
    g = Graph(opset=19, fp8=True)
    path = save_model(tmp_path, g.model(g.conv(g.input(1, 32, 8, 8), "c", 32)))
    arguments = ("predict", path, "--gpu", "Jetson Orin Nano 8GB", "--gpu", "RTX 4090")
    text = cli(*arguments, "--layers")
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and line}
    assert "no engine: FP8-GPU" in rows["Jetson"] and len(re.findall(r"  \d", rows["RTX"])) == 5
    assert "reject" not in text and "trtexec" in text and "Slowest layers on RTX 4090," in text
    answer = cli.json(*arguments)
    orin, ada = answer["times"]
    assert not answer["rejected"] and not orin["supported"]
    assert orin["total_ms"] is None and orin["float"] is None
    assert [orin, ada] == [
        cli.json("predict", path, "--gpu", gpu)["time"]
        for gpu in ("Jetson Orin Nano 8GB", "RTX 4090")
    ]
    (limit,) = (f for f in answer["findings"] if f["code"] == "FP8-GPU")
    assert limit["severity"] == "error" and "Orin" in limit["message"]
    assert "FP8-GPU" in cli(*arguments, "--fail-on", "error", code=1)
    assert "reject" in cli("predict", path, "--gpu", "Jetson Orin Nano 8GB")


def test_predict_warns_of_a_batch_that_the_file_does_not_have(model: str, cli: Cli) -> None:
    text = cli("predict", model, "--gpu", "L4", "--batch", "8")
    assert ", batch 8 (file: 1)," in text and "warning: the times are for the model" in text
    assert "fixed batch" not in cli("predict", model, "--gpu", "L4")


@pytest.mark.parametrize(
    ("quantized", "gpu", "reason"),
    [(False, "rtx 3060", "--require-gain 1.1"), (True, "GTX 1080", "GPU-VERSION")],
    ids=["float model", "unsupported GPU"],
)
def test_predict_without_gain_meets_no_gain(
    tmp_path: Path, cli: Cli, quantized: bool, gpu: str, reason: str
) -> None:
    path = save_model(tmp_path, convolution_chain(quantized=quantized))
    cli("predict", path, "--gpu", gpu, "--require-gain", "1.1", code=1)
    assert reason in cli.err


@pytest.mark.parametrize(
    ("options", "is_noted"),
    [
        (("Orin Nano 8GB",), True),
        (("Orin Nano 8GB", "--gpu", "L4"), True),
        (("Orin Nano 8GB", "--power", "7W"), False),
        (("Orin Nano 8GB", "--target", "8.5.2"), False),
        (("Orin Nano 8GB", "--target", "10.3"), True),
        (("Orin Nano 8GB Super",), False),
        (("RTX 4070",), False),
    ],
)
def test_predict_names_the_super_mode_of_a_jetson(
    model: str, cli: Cli, options: tuple[str, ...], is_noted: bool
) -> None:
    text = cli("predict", model, "--gpu", *options)
    assert text.count("Super mode") == text.count("'Jetson Orin Nano 8GB Super'") == is_noted
    assert "Super mode" not in str(cli.json("predict", model, "--gpu", *options))


def test_gpus_lists_all_or_one(cli: Cli) -> None:
    (gpu,) = cli.json("gpus", "orin-nx-8gb")["gpus"]
    assert gpu["name"] == "Jetson Orin NX 8GB" and gpu["source"]
    assert cli.json("gpus", "orin-nx")["gpus"][0]["name"] == "Jetson Orin NX 16GB"


def test_engine_gpu_compares_layers_with_measured_ones(tmp_path: Path, cli: Cli) -> None:
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
    times = {"timeMs": 5.0, "averageMs": 5.0, "medianMs": 5.0, "percentage": 100.0}
    (tmp_path / "p.json").write_text(json.dumps([{"count": 1}, {"name": "conv", **times}]))
    text = cli("engine", tmp_path / "g.json", tmp_path / "p.json", "--gpu", "RTX 3060")
    assert "slow_tactic" in text and "RTX 3060" in text
    row = cli.json("engine", tmp_path / "g.json", tmp_path / "p.json", "--gpu", "T4")["layers"][0]
    assert 0 < row["best_ms"] < row["expected_ms"] < 5 and row["times_expected"] > 10


def test_predict_gain_has_a_range(model: str, cli: Cli) -> None:
    time = cli.json("predict", model, "--gpu", "rtx 3060")["time"]
    gain = time["gain"]
    assert gain["low"] < gain["value"] < gain["high"]
    assert gain["value"] == pytest.approx(time["float"]["total_ms"] / time["total_ms"], rel=1e-2)
    assert gain["faster"] == ("INT8" if gain["value"] > 1 else "FP16")
    assert 0 < gain["signs_right"] <= gain["signs_measured"]
    page = (Path(__file__).parents[2] / "docs" / "times.md").read_text("utf-8")
    assert time.keys() == set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    )


@pytest.mark.parametrize(("share", "code"), [(0.9, 0), (1.1, 1)])
def test_predict_require_gain_compares_the_low_end(
    model: str, cli: Cli, share: float, code: int
) -> None:
    low = cli.json("predict", model, "--gpu", "rtx 3060")["time"]["gain"]["low"]
    cli("predict", model, "--gpu", "rtx 3060", "--require-gain", share * low, code=code)
    assert ("--require-gain" in cli.err) is bool(code)


@pytest.mark.parametrize(
    "gpus", [("L4",), ("RTX 4080",), ("RTX 4090",), ("RTX 3060",), ("L4", "B300"), ("B300", "T4")]
)
def test_note_about_fp8_comes_with_a_row_of_fp8(
    gpus: tuple[str, ...], tmp_path: Path, cli: Cli
) -> None:
    path = save_model(tmp_path, convolution_chain(quantized=False))
    text = cli("predict", path, *(word for gpu in gpus for word in ("--gpu", gpu)))
    has_row = (
        re.search(r"^ +FP8 by| FP8 +speed", text.split("\n  note")[0], re.MULTILINE) is not None
    )
    assert has_row == ("FP8 times are computed" in " ".join(text.split()))
    assert has_row == any(find_gpu(gpu).has_fp8 for gpu in gpus)


@pytest.mark.parametrize(("gpu", "advises_auto"), [("B300", True), ("L4", False)])
def test_advice_to_quantize_depends_on_the_fastest_type(
    gpu: str, advises_auto: bool, tmp_path: Path, cli: Cli
) -> None:
    # INT8 is far slower than FP16 on B300.
    path = save_model(tmp_path, convolution_chain(channels=256, quantized=False))
    assert (
        "--precision auto --gpu" in " ".join(cli("predict", path, "--gpu", gpu).split())
    ) == advises_auto


def test_ranges_of_several_gpus_are_those_of_a_single_gpu(model: str, cli: Cli) -> None:
    gpus = ("T4", "L4", "Jetson Orin Nano 8GB")
    table = " ".join(cli("predict", model, *(w for gpu in gpus for w in ("--gpu", gpu))).split())
    for gpu in gpus:
        text = " ".join(cli("predict", model, "--gpu", gpu).split())
        match = re.search(r"80 % range ([^)]*)\)", text)
        assert match is not None and f"({match[1]})" in table
