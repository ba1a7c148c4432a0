"""Calibration on a Dask cluster of this machine: throughput, overhead, memory, and what to expect of 100 workers.

    python -m benchmarks.cluster [--rounds 3] [--images 48] [--memory 10000 100000 1000000] [--json FILE]

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

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZE = 320
LINKED = 50  # files that the names of the memory test are links to
SHARE, OVERHEAD, GROWTH = 0.90, 0.15, 1e-3  # the last in MB for each image


# Throughput -------------------------------------------------------------------------------------------------------


def prepare(folder: Path, images: int) -> tuple[Path, Path]:
    import onnx

    from qdqtool.demo.images import write_images
    from qdqtool.demo.model import yolov8n

    model, pictures = folder / "model.onnx", folder / "images"
    onnx.save(yolov8n(SIZE), model)
    pictures.mkdir()
    write_images(pictures, images, SIZE)
    return model, pictures


def wanted(model: Path) -> list[str]:
    """The activations that convolutions read: what `insert` looks at."""
    from qdqtool.modelfile import load

    loaded = load(model)
    names = [n.inputs[0] for n in loaded.nodes if n.proto.op_type == "Conv"]
    return list(dict.fromkeys(n for n in names if not loaded.is_constant(n)))


def role_plain(model: str, images: str) -> None:
    """One process of one thread; begins when a line comes."""
    from calibration import collect, runner

    runner.cores = lambda: 1  # type: ignore[assignment]
    names = wanted(Path(model))
    print("ready", flush=True)
    sys.stdin.readline()
    begin, cpu = time.perf_counter(), time.process_time()
    collect(model, images, names, progress=False)
    print(time.perf_counter() - begin, time.process_time() - cpu, flush=True)


def plain(model: Path, parts: list[Path]) -> tuple[float, float]:
    """Wall seconds of the slowest, and processor seconds of all."""
    command = [sys.executable, "-m", "benchmarks.cluster", "--role", "plain", str(model)]
    running = [subprocess.Popen([*command, str(p)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for p in parts]
    answers = []
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        out, _ = process.communicate()
        answers.append([float(v) for v in out.split()])
    return max(a[0] for a in answers), sum(a[1] for a in answers)


def split(pictures: Path, folder: Path, count: int) -> list[Path]:
    parts = []
    paths = sorted(pictures.iterdir())
    for k in range(count):
        part = folder / f"part{count}-{k}"
        part.mkdir(exist_ok=True)
        for path in paths[k::count]:
            with contextlib.suppress(FileExistsError):
                os.link(path, part / path.name)
        parts.append(part)
    return parts


def clustered(client: Any, model: Path, pictures: Path, names: list[str]) -> tuple[float, float]:
    """Wall seconds, and processor seconds of client, scheduler and workers."""
    from calibration import collect

    def spent() -> float:
        times = client.run(os.times)
        return time.process_time() + sum(t.user + t.system for t in times.values())

    cpu, begin = spent(), time.perf_counter()
    collect(model, pictures, names, progress=False, cluster=client)
    return time.perf_counter() - begin, spent() - cpu


def throughput(folder: Path, images: int, rounds: int) -> dict[str, Any]:
    from qdqtool.cluster.mapping import Cluster

    model, pictures = prepare(folder, images)
    names = wanted(model)
    pairs: dict[int, list[tuple[float, float, float, float]]] = {1: [], 2: []}
    costs: dict[str, float] = {}
    for count, rows in pairs.items():
        with Cluster(f"local:{count}") as cluster:
            clustered(cluster.client, model, split(pictures, folder, 8)[0], names)  # imports, and the probe
            for _ in range(rounds):
                alone = plain(model, split(pictures, folder, count))
                rows.append((*alone, *clustered(cluster.client, model, pictures, names)))
            costs = costs or measured_costs(cluster.client, model, pictures, names)
    found: dict[str, Any] = {"images": images, "rounds": rounds, "costs": costs}
    for count, rows in pairs.items():
        found[str(count)] = {
            "rows": rows,
            "wall": statistics.median(r[0] / r[2] for r in rows),  # of the plain processes' throughput
            "cpu": statistics.median(r[1] / r[3] for r in rows),
        }
    return found


# What 100 workers would do ----------------------------------------------------------------------------------------


def payload(size: int) -> bytes:
    return os.urandom(size)


def measured_costs(client: Any, model: Path, pictures: Path, names: list[str]) -> dict[str, float]:
    """Seconds of one image on a worker, of fetching and merging a portion, of a digest; bytes of a portion."""
    from calibration import clustered as module
    from calibration import collect
    from calibration.listing import file_digest

    seen: list[Any] = []
    real = module.ClusterPass._merge

    def merge(self: Any, portion: Any, packed: Any) -> None:
        begin = time.thread_time()
        real(self, portion, packed)
        spent = time.thread_time() - begin
        seen.append((packed["images"], packed["seconds"], len(pickle.dumps(packed)), spent))

    module.ClusterPass._merge = merge  # type: ignore[method-assign]
    try:
        collect(model, pictures, names, progress=False, cluster=client)
    finally:
        module.ClusterPass._merge = real  # type: ignore[method-assign]
    size = int(statistics.median(s[2] for s in seen))
    fetches = []
    for _ in range(9):
        future = client.submit(payload, size, pure=False)
        while not future.done():
            time.sleep(0.01)
        begin = time.process_time()
        future.result()
        fetches.append(time.process_time() - begin)
    begin = time.process_time()
    paths = sorted(pictures.iterdir())
    for path in paths:
        file_digest(path)
    digest = (time.process_time() - begin) / len(paths)
    return {
        "image": sum(s[1] for s in seen) / sum(s[0] for s in seen),
        "fetching": statistics.median(fetches),
        "merging": statistics.median(s[3] for s in seen),
        "digest": digest,
        "bytes": float(size),
    }


def expected(costs: dict[str, float], workers: int) -> dict[str, float]:
    """Images a second that so many workers of one thread give, and what of the client and its network that takes."""
    from calibration.clustered import _MERGING, _MOST_SECONDS

    portion = max(_MOST_SECONDS, workers * costs["merging"] / _MERGING)  # of a long run; a short one ends with smaller
    images = max(1.0, portion / costs["image"])
    each = costs["image"]
    client = costs["digest"] + (costs["fetching"] + costs["merging"]) / images
    rate = min(workers / each, 1 / client)
    return {"images_per_second": rate, "of_workers": rate * each / workers, "client": rate * client,
            "megabytes_per_second": rate / images * costs["bytes"] / 1e6}


# Memory -----------------------------------------------------------------------------------------------------------


def simulate(engine: Any, portion: Any, stopped: threading.Event) -> dict[str, Any]:
    """In place of counting: answers at once, as for tiny images."""
    from dataclasses import asdict

    from calibration.dataset import Looks
    from calibration.statistics import TensorStatistics

    if not hasattr(engine, "answer"):
        import numpy as np

        values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
        names = engine.assignment.names
        engine.answer = {"tensors": {n: TensorStatistics.of(values) for n in names}}
    count = len(portion.identities)
    return {**engine.answer, "images": count, "looks": asdict(Looks(total=count, low=0.0, high=1.0)), "skipped": [],
            "seconds": count * 2e-4}


def role_memory(address: str, model: str, images: str, count: str) -> None:
    """Lists, hashes and sends; the workers only simulate."""
    from calibration import collect
    from calibration.clustered import ClusterPass

    ClusterPass.counting = "benchmarks.cluster:simulate"
    begin = time.perf_counter()
    found = collect(model, images, wanted(Path(model)), max_images=int(count), progress=False, cluster=address)
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
    dask = [sys.executable, "-m", "dask"]
    options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    running = [subprocess.Popen([*dask, "scheduler", *options], **quiet)]
    try:
        deadline = time.monotonic() + 90
        while not file.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the scheduler did not start")
            time.sleep(0.2)
        address = json.loads(file.read_text())["address"]
        running.append(subprocess.Popen(
            [*dask, "worker", address, "--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--local-directory",
             str(folder)], **quiet))  # fmt: skip
        yield address, running[0].pid
    finally:
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def tiny_model(path: Path) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.full((4, 3, 1, 1), 0.1, np.float32), "w")
    again = numpy_helper.from_array(np.full((4, 4, 1, 1), 0.1, np.float32), "v")
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Conv", ["a", "v"], ["y"])]
    graph = helper.make_graph(nodes, "tiny", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [weight, again])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def memory(folder: Path, counts: list[int]) -> list[dict[str, float]]:
    from PIL import Image

    tiny_model(folder / "tiny.onnx")
    (folder / "files").mkdir()
    for k in range(LINKED):
        Image.new("RGB", (8, 8), (k, 255 - k, 2 * k)).save(folder / "files" / f"{k}.png")
    names = folder / "names"
    names.mkdir()
    made, rows = 0, []
    for count in counts:
        for k in range(made, count):
            place = names / f"{k // 10_000:04d}"
            if k % 10_000 == 0:
                place.mkdir()
            os.link(folder / "files" / f"{k % LINKED}.png", place / f"picture{k:07d}.png")
        made = count
        with scheduler(folder) as (address, process):
            command = [sys.executable, "-m", "benchmarks.cluster", "--role", "memory", address,
                       str(folder / "tiny.onnx"), str(names), str(count)]
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode:
                raise RuntimeError(out.stderr[-2000:])
            client, seconds = (float(v) for v in out.stdout.split())
            rows.append({"images": count, "client": client, "scheduler": peak(process), "seconds": seconds})
    return rows


# Telling ----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--memory", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, *arguments = options.role
        {"plain": role_plain, "memory": role_memory}[role](*arguments)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="qdqtool-bench-"))
    result: dict[str, Any] = {}
    missed = []
    try:
        if options.rounds:
            result["throughput"] = found = throughput(folder, options.images, options.rounds)
            print(f"{os.cpu_count()} cores; {options.images} images; medians of {options.rounds} pairs\n")
            print("workers  throughput of as many plain processes: wall   processor time")
            for count in (1, 2):
                print(f"{count:>7}  {found[str(count)]['wall']:>43.0%}   {found[str(count)]['cpu']:>14.0%}")
            if found["2"]["cpu"] < SHARE:
                missed.append("two workers")
            if 1 / found["1"]["cpu"] - 1 > OVERHEAD:
                missed.append("overhead of one worker")
            costs = found["costs"]
            print(f"\nan image {costs['image'] * 1e3:.0f} ms; a portion: "
                  f"{costs['bytes'] / 1e6:.1f} MB, fetching {costs['fetching'] * 1e3:.0f} ms, merging "
                  f"{costs['merging'] * 1e3:.0f} ms; a digest {costs['digest'] * 1e6:.0f} us\n")
            print("workers  images/s  of the workers  client busy  MB/s to the client   (model)")
            for workers in (1, 10, 100, 1000):
                row = expected(costs, workers)
                result.setdefault("expected", {})[workers] = row
                print(f"{workers:>7}  {row['images_per_second']:>8.1f}  {row['of_workers']:>14.0%}  "
                      f"{row['client']:>11.0%}  {row['megabytes_per_second']:>18.1f}")
        if options.memory:
            result["memory"] = rows = memory(folder, options.memory)
            print("\n   images  client MB  scheduler MB  seconds")
            for row in rows:
                print(f"{row['images']:>9.0f}  {row['client']:>9.0f}  {row['scheduler']:>12.0f}  "
                      f"{row['seconds']:>7.0f}")
            for who in ("client", "scheduler"):
                if len(rows) > 1 and rows[-1][who] - rows[-2][who] > GROWTH * (rows[-1]["images"] - rows[-2]["images"]):
                    missed.append(f"memory of the {who}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if missed:
        print(f"missed: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
