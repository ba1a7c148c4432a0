import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from qdqtool.formats.predict_text import render
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Severity
from qdqtool.reporting.api import report
from tests.commands.conftest import Cli
from tests.findings.lint.test_bfloat16 import quantized as bfloat16_model
from tests.findings.test_causes import residual
from tests.trt.builder import Graph
from tools.growth.families import convolutions


@pytest.fixture
def model(current_folder: Path) -> str:
    onnx.save(residual("float"), current_folder / "m.onnx")
    return "m.onnx"


def test_predict_output_file_has_the_text(model: str, cli: Cli) -> None:
    text = cli("predict", model)
    assert cli("predict", model, "-o", "answer.txt") == ""
    assert Path("answer.txt").read_text().splitlines()[0] == text.splitlines()[0]


def test_predict_lists_the_largest_conversion_first(model: str, cli: Cli) -> None:
    onnx.save(residual("float", channels=24), model)
    title, _, text = cli("predict", model).partition(", the largest first\n")
    assert "CONVERSION (2), INPUT-CONVERSION (1)" in title
    rows = text.splitlines()
    assert "c0.in.Q" in rows[0] and "(6.1 k values)" in rows[0] and "(4.1 k" in rows[1]


def test_outputs_have_the_same_number_of_notes(model: str, cli: Cli) -> None:
    notes = {f["code"] for f in cli.json("predict", model)["findings"] if f["severity"] == "info"}
    assert "CONVERSION" in notes and f"\n{len(notes)} notes with --all: " in cli("predict", model)
    assert (
        set(re.findall("^note ([A-Z0-9-]+) ", cli("predict", model, "--all"), re.MULTILINE))
        == notes
    )
    assert cli("predict", model, "--format", "markdown").count("| note |") == len(notes)
    assert f"● {len(notes)} notes (" in report(model).html


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (["--require", "c[12]"], 0, ""),
        (["--fail-on", "error"], 0, ""),
        (["--fail-on", "warning"], 1, "SKIP-FLOAT at sum"),
        (["--fail-on", "CONCAT-SCALE"], 0, ""),
        (["--fail-on", "skip_float"], 1, "SKIP-FLOAT"),
        (["--target", "trt7"], 2, "'trt7'"),
    ],
)
def test_predict_exit_code(
    model: str, cli: Cli, arguments: list[str], code: int, value: str
) -> None:
    cli("predict", model, *arguments, code=code)
    assert value in cli.err and cli.err.count("\n") == bool(value)


def test_predict_gpu_of_another_target_is_refused_without_notes(model: str, cli: Cli) -> None:
    cli.refuse("predict", model, "--target", "rtx1.7", "--sm", "10.1")
    cli("predict", model, "--target", "trt10", "--sm", "10.1")
    assert cli.err.startswith("qdqtool: --sm: ") and "10.0" in cli.err


@pytest.mark.parametrize(
    ("argument", "used", "unused"),
    [
        ("--help", "click", {"numpy", "onnx", "onnxruntime", "PIL", "qdqtool.trt.pipeline"}),
        (
            "m.onnx",
            "qdqtool.trt.pipeline",
            {"PIL", "onnxruntime", "calibration", "qdqtool.timing.time_calibration"},
        ),
    ],
)
def test_predict_imports_only_what_it_needs(
    model: str, argument: str, used: str, unused: set[str]
) -> None:
    onnx.save(convolutions(12), model)
    command = [sys.executable, "-X", "importtime", "-m", "qdqtool", "predict", argument]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert process.stdout and used in modules
    assert not modules & unused


