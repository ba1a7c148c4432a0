from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from qdqtool.builders.names import log_names, with_log_names
from qdqtool.errors import ModelError
from qdqtool.modelfile import load
from tests.builders.models import NASTY, saved, two_convolutions


def test_good_names_stay_and_no_copy_is_made(tmp_path: Path) -> None:
    path = saved(two_convolutions("/model.0/conv/Conv", "b"), tmp_path)
    model = load(path)
    names = log_names(model)
    assert [names[n.index] for n in model.nodes] == [n.proto.name for n in model.nodes]
    assert with_log_names(model, names, tmp_path / "unused") == Path(path)


@pytest.mark.parametrize("bad", ["", NASTY, "two words", "x" * 300, "[ONNX Layer: a]"])
def test_names_that_a_log_cannot_carry_are_replaced_in_a_copy(bad: str, tmp_path: Path) -> None:
    path = saved(two_convolutions(bad, "second"), tmp_path)
    before = Path(path).read_bytes()
    model = load(path)
    names = log_names(model)
    work = tmp_path / "work"
    work.mkdir()
    copy = onnx.load(with_log_names(model, names, work))
    assert [n.name for n in copy.graph.node] == [names[n.index] for n in model.nodes]
    assert len({n.name for n in copy.graph.node}) == len(copy.graph.node)
    assert all(n.name and "\n" not in n.name and "[" not in n.name for n in copy.graph.node)
    assert Path(path).read_bytes() == before
    for node in copy.graph.node:
        node.name = ""
    original = onnx.load(path)
    for node in original.graph.node:
        node.name = ""
    assert copy.graph == original.graph


def test_doubled_names_become_their_outputs(tmp_path: Path) -> None:
    model = load(saved(two_convolutions("same", "same"), tmp_path))
    convs = [n for n in model.nodes if n.op == "Conv"]
    assert [log_names(model)[n.index] for n in convs] == [n.output for n in convs]


def test_missing_weight_file_is_told_before_the_build(tmp_path: Path) -> None:
    path = tmp_path / "outside.onnx"
    onnx.save(two_convolutions("a", "b"), path, save_as_external_data=True, location="outside.bin", size_threshold=0)
    model = load(path)
    assert with_log_names(model, log_names(model), tmp_path / "unused") == path
    (tmp_path / "outside.bin").unlink()
    with pytest.raises(ModelError, match=r"outside\.onnx: weight file 'outside\.bin' of tensor '.+' is missing"):
        with_log_names(load(path), log_names(model), tmp_path / "unused")
