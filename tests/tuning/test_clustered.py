from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from calibration.cluster.connection import connect
from qdqtool.tuning import measure
from qdqtool.tuning.api import tune
from qdqtool.tuning.measure import (
    ClusterMapper,
    MeasurementTask,
    TaskMapper,
    TaskResult,
    TuningJob,
    map_on_threads,
)
from tests.calibration.cluster.clusters import kill_one, left_behind
from tests.calibration.nets import write_pictures
from tests.insertion.nets import images
from tests.tuning.nets import branchy, floats, job_of, planner_of, segmentation
from tests.tuning.test_measure import rows_of

pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)

DATA = images(6, 16, 16)


def job_and_tasks() -> tuple[TuningJob, list[MeasurementTask]]:
    planner = planner_of(branchy(), DATA)
    choices = floats(), floats("c6"), floats("c0"), floats("c3", "c4")
    recipes = tuple(planner.plan(choice).recipe for choice in choices)
    return job_of(planner, DATA), [MeasurementTask((k,), recipes) for k in range(6)]


def test_cluster_rows_are_those_of_one_process(client: Any) -> None:
    job, tasks = job_and_tasks()
    whole = [replace(t, with_metric=True) for t in tasks]
    with connect(client) as cluster, ClusterMapper(cluster) as mapper:
        for work in (tasks, whole):
            expected = rows_of(map_on_threads(1)(job, work))
            assert len(expected) == 24 and rows_of(mapper(job, work)) == expected
    assert left_behind(client) == (0, 0, [])


@pytest.mark.slow  # quick tests of calibration kill a worker
def test_cluster_worker_that_dies_loses_nothing(client: Any) -> None:
    job, tasks = job_and_tasks()

    def kill_after_first(mapper: TaskMapper) -> Iterator[TaskResult]:
        for position, result in enumerate(mapper(job, tasks)):
            if position == 0:
                kill_one(client)
            yield result

    with connect(client) as cluster, ClusterMapper(cluster) as mapper:
        assert rows_of(kill_after_first(mapper)) == rows_of(map_on_threads(1)(job, tasks))
    client.wait_for_workers(2, timeout=60)
    assert left_behind(client) == (0, 0, [])


@pytest.mark.slow
def test_cluster_worker_gets_the_network_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, tasks = job_and_tasks()
    handed: list[Any] = []
    original = measure.ClusterJob
    monkeypatch.setattr(
        measure,
        "ClusterJob",
        lambda *arguments: handed.append(arguments) or original(*arguments),
    )
    with connect(client) as cluster, ClusterMapper(cluster) as mapper:
        assert all(len(rows_of(mapper(job, tasks[2 * k : 2 * k + 2]))) == 8 for k in range(3))
    assert len(handed) == 1 and handed[0][3] is measure.run_task


@pytest.mark.slow
def test_tune_on_a_cluster_has_the_same_result(client: Any, tmp_path: Path) -> None:
    write_pictures(tmp_path, 12)
    here, there = (
        tune(segmentation(), tmp_path, keep=0.9, whole_front=True, cluster=cluster).as_json()
        for cluster in (None, client)
    )
    assert {**there, "effort": None} == {**here, "effort": None}
    assert left_behind(client) == (0, 0, [])
