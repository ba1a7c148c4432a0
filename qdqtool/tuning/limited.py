"""Runs a function of the user's for a limited time, and ends the processes that it started when that is over."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class Over(Exception):
    """The time is over, or the result is not wanted any more."""


_running: dict[threading.Thread, _Call] = {}


def within(seconds: float, function: Callable[..., Any], *args: object) -> Any:
    """What a function returns.

    Args:
        seconds: The time it may take.
        function: Runs in a thread of its own: no thread can be stopped from outside while it computes, but the one
            that waits for it goes on.
        args: What it is called with.

    Raises:
        Over: The time is over, or :func:`end` was called.
        BaseException: What the function raised.
    """
    call = _Call(function, args)
    caller = threading.current_thread()
    _running[caller] = call
    try:
        call.start()
        if not call.done.wait(seconds) or not call.returned:
            raise Over
    except BaseException:
        call.end()
        raise
    finally:
        del _running[caller]
    if call.error is not None:
        raise call.error
    return call.result


def end(callers: Iterable[threading.Thread]) -> None:
    """Ends what these threads wait for in :func:`within`."""
    for caller in callers:
        call = _running.get(caller)
        if call is not None:
            call.done.set()


class _Call(threading.Thread):
    """One call. Attributes say whether it returned, and what."""

    def __init__(self, function: Callable[..., Any], args: tuple[object, ...]) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.returned = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._given = args

    def run(self) -> None:
        try:
            self.result = self._function(*self._given)
        except BaseException as error:
            self.error = error
        self.returned = True
        self.done.set()

    def end(self) -> None:
        """Ends the processes that the function started, and the function where Python computes it."""
        if self.native_id is None or self.returned:
            return
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))
        for process in _started_by(Path(f"/proc/self/task/{self.native_id}")):
            with contextlib.suppress(OSError):
                if os.getpgid(process) == process:
                    os.killpg(process, signal.SIGKILL)
                os.kill(process, signal.SIGKILL)


def _started_by(task: Path) -> list[int]:
    """Processes that a thread started, and all that those started; none where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for process in map(int, (task / "children").read_text().split()):
            found.append(process)
            for inner in Path(f"/proc/{process}/task").iterdir():
                found += _started_by(inner)
    return found
