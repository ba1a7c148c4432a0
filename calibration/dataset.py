"""Calibration samples, and warnings about their values."""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from calibration.listing import file_digest
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count, format_list

FEW_IMAGES = 100  # fewer images cause a warning; NVIDIA and Ultralytics advise several hundred
_FAR_INPUT = 8.0  # larger magnitudes cause a warning: pixels were not normalized
_SMALL_INPUT = 1.5 / 255  # smaller maxima cause a warning: pixels were divided by 255 twice
# Preprocessing names whose input range is compared with YOLO's; None stands for arrays.
_EVALUATION_FOLDERS = frozenset(("eval", "evaluation", "test", "val", "valid", "validation"))
_YOLO_RANGES = (None, "yolo", "custom")

Array = npt.NDArray[Any]
Sample = dict[str, Array]
Task = Callable[[], tuple[Sample, int] | None]


@dataclass
class DataQuality:
    """Counts and value range of the samples loaded so far, for warnings.

    Attributes:
        total: Number of samples.
        low: Smallest finite value of image inputs.
        high: Largest finite value of image inputs.
        constant: Number of samples with an image whose values are all equal.
        nonfinite: Number of samples with NaN or infinities.
        broken: Number of images that could not be read.
    """

    total: int = 0
    low: float = np.inf
    high: float = -np.inf
    constant: int = 0
    nonfinite: int = 0
    broken: int = 0

    def merge(self, other: DataQuality) -> None:
        """Add the counts and the range of other samples."""
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.constant += other.constant
        self.nonfinite += other.nonfinite
        self.broken += other.broken

    def warnings(self) -> Iterator[Note]:
        """Yield warnings about too few, broken, constant, nonfinite or wrongly scaled images."""
        total, low, high = self.total, self.low, self.high
        if not total:
            return
        if self.broken:
            yield Note(
                f"skipped {self.broken} of {total + self.broken} images, because of reading errors",
                code="broken-images",
                broken=self.broken,
                total=total + self.broken,
            )
        if total < FEW_IMAGES:
            yield Note(
                f"few calibration images ({total}); use {FEW_IMAGES} or more",
                code="few-images",
                images=total,
                enough=FEW_IMAGES,
            )
        # If no value was finite, `high` is minus infinity, and neither range warning applies.
        if max(-low, high) > _FAR_INPUT:
            yield Note(
                f"inputs reach from {low:g} to {high:g}, but YOLO models take 0 to 1; check that "
                "the pixels are divided by 255 (scale 1/255)",
                code="far-inputs",
                low=low,
                high=high,
            )
        elif low >= 0 and 0 < high < _SMALL_INPUT:
            yield Note(
                f"inputs never exceed {high:g}, but YOLO models take 0 to 1; check whether the "
                "pixels are divided by 255 twice",
                code="small-inputs",
                high=high,
            )
        if self.constant:
            yield Note(
                f"every value is the same in {self.constant} of {total} images; check the images",
                code="constant-images",
                constant=self.constant,
                total=total,
            )
        if self.nonfinite:
            yield Note(
                f"NaN or infinite values in {self.nonfinite} of {total} samples; check the data",
                code="nonfinite-samples",
                nonfinite=self.nonfinite,
                total=total,
            )


