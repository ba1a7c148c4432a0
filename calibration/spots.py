"""Every channel at a few positions of a few images: what counts of single values cannot tell.

Rounding errors are taken for noise: zero on average, independent from one position to the next, so that the layers
behind average them out. Over a flat area (paper, sky, a wall) they are nothing of the kind. There an activation has
nearly the same value in a channel everywhere, is rounded the same way everywhere, and the mean error of a channel over
the image reaches the outputs undiminished: a biased error, as Nagel et al. (2019) call it. Which way a value is rounded
depends on the scale, and a slightly smaller range may round most channels well. A histogram of all channels together
does not show it; the values of every channel at a few positions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Spots = npt.NDArray[np.float32]

IMAGES = 16  # images that are looked at
POSITIONS = 48  # in each map
CHANNELS = 48  # of each map
_GOLDEN = 0.6180339887498949  # steps of this part of a whole fill it evenly, however many there are


def chosen(samples: int | None) -> frozenset[int]:
    """Numbers of the samples that are looked at: evenly spread; the first where it is not known how many there are."""
    if samples is None or samples <= IMAGES:
        return frozenset(range(IMAGES))
    return frozenset((i * samples) // IMAGES for i in range(IMAGES))


def taken(array: npt.NDArray[Any], number: int) -> Spots | None:
    """Values of an activation [n, c, h, w] of a sample's first image: [positions, channels].

    The same positions and channels for the same number and shape. None where the activation is no map, is too small
    for one, or is not finite there.
    """
    if array.ndim != 4 or not array.shape[0] or not array.shape[1]:
        return None
    channels, size = array.shape[1], array.shape[2] * array.shape[3]
    if size < POSITIONS:
        return None
    at = ((np.arange(POSITIONS) + number) * _GOLDEN % 1.0 * size).astype(np.intp)
    which = np.arange(min(channels, CHANNELS)) * channels // min(channels, CHANNELS)
    values: Spots = array[0].reshape(channels, size)[which[:, None], at].T.astype(np.float32)
    return values if np.isfinite(values).all() else None


def rounding(spots: Sequence[Spots], ranges: Floats, levels: int) -> tuple[Floats, Floats]:
    """Errors of rounding and clipping to symmetric integers, at the positions kept.

    Args:
        spots: Of each image, [positions, channels].
        ranges: [n], above zero, in units of the tensor.
        levels: Positive integer levels.

    Returns:
        Two float64 [n], in squared units of the tensor, summed over the channels, mean over the images: the biased
        error, which is the square of a channel's mean error over an image (without what so few positions make of mere
        noise: the estimate is unbiased, and not below zero), and the whole squared error.
    """
    biased = np.empty((len(spots), len(ranges)))
    whole = np.empty((len(spots), len(ranges)))
    scales = (ranges / levels).astype(np.float32)[:, None, None]
    steps_squared = (ranges / levels) ** 2
    for image, values in enumerate(spots):
        count = len(values)
        exact = values / scales  # in steps [range, position, channel]
        error = np.rint(exact)
        np.maximum(error, -levels, out=error)
        np.minimum(error, levels, out=error)
        error -= exact
        mean = error.sum(axis=1) / count
        square = np.square(error, out=error).sum(axis=(1, 2)) * (steps_squared / count)
        spread = np.square(mean).sum(axis=1) * steps_squared
        whole[image] = square
        biased[image] = np.maximum(count * spread - square, 0.0) / (count - 1)
    # In an order of their own, so that the sums do not depend on which image was counted first.
    return np.sort(biased, axis=0).sum(axis=0) / len(spots), np.sort(whole, axis=0).sum(axis=0) / len(spots)
