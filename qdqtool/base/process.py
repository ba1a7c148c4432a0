"""Manners of a Unix process: descriptors, signals, what is left in a stream at the end; progress of long work.

Threads take tasks from one place.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from types import FrameType
from typing import Any, Generic, TypeVar

from qdqtool.base.deferred import NO_TELEMETRY, defer
from qdqtool.base.folders import TemporaryFolder
from qdqtool.errors import QdqtoolError

INTERRUPTED = 130
_CODES = {"SIGINT": INTERRUPTED, "SIGTERM": 143, "SIGHUP": 129}
OBJECTS_BETWEEN_COLLECTIONS = 50_000
_LIBRARIES = 100 << 20  # bytes of address space that numpy and onnx take before the first array
_AGAIN = 0.01  # seconds
_PATIENCE = 20  # seconds for ending what has a mark
_ZOMBIES = 1000  # processes that have ended and may be waited for by nobody
_DIGITS = 4  # of a number of columns; Python reads none of some thousand digits
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_own = False  # whether the process is the command line's
_others: list[int] | None = (
    None  # processes that ran when this one began to adopt; None as long as it does not
)
_asked: list[int] = []
_watchers: list[int] = []  # processes that end after this one
_loading: list[Any] = []  # modules of libraries, one inside the other
_interruptible = {"__main__", "qdqtool", "calibration"}  # packages
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
            raise QdqtoolError(
                "standard output is closed: the answer cannot be printed", code="output-closed"
            )
        return 0

    def isatty(self) -> bool:
        return False


def prepare() -> None:
    """Called once, before anything else: sets signals, and fills descriptors 0 to 2 where they are closed.

    A file opened later would get their numbers otherwise, and a library's message would be written into it.
    """
    global _own
    _own = True
    _asked.clear()
    gc.set_threshold(
        OBJECTS_BETWEEN_COLLECTIONS
    )  # importing makes many objects, none of them garbage
    atexit.register(end_started)  # as the first, so that libraries end what is theirs before
    defer()
    for variable, value in NO_TELEMETRY.items():
        os.environ.setdefault(variable, value)  # for what a user's metric or command loads, too
    for name, code in _CODES.items():
        number = getattr(signal, name, None)
        if number is not None and (
            signal.getsignal(number) is not signal.SIG_IGN or name == "SIGINT"
        ):
            signal.signal(number, _handler(code))  # an ignored SIGHUP is how nohup works
    sys.unraisablehook = _lost
    _leave_forked()
    _hold_while_loading()
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def keep_garbage() -> None:
    """Collects none any more, in a process of our own: all that is made from now on is needed until its end."""
    if _own:
        gc.disable()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A large network is many objects, all of which stay: looking for garbage among them takes half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def columns() -> int:
    """Columns of the terminal (or ``COLUMNS``), 80 where there is none; :mod:`shutil` loads all it compresses with."""
    given = os.environ.get("COLUMNS", "").lstrip("0")
    if given.isdecimal() and (wide := int(given[:_DIGITS])):
        return wide
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
    """Imports numpy without threads for its linear algebra: only large products pay for them, and they wait busily."""
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
            signal.signal(
                number, signal.SIG_IGN
            )  # cleaning up is not to be disturbed by the same signal again
        if not _loading:
            raise Stopped(code)

    return stop


def interrupt_loading(module: str) -> None:
    """Lets signals end the loading of a module of the user's, and of its package: it may take as long as it likes."""
    _interruptible.add(module.partition(".")[0])


@functools.cache
def _leave_forked() -> None:
    """Gives what the user's code forks (workers of a pool) Python's own manners: none of this process is its to end."""

    def leave() -> None:
        global _own, _others
        if not _own:
            return
        _own, _others = False, None
        _asked.clear()
        gc.enable()
        atexit.unregister(end_started)
        sys.unraisablehook = sys.__unraisablehook__
        for name in (*_CODES, "SIGALRM"):
            number = getattr(signal, name, None)
            if (
                number is not None
                and getattr(signal.getsignal(number), "__module__", "") == __name__
            ):
                signal.signal(
                    number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
                )

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=leave)


