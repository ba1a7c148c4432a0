"""Saving with external weights, which a model of over 2 GB needs, on a small model with the limit lowered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError

from qdqtool import modelfile
from qdqtool.sessions import open_proto
from tests.calibration.nets import conv_net, run_all
from tests.test_message import OTHERWISE


def test_a_model_over_the_limit_is_saved_with_external_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net()
    big = np.random.default_rng(0).normal(0, 1, (4, 4, 5, 20)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(big, "big"))
    monkeypatch.setattr(modelfile, "MAX_PROTO_BYTES", 1000)
    modelfile.save(model, tmp_path / "m.onnx")
    monkeypatch.undo()
    assert (tmp_path / "m.onnx.data").stat().st_size == big.nbytes
    back = onnx.load(tmp_path / "m.onnx")
    assert (onnx.numpy_helper.to_array(back.graph.initializer[-1]) == big).all()
    feed = [{"images": np.ones((1, 3, 16, 16), np.float32)}]
    assert (run_all(back, feed, ["r2"])["r2"] == run_all(model, feed, ["r2"])["r2"]).all()


@pytest.mark.parametrize("made", OTHERWISE)
def test_documentation_that_is_not_utf_8_hinders_no_saving(
    made: Callable[[], onnx.ModelProto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    modelfile.save(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == model.SerializeToString(deterministic=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    monkeypatch.setattr(modelfile, "MAX_PROTO_BYTES", 1000)
    modelfile.save(model, tmp_path / "over.onnx")
    monkeypatch.undo()
    saved = onnx.load(tmp_path / "over.onnx").graph.initializer
    for found, wanted in zip(saved, model.graph.initializer, strict=True):
        if wanted.name != "texts":
            assert (onnx.numpy_helper.to_array(found) == onnx.numpy_helper.to_array(wanted)).all()


def test_texts_and_half_bytes_stay_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([b"word"] * 600, object), "texts"))
    model.graph.initializer.append(onnx.helper.make_tensor("halves", onnx.TensorProto.INT4, [3000], [1, -2, 3] * 1000))
    model.graph.initializer.append(onnx.helper.make_tensor("flags", onnx.TensorProto.BOOL, [3000], [1, 0, 1] * 1000))
    monkeypatch.setattr(modelfile, "MAX_PROTO_BYTES", 1000)
    modelfile.save(model, tmp_path / "m.onnx")
    monkeypatch.undo()
    assert (tmp_path / "m.onnx.data").stat().st_size == 3000
    back = onnx.load(tmp_path / "m.onnx")
    for name in ("texts", "halves", "flags"):
        found, wanted = (onnx.numpy_helper.to_array(t) for m in (back, model) for t in m.graph.initializer
                         if t.name == name)
        assert (found == wanted).all(), name


def test_a_session_on_a_model_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """protobuf refuses to serialize such a model; here every model is one."""
    model = conv_net()
    feed = {"images": np.ones((1, 3, 16, 16), np.float32)}
    wanted = open_proto(model, 1).run(None, feed)
    monkeypatch.setattr(modelfile, "MAX_PROTO_BYTES", 100)
    monkeypatch.setattr("qdqtool.sessions.serialized", _refuse)
    found = open_proto(model, 1, folder="/nowhere").run(None, feed)
    assert all((a == b).all() for a, b in zip(wanted, found, strict=True))


def _refuse(proto: onnx.ModelProto) -> bytes:
    raise EncodeError("Failed to serialize proto")
