"""Pictures: sizes, colors and numbers at their limits, against arithmetic by hand; limits of files; folders."""

import contextlib
import fcntl
import io
import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from calibration import pictures
from calibration.arrays import Dataset, open_data
from calibration.dataset import InputSpec
from calibration.listing import file_digest
from calibration.pictures import DecodingBudget, ImageSource, Preprocess, decode, describe, prepare
from qdqtool.base import limits
from qdqtool.base.notes import Remark
from qdqtool.errors import DataError, QdqtoolError
from tests.calibration.checks import check_limit, reports
from tests.calibration.nets import png_chunk, write_pictures
from tests.calibration.watchers import HANG, Waits
from tests.errors import has
from tests.fuzz_inputs.seeds import jpeg_in_scans

RAW = Preprocess(scale=1.0)
SPEC = InputSpec("images", (1, 3, 16, 16))
MPO = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}  # two pictures in a file


def noise(height: int, width: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(height * width)
    return rng.integers(0, 256, (height, width, 3)).astype(np.uint8)


def encode(pixels: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def decode_bytes(data: bytes) -> npt.NDArray[np.uint8]:
    return decode(io.BytesIO(data))


# Preprocessing


@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
def test_picture_of_the_right_size_is_not_resized(resize: Any) -> None:
    picture = noise(12, 20)
    prepared = prepare(picture, 12, 20, Preprocess(resize, scale=1.0))
    assert (prepared[0] == picture.transpose(2, 0, 1)).all()


def test_stretch_fills_the_whole_input() -> None:
    prepared = prepare(noise(12, 20), 24, 20, Preprocess("stretch", scale=1.0))
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
    prepared = prepare(np.full((*size, 3), 200, np.uint8), 20, 20, RAW)[0]
    expected = np.full((3, 20, 20), 114, np.float32)
    expected[:, top : top + height, left : left + width] = 200
    np.testing.assert_array_equal(prepared, expected)


@pytest.mark.parametrize("size", [4, 16])
def test_resizing_is_bilinear_without_antialiasing(size: int) -> None:
    values = np.arange(0, 240, 30)
    ramp = np.broadcast_to(values[None, :, None], (8, 8, 3)).astype(np.uint8)
    row = prepare(ramp, size, size, RAW)[0, 0, size // 2]
    centers = (np.arange(size) + 0.5) * 8 / size - 0.5
    assert np.abs(row - np.interp(centers, np.arange(8), values)).max() <= 1.0


@pytest.mark.parametrize("mean", [(0, 0, 0), (5, 0, 0), (0, 0, 7), (1, 2, 3)])
@pytest.mark.parametrize("std", [(1, 1, 1), (2, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize("bgr", [False, True])
def test_each_channel_has_its_mean_and_deviation(mean: Any, std: Any, bgr: bool) -> None:
    picture = noise(4, 6)
    preprocess = Preprocess(bgr=bgr, scale=0.5, mean=mean, std=std)
    prepared = prepare(picture, 4, 6, preprocess)
    colors = (picture[..., ::-1] if bgr else picture) * 0.5
    expected = ((colors - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
    assert prepared.dtype == np.float32 and prepared.flags.c_contiguous
    np.testing.assert_allclose(prepared, expected[None], rtol=1e-6)
    gray = prepare(picture, 4, 6, preprocess, channels=1)
    light = np.asarray(Image.fromarray(picture).convert("L"))
    np.testing.assert_allclose(gray, ((light * 0.5 - mean[0]) / std[0])[None, None], rtol=1e-6)


@pytest.mark.parametrize(
    ("preprocess", "text"),
    [
        (Preprocess(), "letterbox, RGB, scale 0.00392157"),
        (Preprocess("stretch", True, 1.0), "stretch, BGR, scale 1"),
        (Preprocess(scale=1.0, mean=(0, 0, 2)), "letterbox, RGB, scale 1, mean [0, 0, 2]"),
        (Preprocess(scale=1.0, std=(1, 2, 1)), "letterbox, RGB, scale 1, std [1, 2, 1]"),
    ],
    ids=["default", "bgr", "mean", "std"],
)
def test_describe_names_what_is_not_the_default(preprocess: Preprocess, text: str) -> None:
    assert Preprocess() == Preprocess("letterbox", False, 1 / 255, (0, 0, 0), (1, 1, 1), 114)
    assert describe(preprocess) == text


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
        ({"resize": "crop"}, ["'crop'", "letterbox", "stretch"]),
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
    with pytest.raises(DataError, check=reports(None, *values)):
        Preprocess(**arguments)


# Decoding


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(24, 40), (10, 12), (12, 10)])
def test_prepared_pictures_are_those_that_are_decoded(
    tmp_path: Path, size: tuple[int, int], orientation: int
) -> None:
    """Upright RGB pictures are resized without a copy of their pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "p.png"
    path.write_bytes(encode(noise(10, 12), "PNG", exif=exif))
    source = ImageSource([path], tmp_path, [InputSpec("x", (1, 3, *size))], Preprocess(), None)
    assert (source.load(0)["x"] == prepare(decode(path), *size)).all()


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("nothing.png", "file-missing", "no such file"),
        ("", "file-unreadable", "is a folder"),
        ("text.png", "wrong-format", "'text.png'"),
    ],
)
def test_other_files_are_rejected(
    tmp_path: Path, name: str, code: str, value: str, as_text: bool
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    path = tmp_path / name
    with pytest.raises(DataError, check=reports(code, value)):
        decode(str(path) if as_text else path)


def test_open_files_are_decoded() -> None:
    with pytest.raises(DataError, check=reports("wrong-format", "'there.png'")):
        decode(io.BytesIO(b"no picture"), "there.png")
    data = encode(noise(3, 5), "PNG")
    assert (decode_bytes(data) == noise(3, 5)).all()
    reading, writing = os.pipe()  # which has no place to go back to
    with os.fdopen(writing, "wb") as file:
        file.write(data)
    with os.fdopen(reading, "rb") as file:
        assert (decode(file) == noise(3, 5)).all()


def test_decode_does_not_use_a_replacement_of_pillows_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ultralytics replaces it by a function that installs a package when a file is no picture."""
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("called"))
    assert (decode_bytes(encode(noise(3, 5), "PNG")) == noise(3, 5)).all()
    with pytest.raises(DataError, check=has("wrong-format")):
        decode_bytes(b"no picture")


@pytest.mark.parametrize("strip", [1, 7, 40, 1 << 22])
def test_16_bits_are_reduced_to_the_high_byte(monkeypatch: pytest.MonkeyPatch, strip: int) -> None:
    monkeypatch.setattr(pictures, "STRIP_PIXELS", strip)
    values = np.random.default_rng(0).integers(0, 65536, (11, 7)).astype(np.uint16)
    values[0, :4] = 0, 255, 256, 65535
    expected = (values >> 8).astype(np.uint8)[..., None]
    assert (decode_bytes(encode(values, "PNG")) == expected).all()


def test_numbers_beyond_16_bits_are_clipped() -> None:
    wide = Image.fromarray(np.array([[-5, 70_000, 512]], np.int32))
    assert prepare(wide, 1, 3, RAW)[0, 0].tolist() == [[0, 255, 2]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_strips_are_converted_and_turned_like_the_whole(
    monkeypatch: pytest.MonkeyPatch, mode: str, orientation: int
) -> None:
    monkeypatch.setattr(pictures, "STRIP_PIXELS", 50)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(noise(23, 17)).convert(mode)
    data = encode(image, "JPEG" if mode == "CMYK" else "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as picture:
        whole = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    assert (decode_bytes(data) == whole).all()


# Limits of pixels. A pixel is 4 bytes in Pillow and 3 in the array; a progressive JPEG's coefficients are 2 bytes each.

RUNS = b"\2\1\0\0" * 10 + b"\0\1"  # ten rows of two pixels, which Pillow unpacks in Python


def bmp_of_runs() -> bytes:
    """Return 12 x 10 pixels, most of which no run has: 4 kB with short rows took half a minute."""
    start = 54 + 1024
    form = (40, 12, 10, 1, 8, 1, len(RUNS), 1, 1, 256, 0)
    header = struct.pack("<IHHIIiiHHIIiiII", start + len(RUNS), 0, 0, start, *form)
    return b"BM" + header + b"\0\0\0\0\7\7\7\0" + bytes(1016) + RUNS


def encoded(kind: str, mode: str, **options: Any) -> bytes:
    return encode(Image.fromarray(noise(10, 12)).convert(mode), kind.split()[-1], **options)


PROGRESSIVE = {"progressive": True, "subsampling": 0}


@pytest.mark.parametrize(
    ("data", "kind", "bytes_a_pixel"),
    [
        *(
            pytest.param(encoded(kind, mode, **options), kind, size, id=f"{kind} {mode} {size}")
            for kind, mode, size, options in (
                ("PNG", "RGB", 7, {}),
                ("PNG", "RGBA", 7, {}),
                ("PNG", "L", 7, {}),
                ("WEBP", "RGB", 14, {}),
                ("JPEG", "RGB", 7, {}),
                ("JPEG", "CMYK", 7, {}),
                ("progressive JPEG", "CMYK", 12, {"progressive": True}),
                ("progressive JPEG", "RGB", 10, PROGRESSIVE),
                ("progressive JPEG", "RGB", 7, {"progressive": True, "subsampling": 2}),
                ("progressive MPO", "RGB", 10, {**PROGRESSIVE, **MPO}),
            )
        ),
        pytest.param(bmp_of_runs(), "BMP", 28, id="BMP of runs"),
        # Coefficients of components in scans of their own are kept too: 62 million pixels took 640 MB.
        pytest.param(jpeg_in_scans(12, 10, 1), "JPEG", 10, id="JPEG of several scans"),
        pytest.param(jpeg_in_scans(12, 10, 1, together=True), "JPEG", 7, id="JPEG of one scan"),
    ],
)
def test_picture_may_have_as_many_pixels_as_the_budget_has_bytes(
    data: bytes, kind: str, bytes_a_pixel: int
) -> None:
    check = reports("picture-too-large", "12x10", f" {kind} ", 119)
    check_limit("PICTURE_BYTES", 120 * bytes_a_pixel, lambda: decode_bytes(data), check)


def test_bmp_of_runs_is_decoded() -> None:
    pixels = decode_bytes(bmp_of_runs())
    assert (pixels[:, :2] == 7).all() and not pixels[:, 2:].any()


@pytest.mark.parametrize("size", [(1, 65_536), (65_536, 1)])
def test_sides_have_a_limit(size: tuple[int, int]) -> None:
    """Each row costs a pointer in every copy: 148 kB of PNG were 1.9 GB."""
    with pytest.raises(
        DataError, check=reports("picture-too-large", f"{size[0]}x{size[1]}", 65_535)
    ):
        decode_bytes(encode(Image.new("L", size), "PNG"))


@pytest.mark.parametrize(
    ("scale", "bytes_a_pixel", "options"),
    [
        (2, 7 / 4, {}),
        (4, 7 / 16, {}),
        (8, 7 / 64, {}),
        (2, 7 / 4, MPO),
        (4, 7 / 16, {"orientation": 6}),
        (4, 6 + 4 / 16, PROGRESSIVE),
        (8, 3 + 4 / 64, {"progressive": True, "subsampling": 2}),
    ],
)
def test_jpeg_that_is_too_large_is_divided(
    monkeypatch: pytest.MonkeyPatch, scale: int, bytes_a_pixel: float, options: dict[str, Any]
) -> None:
    """Each pixel is the mean of as many, as long as there are as many as the input has."""
    smooth = np.add.outer(np.arange(64) * 2, np.arange(128))[..., None] * np.array([1, 0.5, 0.25])
    exif, options = Image.Exif(), dict(options)
    exif[0x0112] = orientation = options.pop("orientation", 1)
    kind = "MPO" if "save_all" in options else "JPEG"
    data = encode(smooth.astype(np.uint8), kind, quality=100, exif=exif, **options)
    whole = np.rot90(smooth, -1) if orientation == 6 else smooth
    height, width = whole.shape[0] // scale, whole.shape[1] // scale

    def read(height: int) -> Any:
        source = source_of((1, height, width, 3), resize="stretch", scale=1.0)
        return source.prepared(io.BytesIO(data))["x"][0]

    budget = int(64 * 128 * bytes_a_pixel)
    monkeypatch.setattr(limits, "PICTURE_BYTES", budget)
    expected = whole.reshape(height, scale, width, scale, 3).mean((1, 3))
    assert np.abs(read(height) - expected).max() < 8
    check = reports("picture-too-large", "128x64")
    for least in (height + 1, 10**4):  # more pixels, or all of them
        with pytest.raises(DataError, check=check):
            read(least)
    for name, limit in (("PICTURE_REDUCED", 64 * 128 - 1), ("PICTURE_BYTES", budget - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, limit)
            with pytest.raises(DataError, check=check):
                read(height)
    with pytest.raises(DataError, check=check):
        decode_bytes(data)


# Limits of files


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
@pytest.mark.parametrize(("more", "fits"), [(0, True), (40, True), (200, False)])
def test_jpeg_of_many_scans_is_rejected(kind: str, more: int, fits: bool) -> None:
    """Each costs the time of a picture: 298 kB with 506 scans took 17 s, in which Ctrl-C does nothing."""
    data = encode(noise(16, 16), kind, progressive=True, **(MPO if kind == "MPO" else {}))
    end = data.index(b"\xff\xd9")
    scan = data[data.rindex(b"\xff\xda", 0, end) : end]
    data = data[:end] + scan * more + data[end:]
    if fits:
        assert decode_bytes(data).shape == (16, 16, 3)
        return
    with pytest.raises(DataError, check=reports("too-many-scans", 100)):
        decode_bytes(data)


def hidden_scans(jpeg: bytes) -> bytes:
    """Hide the scans of a JPEG behind a marker without a size.

    A decoder goes on behind it at once. A reader that takes the next two bytes, 65534, for a size gets into the
    second comment, at what looks like a scan of three components.
    """
    comments = (b"x" * 59_998, b"y" * 5_528 + b"\xff\xda\0\x0c\3" + b"z" * 10)
    segments = b"".join(b"\xff\xfe" + (len(c) + 2).to_bytes(2, "big") + c for c in comments)
    data = b"\xff\xd8\xff\xd0" + segments + jpeg[2:]
    assert data[65_538:65_540] == b"\xff\xda"
    return data


def test_jpeg_of_many_scans_of_single_components_is_rejected() -> None:
    assert decode_bytes(jpeg_in_scans(12, 10, 33)).shape == (10, 12, 3)
    many = jpeg_in_scans(12, 10, 34)
    for data in (many, hidden_scans(many)):
        with pytest.raises(DataError, check=reports("too-many-scans", 100)):
            decode_bytes(data)


def test_file_of_several_scans_has_a_limit() -> None:
    """The whole file is searched for them, and may have 2 GB of holes."""
    data = encode(noise(16, 16), "JPEG", progressive=True)
    check = reports(None, "several scans", "limit")
    check_limit("PICTURE_FILE", len(data), lambda: decode_bytes(data), check)


@pytest.mark.parametrize(
    ("kind", "piece", "place"),
    [("JPEG", b"\xff", 2), ("PNG", png_chunk(b"teSt"), 33)],
    ids=["JPEG", "PNG"],
)
def test_headers_in_many_pieces_are_rejected(
    monkeypatch: pytest.MonkeyPatch, kind: str, piece: bytes, place: int
) -> None:
    """Pillow reads them in Python: 9 MB of fill bytes in a JPEG took 22 s."""
    data = encode(noise(16, 16), kind)
    monkeypatch.setattr(limits, "PICTURE_PIECES", 1000)
    assert decode_bytes(data[:place] + piece * 10 + data[place:]).shape == (16, 16, 3)
    with pytest.raises(DataError, check=reports("too-many-pieces", 1000)):
        decode_bytes(data[:place] + piece * 1000 + data[place:])


@pytest.mark.parametrize(
    ("kind", "place", "segment"),
    [
        pytest.param(
            "JPEG", 2, lambda body: b"\xff\xed" + (len(body) + 2).to_bytes(2) + body, id="JPEG"
        ),
        pytest.param("PNG", 33, lambda body: png_chunk(b"teSt", body), id="PNG before the pixels"),
        pytest.param("PNG", -12, lambda body: png_chunk(b"teSt", body), id="PNG after the pixels"),
        pytest.param("PNG", -12, lambda body: png_chunk(b"IDAT", body), id="PNG of more pixels"),
        pytest.param("WEBP", None, bytes, id="WEBP"),
    ],
)
def test_large_headers_are_rejected(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: int | None, segment: Any
) -> None:
    """A decoder keeps profiles, texts and other chunks in addition to the pixels."""
    data = encode(noise(40, 40), kind, lossless=True)
    monkeypatch.setattr(limits, "PICTURE_HEADER", 8000)
    monkeypatch.setattr(limits, "PICTURE_FILE", len(data) + 3000)
    place = len(data) if place is None else place
    small, large = (data[:place] + segment(bytes(size)) + data[place:] for size in (1000, 9000))
    assert (decode_bytes(small) == decode_bytes(data)).all()
    with pytest.raises(DataError, match="limit", check=has("header-too-large")):
        decode_bytes(large)


@pytest.mark.parametrize(("characters", "fits"), [(1990, True), (2010, False)])
def test_texts_of_a_png_have_a_limit(
    monkeypatch: pytest.MonkeyPatch, characters: int, fits: bool
) -> None:
    """They unpack to many times their size in the file, four bytes a character."""
    monkeypatch.setattr(limits, "PICTURE_HEADER", 8000)
    texts = PngImagePlugin.PngInfo()
    for name in ("note", "more"):
        texts.add_itxt(name, "\u00e9" * (characters // 2), zip=True)  # two bytes of UTF-8 each
    data = encode(Image.new("RGB", (40, 40)), "PNG", pnginfo=texts)
    expected = contextlib.nullcontext() if fits else pytest.raises(DataError, match="text")
    with expected:
        decode_bytes(data)


# The budget of pictures that are decoded at the same time


class Decoders:
    """Threads that decode pictures of some sizes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._watcher = Waits(monkeypatch)
        self._threads: list[threading.Thread] = []

    def wait(self, budget: DecodingBudget, size: int) -> bool:
        """Return whether one more picture has to wait; it is decoded later."""
        outcomes: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def reserve() -> None:
            self._watcher.listen(lambda: outcomes.put(True))
            with budget.reserve(size):
                outcomes.put(False)

        self._threads.append(threading.Thread(target=reserve, daemon=True))
        self._threads[-1].start()
        return outcomes.get(timeout=HANG)

    @contextlib.contextmanager
    def decode(self, budget: DecodingBudget, size: int) -> Iterator[None]:
        """Decode a picture until the end of the block; then those that wait are decoded."""
        with budget.reserve(size):
            yield
        for thread in self._threads:
            thread.join(HANG)
            assert not thread.is_alive()


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Decoders:
    return Decoders(monkeypatch)


def test_pictures_wait_for_the_budget(decoders: Decoders) -> None:
    budget = DecodingBudget(100)
    with decoders.decode(budget, 60):
        assert not decoders.wait(budget, 40)
        assert decoders.wait(budget, 41)
    assert not decoders.wait(budget, 1000), "one picture alone is always decoded"
    with decoders.decode(budget, 1000):
        assert decoders.wait(budget, 1)
    assert not decoders.wait(budget, 100)


def test_processes_share_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoders: Decoders
) -> None:
    """Two limits stand for two of the processes of `local:N`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setenv(limits.TOGETHER, str(tmp_path))
    first, second = DecodingBudget(1600), DecodingBudget(1600)
    with decoders.decode(first, 1001):
        assert not decoders.wait(second, 500) and not decoders.wait(second, 25)
        assert decoders.wait(second, 501)
    assert not decoders.wait(second, 10_000), "one picture alone is always decoded"
    with decoders.decode(first, 10_000):
        assert not decoders.wait(second, 25), "small pictures do not count"
        assert decoders.wait(second, 26)
        with (tmp_path / "gate").open("ab") as gate, pytest.raises(BlockingIOError):
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one at a time waits for slots
        monkeypatch.delenv(limits.TOGETHER)
        assert not decoders.wait(DecodingBudget(1600), 1600), "another process, without the folder"


def test_processes_have_a_budget_for_every_eight_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoders: Decoders
) -> None:
    monkeypatch.setenv(limits.TOGETHER, str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)
    with decoders.decode(DecodingBudget(1600), 10_000):
        assert not decoders.wait(DecodingBudget(1600), 10_000)


def test_folder_without_locks_is_no_broken_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are not skipped because of it."""
    folder = tmp_path / "none"
    monkeypatch.setenv(limits.TOGETHER, str(folder))
    with pytest.raises(
        QdqtoolError, check=reports("no-file-locks", f"{limits.TOGETHER}={folder}")
    ) as caught:
        decode_bytes(encode(Image.new("RGB", (1200, 900)), "PNG"))
    assert not isinstance(caught.value, DataError)


# Inputs that take pictures

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
def test_inputs_that_take_no_pictures_are_rejected(
    shape: Shape, size: tuple[int, int] | None, code: str, value: str
) -> None:
    assert limits.INPUT_PIXELS == 4096 * 4096
    values = [value, 4096 * 4096] if code == "out-of-range" else [value]
    with pytest.raises(DataError, check=reports(code, *values, node="x")):
        source_of(shape, size)


@pytest.mark.parametrize("inputs", [[], [SPEC, InputSpec("y", (1,))]], ids=["none", "two"])
def test_model_of_pictures_has_one_input(inputs: list[InputSpec]) -> None:
    with pytest.raises(
        DataError, check=reports("input-count", f"{len(inputs)} inputs", path="pictures")
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
    tmp_path: Path, dtype: str, low: int, high: int, scale: float, mean: float
) -> None:
    (path,) = write_pictures(tmp_path, 1)
    preprocess = Preprocess(scale=scale, mean=(mean, mean, mean))
    (sample,) = open_data(path, [InputSpec("x", (1, 3, 16, 16), dtype)], preprocess)
    expected = np.rint(decode(path).astype(np.float32) * scale - mean).clip(low, high)
    assert sample["x"].dtype == dtype
    assert (sample["x"][0] == expected.transpose(2, 0, 1)).all()


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
    tmp_path: Path, spec: InputSpec, preprocess: Preprocess, tolerance: float
) -> None:
    (path,) = write_pictures(tmp_path, 1)
    (sample,) = open_data(path, [spec], preprocess)
    pixels = decode(path).astype(np.float64)
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
    part = source.portion([1])
    assert (part.count(), part.name(0), source.count()) == (1, str(outside), 2)
    assert (part.load(0)["images"] == source.load(1)["images"]).all()


# Folders of pictures


def test_pictures_of_other_formats_are_counted(tmp_path: Path) -> None:
    for name in ("a.tiff", "b.TIFF", "deep/c.heic", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"II*\0")
    with pytest.raises(
        DataError, check=reports("no-images", "2 tiff", "1 heic", path=str(tmp_path))
    ):
        open_data(tmp_path, [SPEC])
    write_pictures(tmp_path, 1)
    data = open_data(tmp_path, [SPEC])
    assert len(data) == 1 and data.warnings[0].values["formats"] == ["2 tiff", "1 heic"]


def test_other_formats_are_not_decoded_by_any_name(tmp_path: Path) -> None:
    """The decoder of EPS would start Ghostscript."""
    Image.new("RGB", (16, 16)).save(tmp_path / "claims.jpg", "EPS")
    with pytest.raises(DataError, check=has("wrong-format")):
        decode(tmp_path / "claims.jpg")


def test_names_may_hold_any_bytes(tmp_path: Path) -> None:
    (path,) = write_pictures(tmp_path, 1)
    try:
        os.rename(path, os.fsencode(tmp_path) + b"/\xff\xfe.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    data = open_data(tmp_path, [SPEC])
    assert [data.source.name(0), len(list(data))] == ["\\xff\\xfe.png", 1]
    assert data.fingerprint


def huge_png() -> bytes:
    """Return a few bytes that claim 40000 x 40000 pixels."""
    header = struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + pixels + png_chunk(b"IEND")


def test_broken_pictures_are_skipped_and_counted_once(tmp_path: Path) -> None:
    _, cut = write_pictures(tmp_path, 2, 64, 64)
    cut.write_bytes(cut.read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "huge.png").write_bytes(huge_png())
    data = open_data(tmp_path, [SPEC])
    for _ in range(2):
        assert len(list(data)) == 1
        reasons = dict(data.skipped)
        assert sorted(reasons) == ["empty.png", "huge.png", cut.name, "text.jpg"]
        assert all(reason and "\n" not in reason for reason in reasons.values())
        assert len(data.skipped) == 4
    assert Remark.BROKEN_IMAGES(broken=4, total=5) in data.warnings


def test_dataset_is_opened_as_it_is(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1)
    data = open_data(tmp_path, [SPEC])
    assert isinstance(data, Dataset) and open_data(data, [SPEC]) is data


def test_fingerprint_is_of_pictures_preprocessing_and_input(tmp_path: Path) -> None:
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
