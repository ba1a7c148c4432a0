"""Reasons that concern the heads of detectors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, Severity, fixable_rule
from qdqtool.reasons.text import NO_ACTION, Message, format_node, format_number
from qdqtool.util.text import format_count

# Minimum score of a reported object; the default of Ultralytics.
CONFIDENCE = 0.25
# Minimum steps that are errors. The agreement of a trained YOLOv8s falls by 0.14 if logits have a
# step of 1.0 (0.03 with 0.5), and by 0.13 if boxes in cells of 8 to 32 pixels have a step of 0.25,
# which is 2 to 8 pixels (0.03 with 0.9 to 3.6 pixels).
COARSE_LOGITS = 1.0
COARSE_PIXELS = 2.0


def describe_destroyed_results(findings: Sequence[Finding]) -> str:
    """Describe which scores or boxes a wrong scale destroys; empty if all are kept.

    If this differs between the findings, each description has its number of places.
    """
    kinds: dict[tuple[bool, bool], list[ResultAfterHead]] = defaultdict(list)
    for finding in findings:
        r = finding.causes[0].reason
        if finding.severity == Severity.ERROR and isinstance(r, ResultAfterHead):
            kinds[bool(r.scores), not r.scores and r.box_step > 0].append(r)
    texts = []
    for same in kinds.values():
        r = same[0] if same[0].scores else min(same, key=lambda r: (r.box_step, r.score_step))
        scale = f" (the scale is {format_number(r.scale or 0.0)})" if r.scores else ""
        places = f"at {format_count(len(same), 'place')}, " if len(same) < len(findings) else ""
        texts.append(f"{places}{r.describe_loss()}{scale}")
    return "; ".join(texts)


_HEADS = {
    "coordinates": "produces or reads boxes, reference points or sampling offsets",
    "dfl": "is the DFL (the mean over the bins of a box side)",
}


class ResultAfterHead(Reason):
    """One scale for boxes, scores or logits after the head of a detector.

    Attributes:
        concat: The Concat that joins them; empty if the quantized tensor has only boxes.
        scale: The scale; None if it is unknown or differs between channels.
        scores: Input of the Concat with scores of at most 1 (from a Sigmoid or Softmax); empty if
            no such input is known.
        own: Scale of the scores before the Concat; None if the scores are not quantized there.
        raw: Whether the Concat joins unchanged results of the last convolutions (logits).
        pixels: Pixels (at least) per unit of the boxes; None if the unit is unknown.
    """

    rules = (fixable_rule("HEAD-CONCAT"),)

    concat: str = ""
    scale: float | None = None
    scores: str = ""
    own: float | None = None
    raw: bool = False
    pixels: float | None = None

    @property
    def zero_limit(self) -> float:
        """Largest score that the scale rounds to 0; 0 if scale or scores are unknown."""
        return 0.0 if self.scale is None or not self.scores else self.scale / 2

    @property
    def step(self) -> float:
        """The scale; 0 if it is unknown or not positive."""
        return self.scale if self.scale is not None and self.scale > 0 else 0.0

    @property
    def box_step(self) -> float:
        """Smallest step of a box in pixels; 0 if scale or unit are unknown."""
        return self.step * (self.pixels or 0.0)

    @property
    def score_step(self) -> float:
        """Largest change of a score between adjacent logits; 0 without logits."""
        return math.tanh(self.step / 4) if self.raw else 0.0

    @property
    def is_fatal(self) -> bool:
        """Whether the scale destroys boxes or scores of objects that a detector would report."""
        has_coarse_logits = self.raw and self.step >= COARSE_LOGITS
        loses_scores = self.zero_limit >= CONFIDENCE or has_coarse_logits
        return loses_scores or self.box_step >= COARSE_PIXELS

    def describe_loss(self) -> str:
        """Describe which scores become 0, or the step of boxes or scores; empty if unknown."""
        if self.zero_limit >= 1:
            return "all scores become 0, and the detector finds nothing"
        if self.scores:
            return f"scores up to {format_number(self.zero_limit)} become 0"
        if self.box_step:
            return f"one step of a box is {format_number(self.box_step)} pixels or more"
        if self.score_step:
            return f"one step of a logit changes a score by up to {self.score_step:.2g}"
        return ""

    def message(self, finding: Finding, cause: Cause) -> str:
        source = format_node(self.concat, "Concat") if self.concat else ""
        values = f"values that come from {source}" if source else "decoded boxes"
        scale = "" if self.scale is None else f" with one scale, {format_number(self.scale)}"
        text = f"{self.node} after the head quantizes {values}{scale}"
        loss = self.describe_loss()
        if not loss:
            return f"{text}."
        if not self.scores:
            return f"{text}: {loss}."
        limit = f"the scores '{self.scores}' are at most 1"
        if self.own is not None:
            limit += f", and have scale {format_number(self.own)} before the Concat"
        return f"{text}: {loss} ({limit})."


class QuantizedHead(Reason):
    """A quantized layer at the end of a detection head; such a layer is better left float.

    Attributes:
        branch: ``dfl``, ``box``, ``class``, ``coordinates`` or ``head``.
        is_tuned: Whether ``tune`` quantized the layer, by the metadata of the model.
    """

    rules = (
        FindingRule("HEAD-SCORE", lambda r: r.branch == "class"),
        FindingRule("HEAD-QUANT", lambda r: r.is_tuned),
        fixable_rule("HEAD-QUANT", on_request=True),
    )

    branch: str
    is_tuned: bool = False

    def message(self, finding: Finding, cause: Cause) -> str | Message:
        text = (
            f"{self.node} "
            f"{_HEADS.get(self.branch, f'is the last convolution of a {self.branch} branch')} and "
            "is quantized"
        )
        if self.is_tuned:
            # One sentence with the node: lists of places drop sentences that are repeated.
            text += ": by the model's metadata, tune chose this by the measured accuracy"
            return f"{text}.", NO_ACTION
        return f"{text}."
