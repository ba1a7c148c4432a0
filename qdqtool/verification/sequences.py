"""How much two sequences of log lines have in common: as multisets, and in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from qdqtool.buildlog.agreement import TraceCounts

_MOST_BITS = 4_000_000_000  # work for the longest common subsequence: 60,000 lines against as many


def agreement(predicted: Sequence[Hashable], built: Sequence[Hashable]) -> TraceCounts:
    """Counts of two sequences: each one's length, elements in common, and elements in common in the same order."""
    common = (Counter(predicted) & Counter(built)).total()
    return TraceCounts(len(predicted), len(built), common, in_order(predicted, built))


def in_order(first: Sequence[Hashable], second: Sequence[Hashable]) -> int | None:
    """Length of the longest common subsequence; None where that would take too long.

    Bit-parallel (Hyyro, 2004, "Bit-parallel LCS-length computation revisited"): a row of the usual table is one
    integer, a zero bit marking where the length grows.
    """
    if len(first) * len(second) > _MOST_BITS:
        return None
    places: dict[Hashable, int] = {}
    for position, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << position
    full = (1 << len(first)) - 1
    row = full
    for item in second:
        hits = row & places.get(item, 0)
        row = (row + hits | row - hits) & full
    return len(first) - row.bit_count()
