"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from qdqtool.errors import QdqtoolError


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside ``path`` and renames it to ``path`` when the block ends without an error.

    On any error, Ctrl-C included, the temporary file is removed and ``path`` is left as it was.

    Args:
        path: The file to write; a file that is there is replaced.

    Raises:
        QdqtoolError: The folder is missing, or the file cannot be written (disk full, no permission).
    """
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        yield from _write_through(target)
        return
    if not target.parent.is_dir():
        raise QdqtoolError(f"{target}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise QdqtoolError(f"{target}: is a folder; give a file name")
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:64]}.", suffix=".tmp", dir=target.parent)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes 0600; users expect what open() gives
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, target)
    except OSError as error:
        raise QdqtoolError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _write_through(target: Path) -> Iterator[IO[bytes]]:
    """A device or a pipe (/dev/stdout, /dev/null) is written to: renaming a file over it would take it away."""
    content = io.BytesIO()
    yield content
    try:
        with target.open("wb") as file:
            file.write(content.getbuffer())
    except OSError as error:
        raise QdqtoolError(f"{target}: cannot be written: {error.strerror or error}") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes UTF-8 text atomically; see :func:`atomic_write`."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # of a file name that is not UTF-8


def same_file(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    """Whether both paths name the same existing file (through links as well)."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False
