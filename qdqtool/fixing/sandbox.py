"""Runs models in a process of their own, with limits on time and memory that hold whatever the model is."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from qdqtool.base import budgets
from qdqtool.base.process import marked

Arrays = dict[str, npt.NDArray[Any]]
WORKER = Path(__file__).parent / "worker.py"
_ARENA = "bfc_arena"  # where onnxruntime says that it got no memory
_STARTS_WITHIN = 60.0  # seconds until Python has loaded onnxruntime, half of one on an idle machine


class RunError(Exception):
    """A model that onnxruntime cannot run; the message is its first line."""


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
            seconds: Until the process is ended.
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
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            return self._ask(process, source, inputs, memory)
        except (BrokenPipeError, EOFError) as error:
            self.close()
            if late.is_set():
                raise TookTooLong(f"it did not end within {seconds:.0f} s") from None
            raise Crashed("onnxruntime crashed on it, or ran out of memory") from error
        except RunError:
            raise
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()

    def ready(self) -> subprocess.Popen[bytes]:
        """The worker, started where there is none; the time that this takes is none of a model's.

        Raises:
            RunError: It does not start.
        """
        if self._process is None or self._process.poll() is not None:
            environment = marked({**os.environ, "MALLOC_ARENA_MAX": "2"})
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(budgets.SESSION_PROCESS)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            )
            atexit.register(self.close)
            self._await(self._process)
        return self._process

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        timer = threading.Timer(_STARTS_WITHIN, process.kill)
        timer.start()
        try:
            if not process.stdout.readline():
                raise RunError("a process for onnxruntime does not start")
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], source: bytes, inputs: Arrays, memory: int) -> Arrays:
        assert process.stdin is not None and process.stdout is not None
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in arrays.items():
            if array.dtype.isbuiltin != 1:  # 4-bit, 8-bit float and bfloat16 numbers, which numpy has from elsewhere
                raise RunError(f"input '{name}' is {array.dtype}, which onnxruntime cannot be given")
        request = {
            "model": len(source), "memory": memory, "threads": max(1, min(4, os.cpu_count() or 1)),
            "inputs": [{"name": n, "dtype": a.dtype.str, "shape": list(a.shape), "bytes": a.nbytes}
                       for n, a in arrays.items()],
        }
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.write(source)
        for array in arrays.values():
            process.stdin.write(array.data.cast("B") if array.size else b"")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or _ended())
        if "error" in answer:
            text = answer["error"]
            if "memory" in answer or "bad_alloc" in text:  # the second as C++ says it
                raise TooMuch(text)
            raise (Crashed if _ARENA in text else RunError)(text)
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


def _ended() -> str:
    raise EOFError


def _array(stream: IO[bytes], entry: dict[str, Any]) -> npt.NDArray[Any]:
    data = stream.read(entry["bytes"])
    if len(data) != entry["bytes"]:
        raise EOFError
    return np.frombuffer(data, np.dtype(entry["dtype"])).reshape(entry["shape"])


#: The worker of this process: one is enough, and starting it takes half a second.
SHARED = Sandbox()
