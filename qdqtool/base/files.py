"""Files that a command reads: noted, so that none is overwritten, and known by their first bytes.

Every file that a command opens for reading is noted here, by device and inode, so that links and file systems that
ignore case are seen through. Every file that it writes goes through :func:`qdqtool.base.outputs.atomic_write`, which
refuses those, and two outputs to one file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, ParamSpec, Protocol, TypeVar

from qdqtool.base import budgets
from qdqtool.base.records import record
from qdqtool.errors import QdqtoolError

P = ParamSpec("P")
M = TypeVar("M", bound="Made")
_Error = TypeVar("_Error", bound=QdqtoolError)
StrPath = str | os.PathLike[str]
Key = tuple[int | str, ...]
_BLOCK = 1 << 24
_NAMED = 3  # files in a message


class FileSet(Protocol):
    """Files too many to be noted one by one."""

    def find(self, key: Key) -> str | None:
        """What to call the file of that key (see :func:`file_key`); None where it is none of these."""
        ...


class Guard:
    """What was read, and what is to be written, while it watches (see :func:`watch`)."""

    def __init__(self, parent: Guard | None = None) -> None:
        self.parent = parent
        self._read: dict[Key, str] = {}
        self._sets: list[FileSet] = []
        self._claims: dict[Key, tuple[str, str]] = {}  # option and path

    def _chain(self) -> Iterator[Guard]:
        guard: Guard | None = self
        while guard is not None:
            yield guard
            guard = guard.parent

    def note(self, key: Key, name: str) -> None:
        """Notes a file that is read.

        Raises:
            QdqtoolError: It is one that is to be written.
        """
        for guard in self._chain():
            guard._read.setdefault(key, name)
            if key in guard._claims:
                option, path = guard._claims[key]
                raise would_overwrite(option, path, name)

    def nested(self) -> QdqtoolError:
        """The error for what Python's stack does not hold, with the files that were read."""
        names = list(self._read.values())
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return QdqtoolError(
            f"{', '.join(names[:_NAMED]) or 'the model in memory'}{more}: nested too deeply (functions "
            "in functions, graphs in graphs, or lists in a JSON)",
            code="nested-too-deeply",
        )

    def note_set(self, files: FileSet) -> None:
        """Notes files that are read, however many.

        Raises:
            QdqtoolError: One of them is to be written.
        """
        for guard in self._chain():
            guard._sets.append(files)
            for key, (option, path) in guard._claims.items():
                name = files.find(key)
                if name is not None:
                    raise would_overwrite(option, path, name)

    def check(self, path: StrPath, option: str = "") -> None:
        """Refuses a file to write that was read; the shell's >> has an open descriptor go on in one.

        Raises:
            QdqtoolError: It was, by this name or another one.
        """
        target = Path(path)
        if is_stream(target) and not target.is_file():
            return
        key = file_key(path)
        for guard in self._chain():
            if key in guard._read:
                raise would_overwrite(option, os.fspath(path), guard._read[key])
            for files in guard._sets:
                name = files.find(key)
                if name is not None:
                    raise would_overwrite(option, os.fspath(path), name)

    def claim(self, path: StrPath, option: str) -> None:
        """Says which file an option will write, before any work is done.

        Raises:
            QdqtoolError: It cannot be written, was read, or another option writes it.
        """
        not_dash(path, option)
        target = Path(path)
        check_place(target, option)
        self.check(path, option)
        if is_stream(target):
            return
        key = file_key(path)
        for other_key, (other, taken) in self._claims.items():
            if other != option and (other_key == key or one_name(Path(taken), target)):
                raise _output_error(
                    f"is what {other} names; choose another name", target, option, "duplicate"
                )
        self._claims[key] = (option, os.fspath(path))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watches again: what was noted is refused as an output inside the block."""
        token = current_guard.set(self)
        try:
            yield
        finally:
            current_guard.reset(token)


current_guard: ContextVar[Guard | None] = ContextVar("guard", default=None)


@contextlib.contextmanager
def watch() -> Iterator[Guard]:
    """Notes all files that are read inside the block; an outer watch sees them as well."""
    guard = Guard(current_guard.get())
    with guard.active():
        yield guard


class Made(Protocol):
    """A result that knows the files that it was made from; None where nobody watched."""

    read: Guard | None


def watched(function: Callable[P, M]) -> Callable[P, M]:
    """Notes what a function reads in its result, for :func:`not_over`."""

    @functools.wraps(function)
    def watching(*args: P.args, **kwargs: P.kwargs) -> M:
        with watch() as guard:
            try:
                result = function(*args, **kwargs)
            except RecursionError as error:
                raise guard.nested() from error
        result.read = guard
        return result

    return watching


def not_over(read: Guard | None) -> contextlib.AbstractContextManager[None]:
    """Inside the block nothing is written over what a result was made from."""
    return contextlib.nullcontext() if read is None else read.active()


def claim(path: StrPath | None, option: str) -> None:
    """Says which file an option will write; see :meth:`Guard.claim`. None is no file."""
    if path is None:
        return
    guard = current_guard.get()
    (guard if guard is not None else Guard()).claim(path, option)


def not_dash(path: StrPath, option: str) -> None:
    """Refuses ``-`` as an output: few want a file of that name, and the answer is on standard output anyway.

    Raises:
        QdqtoolError: It is that.
    """
    if os.fspath(path) == "-":
        raise QdqtoolError(
            f"{option} -: give a file name; /dev/stdout is standard output, ./- a file of that name",
            code="invalid-path",
        )


def check_output(path: StrPath) -> None:
    """Says before the work, not after it, that a file could not be written.

    Raises:
        QdqtoolError: Its folder is missing, it is a folder itself, or it was read.
    """
    check_place(Path(path))
    guard = current_guard.get()
    if guard is not None:
        guard.check(path)


def note_read(path: StrPath | int) -> None:
    """Notes a file (or an open descriptor) that is read, so that it cannot be written; a missing one is ignored.

    Raises:
        QdqtoolError: It is to be written.
    """
    guard = current_guard.get()
    if guard is None:
        return
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return
    if stat.S_ISREG(found.st_mode):
        guard.note(
            (found.st_dev, found.st_ino),
            "standard input" if isinstance(path, int) else os.fspath(path),
        )


def note_files(files: FileSet) -> None:
    """Notes files that are read; see :meth:`Guard.note_set`."""
    guard = current_guard.get()
    if guard is not None:
        guard.note_set(files)


def unreadable(path: StrPath) -> str:
    """Why a path is not read, as all that is read are regular files; empty where it names one.

    What a pipe, a socket or a device gives may never come, or never end. A log is also read from standard input, as
    ``-`` (:func:`qdqtool.buildlog.read.blocks`); nothing else is.
    """
    return _unreadable(path)[1]


def _unreadable(path: StrPath) -> tuple[str, str]:
    """Code of the error and the reason; both empty for a regular file."""
    try:
        what = _special(os.stat(path).st_mode)
    except FileNotFoundError:
        return "file-missing", "no such file"
    except ValueError:
        return "invalid-path", NO_NAME
    except OSError as found:
        return "file-unreadable", f"cannot be read: {found.strerror or found}"
    if what:
        return "not-a-file", f"is {what}; {_INSTEAD.get(what, 'give a file')}"
    return "", ""


NO_NAME = "no file name can hold a NUL or half a character"
_INSTEAD = {
    "a pipe": "write what it gives to a file first (a log may come on standard input, as -)"
}


def _special(mode: int) -> str:
    """What there is in place of a regular file; empty for one."""
    if stat.S_ISREG(mode):
        return ""
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((what for test, what in kinds if test(mode)), "a device")


def open_input(
    path: StrPath, *, error: type[QdqtoolError] = QdqtoolError, note: bool = True
) -> IO[bytes]:
    """Opens a regular file for reading and notes it. Reading is unbounded: see :func:`read_input`.

    Args:
        path: The file.
        error: Class of the errors, of those of reading it as well.
        note: Whether it becomes one of the files that were read.

    Raises:
        QdqtoolError: It is missing, no regular file (see :func:`unreadable`), not readable, or is to be written.
    """
    code, reason = _unreadable(path)
    if reason:
        raise error(reason, os.fspath(path), code=code)
    try:
        file = io.BufferedReader(_Input(path, error))
    except OSError as found:
        raise error(
            f"cannot be read: {found.strerror or found}", os.fspath(path), code="file-unreadable"
        ) from found
    try:
        if note:
            note_read(path)
    except BaseException:
        file.close()
        raise
    return file


def open_readable(path: StrPath) -> IO[bytes]:
    """Opens for reading what :func:`unreadable` has nothing against, and notes nothing.

    Raises:
        OSError: It cannot be opened. Reading raises it too.
    """
    return io.BufferedReader(_Readable(path))


class _Readable(io.FileIO):
    """A file of which reading never waits: some of the kernel's look like regular ones and give what happens."""

    def __init__(self, path: StrPath) -> None:
        super().__init__(path, "rb", opener=_without_waiting)

    def readinto(self, buffer: Any) -> int:
        size: int | None = super().readinto(buffer)
        if size is None:
            raise BlockingIOError(errno.EAGAIN, "it gives nothing now, and is no file on a disk")
        return size

    readall = io.RawIOBase.readall  # FileIO's own asks the system, not `readinto`


