"""What is measured, against whole networks run by onnxruntime and errors worked out with numpy."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from qdqtool.errors import QdqtoolError
from qdqtool.tuning.configuration import Configuration
from qdqtool.tuning.mapper import local
from qdqtool.tuning.measure import Job, Result, Task, run_task
from qdqtool.tuning.metrics import UserMetric
from qdqtool.tuning.recipe import Recipe
from tests.insertion.nets import images, run
from tests.tuning.nets import branchy, job_of, planner_of

DATA = images(5, 16, 16)


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of(planner_of(branchy(), DATA), DATA)


@pytest.fixture(scope="module")
def recipes() -> list[Recipe]:
    planner = planner_of(branchy(), DATA)
    choices = [(), ("c6",), ("c0",), ("c3", "c4"), ("add",), ("c5",), ("c2",)]
    return [planner.plan(Configuration(floats=frozenset(c))).recipe for c in choices]


def by_hand(job: Job, recipe: Recipe, sample: int) -> float:
    """Root mean square difference of the last convolution's output, over the float output's standard deviation."""
    quantized, _ = recipe.build(job.network.model)
    wanted = run(branchy(), DATA[sample])[0].astype(np.float64)
    found = run(quantized.proto, DATA[sample])[0].astype(np.float64)
    return float(np.sqrt(np.mean((wanted - found) ** 2)) / wanted.std())


def test_a_sweep_measures_what_whole_networks_give(job: Job, recipes: list[Recipe]) -> None:
    result = run_task(job, Task("t", (0, 3), tuple(recipes)))
    for recipe in recipes:
        for sample in (0, 3):
            row = result.rows[recipe.key][sample]
            assert row is not None
            assert row.error == pytest.approx(by_hand(job, recipe, sample), rel=1e-12)


def test_whole_runs_give_the_same_errors_bit_by_bit(job: Job, recipes: list[Recipe]) -> None:
    swept = run_task(job, Task("s", (0, 1, 2), tuple(recipes)))
    whole = run_task(job, Task("w", (0, 1, 2), tuple(recipes), whole=True))
    for recipe in recipes:
        for sample in range(3):
            one, other = swept.rows[recipe.key][sample], whole.rows[recipe.key][sample]
            assert one is not None and other is not None
            assert one.error == other.error
            assert other.evidence == pytest.approx(1.0 - other.error)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_same_bits_for_any_number_of_workers(job: Job, recipes: list[Recipe], workers: int) -> None:
    tasks = [Task(f"{i} {k}", (i,), tuple(recipes[k::2])) for i in range(5) for k in range(2)]
    found: dict[tuple[str, int], object] = {}
    for result in local(workers)(job, tasks):
        for key, rows in result.rows.items():
            for number, row in rows.items():
                assert (key, number) not in found
                found[key, number] = row
    wanted = run_task(job, Task("all", tuple(range(5)), tuple(recipes)))
    assert found == {(k, n): row for k, rows in wanted.rows.items() for n, row in rows.items()}


def test_job_and_task_go_through_pickle(job: Job, recipes: list[Recipe]) -> None:
    task = Task("t", (1,), tuple(recipes[:3]), whole=True)
    job.network  # noqa: B018 - what is kept for one process stays there
    back: Job = pickle.loads(pickle.dumps(job))
    again: Task = pickle.loads(pickle.dumps(task))
    result: Result = pickle.loads(pickle.dumps(run_task(back, again)))
    assert result == run_task(job, task)


def test_an_error_of_one_worker_ends_all(job: Job, recipes: list[Recipe]) -> None:
    def broken(reference: object, outputs: object, image: str) -> float:
        raise RuntimeError("no labels")

    failing = Job(job.model, job.images, job.base, job.compared, (), UserMetric("m:f", job.metric.tensors, broken))
    tasks = [Task(f"{i}", (i,), tuple(recipes), whole=True) for i in range(5)]
    with pytest.raises(QdqtoolError, match=r"`metric` m:f: raised RuntimeError on sample \d: no labels"):
        list(local(2)(failing, tasks))


def test_samples_at_once_fit_the_budget(job: Job, recipes: list[Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    from qdqtool import budgets

    # The largest cut: a residual's two tensors, or two branches' worth, of 16 KB each.
    monkeypatch.setattr(budgets, "TUNING_CUTS", 2 * 3 * (2 * 16384))
    assert job.network.images_at_once(recipes, 1) == 3
    assert job.network.images_at_once(recipes, 3) == 1


class Counting:
    """A metric that counts for which outputs of the float network it was asked what to keep."""

    name = identity = sentence = "counting"

    def __init__(self, tensors: tuple[str, ...]) -> None:
        self.tensors = tensors
        self.kept_of = 0

    def kept(self, reference: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.kept_of += 1
        return dict(reference)

    def look(self, kept: dict[str, np.ndarray], found: dict[str, np.ndarray], image: str) -> float:
        return float(np.abs(kept[self.tensors[0]] - found[self.tensors[0]]).mean())

    def value(self, evidence: list[float]) -> float:
        return float(np.mean(evidence))


def test_the_float_network_runs_once_for_each_sample(
    job: Job, recipes: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [Task(f"{r.key} {i}", (i, i + 1), (r,), whole) for r in recipes for i in (0, 2) for whole in (True, False)]
    found = []
    for room, runs in ((None, 4), (0, 2 * len(tasks))):
        if room is not None:
            from qdqtool import budgets

            monkeypatch.setattr(budgets, "TUNING_REFERENCES", room)
        metric = Counting(job.metric.tensors)
        counted = Job(job.model, job.images, job.base, job.compared, (), metric)
        rows = [run_task(counted, task) for task in tasks[: len(tasks) // 2]]
        rows += [run_task(counted.based_on(recipes[1]), task) for task in tasks[len(tasks) // 2 :]]
        assert metric.kept_of == runs
        found.append(rows)
    assert found[0] == found[1]


def test_a_metric_that_writes_into_what_it_gets_changes_nothing_for_the_next(job: Job, recipes: list[Recipe]) -> None:
    def rude(reference: dict[str, np.ndarray], outputs: dict[str, np.ndarray], image: str) -> float:
        (wanted,), (found,) = reference.values(), outputs.values()
        value = float(np.abs(wanted - found).mean())
        wanted[:] = found[:] = 0.0
        return value

    metric = UserMetric("m:f", job.metric.tensors, rude)
    task = Task("t", (0,), tuple(recipes), whole=True)
    rows = run_task(Job(job.model, job.images, job.base, job.compared, (), metric), task).rows
    backwards = replace(task, candidates=tuple(recipes[::-1]))
    again = run_task(Job(job.model, job.images, job.base, job.compared, (), metric), backwards)
    assert again.rows == rows
