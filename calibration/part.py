"""Some samples of a larger set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calibration.dataset import Sample, Source
from qdqtool.errors import DataError


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