class _Input(_Readable):
    """The same for :func:`open_input`: what opens may still fail when it is read."""

    def __init__(self, path: StrPath, error: type[QdqtoolError]) -> None:
        super().__init__(path)
        self._error = error

    def readinto(self, buffer: Any) -> int:
        try:
            return super().readinto(buffer)
        except OSError as found:
            raise self._error(
                f"cannot be read: {found.strerror or found}",
                os.fspath(self.name),
                code="file-unreadable",
            ) from found


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_input(path: StrPath, limit: int, *, error: type[QdqtoolError] = QdqtoolError) -> bytes:
    """All bytes of a file; see :func:`open_input`.

    Raises:
        QdqtoolError: As for open_input; also when there are more than ``limit`` bytes.
    """
    with open_input(path, error=error) as file:
        size = os.fstat(file.fileno()).st_size
        budgets.require(size, limit, "the file has", error, path=os.fspath(path))
        data = read_all(file, limit)
    if data is None:
        raise error(
            f"holds more than {budgets.amount(limit)}, the limit",
            os.fspath(path),
            code="file-too-large",
        )
    return data


def read_all(file: IO[bytes], limit: int, head: bytes = b"") -> bytes | None:
    """``head``, and what is left of a file; None where that is more than ``limit`` bytes.

    Block by block: ``read(limit)`` would take so much memory at once, however little there is.
    """
    blocks = [head] if head else []
    total = len(head)
    while block := file.read(_BLOCK):
        blocks.append(block)
        total += len(block)
        if total > limit:
            return None
    return b"".join(blocks)


