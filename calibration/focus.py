"""Positions in focus: positions of a detector's feature map with the highest scores.

An object detector detects objects at a few positions of its feature maps. Only the values at these
positions need precision. Most positions of an image are background, so the best range for all
values fits the background and clips the values of rare objects. That range also depends on how many
objects the calibration images contain. The best range for the positions in focus hardly depends on
this number.

A position is in focus in three cases:

* Its highest class output reaches a threshold far below the score of a detection.
* Its highest class output is among the highest `share` of the sample. Samples without objects have
  positions in focus for this reason.
* A neighbor is in focus for one of these two reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

THRESHOLD = math.log(0.1 / 0.9)  # a score of 0.1, as a logit
SHARE = 0.001
_Mask = npt.NDArray[np.bool_]
_Indices = npt.NDArray[np.intp]


class FocusMap:
    """Positions in focus in one sample, for activations of any size.

    Attributes:
        masks: Boolean maps [height, width] of each row of the batch, on the grid of the finest
            class output.
    """

    def __init__(self, masks: Sequence[_Mask]) -> None:
        self.masks = masks
        self._indices_by_size: dict[tuple[int, int], list[_Indices]] = {}

    def values(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the values of an activation [n, c, h, w] at the positions in focus.

        Returns:
            Values [c, positions] for each row of the batch that has positions in focus. Empty if
            the activation is empty, does not have four dimensions, or has another batch size.
        """
        if array.ndim != 4 or len(array) != len(self.masks) or 0 in array.shape:
            return []
        rows = self._indices(array.shape[2], array.shape[3])
        return [
            np.take(row.reshape(len(row), -1), indices, axis=1)
            for row, indices in zip(array, rows, strict=True)
            if len(indices)
        ]

    def covers(self, array: npt.NDArray[Any]) -> bool:
        """Return whether every position of an activation [n, c, h, w] is in focus."""
        if array.ndim != 4 or len(array) != len(self.masks):
            return False
        height, width = array.shape[2:]
        return all(len(indices) == height * width for indices in self._indices(height, width))

    def _indices(self, height: int, width: int) -> list[_Indices]:
        if (height, width) not in self._indices_by_size:
            masks = [resize_mask(mask, height, width) for mask in self.masks]
            self._indices_by_size[height, width] = [np.flatnonzero(mask) for mask in masks]
        return self._indices_by_size[height, width]


def resize_mask(mask: _Mask, height: int, width: int) -> _Mask:
    """Resize a mask [h, w] to another height and width.

    A cell of the result is set if it overlaps a set cell of the mask.
    """
    for axis, size in ((0, height), (1, width)):
        length = mask.shape[axis]
        start = np.arange(size) * length // size
        end = -(-np.arange(1, size + 1) * length // size)  # rounded up
        if size >= length and size % length == 0:
            mask = np.repeat(mask, size // length, axis=axis)
            continue
        zeros = np.zeros_like(mask.take([0], axis), np.int64)
        counts = np.concatenate([zeros, np.cumsum(mask, axis=axis)], axis=axis)
        mask = counts.take(end, axis) > counts.take(start, axis)
    return mask


def dilate_mask(mask: _Mask) -> _Mask:
    """Add the eight neighbors of each set cell of a mask [h, w]."""
    tall = mask.copy()
    tall[1:] |= mask[:-1]
    tall[:-1] |= mask[1:]
    wide = tall.copy()
    wide[:, 1:] |= tall[:, :-1]
    wide[:, :-1] |= tall[:, 1:]
    return wide


@dataclass(frozen=True)
class Focus:
    """Class outputs, and the thresholds that select positions in focus.

    Attributes:
        scores: Names of class outputs [n, classes, h, w] before the Sigmoid.
        threshold: Lowest class output in focus, in units of the class outputs (logits).
        share: Share of all positions of a sample, over all class outputs, that is always in focus;
            from 0 to 1.
    """

    scores: tuple[str, ...]
    threshold: float = THRESHOLD
    share: float = SHARE

    def find(self, outputs: dict[str, npt.NDArray[Any]]) -> FocusMap | None:
        """Return the positions in focus of one sample.

        Args:
            outputs: Tensors of the sample by name, including the class outputs.

        Returns:
            None if a class output is empty, does not have four dimensions or is not finite, or if
            the class outputs have different batch sizes.
        """
        maps = []
        for name in self.scores:
            array = outputs[name]
            if array.ndim != 4 or 0 in array.shape or not np.isfinite(array).all():
                return None
            maps.append(array.max(axis=1).astype(np.float32))
        if len({len(level) for level in maps}) != 1:
            return None
        return FocusMap(
            [self._find_mask([level[row] for level in maps]) for row in range(len(maps[0]))]
        )

    def _find_mask(self, levels: list[npt.NDArray[np.float32]]) -> _Mask:
        """Return the mask [h, w] of one image, on the grid of the finest level.

        The mask is True at the positions in focus.

        Args:
            levels: Highest class output (logit) at each position, [h, w] for each level.
        """
        scores = np.concatenate([level.ravel() for level in levels])
        count = max(1, round(self.share * scores.size))
        threshold = min(self.threshold, float(np.partition(scores, -count)[-count]))
        height = max(level.shape[0] for level in levels)
        width = max(level.shape[1] for level in levels)
        mask = np.zeros((height, width), bool)
        for level in levels:
            mask |= resize_mask(dilate_mask(level >= threshold), height, width)
        return mask
