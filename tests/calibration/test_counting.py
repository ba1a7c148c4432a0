"""Threads that count: who waits for whom."""

import threading

import numpy as np

from calibration.counting import Tally, ThreadPass, turns


def waits(work: threading.Thread) -> bool:
    work.join(0.2)
    return work.is_alive()


def test_a_sample_is_counted_in_turn_and_seen_whole() -> None:
    turn = threading.Semaphore(0)
    with Tally(None, ["x"], 256, None, 1, 1, turn=turn) as tally:
        adding = threading.Thread(
            target=tally.add, args=(0, ({"x": np.ones((1, 4), np.float32)}, 1))
        )
        adding.start()
        assert waits(adding)
        found: list[int] = []
        looking = threading.Thread(
            target=lambda: found.append(ThreadPass(iter(()), [tally]).snapshot()[0].images)
        )
        with tally.lock:  # as while a sample is being added
            turn.release()
            looking.start()
            assert waits(adding) and waits(looking) and not found
        for thread in (adding, looking):
            thread.join()
        assert tally.images == 1 and tally.tensors["x"].count == 4


def test_half_of_the_threads_count_at_a_time() -> None:
    for tallies, at_once in ((1, 1), (2, 1), (3, 1), (8, 4)):
        free = turns(tallies)
        assert sum(free.acquire(blocking=False) for _ in range(tallies)) == at_once
