"""Pictures and arrays as network inputs: finding, decoding, letterbox, layout, normalisation.

``open_data`` turns whatever the user has (a folder, a list of paths, npz, npy, arrays in memory) into a Dataset that
gives one sample at a time, so that memory does not depend on the number of images.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from calibration.arrays import ARRAY_SUFFIXES, array_file_source, sample_files_source
from calibration.dataset import Array, Dataset, InputSpec, Source, file_digest, printable
from calibration.memory import MemorySource, rows_of
from qdqtool import budgets
from qdqtool.errors import DataError
from qdqtool.files import note_read, read_input

__all__ = ["Dataset", "InputSpec", "Preprocess", "decode", "open_data", "prepare"]

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
# By content, whatever the file is called: no other decoder of Pillow's, least of all EPS, which starts Ghostscript.
_FORMATS = ("JPEG", "PNG", "BMP", "DIB", "WEBP")
DEFAULT_MAX_IMAGES = 512
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


def open_data(
    source: object,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess = YOLO_PREPROCESS,
    max_images: int = DEFAULT_MAX_IMAGES,
    size: tuple[int, int] | None = None,
) -> Dataset:
    """Opens calibration data for a model.

    Args:
        source: A folder of pictures (searched through, in the order of their paths), a ``.txt`` file with one path a
            line, one picture; an ``.npz`` of stacked arrays keyed by input name, an ``.npy``, a folder of ``.npz`` or
            ``.npy`` with one sample each; an iterable of ``{input name: array}``; or a Dataset, returned as it is.
        inputs: The model's inputs.
        preprocess: For pictures only; arrays are taken as they are.
        max_images: At most so many samples are used, evenly spread over the set.
        size: Height and width in pixels where the model leaves them open.

    Raises:
        DataError: There is nothing usable, or it does not fit the inputs.
    """
    if isinstance(source, Dataset):
        return source
    if max_images < 1:
        raise DataError(f"the number of calibration images is {max_images}; it must be at least 1")
    if not inputs:
        raise DataError("the model has no inputs to calibrate with")
    if isinstance(source, (str, os.PathLike)):
        return Dataset(_path_source(Path(source), inputs, preprocess, size), inputs, max_images)
    if isinstance(source, np.ndarray):
        source = {inputs[0].name: source}
    if isinstance(source, Mapping):
        return Dataset(MemorySource(rows_of(source, inputs), inputs), inputs, max_images)
    if isinstance(source, Iterable):
        return Dataset(MemorySource(source, inputs), inputs, max_images)
    raise DataError(f"calibration data of type {type(source).__name__} is not understood; give a folder of images")


def _path_source(
    path: Path, inputs: Sequence[InputSpec], preprocess: Preprocess, size: tuple[int, int] | None
) -> Source:
    suffix = path.suffix.lower()
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(n.startswith(".") for n in p.relative_to(path).parts))
        found = sorted(visible, key=lambda p: p.as_posix())
        pictures = [p for p in found if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()]
        if pictures:
            return ImageSource(pictures, path, inputs, preprocess, size)
        arrays = [p for p in found if p.suffix.lower() in ARRAY_SUFFIXES and p.is_file()]
        if arrays:
            return sample_files_source(arrays, path, inputs)
        kinds = ", ".join(sorted(s[1:] for s in IMAGE_SUFFIXES))
        raise DataError(f"{path}: no images ({kinds}) and no npz or npy files in this folder")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if suffix in ARRAY_SUFFIXES:
        return array_file_source(path, inputs)
    if suffix in IMAGE_SUFFIXES:
        return ImageSource([path], path.parent, inputs, preprocess, size)
    if suffix in (".txt", ".lst", ".list"):
        return ImageSource(_listed(path), path.parent, inputs, preprocess, size)
    raise DataError(f"{path}: not a folder, a list of images (.txt), an image, .npz or .npy")


def _listed(path: Path) -> list[Path]:
    """The paths in a text file; relative ones count from the file's folder, else from the current one."""
    try:
        lines = read_input(path, budgets.LIST_FILE, error=DataError).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as a list of images: {error}") from error
    result = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if "\0" in text:
            raise DataError(f"{path}: line {number}: no file name can hold a NUL")
        if text and not text.startswith("#"):
            beside = path.parent / text
            result.append(beside if beside.exists() or not Path(text).exists() else Path(text))
    if not result:
        raise DataError(f"{path}: lists no images")
    return result


