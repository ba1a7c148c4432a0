"""Calibration data from npz and npy files, folders, lists of images, and arrays in memory."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from calibration.archives import Archive, read_array_header, read_values
from calibration.dataset import (
    Array,
    Dataset,
    EndOfSamples,
    FilesSource,
    InputSpec,
    Sample,
    SampleSource,
    escape_path,
    fit_inputs,
    spread_indices,
)
from calibration.images import (
    IMAGE_SUFFIXES,
    OTHER_IMAGE_SUFFIXES,
    ImageSource,
)
from calibration.listing import BLOCK, block_starts, file_digest, list_files
from calibration.options import YOLO_PREPROCESS, ImageFunction, Preprocess
from calibration.urls import is_url, open_url_source, to_local_path
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.files import open_input, read_input, record_input
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count, format_reason

ARRAY_SUFFIXES = frozenset({".npz", ".npy"})
LIST_SUFFIXES = frozenset({".txt", ".lst", ".list"})


# Array files --------------------------------------------------------------------------------------


class StackedArray:
    """Array of shape [samples, ...] in a file, read one row at a time.

    Rows of an npy file, and of an uncompressed array in an npz file, can be read in any order. Rows
    of a compressed array have to be read from front to back.

    Args:
        path: File.
        archive: The file as an npz file, None for an npy file.
        member: Name of the array in the archive.

    Raises:
        DataError: The array is missing, damaged, in Fortran order, or a row is empty or too large.
    """

    def __init__(self, path: Path, archive: Archive | None = None, member: str = "") -> None:
        self.path = path
        self.lock = threading.Lock()
        self._archive = archive  # keeps the archive's file open
        if archive is None:
            self.label, self._prefix = str(path), ""
            self.random_access = True
            self.file = open_input(path, error=DataError)
            size = os.fstat(self.file.fileno()).st_size
        else:
            self.label, self._prefix = archive.describe_array(member), f"array '{member}': "
            self.random_access = not archive.members[member].compress_type
            self.file = archive.open(member)
            size = archive.members[member].file_size
        weakref.finalize(self, self.file.close)
        header = read_array_header(self.file, size, self.label)
        if header.fortran and len(header.shape) > 1:
            raise self._make_error(
                "is in Fortran order; convert it with numpy.ascontiguousarray, and save it again",
                "fortran-order",
            )
        self.shape, self.dtype, self.start = header.shape, header.dtype, header.start
        self.row_bytes = header.nbytes // max(len(self), 1)
        if len(self) and not self.row_bytes:
            raise self._make_error(
                f"its samples have no values (shape {list(self.shape)}); give a sample in each row",
                "empty",
            )
        limits.check_size(
            self.row_bytes, limits.SAMPLE, f"{self.label}: one sample takes", DataError
        )

    def _make_error(self, reason: str, code: str) -> DataError:
        return DataError(f"{self._prefix}{reason}", str(self.path), code=code)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def read_row(self, index: int) -> Array:
        """Return one row, without the first dimension.

        Raises:
            DataError: The file is cut off or damaged.
        """
        try:
            with self.lock:
                self.file.seek(self.start + index * self.row_bytes)
                data = self.file.read(self.row_bytes)
            return np.frombuffer(data, self.dtype).reshape(self.shape[1:])
        except Exception as error:  # numpy, zipfile and zlib raise many classes
            raise self._make_error(
                f"cut off or damaged at sample {index} ({format_reason(error)}); save it again",
                "file-damaged",
            ) from error


class StackedSource(SampleSource):
    """Rows of an npy file, or of an npz file with one array for each input.

    If an array has the rank of the input, its rows are samples without a batch dimension. If it has
    one more dimension, its rows are batches. A copy in another process opens the file when it loads
    the first row.

    Raises:
        DataError: The file does not fit the inputs.
    """

    def __init__(self, path: Path, inputs: Sequence[InputSpec]) -> None:
        self.path = path
        self.inputs = inputs
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
            raise DataError(
                f"the arrays have different numbers of samples: {text}; give each array one row "
                "for each sample",
                str(path),
                code="wrong-length",
            )
        self.rows: Sequence[int] = range(next(iter(lengths.values())))
        if not self.rows:
            raise DataError("contains no samples; save at least one", str(path), code="empty")
        self.random_access = all(array.random_access for array in self.arrays.values())
        first = self.load(0)  # checks the shapes before any work is done
        self.single_rows = all(first[i.name].ndim == len(self.arrays[i.name].shape) for i in inputs)

    @functools.cached_property
    def arrays(self) -> dict[str, StackedArray]:
        """Array in the file for each input, by input name. The first access opens the file."""
        if self.path.suffix.lower() == ".npy":
            if len(self.inputs) > 1:
                raise DataError(
                    f"one npy file cannot feed a model with {len(self.inputs)} inputs; give an npz "
                    "file with an array for each input",
                    str(self.path),
                    code="input-count",
                )
            return {self.inputs[0].name: StackedArray(self.path)}
        archive = Archive(self.path)
        if len(self.inputs) == 1 and len(archive.members) == 1:
            (member,) = archive.members
            return {self.inputs[0].name: StackedArray(self.path, archive, member)}
        for spec in self.inputs:
            if spec.name not in archive.members:
                members = ", ".join(f"'{name}'" for name in archive.members) or "none"
                raise DataError(
                    f"has no array for the model's input '{spec.name}' (arrays: {members}); "
                    "name each array like its input",
                    str(self.path),
                    code="missing-input",
                    node=spec.name,
                )
        return {i.name: StackedArray(self.path, archive, i.name) for i in self.inputs}

    @functools.cached_property
    def _file_digest(self) -> bytes:
        return file_digest(self.path)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files. Another process opens them again."""
        return {k: v for k, v in self.__dict__.items() if k not in ("arrays", "_file_digest")}

    def count(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def load(self, index: int) -> Sample:
        """Return a sample with a batch dimension."""
        row = self.rows[index]
        sample = {}
        for spec in self.inputs:
            array = self.arrays[spec.name]
            sample[spec.name] = spec.fit(array.read_row(row), array.label, array.shape)
        return sample

    def digest(self, index: int) -> bytes:
        """Return the row's number. For row 0, the digest of the file precedes it.

        The file is therefore hashed only once for all rows.
        """
        row = self.rows[index]
        return (b"" if row else file_digest(self.path)) + row.to_bytes(8, "big")

    def identity(self, index: int) -> bytes:
        """Return the row's number and the digest of the file."""
        return self.rows[index].to_bytes(8, "big") + self._file_digest

    def select_samples(self, indices: Sequence[int]) -> StackedSource:
        """Return a source of the samples at `indices` for another process.

        Raises:
            DataError: The file is compressed.
        """
        if not self.random_access:
            raise DataError(
                "is compressed, so workers would have to read it from the start; save it with "
                "numpy.savez",
                str(self.path),
                code="compressed-archive",
            )
        part = copy.copy(self)
        part.path = Path(os.path.abspath(self.path))
        part.rows = [self.rows[i] for i in indices]
        return part

    def name(self, index: int) -> str:
        """Return the name of a sample for messages."""
        return f"{escape_path(self.path.name)}[{self.rows[index]}]"


class SampleFilesSource(FilesSource):
    """One npz or npy file for each sample."""

    def __init__(self, paths: Sequence[Path], root: Path, inputs: Sequence[InputSpec]) -> None:
        self.paths = paths
        self.root = root
        self.inputs = inputs
        for path in paths:
            record_input(path)

    def load(self, index: int) -> Sample:
        """Return a sample with a batch dimension."""
        path = self.paths[index]
        if path.suffix.lower() == ".npz":
            with Archive(path) as archive:
                arrays = {name: archive.read(name) for name in archive.members}
        else:
            arrays = {self.inputs[0].name: _read_npy(path)}
        return fit_inputs(arrays, self.inputs, str(path))


def _read_npy(path: Path) -> Array:
    with open_input(path, error=DataError) as file:
        header = read_array_header(file, os.fstat(file.fileno()).st_size, str(path))
        limits.check_size(header.nbytes, limits.SAMPLE, f"{path}: one sample takes", DataError)
        return read_values(file, header, str(path))


# Arrays in memory ---------------------------------------------------------------------------------


def split_rows(arrays: Mapping[str, Any], inputs: Sequence[InputSpec]) -> list[Sample]:
    """Split stacked arrays into samples of one row.

    Args:
        arrays: Arrays by input name.
        inputs: Inputs of the model.

    Returns:
        One sample of views for each row if every input has a batch dimension of 1 or a dynamic
        batch, and all arrays have the same length. Otherwise all arrays as one sample.
    """
    named = {name: np.asarray(array) for name, array in arrays.items()}
    lengths = set()
    for spec in inputs:
        array = named.get(spec.name)
        has_batch = spec.shape and spec.shape[0] in (1, None)
        if array is None or not has_batch or array.ndim != len(spec.shape):
            return [named]
        lengths.add(len(array))
    if len(lengths) != 1:
        return [named]
    (length,) = lengths
    return [
        {spec.name: named[spec.name][row : row + 1] for spec in inputs} for row in range(length)
    ]


class MemorySource(SampleSource):
    """Dictionaries of arrays from an iterable. A list can be read again, an iterator once."""

    def __init__(self, source: Iterable[Any], inputs: Sequence[InputSpec]) -> None:
        self.inputs = inputs
        self.samples: Sequence[Any] | None = source if isinstance(source, Sequence) else None
        self.iterable = source
        self.iterator: Iterator[Any] | None = None
        self.repeatable = not isinstance(source, Iterator)
        self.random_access = self.samples is not None
        self.used = False

    def count(self) -> int | None:
        """Return the number of samples; None for an iterable without a length."""
        return None if self.samples is None else len(self.samples)

    def restart(self) -> None:
        """Prepare for another pass.

        Raises:
            DataError: The data is a one-time iterator that was read before.
        """
        if self.samples is not None:
            return
        if self.used and not self.repeatable:
            raise DataError(
                "the calibration data is an iterator and can be read only once; give a list",
                code="read-once",
                parameter="data",
            )
        self.iterator = iter(self.iterable)
        self.used = True

    def load(self, index: int) -> Sample:
        """Return a sample with a batch dimension."""
        if self.samples is not None:
            sample = self.samples[index]
        else:
            assert self.iterator is not None
            try:
                sample = next(self.iterator)
            except StopIteration:
                raise EndOfSamples from None
        if not isinstance(sample, Mapping):
            raise DataError(
                f"calibration sample {index} is a {type(sample).__name__}; give a dict of arrays "
                "by input name for each sample, or only paths of images",
                code="wrong-type",
                parameter="data",
            )
        return fit_inputs(sample, self.inputs, f"calibration sample {index}")

    def select_samples(self, indices: Sequence[int]) -> MemorySource:
        """Return a source that holds the samples at `indices`, for another process.

        Raises:
            DataError: The data is an iterable without a length.
        """
        if self.samples is None:
            raise DataError(
                "calibration data from an iterator cannot be split among the workers of a cluster; "
                "give a list, or a folder that all machines share",
                code="not-shareable",
                parameter="data",
            )
        return MemorySource([self.samples[i] for i in indices], self.inputs)

    def digest(self, index: int) -> bytes:
        """Return a hash of a sample's arrays; empty for an iterable without a length.

        Of large arrays, at most 16 evenly spread blocks are hashed.
        """
        if self.samples is None:
            return b""
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(self.samples[index].items()):
            value = np.ascontiguousarray(array)
            digest.update(f"{name}{value.dtype}{value.shape}".encode())
            flat = value.reshape(-1).view(np.uint8)
            for start in block_starts(flat.size):
                digest.update(flat[start : start + BLOCK].data)
        return digest.digest()


# Opening data -------------------------------------------------------------------------------------


CalibrationSource: TypeAlias = (
    str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | npt.NDArray[Any]
    | Mapping[str, Any]
    | Iterable[Mapping[str, Any]]
    | Dataset
)
"""Calibration data in one of the forms that :func:`open_data` lists, such as a folder of images."""


def open_data(
    source: CalibrationSource,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess | str | ImageFunction = YOLO_PREPROCESS,
    max_images: int = 512,
    size: tuple[int, int] | None = None,
) -> Dataset:
    """Open calibration data for a model.

    Args:
        source: One of these:

            * a folder of images, with its subfolders, in the order of their paths;
            * a ``.txt`` file with one image path in each line, or a single image;
            * a URL of a folder of images that fsspec opens (``s3://bucket/images``);
            * an ``.npz`` of stacked arrays keyed by input name, or an ``.npy``;
            * a folder of ``.npz`` or ``.npy`` files with one sample each;
            * a list of image paths;
            * a dictionary of arrays by input name, or an iterable of such dictionaries;
            * an array for the first input;
            * a Dataset, which is returned as it is.
        inputs: The model's inputs.
        preprocess: Conversion of images to inputs, by name (:data:`calibration.PRESETS`), as a
            :class:`Preprocess`, or as a function from an RGB image of Pillow to the input; arrays
            are used as they are.
        max_images: Maximum number of images or rows, spread evenly over the data.
        size: Height and width in pixels for a model with dynamic image size.

    Raises:
        DataError: The data has no usable sample, or does not fit the inputs.
    """
    if isinstance(source, Dataset):
        return source
    max_images = operator.index(max_images)
    if max_images < 1:
        raise DataError(
            f"`max_images` is {max_images}; give at least 1",
            code="out-of-range",
            parameter="max_images",
        )
    if not inputs:
        raise DataError(
            "the model has no inputs, so there is nothing to calibrate; give a model with inputs",
            code="no-inputs",
        )
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        if is_url(text):
            data: SampleSource = open_url_source(text, inputs, preprocess, size)
        else:
            data = _open_path(Path(to_local_path(text)), inputs, preprocess, size, max_images)
        return Dataset(data, inputs, max_images)
    if isinstance(source, Sequence) and source and all(map(_is_path, source)):
        paths = [Path(name) for name in source]
        return Dataset(ImageSource(paths, Path(), inputs, preprocess, size), inputs, max_images)
    if isinstance(source, np.ndarray):
        source = {inputs[0].name: source}
    if isinstance(source, Mapping):
        source = split_rows(source, inputs)
    if not isinstance(source, Iterable):
        raise DataError(
            f"calibration data of type {type(source).__name__} is not supported; give a folder of "
            "images",
            code="wrong-type",
            parameter="data",
        )
    return Dataset(MemorySource(source, inputs), inputs, max_images)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _open_path(
    path: Path,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess | str | ImageFunction,
    size: tuple[int, int] | None,
    max_images: int,
) -> SampleSource:
    suffix = path.suffix.lower()
    if os.path.isdir(path):
        return _open_folder(path, inputs, preprocess, size)
    if not os.path.exists(path):
        raise DataError("no such file or folder", str(path), code="file-missing")
    if suffix in ARRAY_SUFFIXES:
        return StackedSource(path, inputs)
    if suffix in IMAGE_SUFFIXES:
        return ImageSource([path], path.parent, inputs, preprocess, size)
    if suffix in LIST_SUFFIXES:
        paths = _read_image_list(path, max_images)
        source = ImageSource(paths, path.parent, inputs, preprocess, size)
        source.list_file = path
        return source
    raise DataError(
        "is not calibration data; give a folder, a list of images (.txt), an image, .npz or .npy",
        str(path),
        code="wrong-format",
    )


def _open_folder(
    path: Path,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess | str | ImageFunction,
    size: tuple[int, int] | None,
) -> SampleSource:
    listing = list_files(path, IMAGE_SUFFIXES)
    links, counts = listing.broken_links, listing.suffixes
    formats = [f"{counts[s]} {s[1:]}" for s in OTHER_IMAGE_SUFFIXES if counts[s]]
    kinds = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
    notes = []
    if formats:
        notes.append(
            Note(
                f"files of other formats were not read ({', '.join(formats)}); convert the images "
                f"to one of {kinds}",
                code="other-formats",
                formats=formats,
                kinds=kinds,
            )
        )
    if listing.paths:
        if links:
            text = f"skipped {format_count(len(links), 'broken link')}, such as {min(links)}"
            notes.append(Note(text, code="dead-links", count=len(links), first=min(links)))
        source = ImageSource(listing.paths, path, inputs, preprocess, size)
        source.notes = notes
        source.listed_folder = path
        return source
    arrays = list_files(path, ARRAY_SUFFIXES)
    if arrays.paths:
        files = SampleFilesSource(arrays.paths, path, inputs)
        files.listed_folder = path
        return files
    reason = f"the folder has no images ({kinds}) and no npz or npy files"
    if links:
        example = f"{format_count(len(links), 'broken link')} (such as {min(links)})"
        reason += f", but {example}; check whether the images are mounted"
    elif notes:
        reason = str(notes[0])
    else:
        reason += "; give a folder with images"
    raise DataError(reason, str(path), code="no-images")


def _read_image_list(path: Path, max_images: int) -> list[Path]:
    """Return at most `max_images` of the paths in a text file, spread evenly.

    A relative path is looked up in the list's folder. If no such file exists there, the path is
    relative to the current folder.
    """
    try:
        content = read_input(path, limits.LIST_FILE, error=DataError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot be read as a list of images: {error}; save it in UTF-8",
            str(path),
            code="wrong-encoding",
        ) from error
    lines = [line.strip() for line in io.StringIO(content, newline=None)]
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise DataError(
            "lists no images; write the path of an image on each line", str(path), code="no-images"
        )
    return [_resolve_path(names[i], path.parent) for i in spread_indices(len(names), max_images)]


def _resolve_path(name: str, folder: Path) -> Path:
    path = folder / name
    return path if os.path.exists(path) or not os.path.exists(name) else Path(name)
