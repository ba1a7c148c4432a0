from pathlib import Path

import pytest

from qdqtool.builders.child import is_installed
from tests.builders.models import NASTY, saved, two_convolutions
from tests.commands.conftest import Cli

needs_compiler = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@needs_compiler
def test_text_and_json(tmp_path: Path, cli: Cli) -> None:
    path = saved(two_convolutions(), tmp_path)
    out = cli("build", path, "-o", tmp_path / "out")
    assert (
        "1 of 2 convolutions in INT8" in out
        and "build.log" in out
        and "NVIDIA's licence" in cli.err
    )
    table = cli.json("build", path, "--sm", "8.9", "--sm", "SM86")
    assert cli.err == ""
    assert (table["schema"], table["status"], table["targets"]) == (
        "qdqtool/build/1",
        "built",
        ["SM89", "SM86"],
    )
    assert [n["precision"] for n in table["nodes"]] == ["INT8", "FP32"]


@needs_compiler
def test_what_was_built(tmp_path: Path, cli: Cli) -> None:
    """The compiler gets a copy with such names, which is there when it reads it."""
    path = saved(two_convolutions(NASTY, ""), tmp_path)
    assert "2 of 2 convolutions agree" in cli("verify", path, "--builder", "tensorrt-rtx")
    path = saved(two_convolutions(bad_zero_point=True), tmp_path)
    assert "refused: Assertion failed: shiftIsAllZeros" in cli(
        "build", path, "-o", tmp_path / "out", code=1
    )
    assert (tmp_path / "out" / "build.log").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sm", "x"], "give a compute capability"),
        (["--sm", "87"], "cannot build for SM87"),
        (["--sm", "86", "--builder", "trtexec"], "--sm is for tensorrt-rtx"),
        (["--shapes", "images"], "give INPUT:1x3x640x640"),
        (["--shapes", "a:1x2,1x2"], "give INPUT:1x3x640x640"),
        (["--timeout", "-1"], "--timeout"),
        (["--timeout", "nan"], "--timeout"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--builder", "tvm"], "Invalid value for '--builder'"),
        (["--engine"], "needs a folder"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], said: str, tmp_path: Path, cli: Cli) -> None:
    cli("build", saved(two_convolutions(), tmp_path), *arguments, code=2)
    assert said in cli.err.splitlines()[-1]
