"""Progress of long work on stderr: a bar on a terminal, else one line a minute, as logs expect."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
LINE_SECONDS = 60.0


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yields ``items`` and prints how far they are.

    Args:
        items: What to go through.
        description: A few words shown before the bar.
        total: Number of items, where ``items`` has no length.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield from _in_lines(items, description, total)
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    stream = getattr(sys.stderr, "unfiltered", sys.stderr)  # a bar is drawn with control characters
    yield from rich_track(items, description, total=total, console=Console(file=stream), transient=True)


def _in_lines(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """Short work says nothing."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    begun = printed = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - printed >= LINE_SECONDS and sys.stderr is not None:
            printed = now
            of = f" of {total} ({done / total:.0%})" if total else ""
            print(f"qdqtool: {description}: {done}{of} after {now - begun:.0f} s", file=sys.stderr, flush=True)
        yield item
