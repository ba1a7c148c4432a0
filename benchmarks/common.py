"""What the scripts share: tables in pages, rows in files, splits of images, detectors, and paired differences."""

import argparse
import hashlib
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

RESAMPLES = 500
Images = npt.NDArray[np.float32]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints a script's docstring as it stands, with the option that all tables have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--page", type=Path, help="write the tables between their marks in this page"
    )
    return parser


def publish(
    name: str,
    text: str,
    page: Path | None = None,
    file: Path | None = None,
    rows: Sequence[Any] = (),
) -> None:
    """Prints a table; where they are named, writes it between its marks in a page, and its rows (dataclasses) as JSON.

    The marks are ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``; exits where the page has none.
    """
    print(text)
    if file is not None:
        file.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", "utf-8")
    if page is None:
        return
    marks = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
    found, count = marks.subn(lambda m: f"{m[1]}{text}{m[2]}", page.read_text("utf-8"))
    if not count:
        sys.exit(f"{page}: has no '<!-- {name}: ... --> ... <!-- end of {name} -->'")
    page.write_text(found, "utf-8")


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    return "\n".join(
        f"| {' | '.join(map(str, line))} |" for line in (head, ("---",) * len(head), *rows)
    )


def kept_rows(
    names: Iterable[str],
    file: Path | None,
    measure: Callable[[str], dict[str, Any]],
    prefix: str = "",
) -> dict[str, Any]:
    """The rows of a JSON file and those of the names that it lacks, each written as soon as it is measured."""
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
    """The class and the first line of what another tool raised."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


def read_splits(path: Path, files: Sequence[str], only: str = "") -> list[dict[str, Any]]:
    """The ``[[split]]`` of a TOML file whose name has a match of ``only``; exits with one line where one lacks a file.

    ``files`` are the keys that name files, relative to the TOML file.
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
    """The images of a folder as the model takes them (letterbox, RGB, 0 to 1), or an npy file of them: [n, 3, h, w]."""
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
    """At most so many rows, evenly spread, each with a batch dimension."""
    chosen = np.unique(np.linspace(0, len(array) - 1, min(wanted, len(array))).astype(int))
    return [np.ascontiguousarray(array[i : i + 1]) for i in chosen]


def input_name(model: Path) -> str:
    import onnx

    return str(onnx.load(model, load_external_data=False).graph.input[0].name)


def run_model(model: bytes | str, samples: Iterable[Images], threads: int = 0) -> list[Detections]:
    """Detections of a model on inputs [1, 3, height, width], onnxruntime on the CPU, Q/DQ computed in float."""
    from qdqtool.runtime.sessions import open_session

    session = open_session(model, threads, optimize="extended", fold_qdq=False)
    name = session.get_inputs()[0].name
    return [
        decode_detections(session.run(None, {name: np.ascontiguousarray(x)})[0]) for x in samples
    ]


def digest(model: bytes, images: Iterable[Images]) -> str:
    """Of a model and the arrays it is run on: a folder may get more images, a file another model."""
    data = hashlib.sha256(model)
    for image in images:
        data.update(np.ascontiguousarray(image).data)
    return data.hexdigest()


def detect(
    model: bytes, samples: Sequence[Images], work: Path, threads: int = 0
) -> list[Detections]:
    """Detections of a model, from the folder where they were kept if it has them."""
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


def judge_of(
    model: Path, samples: Sequence[Images], work: Path, threads: int
) -> Callable[[bytes], list[DetectionMatches]]:
    """Compares what other models detect on each image with what this one does with a score of at least 0.25."""
    references = [d.above(0.25) for d in detect(model.read_bytes(), samples, work, threads)]
    print(
        f"{len(samples)} images to judge on, {sum(len(r.scores) for r in references)} boxes",
        flush=True,
    )
    return lambda other: list(
        map(match_detections, references, detect(other, samples, work, threads))
    )


def corners(boxes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Low and high corners [..., 4] of boxes that are given as center and size [..., 4]."""
    return np.concatenate(
        [boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1
    )


def pooled(matches: Sequence[DetectionMatches]) -> float:
    """AP over IoU 0.50 to 0.95, the detections of all classes ranked together."""
    return float(compute_average_precision(matches, True).mean())


def paired(
    pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]], value: Callable[[Sequence[Any]], float]
) -> tuple[float, float, float]:
    """The first minus the second, the mean over the pairs, with the 95 % interval of a paired bootstrap over images."""
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
