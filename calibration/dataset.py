"""Calibration samples, one at a time, with what is worth warning about."""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from calibration.listing import file_digest, read_ahead
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.notes import Note, Remark

FEW_IMAGES = 100  # NVIDIA's and Ultralytics' advice is several hundred; below this, ranges depend on the choice
_FAR_OUTSIDE = 8.0  # normalised inputs (mean and std) stay well within; 0 to 255 data do not


@dataclass
class Looks:
    """What was noticed about the samples loaded; ``low`` and ``high`` are over all of them."""

    total: int = 0
    low: float = np.inf
    high: float = -np.inf
    constant: int = 0
    nonfinite: int = 0
    broken: int = 0

    def merge(self, other: Looks) -> None:
        """Takes in what was noticed about other samples."""
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.constant += other.constant
        self.nonfinite += other.nonfinite
        self.broken += other.broken

    def warnings(self) -> Iterator[Note]:
        total, low, high = self.total, self.low, self.high
        if not total:
            return
        if self.broken:
            yield Remark.BROKEN_IMAGES(broken=self.broken, total=total + self.broken)
        if total < FEW_IMAGES:
            yield Remark.FEW_IMAGES(images=total, enough=FEW_IMAGES)
        if max(-low, high) > _FAR_OUTSIDE:  # minus infinity where nothing was finite
            yield Remark.FAR_INPUTS(low=low, high=high)
        elif low >= 0 and 0 < high < 1.5 / 255:
            yield Remark.SMALL_INPUTS(high=high)
        if self.constant:
            yield Remark.CONSTANT_IMAGES(constant=self.constant, total=total)
        if self.nonfinite:
            yield Remark.NONFINITE_SAMPLES(nonfinite=self.nonfinite, total=total)


Array = npt.NDArray[Any]
Sample = dict[str, Array]
Task = Callable[[], tuple[Sample, int] | None]


@dataclass(frozen=True)
class InputSpec:
    """A model input.

    Attributes:
        name: Its name.
        shape: Dimensions, None for an open one.
        dtype: A numpy type name: ``float32``, ``float16``, ``uint8``, ...
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str = "float32"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def batch(self) -> int:
        """The first dimension, 1 where it is open or there is none."""
        return (self.shape[0] or 1) if self.shape else 1

    def shape_text(self) -> str:
        return "[" + ", ".join("?" if d is None else str(d) for d in self.shape) + "]"

    def fit(self, array: Array, what: str) -> Array:
        """The array as this input takes it, with a batch dimension added where that is all that is missing.

        Raises:
            DataError: Its shape or type does not fit; ``what`` names it.
        """
        if array.ndim == len(self.shape) - 1:
            array = array[None]
        if array.ndim != len(self.shape) or any(
            wanted not in (None, have)
            for wanted, have in zip(self.shape[1:], array.shape[1:], strict=True)
        ):
            have = "[" + ", ".join(map(str, array.shape)) + "]"
            raise DataError(
                f"{what} is {have}, the model's input '{self.name}' takes {self.shape_text()}",
                code="wrong-shape",
                node=self.name,
            )
        if not array.size:
            raise DataError(
                f"{what} holds no values: its shape is {list(array.shape)}",
                code="empty",
                node=self.name,
            )
        wanted = self.numpy_dtype
        if array.dtype != wanted:
            if array.dtype.kind not in "fiub" or (wanted.kind in "iub" and array.dtype.kind == "f"):
                raise DataError(
                    f"{what} holds {array.dtype}, the model's input '{self.name}' takes {wanted}",
                    code="wrong-type",
                    node=self.name,
                )
            with np.errstate(
                over="ignore"
            ):  # infinities are counted and reported with the tensor's name
                array = array.astype(wanted)
        return np.asarray(array, order="C")  # ascontiguousarray would make [1] of a scalar


class Source(ABC):
    """Where samples come from. A sample may have several rows along the batch dimension."""

    #: False where samples can be had once only, in order.
    repeatable = True
    #: False where samples must be read in ascending order.
    random_access = True
    #: Whether a sample is one row of the batch, to be joined with others; else it is all that the model takes at once.
    single_rows = False
    #: Whether a broken sample is skipped (images) or an error (arrays).
    is_images = False
    #: What a user should know of them, in one line each.
    remarks: Sequence[Note] = ()

    @abstractmethod
    def count(self) -> int | None:
        """Samples there are; None where that is not known before the end."""

    @abstractmethod
    def load(self, index: int) -> Sample:
        """Sample ``index``, with a batch dimension.

        Raises:
            DataError: It is broken; for images the message is the reason alone.
            IndexError: There are no more (unknown length only).
        """

    @abstractmethod
    def digest(self, index: int) -> bytes:
        """Bytes that change when the sample changes; empty where that is not known."""

    def name(self, index: int) -> str:
        return f"sample {index}"

    def settings(self) -> str:
        """What else the samples depend on."""
        return ""

    def identity(self, index: int) -> bytes:
        """As :meth:`digest`, of all that sample ``index`` is read from: another machine has to see the same."""
        return self.digest(index)

    def portion(self, indices: Sequence[int]) -> Source:
        """These samples alone, in this order, as another process can open them: what Dask can send.

        Raises:
            DataError: They are in this process only.
        """
        raise DataError(
            "this calibration data cannot be read by the workers of a cluster; give a folder, a list file, "
            "npz or npy on a path that all machines share",
            code="not-shareable",
            parameter="data",
        )

    def restart(self) -> None:  # noqa: B027 - most sources have nothing to do
        """Called before each pass."""


def fit_all(arrays: Mapping[str, Any], inputs: Sequence[InputSpec], what: str) -> Sample:
    """One sample for all inputs.

    Raises:
        DataError: An input has no array, or one that does not fit.
    """
    missing = [i.name for i in inputs if i.name not in arrays]
    if missing and len(inputs) == 1 and len(arrays) == 1:
        arrays, missing = {inputs[0].name: next(iter(arrays.values()))}, []
    if missing:
        found = ", ".join(f"'{n}'" for n in arrays) or "nothing"
        raise DataError(
            f"{what} has no array for the model's input '{missing[0]}'; it has {found}",
            code="missing-input",
            node=missing[0],
        )
    return {i.name: i.fit(np.asarray(arrays[i.name]), f"{what}: array '{i.name}'") for i in inputs}


class FilesSource(Source):
    """One file for each sample."""

    paths: Sequence[Path]
    root: Path

    def count(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        path = self.paths[index]
        return printable(
            path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        )

    def digest(self, index: int) -> bytes:
        return self.name(index).encode() + file_digest(self.paths[index])

    def portion(self, indices: Sequence[int]) -> Self:
        part = copy.copy(self)
        part.root = Path(os.path.abspath(self.root))
        part.paths = [Path(os.path.abspath(self.paths[i])) for i in indices]
        return part


def printable(path: str) -> str:
    """A file name as UTF-8 can hold it: bytes that are not UTF-8 are written ``\\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


