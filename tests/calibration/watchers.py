import io
import itertools
import threading
import time
from collections.abc import Callable

import pytest

HANG = 60  # seconds until a test that hangs fails


class ProgressStream(io.StringIO):
    def __init__(self, on_sample: Callable[[int], object]) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._on_sample = on_sample

    def write(self, text: str) -> int:
        if "Calibrating" in text:
            self._on_sample(next(self._numbers))
        return super().write(text)


WatchProgress = Callable[..., ProgressStream]
"""Fixture of conftest.py."""


def stop_after(count: int) -> Callable[[int], None]:
    def on_sample(number: int) -> None:
        if number == count:
            raise KeyboardInterrupt

    return on_sample


class Waits:
    """Reports that a thread waits for a condition or sleeps, so that tests measure no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._listeners: dict[int, Callable[[], object]] = {}
        wait, sleep = threading.Condition.wait, time.sleep

        def report_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            self._report()
            return wait(condition, timeout)

        def report_sleep(seconds: float) -> None:
            if seconds:
                self._report()
            sleep(seconds)

        monkeypatch.setattr(threading.Condition, "wait", report_wait)
        monkeypatch.setattr(time, "sleep", report_sleep)

    def listen(self, listener: Callable[[], object]) -> None:
        self._listeners[threading.get_ident()] = listener

    def _report(self) -> None:
        self._listeners.get(threading.get_ident(), int)()
