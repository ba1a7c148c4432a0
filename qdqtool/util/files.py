"""Open and record input files, limit their size, and write output files atomically.

The device and inode of each input file are recorded, so a link to a file counts as the file itself.
:func:`atomic_write` does not write to recorded files.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from qdqtool.errors import QdqtoolError
from qdqtool.util import limits
from qdqtool.util.json_text import json_text
from qdqtool.util.text import escape_hidden, format_list

StrPath = str | os.PathLike[str]
FileKey = tuple[int | str, ...]
INVALID_NAME = "the name contains NUL or an unpaired surrogate; give another name"


class InputFiles:
    """Record of the files that were read, and of the files that are reserved for outputs.

    Args:
        outer: Record of an enclosing block. Each file that is read is added to both records.
    """

    def __init__(self, outer: "InputFiles | None" = None) -> None:
        self._outer = outer
        self._names: dict[FileKey, str] = {}
        self._reserved: dict[FileKey, tuple[str, str]] = {}  # option and path of each output
        self._replaced: set[str] = set()  # absolute paths of outputs that exist already

    def add(self, key: FileKey, name: str) -> None:
        """Record a file that is read.

        Raises:
            QdqtoolError: The file is reserved for an output.
        """
        self._names.setdefault(key, name)
        if key in self._reserved:
            raise _output_is_input_error(*self._reserved[key], name)
        if self._outer is not None:
            self._outer.add(key, name)

    def forbid_overwrite(self, path: StrPath, option: str = "") -> None:
        """Raise an error if an output is a file that was read, or a link to such a file.

        Args:
            path: File to write.
            option: Option that names the output, for the message.

        Raises:
            QdqtoolError: The file was read.
        """
        target = Path(path)
        if is_stream(target) and not target.is_file():
            return
        name = self._names.get(file_key(path))
        if name is not None:
            raise _output_is_input_error(option, os.fspath(path), name)
        if self._outer is not None:
            self._outer.forbid_overwrite(path, option)

    def reserve(self, path: StrPath, option: str) -> None:
        """Reserve a file for the output of an option, after checking that it can be written.

        Raises:
            QdqtoolError: The file cannot be written, was read, or is reserved for another option.
        """
        forbid_dash(path, option)
        check_writable(Path(path), option)
        self.forbid_overwrite(path, option)
        if is_stream(Path(path)):
            return
        if os.path.exists(path):
            self._replaced.add(os.path.abspath(path))
        key = file_key(path)
        other = self._reserved.setdefault(key, (option, os.fspath(path)))[0]
        if other != option:
            raise _output_error(
                f"is also the output of {other}; choose another name", path, option, "duplicate"
            )

    def is_replaced(self, path: StrPath) -> bool:
        """Return whether a file existed when it was reserved for an output."""
        return os.path.abspath(path) in self._replaced

    def nesting_error(self) -> QdqtoolError:
        """Return the error for input that is nested too deeply.

        The message names the files that were read.
        """
        names = format_list(list(self._names.values()), most=3) or "the model in memory"
        return QdqtoolError(
            f"{names}: nested too deeply "
            "(functions in functions, graphs in graphs, or lists in JSON); flatten the file",
            code="nested-too-deeply",
        )

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Use this record inside the block.

        The files of the record cannot be overwritten, and files that are read are added to it.
        """
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[InputFiles | None] = ContextVar("inputs", default=None)


@contextlib.contextmanager
def record_inputs() -> Iterator[InputFiles]:
    """Record all files that are read inside the block, for :func:`forbid_overwrite`.

    Raises:
        QdqtoolError: An input is nested so deeply that Python's stack overflows.
    """
    inputs = InputFiles(_current.get())
    with inputs.activate():
        try:
            yield inputs
        except RecursionError as error:
            raise inputs.nesting_error() from error