class Part(Source):
    """Some samples of another source, in the order given."""

    def __init__(self, whole: Source, indices: Sequence[int]) -> None:
        self.whole = whole
        self.indices = list(indices)
        self.repeatable = whole.repeatable
        self.random_access = whole.random_access
        self.single_rows = whole.single_rows
        self.is_images = whole.is_images

    def count(self) -> int:
        return len(self.indices)

    def load(self, index: int) -> Sample:
        return self.whole.load(self.indices[index])

    def digest(self, index: int) -> bytes:
        return self.whole.identity(
            self.indices[index]
        )  # a digest may be of the file with its first sample alone

    def portion(self, indices: Sequence[int]) -> Source:
        return self.whole.portion([self.indices[i] for i in indices])

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files itself; samples in memory go along."""
        try:
            return _opened, (self.whole.portion(self.indices),)
        except DataError:
            return Part, (self.whole, self.indices)

    def name(self, index: int) -> str:
        return self.whole.name(self.indices[index])

    def settings(self) -> str:
        return self.whole.settings()


def _opened(source: Source) -> Source:
    return source


def spread(total: int, wanted: int) -> Sequence[int]:
    """At most ``wanted`` of ``total`` indices, evenly spread, ascending, the first and last included."""
    if total <= wanted:
        return range(total)
    gaps = max(wanted - 1, 1)
    return array(
        "q", ((i * (total - 1) + gaps // 2) // gaps for i in range(wanted))
    )  # millions are eight bytes each


class Dataset:
    """Samples of the model's batch size, as often as wanted (a one-time iterator: once).

    Where the model has a fixed batch of n, n images make one sample; the last one is filled up by repeating images.

    Attributes:
        inputs: The model's inputs.
        skipped: Broken images met so far, and why.
    """

    _lock = threading.Lock()  # of all datasets: it is held for a few additions

    def __init__(self, source: Source, inputs: Sequence[InputSpec], max_images: int) -> None:
        self.source = source
        self.inputs = list(inputs)
        self.skipped: list[tuple[str, str]] = []
        self.max_images = max_images
        self.batch = max(i.batch for i in self.inputs) if source.single_rows else 1
        if self.batch > limits.SAMPLE_ROWS:
            raise DataError(
                f"the model has a fixed batch of {self.batch}; the most is {limits.SAMPLE_ROWS}: export "
                "it with a batch of 1, or a dynamic one",
                code="batch-too-large",
            )
        known = source.count()
        self.indices = None if known is None else spread(known, max_images)
        self._exhausted = False
        self._fingerprint: str | None = None
        self._digests: list[bytes] | None = None
        self._seen: set[int] = set()
        self.looks = Looks()

    def __len__(self) -> int:
        """Samples of one pass, broken ones included.

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
        """The work of one pass: a sample's number and a function that loads it, which any thread may call.

        The function gives the sample and the number of images in it, or None when all of them are broken. Where
        samples must be read in order, they are already read when this yields.

        Args:
            done: Numbers to leave out.
        """
        self.source.restart()
        self._exhausted = False
        for number, group in enumerate(self._groups()):
            if number not in done:
                if self.source.random_access:
                    yield number, lambda group=group: self._load(group)  # type: ignore[misc]
                else:
                    loaded = self._load(group)
                    yield number, lambda loaded=loaded: loaded  # type: ignore[misc]

    def group(self, number: int) -> list[int]:
        """The source's indices in sample ``number``; only where the length is known."""
        assert self.indices is not None
        return list(self.indices[number * self.batch : (number + 1) * self.batch])

    def take(self, looks: Looks, skipped: Iterable[tuple[str, str]]) -> None:
        """Notes what was noticed about samples that were loaded elsewhere."""
        with self._lock:
            self.looks.merge(looks)
            self.skipped.extend(skipped)

    def load(self, number: int) -> Sample | None:
        """Sample ``number`` of a source that has a length; None when all of its images are broken."""
        loaded = self._load(self.group(number))
        return None if loaded is None else loaded[0]

    def name(self, number: int) -> str:
        """What the (first) image of a sample is called."""
        return self.source.name(self.group(number)[0])

    def _groups(self) -> Iterator[list[int]]:
        if self.indices is not None:
            yield from map(self.group, range(len(self)))
            return
        taken = 0
        while taken < self.max_images and not self._exhausted:
            count = min(self.batch, self.max_images - taken)
            yield list(range(taken, taken + count))
            taken += count

    def _load(self, group: list[int]) -> tuple[Sample, int] | None:
        parts: list[Sample] = []
        for index in group:
            try:
                sample = self.source.load(index)
            except IndexError:
                self._exhausted = True
                break
            except DataError as error:
                if not self.source.is_images:
                    raise
                with self._lock:
                    if index not in self._seen:
                        self._seen.add(index)
                        self.looks.broken += 1
                        self.skipped.append((self.source.name(index), str(error)))
                continue
            self._look(index, sample)
            parts.append(sample)
        if not parts:
            return None
        return self._joined(parts), len(parts)

    def _joined(self, parts: list[Sample]) -> Sample:
        """The parts as one sample; a fixed batch that they do not fill is filled up with the same rows again."""
        result: Sample = {}
        for spec in self.inputs:
            rows = parts[0][spec.name]
            if len(parts) > 1:
                rows = np.concatenate([p[spec.name] for p in parts])
            wanted = spec.shape[0] if spec.shape else None
            if wanted is not None and len(rows) != wanted:
                if len(rows) > wanted:
                    raise DataError(
                        f"a calibration sample has {len(rows)} rows, input '{spec.name}' takes {spec.shape_text()}",
                        code="wrong-shape",
                        node=spec.name,
                    )
                rows = rows[np.arange(wanted) % len(rows)]
            result[spec.name] = rows
        return result

    def _look(self, index: int, sample: Sample) -> None:
        """Notes the range of the picture-like inputs of a sample, for the warnings."""
        low, high, constant, nonfinite = np.inf, -np.inf, False, False
        for spec in self.inputs:
            if len(spec.shape) == 4 and spec.numpy_dtype.kind == "f":
                array = sample[spec.name]
                least, most = float(array.min()), float(array.max())
                if not (np.isfinite(least) and np.isfinite(most)):
                    nonfinite = True
                    finite = array[np.isfinite(array)]
                    least, most = (
                        (float(finite.min()), float(finite.max()))
                        if finite.size
                        else (np.inf, -np.inf)
                    )
                elif least == most:
                    constant = True
                low, high = min(low, least), max(high, most)
        with self._lock:
            if index not in self._seen:
                self._seen.add(index)
                self.looks.merge(Looks(1, low, high, constant, nonfinite))

    @property
    def fingerprint(self) -> str:
        """Identifies data and preprocessing, in hexadecimal; empty where the data has no identity (an iterator)."""
        if self._fingerprint is None:
            for _ in self.digests():
                pass
        return self._fingerprint or ""

    def digests(self) -> Iterator[bytes]:
        """The digest of each image or row that is used, in order; read once.

        When all were taken, the :attr:`fingerprint` is known.
        """
        if self._digests is not None:
            yield from self._digests
            return
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"1 {self.source.settings()} batch {self.batch} {self.inputs}".encode())
        known = bool(self.indices)
        kept = []
        for part in read_ahead(self.source.digest, self.indices or ()):
            digest.update(len(part).to_bytes(4, "big") + part)
            kept.append(part)
            known = known and bool(part)
            yield part
        self._fingerprint = digest.hexdigest() if known else ""
        self._digests = kept

    @property
    def warnings(self) -> list[Note]:
        """What looks wrong with the samples loaded so far, in one line each, with numbers."""
        with self._lock:
            return [*self.source.remarks, *self.looks.warnings()]

    def forget(self) -> None:
        """Starts counting skipped images and warnings again, for data that is used once more."""
        with self._lock:
            self._seen.clear()
            self.skipped.clear()
            self.looks = Looks()
