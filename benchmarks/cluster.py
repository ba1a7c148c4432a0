"""Calibration on a Dask cluster of this machine: throughput, overhead and memory.

    python -m benchmarks.cluster [--rounds 3] [--images 48] [--memory 10000 100000 1000000]

Throughput: the demo model (YOLOv8n architecture, 320 pixels) over generated PNG images. Plain processes of one thread,
side by side, each with its part of the images, against as many cluster workers of one thread; both have started before
the clock does. The pairs take turns, since other work on the machine changes from minute to minute, and both wall time
and the processor time of all processes together are compared; the medians of the ratios count.

Memory: client and scheduler in processes of their own, with so many names in a folder (hard links to a few files). The
names are listed, hashed and sent as always; the workers answer without reading the images ("simulated"), because a
million would take hours. The peak of each process counts.

Limits: two workers have at least 90 % of the throughput of two plain processes, by processor time; one worker costs at
most 15 % more than one plain process; client and scheduler take at most a kilobyte more for each image more. Exit code
1 when one is missed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import onnx
from common import table
from PIL import Image

from calibration import TensorStatistics, clustered, collect, runner
from calibration.dataset import Looks
from qdqtool.cluster.mapping import Cluster
from qdqtool.commands.demo_run import write_images, yolov8n
from qdqtool.model.modelfile import load

SIZE = 320
LINKED = 50  # files that the names of the memory test are links to
SHARE, OVERHEAD, GROWTH = 0.90, 0.15, 1e-3  # the last in MB for each image


def wanted(model: str | Path) -> list[str]:
    """The activations that convolutions read: what `insert` looks at."""
    loaded = load(model)
    names = [n.inputs[0] for n in loaded.nodes if n.op == "Conv"]
    return list(dict.fromkeys(n for n in names if not loaded.is_constant(n)))


# Throughput -------------------------------------------------------------------------------------------------------


def role_plain(model: str, images: str) -> None:
    """One process of one thread; begins when a line comes."""
    runner.cores = lambda: 1  # type: ignore[assignment]
    names = wanted(model)
    print("ready", flush=True)
    sys.stdin.readline()
    begin, cpu = time.perf_counter(), time.process_time()
    collect(model, images, names, progress=False)
    print(time.perf_counter() - begin, time.process_time() - cpu, flush=True)


def plain(model: Path, parts: list[Path]) -> tuple[float, float]:
    """Wall seconds of the slowest, and processor seconds of all."""
    running = [subprocess.Popen([*role("plain"), model, part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for part in parts]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [[float(v) for v in process.communicate()[0].split()] for process in running]
    return max(a[0] for a in answers), sum(a[1] for a in answers)


def role(name: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.cluster", "--role", name]


def split(pictures: Path, count: int) -> list[Path]:
    """Folders with links to every ``count``-th picture."""
    parts = [pictures.with_name(f"part{count}-{k}") for k in range(count)]
    for k, part in enumerate(parts):
        part.mkdir()
        for path in sorted(pictures.iterdir())[k::count]:
            os.link(path, part / path.name)
    return parts


def on_cluster(client: Any, model: Path, pictures: Path) -> tuple[float, float]:
    """Wall seconds, and processor seconds of client, scheduler and workers."""
    def spent() -> float:
        return time.process_time() + sum(t.user + t.system for t in client.run(os.times).values())

    cpu, begin = spent(), time.perf_counter()
    collect(model, pictures, wanted(model), progress=False, cluster=client)
    return time.perf_counter() - begin, spent() - cpu


def throughput(folder: Path, images: int, rounds: int) -> Iterator[str]:
    """Prints, and yields what was missed."""
    model, pictures = folder / "model.onnx", folder / "images"
    onnx.save(yolov8n(SIZE), model)
    pictures.mkdir()
    write_images(pictures, images, SIZE)
    few = split(pictures, 8)[0]
    rows, shares = [], {}
    for count in (1, 2):
        parts = split(pictures, count)
        with Cluster(f"local:{count}") as cluster:
            on_cluster(cluster.client, model, few)  # imports, and the probe
            pairs = [(*plain(model, parts), *on_cluster(cluster.client, model, pictures)) for _ in range(rounds)]
        wall, shares[count] = (statistics.median(p[i] / p[i + 2] for p in pairs) for i in (0, 1))
        rows.append((count, f"{wall:.0%}", f"{shares[count]:.0%}"))
    print(f"{os.cpu_count()} cores; {images} images; medians of {rounds} pairs\n")
    print(table(("workers", "throughput of as many plain processes, wall", "by processor time"), rows))
    if shares[2] < SHARE:
        yield "two workers"
    if 1 / shares[1] - 1 > OVERHEAD:
        yield "overhead of one worker"


# Memory -----------------------------------------------------------------------------------------------------------


def simulate(engine: Any, portion: Any, stopped: threading.Event) -> dict[str, Any]:
    """In place of counting: answers at once, as for tiny images."""
    if not hasattr(engine, "answer"):
        values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
        engine.answer = {"tensors": {n: TensorStatistics.of(values) for n in engine.assignment.names}}
    count = len(portion.identities)
    return {**engine.answer, "images": count, "looks": asdict(Looks(total=count, low=0.0, high=1.0)), "skipped": [],
            "seconds": count * 2e-4}


def role_memory(address: str, model: str, images: str, count: str) -> None:
    """Lists, hashes and sends; the workers only simulate."""
    clustered.ClusterPass.counting = "benchmarks.cluster:simulate"
    begin = time.perf_counter()
    found = collect(model, images, wanted(model), max_images=int(count), progress=False, cluster=address)
    assert found.images == int(count) and found.fingerprint, found
    print(peak(os.getpid()), time.perf_counter() - begin, flush=True)


def peak(process: int) -> float:
    """MB of memory that a process took at most."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextlib.contextmanager
