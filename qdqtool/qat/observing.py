"""Statistics of activations, collected on the device that they are on."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from calibration import TensorStatistics
from calibration.histogram import OCTAVES, top_of

# A call with more values than this counts runs of values, evenly spread, half as many or more altogether; the smallest
# and largest are always exact.
COUNTED = 1 << 15
# No layout repeats with the length of a run: widths and channels are products of small primes.
RUN = 61


class DeviceStatistics:
    """Collects what :class:`calibration.TensorStatistics` holds, without bringing the values to the CPU.

    Only the counts of a batch (at most 20481 integers) and four numbers leave the device.
    """

    def __init__(self) -> None:
        self.result = TensorStatistics()
        self._calls = 0

    def _sampled(self, flat: Tensor) -> Tensor:
        """All values, or every n-th run of them, from another run on each time."""
        step = math.ceil(flat.numel() / COUNTED)
        first = self._calls % step
        self._calls += 1
        if step == 1:
            return flat
        runs = flat[: flat.numel() // RUN * RUN].view(-1, RUN)
        return runs[first::step].reshape(-1)

    def add(self, values: Tensor) -> None:
        """Takes in an activation of any shape, floating type and device."""
        flat = _flat(values.detach()).float()
        if not flat.numel():
            return
        low, high = (float(v) for v in torch.stack(torch.aminmax(flat)).tolist())
        sampled = self._sampled(flat)
        stats = self.result
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = torch.isfinite(flat)
            stats.nonfinite += int((~finite).sum())
            flat = flat[finite]
            if not flat.numel():
                return
            low, high = (float(v) for v in torch.stack(torch.aminmax(flat)).tolist())
            sampled = sampled[torch.isfinite(sampled)]
        stats.minimum, stats.maximum = min(stats.minimum, low), max(stats.maximum, high)
        stats.count += sampled.numel()
        counter = stats.counter
        counter.raise_top(top_of(max(-low, high)))
        shift = 23 - counter.bits
        lowest = ((counter.top - OCTAVES + 127) << 23) - (1 << shift)  # see calibration.histogram
        bins = sampled.view(torch.int32).bitwise_and(0x7FFFFFFF).clamp_min_(lowest).sub_(lowest)
        counts = torch.bincount(bins.bitwise_right_shift_(shift)).cpu().numpy()
        counter.counts[: len(counts)] += counts.astype(np.int64)


def _flat(values: Tensor) -> Tensor:
    """All values in the order in which they lie in memory, without a copy where that is possible."""
    if values.is_contiguous():
        return values.view(-1)
    order = sorted(range(values.ndim), key=lambda d: -values.stride(d))
    return values.permute(order).reshape(-1)
