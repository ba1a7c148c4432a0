"""Runs models in a process of their own, with limits on time and memory that hold whatever the model is.

The time is the processor's: neither a loaded machine nor a worker that was stopped meanwhile changes what a run gives.
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
from qdqtool.util.said import said

Arrays = dict[str, npt.NDArray[Any]]
WORKER = Path(__file__).parent / "worker.py"
_CLOCK = (
    10  # seconds of the clock for each of the processor, where other programs want that as well
)
_ENDS_WITHIN = 10.0  # seconds, once it has closed its output
_TICKS = 60  # parts in which the seconds of a clock are waited for


class RunError(Exception):
    """A model that onnxruntime cannot run; the message is its first line.

    Attributes:
        code: Identifier of the cause, such as ``"cpu-time-limit"``. It stays when the message is reworded.
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


class TooMuch(RunError):
    """A model that takes more time or memory than it may."""


class TookTooLong(TooMuch):
    """The run did not end, though what could be counted of it was within the limits."""


class Crashed(RunError):
    """The process ended while it ran the model, or had no memory left for it."""


class Sandbox:
    """A worker process; started when first used, and again after it had to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._used = False  # whether it has run a model

    def run(self, source: bytes, inputs: Arrays, seconds: float, memory: int) -> Arrays:
        """The outputs of a model, computed on the CPU without fusing Q/DQ.

        Args:
            source: The serialized model.
            inputs: Array for each input.
            seconds: Of the processor, those of all its cores together, until the process is ended.
            memory: Bytes that the process may take.

        Raises:
            TooMuch: It took longer, or more memory.
            RunError: onnxruntime cannot load or run the model, or crashed on it.
        """
        used = self._used
        try:
            return self._run(source, inputs, seconds, memory)
        except TookTooLong:
            raise
        except (TooMuch, Crashed):
            if not used:
                raise
            self.close()  # memory that runs before this one left in pieces counts: a new process has all of it
            return self._run(source, inputs, seconds, memory)

    def _run(self, source: bytes, inputs: Arrays, seconds: float, memory: int) -> Arrays:
        process = self.ready()
        self._used = True
        clock = _CLOCK * seconds + (limits.SESSION_STUCK if hasattr(signal, "setitimer") else 0.0)
        try:
            with _ended_after(process, clock) as late:
                return self._ask(process, source, inputs, seconds, memory)
        except (BrokenPipeError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_WITHIN)
            code = process.poll()
            self.close()
            if late.is_set():
                raise TookTooLong(
                    f"it neither computed nor ended within {clock:g} s of the clock",
                    code="wall-clock-limit",
                ) from None
            if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
                raise TookTooLong(
                    said(
                        "it did not end within {seconds:g} s of the processor; raise it with {`effort`}",
                        seconds=seconds,
                    ),
                    code="cpu-time-limit",
                    parameter="effort",
                ) from None
            raise Crashed(
                "onnxruntime crashed on it, or ran out of memory", code="crashed"
            ) from error
        except RunError:
            raise
        except BaseException:
            self.close()
            raise

    def ready(self) -> subprocess.Popen[bytes]:
        """The worker, started where there is none; the time that this takes is none of a model's.

        Raises:
            RunError: It does not start.
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
            self._await(self._process)
        return self._process

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            with _ended_after(process, limits.SESSION_STUCK):
                if not process.stdout.readline():
                    raise RunError(
                        "a process for onnxruntime does not start", code="worker-not-started"
                    )
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _ask(
        process: subprocess.Popen[bytes], source: bytes, inputs: Arrays, seconds: float, memory: int
    ) -> Arrays:
        assert process.stdin is not None and process.stdout is not None
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in arrays.items():
            if (
                array.dtype.isbuiltin != 1
            ):  # 4-bit, 8-bit float and bfloat16 numbers, which numpy has from elsewhere
                raise RunError(
                    f"input '{name}' is {array.dtype}, which onnxruntime cannot be given",
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
        line = process.stdout.readline()
        answer = json.loads(line if line.endswith(b"\n") else _ended())
        if "error" in answer:
            text = answer["error"]
            if "memory" in answer or "bad_alloc" in text:  # the second as C++ says it
                raise TooMuch(text, code="memory-limit")
            if OUT_OF_MEMORY in text:
                raise Crashed(text, code="crashed")
            raise RunError(text, code="onnxruntime-error")
        return {entry["name"]: _array(process.stdout, entry) for entry in answer["outputs"]}

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        self._used = False
        if process is None:
            return
        atexit.unregister(self.close)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Ends a process after seconds of the clock, and sets what it yields then.

    Only for one that neither computes nor ends. The seconds are waited for in parts, of which one at most goes on while
    this process is stopped as well.
    """
    done, late = threading.Event(), threading.Event()

    def wait() -> None:
        if not any(done.wait(seconds / _TICKS) for _ in range(_TICKS)):
            late.set()
            process.kill()

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield late
    finally:
        done.set()


def _ended() -> str:
    raise EOFError


def _array(stream: IO[bytes], entry: dict[str, Any]) -> npt.NDArray[Any]:
    data = stream.read(entry["bytes"])
    if len(data) != entry["bytes"]:
        raise EOFError
    return np.frombuffer(data, np.dtype(entry["dtype"])).reshape(entry["shape"])


#: The worker of this process: one is enough, and starting it takes half a second.
SHARED = Sandbox()
