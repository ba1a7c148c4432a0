"""A snapshot stays as it is while threads go on counting; at the end it is what they counted, and no copy of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from calibration.counting import Tally
from calibration.dataset import Task
from calibration.threads import ThreadPass

VALUES = np.arange(12, dtype=np.float32)


def tasks(count: int) -> Iterator[tuple[int, Task]]:
    for number in range(count):
        yield number, lambda: ({"x": VALUES}, 1)


def test_snapshot_in_the_middle_and_at_the_end() -> None:
    tally = Tally(None, ["x"], 2048, None, 1)
    running = ThreadPass(tasks(50), [tally])
    results = running.results()
    next(results)
    middle = running.snapshot()
    seen = middle.statistics["x"].count
    assert seen == VALUES.size * len(middle.done) == middle.statistics["x"].histogram.counts.sum()
    list(results)
    assert middle.statistics["x"].count == seen and middle.statistics["x"] is not tally.tensors["x"]
    end = running.snapshot()
    assert end.statistics["x"] is tally.tensors["x"]
    assert end.done == set(range(50)) and end.statistics["x"].count == 50 * VALUES.size


def test_several_threads_together() -> None:
    tallies = [Tally(None, ["x"], 2048, None, 1) for _ in range(3)]
    running = ThreadPass(tasks(50), tallies)
    list(running.results())
    end = running.snapshot()
    assert end.statistics.images == 50 and end.statistics["x"].count == 50 * VALUES.size
    assert sum(t.tensors["x"].count for t in tallies) == 50 * VALUES.size, "the threads' own are not changed"
