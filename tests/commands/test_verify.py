from pathlib import Path

import onnx
import pytest

from qdqtool import predict
from tests.commands.conftest import Cli
from tests.contract import residual
from tests.verification.synthetic import log_of


@pytest.fixture
def folder(current_folder: Path) -> Path:
    prediction = predict(residual(), "trt8.5")
    onnx.save(residual(), current_folder / "m.onnx")
    (current_folder / "build.log").write_text("\n".join(log_of(prediction)) + "\n")
    (current_folder / "old.log").write_text("\n".join(log_of(prediction, "7203")) + "\n")
    return current_folder


def test_verify_build_older_than_any_target_needs_a_target(folder: Path, cli: Cli) -> None:
    assert "--target" in cli.refuse("verify", "m.onnx", "old.log")
    cli("verify", "m.onnx", "old.log", "--target", "trt8.5")


def test_verify_counts_optimizer_lines(folder: Path, cli: Cli) -> None:
    count = len(predict(residual(), "trt8.5").trace)
    assert count > 20
    trace = cli.json("verify", "m.onnx", "build.log")["trace"]
    assert trace == {"predicted": count, "built": count, "agree": count, "in_order": count}
    assert f"{count} of {count}" in cli("verify", "m.onnx", "build.log")
