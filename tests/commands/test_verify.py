"""``qdqtool verify``: what the command words itself."""

from pathlib import Path

import onnx

from qdqtool import predict
from tests.commands.conftest import Cli
from tests.contract import residual
from tests.verification.synthetic import log_of


def test_versions_gpus_and_lines(tmp_path: Path, cli: Cli) -> None:
    model, path = tmp_path / "m.onnx", tmp_path / "build.log"
    onnx.save(residual(), model)
    predicted = predict(residual(), "trt8.5")
    path.write_text("\n".join(log_of(predicted, "7203")) + "\n")
    error = cli.refused("verify", model, path)
    assert "older than 8.0" in error and error.endswith("give --target")
    cli("verify", model, path, "--target", "trt8.5")
    path.write_text("\n".join(log_of(predicted)) + "\n")
    assert "--from-log compares no times" in cli.refused(
        "verify", "--from-log", path, "--gpu", "T4"
    )
    count = len(predicted.trace)
    assert count > 20
    text = " ".join(cli("verify", model, path).split())
    assert (
        f"{count} of {count} agree ({count} predicted), {count} of them in the log's order" in text
    )
    trace = cli.json("verify", model, path)["trace"]
    assert trace == {"predicted": count, "built": count, "agree": count, "in_order": count}
