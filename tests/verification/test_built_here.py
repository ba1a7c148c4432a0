"""Building and verifying in one step, with a builder that says what the test wants."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import onnx
import pytest

from qdqtool.builders.run import BuildResult
from qdqtool.buildlog.read import read_build
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.prediction import predict
from qdqtool.verification.api import exit_code
from qdqtool.verification.build_model import BuiltModel
from qdqtool.verification.built_here import verify_with_builder
from tests.trt.builder import Graph
from tests.verification.synthetic import log_of

SM: list[Any] = []


def answers(monkeypatch: pytest.MonkeyPatch, result: BuildResult) -> None:
    def build(model: object, builder: str, *_: object, sm: Any = None, **__: object) -> BuildResult:
        SM.append(sm)
        return result

    for home in ("qdqtool.builders.build", "qdqtool.verification.build_model.build_model"):
        with contextlib.suppress(ImportError, AttributeError):
            monkeypatch.setattr(home, build)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "m.onnx"


def written(path: Path, zero: int) -> Path:
    """One quantized convolution; TensorRT-RTX refuses a zero point that is not 0."""
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "p", zero=zero)
    onnx.save(g.model(g.conv(x, "c", 16, scale=None)), path)
    return path


def test_time_that_ran_out_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, BuildResult("tensorrt-rtx", "timeout", message="stopped after 5 s"))
    with pytest.raises(BuilderError, match="did not end in time; stopped after 5 s"):
        verify_with_builder(written(model, 0), "tensorrt-rtx")


def test_a_refusal_that_was_predicted_agrees(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no layers to compare then: nothing agrees, and nothing is unknown."""
    answers(monkeypatch, BuildResult("tensorrt-rtx", "refused", "1.7.1", message="no asymmetric quantization"))
    result = verify_with_builder(written(model, 3), "tensorrt-rtx")
    assert result.mismatches == []
    assert result.notes == ["predicted and built alike: refused: no asymmetric quantization"]
    counts = result.as_json()["convolutions"]
    assert (counts["agree"], counts["unknown"]) == (0, 0)
    assert result.as_json()["build"]["status"] == "refused"


def test_a_refusal_that_was_not_predicted_is_a_mismatch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, BuildResult("tensorrt-rtx", "refused", "1.7.1", message="because"))
    result = verify_with_builder(written(model, 0), "tensorrt-rtx")
    assert [(str(m.kind), m.built["status"]) for m in result.mismatches] == [("build", "refused")]
    assert result.mismatches[0].why == "predicted to be built, the compiler says refused: because"
    assert exit_code(result) == 1
    answers(monkeypatch, BuildResult("tensorrt-rtx", "crashed", "1.7.1"))
    result = verify_with_builder(written(model, 0), "tensorrt-rtx")
    assert result.mismatches[0].why == "predicted to be built, the compiler says crashed"


def test_a_classic_build_is_verified_as_a_log_of_its_version(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """trtexec and TensorRT tell of layers and passes, for the target that their version chooses; RTX of nodes.

    Only what runs TensorRT-RTX speaks of its licence.
    """
    proto = onnx.load(written(model, 0))
    log = read_build(io.BytesIO("\n".join(log_of(predict(proto, "trt8.5"))).encode()))
    answers(monkeypatch, BuildResult("trtexec", "built", "8.5.2", build=log))
    result = verify_with_builder(model, "trtexec")
    assert (result.prediction is not None and result.prediction.target, result.mismatches) == ("trt8.5", [])
    assert result.convolutions.agree == result.convolutions.total == 1
    assert result.trace.built == result.trace.predicted > 0
    assert "licence" not in capsys.readouterr().err
    answers(monkeypatch, BuiltModel("tensorrt-rtx", "built", "1.7.1", build=log))
    result = verify_with_builder(model, "tensorrt-rtx")
    assert result.prediction is not None and result.prediction.target == "rtx1.7"
    assert "licence" in capsys.readouterr().err
    assert result.complete, "every convolution of a build made here was looked at"
    assert (result.convolutions.total, result.convolutions.agree, result.convolutions.unknown) == (1, 0, 1)


@pytest.mark.parametrize(("text", "given"), [(None, None), ("86", [86]), ("sm89", [89]), ("SM120", [120])])
def test_compute_capability(model: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, given: Any) -> None:
    answers(monkeypatch, BuildResult("tensorrt-rtx", "refused"))
    verify_with_builder(written(model, 3), "tensorrt-rtx", sm=text)
    assert SM[-1] == given
    with pytest.raises(QdqtoolError, match="'ampere' is not a compute capability"):
        verify_with_builder(model, "tensorrt-rtx", sm="ampere")
