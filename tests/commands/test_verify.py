"""``qdqtool verify``: what the command words itself."""

from pathlib import Path

from tests.commands.conftest import Cli
from tests.trt.evidence import HOME, prediction
from tests.verification.synthetic import log_of

CASE = "resnet18-qat-rtx2000-trt8510"
MODEL = str(HOME / CASE / "model.onnx.gz")


def written(folder: Path, version: str = "8502") -> str:
    path = folder / "build.log"
    path.write_text("\n".join(log_of(prediction(CASE), version)) + "\n")
    return str(path)


def test_versions_gpus_and_lines(tmp_path: Path, cli: Cli) -> None:
    path = written(tmp_path, "7203")
    error = cli.refused("verify", MODEL, path)
    assert "older than 8.0" in error and error.endswith("give --target")
    cli("verify", MODEL, path, "--target", "trt8.5")
    assert "--from-log compares no times" in cli.refused("verify", "--from-log", written(tmp_path), "--gpu", "T4")
    path = written(tmp_path)
    text = " ".join(cli("verify", MODEL, path).split())
    assert "607 of 607 agree (607 predicted), 607 of them in the log's order" in text
    trace = cli.json("verify", MODEL, path)["trace"]
    assert trace == {"predicted": 607, "built": 607, "agree": 607, "in_order": 607}
