"""Processes that a test recognizes by how long they sleep, on systems with /proc."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="this system does not show its processes"
)


def new_mark() -> str:
    """Return seconds to sleep that no other process has in its command line."""
    return f"{random.randrange(1000, 9999)}.{os.getpid()}"


def sleeping(mark: str, state: str = "") -> list[Path]:
    """Return the processes whose command line has `sleep` and the mark, in a state such as `T`."""
    commands = {path.parent: read(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    marked = [path for path, text in commands.items() if mark.encode() in text and b"sleep" in text]
    return [path for path in marked if f") {state}".encode() in read(path / "stat")]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "hangs"
        time.sleep(0.02)
