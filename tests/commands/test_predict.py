"""``qdqtool predict`` as a user meets it."""

import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from tests.explain.test_causes import residual
from tools.growth.families import convolutions


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(residual("float"), path)
    return str(path)


def test_answers(model, cli, tmp_path, g):
    lines = cli("predict", model).splitlines()
    assert lines[0] == "4 convolutions: 4 INT8 (1 to INT8, 3 to float), 0 float; 3 conversions"
    assert lines[1].startswith("  target trt10: assumed:")
    assert any(line.startswith("warning SKIP-FLOAT: ") for line in lines)
    assert lines.index("Conversions that stay at run time (3)") > 0
    out = cli("predict", model, "--all")
    assert "INT8 + FLOAT -> FLOAT  c2  + sum, r2  [SKIP-FLOAT]" in out
    assert "INT8 -> INT8" in out.split("Every convolution")[1]
    out = cli("predict", model, "--trace", "--layers")
    assert "Running: QDQToCopy on next.in.Q" in out
    assert "Conversion: FLOAT -> INT8  next.in.Q" in out
    data = cli.json("predict", model, "--fail-on", "SKIP-FLOAT", code=1)
    assert data["schema"] == "qdqtool/prediction/1" and data["summary"]["conversions"] == 3
    assert (
        data["findings"][0]["code"] == "SKIP-FLOAT" and "c2" in data["findings"][0]["convolutions"]
    )
    assert cli.err == "qdqtool: --fail-on SKIP-FLOAT: 1 finding (SKIP-FLOAT at sum)\n"
    out = tmp_path / "answer.txt"
    assert cli("predict", model, "-o", out) == "" and out.read_text().startswith("4 convolutions")
    onnx.save(
        g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, scale=None, weights="float")),
        tmp_path / "f.onnx",
    )
    cli("predict", tmp_path / "f.onnx", "--require", ".", code=1)
    assert "1 of 1 convolutions are not INT8 (c)" in cli.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--require", "c[12]"], 0, ""),
        (["--require", "c1", "--require", "nothing"], 2, "matches none of the convolutions"),
        (["--require", "["], 2, "not a regular expression"),
        (["--fail-on", "error"], 0, ""),
        (["--fail-on", "warning"], 1, "SKIP-FLOAT at sum"),
        (["--fail-on", "CONCAT-SCALE"], 0, ""),
        (["--fail-on", "skip_float"], 1, "SKIP-FLOAT"),
        (["--fail-on", "SKIP-FLAOT"], 2, "did you mean SKIP-FLOAT"),
        (["--target", "trt7"], 2, "unknown target 'trt7'"),
    ],
)
def test_gates(model, cli, arguments, code, said):
    cli("predict", model, *arguments, code=code)
    assert said in cli.err and cli.err.count("\n") == bool(said)


def test_a_gpu_that_the_target_is_not_for_is_refused_before_anything_is_said_of_it(model, cli):
    cli.refused("predict", model, "--target", "rtx1.7", "--sm", "10.3")
    cli("predict", model, "--target", "trt10", "--sm", "10.3")
    assert cli.err.startswith("qdqtool: --sm: ") and "10.0" in cli.err


@pytest.mark.parametrize("content", [b"", b"not onnx", b"\x1f\x8bbroken"])
def test_bad_files(tmp_path, cli, content):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    cli.refused("predict", path)


def test_help_is_quick():
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "qdqtool", "predict", "--help"], check=True, capture_output=True
    )
    assert time.perf_counter() - start < 2


def test_it_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """Most of what a prediction takes is importing; this is what once came along for a constant or a function."""
    onnx.save(convolutions(12), tmp_path / "m.onnx")
    script = "import sys; from qdqtool.commands.cli import _prepared; _prepared(); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script, "predict", str(tmp_path / "m.onnx")],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "qdqtool.trt.pipeline" in loaded and done.stdout
    assert not loaded & {"PIL", "onnxruntime", "calibration", "qdqtool.timing.parts"}
