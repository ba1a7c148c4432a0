"""Settings of the process: garbage collection, terminal width, standard output."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import TextIO

INTERRUPTED = 130  # exit code after Ctrl-C: 128 + number of the signal


@contextlib.contextmanager
def restore_gc() -> Iterator[None]:
    """Start Python's garbage collection again after the block, if it ran before the block."""
    enabled = gc.isenabled()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Pause Python's garbage collection inside the block.

    While a large network is indexed, garbage collection would take half of the time.
    """
    with restore_gc():
        gc.disable()
        yield


def terminal_columns(stream: TextIO | None = None) -> int:
    """Return the width of the terminal in columns; 80 without a terminal.

    Args:
        stream: Stream whose terminal counts if standard output is redirected.
    """
    import shutil  # imported only if needed, because the import is slow

    columns = 0
    if stream is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            columns = os.get_terminal_size(stream.fileno()).columns
    return shutil.get_terminal_size((columns or 80, 24)).columns


def silence_stdout() -> None:
    """Redirect standard output to the null device, so that buffered text is discarded as well."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
