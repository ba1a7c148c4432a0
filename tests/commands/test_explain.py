"""``qdqtool explain``."""


import pytest

from qdqtool.explain.codes import CODES


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


@pytest.mark.parametrize("message", [
    '[6] Assertion failed: shiftIsAllZeros(zeroPoint) && "TRT only supports symmetric quantization"',
    "[E] [TRT] 4: Could not fuse 2nd input (kernel weights) of CONVOLUTION",
])
def test_error_text(cli, message):
    out = cli("explain", message)
    assert "Cause" in out and "Fix" in out and "'qdqtool predict' reports it before the build" in out


@pytest.mark.parametrize(("arguments", "said"), [
    (["SKIPFLOAT"], "SKIP-FLOAT"), (["what ails thee"], "is not a finding code"), ([], "give a finding"),
])
def test_unknown(cli, arguments, said):
    assert said in cli.refused("explain", *arguments)
