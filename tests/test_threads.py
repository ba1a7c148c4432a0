"""Threads that share tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from qdqtool.threads import Crew


def squares(crew: Crew[int, int]) -> None:
    for task in crew.tasks():
        crew.put(task * task)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_task_is_done_once(workers: int) -> None:
    crew: Crew[int, int] = Crew(i for i in range(200))  # a generator bears no two threads at a time
    assert sorted(crew.results([lambda: squares(crew)] * workers)) == [i * i for i in range(200)]


def test_nobody_to_work_is_no_result() -> None:
    crew: Crew[int, int] = Crew([1])
    assert list(crew.results([])) == []


def test_what_a_thread_raises_is_raised_here_and_all_have_ended() -> None:
    def fails(crew: Crew[int, int]) -> None:
        for task in crew.tasks():
            if task == 3:
                raise ValueError("task 3")
            crew.put(task)

    before = threading.active_count()
    crew: Crew[int, int] = Crew(range(1000))
    with pytest.raises(ValueError, match="task 3"):
        list(crew.results([lambda: fails(crew)] * 2))
    assert crew.stopped and threading.active_count() == before


def test_tasks_that_fail_to_come_are_told() -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    crew: Crew[int, int] = Crew(tasks())
    with pytest.raises(OSError, match="gone"):
        list(crew.results([lambda: squares(crew)] * 2))


def test_a_crew_ends_when_its_results_are_not_wanted_any_more() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    before = threading.active_count()
    crew: Crew[int, int] = Crew(endless())
    results = crew.results([lambda: squares(crew)] * 2)
    next(results)
    results.close()
    assert threading.active_count() == before
