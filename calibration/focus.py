"""Where in the map a network looks: the positions at which its class outputs are highest.

An object detector answers at a few positions of its map, and only what the answers depend on has to survive INT8. A
range that is best for all values alike is best for the background, which is most of every picture, and clips what the
rare objects make. How rare they are differs between the calibration data and the deployment, and with it the best
range; at the positions themselves it hardly does.

A position is looked at when its highest class output reaches a threshold far below that of a detection, or is among the
highest ``share`` of the sample (so that a sample without objects shows where the network came closest to one), and when
it is next to such a position.
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
    """The positions looked at in one sample, for maps of any size.

    Attributes:
        masks: Boolean maps [height, width] of each row of the batch, on the finest class output's grid.
    """

    def __init__(self, masks: Sequence[_Mask]) -> None:
        self.masks = masks
        self._known: dict[tuple[int, int], list[_Indices]] = {}

    def values(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """What an activation [n, c, h, w] holds at these positions: [c, positions] of each row of the batch.

        Empty where the activation is no map, or its batch is another.
        """
        if array.ndim != 4 or len(array) != len(self.masks) or 0 in array.shape:
            return []
        rows = self._indices(array.shape[2], array.shape[3])
        return [
            np.take(a.reshape(len(a), -1), at, axis=1)
            for a, at in zip(array, rows, strict=True)
            if len(at)
        ]

    def covers(self, array: npt.NDArray[Any]) -> bool:
        """Whether every position of an activation [n, c, h, w] is looked at, so that :meth:`values` has all of it."""
        if array.ndim != 4 or len(array) != len(self.masks):
            return False
        height, width = array.shape[2:]
        return all(len(at) == height * width for at in self._indices(height, width))

    def _indices(self, height: int, width: int) -> list[_Indices]:
        if (height, width) not in self._known:
            self._known[height, width] = [
                np.flatnonzero(resized(m, height, width)) for m in self.masks
            ]
        return self._known[height, width]


def resized(mask: _Mask, height: int, width: int) -> _Mask:
    """A mask on another grid: a cell is set when any cell of the other grid that it touches is."""
    for axis, size in ((0, height), (1, width)):
        have = mask.shape[axis]
        start = np.arange(size) * have // size
        end = -(-np.arange(1, size + 1) * have // size)  # rounded up
        if size >= have and size % have == 0:
            mask = np.repeat(mask, size // have, axis=axis)
            continue
        counts = np.concatenate(
            [np.zeros_like(mask.take([0], axis), np.int64), np.cumsum(mask, axis=axis)], axis=axis
        )
        mask = counts.take(end, axis) > counts.take(start, axis)
    return mask


def dilated(mask: _Mask) -> _Mask:
    """A mask [h, w] and its eight neighbours."""
    tall = mask.copy()
    tall[1:] |= mask[:-1]
    tall[:-1] |= mask[1:]
    wide = tall.copy()
    wide[:, 1:] |= tall[:, :-1]
    wide[:, :-1] |= tall[:, 1:]
    return wide


@dataclass(frozen=True)
class Focus:
    """Which tensors show where a network looks.

    Attributes:
        scores: Class outputs [n, classes, h, w], in front of the Sigmoid.
        threshold: In their units.
        share: Of all positions of a sample, all maps together; from 0 to 1.
    """

    scores: tuple[str, ...]
    threshold: float = THRESHOLD
    share: float = SHARE

    def find(self, outputs: dict[str, npt.NDArray[Any]]) -> FocusMap | None:
        """The positions looked at; None where an output is no map, not finite, or the batches differ."""
        maps = []
        for name in self.scores:
            array = outputs[name]
            if array.ndim != 4 or 0 in array.shape or not np.isfinite(array).all():
                return None
            maps.append(array.max(axis=1).astype(np.float32))
        if not maps or len({len(m) for m in maps}) != 1:
            return None
        height = max(m.shape[1] for m in maps)
        width = max(m.shape[2] for m in maps)
        masks = []
        for row in range(len(maps[0])):
            levels = [m[row] for m in maps]
            everything = np.concatenate([level.ravel() for level in levels])
            count = max(1, round(self.share * everything.size))
            threshold = min(self.threshold, float(np.partition(everything, -count)[-count]))
            mask = np.zeros((height, width), bool)
            for level in levels:
                mask |= resized(dilated(level >= threshold), height, width)
            masks.append(mask)
        return FocusMap(masks)
