"""Comparison of a detector's detections before and after a change, on images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qdqtool.accuracy.metrics import (
    DetectionAgreementMetric,
    choose_agreement_metrics,
    count_references,
    resample_metric,
)
from qdqtool.fixing.runner import Arrays
from qdqtool.ir.graph import Model
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import format_count

_MIN_DETECTIONS = 10  # fewer detections of the float network are too few to decide
_MIN_AGREEMENT = 0.25  # minimum agreement before a change; with less, a loss cannot be measured
_MAX_LOSS = 0.02  # permitted loss of agreement if the interval of the change contains 0


@dataclass(frozen=True)
class DetectionVerdict:
    """Agreement of detections with those of the float network, before and after a change.

    Attributes:
        before: Agreement mAP of the model at the start of the step.
        after: Agreement mAP of the changed model.
        low: Lower end of the 95 % interval of `after` minus `before`.
        high: Upper end of this interval.
        images: Number of images.
        count: Number of detections of the float network.
    """

    before: float
    after: float
    low: float
    high: float
    images: int
    count: int

    @property
    def has_enough_detections(self) -> bool:
        """Whether enough detections were compared."""
        return self.count >= _MIN_DETECTIONS

    @property
    def is_meaningful(self) -> bool:
        """Whether enough detections were compared, and the model before the change finds them."""
        return self.has_enough_detections and self.before >= _MIN_AGREEMENT

    @property
    def finds_objects_again(self) -> bool:
        """Whether the changed model finds the objects, and the model before found none of them."""
        return round(self.before, 3) == 0 and self.after >= _MIN_AGREEMENT

    @property
    def permits_change(self) -> bool:
        """Whether the comparison is meaningful, and shows no clear loss of agreement."""
        return self.is_meaningful and self.high >= 0 and self.after >= self.before - _MAX_LOSS

    def describe(self) -> str:
        """Describe the agreement before and after the change, and the number of images."""
        return f"agreement mAP with float activations {self.describe_values()}"

    def describe_values(self) -> str:
        """Describe the agreement without the name of the metric."""
        is_unsure = self.low <= 0 <= self.high and self.low < self.high
        unsure = ", not certain" if is_unsure else ""
        return (
            f"{self.before:.3f} -> {self.after:.3f} (difference {self.low:+.3f} to "
            f"{self.high:+.3f}{unsure}) on {format_count(self.images, 'image')} with {self.count} "
            "detections"
        )

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return to_json_fields(self, "before", "after", "low", "high", "images") | {
            "detections": self.count
        }

    def add_to(self, growth: Note) -> Note:
        """Return a note on grown output errors, with the agreement if it is meaningful.

        Args:
            growth: The note without the agreement.
        """
        if not self.is_meaningful:
            return growth
        text = f"{growth}, and the detections get worse: {self.describe()}"
        return Note(text, code=growth.code, **growth.values)

    def describe_kept_change(self, codes: Sequence[str]) -> Note:
        """Return the note on a change that was kept although an error grew."""
        reason = "the detections do not get worse"
        if self.after < self.before:
            reason = (
                f"the agreement of the detections falls by at most {_MAX_LOSS:g}, which these "
                "images cannot distinguish from no loss"
            )
        return Note(
            f"the fix of {', '.join(codes)} was kept although the error of the outputs grew, "
            f"because {reason}: {self.describe()}",
            code="detections-decided",
            codes=list(codes),
            before=self.before,
            after=self.after,
        )


class _Agreement(NamedTuple):
    """Agreement of a model's detections with those of the float network.

    Attributes:
        value: Agreement mAP.
        resampled: Agreement mAP of each resample of the images.
        references: Number of detections of the float network.
    """

    value: float
    resampled: npt.NDArray[np.float64]
    references: int


class DetectionJudge:
    """Compares the detections of changed models with those at the start of a step.

    Args:
        metric: Agreement with the float network's detections.
        outputs: Outputs of the model before any change, for each image.
    """

    def __init__(self, metric: DetectionAgreementMetric, outputs: Sequence[Arrays]) -> None:
        self._metric = metric
        self._current = self._select(outputs)
        self._start = self._first = self._current
        # Cached for the tries of a step: the float network's outputs with its detections, and the
        # agreement at the start of the step.
        self._reference: Sequence[Arrays] = ()
        self._truths: list[Any] = []
        self._before: _Agreement | None = None

    def _select(self, outputs: Sequence[Arrays]) -> list[Arrays]:
        return [{name: sample[name] for name in self._metric.tensors} for sample in outputs]

    def start_step(self) -> None:
        """Start a step: its changes are compared with the present outputs."""
        self._start = self._current
        self._before = None

    def keep(self, outputs: Sequence[Arrays]) -> None:
        """Replace the present outputs by those of a change that was kept."""
        self._current = self._select(outputs)

    def compare(self, outputs: Sequence[Arrays], reference: Sequence[Arrays]) -> DetectionVerdict:
        """Compare a changed model with the model at the start of the step.

        Without detections of the float network, agreements and interval are 0.

        Args:
            outputs: Outputs of the changed model for each image.
            reference: Outputs of the float network for each image.
        """
        self._decode_reference(reference)
        if self._before is None:
            self._before = self._measure(self._start)
        return _compare_agreements(self._before, self._measure(self._select(outputs)), len(outputs))

    def compare_all_changes(self, reference: Sequence[Arrays]) -> DetectionVerdict:
        """Compare the model with all changes that were kept with the model before any change.

        Args:
            reference: Outputs of the float network for each image.
        """
        self._decode_reference(reference)
        before, after = self._measure(self._first), self._measure(self._current)
        return _compare_agreements(before, after, len(reference))

    def _decode_reference(self, reference: Sequence[Arrays]) -> None:
        if reference is not self._reference:
            self._truths = [self._metric.prepare_reference(sample) for sample in reference]
            self._reference, self._before = reference, None

    def _measure(self, outputs: Sequence[Arrays]) -> _Agreement:
        samples = zip(self._truths, outputs, strict=True)
        evidence = [self._metric.observe(truth, sample, "") for truth, sample in samples]
        count = count_references(self._metric, evidence)
        if not count:
            return _Agreement(0.0, np.empty(0), 0)
        return _Agreement(
            self._metric.value(evidence), resample_metric(self._metric, evidence), count
        )


def _compare_agreements(before: _Agreement, after: _Agreement, images: int) -> DetectionVerdict:
    if not before.references:
        return DetectionVerdict(0.0, 0.0, 0.0, 0.0, images, 0)
    low, high = np.nanpercentile(after.resampled - before.resampled, [2.5, 97.5])
    return DetectionVerdict(
        before.value, after.value, float(low), float(high), images, before.references
    )


def find_detection_judge(floats: Model, outputs: Sequence[Arrays]) -> DetectionJudge | None:
    """Return a comparison of detections; None if the network outputs no detections.

    Args:
        floats: The float network.
        outputs: Outputs of the model before any change, for each image.
    """
    metric = choose_agreement_metrics(floats)[0]
    if not isinstance(metric, DetectionAgreementMetric):
        return None
    if not all(set(metric.tensors) <= set(sample) for sample in outputs):
        return None
    return DetectionJudge(metric, outputs)
