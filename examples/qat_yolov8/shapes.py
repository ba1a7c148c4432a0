"""Generated images of discs, rectangles and triangles, with the exact box of each."""

from __future__ import annotations

import numpy as np

SIZE = 96  # pixels, both sides
CLASSES = ("disc", "rectangle", "triangle")
MAX_OBJECTS = 4  # objects in an image


def generate(count: int, seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Generate images and their objects.

    Returns:
        Images, uint8 [count, 3, SIZE, SIZE], and the objects of each image, float32 [objects, 5]:
        class, x1, y1, x2, y2 in pixels.
    """
    rng = np.random.default_rng(seed)
    images = np.empty((count, 3, SIZE, SIZE), np.uint8)
    objects = []
    for i in range(count):
        images[i], found = _draw_image(rng)
        objects.append(found)
    return images, objects


def _draw_image(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    ys, xs = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32)
    slope = rng.uniform(-0.6, 0.6, (3, 2, 1, 1)).astype(np.float32)
    base = rng.uniform(60, 195, (3, 1, 1)).astype(np.float32)
    image = base + slope[:, 0] * (xs - SIZE / 2) + slope[:, 1] * (ys - SIZE / 2)
    found: list[list[float]] = []
    for _ in range(int(rng.integers(1, MAX_OBJECTS + 1))):
        for _ in range(10):  # choose another place if the object would overlap another object
            width, height = rng.uniform(10, 48, 2)
            x, y = rng.uniform(0, SIZE - width), rng.uniform(0, SIZE - height)
            if all(x > b[3] or x + width < b[1] or y > b[4] or y + height < b[2] for b in found):
                break
        else:
            continue
        kind = int(rng.integers(len(CLASSES)))
        mask = _mask(kind, xs, ys, x, y, width, height, rng)
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if len(rows) < 6 or len(columns) < 6:
            continue
        background = image[:, mask].mean(1)
        contrast = rng.uniform(25, 110, 3) * rng.choice([-1, 1], 3)
        image[:, mask] = (background + contrast)[:, None]
        found.append([kind, columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    image += rng.normal(0, rng.uniform(4, 14), image.shape)
    return np.clip(image, 0, 255).astype(np.uint8), np.array(found, np.float32).reshape(-1, 5)


def _mask(
    kind: int,
    xs: np.ndarray,
    ys: np.ndarray,
    x: float,
    y: float,
    width: float,
    height: float,
    rng: np.random.Generator,
) -> np.ndarray:
    u, v = (xs + 0.5 - x) / width, (ys + 0.5 - y) / height  # 0 to 1 inside the expected box
    inside = (u >= 0) & (u < 1) & (v >= 0) & (v < 1)
    if kind == 0:
        return (2 * u - 1) ** 2 + (2 * v - 1) ** 2 < 1
    if kind == 1:
        return inside
    tip = rng.uniform(0.2, 0.8)
    if rng.random() < 0.5:
        v = 1 - v
    return inside & (u > tip * (1 - v)) & (u < 1 - (1 - tip) * (1 - v))