def test_predict_rejected_model_has_no_times_and_no_build_command(cli: Cli, model: str) -> None:
    # The output starts with the rejection; the fix is a command with file names.
    g = Graph(opset=12)
    x = g.dq(g.q(g.input(1, 16, 8, 8), "q", zero=3), "dq", zero=3)
    onnx.save(g.model(g.dq(g.q(g.conv(x, "c", 16, scale=None), "r"), "dr")), model)
    text = cli("predict", model, "--gpu", "T4", "--layers")
    assert "will reject" in text.splitlines()[2] and "ZP-NONZERO" in text
    assert "trtexec" not in text and not re.search(r"\d ms", text)
    assert not re.search(
        "at run time|in INT8|Not INT8|Confidence|Every convolution| CONVERSION ",
        cli("predict", model, "--all") + cli("predict", model, "--format", "markdown"),
    )
    assert "qdqtool fix m.onnx -o m_fixed.onnx" in text and "2. In the shell, for opset 13" in text
    assert "No times for Tesla T4, L4" in cli("predict", model, "--gpu", "T4", "--gpu", "L4")
    prediction = cli.json("predict", model, "--gpu", "T4")
    assert prediction["rejected"] and "time" not in prediction
    prediction = cli.json("predict", model, "--gpu", "T4", "--gpu", "L4")
    assert [prediction["times"], *(note.split(":")[0] for note in prediction["notes"])] == [
        [],
        "no times for Tesla T4",
        "no times for L4",
    ]
    for condition in (("--require-gain", "0.1"), ("--require", "c")):
        cli("predict", model, "--gpu", "T4", *condition, code=1)
        assert condition[0] in cli.err and "will reject" in cli.err
    assert "(ZP-NONZERO" in cli.err


def test_predict_bfloat16_model_builds_with_bf16(cli: Cli, model: str) -> None:
    onnx.save(bfloat16_model(), model)
    text = " ".join(cli("predict", model).split())
    assert "--int8 --bf16" in text and "--fp16" not in text and "BF16 output" in text


@pytest.mark.parametrize(
    ("options", "is_assumed"), [("", True), ("--target 11", False), ("--strongly-typed", False)]
)
def test_predict_names_the_typing_assumed_for_a_float16_file(
    cli: Cli, model: str, options: str, is_assumed: bool
) -> None:
    assert "\n  Typing " not in cli("predict", model)
    proto = onnx.load(model)
    proto.graph.initializer.append(onnx.helper.make_tensor("half", 10, [1], [1.0]))
    onnx.save(proto, model)
    assert ("\n  Typing " in cli("predict", model, *options.split())) == is_assumed


@pytest.mark.parametrize(
    ("target", "title", "borrows"),
    [
        ("9", "TensorRT 9", True),
        ("10.3", "TensorRT 10.3", True),
        ("8.5.2", "TensorRT 8.5.2", False),
        ("trt10", "TensorRT 10", False),
    ],
)
def test_predict_names_the_requested_version(
    model: str, cli: Cli, target: str, title: str, borrows: bool
) -> None:
    text = cli("predict", model, "--target", target)
    assert text.splitlines()[0].endswith(title)
    rules = [line for line in text.splitlines() if line.split()[:1] == ["Rules"]]
    assert len(rules) == borrows and all(
        re.search(r"\bTensorRT \d", row) and target in row for row in rules
    )
    assert cli.json("predict", model, "--target", target)["requested_target"] == target
    markdown = cli("predict", model, "--target", target, "--format", "markdown")
    assert markdown.splitlines()[0].endswith(f" on {title}")
    assert ("has no rules of its own" in markdown) == borrows
    assert f" for {title}: " in repr(predict(model, target))


@pytest.mark.parametrize(
    ("proto", "promise"),
    [
        (
            residual("own", conv_side=True),
            "[*] 1 place may be fixed without new data, if the prediction improves:",
        ),
        (
            residual("float"),
            "fix may refuse changes that cost accuracy on your images (on random inputs without "
            "--calib): qdqtool fix m.onnx -o m_fixed.onnx --target 8.5 --calib images/",
        ),
    ],
    ids=["note", "warning"],
)
def test_predict_promises_no_fix_of_notes(
    cli: Cli, model: str, proto: onnx.ModelProto, promise: str
) -> None:
    # The finding at the first Add is a note; `fix` rejects its fix if the prediction gets worse.
    onnx.save(proto, model)
    assert promise in " ".join(cli("predict", model, "--target", "8.5").split())


def test_predict_marks_only_groups_with_a_fix() -> None:
    prediction = predict(residual("float"))
    finding = prediction.findings[0]
    prediction.findings.append(replace(finding, severity=Severity.INFO, automatic=False))
    text = str(render(prediction, everything=True))
    assert re.findall(r"^\w+ SKIP-FLOAT.{5}", text, re.M) == [
        "warning SKIP-FLOAT [*] ",
        "note SKIP-FLOAT  The",
    ]
