"""Time and memory of `qdqtool insert` against plain onnxruntime inference and onnxruntime's own quantizer.

    python benchmarks/calibration_speed.py [--sizes 320 640] [--images 64] [--runs 3] [--json FILE] [--page FILE]
                                           [--before TREE]

Everything runs on the demo model (YOLOv8n architecture) and the same generated PNG images of the network's size, each
row in a process of its own, from import to the written file, plain inference, the methods and, where `--before` names
the sources of another version, its defaults in turns; the least wall time of the runs counts, and the largest peak
memory. "plain" decodes the images and runs the float model over them, nothing else; "loop" is the time that its
onnxruntime calls alone take, "x peak" the peak memory over plain's. Exit code 1 when a limit is missed. Memory of
larger networks: `benchmarks/memory.py`.

Limits: every method within 2.85 times plain and 350 MB at 320, 1.95 times and 450 MB at 640; peak memory with eight
times the images within 5 %.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marked import publish

PLAIN, BEFORE = "plain inference", "insert, the version before"
METHODS = ("focus", "mse", "percentile", "entropy", "max")
LIMITS = {320: (2.85, 350.0), 640: (1.95, 450.0)}  # times plain inference, MB
MEMORY_GROWTH = 1.05
MORE_IMAGES = 8
BEGIN, END = "<!-- speed: written by benchmarks/calibration_speed.py -->", "<!-- end of speed -->"


@dataclass
class Row:
    """One measured process: seconds of wall and CPU time, MB of peak memory."""

    size: int
    images: int
    what: str
    wall: float
    cpu: float
    peak: float
    loop: float | None = None
    times_plain: float | None = None
    times_loop: float | None = None
    times_peak: float | None = None
    verdict: str = ""


def measure(command: list[str], tree: Path | None = None) -> tuple[float, float, float, str]:
    """Runs a process, on the sources of a tree if one is given; wall seconds, CPU seconds, peak MB, and its output.

    Raises:
        RuntimeError: It failed.
    """
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        where = None if tree is None else {**os.environ, "PYTHONPATH": str(tree.resolve())}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=where, cwd=tree)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {text.strip()[-800:]}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text


def best(size: int, images: int, what: str, command: list[str], runs: int) -> Row:
    """The least times and the largest peak of several runs."""
    return in_turns(size, images, {what: (command, None)}, runs)[0]


def in_turns(size: int, images: int, commands: dict[str, tuple[list[str], Path | None]], runs: int) -> list[Row]:
    """The same for several commands; on a machine whose speed drifts each gets as much of it as the others."""
    results: dict[str, list[tuple[float, float, float, str]]] = {what: [] for what in commands}
    for _ in range(runs):
        for what, (command, tree) in commands.items():
            results[what].append(measure(command, tree))
    rows = []
    for what, found in results.items():
        row = Row(size, images, what, min(r[0] for r in found), min(r[1] for r in found), max(r[2] for r in found))
        loops = [float(r[3].split("loop ")[1].split()[0]) for r in found if "loop " in r[3]]
        row.loop = min(loops) if loops else None
        rows.append(row)
    return rows


def child(role: str, *arguments: object) -> list[str]:
    return [sys.executable, __file__, "--role", role, *map(str, arguments)]


def insert_command(model: Path, images: Path, output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "qdqtool", "insert", str(model), "--calib", str(images), "-o", str(output), *options]


def role_prepare(folder: str, size: str, images: str) -> None:
    """Writes the model and the images."""
    import onnx

    from qdqtool.demo.images import write_images
    from qdqtool.demo.model import yolov8n

    onnx.save(yolov8n(int(size)), Path(folder) / "model.onnx")
    (Path(folder) / "images").mkdir()
    write_images(Path(folder) / "images", int(images), int(size))


def role_plain(model: str, images: str) -> None:
    """Decodes and runs every image, one at a time."""
    import numpy as np
    import onnxruntime
    from PIL import Image

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    spent = 0.0
    for path in sorted(Path(images).iterdir()):
        pixels = np.asarray(Image.open(path).convert("RGB"))
        sample = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32) / np.float32(255)
        begin = time.perf_counter()
        session.run(None, {name: sample})
        spent += time.perf_counter() - begin
    print(f"loop {spent:.3f}")


def role_onnxruntime(model: str, images: str, output: str, method: str) -> None:
    """onnxruntime's quantize_static, as its documentation shows it, in the form that TensorRT takes."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from calibration import Preprocess, open_data
    from calibration.partial import input_specs
    from qdqtool.modelfile import load

    prepared = str(Path(output).with_suffix(".prepared.onnx"))
    quant_pre_process(model, prepared, skip_symbolic_shape=True)
    samples = iter(open_data(images, input_specs(load(model)), Preprocess()))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(samples, None)

    quantize_static(
        prepared, output, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QInt8, weight_type=QuantType.QInt8,
        calibrate_method=getattr(CalibrationMethod, method), extra_options={"ActivationSymmetric": True},
    )  # fmt: skip


def more_images(images: Path, folder: Path) -> Path:
    """A folder with each image under eight names."""
    folder.mkdir()
    for path in images.iterdir():
        for copy in range(MORE_IMAGES):
            (folder / f"{path.stem}-{copy}{path.suffix}").symlink_to(path)
    return folder


