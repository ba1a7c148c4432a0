"""Flags in the words of each way to build."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import qdqtool
from qdqtool.cli import run
from qdqtool.errors import QdqtoolError
from qdqtool.explain.ways import WAYS, way_named
from tests.explain.test_causes import residual

WORDS = {
    "trtexec": "--int8 --fp16", "python": "BuilderFlag.FP16", "onnxruntime": "trt_fp16_enable",
    "torch-tensorrt": "enabled_precisions", "deepstream": "network-mode=1",
}


@pytest.mark.parametrize("way", WORDS)
def test_the_flag_finding_speaks_the_words_of_the_way(way: str) -> None:
    prediction = qdqtool.predict(residual("own"), way=way)
    (flag,) = (f for f in prediction.findings if f.code == "FLAG-FP16")
    assert WORDS[way] in flag.fix
    assert all(WORDS[other] not in flag.fix for other in WORDS if other not in (way, "trtexec"))


def test_strongly_typed_targets_have_no_precision_flags() -> None:
    assert set(WORDS) == set(WAYS)
    for way in WAYS.values():
        assert "--int8" not in way.flags("trt11").partition(":")[0]
        assert way.source and way.log
    assert "FLAG-FP16" not in qdqtool.predict(residual("own"), "trt11", way="python").findings_by_code()


def test_onnxruntime_is_told_to_give_no_calibration_table() -> None:
    assert "trt_int8_calibration_table_name" in WAYS["onnxruntime"].care


def test_unknown_ways() -> None:
    with pytest.raises(QdqtoolError, match="did you mean onnxruntime"):
        way_named("onnxruntim")
    assert way_named("ORT").name == "onnxruntime"


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "m.onnx")
    onnx.save(residual("own"), model)
    assert run(["predict", model, "--for", "onnxruntime", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["for"]["way"] == "onnxruntime"
    assert run(["predict", model, "--for", "deepstream"]) == 0
    assert "To build it with DeepStream" in capsys.readouterr().out
    assert run(["explain", "FLAG-FP16", "--for", "python"]) == 0
    assert "trt.Logger.VERBOSE" in capsys.readouterr().out
    assert run(["explain", "--for", "torch-tensorrt"]) == 0
    assert capsys.readouterr().out.startswith("With Torch-TensorRT")
    assert run(["predict", model, "--for", "make"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1


def test_a_way_that_resembles_none_is_told_with_those_there_are() -> None:
    with pytest.raises(QdqtoolError, match=r"^unknown way to build 'qqqq'; choose one of trtexec, python, "):
        way_named("qqqq")
