"""One picture as a network input: decoding, letterbox, layout, normalisation."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from qdqtool import budgets
from qdqtool.errors import DataError

# By content, whatever the file is called: no other decoder of Pillow's, least of all EPS, which starts Ghostscript.
_FORMATS = ("JPEG", "PNG", "BMP", "DIB", "WEBP")
_STRIP = 1 << 22  # pixels


@dataclass(frozen=True)
class Preprocess:
    """How a picture becomes a network input; the defaults are those of Ultralytics YOLO.

    ``value = (pixel * scale - mean) / std`` for each channel, in the order the network takes them.

    Attributes:
        resize: ``letterbox`` keeps the aspect ratio and pads both sides evenly; ``stretch`` does not.
        bgr: Channel order blue, green, red instead of red, green, blue.
        scale: Factor for the 0 to 255 pixel values.
        mean: Subtracted after scaling, for each channel.
        std: Divided by after that.
        fill: Grey level of the padding, 0 to 255.
    """

    resize: str = "letterbox"
    bgr: bool = False
    scale: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    fill: int = 114

    def __post_init__(self) -> None:
        if self.resize not in ("letterbox", "stretch"):
            raise DataError(f"resize is '{self.resize}'; use letterbox or stretch")
        if len(self.mean) != 3 or len(self.std) != 3:
            raise DataError("mean and std take three numbers, one for each channel")
        if not all(s > 0 for s in self.std):
            raise DataError(f"std is {self.std}; every channel's must be above 0")
        if not 0 <= self.fill <= 255:
            raise DataError(f"fill is {self.fill}; it is a grey level from 0 to 255")


YOLO_PREPROCESS = Preprocess()


def decode(source: str | os.PathLike[str] | IO[bytes], name: str = "") -> npt.NDArray[np.uint8]:
    """Reads a picture as OpenCV's imread does: turned as its EXIF data says, without alpha, 8 bits.

    Args:
        source: A path, or an open file.
        name: What to call an open file in messages.

    Returns:
        uint8 [height, width, 3], RGB.

    Raises:
        DataError: It cannot be read, is no regular file, is cut off, has a side of more than
            :data:`qdqtool.budgets.PICTURE_SIDE` pixels, or more than :data:`qdqtool.budgets.PICTURE_PIXELS` in all.
    """
    with decoded(source, name) as pixels:
        return pixels


@contextlib.contextmanager
def decoded(source: str | os.PathLike[str] | IO[bytes], name: str = "") -> Iterator[npt.NDArray[np.uint8]]:
    """As :func:`decode`; until the end of the block the picture counts among those that are in memory.

    A thread that waits for its turn must not hold another one.
    """
    with contextlib.ExitStack() as stack:
        yield _decoded(source, name, stack)


def _decoded(
    source: str | os.PathLike[str] | IO[bytes], name: str, stack: contextlib.ExitStack
) -> npt.NDArray[np.uint8]:
    try:
        if isinstance(source, str | os.PathLike) and not Path(source).is_file():
            raise DataError("no regular file" if Path(source).exists() else "No such file or directory")
        with Image.open(source, formats=_FORMATS) as picture:
            pixels = picture.width * picture.height
            if pixels > budgets.PICTURE_PIXELS:
                raise DataError(f"{picture.width}x{picture.height} pixels; the limit is {budgets.PICTURE_PIXELS}")
            if max(picture.size) > budgets.PICTURE_SIDE:
                raise DataError(f"{picture.width}x{picture.height} pixels; a side may have {budgets.PICTURE_SIDE}")
            stack.enter_context(_DECODING.taken(pixels))
            return _as_rgb(picture)
    except DataError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything in the decoders
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
        if isinstance(source, str | os.PathLike):
            raise DataError(reason.replace(str(source), Path(source).name)) from error
        raise DataError(reason.replace(repr(source), repr(name))) from error


def _as_rgb(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """The pixels, converted a strip at a time: Pillow's and numpy's copies of the whole would take a gigabyte."""
    ImageOps.exif_transpose(picture, in_place=True)
    width, height = picture.size
    result = np.empty((height, width, 3), np.uint8)
    step = max(1, _STRIP // max(width, 1))
    for top in range(0, height, step):
        strip = picture.crop((0, top, width, min(top + step, height)))
        if strip.mode.startswith("I"):  # 16 bits: the high byte, as imread does; convert() would clip at 255
            result[top : top + step] = (np.asarray(strip).astype(np.int32) >> 8).clip(0, 255)[..., None]
        else:
            result[top : top + step] = np.asarray(strip.convert("RGB"))
    return result


class _Pixels:
    """How many pixels may be decoded at the same time, over all threads; one picture alone always may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + pixels <= self._limit)
            self._used += pixels
        try:
            yield
        finally:
            with self._changed:
                self._used -= pixels
                self._changed.notify_all()


