"""Write output files atomically, and never over an input."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qdqtool.errors import QdqtoolError
from qdqtool.util.files import (
    InputFiles,
    StrPath,
    check_output,
    file_descriptor,
    forbid_overwrite,
    is_stream,
)
from qdqtool.util.json_text import json_text
from qdqtool.util.text import escape_hidden


@contextlib.contextmanager
def atomic_write(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path` and rename it to `path` when the block ends.

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
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise QdqtoolError(
                f"cannot be written: {error.strerror or error}", str(target), code="not-written"
            ) from error
        raise


def _open_stream(target: Path) -> IO[bytes]:
    """Open a device; for an open descriptor, open a duplicate at the same position."""
    descriptor = file_descriptor(target)
    if descriptor is None:
        return target.open("wb")
    if sys.stdout is not None:
        sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")


def write_text(path: StrPath, text: str) -> None:
    """Write text in UTF-8, atomically; see :func:`atomic_write`."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # some file names are not UTF-8


def write_visible(path: StrPath, text: str) -> None:
    """Write text atomically, with hidden characters escaped (see :mod:`qdqtool.util.text`)."""
    write_text(path, escape_hidden(text))


class SavableResult:
    """Base class of results that can be saved as JSON, but not over their own inputs."""

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
        write_visible(path, json_text(answer) + "\n")
