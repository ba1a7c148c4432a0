"""Division of images into sets for calibration, search, and final evaluation."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calibration.arrays import CalibrationSource, open_data
from calibration.dataset import Dataset, SubsetSource, spread_indices
from calibration.options import YOLO_PREPROCESS
from calibration.session import choose_size, input_specs
from qdqtool.errors import DataError
from qdqtool.insertion.options import ImageOptions, RangeOptions
from qdqtool.ir.graph import Model
from qdqtool.tuning.options import SWEPT_ON, SearchBudget
from qdqtool.util import limits
from qdqtool.util.files import is_same_file

_BLOCKS = 4  # number of blocks of neighboring images into which large data is divided
# Minimum number of images in a block, and minimum number of batches in data that is divided.
_FEWEST = 4


@dataclass
class ImageSets:
    """Samples of a tuning, divided by purpose.

    Attributes:
        calibration: Samples for the ranges during the search.
        complete: Samples for the ranges of the result: all calibration data.
        measured: Samples of the search and held-out samples.
        chosen_on: Positions in `measured` of the samples on which the search compares placements.
        judged_on: Positions in `measured` of the held-out samples on which results are evaluated.
        swept_on: Positions in `measured` of the samples for the sensitivity of single sites, a
            subset of `chosen_on`.
    """

    calibration: Dataset
    complete: Dataset
    measured: Dataset
    chosen_on: tuple[int, ...]
    judged_on: tuple[int, ...]
    swept_on: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of the sets and of the samples, as far as the samples can be identified."""
        samples = self.measured.fingerprint + self.calibration.fingerprint
        identity = f"{samples} {self.chosen_on} {self.judged_on}"
        return hashlib.sha256(identity.encode()).hexdigest()[:20]


def open_sets(
    model: Model,
    data: CalibrationSource,
    evaluation: CalibrationSource | None = None,
    images: ImageOptions | None = None,
    *,
    max_images: int = RangeOptions.max_images,
    chosen_on: int = SearchBudget.chosen_on,
    judged_on: int = SearchBudget.judged_on,
    swept_on: int | None = None,
) -> ImageSets:
    """Divide data into samples for ranges, for the search, and for the final evaluation.

    With evaluation data, ranges use all calibration data, about half of the evaluation data is for
    the search, and the rest for the final evaluation. Without evaluation data, the search and the
    final evaluation each use up to a quarter of the calibration data. Sets consist of parts of
    blocks of neighboring images, so that similar images (of a video, a document) are in the same
    set. Of a block with an odd number of images, the search gets one image more.

    Args:
        model: Float model.
        data: Calibration data of the user.
        evaluation: Evaluation data of the user; None if there is none.
        images: Preprocessing and size of images.
        max_images: Maximum number of images for ranges.
        chosen_on: Maximum number of samples for the search.
        judged_on: Maximum number of samples for the final evaluation.
        swept_on: Maximum number of samples for the sensitivity of single sites; None for
            `SWEPT_ON`.

    Raises:
        DataError: The data has too few usable images, can be read only once, or is given as
            evaluation data too.
    """
    chosen_on, judged_on = (min(n, limits.TUNING_SAMPLES) for n in (chosen_on, judged_on))
    images = images or ImageOptions()
    dataset, indices = _open_dataset(model, data, images, max_images, "data")
    if evaluation is None:
        least = _FEWEST * dataset.batch
        if len(indices) < least:
            raise DataError(
                f"`data`: {_describe_image_count(indices)} too few for calibration, search and "
                f"final evaluation; give {least} images or more, or separate images for the search "
                "and the final evaluation with `evaluation`",
                code="too-few-images",
                parameter="data",
            )
        split = _split_in_three(indices, dataset.batch, chosen_on, judged_on)
        calibration = _select_images(dataset, split.calibration)
        return _make_sets(dataset, calibration, dataset, split.search, split.evaluation, swept_on)
    _forbid_same_path(data, evaluation)
    limit = max(max_images, chosen_on + judged_on)
    other, indices = _open_dataset(model, evaluation, images, limit, "evaluation")
    if len(indices) < 2 * other.batch:
        raise DataError(
            f"`evaluation`: {_describe_image_count(indices)} too few: one half is for the search, "
            f"the other half for the final evaluation; give {2 * other.batch} images or more",
            code="too-few-images",
            parameter="evaluation",
        )
    to_choose, to_judge = _split_in_halves(indices, other.batch, chosen_on, judged_on)
    return _make_sets(other, dataset, dataset, to_choose, to_judge, swept_on)


