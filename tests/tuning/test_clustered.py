"""Tasks on a cluster: the rows of one process, whoever dies, and the network once to each worker."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from calibration.cluster.mapping import Cluster
from qdqtool.tuning import measure as clustered
from qdqtool.tuning.api import tune
from qdqtool.tuning.configuration import Configuration
from qdqtool.tuning.measure import ClusterMapper, Job, Mapper, Result, Task, local
from tests.calibration.cluster.clusters import kill_one, left_behind
from tests.insertion.nets import images
from tests.tuning.nets import branchy, job_of, planner_of, segmentation
from tests.tuning.test_measure import rows_of

#: Only looked for: reading all tests does not load it.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)

DATA = images(6, 16, 16)


def job_and_tasks() -> tuple[Job, list[Task]]:
    planner = planner_of(branchy(), DATA)
    recipes = [
        planner.plan(Configuration(floats=frozenset(c))).recipe
        for c in ((), ("c6",), ("c0",), ("c3", "c4"))
    ]
    tasks = [Task(f"t{k}", (k,), tuple(recipes)) for k in range(6)]
    return job_of(planner, DATA), tasks


def test_rows_are_those_of_one_process(client: Any) -> None:
    job, tasks = job_and_tasks()
    whole = [replace(t, whole=True) for t in tasks]
    with Cluster(client) as cluster, ClusterMapper(cluster) as mapper:
        for given in (tasks, whole):
            wanted = rows_of(local(1)(job, given))
            assert len(wanted) == 24 and rows_of(mapper(job, given)) == wanted
    assert left_behind(client) == (0, 0, [])


@pytest.mark.slow  # calibration loses one in every run of the tests
def test_a_worker_that_dies_loses_nothing(client: Any) -> None:
    job, tasks = job_and_tasks()

    def watched(mapper: Mapper) -> Iterator[Result]:
        for place, result in enumerate(mapper(job, tasks)):
            if place == 0:
                kill_one(client)
            yield result

    with Cluster(client) as cluster, ClusterMapper(cluster) as mapper:
        assert rows_of(watched(mapper)) == rows_of(local(1)(job, tasks))
    client.wait_for_workers(2, timeout=60)
    assert left_behind(client) == (0, 0, [])


@pytest.mark.slow
def test_the_network_reaches_each_worker_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, tasks = job_and_tasks()
    handed: list[Any] = []
    real = clustered.Handed

    def counted(*arguments: Any) -> Any:
        handed.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(clustered, "Handed", counted)
    with Cluster(client) as cluster, ClusterMapper(cluster) as mapper:
        for k in range(3):
            assert len(rows_of(mapper(job, tasks[2 * k : 2 * k + 2]))) == 8
    assert len(handed) == 1 and handed[0][3] == f"{clustered.__name__}:run_task"


@pytest.mark.slow
def test_tune_on_a_cluster_says_the_same(client: Any, tmp_path: Path) -> None:
    for k in range(12):
        pixels = np.random.default_rng(k).integers(0, 256, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k:02d}.png")
    one, other = (
        tune(segmentation(), tmp_path, keep=0.9, whole_front=True, cluster=where).as_json()
        for where in (None, client)
    )
    assert {**other, "effort": None} == {**one, "effort": None}
    assert left_behind(client) == (0, 0, [])
