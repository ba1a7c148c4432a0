"""Files that a command reads and writes: what was read is not overwritten, outputs appear together or not at all.

Every file that a command opens for reading is noted here, by device and inode, so that links and file systems that
ignore case are seen through. Every file that it writes goes through :func:`atomic_write`, which refuses those, and two
outputs to one file. Within :func:`together`, files are renamed into place only when all of them are written.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from qdqtool import budgets
from qdqtool.errors import QdqtoolError
from qdqtool.text import visible

StrPath = str | os.PathLike[str]
Key = tuple[int | str, ...]
_BLOCK = 1 << 24


class Guard:
    """What was read, and what is to be written, while it watches (see :func:`watch`)."""

    def __init__(self, parent: Guard | None = None) -> None:
        self.parent = parent
        self._read: dict[Key, str] = {}
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
                raise QdqtoolError(_would_overwrite(option, path, name))

    def check(self, path: StrPath, option: str = "") -> None:
        """Refuses a file to write that was read.

        Raises:
            QdqtoolError: It was, by this name or another one.
        """
        key = _key(path)
        for guard in self._chain():
            if key in guard._read:
                raise QdqtoolError(_would_overwrite(option, os.fspath(path), guard._read[key]))

    def claim(self, path: StrPath, option: str) -> None:
        """Says which file an option will write, before any work is done.

        Raises:
            QdqtoolError: It cannot be written, was read, or another option writes it.
        """
        target = Path(path)
        _check_place(target, option)
        if _is_device(target):
            return
        self.check(path, option)
        key = _key(path)
        for other_key, (other, taken) in self._claims.items():
            if other != option and (other_key == key or _one_name(Path(taken), target)):
                raise QdqtoolError(f"{option} {path}: is what {other} names; choose another name")
        self._claims[key] = (option, os.fspath(path))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watches again: what was noted is refused as an output inside the block."""
        token = _guard.set(self)
        try:
            yield
        finally:
            _guard.reset(token)


_guard: ContextVar[Guard | None] = ContextVar("guard", default=None)


@contextlib.contextmanager
def watch() -> Iterator[Guard]:
    """Notes all files that are read inside the block; an outer watch sees them as well."""
    guard = Guard(_guard.get())
    with guard.active():
        yield guard


def claim(path: StrPath | None, option: str) -> None:
    """Says which file an option will write; see :meth:`Guard.claim`. None is no file."""
    if path is None:
        return
    guard = _guard.get()
    (guard if guard is not None else Guard()).claim(path, option)


def check_output(path: StrPath) -> None:
    """Says before the work, not after it, that a file could not be written.

    Raises:
        QdqtoolError: Its folder is missing, it is a folder itself, or it was read.
    """
    _check_place(Path(path))
    guard = _guard.get()
    if guard is not None:
        guard.check(path)


def note_read(path: StrPath | int) -> None:
    """Notes a file (or an open descriptor) that is read, so that it cannot be written; a missing one is ignored.

    Raises:
        QdqtoolError: It is to be written.
    """
    guard = _guard.get()
    if guard is None:
        return
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return
    if stat.S_ISREG(found.st_mode):
        guard.note((found.st_dev, found.st_ino), "standard input" if isinstance(path, int) else os.fspath(path))


def open_input(
    path: StrPath, *, pipes: bool = True, error: type[QdqtoolError] = QdqtoolError, note: bool = True
) -> IO[bytes]:
    """Opens a file for reading and notes it. Reading is unbounded: see :func:`read_input`.

    Args:
        path: The file.
        pipes: Whether it may be a pipe or a device; else only a regular file.
        error: Class of the errors.
        note: Whether it becomes one of the files that were read.

    Raises:
        QdqtoolError: It is missing, a folder, not readable, a pipe that nobody writes to, or is to be written.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise error(f"{path}: is a folder; give a file")
        if not stat.S_ISREG(mode) and not pipes:
            raise error(f"{path}: is no regular file")
        if stat.S_ISFIFO(mode):
            return _open_pipe(Path(path), error)
        file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except ValueError:
        raise error(f"{path!r}: no file name can hold a NUL") from None
    except OSError as found:
        raise error(f"{path}: cannot be read: {found.strerror or found}") from found
    try:
        if note:
            note_read(path)
    except BaseException:
        file.close()
        raise
    return file


def _open_pipe(path: Path, error: type[QdqtoolError]) -> IO[bytes]:
    """A named pipe is waited for only so long; one of the shell's, ``<(command)``, as long as it takes."""
    if os.path.realpath(path).startswith(("/proc/", "/dev/")):
        return open(path, "rb")
    import select

    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if not poll.poll(budgets.PIPE_SECONDS * 1000):
        os.close(handle)
        raise error(f"{path}: nothing came from this pipe within {budgets.PIPE_SECONDS:g} s")
    os.set_blocking(handle, True)
    return os.fdopen(handle, "rb")


