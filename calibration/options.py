"""Options of the calibration."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.errors import DataError
from qdqtool.util.text import brief_repr


def _plain(number: float) -> float:
    """Return a number of numpy as a Python int or float."""
    return number if isinstance(number, int) else float(number)


@dataclass(frozen=True)
class Preprocess:
    """Conversion of an image to a network input; the defaults are those of Ultralytics YOLO.

    ``value = (pixel * scale - mean) / std`` for each channel, in the channel order of the network.

    Attributes:
        resize: ``letterbox`` keeps the aspect ratio and pads both sides evenly; ``stretch`` does
            not.
        bgr: Channel order blue, green, red instead of red, green, blue.
        scale: Factor for the 0 to 255 pixel values.
        mean: Subtracted after scaling, for each channel.
        std: Divided by after that.
        fill: Gray level of the padding, 0 to 255.
    """

    resize: str = "letterbox"
    bgr: bool = False
    scale: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    fill: int = 114

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(_plain, getattr(self, name))))
        if not len(self.mean) == len(self.std) == 3:
            raise DataError(
                "mean and std take three numbers, one for each channel", code="wrong-length"
            )
        object.__setattr__(self, "scale", _plain(self.scale))
        if self.resize not in ("letterbox", "stretch"):
            raise DataError(
                f"resize is '{self.resize}'; use letterbox or stretch",
                code="unknown-choice",
                parameter="resize",
            )
        if not all(s > 0 for s in self.std):
            raise DataError(
                f"std is {self.std}; every channel's must be above 0",
                code="out-of-range",
                parameter="std",
            )
        if not 0 <= self.fill <= 255:
            raise DataError(
                f"fill is {brief_repr(self.fill)}; it is a gray level from 0 to 255",
                code="out-of-range",
                parameter="fill",
            )


YOLO_PREPROCESS = Preprocess()
