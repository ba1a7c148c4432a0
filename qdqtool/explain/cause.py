"""The refusals of a prediction by node, and the findings that were made of them so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from qdqtool.base.records import record
from qdqtool.explain.report import Report
from qdqtool.trt.refusals import AddOutputNotQuantized, Size
from qdqtool.types import Cause, ConvOutcome, Evidence, FindingCode, Prediction, Refusal

R = TypeVar("R", bound=Refusal)
See = tuple[FindingCode, str]
"""Another finding: its code and node."""


@record
class Diagnosis:
    """What a refusal becomes.

    Attributes:
        code: Finding code.
        node: The node at the boundary that costs: the Add, the Concat, the pooling ...
        cause: The refusal and what explains it.
        size: Of the tensor that is converted or stays float.
        convolutions: Those that it concerns.
        joined: Whether causes of the same code and node are reported one after the other.
        evidence: Where this place is proven less well than its code.
        gains: Whether the change brings something here; a finding that would not is a note, and no automatic fix.
        automatic: Whether what the code's automatic fix needs is there.
    """

    code: FindingCode
    node: str
    cause: Cause
    size: Size | None = None
    convolutions: tuple[str, ...] = ()
    joined: bool = False
    evidence: Evidence = Evidence.SEEN
    gains: bool = True
    automatic: bool = True


class Known:
    """A prediction's refusals by node, and the findings that were made so far.

    Attributes:
        report: Where findings go.
        outcomes: Convolutions by name.
    """

    def __init__(self, prediction: Prediction, report: Report) -> None:
        self.report = report
        self.outcomes: dict[str, ConvOutcome] = {c.name: c for c in prediction.convolutions}
        self._found: dict[str, See] = {}  # the finding made for a refused node
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

    def concerned(self, node: str) -> tuple[str, ...]:
        """The node, where it is a convolution of the prediction."""
        return (node,) if node in self.outcomes else ()

    def add(self, found: Diagnosis, about: Iterable[str] = ()) -> bool:
        """Reports a diagnosis; ``about`` are the refused nodes that it explains."""
        refused = self.outcomes.get(found.cause.refusal.node)  # what its outcome rests on, the finding rests on too
        evidence = found.evidence if refused is None else found.evidence.weaker(refused.evidence)
        size = found.size.values if found.size is not None else None
        holds = self.report.add(
            found.code, found.cause, found.node, found.convolutions, size, found.joined, evidence, gains=found.gains,
            automatic=found.automatic,
        )
        if found.code in ("CONVERSION", "INPUT-CONVERSION"):
            return holds  # what stays explains nothing else
        for node in (*about, found.node):
            self.explain(node, (found.code, found.node))
        return holds

    def explain(self, node: str, by: See) -> None:
        """Notes that a finding explains a node, unless another does."""
        self._found.setdefault(node, by)

    def see(self, node: str) -> tuple[See, ...]:
        """The finding that explains a node; empty for a node that none explains."""
        found = self._found.get(node)
        if found is not None and self.report.has(*found):
            return (found,)
        codes: tuple[FindingCode, ...] = ("SILU-INNER-Q", "ACT-INNER-Q", "DOUBLE-QDQ")
        return next((((code, node),) for code in codes if self.report.has(code, node)), ())
