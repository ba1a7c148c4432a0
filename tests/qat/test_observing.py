from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from calibration import TensorStatistics, amax_of, squared_error
from qdqtool.qat.observing import BINS, COUNTED, HELD, DeviceStatistics


def _both(values: torch.Tensor) -> tuple[TensorStatistics, TensorStatistics]:
    mine = DeviceStatistics()
    for part in values:
        mine.add(part)
    return mine.result, TensorStatistics.of(values.numpy(), BINS)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_counts_are_those_of_the_cpu(scale: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 4, 8, 9) * torch.tensor([0.1, 5.0, 1.0]).reshape(3, 1, 1, 1) * scale
    mine, other = _both(values)
    assert (mine.count, mine.minimum, mine.maximum) == (other.count, other.minimum, other.maximum)
    np.testing.assert_array_equal(mine.histogram.counts, other.histogram.counts)
    np.testing.assert_array_equal(mine.histogram.edges, other.histogram.edges)


def test_other_layouts_types_and_values_that_are_not_finite() -> None:
    values = torch.randn(2, 4, 8, 9)
    values[0, 0, 0, :3] = torch.tensor([np.nan, np.inf, -np.inf])
    mine, other = _both(values)
    assert (mine.nonfinite, mine.count) == (other.nonfinite, other.count) == (3, values.numel() - 3)
    strided, half = DeviceStatistics(), DeviceStatistics()
    strided.add(values.to(memory_format=torch.channels_last))
    half.add(torch.ones(4, dtype=torch.float16))
    np.testing.assert_array_equal(strided.result.histogram.counts, other.histogram.counts)
    assert half.result.maximum == 1.0


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torchs_default_type_changes_no_count(default: torch.dtype) -> None:
    values = torch.randn(3, 4, 8, 9)
    torch.set_default_dtype(default)
    try:
        mine, other = _both(values)
    finally:
        torch.set_default_dtype(torch.float32)
    assert mine.count == other.count == values.numel()
    np.testing.assert_array_equal(mine.histogram.counts, other.histogram.counts)


def test_large_tensors_are_sampled_evenly_and_their_ends_are_exact() -> None:
    torch.manual_seed(1)
    values = torch.randn(8, 16, 128, 128)
    mine, other = _both(values)
    assert mine.count < other.count == values.numel() and mine.count > 8 * COUNTED // 2
    assert mine.absmax == other.absmax and mine.minimum == other.minimum
    assert amax_of(mine, "max") == amax_of(other, "max")
    assert amax_of(mine, "percentile") == pytest.approx(amax_of(other, "percentile"), rel=0.1)
    # The error over a range is flat round its least: what counts is the error of all values, not the range itself.
    chosen, best = (squared_error(other, amax_of(s, "mse")) for s in (mine, other))
    assert chosen < 1.05 * best


@pytest.mark.parametrize("shape", [(4, 48, 40, 40), (1, 64, 80, 80), (1, 96, 112, 112), (2, 96, 61, 32), (8, 49, 768)])
@pytest.mark.parametrize("last", [False, True])
def test_every_channel_and_position_has_its_share_of_a_sample(shape: tuple[int, ...], last: bool) -> None:
    """Each value is one of as many magnitudes as an axis is long, so that the counts say what was taken."""
    for axis in range(1, len(shape)):
        length = shape[axis]
        along = [-1 if i == axis else 1 for i in range(len(shape))]
        values = (2.0 ** -torch.arange(length).remainder(16).float()).reshape(along).expand(shape).contiguous()
        if last and len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        mine = DeviceStatistics()
        for _ in range(64 // shape[0]):
            mine.add(values, shape[0])
        histogram = mine.result.histogram
        present = np.bincount(np.arange(length) % 16, minlength=16) / length
        edges = histogram.edges[:-1], histogram.edges[1:]
        taken = np.array([
            histogram.counts[(edges[0] <= v) & (edges[1] > v)].sum() for v in 2.0 ** -np.arange(16)
        ])
        np.testing.assert_allclose(taken / taken.sum(), present, rtol=0.1)


def test_values_that_are_not_finite_are_counted_once_wherever_the_buffer_ends() -> None:
    size = 3 * HELD // 8
    good, bad = torch.randn(size), torch.randn(size)
    bad[5] = math.nan
    statistics = DeviceStatistics()
    for values in (good, good, bad, good, good):
        statistics.add(values, images=size // COUNTED + 1)
    found = statistics.result
    assert found.nonfinite == 1 and found.count == 5 * size - 1
    assert found.absmax == max(float(good.abs().max()), float(bad.nan_to_num().abs().max()))
