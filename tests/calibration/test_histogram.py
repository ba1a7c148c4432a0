from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from calibration.statistics import (
    TensorStatistics,
    mantissa_bits,
)
from qdqtool.errors import DataError
from tests.errors import has

TINY = 2.0**-126  # the smallest normal float32


def statistics_of(*values: float, bins: int = 64) -> TensorStatistics:
    return TensorStatistics.of(np.array(values, np.float32), bins)


def direct_counts(values: np.ndarray, edges: np.ndarray) -> list[int]:
    counts, _ = np.histogram(np.abs(values.astype(np.float64)), np.append(edges[:-1], np.inf))
    return list(counts)


@given(
    hnp.arrays(
        np.float32,
        st.integers(0, 60),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_histogram_counts_every_value_in_any_order(values: np.ndarray) -> None:
    stats = TensorStatistics.of(values, 64)
    counts, edges = stats.histogram
    assert counts.sum() == len(values)
    assert (np.diff(edges) > 0).all() and counts.tolist() == direct_counts(values, edges)
    one_by_one = TensorStatistics(64)
    for value in np.sort(np.abs(values)):  # the window moves as often as it can
        one_by_one.add(np.array([value], np.float32))
    assert np.array_equal(one_by_one.counter.counts, stats.counter.counts)


def test_coarse_histogram_joins_bins() -> None:
    values = np.random.default_rng(1).normal(0, 1, 5000).astype(np.float32)
    counts, edges = TensorStatistics.of(values).coarse(4)
    assert counts.tolist() == direct_counts(values, edges)


def test_linear_histogram_is_off_by_one_bin_at_most() -> None:
    values = np.random.default_rng(2).normal(0, 1, 50_000).astype(np.float32)
    stats = TensorStatistics.of(values)
    counts = stats.linear(512).counts
    exact, _ = np.histogram(np.abs(values), 512, (0.0, stats.absmax))
    assert counts.sum() == pytest.approx(50_000)
    # A bin that straddles an edge is split evenly.
    assert np.abs(np.cumsum(counts) - np.cumsum(exact)).max() <= stats.histogram.counts.max()


def test_linear_histogram_splits_bins_evenly() -> None:
    # Four values in a bin from 0.5 to 0.75, of which the edge 0.6 cuts off two fifths.
    stats = statistics_of(*[0.5625] * 4, 0.9, bins=4)
    assert stats.histogram.edges[-3:] == pytest.approx([0.5, 0.75, 0.9])
    assert stats.linear(3).counts == pytest.approx([0.0, 1.6, 3.4])


@pytest.mark.parametrize("top", [1.0, 1.0 + 1 / 32, 4.0])
def test_linear_histogram_has_the_largest_magnitude_in_its_last_bin(top: float) -> None:
    """The last bin ends just above a largest magnitude on its lower edge."""
    counts = statistics_of(0.3 * top, top, top).linear(10).counts
    assert counts[-1] == 2 and counts.sum() == pytest.approx(3)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        *((mantissa_bits, bins) for bins in (-4, 0, 1, 2, 5, 2047, 131072)),
        pytest.param(mantissa_bits, -(10**5000), id="mantissa_bits-huge"),
        (TensorStatistics().linear, 0),
        (TensorStatistics().linear, 1_000_001),
        pytest.param(TensorStatistics().linear, 10**400, id="linear-huge"),
    ],
)
def test_other_numbers_of_bins_are_rejected(call: Callable[[int], object], value: int) -> None:
    allowed = ["65536", f"{value};" if abs(value) < 2**63 else "bins"]
    values = allowed if call is mantissa_bits else ["1,000,000"]
    with pytest.raises(DataError, check=has("out-of-range", *values, parameter="bins")):
        call(value)


@pytest.mark.parametrize(
    ("values", "bins"),
    [
        pytest.param([0.75, 2.0**-20], {2.0**-20: 1, 0.75: 1}, id="20 octaves"),
        pytest.param(
            [0.75, np.nextafter(np.float32(2.0**-20), np.float32(0))],
            {0.0: 1, 0.75: 1},
            id="below 20 octaves",
        ),
        pytest.param([1.0, 2.0**-20], {0.0: 1, 1.0: 1}, id="1 begins the next octave"),
        pytest.param([TINY, TINY / 2, 0.0], {0.0: 2, TINY: 1}, id="subnormal"),
        pytest.param(
            [0.5, 0.5 + 0.99 / 64, 0.5 + 1 / 64, 1.0 - 0.5 / 64],
            {0.5: 2, 0.5 + 1 / 64: 1, 1.0 - 1 / 64: 1},
            id="32 bins an octave",
        ),
    ],
)
def test_histogram_bins_of_values(values: list[float], bins: dict[float, int]) -> None:
    counts, edges = statistics_of(*values).histogram
    assert {float(e): int(c) for e, c in zip(edges, counts, strict=False) if c} == bins


@pytest.mark.parametrize(
    ("value", "end"),
    [
        (1.0, 1 + 2**-20),
        (1.001, float(np.float32(1.001))),
        pytest.param(TINY, TINY * (1 + 2**-20), id="tiny"),
    ],
)
def test_last_bin_ends_at_the_largest_magnitude(value: float, end: float) -> None:
    histogram = statistics_of(value).histogram
    assert histogram.edges[-1] == end and histogram.counts[-1] == 1


@pytest.mark.parametrize("values", [[], [0.0] * 3], ids=["nothing", "zeros"])
def test_histogram_without_magnitudes_has_one_bin(values: list[float]) -> None:
    assert [part.tolist() for part in statistics_of(*values).histogram] == [
        [len(values)],
        [0.0, TINY],
    ]
