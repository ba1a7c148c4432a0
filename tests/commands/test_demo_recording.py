"""The recorded build: it is of the default model, says so when it is not, and a wrong entry shows."""

import json
from pathlib import Path

import pytest

from qdqtool.builders import child
from qdqtool.commands import demo_run as recording
from qdqtool.commands.demo_run import RECORDING, verify_recorded
from qdqtool.verification.api import exit_code
from qdqtool.verification.build_model import build_model
from tests.commands.conftest import Cli
from tests.tools.record_demo import quantized_demo


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_demo(tmp_path_factory.mktemp("demo"), 2)  # the recording was made with 100: scales do not count


def test_the_default_model_is_the_recorded_one(quantized: Path) -> None:
    result = verify_recorded(quantized)
    assert result is not None, "the demo's model or placement has changed: run python -m tests.tools.record_demo"
    assert result.convolutions.agree == result.convolutions.total == 64
    assert (exit_code(result), result.build.tensorrt) == (0, "1.7.1.116")
    table = json.loads(RECORDING.read_text())
    assert set(table) == {"what", "tensorrt", "structure", "convolutions"}
    assert all(set(row) == {"name", "precision", "output"} for row in table["convolutions"])


def test_a_recording_that_says_otherwise_is_a_mismatch(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = json.loads(RECORDING.read_text())
    changed, lost = table["convolutions"][5], table["convolutions"].pop(7)
    changed["precision"] = "FP32" if changed["precision"] == "INT8" else "INT8"
    (tmp_path / "other.json").write_text(json.dumps(table))
    monkeypatch.setattr(recording, "RECORDING", tmp_path / "other.json")
    result = verify_recorded(quantized)
    assert result is not None
    assert [m.name for m in result.mismatches] == [changed["name"]]
    assert result.convolutions.unknown_names == (lost["name"],)
    assert exit_code(result) == 1


@pytest.mark.skipif(not child.is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed")
def test_the_recording_is_what_the_compiler_says(quantized: Path) -> None:
    built = {n.name: (str(n.precision), str(n.output)) for n in build_model(quantized).nodes}
    table = json.loads(RECORDING.read_text())
    assert {row["name"]: (row["precision"], row["output"]) for row in table["convolutions"]} == built


@pytest.mark.slow
def test_the_default_demo_verifies_without_a_compiler(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "is_installed", lambda _package: False)
    text = cli("demo", "-o", tmp_path, "--images", "2")
    assert "64 of 64 convolutions agree" in text and "recording of an earlier build" in text