def scheduler(folder: Path) -> Iterator[tuple[str, int]]:
    """A scheduler and two workers as processes; address and the scheduler's process."""
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": Path.cwd()}
    dask, alone = [sys.executable, "-m", "dask"], ["--no-dashboard", "--host", "127.0.0.1"]
    running = [subprocess.Popen([*dask, "scheduler", *alone, "--port", "0", "--scheduler-file", file], **quiet)]
    try:
        deadline = time.monotonic() + 90
        while not file.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the scheduler did not start")
            time.sleep(0.2)
        running.append(subprocess.Popen([*dask, "worker", "--scheduler-file", file, *alone, "--nworkers", "2",
                                         "--nthreads", "1", "--local-directory", folder], **quiet))
        yield json.loads(file.read_text())["address"], running[0].pid
    finally:
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def memory(folder: Path, counts: list[int]) -> Iterator[str]:
    """Prints, and yields what was missed."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 17]>
        tiny (float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y)
        <float[4, 3, 1, 1] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> { a = Relu (x) y = Conv (a, w) }""")
    onnx.save(model, folder / "tiny.onnx")
    (folder / "files").mkdir()
    for k in range(LINKED):
        Image.new("RGB", (8, 8), (k, 255 - k, 2 * k)).save(folder / "files" / f"{k}.png")
    names = folder / "names"
    rows: list[tuple[int, float, float, float]] = []
    for count in counts:
        for k in range(rows[-1][0] if rows else 0, count):
            place = names / f"{k // 10_000:04d}"
            if k % 10_000 == 0:
                place.mkdir(parents=True)
            os.link(folder / "files" / f"{k % LINKED}.png", place / f"picture{k:07d}.png")
        with scheduler(folder) as (address, process):
            command = [*role("memory"), address, str(folder / "tiny.onnx"), str(names), str(count)]
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode:
                raise RuntimeError(out.stderr[-2000:])
            client, seconds = (float(v) for v in out.stdout.split())
            rows.append((count, client, peak(process), seconds))
    shown = [(count, *(f"{value:.0f}" for value in values)) for count, *values in rows]
    print("\n" + table(("images", "client MB", "scheduler MB", "seconds"), shown))
    if len(rows) > 1:
        more = GROWTH * (rows[-1][0] - rows[-2][0])
        yield from (f"memory of the {who}" for i, who in ((1, "client"), (2, "scheduler"))
                    if rows[-1][i] - rows[-2][i] > more)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--memory", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        name, *arguments = options.role
        {"plain": role_plain, "memory": role_memory}[name](*arguments)
        return 0
    with tempfile.TemporaryDirectory(prefix="qdqtool-bench-") as name:
        folder = Path(name)
        missed = list(throughput(folder, options.images, options.rounds)) if options.rounds else []
        missed += memory(folder, options.memory) if options.memory else []
    if missed:
        print(f"missed: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
