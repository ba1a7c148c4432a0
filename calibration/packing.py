"""Statistics as they travel: plain numbers, each count in as few bytes as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.statistics import TensorStatistics

_COLUMNS = 6  # count, values not finite, top of the window, lowest bin, first bin that follows, width of its numbers
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def pack(tensors: Mapping[str, TensorStatistics], names: Sequence[str]) -> dict[str, Any]:
    """Statistics of the named tensors as arrays and bytes; see :func:`absorb`."""
    focused = [k for k, name in enumerate(names) if tensors[name].focus is not None]
    parts = [tensors[n] for n in names] + [p for n in names if (p := tensors[n].focus) is not None]
    numbers = np.zeros((len(parts), _COLUMNS), np.int64)
    counts: list[bytes] = []
    for row, part in zip(numbers, parts, strict=True):
        filled = np.flatnonzero(part.counter.counts[1:])
        first, last = (int(filled[0]) + 1, int(filled[-1]) + 2) if len(filled) else (1, 1)
        window = part.counter.counts[first:last]
        largest = int(window.max()) if len(window) else 0
        width = next(w for w in _WIDTHS if largest < 1 << (8 * w))
        row[:] = part.count, part.nonfinite, part.counter.top, part.counter.counts[0], first, width
        counts.append(window.astype(_WIDTHS[width]).tobytes())
    spots = [(k, s) for k, name in enumerate(names) for s in tensors[name].spots]
    return {
        "spots": [(k, *s.shape) for k, s in spots],
        "values": b"".join(s.tobytes() for _, s in spots),
        "numbers": numbers,
        "range": np.array([(p.minimum, p.maximum) for p in parts], np.float64).reshape(len(parts), 2),
        "focused": focused,
        "lengths": [len(c) for c in counts],
        "counts": b"".join(counts),
    }


def absorb(tensors: Mapping[str, TensorStatistics], names: Sequence[str], packed: Mapping[str, Any]) -> None:
    """Adds packed statistics to those of the named tensors; exact, in whatever order they come.

    Args:
        tensors: By name; changed.
        names: As they were packed.
        packed: What :func:`pack` gave.
    """
    parts = [tensors[n] for n in names]
    for k in packed["focused"]:
        part = parts[k]
        if part.focus is None:
            part.focus = TensorStatistics(part.bins)
        parts.append(part.focus)
    at = 0
    for k, positions, channels in packed["spots"]:
        values = np.frombuffer(packed["values"], np.float32, positions * channels, at)
        parts[k].spots.append(values.reshape(positions, channels))
        at += values.nbytes
    numbers: npt.NDArray[np.int64] = packed["numbers"]
    at = 0
    for part, row, (low, high), length in zip(
        parts, numbers.tolist(), packed["range"].tolist(), packed["lengths"], strict=True
    ):
        count, nonfinite, top, lowest, first, width = row
        window = np.frombuffer(packed["counts"], _WIDTHS[width], length // width, at)
        at += length
        part.count += count
        part.nonfinite += nonfinite
        part.minimum = min(part.minimum, low)
        part.maximum = max(part.maximum, high)
        part.counter.absorb(top, lowest, first, window)