@dataclass(frozen=True)
class InputSpec:
    """A model input.

    Attributes:
        name: Name of the input.
        shape: Dimensions; None for a dynamic dimension.
        dtype: Name of a numpy type: ``float32``, ``float16``, ``uint8``, ...
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str = "float32"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Type of the input as a numpy type."""
        return np.dtype(self.dtype)

    @property
    def batch(self) -> int:
        """Batch size; 1 if the first dimension is dynamic or the input is a scalar."""
        return (self.shape[0] or 1) if self.shape else 1

    def shape_text(self) -> str:
        """Return the shape for a message; dynamic dimensions are question marks."""
        return "[" + ", ".join("?" if d is None else str(d) for d in self.shape) + "]"

    def fit(self, array: Array, what: str, stack: Sequence[int] | None = None) -> Array:
        """Convert an array to the type of this input, and add a missing batch dimension.

        Args:
            array: Array of the user.
            what: Name of the array for messages.
            stack: If the array is a row of a stacked array, the shape of the stacked array.

        Raises:
            DataError: The array's shape or type does not fit, or the array is empty.
        """
        shape = list(array.shape if stack is None else stack)
        if array.ndim == len(self.shape) - 1:
            array = array[None]
        takes = f"the model's input '{self.name}' takes"
        sizes = zip(self.shape[1:], array.shape[1:], strict=False)
        if array.ndim != len(self.shape) or any(size not in (None, have) for size, have in sizes):
            form = "an array of this shape" if stack is None else "a row of this shape per sample"
            raise DataError(
                f"{what} has the shape {shape}, but {takes} {self.shape_text()}; give {form}",
                code="wrong-shape",
                node=self.name,
            )
        if not array.size:
            raise DataError(
                f"{what} has no values: its shape is {list(array.shape)}; give at least one row",
                code="empty",
                node=self.name,
            )
        dtype = self.numpy_dtype
        if array.dtype != dtype:
            rounds = dtype.kind in "iub" and array.dtype.kind == "f"
            if array.dtype.kind not in "fiub" or rounds:
                raise DataError(
                    f"{what} has the type {array.dtype}, but {takes} {dtype}; convert the array",
                    code="wrong-type",
                    node=self.name,
                )
            # Values too large for the type become infinities. The statistics count and report
            # them, so numpy's warning is not needed.
            with np.errstate(over="ignore"):
                array = array.astype(dtype)
        return np.asarray(array, order="C")  # ascontiguousarray would give a scalar the shape [1]


class EndOfSamples(Exception):
    """An iterable without a length has no more samples."""


class SampleSource(ABC):
    """Source of calibration samples, such as a folder of images or an npz file.

    A sample holds an array for each input. The arrays may have several rows along the batch
    dimension.
    """

    #: Whether samples can be read in any order.
    random_access = True
    #: Whether a sample is one row of a batch; otherwise a sample is a whole batch.
    single_rows = False
    #: Whether the samples are images. A broken image is skipped; a broken array is an error.
    is_images = False
    #: Notes about the source for the user.
    notes: Sequence[Note] = ()

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """Conversion of images to inputs, as JSON; None for arrays."""
        return None

    @abstractmethod
    def count(self) -> int | None:
        """Return the number of samples; None for an iterable without a length."""

    @abstractmethod
    def load(self, index: int) -> Sample:
        """Return a sample with a batch dimension.

        Raises:
            DataError: The sample is broken. For images, the message does not name the file.
            EndOfSamples: An iterable without a length has no more samples.
        """

    @abstractmethod
    def digest(self, index: int) -> bytes:
        """Return bytes that change if the sample changes; empty for an iterator."""

    def name(self, index: int) -> str:
        """Return the name of a sample for messages."""
        return f"sample {index}"

    def settings(self) -> str:
        """Return settings that change the samples, such as the preprocessing, as text."""
        return ""

    def identity(self, index: int) -> bytes:
        """Return a digest of all files that a sample is read from.

        All machines of a cluster must compute the same digest.
        """
        return self.digest(index)

    def select_samples(self, indices: Sequence[int]) -> SampleSource:
        """Return a source of the samples at `indices`, in this order, for another process.

        Raises:
            DataError: The samples exist in this process only.
        """
        raise DataError(
            "this calibration data cannot be read by the workers of a cluster; give a folder, a "
            "list file, npz or npy on a path that all machines share",
            code="not-shareable",
            parameter="data",
        )

    def restart(self) -> None:  # noqa: B027 - most sources have nothing to do
        """Prepare for another pass."""


def fit_inputs(arrays: Mapping[str, Any], inputs: Sequence[InputSpec], label: str) -> Sample:
    """Select the array of each model input, and convert it to the input's type and rank.

    Args:
        arrays: Arrays by input name. If there is one array and one input, any name is accepted.
        inputs: Inputs of the model.
        label: Name of the sample for messages.

    Raises:
        DataError: An input has no array, or its array does not fit.
    """
    missing = [spec.name for spec in inputs if spec.name not in arrays]
    if missing and len(inputs) == 1 and len(arrays) == 1:
        arrays, missing = {inputs[0].name: next(iter(arrays.values()))}, []
    if missing:
        names = ", ".join(f"'{name}'" for name in arrays) or "none"
        raise DataError(
            f"{label} has no array for the model's input '{missing[0]}' (arrays: {names}); name "
            "each array like its input",
            code="missing-input",
            node=missing[0],
        )
    return {
        spec.name: spec.fit(np.asarray(arrays[spec.name]), f"{label}: array '{spec.name}'")
        for spec in inputs
    }


