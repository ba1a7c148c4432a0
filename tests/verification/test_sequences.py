"""Common lines as a multiset and in order, against the textbook's table."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from qdqtool.agreement import TraceCounts
from qdqtool.verification.sequences import agreement, in_order


def by_table(first: list[int], second: list[int]) -> int:
    """Length of the longest common subsequence, by dynamic programming over both."""
    row = [0] * (len(second) + 1)
    for x in first:
        before = row[:]
        for j, y in enumerate(second):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


lists = st.lists(st.integers(0, 6), max_size=40)


@given(lists, lists)
def test_in_order_is_the_longest_common_subsequence(first: list[int], second: list[int]) -> None:
    assert in_order(first, second) == by_table(first, second)


@given(lists, lists)
def test_counts(first: list[int], second: list[int]) -> None:
    found = agreement(first, second)
    common = sum(min(n, Counter(second)[x]) for x, n in Counter(first).items())
    assert found == TraceCounts(len(first), len(second), common, by_table(first, second))
    assert found.in_order is not None and found.in_order <= common


def test_too_long_is_not_counted() -> None:
    assert in_order(range(100_000), range(100_000)) is None
    assert in_order(range(5000), range(5000)) == 5000
