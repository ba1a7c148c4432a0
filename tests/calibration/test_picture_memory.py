"""Peak memory of a process for pictures of each kind, as large as a quarter of the budget permits."""

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qdqtool.base import limits
from tests.calibration.nets import png_chunk

BUDGET = limits.PICTURE_BYTES // 4
OTHER_BYTES = 32_000_000  # strips that are converted, and what a decoder takes for any size
SAMPLED = (("PNG", "RGBA", 1), ("MPO", "RGB", 4), ("WEBP", "RGBA", 3))
PRINT_PEAKS = """
import re, sys, threading
from pathlib import Path
from qdqtool.base import limits
limits.PICTURE_BYTES = int(sys.argv[2])
from calibration.dataset import InputSpec
from calibration.pictures import ImageSource, YOLO_PREPROCESS, decode
path = Path(sys.argv[1])
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
source = ImageSource([path], path.parent, [InputSpec("x", (1, 3, 64, 64))], YOLO_PREPROCESS, None)
before = status("VmRSS")
threads = [threading.Thread(target=source.load, args=(0,)) for _ in range(int(sys.argv[3]))]
[t.start() for t in threads]; [t.join() for t in threads]
print(status("VmHWM") - before, flush=True)
decode(path)
print(status("VmHWM") - before)
"""
# First column and row, and the steps between columns and rows, of each pass of Adam7.
PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)


def png(side: int, depth: int, kind: int, interlaced: bool) -> bytes:
    """Return a black PNG of a form that Pillow does not write: 16 bits of several channels, and interlaced."""
    bits = depth * {0: 1, 2: 3, 6: 4}[kind]
    packing, packed = zlib.compressobj(1), b""
    for x, y, across, down in PASSES if interlaced else ((0, 0, 1, 1),):
        row = bytes(1 + (-((x - side) // across) * bits + 7) // 8)
        for _ in range(-((y - side) // down)):
            packed += packing.compress(row)
    header = struct.pack(">IIBBBBB", side, side, depth, kind, 0, 0, interlaced)
    chunks = ((b"IHDR", header), (b"IDAT", packed + packing.flush()), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


MPO = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}
#: Format, mode, bytes that count for a pixel, and options of Pillow.
WRITTEN: list[tuple[str, str, float, dict[str, Any]]] = [
    *(("PNG", m, 7, {"compress_level": 1}) for m in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16")),
    *(("BMP", mode, 7, {}) for mode in ("1", "P", "RGB", "RGBA")),
    ("DIB", "L", 7, {}),
    *(("JPEG", mode, 7, {}) for mode in ("L", "RGB", "CMYK")),
    *(
        ("JPEG", "RGB", size, {"progressive": True, "subsampling": subsampling})
        for subsampling, size in ((0, 10), (1, 8), (2, 7))
    ),
    ("JPEG", "CMYK", 12, {"progressive": True}),
    ("MPO", "RGB", 10, {"progressive": True, "subsampling": 0, **MPO}),
    *(
        ("WEBP", mode, 14, {"lossless": lossless, "method": 0, "quality": 10})
        for mode in ("RGB", "RGBA")
        for lossless in (False, True)
    ),
]
#: Too large, but for the network's input, so that the decoder divides the sides.
DIVIDED: list[tuple[float, dict[str, Any]]] = [
    (7 / 4, {}),
    (3 + 4 / 64, {"progressive": True}),
    (6 + 4 / 64, {"progressive": True, "subsampling": 0}),
]


def write_pictures(folder: Path, sampled: bool) -> Iterator[Path]:
    """Write one picture after another, each of as many pixels as fit; some of each kind if `sampled`."""

    def write(kind: str, mode: str, size: float, options: dict[str, Any], name: str = "") -> Path:
        side, path = (
            int((BUDGET / size) ** 0.5 * (0.998 if name else 1)),
            folder / f"{name}{kind} {mode}",
        )
        Image.new(mode, (side, side)).save(path, kind, **options)
        return path

    for kind, mode, size, options in WRITTEN:
        if not sampled or (kind, mode, len(options)) in SAMPLED:
            yield write(kind, mode, size, options)
    for depth, color in ((16, 2), (16, 6), (8, 2), (16, 0), (1, 0)):
        for interlaced in (False, True):
            if not sampled or (depth, color, interlaced) == (16, 6, True):
                path = folder / f"PNG {depth} {color} {interlaced}"
                path.write_bytes(png(int((BUDGET / 7) ** 0.5), depth, color, interlaced))
                yield path
    for size, options in DIVIDED[2 * sampled :]:
        yield write("JPEG", "RGB", size, options, "divided ")


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc"
)
@pytest.mark.parametrize("sampled", [pytest.param(True, marks=pytest.mark.sampled), False])
@pytest.mark.growth
def test_peak_memory_of_each_kind_of_picture(tmp_path: Path, sampled: bool) -> None:
    for path in write_pictures(tmp_path, sampled):
        threads = 2 if path.name.startswith("PNG RGBA") else 1
        run = subprocess.run(
            [sys.executable, "-c", PRINT_PEAKS, str(path), str(BUDGET), str(threads)],
            capture_output=True,
            text=True,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        )
        divided = path.name.startswith("divided")  # decode() reads a picture whole
        assert divided == ("DataError" in run.stderr), (path.name, run.stderr)
        peaks = [int(line) for line in run.stdout.split()]
        assert peaks, path.name
        assert all(20_000_000 < peak < BUDGET + OTHER_BYTES for peak in peaks), (path.name, peaks)
        path.unlink()