class FilesSource(SampleSource):
    """Source with one file for each sample.

    Attributes:
        paths: File of each sample.
        root: Folder to which names in messages are relative.
        listed_folder: Folder that the user gave, read with its subfolders; None if the user gave
            the files.
    """

    paths: Sequence[Path]
    root: Path
    listed_folder: Path | None = None

    def count(self) -> int:
        """Return the number of samples."""
        return len(self.paths)

    def name(self, index: int) -> str:
        """Return the name of a sample for messages."""
        path = self.paths[index]
        if path.is_relative_to(self.root):
            return escape_path(path.relative_to(self.root).as_posix())
        return escape_path(str(path))

    def digest(self, index: int) -> bytes:
        """Return bytes that change if the sample changes."""
        return self.name(index).encode() + file_digest(self.paths[index])

    def select_samples(self, indices: Sequence[int]) -> Self:
        """Return a source of the samples at `indices`, with absolute paths."""
        part = copy.copy(self)
        part.root = Path(os.path.abspath(self.root))
        part.paths = [Path(os.path.abspath(self.paths[i])) for i in indices]
        return part


def escape_path(path: str) -> str:
    r"""Return a file name as valid UTF-8, with other bytes as escapes such as ``\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


class SubsetSource(SampleSource):
    """Some samples of another source, in a given order."""

    def __init__(self, whole: SampleSource, indices: Sequence[int]) -> None:
        self.whole = whole
        self.indices = list(indices)
        self.random_access = whole.random_access
        self.single_rows = whole.single_rows
        self.is_images = whole.is_images

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """Conversion of images to inputs, as JSON; None for arrays."""
        return self.whole.preprocessing

    def count(self) -> int:
        """Return the number of samples."""
        return len(self.indices)

    def load(self, index: int) -> Sample:
        """Return a sample with a batch dimension."""
        return self.whole.load(self.indices[index])

    def digest(self, index: int) -> bytes:
        """Return bytes that change if the sample changes."""
        # For an npz or npy file, only the `digest` of row 0 contains a hash of the file, and the
        # subset may lack row 0. The `identity` contains the hash for every row.
        return self.whole.identity(self.indices[index])

    def select_samples(self, indices: Sequence[int]) -> SampleSource:
        """Return a source of the samples at `indices` for another process."""
        return self.whole.select_samples([self.indices[i] for i in indices])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a source of only these samples, or the whole source if it cannot be split."""
        try:
            return _unpickle_source, (self.whole.select_samples(self.indices),)
        except DataError:
            return SubsetSource, (self.whole, self.indices)

    def name(self, index: int) -> str:
        """Return the name of a sample for messages."""
        return self.whole.name(self.indices[index])

    def settings(self) -> str:
        """Return settings that change the samples, such as the preprocessing, as text."""
        return self.whole.settings()


def _unpickle_source(source: SampleSource) -> SampleSource:
    return source


