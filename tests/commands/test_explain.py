from pathlib import Path

import onnx
import pytest

from qdqtool.findings.codes import CODES
from tests.commands.conftest import Cli
from tests.findings.test_causes import residual


def test_explain_list(cli: Cli) -> None:
    assert {c["code"] for c in cli.json("explain", "--list")} == set(CODES)


@pytest.mark.parametrize(
    ("message", "entry"),
    [
        ("Scale coefficients must all be positive", "scale-positive"),
        ("[6] Assertion failed: shiftIsAllZeros(zeroPoint)", "zero-point"),
        (
            "[E] [TRT] 4: Could not fuse 2nd input (kernel weights) of CONVOLUTION",
            "weights-not-folded",
        ),
    ],
)
def test_explain_error_message(cli: Cli, message: str, entry: str) -> None:
    answer = cli.json("explain", *message.split())
    assert answer["id"] == entry and answer["cause"] and answer["fix"]
    assert "qdqtool predict" in cli("explain", message)  # which reports it before a build


def test_predict_for_builder(tmp_path: Path, cli: Cli) -> None:
    onnx.save(residual("own"), model := tmp_path / "m.onnx")
    assert cli.json("predict", model, "--for", "onnxruntime")["for"]["way"] == "onnxruntime"


def test_explain_log_line_names_builds_rule_and_test(cli: Cli) -> None:
    (rule,) = cli.json("explain", "[V] [TRT] Running: QDQToCopy on QuantizeLinear_28")["rules"]
    assert rule["pass"] == "QDQToCopy"
    root = Path(__file__).parents[2]
    assert (root / rule["file"]).is_file() and (root / rule["test"]).is_file()
    builds = [build for case in rule["cases"] for build in case["builds"]]
    assert "bevfusion-camera-orin-trt8502:870" in builds
