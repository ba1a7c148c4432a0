"""Findings and predictions that the small model and the whole model must have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from qdqtool.errors import ModelError
from qdqtool.findings.identity import finding_key, iterate_consumer_names
from qdqtool.findings.report import sort_conversions
from qdqtool.reasons.finding import Finding, Severity
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
    if code == "CONVERSION":  # predict lists the largest first
        findings = sort_conversions(findings)
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


def list_new_codes(part: Prediction, whole: Prediction) -> list[str]:
    """Return the codes of the errors and warnings that a part has and the whole model has not.

    A finding of the whole model can list many nodes: its node is only the worst or the first of
    them. A finding of the part at a listed node is not new. If a finding may omit nodes from its
    list, no finding with its code is new.
    """
    serious = (f for f in part.findings if f.severity != Severity.INFO)
    places = dict.fromkeys((f.code, f.node) for f in serious)
    known = {(f.code, f.node) for f in whole.findings}
    # A finding can list all nodes of a model, so only the lists of the remaining codes are read.
    codes = {code for code, _ in places.keys() - known}
    codes -= _find_incomplete_codes(whole.findings)
    known |= _find_listed_places(whole.findings, codes)
    new = (code for code, node in places if code in codes and (code, node) not in known)
    return list(dict.fromkeys(map(str, new)))


def _find_listed_places(findings: Sequence[Finding], codes: Set[str]) -> set[tuple[str, str]]:
    """Return the code and the name for each node that a finding with one of the codes lists."""
    return {
        (f.code, name) for f in findings if f.code in codes for name in (*f.convolutions, *f.nodes)
    }


def _find_incomplete_codes(findings: Sequence[Finding]) -> set[str]:
    """Return the codes of the findings that may omit nodes from their lists."""
    causes = ((f.code, cause) for f in findings for cause in f.causes)
    return {code for code, cause in causes if "node" in cause.reason.identity_excludes}


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
