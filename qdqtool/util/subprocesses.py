"""Child processes and temporary folders."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO


def run_command(
    command: Sequence[str], timeout: float, output: IO[bytes] | int = subprocess.DEVNULL
) -> int | None:
    """Run a command without a shell, and return its exit code; None after a timeout.

    The command runs in its own process group. At the end, all remaining processes of the group are
    killed.

    Args:
        command: Program and arguments.
        timeout: Maximum time in seconds.
        output: File or descriptor for standard output and standard error.

    Raises:
        OSError: The command cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(OSError):  # raised if all processes have already ended
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()


def temporary_folder(purpose: str = "") -> tempfile.TemporaryDirectory[str]:
    """Create a folder ``qdqtool-...`` that is removed when the context ends."""
    return tempfile.TemporaryDirectory(prefix=f"qdqtool-{purpose}", ignore_cleanup_errors=True)
