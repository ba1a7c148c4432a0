"""Images at URLs (``s3://bucket/images``), which fsspec and its plug-ins open."""

from __future__ import annotations

import copy
import hashlib
import io
import posixpath
import re
from collections.abc import Sequence
from typing import Any, Self

from calibration.dataset import Array, InputSpec, escape_path
from calibration.images import IMAGE_SUFFIXES, ImageSource
from calibration.listing import UNREADABLE
from calibration.options import ImageFunction, Preprocess
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.text import format_reason

_URL = re.compile(r"[a-z][a-z0-9+.\-]+(://|::)", re.IGNORECASE)
# fsspec's file systems return the checksum of a file under one of these names.
_CHECKSUMS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "sha256")


def is_url(text: str) -> bool:
    """Return whether a text is a URL of a protocol other than ``file`` and ``local``."""
    return _URL.match(text) is not None and to_local_path(text) == text


def to_local_path(text: str) -> str:
    """Return the path of a ``file://`` or ``local://`` URL, and any other text unchanged."""
    for begin in ("file://", "local://"):
        if text.lower().startswith(begin):
            return text[len(begin) :]
    return text


def open_url_source(
    url: str,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess | str | ImageFunction,
    size: tuple[int, int] | None,
) -> UrlSource:
    """Return the images under a URL in the order of their paths, or a single image.

    Files and folders whose names begin with a dot are skipped.

    Raises:
        DataError: fsspec or its package for the protocol is not installed, the URL cannot be
            listed, or no image is found.
    """
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        file_paths = system.find(path)
    except ImportError as error:
        raise DataError(
            f"{format_reason(error)} (pip install fsspec and the package for the protocol, such as "
            "s3fs, here and on every worker)",
            url,
            code="missing-package",
        ) from None
    except Exception as error:  # each file system has its own classes of errors
        raise DataError(
            f"cannot be listed: {format_reason(error)}; check the URL and your credentials",
            url,
            code="file-unreadable",
        ) from None
    root = path.rstrip("/")
    if file_paths == [root]:
        root = root.rpartition("/")[0]
    names = [str(path).removeprefix(root).lstrip("/") for path in sorted(file_paths)]
    names = [name for name in names if _is_image(name)]
    if not names:
        kinds = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
        raise DataError(
            f"no images ({kinds}) under this URL; check its spelling", url, code="no-images"
        )
    return UrlSource(url, system, root, names, inputs, preprocess, size)


def _is_image(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return posixpath.splitext(name)[1].lower() in IMAGE_SUFFIXES and not is_hidden


class UrlSource(ImageSource):
    """Images at a URL; each image file is read into memory as a whole.

    Args:
        url: URL of the images.
        system: File system of fsspec. A pickled copy connects again in another process.
        folder: Path of the folder in its file system.
        names: Names of the images under the folder.
        inputs: Inputs of the model.
        preprocess: Conversion of images to inputs.
        size: Height and width if they are dynamic in the model.
    """

    def __init__(
        self,
        url: str,
        system: Any,
        folder: str,
        names: Sequence[str],
        inputs: Sequence[InputSpec],
        preprocess: Preprocess | str | ImageFunction,
        size: tuple[int, int] | None,
    ) -> None:
        self.configure_input(url, inputs, preprocess, size)
        self.system, self.folder, self.names = system, folder, names

    def count(self) -> int:
        """Return the number of samples."""
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the name of a sample for messages."""
        return escape_path(self.names[index])

    def select_samples(self, indices: Sequence[int]) -> Self:
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
        return self.load_image(
            io.BytesIO(self._read_file(index)), posixpath.basename(self.names[index])
        )

    def _checksum(self, index: int) -> bytes:
        try:
            details = self.system.info(f"{self.folder}/{self.names[index]}")
            for name in _CHECKSUMS:
                if details.get(name):
                    return f"{details.get('size')} {details[name]}".encode()
            return hashlib.blake2b(self._read_file(index), digest_size=16).digest()
        except Exception:  # each file system has its own classes of errors
            return UNREADABLE

    def _read_file(self, index: int) -> bytes:
        """Return the contents of an image file.

        Raises:
            DataError: The file cannot be read, or is too large.
        """
        try:
            with self.system.open(f"{self.folder}/{self.names[index]}", "rb") as file:
                data: bytes = file.read(limits.IMAGE_FILE + 1)
        except FileNotFoundError:
            raise DataError("no such file", code="file-missing") from None
        except Exception as error:
            raise DataError(format_reason(error), code="file-unreadable") from None
        limits.check_size(len(data), limits.IMAGE_FILE, "the file has", DataError)
        return data
