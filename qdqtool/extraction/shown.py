"""What a smaller model has to show as the whole one does: findings with their fixes, and outcomes of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool.errors import ModelError
from qdqtool.explain.messages import worded
from qdqtool.types import ConvOutcome, Finding, Prediction


@dataclass(frozen=True)
class Shown:
    """Findings and convolutions that stay the same.

    Attributes:
        findings: Of the whole model.
        convolutions: Of the whole model.
    """

    findings: tuple[Finding, ...] = ()
    convolutions: tuple[ConvOutcome, ...] = ()

    def missing(self, prediction: Prediction) -> list[str]:
        """What a prediction does not show, in words; empty when it shows everything."""
        there = {key(f) for f in prediction.findings}
        lines = [f"{f.code} at {f.node or 'the network'}" for f in self.findings if key(f) not in there]
        by_name = {c.name: c for c in prediction.convolutions}
        for conv in self.convolutions:
            other = by_name.get(conv.name)
            if other is None or not same(conv, other):
                lines.append(f"the outcome of {conv.name}")
        return lines

    def holds(self, prediction: Prediction) -> bool:
        """Whether a prediction shows everything."""
        return not self.missing(prediction)


def key(finding: Finding) -> tuple[str, str, str, str, str]:
    """Equal for two findings that say the same; sizes of tensors apart, which a smaller model changes."""
    return str(finding.code), str(finding.severity), finding.node, *worded(finding, sizes=False)


def same(one: ConvOutcome, two: ConvOutcome) -> bool:
    """Whether two outcomes have the same data types; FLOAT agrees with any width of float."""
    return (
        one.op == two.op and one.weights == two.weights and one.precision.agrees(two.precision)
        and one.output.agrees(two.output) and len(one.inputs) == len(two.inputs)
        and all(a.agrees(b) for a, b in zip(one.inputs, two.inputs, strict=True))
    )


def of_findings(prediction: Prediction, findings: Sequence[Finding]) -> Shown:
    """Findings and the convolutions that they name."""
    named = {name for f in findings for name in (*f.convolutions, f.node)}
    return Shown(tuple(findings), tuple(c for c in prediction.convolutions if c.name in named))


def of_node(prediction: Prediction, name: str) -> Shown:
    """What is predicted of one node."""
    findings = tuple(f for f in prediction.findings if f.node == name or name in f.convolutions)
    return Shown(findings, tuple(c for c in prediction.convolutions if c.name == name))


def choose(prediction: Prediction, wanted: str, node: str | None) -> Finding:
    """The finding that ``CODE`` or ``CODE:n`` stands for; n counts from 1, in the order of ``predict``.

    Raises:
        ModelError: There is none.
    """
    code, colon, number = wanted.partition(":")
    code = code.strip().upper()
    found = [f for f in prediction.findings if f.code == code and (node is None or f.node == node or
                                                                   node in f.convolutions)]
    what = prediction.model.path or "model"
    place = f" at '{node}'" if node is not None else ""
    if not found:
        counts = prediction.findings_by_code()
        there = ", ".join(f"{c} ({n})" for c, n in counts.items()) or "none"
        raise ModelError(f"{what}: has no finding {code}{place} on {prediction.target}; its findings: {there}")
    if not colon:
        return found[0]
    if not number.isascii() or not number.isdigit() or not 1 <= int(number[:9]) <= len(found):
        count = f"there are {len(found)}" if len(found) > 1 else "there is 1"
        raise ModelError(f"{what}: `finding` {wanted}: {count} of {code}{place}, counted from 1")
    return found[int(number) - 1]


def listed(items: Sequence[str], most: int = 4) -> str:
    """A list in words."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
