"""Sizes of the portions that a cluster gets, by times that are given."""

from __future__ import annotations

import math

import pytest

from calibration.clustered import _Pace


def test_two_samples_while_nothing_is_known() -> None:
    assert [_Pace().size(left, 4) for left in (1, 2, 1000)] == [2, 2, 2]


@pytest.mark.parametrize("left", [0, 1, 7, 90, 5000])
@pytest.mark.parametrize("slots", [0, 1, 4, 64])
@pytest.mark.parametrize(
    ("counting", "packing", "merging"),
    [(10.0, 0.0, 0.0), (0.01, 0.0, 0.0), (1.0, 0.05, 0.001), (1.0, 0.001, 0.2), (500.0, 0.1, 0.1), (0.0, 0.1, 0.1),
     (0.0, 0.0, 0.0), (3000.0, 90.0, 2.0)],
)  # fmt: skip
def test_a_portion_is_worth_its_packing_and_leaves_work_for_all(
    left: int, slots: int, counting: float, packing: float, merging: float
) -> None:
    """A fiftieth of the time for packing, a quarter for merging, ten seconds, two and a half portions a thread."""
    pace = _Pace()
    pace.learn(20, counting, packing, merging)
    each = counting / 20 or 1e-9
    least = max(50 * packing, 4 * slots * merging) / each
    most = max(10.0 / each, least)
    wanted = min(max(left / 2.5 / max(slots, 1), least), most)
    assert pace.size(left, slots) == max(1, min(left, 256, math.ceil(wanted)))


def test_times_are_those_of_late() -> None:
    pace = _Pace()
    pace.learn(10, 1.0, 0.1, 0.01)
    pace.learn(30, 7.0, 0.2, 0.05)
    assert (pace._samples, pace._counting) == (40, 8.0)
    assert (pace._packing, pace._merging) == pytest.approx((0.7 * 0.1 + 0.3 * 0.2, 0.7 * 0.01 + 0.3 * 0.05))
    pace.learn(1, 1.0, 0.0, 0.0)
    assert pace._packing == pytest.approx(0.7 * 0.13)
