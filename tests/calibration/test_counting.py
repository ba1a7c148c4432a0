import threading
import time
from typing import Any

import numpy as np
import pytest

from calibration import Focus, TensorStatistics
from calibration.arrays import MemorySource
from calibration.cluster_pass import (
    CountingEngine,
    CountingPayload,
    SamplePortion,
    VerifiedSource,
    count_portion,
    portion_size,
)
from calibration.counting import SampleCounter, ThreadPass, make_counting_semaphore
from calibration.dataset import InputSpec
from calibration.session import open_session, pack_model
from qdqtool.errors import ClusterError
from qdqtool.ir.modelfile import load
from tests.calibration.nets import conv_net
from tests.calibration.watchers import HANG
from tests.errors import has

SPEC = InputSpec("images", (1, 3, 16, 16))
FEEDS = [
    {"images": np.random.default_rng(k).random((1, 3, 16, 16), np.float32) - 0.5} for k in range(3)
]
VALUES = np.arange(12, dtype=np.float32)
SAMPLE = ({"x": VALUES}, 1)  # and its number of images


def test_counter_counts_inputs_and_computed_tensors() -> None:
    session = open_session(load(conv_net()), ["c1", "out"], 1)
    with SampleCounter(session, ["images", "c1"], 64, Focus(("out",), 0.0), 2) as counter:
        counter.add(0, (FEEDS[0], 1))
    assert {name: part.count for name, part in counter.tensors.items()} == {
        "images": 768,
        "c1": 1024,
    }
    for part in counter.tensors.values():
        assert part.focus is not None and 0 < part.focus.count <= part.count
    assert len(counter.tensors["c1"].spots) == 1


def test_counter_starts_empty_and_can_reset() -> None:
    with SampleCounter(None, ["images"], 64, None, 1) as counter:
        assert (counter.images, counter.done, counter.tensors["images"].count) == (0, set(), 0)
        for number, feed in enumerate(FEEDS):
            counter.add(number, (feed, number + 2))
        counter.add(9, None)  # no image of the sample could be read
        part = counter.tensors["images"]
        assert (counter.images, counter.done) == (2 + 3 + 4, {0, 1, 2, 9})
        assert (part.count, part.bins, len(part.spots), part.focus) == (3 * 768, 64, 3, None)
        counter.reset()
        assert (counter.images, counter.done, counter.tensors["images"].count) == (0, set(), 0)


def test_counter_waits_for_its_threads_after_a_failure() -> None:
    """The calling thread runs out of memory while another thread counts."""
    caller, other_counts = threading.current_thread(), threading.Event()

    class SlowStatistics(TensorStatistics):
        def add(self, *arguments: Any, **options: Any) -> None:
            if threading.current_thread() is caller:
                assert other_counts.wait(HANG)
                raise MemoryError
            other_counts.set()
            time.sleep(0.2)  # a caller that does not wait returns in this time
            super().add(*arguments, **options)

    names = ["a", "b", "c", "d"]
    with SampleCounter(None, names, 64, None, 2) as counter:
        counter.tensors = {name: SlowStatistics(64) for name in names}
        with pytest.raises(MemoryError):
            counter.add(0, (dict.fromkeys(names, VALUES), 1))
        counted = [name for name, part in counter.tensors.items() if part.count]
        assert 1 <= len(counted) < 3, "the other thread finishes a tensor and leaves the others"
        assert not counter.lock.locked()


@pytest.mark.parametrize(("counters", "at_once"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4)])
def test_half_of_the_counters_count_at_a_time(counters: int, at_once: int) -> None:
    free = make_counting_semaphore(counters)
    assert sum(free.acquire(blocking=False) for _ in range(counters)) == at_once


def test_snapshot_in_the_middle_is_a_copy_and_at_the_end_is_not() -> None:
    counter = SampleCounter(None, ["x"], 2048, None, 1)
    running = ThreadPass(((number, lambda: SAMPLE) for number in range(50)), [counter])
    results = running.results()
    next(results)
    middle, done = running.snapshot()
    count_in_the_middle = middle["x"].count
    assert count_in_the_middle == VALUES.size * len(done) == middle["x"].histogram.counts.sum()
    list(results)
    assert middle["x"].count == count_in_the_middle
    end, done = running.snapshot()
    assert end["x"] is counter.tensors["x"] and end["x"].count == 50 * VALUES.size
    assert done == set(range(50))


# Portions of samples for the workers of a cluster


@pytest.fixture
def engine() -> CountingEngine:
    counting = {"names": ("images", "c1"), "bins": 64, "focus": None, "samples": 3}
    return CountingEngine(
        CountingPayload(pack_model(load(conv_net()), ["c1"]), "net.onnx", (SPEC,), counting), 2
    )


def portion(*numbers: int, identities: tuple[bytes, ...] = ()) -> SamplePortion:
    source = MemorySource(FEEDS[: len(numbers)], [SPEC])
    digests = identities or [source.digest(k) for k in range(len(numbers))]
    return SamplePortion(numbers, VerifiedSource(source, digests))


def test_count_portion_returns_the_statistics_of_one_portion(engine: CountingEngine) -> None:
    assert str(portion(4, 7, 9)) == "samples 4 to 9"
    for _ in range(2):  # nothing of the first portion is left in the second
        counted = count_portion(engine, portion(4, 7, 9), threading.Event())
        statistics = counted.statistics
        assert (statistics.images, counted.skipped, counted.quality.total) == (3, [], 3)
        counts = {name: part.count for name, part in statistics.items()}
        assert counts == {"images": 3 * 768, "c1": 3 * 1024}
        assert len(statistics["images"].spots) == 3


def test_count_portion_ends_with_its_job(engine: CountingEngine) -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(ClusterError, check=has("job-over")):
        count_portion(engine, portion(4, 7, 9), stopped)


def test_count_portion_rejects_samples_that_the_client_did_not_see(engine: CountingEngine) -> None:
    with pytest.raises(ClusterError, check=has("different-files")):
        count_portion(engine, portion(0, identities=(b"another",)), threading.Event())


def test_portions_become_smaller_and_leave_work_for_all() -> None:
    left, sizes = 5000, []
    while left:
        sizes.append(portion_size(left, slots=4))
        left -= sizes[-1]
    assert sizes[0] == 64 and sizes[-8:] == [1] * 8
    assert sizes == sorted(sizes, reverse=True) and portion_size(3, slots=0) == 1
