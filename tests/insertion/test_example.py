from __future__ import annotations

import runpy
import sys
from pathlib import Path

import onnx
import pytest

from qdqtool.demo.images import write_images
from qdqtool.demo.model import yolov8n
from tests.insertion.nets import check

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quantize_yolov8.py"


def run_example(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return caught.value.code


def test_the_example_quantizes_a_yolov8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(yolov8n(64, classes=2), tmp_path / "m.onnx")
    (tmp_path / "images").mkdir()
    write_images(tmp_path / "images", 3, 64)
    assert run_example(monkeypatch, tmp_path / "m.onnx", tmp_path / "images", tmp_path / "q.onnx") == 0
    check(onnx.load(tmp_path / "q.onnx"))
    assert "60 of 64 convolutions INT8, 1 conversions" in capsys.readouterr().out
    code = run_example(monkeypatch, tmp_path / "no.onnx", tmp_path / "images", tmp_path / "q.onnx")
    assert "no such file" in str(code)
