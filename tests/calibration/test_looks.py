"""What is worth a warning: each limit from both sides, each sentence whole."""

from __future__ import annotations

import math

import pytest

from calibration.looks import FEW_IMAGES, Looks

MANY = 100
REACH = "inputs reach from {:g} to {:g}; YOLO models take 0 to 1: is the division by 255 missing (scale 1/255)?"
TWICE = "inputs never exceed {:g}; YOLO models take 0 to 1: were they divided by 255 twice?"


@pytest.mark.parametrize(
    ("low", "high", "sentence"),
    [
        (0.0, 1.0, ""),
        (0.0, 8.0, ""),
        (0.0, 8.01, REACH.format(0, 8.01)),
        (-8.0, 0.5, ""),
        (-8.01, 0.5, REACH.format(-8.01, 0.5)),
        (9.0, 9.0, REACH.format(9, 9)),
        (0.0, 0.0, ""),
        (0.0, 1e-9, TWICE.format(1e-9)),
        (0.0, 0.0058, TWICE.format(0.0058)),
        (0.001, 0.0058, TWICE.format(0.0058)),
        (0.0, 1.5 / 255, ""),
        (-1e-9, 0.0058, ""),
        (-1.0, -0.5, ""),
        (math.inf, -math.inf, ""),  # nothing finite
    ],
)
def test_what_the_reach_of_the_inputs_tells(low: float, high: float, sentence: str) -> None:
    assert list(Looks(total=MANY, low=low, high=high).warnings()) == [sentence] * bool(sentence)


def test_how_many_images_there_were() -> None:
    assert FEW_IMAGES == MANY
    few = "only {} calibration image{}; 100 or more give steadier ranges"
    told = {n: list(Looks(total=n).warnings()) for n in (0, 1, 2, 99, 100)}
    assert told == {0: [], 1: [few.format(1, "")], 2: [few.format(2, "s")], 99: [few.format(99, "s")], 100: []}
    assert list(Looks(broken=5).warnings()) == [], "where no image is left, that is an error"


def test_what_was_counted_is_told_with_its_share() -> None:
    assert list(Looks(total=MANY, broken=1).warnings()) == ["1 of 101 images could not be read and were skipped"]
    assert list(Looks(total=MANY, constant=1).warnings()) == ["1 of 100 images are constant (every value the same)"]
    assert list(Looks(total=MANY, nonfinite=1).warnings()) == ["1 of 100 samples hold NaN or infinities"]


def test_looks_add_up() -> None:
    one = Looks()
    assert vars(one) == {"total": 0, "low": math.inf, "high": -math.inf, "constant": 0, "nonfinite": 0, "broken": 0}
    one.add(0.25, 0.5, True, False)
    one.add(0.125, 0.375, False, True)
    one.add(math.inf, -math.inf, False, True)
    assert one == Looks(3, 0.125, 0.5, 1, 2, 0)
    other = Looks(10, -1.0, 0.25, 4, 5, 6)
    other.merge(one)
    assert other == Looks(13, -1.0, 0.5, 5, 7, 6)
    one.merge(Looks(1, 0.5, 2.0, 0, 0, 7))
    assert one == Looks(4, 0.125, 2.0, 1, 2, 7)
