"""Jobs of a cluster: each result once, nothing left behind, errors in one line."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from calibration.cluster.connection import Cluster, connect
from calibration.cluster.jobs import AHEAD, ClusterJob
from qdqtool.errors import ClusterError
from tests.calibration.checks import reports
from tests.calibration.cluster.clusters import (
    ENDLESS,
    fail_on_three,
    left_behind,
    multiply,
    recorded,
    share_number,
)

# find_spec does not import: collecting all tests does not load Dask.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)


@pytest.fixture
def cluster(client: Any) -> Iterator[Cluster]:
    with connect(client) as opened:
        yield opened
    assert left_behind(client) == (0, 0, [])


def multiplication(cluster: Cluster, number: int = 7) -> ClusterJob:
    return ClusterJob(cluster, share_number, number, multiply)


def test_job_gives_each_result_once_and_limits_items_ahead(cluster: Cluster) -> None:
    taken: list[int] = []
    finished: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            assert len(taken) - len(finished) <= AHEAD * 2
            yield item

    with multiplication(cluster) as job:
        for item, result in job.results(items()):
            assert result == 7 * item
            finished.append(item)
    assert sorted(finished) == list(range(20))


def test_job_can_be_used_again_after_part_of_its_results(cluster: Cluster) -> None:
    with multiplication(cluster) as job:
        started = job.results(range(30, 60))
        next(started)
        started.close()
        assert sorted(job.results([1, 2])) == [(1, 7), (2, 14)]
        assert list(job.results([])) == []


def test_work_ends_with_its_job(client: Any, cluster: Cluster) -> None:
    with multiplication(cluster) as job:
        running = job.results([1, ENDLESS, ENDLESS])
        assert next(running) == (1, 7)
        running.close()
    # Two endless pieces of work keep both workers busy unless they end with the job.
    with multiplication(cluster, 1) as job:
        assert sorted(job.results([1, 2, 3])) == [(1, 1), (2, 2), (3, 3)]
    assert [late for _, late in client.run(recorded).values()] == [[], []]


def test_job_reports_errors_of_workers(cluster: Cluster) -> None:
    failing = ClusterJob(cluster, share_number, 7, fail_on_three)
    with (
        pytest.raises(ClusterError, check=reports("worker-failed", 3, "ValueError")),
        failing as job,
    ):
        list(job.results(range(6)))
