"""One tally, and a worker's engine of several, in this process."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import numpy as np
import pytest

from calibration import remote
from calibration.counting import Tally
from calibration.dataset import InputSpec
from calibration.focus import Focus
from calibration.memory import MemorySource
from calibration.packing import absorb
from calibration.parcels import Parcel
from calibration.remote import Assignment, Portion, count, prepare
from calibration.session import open_session, packed_model
from calibration.statistics import TensorStatistics
from qdqtool.errors import ClusterError
from qdqtool.modelfile import load
from tests.calibration.nets import conv_net

SPEC = InputSpec("images", (1, 3, 16, 16))
FEEDS = [{"images": np.random.default_rng(k).random((1, 3, 16, 16), np.float32) - 0.5} for k in range(3)]


def test_what_is_added_to_a_tally() -> None:
    with Tally(None, ["images"], 64, None, 1, {1}) as tally:
        assert (tally.images, tally.done, tally.tensors["images"].count) == (0, set(), 0)
        for number, feed in enumerate(FEEDS):
            tally.add(number, (feed, number + 2))
        tally.add(9, None)
        part = tally.tensors["images"]
        assert (tally.images, tally.done, part.count, part.bins) == (2 + 3 + 4, {0, 1, 2, 9}, 3 * 768, 64)
        assert len(part.spots) == 1 and part.focus is None
        tally.forget()
        assert (tally.images, tally.done, tally.tensors["images"].count) == (0, set(), 0)


def test_computed_tensors_and_where_the_network_looks() -> None:
    session = open_session(load(conv_net()), ["c1", "out"], 1)
    with Tally(session, ["images", "c1"], 64, Focus(("out",), 0.0), 2) as tally:
        tally.add(0, (FEEDS[0], 1))
        assert list(tally.tensors) == ["images", "c1"]
        assert [p.count for p in tally.tensors.values()] == [768, 1024]
        assert all(p.focus is not None and 0 < p.focus.count <= p.count for p in tally.tensors.values())
        assert not tally.tensors["c1"].spots


def test_the_largest_tensors_are_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(Tally, "_count", lambda self, number, name, array, looked: order.append(name))
    with Tally(None, ["few", "most", "some"], 64, None, 1) as tally:
        tally.add(0, ({"few": np.zeros(1), "most": np.zeros(9), "some": np.zeros(5)}, 1))
    assert order == ["most", "some", "few"]


def test_nobody_counts_any_more_when_a_count_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread runs out of memory while another one is at a tensor; the tally is used again at once."""
    here, begun, real = threading.current_thread(), threading.Event(), Tally._count

    def count(self: Tally, number: int, name: str, array: Any, looked: Any) -> None:
        if threading.current_thread() is here:
            begun.wait(5)
            raise MemoryError
        begun.set()
        time.sleep(0.2)
        real(self, number, name, array, looked)

    names = ["a", "b", "c", "d"]
    with Tally(None, names, 64, None, 2) as tally:
        monkeypatch.setattr(Tally, "_count", count)
        with pytest.raises(MemoryError):
            tally.add(0, (dict.fromkeys(names, np.ones(9, np.float32)), 1))
        assert not tally.lock.locked()
        tally.forget()
        time.sleep(0.3)
        assert [p.count for p in tally.tensors.values()] == [0] * 4


def assignment(model: bytes, names: tuple[str, ...] = ("images", "c1"), fetched: int = 1, **facts: Any) -> Assignment:
    digest = facts.get("sha256", hashlib.sha256(model).hexdigest())
    return Assignment(model, digest, "net.onnx", names, 64, None, (SPEC,), fetched)


@pytest.mark.parametrize(
    ("threads", "fetched", "tallies", "counters"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (8, 1, 4, 2), (8, 64 << 20, 2, 4), (7, 1 << 40, 1, 7)],
)  # fmt: skip
def test_portions_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, threads: int, fetched: int, tallies: int, counters: int
) -> None:
    made: list[int] = []
    opened: list[int] = []
    monkeypatch.setattr(remote, "Tally", lambda session, names, bins, focus, count: made.append(count))
    monkeypatch.setattr(remote, "open_packed", lambda model, count, name: opened.append(count))
    engine = prepare(assignment(b"model", fetched=fetched), threads)
    assert made == [counters] * tallies and opened == [counters]
    assert engine.assignment.model == b"", "not kept beside the session"
    opened.clear()
    prepare(assignment(b"", ("images",), fetched), threads)
    assert opened == []


def test_a_model_that_arrives_damaged() -> None:
    with pytest.raises(ClusterError, match=r"^the model arrived damaged$"):
        prepare(assignment(b"model", sha256=hashlib.sha256(b"mode1").hexdigest()), 1)


def test_a_portion_is_counted() -> None:
    source = MemorySource(FEEDS, [SPEC])
    portion = Portion((4, 7, 9), source, Parcel(source.digest(k) for k in range(3)), (7,))
    assert str(portion) == "samples 4 to 9"
    engine = prepare(assignment(packed_model(load(conv_net()), ["c1"])), 1)
    for _ in range(2):  # nothing is left of the one before
        packed = count(engine, portion, threading.Event())
        assert (packed["images"], packed["skipped"], packed["looks"]["total"]) == (3, [], 3)
        found = {n: TensorStatistics(64) for n in ("images", "c1")}
        absorb(found, ["images", "c1"], packed)
        assert [p.count for p in found.values()] == [3 * 768, 3 * 1024] and len(found["images"].spots) == 1
        assert packed["seconds"] > 0 and packed["packing"] > 0
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(ClusterError, match=r"^the job is over$"):
        count(engine, portion, stopped)
    other = Portion((0,), MemorySource(FEEDS[:1], [SPEC]), Parcel([b"another"]), ())
    with pytest.raises(ClusterError, match=r"^sample 0 is another file there; let all machines see the same files$"):
        count(engine, other, threading.Event())