def _output_error(reason: str, path: StrPath, option: str, code: str) -> QdqtoolError:
    """An error about an output, with the option that names it in front."""
    if option:
        return QdqtoolError(f"{option} {path}: {reason}", code=code)
    return QdqtoolError(reason, os.fspath(path), code=code)


def would_overwrite(option: str, path: str, name: str) -> QdqtoolError:
    same = (
        ""
        if os.path.abspath(path) == os.path.abspath(name) or name == "standard input"
        else f" (it is {name})"
    )
    reason = f"is one of the files read{same}; choose another name"
    return _output_error(reason, path, option, "output-is-input")


def file_key(path: StrPath) -> Key:
    """Identifies a file: device and inode where it exists, else its folder's and its name."""
    try:
        found = os.stat(path)
        return found.st_dev, found.st_ino
    except (OSError, ValueError):
        target = Path(path)
    try:
        folder = os.stat(target.parent)
        return folder.st_dev, folder.st_ino, target.name
    except (OSError, ValueError):
        return (os.path.abspath(target),)


def one_name(a: Path, b: Path) -> bool:
    """Whether two names that do not exist yet would be one file, as on file systems that ignore case."""
    if a.name == b.name or _folded(a.name) != _folded(b.name) or a.exists() or b.exists():
        return False
    try:
        return os.path.samefile(a.parent, b.parent) and _ignores_case(a.parent)
    except OSError:
        return False


