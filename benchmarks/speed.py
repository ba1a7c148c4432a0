"""Measurement for `benchmarks/run.py --compare`: two versions in turns, and inference.

Both versions get the same files, which the present sources make: the demo model (YOLOv8n, random
weights) and generated PNG images of its size. `--model` and `--photos` name other files. The
modules of both versions are compiled before the first turn, as by pip. A ratio is the median over
the turns. The ends of its interval are two order statistics of the turns. The interval contains the
median with the printed probability, for any distribution (75 % for 3 turns, 94 % for 5, 97 % for
6). Seconds and megabytes are the minimum over the turns. Processor time is user and system time of
all threads and child processes.
"""

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = (
    "",
    "processor time",
    "times before",
    "times plain",
    "peak memory",
    "times before",
    "times plain",
)


@dataclass(frozen=True)
class Run:
    """Wall time and processor time of one process in seconds, and its peak memory in MB."""

    wall: float
    cpu: float
    peak: float


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: Title in the table.
        command: Arguments of qdqtool. MODEL, IMAGES and OUT are placeholders for files.
        model: Function that writes MODEL. None: MODEL is the file of `--model`.
        images: Number and size of IMAGES. If the size is 0, IMAGES are those of `--photos`.
        plain: Whether to also measure inference of onnxruntime on the same images.
    """

    title: str
    command: str
    model: Callable[[Path], None] | None = None
    images: tuple[int, int] | None = None
    plain: bool = False


@dataclass(frozen=True)
class Ratio:
    """Median of ratios, with an interval.

    Attributes:
        low: Lower end of the interval.
        value: The median.
        high: Upper end of the interval.
        sure: Probability that the interval contains the median.
    """

    low: float
    value: float
    high: float
    sure: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the median ratio of pairs, with the narrowest interval of at least 95 %.

    If there are too few pairs for 95 %, the interval contains all ratios.
    """
    each = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    n = len(each)
    outside, at = 2 * 0.5**n, 0
    while at < (n - 1) // 2:
        further = outside + 2 * math.comb(n, at + 1) * 0.5**n
        if further > 0.05:
            break
        outside, at = further, at + 1
    return Ratio(each[at], statistics.median(each), each[n - 1 - at], max(0.0, 1 - outside))


def measure(command: Sequence[str], tree: Path) -> Run:
    """Run a process with the sources in a folder, and measure it.

    Raises:
        RuntimeError: The exit code is neither 0 nor 1.
    """
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tree,
            env={**kept, "PYTHONPATH": str(tree)},
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1):
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
            raise RuntimeError(
                f"{' '.join(command)} ended with {process.returncode}: {text[-800:]}"
            )
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


# Files of both versions --------------------------------------------------------------------------------------------


def _yolo(path: Path, letter: str = "n", size: int = 640) -> None:
    from qdqtool.demo.network import yolov8
    from qdqtool.ir.modelfile import save

    save(yolov8(letter, size), path)


def _quantized(path: Path) -> None:
    import numpy as np

    from qdqtool.demo.network import yolov8n
    from qdqtool.quantization.api import insert

    data = np.random.default_rng(0).uniform(0, 1, (1, 3, 640, 640)).astype(np.float32)
    insert(yolov8n(), data, method="max", predict=False).save(path)


def _large(path: Path) -> None:
    """Write a quantized network of 100,000 nodes with small tensors, a chain of C2f blocks."""
    import onnx

    from tools.growth.families import c2f

    onnx.save(c2f(100_000), path)


CASES = {
    "help": Case("`--help`", "--help"),
    "predict": Case("`predict`, YOLOv8n", "predict MODEL", _quantized),
    "nodes": Case("`predict`, 100,000 nodes", "predict MODEL", _large),
    "insert-320": Case(
        "YOLOv8n, 64 images of 320",
        "insert MODEL --calib IMAGES -o OUT",
        partial(_yolo, size=320),
        (64, 320),
        True,
    ),
    "insert-640": Case(
        "YOLOv8n, 64 images of 640", "insert MODEL --calib IMAGES -o OUT", _yolo, (64, 640), True
    ),
    "insert-many": Case(
        "YOLOv8n, 512 images of 320",
        "insert MODEL --calib IMAGES -o OUT --max-images 512",
        partial(_yolo, size=320),
        (512, 320),
        True,
    ),
    "insert-n": Case(
        "YOLOv8n, 8 images of 640", "insert MODEL --calib IMAGES -o OUT", _yolo, (8, 640), True
    ),
    "insert-s": Case(
        "YOLOv8s, 8 images of 640",
        "insert MODEL --calib IMAGES -o OUT",
        partial(_yolo, letter="s"),
        (8, 640),
        True,
    ),
    "insert-x": Case(
        "YOLOv8x, 8 images of 640",
        "insert MODEL --calib IMAGES -o OUT",
        partial(_yolo, letter="x"),
        (8, 640),
        True,
    ),
    "insert-photos": Case(
        "`--model`, photographs", "insert MODEL --calib IMAGES -o OUT", None, (0, 0), True
    ),
    "tune-photos": Case(
        "`tune --front`, `--model`, photographs",
        "tune MODEL --calib IMAGES -o OUT --no-state --front",
        None,
        (0, 0),
    ),
}
USUAL = ("help", "predict", "nodes", "insert-320", "insert-640")

