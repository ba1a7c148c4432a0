import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from calibration import Dataset, InputSpec, open_data
from calibration.images import (
    ImageFile,
    ImageSource,
    Preprocess,
    describe_preprocess,
    prepare_image,
    read_image,
)
from calibration.listing import file_digest
from qdqtool.errors import DataError
from qdqtool.util import limits
from tests.calibration.checks import check_limit
from tests.calibration.nets import make_special_files, png_chunk, write_pictures
from tests.errors import has
from tests.notes import note

RAW = Preprocess(scale=1.0)
SPEC = InputSpec("images", (1, 3, 16, 16))


def noise(height: int, width: int) -> np.ndarray:
    return (
        np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)
    )


def encode(pixels: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def decode_image(source: ImageFile) -> np.ndarray:
    return np.array(read_image(source))


def decode_bytes(data: bytes) -> np.ndarray:
    return decode_image(io.BytesIO(data))


# Preprocessing


def test_stretch_fills_the_whole_input() -> None:
    prepared = prepare_image(noise(12, 20), 24, 20, Preprocess("stretch", scale=1.0))
    assert prepared.shape == (1, 3, 24, 20) and (prepared[0, :, 0] != 114).any()


@pytest.mark.parametrize(
    ("size", "top", "left", "height", "width"),
    [
        ((10, 20), 5, 0, 10, 20),
        ((20, 10), 0, 5, 20, 10),
        ((11, 20), 4, 0, 11, 20),
        ((20, 11), 0, 4, 20, 11),  # the odd pixel lies below, and to the right
        ((5, 10), 5, 0, 10, 20),
        ((10, 5), 0, 5, 20, 10),  # up as well as down
        ((40, 80), 5, 0, 10, 20),
        ((1, 400), 9, 0, 1, 20),
        ((400, 1), 0, 9, 20, 1),  # at least a pixel
    ],
)
def test_letterbox_is_padded_evenly(
    size: tuple[int, int], top: int, left: int, height: int, width: int
) -> None:
    prepared = prepare_image(np.full((*size, 3), 200, np.uint8), 20, 20, RAW)[0]
    expected = np.full((3, 20, 20), 114, np.float32)
    expected[:, top : top + height, left : left + width] = 200
    np.testing.assert_array_equal(prepared, expected)


@pytest.mark.parametrize("size", [4, 16])
def test_resizing_is_bilinear_without_antialiasing(size: int) -> None:
    values = np.arange(0, 240, 30)
    ramp = np.broadcast_to(values[None, :, None], (8, 8, 3)).astype(np.uint8)
    row = prepare_image(ramp, size, size, RAW)[0, 0, size // 2]
    centers = (np.arange(size) + 0.5) * 8 / size - 0.5
    assert np.abs(row - np.interp(centers, np.arange(8), values)).max() <= 1.0


@pytest.mark.parametrize("mean", [(0, 0, 0), (5, 0, 0), (0, 0, 7), (1, 2, 3)])
@pytest.mark.parametrize("std", [(1, 1, 1), (2, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize("bgr", [False, True])
def test_each_channel_has_its_mean_and_deviation(mean: Any, std: Any, bgr: bool) -> None:
    picture, preprocess = noise(4, 6), Preprocess(bgr=bgr, scale=0.5, mean=mean, std=std)
    prepared = prepare_image(picture, 4, 6, preprocess)
    colors = (picture[..., ::-1] if bgr else picture) * 0.5
    expected = ((colors - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
    assert prepared.dtype == np.float32 and prepared.flags.c_contiguous
    np.testing.assert_allclose(prepared, expected[None], rtol=1e-6)
    gray = prepare_image(picture, 4, 6, preprocess, channels=1)
    light = np.asarray(Image.fromarray(picture).convert("L"))
    np.testing.assert_allclose(gray, ((light * 0.5 - mean[0]) / std[0])[None, None], rtol=1e-6)


@pytest.mark.parametrize(
    ("preprocess", "text"),
    [
        (Preprocess(), "letterbox, RGB, pixels / 255"),
        (Preprocess("stretch", True, 1.0), "stretch, BGR, pixels from 0 to 255"),
        (Preprocess(scale=0.5, mean=(0, 0, 2)), "letterbox, RGB, pixels x 0.5, mean [0, 0, 2]"),
        (Preprocess(scale=0.5, std=(1, 2, 1)), "letterbox, RGB, pixels x 0.5, std [1, 2, 1]"),
    ],
    ids=["default", "bgr", "mean", "std"],
)
def test_describe_names_what_is_not_the_default(preprocess: Preprocess, text: str) -> None:
    assert Preprocess() == Preprocess("letterbox", False, 1 / 255, (0, 0, 0), (1, 1, 1), 114)
    assert describe_preprocess(preprocess) == text


@pytest.mark.parametrize(
    "arguments",
    [{"resize": "stretch"}, {"fill": 0}, {"fill": 255}, {"std": (0.1, 0.5, 2)}],
    ids=str,
)
def test_preprocess_accepts_values_at_its_limits(arguments: dict[str, Any]) -> None:
    assert Preprocess(**arguments)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"resize": "cut"}, ["'cut'", "letterbox", "stretch", "crop"]),
        ({"interpolation": "nearest"}, ["'nearest'", "bilinear"]),
        ({"crop": 0}, ["crop", "0;"]),
        ({"mean": (1, 2)}, ["mean", "three"]),
        ({"mean": (1, 2, 3, 4)}, ["mean", "three"]),
        ({"std": (1, 2)}, ["std", "three"]),
        ({"std": (1, 1, 0)}, ["std", "(1, 1, 0)"]),
        ({"std": (-1, 1, 1)}, ["std", "(-1, 1, 1)"]),
        ({"fill": -1}, ["fill", "-1;", "255"]),
        ({"fill": 256}, ["fill", "256;", "255"]),
        pytest.param({"fill": -(10**5000)}, ["fill"], id="a number that Python does not print"),
    ],
)
def test_preprocess_rejects_other_values(arguments: dict[str, Any], values: list[str]) -> None:
    with pytest.raises(DataError, check=has(None, *values)):
        Preprocess(**arguments)


# Decoding


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(24, 40), (10, 12), (12, 10)])
def test_prepared_images_are_those_that_are_decoded(
    tmp_path: Path, size: tuple[int, int], orientation: int
) -> None:
    """Upright RGB pictures are resized without a copy of their pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "p.png"
    path.write_bytes(encode(noise(10, 12), "PNG", exif=exif))
    source = ImageSource([path], tmp_path, [InputSpec("x", (1, 3, *size))], Preprocess(), None)
    assert (source.load(0)["x"] == prepare_image(decode_image(path), *size)).all()


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("nothing.png", "file-missing", "no such file"),
        ("", "not-a-file", "is a folder"),
        ("text.png", "wrong-format", "not a JPEG"),
    ],
)
def test_other_files_are_rejected(
    tmp_path: Path, name: str, code: str, value: str, as_text: bool
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    path = tmp_path / name
    with pytest.raises(DataError, check=has(code, value)):
        decode_image(str(path) if as_text else path)


def test_decode_does_not_use_a_replacement_of_pillows_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ultralytics replaces it by a function that installs a package if a file is not an image."""
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("called"))
    assert (decode_bytes(encode(noise(3, 5), "PNG")) == noise(3, 5)).all()
    with pytest.raises(DataError, check=has("wrong-format", "not a JPEG")):
        decode_bytes(b"no picture")