def _folded(name: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFC", name).casefold()


def _ignores_case(folder: Path) -> bool:
    handle, probe = temporary_beside(folder / "case", ".tmp")
    try:
        os.close(handle)
        return Path(probe).with_name(Path(probe).name.swapcase()).exists()
    finally:
        os.unlink(probe)


def temporary_beside(target: Path, suffix: str) -> tuple[int, str]:
    """A new file beside another one, opened."""
    import tempfile  # takes its time, and `--help` writes nothing

    name = os.fsdecode(os.fsencode(target.name)[:64])
    return tempfile.mkstemp(prefix=f".{name}.", suffix=suffix, dir=target.parent)


_DESCRIPTORS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"(?:/dev|/proc/self)/fd/(\d{1,9})")


def descriptor_of(target: Path) -> int | None:
    """The open descriptor that a path names, such as /dev/stdout; the shell's ``>(command)`` is one."""
    name = os.path.abspath(target)
    found = _DESCRIPTOR.fullmatch(name)
    return int(found[1]) if found else _DESCRIPTORS.get(name)


def is_stream(target: Path) -> bool:
    """Whether what is written there goes on somewhere, so that no file may take its place; see :func:`check_place`."""
    try:
        return descriptor_of(target) is not None or stat.S_ISCHR(os.stat(target).st_mode)
    except (OSError, ValueError):
        return False


def check_place(target: Path, option: str = "") -> None:
    """Looks whether a file can be written: a regular or new one, an open descriptor, or /dev/null.

    Raises:
        QdqtoolError: It cannot.
    """
    descriptor = descriptor_of(target)
    try:
        found = os.stat(target if descriptor is None else descriptor)
        if descriptor is not None:
            os.write(descriptor, b"")  # fails where it is open for reading only
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(target):
            reason = "is a link to nothing; remove it, or name another file"
            raise _output_error(reason, target, option, "not-a-file") from None
        if not target.parent.is_dir():
            reason = f"the folder {target.parent} does not exist; create it first"
            raise _output_error(reason, target, option, "folder-missing") from None
    except ValueError:
        where = f"{option} {target}".strip()
        raise QdqtoolError(f"{where!r}: {NO_NAME}", code="invalid-path") from None
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise _output_error(reason, target, option, "not-written") from None
    else:
        what = "" if descriptor is not None else _special(found.st_mode)
        if what and not (
            stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev
        ):
            raise _output_error(f"is {what}; give a file name", target, option, "not-a-file")
    if not is_stream(target) and not os.access(target.parent, os.W_OK):
        reason = f"the folder {target.parent} cannot be written to; name another one"
        raise _output_error(reason, target, option, "not-written")


def same_file(a: StrPath, b: StrPath) -> bool:
    """Whether both paths name the same existing file (through links as well)."""
    try:
        return os.path.samefile(a, b)
    except (OSError, ValueError):  # no file can have such a name
        return False


HEAD = 64  # first bytes that decide


@record
class FileType:
    """A kind of file that users take for a model.

    Attributes:
        name: What it is.
        step: How to get an ONNX model, or what to do with it instead.
        endings: Endings of its names.
        magics: Bytes that it has at an offset.
        of_build: Whether it may describe a build.
    """

    name: str
    step: str
    endings: tuple[str, ...] = ()
    magics: tuple[tuple[int, bytes], ...] = ()
    of_build: bool = False


_EXPORT = "export it to ONNX first: torch.onnx.export, or `yolo export model=... format=onnx` for Ultralytics"
_TF = "convert it to ONNX first, for instance with tf2onnx"
_BUILT = (
    "an engine holds no graph to look at: give its ONNX file; 'qdqtool engine' reads its layer JSON"
)