_PLAIN = """
import sys, numpy as np, onnxruntime
from pathlib import Path
from PIL import Image, ImageOps
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
name, (_, _, high, wide) = session.get_inputs()[0].name, session.get_inputs()[0].shape
for path in sorted(Path(sys.argv[2]).iterdir()):
    picture = ImageOps.pad(Image.open(path).convert("RGB"), (wide, high), Image.Resampling.BILINEAR, (114, 114, 114))
    pixels = np.asarray(picture).transpose(2, 0, 1)[None]
    session.run(None, {name: np.ascontiguousarray(pixels, np.float32) / np.float32(255)})
"""


def made(name: str, folder: Path, model: Path | None, photos: Path | None) -> dict[str, str]:
    """Make the files of a case, and return the file for each placeholder in its command.

    A child process makes the files, so that the peak memory of this process remains small.
    """
    case, found, steps = (
        CASES[name],
        {"OUT": folder / "out.onnx", "MODEL": model, "IMAGES": photos},
        [],
    )
    if case.model is not None:
        found["MODEL"] = folder / f"{name}.onnx"
        steps.append(f"CASES[{name!r}].model(Path({str(found['MODEL'])!r}))")
    if case.images is not None and case.images[0]:
        count, size = case.images
        found["IMAGES"] = where = folder / f"images-{count}-{size}"
        if not where.exists():
            where.mkdir()
            steps.append(f"write_images(Path({str(where)!r}), {count}, {size})")
    start = [
        "from pathlib import Path",
        "from benchmarks.speed import CASES",
        "from qdqtool.demo.images import write_images",
    ]
    subprocess.run([sys.executable, "-c", "\n".join([*start, *steps])], cwd=ROOT, check=True)
    return {word: str(path) for word, path in found.items()}


def sources(commit: str, folder: Path) -> Path:
    packed = folder.with_suffix(".tar")
    subprocess.run(["git", "-C", ROOT, "archive", "--output", packed, commit], check=True)
    shutil.unpack_archive(packed, folder, filter="data")
    return folder


def compare(
    commit: str, names: Sequence[str], turns: int, model: Path | None, photos: Path | None
) -> list[list[str]]:
    """Measure cases, print rows of a table, and return the rows.

    Args:
        commit: Version with which the present sources are compared.
        names: Names of the cases.
        turns: Number of runs of each process.
        model: Model for the cases with photographs.
        photos: Folder of photographs.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="qdqtool-speed-") as name:
        folder = Path(name)
        trees = {"before": sources(commit, folder / "before"), "now": ROOT}
        for tree in trees.values():
            packages = (tree / "qdqtool", tree / "calibration")
            subprocess.run([sys.executable, "-m", "compileall", "-q", *packages], check=True)
        for case in names:
            if CASES[case].images == (0, 0) and (model is None or photos is None):
                print(f"{case}: skipped; give --model and --photos", flush=True)
                continue
            rows.append(_in_turns(case, made(case, folder, model, photos), trees, turns))
    return rows


def _in_turns(name: str, files: dict[str, str], trees: dict[str, Path], turns: int) -> list[str]:
    case = CASES[name]
    words = [files.get(word, word) for word in case.command.split()]
    commands = {
        what: ([sys.executable, "-m", "qdqtool", *words], tree) for what, tree in trees.items()
    }
    if case.plain:
        commands["plain"] = (
            [sys.executable, "-c", _PLAIN, files["MODEL"], files["IMAGES"]],
            trees["now"],
        )
    runs: dict[str, list[Run]] = {what: [] for what in commands}
    for turn in range(turns):
        for what in commands if turn % 2 else reversed(commands):
            runs[what].append(measure(*commands[what]))
    print(f"{name} ({case.title}), {turns} turns")
    cells = [case.title]
    for part, unit in (("cpu", "s"), ("wall", "s"), ("peak", "MB")):
        values = {what: [float(getattr(r, part)) for r in found] for what, found in runs.items()}
        against = {other: ratio(values["now"], values[other]) for other in values if other != "now"}
        digits = 0 if unit == "MB" else 3 if min(values["now"]) < 1 else 1
        least = {what: f"{min(found):.{digits}f} {unit}" for what, found in values.items()}
        print(
            f"  {part:5}",
            *(f"{what} {least[what]}" for what in values),
            *(f"now/{other} {found}" for other, found in against.items()),
            sep="  ",
            flush=True,
        )
        if part != "wall":  # the wall time of a busy machine is not meaningful
            cells += [least["now"], str(against["before"]), str(against.get("plain", ""))]
    print(f"  in brackets with {ratio(values['now'], values['before']).sure:.0%}", flush=True)
    return cells
