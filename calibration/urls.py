"""Images at URLs (``s3://bucket/images``), which fsspec and its plug-ins open."""

from __future__ import annotations

import copy
import hashlib
import io
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any, Self

from calibration.dataset import Array, InputSpec, escape_path
from calibration.images import IMAGE_SUFFIXES, ImageSource
from calibration.listing import UNREADABLE
from calibration.options import ImageFunction, Preprocess
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.text import reason_of

_URL = re.compile(r"[a-z][a-z0-9+.\-]+(://|::)", re.IGNORECASE)
# fsspec's file systems return the checksum of a file under one of these names.
_CHECKSUMS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "sha256")


def is_url(text: str) -> bool:
    """Return whether a text is a URL of a protocol other than ``file``."""
    return _URL.match(text) is not None and local_path(text) == text


def local_path(text: str) -> str:
    """Return the path of a ``file://`` URL, and any other text unchanged."""
    for begin in ("file://", "local://"):
        if text.lower().startswith(begin):
            return text[len(begin) :]
    return text


def open_url(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the URL's path in that file system.

    Raises:
        DataError: fsspec or its package for the protocol is not installed, or the URL is invalid.
    """
    try:
        import fsspec
    except ImportError:
        raise DataError(
            "URLs need fsspec: pip install fsspec and the package for the protocol, such as s3fs",
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
    except Exception as error:  # each file system has its own classes of errors
        raise DataError(
            f"cannot be opened: {reason_of(error)}", url, code="file-unreadable"
        ) from None
    return system, str(path)


def open_url_source(
    url: str,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess | str | ImageFunction,
    size: tuple[int, int] | None,
) -> UrlSource:
    """Return the images under a URL in the order of their paths, or a single image.

    Raises:
        DataError: No image is found, or the URL cannot be listed.
    """
    system, path = open_url(url)
    try:
        if system.isfile(path):
            folder, _, name = path.rpartition("/")
            return UrlSource(url.rpartition("/")[0], folder, [name], inputs, preprocess, size)
        names = sorted(_list_images(system, path.rstrip("/")))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"cannot be listed: {reason_of(error)}", url, code="file-unreadable"
        ) from None
    if not names:
        kinds = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
        raise DataError(f"no images ({kinds}) under this URL", url, code="no-images")
    return UrlSource(url, path.rstrip("/"), names, inputs, preprocess, size)


def _list_images(system: Any, root: str) -> Iterator[str]:
    """Yield the paths of images in a folder and its subfolders, relative to the folder.

    Files and folders whose names begin with a dot are skipped.
    """
    folders = [root]
    while folders:
        folder = folders.pop()
        for entry in system.ls(folder, detail=True):
            path = str(entry["name"]).rstrip("/")
            name = path.rpartition("/")[2]
            if name.startswith(".") or path == folder:
                continue
            if entry["type"] == "directory":
                folders.append(path)
            elif posixpath.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield path.removeprefix(root).lstrip("/")


class UrlSource(ImageSource):
    """Images at a URL; each image file is read into memory as a whole.

    Args:
        url: URL of a folder.
        folder: Path of the folder in its file system.
        names: Names of the images under the folder.
        inputs: Inputs of the model.
        preprocess: Conversion of images to inputs.
        size: Height and width if the model leaves them open.
    """

    def __init__(
        self,
        url: str,
        folder: str,
        names: Sequence[str],
        inputs: Sequence[InputSpec],
        preprocess: Preprocess | str | ImageFunction,
        size: tuple[int, int] | None,
    ) -> None:
        self.configure(url, inputs, preprocess, size)
        self.url, self.folder, self.names = url, folder, names

    def count(self) -> int:
        """Return the number of samples."""
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the name of a sample for messages."""
        return escape_path(self.names[index])

    def portion(self, indices: Sequence[int]) -> Self:
        """Return a source of the images at `indices`, for another process."""
        part = copy.copy(self)
        part.names = [self.names[i] for i in indices]
        return part

    def digest(self, index: int) -> bytes:
        """Return the name and checksum of an image.

        The file is read only if the file system stores no checksum.
        """
        return self.name(index).encode() + self._checksum(index)

    def load(self, index: int) -> dict[str, Array]:
        """Return a sample with a batch dimension."""
        name = self.names[index].rpartition("/")[2]
        return self.load_image(io.BytesIO(self._read(index)), name)

    def _path(self, index: int) -> str:
        return f"{self.folder}/{self.names[index]}"

    def _checksum(self, index: int) -> bytes:
        system, _ = open_url(self.url)
        try:
            details = system.info(self._path(index))
            for name in _CHECKSUMS:
                if details.get(name):
                    return f"{details.get('size')} {details[name]}".encode()
            return hashlib.blake2b(self._read(index), digest_size=16).digest()
        except Exception:  # each file system has its own classes of errors
            return UNREADABLE

    def _read(self, index: int) -> bytes:
        """Return the contents of an image file.

        Raises:
            DataError: The file cannot be read, or is too large.
        """
        system, _ = open_url(self.url)
        try:
            with system.open(self._path(index), "rb") as file:
                data: bytes = file.read(limits.IMAGE_FILE + 1)
        except FileNotFoundError:
            raise DataError("no such file", code="file-missing") from None
        except Exception as error:
            raise DataError(reason_of(error), code="file-unreadable") from None
        limits.check_size(len(data), limits.IMAGE_FILE, "the file has", DataError)
        return data