def png_of_size(
    width: int, height: int, depth: int = 8, color: int = 2, rows: bytes = b""
) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + pixels + png_chunk(b"IEND")


@pytest.mark.parametrize(("channels", "color"), [(1, 0), (3, 2), (4, 6)])
def test_16_bits_are_reduced_to_the_high_byte(channels: int, color: int) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (11, 7, channels)).astype(np.uint16)
    values[0, :4] = np.array([0, 255, 256, 65535])[:, None]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    decoded = decode_bytes(png_of_size(7, 11, 16, color, rows))
    assert (decoded == (values >> 8).astype(np.uint8)[..., :3]).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_converted_and_turned(mode: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(noise(23, 17)).convert(mode)
    data = encode(image, "JPEG" if mode == "CMYK" else "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as picture:
        whole = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    assert (decode_bytes(data) == whole).all()


# Limits


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("WEBP", {}), ("JPEG", {}), ("JPEG", {"progressive": True})],
)
def test_image_may_have_the_limit_of_pixels(kind: str, options: dict[str, Any]) -> None:
    data, check = encode(noise(10, 12), kind, **options), has("image-too-large", "12x10", 119)
    check_limit("IMAGE_PIXELS", 120, lambda: decode_bytes(data), check)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png_of_size(40_000, 40_000), id="square"),
        pytest.param(png_of_size(1, 1 << 28), id="column"),
        pytest.param(png_of_size((1 << 31) - 1, (1 << 31) - 1), id="largest"),
        # Two 16-bit images just below 100 million pixels took 3.9 GB.
        pytest.param(png_of_size(9_900, 9_900, 16, 0), id="16 bits"),
        pytest.param(png_of_size(9_900, 9_900, 16, 6), id="16 bits RGBA"),
    ],
)
def test_png_bomb_is_rejected_before_it_is_decoded(data: bytes) -> None:
    with pytest.raises(DataError, check=has("image-too-large", 1 << 26)):
        decode_bytes(data)


