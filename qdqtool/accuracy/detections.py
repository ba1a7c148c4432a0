"""Detections of YOLOv8-style outputs, and the agreement of two sets of detections.

Boxes are x1, y1, x2, y2 in input pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

IOUS = np.linspace(0.5, 0.95, 10)  # IoU thresholds of COCO's metric
RECALLS = np.linspace(0.0, 1.0, 101)
SUPPRESSION_CANDIDATES = 3000  # maximum number of boxes that non-maximum suppression compares
MASK_STRIDE = 4  # input pixels for one pixel of the prototypes of masks
_MIN_SCORE = 0.001  # lowest score of a detection
_MAX_OVERLAP = 0.7  # a box is dropped if its IoU with a better box of its class is larger
MAX_DETECTIONS = 300  # maximum number of detections of an image
# A rounding error can change the integer of an activation, and further layers amplify this. Exact
# computations of a Q/DQ model that differ in the order of sums therefore give scores that differ by
# 0.02 (root mean square). Losses within this margin may be due to rounding.
SCORE_MARGIN = 0.05


@dataclass
class Detections:
    """Boxes [n, 4], scores [n] and classes [n] of one image, best first."""

    boxes: Floats
    scores: Floats
    classes: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return int(self.boxes.nbytes + self.scores.nbytes + self.classes.nbytes)

    def filter_by_score(self, lowest: float) -> Detections:
        """Return the detections with a score of at least ``lowest``."""
        keep = self.scores >= lowest
        return Detections(self.boxes[keep], self.scores[keep], self.classes[keep])


@dataclass
class DetectionMatches:
    """Matches of the detections of one image with reference boxes.

    The average precision over any set of images can be computed from the matches of the images.

    Attributes:
        scores: Score of each detection, [n].
        hits: Whether a detection matches a reference box at each of :data:`IOUS`, [n, 10].
        classes: Class of each detection, [n].
        truth: Class of each reference box, [reference boxes].
    """

    scores: Floats
    hits: npt.NDArray[np.bool_]
    classes: npt.NDArray[np.int64]
    truth: npt.NDArray[np.int64]

    def as_json(self) -> dict[str, list[Any]]:
        """Return the fields of the JSON output.

        The hits of a detection are the bits of an integer. The lowest bit is for the lowest IoU
        threshold.
        """
        bits = self.hits @ (1 << np.arange(len(IOUS)))
        return {
            "scores": self.scores.tolist(),
            "hits": bits.tolist(),
            "classes": self.classes.tolist(),
            "truth": self.truth.tolist(),
        }

    @staticmethod
    def from_json(fields: dict[str, list[Any]]) -> DetectionMatches:
        """Return the matches that `as_json` wrote."""
        bits = np.asarray(fields["hits"], np.int64).reshape(-1, 1)
        return DetectionMatches(
            np.asarray(fields["scores"], np.float64),
            (bits >> np.arange(len(IOUS))) & 1 == 1,
            np.asarray(fields["classes"], np.int64),
            np.asarray(fields["truth"], np.int64),
        )


class DetectionCounts(NamedTuple):
    """Numbers of detections at one score and an IoU of 0.5.

    Attributes:
        reference: Detections of the reference.
        found: Detections that match one of the reference.
        extra: Detections that match none.
        below: Further detections of the reference, which match a detection with a score of at most
            :data:`SCORE_MARGIN` below this score.
    """

    reference: int
    found: int
    extra: int
    below: int


def count_detections(matches: Sequence[DetectionMatches], min_score: float) -> DetectionCounts:
    """Count the detections of all images whose score is at least `min_score`.

    A detection with a lower score takes no match from them, because matching starts with the
    highest scores.
    """
    scores = np.concatenate([m.scores for m in matches])
    hits = np.concatenate([m.hits[:, 0] for m in matches])
    is_counted = scores >= min_score
    found = int(hits[is_counted].sum())
    return DetectionCounts(
        reference=sum(len(m.truth) for m in matches),
        found=found,
        extra=int(is_counted.sum()) - found,
        below=int(hits[scores >= min_score - SCORE_MARGIN].sum()) - found,
    )


def compute_iou(a: Floats, b: Floats) -> Floats:
    """Return the IoU of each box in `a` [n, 4] with each box in `b` [m, 4], as [n, m]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    intersection = np.prod(np.clip(high - low, 0.0, None), axis=2)
    areas = [np.prod(np.clip(x[:, 2:] - x[:, :2], 0.0, None), axis=1) for x in (a, b)]
    union = areas[0][:, None] + areas[1][None] - intersection
    return np.asarray(intersection / np.maximum(union, 1e-9))


