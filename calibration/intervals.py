"""A set of numbers that were mostly added in order: as few ranges as it takes."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set

import numpy as np
import numpy.typing as npt


class Intervals(Set[int]):
    """Natural numbers. Memory goes with the gaps between them, not with how many there are."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # each one past the last
        self._count = 0
        for number in numbers:
            self.add(number)

    @staticmethod
    def of_ranges(ranges: Iterable[tuple[int, int]]) -> Intervals:
        """From pairs of the first number and the one past the last.

        Raises:
            ValueError: They are not ascending, touch each other, or are empty.
        """
        result = Intervals()
        before = -1
        for start, end in ranges:
            if start <= before or end <= start:
                raise ValueError("its ranges are not in order")
            result._starts.append(start)
            result._ends.append(end)
            result._count += end - start
            before = end
        return result

    def ranges(self) -> npt.NDArray[np.int64]:
        """Pairs of the first number and the one past the last, [n, 2], ascending."""
        return np.array([self._starts, self._ends], np.int64).T

    def add(self, number: int) -> None:
        """Adds a number; one that is there already changes nothing."""
        place = bisect_right(self._starts, number)
        if place and number < self._ends[place - 1]:
            return
        self._count += 1
        joins_before = place > 0 and self._ends[place - 1] == number
        joins_after = place < len(self._starts) and self._starts[place] == number + 1
        if joins_before and joins_after:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif joins_before:
            self._ends[place - 1] += 1
        elif joins_after:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number + 1)

    def copy(self) -> Intervals:
        result = Intervals()
        result._starts, result._ends, result._count = list(self._starts), list(self._ends), self._count
        return result

    def missing(self, total: int) -> Iterator[int]:
        """The numbers below ``total`` that are not here, ascending; numbers added meanwhile may be among them."""
        at = 0
        while at < total:
            place = bisect_right(self._starts, at)
            if place and at < self._ends[place - 1]:
                at = self._ends[place - 1]
                continue
            yield at
            at += 1

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        place = bisect_right(self._starts, number)
        return place > 0 and number < self._ends[place - 1]

    def __iter__(self) -> Iterator[int]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end)

    def __len__(self) -> int:
        return self._count

    def __or__(self, other: Set[int]) -> Intervals:  # type: ignore[override]
        result = Intervals()
        more = other if isinstance(other, Intervals) else Intervals(sorted(other))
        for start, end in heapq.merge(zip(self._starts, self._ends, strict=True),
                                      zip(more._starts, more._ends, strict=True)):
            if result._ends and start <= result._ends[-1]:
                result._count += max(0, end - result._ends[-1])
                result._ends[-1] = max(end, result._ends[-1])
            else:
                result._starts.append(start)
                result._ends.append(end)
                result._count += end - start
        return result
