"""What was noticed about calibration samples, and what of it is worth a warning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FEW_IMAGES = 100  # NVIDIA's and Ultralytics' advice is several hundred; below this, ranges depend on the choice
_FAR_OUTSIDE = 8.0  # normalised inputs (mean and std) stay well within; 0 to 255 data do not


@dataclass
class Looks:
    """What was noticed about the samples loaded; ``low`` and ``high`` are over all of them."""

    total: int = 0
    low: float = np.inf
    high: float = -np.inf
    constant: int = 0
    nonfinite: int = 0
    broken: int = 0

    def merge(self, other: Looks) -> None:
        """Takes in what was noticed about other samples."""
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.constant += other.constant
        self.nonfinite += other.nonfinite
        self.broken += other.broken

    def add(self, low: float, high: float, constant: bool, nonfinite: bool) -> None:
        self.total += 1
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.constant += constant
        self.nonfinite += nonfinite

    def warnings(self) -> Iterator[str]:
        total, low, high = self.total, self.low, self.high
        if not total:
            return
        if self.broken:
            yield f"{self.broken} of {total + self.broken} images could not be read and were skipped"
        if total < FEW_IMAGES:
            yield f"only {total} calibration image{'s' * (total != 1)}; {FEW_IMAGES} or more give steadier ranges"
        if max(-low, high) > _FAR_OUTSIDE:  # minus infinity where nothing was finite
            yield (
                f"inputs reach from {low:g} to {high:g}; YOLO models take 0 to 1: "
                "is the division by 255 missing (scale 1/255)?"
            )
        elif low >= 0 and 0 < high < 1.5 / 255:
            yield f"inputs never exceed {high:g}; YOLO models take 0 to 1: were they divided by 255 twice?"
        if self.constant:
            yield f"{self.constant} of {total} images are constant (every value the same)"
        if self.nonfinite:
            yield f"{self.nonfinite} of {total} samples hold NaN or infinities"
