"""What a process takes for pictures of each kind, as large as a quarter of the budget permits, in several threads."""

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from qdqtool.base import budgets

_BUDGET = budgets.PICTURE_BYTES // 4
_BESIDE = 32_000_000  # strips that are converted, and what a decoder takes whatever the size
_SOME = (("PNG", "RGBA", 1), ("MPO", "RGB", 4), ("WEBP", "RGBA", 3))
_CODE = """
import re, sys, threading
from pathlib import Path
from qdqtool.base import budgets
budgets.PICTURE_BYTES = int(sys.argv[2])
from calibration.dataset import InputSpec
from calibration.pictures import ImageSource, YOLO_PREPROCESS, decode
path = Path(sys.argv[1])
taken = lambda what: int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
source = ImageSource([path], path.parent, [InputSpec("x", (1, 3, 64, 64))], YOLO_PREPROCESS, None)
before = taken("VmRSS")
threads = [threading.Thread(target=source.load, args=(0,)) for _ in range(int(sys.argv[3]))]
[t.start() for t in threads]; [t.join() for t in threads]
print(taken("VmHWM") - before, flush=True)
decode(path)
print(taken("VmHWM") - before)
"""


def png(path: Path, side: int, depth: int, kind: int, interlaced: bool) -> None:
    """One of no colour, of what Pillow does not write: 16 bits of several channels, and interlaced ones."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    bits = depth * {0: 1, 2: 3, 6: 4}[kind]
    packing, packed = zlib.compressobj(1), b""
    starts = (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    )
    for x, y, across, down in starts if interlaced else ((0, 0, 1, 1),):
        row = bytes(1 + (-((x - side) // across) * bits + 7) // 8)
        for _ in range(-((y - side) // down)):
            packed += packing.compress(row)
    header = struct.pack(">IIBBBBB", side, side, depth, kind, 0, 0, interlaced)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", packed + packing.flush())
        + chunk(b"IEND", b"")
    )


def written() -> Iterator[tuple[str, str, int, dict[str, object]]]:
    """Format, mode, bytes a pixel that count, and how it is written."""
    for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16"):
        yield "PNG", mode, 7, {"compress_level": 1}
    for mode in ("1", "P", "RGB", "RGBA"):
        yield "BMP", mode, 7, {}
    yield "DIB", "L", 7, {}
    for mode in ("L", "RGB", "CMYK"):
        yield "JPEG", mode, 7, {}
    for subsampling, each in ((0, 10), (1, 8), (2, 7)):
        yield "JPEG", "RGB", each, {"progressive": True, "subsampling": subsampling}
    yield "JPEG", "CMYK", 12, {"progressive": True}
    more = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}
    yield "MPO", "RGB", 10, {"progressive": True, "subsampling": 0, **more}
    for mode in ("RGB", "RGBA"):
        for lossless in (False, True):
            yield "WEBP", mode, 14, {"lossless": lossless, "method": 0, "quality": 10}


def pictures(folder: Path, some: bool) -> Iterator[Path]:
    """One after another, each of as many pixels as fit; some of those for which more is held than their pixels."""
    for form, mode, each, options in written():
        if some and (form, mode, len(options)) not in _SOME:
            continue
        side = int((_BUDGET / each) ** 0.5)
        Image.new(mode, (side, side)).save(folder / f"{form} {mode} {options}", form, **options)
        yield folder / f"{form} {mode} {options}"
    side = int((_BUDGET / 7) ** 0.5)
    for depth, kind in ((16, 2), (16, 6), (8, 2), (16, 0), (1, 0)):
        for interlaced in (False, True):
            if some and (depth, kind, interlaced) != (16, 6, True):
                continue
            path = folder / f"PNG {depth} {kind} {interlaced}"
            png(path, side, depth, kind, interlaced)
            yield path
    for each, options in (
        (7 / 4, {}),
        (3 + 4 / 64, {"progressive": True}),
        (6 + 4 / 64, {"progressive": True, "subsampling": 0}),
    )[2 * some :]:
        side = int((_BUDGET / each) ** 0.5 * 0.998)
        path = folder / f"divided JPEG {options}"
        Image.new("RGB", (side, side)).save(path, "JPEG", **options)
        yield path


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc"
)
@pytest.mark.parametrize("some", [pytest.param(True, marks=pytest.mark.sampled), False])
@pytest.mark.growth
def test_the_peak_of_a_process_for_each_kind_of_picture(tmp_path: Path, some: bool) -> None:
    for path in pictures(tmp_path, some):
        threads = 2 if path.name.startswith("PNG RGBA") else 1
        run = subprocess.run(
            [sys.executable, "-c", _CODE, str(path), str(_BUDGET), str(threads)],
            capture_output=True,
            text=True,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        )
        divided = path.name.startswith("divided")  # never read whole
        assert divided == ("DataError" in run.stderr), (path.name, run.stderr)
        found = [int(taken) for taken in run.stdout.split()]
        assert all(20_000_000 < taken < _BUDGET + _BESIDE for taken in found) and found, (
            path.name,
            found,
        )
        path.unlink()
