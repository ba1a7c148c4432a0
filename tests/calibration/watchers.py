import io
import itertools
from collections.abc import Callable

HANG = 60  # seconds until a test that hangs fails


class ProgressStream(io.StringIO):
    def __init__(self, on_sample: Callable[[int], object]) -> None:
        super().__init__()
        self._numbers, self._on_sample = itertools.count(1), on_sample

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