class ImageSource(Source):
    """Pictures for a model with one input of rank 4, NCHW or NHWC, with 3 channels or 1."""

    single_rows = True

    def __init__(
        self,
        paths: Sequence[Path],
        root: Path,
        inputs: Sequence[InputSpec],
        preprocess: Preprocess,
        size: tuple[int, int] | None,
    ) -> None:
        if len(inputs) != 1:
            names = ", ".join(f"'{i.name}'" for i in inputs)
            raise DataError(f"{root}: images cannot feed a model with {len(inputs)} inputs ({names}); give npz files")
        self.spec = inputs[0]
        self.paths = list(paths)
        self.root = root
        self.integer = self.spec.numpy_dtype.kind in "iu"
        if self.integer and preprocess.scale == YOLO_PREPROCESS.scale:
            preprocess = replace(preprocess, scale=1.0)  # the network divides by 255 itself; 0 to 1 would round to 0
        self.preprocess = preprocess
        self.nhwc, self.channels, self.height, self.width = _layout(self.spec, size)
        for path in self.paths:
            note_read(path)

    def count(self) -> int:
        return len(self.paths)

    @property
    def is_images(self) -> bool:
        return True

    def name(self, index: int) -> str:
        path = self.paths[index]
        return printable(path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path))

    def digest(self, index: int) -> bytes:
        return self.name(index).encode() + file_digest(self.paths[index])

    def settings(self) -> str:
        return f"{self.preprocess} {self.channels}x{self.height}x{self.width} nhwc={self.nhwc}"

    def portion(self, indices: Sequence[int]) -> ImageSource:
        part = copy.copy(self)
        part.root = Path(os.path.abspath(self.root))
        part.paths = [Path(os.path.abspath(self.paths[i])) for i in indices]
        return part

    def load(self, index: int) -> dict[str, Array]:
        pixels = decode(self.paths[index])
        array = prepare(pixels, self.height, self.width, self.preprocess, self.channels)
        if self.nhwc:
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        if self.integer:
            limits = np.iinfo(self.spec.numpy_dtype)
            array = np.rint(array, out=array).clip(limits.min, limits.max)
        return {self.spec.name: array.astype(self.spec.numpy_dtype, copy=False)}


def _layout(spec: InputSpec, size: tuple[int, int] | None) -> tuple[bool, int, int, int]:
    """Whether the input is NHWC, its channels, height and width."""
    shown = spec.shape_text()
    if len(spec.shape) != 4:
        raise DataError(f"input '{spec.name}' {shown} does not take images (rank 4 needed); give npz files")
    nhwc = spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    dims = (spec.shape[3], spec.shape[1], spec.shape[2]) if nhwc else spec.shape[1:]
    channels, height, width = (*dims,)
    channels = 3 if channels is None else channels
    if channels not in (1, 3):
        raise DataError(f"input '{spec.name}' {shown} takes {channels} channels, images have 3 or 1; give npz files")
    if height is None or width is None:
        if size is None:
            raise DataError(f"input '{spec.name}' {shown} leaves the image size open; give it, for example 640x640")
        height, width = height or size[0], width or size[1]
    if height < 1 or width < 1 or height * width > budgets.INPUT_PIXELS:
        raise DataError(f"input '{spec.name}' {shown}: image size {height}x{width} is not possible; the limit is "
                        f"{budgets.INPUT_PIXELS} pixels")
    return nhwc, channels, height, width


def decode(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """Reads a picture as OpenCV's imread does: turned as its EXIF data says, without alpha, 8 bits.

    Returns:
        uint8 [height, width, 3], RGB.

    Raises:
        DataError: It cannot be read, is no regular file, is cut off, or has more pixels than
            :data:`qdqtool.budgets.PICTURE_PIXELS`.
    """
    try:
        if not Path(path).is_file():
            raise DataError("no regular file" if Path(path).exists() else "No such file or directory")
        with Image.open(path, formats=_FORMATS) as picture:
            pixels = picture.width * picture.height
            if pixels > budgets.PICTURE_PIXELS:
                raise DataError(f"{picture.width}x{picture.height} pixels; the limit is {budgets.PICTURE_PIXELS}")
            with _DECODING.taken(pixels):
                return np.asarray(_as_rgb(picture))
    except DataError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything in the decoders
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
        raise DataError(reason.replace(str(path), Path(path).name)) from error


def _as_rgb(picture: Image.Image) -> Image.Image:
    turned = ImageOps.exif_transpose(picture)
    if turned.mode.startswith("I"):  # 16 bits: the high byte, as imread does; convert() would clip at 255
        return _high_bytes(turned).convert("RGB")
    return turned.convert("RGB")


def _high_bytes(picture: Image.Image) -> Image.Image:
    """The high bytes of 16-bit grey levels, a strip at a time: numpy's copies of the whole would take gigabytes."""
    result = np.empty((picture.height, picture.width), np.uint8)
    step = max(1, _STRIP // max(picture.width, 1))
    for top in range(0, picture.height, step):
        strip = np.asarray(picture.crop((0, top, picture.width, min(top + step, picture.height))))
        result[top : top + step] = (strip.astype(np.int32) >> 8).clip(0, 255)
    return Image.fromarray(result)


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
