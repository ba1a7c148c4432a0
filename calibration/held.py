"""Samples held against what another process saw of them, each as it is read."""

from __future__ import annotations

from collections.abc import Sequence

from calibration.dataset import Dataset, Sample, Source
from calibration.digests import UNREADABLE
from calibration.parcels import Parcel
from qdqtool.errors import ClusterError


class Held(Source):
    """A source whose samples have to be those that the client of a cluster saw."""

    def __init__(self, source: Source, identities: Sequence[bytes]) -> None:
        """Holds them.

        Args:
            source: What this process reads.
            identities: :meth:`~calibration.dataset.Source.identity` of each sample, as the client sees it.
        """
        self.source = source
        self.identities = identities

    @property
    def single_rows(self) -> bool:  # type: ignore[override]
        return self.source.single_rows

    @property
    def is_images(self) -> bool:
        return self.source.is_images

    def count(self) -> int:
        return len(self.identities)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def settings(self) -> str:
        return self.source.settings()

    def digest(self, index: int) -> bytes:
        return self.source.digest(index)

    def load(self, index: int) -> Sample:
        found = self.source.identity(index)
        if found != self.identities[index]:
            fault = "cannot be read" if found.endswith(UNREADABLE) else "is another file"
            raise ClusterError(f"{self.source.name(index)} {fault} there; let all machines see the same files")
        return self.source.load(index)


def shared(dataset: Dataset) -> Dataset:
    """The same samples under the same numbers, as other processes can read them: what Dask can send.

    Raises:
        DataError: They are in this process only.
    """
    indices = list(dataset.indices or ())
    source = dataset.source.portion(indices)
    held = Held(source, Parcel(dataset.source.identity(i) for i in indices))
    return Dataset(held, dataset.inputs, len(indices))