_DECODING = _Pixels(budgets.PIXELS_AT_ONCE)


def prepare(
    pixels: npt.NDArray[np.uint8], height: int, width: int, preprocess: Preprocess = YOLO_PREPROCESS, channels: int = 3
) -> npt.NDArray[np.float32]:
    """Resizes, pads and normalises one picture.

    Args:
        pixels: uint8 [h, w, 3], RGB.
        height: Of the result, in pixels.
        width: Of the result, in pixels.
        preprocess: See :class:`Preprocess`.
        channels: 3, or 1 for the luminance (ITU-R 601, as OpenCV's).

    Returns:
        float32 [1, channels, height, width], contiguous.
    """
    canvas = _fitted(pixels, height, width, preprocess)
    if channels == 1:
        canvas = np.asarray(Image.fromarray(canvas).convert("L"))[..., None]
    elif preprocess.bgr:
        canvas = canvas[..., ::-1]
    result = np.multiply(canvas.transpose(2, 0, 1), np.float32(preprocess.scale), dtype=np.float32, order="C")
    if any(preprocess.mean):
        result -= np.asarray(preprocess.mean[:channels], np.float32)[:, None, None]
    if any(s != 1.0 for s in preprocess.std):
        result /= np.asarray(preprocess.std[:channels], np.float32)[:, None, None]
    return result[None]


def _fitted(pixels: npt.NDArray[np.uint8], height: int, width: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    """The picture in a canvas of the network's size, uint8 [height, width, 3].

    The letterbox is that of Ultralytics (LetterBox, auto=False): scale by the smaller ratio, up as well as down,
    round to whole pixels, and pad both sides evenly, the odd pixel to the right and bottom.
    """
    h, w = pixels.shape[:2]
    if (h, w) == (height, width):
        return pixels
    if preprocess.resize == "stretch":
        return _resized(pixels, height, width)
    ratio = min(height / h, width / w)
    new_h, new_w = max(1, round(h * ratio)), max(1, round(w * ratio))
    canvas = np.full((height, width, 3), preprocess.fill, np.uint8)
    top, left = round((height - new_h) / 2 - 0.1), round((width - new_w) / 2 - 0.1)
    canvas[top : top + new_h, left : left + new_w] = _resized(pixels, new_h, new_w)
    return canvas


def _resized(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Bilinear without antialiasing, which is what OpenCV's INTER_LINEAR does and YOLO models are trained with."""
    h, w = pixels.shape[:2]
    if (h, w) == (height, width):
        return pixels
    picture = Image.fromarray(pixels)
    extent = (0, 0, w, h)
    return np.asarray(picture.transform((width, height), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR))


def describe(preprocess: Preprocess) -> str:
    """The preprocessing in a few words, for a report."""
    order = "BGR" if preprocess.bgr else "RGB"
    norm: list[Any] = [f"scale {preprocess.scale:.6g}"]
    if any(preprocess.mean):
        norm.append(f"mean {list(preprocess.mean)}")
    if any(s != 1.0 for s in preprocess.std):
        norm.append(f"std {list(preprocess.std)}")
    return f"{preprocess.resize}, {order}, {', '.join(map(str, norm))}"
