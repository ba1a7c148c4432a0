"""Samples in memory, and some samples of another source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calibration.dataset import InputSpec, Sample, Source, fit_all
from qdqtool.errors import DataError

_BLOCK = 1 << 16
_BLOCKS = 16


def rows_of(arrays: Mapping[str, Any], inputs: Sequence[InputSpec]) -> list[Sample]:
    """Stacked arrays in memory as samples of one row each (views); as one sample where they are not stacked."""
    named = {name: np.asarray(array) for name, array in arrays.items()}
    by_input = {i.name: named[i.name] for i in inputs if i.name in named}
    lengths = {len(a) for a in by_input.values() if a.ndim}
    stacked = len(by_input) == len(inputs) and all(
        i.shape and by_input[i.name].ndim == len(i.shape) and i.shape[0] in (1, None) for i in inputs
    )
    if not stacked or len(lengths) != 1:
        return [named]
    return [{name: array[k : k + 1] for name, array in by_input.items()} for k in range(lengths.pop())]


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
        return None if self.samples is None else len(self.samples)

    def restart(self) -> None:
        if self.samples is None:
            if self.used and not self.repeatable:
                raise DataError("the calibration data was a one-time iterator and is used up; give a list")
            self.iterator = iter(self.iterable)
            self.used = True

    def load(self, index: int) -> Sample:
        if self.samples is not None:
            sample = self.samples[index]
        else:
            assert self.iterator is not None
            try:
                sample = next(self.iterator)
            except StopIteration:
                raise IndexError(index) from None
        if not isinstance(sample, Mapping):
            raise DataError(f"calibration sample {index} is a {type(sample).__name__}; give a dict of name to array")
        return fit_all(sample, self.inputs, f"calibration sample {index}")

    def portion(self, indices: Sequence[int]) -> MemorySource:
        """They travel with it."""
        if self.samples is None:
            raise DataError("calibration data from an iterator cannot be shared out to a cluster; give a list, or a "
                            "folder that all machines share")
        return MemorySource([self.samples[i] for i in indices], self.inputs)

    def digest(self, index: int) -> bytes:
        if self.samples is None:
            return b""
        sample = self.samples[index]
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(sample.items()) if isinstance(sample, Mapping) else ():
            value = np.ascontiguousarray(array)
            digest.update(f"{name}{value.dtype}{value.shape}".encode())
            flat = value.reshape(-1).view(np.uint8)
            step = max(_BLOCK, (flat.size - _BLOCK) // (_BLOCKS - 1))
            for start in range(0, flat.size, step):  # evenly spread blocks, as for files
                digest.update(flat[start : start + _BLOCK].data)
        return digest.digest()


# Some samples of a larger set ---------------------------------------------------------------------------------------


class Part(Source):
    """Some samples of another source, in the order given."""

    def __init__(self, whole: Source, indices: Sequence[int]) -> None:
        self.whole = whole
        self.indices = list(indices)
        self.repeatable = whole.repeatable
        self.random_access = whole.random_access
        self.single_rows = whole.single_rows

    def count(self) -> int:
        return len(self.indices)

    def load(self, index: int) -> Sample:
        return self.whole.load(self.indices[index])

    def digest(self, index: int) -> bytes:
        return self.whole.identity(self.indices[index])  # a digest may tell of the file with its first sample alone

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

    @property
    def is_images(self) -> bool:
        return self.whole.is_images


def _opened(source: Source) -> Source:
    return source
