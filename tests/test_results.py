"""Results of the Python functions: a short repr, ``ok``, ``save``, and a package that lists what is public."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from tests.comparing.networks import float_network, network


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(network(spoilt=[1]).SerializeToString())
    return tmp_path / "model.onnx"


def test_what_is_public_is_listed() -> None:
    assert dir(qdqtool) == sorted(qdqtool.__all__)
    assert all(getattr(qdqtool, name) is not None for name in qdqtool.__all__)


def test_reprs_are_short(model: Path) -> None:
    results = [qdqtool.predict(model), qdqtool.extract(model, finding="W-NO-DQ"), qdqtool.compare(model, model)]
    assert all(len(repr(r)) < 300 and repr(r).startswith("<") for r in results)


def test_ok(model: Path) -> None:
    assert not qdqtool.predict(model, "trt8.5").ok
    assert qdqtool.predict(network(weights="tensor"), "trt8.5").ok
    assert qdqtool.extract(model, finding="W-NO-DQ").ok
    assert qdqtool.compare(float_network(), network()).ok and not qdqtool.compare(network(), model).ok


def test_an_extraction_saves_itself_and_never_over_its_model(model: Path) -> None:
    result = qdqtool.extract(model, finding="W-NO-DQ")
    before = model.read_bytes()
    with pytest.raises(QdqtoolError):
        result.save(model)
    assert model.read_bytes() == before
    result.save(model.with_name("small.onnx"))
    assert onnx.load(model.with_name("small.onnx")) == result.proto


def test_an_extraction_never_writes_over_the_weights_of_its_model(tmp_path: Path) -> None:
    onnx.save(network(spoilt=[1]), tmp_path / "model.onnx", save_as_external_data=True, location="w.bin",
              size_threshold=0)
    result = qdqtool.extract(tmp_path / "model.onnx", finding="W-NO-DQ")
    before = (tmp_path / "w.bin").read_bytes()
    with pytest.raises(QdqtoolError):
        result.save(tmp_path / "w.bin")
    assert (tmp_path / "w.bin").read_bytes() == before
