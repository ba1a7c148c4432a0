"""What users give instead of an ONNX model is called by its name, with the next step."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

import qdqtool
from qdqtool.errors import ModelError
from tests.comparing.networks import network


def said(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        qdqtool.predict(path)
    return str(error.value)


@pytest.mark.parametrize(("name", "data", "expected"), [
    ("best.engine", b"ftrt\0\0\0", "TensorRT engine"), ("best.trt", b"abc", "TensorRT engine"),
    ("best.pt", b"PK\x03\x04abc", "PyTorch"), ("best.tflite", b"\x1c\0\0\0TFL3", "TensorFlow Lite"),
    ("best.xml", b"<?xml version=\"1.0\"?>\n<net name=\"a\">", "OpenVINO"),
    ("model.onnx", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ("model.onnx", b"<!DOCTYPE html><html>", "web page"), ("model.onnx", b"", "empty"),
    ("model.onnx", b"\x89PNG\r\n", "picture"), ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "safetensors"),
    ("layers.json", b'{"Layers": []}', "JSON"), ("model.onnx", b"not a model", "not an ONNX model"),
])
def test_other_files(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    message = said(path)
    assert expected in message and str(path) in message and "\n" not in message


def test_real_files_of_other_kinds(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"w": 1}))
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "weights").write_bytes(pickle.dumps([1], protocol=2))
    assert "PyTorch" in said(tmp_path / "a.pth") and "torch.onnx.export" in said(tmp_path / "a.pth")
    assert "numpy" in said(tmp_path / "a.npy") and "PyTorch" in said(tmp_path / "weights")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_cut_model_is_called_cut(tmp_path: Path, share: float) -> None:
    data = network().SerializeToString()
    (tmp_path / "model.onnx").write_bytes(data[: int(share * len(data))])
    assert "cut off or damaged" in said(tmp_path / "model.onnx")
