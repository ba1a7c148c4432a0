"""How many workers there are, what travels of a model, and what is said when onnxruntime refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper

from calibration import session
from calibration.session import Fetcher, fetched_bytes, open_packed, open_session, packed_model, worker_count
from qdqtool import budgets
from qdqtool.errors import ModelError
from qdqtool.graph import Model
from qdqtool.modelfile import load
from tests.calibration.nets import conv_net

FEED = {"images": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}
MB = 1 << 20


def test_workers_by_cores() -> None:
    assert [worker_count(1, cores) for cores in range(1, 11)] == [1, 2, 3, 2, 2, 3, 3, 4, 4, 4]
    assert worker_count(1, 0) == 1


def test_workers_by_what_they_hold() -> None:
    assert budgets.FETCHED == 128 * MB
    sizes = [0, 1, 32 * MB, 32 * MB + 1, 42 * MB, 43 * MB, 64 * MB, 64 * MB + 1, 128 * MB, 129 * MB, 1 << 50]
    assert [worker_count(s, 64) for s in sizes] == [4, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1]


def test_sizes_of_tensors() -> None:
    model = conv_net((2, 3, "h", 5))
    assert fetched_bytes(Model(model), ["images"]) == 4 * 2 * 3 * 5
    assert fetched_bytes(Model(model), []) == 0
    assert fetched_bytes(Model(model), ["images", "c1"]) == 4 * 2 * 3 * 5 + 4 * 2 * 4 * 5


def test_a_packed_model_is_the_part_with_all_its_weights(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    packed = packed_model(load(tmp_path / "m.onnx"), ["c1"])
    inside = onnx.load_from_string(packed)
    assert [n.name for n in inside.graph.node] == ["conv1", "sigmoid1", "mul1"]
    assert not inside.graph.initializer[0].external_data
    assert packed_model(load(conv_net()), ["c1"]) == session.partial_model(load(conv_net()), ["c1"]).SerializeToString()
    there = Fetcher(open_packed(packed, 1, "m.onnx")).run(FEED)["c1"]
    assert np.array_equal(there, Fetcher(open_session(load(conv_net()), ["c1"], 1)).run(FEED)["c1"])


@pytest.mark.parametrize("error", [ValueError, EncodeError])
@pytest.mark.parametrize("path", ["", "a/m.onnx"])
def test_a_model_too_large_to_travel(monkeypatch: pytest.MonkeyPatch, error: type[Exception], path: str) -> None:
    class Refuses:
        def SerializeToString(self) -> bytes:
            raise error("exceeds maximum protobuf size of 2GB")

    monkeypatch.setattr(session, "partial_model", lambda *_: Refuses())
    with pytest.raises(ModelError) as caught:
        packed_model(Model(conv_net(), path=path), ["c1"])
    assert str(caught.value) == (f"{path or 'model'}: is over 2 GB, which cannot be sent to a cluster; calibrate it on "
                                 "one machine")


@pytest.mark.parametrize("path", ["", "a/m.onnx"])
def test_what_onnxruntime_refuses(path: str) -> None:
    model = conv_net()
    model.graph.node[0].op_type = "NoSuchOperator"
    told = f"{path or 'model'}: onnxruntime cannot run it: "
    with pytest.raises(ModelError) as caught:
        open_session(Model(model, path=path), ["c1"], 1)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)
    with pytest.raises(ModelError) as caught:
        open_packed(model.SerializeToString(), 1, path)
    assert str(caught.value).startswith(told)
    assert session._reason(ValueError("a\n b" + "c" * 400)) == "a b" + "c" * 297


def test_a_sample_that_cannot_be_run() -> None:
    fetcher = Fetcher(open_session(load(conv_net()), ["c1"], 1))
    for sample in ({}, {"images": FEED["images"][:, :2].copy()}):
        with pytest.raises(ModelError, match=r"^onnxruntime failed on a calibration sample: ."):
            fetcher.run(sample)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 3, 16, 16), TensorProto.FLOAT), ((1, 3, 16, 16), TensorProto.FLOAT16), (("n", 3, 16, 16), TensorProto.FLOAT)],
)
def test_outputs_keep_their_names_types_and_shapes(shape: tuple[int | str, ...], dtype: int) -> None:
    model = conv_net(shape, dtype)
    for name, operator, options in (("wide", "Cast", {"to": TensorProto.DOUBLE}), ("best", "ArgMax", {"axis": 1})):
        model.graph.node.append(helper.make_node(operator, ["out"], [name], **options))
    fetcher = Fetcher(open_session(load(model), ["best", "out", "wide"], 1))
    sample = {"images": FEED["images"].astype(helper.tensor_dtype_to_np_dtype(dtype))}
    found: dict[str, Any] = fetcher.run({**sample, "unused": np.zeros(3)})
    assert list(found) == ["best", "out", "wide"]
    assert [a.dtype.name for a in found.values()] == ["int64", sample["images"].dtype.name, "float64"]
    assert found["out"].shape == found["wide"].shape == (1, 4, 16, 16) and np.abs(found["out"]).max() > 0
    assert (found["best"][:, 0] == found["out"].argmax(axis=1)).all() and (found["wide"] == found["out"]).all()
