"""``qdqtool explain``."""

import onnx
import pytest

from qdqtool.explain.codes import CODES
from tests.explain.test_causes import residual


@pytest.mark.parametrize("code", ["SKIP-FLOAT", "zp_nonzero", "CONCAT-SCALE"])
def test_code(cli, code):
    out = cli("explain", code)
    for heading in ("Cause", "What TensorRT does", "In a log", "Fix", "Where it holds"):
        assert f"\n{heading}\n" in out
    assert max(map(len, out.splitlines())) <= 120


def test_lists_and_texts(cli):
    out = cli("explain", "--list")
    assert all(code in out for code in CODES)
    assert {c["code"] for c in cli.json("explain", "--list")} == set(CODES)
    assert "Cause" in cli("explain", "Scale", "coefficients", "must", "all", "be", "positive")
    out = cli("explain", "SKIP-FLOAT")
    assert "trt8.0, trt8.4, trt8.5, trt8.6: seen:" in out and "trt10, trt11: assumed:" in out
    assert "not on rtx1.7" in out


@pytest.mark.parametrize(
    "message",
    [
        '[6] Assertion failed: shiftIsAllZeros(zeroPoint) && "TRT only supports symmetric quantization"',
        "[E] [TRT] 4: Could not fuse 2nd input (kernel weights) of CONVOLUTION",
    ],
)
def test_error_text(cli, message):
    out = cli("explain", message)
    assert (
        "Cause" in out and "Fix" in out and "'qdqtool predict' reports it before the build" in out
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["SKIPFLOAT"], "SKIP-FLOAT"),
        (["what ails thee"], "is not a finding code"),
        ([], "give a finding"),
    ],
)
def test_unknown(cli, arguments, said):
    assert said in cli.refused("explain", *arguments)


def test_ways_and_lines(tmp_path, cli):
    model = tmp_path / "m.onnx"
    onnx.save(residual("own"), model)
    assert cli.json("predict", model, "--for", "onnxruntime")["for"]["way"] == "onnxruntime"
    assert "To build it with DeepStream" in cli("predict", model, "--for", "deepstream")
    assert "trt.Logger.VERBOSE" in cli("explain", "FLAG-FP16", "--for", "python")
    assert cli("explain", "--for", "torch-tensorrt").startswith("With Torch-TensorRT")
    cli.refused("predict", model, "--for", "make")
    out = cli("explain", "[V] [TRT] Running: QDQToCopy on QuantizeLinear_28")
    for part in (
        "A conversion that stays in the engine",
        "bevfusion-camera-orin-trt8502:870",
        "Rule: qdqtool/trt/passes/qdq_to_copy.py",
        "Test: tests/trt/passes/test_qdq_to_copy.py",
    ):
        assert part in out, part
    assert all(len(line) <= 80 for line in out.splitlines())
