from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from calibration import session
from calibration.partial import partial_model
from calibration.session import Fetcher, fetched_bytes, open_session, worker_count
from qdqtool import runtime, sessions
from qdqtool.modelfile import load
from tests.calibration.nets import conv_net, run_all

FEED = {"images": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}


def test_workers_follow_cores_and_memory() -> None:
    assert [worker_count(1 << 20, available) for available in (1, 2, 3, 4, 8, 64)] == [1, 2, 3, 2, 4, 4]
    assert worker_count(40 << 20, 64) == 3
    assert worker_count(1 << 40, 64) == 1
    assert worker_count(0, 2) == 2


def test_size_of_what_is_fetched() -> None:
    assert fetched_bytes(load(conv_net()), ["c1", "r2"]) == 2 * 4 * 4 * 16 * 16
    assert fetched_bytes(load(conv_net(("n", 3, "h", "w"))), ["c1"]) == 4 * 4


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), ("n", 3, 16, 16), ("n", 3, "h", "w")])
def test_values_are_those_of_a_plain_run(shape: tuple[int | str, ...]) -> None:
    model = conv_net(shape)
    fetcher = Fetcher(open_session(load(model), ["r2", "c1"], 1))
    for feed in (FEED, {"images": FEED["images"][..., ::-1].copy()}):
        found = fetcher.run(feed)
        for name, values in run_all(model, [feed], ["c1", "r2"]).items():
            np.testing.assert_allclose(found[name].reshape(-1), values, rtol=1e-4, atol=1e-5)


def test_freed_memory_is_given_back_where_the_system_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        def malloc_trim(self, pad: int) -> int:
            asked.append(pad)
            return 1

    monkeypatch.setattr(session.ctypes, "CDLL", lambda name: Library())
    open_session(load(conv_net()), ["c1"], 1)
    assert asked == [0]
    monkeypatch.setattr(session.ctypes, "CDLL", lambda name: object())  # a system without it
    assert open_session(load(conv_net()), ["c1"], 1) is not None


def test_values_stay_until_they_are_let_go_of_and_their_memory_is_used_again() -> None:
    fetcher = Fetcher(open_session(load(conv_net()), ["c1"], 1))
    first = fetcher.run(FEED)
    kept = first["c1"].copy()
    second = fetcher.run({"images": -FEED["images"]})
    assert (first["c1"] == kept).all() and not (second["c1"] == kept).all()
    addresses = {v["c1"].ctypes.data for v in (first, second)}
    del first, second
    assert fetcher.run(FEED)["c1"].ctypes.data in addresses


def test_the_message_that_was_opened_is_not_held() -> None:
    message = bytearray(conv_net().SerializeToString())
    source = bytes(message)
    alone = sys.getrefcount(source)
    opened = runtime.open_session(source, 1)
    assert sys.getrefcount(source) == alone
    assert opened.run(None, FEED)[0].shape == (1, 4, 16, 16)


def test_external_weights_go_into_the_model_where_the_folder_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(conv_net(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    inside = Fetcher(open_session(load(conv_net()), ["r2"], 1)).run(FEED)["r2"].copy()
    monkeypatch.setattr(runtime, "FOLDER_KEY", "session.unknown_to_this_version")
    outside = Fetcher(open_session(load(tmp_path / "m.onnx"), ["r2"], 1)).run(FEED)["r2"]
    assert (inside == outside).all()


def test_models_over_two_gigabytes_go_through_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    from qdqtool.modelfile import write_model as real

    def watched(proto: onnx.ModelProto, path: Path) -> None:
        opened.append(path)
        real(proto, path, at_once=True)

    partial = partial_model(load(conv_net()), ["r2"])

    class Refuses:
        graph = partial.graph

        def SerializeToString(self) -> bytes:
            raise ValueError("Message onnx.ModelProto exceeds maximum protobuf size of 2GB")

        def Clear(self) -> None:
            self.cleared = True

    monkeypatch.setattr(sessions, "write_model", lambda _, path, **__: watched(partial, path))
    monkeypatch.setattr(session, "partial_model", lambda *_, **__: Refuses())
    found = Fetcher(open_session(load(conv_net()), ["r2"], 1)).run(FEED)["r2"]
    assert opened and not Path(str(opened[0])).exists(), "the file is gone again"
    np.testing.assert_allclose(found.reshape(-1), run_all(conv_net(), [FEED], ["r2"])["r2"], rtol=1e-4, atol=1e-5)
