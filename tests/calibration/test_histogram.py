"""The histogram against numpy on the raw values, and its algebra on arbitrary ones."""

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration import clustered, statistics
from calibration.arrays import MemorySource
from calibration.clustered import Assignment, Engine, Portion, count
from calibration.counting import Tally, turns
from calibration.dataset import InputSpec
from calibration.focus import Focus
from calibration.session import open_session, packed_model
from qdqtool.errors import ClusterError, DataError
from qdqtool.model.modelfile import load
from tests.calibration.nets import conv_net
from tests.raising import raises

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float32, st.integers(0, 60), elements=FLOATS)


def of(array: npt.NDArray[np.float32], bins: int = 64) -> statistics.TensorStatistics:
    return statistics.TensorStatistics.of(array, bins)


@given(ARRAYS)
def test_no_count_is_lost_in_any_order(values: npt.NDArray[np.float32]) -> None:
    counts, edges = of(values).histogram
    assert counts.sum() == len(values)
    assert (np.diff(edges) > 0).all()
    # np.histogram closes the last bin on the right, as the largest magnitude ends ours.
    expected, _ = np.histogram(np.abs(values.astype(np.float64)), np.append(edges[:-1], np.inf))
    assert np.array_equal(counts, expected)
    grown = statistics.TensorStatistics(64)
    for value in np.sort(np.abs(values)):  # the window moves as often as it can
        grown.add(np.array([value], np.float32))
    assert np.array_equal(grown.counter.counts, of(values).counter.counts)


def test_coarser_and_equal_bins() -> None:
    values = np.random.default_rng(1).normal(0, 1, 5000).astype(np.float32)
    stats = statistics.TensorStatistics.of(values)
    counts, edges = stats.coarse(4)
    expected, _ = np.histogram(np.abs(values.astype(np.float64)), np.append(edges[:-1], np.inf))
    assert np.array_equal(counts, expected)
    values = np.random.default_rng(2).normal(0, 1, 50_000).astype(np.float32)
    stats = statistics.TensorStatistics.of(values)
    counts = stats.linear(512).counts
    exact, _ = np.histogram(np.abs(values), 512, (0.0, stats.absmax))
    assert counts.sum() == pytest.approx(50_000)
    # A bin that straddles an edge is split evenly: running sums are off by no more than one bin's counts.
    slack = int(stats.histogram.counts.max())
    assert np.abs(np.cumsum(counts) - np.cumsum(exact)).max() <= slack
    # Six values from 0.375 to 0.5 and one from 0.75 to 0.9: an edge in the midst of a bin halves it
    stats = statistics.TensorStatistics.of(np.array([0.4375] * 6 + [0.9], np.float32), 4)
    assert stats.histogram.edges[-4:] == pytest.approx([0.375, 0.5, 0.75, 0.9])
    assert stats.linear(3).counts == pytest.approx([0.0, 6.0, 1.0])
    # A largest magnitude that begins a bin is nearly the end of it, and none the less in the last of equal bins
    for top in (1.0, 1.0 + 1 / 32, 4.0):
        stats = statistics.TensorStatistics.of(np.array([0.3 * top, top, top], np.float32), 64)
        found = stats.linear(10).counts
        assert found[-1] == 2 and found.sum() == pytest.approx(3)


def counts(values: list[float], bins: int = 64) -> list[tuple[float, int]]:
    """Lower edges of the bins that are not empty, and their counts."""
    found, edges = statistics.TensorStatistics.of(np.array(values, np.float32), bins).histogram
    return [(float(e), int(c)) for e, c in zip(edges, found, strict=False) if c]


