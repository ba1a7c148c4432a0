"""Functions of several benchmarks: tables, splits of images, detectors and intervals."""

import argparse
import hashlib
import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.accuracy.detections import (
    DetectionMatches,
    Detections,
    compute_average_precision,
    decode_detections,
    match_detections,
)

ROOT = Path(__file__).resolve().parents[1]
RESAMPLES = 500
Images = npt.NDArray[np.float32]


def parser_of(description: str | None, pages: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that prints a script's docstring unchanged, with the option ``--page``.

    Args:
        description: Docstring of the script.
        pages: ``nargs`` of the option. None: one page.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--page",
        type=Path,
        nargs=pages,
        help=f"write the tables between their marks into {'these pages' if pages else 'this page'}",
    )
    return parser


def add_measurement_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts that measure detections: ``--threads``, ``--work``, ``--json``."""
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of onnxruntime for the evaluation"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("accuracy-work"),
        help="folder for detections and statistics (default: %(default)s); runs of the same version "
        "of qdqtool and onnxruntime reuse them",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this JSON file")


def open_work_folder(folder: Path) -> Path:
    """Create and return the subfolder of a work folder for this version of the code.

    Its name depends on the sources of qdqtool and of the benchmarks and on the version of
    onnxruntime, so that results of other versions are not reused. Files that are reused are counted
    on stderr.

    Args:
        folder: Value of ``--work``.
    """
    version = hashlib.sha256(importlib.metadata.version("onnxruntime").encode())
    for package in ("qdqtool", "calibration", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            version.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    made = folder / version.hexdigest()[:12]
    made.mkdir(parents=True, exist_ok=True)
    reused = len(list(made.iterdir()))
    if reused:
        print(f"{made}: files of earlier runs that are reused: {reused}", file=sys.stderr)
    return made


def publish(
    name: str,
    text: str,
    page: Path | None = None,
    file: Path | None = None,
    rows: Sequence[Any] = (),
) -> None:
    """Print a table, write it into a page, and write its rows as JSON.

    In the page, the table replaces the text between the marks ``<!-- NAME: ... -->`` and ``<!-- end
    of NAME -->``.

    Args:
        name: Name of the marks.
        text: The table.
        page: Page into which the table is written; None for no page.
        file: JSON file for the rows; None for no file.
        rows: Rows of the table, as dataclasses.

    Raises:
        SystemExit: The page does not have the marks.
    """
    print(text)
    if file is not None:
        file.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", "utf-8")
    if page is None:
        return
    marks = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
    found, count = marks.subn(lambda m: f"{m[1]}{text}{m[2]}", page.read_text("utf-8"))
    if not count:
        sys.exit(
            f"{page}: the marks '<!-- {name}: ... --> ... <!-- end of {name} -->' are missing; "
            "add them to the page"
        )
    page.write_text(found, "utf-8")


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(
        f"| {' | '.join(map(str, line))} |" for line in (head, ("---",) * len(head), *rows)
    )


def kept_rows(
    names: Iterable[str],
    file: Path | None,
    measure: Callable[[str], dict[str, Any]],
    prefix: str = "",
) -> dict[str, Any]:
    """Return the rows of a JSON file by name, and measure the rows that are not in the file.

    Each row is written to the file as soon as it is measured, so that an interrupted run can
    continue.

    Args:
        names: Names of the rows.
        file: The JSON file. None: all rows are measured.
        measure: Function that measures the row of a name.
        prefix: Text before the name in the progress line.
    """
    found: dict[str, Any] = (
        json.loads(file.read_text()) if file is not None and file.exists() else {}
    )
    for name in names:
        if name in found:
            continue
        found[name] = measure(name)
        if file is not None:
            file.write_text(json.dumps(found, indent=1))
        print(f"{prefix}{name}: {found[name]}", file=sys.stderr, flush=True)
    return {name: found[name] for name in names}


def failure(error: BaseException) -> str:
    """Return the class and the first line of an exception, with at most 200 characters."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


