"""Building a model and mapping the build back to it, with a builder that says what the test wants."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from qdqtool.builders.run import BuildResult
from qdqtool.buildlog.read import read_build
from qdqtool.model.modelfile import load
from qdqtool.types import Precision
from qdqtool.verification.build_model import BuiltModel, build_model
from qdqtool.verification.convolutions import BuiltNode
from tests.trt.evidence import HOME, prediction
from tests.verification.synthetic import log_of

CASE = "resnet18-qat-rtx2000-trt8510"
MODEL = HOME / CASE / "model.onnx.gz"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the builder was asked for; it builds as predicted, or refuses where the time limit is 1 s."""
    calls: list[tuple[Any, ...]] = []

    def build(*arguments: Any) -> BuildResult:
        calls.append(arguments)
        if arguments[4] == 1:
            return BuildResult("tensorrt", "refused", message="no")
        model = load(MODEL)
        read = read_build(io.BytesIO("\n".join(log_of(prediction(CASE))).encode()))
        return BuildResult("tensorrt", "built", "8.5.2", model=model, names={n.index: n.name for n in model.nodes},
                           build=read)  # fmt: skip

    monkeypatch.setattr("qdqtool.builders.build", build)
    return calls


def test_the_layers_are_written(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    result = build_model(MODEL, "tensorrt", tmp_path)
    assert asked[0][5] is False, "no engine is kept unless asked for"
    assert [n.precision for n in result.nodes] == [Precision.INT8] * 21
    assert result.node("Conv_22").inputs == (Precision.INT8,)
    assert result.node("Conv_34").inputs == (Precision.INT8, Precision.INT8), "data, then the residual"
    assert result.layers_path == tmp_path / "layers.json"
    text = (tmp_path / "layers.json").read_text()
    table = json.loads(text)
    assert text.startswith('{\n "builder"') and text.endswith("}\n"), "indented for people"
    assert (table["builder"], table["version"], len(table["nodes"])) == ("tensorrt", "8.5.2", 21)
    first = table["Layers"][0]
    assert (first["Name"], first["LayerType"]) == ("QuantizeLinear_2", "Reformat")
    assert first["Inputs"][0]["Dimensions"] == [1, 8, 8, 8]


def test_what_is_told_of_a_build(tmp_path: Path) -> None:
    """Paths where something was kept, null elsewhere; convolutions counted, those in INT8 among them."""
    rows = [BuiltNode(i, f"n{i}", "Conv", p) for i, p in enumerate((Precision.INT8, Precision.FP16, Precision.INT8))]
    told = BuiltModel("tensorrt-rtx", "built", "1.7.1", (86, 120), seconds=1.23456, nodes=rows).as_json()
    assert (told["engine"], told["log"], told["layers"]) == (None, None, None)
    assert (told["targets"], told["seconds"]) == (["SM86", "SM120"], 1.235)
    assert told["summary"] == {"convolutions": 3, "int8": 2}
    kept = {name: tmp_path / name for name in ("engine_path", "log_path", "layers_path")}
    told = BuiltModel("trtexec", "built", **kept).as_json()  # type: ignore[arg-type]
    assert [told[n] for n in ("engine", "log", "layers")] == [str(p) for p in kept.values()]
    assert BuiltModel("trtexec", "built", nodes=rows).node("n1") is rows[1]
    with pytest.raises(KeyError):
        BuiltModel("trtexec", "built", nodes=rows).node("n3")


def test_without_a_folder_nothing_is_written(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    result = build_model(MODEL, "tensorrt")
    assert len(result.nodes) == 21 and result.layers_path is None


def test_what_was_not_built_has_no_layers(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    result = build_model(MODEL, "tensorrt", tmp_path, timeout=1)
    assert (result.status, result.nodes, result.layers_path) == ("refused", [], None)
    assert list(tmp_path.iterdir()) == []
