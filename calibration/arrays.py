"""Arrays as calibration data: npz and npy files, read one sample at a time and never unpickled, and in memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import operator
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from calibration.dataset import (
    Array,
    Dataset,
    FilesSource,
    InputSpec,
    Sample,
    Source,
    fit_all,
    printable,
    spread,
)
from calibration.listing import BLOCK, block_starts, file_digest, files_under
from calibration.options import YOLO_PREPROCESS, Preprocess
from calibration.pictures import (
    IMAGE_SUFFIXES,
    OTHER_PICTURES,
    ImageSource,
    decode,
    describe,
    prepare,
)
from calibration.urls import is_url, local_path, url_source
from qdqtool.base import budgets
from qdqtool.base.archives import Archive, Header, read_values
from qdqtool.base.files import INVALID_NAME, open_input, read_input
from qdqtool.base.notes import Remark
from qdqtool.base.text import brief_repr, reason_of
from qdqtool.errors import DataError, QdqtoolError

ARRAY_SUFFIXES = frozenset({".npz", ".npy"})


class StackedArray:
    """An array in a file, [samples, ...], of which one row at a time is read.

    A plain .npy, or one stored uncompressed in an .npz, is read at any place; a compressed one from front to back.
    """

    def __init__(self, path: Path, archive: Archive | None = None, member: str = "") -> None:
        self.path = path
        self.what = str(path) if archive is None else archive.what(member)
        self._place = "" if archive is None else f"array '{member}': "  # in the file, for messages
        self._archive = archive  # which closes its file when nothing needs it any more
        self.lock = threading.Lock()
        self.file: IO[bytes]
        if archive is None:
            self.file = open_input(path, error=DataError)
            size = os.fstat(self.file.fileno()).st_size
        else:
            self.file = archive.open(member)
            size = archive.members[member].file_size
        self.random_access = archive is None or not archive.members[member].compress_type
        header = Header(self.file, size, self.what)
        if header.fortran and len(header.shape) > 1:
            raise DataError(
                f"{self._place}is in Fortran order; save it with numpy.ascontiguousarray",
                str(path),
                code="fortran-order",
            )
        self.shape, self.dtype, self.start = header.shape, header.dtype, header.start
        count = self.shape[0] if self.shape else 1
        self.row_bytes = header.bytes // max(count, 1)
        if count and not self.row_bytes:
            raise DataError(
                f"{self._place}its samples have no values (shape {list(self.shape)})",
                str(path),
                code="empty",
            )
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
            except QdqtoolError:
                raise
            except (
                Exception
            ) as error:  # zlib.error, EOFError, ValueError, OSError: all of them are damage
                raise DataError(
                    f"{self._place}damaged at sample {index}: {reason_of(error)}",
                    str(self.path),
                    code="file-damaged",
                ) from error
        if len(data) != self.row_bytes:
            raise DataError(
                f"{self._place}the file is cut off at sample {index}; copy it again",
                str(self.path),
                code="file-damaged",
            )
        return np.frombuffer(data, self.dtype).reshape(self.shape[1:])

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # what was refused has no file
            self.file.close()


class StackedSource(Source):
    """Rows of arrays in one file: an npz of stacked arrays keyed by input name, or an npy for a model with one input.

    An array that has the input's own rank is stacked along the batch dimension; one rank more is a stack of batches.
    Another process opens the file when it wants the first row.
    """

    def __init__(self, path: Path, inputs: Sequence[InputSpec]) -> None:
        """Opens the file.

        Raises:
            DataError: It does not fit the inputs.
        """
        self.path = path
        self.inputs = inputs
        lengths = {name: len(a) for name, a in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"'{n}' {k}" for n, k in lengths.items())
            raise DataError(
                f"the arrays have different numbers of samples: {text}",
                str(path),
                code="wrong-length",
            )
        self.rows: Sequence[int] = range(next(iter(lengths.values())))
        if not self.rows:
            raise DataError("holds no samples", str(path), code="empty")
        self.random_access = all(a.random_access for a in self.arrays.values())
        first = self.load(0)  # the shapes are checked before any work is done
        self.single_rows = all(first[i.name].ndim == len(self.arrays[i.name].shape) for i in inputs)

    @functools.cached_property
    def arrays(self) -> dict[str, StackedArray]:
        """By input."""
        path, inputs = self.path, self.inputs
        if path.suffix.lower() == ".npy":
            if len(inputs) > 1:
                raise DataError(
                    f"one npy cannot feed a model with {len(inputs)} inputs; give an npz",
                    str(path),
                    code="input-count",
                )
            return {inputs[0].name: StackedArray(path)}
        archive = Archive(path)
        names = {m: m for m in archive.members}
        if len(inputs) == 1 and len(names) == 1:
            names = {inputs[0].name: next(iter(names))}
        missing = next((i.name for i in inputs if i.name not in names), None)
        if missing is not None:
            found = ", ".join(f"'{n}'" for n in names) or "nothing"
            raise DataError(
                f"has no array for the model's input '{missing}'; it has {found}",
                str(path),
                code="missing-input",
                node=missing,
            )
        return {i.name: StackedArray(path, archive, names[i.name]) for i in inputs}

    @functools.cached_property
    def _file_digest(self) -> bytes:
        return file_digest(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("arrays", "_file_digest")}

    def count(self) -> int:
        return len(self.rows)

    def load(self, index: int) -> Sample:
        row = self.rows[index]
        return {
            i.name: i.fit(self.arrays[i.name].row(row), self.arrays[i.name].what)
            for i in self.inputs
        }

    def digest(self, index: int) -> bytes:
        row = self.rows[index]
        return (b"" if row else file_digest(self.path)) + row.to_bytes(8, "big")

    def identity(self, index: int) -> bytes:
        return self.rows[index].to_bytes(8, "big") + self._file_digest

    def portion(self, indices: Sequence[int]) -> StackedSource:
        if not self.random_access:
            raise DataError(
                "is compressed, so that workers cannot begin in the middle; save it with numpy.savez, "
                "uncompressed",
                str(self.path),
                code="compressed-archive",
            )
        part = copy.copy(self)
        part.path = Path(os.path.abspath(self.path))
        part.rows = [self.rows[i] for i in indices]
        return part

    def name(self, index: int) -> str:
        return f"{printable(self.path.name)}[{self.rows[index]}]"


class SampleFilesSource(FilesSource):
    """One npz or npy for each sample."""

    def __init__(self, paths: Sequence[Path], root: Path, inputs: Sequence[InputSpec]) -> None:
        self.paths = paths
        self.root = root
        self.inputs = inputs

    def load(self, index: int) -> Sample:
        path = self.paths[index]
        if path.suffix.lower() == ".npz":
            with Archive(path, budgets.SAMPLE) as archive:
                arrays = {name: archive.read(name) for name in archive.members}
        else:
            with open_input(path, error=DataError) as file:
                header = Header(file, os.fstat(file.fileno()).st_size, str(path))
                budgets.require(
                    header.bytes, budgets.SAMPLE, f"{path}: one sample takes", DataError
                )
                arrays = {self.inputs[0].name: read_values(file, header, str(path))}
        return fit_all(arrays, self.inputs, str(path))


# In memory -----------------------------------------------------------------------------------------------------------


def rows_of(arrays: Mapping[str, Any], inputs: Sequence[InputSpec]) -> list[Sample]:
    """Stacked arrays in memory as samples of one row each (views); as one sample where they are not stacked."""
    with _users("an array of the calibration data"):
        named = {
            name: np.asarray(array)
            for name, array in _named(arrays, "the calibration data").items()
        }
    by_input = {i.name: named[i.name] for i in inputs if i.name in named}
    lengths = {len(a) for a in by_input.values() if a.ndim}
    stacked = len(by_input) == len(inputs) and all(
        i.shape and by_input[i.name].ndim == len(i.shape) and i.shape[0] in (1, None)
        for i in inputs
    )
    if not stacked or len(lengths) != 1:
        return [named]
    return [
        {name: array[k : k + 1] for name, array in by_input.items()} for k in range(lengths.pop())
    ]


_END = object()


@contextlib.contextmanager
def _users(what: str) -> Iterator[None]:
    """Names what objects of the user's were asked for when they raise; what ends a process passes.

    Raises:
        DataError: They raised something.
    """
    try:
        yield
    except (QdqtoolError, MemoryError):
        raise
    except Exception as error:
        kind, reason = type(error).__name__, reason_of(error)
        raise DataError(
            f"{what} cannot be had: {kind}" + f": {reason}" * (reason != kind),
            code="source-failed",
            parameter="data",
        ) from error


def _named(sample: object, what: str) -> Mapping[str, Any]:
    """A sample of the user's, which has an array for each name.

    Raises:
        DataError: It is something else.
    """
    if not isinstance(sample, Mapping):
        raise DataError(
            f"{what} is a {type(sample).__name__}; give a dict of name to array",
            code="wrong-type",
            parameter="data",
        )
    wrong = next((key for key in sample if not isinstance(key, str)), None)
    if wrong is not None:
        raise DataError(
            f"{what} has the key {brief_repr(wrong)}, which is no text; give a dict of name to array",
            code="key-not-text",
            parameter="data",
        )
    return sample


class MemorySource(Source):
    """Dictionaries of arrays from any iterable; a list can be gone through again, a generator once."""

    def __init__(self, source: Iterable[object], inputs: Sequence[InputSpec]) -> None:
        self.inputs = inputs
        self.samples: Sequence[object] | None = source if isinstance(source, Sequence) else None
        self.iterable = source
        self.iterator: Iterator[object] | None = None
        self.repeatable = not isinstance(source, Iterator)
        self.random_access = self.samples is not None
        self.used = False

    def count(self) -> int | None:
        with _users("the number of calibration samples"):
            return None if self.samples is None else len(self.samples)

    def restart(self) -> None:
        if self.samples is None:
            if self.used and not self.repeatable:
                raise DataError(
                    "the calibration data was a one-time iterator and is used up; give a list",
                    code="read-once",
                    parameter="data",
                )
            with _users("the calibration data"):
                self.iterator = iter(self.iterable)
            self.used = True

    def load(self, index: int) -> Sample:
        what = f"calibration sample {index}"
        with _users(what):
            if self.samples is not None:
                sample = self.samples[index]
            else:
                assert self.iterator is not None
                sample = next(self.iterator, _END)
            if sample is not _END:
                return fit_all(_named(sample, what), self.inputs, what)
        raise IndexError(index)

    def portion(self, indices: Sequence[int]) -> MemorySource:
        """They travel with it."""
        if self.samples is None:
            raise DataError(
                "calibration data from an iterator cannot be shared out to a cluster; give a list, or a "
                "folder that all machines share",
                code="not-shareable",
                parameter="data",
            )
        with _users(f"one of {len(indices)} calibration samples"):
            return MemorySource([self.samples[i] for i in indices], self.inputs)

    def digest(self, index: int) -> bytes:
        if self.samples is None:
            return b""
        what = f"calibration sample {index}"
        with _users(what):
            sample = _named(self.samples[index], what)
            arrays = {name: np.ascontiguousarray(array) for name, array in sorted(sample.items())}
        digest = hashlib.blake2b(digest_size=16)
        for name, value in arrays.items():
            digest.update(f"{name}{value.dtype}{value.shape}".encode())
            flat = value.reshape(-1).view(np.uint8)
            for start in block_starts(flat.size):
                digest.update(flat[start : start + BLOCK].data)
        return digest.digest()


# From whatever the user has to a Dataset -----------------------------------------------------------------------------


__all__ = ["Dataset", "InputSpec", "Preprocess", "decode", "describe", "open_data", "prepare"]


def open_data(
    source: object,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess = YOLO_PREPROCESS,
    max_images: int = 512,
    size: tuple[int, int] | None = None,
) -> Dataset:
    """Open calibration data for a model.

    Args:
        source: A folder of pictures (searched through, in the order of their paths), a ``.txt`` file with one path a
            line, one picture; a URL of a folder of pictures that fsspec opens (``s3://bucket/images``); an ``.npz`` of
            stacked arrays keyed by input name, an ``.npy``, a folder of ``.npz`` or ``.npy`` with one sample each; an
            iterable of ``{input name: array}``; or a Dataset, returned as it is.
        inputs: The model's inputs.
        preprocess: How images become inputs; arrays are used as they are.
        max_images: Maximum number of samples, spread evenly over the data.
        size: Height and width in pixels if the model leaves them open.

    Raises:
        DataError: There is nothing usable, or it does not fit the inputs.
    """
    if isinstance(source, Dataset):
        return source
    max_images = operator.index(max_images)
    if max_images < 1:
        raise DataError(
            f"the number of calibration images is {max_images}; it must be at least 1",
            code="out-of-range",
            parameter="max_images",
        )
    if not inputs:
        raise DataError("the model has no inputs to calibrate with", code="no-inputs")
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        if is_url(text):
            return Dataset(url_source(text, inputs, preprocess, size), inputs, max_images)
        path = Path(local_path(text))
        try:
            path.exists()
        except (OSError, ValueError) as error:  # too long, or with a NUL
            raise DataError(
                f"{text[:100]!r}: {getattr(error, 'strerror', None) or error}",
                code="invalid-path",
                parameter="data",
            ) from None
        return Dataset(_path_source(path, inputs, preprocess, size, max_images), inputs, max_images)
    if isinstance(source, np.ndarray):
        source = {inputs[0].name: source}
    if isinstance(source, Iterable):
        rows = rows_of(source, inputs) if isinstance(source, Mapping) else source
        return Dataset(MemorySource(rows, inputs), inputs, max_images)
    raise DataError(
        f"calibration data of type {type(source).__name__} is not understood; give a folder of images",
        code="wrong-type",
        parameter="data",
    )


def _path_source(
    path: Path,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess,
    size: tuple[int, int] | None,
    wanted: int,
) -> Source:
    suffix = path.suffix.lower()
    if path.is_dir():
        passed = dict.fromkeys(OTHER_PICTURES, 0)
        dead: list[str] = []
        pictures = files_under(path, IMAGE_SUFFIXES, passed, dead)
        kinds = ", ".join(sorted(s[1:] for s in IMAGE_SUFFIXES))
        others = [f"{number} {suffix[1:]}" for suffix, number in passed.items() if number]
        unread = Remark.OTHER_FORMATS(formats=others, kinds=kinds) if others else None
        if len(pictures):
            source = ImageSource(pictures, path, inputs, preprocess, size)
            lost = [Remark.DEAD_LINKS(count=len(dead), first=min(dead))] if dead else []
            source.remarks = [*([unread] if unread else []), *lost]
            return source
        arrays = files_under(path, ARRAY_SUFFIXES)
        if len(arrays):
            return SampleFilesSource(arrays, path, inputs)
        broken = (
            f"; {len(dead)} links in it lead nowhere ({min(dead)}, ...): are the images mounted?"
            if dead
            else ""
        )
        raise DataError(
            f"{unread or f'no images ({kinds}) and no npz or npy files in this folder'}{broken}",
            str(path),
            code="no-images",
        )
    if not path.exists():
        raise DataError("no such file or folder", str(path), code="file-missing")
    if suffix in ARRAY_SUFFIXES:
        return StackedSource(path, inputs)
    if suffix in IMAGE_SUFFIXES:
        return ImageSource([path], path.parent, inputs, preprocess, size)
    if suffix in (".txt", ".lst", ".list"):
        return ImageSource(_listed(path, wanted), path.parent, inputs, preprocess, size)
    raise DataError(
        "not a folder, a list of images (.txt), an image, .npz or .npy",
        str(path),
        code="wrong-format",
    )


_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # as Python's `splitlines` has them
_LONGEST = 32_767  # on Windows, and elsewhere less


def _listed(path: Path, wanted: int) -> list[Path]:
    """The paths in a text file; relative ones count from the file's folder, else from the current one.

    Of a long list they are those alone that are used for ``wanted`` samples: a million files take long to look for.
    """
    try:
        content = read_input(path, budgets.LIST_FILE, error=DataError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot be read as a list of images: {error}", str(path), code="wrong-encoding"
        ) from error
    if sum(map(content.count, _LINE_ENDS)) - content.count("\r\n") > budgets.LIST_LINES:
        raise DataError(
            f"has more than {budgets.LIST_LINES:,} lines, the limit",
            str(path),
            code="file-too-large",
        )
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        text = line.strip()
        if "\0" in text:
            raise DataError(f"line {number}: {INVALID_NAME}", str(path), code="invalid-path")
        if len(text) > _LONGEST:
            raise DataError(
                f"line {number}: is no path, which has {_LONGEST:,} characters at most",
                str(path),
                code="invalid-path",
            )
        if text and not text.startswith("#"):
            texts.append(text)
    if not texts:
        raise DataError("lists no images", str(path), code="no-images")
    if len(texts) > budgets.LISTED:
        texts = [texts[i] for i in spread(len(texts), wanted)]
    found = []
    for text in texts:
        beside = path.parent / text
        found.append(beside if os.path.exists(beside) or not os.path.exists(text) else Path(text))
    return found