@functools.cache
def _hold_while_loading() -> None:
    """Lets signals wait while a library is loaded: an exception in its compiled code would end the process.

    That code may call Python's, as protobuf's does while it makes onnx's classes, and some of it does not expect an
    exception from there. Signals are not blocked: the threads that libraries start would take them, and Python's
    handler runs in this one.
    """

    def held(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(loader: Any, *args: Any) -> Any:
            package = getattr(loader, "name", "").partition(".")[0]
            if (
                package in _interruptible
                or threading.current_thread() is not threading.main_thread()
            ):
                return original(loader, *args)
            before = len(_asked)
            _loading.append(loader)
            try:
                return original(loader, *args)
            finally:
                _loading.pop()
                if not _loading and len(_asked) > before:
                    raise Stopped(_asked[-1])

        return load

    for kind, name in (
        (ExtensionFileLoader, "create_module"),
        (ExtensionFileLoader, "exec_module"),
        (SourceFileLoader, "exec_module"),
    ):
        setattr(kind, name, held(getattr(kind, name)))


def _lost(unraisable: sys.UnraisableHookArgs) -> None:
    """Raises a stop again, soon, that came where Python drops exceptions: while an object was being deleted."""
    if not isinstance(unraisable.exc_value, Stopped):
        sys.__unraisablehook__(unraisable)
    elif hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _handler(unraisable.exc_value.code))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)


def end_at_once(code: int) -> None:
    """Ends a process that was stopped while threads of it are at work: Python would pull them out of libraries, which
    abort then (a second Ctrl-C while onnxruntime runs), or wait for them."""
    if code in _CODES.values() and threading.active_count() > 1:
        atexit._run_exitfuncs()
        os._exit(code)


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
    for name in (
        *_CODES,
        "SIGALRM",
    ):  # all is done; Python would give them back their defaults while it ends
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    return code


T = TypeVar("T")
R = TypeVar("R")


class Crew(Generic[T, R]):
    """What threads share: the tasks, and the results for the thread that asked for them.

    Args:
        tasks: The tasks.
        ending: Called with the threads when they are to stop, to end what they wait for.

    Attributes:
        stopped: Set when the tasks left are not wanted any more; work at a long task may look at it.
    """

    def __init__(
        self,
        tasks: Iterable[T],
        ending: Callable[[Sequence[threading.Thread]], None] = lambda threads: None,
    ) -> None:
        self.stopped = False
        self._ending = ending
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        from queue import SimpleQueue  # needed by few commands

        self._finished: SimpleQueue[R | _Ended] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def tasks(self) -> Iterator[T]:
        """For the work of a thread: tasks that no other thread has, until there are no more or the crew stops."""
        while True:
            with self._lock:
                if self.stopped:
                    return
                try:
                    task = next(self._tasks)
                except StopIteration:
                    return
            yield task

    def put(self, result: R) -> None:
        """For the work of a thread: gives a result back."""
        self._finished.put(result)

    def results(self, work: Sequence[Callable[[], None]]) -> Generator[R, None, None]:
        """Results as they are put; all threads have ended when this has.

        Args:
            work: What each thread does, from its start to its end.

        Raises:
            BaseException: What a thread raised.
        """
        self._threads = [
            threading.Thread(target=self._run, args=(does,), daemon=True) for does in work
        ]
        try:
            for thread in self._threads:
                thread.start()
            at_work = len(self._threads)
            while at_work:
                item = self._finished.get()
                if not isinstance(item, _Ended):
                    yield item
                elif item.error is not None:
                    raise item.error
                else:
                    at_work -= 1
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the threads after the tasks that they are at."""
        self.stopped = True
        self._ending(self._threads)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.stopped = True
            self._finished.put(_Ended(error))
        else:
            self._finished.put(_Ended())


class _Ended:
    """A thread is done, or has failed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def descendants(
    process: int | str, thread: int | None = None, but: Collection[int] = ()
) -> list[int]:
    """The processes that one (``"self"``), or one of its threads, started, and that these did, as far as the system
    says; none of ``but``, and none that those started."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{process}/task") if thread is None else (thread,):
            with open(f"/proc/{process}/task/{task}/children") as children:
                for started in map(int, children.read().split()):
                    if started not in but:
                        found += (started, *descendants(started, but=but))
    except (OSError, ValueError):  # it has ended meanwhile
        return found
    return found


_MARK = "QDQTOOL_STARTED_BY"
_ENDS = """
import os, select, sys
os.closerange(3, 1 << 16)
parent, mark, told = int(sys.argv[1]), sys.argv[2].encode(), [b""]
lives = True
while lives:
    lives = os.getppid() == parent
    while select.select([0], [], [], lives)[0]:
        told.append(os.read(0, 1 << 16))
        if not told[-1]:
            lives = False
            break
found = True
while found:
    found = False
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(bytes(1)):
                    os.kill(int(name), 9)
                    found = True
        except OSError:
            pass
left = set(filter(os.path.lexists, b"".join(told).split(bytes(1))[:-1]))
if left:
    import shutil, time
    end = time.monotonic() + 10
    while left and time.monotonic() < end:
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
            if os.path.isfile(path):
                os.unlink(path)
        left = set(filter(os.path.lexists, left))
        time.sleep(0.1)
"""


def marked(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that is not to live on without this one, however this one ends, and of all that it
    starts; on Linux, as far as they keep it.

    Args:
        environment: What else it holds; this process's own by default.
    """
    return {**(os.environ if environment is None else environment), **_watched(os.getpid())[0]}


