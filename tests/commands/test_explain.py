"""``qdqtool explain``."""

import json

import pytest

from qdqtool.cli import run
from qdqtool.explain.codes import CODES


@pytest.mark.parametrize("code", ["SKIP-FLOAT", "zp_nonzero", "CONCAT-SCALE"])
def test_code(capsys, code):
    assert run(["explain", code]) == 0
    out = capsys.readouterr().out
    for heading in ("Cause", "What TensorRT does", "In a log", "Fix", "Where it holds"):
        assert f"\n{heading}\n" in out
    assert max(map(len, out.splitlines())) <= 120


def test_lists_and_texts(capsys):
    assert run(["explain", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(code in out for code in CODES)
    assert run(["explain", "--list", "--format", "json"]) == 0
    assert {c["code"] for c in json.loads(capsys.readouterr().out)} == set(CODES)
    assert run(["explain", "Scale", "coefficients", "must", "all", "be", "positive"]) == 0
    assert "Cause" in capsys.readouterr().out
    run(["explain", "SKIP-FLOAT"])
    out = capsys.readouterr().out
    assert "trt8.0, trt8.4, trt8.5, trt8.6: seen:" in out and "trt10, trt11: assumed:" in out
    assert "not on rtx1.7" in out


@pytest.mark.parametrize("message", [
    '[6] Assertion failed: shiftIsAllZeros(zeroPoint) && "TRT only supports symmetric quantization"',
    "[E] [TRT] 4: Could not fuse 2nd input (kernel weights) of CONVOLUTION",
])
def test_error_text(capsys, message):
    assert run(["explain", message]) == 0
    out = capsys.readouterr().out
    assert "Cause" in out and "Fix" in out and "'qdqtool predict' reports it before the build" in out


@pytest.mark.parametrize(("arguments", "said"), [
    (["SKIPFLOAT"], "SKIP-FLOAT"), (["what ails thee"], "is not a finding code"), ([], "give a finding"),
])
def test_unknown(capsys, arguments, said):
    assert run(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
