from collections.abc import Callable

import pytest

from qdqtool.util import progress
from tests.calibration.watchers import ProgressStream, WatchProgress


@pytest.fixture
def watch_progress(monkeypatch: pytest.MonkeyPatch) -> WatchProgress:
    """Return a function that lets each sample print a line of progress to a new stream.

    The main thread calls the argument of this function before each line.
    """

    def watch(on_sample: Callable[[int], object] = lambda number: None) -> ProgressStream:
        stream = ProgressStream(on_sample)
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        monkeypatch.setattr("sys.stderr", stream)
        return stream

    return watch