def bench(size: int, images: int, runs: int, peers: bool, folder: Path, before: Path | None) -> list[Row]:
    measure(child("prepare", folder, size, images))
    model, pictures, output = folder / "model.onnx", folder / "images", folder / "out.onnx"
    commands: dict[str, tuple[list[str], Path | None]] = {PLAIN: (child("plain", model, pictures), None)}
    for method in METHODS:
        commands[f"insert {method}"] = (insert_command(model, pictures, output, "--method", method), None)
    if before is not None:
        commands[BEFORE] = (insert_command(model, pictures, output), before)
    rows = in_turns(size, images, commands, runs)
    plain = rows[0]
    factor, memory = LIMITS.get(size, (4.0, float("inf")))
    for row in rows[1 : 1 + len(METHODS)]:
        slow, large = row.wall > factor * plain.wall, row.peak > memory
        row.verdict = ", ".join(["too slow"] * slow + ["too much memory"] * large) or "ok"
    few = rows[1].peak
    cache = folder / "cache.npz"
    first = insert_command(model, pictures, output, "--calib-cache", str(cache))
    rows.append(best(size, images, "insert focus, writing a cache", first, 1))
    again = insert_command(model, pictures, output, "--calib-cache", str(cache), "--method", "entropy")
    rows.append(best(size, images, "insert entropy, from the cache", again, runs))
    many = more_images(pictures, folder / "many")
    command = insert_command(model, many, output, "--max-images", str(images * MORE_IMAGES))
    row = best(size, images * MORE_IMAGES, "insert focus", command, 1)
    row.verdict = "ok" if row.peak <= few * MEMORY_GROWTH else "memory grows with the images"
    rows.append(row)
    for method in ("MinMax", "Entropy") if peers else ():
        name = f"onnxruntime quantize_static {method}"
        rows.append(best(size, images, name, child("onnxruntime", model, pictures, output, method), 1))
    for row in rows:
        if row.images == images and row is not plain:
            row.times_plain = row.wall / plain.wall
            row.times_loop = row.wall / (plain.loop or plain.wall)
            row.times_peak = row.peak / plain.peak
    return rows


def show(rows: list[Row]) -> None:
    print(f"{'size':>4} {'images':>6}  {'what':<36} {'wall s':>7} {'CPU s':>6} {'peak MB':>8} "
          f"{'x plain':>8} {'x loop':>7} {'x peak':>7}  verdict")
    for r in rows:
        plain = f"{r.times_plain:8.2f} {r.times_loop:7.2f} {r.times_peak:7.2f}" if r.times_plain else f"{'':>24}"
        if r.loop:
            plain = f"{'loop':>8} {r.loop:6.2f}s{'':8}"
        print(f"{r.size:>4} {r.images:>6}  {r.what:<36} {r.wall:7.2f} {r.cpu:6.2f} {r.peak:8.0f} {plain}  {r.verdict}")


def table(rows: list[Row]) -> str:
    """What users ask for first: the default."""
    lines = ["| pixels | plain inference | `insert` | CPU | peak memory | the version before |",
             "|---|---|---|---|---|---|"]
    by_name = {(r.size, r.what): r for r in reversed(rows)}  # the first of a name counts
    for size in dict.fromkeys(r.size for r in rows):
        plain, ours = by_name[size, PLAIN], by_name[size, f"insert {METHODS[0]}"]
        before = by_name.get((size, BEFORE))
        told = f"{before.wall:.1f} s, {before.peak:.0f} MB" if before else ""
        lines.append(f"| {size} | {plain.wall:.1f} s, {plain.peak:.0f} MB | {ours.wall:.1f} s "
                     f"({ours.wall / plain.wall:.2f} times) | {ours.cpu / plain.cpu:.2f} times | {ours.peak:.0f} MB "
                     f"({ours.peak / plain.peak:.2f} times) | {told} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[320, 640])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", choices=["none", "small", "all"], default="small",
                        help="onnxruntime's quantizer: at 320 only (default), or at every size (17 GB at 640)")
    parser.add_argument("--before", type=Path, metavar="TREE", help="the sources of a version to compare with")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    parser.add_argument("--page", type=Path, help="write the table between the markers of that page")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, *arguments = options.role
        roles: dict[str, Callable[..., None]] = {
            "prepare": role_prepare, "plain": role_plain, "onnxruntime": role_onnxruntime
        }  # fmt: skip
        roles[role](*arguments)
        return 0
    rows: list[Row] = []
    for size in options.sizes:
        folder = Path(tempfile.mkdtemp(prefix="qdqtool-bench-"))
        try:
            peers = options.peers == "all" or (options.peers == "small" and size <= 320)
            rows += bench(size, options.images, options.runs, peers, folder, options.before)
        finally:
            shutil.rmtree(folder)
    print(f"{os.cpu_count()} cores; least of {options.runs} runs; 'loop' is plain's time inside onnxruntime")
    show(rows)
    publish(rows, table(rows), options.json, options.page, BEGIN, END)
    return int(any(r.verdict not in ("", "ok") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
