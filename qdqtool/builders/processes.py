"""Runs a command with everything that it starts, and ends all of it when its time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO


def exit_code(command: Sequence[str], timeout: float, output: IO[bytes] | int = subprocess.DEVNULL) -> int | None:
    """The exit code of a command that reads nothing; None when it did not end within ``timeout`` seconds.

    Args:
        command: The words; no shell reads them.
        timeout: In seconds.
        output: Where its output goes, errors included.

    Raises:
        OSError: It cannot be started.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)  # what it left running as well


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