def end_marked(mark: str) -> None:
    """Ends every process that has the mark (``NAME=value``) in its environment; on Linux."""
    import subprocess  # takes its time

    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ENDS, "0", mark],
            stdin=subprocess.DEVNULL,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=unmarked(),
            timeout=_PATIENCE,
        )


def unmarked() -> dict[str, str]:
    """This process's environment without the mark."""
    return {name: value for name, value in os.environ.items() if name != _MARK}


def temporary_folder(purpose: str = "") -> TemporaryFolder:
    """A new folder ``qdqtool-...``; on Linux it is removed with its content if this process is killed, too."""
    folder = TemporaryFolder(f"qdqtool-{purpose}")
    remove_at_end(folder.name)
    return folder


def remove_at_end(path: str, own: bool = False) -> None:
    """Removes what is left of a temporary file or folder when this process has ended, however it does; on Linux.

    Args:
        path: The file or folder.
        own: Only where the process is the command line's: no other is started for it in a user's process.
    """
    held = _watched(os.getpid())[1] if _own or not own else None
    if held is not None:
        with contextlib.suppress(OSError):
            os.write(held, os.fsencode(os.path.abspath(path)) + b"\0")


def mark_all() -> None:
    """Marks all that is started from now on so, where the process is the command line's, and adopts it."""
    if _own:
        os.environ.update(marked({}))
        adopt()


def adopt() -> list[int] | None:
    """Lets what loses its parent, of all that is started from now on, become a child of this process; on Linux.

    So :func:`end_started` finds it, whatever environment and session it has.

    Returns:
        The processes that run already; None in a process that is not the command line's, whose others are not ours.
    """
    global _others
    if not _own or sys.platform != "linux":
        return None
    before = descendants("self")
    if _others is None:
        import ctypes  # takes its time

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        _others = before
    return before


def reap() -> None:
    """Lets go of what this process adopted and what has ended since, before that fills the system's table; of few it
    does not: they may be the user's own, who still asks how they ended."""
    ended = []
    for process in (
        () if _others is None else descendants("self", os.getpid(), {*_others, *_watchers})
    ):
        with contextlib.suppress(OSError):  # it is a child's child
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                ended.append(process)
    for process in ended if len(ended) > _ZOMBIES else ():
        with contextlib.suppress(OSError):
            os.waitpid(process, os.WNOHANG)


def end_started(but: Collection[int] | None = None) -> None:
    """Ends the processes that this one started, and that came to it, all but some and what those started; by default
    but those that ran when it began to adopt, if it did."""
    if (but := _others if but is None else but) is None:
        return
    spared = {*but, *_watchers}
    end = time.monotonic() + _PATIENCE
    while (left := descendants("self", but=spared)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(OSError):  # it is a child's child, until that has ended
                os.waitpid(process, os.WNOHANG)
        time.sleep(_AGAIN)


@functools.cache
def _watched(process: int) -> tuple[dict[str, str], int | None]:
    """Starts what ends the marked processes when this one has ended; the mark, and where it is told what to remove."""
    if sys.platform != "linux" or not sys.executable:
        return {}, None
    mark = f"{process}-{os.urandom(8).hex()}"
    read, held = os.pipe()  # which is closed when this process ends, if only by being killed
    nothing = ((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (1, 2))
    command = [sys.executable, "-I", "-S", "-c", _ENDS, str(process), f"{_MARK}={mark}"]
    actions = [(os.POSIX_SPAWN_DUP2, read, 0), *nothing]
    try:
        _watchers.append(
            os.posix_spawn(sys.executable, command, unmarked(), file_actions=actions, setsid=True)
        )
    except OSError:  # no such program, or no room for a process: then they go on
        os.close(held)
        return {}, None
    finally:
        os.close(read)
    return {_MARK: mark}, held


# Progress on stderr: a bar on a terminal, else one line a minute, as logs expect -------------------------------------


LINE_SECONDS = 60.0


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yields ``items`` and prints how far they are.

    Args:
        items: What to go through.
        description: A few words shown before the bar.
        total: Number of items, where ``items`` has no length.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield from _in_lines(items, description, total)
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    stream = getattr(sys.stderr, "unfiltered", sys.stderr)  # a bar is drawn with control characters
    yield from rich_track(
        items, description, total=total, console=Console(file=stream), transient=True
    )


def _in_lines(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """Short work says nothing."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    begun = printed = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - printed >= LINE_SECONDS and sys.stderr is not None:
            printed = now
            of = f" of {total} ({done / total:.0%})" if total else ""
            print(
                f"qdqtool: {description}: {done}{of} after {now - begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        yield item
