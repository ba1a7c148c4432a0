"""Reasons that concern the heads of detectors."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, Severity, fixable_rule
from qdqtool.reasons.text import format_node, format_number


def describe_lost_scores(r: ConcatAfterHead) -> str:
    """Describe which scores of a detector become 0 because of the scale of a Concat."""
    if r.zero_limit >= 1:
        return "all scores become 0, and the detector finds nothing"
    return f"scores up to {format_number(r.zero_limit)} become 0"


def describe_destroyed_scores(findings: Sequence[Finding]) -> str:
    """Describe the scores that a wrong Concat scale destroys; empty if all scores are kept."""
    for finding in findings:
        r = finding.causes[0].reason
        if finding.severity == Severity.ERROR and isinstance(r, ConcatAfterHead) and r.scores:
            return f"{describe_lost_scores(r)} (the scale is {format_number(r.scale or 0.0)})"
    return ""


_HEADS = {
    "coordinates": "produces or reads boxes, reference points or sampling offsets",
    "dfl": "is the DFL (the mean over the bins of a box side)",
}


class ConcatAfterHead(Reason):
    """One scale for all inputs of a Concat after the head of a detector.

    Attributes:
        concat: The Concat.
        scale: The scale; None if it is unknown or differs between channels.
        scores: Input of the Concat with scores of at most 1 (from a Sigmoid or Softmax); empty if
            no such input is known.
        own: Scale of the scores before the Concat; None if the scores are not quantized there.
        raw: Whether the Concat joins unchanged results of the last convolutions (logits).
    """

    rules = (fixable_rule("HEAD-CONCAT", on_request=True),)

    concat: str
    scale: float | None = None
    scores: str = ""
    own: float | None = None
    raw: bool = False

    @property
    def zero_limit(self) -> float:
        """Largest score that the scale rounds to 0; 0 if scale or scores are unknown."""
        return 0.0 if self.scale is None or not self.scores else self.scale / 2

    def message(self, finding: Finding, cause: Cause) -> str:
        scale = "" if self.scale is None else f", {format_number(self.scale)},"
        text = (
            f"{self.node} after the head quantizes the result of "
            f"{format_node(self.concat, 'Concat')}, so one scale{scale} applies to all inputs of "
            "the Concat"
        )
        if not self.scores:
            return f"{text}."
        limit = f"the scores '{self.scores}' are at most 1"
        if self.own is not None:
            limit += f", and have scale {format_number(self.own)} before the Concat"
        return f"{text}: {describe_lost_scores(self)} ({limit})."


class QuantizedHead(Reason):
    """A quantized layer at the end of a detection head; such a layer is better left float.

    Attributes:
        branch: ``dfl``, ``box``, ``class``, ``coordinates`` or ``head``.
    """

    rules = (
        FindingRule("HEAD-SCORE", lambda r: r.branch == "class"),
        fixable_rule("HEAD-QUANT", on_request=True),
    )

    branch: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} "
            f"{_HEADS.get(self.branch, f'is the last convolution of a {self.branch} branch')} and "
            "is quantized."
        )
