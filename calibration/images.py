"""Conversion of image files to network inputs: decoding, resizing, normalization, layout."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import BmpImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from calibration.dataset import Array, FilesSource, InputSpec
from calibration.options import YOLO_PREPROCESS, ImageFunction, Preprocess
from calibration.presets import find_preprocess, name_preprocess, without_normalization
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.util import limits
from qdqtool.util.files import find_reading_problem, record_input
from qdqtool.util.text import format_reason

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
# Messages list the formats in this order.
OTHER_IMAGE_SUFFIXES = tuple(".tif .tiff .gif .heic .heif .avif .jp2 .jxl .ppm .pgm .tga".split())
# Only these decoders of Pillow are used, whatever the suffix of a file. Other decoders are unsafe:
# the decoder for EPS starts Ghostscript.
_FORMATS = (
    JpegImagePlugin.JpegImageFile.format,
    PngImagePlugin.PngImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
    BmpImagePlugin.DibImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
)
_ORIENTATION = 0x0112  # EXIF tag
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

ImageFile = str | os.PathLike[str] | IO[bytes]


# Decoding -----------------------------------------------------------------------------------------


def read_image(source: ImageFile) -> Image.Image:
    """Decode an image like OpenCV's imread: upright by its EXIF data, without alpha, 8 bits.

    Returns:
        RGB image of Pillow.

    Raises:
        DataError: The file cannot be read, has another format, is damaged, is not a regular file,
            or exceeds :data:`qdqtool.util.limits.IMAGE_FILE` or
            :data:`qdqtool.util.limits.IMAGE_PIXELS`.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(source, str | os.PathLike):
                source = stack.enter_context(_open_file(source))
            image = stack.enter_context(_open_image(source))
            width, height = image.size
            if width * height > limits.IMAGE_PIXELS:  # checked before the pixels are decoded
                raise DataError(
                    f"{width}x{height} exceeds the limit of {limits.IMAGE_PIXELS} pixels; make the "
                    "image smaller, or leave the image out",
                    code="image-too-large",
                )
            return _to_upright_rgb(image)
        except QdqtoolError:
            raise
        except Exception as error:  # the decoders raise nearly anything for a damaged file
            raise DataError(
                getattr(error, "strerror", None) or format_reason(error), code="file-damaged"
            ) from error


