"""Detections of YOLOv8-style outputs, and how well two sets of them agree (COCO-style average precision).

All boxes are x1, y1, x2, y2 in input pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def nbytes(self) -> int:
        return int(self.boxes.nbytes + self.scores.nbytes + self.classes.nbytes)

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


@dataclass
class Matches:
    """How the detections of one image fit its reference boxes; enough for every average precision over any images.

    Attributes:
        scores: [n].
        hits: [n, 10], whether a detection takes a reference box at each of IOUS.
        classes: [n].
        truth: Classes of the reference boxes.
    """

    scores: Floats
    hits: npt.NDArray[np.bool_]
    classes: npt.NDArray[np.int64]
    truth: npt.NDArray[np.int64]

    def as_json(self) -> dict[str, list[Any]]:
        """As plain numbers: the hits of one detection are the bits of one number."""
        bits = self.hits @ (1 << np.arange(len(IOUS)))
        return {"scores": self.scores.tolist(), "hits": bits.tolist(), "classes": self.classes.tolist(),
                "truth": self.truth.tolist()}  # fmt: skip

    @staticmethod
    def from_json(data: dict[str, list[Any]]) -> Matches:
        bits = np.asarray(data["hits"], np.int64).reshape(-1, 1)
        return Matches(
            np.asarray(data["scores"], np.float64), (bits >> np.arange(len(IOUS))) & 1 == 1,
            np.asarray(data["classes"], np.int64), np.asarray(data["truth"], np.int64),
        )


def match(reference: Detections, found: Detections) -> Matches:
    """Gives each detection, best first, the free reference box of its class that it overlaps most."""
    hits = np.zeros((len(found.scores), len(IOUS)), bool)
    for label in np.unique(found.classes):
        truth = reference.boxes[reference.classes == label]
        used = np.zeros((len(truth), len(IOUS)), bool)
        mine = np.flatnonzero(found.classes == label)
        overlaps = iou(found.boxes[mine], truth)
        for index, row in zip(mine, overlaps, strict=True):
            if not len(row) or row.max() < IOUS[0]:
                continue
            for k, threshold in enumerate(IOUS):
                free = np.where(used[:, k], -1.0, row)
                if free.max() >= threshold:
                    used[int(free.argmax()), k] = hits[index, k] = True
    return Matches(found.scores, hits, found.classes, reference.classes)


def precision(matches: Sequence[Matches], pooled: bool) -> Floats:
    """COCO's 101-point average precision at each of IOUS, [10]; NaN without reference boxes.

    Args:
        matches: Of the images, with repetition (for bootstrap).
        pooled: Rank the detections of all classes together; else the mean over the classes that have references.
    """
    scores = np.concatenate([m.scores for m in matches])
    hits = np.concatenate([m.hits for m in matches])
    truth = np.concatenate([m.truth for m in matches])
    if not len(truth):
        return np.full(len(IOUS), np.nan)
    if pooled:
        return _curve(scores, hits, len(truth))
    classes = np.concatenate([m.classes for m in matches])
    each = [_curve(scores[classes == c], hits[classes == c], int((truth == c).sum())) for c in np.unique(truth)]
    result: Floats = np.mean(each, axis=0)
    return result


def _curve(scores: Floats, hits: npt.NDArray[np.bool_], total: int) -> Floats:
    if not len(scores):
        return np.zeros(len(IOUS))
    true = np.cumsum(hits[np.argsort(-scores, kind="stable")], axis=0)
    recall = true / total
    exact = true / np.arange(1, len(true) + 1)[:, None]
    exact = np.maximum.accumulate(exact[::-1], axis=0)[::-1]
    result = np.zeros(len(IOUS))
    for k in range(len(IOUS)):
        at = np.searchsorted(recall[:, k], RECALLS, side="left")
        result[k] = np.where(at < len(exact), exact[np.minimum(at, len(exact) - 1), k], 0.0).mean()
    return result