def _describe_image_count(indices: Sequence[int]) -> str:
    return "1 image is" if len(indices) == 1 else f"{len(indices)} images are"


def _forbid_same_path(data: CalibrationSource, evaluation: CalibrationSource) -> None:
    paths = [d for d in (data, evaluation) if isinstance(d, str | os.PathLike)]
    if len(paths) == 2 and is_same_file(*paths):
        raise DataError(
            f"`evaluation` {os.fspath(paths[1])} is also given as `data`, so no images remain for "
            "the final evaluation; leave `evaluation` out to hold out a part of `data`",
            code="option-conflict",
            parameter="evaluation",
        )


def _open_dataset(
    model: Model, data: CalibrationSource, images: ImageOptions, max_images: int, parameter: str
) -> tuple[Dataset, Sequence[int]]:
    """Open data, and return the dataset with the indices of its images.

    Raises:
        DataError: The data can be read only once.
    """
    dataset = open_data(
        data,
        input_specs(model),
        images.preprocess or YOLO_PREPROCESS,
        max_images,
        choose_size(model, images.size),
    )
    if dataset.indices is None:
        raise DataError(
            f"the number of samples in `{parameter}` is unknown; give a folder or a list",
            code="read-once",
            parameter=parameter,
        )
    return dataset, dataset.indices


def _select_images(dataset: Dataset, indices: Sequence[int]) -> Dataset:
    return Dataset(SubsetSource(dataset.source, indices), dataset.inputs, max(1, len(indices)))


def _make_sets(
    dataset: Dataset,
    calibration: Dataset,
    complete: Dataset,
    to_choose: list[int],
    to_judge: list[int],
    swept_on: int | None,
) -> ImageSets:
    """Create the sets from indices of images in `dataset`; drop incomplete batches."""
    batch = dataset.batch
    to_choose = to_choose[: len(to_choose) // batch * batch]
    to_judge = to_judge[: len(to_judge) // batch * batch]
    first = len(to_choose) // batch
    last = first + len(to_judge) // batch
    return ImageSets(
        calibration,
        complete,
        _select_images(dataset, to_choose + to_judge),
        tuple(range(first)),
        tuple(range(first, last)),
        tuple(spread_indices(first, min(swept_on or SWEPT_ON, first))),
    )


def _split_blocks(indices: Sequence[int]) -> list[list[int]]:
    count = min(_BLOCKS, max(1, len(indices) // _FEWEST))
    bounds = [len(indices) * k // count for k in range(count + 1)]
    return [list(indices[a:b]) for a, b in itertools.pairwise(bounds)]


def _share_of_block(total: int, blocks: int, k: int) -> int:
    return total * (k + 1) // blocks - total * k // blocks


class _ImageSplit(NamedTuple):
    """Indices of images for the calibration, the search and the final evaluation."""

    calibration: list[int]
    search: list[int]
    evaluation: list[int]


def _split_in_three(
    indices: Sequence[int], batch: int, search_count: int, evaluation_count: int
) -> _ImageSplit:
    quarter = len(indices) // _FEWEST // batch * batch
    search_count, evaluation_count = (
        max(batch, min(n * batch, quarter)) for n in (search_count, evaluation_count)
    )
    blocks = _split_blocks(indices)
    split = _ImageSplit([], [], [])
    for k, block in enumerate(blocks):
        evaluation_share = _share_of_block(evaluation_count, len(blocks), k)
        search_share = _share_of_block(search_count, len(blocks), k)
        start = max(0, len(block) - search_share - evaluation_share)
        end = start + search_share
        split.calibration.extend(block[:start])
        split.search.extend(block[start:end])
        split.evaluation.extend(block[end : end + evaluation_share])
    return split


def _split_in_halves(
    indices: Sequence[int], batch: int, search_count: int, evaluation_count: int
) -> tuple[list[int], list[int]]:
    """Select images for the search and for the evaluation, from the two halves of each block."""
    search: list[int] = []
    evaluation: list[int] = []
    blocks = _split_blocks(indices)
    for k, block in enumerate(blocks):
        middle = (len(block) + 1) // 2
        search += select_evenly(
            block[:middle], _share_of_block(search_count * batch, len(blocks), k)
        )
        evaluation += select_evenly(
            block[middle:], _share_of_block(evaluation_count * batch, len(blocks), k)
        )
    return search, evaluation


def select_evenly(numbers: Sequence[int], count: int) -> list[int]:
    """Return `count` (at least 1) evenly spread numbers, or all of a shorter sequence."""
    return [numbers[i] for i in spread_indices(len(numbers), max(1, count))] if numbers else []