def decode_detections(output: npt.NDArray[Any]) -> Detections:
    """Return at most 300 detections in an output, after non-maximum suppression by class.

    Args:
        output: Center, size and class scores of each anchor, [1, 4 + classes, anchors].
    """
    rows = output[0].T.astype(np.float64)
    scores = rows[:, 4:].max(axis=1)
    classes = rows[:, 4:].argmax(axis=1)
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= _MIN_SCORE][:SUPPRESSION_CANDIDATES]
    center, size = rows[order, :2], rows[order, 2:4]
    boxes = np.concatenate([center - size / 2, center + size / 2], axis=1)
    scores, classes = scores[order], classes[order]
    selected: list[int] = []
    remaining = np.ones(len(order), bool)
    for i in range(len(order)):
        if not remaining[i]:
            continue
        selected.append(i)
        if len(selected) == MAX_DETECTIONS:
            break
        later = np.flatnonzero(remaining[i + 1 :] & (classes[i + 1 :] == classes[i])) + i + 1
        remaining[later[compute_iou(boxes[i : i + 1], boxes[later])[0] > _MAX_OVERLAP]] = False
    return Detections(boxes[selected], scores[selected], classes[selected])


def read_detections(rows: npt.NDArray[Any]) -> Detections:
    """Return the detections that a network selected itself, without further suppression.

    Args:
        rows: Two corners, score and class of each detection, [detections, 6 or more].
    """
    order = np.argsort(-rows[:, 4], kind="stable")
    rows = rows[order][rows[order, 4] >= _MIN_SCORE].astype(np.float64)
    return Detections(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64))


def draw_boxes(boxes: npt.NDArray[Any], sides: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return where the prototypes of masks are in each box, [boxes, h, w].

    Args:
        boxes: Center and size of each box in input pixels, [4, boxes].
        sides: Height and width of the prototypes.
    """
    low, high = (boxes[:2] + sign * boxes[2:] / 2 for sign in (-1, 1))
    columns, rows = (
        (low[axis, :, None] <= pixels) & (pixels < high[axis, :, None])
        for axis, pixels in enumerate(MASK_STRIDE * np.arange(side) for side in reversed(sides))
    )
    return np.asarray(rows[:, :, None] & columns[:, None])


def match_detections(reference: Detections, detections: Detections) -> DetectionMatches:
    """Match each detection with a reference box of its class, at each threshold of `IOUS`.

    Detections are in the order of their scores. At each threshold, a detection matches the box with
    the largest overlap among those that no earlier detection matches, if this overlap reaches the
    threshold.
    """
    hits = np.zeros((len(detections.scores), len(IOUS)), bool)
    for label in np.unique(detections.classes):
        truth = reference.boxes[reference.classes == label]
        used = np.zeros((len(truth), len(IOUS)), bool)
        indices = np.flatnonzero(detections.classes == label)
        overlaps = compute_iou(detections.boxes[indices], truth)
        for index, row in zip(indices, overlaps, strict=True):
            if not len(row) or row.max() < IOUS[0]:
                continue
            for k, threshold in enumerate(IOUS):
                free = np.where(used[:, k], -1.0, row)
                if free.max() >= threshold:
                    used[int(free.argmax()), k] = hits[index, k] = True
    return DetectionMatches(detections.scores, hits, detections.classes, reference.classes)


def compute_average_precision(matches: Sequence[DetectionMatches], pooled: bool) -> Floats:
    """Return COCO's 101-point average precision at each of `IOUS`, [10].

    All entries are NaN without reference boxes.

    Args:
        matches: Matches of the images. An image may occur repeatedly, for the bootstrap.
        pooled: Whether to rank the detections of all classes together. Otherwise the result is the
            mean over the classes that have reference boxes.
    """
    scores, hits, truth, classes = (
        np.concatenate([getattr(m, name) for m in matches])
        for name in ("scores", "hits", "truth", "classes")
    )
    if not len(truth):
        return np.full(len(IOUS), np.nan)
    if pooled:
        return _rank_precision(scores, hits, len(truth))
    precisions = [
        _rank_precision(scores[classes == c], hits[classes == c], int((truth == c).sum()))
        for c in np.unique(truth)
    ]
    return np.asarray(np.mean(precisions, axis=0))


def _rank_precision(scores: Floats, hits: npt.NDArray[np.bool_], total: int) -> Floats:
    """Return the average precision of ranked detections at each of `IOUS`, [10].

    `total` is the number of reference boxes.
    """
    if not len(scores):
        return np.zeros(len(IOUS))
    true = np.cumsum(hits[np.argsort(-scores, kind="stable")], axis=0)
    recall = true / total
    precision = true / np.arange(1, len(true) + 1)[:, None]
    precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    average = np.zeros(len(IOUS))
    for k in range(len(IOUS)):
        index = np.searchsorted(recall[:, k], RECALLS, side="left")
        reached = precision[np.minimum(index, len(precision) - 1), k]
        average[k] = np.where(index < len(precision), reached, 0.0).mean()
    return average
