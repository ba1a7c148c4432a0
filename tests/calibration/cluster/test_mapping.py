"""Pieces of work: each result once, nothing left behind, errors in one line."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from calibration.cluster.mapping import AHEAD, Cluster, Job
from qdqtool.errors import ClusterError
from tests.calibration.cluster.clusters import left_behind
from tests.raising import raises

#: Only looked for: reading all tests does not load it.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)

HOME = "tests.calibration.cluster.clusters"


def test_each_item_once_and_no_more_ahead_than_there_is_room_for(client: Any) -> None:
    taken: list[int] = []
    given: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            assert len(taken) - len(given) <= AHEAD * 2
            yield item

    with (
        Cluster(client) as cluster,
        Job(cluster, f"{HOME}:shared_number", 7, f"{HOME}:slowly_times") as job,
    ):
        for item, result in job.results(items()):
            assert result == 7 * item
            given.append(item)
        assert sorted(given) == list(range(20))
        # A part of the results is taken, and the job is used again: nothing of the first is among them.
        started = job.results(range(30, 60))
        next(started)
        started.close()
        assert sorted(job.results([1, 2])) == [(1, 7), (2, 14)]
        assert list(job.results([])) == []
    assert left_behind(client) == (0, 0, [])


def test_work_ends_with_its_job_and_errors_are_one_line(client: Any) -> None:
    begin = time.monotonic()
    with (
        Cluster(client) as cluster,
        Job(cluster, f"{HOME}:shared_number", 7, f"{HOME}:slowly_times") as job,
    ):
        running = job.results([1, 1000, 1000])
        assert next(running) == (1, 7)
        running.close()
    with (
        Cluster(client) as cluster,
        Job(cluster, f"{HOME}:shared_number", 1, f"{HOME}:slowly_times") as job,
    ):
        assert sorted(job.results([1, 2, 3])) == [(1, 1), (2, 2), (3, 3)]
    assert time.monotonic() - begin < 29
    assert left_behind(client) == (0, 0, [])
    told = raises(ClusterError, "Job._fetched 3 ValueError")
    with (
        Cluster(client) as cluster,
        Job(cluster, f"{HOME}:shared_number", 7, f"{HOME}:failing") as job,
        told,
    ):
        list(job.results(range(6)))
    assert left_behind(client) == (0, 0, [])
