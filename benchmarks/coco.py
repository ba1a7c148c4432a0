"""Measure mAP on COCO val2017: float model, `qdqtool insert`, Q/DQ models of other tools.

usage:
    yolo export model=yolov8n.pt format=onnx opset=17
    python -m benchmarks.coco yolov8n.onnx --images val2017
        --annotations instances_val2017.json --calib train2017
    python -m benchmarks.coco yolov8n.onnx ... --other modelopt=yolov8n_modelopt.onnx
        --limit 500 -o rows.json

COCO cannot be downloaded on the machine on which qdqtool is developed. This script was therefore
run on generated images only (tests/test_coco.py), and the documents of qdqtool have no mAP on COCO.
Please report your results.

Models have 80 classes in the order of COCO, and the output of YOLOv8 to YOLO26. Images are
letterboxed to the square input of the model, as in a deployment. `yolo val` uses rectangular
inputs, so its values are slightly different (published for yolov8n: 37.3). The evaluation is that
of COCO: 100 detections for each image, IoU .50 to .95, 101 recalls, and the mean over the classes.
Crowds are ignored. Use another folder for calibration than for evaluation.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import parser_of, publish, table
from qdqtool.accuracy.detections import (
    IOUS,
    RECALLS,
    Detections,
    decode_detections,
    read_detections,
)

MAX_DETECTIONS = 100
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GroundTruth:
    """Objects of one image.

    Attributes:
        boxes: Two corners of each object, in pixels of the image, [n, 4].
        classes: Number of the class, [n].
        crowd: Whether the object is a group of objects (a crowd), [n]. A crowd counts neither as
            found nor as missed.
    """

    boxes: Floats
    classes: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CocoRow:
    """mAP of one model.

    Attributes:
        model: Name of the model.
        images: Number of images.
        map50_95: Mean over IoU .50 to .95 and over the classes.
        map50: Mean over the classes, at IoU .50.
    """

    model: str
    images: int
    map50_95: float
    map50: float


# Annotations --------------------------------------------------------------------------


def read_annotations(path: Path) -> dict[str, GroundTruth]:
    """Return the objects of each image of a COCO file, by name of the image file.

    Raises:
        SystemExit: The file is not a COCO file of detections.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        numbers = {c["id"]: n for n, c in enumerate(sorted(content["categories"], key=_id))}
        objects: dict[int, list[tuple[list[float], int, bool]]] = defaultdict(list)
        for entry in content["annotations"]:
            left, top, width, height = map(float, entry["bbox"])
            box = [left, top, left + width, top + height]
            is_crowd = bool(entry.get("iscrowd", 0))
            objects[entry["image_id"]].append((box, numbers[entry["category_id"]], is_crowd))
        return {i["file_name"]: _make_truth(objects[i["id"]]) for i in content["images"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: is not a COCO file of detections: {type(error).__name__}: {error}")


def _id(category: Mapping[str, Any]) -> int:
    return int(category["id"])


def _make_truth(objects: Sequence[tuple[list[float], int, bool]]) -> GroundTruth:
    return GroundTruth(
        np.array([box for box, _, _ in objects], np.float64).reshape(-1, 4),
        np.array([label for _, label, _ in objects], np.int64),
        np.array([is_crowd for _, _, is_crowd in objects], np.bool_),
    )


# Evaluation ---------------------------------------------------------------------------


@dataclass
class ClassMatches:
    """Detections of one class on all images.

    Attributes:
        scores: Score of each detection, one array for each image.
        hits: For each image, whether a detection matches an object at each IoU, [n, 10].
        ignored: For each image, whether a detection matches a crowd at each IoU, [n, 10].
        objects: Number of objects that are not crowds.
    """

    scores: list[Floats]
    hits: list[npt.NDArray[np.bool_]]
    ignored: list[npt.NDArray[np.bool_]]
    objects: int = 0


def evaluate(truths: Sequence[GroundTruth], detections: Sequence[Detections]) -> Floats:
    """Return COCO's mAP at each of `IOUS`, [10]; NaN without objects."""
    classes: dict[int, ClassMatches] = defaultdict(lambda: ClassMatches([], [], []))
    for truth, image in zip(truths, detections, strict=True):
        best = np.argsort(-image.scores, kind="stable")[:MAX_DETECTIONS]
        for label in np.union1d(truth.classes, image.classes[best]):
            chosen = best[image.classes[best] == label]
            same = truth.classes == label
            _match_class(
                classes[int(label)],
                image.boxes[chosen],
                image.scores[chosen],
                truth.boxes[same],
                truth.crowd[same],
            )
    precisions = [_average_precision(c) for c in classes.values() if c.objects]
    return np.mean(precisions, axis=0) if precisions else np.full(len(IOUS), np.nan)


def _match_class(
    matches: ClassMatches,
    boxes: Floats,
    scores: Floats,
    objects: Floats,
    crowd: npt.NDArray[np.bool_],
) -> None:
    """Match the detections of one class on one image with objects, and add them to `matches`.

    The detections are in the order of their scores, best first. An object matches one detection. A
    crowd matches any number of detections that match no object.
    """
    overlaps = _overlaps(boxes, objects, crowd)
    hits = np.zeros((len(boxes), len(IOUS)), np.bool_)
    ignored = np.zeros_like(hits)
    for k, threshold in enumerate(IOUS):
        free = ~crowd
        for index, row in enumerate(overlaps):
            candidates = np.where(free, row, -1.0)
            if candidates.size and candidates.max() >= threshold:
                free[candidates.argmax()] = False
                hits[index, k] = True
            elif np.any(crowd & (row >= threshold)):
                ignored[index, k] = True
    matches.scores.append(scores)
    matches.hits.append(hits)
    matches.ignored.append(ignored)
    matches.objects += int((~crowd).sum())


def _overlaps(boxes: Floats, objects: Floats, crowd: npt.NDArray[np.bool_]) -> Floats:
    """Return the IoU of boxes and objects, [boxes, objects].

    For a crowd, the value is the fraction of the box that is inside the crowd.
    """
    low = np.maximum(boxes[:, None, :2], objects[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], objects[None, :, 2:])
    inside = np.prod(np.clip(high - low, 0.0, None), axis=2)
    areas, others = (
        np.prod(np.clip(b[:, 2:] - b[:, :2], 0.0, None), axis=1) for b in (boxes, objects)
    )
    union = np.where(crowd, areas[:, None], areas[:, None] + others - inside)
    return np.asarray(inside / np.maximum(union, 1e-9))


def _average_precision(matches: ClassMatches) -> Floats:
    scores = np.concatenate(matches.scores)
    order = np.argsort(-scores, kind="stable")
    hits = np.concatenate(matches.hits)[order]
    ignored = np.concatenate(matches.ignored)[order]
    average = np.zeros(len(IOUS))
    for k in range(len(IOUS)):
        true = np.cumsum(hits[~ignored[:, k], k])
        if not len(true):
            continue
        precision = true / np.arange(1, len(true) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        index = np.searchsorted(true / matches.objects, RECALLS, side="left")
        reached = precision[np.minimum(index, len(precision) - 1)]
        average[k] = np.where(index < len(precision), reached, 0.0).mean()
    return average


# Models -------------------------------------------------------------------------------


def detect_images(model: bytes, paths: Sequence[Path], size: int) -> Iterator[Detections]:
    from calibration.images import prepare_image, read_image
    from qdqtool.runtime.sessions import open_session

    session = open_session(model, 0, optimize="extended", fold_qdq=False)
    (name,) = (i.name for i in session.get_inputs())
    for path in paths:
        image = read_image(path)
        output = session.run(None, {name: prepare_image(image, size, size)})[0]
        is_sorted = output.shape[-1] == 6
        boxed = read_detections(output[0]) if is_sorted else decode_detections(output)
        yield Detections(
            undo_letterbox(boxed.boxes, *image.size, size), boxed.scores, boxed.classes
        )


def undo_letterbox(boxes: Floats, width: int, height: int, size: int) -> Floats:
    """Convert boxes [n, 4] in a letterboxed square input to pixels of the image."""
    ratio = min(size / height, size / width)
    padding = [round((size - max(1, round(side * ratio))) / 2 - 0.1) for side in (width, height)]
    if (width, height) == (size, size):
        padding = [0, 0]
    unpadded = (boxes - np.array(padding * 2)) / ratio
    return np.clip(unpadded, 0.0, np.array([width, height] * 2, np.float64))


def measure(
    name: str,
    model: bytes,
    paths: Sequence[Path],
    truths: Sequence[GroundTruth],
    size: int,
) -> CocoRow:
    from qdqtool.util.progress import track_progress

    detections = list(track_progress(detect_images(model, paths, size), name, len(paths)))
    values = evaluate(truths, detections)
    row = CocoRow(name, len(paths), float(values.mean()), float(values[0]))
    print(f"{name}: {row.map50_95:.4f}", file=sys.stderr, flush=True)
    return row


def format_rows(rows: Sequence[CocoRow]) -> str:
    first = rows[0]
    return table(
        ("model", "mAP50-95", "minus float", "mAP50"),
        (
            (
                row.model,
                f"{row.map50_95 * 100:.1f}",
                f"{(row.map50_95 - first.map50_95) * 100:+.1f}" if row is not first else "",
                f"{row.map50 * 100:.1f}",
            )
            for row in rows
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path, help="float ONNX model with a square input")
    parser.add_argument("--images", type=Path, required=True, help="folder of the images")
    parser.add_argument("--annotations", type=Path, required=True, help="instances_val2017.json")
    parser.add_argument("--calib", type=Path, help="folder to calibrate with, for qdqtool insert")
    parser.add_argument(
        "--other", action="append", default=[], metavar="NAME=FILE", help="another Q/DQ model"
    )
    parser.add_argument("--limit", type=int, help="number of images, evenly spread")
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    truth = read_annotations(options.annotations)
    names = sorted(name for name in truth if (options.images / name).is_file())
    if not names:
        sys.exit(
            f"{options.images}: the images of {options.annotations} are missing; give their folder"
        )
    count = min(options.limit or len(names), len(names))
    names = [names[i] for i in np.unique(np.linspace(0, len(names) - 1, count).astype(int))]
    models = {"float": options.model.read_bytes()}
    if options.calib is not None:
        import qdqtool

        insertion = qdqtool.insert(options.model, options.calib, predict=False, progress=True)
        models["qdqtool insert"] = insertion.model.SerializeToString()
    for entry in options.other:
        name, _, file = entry.partition("=")
        models[name] = Path(file).read_bytes()
    size = _input_size(options.model)
    paths, truths = [options.images / n for n in names], [truth[n] for n in names]
    rows = [measure(name, model, paths, truths, size) for name, model in models.items()]
    publish("coco", format_rows(rows), options.page, options.output, rows)


def _input_size(path: Path) -> int:
    from calibration.session import input_specs, metadata_size
    from qdqtool.ir.modelfile import load

    model = load(path)
    size = input_specs(model)[0].shape[2] or (metadata_size(model) or (640,))[0]
    return int(size)


if __name__ == "__main__":
    main()
