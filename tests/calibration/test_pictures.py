"""Pictures: sizes, colours and numbers at their limits, against arithmetic by hand; and folders of them."""

import contextlib
import io
import os
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from calibration import pictures
from calibration.arrays import Dataset, open_data
from calibration.dataset import Array, InputSpec
from calibration.listing import file_digest
from calibration.pictures import ImageSource, Preprocess, _Decoding, decode, describe, prepare
from qdqtool.base import budgets
from qdqtool.base.notes import Remark
from qdqtool.errors import DataError, QdqtoolError
from tests.calibration.nets import refused, write_pictures
from tests.raising import raises
from tools.fuzz_inputs.mutate import jpeg_in_scans

RAW = Preprocess(scale=1.0)


def noise(height: int, width: int) -> npt.NDArray[np.uint8]:
    return (
        np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)
    )


def test_sizes_that_are_too_large_or_just_right() -> None:
    picture = noise(12, 20)
    for way in (RAW, Preprocess("stretch", scale=1.0)):
        assert (prepare(picture, 12, 20, way)[0] == picture.transpose(2, 0, 1)).all()
    assert prepare(picture, 24, 20, Preprocess("stretch", scale=1.0)).shape == (1, 3, 24, 20)
    boxed = prepare(picture, 24, 20, RAW)[0]
    assert (boxed[:, 6:18] == picture.transpose(2, 0, 1)).all() and (boxed[:, :6] == 114).all()
    assert Preprocess() == Preprocess("letterbox", False, 1 / 255, (0, 0, 0), (1, 1, 1), 114)
    assert describe(Preprocess()) == "letterbox, RGB, scale 0.00392157"
    assert describe(Preprocess("stretch", True, 1.0)) == "stretch, BGR, scale 1"
    assert (
        describe(Preprocess(scale=1.0, mean=(0, 0, 2))) == "letterbox, RGB, scale 1, mean [0, 0, 2]"
    )
    assert (
        describe(Preprocess(scale=1.0, std=(1, 2, 1))) == "letterbox, RGB, scale 1, std [1, 2, 1]"
    )
    inputs = [InputSpec("x", (1, 3, 8, 8)), InputSpec("y", (1,))]
    for given in (inputs, []):
        with raises(DataError, f"ImageSource.describe pictures: {len(given)}"):
            ImageSource([], Path("pictures"), given, Preprocess(), None)