def test_windows_of_octaves() -> None:
    edge, before = 2.0**-20, np.nextafter(np.float32(2.0**-20), np.float32(0))
    assert counts([0.75, edge]) == [(edge, 1), (0.75, 1)]
    assert counts([0.75, before]) == [(0.0, 1), (0.75, 1)]
    assert counts([1.0, edge]) == [(0.0, 1), (1.0, 1)], "1 begins the next octave"
    smallest = float(np.finfo(np.float32).tiny)
    assert statistics.MIN_TOP == -106 and smallest == 2.0**-126
    assert counts([smallest, smallest / 2, 0.0]) == [(0.0, 2), (smallest, 1)]
    assert [statistics.top_of(x) for x in (0.0, 2.0**-107, 2.0**-106, 2.0**-105)] == [
        -106,
        -106,
        -105,
        -104,
    ]
    assert statistics.mantissa_bits(64) == 5
    step = 0.5 / 32
    values = [0.5, 0.5 + step * 0.99, 0.5 + step, 1.0 - step / 2]
    assert counts(values) == [(0.5, 2), (0.5 + step, 1), (1.0 - step, 1)]
    assert len(statistics.MagnitudeCounter(5).counts) == 1 + 20 * 32


@pytest.mark.parametrize(
    ("bins", "bits"),
    [
        (4, 1),
        (8, 2),
        (2048, 10),
        (65536, 15),
        (-4, None),
        (1, None),
        (2, None),
        (5, None),
        (2047, None),
        (131072, None),
        pytest.param(-(10**5000), None, id="huge"),
    ],
)
def test_bins_that_can_be(bins: int, bits: int | None) -> None:
    if bits is not None:
        assert statistics.mantissa_bits(bins) == bits
        return
    with raises(
        DataError, "mantissa_bits bins" if abs(bins) > 2**63 else f"mantissa_bits bins {bins}"
    ):
        statistics.mantissa_bits(bins)


def test_ends_of_bins() -> None:
    for value, end in (
        (1.0, 1 + 2**-20),
        (1.001, float(np.float32(1.001))),
        (2.0**-126, 2.0**-126 * (1 + 2**-20)),
    ):
        found = statistics.TensorStatistics.of(np.array([value], np.float32), 64).histogram
        assert found.edges[-1] == end and found.counts[-1] == 1
    for nothing in (
        statistics.TensorStatistics(64),
        statistics.TensorStatistics.of(np.zeros(3), 64),
    ):
        assert nothing.histogram.edges.tolist() == [0.0, 2.0**-126]
        assert nothing.histogram.counts.tolist() == [nothing.count]
    # A raise to the same window, and an equal resolution, cost nothing
    counter = statistics.MagnitudeCounter(5)
    counter.raise_top(3)
    counter.add(np.array([1.0, 5.0], np.float32))
    before = counter.counts
    counter.raise_top(3)
    counter.raise_top(-3)
    assert counter.counts is before and counter.top == 3
    for bits in (None, 5, 9):
        assert np.shares_memory(counter.histogram(5.0, bits).counts, before)
    assert not np.shares_memory(counter.histogram(5.0, 4).counts, before)


@pytest.mark.parametrize("octaves", [1, 19, 20, 21, 40])
def test_what_falls_out_of_the_window_goes_to_the_lowest_bin(octaves: int) -> None:
    values = np.array([0.5, 0.9, 2.0**-20], np.float32)
    moved = statistics.TensorStatistics.of(values, 64)
    moved.counter.raise_top(octaves)
    wanted = statistics.MagnitudeCounter(5)
    wanted.raise_top(octaves)
    wanted.add(values)
    assert moved.counter.counts.tolist() == wanted.counts.tolist()
    other = statistics.MagnitudeCounter(5)
    other.raise_top(octaves)
    for first in (1, 5, 300):  # the counts from some bin on, those before being empty
        part = statistics.TensorStatistics.of(values, 64).counter
        part.counts[1:first] = 0
        found = statistics.MagnitudeCounter(5)
        found.raise_top(octaves)
        found.absorb(part.top, int(part.counts[0]), first, part.counts[first:])
        assert found.counts.tolist() == other.merged(part).counts.tolist()


SPEC = InputSpec("images", (1, 3, 16, 16))
FEEDS = [
    {"images": np.random.default_rng(k).random((1, 3, 16, 16), np.float32) - 0.5} for k in range(3)
]


