"""Reading and writing model files."""

from __future__ import annotations

import gzip
from pathlib import Path

import onnx
import pytest

from qdqtool.errors import ModelError
from qdqtool.modelfile import load, load_full, save
from tests.trt.evidence import HOME

CASE = HOME / "resnet18-a100-qat" / "model.onnx.gz"


def test_every_kind_of_source_is_the_same_model(tmp_path: Path) -> None:
    data = gzip.decompress(CASE.read_bytes())
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    names = [n.name for n in load(CASE).nodes]
    assert len(names) == 258
    for source in (data, str(path), onnx.ModelProto.FromString(data)):
        assert [n.name for n in load(source).nodes] == names
    assert load(path).sha256 == load(data).sha256


def test_a_graphsurgeon_graph() -> None:
    gs = pytest.importorskip("onnx_graphsurgeon")
    graph = gs.import_onnx(onnx.ModelProto.FromString(gzip.decompress(CASE.read_bytes())))
    assert [n.op for n in load(graph).nodes if n.op == "Conv"] == ["Conv"] * 20


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "m.onnx", "offset": "-5"},
        {"location": "m.onnx", "offset": "x"},
        {"location": "m.onnx", "length": "99999999999"},
        {"location": "/etc/hostname"},
        {"location": "../m.onnx"},
        {"location": "none.bin"},
        {"location": ""},
        {},
    ],
)
def test_external_weights_that_are_not_there_or_elsewhere(tmp_path: Path, entries: dict[str, str]) -> None:
    (tmp_path / "in").mkdir()
    proto = onnx.ModelProto.FromString(gzip.decompress(CASE.read_bytes()))
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    for path in (tmp_path / "m.onnx", tmp_path / "in" / "m.onnx"):
        path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=f"'{tensor.name}'"):
        load_full(tmp_path / "in" / "m.onnx")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "not an ONNX model"), (b"not a model", "not an ONNX model"), (b"\x1f\x8b\x08broken", "cannot be read")],
)
def test_what_is_no_model(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cut_gzip(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx.gz"
    path.write_bytes(CASE.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cut off"):
        load(path)


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(gzip.decompress(CASE.read_bytes()))
    with pytest.raises(ModelError, match="is the input"):
        save(load(path).proto, path, source=str(path))


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "none.onnx")