def test_a_number_that_python_does_not_write_is_refused() -> None:
    with raises(DataError, "Preprocess.__post_init__ fill"):
        Preprocess(fill=-(10**5000))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"resize": "crop"}, "Preprocess.__post_init__ 'crop'; letterbox stretch"),
        ({"mean": (1, 2)}, "Preprocess.__post_init__ mean"),
        ({"mean": (1, 2, 3, 4)}, "Preprocess.__post_init__ mean"),
        ({"std": (1, 2)}, "Preprocess.__post_init__ std"),
        ({"std": (1, 1, 0)}, "Preprocess.__post_init__ std (1, 1, 0);"),
        ({"std": (-1, 1, 1)}, "Preprocess.__post_init__ std (-1, 1, 1);"),
        ({"fill": -1}, "Preprocess.__post_init__ -1; 255"),
        ({"fill": 256}, "Preprocess.__post_init__ 256; 255"),
        ({"resize": "stretch"}, ""),
        ({"fill": 0}, ""),
        ({"fill": 255}, ""),
        ({"std": (0.1, 0.5, 2)}, ""),
    ],
)
def test_what_can_be_asked_for(arguments: dict[str, object], told: str) -> None:
    if not told:
        assert Preprocess(**arguments)  # type: ignore[arg-type]
        return
    refused(DataError, told, Preprocess, **arguments)


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
        ((400, 1), 0, 9, 20, 1),  # never less than a pixel
    ],
)
def test_the_letterbox(size: tuple[int, int], top: int, left: int, height: int, width: int) -> None:
    found = prepare(np.full((*size, 3), 200, np.uint8), 20, 20, RAW)[0]
    wanted = np.full((3, 20, 20), 114, np.float32)
    wanted[:, top : top + height, left : left + width] = 200
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mean", [(0, 0, 0), (5, 0, 0), (0, 0, 7), (1, 2, 3)])
@pytest.mark.parametrize("std", [(1, 1, 1), (2, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize("bgr", [False, True])
def test_each_channel_has_its_mean_and_deviation(
    mean: tuple[float, float, float], std: tuple[float, float, float], bgr: bool
) -> None:
    picture = noise(4, 6)
    found = prepare(picture, 4, 6, Preprocess(bgr=bgr, scale=0.5, mean=mean, std=std))
    wanted = (picture[..., ::-1] if bgr else picture) * 0.5
    wanted = ((wanted - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
    assert found.dtype == np.float32 and found.flags.c_contiguous and found.shape == (1, 3, 4, 6)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)
    grey = prepare(picture, 4, 6, Preprocess(bgr=bgr, scale=0.5, mean=mean, std=std), channels=1)
    light = np.asarray(Image.fromarray(picture).convert("L"))
    np.testing.assert_allclose(grey, ((light * 0.5 - mean[0]) / std[0])[None, None], rtol=1e-6)


MPO = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}  # what two pictures make


# A pixel is 4 bytes in Pillow and 3 in the array; a progressive JPEG's coefficients are 2 bytes each until it is whole.
@pytest.mark.parametrize(
    ("kind", "mode", "each", "options"),
    [
        ("PNG", "RGB", 7, {}),
        ("PNG", "RGBA", 7, {}),
        ("PNG", "L", 7, {}),
        ("WEBP", "RGB", 14, {}),
        ("JPEG", "RGB", 7, {}),
        ("JPEG", "CMYK", 7, {}),
        ("progressive JPEG", "CMYK", 12, {"progressive": True}),
        ("progressive JPEG", "RGB", 10, {"progressive": True, "subsampling": 0}),
        ("progressive JPEG", "RGB", 7, {"progressive": True, "subsampling": 2}),
        ("progressive MPO", "RGB", 10, {"progressive": True, "subsampling": 0, **MPO}),
    ],
)
def test_as_many_pixels_as_there_may_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mode: str,
    each: int,
    options: dict[str, object],
) -> None:
    path = tmp_path / "p"
    Image.fromarray(noise(10, 12)).convert(mode).save(path, kind.split()[-1], **options)
    monkeypatch.setattr(budgets, "PICTURE_BYTES", 120 * each)
    assert decode(path).shape == (10, 12, 3)
    monkeypatch.setattr(budgets, "PICTURE_BYTES", 120 * each - 1)
    with raises(DataError, f"_fit 12x10 {kind} 119"):
        decode(path)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(24, 40), (10, 12), (12, 10)])
def test_pictures_that_are_not_copied_give_the_same(
    tmp_path: Path, size: tuple[int, int], orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(noise(10, 12)).save(tmp_path / "p.png", exif=exif)
    inputs = [InputSpec("x", (1, 3, *size))]
    (array,) = (
        ImageSource([tmp_path / "p.png"], tmp_path, inputs, Preprocess(), None).load(0).values()
    )
    assert (array == prepare(decode(tmp_path / "p.png"), *size)).all()


def test_what_is_no_file_is_told_alike_everywhere(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "nothing.png", "decoded no"), (tmp_path, "decoded folder;")):
        for given in (path, str(path)):
            with raises(DataError, told):
                decode(given)
    (tmp_path / "text.png").write_text("no picture")
    with raises(DataError, "_opened text.png"):
        decode(tmp_path / "text.png")
    with raises(DataError, "_opened there.png"):
        decode(io.BytesIO(b"no picture"), "there.png")
    held = io.BytesIO()
    Image.fromarray(noise(3, 5)).save(held, "PNG")
    assert (decode(held) == noise(3, 5)).all()
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        file.write(held.getvalue())
    with os.fdopen(reading, "rb") as file:
        assert (decode(file) == noise(3, 5)).all()


