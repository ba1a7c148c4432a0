"""Archives of arrays (npy, npz), read within limits, before numpy looks at them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import sys
import zipfile
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from qdqtool.base import limits
from qdqtool.base.files import StrPath, open_input
from qdqtool.base.text import reason_of
from qdqtool.errors import DataError, QdqtoolError

Array = npt.NDArray[Any]

_MAGIC = b"\x93NUMPY"
_DIMENSIONS = 32  # of an array of any version of numpy
_MAX_HEADER = 10_000  # numpy's own limit for headers that are not trusted
_KINDS = "biuf"
_ENCRYPTED = 0x1
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes
# What zipfile, zlib and struct raise on damaged archives.
DAMAGED = (
    OSError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    struct.error,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    KeyError,
    IndexError,
)


class Header:
    """What an array in a file says of itself, checked.

    Attributes:
        shape: Dimensions, none negative.
        dtype: Of numbers: booleans, integers or floats.
        fortran: Whether the first index moves fastest.
        start: Where the values begin in the file.
        bytes: Size of all values.
    """

    def __init__(self, file: IO[bytes], size: int, what: str) -> None:
        """Reads the header.

        Args:
            file: At the array's beginning.
            size: Bytes of the whole array file.
            what: What to call it in messages.

        Raises:
            DataError: It is no array of plain numbers, or has fewer values than it says.
        """
        try:
            shape, fortran, dtype = _parsed(file)
        except QdqtoolError:
            raise
        except (
            Exception
        ) as error:  # numpy evaluates the header as Python: nearly anything can be raised
            raise DataError(
                f"{what}: not a numpy array file: {reason_of(error)}", code="wrong-format"
            ) from error
        if dtype.hasobject:
            raise DataError(
                f"{what}: holds Python objects, which are never loaded; save plain numbers",
                code="python-objects",
            )
        if dtype.kind not in _KINDS or dtype.subdtype is not None or not dtype.itemsize:
            raise DataError(
                f"{what}: holds {dtype}, which is not a plain number", code="wrong-type"
            )
        if len(shape) > _DIMENSIONS:
            raise DataError(
                f"{what}: has {len(shape)} dimensions; the limit is {_DIMENSIONS}",
                code="too-many-dimensions",
            )
        beyond = (
            math.prod(d for d in shape if d) * dtype.itemsize > sys.maxsize
        )  # numpy makes no such array, not empty
        if any(d < 0 for d in shape) or (beyond and 0 in shape):
            raise DataError(
                f"{what}: declares the shape {list(shape)}; save it again", code="wrong-shape"
            )
        self.shape, self.fortran, self.dtype = shape, fortran, dtype
        self.start = file.tell()
        self.bytes = math.prod(shape) * dtype.itemsize
        if self.bytes > size - self.start:
            raise DataError(
                f"{what}: the file is cut off: {list(shape)} of {dtype} need "
                f"{limits.format_bytes(self.bytes)}, it has {limits.format_bytes(max(0, size - self.start))}",
                code="file-damaged",
            )


def _parsed(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    head = file.read(8)
    if head[:6] != _MAGIC or len(head) < 8:
        raise ValueError("it does not begin as one")
    wide = head[6] > 1
    raw = file.read(4 if wide else 2)
    (length,) = struct.unpack("<I" if wide else "<H", raw)
    if length > _MAX_HEADER:
        raise ValueError(f"its header takes {length} bytes")
    text = io.BytesIO(raw + file.read(length))
    reader = np.lib.format.read_array_header_2_0 if wide else np.lib.format.read_array_header_1_0
    shape, fortran, dtype = reader(text)
    return tuple(int(d) for d in shape), bool(fortran), dtype


class Archive:
    """An npz file.

    Attributes:
        members: Array name to its entry, in the archive's order.
    """

    def __init__(
        self, path: StrPath, limit: int = limits.UNPACKED_ARRAYS, note: bool = True
    ) -> None:
        """Opens it.

        Args:
            path: The file.
            limit: Bytes of all arrays together, unpacked; see :func:`qdqtool.base.limits.unpacked`.
            note: Whether it becomes one of the files that were read.

        Raises:
            DataError: It is missing, no npz, encrypted, packed in a way that numpy does not, or too large.
        """
        self.path = path
        file = open_input(path, error=DataError, record=note)
        try:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise DataError("is empty", os.fspath(path), code="empty")
            self._zip = zipfile.ZipFile(file)
            entries = self._zip.infolist()
        except (*DAMAGED, SystemError) as error:
            file.close()
            raise DataError(
                f"not an npz file: {reason_of(error)}", os.fspath(path), code="wrong-format"
            ) from error
        except BaseException:
            file.close()
            raise
        self._file = file
        self.members: dict[str, zipfile.ZipInfo] = {}
        try:
            self._take(entries, limits.unpacked(limit, size))
        except BaseException:
            self.close()
            raise

    def _take(self, entries: list[zipfile.ZipInfo], limit: int) -> None:
        for entry in entries:
            if not entry.filename.endswith(".npy"):
                continue
            name = entry.filename.removesuffix(".npy")
            if entry.flag_bits & _ENCRYPTED:
                raise DataError(
                    f"array '{name}' is encrypted; save it again with numpy",
                    os.fspath(self.path),
                    code="encrypted",
                )
            if entry.compress_type not in _PLAIN:
                raise DataError(
                    f"array '{name}' is packed in a way that numpy does not write; save it "
                    "again with numpy",
                    os.fspath(self.path),
                    code="unsupported",
                )
            if name in self.members:
                raise DataError(f"has two arrays '{name}'", os.fspath(self.path), code="duplicate")
            self.members[name] = entry
        total = sum(entry.file_size for entry in self.members.values())
        limits.check_size(
            total, limit, "its arrays unpack to", DataError, path=os.fspath(self.path)
        )

    def what(self, name: str) -> str:
        """What to call an array in messages."""
        return f"{self.path}: array '{name}'"

    def open(self, name: str) -> IO[bytes]:
        """The file of one array.

        Raises:
            DataError: It is damaged.
        """
        try:
            return self._zip.open(self.members[name])
        except DAMAGED as error:
            raise DataError(
                f"array '{name}': cannot be read: {reason_of(error)}",
                os.fspath(self.path),
                code="file-damaged",
            ) from error

    def read(self, name: str) -> Array:
        """One array, whole.

        Raises:
            DataError: It is damaged, or holds something else than plain numbers.
        """
        with self.open(name) as file:
            return read_values(
                file, Header(file, self.members[name].file_size, self.what(name)), self.what(name)
            )

    def close(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # what was refused has neither
            self._zip.close()
            self._file.close()

    __del__ = close

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_values(file: IO[bytes], header: Header, what: str) -> Array:
    """The values behind a header.

    Raises:
        DataError: The file is cut off or damaged.
    """
    try:
        data = file.read(header.bytes)
    except QdqtoolError:
        raise
    except (*DAMAGED, Exception) as error:  # zlib.error is a class of its own
        raise DataError(f"{what}: damaged: {reason_of(error)}", code="file-damaged") from error
    if len(data) != header.bytes:
        raise DataError(f"{what}: the file is cut off; copy it again", code="file-damaged")
    return np.frombuffer(data, header.dtype).reshape(
        header.shape, order="F" if header.fortran else "C"
    )


def read_arrays(path: StrPath) -> dict[str, Array]:
    """All arrays of an npz file.

    Raises:
        DataError: It is missing, or no npz of plain numbers; together they are too large.
    """
    with open_input(path, error=DataError) as file:
        if file.read(6) == _MAGIC:
            raise DataError(
                "is one array (npy); give an npz with an array for each input of the model",
                os.fspath(path),
                code="wrong-format",
            )
    with Archive(path) as archive:
        if not archive.members:
            raise DataError("holds no arrays", os.fspath(path), code="empty")
        return {name: archive.read(name) for name in archive.members}
