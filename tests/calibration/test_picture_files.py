"""Which inputs take pictures, and in which layout and size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.dataset import InputSpec
from calibration.digests import file_digest
from calibration.images import open_data
from calibration.picture_files import ImageSource
from calibration.pictures import Preprocess, decode
from qdqtool import budgets, files
from qdqtool.errors import DataError, QdqtoolError
from tests.calibration.nets import write_pictures

Shape = tuple[int | None, ...]
EVERY: Shape = (None, None, None, None)


def source(shape: Shape, size: tuple[int, int] | None = None, dtype: str = "float32", **facts: float) -> ImageSource:
    preprocess = Preprocess(**facts)  # type: ignore[arg-type]
    return ImageSource([], Path("pictures"), [InputSpec("x", shape, dtype)], preprocess, size)


@pytest.mark.parametrize(
    ("shape", "size", "found"),
    [
        ((1, 3, 16, 24), None, (False, 3, 16, 24)),
        ((1, 1, 16, 24), None, (False, 1, 16, 24)),
        ((1, 16, 24, 3), None, (True, 3, 16, 24)),
        ((1, 16, 24, 1), None, (True, 1, 16, 24)),
        ((1, 3, 16, 3), None, (False, 3, 16, 3)),  # both could be: NCHW
        ((1, 1, 16, 1), None, (False, 1, 16, 1)),
        ((1, 3, 1, 1), None, (False, 3, 1, 1)),
        ((1, None, None, 3), (16, 24), (True, 3, 16, 24)),
        ((1, 3, None, 24), (16, 99), (False, 3, 16, 24)),
        ((1, 3, 16, None), (99, 24), (False, 3, 16, 24)),
        ((1, 16, None, 3), (99, 24), (True, 3, 16, 24)),
        (EVERY, (16, 24), (False, 3, 16, 24)),
        ((1, 3, 16, 24), (99, 99), (False, 3, 16, 24)),
        ((1, 3, 4096, 4096), None, (False, 3, 4096, 4096)),
    ],
)
def test_layouts(shape: Shape, size: tuple[int, int] | None, found: tuple[bool, int, int, int]) -> None:
    made = source(shape, size)
    assert (made.nhwc, made.channels, made.height, made.width) == found


OPEN = "leaves the image size open; give `size`, for example 640x640"
IMPOSSIBLE = ": image size {} is not possible; the limit is 16777216 pixels"


@pytest.mark.parametrize(
    ("shape", "size", "told"),
    [
        ((1, 3, 16), None, "[1, 3, 16] does not take images (rank 4 needed); give npz files"),
        ((1, 3, 16, 16, 1), None, "[1, 3, 16, 16, 1] does not take images (rank 4 needed); give npz files"),
        ((1, 2, 16, 24), None, "[1, 2, 16, 24] takes 2 channels, images have 3 or 1; give npz files"),
        ((1, 4, 16, 24), None, "[1, 4, 16, 24] takes 4 channels, images have 3 or 1; give npz files"),
        ((1, 3, None, 24), None, f"[1, 3, ?, 24] {OPEN}"),
        ((1, 3, 16, None), None, f"[1, 3, 16, ?] {OPEN}"),
        ((1, None, None, 3), None, f"[1, ?, ?, 3] {OPEN}"),
        ((1, 3, 0, 24), None, "[1, 3, 0, 24]" + IMPOSSIBLE.format("0x24")),
        ((1, 3, 16, 0), None, "[1, 3, 16, 0]" + IMPOSSIBLE.format("16x0")),
        ((1, 3, None, None), (-1, 24), "[1, 3, ?, ?]" + IMPOSSIBLE.format("-1x24")),
        ((1, 3, 4096, 4097), None, "[1, 3, 4096, 4097]" + IMPOSSIBLE.format("4096x4097")),
    ],
)
def test_inputs_that_take_no_pictures(shape: Shape, size: tuple[int, int] | None, told: str) -> None:
    assert budgets.INPUT_PIXELS == 4096 * 4096
    with pytest.raises(DataError) as caught:
        source(shape, size)
    assert str(caught.value) == f"input 'x' {told}"


def test_one_input_only() -> None:
    inputs = [InputSpec("x", (1, 3, 8, 8)), InputSpec("y", (1,))]
    for given in (inputs, []):
        with pytest.raises(DataError, match=rf"^pictures: images cannot feed a model with {len(given)} inputs "):
            ImageSource([], Path("pictures"), given, Preprocess(), None)


@pytest.mark.parametrize(
    ("dtype", "scale", "used"),
    [("uint8", None, 1.0), ("int32", None, 1.0), ("int8", None, 1.0), ("float16", None, 1 / 255),
     ("uint8", 0.5, 0.5), ("float32", 0.5, 0.5), ("uint8", 1 / 254, 1 / 254)],
)  # fmt: skip
def test_integer_inputs_are_not_divided_by_255(dtype: str, scale: float | None, used: float) -> None:
    facts = {} if scale is None else {"scale": scale}
    made = source((1, 3, 8, 8), None, dtype, **facts)
    assert made.preprocess.scale == used and made.integer == (dtype[0] in "iu")


def test_numbers_are_rounded_and_clipped_to_the_type(tmp_path: Path) -> None:
    (path,) = write_pictures(tmp_path, 1, 8, 8)
    pixels = decode(path).astype(np.float64).transpose(2, 0, 1)
    for dtype, low, high in (("uint8", 0, 255), ("int8", -128, 127)):
        for scale, mean in ((1.5, 0.0), (0.25, 0.0), (2.0, 300.0)):
            way = Preprocess(scale=scale, mean=(mean, mean, mean))
            (sample,) = open_data(path, [InputSpec("x", (1, 3, 8, 8), dtype)], way)
            wanted = np.rint(pixels.astype(np.float32) * scale - mean).clip(low, high)
            assert sample["x"].dtype == dtype and (sample["x"][0] == wanted).all()
    (sample,) = open_data(path, [InputSpec("x", (1, 8, 8, 3))])
    assert sample["x"].flags.c_contiguous and np.allclose(sample["x"][0] * 255, pixels.transpose(1, 2, 0))


def test_names_digests_and_portions(tmp_path: Path) -> None:
    inside, outside = write_pictures(tmp_path / "in", 1), write_pictures(tmp_path / "out", 1, suffix=".bmp")
    listing = tmp_path / "in" / "list.txt"
    listing.write_text(f"{inside[0].name}\n{outside[0]}\n")
    data = open_data(listing, [InputSpec("x", (1, 3, 16, 16))])
    made = data.source
    assert [made.name(k) for k in range(2)] == ["picture000.png", str(outside[0])]
    assert made.digest(1) == str(outside[0]).encode() + file_digest(outside[0])
    assert made.single_rows and made.is_images
    assert made.settings() == f"{Preprocess()} 3x16x16 nhwc=False"
    part = made.portion([1])
    assert (part.count(), part.name(0)) == (1, str(outside[0])) and made.count() == 2
    assert (part.load(0)["x"] == made.load(1)["x"]).all()


def test_no_listed_picture_is_written(tmp_path: Path) -> None:
    (path,) = write_pictures(tmp_path, 1)
    (tmp_path / "list.txt").write_text(path.name)
    with files.watch() as guard:
        open_data(tmp_path / "list.txt", [InputSpec("x", (1, 3, 16, 16))])
        with pytest.raises(QdqtoolError, match="one of the files read"):
            guard.check(path)