def test_a_library_that_replaces_pillows_open_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ultralytics' own, for one, installs a package when a file is no picture."""
    Image.fromarray(noise(3, 5)).save(tmp_path / "p.png")
    (tmp_path / "text.png").write_text("no picture")
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("somebody else's"))
    assert (decode(tmp_path / "p.png") == noise(3, 5)).all()
    with raises(DataError, "_opened text.png"):
        decode(tmp_path / "text.png")


@pytest.mark.parametrize("strip", [1, 7, 40, 1 << 22])
def test_the_high_byte_of_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strip: int
) -> None:
    """Whatever part of the picture is looked at at a time; numbers beyond 16 bits are clipped."""
    monkeypatch.setattr(pictures, "_STRIP", strip)
    values = np.random.default_rng(0).integers(0, 65536, (11, 7)).astype(np.uint16)
    values[0, :4] = 0, 255, 256, 65535
    Image.fromarray(values).save(tmp_path / "p.png")
    assert (decode(tmp_path / "p.png") == (values >> 8).astype(np.uint8)[..., None]).all()
    wide = Image.fromarray(np.array([[-5, 70_000, 512]], np.int32))
    assert pictures._as_rgb(wide)[..., 0].tolist() == [[0, 255, 2]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_strips_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, orientation: int
) -> None:
    monkeypatch.setattr(pictures, "_STRIP", 50)
    drawn = Image.fromarray(noise(23, 17)).convert(mode)
    path = tmp_path / ("p.jpg" if mode == "CMYK" else "p.png")
    exif = Image.Exif()
    exif[0x0112] = orientation
    drawn.save(path, exif=exif)
    with Image.open(path) as picture:
        whole = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    assert (decode(path) == whole).all()


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
@pytest.mark.parametrize(("more", "refused"), [(0, False), (40, False), (200, True)])
def test_a_jpeg_of_many_scans_is_refused(
    tmp_path: Path, more: int, refused: bool, kind: str
) -> None:
    """Each costs the time of a picture: 298 kB with 506 scans took 17 s, in which Ctrl-C does nothing."""
    path = tmp_path / "p.jpg"
    Image.fromarray(noise(16, 16)).save(
        path, kind, progressive=True, **(MPO if kind == "MPO" else {})
    )
    data = path.read_bytes()
    end = data.index(b"\xff\xd9")
    path.write_bytes(data[:end] + data[data.rindex(b"\xff\xda", 0, end) : end] * more + data[end:])
    if refused:
        with raises(DataError, "_in_several_scans 100"):
            decode(path)
    else:
        assert decode(path).shape == (16, 16, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_headers_in_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Pillow reads them in Python: what filled 9 MB of a JPEG up took 22 s."""
    made = io.BytesIO()
    Image.fromarray(noise(16, 16)).save(made, kind)
    data = made.getvalue()
    monkeypatch.setattr(budgets, "PICTURE_PIECES", 1000)
    piece, place = (
        (b"\xff", 2)
        if kind == "JPEG"
        else (bytes(4) + b"teSt" + zlib.crc32(b"teSt").to_bytes(4), 33)
    )
    assert decode(io.BytesIO(data[:place] + piece * 10 + data[place:])).shape == (16, 16, 3)
    with raises(DataError, "_Pieces.read 1000"):
        decode(io.BytesIO(data[:place] + piece * 1000 + data[place:]))


def test_files_of_several_scans_and_bmps_of_runs_cost_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GB of holes behind a progressive JPEG were gone through; 4 kB of a BMP, its lines short, took half a minute."""
    made = io.BytesIO()
    Image.fromarray(noise(16, 16)).save(made, "JPEG", progressive=True)
    monkeypatch.setattr(budgets, "PICTURE_FILE", len(made.getvalue()))
    assert decode(made).shape == (16, 16, 3)
    with raises(DataError, "require limit"):
        decode(io.BytesIO(made.getvalue() + b"\0"))
    runs, start = b"\2\1\0\0" * 10 + b"\0\1", 54 + 1024
    form = (40, 12, 10, 1, 8, 1, len(runs), 1, 1, 256, 0)
    header = struct.pack("<IHHIIiiHHIIiiII", start + len(runs), 0, 0, start, *form)
    bmp = io.BytesIO(b"BM" + header + b"\0\0\0\0\7\7\7\0" + bytes(1016) + runs)
    monkeypatch.setattr(budgets, "PICTURE_BYTES", 120 * 28)
    found = decode(bmp)
    assert (found[:, :2] == 7).all() and not found[:, 2:].any()
    monkeypatch.setattr(budgets, "PICTURE_BYTES", 120 * 28 - 1)
    with raises(DataError, "_fit 12x10 BMP 119"):
        decode(bmp)


def test_jpegs_whose_components_have_scans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their coefficients are kept like those of a progressive one (62 million pixels took 640 MB), and scans cost time
    (540 kB of them, without an end).
    """
    for data, each in (
        (jpeg_in_scans(12, 10, 1), 10),
        (jpeg_in_scans(12, 10, 1, together=True), 7),
    ):
        monkeypatch.setattr(budgets, "PICTURE_BYTES", 120 * each)
        assert (decode(io.BytesIO(data)) == 128).all()
        monkeypatch.setattr(budgets, "PICTURE_BYTES", 120 * each - 1)
        with raises(DataError, "_fit 12x10 JPEG 119"):
            decode(io.BytesIO(data))
    monkeypatch.undo()
    assert decode(io.BytesIO(jpeg_in_scans(12, 10, 33))).shape == (10, 12, 3)
    many = jpeg_in_scans(12, 10, 34)
    # Behind a marker without a size a decoder goes on at once; who takes the next two bytes, 65534, for its size, lands
    # in the second comment, at what looks like a scan of three components.
    comments = (b"x" * 59_998, b"y" * 5_528 + b"\xff\xda\0\x0c\3" + b"z" * 10)
    hidden = (
        b"\xff\xd8\xff\xd0"
        + b"".join(b"\xff\xfe" + (len(c) + 2).to_bytes(2, "big") + c for c in comments)
        + many[2:]
    )
    assert hidden[65_538:65_540] == b"\xff\xda"
    for data in (many, hidden):
        with raises(DataError, "_in_several_scans 100"):
            decode(io.BytesIO(data))


def test_sides_and_pixels_have_limits(tmp_path: Path) -> None:
    """Each row costs a pointer in every copy: 148 kB of PNG were 1.9 GB."""
    for size in ((1, 65_536), (65_536, 1)):
        Image.new("L", size).save(tmp_path / "p.png")
        with raises(DataError, f"_begun {size[0]}x{size[1]} 65535"):
            decode(tmp_path / "p.png")
    pixels = _Decoding(100)
    with pixels.taken(60):
        assert not waits(pixels, 40)
        assert waits(pixels, 41)
    assert not waits(pixels, 1000), "one picture alone always may"
    with pixels.taken(1000):
        assert waits(pixels, 1)
    assert not waits(pixels, 100) and pixels._used == 0


@pytest.mark.parametrize(
    ("scale", "each", "way"),
    [
        (2, 7 / 4, {}),
        (4, 7 / 16, {}),
        (8, 7 / 64, {}),
        (2, 7 / 4, MPO),
        (4, 7 / 16, {"orientation": 6}),
        (4, 6 + 4 / 16, {"progressive": True, "subsampling": 0}),
        (8, 3 + 4 / 64, {"progressive": True, "subsampling": 2}),
    ],
)
def test_a_jpeg_that_is_too_large_is_divided(
    monkeypatch: pytest.MonkeyPatch, scale: int, each: float, way: dict[str, object]
) -> None:
    """Each pixel is the mean of as many, as long as there are as many as the input has."""
    smooth = np.add.outer(np.arange(64) * 2, np.arange(128))[..., None] * np.array([1, 0.5, 0.25])
    exif, made, options = Image.Exif(), io.BytesIO(), dict(way)
    exif[0x0112] = turned = options.pop("orientation", 1)
    kind = "MPO" if way is MPO else "JPEG"
    Image.fromarray(smooth.astype(np.uint8)).save(made, kind, quality=100, exif=exif, **options)
    whole = np.rot90(smooth, -1) if turned == 6 else smooth
    height, width = whole.shape[0] // scale, whole.shape[1] // scale
    budget = int(64 * 128 * each)

    def read(height: int, **limits: int) -> Array:
        for name, limit in ({"PICTURE_BYTES": budget} | limits).items():
            monkeypatch.setattr(budgets, name, limit)
        (found,) = (
            source((1, height, width, 3), None, resize="stretch", scale=1.0).prepared(made).values()
        )
        return found[0]

    wanted = whole.reshape(height, scale, width, scale, 3).mean((1, 3))
    assert np.abs(read(height) - wanted).max() < 8
    for limits in ({"PICTURE_BYTES": budget - 1}, {"PICTURE_REDUCED": 64 * 128 - 1}):
        with raises(DataError, "_fit 128x64"):
            read(height, **limits)
    monkeypatch.undo()
    with raises(DataError, "_fit 128x64"):
        read(height + 1)
    with raises(DataError, "_fit 128x64"):
        decode(made)


@pytest.mark.parametrize(
    ("kind", "place", "chunk"),
    [
        ("JPEG", 2, b""),
        ("PNG", 33, b"teSt"),
        ("PNG", -12, b"teSt"),
        ("PNG", -12, b"IDAT"),
        ("WEBP", None, b""),
    ],
)
def test_what_a_decoder_holds_beside_the_pixels_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: int | None, chunk: bytes
) -> None:
    """A gigabyte of profiles, texts or chunks of somebody's own before or behind the pixels would be kept."""
    made = io.BytesIO()
    Image.fromarray(noise(40, 40)).save(made, kind, lossless=True)
    data = made.getvalue()
    monkeypatch.setattr(budgets, "PICTURE_HEADER", 8000)
    monkeypatch.setattr(budgets, "PICTURE_FILE", len(data) + 3000)
    for size, fits in ((1000, True), (9000, False)):
        more = {
            "JPEG": b"\xff\xed" + (size + 2).to_bytes(2) + bytes(size),
            "WEBP": bytes(size),
            "PNG": size.to_bytes(4)
            + chunk
            + bytes(size)
            + zlib.crc32(chunk + bytes(size)).to_bytes(4),
        }[kind]
        file = io.BytesIO(data[:place] + more + data[len(data) if place is None else place :])
        if fits:
            assert (decode(file) == decode(io.BytesIO(data))).all()
        else:
            with raises(DataError, "_Pieces.read limit"):
                decode(file)


def test_texts_of_a_png_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """They unpack to many times what they take in the file, four bytes a character."""
    monkeypatch.setattr(budgets, "PICTURE_HEADER", 8000)
    for characters, fits in ((1990, True), (2010, False)):
        text, made = PngImagePlugin.PngInfo(), io.BytesIO()
        text.add_itxt("note", "\u00e9" * (characters // 2), zip=True)  # two bytes of UTF-8 each
        text.add_itxt("more", "\u00e9" * (characters // 2), zip=True)
        Image.new("RGB", (40, 40)).save(made, "PNG", pnginfo=text)
        with contextlib.nullcontext() if fits else raises(DataError, "decoded"):
            decode(made)


def test_processes_that_share_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `local:N`: a picture waits where others together with it would take more."""
    monkeypatch.setenv(budgets.TOGETHER, str(tmp_path))
    monkeypatch.setattr(pictures, "cores", lambda: 8)
    one, other = _Decoding(1600), _Decoding(1600)
    with one.taken(1001):
        assert not waits(other, 500) and not waits(other, 25)
        assert waits(other, 501)
    assert not waits(other, 10_000), "one picture alone always may"
    with one.taken(10_000), monkeypatch.context() as patch:
        patch.setattr(pictures, "cores", lambda: 16)
        assert not waits(other, 10_000), "a second budget for eight cores more"
    with one.taken(10_000):
        assert not waits(other, 25), "small ones do not count"
        assert waits(other, 26)
        with contextlib.ExitStack() as held:
            assert not pictures._locked(held, str(tmp_path), "gate"), "one at a time takes slots"
        monkeypatch.delenv(budgets.TOGETHER)
        assert not waits(_Decoding(1600), 1600), "another process, of no such folder"
    monkeypatch.setenv(budgets.TOGETHER, str(tmp_path / "none"))
    Image.new("RGB", (1200, 900)).save(tmp_path / "p.png")
    with raises(QdqtoolError, f"_locked {budgets.TOGETHER}={tmp_path / 'none'}") as caught:
        decode(tmp_path / "p.png")
    assert not isinstance(caught.value, DataError), "no picture is passed over for it"


def waits(pixels: _Decoding, count: int) -> bool:
    """Whether one more picture has to wait; it is let in later."""
    taken = threading.Event()

    def take() -> None:
        with pixels.taken(count):
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return not taken.wait(0.15)


Shape = tuple[int | None, ...]
EVERY: Shape = (None, None, None, None)


def source(
    shape: Shape, size: tuple[int, int] | None = None, dtype: str = "float32", **facts: float
) -> ImageSource:
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
def test_layouts(
    shape: Shape, size: tuple[int, int] | None, found: tuple[bool, int, int, int]
) -> None:
    made = source(shape, size)
    assert (made.nhwc, made.channels, made.height, made.width) == found


@pytest.mark.parametrize(
    ("shape", "size", "told"),
    [
        ((1, 3, 16), None, "[1, 3, 16] 4"),
        ((1, 3, 16, 16, 1), None, "[1, 3, 16, 16, 1] 4"),
        ((1, 2, 16, 24), None, "[1, 2, 16, 24] 2 3 1;"),
        ((1, 4, 16, 24), None, "[1, 4, 16, 24] 4 3 1;"),
        ((1, 3, None, 24), None, "[1, 3, ?, 24] `size`,"),
        ((1, 3, 16, None), None, "[1, 3, 16, ?] `size`,"),
        ((1, None, None, 3), None, "[1, ?, ?, 3] `size`,"),
        ((1, 3, 0, 24), None, "[1, 3, 0, 24]: 0x24 16777216"),
        ((1, 3, 16, 0), None, "[1, 3, 16, 0]: 16x0 16777216"),
        ((1, 3, None, None), (-1, 24), "[1, 3, ?, ?]: -1x24 16777216"),
        ((1, 3, 4096, 4097), None, "[1, 3, 4096, 4097]: 4096x4097 16777216"),
    ],
)
def test_inputs_that_take_no_pictures(
    shape: Shape, size: tuple[int, int] | None, told: str
) -> None:
    assert budgets.INPUT_PIXELS == 4096 * 4096
    refused(DataError, f"_layout 'x' {told}", source, shape, size)


@pytest.mark.parametrize(
    ("dtype", "scale", "used"),
    [
        ("uint8", None, 1.0),
        ("int32", None, 1.0),
        ("int8", None, 1.0),
        ("float16", None, 1 / 255),
        ("uint8", 0.5, 0.5),
        ("float32", 0.5, 0.5),
        ("uint8", 1 / 254, 1 / 254),
    ],
)
def test_integer_inputs_are_not_divided_by_255(
    dtype: str, scale: float | None, used: float
) -> None:
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
    assert sample["x"].flags.c_contiguous and np.allclose(
        sample["x"][0] * 255, pixels.transpose(1, 2, 0)
    )


def test_names_digests_and_portions(tmp_path: Path) -> None:
    inside, outside = (
        write_pictures(tmp_path / "in", 1),
        write_pictures(tmp_path / "out", 1, suffix=".bmp"),
    )
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


# Folders of pictures.

SPEC = InputSpec("images", (1, 3, 16, 16))


def test_pictures_of_other_formats_are_counted_and_never_decoded(tmp_path: Path) -> None:
    for name in ("a.tiff", "b.TIFF", "deep/c.heic", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"II*\0")
    with raises(DataError, "_path_source 2 1"):
        open_data(tmp_path, [SPEC])
    write_pictures(tmp_path, 1)
    assert len(open_data(tmp_path, [SPEC])) == 1
    assert open_data(tmp_path, [SPEC]).warnings[0].values["formats"] == ["2 tiff", "1 heic"]
    Image.new("RGB", (16, 16)).save(tmp_path / "really.eps")
    (tmp_path / "really.eps").rename(tmp_path / "claims.jpg")
    with pytest.raises(DataError, match="cannot identify"):
        decode(tmp_path / "claims.jpg")


def test_names_and_headers_of_files(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1)
    strange = os.fsencode(tmp_path) + b"/\xff\xfe.png"
    try:
        os.rename(tmp_path / "picture000.png", strange)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    data = open_data(tmp_path, [SPEC])
    assert [data.source.name(0), len(list(data))] == ["\\xff\\xfe.png", 1]
    assert data.fingerprint


def test_resizing_and_layouts(tmp_path: Path) -> None:
    ramp = np.repeat(np.arange(0, 240, 30, dtype=np.uint8)[None, :, None], 8, 0).repeat(3, 2)
    doubled = prepare(ramp, 16, 16, Preprocess(scale=1.0))[0, 0, 8]
    centres = (np.arange(16) + 0.5) / 2 - 0.5
    expected = np.interp(centres, np.arange(8), np.arange(0, 240, 30))
    assert np.abs(doubled - expected).max() <= 1.0
    halved = prepare(np.repeat(ramp, 1, 0), 4, 4, Preprocess(scale=1.0))[0, 0, 2]
    assert np.abs(halved - np.array([15, 75, 135, 195])).max() <= 1.0
    (path,) = write_pictures(tmp_path, 1)
    pixels = decode(path).astype(np.float64)
    (grey,) = open_data(tmp_path, [InputSpec("x", (None, 1, 16, 16))])
    luminance = pixels @ [0.299, 0.587, 0.114] / 255
    assert np.abs(grey["x"][0, 0] - luminance).max() < 1 / 255
    (nhwc,) = open_data(tmp_path, [InputSpec("x", (1, 16, 16, 3), "uint8")], Preprocess(scale=1.0))
    assert nhwc["x"].dtype == np.uint8 and (nhwc["x"][0] == pixels).all()
    (half,) = open_data(tmp_path, [InputSpec("x", (1, 3, 16, 16), "float16")])
    assert half["x"].dtype == np.float16


def huge_png(path: Path) -> None:
    """A few bytes that claim 40000 x 40000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def test_broken_pictures_are_skipped_and_counted(tmp_path: Path) -> None:
    good, cut, *_ = write_pictures(tmp_path, 2, 64, 64)
    cut.write_bytes(cut.read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    huge_png(tmp_path / "huge.png")
    data = open_data(tmp_path, [SPEC])
    assert len(list(data)) == 1
    assert sorted(name for name, _ in data.skipped) == [
        "empty.png",
        "huge.png",
        cut.name,
        "text.jpg",
    ]
    assert all(reason and "\n" not in reason for _, reason in data.skipped)
    assert Remark.BROKEN_IMAGES(broken=4, total=5) in data.warnings
    assert len(list(data)) == 1 and len(data.skipped) == 4, "a second pass counts nothing twice"
    assert good.exists()


def test_sets_and_fingerprints(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1)
    data = open_data(tmp_path, [SPEC])
    assert isinstance(data, Dataset) and open_data(data, [SPEC]) is data
    paths = write_pictures(tmp_path / "a", 3)
    write_pictures(tmp_path / "b", 3)
    first = open_data(tmp_path / "a", [SPEC]).fingerprint
    assert first and first == open_data(tmp_path / "a", [SPEC]).fingerprint
    assert first == open_data(tmp_path / "b", [SPEC]).fingerprint, (
        "the same pictures in another folder"
    )
    others = {
        open_data(tmp_path / "a", [SPEC], Preprocess(bgr=True)).fingerprint,
        open_data(tmp_path / "a", [SPEC], max_images=2).fingerprint,
        open_data(tmp_path / "a", [InputSpec("images", (1, 3, 32, 32))]).fingerprint,
    }
    paths[1].write_bytes(paths[2].read_bytes())
    others.add(open_data(tmp_path / "a", [SPEC]).fingerprint)
    assert len(others) == 4 and first not in others