_TYPES = (
    FileType(
        "a TensorRT engine", _BUILT, (".engine", ".trt", ".plan"), ((0, b"ftrt"), (0, b"ptrt"))
    ),
    FileType(
        "an OpenVINO model",
        "export the network to ONNX from where it was trained",
        (".xml",),
        ((0, b'<?xml version="1.0"?>\n<net '),),
    ),
    FileType("a TensorFlow Lite model", _TF, (".tflite",), ((4, b"TFL3"),)),
    FileType("a TensorFlow or Keras model", _TF, (".pb", ".h5", ".keras"), ((0, b"\x89HDF"),)),
    FileType(
        "a Core ML model",
        "export the network to ONNX from where it was trained",
        (".mlmodel", ".mlpackage"),
    ),
    FileType("a safetensors file (weights without a graph)", _EXPORT, (".safetensors",)),
    FileType(
        "a PyTorch file",
        _EXPORT,
        (".pt", ".pth", ".ckpt", ".pt2", ".torchscript"),
        ((0, b"\x80\x02"), (0, b"\x80\x03"), (0, b"\x80\x04")),
    ),
    FileType(
        "a picture",
        "give the ONNX model here, and pictures to --calib",
        (".jpg", ".jpeg", ".png", ".bmp"),
        ((0, b"\x89PNG"), (0, b"\xff\xd8\xff")),
    ),
    FileType("a numpy file", "give the ONNX model here", (".npy", ".npz"), ((0, b"\x93NUMPY"),)),
    FileType(
        "a Git LFS pointer",
        "fetch the model itself with `git lfs pull`",
        (),
        ((0, b"version https://git-lfs"),),
    ),
    FileType(
        "a web page",
        "the download went wrong: fetch the file itself",
        (),
        ((0, b"<!DOCTYPE html"), (0, b"<!doctype html"), (0, b"<html")),
    ),
    FileType(
        "JSON",
        "give the ONNX model first, then the builds of it",
        (".json",),
        ((0, b"{"), (0, b"[")),
        of_build=True,
    ),
    FileType("a log", "give the ONNX model first, then the builds of it", (".log",), of_build=True),
    FileType(
        "a zip archive",
        "unpack it; a PyTorch file is one too: export that to ONNX",
        (".zip",),
        ((0, b"PK\x03\x04"),),
    ),
)


def recognise(name: str, head: bytes) -> FileType | None:
    """What a file is, by its ending first; None for one that may well be a damaged ONNX model.

    Args:
        name: Its path.
        head: Its first bytes, :data:`HEAD` of them or more.
    """
    lower = name.lower()
    by_magic = next(
        (t for t in _TYPES if any(head[at : at + len(m)] == m for at, m in t.magics)), None
    )
    by_name = (
        next((t for t in _TYPES if lower.endswith(t.endings)), None)
        if not lower.endswith(".onnx")
        else None
    )
    return by_name or by_magic


def explain(name: str, head: bytes, missing: str = "") -> str:
    """One sentence for an error: what the file is instead of an ONNX model, and the next step.

    Args:
        name: Its path.
        head: Its first bytes.
        missing: What it lacks, where it could be read as an ONNX model.
    """
    return not_a_model(name, head, missing, error=QdqtoolError).reason


def not_a_model(name: str, head: bytes, missing: str = "", *, error: type[_Error]) -> _Error:
    """The error for a file that is not an ONNX model; see :func:`explain` for the arguments.

    Args:
        error: Its class.
    """
    found = recognise(name, head)
    code = "wrong-format"
    if not head:
        code, reason = "empty", "is empty, not an ONNX model; export or copy it again"
    elif found is not None:
        reason = f"is {found.name}, not an ONNX model; {found.step}"
    elif missing:
        reason = f"not an ONNX model ({missing})"
    elif head[0] == 0x08:  # how every exporter's file begins
        code = "file-damaged"
        reason = "an ONNX model that is cut off or damaged; export or copy it again"
    else:
        reason = "not an ONNX model, or damaged; export it again"
    return error(reason, name, code=code)


# Names of models ----------------------------------------------------------------------------------------------------


def named_as_model(path: StrPath) -> bool:
    """Whether a path ends as that of an ONNX model does."""
    return os.fspath(path).lower().endswith((".onnx", ".onnx.gz"))


def stem(path: StrPath) -> str:
    """The name of a model's file without its ending."""
    name = Path(path).name
    for ending in (".gz", ".onnx"):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return name
