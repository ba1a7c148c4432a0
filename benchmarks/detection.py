"""Detections of YOLOv8-style outputs, and how well two sets of them agree (COCO-style average precision).

All boxes are x1, y1, x2, y2 in input pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
IOUS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)


@dataclass
class Detections:
    """Boxes [n, 4], scores [n] and classes [n] of one image, best first."""

    boxes: Floats
    scores: Floats
    classes: npt.NDArray[np.int64]

    def above(self, score: float) -> Detections:
        keep = self.scores >= score
        return Detections(self.boxes[keep], self.scores[keep], self.classes[keep])


def iou(a: Floats, b: Floats) -> Floats:
    """Intersection over union of every box of ``a`` [n, 4] with every box of ``b`` [m, 4]: [n, m]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0.0, None), axis=2)
    areas = [np.prod(np.clip(x[:, 2:] - x[:, :2], 0.0, None), axis=1) for x in (a, b)]
    union = areas[0][:, None] + areas[1][None] - shared
    result: Floats = shared / np.maximum(union, 1e-9)
    return result


def decode(output: npt.NDArray[Any], score: float = 0.001, overlap: float = 0.7, limit: int = 300) -> Detections:
    """Non-maximum suppression by class over an output [1, 4 + classes, anchors] (centre, size, scores)."""
    rows = output[0].T.astype(np.float64)
    scores = rows[:, 4:].max(axis=1)
    classes = rows[:, 4:].argmax(axis=1)
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= score][:3000]
    centre, extent = rows[order, :2], rows[order, 2:4]
    boxes = np.concatenate([centre - extent / 2, centre + extent / 2], axis=1)
    scores, classes = scores[order], classes[order]
    kept: list[int] = []
    alive = np.ones(len(order), bool)
    for i in range(len(order)):
        if not alive[i]:
            continue
        kept.append(i)
        if len(kept) == limit:
            break
        later = np.flatnonzero(alive[i + 1 :] & (classes[i + 1 :] == classes[i])) + i + 1
        alive[later[iou(boxes[i : i + 1], boxes[later])[0] > overlap]] = False
    return Detections(boxes[kept], scores[kept], classes[kept])


def average_precision(
    references: list[Detections], found: list[Detections], images: npt.NDArray[np.int64] | None = None
) -> tuple[float, float]:
    """mAP50 and mAP50-95 of detections against references: 101-point AP, mean over classes that have references.

    Args:
        references: For each image, what counts as true.
        found: For each image, what is judged.
        images: Which images to use, with repetition (for bootstrap); all of them when None.
    """
    chosen = range(len(references)) if images is None else images
    present = sorted({int(c) for i in chosen for c in references[i].classes})
    values = [_class_precision(references, found, chosen, c) for c in present]
    if not values:
        return float("nan"), float("nan")
    table = np.array(values)
    return float(table[:, 0].mean()), float(table.mean())


def _class_precision(references: list[Detections], found: list[Detections], images: Any, label: int) -> Floats:
    scores: list[float] = []
    hits: list[npt.NDArray[np.bool_]] = []
    total = 0
    for i in images:
        truth = references[i].boxes[references[i].classes == label]
        mine = found[i].classes == label
        total += len(truth)
        used = np.zeros((len(truth), len(IOUS)), bool)
        overlaps = iou(found[i].boxes[mine], truth)
        for row, score in zip(overlaps, found[i].scores[mine], strict=True):
            hit = np.zeros(len(IOUS), bool)
            for k, threshold in enumerate(IOUS):
                free = np.where(used[:, k], -1.0, row)
                if len(free) and free.max() >= threshold:
                    used[int(free.argmax()), k] = hit[k] = True
            scores.append(score)
            hits.append(hit)
    if not scores:
        return np.zeros(len(IOUS))
    table = np.array(hits)[np.argsort(-np.array(scores), kind="stable")]
    true = np.cumsum(table, axis=0)
    recall = true / total
    precision = true / np.arange(1, len(table) + 1)[:, None]
    precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    result = np.zeros(len(IOUS))
    for k in range(len(IOUS)):
        at = np.searchsorted(recall[:, k], RECALLS, side="left")
        result[k] = np.where(at < len(precision), precision[np.minimum(at, len(precision) - 1), k], 0.0).mean()
    return result


def run_model(model: bytes | str, samples: list[npt.NDArray[np.float32]], threads: int = 0) -> list[Detections]:
    """Detections of a model on inputs [1, 3, height, width], onnxruntime on the CPU, graph optimizations off.

    Optimizations are off because onnxruntime would replace Q/DQ patterns by integer kernels of its own.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [decode(session.run(None, {name: x})[0]) for x in samples]


def load_samples(model: str | Path, folder: str | Path) -> list[npt.NDArray[np.float32]]:
    """The images of a folder as the model takes them (letterbox, RGB, 0 to 1)."""
    from calibration.images import open_data
    from calibration.partial import input_specs, metadata_size
    from qdqtool.modelfile import load

    loaded = load(model)
    specs = input_specs(loaded)
    data = open_data(str(folder), specs, max_images=10_000, size=metadata_size(loaded))
    return [sample[specs[0].name] for sample in data]
