"""The process of the command line: signals, standard streams, exit codes."""

import contextlib
import gc
import io
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn, TextIO

from qdqtool.errors import QdqtoolError
from qdqtool.formats.wrapping import wrap_words
from qdqtool.util.process import INTERRUPTED, silence_stdout, terminal_columns
from qdqtool.util.text import escape_hidden, escape_unencodable

# Bytes of address space. Python, numpy and onnx need at least 150 MB, the exact size depends on the
# machine. If they get slightly less, onnx fails in other ways than with a MemoryError.
_MIN_ADDRESS_SPACE = 256 << 20
MESSAGE_PREFIX = "qdqtool: "
_MESSAGES = {130: "interrupted", 143: "terminated", 129: "the terminal was closed"}

# Signals ------------------------------------------------------------------------------------------


class StopRequest(KeyboardInterrupt):
    """Exception for a signal that asks the process to end.

    A signal handler raises the exception in the main thread, so that temporary files are removed.

    Attributes:
        code: Exit code.
    """

    def __init__(self, code: int = INTERRUPTED) -> None:
        super().__init__(code)
        self.code = code


def stop_message(stop: BaseException | None) -> str:
    """Return the line that is printed after a signal, with the notes of the exception."""
    message = _MESSAGES.get(getattr(stop, "code", INTERRUPTED), "stopped")
    notes = getattr(stop, "__notes__", ())
    return " ".join([f"{message}. No partial output was written.", *notes])


def set_up_process() -> None:
    """Set up the process of the command line. This must be done before a file is opened.

    Raises:
        MemoryError: ``ulimit -v`` leaves less address space than the libraries need.
    """
    _require_address_space()
    # Idle threads of OpenBLAS would use processor time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # A signal that is ignored already, as with nohup, stays ignored.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise_stop)
    for descriptor in range(3):  # so that no opened file gets the number of a standard stream
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _require_address_space() -> None:
    # If there is too little memory, OpenBLAS ends the process with exit code 1, which would mean
    # that a check failed.
    try:
        import resource
    except ImportError:  # Windows
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _MIN_ADDRESS_SPACE:
        raise MemoryError


def _raise_stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # further signals are ignored during the clean-up
    raise StopRequest(128 + number)


# Standard streams ---------------------------------------------------------------------------------


class ClosedOutput(io.StringIO):
    """Standard output that was closed before the program began (``>&-``)."""

    def write(self, text: str) -> int:
        """Raise an error if the text is not empty."""
        if text:
            raise QdqtoolError(
                "standard output is closed: the result cannot be printed; open standard output",
                code="output-closed",
            )
        return 0

    def isatty(self) -> bool:
        """Return False, because the output is closed."""
        return False


class FilteredStream:
    """Text stream that escapes hidden characters and writes to another stream.

    Attributes:
        unfiltered: The other stream. Progress bars use it, because they need control characters.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Write a text with hidden characters escaped."""
        self.unfiltered.write(escape_unencodable(escape_hidden(text), self.unfiltered))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write lines with hidden characters escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


class FilteredErrorStream(FilteredStream):
    """Filtered standard error. If a text cannot be written (full disk), no error is raised.

    Messages of qdqtool are wrapped on a terminal. Elsewhere, each message is one line.
    """

    def write(self, text: str) -> int:
        """Write a text, or drop it if it cannot be written."""
        with contextlib.suppress(OSError, ValueError):
            super().write(self._wrap_message(text))
        return len(text)

    def _wrap_message(self, text: str) -> str:
        if not text.startswith(MESSAGE_PREFIX) or not self.unfiltered.isatty():
            return text
        width = terminal_columns(self.unfiltered)
        if len(text) <= width:
            return text
        return "\n".join(
            line for row in text.split("\n") for line in wrap_words(row, width, 2, "") or [""]
        )

    def flush(self) -> None:
        """Flush the other stream, and ignore errors."""
        with contextlib.suppress(OSError, ValueError):
            self.unfiltered.flush()


def flush_streams(code: int) -> int:
    """Flush standard output and error.

    Returns:
        The exit code. It is at least 2 if the answer could not be written, unless the reader of a
        pipe has ended.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except (OSError, ValueError):
        silence_stdout()
        code = max(code, 2)
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = None
    return code


def exit_process(code: int) -> NoReturn:
    """Flush standard output and standard error, and exit.

    From now on, Ctrl-C is ignored. During the shutdown of Python, it would replace the exit code,
    although the command has ended.
    """
    gc.freeze()  # The system frees all memory at once. A last garbage collection would take 0.03 s.
    code = flush_streams(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
