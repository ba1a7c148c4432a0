"""Generated calibration images for the demo network: gradients, shapes and noise."""

import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from qdqtool.errors import DataError

IMAGE_NAME = re.compile(r"demo-\d{3,6}\.png")  # file names of :func:`write_images`


def make_image(size: int, index: int) -> Image.Image:
    """Return an RGB image of `size` by `size` pixels. Equal arguments give equal images."""
    rng = np.random.default_rng((0, index))
    image = Image.fromarray(_draw_background(rng, size))
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(3, 14))):
        _draw_shape(draw, rng, size)
    if index % 4 == 1:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.5, 3.0))))
    pixels = np.asarray(image, np.float32)
    contrast, brightness = rng.uniform(0.5, 1.3), rng.uniform(-50.0, 50.0)
    pixels = (pixels - 128.0) * contrast + 128.0 + brightness
    pixels += rng.normal(0.0, rng.uniform(1.0, 18.0), pixels.shape)  # sensor noise
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _draw_background(rng: np.random.Generator, size: int) -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    result = np.empty((size, size, 3), np.float32)
    for channel in range(3):
        a, b, c, d = rng.uniform(-1.0, 1.0, 4)
        waves = np.sin(2 * np.pi * (rng.uniform(0.5, 8) * x + rng.uniform(0.5, 8) * y + d))
        result[..., channel] = 128 + 70 * (a * x + b * y) + 30 * c * waves
    return np.clip(result, 0, 255).astype(np.uint8)


def _draw_shape(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: int) -> None:
    fill, edge = (tuple(int(v) for v in rng.integers(0, 256, 3)) for _ in range(2))
    width, height = (float(v) for v in np.exp(rng.uniform(np.log(0.03), np.log(0.6), 2)) * size)
    left, top = (float(v) for v in rng.uniform(-0.1, 0.95, 2) * size)
    box = (left, top, left + width, top + height)
    kind = rng.integers(0, 4)
    if kind < 2:
        (draw.ellipse if kind else draw.rectangle)(
            box, fill=fill, outline=edge, width=max(1, size // 160)
        )
    elif kind == 2:
        draw.polygon(
            [(left, top + height), (left + width / 2, top), (left + width, top + height)], fill=fill
        )
    else:
        draw.line(box, fill=fill, width=int(rng.integers(1, max(2, size // 40))))


def write_images(folder: str | os.PathLike[str], count: int, size: int) -> list[Path]:
    """Write generated images `demo-000.png`, `demo-001.png` ... into an existing folder.

    The images have `size` by `size` pixels.

    Raises:
        DataError: The folder is missing, or an image cannot be written.
    """
    paths = [Path(folder) / f"demo-{index:03d}.png" for index in range(count)]
    for index, path in enumerate(paths):
        try:
            make_image(size, index).save(path, compress_level=1)
        except OSError as error:
            raise DataError(
                f"cannot be written: {error.strerror or error}", str(path), code="not-written"
            ) from error
    return paths
