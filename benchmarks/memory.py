"""Peak memory and CPU time of `qdqtool insert` against plain onnxruntime inference, from YOLOv8n to YOLOv8x.

    python benchmarks/memory.py [--networks n s x] [--size 640] [--images 8] [--runs 2] [--json FILE] [--page FILE]
    python benchmarks/memory.py --model yolov8s.onnx --calib images/ [--runs 3]

Every row is a process of its own, from import to the written file, with all defaults (`focus`, losses, prediction).
"plain" decodes the same images and runs the float model over them with onnxruntime's own defaults. The largest peak
of `insert` is held against the smallest of plain inference; CPU seconds are the least of the runs, taken in turns.
The networks are built with random weights, the images are generated; `--model` takes what you have (the images of
`--calib` must have the network's size). Exit code 1 where the ratio of the peaks is above 2, of those of more than
400 MB: below, two samples are counted at the same time, which is a few times what a small network takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from calibration_speed import child, insert_command, measure
from marked import publish

LIMIT = 2.0
SMALL = 400.0  # MB
BEGIN, END = "<!-- memory: written by benchmarks/memory.py -->", "<!-- end of memory -->"


@dataclass
class Row:
    """One network: MB of weights and of peak memory, CPU seconds of whole processes."""

    network: str
    weights: float
    plain: float
    insert: float
    plain_cpu: float
    insert_cpu: float

    @property
    def ratio(self) -> float:
        return self.insert / self.plain


def role_make(letter: str, size: str, path: str) -> None:
    """Writes a network; in a process of its own, so that this one stays small."""
    from qdqtool.demo.model import yolov8
    from qdqtool.modelfile import save

    save(yolov8(letter, int(size)), path)


def role_images(folder: str, count: str, size: str) -> None:
    from qdqtool.demo.images import write_images

    write_images(Path(folder), int(count), int(size))


def row_of(name: str, model: Path, images: Path, output: Path, runs: int) -> Row:
    plain, ours = [], []
    for _ in range(runs):
        plain.append(measure(child("plain", model, images)))
        ours.append(measure(insert_command(model, images, output)))
    return Row(
        name, model.stat().st_size / (1 << 20), min(r[2] for r in plain), max(r[2] for r in ours),
        min(r[1] for r in plain), min(r[1] for r in ours),
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    lines = ["| network | weights | plain inference | insert | times plain |", "|---|---|---|---|---|"]
    for r in rows:
        lines.append(f"| {r.network} | {r.weights:.0f} MB | {r.plain:.0f} MB | {r.insert:.0f} MB | {r.ratio:.2f} |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--role"]:
        {"make": role_make, "images": role_images}[sys.argv[2]](*sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["n", "s", "x"], choices=["n", "s", "m", "l", "x"])
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a float model of your own instead")
    parser.add_argument("--calib", type=Path, help="images for it, of its size")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    parser.add_argument("--page", type=Path, help="write the table between the markers of that page")
    options = parser.parse_args()
    if (options.model is None) != (options.calib is None):
        parser.error("--model and --calib belong together")
    rows = []
    with tempfile.TemporaryDirectory(prefix="qdqtool-bench-") as temporary:
        folder = Path(temporary)
        if options.model is not None:
            rows.append(row_of(options.model.stem, options.model, options.calib, folder / "out.onnx", options.runs))
        else:
            images = folder / "images"
            images.mkdir()
            command = [sys.executable, __file__, "--role"]
            measure([*command, "images", str(images), str(options.images), str(options.size)])
        for letter in options.networks if options.model is None else ():
            model = folder / f"yolov8{letter}.onnx"
            measure([*command, "make", letter, str(options.size), str(model)])
            rows.append(row_of(f"YOLOv8{letter}", model, images, folder / "out.onnx", options.runs))
            model.unlink()
    for r in rows:
        print(f"{r.network}: CPU {r.insert_cpu:.1f} s, plain {r.plain_cpu:.1f} s")
    publish(rows, table(rows), options.json, options.page, BEGIN, END)
    return int(any(r.ratio > LIMIT and r.insert > SMALL for r in rows))


if __name__ == "__main__":
    sys.exit(main())