def test_tallies() -> None:
    session = open_session(load(conv_net()), ["c1", "out"], 1)
    with Tally(session, ["images", "c1"], 64, Focus(("out",), 0.0), 2) as tally:
        tally.add(0, (FEEDS[0], 1))
        assert list(tally.tensors) == ["images", "c1"]
        assert [p.count for p in tally.tensors.values()] == [768, 1024]
        assert all(
            p.focus is not None and 0 < p.focus.count <= p.count for p in tally.tensors.values()
        )
        assert len(tally.tensors["c1"].spots) == 1
    with Tally(None, ["images"], 64, None, 1) as tally:
        assert (tally.images, tally.done, tally.tensors["images"].count) == (0, set(), 0)
        for number, feed in enumerate(FEEDS):
            tally.add(number, (feed, number + 2))
        tally.add(9, None)
        part = tally.tensors["images"]
        assert (tally.images, tally.done, part.count, part.bins) == (
            2 + 3 + 4,
            {0, 1, 2, 9},
            3 * 768,
            64,
        )
        assert len(part.spots) == 3 and part.focus is None
        tally.forget()
        assert (tally.images, tally.done, tally.tensors["images"].count) == (0, set(), 0)


def test_the_largest_tensors_are_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        Tally, "_count", lambda self, number, name, array, looked: order.append(name)
    )
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


@pytest.mark.parametrize(("tallies", "at_once"), [(1, 1), (2, 1), (4, 2)])
def test_half_of_the_tallies_count_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tallies: int, at_once: int
) -> None:
    inside = [0]
    most = [0]
    lock = threading.Lock()

    def count(self: Tally, *_: Any) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.03)
        with lock:
            inside[0] -= 1

    monkeypatch.setattr(Tally, "_count", count)
    turn = turns(tallies)
    made = [Tally(None, ["x"], 64, None, 1, turn=turn) for _ in range(tallies)]
    sample = {"x": np.ones(9, np.float32)}
    with ThreadPoolExecutor(tallies) as pool:
        list(pool.map(lambda tally: tally.add(0, (sample, 1)), made))
    assert most == [at_once]


def assignment(
    model: bytes, names: tuple[str, ...] = ("images", "c1"), fetched: int = 1, **facts: Any
) -> Assignment:
    digest = facts.get("sha256", hashlib.sha256(model).hexdigest())
    return Assignment(model, digest, "net.onnx", names, 64, None, (SPEC,), fetched, 3)


@pytest.mark.parametrize(
    ("threads", "fetched", "tallies", "counters"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (8, 1, 4, 2), (8, 128 << 20, 2, 4), (7, 1 << 40, 1, 7)],
)
def test_portions_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, threads: int, fetched: int, tallies: int, counters: int
) -> None:
    made: list[int] = []
    opened: list[int] = []
    monkeypatch.setattr(clustered, "Tally", lambda *given: made.append(given[4]))
    monkeypatch.setattr(clustered, "open_packed", lambda model, count, name: opened.append(count))
    engine = Engine(assignment(b"model", fetched=fetched), threads)
    assert made == [counters] * tallies and opened == [counters]
    assert engine.assignment.model == b"", "not kept beside the session"
    opened.clear()
    Engine(assignment(b"", ("images",), fetched), threads)
    assert opened == []


def test_a_model_that_arrives_damaged() -> None:
    with raises(ClusterError, "Engine.__init__"):
        Engine(assignment(b"model", sha256=hashlib.sha256(b"mode1").hexdigest()), 1)


def test_a_portion_is_counted() -> None:
    source = MemorySource(FEEDS, [SPEC])
    portion = Portion((4, 7, 9), source, [source.digest(k) for k in range(3)])
    assert str(portion) == "samples 4 to 9"
    engine = Engine(assignment(packed_model(load(conv_net()), ["c1"])), 1)
    for _ in range(2):  # nothing is left of the one before
        packed = count(engine, portion, threading.Event())
        assert (packed["images"], packed["skipped"], packed["looks"]["total"]) == (3, [], 3)
        found = packed["tensors"]
        assert [p.count for p in found.values()] == [3 * 768, 3 * 1024] and len(
            found["images"].spots
        ) == 3
        assert packed["seconds"] > 0
    stopped = threading.Event()
    stopped.set()
    with raises(ClusterError, "count"):
        count(engine, portion, stopped)
    other = Portion((0,), MemorySource(FEEDS[:1], [SPEC]), [b"another"])
    with raises(ClusterError, "Held.load 0"):
        count(engine, other, threading.Event())
