from pathlib import Path

import onnx
import pytest

from qdqtool import predict
from tests.commands.conftest import Cli
from tests.contract import residual
from tests.verification.synthetic import log_of


@pytest.fixture
def folder(current_folder: Path) -> Path:
    lines = log_of(predict(residual(), "trt8.5"), "7203")
    onnx.save(residual(), current_folder / "m.onnx")
    (current_folder / "old.log").write_text("\n".join(lines) + "\n")
    return current_folder


def test_verify_build_older_than_any_target_needs_a_target(folder: Path, cli: Cli) -> None:
    assert "--target" in cli.refuse("verify", "m.onnx", "old.log")
    cli("verify", "m.onnx", "old.log", "--target", "trt8.5")
