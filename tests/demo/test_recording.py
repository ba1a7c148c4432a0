import json
from pathlib import Path

import pytest

from qdqtool.demo import recording
from qdqtool.demo.recording import RECORDING, verify_recorded, write_recorded_layers
from qdqtool.verification.api import exit_code, verify
from qdqtool.verification.local_build import build_model
from tests.builders.models import needs_compiler
from tools.record_demo import quantized_demo


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the default model with Q/DQ; scales do not count, so that one image is enough."""
    return quantized_demo(tmp_path_factory.mktemp("demo"), 1, method="max", losses=0, predict=False)


def test_recording_agrees_with_the_default_model(quantized: Path) -> None:
    result = verify_recorded(quantized)
    assert result is not None, (
        "the demo's model or placement has changed: run python -m tools.record_demo"
    )
    assert result.convolutions.agree == result.convolutions.total == 64
    assert (exit_code(result), result.build.tensorrt) == (0, "1.7.1.116")
    table = json.loads(RECORDING.read_text())
    assert set(table) == {"what", "tensorrt", "structure", "convolutions"}
    assert all(set(row) == {"name", "precision", "output"} for row in table["convolutions"])


def test_recording_with_wrong_entries_is_a_mismatch(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = json.loads(RECORDING.read_text())
    changed, lost = table["convolutions"][5], table["convolutions"].pop(7)
    changed["precision"] = "FP32" if changed["precision"] == "INT8" else "INT8"
    (tmp_path / "other.json").write_text(json.dumps(table))
    monkeypatch.setattr(recording, "RECORDING", tmp_path / "other.json")
    result = verify_recorded(quantized)
    assert [m.name for m in result.mismatches] == [changed["name"]]
    assert (result.convolutions.unknown_names, exit_code(result)) == ((lost["name"],), 1)


def test_recorded_layers_are_read_by_verify(quantized: Path, tmp_path: Path) -> None:
    write_recorded_layers(tmp_path / "layers.json")
    result = verify(quantized, tmp_path / "layers.json")
    assert (result.convolutions.agree, exit_code(result), result.times) == (64, 0, None)


@needs_compiler
def test_recording_agrees_with_the_compiler(quantized: Path) -> None:
    built = {n.name: (str(n.precision), str(n.output)) for n in build_model(quantized).nodes}
    assert {
        row["name"]: (row["precision"], row["output"])
        for row in json.loads(RECORDING.read_text())["convolutions"]
    } == built
