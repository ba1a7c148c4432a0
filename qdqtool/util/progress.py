"""Progress of long work on stderr: a bar on a terminal, else one line per minute."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")

LINE_SECONDS = 60.0


def track_progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield items, and report on stderr how many of them are done.

    Args:
        items: Items to go through.
        description: Short text that is printed before the bar.
        total: Number of items, if `items` has no length.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield from _print_lines(items, description, total)
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    # The bar needs control characters, which the command line's stderr escapes.
    stream = getattr(sys.stderr, "unfiltered", sys.stderr)
    yield from rich_track(
        items, description, total=total, console=Console(file=stream), transient=True
    )


def _print_lines(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    if total is None and isinstance(items, Sized):
        total = len(items)
    start = last_line = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last_line >= LINE_SECONDS and sys.stderr is not None:
            last_line = now
            share = f" of {total} ({done / total:.0%})" if total else ""
            line = f"qdqtool: {description}: {done}{share} after {now - start:.0f} s"
            print(line, file=sys.stderr, flush=True)
        yield item
