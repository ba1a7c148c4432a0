"""Three sets of samples: to make ranges from, to choose on, and to judge on."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calibration.dataset import Dataset, Part, Source, spread
from calibration.images import Preprocess, open_data
from calibration.session import input_specs, metadata_size
from qdqtool.base import budgets
from qdqtool.errors import DataError
from qdqtool.io.files import same_file

if TYPE_CHECKING:
    from qdqtool.model.graph import Model

CHOSEN_ON = 32
JUDGED_ON = 64
_BLOCKS = 4
_FEWEST = 4


@dataclass
class Sets:
    """The samples of a tuning.

    Attributes:
        calibration: To make ranges from.
        measured: All others; numbers count in it.
        chosen_on: Numbers of those that choices are made on.
        judged_on: Numbers of those that the result is judged on, and nothing is chosen by.
        swept_on: Numbers of those to choose on that single sites are measured on; all of them by default.
    """

    calibration: Dataset
    measured: Dataset
    chosen_on: tuple[int, ...]
    judged_on: tuple[int, ...]
    swept_on: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.swept_on = self.swept_on or self.chosen_on

    def swept_on_at_most(self, count: int | None) -> Sets:
        """The same, with so many of the samples to choose on, evenly spread, for the sensitivity of single sites."""
        at = spread(len(self.chosen_on), min(count or len(self.chosen_on), len(self.chosen_on)))
        return replace(self, swept_on=tuple(self.chosen_on[i] for i in at))

    @property
    def fingerprint(self) -> str:
        """Identifies the measured samples, as far as they can be identified."""
        samples = self.measured.fingerprint + self.calibration.fingerprint
        return hashlib.sha256(f"{samples} {self.chosen_on} {self.judged_on}".encode()).hexdigest()[:20]


def open_sets(
    model: Model, data: object, evaluation: object = None, *, preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None, max_images: int = 512, chosen_on: int = CHOSEN_ON, judged_on: int = JUDGED_ON,
) -> Sets:
    """Divides the data.

    With evaluation data the ranges are made from all of the calibration data, choices on one half of the evaluation
    data and the judgement on the other. Without, up to a quarter of the calibration data goes to each of both. Always
    in blocks: pictures that lie side by side (of one video, one document) fall on one side.

    Raises:
        DataError: There is nothing usable, too little, or it can be read once only.
    """
    chosen_on, judged_on = (min(n, budgets.TUNING_SAMPLES) for n in (chosen_on, judged_on))
    whole = _open(model, data, preprocess, size, max_images, "data")
    assert whole.indices is not None
    if evaluation is None:
        if len(whole.indices) < _FEWEST * whole.batch:
            raise DataError(
                f"`data`: {_images(len(whole.indices))} too few to calibrate, choose and judge with; give "
                f"{_FEWEST * whole.batch} or more, or others to judge on with `evaluation`"
            )
        rest, chosen, judged = _three(whole.indices, whole.batch, chosen_on, judged_on)
        calibration, measured = (_part(whole.source, part, whole) for part in (rest, [*chosen, *judged]))
        return Sets(calibration, measured, *_numbers(chosen, judged, whole.batch))
    paths = [d for d in (data, evaluation) if isinstance(d, str | os.PathLike)]
    if len(paths) == 2 and same_file(*paths):
        raise DataError(f"`evaluation` {os.fspath(paths[1])}: is what `data` names, so that nothing would be left to "
                        "judge on; leave it out, and a part is held out")
    other = _open(model, evaluation, preprocess, size, max(max_images, chosen_on + judged_on), "evaluation")
    assert other.indices is not None
    if len(other.indices) < 2 * other.batch:
        raise DataError(f"`evaluation`: {_images(len(other.indices))} too few to choose on one half and judge on the "
                        f"other; give {2 * other.batch} or more")
    chosen, judged = _halves(other.indices, other.batch, chosen_on, judged_on)
    return Sets(whole, _part(other.source, [*chosen, *judged], other), *_numbers(chosen, judged, other.batch))


def _images(count: int) -> str:
    return "1 image is" if count == 1 else f"{count} images are"


def _open(
    model: Model, data: object, preprocess: Preprocess | None, size: tuple[int, int] | None, limit: int, what: str
) -> Dataset:
    if data is None:
        raise DataError(f"`{what}`: no images; give a folder of images")
    if isinstance(data, Iterator):
        raise DataError(f"`{what}`: an iterator can be gone through once only; give a list")
    dataset = open_data(data, input_specs(model), preprocess or Preprocess(), limit, size or metadata_size(model))
    if dataset.indices is None:
        raise DataError(f"`{what}`: its length is not known; give a folder or a list")
    return dataset


def _part(source: Source, indices: Sequence[int], like: Dataset) -> Dataset:
    return Dataset(Part(source, indices), like.inputs, max(1, len(indices)))


def _numbers(chosen: Sequence[int], judged: Sequence[int], batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first = len(chosen) // batch
    return tuple(range(first)), tuple(range(first, first + len(judged) // batch))


def _blocks(items: Sequence[int]) -> list[list[int]]:
    count = min(_BLOCKS, max(1, len(items) // _FEWEST))
    bounds = [len(items) * k // count for k in range(count + 1)]
    return [list(items[a:b]) for a, b in itertools.pairwise(bounds)]


def _whole(items: Sequence[int], batch: int) -> list[int]:
    return list(items[: len(items) // batch * batch])


def _share(wanted: int, blocks: int, k: int) -> int:
    return wanted * (k + 1) // blocks - wanted * k // blocks


def _three(
    items: Sequence[int], batch: int, chosen_on: int, judged_on: int
) -> tuple[list[int], list[int], list[int]]:
    """What is left for ranges, and what is chosen and judged on; of each block the end."""
    quarter = len(items) // _FEWEST // batch * batch
    chosen_on, judged_on = (max(batch, min(n * batch, quarter)) for n in (chosen_on, judged_on))
    blocks = _blocks(items)
    rest: list[int] = []
    chosen: list[int] = []
    judged: list[int] = []
    for k, block in enumerate(blocks):
        c, j = _share(chosen_on, len(blocks), k), _share(judged_on, len(blocks), k)
        keep = max(0, len(block) - c - j)
        rest += block[:keep]
        chosen += block[keep : keep + c]
        judged += block[keep + c : keep + c + j]
    return rest, _whole(chosen, batch), _whole(judged, batch)


def _halves(items: Sequence[int], batch: int, chosen_on: int, judged_on: int) -> tuple[list[int], list[int]]:
    chosen: list[int] = []
    judged: list[int] = []
    blocks = _blocks(items)
    for k, block in enumerate(blocks):
        middle = (len(block) + 1) // 2
        for part, into, wanted in ((block[:middle], chosen, chosen_on), (block[middle:], judged, judged_on)):
            share = max(1, _share(wanted * batch, len(blocks), k))
            into += [part[i] for i in spread(len(part), share)] if part else []
    return _whole(chosen, batch), _whole(judged, batch)