def read_input(path: StrPath, limit: int, *, error: type[QdqtoolError] = QdqtoolError, pipes: bool = True) -> bytes:
    """All bytes of a file; see :func:`open_input`.

    Raises:
        QdqtoolError: As for open_input; also when there are more than ``limit`` bytes.
    """
    with open_input(path, pipes=pipes, error=error) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            budgets.require(size, limit, f"{path}: the file has", error)
            data = read_all(file, limit)
        except OSError as found:
            raise error(f"{path}: cannot be read: {found.strerror or found}") from found
    if data is None:
        raise error(f"{path}: holds more than {budgets.amount(limit)}, the limit")
    return data


def read_all(file: IO[bytes], limit: int, head: bytes = b"") -> bytes | None:
    """``head``, and what is left of a file; None where that is more than ``limit`` bytes.

    Block by block: ``read(limit)`` would take so much memory at once, however little there is.
    """
    blocks = [head]
    total = len(head)
    while block := file.read(_BLOCK):
        blocks.append(block)
        total += len(block)
        if total > limit:
            return None
    return b"".join(blocks)


def _would_overwrite(option: str, path: str, name: str) -> str:
    where = f"{option} {path}".strip()
    same = "" if os.path.abspath(path) == os.path.abspath(name) or name == "standard input" else f" (it is {name})"
    return f"{where}: is one of the files read{same}; choose another name"


def _key(path: StrPath) -> Key:
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


def _one_name(a: Path, b: Path) -> bool:
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
    handle, probe = _temporary(folder / "case", ".tmp")
    try:
        os.close(handle)
        return Path(probe).with_name(Path(probe).name.swapcase()).exists()
    finally:
        os.unlink(probe)


def _temporary(target: Path, suffix: str) -> tuple[int, str]:
    """A new file beside another one, opened."""
    import tempfile  # takes its time, and `--help` writes nothing

    name = os.fsdecode(os.fsencode(target.name)[:64])
    return tempfile.mkstemp(prefix=f".{name}.", suffix=suffix, dir=target.parent)


