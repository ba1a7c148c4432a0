"""Pictures behind URLs (``s3://bucket/images``), opened through fsspec and what it finds installed for the protocol."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import posixpath
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

from calibration.dataset import Array, InputSpec, escape_path
from calibration.images import IMAGE_SUFFIXES, ImageSource
from calibration.listing import UNREADABLE
from calibration.options import Preprocess
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.text import reason_of

_URL = re.compile(r"[a-z][a-z0-9+.\-]+(://|::)", re.IGNORECASE)
_CHECKSUMS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "checksum",
    "sha256",
)  # as the file systems call them


def is_url(text: str) -> bool:
    """Whether a text is a URL of a protocol other than ``file``."""
    return _URL.match(text) is not None and local_path(text) == text


def local_path(text: str) -> str:
    """The path of a ``file://`` URL; anything else as it is."""
    for begin in ("file://", "local://"):
        if text.lower().startswith(begin):
            return text[len(begin) :]
    return text


def opened(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        DataError: fsspec is not installed, or nothing for that protocol.
    """
    try:
        import fsspec
    except ImportError:
        raise DataError(
            "URLs need fsspec: pip install fsspec, and s3fs, gcsfs or the like",
            url,
            code="missing-package",
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{' '.join(str(error).split())} (pip install it here and on every worker)",
            url,
            code="missing-package",
        ) from None
    except Exception as error:  # each file system has classes of its own
        raise DataError(
            f"cannot be opened: {reason_of(error)}", url, code="file-unreadable"
        ) from None
    return system, str(path)


def url_source(
    url: str, inputs: Sequence[InputSpec], preprocess: Preprocess, size: tuple[int, int] | None
) -> UrlSource:
    """Pictures under a URL, in the order of their paths, or one picture.

    Raises:
        DataError: There are none, or the URL cannot be listed.
    """
    system, path = opened(url)
    try:
        if system.isfile(path):
            folder, _, name = path.rpartition("/")
            return UrlSource(url.rpartition("/")[0], folder, [name], inputs, preprocess, size)
        names = sorted(_pictures(system, path.rstrip("/")))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"cannot be listed: {reason_of(error)}", url, code="file-unreadable"
        ) from None
    if not len(names):
        kinds = ", ".join(sorted(s[1:] for s in IMAGE_SUFFIXES))
        raise DataError(f"no images ({kinds}) under this URL", url, code="no-images")
    return UrlSource(url, path.rstrip("/"), names, inputs, preprocess, size)


def _pictures(system: Any, root: str) -> Iterator[str]:
    """Names under a folder, one folder at a time; what begins with a dot is left out."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        for entry in system.ls(folder, detail=True):
            path = str(entry["name"]).rstrip("/")
            last = path.rpartition("/")[2]
            if last.startswith(".") or path == folder:
                continue
            if entry["type"] == "directory":
                waiting.append(path)
            elif posixpath.splitext(last)[1].lower() in IMAGE_SUFFIXES and "\0" not in path:
                yield path.removeprefix(root).lstrip("/")


class UrlSource(ImageSource):
    """Pictures behind a URL, each read whole and within :data:`qdqtool.util.limits.IMAGE_FILE`."""

    def __init__(
        self,
        url: str,
        folder: str,
        names: Sequence[str],
        inputs: Sequence[InputSpec],
        preprocess: Preprocess,
        size: tuple[int, int] | None,
    ) -> None:
        """Describes them; nothing is read yet. ``folder`` is that of the URL in its file system."""
        self.configure(url, inputs, preprocess, size)
        self.url, self.folder, self.names = url, folder, names

    @functools.cached_property
    def _read(self) -> threading.local:
        """The picture that a thread has read and not loaded yet."""
        return threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_read"}

    def count(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return escape_path(self.names[index])

    def portion(self, indices: Sequence[int]) -> Self:
        part = copy.copy(self)
        part.names = [self.names[i] for i in indices]
        return part

    def digest(self, index: int) -> bytes:
        """Name and checksum: the store's own where it has one, so that the client need not read the pictures."""
        return self.name(index).encode() + self._checksum(index)

    def load(self, index: int) -> dict[str, Array]:
        data = self._content(index)[0]
        self._read.held = None
        return self.load_image(io.BytesIO(data), self.names[index].rpartition("/")[2])

    def _path(self, index: int) -> str:
        return f"{self.folder}/{self.names[index]}"

    def _checksum(self, index: int) -> bytes:
        system, _ = opened(self.url)
        try:
            mark = _mark(system.info(self._path(index)))
            return mark or self._content(index)[1]
        except Exception:
            return UNREADABLE

    def _content(self, index: int) -> tuple[bytes, bytes]:
        """What a picture's file holds, and its checksum; held until it is loaded, so that it travels once.

        Raises:
            DataError: It cannot be read, or is too large.
        """
        held = getattr(self._read, "held", None)
        if held is not None and held[0] == index:
            return held[1], held[2]
        system, _ = opened(self.url)
        try:
            with system.open(self._path(index), "rb") as file:
                details = getattr(file, "details", None)
                data = file.read(limits.IMAGE_FILE + 1)
        except FileNotFoundError:
            raise DataError("no such file", code="file-missing") from None
        except Exception as error:
            raise DataError(reason_of(error), code="file-unreadable") from None
        limits.check_size(len(data), limits.IMAGE_FILE, "the file has", DataError)
        mark = _mark(details) if isinstance(details, dict) else b""
        mark = mark or hashlib.blake2b(data, digest_size=16).digest()
        self._read.held = (index, data, mark)
        return data, mark


def _mark(details: dict[str, Any]) -> bytes:
    """The checksum that a store gives of a file, with its size; empty where it gives none."""
    for name in _CHECKSUMS:
        if details.get(name):
            return f"{details.get('size')} {details[name]}".encode()
    return b""
