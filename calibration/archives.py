"""Arrays in npy and npz files, read with a size limit and without unpickling."""

from __future__ import annotations

import math
import os
import weakref
import zipfile
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.files import StrPath, open_input
from qdqtool.util.text import format_reason

Array = npt.NDArray[Any]

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_KINDS = "biuf"  # kinds of numpy's dtypes: booleans, signed and unsigned integers, floats


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """Type, shape and offset of an array in a file.

    Attributes:
        shape: Dimensions.
        dtype: Booleans, integers or floats.
        fortran: Whether the values are in Fortran (column-major) order.
        start: Offset of the values in the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_array_header(file: IO[bytes], size: int, name: str) -> ArrayHeader:
    """Read and check the header of an array.

    Args:
        file: File at the beginning of the array.
        size: Bytes of the array with its header.
        name: Name of the array for messages.

    Raises:
        DataError: The header is not valid, the values are not plain numbers, or the file is cut
            off.
    """
    try:
        shape, fortran, dtype = _HEADER_READERS[np.lib.format.read_magic(file)](file)
        header = ArrayHeader(shape, dtype, fortran, file.tell())
    except Exception as error:  # numpy, zipfile and zlib raise many classes
        raise DataError(
            f"{name}: not a numpy array file ({format_reason(error)}); save it with numpy.save",
            code="wrong-format",
        ) from error
    if dtype.hasobject:
        reason = "contains Python objects, which are never loaded; save plain numbers"
        raise DataError(f"{name}: {reason}", code="python-objects")
    if dtype.kind not in _KINDS or dtype.subdtype is not None:
        raise DataError(
            f"{name}: has the type {dtype}; save booleans, integers or floats", code="wrong-type"
        )
    if min(shape, default=0) < 0:
        reason = f"has a negative size in its shape {list(shape)}; save the array again"
        raise DataError(f"{name}: {reason}", code="wrong-shape")
    available = max(0, size - header.start)
    if header.nbytes > available:
        needed, present = limits.format_bytes(header.nbytes), limits.format_bytes(available)
        reason = (
            f"the file is cut off: {list(shape)} of {dtype} needs {needed}, but only {present} "
            "follow the header; save the array again"
        )
        raise DataError(f"{name}: {reason}", code="file-damaged")
    return header


def read_values(file: IO[bytes], header: ArrayHeader, name: str) -> Array:
    """Return the array whose header has just been read.

    Args:
        file: File at the first value.
        header: Header of the array.
        name: Name of the array for messages.

    Raises:
        DataError: The file is cut off or damaged.
    """
    try:
        values = np.frombuffer(file.read(header.nbytes), header.dtype)
        return values.reshape(header.shape, order="F" if header.fortran else "C")
    except Exception as error:  # numpy, zipfile and zlib raise many classes
        raise DataError(
            f"{name}: damaged ({format_reason(error)}); save the array again", code="file-damaged"
        ) from error


class Archive:
    """An open npz file; arrays are read on request.

    Args:
        path: The npz file.
        record: Whether the file is recorded as an input, which commands never overwrite.

    Attributes:
        members: Zip entry of each array by name, in the order of the archive.

    Raises:
        DataError: The file is missing, too large, or not an npz file.
    """

    def __init__(self, path: StrPath, *, record: bool = True) -> None:
        self.path = os.fspath(path)
        file = open_input(path, error=DataError, record=record)
        self._close = weakref.finalize(self, file.close)
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise DataError("is empty; save it with numpy.savez", self.path, code="empty")
        try:
            self._zip = zipfile.ZipFile(file)
        except Exception as error:  # zipfile raises many classes for damaged directories
            raise DataError(
                f"not an npz file ({format_reason(error)}); save it with numpy.savez",
                self.path,
                code="wrong-format",
            ) from error
        self.members = {
            entry.filename.removesuffix(".npy"): entry
            for entry in self._zip.infolist()
            if entry.filename.endswith(".npy")
        }
        total = sum(entry.file_size for entry in self.members.values())
        limit = limits.max_unpacked_size(size)
        limits.check_size(total, limit, "its arrays unpack to", DataError, path=self.path)

    def describe_array(self, name: str) -> str:
        """Return path and name of an array for messages."""
        return f"{self.path}: array '{name}'"

    def open(self, name: str) -> IO[bytes]:
        """Open the npy file of one array.

        Raises:
            DataError: The array is damaged or encrypted.
        """
        try:
            return self._zip.open(self.members[name])
        except Exception as error:
            raise DataError(
                f"array '{name}' cannot be read ({format_reason(error)}); save the file again",
                self.path,
                code="file-damaged",
            ) from error

    def read(self, name: str) -> Array:
        """Return one array.

        Raises:
            DataError: The array is damaged, or not of plain numbers.
        """
        label = self.describe_array(name)
        with self.open(name) as file:
            header = read_array_header(file, self.members[name].file_size, label)
            return read_values(file, header, label)

    def close(self) -> None:
        """Close the file."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_arrays(path: StrPath) -> dict[str, Array]:
    """Return all arrays of an npz file.

    Raises:
        DataError: The file is missing, too large, or not an npz file of plain numbers.
    """
    with open_input(path, error=DataError) as file:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
            raise DataError(
                "is an npy file with one array; give an npz file with an array for each model "
                "input",
                os.fspath(path),
                code="wrong-format",
            )
    with Archive(path) as archive:
        if not archive.members:
            raise DataError(
                "contains no arrays; save an array for each model input",
                os.fspath(path),
                code="empty",
            )
        return {name: archive.read(name) for name in archive.members}
