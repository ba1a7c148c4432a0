"""Preprocessing options of calibration images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from qdqtool.errors import DataError
from qdqtool.util.text import brief_repr

if TYPE_CHECKING:
    import distributed
    from PIL.Image import Image

RESIZES = ("letterbox", "corner", "stretch", "crop")
INTERPOLATIONS = ("linear", "bilinear", "bicubic")
# Function of the user that converts an upright RGB image to the network's input, such as a
# transform of torchvision. The result may have a batch dimension.
ImageFunction = Callable[["Image"], Any]
DaskCluster: TypeAlias = Union[str, "distributed.Client"]
"""Address of a Dask scheduler, ``local:N`` for N processes on this machine, or a client of Dask."""


def _to_python_number(number: float) -> float:
    return number if isinstance(number, int) else float(number)


@dataclass(frozen=True)
class Preprocess:
    """Conversion of an image to a network input; the defaults are those of Ultralytics YOLO.

    ``value = (pixel * scale - mean) / std`` for each channel, in the channel order of the network.

    Attributes:
        resize: ``letterbox`` keeps the aspect ratio and pads both sides evenly; ``corner`` pads
            the right and the bottom. ``stretch`` does not keep the aspect ratio. ``crop`` resizes
            the image and takes its center, as torchvision's Resize and CenterCrop.
        bgr: Channel order blue, green, red instead of red, green, blue.
        scale: Factor for the 0 to 255 pixel values.
        mean: Mean of each channel, subtracted after scaling.
        std: Standard deviation of each channel, by which the difference is divided.
        fill: Gray level of the padding, 0 to 255.
        interpolation: ``linear`` as OpenCV's INTER_LINEAR, without antialiasing when images get
            smaller; ``bilinear`` and ``bicubic`` as Pillow, with antialiasing.
        crop: Part of each side of the resized image that ``resize="crop"`` keeps, above 0 and at
            most 1: 0.875 for 224 of 256 pixels.
    """

    resize: str = "letterbox"
    bgr: bool = False
    scale: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    fill: int = 114
    interpolation: str = field(default="linear", repr=False)
    crop: float = field(default=1.0, repr=False)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(_to_python_number, getattr(self, name))))
        if not len(self.mean) == len(self.std) == 3:
            raise DataError(
                "`mean` and `std` each need three numbers, one for each channel",
                code="wrong-length",
            )
        object.__setattr__(self, "scale", _to_python_number(self.scale))
        object.__setattr__(self, "crop", _to_python_number(self.crop))
        for name, choices in (("resize", RESIZES), ("interpolation", INTERPOLATIONS)):
            if getattr(self, name) not in choices:
                raise DataError(
                    f"{name} is {brief_repr(getattr(self, name))}; use one of {', '.join(choices)}",
                    code="unknown-choice",
                    parameter=name,
                )
        if not 0.0 < self.crop <= 1.0:
            raise DataError(
                f"crop is {brief_repr(self.crop)}; use the fraction of each image side to keep, "
                "above 0 and at most 1",
                code="out-of-range",
                parameter="crop",
            )
        if not all(s > 0 for s in self.std):
            raise DataError(
                f"`std` is {self.std}; use a number above 0 for each channel",
                code="out-of-range",
                parameter="std",
            )
        if not 0 <= self.fill <= 255:
            raise DataError(
                f"fill is {brief_repr(self.fill)}; use a gray level from 0 to 255",
                code="out-of-range",
                parameter="fill",
            )

    def as_json(self) -> dict[str, Any]:
        """Return all fields as a JSON object."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


YOLO_PREPROCESS = Preprocess()
