"""Statistics of activations, collected on the device of the activations."""

import math

import torch
from torch import Tensor

from calibration import TensorStatistics
from calibration.statistics import OCTAVES, top_exponent

# If a tensor has more values per image, only evenly spread runs of values are counted, with at
# least half of this number of values. The smallest and largest values are always exact.
SAMPLED_PER_IMAGE = 1 << 13
# Length of a run of values. The length is a prime, and widths and channel counts are products of
# small primes, so runs start at different columns and channels.
RUN_LENGTH = 61
# Step of the first run's offset from call to call, as a part of the distance between runs.
# Multiples of the golden ratio modulo 1 are evenly spread.
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# Resolution of the histograms: no bin is wider than 0.4 % of the largest magnitude, which is finer
# than the steps of the search for ranges.
HISTOGRAM_BINS = 512
# Number of values that are collected in a buffer and then counted together, because counting
# launches a dozen kernels and waits for the device. Each tensor has one permanent buffer (512 kB):
# small copies between the activations would fragment the memory.
BUFFER_SIZE = 1 << 17


class DeviceStatistics:
    """Collects :class:`calibration.TensorStatistics` without moving the values to the CPU.

    Only the counts (at most 5121 integers) and the smallest and largest values are copied to the
    CPU, once for several activations.
    """

    def __init__(self) -> None:
        self._result = TensorStatistics(HISTOGRAM_BINS)
        self._calls = 0
        self._buffer: Tensor | None = None
        self._ends: list[Tensor] = []
        self._size = 0

    @property
    def result(self) -> TensorStatistics:
        """Statistics of all activations added so far.

        The number of NaN and infinities is exact only if all values are counted, not samples.
        """
        self._count()
        return self._result

    def add(self, values: Tensor, images: int = 1) -> None:
        """Add an activation of any shape, floating type and device.

        Args:
            values: The activation.
            images: Number of images in the activation.
        """
        size = values.numel()
        if not size:
            return
        # Avoid calls of torch: for a small image, one call takes as long as a layer of the network.
        if values.requires_grad:
            values = values.detach()
        if values.dtype is not torch.float32:
            values = values.float()
        if not values.is_contiguous():
            values = _to_memory_order(values)
        ends = torch.aminmax(values)
        sampled = self._sample(values, size, math.ceil(size / (SAMPLED_PER_IMAGE * images)))
        size = sampled.numel()
        if self._buffer is None or self._size + size > len(self._buffer):
            self._count()
            if self._buffer is None or size > len(self._buffer):
                self._buffer = torch.empty(
                    max(size, BUFFER_SIZE), dtype=torch.float32, device=values.device
                )
        self._buffer[self._size : self._size + size].view(sampled.shape).copy_(sampled)
        self._size += size
        self._ends.extend(ends)

    def _sample(self, values: Tensor, size: int, step: int) -> Tensor:
        """Return all values if `step` is 1, else every n-th run of values, [runs, RUN_LENGTH].

        The first run differs from call to call.
        """
        first = int(self._calls * GOLDEN_RATIO % 1.0 * step)
        self._calls += 1
        if step == 1:
            return values
        runs = (size // RUN_LENGTH - first + step - 1) // step
        offset = values.storage_offset() + first * RUN_LENGTH
        return values.as_strided((runs, RUN_LENGTH), (step * RUN_LENGTH, 1), offset)

    def _count(self) -> None:
        """Add the values in the buffer to the statistics, and empty the buffer."""
        if self._buffer is None or not self._ends:
            return
        sampled, ends = self._buffer[: self._size], torch.stack(self._ends).cpu()
        self._ends, self._size = [], 0
        statistics = self._result
        if not bool(torch.isfinite(ends).all()):
            finite = torch.isfinite(sampled)
            statistics.nonfinite += max(1, int((~finite).sum()))
            sampled = sampled[finite]
            ends = ends[torch.isfinite(ends)]
            if sampled.numel():
                ends = torch.cat([ends, torch.stack(torch.aminmax(sampled)).cpu()])
        if not ends.numel():
            return
        low, high = (float(v) for v in torch.aminmax(ends))
        statistics.minimum = min(statistics.minimum, low)
        statistics.maximum = max(statistics.maximum, high)
        statistics.count += sampled.numel()
        counter = statistics.counter
        counter.raise_top(top_exponent(max(-low, high)))
        magnitudes = sampled.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        bins = magnitudes.bitwise_right_shift_(23 - counter.bits)
        # All float32 bit patterns have a bin here. The counter has one bin for all values below its
        # window (see calibration.statistics), so these counts are added up.
        lowest = ((counter.top - OCTAVES + 127) << counter.bits) - 1
        counts = torch.bincount(bins, minlength=lowest + 1)
        counts[lowest] = counts[: lowest + 1].sum()
        window = counts[lowest:].cpu().numpy()
        counter.counts[: len(window)] += window


def _to_memory_order(values: Tensor) -> Tensor:
    """Return a contiguous tensor with dimensions in memory order, without a copy if possible."""
    order = sorted(range(values.ndim), key=lambda d: -values.stride(d))
    return values.permute(order).contiguous()
