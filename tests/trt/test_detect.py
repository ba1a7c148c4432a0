"""One function looks for each fault: where those who ask differ, an argument says so."""

import math

import numpy as np
import pytest

from qdqtool.model.qdq import Numbers
from qdqtool.trt import detect


@pytest.mark.parametrize(
    ("count", "axis", "shape", "told"),
    [
        (16, 1, (8, 16), "neither"),
        (16, -1, (8, 16), "neither"),
        (8, 1, (8, 16), "both"),
        (8, 1, (8, None), "neither"),
        (0, 1, (8, 16), "strict"),
        (0, 0, (0,), "strict"),
        (16, 2, (8, 16), "strict"),
        (16, -3, (8, 16), "strict"),
    ],
)
def test_no_scale_and_an_axis_that_is_not_there_count_where_it_is_strict(
    count: int, axis: int, shape: tuple[int | None, ...], told: str
) -> None:
    found = [
        detect.scale_count("", "q", count, axis, shape, strict) is not None
        for strict in (False, True)
    ]
    assert found == {"neither": [False, False], "strict": [False, True], "both": [True, True]}[told]


@pytest.mark.parametrize(
    ("scales", "bad", "infinite"),
    [
        ([0.1, 2.0], [], []),
        ([0.1, 0.0, -1.0], [1, 2], [1, 2]),
        ([math.inf, 1.0], [0], []),
        ([math.nan, -math.inf, math.inf], [0, 1, 2], [0, 1]),
        ([], [], []),
    ],
)
def test_a_scale_is_a_number_above_0(
    scales: list[float], bad: list[int], infinite: list[int]
) -> None:
    for taken, places in ((False, bad), (True, infinite)):
        found = detect.scale_not_positive("", "q", Numbers(np.array(scales, np.float64)), taken)
        assert (() if found is None else found.channels) == tuple(places)
        if found is not None:
            assert found.bad == len(places) and found.count == len(scales)
            np.testing.assert_equal(found.value, scales[places[0]])
