import math

import numpy as np
import pytest

from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import ParameterValues
from qdqtool.trt import fault_checks
from tests.trt.builder import Graph


@pytest.mark.parametrize(
    ("count", "axis", "shape", "reported", "reported_if_strict"),
    [
        (16, 1, (8, 16), False, False),
        (16, -1, (8, 16), False, False),
        (8, 1, (8, 16), True, True),
        (8, 1, (8, None), False, False),
        # Without scales, or with an axis that the tensor does not have, only the strict check reports.
        (0, 1, (8, 16), False, True),
        (0, 0, (0,), False, True),
        (16, 2, (8, 16), False, True),
        (16, -3, (8, 16), False, True),
    ],
)
def test_scale_count(
    count: int,
    axis: int,
    shape: tuple[int | None, ...],
    reported: bool,
    reported_if_strict: bool,
) -> None:
    assert [
        fault_checks.check_scale_count("", "q", count, axis, shape, strict) is not None
        for strict in (False, True)
    ] == [reported, reported_if_strict]


@pytest.mark.parametrize(
    ("scales", "strict_channels", "channels"),
    [
        ([0.1, 2.0], [], []),
        ([0.1, 0.0, -1.0], [1, 2], [1, 2]),
        ([math.inf, 1.0], [0], []),
        ([math.nan, -math.inf, math.inf], [0, 1, 2], [0, 1]),
        ([], [], []),
    ],
)
@pytest.mark.parametrize("accept_infinity", [False, True])
def test_scale_not_positive(
    scales: list[float],
    strict_channels: list[int],
    channels: list[int],
    accept_infinity: bool,
    g: Graph,
) -> None:
    expected = channels if accept_infinity else strict_channels
    model = Model(g.model(g.q(g.input(1, len(scales)), "q", np.array(scales), axis=1)))
    fault = fault_checks.check_scale_positive(
        "", model, model.nodes[0], ParameterValues(np.array(scales, np.float64)), accept_infinity
    )
    if not expected:
        assert fault is None
        return
    assert (fault.channels, fault.bad, fault.count) == (tuple(expected), len(expected), len(scales))
    np.testing.assert_equal(fault.value, scales[expected[0]])
