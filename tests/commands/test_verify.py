"""``qdqtool verify``: what the command words itself."""

import json
from pathlib import Path

import pytest

from qdqtool.cli import run
from tests.trt.evidence import HOME, prediction
from tests.verification.synthetic import log_of

CASE = "resnet18-qat-rtx2000-trt8510"
MODEL = str(HOME / CASE / "model.onnx.gz")


def written(folder: Path, version: str = "8502") -> str:
    path = folder / "build.log"
    path.write_text("\n".join(log_of(prediction(CASE), version)) + "\n")
    return str(path)


def test_versions_gpus_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "7203")
    assert run(["verify", MODEL, path]) == 2
    error = capsys.readouterr().err
    assert "older than 8.0" in error and error.rstrip().endswith("give --target")
    assert run(["verify", MODEL, path, "--target", "trt8.5"]) == 0
    assert run(["verify", "--from-log", written(tmp_path), "--gpu", "T4"]) == 2
    assert "--from-log compares no times" in capsys.readouterr().err
    path = written(tmp_path)
    assert run(["verify", MODEL, path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "607 of 607 agree (607 predicted), 607 of them in the log's order" in text
    assert run(["verify", MODEL, path, "--format", "json"]) == 0
    trace = json.loads(capsys.readouterr().out)["trace"]
    assert trace == {"predicted": 607, "built": 607, "agree": 607, "in_order": 607}
