"""Statistics of activations that are sampled on the device of the activations."""

import math

import torch
from torch import Tensor

from calibration import TensorStatistics
from calibration.statistics import top_exponent

# If a tensor has more values for each image, only evenly spread runs of consecutive values are
# counted. The runs have at least half of this number of values. The smallest and largest values are
# always exact.
SAMPLED_PER_IMAGE = 1 << 13
# Length of a run of values. It is a prime number, but widths and numbers of channels are products
# of small primes. Runs therefore start at different columns and channels.
RUN_LENGTH = 61
# In each call, the offset of the first run grows by this fraction of the distance between runs.
# Multiples of the golden ratio modulo 1 are evenly spread.
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# Number of bins of a histogram. No bin is wider than 0.4 % of the largest magnitude, which is finer
# than the steps of the search for ranges.
HISTOGRAM_BINS = 512


class DeviceStatistics:
    """Collects :class:`calibration.TensorStatistics` from values sampled on the device.

    Attributes:
        result: Statistics of all activations added so far. The number of NaN and infinities is
            exact only if no values were left out.
    """

    def __init__(self) -> None:
        self.result = TensorStatistics(HISTOGRAM_BINS)
        self._calls = 0

    def add(self, values: Tensor, images: int = 1) -> None:
        """Add an activation of any shape, floating type and device.

        Args:
            values: The activation.
            images: Number of images in the activation.
        """
        size = values.numel()
        if not size:
            return
        values = values.detach().float()
        step = math.ceil(size / (SAMPLED_PER_IMAGE * images))
        if step == 1:
            self.result.add(values.cpu().numpy())
            return
        low, high = torch.stack(torch.aminmax(values)).tolist()
        self.result.add(self._sample_runs(values, step).cpu().numpy())
        if not (math.isfinite(low) and math.isfinite(high)):
            self.result.nonfinite += 1
            return
        self.result.minimum = min(self.result.minimum, low)
        self.result.maximum = max(self.result.maximum, high)
        self.result.counter.raise_top(top_exponent(max(-low, high)))

    def _sample_runs(self, values: Tensor, step: int) -> Tensor:
        """Return every n-th run of values, of shape [runs, RUN_LENGTH].

        `step` is n. The first run differs from call to call.
        """
        if not values.is_contiguous():
            values = _to_memory_order(values)
        first = int(self._calls * GOLDEN_RATIO % 1.0 * step)
        self._calls += 1
        runs = (values.numel() // RUN_LENGTH - first + step - 1) // step
        offset = values.storage_offset() + first * RUN_LENGTH
        return values.as_strided((runs, RUN_LENGTH), (step * RUN_LENGTH, 1), offset)


def _to_memory_order(values: Tensor) -> Tensor:
    """Return a contiguous tensor with the dimensions in memory order. Copy only if necessary."""
    order = sorted(range(values.ndim), key=lambda d: -values.stride(d))
    return values.permute(order).contiguous()
