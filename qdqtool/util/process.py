"""Garbage collection, the terminal, and standard output."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

INTERRUPTED = 130  # exit code after Ctrl-C: 128 and the number of the signal


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Stop the search for garbage, which takes half the time while a large network is indexed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def terminal_columns() -> int:
    """Return the width of the terminal, 80 if there is none."""
    import shutil  # slow to import, and most commands do without

    return shutil.get_terminal_size((80, 24)).columns


def silence_stdout() -> None:
    """Drop everything that is still in the buffer of standard output."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