def forbid_overwrite(inputs: InputFiles | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the inputs of a result cannot be overwritten.

    Args:
        inputs: Files that were read for the result. If None, nothing is protected.
    """
    return contextlib.nullcontext() if inputs is None else inputs.activate()


def reserve_output(path: StrPath | None, option: str) -> None:
    """Reserve a file for the output of an option, unless `path` is None.

    See :meth:`InputFiles.reserve`.
    """
    if path is not None:
        (_current.get() or InputFiles()).reserve(path, option)


def output_verb(path: StrPath) -> str:
    """Return ``Replaced`` if a reserved output existed before the command, else ``Wrote``."""
    inputs = _current.get()
    return "Replaced" if inputs is not None and inputs.is_replaced(path) else "Wrote"


def check_output(path: StrPath) -> None:
    """Raise an error if an output cannot be written.

    Raises:
        QdqtoolError: The file cannot be written, or is an input.
    """
    check_writable(Path(path))
    inputs = _current.get()
    if inputs is not None:
        inputs.forbid_overwrite(path)


def record_input(path: StrPath | int) -> None:
    """Record a file as an input; `path` may be the number of an open descriptor.

    Missing files, pipes and devices are ignored.

    Raises:
        QdqtoolError: The file is reserved for an output.
    """
    inputs = _current.get()
    if inputs is None:
        return
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            name = "standard input" if isinstance(path, int) else os.fspath(path)
            inputs.add((status.st_dev, status.st_ino), name)


def _output_error(reason: str, path: StrPath, option: str, code: str) -> QdqtoolError:
    if option:
        return QdqtoolError(f"{option} {path}: {reason}", code=code)
    return QdqtoolError(reason, os.fspath(path), code=code)


def _output_is_input_error(option: str, path: str, name: str) -> QdqtoolError:
    same_name = os.path.abspath(path) == os.path.abspath(name) or name == "standard input"
    other_name = "" if same_name else f" (the same file as {name})"
    return _output_error(
        f"is one of the input files{other_name}; choose another name",
        path,
        option,
        "output-is-input",
    )


def file_key(path: StrPath) -> FileKey:
    """Return a key that is equal for all links to a file.

    The key of an existing file is its device and inode. The key of a new file is the device and
    inode of its folder, and its name.
    """
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    target = Path(path)
    with contextlib.suppress(OSError, ValueError):
        folder = os.stat(target.parent)
        return folder.st_dev, folder.st_ino, target.name
    return (os.path.abspath(target),)


def is_same_file(a: StrPath, b: StrPath) -> bool:
    """Return whether both paths lead to the same existing file, also through links."""
    try:
        return os.path.samefile(a, b)
    except (OSError, ValueError):
        return False


# Reading ------------------------------------------------------------------------------------------


def find_reading_problem(path: StrPath) -> tuple[str, str]:
    """Return an error code and the reason why a path cannot be read.

    Both are empty for a regular file. All other files are rejected, because a pipe, a socket or a
    device may never end.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "file-missing", "no such file"
    except ValueError:
        return "invalid-path", INVALID_NAME
    except OSError as error:
        return "file-unreadable", f"cannot be read: {error.strerror or error}"
    if stat.S_ISREG(mode):
        return "", ""
    advice = "give a file"
    if stat.S_ISFIFO(mode):
        advice = "write the data to a file first (a log can be piped to standard input, as -)"
    return "not-a-file", f"is {_name_special_file(mode)}; {advice}"


def _name_special_file(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")


def open_input(
    path: StrPath, *, error: type[QdqtoolError] = QdqtoolError, record: bool = True
) -> IO[bytes]:
    """Open a regular file for reading.

    Args:
        path: File to open.
        error: Class of the errors.
        record: Whether the file is recorded as an input, so that it cannot be overwritten.

    Raises:
        QdqtoolError: The file is missing, not a regular file, not readable, or reserved for an
            output.
    """
    code, problem = find_reading_problem(path)
    if problem:
        raise error(problem, os.fspath(path), code=code)
    if record:
        record_input(path)
    try:
        return open(path, "rb")
    except OSError as cause:
        raise error(
            f"cannot be read: {cause.strerror or cause}", os.fspath(path), code="file-unreadable"
        ) from cause


def read_input(path: StrPath, limit: int, *, error: type[QdqtoolError] = QdqtoolError) -> bytes:
    """Return all bytes of a file; see :func:`open_input`.

    Raises:
        QdqtoolError: As for `open_input`, or the file has more than `limit` bytes.
    """
    subject, name = "the file has", os.fspath(path)
    with open_input(path, error=error) as file:
        limits.check_size(os.fstat(file.fileno()).st_size, limit, subject, error, path=name)
        data = file.read(limit + 1)
    limits.check_size(len(data), limit, subject, error, path=name)
    return data


# Writing ------------------------------------------------------------------------------------------

_DESCRIPTORS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def file_descriptor(target: Path) -> int | None:
    """Return the descriptor number of a path such as /dev/fd/63; None for other paths."""
    name = os.path.abspath(target)
    if name in _DESCRIPTORS:
        return _DESCRIPTORS[name]
    folder, number = os.path.split(name)
    if folder in ("/dev/fd", "/proc/self/fd") and number.isdecimal() and len(number) < 10:
        return int(number)
    return None


def is_stream(target: Path) -> bool:
    """Return whether a path is a descriptor such as /dev/fd/1, or a character device."""
    try:
        return file_descriptor(target) is not None or stat.S_ISCHR(os.stat(target).st_mode)
    except (OSError, ValueError):
        return False


def forbid_dash(path: StrPath, option: str) -> None:
    """Raise an error for the output ``-``, because it would create a file named ``-``.

    Raises:
        QdqtoolError: The path is ``-``.
    """
    if os.fspath(path) == "-":
        raise QdqtoolError(
            f"{option} -: give a file name; use /dev/stdout for standard output, or ./- for a file "
            "with this name",
            code="invalid-path",
        )


def check_writable(target: Path, option: str = "") -> None:
    """Raise an error if a path cannot be written.

    Regular files, new files in an existing folder, open descriptors and /dev/null can be written.

    Args:
        target: File to write.
        option: Option that names the output, for the message.

    Raises:
        QdqtoolError: The file cannot be written.
    """
    descriptor = file_descriptor(target)
    try:
        mode = os.stat(target if descriptor is None else descriptor).st_mode
        if descriptor is not None:
            os.write(descriptor, b"")  # fails if the descriptor is open for reading only
            return
        if not stat.S_ISREG(mode) and not is_same_file(target, os.devnull):
            reason = f"is {_name_special_file(mode)}; give a file name"
            raise _output_error(reason, target, option, "not-a-file")
    except (FileNotFoundError, NotADirectoryError):
        _check_new_file(target, option)
    except ValueError:
        where = f"{option} {target}".strip()
        raise QdqtoolError(f"{where!r}: {INVALID_NAME}", code="invalid-path") from None
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise _output_error(reason, target, option, "not-written") from None
    if not is_stream(target) and not os.access(target.parent, os.W_OK):
        raise _output_error(
            f"the folder {target.parent} cannot be written to; give another folder",
            target,
            option,
            "not-written",
        )


def _check_new_file(target: Path, option: str) -> None:
    if os.path.islink(target):
        raise _output_error(
            "is a broken link; remove it, or give another file name", target, option, "not-a-file"
        )
    if not target.parent.is_dir():
        raise _output_error(
            f"the folder {target.parent} does not exist; create it first",
            target,
            option,
            "folder-missing",
        )


@contextlib.contextmanager
def atomic_write(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`, and rename it to `path` when the block ends.

    After an error or Ctrl-C, the temporary file is removed and `path` is unchanged. Devices and
    open descriptors (/dev/null, /dev/stdout) are written directly.

    Raises:
        QdqtoolError: The file cannot be written (missing folder, disk full, no permission), or it
            is an input.
    """
    target = Path(path)
    check_output(target)
    temporary = None
    try:
        if is_stream(target):
            with _open_stream(target) as file:
                yield file
            return
        name = os.fsdecode(os.fsencode(target.name)[:64])
        temporary = target.with_name(f".{name}.{os.urandom(4).hex()}.tmp")
        with temporary.open("xb") as file:
            yield file
        temporary.replace(target)
    except OSError as error:
        raise QdqtoolError(
            f"cannot be written: {error.strerror or error}", str(target), code="not-written"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _open_stream(target: Path) -> IO[bytes]:
    descriptor = file_descriptor(target)
    if descriptor is None:
        return target.open("wb")
    if sys.stdout is not None:
        sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")  # closing the duplicate leaves the original open


def write_text(path: StrPath, text: str) -> None:
    """Write text in UTF-8, atomically; see :func:`atomic_write`."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # some file names are not UTF-8


class SavableResult:
    """Base class of results that can be saved as JSON, but not over their own inputs.

    Attributes:
        read: Files that were read for the result; None if they are not protected.
    """

    __slots__ = ()
    read: InputFiles | None

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        raise NotImplementedError

    def save(self, path: StrPath) -> None:
        """Write the JSON that the command prints with ``--format json``.

        Raises:
            QdqtoolError: `path` is an input, its folder is missing, or it cannot be written.
        """
        save_answer(path, self.as_json(), self.read)


def save_answer(path: StrPath, answer: dict[str, Any], inputs: InputFiles | None) -> None:
    """Write a result as JSON, but not over one of its inputs.

    Raises:
        QdqtoolError: `path` is an input, its folder is missing, or it cannot be written.
    """
    with forbid_overwrite(inputs):
        write_text(path, escape_hidden(json_text(answer)) + "\n")
