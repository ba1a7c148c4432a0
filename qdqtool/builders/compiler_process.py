"""Run a compiler in a child process, with a time limit and protection from crashes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.util.files import write_text

WORKER = Path(__file__).parent / "worker.py"
_INSTALL = {
    "tensorrt_rtx": "TensorRT-RTX is not installed: run pip install 'qdqtool[rtx]' (this accepts "
    "NVIDIA's license)",
    "tensorrt": (
        "the tensorrt Python package is not installed; install NVIDIA's package, or build with "
        "tensorrt-rtx"
    ),
}


def is_installed(package: str) -> bool:
    """Return whether a Python package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


class CompilerProcess:
    """Compiler in a child process, which starts when needed and restarts after a crash.

    Args:
        package: ``tensorrt_rtx`` or ``tensorrt``.

    Raises:
        BuilderError: The package is not installed.
    """

    def __init__(self, package: str = "tensorrt_rtx") -> None:
        if not is_installed(package):
            raise BuilderError(
                _INSTALL.get(
                    package, f"the package {package} is not installed; run pip install {package}"
                ),
                code="missing-package",
                parameter="builder",
            )
        self._package = package
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> CompilerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process; kill it if it does not end within 5 seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def send_request(
        self, request: dict[str, Any], timeout: float, meanwhile: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Send a request to the child process, and return its answer.

        ``worker.py`` describes the formats. If the process dies, the answer has the status
        ``crashed``. If the time runs out, the process is stopped, and the status is ``timeout``.

        Args:
            request: Request in the format of ``worker.py``.
            timeout: Maximum time in seconds, including the start of the process.
            meanwhile: Function to call while the process works.

        Raises:
            BuilderError: The process cannot load the compiler.
        """
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + timeout
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            if meanwhile is not None:
                meanwhile()
            line = self._read_line(process, deadline)
        except BrokenPipeError:
            line = b""
        except BaseException:
            self._kill_process(process)
            raise
        if line is None:
            self._kill_process(process)
            return {"status": "timeout"}
        if not line:
            return self._describe_exit(process)
        answer: dict[str, Any] = json.loads(line)
        if answer.get("status") == "unavailable":
            self.close()
            raise BuilderError(
                str(answer.get("message", "the compiler cannot run here")),
                code="builder-unavailable",
                parameter="builder",
            )
        return answer

    def start(self) -> subprocess.Popen[bytes]:
        """Start the child process unless it is running. It loads the compiler in the background."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), self._package],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """Return the next line of output; empty if the process ended, None at the deadline."""
        assert process.stdout is not None
        data = b""
        while not data.endswith(b"\n"):
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not select.select([process.stdout], [], [], seconds)[0]:
                return None
            piece = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not piece:
                return b""
            data += piece
        return data

    def _kill_process(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        self.close()

    def _describe_exit(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        code = process.wait()
        self.close()
        if code >= 0:
            return {
                "status": "crashed",
                "message": f"the process of the compiler ended with code {code}",
            }
        name = signal.strsignal(-code)
        return {
            "status": "crashed",
            "message": f"the compiler was stopped by signal {-code} ({name})",
        }


# License of TensorRT-RTX

NOTICE = (
    "TensorRT-RTX is software of NVIDIA. Installing it accepted NVIDIA's license:\n"
    "you may not pass TensorRT-RTX on, and NVIDIA may collect system information.\n"
    "qdqtool does not contain TensorRT-RTX. (Shown only once.)"
)


def print_license_notice() -> bool:
    """Print the license notice to stderr once per user; return whether it was printed.

    A marker file records that the notice was shown. If this file cannot be written, the notice is
    printed each time.
    """
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "state"
    )
    marker = Path(state) / "qdqtool" / "tensorrt-rtx-notice-shown"
    if os.path.exists(marker):  # Path.exists would raise if the folder is unreadable
        return False
    print(NOTICE, file=sys.stderr)
    with contextlib.suppress(OSError, QdqtoolError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_text(marker, "shown\n")
    return True
