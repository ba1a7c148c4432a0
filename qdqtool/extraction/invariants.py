"""Findings and predictions that the small model and the whole model must have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdqtool.errors import ModelError
from qdqtool.findings.identity import finding_key, iterate_consumer_names
from qdqtool.reasons.finding import Finding
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.util.text import format_list


@dataclass(frozen=True)
class Invariants:
    """Findings and convolutions that a small model must reproduce.

    Attributes:
        findings: Findings that the small model must show with the same message.
        convolutions: Convolutions that must have the same predicted data types in the small model.
    """

    findings: tuple[Finding, ...] = ()
    convolutions: tuple[ConvOutcome, ...] = ()

    @classmethod
    def from_findings(cls, prediction: Prediction, findings: Sequence[Finding]) -> Invariants:
        """Return findings, and the convolutions that they name, as invariants."""
        names = {name for f in findings for name in (*f.convolutions, f.node)}
        return cls(tuple(findings), tuple(c for c in prediction.convolutions if c.name in names))

    @classmethod
    def from_node(cls, prediction: Prediction, name: str) -> Invariants:
        """Return the findings that name a node, and its predicted types, as invariants.

        Only convolutions have predicted types.
        """
        return cls(
            tuple(f for f in prediction.findings if f.node == name or name in f.convolutions),
            tuple(c for c in prediction.convolutions if c.name == name),
        )

    def required_nodes(self) -> set[str]:
        """Return the names of the consumers that the findings are about."""
        return {name for f in self.findings for name in iterate_consumer_names(finding_key(f))}

    def find_missing(self, prediction: Prediction) -> list[Finding | ConvOutcome]:
        """Return the findings and convolutions that a prediction does not reproduce."""
        # Computing keys is slow, so keys are computed only for findings with a required code and
        # node.
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

    def find_different_fixes(self, prediction: Prediction) -> list[Finding]:
        """Return the findings that a prediction reproduces with another fix.

        The fix can depend on nodes that are not in the small model.
        """
        places = {(f.code, f.node) for f in self.findings}
        present = {finding_key(f): f for f in prediction.findings if (f.code, f.node) in places}
        pairs = ((f, present.get(finding_key(f))) for f in self.findings)
        return [
            f
            for f, other in pairs
            if other and (f.fix, f.automatic) != (other.fix, other.automatic)
        ]

    def are_reproduced_by(self, prediction: Prediction) -> bool:
        """Return whether a prediction reproduces all findings and convolutions."""
        return not self.find_missing(prediction)

    def without(self, missing: Sequence[Finding | ConvOutcome]) -> Invariants:
        """Return the invariants without some findings and convolutions.

        Args:
            missing: Findings and convolutions to remove. They are compared by identity.
        """
        removed = set(map(id, missing))
        return Invariants(
            tuple(f for f in self.findings if id(f) not in removed),
            tuple(c for c in self.convolutions if id(c) not in removed),
        )


def has_same_types(outcome: ConvOutcome, other: ConvOutcome) -> bool:
    """Return whether two outcomes have the same operator and data types.

    FLOAT stands for a float type of unknown width, and matches every float type.
    """
    return (
        outcome.op == other.op
        and outcome.weights == other.weights
        and outcome.precision.agrees(other.precision)
        and outcome.output.agrees(other.output)
        and len(outcome.inputs) == len(other.inputs)
        and all(a.agrees(b) for a, b in zip(outcome.inputs, other.inputs, strict=True))
    )


def choose_finding(prediction: Prediction, text: str, node: str | None) -> Finding:
    """Return the finding that a text such as ``CODE`` or ``CODE:n`` selects.

    Args:
        prediction: Prediction with the findings.
        text: Code of the finding, and the number n of the finding among those with this code,
            starting at 1, in the order of ``predict``. Without a number, the first finding is
            selected.
        node: Name of a node. Findings at other nodes are ignored. None: no finding is ignored.

    Raises:
        ModelError: The prediction has no such finding.
    """
    code, colon, number = text.partition(":")
    code = code.strip().upper()
    findings = [f for f in prediction.findings if f.code == code and _is_about_node(f, node)]
    place = f" at '{node}'" if node is not None else ""
    if not findings:
        choices = _describe_choices(prediction, node)
        message = f"has no finding {code}{place} on {prediction.target}; {choices}"
        raise _finding_error(message, "unknown-choice", prediction, node)
    if not colon:
        return findings[0]
    is_number = number.isascii() and number.isdigit()
    if not is_number or not 1 <= int(number[:9]) <= len(findings):
        message = f"`finding` {text}: the number of {code} findings{place} is {len(findings)}; " + (
            f"give {code}:1" if len(findings) == 1 else f"give {code}:1 to {code}:{len(findings)}"
        )
        raise _finding_error(message, "out-of-range", prediction, node)
    return findings[int(number) - 1]


def _describe_choices(prediction: Prediction, node: str | None) -> str:
    counts = Counter(f.code for f in prediction.findings if _is_about_node(f, node))
    if not counts:
        return f"{'the model' if node is None else 'this node'} has no findings"
    return f"choose from {', '.join(f'{code} ({count})' for code, count in counts.items())}"


def list_places(finding: Finding) -> set[str | None]:
    """Return the names of all nodes that a finding concerns, and None if it may omit some.

    Some findings report many nodes at once. Their node is only the worst or the first of them.
    """
    places: set[str | None] = {finding.node, *finding.convolutions, *finding.nodes}
    if any("node" in cause.reason.identity_excludes for cause in finding.causes):
        places.add(None)
    return places


def is_shown_elsewhere(missing: Finding | ConvOutcome, prediction: Prediction, node: str) -> bool:
    """Return whether a part has a missing finding at another of its convolutions.

    Args:
        missing: Finding or convolution of the whole model.
        prediction: Prediction of the part.
        node: Name of the node that the finding in the part must concern.
    """
    return isinstance(missing, Finding) and any(
        f.code == missing.code
        and f.node != missing.node
        and f.node in missing.convolutions
        and _is_about_node(f, node)
        for f in prediction.findings
    )


def _is_about_node(finding: Finding, node: str | None) -> bool:
    return node is None or finding.node == node or node in finding.convolutions


def _finding_error(message: str, code: str, prediction: Prediction, node: str | None) -> ModelError:
    path = prediction.model.path or "model"
    return ModelError(message, path, code=code, parameter="finding", node=node or "")


def describe_missing(
    missing: Sequence[Finding | ConvOutcome], rename: Callable[[str], str] = str
) -> str:
    """Describe missing findings and convolutions: list the first few, and count the others.

    Args:
        missing: Findings and convolutions.
        rename: Function that returns the name to print for a node.
    """
    texts = []
    for m in missing:
        if isinstance(m, Finding):
            texts.append(f"{m.code} at {rename(m.node) or 'the network'}")
        else:
            texts.append(f"the outcome of {rename(m.name)}")
    return format_list(texts)
