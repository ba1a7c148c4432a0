"""Processes of Python that answer on their pipes: scripts that import nothing of qdqtool, started and ended here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qdqtool.base.process import marked

if TYPE_CHECKING:
    import subprocess


def start(
    script: Path, *words: str, environment: Mapping[str, str] = os.environ
) -> subprocess.Popen[bytes]:
    """Starts a script of this installation, with pipes for what it reads and prints; its errors go nowhere."""
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-P", str(script), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=marked(environment),
    )


def end(process: subprocess.Popen[bytes]) -> int:
    """Ends it, and closes its pipes; returns its exit code, its own where it had ended."""
    process.kill()
    code = process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    return code
