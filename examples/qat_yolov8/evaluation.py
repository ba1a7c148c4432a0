"""Measure mAP50-95 of an ONNX detector in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnxruntime

THRESHOLDS = np.arange(0.5, 1.0, 0.05)


def detect(path: str, images: np.ndarray, batch: int = 1) -> np.ndarray:
    """Return the outputs [images, 4 + classes, cells] of onnxruntime without fusion of Q/DQ."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    found = [
        session.run(None, {name: images[i : i + batch].astype(np.float32) / 255})[0]
        for i in range(0, len(images), batch)
    ]
    return np.concatenate(found)


def mean_average_precision(outputs: np.ndarray, objects: list[np.ndarray], classes: int) -> float:
    """Return COCO's mAP50-95 in percent: 101 recall points, 10 thresholds, mean over classes."""
    precisions = []
    for kind in range(classes):
        scores, hits, total = [], [], 0
        for output, expected in zip(outputs, objects, strict=True):
            truth = expected[expected[:, 0] == kind, 1:]
            total += len(truth)
            boxes, score = suppress(output[:4].T, output[4 + kind])
            scores.append(score)
            hits.append(_hits(boxes, truth))
        order = np.argsort(-np.concatenate(scores), kind="stable")
        hit = np.concatenate(hits)[order]
        precisions.append([_average_precision(hit[:, i], total) for i in range(len(THRESHOLDS))])
    return 100 * float(np.mean(precisions))


def suppress(
    boxes: np.ndarray, scores: np.ndarray, low: float = 0.01, overlap: float = 0.6
) -> tuple:
    """Return boxes and scores of one class after non-maximum suppression, best first."""
    kept = np.flatnonzero(scores > low)
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    boxes, scores = boxes[kept], scores[kept]
    between = overlaps(boxes, boxes)
    alive = np.ones(len(boxes), bool)
    for i in range(len(boxes)):
        if alive[i]:
            alive[i + 1 :] &= between[i, i + 1 :] <= overlap
    return boxes[alive], scores[alive]


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the intersection over union of all pairs of boxes, [len(a), len(b)]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    inner = np.clip(high - low, 0, None).prod(2)
    areas = [np.clip(x[:, 2:] - x[:, :2], 0, None).prod(1) for x in (a, b)]
    return inner / np.maximum(areas[0][:, None] + areas[1][None] - inner, 1e-9)


def _hits(boxes: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return whether each box (best first) finds an object that no better box has found.

    The shape is [boxes, thresholds].
    """
    result = np.zeros((len(boxes), len(THRESHOLDS)), bool)
    if not len(boxes) or not len(truth):
        return result
    between = overlaps(boxes, truth)
    for t, threshold in enumerate(THRESHOLDS):
        free = np.ones(len(truth), bool)
        for i in range(len(boxes)):
            quality = np.where(free, between[i], -1.0)
            best = int(quality.argmax())
            if quality[best] >= threshold:
                free[best] = False
                result[i, t] = True
    return result


def _average_precision(hit: np.ndarray, total: int) -> float:
    found = np.cumsum(hit)
    recall = found / max(total, 1)
    precision = found / np.arange(1, len(hit) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    positions = np.searchsorted(recall, np.linspace(0, 1, 101), side="left")
    return float(np.mean([envelope[i] if i < len(envelope) else 0.0 for i in positions]))
