"""A progress bar on stderr for long work; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yields ``items``, drawing a bar on stderr when that is a terminal.

    Args:
        items: What to go through.
        description: A few words shown before the bar.
        total: Number of items, where ``items`` has no length.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    stream = getattr(sys.stderr, "unfiltered", sys.stderr)  # a bar is drawn with control characters
    yield from rich_track(items, description, total=total, console=Console(file=stream), transient=True)