def _open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading. The caller adds the path to error messages."""
    code, problem = find_reading_problem(path)
    if problem:
        raise DataError(problem, code=code)
    limits.check_size(os.path.getsize(path), limits.IMAGE_FILE, "the file has", DataError)
    return open(path, "rb")


def _open_image(file: IO[bytes]) -> Image.Image:
    """Open an image like `PIL.Image.open`, but only with the decoders in `_FORMATS`.

    `PIL.Image.open` itself is not called: Ultralytics replaces it by a function that installs a
    package if a file is not an image.
    """
    file.seek(0)
    start = file.read(16)
    for image_format in _FORMATS:
        open_format, accepts = Image.OPEN[image_format]
        # The decoders raise these exceptions for a file of another format.
        with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):
            if accepts is None or accepts(start) is True:
                file.seek(0)
                return open_format(file, "")
    raise DataError("not a JPEG, PNG, BMP or WebP image", code="wrong-format")


def _to_upright_rgb(image: Image.Image) -> Image.Image:
    transposition = _TRANSPOSITIONS.get(image.getexif().get(_ORIENTATION, 1))
    if image.mode.startswith("I"):  # keep the high byte of 16 bits, as OpenCV's imread does
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "RGB":
        image.load()  # reads the pixels before the file is closed
    else:
        image = image.convert("RGB")
    return image if transposition is None else image.transpose(transposition)


# Preprocessing ------------------------------------------------------------------------------------


def prepare_image(
    image: npt.NDArray[np.uint8] | Image.Image,
    height: int,
    width: int,
    preprocess: Preprocess = YOLO_PREPROCESS,
    channels: int = 3,
) -> npt.NDArray[np.float32]:
    """Resize, pad or crop, and normalize one image.

    Args:
        image: RGB values, uint8 [h, w, 3], or an RGB image of Pillow.
        height: Height of the result in pixels.
        width: Width of the result in pixels.
        preprocess: See :class:`Preprocess`.
        channels: 3, or 1 for the luminance (ITU-R 601, as in OpenCV).

    Returns:
        float32 [1, channels, height, width], contiguous.
    """
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    pixels = _fit_image(image, height, width, preprocess)
    if channels == 1:
        pixels = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    elif preprocess.bgr:
        pixels = pixels[..., ::-1]
    scale = np.float32(preprocess.scale)
    result = np.multiply(pixels.transpose(2, 0, 1), scale, dtype=np.float32, order="C")
    if any(preprocess.mean):
        result -= np.asarray(preprocess.mean[:channels], np.float32)[:, None, None]
    if any(s != 1.0 for s in preprocess.std):
        result /= np.asarray(preprocess.std[:channels], np.float32)[:, None, None]
    return result[None]


def _fit_image(
    image: Image.Image, height: int, width: int, preprocess: Preprocess
) -> npt.NDArray[np.uint8]:
    if preprocess.resize == "crop":
        return _crop_center(image, height, width, preprocess)
    if preprocess.resize == "stretch":
        return _resize_image(image, height, width, preprocess.interpolation)
    return _letterbox_image(image, height, width, preprocess)


def _letterbox_image(
    image: Image.Image, height: int, width: int, preprocess: Preprocess
) -> npt.NDArray[np.uint8]:
    """Fit an image into the input like Ultralytics' LetterBox with auto=False.

    The image is scaled up or down by the smaller ratio of the sizes, and the new sizes are rounded.
    Then the image is padded evenly; an odd pixel of padding goes to the right or bottom. With
    ``corner`` (YOLOX), all padding is at the right and bottom, and sizes are rounded down.
    """
    if image.size == (width, height):
        return np.asarray(image)
    is_corner = preprocess.resize == "corner"
    whole = int if is_corner else round
    ratio = min(height / image.height, width / image.width)
    new_height = max(1, whole(image.height * ratio))
    new_width = max(1, whole(image.width * ratio))
    top = 0 if is_corner else round((height - new_height) / 2 - 0.1)
    left = 0 if is_corner else round((width - new_width) / 2 - 0.1)
    canvas = np.full((height, width, 3), preprocess.fill, np.uint8)
    resized = _resize_image(image, new_height, new_width, preprocess.interpolation)
    canvas[top : top + new_height, left : left + new_width] = resized
    return canvas


def _crop_center(
    image: Image.Image, height: int, width: int, preprocess: Preprocess
) -> npt.NDArray[np.uint8]:
    """Resize an image and take its center, like torchvision's Resize and CenterCrop.

    For a square input, the shorter side of the image is resized to the input's side divided by
    `crop`. For other inputs, both sides are resized to the input's sides divided by `crop`, as in
    Ultralytics.
    """
    # The small addend keeps a rounding error from turning 224 / 0.875 = 256 into 255.
    tall, wide = (int(side / preprocess.crop + 1e-6) for side in (height, width))
    if height == width and image.width <= image.height:
        tall = int(wide * image.height / image.width)
    elif height == width:
        wide = int(tall * image.width / image.height)
    if tall * wide > limits.IMAGE_PIXELS:
        raise DataError(
            f"resizing {image.width}x{image.height} to {wide}x{tall} before the crop exceeds the "
            f"limit of {limits.IMAGE_PIXELS} pixels; leave the image out",
            code="image-too-large",
        )
    pixels = _resize_image(image, tall, wide, preprocess.interpolation)
    top, left = round((tall - height) / 2.0), round((wide - width) / 2.0)
    return pixels[top : top + height, left : left + width]


def _resize_image(
    image: Image.Image, height: int, width: int, interpolation: str
) -> npt.NDArray[np.uint8]:
    """Resize an image: ``linear`` like OpenCV (without antialiasing), other modes like Pillow."""
    if image.size == (width, height):
        return np.asarray(image)
    if interpolation != "linear":
        return np.asarray(image.resize((width, height), Image.Resampling[interpolation.upper()]))
    extent = (0, 0, image.width, image.height)
    size, method = (width, height), Image.Transform.EXTENT
    return np.asarray(image.transform(size, method, extent, Image.Resampling.BILINEAR))


def describe_preprocess(preprocess: Preprocess) -> str:
    """Return a short text about a preprocessing, such as "letterbox, RGB, pixels / 255"."""
    resize = preprocess.resize
    if preprocess.resize == "crop":
        resize = f"center crop of {preprocess.crop:.4g}"
    if preprocess.interpolation != "linear":
        resize += f" ({preprocess.interpolation})"
    parts = [resize, "BGR" if preprocess.bgr else "RGB", _describe_scale(preprocess.scale)]
    if any(preprocess.mean):
        parts.append(f"mean {list(preprocess.mean)}")
    if any(s != 1.0 for s in preprocess.std):
        parts.append(f"std {list(preprocess.std)}")
    return ", ".join(parts)


def _describe_scale(scale: float) -> str:
    if scale == 1.0:
        return "pixels from 0 to 255"
    if math.isclose(255 * scale, 1.0, rel_tol=1e-6):
        return "pixels / 255"
    return f"pixels x {scale:.6g}"


# Image files as samples ---------------------------------------------------------------------------


class ImageSource(FilesSource):
    """Images for a model with one input of rank 4, NCHW or NHWC, with 3 channels or 1.

    Raises:
        DataError: The model does not take images.
    """

    single_rows = is_images = True
    list_file: Path | None = None  # text file that names the images

    def __init__(
        self,
        paths: Sequence[Path],
        root: Path,
        inputs: Sequence[InputSpec],
        preprocess: Preprocess | str | ImageFunction,
        size: tuple[int, int] | None,
    ) -> None:
        self.configure_input(str(root), inputs, preprocess, size)
        self.paths = paths
        self.root = root
        for path in paths:
            record_input(path)

    def configure_input(
        self,
        path: str,
        inputs: Sequence[InputSpec],
        preprocess: Preprocess | str | ImageFunction,
        size: tuple[int, int] | None,
    ) -> None:
        """Set the layout, size and preprocessing that fit the model's input.

        Args:
            path: Path or URL of the images for messages.
            inputs: Inputs of the model.
            preprocess: Conversion of images to inputs.
            size: Height and width in pixels if they are dynamic in the model.

        Raises:
            DataError: The model does not take images.
        """
        if len(inputs) != 1:
            names = ", ".join(f"'{i.name}'" for i in inputs)
            raise DataError(
                f"images cannot feed a model with {len(inputs)} inputs ({names}); give npz files",
                path,
                code="input-count",
            )
        self.spec = inputs[0]
        self.integer = self.spec.numpy_dtype.kind in "iu"
        self.preprocess = find_preprocess(preprocess)
        if self.integer and isinstance(self.preprocess, Preprocess):
            self.preprocess = without_normalization(self.preprocess)
        layout = _find_layout(self.spec, size)
        self.nhwc, self.channels = layout.nhwc, layout.channels
        self.height, self.width = layout.height, layout.width

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Conversion of images to inputs, as JSON: name, description, size and all settings."""
        described = {
            "name": name_preprocess(self.preprocess),
            "size": [self.height, self.width],
            "text": "a function of the caller",
        }
        if isinstance(self.preprocess, Preprocess):
            described["text"] = describe_preprocess(self.preprocess)
            described |= self.preprocess.as_json()
        return described

    def settings(self) -> str:
        """Return the preprocessing, size and layout as text."""
        preprocess = str(self.preprocess)
        if not isinstance(self.preprocess, Preprocess):
            preprocess = self._digest_function(self.preprocess)
        elif self.preprocess.interpolation != "linear" or self.preprocess.crop != 1.0:
            preprocess += f" {self.preprocess.interpolation} {self.preprocess.crop}"
        return f"{preprocess} {self.channels}x{self.height}x{self.width} nhwc={self.nhwc}"

    def _digest_function(self, function: ImageFunction) -> str:
        """Return a hash that identifies a function: the hash of its result for a fixed image."""
        side = np.arange(0, 255, 2, dtype=np.uint8)
        pixels = np.stack(np.broadcast_arrays(side, side[:, None], side[::-1]), -1)
        result = np.ascontiguousarray(np.asarray(function(Image.fromarray(pixels))))
        return hashlib.blake2b(result.tobytes(), digest_size=16).hexdigest()

    def load(self, index: int) -> dict[str, Array]:
        """Return a sample with a batch dimension."""
        return self.load_image(self.paths[index])

    def load_image(self, source: ImageFile, name: str = "") -> dict[str, Array]:
        """Return an image file as the network's input with a batch dimension.

        Args:
            source: Path, or open file.
            name: Name of an open file for messages.

        Raises:
            DataError: The file cannot be decoded, or a user's function returns an array that does
                not fit the input.
        """
        image = read_image(source)
        if not isinstance(self.preprocess, Preprocess):
            label = f"the result of `preprocess` for {name or source}"
            return {self.spec.name: self.spec.fit(np.asarray(self.preprocess(image)), label)}
        array = prepare_image(image, self.height, self.width, self.preprocess, self.channels)
        if self.nhwc:
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        if self.integer:
            bounds = np.iinfo(self.spec.numpy_dtype)
            array = np.rint(array, out=array).clip(bounds.min, bounds.max)
        return {self.spec.name: array.astype(self.spec.numpy_dtype, copy=False)}


