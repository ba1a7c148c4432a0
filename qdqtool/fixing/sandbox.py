"""Worker process that runs models with limits on processor time and memory.

The limits count processor time, not wall-clock time, so that the load of the machine and pauses of
the worker do not change the result.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from qdqtool.runtime.sessions import OUT_OF_MEMORY
from qdqtool.util import limits

Arrays = dict[str, npt.NDArray[Any]]
WORKER = Path(__file__).parent / "worker.py"
_CLOCK_FACTOR = 10  # wall-clock seconds permitted for each processor second
_EXIT_SECONDS = 10.0  # time for the worker to exit after it has closed its output
_CLOCK_PARTS = 60  # number of parts into which a wait is divided


class RunError(Exception):
    """Error: onnxruntime cannot run a model.

    Attributes:
        code: Identifier of the cause, such as ``"cpu-time-limit"``. It does not change when the
            message is reworded.
        parameter: Parameter of the Python API that raises the limit. Empty if there is none.
        node: Tensor that the error is about. Empty if there is none.
    """

    def __init__(
        self, message: str = "", *, code: str = "", parameter: str = "", node: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.parameter = parameter
        self.node = node


class RunLimitError(RunError):
    """Error: a model takes more time or memory than permitted."""


class RunTimeoutError(RunLimitError):
    """Error: a run exceeded its time, although its computed cost was within the limits."""


class RunCrashError(RunError):
    """Error: the worker process ended during a run, or had no memory left."""


class Sandbox:
    """Worker process that is started on first use, and started again after it ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._has_run = False

    def run(self, source: bytes, inputs: Arrays, seconds: float, memory: int) -> Arrays:
        """Return the outputs of a model, computed on the CPU without fusing Q/DQ.

        Args:
            source: Serialized model.
            inputs: Array for each input.
            seconds: Permitted processor seconds, summed over all cores.
            memory: Permitted size of the process in bytes.

        Raises:
            RunLimitError: The run exceeded the time or the memory.
            RunError: onnxruntime crashed, or cannot load or run the model.
        """
        has_run = self._has_run
        try:
            return self._run(source, inputs, seconds, memory)
        except RunTimeoutError:
            raise
        except (RunLimitError, RunCrashError):
            if not has_run:
                raise
            # Earlier runs may have fragmented the memory, so try again in a new process.
            self.close()
            return self._run(source, inputs, seconds, memory)

    def _run(self, source: bytes, inputs: Arrays, seconds: float, memory: int) -> Arrays:
        process = self.start()
        self._has_run = True
        clock = _CLOCK_FACTOR * seconds
        if hasattr(signal, "setitimer"):  # the worker limits its processor time too
            clock += limits.SESSION_STUCK
        try:
            with _kill_after(process, clock) as timeout:
                return _exchange(process, source, inputs, seconds, memory)
        except (BrokenPipeError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECONDS)
            code = process.poll()
            self.close()
            if timeout.is_set():
                raise RunTimeoutError(
                    f"the run made no progress for {clock:g} s of wall time",
                    code="wall-clock-limit",
                ) from None
            if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
                raise RunTimeoutError(
                    f"the run exceeded {seconds:g} s of CPU time; increase `effort`",
                    code="cpu-time-limit",
                    parameter="effort",
                ) from None
            raise RunCrashError(
                "onnxruntime crashed during the run, or ran out of memory; increase `effort` to "
                "permit more memory",
                code="crashed",
                parameter="effort",
            ) from error
        except RunError:
            raise
        except BaseException:
            self.close()
            raise

    def start(self) -> subprocess.Popen[bytes]:
        """Return the worker process, and start it first if it is not running.

        The start does not count as time of a run.

        Raises:
            RunError: The worker does not start.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(limits.SESSION_PROCESS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"ORT_DISABLE_TELEMETRY": "1", **os.environ, "MALLOC_ARENA_MAX": "2"},
            )
            atexit.register(self.close)
            self._wait_until_ready(self._process)
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            with _kill_after(process, limits.SESSION_STUCK):
                if not process.stdout.readline():
                    raise RunError(
                        "the process that runs onnxruntime did not start; check that 'import "
                        "onnxruntime' works in this Python",
                        code="worker-not-started",
                    )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the worker process; the next run starts a new one."""
        process, self._process = self._process, None
        self._has_run = False
        if process is None:
            return
        atexit.unregister(self.close)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _exchange(
    process: subprocess.Popen[bytes], source: bytes, inputs: Arrays, seconds: float, memory: int
) -> Arrays:
    assert process.stdin is not None and process.stdout is not None
    arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    for name, array in arrays.items():
        # The worker has only numpy's own types, without 4-bit integers, 8-bit floats and bfloat16.
        if array.dtype.isbuiltin != 1:
            raise RunError(
                f"input '{name}' has type {array.dtype}, which cannot be passed to onnxruntime; "
                "export the model in float16 or float32",
                code="input-type-not-supported",
                node=name,
            )
    request = {
        "model": len(source),
        "seconds": seconds,
        "memory": memory,
        "threads": max(1, min(4, os.cpu_count() or 1)),
        "inputs": [
            {"name": n, "dtype": a.dtype.str, "shape": list(a.shape), "bytes": a.nbytes}
            for n, a in arrays.items()
        ],
    }
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.write(source)
    for array in arrays.values():
        process.stdin.write(array.data.cast("B") if array.size else b"")
    process.stdin.flush()
    return _read_answer(process.stdout)


def _read_answer(stream: IO[bytes]) -> Arrays:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer = json.loads(line)
    if "error" not in answer:
        return {entry["name"]: _read_array(stream, entry) for entry in answer["outputs"]}
    text = answer["error"]
    if "memory" in answer or "bad_alloc" in text:  # MemoryError of Python, std::bad_alloc of C++
        raise RunLimitError(text, code="memory-limit")
    if OUT_OF_MEMORY in text:
        raise RunCrashError(text, code="crashed")
    raise RunError(text, code="onnxruntime-error")


def _read_array(stream: IO[bytes], entry: dict[str, Any]) -> npt.NDArray[Any]:
    content = stream.read(entry["bytes"])
    if len(content) != entry["bytes"]:
        raise EOFError
    return np.frombuffer(content, np.dtype(entry["dtype"])).reshape(entry["shape"])


@contextlib.contextmanager
def _kill_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kill a process if the block takes too many seconds; the yielded event is then set.

    This ends a process that neither computes nor exits. The wait consists of short parts, so that a
    pause of this process (suspend) counts as one part at most.
    """
    done, timeout = threading.Event(), threading.Event()

    def wait() -> None:
        if not any(done.wait(seconds / _CLOCK_PARTS) for _ in range(_CLOCK_PARTS)):
            timeout.set()
            process.kill()

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield timeout
    finally:
        done.set()


#: Shared by all runs of this process, because starting a worker takes half a second.
SHARED = Sandbox()
