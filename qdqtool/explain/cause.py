"""What a refusal becomes: a finding's code and text, and what other refusals have to say about the same nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from qdqtool.explain.report import Report
from qdqtool.finding_codes import FindingCode
from qdqtool.trt.provenance import Size
from qdqtool.trt.refusals import AddOutputNotQuantized
from qdqtool.types import ConvOutcome, Evidence, Prediction, Refusal

R = TypeVar("R", bound=Refusal)


@dataclass(frozen=True, slots=True)
class Cause:
    """A finding about to be reported.

    Attributes:
        code: Finding code.
        node: The node at the boundary that costs: the Add, the Concat, the pooling ...
        message: The chain of causes, one or two sentences.
        fix: What to change here; empty for the code's general advice.
        size: Of the tensor that is converted or stays float.
        convolutions: Those that it concerns.
        joined: Whether messages of the same code and node are told one after the other.
        evidence: Where this place is proven less well than its code.
        gains: Whether the change brings something here; a finding that would not is a note, and no automatic fix.
        automatic: Whether what the code's automatic fix needs is there.
    """

    code: FindingCode
    node: str
    message: str
    fix: str = ""
    size: Size | None = None
    convolutions: tuple[str, ...] = ()
    joined: bool = False
    evidence: Evidence | None = None
    gains: bool = True
    automatic: bool = True


class Known:
    """A prediction's refusals by node, and the findings that were made so far.

    Attributes:
        report: Where findings go.
        outcomes: Convolutions by name.
        told: Code and node of the finding made for a refused node.
    """

    def __init__(self, prediction: Prediction, report: Report) -> None:
        self.report = report
        self.outcomes: dict[str, ConvOutcome] = {c.name: c for c in prediction.convolutions}
        self.told: dict[str, tuple[FindingCode, str]] = {}
        self._by_node: dict[str, list[Refusal]] = defaultdict(list)
        for refusal in prediction.refusals:
            self._by_node[refusal.node].append(refusal)
        self._sums: dict[str, str] = {}
        for sum_ in self.every(AddOutputNotQuantized):
            self._sums.setdefault(sum_.residual.node, sum_.node)

    def at(self, node: str) -> list[Refusal]:
        """The refusals of a node, in the order of the passes."""
        return self._by_node.get(node, [])

    def first(self, kind: type[R], node: str) -> R | None:
        """The first refusal of a class at a node."""
        return next((r for r in self.at(node) if isinstance(r, kind)), None)

    def every(self, kind: type[R]) -> Iterator[R]:
        """All refusals of a class."""
        return (r for found in self._by_node.values() for r in found if isinstance(r, kind))

    def sum_of(self, dq: str) -> str:
        """The first convolution that could take a sum in, whose result no Q reads, with a DQ's tensor as its residual.

        Returns:
            Its node; empty where there is none.
        """
        return self._sums.get(dq, "")

    def float_in_between(self, name: str) -> bool:
        """Whether a convolution is one that reads INT8 and writes float."""
        outcome = self.outcomes.get(name)
        return outcome is not None and outcome.is_int8 and not outcome.int8_in_int8_out

    def add(self, cause: Cause, about: Iterable[str] = ()) -> bool:
        """Reports a cause; ``about`` are the refused nodes that it explains."""
        size = cause.size.values if cause.size is not None else None
        held = self.report.add(
            cause.code, cause.node, cause.message, cause.fix, cause.convolutions, size, cause.joined, cause.evidence,
            cause.gains, cause.automatic,
        )
        if cause.code in ("CONVERSION", "INPUT-CONVERSION"):
            return held  # what stays explains nothing else
        for node in (*about, cause.node):
            self.told.setdefault(node, (cause.code, cause.node))
        return held

    def see(self, node: str) -> str:
        """``see CODE at NODE`` for a node that a finding explains; empty for another."""
        found = self.told.get(node)
        if found is not None and self.report.has(*found):
            return f"see {found[0]} at {found[1]}"
        codes: tuple[FindingCode, ...] = ("SILU-INNER-Q", "ACT-INNER-Q", "DOUBLE-QDQ")
        return next((f"see {code} at {node}" for code in codes if self.report.has(code, node)), "")
