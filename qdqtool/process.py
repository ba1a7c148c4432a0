"""Manners of a Unix process: closed descriptors, signals, and what is left in a stream at the end."""

from __future__ import annotations

import functools
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

from qdqtool.deferred import defer
from qdqtool.errors import QdqtoolError

INTERRUPTED = 130
_CODES = {"SIGINT": INTERRUPTED, "SIGTERM": 143, "SIGHUP": 129}
OBJECTS_BETWEEN_COLLECTIONS = 50_000
_LIBRARIES = 100 << 20  # bytes of address space that numpy and onnx take before the first array
_AGAIN = 0.01  # seconds
_asked: list[int] = []
_WORDS = {INTERRUPTED: "interrupted", 143: "terminated", 129: "the terminal was closed"}


class Stopped(BaseException):
    """A signal asked the process to end; raised in the main thread, so that everything is cleaned up on the way.

    Attributes:
        code: The exit code, 128 and the signal's number.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    @property
    def message(self) -> str:
        return f"{_WORDS.get(self.code, 'stopped')}; nothing half-written was left"


class ClosedOutput(io.StringIO):
    """Stands for a stream that was closed before the program began (``>&-``)."""

    def write(self, text: str) -> int:
        if text:
            raise QdqtoolError("standard output is closed: the answer cannot be printed")
        return 0

    def isatty(self) -> bool:
        return False


def prepare() -> None:
    """Called once, before anything else: sets signals, and fills descriptors 0 to 2 where they are closed.

    A file opened later would get their numbers otherwise, and a library's message would be written into it.
    """
    _asked.clear()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)  # importing makes many objects, none of them garbage
    defer()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime leaves its file `.ses` in TMPDIR
    for name, code in _CODES.items():
        number = getattr(signal, name, None)
        if number is not None and (signal.getsignal(number) is not signal.SIG_IGN or name == "SIGINT"):
            signal.signal(number, _handler(code))  # an ignored SIGHUP is how nohup works
    sys.unraisablehook = _lost
    _hold_while_loading()
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def columns() -> int:
    """Columns of the terminal (or ``COLUMNS``), 80 where there is none; :mod:`shutil` loads all it compresses with."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return 80


def require_room() -> None:
    """Looks whether a limited address space (``ulimit -v``) holds the libraries; OpenBLAS would end with 1, a "no".

    Raises:
        MemoryError: There is too little left.
    """
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):  # no Linux
        return
    if limit == resource.RLIM_INFINITY:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread takes some
    if limit - taken < _LIBRARIES:
        raise MemoryError


def load_numpy() -> None:
    """Imports numpy without threads for its linear algebra: starting them is work that only large products pay for."""
    threads = "OPENBLAS_NUM_THREADS"
    if "numpy" in sys.modules or threads in os.environ:
        return
    os.environ[threads] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[threads]  # what is started from here may need them


def stopped() -> Stopped | None:
    """What a signal asked for: libraries that are just being loaded turn the exception into one of theirs."""
    return Stopped(_asked[-1]) if _asked else None


def _handler(code: int) -> signal._HANDLER:
    def stop(number: int, frame: FrameType | None) -> None:
        _asked.append(code)
        if code != INTERRUPTED:
            signal.signal(number, signal.SIG_IGN)  # cleaning up is not to be disturbed by the same signal again
        raise Stopped(code)

    return stop


@functools.cache
def _hold_while_loading() -> None:
    """Lets signals wait while a compiled module is loaded: an exception in its C++ code would abort the process."""
    if not hasattr(signal, "pthread_sigmask"):
        return
    numbers = {getattr(signal, name) for name in _CODES}

    def held(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*args: Any) -> Any:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                return original(*args)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        return load

    for name in ("create_module", "exec_module"):
        setattr(ExtensionFileLoader, name, held(getattr(ExtensionFileLoader, name)))


def _lost(unraisable: sys.UnraisableHookArgs) -> None:
    """Raises a stop again, soon, that came where Python drops exceptions: while an object was being deleted."""
    if not isinstance(unraisable.exc_value, Stopped):
        sys.__unraisablehook__(unraisable)
    elif hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _handler(unraisable.exc_value.code))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)


def silence_stdout() -> None:
    """Points descriptor 1 at nothing, so that what is left in the buffer can be dropped."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
    except (OSError, ValueError, AttributeError):
        return


def finish(code: int) -> int:
    """Flushes stdout and stderr; a device that takes no more must not end in a traceback.

    Returns:
        The exit code: 2 in place of 0 or 1 where the answer could not be written.
    """
    gc.freeze()  # all memory is given back at once now: nothing is to be searched for garbage before
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except (OSError, ValueError):
        silence_stdout()
        code = code if code > 1 else 2
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = None
    for name in (*_CODES, "SIGALRM"):  # all is done; Python would give them back their defaults while it ends
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    return code
