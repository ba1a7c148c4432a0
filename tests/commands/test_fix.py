"""`qdqtool fix`."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.util import limits
from tests.commands.conftest import Cli
from tests.findings.graphs import GRAPHS
from tests.findings.lint.test_api import simple
from tests.findings.test_causes import residual


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model with a float skip connection into the current folder."""
    onnx.save(residual("float"), tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fix_json_has_counts_before_and_after(folder: Path, cli: Cli) -> None:
    answer = cli.json("fix", "m.onnx", "-o", "fixed.onnx")
    assert [change["code"] for change in answer["applied"]] == ["SKIP-FLOAT"]
    keys = ("int8", "int8_to_int8", "conversions")
    before, after = answer["before"]["summary"], answer["after"]["summary"]
    assert [before[key] for key in keys] == [4, 1, 3]
    assert [after[key] for key in keys] == [4, 3, 1]
    cli("predict", "fixed.onnx", "--fail-on", "warning")


def test_fix_text_names_file_and_codes(folder: Path, cli: Cli) -> None:
    text = cli("fix", "m.onnx", "-o", "fixed.onnx")
    assert "fixed.onnx" in text and "SKIP-FLOAT (1)" in text


def test_fix_keeps_metadata_and_names(folder: Path, cli: Cli) -> None:
    model = onnx.load("m.onnx")
    model.metadata_props.add(key="names", value="{0: 'cat'}")
    onnx.save(model, "m.onnx")
    cli("fix", "m.onnx", "-o", "fixed.onnx")
    fixed = onnx.load("fixed.onnx")
    assert fixed.metadata_props[0].value == "{0: 'cat'}"
    assert [o.name for o in fixed.graph.output] == [o.name for o in model.graph.output]
    assert {n.name for n in model.graph.node} <= {n.name for n in fixed.graph.node}


@pytest.mark.parametrize("form", ["text", "json"])
def test_fix_names_parameters_as_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, form: str
) -> None:
    monkeypatch.setattr(limits, "SESSION_WORK", 1)
    text = cli("fix", "m.onnx", "-o", "f.onnx", "--format", form)
    assert "--effort" in text and "`" not in text


def test_fix_runs_the_model_on_given_inputs(folder: Path, cli: Cli) -> None:
    np.savez(folder / "in.npz", x=np.ones((1, 16, 16, 16), np.float32))
    cli("fix", "m.onnx", "-o", "f.onnx", "--inputs", "in.npz")


def test_fix_exits_with_1_if_an_error_is_left(folder: Path, cli: Cli) -> None:
    onnx.save(simple(scale=float("nan"), zero=3), folder / "bad.onnx")
    cli("fix", "bad.onnx", "-o", "f.onnx", "--only", "ADD-BOTH", code=1)


def test_fix_only_lists_unfixed_places(folder: Path, cli: Cli) -> None:
    onnx.save(GRAPHS["weights-not-constant"](), folder / "m.onnx")
    arguments = ["--only", "W-NONCONST", "--only", "ADD-BOTH", "--target", "trt8.5"]
    answer = cli.json("fix", "m.onnx", "-o", "f.onnx", *arguments)
    assert answer["applied"] == []
    (note,) = answer["notes"]
    assert "ADD-BOTH" in note and "trt8.5" in note
    refused = [(c["code"], c["node"], bool(c["why_not"])) for c in answer["refused"]]
    assert refused == [("W-NONCONST", "c", True)]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--only", "NOPE"], "'NOPE'"),
        (["--only", "CH-ALIGN"], "CH-ALIGN"),
        (["--target", "trt7"], "'trt7'"),
        (["--inputs", "missing.npz"], "missing.npz"),
        (["--inputs", "x.npz"], "x.npz"),
    ],
)
def test_fix_wrong_option_is_refused(
    folder: Path, cli: Cli, arguments: list[str], value: str
) -> None:
    (folder / "x.npz").write_bytes(b"hello")
    assert value in cli.refuse("fix", "m.onnx", "-o", "f.onnx", *arguments)
    assert not (folder / "f.onnx").exists()