def _is_device(target: Path) -> bool:
    try:
        mode = os.stat(target).st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _check_place(target: Path, option: str = "") -> None:
    where = f"{option} {target}".strip()
    if "\0" in str(target):
        raise QdqtoolError(f"{where!r}: no file name can hold a NUL")
    if not target.parent.is_dir():
        raise QdqtoolError(f"{where}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise QdqtoolError(f"{where}: is a folder; give a file name")


@dataclass(slots=True)
class _Staged:
    """A file that is written and waits for its name: a temporary file beside it, or the bytes for a device."""

    target: Path
    temporary: str = ""
    content: io.BytesIO | None = None
    backup: str = ""
    placed: bool = False


@dataclass
class _Outputs:
    """The outputs of one command."""

    staged: list[_Staged] = field(default_factory=list)
    written: set[Key] = field(default_factory=set)

    def add(self, one: _Staged) -> None:
        if one.content is None:
            key = _key(one.target)
            twice = key in self.written or any(_one_name(s.target, one.target) for s in self.staged)
            if twice:
                with contextlib.suppress(OSError):
                    os.unlink(one.temporary)
                raise QdqtoolError(f"{one.target}: two outputs of one command would be this file; choose another name")
            self.written.add(key)
        self.staged.append(one)

    def commit(self) -> None:
        """Gives every file its name; where one cannot have it, all others are put back as they were."""
        files, self.staged = self.staged, []
        current = files[0] if files else None
        try:
            for current in files:
                if current.content is not None:
                    with current.target.open("wb") as device:
                        device.write(current.content.getbuffer())
                    continue
                if len(files) > 1:
                    current.backup = _set_aside(current.target)
                os.replace(current.temporary, current.target)
                current.placed = True
                self.written.add(_key(current.target))
        except BaseException as error:
            _put_back(files)
            if isinstance(error, OSError) and current is not None:
                raise QdqtoolError(f"{current.target}: cannot be written: {error.strerror or error}") from error
            raise
        for one in files:
            if one.backup:
                with contextlib.suppress(OSError):
                    os.unlink(one.backup)

    def discard(self) -> None:
        files, self.staged = self.staged, []
        _put_back(files)


def _set_aside(target: Path) -> str:
    """A second name for a file that is about to be replaced; empty where there is none."""
    if not os.path.lexists(target):
        return ""
    handle, backup = _temporary(target, ".old")
    os.close(handle)
    os.unlink(backup)
    try:
        os.link(target, backup, follow_symlinks=False)
    except OSError:  # a file system without hard links
        os.rename(target, backup)
    return backup


def _put_back(files: list[_Staged]) -> None:
    for one in files:
        with contextlib.suppress(OSError):
            if one.backup:
                os.replace(one.backup, one.target)
            elif one.placed:
                os.unlink(one.target)
        if one.temporary:
            with contextlib.suppress(OSError):
                os.unlink(one.temporary)


_outputs: ContextVar[_Outputs | None] = ContextVar("outputs", default=None)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Files written inside the block get their names when it ends without an error, all of them or none."""
    if _outputs.get() is not None:
        yield
        return
    outputs = _Outputs()
    token = _outputs.set(outputs)
    try:
        try:
            yield
        finally:
            _outputs.reset(token)
        outputs.commit()
    except BaseException:
        outputs.discard()
        raise


def commit() -> None:
    """Gives the files written so far their names, before the user is told that they are there.

    Raises:
        QdqtoolError: One cannot be written; none is.
    """
    outputs = _outputs.get()
    if outputs is not None:
        outputs.commit()


@contextlib.contextmanager
def atomic_write(path: StrPath, *, at_once: bool = False) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside ``path`` and renames it to ``path`` when the block ends without an error.

    On any error, Ctrl-C included, the temporary file is removed and ``path`` is left as it was. A device or a pipe
    (/dev/stdout, /dev/null) is written to: renaming a file over it would take it away.

    Args:
        path: The file to write; a file that is there is replaced.
        at_once: Not with the other outputs of :func:`together`: a cache, which keeps what an interrupted command did.

    Raises:
        QdqtoolError: The folder is missing, the file cannot be written (disk full, no permission), it is one of those
            read, or one that this command has already written.
    """
    target = Path(path)
    _check_place(target)
    waiting = None if at_once else _outputs.get()
    outputs = waiting if waiting is not None else _Outputs()
    if _is_device(target):
        content = io.BytesIO()
        yield content
        outputs.add(_Staged(target, content=content))
    else:
        guard = _guard.get()
        if guard is not None:
            guard.check(path)
        temporary = None
        try:
            handle, temporary = _temporary(target, ".tmp")
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes 0600; users expect what open() gives
            with os.fdopen(handle, "wb") as file:
                yield file
        except BaseException as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            if isinstance(error, OSError):
                raise QdqtoolError(f"{target}: cannot be written: {error.strerror or error}") from error
            raise
        outputs.add(_Staged(target, temporary))
    if waiting is None:
        try:
            outputs.commit()
        except BaseException:
            outputs.discard()
            raise


def write_text(path: StrPath, text: str, *, at_once: bool = False) -> None:
    """Writes UTF-8 text atomically; see :func:`atomic_write`."""
    with atomic_write(path, at_once=at_once) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # of a file name that is not UTF-8


def write_visible(path: StrPath, text: str) -> None:
    """Writes text that people will look at: without control characters (see :mod:`qdqtool.text`)."""
    write_text(path, visible(text))


def same_file(a: StrPath, b: StrPath) -> bool:
    """Whether both paths name the same existing file (through links as well)."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False
