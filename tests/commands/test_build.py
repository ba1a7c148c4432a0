import json
from pathlib import Path

import pytest

from qdqtool.builders.child import is_installed
from qdqtool.cli import run
from tests.builders.models import NASTY, saved, two_convolutions
from tests.tables import cases

needs_compiler = pytest.mark.skipif(not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@needs_compiler
def test_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(two_convolutions(), tmp_path)
    assert run(["build", path, "-o", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "1 of 2 convolutions in INT8" in shown.out
    assert "build.log" in shown.out
    assert "NVIDIA's licence" in shown.err
    assert run(["build", path, "--format", "json", "--sm", "8.9", "--sm", "SM86"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    table = json.loads(shown.out)
    assert (table["schema"], table["status"], table["targets"]) == ("qdqtool/build/1", "built", ["SM89", "SM86"])
    assert [n["precision"] for n in table["nodes"]] == ["INT8", "FP32"]


@needs_compiler
def test_what_was_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The compiler gets a copy with such names, which is there when it reads it."""
    path = saved(two_convolutions(NASTY, ""), tmp_path)
    assert run(["verify", path, "--builder", "tensorrt-rtx"]) == 0
    assert "2 of 2 convolutions agree" in capsys.readouterr().out
    path = saved(two_convolutions(bad_zero_point=True), tmp_path)
    assert run(["build", path, "-o", str(tmp_path / "out")]) == 1
    assert "refused: Assertion failed: shiftIsAllZeros" in capsys.readouterr().out
    assert (tmp_path / "out" / "build.log").exists()


@pytest.mark.parametrize(*cases("commands/build-bad-usage-is-one-line"))
def test_bad_usage_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["build", saved(two_convolutions(), tmp_path), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error
