"""A metric of the user's has a limit, and what it started ends with it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qdqtool.errors import QdqtoolError
from qdqtool.threads import Crew
from qdqtool.tuning import limited
from qdqtool.tuning.metrics import Outputs, UserMetric

SLEEP = "import sys, time; time.sleep(2); open(sys.argv[1], 'w')"
children = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list threads' children")


def starts(mark: Path) -> Callable[[Outputs, Outputs, str], float]:
    """A metric that waits for a process."""

    def metric(reference: Outputs, outputs: Outputs, image: str) -> float:
        subprocess.run([sys.executable, "-c", SLEEP, str(mark)], check=False)
        return 1.0

    return metric


def test_results_and_errors_pass() -> None:
    assert limited.within(5.0, lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        limited.within(5.0, lambda: 1 / 0)


@children
def test_a_slow_metric_is_one_line_and_its_process_ends(tmp_path: Path) -> None:
    metric = UserMetric("m:f", ("o",), starts(tmp_path / "mark"), 0.5)
    with pytest.raises(QdqtoolError, match=r"`metric` m:f: did not end within 0\.5 s on a\.jpg"):
        metric.look({"o": np.zeros(2)}, {"o": np.zeros(2)}, "a.jpg")
    time.sleep(2.5)
    assert not (tmp_path / "mark").exists()


def test_a_metric_that_computes_for_ever_is_stopped() -> None:
    turns = [0]

    def spin() -> None:
        while True:
            turns[0] += 1

    with pytest.raises(limited.Over):
        limited.within(0.2, spin)
    time.sleep(0.2)
    seen = turns[0]
    time.sleep(0.1)
    assert turns[0] == seen


@children
def test_what_is_not_wanted_any_more_is_not_waited_for(tmp_path: Path) -> None:
    """As on Ctrl-C: the thread that reads the results stops."""
    metric, crew = starts(tmp_path / "mark"), Crew[int, None]([1], limited.end)
    at_work = threading.Event()

    def work() -> None:
        crew.put(None)
        at_work.set()
        limited.within(60.0, metric, {}, {}, "a.jpg")

    results = crew.results([work])
    next(results)
    assert at_work.wait(5)
    time.sleep(0.3)  # the process has started
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 1.5
    time.sleep(2.5)
    assert not (tmp_path / "mark").exists()