def test_image_file_may_have_the_limit(tmp_path: Path) -> None:
    data = encode(noise(16, 16), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    check = has("file-too-large", len(data) - 1)
    check_limit("IMAGE_FILE", len(data), lambda: decode_image(tmp_path / "a.png"), check)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The only picture of the folder."""
    (path,) = write_pictures(tmp_path, 1)
    return path


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["pipe", "link", "loop", "/dev/zero"])
def test_special_files_in_a_list_are_skipped(tmp_path: Path, name: str, path: Path) -> None:
    make_special_files(tmp_path)
    (tmp_path / "list.txt").write_text(f"{path.name}\n{name}\n")
    data = open_data(tmp_path / "list.txt", [SPEC])
    assert len(list(data)) == 1 and data.fingerprint
    assert [skipped for skipped, _ in data.skipped] == [name]


# Inputs that take images

Shape = tuple[int | None, ...]


def source_of(
    shape: Shape, size: tuple[int, int] | None = None, dtype: str = "float32", **preprocess: Any
) -> ImageSource:
    inputs = [InputSpec("x", shape, dtype)]
    return ImageSource([], Path("pictures"), inputs, Preprocess(**preprocess), size)


@pytest.mark.parametrize(
    ("shape", "size", "layout"),
    [
        ((1, 3, 16, 24), None, (False, 3, 16, 24)),
        ((1, 1, 16, 24), None, (False, 1, 16, 24)),
        ((1, 16, 24, 3), None, (True, 3, 16, 24)),
        ((1, 16, 24, 1), None, (True, 1, 16, 24)),
        ((1, 3, 16, 3), None, (False, 3, 16, 3)),  # both are possible: NCHW
        ((1, 1, 16, 1), None, (False, 1, 16, 1)),
        ((1, 3, 1, 1), None, (False, 3, 1, 1)),
        ((1, None, None, 3), (16, 24), (True, 3, 16, 24)),
        ((1, 3, None, 24), (16, 99), (False, 3, 16, 24)),
        ((1, 3, 16, None), (99, 24), (False, 3, 16, 24)),
        ((1, 16, None, 3), (99, 24), (True, 3, 16, 24)),
        ((None, None, None, None), (16, 24), (False, 3, 16, 24)),
        ((1, 3, 16, 24), (99, 99), (False, 3, 16, 24)),
        ((1, 3, 4096, 4096), None, (False, 3, 4096, 4096)),
    ],
)
def test_layout_of_an_input(
    shape: Shape, size: tuple[int, int] | None, layout: tuple[bool, int, int, int]
) -> None:
    source = source_of(shape, size)
    assert (source.nhwc, source.channels, source.height, source.width) == layout


@pytest.mark.parametrize(
    ("shape", "size", "code", "value"),
    [
        ((1, 3, 16), None, "wrong-rank", "[1, 3, 16]"),
        ((1, 3, 16, 16, 1), None, "wrong-rank", "[1, 3, 16, 16, 1]"),
        ((1, 2, 16, 24), None, "wrong-channels", "2 channels"),
        ((1, 4, 16, 24), None, "wrong-channels", "4 channels"),
        ((1, 3, None, 24), None, "missing-argument", "[1, 3, ?, 24]"),
        ((1, 3, 16, None), None, "missing-argument", "[1, 3, 16, ?]"),
        ((1, None, None, 3), None, "missing-argument", "[1, ?, ?, 3]"),
        ((1, 3, 0, 24), None, "out-of-range", "0x24"),
        ((1, 3, 16, 0), None, "out-of-range", "16x0"),
        ((1, 3, None, None), (-1, 24), "out-of-range", "-1x24"),
        ((1, 3, 4096, 4097), None, "out-of-range", "4096x4097"),
    ],
)
def test_inputs_that_take_no_images_are_rejected(
    shape: Shape, size: tuple[int, int] | None, code: str, value: str
) -> None:
    assert limits.INPUT_PIXELS == 4096 * 4096
    values = [value, 4096 * 4096] if code == "out-of-range" else [value]
    with pytest.raises(DataError, check=has(code, *values, node="x")):
        source_of(shape, size)


@pytest.mark.parametrize("inputs", [[], [SPEC, InputSpec("y", (1,))]], ids=["none", "two"])
def test_model_of_images_has_one_input(inputs: list[InputSpec]) -> None:
    with pytest.raises(
        DataError, check=has("input-count", f"{len(inputs)} inputs", path="pictures")
    ):
        ImageSource([], Path("pictures"), inputs, Preprocess(), None)


@pytest.mark.parametrize(
    ("dtype", "preprocess", "scale"),
    [
        ("uint8", {}, 1.0),
        ("int32", {}, 1.0),
        ("int8", {}, 1.0),
        ("float16", {}, 1 / 255),
        ("uint8", {"scale": 0.5}, 0.5),
        ("float32", {"scale": 0.5}, 0.5),
        ("uint8", {"scale": 1 / 254}, 1 / 254),
    ],
)
def test_integer_inputs_are_not_divided_by_255(
    dtype: str, preprocess: dict[str, float], scale: float
) -> None:
    source = source_of((1, 3, 8, 8), None, dtype, **preprocess)
    assert source.preprocess.scale == scale and source.integer == (dtype[0] in "iu")


@pytest.mark.parametrize(("dtype", "low", "high"), [("uint8", 0, 255), ("int8", -128, 127)])
@pytest.mark.parametrize(("scale", "mean"), [(1.5, 0.0), (0.25, 0.0), (2.0, 300.0)])
def test_integer_inputs_are_rounded_and_clipped(
    dtype: str, low: int, high: int, scale: float, mean: float, path: Path
) -> None:
    preprocess = Preprocess(scale=scale, mean=(mean, mean, mean))
    (sample,) = open_data(path, [InputSpec("x", (1, 3, 16, 16), dtype)], preprocess)
    expected = np.rint(decode_image(path).astype(np.float32) * scale - mean).clip(low, high)
    assert sample["x"].dtype == dtype and (sample["x"][0] == expected.transpose(2, 0, 1)).all()


@pytest.mark.parametrize(
    ("spec", "preprocess", "tolerance"),
    [
        (InputSpec("x", (1, 16, 16, 3)), Preprocess(), 1e-6),
        (InputSpec("x", (1, 16, 16, 3), "uint8"), RAW, 0.0),
        (InputSpec("x", (1, 16, 16, 3), "float16"), Preprocess(), 1e-3),
        (InputSpec("x", (None, 16, 16, 1)), Preprocess(), 1 / 255),
    ],
    ids=["float32", "uint8", "float16", "gray"],
)
def test_samples_have_the_type_and_channels_of_the_input(
    spec: InputSpec, preprocess: Preprocess, tolerance: float, path: Path
) -> None:
    (sample,) = open_data(path, [spec], preprocess)
    pixels = decode_image(path).astype(np.float64)
    if spec.shape[3] == 1:
        pixels = pixels @ np.array([[0.299], [0.587], [0.114]])
    assert sample["x"].dtype == spec.dtype and sample["x"].flags.c_contiguous
    assert np.abs(sample["x"][0] - pixels * preprocess.scale).max() <= tolerance


def test_source_of_a_list(tmp_path: Path) -> None:
    (inside,) = write_pictures(tmp_path / "in", 1)
    (outside,) = write_pictures(tmp_path / "out", 1, suffix=".bmp")
    (tmp_path / "in" / "list.txt").write_text(f"{inside.name}\n{outside}\n")
    source = open_data(tmp_path / "in" / "list.txt", [SPEC]).source
    assert [source.name(k) for k in range(2)] == ["picture000.png", str(outside)]
    assert source.digest(1) == str(outside).encode() + file_digest(outside)
    assert source.single_rows and source.is_images
    assert source.settings() == f"{Preprocess()} 3x16x16 nhwc=False"
    part = source.select_samples([1])
    assert (part.count(), part.name(0), source.count()) == (1, str(outside), 2)
    assert (part.load(0)["images"] == source.load(1)["images"]).all()


# Folders of images


def test_images_of_other_formats_are_counted(tmp_path: Path) -> None:
    for name in ("a.tiff", "b.TIFF", "deep/c.heic", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"II*\0")
    with pytest.raises(DataError, check=has("no-images", "2 tiff", "1 heic", path=str(tmp_path))):
        open_data(tmp_path, [SPEC])
    write_pictures(tmp_path, 1)
    data = open_data(tmp_path, [SPEC])
    assert len(data) == 1 and data.warnings[0].values["formats"] == ["2 tiff", "1 heic"]


def test_other_formats_are_not_decoded_by_any_name(tmp_path: Path) -> None:
    """The decoder of EPS would start Ghostscript."""
    Image.new("RGB", (16, 16)).save(tmp_path / "claims.jpg", "EPS")
    with pytest.raises(DataError, check=has("wrong-format")):
        decode_image(tmp_path / "claims.jpg")


def test_names_may_hold_any_bytes(tmp_path: Path, path: Path) -> None:
    try:
        os.rename(path, os.fsencode(tmp_path) + b"/\xff\xfe.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    data = open_data(tmp_path, [SPEC])
    assert [data.source.name(0), len(list(data))] == ["\\xff\\xfe.png", 1] and data.fingerprint


def test_broken_images_are_skipped_and_counted_once(tmp_path: Path) -> None:
    _, cut = write_pictures(tmp_path, 2, 64, 64)
    cut.write_bytes(cut.read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "huge.png").write_bytes(png_of_size(40_000, 40_000))
    data = open_data(tmp_path, [SPEC])
    for _ in range(2):
        assert len(list(data)) == 1
        reasons = dict(data.skipped)
        assert sorted(reasons) == ["empty.png", "huge.png", cut.name, "text.jpg"]
        assert all(reason and "\n" not in reason for reason in reasons.values())
        assert len(data.skipped) == 4
    assert note("broken-images", broken=4, total=5) in data.warnings


def test_dataset_is_opened_as_it_is(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1)
    data = open_data(tmp_path, [SPEC])
    assert isinstance(data, Dataset) and open_data(data, [SPEC]) is data


def test_fingerprint_is_of_images_preprocessing_and_input(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path / "a", 3)
    write_pictures(tmp_path / "b", 3)

    def fingerprint(folder: str = "a", spec: InputSpec = SPEC, **options: Any) -> str:
        return open_data(tmp_path / folder, [spec], **options).fingerprint

    first = fingerprint()
    assert first and first == fingerprint() == fingerprint("b"), "the folder does not count"
    others = {
        fingerprint(preprocess=Preprocess(bgr=True)),
        fingerprint(max_images=2),
        fingerprint(spec=InputSpec("images", (1, 3, 32, 32))),
    }
    paths[1].write_bytes(paths[2].read_bytes())
    assert len({first, fingerprint(), *others}) == 5