def spread_indices(total: int, count: int) -> Sequence[int]:
    """Return at most `count` indices from 0 to `total` - 1, ascending and evenly spread.

    The first and the last index are included if `count` is at least 2.
    """
    if total <= count:
        return range(total)
    gaps = max(count - 1, 1)
    # An array, because a tuple of millions of integers would take much memory.
    return array("q", ((i * (total - 1) + gaps // 2) // gaps for i in range(count)))


class Dataset:
    """Calibration samples, each of the model's batch size.

    If the model has a fixed batch of n, each sample consists of n images; the last sample repeats
    images to fill the batch. All data except a one-time iterator can be read several times.

    Attributes:
        inputs: Inputs of the model.
        skipped: Name and reason of each broken image so far.
    """

    _lock = threading.Lock()  # held only briefly, so that all datasets can share it

    def __init__(self, source: SampleSource, inputs: Sequence[InputSpec], max_images: int) -> None:
        self.source = source
        self.inputs = list(inputs)
        self.skipped: list[tuple[str, str]] = []
        self.max_images = max_images
        self.batch = max(spec.batch for spec in self.inputs) if source.single_rows else 1
        if self.batch > limits.SAMPLE_ROWS:
            raise DataError(
                f"the model has a fixed batch of {self.batch}; at most {limits.SAMPLE_ROWS} is "
                "supported. Export the model with a batch of 1 or a dynamic batch",
                code="batch-too-large",
            )
        total = source.count()
        self.indices = None if total is None else spread_indices(total, max_images)
        self._exhausted = False
        self._fingerprint: str | None = None
        self._digests: list[bytes] | None = None
        self._seen: set[int] = set()
        self.quality = DataQuality()

    def __len__(self) -> int:
        """Return the number of samples of one pass, including broken samples.

        Raises:
            TypeError: The source is an iterable without a length.
        """
        if self.indices is None:
            raise TypeError("this calibration data has no length")
        return -(-len(self.indices) // self.batch)

    def __iter__(self) -> Iterator[Sample]:
        for _, load in self.tasks():
            sample = load()
            if sample is not None:
                yield sample[0]

    def tasks(self, done: Set[int] = frozenset()) -> Iterator[tuple[int, Task]]:
        """Yield each sample's number and a function that loads the sample in any thread.

        The function returns the sample and its number of images, or None if all its images are
        broken. If the source can only be read in order, the sample is read before the function is
        yielded.

        Args:
            done: Numbers of the samples to skip.
        """
        self.source.restart()
        self._exhausted = False
        for number, group in enumerate(self._groups()):
            if number in done:
                continue
            if self.source.random_access:
                yield number, lambda group=group: self._load_group(group)  # type: ignore[misc]
            else:
                loaded = self._load_group(group)
                yield number, lambda loaded=loaded: loaded  # type: ignore[misc]

    def group(self, number: int) -> list[int]:
        """Return the indices of a sample's rows in the source, which must have a length."""
        assert self.indices is not None
        return list(self.indices[number * self.batch : (number + 1) * self.batch])

    def take(self, looks: DataQuality, skipped: Iterable[tuple[str, str]]) -> None:
        """Add the quality and the skipped images of samples that another process loaded.

        Args:
            looks: Quality of those samples.
            skipped: Name of each broken image and the reason.
        """
        with self._lock:
            self.quality.merge(looks)
            self.skipped.extend(skipped)

    def load(self, number: int) -> Sample | None:
        """Return a sample of a source that has a length; None if all of its images are broken."""
        loaded = self._load_group(self.group(number))
        return None if loaded is None else loaded[0]

    def name(self, number: int) -> str:
        """Return the name of a sample's first image."""
        return self.source.name(self.group(number)[0])

    def _groups(self) -> Iterator[list[int]]:
        if self.indices is not None:
            yield from map(self.group, range(len(self)))
            return
        start = 0
        while start < self.max_images and not self._exhausted:
            end = min(start + self.batch, self.max_images)
            yield list(range(start, end))
            start = end

    def _load_group(self, group: list[int]) -> tuple[Sample, int] | None:
        parts: list[Sample] = []
        for index in group:
            try:
                sample = self.source.load(index)
            except EndOfSamples:
                self._exhausted = True
                break
            except DataError as error:
                if not self.source.is_images:
                    raise
                with self._lock:
                    if index not in self._seen:
                        self._seen.add(index)
                        self.quality.broken += 1
                        self.skipped.append((self.source.name(index), str(error)))
                continue
            self._record_quality(index, sample)
            parts.append(sample)
        return (self._join_rows(parts), len(parts)) if parts else None

    def _join_rows(self, parts: list[Sample]) -> Sample:
        """Concatenate the rows of several samples, and repeat rows to fill a fixed batch."""
        result: Sample = {}
        for spec in self.inputs:
            rows = parts[0][spec.name]
            if len(parts) > 1:
                rows = np.concatenate([part[spec.name] for part in parts])
            batch = spec.shape[0] if spec.shape else None
            if batch is not None and len(rows) > batch:
                raise DataError(
                    f"a calibration sample has {len(rows)} rows, but input '{spec.name}' takes "
                    f"{spec.shape_text()}; give at most {batch} in each sample",
                    code="wrong-shape",
                    node=spec.name,
                )
            if batch is not None and len(rows) < batch:
                rows = rows[np.arange(batch) % len(rows)]
            result[spec.name] = rows
        return result

    def _record_quality(self, index: int, sample: Sample) -> None:
        """Add a sample to `quality`, unless a sample of the same index was added before.

        Only 4-D float inputs count for the value range.
        """
        quality = DataQuality(total=1)
        for spec in self.inputs:
            if len(spec.shape) == 4 and spec.numpy_dtype.kind == "f":
                array = sample[spec.name]
                low, high = float(array.min()), float(array.max())
                if not (np.isfinite(low) and np.isfinite(high)):
                    quality.nonfinite = 1
                    finite = array[np.isfinite(array)]
                    low = float(finite.min(initial=np.inf))
                    high = float(finite.max(initial=-np.inf))
                elif low == high:
                    quality.constant = 1
                quality.low, quality.high = min(quality.low, low), max(quality.high, high)
        with self._lock:
            if index not in self._seen:
                self._seen.add(index)
                self.quality.merge(quality)

    @property
    def fingerprint(self) -> str:
        """Hash of data and preprocessing, in hexadecimal; empty if unknown (an iterator)."""
        if self._fingerprint is None:
            for _ in self.digests():
                pass
        return self._fingerprint or ""

    def digests(self) -> Iterator[bytes]:
        """Yield the digest of each image or row in use, in order.

        The first complete iteration reads the files and sets :attr:`fingerprint`. Later iterations
        yield the stored digests.
        """
        if self._digests is not None:
            yield from self._digests
            return
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"1 {self.source.settings()} batch {self.batch} {self.inputs}".encode())
        parts = []
        for part in map(self.source.digest, self.indices or ()):
            digest.update(len(part).to_bytes(4, "big") + part)
            parts.append(part)
            yield part
        self._fingerprint = digest.hexdigest() if parts and all(parts) else ""
        self._digests = parts

    @property
    def warnings(self) -> list[Note]:
        """Warnings about the source and the samples loaded so far."""
        with self._lock:
            warnings = [*self.source.notes, *self.quality.warnings()]
        if (self.source.preprocessing or {}).get("name") in _YOLO_RANGES:
            return warnings
        return [w for w in warnings if getattr(w, "code", "") not in ("far-inputs", "small-inputs")]

    @property
    def folder_notes(self) -> list[Note]:
        """A note if the files in use are in several subfolders of the folder that the user gave.

        A folder may contain other images than the user expects, such as those of a test set. The
        value ``evaluation`` of the note is the first folder whose name is that of such a set, or
        empty.
        """
        source = self.source
        if not isinstance(source, FilesSource) or source.listed_folder is None:
            return []
        files = [source.paths[index] for index in self.indices or ()]
        folders = Counter(file.parent.relative_to(source.listed_folder) for file in files)
        if len(folders) < 2:
            return []
        count = format_count(len(files), "image" if source.is_images else "file")
        shown = [f"{escape_path(str(f))} ({n})" for f, n in folders.items()]
        text = f"{count} from {len(folders)} folders in {escape_path(str(source.listed_folder))}"
        text += f": {format_list(shown)}"
        evaluation = _find_evaluation_folder(folders)
        if evaluation:
            text += f". Leave out {escape_path(evaluation)} if you evaluate with its images"
        values = {"files": len(files), "folders": len(folders), "evaluation": evaluation}
        return [Note(text, code="subfolders-read", **values)]

    def forget(self) -> None:
        """Reset skipped images and warnings before another pass over the data."""
        with self._lock:
            self._seen.clear()
            self.skipped.clear()
            self.quality = DataQuality()


def _find_evaluation_folder(folders: Collection[Path]) -> str:
    """Return the first folder that is named as a set for evaluation; empty if none or all are."""
    evaluated = [f for f in folders if _EVALUATION_FOLDERS.intersection(f.parts)]
    return str(evaluated[0]) if 0 < len(evaluated) < len(folders) else ""
