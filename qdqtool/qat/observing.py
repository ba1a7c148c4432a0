"""Statistics of activations, collected on the device that they are on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from calibration import TensorStatistics
from calibration.statistics import OCTAVES, top_of

# Of a tensor with more values than this to an image, runs of values are counted, evenly spread, half as many or more
# altogether; the smallest and largest are always exact.
COUNTED = 1 << 13
# No layout repeats with the length of a run: widths and channels are products of small primes.
RUN = 61
# So much further on in the period each call starts: however many there are, their starts are spread evenly.
GOLDEN = (math.sqrt(5) - 1) / 2
# Resolution of the histograms: no bin is wider than 0.4 % of the largest magnitude, finer than ranges are searched.
BINS = 512
# Values that are kept until they are counted together: counting takes a dozen kernels and waits for the device, so
# that it happens once in several calls. They are copied to 512 kB for each tensor that are there from the first call to
# the last: small copies among the activations would keep the memory of these from being used again.
HELD = 1 << 17


class DeviceStatistics:
    """Collects what :class:`calibration.TensorStatistics` holds, without bringing the values to the CPU.

    Only counts (at most 5121 integers) and the ends of each call leave the device, once in several calls.
    """

    def __init__(self) -> None:
        self._result = TensorStatistics(BINS)
        self._calls = 0
        self._buffer: Tensor | None = None
        self._ends: list[Tensor] = []
        self._size = 0

    @property
    def result(self) -> TensorStatistics:
        """What was seen so far. Of large tensors that held NaN or infinities, the sampled ones are counted."""
        self._count()
        return self._result

    def add(self, values: Tensor, images: int = 1) -> None:
        """Takes in an activation of any shape, floating type and device, of so many images."""
        size = values.numel()
        if not size:
            return
        # No call of torch more than needed: for one small image they cost as much as the layer itself.
        if values.requires_grad:
            values = values.detach()
        if values.dtype is not torch.float32:
            values = values.float()
        if not values.is_contiguous():
            values = _in_order_of_memory(values)
        ends = torch.aminmax(values)
        sampled = self._sampled(values, size, math.ceil(size / (COUNTED * images)))
        size = sampled.numel()
        if self._buffer is None or self._size + size > len(self._buffer):
            self._count()
            if self._buffer is None or size > len(self._buffer):
                self._buffer = torch.empty(max(size, HELD), dtype=torch.float32, device=values.device)
        self._buffer[self._size : self._size + size].view(sampled.shape).copy_(sampled)
        self._size += size
        self._ends.extend(ends)

    def _sampled(self, values: Tensor, size: int, step: int) -> Tensor:
        """All values, or every n-th run of them, from another run on each time."""
        first = int(self._calls * GOLDEN % 1.0 * step)
        self._calls += 1
        if step == 1:
            return values
        runs = (size // RUN - first + step - 1) // step
        return values.as_strided((runs, RUN), (step * RUN, 1), values.storage_offset() + first * RUN)

    def _count(self) -> None:
        if self._buffer is None or not self._ends:
            return
        sampled, ends = self._buffer[: self._size], torch.stack(self._ends).cpu()
        self._ends, self._size = [], 0
        stats = self._result
        if not bool(torch.isfinite(ends).all()):
            finite = torch.isfinite(sampled)
            stats.nonfinite += max(1, int((~finite).sum()))
            sampled = sampled[finite]
            ends = ends[torch.isfinite(ends)]
            if sampled.numel():
                ends = torch.cat([ends, torch.stack(torch.aminmax(sampled)).cpu()])
        if not ends.numel():
            return
        low, high = (float(v) for v in torch.aminmax(ends))
        stats.minimum, stats.maximum = min(stats.minimum, low), max(stats.maximum, high)
        stats.count += sampled.numel()
        counter = stats.counter
        counter.raise_top(top_of(max(-low, high)))
        lowest = ((counter.top - OCTAVES + 127) << counter.bits) - 1  # see calibration.statistics
        bins = sampled.view(torch.int32).bitwise_and_(0x7FFFFFFF).bitwise_right_shift_(23 - counter.bits)
        counts = torch.bincount(bins, minlength=lowest + 1)  # bins of all float32; below the window they are one
        counts[lowest] = counts[: lowest + 1].sum()
        found = counts[lowest:].cpu().numpy()
        counter.counts[: len(found)] += found


def _in_order_of_memory(values: Tensor) -> Tensor:
    """The values in the order in which they lie in memory, contiguous, without a copy where that is possible."""
    order = sorted(range(values.ndim), key=lambda d: -values.stride(d))
    return values.permute(order).contiguous()
