import threading
from collections.abc import Callable, Iterator

import pytest

from qdqtool.util.threads import SharedTasks, run_threads


def square(tasks: SharedTasks[int]) -> Callable[[Callable[[int], None]], None]:
    def work(put: Callable[[int], None]) -> None:
        for task in tasks:
            put(task * task)

    return work


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_run_threads_does_each_task_once(workers: int) -> None:
    tasks = SharedTasks(i for i in range(200))
    assert sorted(run_threads(tasks, [square(tasks)] * workers)) == [i * i for i in range(200)]


def test_run_threads_without_workers_yields_nothing() -> None:
    assert list(run_threads(SharedTasks([1]), [])) == []


def test_run_threads_raises_the_error_of_a_worker_and_ends_all() -> None:
    tasks = SharedTasks(range(1000))

    def fail(put: Callable[[int], None]) -> None:
        for task in tasks:
            if task == 3:
                raise ValueError("task 3")
            put(task)

    before = threading.active_count()
    with pytest.raises(ValueError, match="task 3"):
        list(run_threads(tasks, [fail, fail]))
    assert tasks.stopped and threading.active_count() == before


def test_run_threads_raises_the_error_of_the_tasks() -> None:
    def generate() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    tasks = SharedTasks(generate())
    with pytest.raises(OSError, match="gone"):
        list(run_threads(tasks, [square(tasks)] * 2))


def test_run_threads_ends_when_the_generator_is_closed() -> None:
    def count() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    before, tasks = threading.active_count(), SharedTasks(count())
    stopped = threading.Event()
    results = run_threads(tasks, [square(tasks)] * 2, on_stop=stopped.set)
    next(results)
    results.close()
    assert stopped.is_set() and threading.active_count() == before
