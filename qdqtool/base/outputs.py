"""Outputs of a command, JSON among them: written aside, and given their names together or not at all.

Within :func:`together`, files are renamed into place only when all of them are written.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from qdqtool.base import budgets
from qdqtool.base.files import (
    Guard,
    Key,
    StrPath,
    check_place,
    current_guard,
    descriptor_of,
    file_key,
    is_stream,
    not_over,
    one_name,
    temporary_beside,
)
from qdqtool.base.parameters import typed
from qdqtool.base.process import pause_gc
from qdqtool.base.text import visible
from qdqtool.errors import QdqtoolError


class _Staged:
    """A file that is written and waits for its name: a temporary file beside it, or the bytes for a stream."""

    def __init__(
        self, target: Path, temporary: str = "", content: io.BytesIO | None = None
    ) -> None:
        self.target, self.temporary, self.content = target, temporary, content
        self.backup = ""
        self.placed = False


class _Outputs:
    """The outputs of one command, in the process that began it: what that forked leaves them alone."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.staged: list[_Staged] = []
        self.written: set[Key] = set()

    def add(self, one: _Staged) -> None:
        if one.content is None:
            key = file_key(one.target)
            if key in self.written or any(one_name(s.target, one.target) for s in self.staged):
                with contextlib.suppress(OSError):
                    os.unlink(one.temporary)
                raise QdqtoolError(
                    f"{one.target}: two outputs of one command would be this file; choose another name"
                )
            self.written.add(key)
        self.staged.append(one)

    def commit(self) -> None:
        """Gives every file its name; where one cannot have it, all others are put back as they were."""
        files, self.staged = self.staged, []
        current = files[0] if files else None
        try:
            for current in files:
                if current.content is not None:
                    with _opened(current.target) as stream:
                        stream.write(current.content.getbuffer())
                    continue
                if len(files) > 1:
                    current.backup = _set_aside(current.target)
                os.replace(current.temporary, current.target)
                current.placed = True
                self.written.add(file_key(current.target))
        except BaseException as error:
            _put_back(files)
            if isinstance(error, OSError) and current is not None:
                raise QdqtoolError(
                    f"{current.target}: cannot be written: {error.strerror or error}"
                ) from error
            raise
        for one in files:
            if one.backup:
                with contextlib.suppress(OSError):
                    os.unlink(one.backup)

    def discard(self) -> None:
        if os.getpid() != self.process:
            return
        files, self.staged = self.staged, []
        _put_back(files)


def _opened(target: Path) -> IO[bytes]:
    """A descriptor goes on where it is: opened by its name, a file behind it would be begun anew."""
    descriptor = descriptor_of(target)
    if descriptor is None:
        return target.open("wb")
    if sys.stdout is not None:
        sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")


def _set_aside(target: Path) -> str:
    """A second name for a file that is about to be replaced; empty where there is none."""
    if not os.path.lexists(target):
        return ""
    handle, backup = temporary_beside(target, ".old")
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
    """Gives the files written so far their names, before the user reads that they are there.

    Raises:
        QdqtoolError: One cannot be written; none is.
    """
    outputs = _outputs.get()
    if outputs is not None:
        outputs.commit()


@contextlib.contextmanager
def atomic_write(path: StrPath, *, at_once: bool = False) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside ``path`` and renames it to ``path`` when the block ends without an error.

    On any error, Ctrl-C included, the temporary file is removed and ``path`` is left as it was. /dev/null and
    open descriptors (/dev/stdout) are written to: renaming a file over them would take them away.

    Args:
        path: The file to write; a file that is there is replaced.
        at_once: Not with the other outputs of :func:`together`: a cache, which keeps what an interrupted command did.

    Raises:
        QdqtoolError: The folder is missing, the file cannot be written (disk full, no permission), it is one of those
            read, or one that this command has already written.
    """
    target = Path(path)
    check_place(target)
    waiting = None if at_once else _outputs.get()
    outputs = waiting if waiting is not None else _Outputs()
    guard = current_guard.get()
    if guard is not None:
        guard.check(path)
    if is_stream(target):
        content = io.BytesIO()
        yield content
        outputs.add(_Staged(target, content=content))
    else:
        temporary = None
        try:
            handle, temporary = temporary_beside(target, ".tmp")
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(
                temporary, 0o666 & ~umask
            )  # mkstemp makes 0600; users expect what open() gives
            with os.fdopen(handle, "wb") as file:
                yield file
        except BaseException as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            if isinstance(error, OSError):
                raise QdqtoolError(
                    f"{target}: cannot be written: {error.strerror or error}"
                ) from error
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
    """Writes text that people will look at: without control characters (see :mod:`qdqtool.base.text`)."""
    write_text(path, visible(text))


_DIGITS = 20  # of the largest whole number of 64 bits; a longer one is a float


class Saved:
    """A result that is saved as its JSON, over nothing that it was made from."""

    __slots__ = ()
    read: Guard | None

    def as_json(self) -> dict[str, Any]:
        raise NotImplementedError

    @typed
    def save(self, path: StrPath) -> None:
        """Writes the JSON that the command's ``--format json`` prints, atomically.

        Raises:
            QdqtoolError: ``path`` is a file that was read, its folder is missing, or it cannot be written.
        """
        save_answer(path, self.as_json(), self.read)


def save_answer(path: StrPath, answer: dict[str, Any], read: Guard | None) -> None:
    """Writes an answer as JSON, atomically and over nothing that it was made from.

    Raises:
        QdqtoolError: ``path`` is a file that was read, its folder is missing, or it cannot be written.
    """
    with not_over(read):
        write_visible(path, json_text(answer) + "\n")


def json_text(data: Any, *, compact: bool = False) -> str:
    """JSON text of an answer. What JSON has no number for (NaN, infinity: damaged scales bring them) is ``null``.

    Args:
        data: Of JSON's types.
        compact: Without line breaks and spaces.
    """
    import json  # an answer in text needs none

    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 1}
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, **layout)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


class TooManyValues(ValueError):
    """A JSON that would take too much memory."""


def parse_json(text: str | bytes, *, strict: bool = True, infinities: bool = False) -> Any:
    """What a JSON of unknown origin holds. A number that no float can hold is None, as are NaN and infinity, which
    JSON does not have; whole numbers beyond 64 bits are floats.

    Args:
        text: The JSON.
        strict: Whether control characters in strings are refused.
        infinities: Whether NaN and infinity are kept, as Python writes them.

    Raises:
        ValueError: It is none; TooManyValues: it holds more of them than there is room for.
        RecursionError: It is nested too deeply.
    """
    import json

    marks: Sequence[Any] = (b",", b"[", b"{") if isinstance(text, bytes) else ",[{"
    if len(text) > budgets.JSON_VALUES and sum(map(text.count, marks)) > budgets.JSON_VALUES:
        raise TooManyValues(f"more than {budgets.JSON_VALUES:,} values")
    constant = float if infinities else lambda _name: None
    with (
        pause_gc()
    ):  # what is let go in a deep one has no room to end, and Python says so on stderr
        return json.loads(
            text, strict=strict, parse_int=_integer, parse_float=_number, parse_constant=constant
        )


def _integer(text: str) -> int | float | None:
    return int(text) if len(text) <= _DIGITS else _number(text)


def _number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
