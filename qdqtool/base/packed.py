"""Compressed files, unpacked block by block and never beyond a limit: gzip and xz of any number of members, zstd.

Archives of arrays (npy, npz) are read within the same limits.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from qdqtool.base import budgets
from qdqtool.base.files import StrPath, open_input
from qdqtool.base.text import reason_of
from qdqtool.errors import DataError, QdqtoolError

BLOCK = 1 << 20
_XZ_MEMORY = 256 << 20
GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
HEAD = 6  # bytes that show what a file is


class _Gzip:
    """zlib's decompressor with the interface of lzma's and compression.zstd's."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    def __getattr__(self, name: str) -> Any:  # eof, unused_data
        return getattr(self._inner, name)

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, most)


def _zstd() -> Any:
    """Python 3.14's own decompressor, or that of its backport where it is installed; None without either."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name).ZstdDecompressor()
        except ImportError:
            continue
    return None


def kind_of(head: bytes) -> bytes:
    """Which magic number a file begins with; empty for one that is not compressed."""
    return next((magic for magic in (GZIP, XZ, ZSTD) if head.startswith(magic)), b"")


def unpack(
    head: bytes, read: Callable[[], bytes], name: str, limit: int, *, whole: bool,
    error: type[QdqtoolError] = QdqtoolError,
) -> Iterator[bytes]:
    """Yields what a compressed stream holds, all members after one another.

    Args:
        head: Its first bytes.
        read: Gives the next bytes, none at the end.
        name: What to call it in messages.
        limit: Bytes after unpacking.
        whole: Whether damage is an error; else it ends the data (a log that was cut off is still worth reading),
            unless it is at the very start.
        error: Class of the errors.

    Raises:
        QdqtoolError: More than ``limit`` bytes, damage, or zstd where Python cannot read it.
    """
    magic = kind_of(head)
    total, data, ended = 0, head, False
    while data:
        unpacker = _unpacker(magic, name, error)
        while not unpacker.eof:
            try:
                block = unpacker.decompress(data, BLOCK)
            except (zlib.error, lzma.LZMAError, ValueError, OSError) as found:
                if not whole and total:
                    return
                raise error(f"{name}: cannot be read: the compressed file is damaged ({found}); copy it again"
                            ) from found
            except Exception as found:  # zstd's own class
                if type(found).__name__ != "ZstdError":
                    raise
                raise error(f"{name}: the compressed file is damaged ({found}); copy it again") from found
            data = b""
            if block:
                total += len(block)
                if total > limit:
                    raise error(f"{name}: unpacks to more than {budgets.amount(limit)}, the limit")
                yield block
            if not unpacker.eof and unpacker.needs_input:
                data = b"" if ended else read()
                if not data:
                    if whole:
                        raise error(f"{name}: the compressed file is cut off; copy it again")
                    return
        data = unpacker.unused_data
        while not ended and len(data) < HEAD:
            more = read()
            ended = not more
            data += more
        # Zeros pad xz and tapes; anything else behind the end is no part of the file, as gzip has it.
        data = data.lstrip(b"\0")
        if kind_of(data) != magic:
            return


def _unpacker(magic: bytes, name: str, error: type[QdqtoolError]) -> Any:
    if magic == GZIP:
        return _Gzip()
    inner = lzma.LZMADecompressor(memlimit=_XZ_MEMORY) if magic == XZ else _zstd()
    if inner is None:
        raise error(f"{name}: is compressed with zstd, which this Python cannot read; unpack it first (zstd -d)")
    return inner


Array = npt.NDArray[Any]

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # numpy's own limit for headers that are not trusted
_KINDS = "biuf"
_ENCRYPTED = 0x1
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes
# What zipfile, zlib and struct raise on damaged archives.
DAMAGED = (OSError, ValueError, EOFError, zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError,
           OverflowError, KeyError, IndexError)


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
        except Exception as error:  # numpy evaluates the header as Python: nearly anything can be raised
            raise DataError(f"{what}: not a numpy array file: {reason_of(error)}") from error
        if dtype.hasobject:
            raise DataError(f"{what}: holds Python objects, which are never loaded; save plain numbers")
        if dtype.kind not in _KINDS or dtype.subdtype is not None or not dtype.itemsize:
            raise DataError(f"{what}: holds {dtype}, which is not a plain number")
        if any(d < 0 for d in shape):
            raise DataError(f"{what}: declares the shape {list(shape)}; save it again")
        self.shape, self.fortran, self.dtype = shape, fortran, dtype
        self.start = file.tell()
        self.bytes = math.prod(shape) * dtype.itemsize
        if self.bytes > size - self.start:
            raise DataError(f"{what}: the file is cut off: {list(shape)} of {dtype} need "
                            f"{budgets.amount(self.bytes)}, it has {budgets.amount(max(0, size - self.start))}")


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

    def __init__(self, path: StrPath, limit: int = budgets.UNPACKED_ARRAYS, note: bool = True) -> None:
        """Opens it.

        Args:
            path: The file.
            limit: Bytes of all arrays together, unpacked; see :func:`qdqtool.base.budgets.unpacked`.
            note: Whether it becomes one of the files that were read.

        Raises:
            DataError: It is missing, no npz, encrypted, packed in a way that numpy does not, or too large.
        """
        self.path = path
        file = open_input(path, error=DataError, note=note)
        try:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise DataError(f"{path}: is empty")
            self._zip = zipfile.ZipFile(file)
            entries = self._zip.infolist()
        except (*DAMAGED, SystemError) as error:
            file.close()
            raise DataError(f"{path}: not an npz file: {reason_of(error)}") from error
        except BaseException:
            file.close()
            raise
        self._file = file
        self.members: dict[str, zipfile.ZipInfo] = {}
        try:
            self._take(entries, budgets.unpacked(limit, size))
        except BaseException:
            self.close()
            raise

    def _take(self, entries: list[zipfile.ZipInfo], limit: int) -> None:
        for entry in entries:
            if not entry.filename.endswith(".npy"):
                continue
            name = entry.filename.removesuffix(".npy")
            if entry.flag_bits & _ENCRYPTED:
                raise DataError(f"{self.path}: array '{name}' is encrypted; save it again with numpy")
            if entry.compress_type not in _PLAIN:
                raise DataError(f"{self.path}: array '{name}' is packed in a way that numpy does not write; save it "
                                "again with numpy")
            if name in self.members:
                raise DataError(f"{self.path}: has two arrays '{name}'")
            self.members[name] = entry
        total = sum(entry.file_size for entry in self.members.values())
        budgets.require(total, limit, f"{self.path}: its arrays unpack to", DataError)

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
            raise DataError(f"{self.what(name)}: cannot be read: {reason_of(error)}") from error

    def read(self, name: str) -> Array:
        """One array, whole.

        Raises:
            DataError: It is damaged, or holds something else than plain numbers.
        """
        with self.open(name) as file:
            return read_values(file, Header(file, self.members[name].file_size, self.what(name)), self.what(name))

    def close(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # what was refused has neither
            self._zip.close()
            self._file.close()

    __del__ = close

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_values(file: IO[bytes], header: Header, what: str) -> Array:
    """The values behind a header.

    Raises:
        DataError: The file is cut off or damaged.
    """
    try:
        data = file.read(header.bytes)
    except (*DAMAGED, Exception) as error:  # zlib.error is a class of its own
        raise DataError(f"{what}: damaged: {reason_of(error)}") from error
    if len(data) != header.bytes:
        raise DataError(f"{what}: the file is cut off; copy it again")
    return np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")


def read_arrays(path: StrPath) -> dict[str, Array]:
    """All arrays of an npz file.

    Raises:
        DataError: It is missing, or no npz of plain numbers; together they are too large.
    """
    with open_input(path, error=DataError) as file:
        if file.read(6) == _MAGIC:
            raise DataError(f"{path}: is one array (npy); give an npz with an array for each input of the model")
    with Archive(path) as archive:
        if not archive.members:
            raise DataError(f"{path}: holds no arrays")
        return {name: archive.read(name) for name in archive.members}