def read_splits(path: Path, files: Sequence[str], only: str = "") -> list[dict[str, Any]]:
    """Return the ``[[split]]`` tables of a TOML file whose names match a pattern.

    Args:
        path: The TOML file.
        files: Keys with the names of files, relative to the TOML file.
        only: Regular expression on the names of the splits.

    Raises:
        SystemExit: The TOML file is damaged, or a key or file of a split is missing.
    """
    try:
        entries: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8"))["split"]
    except OSError as error:
        sys.exit(f"{path}: cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        sys.exit(f"{path}: not a list of [[split]]: {error}")
    for number, entry in enumerate(entries, 1):
        missing = [f for f in ("name", *files) if f not in entry]
        if missing:
            sys.exit(f"{path}: split {number} has no '{missing[0]}'")
        for file in files:
            entry[file] = path.parent / entry[file]
            if not entry[file].exists():
                sys.exit(
                    f"{path}: {file} of split '{entry['name']}', {entry[file]}, does not exist"
                )
    return [entry for entry in entries if re.search(only, entry["name"])]


def load_samples(model: str | Path, data: str | Path) -> Images:
    """Return the images of a folder as inputs of a model, float32 [n, 3, h, w].

    Images are letterboxed, RGB, from 0 to 1. An npy file contains the inputs themselves.
    """
    from calibration.arrays import open_data
    from calibration.session import input_specs
    from qdqtool.ir.input_shapes import metadata_size
    from qdqtool.ir.modelfile import load

    if Path(data).suffix == ".npy":
        array: Images = np.load(data, mmap_mode="r", allow_pickle=False)
        return array
    loaded = load(model)
    specs = input_specs(loaded)
    found = open_data(str(data), specs, max_images=10_000, size=metadata_size(loaded))
    return np.concatenate([sample[specs[0].name] for sample in found])


def evenly(array: Images, wanted: int) -> list[Images]:
    """Return at most `wanted` rows of an array, evenly spread, each with a batch dimension."""
    chosen = np.unique(np.linspace(0, len(array) - 1, min(wanted, len(array))).astype(int))
    return [np.ascontiguousarray(array[i : i + 1]) for i in chosen]


def exclude_images(images: Iterable[Images], used: Iterable[Images]) -> list[Images]:
    """Return the images that are not in `used`, each with a batch dimension.

    Images are equal if their inputs [3, h, w] are equal.
    """
    seen = {digest(b"", image) for image in used}
    return [np.ascontiguousarray(i[None]) for i in images if digest(b"", i) not in seen]


def input_name(model: Path) -> str:
    import onnx

    return str(onnx.load(model, load_external_data=False).graph.input[0].name)


def run_model(model: bytes | str, samples: Iterable[Images], threads: int = 0) -> list[Detections]:
    """Return the detections of a model on inputs [1, 3, h, w].

    onnxruntime runs the model on the CPU, and computes Q/DQ in float, as in `compare`.
    """
    from qdqtool.runtime.sessions import open_session

    session = open_session(model, threads, fold_qdq=False)
    name = session.get_inputs()[0].name
    return [
        decode_detections(session.run(None, {name: np.ascontiguousarray(x)})[0]) for x in samples
    ]


def quantize_static(model: Path, output: Path, calibration: Images, **options: Any) -> None:
    """Write the model of onnxruntime's ``quantize_static``, with Q/DQ.

    Args:
        model: Float model with one input.
        output: File of the Q/DQ model.
        calibration: Inputs, [n, 3, h, w].
        options: Further arguments of ``quantize_static``.
    """
    from onnxruntime import quantization

    name = input_name(model)
    rows = ({name: np.ascontiguousarray(calibration[i : i + 1])} for i in range(len(calibration)))

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(rows, None)

    quantization.quantize_static(str(model), str(output), Reader(), **options)


def digest(model: bytes, images: Iterable[Images]) -> str:
    """Return the SHA-256 of a model and of its input arrays.

    The names of files are not sufficient, because their content may change.
    """
    data = hashlib.sha256(model)
    for image in images:
        data.update(np.ascontiguousarray(image).data)
    return data.hexdigest()


def detect(
    model: bytes, samples: Sequence[Images], work: Path, threads: int = 0
) -> list[Detections]:
    """Return the detections of a model, computed or from the work folder."""
    path = work / f"{digest(model, samples)[:24]}.detections.npz"
    if not path.exists():
        found = run_model(model, samples, threads)
        with open(path.with_suffix(".part"), "wb") as file:
            joined = {
                n: np.concatenate([getattr(d, n) for d in found])
                for n in ("boxes", "scores", "classes")
            }
            np.savez(file, counts=[len(d.scores) for d in found], **joined)
        path.with_suffix(".part").rename(path)
    with np.load(path, allow_pickle=False) as kept:
        ends = np.cumsum(kept["counts"])[:-1]
        parts = zip(*(np.split(kept[n], ends) for n in ("boxes", "scores", "classes")), strict=True)
        return [Detections(*p) for p in parts]


def find_references(
    model: Path, samples: Sequence[Images], work: Path, threads: int = 0
) -> list[Detections]:
    """Return the detections of a float model with a score of at least 0.25, for each image.

    They are the ground truth of an agreement. The arguments are those of `judge_of`.
    """
    found = detect(model.read_bytes(), samples, work, threads)
    return [detections.filter_by_score(0.25) for detections in found]


def judge_of(
    model: Path, samples: Sequence[Images], work: Path, threads: int
) -> Callable[[bytes], list[DetectionMatches]]:
    """Return a function that compares the detections of a model with those of the float model.

    The reference is that of `find_references`.

    Args:
        model: Float model.
        samples: Inputs of the models, [1, 3, h, w].
        work: Folder for detections.
        threads: Number of threads of onnxruntime; 0 for one on each core.
    """
    references = find_references(model, samples, work, threads)
    print(
        f"{len(samples)} images for evaluation, {sum(len(r.scores) for r in references)} boxes",
        flush=True,
    )
    return lambda other: list(
        map(match_detections, references, detect(other, samples, work, threads))
    )


def corners(boxes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert boxes [..., 4] from center and size to low and high corners."""
    return np.concatenate(
        [boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1
    )


def pooled(matches: Sequence[DetectionMatches]) -> float:
    """Return AP over IoU 0.50 to 0.95, with the detections of all classes ranked together."""
    return float(compute_average_precision(matches, True).mean())


def paired(
    pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]], value: Callable[[Sequence[Any]], float]
) -> tuple[float, float, float]:
    """Return the mean difference (first minus second) of pairs, with its 95 % interval.

    The interval is that of a paired bootstrap over the images.

    Args:
        pairs: For each split, the results of two methods for each image.
        value: Function that returns the compared value for the results of images.

    Returns:
        The difference, and the lower and the upper end of the interval.
    """
    rng = np.random.default_rng(0)
    values = np.zeros(RESAMPLES)
    difference = 0.0
    for mine, theirs in pairs:
        difference += (value(mine) - value(theirs)) / len(pairs)
        for k in range(RESAMPLES):
            images = rng.integers(0, len(mine), len(mine))
            values[k] += (
                value([mine[i] for i in images]) - value([theirs[i] for i in images])
            ) / len(pairs)
    low, high = (float(v) for v in np.nanpercentile(values, [2.5, 97.5]))
    return difference, low, high
