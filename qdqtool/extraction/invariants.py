"""Findings and predictions that must be equal in an extract and the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdqtool.errors import ModelError
from qdqtool.findings.identity import finding_key, iterate_consumer_names
from qdqtool.types import ConvOutcome, Finding, Prediction
from qdqtool.util.text import format_list


@dataclass(frozen=True)
class Invariants:
    """Findings and convolutions that an extract has to reproduce.

    Attributes:
        findings: Findings to reproduce with the same message and fix.
        convolutions: Convolutions to reproduce with the same data types.
    """

    findings: tuple[Finding, ...] = ()
    convolutions: tuple[ConvOutcome, ...] = ()

    @classmethod
    def from_findings(cls, prediction: Prediction, findings: Sequence[Finding]) -> Invariants:
        """Return invariants of findings and the convolutions that they name."""
        names = {name for f in findings for name in (*f.convolutions, f.node)}
        return cls(tuple(findings), tuple(c for c in prediction.convolutions if c.name in names))

    @classmethod
    def from_node(cls, prediction: Prediction, name: str) -> Invariants:
        """Return invariants of the findings at a node and its convolution."""
        return cls(
            tuple(f for f in prediction.findings if f.node == name or name in f.convolutions),
            tuple(c for c in prediction.convolutions if c.name == name),
        )

    def required_nodes(self) -> set[str]:
        """Return the names of nodes that the findings list as consumers."""
        return {name for f in self.findings for name in iterate_consumer_names(finding_key(f))}

    def find_missing(self, prediction: Prediction) -> list[Finding | ConvOutcome]:
        """Return the findings and convolutions that a prediction does not reproduce."""
        # Only create keys of candidates, which is slow.
        places = {(f.code, f.node) for f in self.findings}
        present = {finding_key(f) for f in prediction.findings if (f.code, f.node) in places}
        outcomes = {c.name: c for c in prediction.convolutions}
        missing: list[Finding | ConvOutcome] = [
            f for f in self.findings if finding_key(f) not in present
        ]
        return missing + [
            c
            for c in self.convolutions
            if c.name not in outcomes or not has_same_types(c, outcomes[c.name])
        ]

    def hold_in(self, prediction: Prediction) -> bool:
        """Return whether a prediction reproduces all findings and convolutions."""
        return not self.find_missing(prediction)

    def without(self, missing: Sequence[Finding | ConvOutcome]) -> Invariants:
        """Return the invariants without some missing findings and convolutions.

        `missing` has to contain the same objects, not equal ones.
        """
        removed = set(map(id, missing))
        return Invariants(
            tuple(f for f in self.findings if id(f) not in removed),
            tuple(c for c in self.convolutions if id(c) not in removed),
        )


def has_same_types(outcome: ConvOutcome, other: ConvOutcome) -> bool:
    """Return whether two outcomes have the same data types; FLOAT agrees with any float."""
    return (
        outcome.op == other.op
        and outcome.weights == other.weights
        and outcome.precision.agrees(other.precision)
        and outcome.output.agrees(other.output)
        and len(outcome.inputs) == len(other.inputs)
        and all(a.agrees(b) for a, b in zip(outcome.inputs, other.inputs, strict=True))
    )


def choose_finding(prediction: Prediction, text: str, node: str | None) -> Finding:
    """Return the finding that ``CODE`` or ``CODE:n`` selects.

    n counts the findings of that code from 1, in the order of ``predict``.

    Args:
        prediction: Prediction with the findings.
        text: The code, with or without number.
        node: Name of a node that the finding has to name. None: any node.

    Raises:
        ModelError: The prediction has no such finding.
    """
    code, colon, number = text.partition(":")
    code = code.strip().upper()
    findings = [f for f in prediction.findings if f.code == code and _names_node(f, node)]
    place = f" at '{node}'" if node is not None else ""
    if not findings:
        counts = [f"{c} ({n})" for c, n in prediction.findings_by_code().items()]
        message = (
            f"has no finding {code}{place} on {prediction.target}; its findings: "
            f"{', '.join(counts) or 'none'}"
        )
        raise _finding_error(message, "unknown-choice", prediction, node)
    if not colon:
        return findings[0]
    is_number = number.isascii() and number.isdigit()
    if not is_number or not 1 <= int(number[:9]) <= len(findings):
        count = f"there are {len(findings)}" if len(findings) > 1 else "there is 1"
        message = f"`finding` {text}: {count} of {code}{place}, counted from 1"
        raise _finding_error(message, "out-of-range", prediction, node)
    return findings[int(number) - 1]


def _names_node(finding: Finding, node: str | None) -> bool:
    return node is None or finding.node == node or node in finding.convolutions


def _finding_error(message: str, code: str, prediction: Prediction, node: str | None) -> ModelError:
    path = prediction.model.path or "model"
    return ModelError(message, path, code=code, parameter="finding", node=node or "")


def describe_missing(
    missing: Sequence[Finding | ConvOutcome], rename: Callable[[str], str] = str
) -> str:
    """Describe the first few missing findings and convolutions, with the number of others.

    Args:
        missing: Findings and convolutions.
        rename: Function that returns the name to print of a node.
    """
    texts = []
    for m in missing:
        if isinstance(m, Finding):
            texts.append(f"{m.code} at {rename(m.node) or 'the network'}")
        else:
            texts.append(f"the outcome of {rename(m.name)}")
    return format_list(texts)