class _ImageLayout(NamedTuple):
    """Layout of an image input: whether its channels are last, and its sizes."""

    nhwc: bool
    channels: int
    height: int
    width: int


def _find_layout(spec: InputSpec, size: tuple[int, int] | None) -> _ImageLayout:
    """Return the layout of an image input.

    Raises:
        DataError: The input is not one of images, or its size is missing or too large.
    """
    label = f"input '{spec.name}' {spec.shape_text()}"
    if len(spec.shape) != 4:
        raise DataError(
            f"{label} does not have the 4 dimensions of an image input; give npz files",
            code="wrong-rank",
            node=spec.name,
        )
    nhwc = spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    _, *dims = spec.shape
    channels = dims.pop(-1 if nhwc else 0)
    height, width = dims
    if channels is None:
        channels = 3
    if channels not in (1, 3):
        raise DataError(
            f"{label} takes {channels} channels, but images have 3 or 1; give npz files",
            code="wrong-channels",
            node=spec.name,
        )
    if height is None or width is None:
        height, width = _complete_size(spec, height, width, size)
    if height < 1 or width < 1 or height * width > limits.INPUT_PIXELS:
        raise DataError(
            f"{label}: image size {height}x{width} is not possible; give a size of at most "
            f"{limits.INPUT_PIXELS} pixels",
            code="out-of-range",
            parameter="size",
            node=spec.name,
        )
    return _ImageLayout(nhwc, channels, height, width)


def _complete_size(
    spec: InputSpec, height: int | None, width: int | None, size: tuple[int, int] | None
) -> tuple[int, int]:
    if size is None:
        raise DataError(
            f"input '{spec.name}' {spec.shape_text()} has a dynamic image size; give `size`, for "
            "example 640x640",
            code="missing-argument",
            parameter="size",
            node=spec.name,
        )
    return height or size[0], width or size[1]
