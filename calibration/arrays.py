"""npz and npy files as calibration data, read one sample at a time and never unpickled."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from calibration.dataset import Array, InputSpec, Sample, Source, fit_all, printable
from calibration.listing import file_digest
from qdqtool import budgets
from qdqtool.arrayfiles import Archive, Header, read_values, short
from qdqtool.errors import DataError
from qdqtool.files import open_input

ARRAY_SUFFIXES = frozenset({".npz", ".npy"})


class StackedArray:
    """An array in a file, [samples, ...], of which one row at a time is read.

    A plain .npy, or one stored uncompressed in an .npz, is read at any place; a compressed one from front to back.
    """

    def __init__(self, path: Path, archive: Archive | None = None, member: str = "") -> None:
        self.path = path
        self.what = str(path) if archive is None else archive.what(member)
        self._archive = archive  # which closes its file when nothing needs it any more
        self.lock = threading.Lock()
        self.file: IO[bytes]
        if archive is None:
            self.file = open_input(path, pipes=False, error=DataError)
            size = os.fstat(self.file.fileno()).st_size
        else:
            self.file = archive.open(member)
            size = archive.members[member].file_size
        self.random_access = archive is None or not archive.members[member].compress_type
        header = Header(self.file, size, self.what)
        if header.fortran and len(header.shape) > 1:
            raise DataError(f"{self.what}: is in Fortran order; save it with numpy.ascontiguousarray")
        self.shape, self.dtype, self.start = header.shape, header.dtype, header.start
        count = self.shape[0] if self.shape else 1
        self.row_bytes = header.bytes // max(count, 1)
        if count and not self.row_bytes:
            raise DataError(f"{self.what}: its samples have no values (shape {list(self.shape)})")
        budgets.require(self.row_bytes, budgets.SAMPLE, f"{self.what}: one sample takes", DataError)

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
            except Exception as error:  # zlib.error, EOFError, ValueError, OSError: all of them are damage
                raise DataError(f"{self.what}: damaged at sample {index}: {short(error)}") from error
        if len(data) != self.row_bytes:
            raise DataError(f"{self.what}: the file is cut off at sample {index}; copy it again")
        return np.frombuffer(data, self.dtype).reshape(self.shape[1:])

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # what was refused has no file
            self.file.close()


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
        archive = Archive(path)
        names = {m: m for m in archive.members}
        if len(inputs) == 1 and len(names) == 1:
            names = {inputs[0].name: next(iter(names))}
        arrays = {}
        for spec in inputs:
            if spec.name not in names:
                found = ", ".join(f"'{n}'" for n in names) or "nothing"
                raise DataError(f"{path}: has no array for the model's input '{spec.name}'; it has {found}")
            arrays[spec.name] = StackedArray(path, archive, names[spec.name])
    return StackedSource(path, arrays, inputs)


class StackedSource(Source):
    """Rows of arrays in one file."""

    def __init__(self, path: Path, arrays: dict[str, StackedArray], inputs: Sequence[InputSpec]) -> None:
        self.path = path
        self._file_digest = b""
        self.arrays = arrays
        self.inputs = inputs
        self.random_access = all(a.random_access for a in arrays.values())
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

    def identity(self, index: int) -> bytes:
        if not self._file_digest:
            self._file_digest = file_digest(self.path)
        return index.to_bytes(8, "big") + self._file_digest

    def portion(self, indices: Sequence[int]) -> RowsSource:
        if not self.random_access:
            raise DataError(f"{self.path}: is compressed, so that workers cannot begin in the middle; save it with "
                            "numpy.savez, uncompressed")
        return RowsSource(Path(os.path.abspath(self.path)), self.inputs, indices)

    def name(self, index: int) -> str:
        return f"{printable(self.path.name)}[{index}]"


class RowsSource(Source):
    """Some rows of arrays in one file, which is opened when the first is wanted."""

    def __init__(self, path: Path, inputs: Sequence[InputSpec], rows: Sequence[int]) -> None:
        self.path = path
        self.inputs = inputs
        self.rows = list(rows)
        self._whole: Source | None = None

    @property
    def whole(self) -> Source:
        if self._whole is None:
            self._whole = array_file_source(self.path, self.inputs)
        return self._whole

    @property
    def single_rows(self) -> bool:  # type: ignore[override]
        return self.whole.single_rows

    def count(self) -> int:
        return len(self.rows)

    def load(self, index: int) -> Sample:
        return self.whole.load(self.rows[index])

    def digest(self, index: int) -> bytes:
        return self.whole.digest(self.rows[index])

    def identity(self, index: int) -> bytes:
        return self.whole.identity(self.rows[index])

    def name(self, index: int) -> str:
        return self.whole.name(self.rows[index])


class SampleFilesSource(Source):
    """One file for each sample."""

    def __init__(self, paths: Sequence[Path], root: Path, inputs: Sequence[InputSpec]) -> None:
        self.paths = paths
        self.root = root
        self.inputs = inputs

    def count(self) -> int:
        return len(self.paths)

    def load(self, index: int) -> Sample:
        path = self.paths[index]
        if path.suffix.lower() == ".npz":
            with Archive(path, budgets.SAMPLE) as archive:
                arrays = {name: archive.read(name) for name in archive.members}
        else:
            with open_input(path, pipes=False, error=DataError) as file:
                header = Header(file, os.fstat(file.fileno()).st_size, str(path))
                budgets.require(header.bytes, budgets.SAMPLE, f"{path}: one sample takes", DataError)
                arrays = {self.inputs[0].name: read_values(file, header, str(path))}
        return fit_all(arrays, self.inputs, str(path))

    def digest(self, index: int) -> bytes:
        return self.name(index).encode() + file_digest(self.paths[index])

    def portion(self, indices: Sequence[int]) -> SampleFilesSource:
        part = copy.copy(self)
        part.root = Path(os.path.abspath(self.root))
        part.paths = [Path(os.path.abspath(self.paths[i])) for i in indices]
        return part

    def name(self, index: int) -> str:
        return printable(self.paths[index].relative_to(self.root).as_posix())
