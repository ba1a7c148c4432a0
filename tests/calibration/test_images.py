import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calibration.arrays import Dataset, InputSpec, Preprocess, decode, open_data, prepare
from calibration.methods import METHODS, amax_of
from calibration.statistics import TensorStatistics
from qdqtool.errors import DataError
from tests.calibration.nets import told_by, write_pictures

SPEC = InputSpec("images", (1, 3, 16, 16))


def test_pictures_of_other_formats_are_counted_and_never_decoded(tmp_path: Path) -> None:
    for name in ("a.tiff", "b.TIFF", "deep/c.heic", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"II*\0")
    with pytest.raises(DataError, match=r"not read \(2 tiff, 1 heic\): convert"):
        open_data(tmp_path, [SPEC])
    write_pictures(tmp_path, 1)
    assert len(open_data(tmp_path, [SPEC])) == 1
    assert "(2 tiff, 1 heic)" in open_data(tmp_path, [SPEC]).warnings[0]
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
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

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
    assert sorted(name for name, _ in data.skipped) == ["empty.png", "huge.png", cut.name, "text.jpg"]
    assert all(reason and "\n" not in reason for _, reason in data.skipped)
    assert any("4 of 5 images could not be read" in w for w in data.warnings)
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
    assert first == open_data(tmp_path / "b", [SPEC]).fingerprint, "the same pictures in another folder"
    others = {
        open_data(tmp_path / "a", [SPEC], Preprocess(bgr=True)).fingerprint,
        open_data(tmp_path / "a", [SPEC], max_images=2).fingerprint,
        open_data(tmp_path / "a", [InputSpec("images", (1, 3, 32, 32))]).fingerprint,
    }
    paths[1].write_bytes(paths[2].read_bytes())
    others.add(open_data(tmp_path / "a", [SPEC]).fingerprint)
    assert len(others) == 4 and first not in others


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_fortran_order_means_nothing_with_one_dimension(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with (tmp_path / "c.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": True, "shape": shape})
        file.write(np.arange(5, dtype="<f4").tobytes())
    spec = InputSpec("x", (1, *shape[1:]))
    if len(shape) == 1:
        assert [s["x"].tolist() for s in open_data(tmp_path / "c.npy", [spec])] == [[k] for k in range(5)]
    else:
        assert "Fortran" in told_by(DataError, open_data, tmp_path / "c.npy", [spec])


@pytest.mark.parametrize("method", METHODS)
def test_seeing_everything_many_times_changes_no_range(method: str) -> None:
    """Ranges depend on shares, not on counts: few values, or each of them a thousand times."""
    values = np.random.default_rng(3).laplace(0, 1, 300).astype(np.float32)
    once, often = TensorStatistics.of(values), TensorStatistics.of(np.tile(values, 1000))
    assert amax_of(once, method) == pytest.approx(amax_of(often, method), rel=1e-6)
