"""Generated pictures for the demo: gradients, shapes and noise; deterministic, saved as PNG."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from qdqtool.errors import DataError

OWN_NAME = re.compile(r"demo-\d{3,6}\.png")  # of what :func:`write_images` writes


def make_image(size: int, index: int, seed: int = 0) -> Image.Image:
    """One picture, ``size`` pixels square, RGB; the same arguments give the same picture."""
    rng = np.random.default_rng((seed, index))
    image = Image.fromarray(_background(rng, size))
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(3, 14))):
        _shape(draw, rng, size)
    if index % 4 == 1:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.5, 3.0))))
    pixels = np.asarray(image, np.float32)
    pixels = (pixels - 128.0) * rng.uniform(0.5, 1.3) + 128.0 + rng.uniform(-50.0, 50.0)  # contrast, light
    pixels += rng.normal(0.0, rng.uniform(1.0, 18.0), pixels.shape)  # sensor noise
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _background(rng: np.random.Generator, size: int) -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    result = np.empty((size, size, 3), np.float32)
    for channel in range(3):
        a, b, c, d = rng.uniform(-1.0, 1.0, 4)
        waves = np.sin(2 * np.pi * (rng.uniform(0.5, 8) * x + rng.uniform(0.5, 8) * y + d))
        result[..., channel] = 128 + 70 * (a * x + b * y) + 30 * c * waves
    return np.clip(result, 0, 255).astype(np.uint8)


def _shape(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: int) -> None:
    fill = tuple(int(v) for v in rng.integers(0, 256, 3))
    edge = tuple(int(v) for v in rng.integers(0, 256, 3))
    width, height = (float(v) for v in np.exp(rng.uniform(np.log(0.03), np.log(0.6), 2)) * size)
    left, top = (float(v) for v in rng.uniform(-0.1, 0.95, 2) * size)
    box = (left, top, left + width, top + height)
    kind = rng.integers(0, 4)
    if kind == 0:
        draw.rectangle(box, fill=fill, outline=edge, width=max(1, size // 160))
    elif kind == 1:
        draw.ellipse(box, fill=fill, outline=edge, width=max(1, size // 160))
    elif kind == 2:
        draw.polygon([(left, top + height), (left + width / 2, top), (left + width, top + height)], fill=fill)
    else:
        draw.line(box, fill=fill, width=int(rng.integers(1, max(2, size // 40))))


def write_images(folder: str | os.PathLike[str], count: int, size: int, seed: int = 0) -> list[Path]:
    """Writes ``count`` PNG files ``demo-000.png`` ... of ``size`` by ``size`` pixels into an existing folder.

    Raises:
        DataError: The folder is missing or cannot be written.
    """
    paths = [Path(folder) / f"demo-{index:03d}.png" for index in range(count)]
    for index, path in enumerate(paths):
        try:
            make_image(size, index, seed).save(path, compress_level=1)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    return paths
