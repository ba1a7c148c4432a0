"""npz and npy files as calibration data, read one sample at a time and never unpickled."""

from __future__ import annotations

import contextlib
import math
import struct
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from calibration.dataset import Array, InputSpec, Sample, Source, file_digest, fit_all, printable
from qdqtool.errors import DataError

ARRAY_SUFFIXES = frozenset({".npz", ".npy"})
MAX_SAMPLE_BYTES = 1 << 30
_SKIP_BLOCK = 1 << 20

_DAMAGED = (OSError, ValueError, EOFError, zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError)


class StackedArray:
    """An array in a file, [samples, ...], of which one row at a time is read.

    A plain .npy, or one stored uncompressed in an .npz, is read at any place; a compressed one from front to back.
    """

    def __init__(self, path: Path, member: str | None = None) -> None:
        self.path = path
        self.member = member
        self.what = f"{path}: array '{member.removesuffix('.npy')}'" if member else str(path)
        self.lock = threading.Lock()
        self.position = 0
        self.file = self._open()
        try:
            self.shape, fortran, self.dtype = _header(self.file)
        except _DAMAGED as error:
            raise DataError(f"{self.what}: not a numpy array file: {_short(error)}") from error
        if any(d < 0 for d in self.shape):
            raise DataError(f"{self.what}: declares the shape {list(self.shape)}; save it again")
        if self.dtype.hasobject:
            raise DataError(f"{self.what}: holds Python objects, which are never loaded; save plain numbers")
        if fortran and len(self.shape) > 1:
            raise DataError(f"{self.what}: is in Fortran order; save it with numpy.ascontiguousarray")
        self.start = self.file.tell()
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if self.row_bytes > MAX_SAMPLE_BYTES:
            raise DataError(f"{self.what}: one sample takes {self.row_bytes >> 20} MB; the limit is 1024 MB")

    def _open(self) -> IO[bytes]:
        try:
            if self.member is None:
                return self.path.open("rb")
            with zipfile.ZipFile(self.path) as archive:
                return archive.open(self.member)
        except _DAMAGED as error:
            raise DataError(f"{self.what}: cannot be read: {_short(error)}") from error

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def row(self, index: int) -> Array:
        """Row ``index`` as an array of the other dimensions.

        Raises:
            DataError: The file is cut off or damaged.
        """
        with self.lock:
            try:
                # zipfile's reader seeks by reading on, or from the start again when going back.
                self.file.seek(self.start + index * self.row_bytes)
                data = self.file.read(self.row_bytes)
            except _DAMAGED as error:
                raise DataError(f"{self.what}: damaged at sample {index}: {_short(error)}") from error
        if len(data) != self.row_bytes:
            raise DataError(f"{self.what}: the file is cut off at sample {index}; copy it again")
        return np.frombuffer(data, self.dtype).reshape(self.shape[1:])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = reader(file)
    return tuple(shape), bool(fortran), dtype


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [n for n in archive.namelist() if n.endswith(".npy")]
    except _DAMAGED as error:
        raise DataError(f"{path}: not an npz file: {_short(error)}") from error


def array_file_source(path: Path, inputs: Sequence[InputSpec]) -> Source:
    """An npz of stacked arrays keyed by input name, or an npy for a model with one input.

    An array that has the input's own rank is stacked along the batch dimension; one rank more is a stack of batches.

    Raises:
        DataError: It does not fit the inputs.
    """
    if path.suffix.lower() == ".npy":
        arrays = {inputs[0].name: StackedArray(path)}
        if len(inputs) > 1:
            raise DataError(f"{path}: one npy cannot feed a model with {len(inputs)} inputs; give an npz")
    else:
        members = _members(path)
        names = {m.removesuffix(".npy"): m for m in members}
        if len(inputs) == 1 and len(members) == 1:
            names = {inputs[0].name: members[0]}
        arrays = {}
        for spec in inputs:
            if spec.name not in names:
                found = ", ".join(f"'{n}'" for n in names) or "nothing"
                raise DataError(f"{path}: has no array for the model's input '{spec.name}'; it has {found}")
            arrays[spec.name] = StackedArray(path, names[spec.name])
    return StackedSource(path, arrays, inputs)


class StackedSource(Source):
    """Rows of arrays in one file."""

    def __init__(self, path: Path, arrays: dict[str, StackedArray], inputs: Sequence[InputSpec]) -> None:
        self.path = path
        self.arrays = arrays
        self.inputs = inputs
        lengths = {name: len(a) for name, a in arrays.items()}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"'{n}' {k}" for n, k in lengths.items())
            raise DataError(f"{path}: the arrays have different numbers of samples: {text}")
        if not next(iter(lengths.values())):
            raise DataError(f"{path}: holds no samples")
        first = self.load(0)  # the shapes are checked before any work is done
        self.single_rows = all(first[i.name].ndim == len(arrays[i.name].shape) for i in inputs)

    def count(self) -> int:
        return len(next(iter(self.arrays.values())))

    def load(self, index: int) -> Sample:
        return {i.name: i.fit(self.arrays[i.name].row(index), self.arrays[i.name].what) for i in self.inputs}

    def digest(self, index: int) -> bytes:
        return file_digest(self.path) + index.to_bytes(8, "big") if index == 0 else index.to_bytes(8, "big")

    def name(self, index: int) -> str:
        return f"{printable(self.path.name)}[{index}]"


def sample_files_source(paths: Sequence[Path], root: Path, inputs: Sequence[InputSpec]) -> Source:
    """A folder with one npz (several inputs) or npy (one input) for each sample."""
    return SampleFilesSource(paths, root, inputs)


class SampleFilesSource(Source):
    """One file for each sample."""

    def __init__(self, paths: Sequence[Path], root: Path, inputs: Sequence[InputSpec]) -> None:
        self.paths = list(paths)
        self.root = root
        self.inputs = inputs

    def count(self) -> int:
        return len(self.paths)

    def load(self, index: int) -> Sample:
        path = self.paths[index]
        members = [None] if path.suffix.lower() == ".npy" else _members(path)
        arrays: dict[str, Array] = {}
        for member in members:
            array = StackedArray(path, member)
            try:
                if array.row_bytes * len(array) > MAX_SAMPLE_BYTES:
                    raise DataError(f"{array.what}: one sample of more than 1024 MB")
                key = self.inputs[0].name if member is None else member.removesuffix(".npy")
                arrays[key] = np.stack([array.row(i) for i in range(len(array))]) if array.shape else array.row(0)
            finally:
                array.close()
        return fit_all(arrays, self.inputs, str(path))

    def digest(self, index: int) -> bytes:
        return self.name(index).encode() + file_digest(self.paths[index])

    def name(self, index: int) -> str:
        return printable(self.paths[index].relative_to(self.root).as_posix())
