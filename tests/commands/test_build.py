from pathlib import Path

import pytest

from tests.builders.models import NASTY, needs_compiler, saved, two_convolutions
from tests.commands.conftest import Cli


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@needs_compiler
def test_build_text_lists_convolutions_and_files(tmp_path: Path, cli: Cli) -> None:
    path = saved(two_convolutions(), tmp_path)
    text = cli("build", path, "-o", tmp_path / "out")
    assert "1 of 2" in text and str(tmp_path / "out" / "build.log") in text
    assert "NVIDIA" in cli.err
    cli("build", path)
    assert cli.err == ""


@needs_compiler
def test_build_json_for_several_gpus(tmp_path: Path, cli: Cli) -> None:
    table = cli.json("build", saved(two_convolutions(), tmp_path), "--sm", "8.9", "--sm", "SM86")
    assert table["schema"] == "qdqtool/build/1"
    assert (table["status"], table["targets"]) == ("built", ["SM89", "SM86"])
    assert [n["precision"] for n in table["nodes"]] == ["INT8", "FP32"]


@needs_compiler
def test_verify_builder_agrees_on_nodes_with_odd_names(tmp_path: Path, cli: Cli) -> None:
    """The compiler reads a copy of the model with names that it can print."""
    path = saved(two_convolutions(NASTY, ""), tmp_path)
    counts = cli.json("verify", path, "--builder", "tensorrt-rtx")["convolutions"]
    assert (counts["agree"], counts["total"]) == (2, 2)


@needs_compiler
def test_build_refused_model_exits_with_1_and_keeps_the_log(tmp_path: Path, cli: Cli) -> None:
    path = saved(two_convolutions(bad_zero_point=True), tmp_path)
    table = cli.json("build", path, "-o", tmp_path / "out", code=1)
    assert table["status"] == "refused" and table["message"]
    assert "shiftIsAllZeros" in (tmp_path / "out" / "build.log").read_text()
