"""Collecting findings for one target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from qdqtool.findings.rules import PROMISED_CODES, attempted_reasons, finding_code
from qdqtool.reasons.simulation import (
    AddOutputNotQuantized,
    RemainingConversion,
    ResidualFloat,
    ScalesAround,
)
from qdqtool.reasons.tensors import TensorSize
from qdqtool.types import (
    Cause,
    ConvOutcome,
    Evidence,
    Finding,
    FindingCode,
    Prediction,
    Refusal,
    Severity,
)
from qdqtool.util.records import record

if TYPE_CHECKING:
    from qdqtool.findings.codes import Holds


def title_of(code: FindingCode) -> str:
    """The one-line form of a code."""
    from qdqtool.findings import codes

    return codes.get(code).title


def describe_finding(finding: Finding) -> tuple[str, str]:
    """Return the message and the fix of a finding. The table of codes is loaded with the first."""
    from qdqtool.findings import messages

    return messages.describe_finding(finding)


class Report:
    """Findings for one target; a code that does not hold there is left out."""

    def __init__(self, target: str, way: str | None = None) -> None:
        self.target = target
        #: How the engine is built (``qdqtool.findings.ways``), None where that is not known.
        self.way = way
        #: Codes that somebody else reports, of which nothing is added.
        self.left_out: frozenset[FindingCode] = frozenset()
        self.findings: list[Finding] = []
        self._entries: dict[FindingCode, tuple[Holds | None, Severity]] = {}
        self._known: dict[tuple[FindingCode, str], Finding] = {}
        # Convolutions and the nodes of the findings that concern them.
        self._concerned: dict[FindingCode, dict[str, dict[str, None]]] = defaultdict(dict)

    def add(
        self,
        cause: Cause | Refusal,
        node: str | None = None,
        convolutions: Iterable[str] = (),
        values: int | None = None,
        joined: bool = False,
        evidence: Evidence = Evidence.SEEN,
        fatal: bool | None = None,
        gains: bool = True,
        automatic: bool = True,
    ) -> bool:
        """Adds a finding, once for a code and node; convolutions of a second one are joined to the first.

        Args:
            cause: The refusal that decided, with what explains it or alone; it gives the code.
            node: Where; the refusal's node by default.
            convolutions: Those that it concerns.
            values: Elements of the tensor that is converted because of it.
            joined: Whether a second cause is reported too: an Add costs the convolution in front and the one it is
                fused into.
            evidence: Of this place, where it is proven less well than its code.
            fatal: Whether the build ends with it, where the code alone does not say that.
            gains: Whether the change brings something here; a finding that would not is a note, with no automatic fix.
            automatic: Whether what such a fix needs is there.

        Returns:
            Whether the code holds on the target.
        """
        if isinstance(cause, Refusal):
            cause = Cause(cause)
        code = finding_code(cause.refusal)
        holds, severity = self._entry(code)
        if holds is None or code in self.left_out:
            return False
        place = cause.refusal.node if node is None else node
        first = self._known.get((code, place))
        if first is not None:
            first.convolutions.extend(self._new(code, place, convolutions))
            if gains and not first.gains:
                first.gains, first.severity = True, severity
            first.automatic = first.automatic and automatic
            if joined and cause not in first.causes:
                first.causes += (cause,)
                first.values = max(first.values or 0, values or 0) or None
            return True
        if fatal:
            severity = Severity.ERROR
        if fatal is False and severity == Severity.ERROR:
            severity = Severity.WARNING
        if not gains:
            severity = Severity.INFO
        finding = Finding(
            code,
            severity,
            place,
            (cause,),
            holds.evidence.weaker(evidence),
            describe_finding,
            target=self.target,
            way=self.way,
            convolutions=self._new(code, place, convolutions),
            values=values,
            gains=gains,
        )
        finding.automatic = (
            code in PROMISED_CODES and gains and automatic and bool(attempted_reasons(finding))
        )
        self._known[code, place] = finding
        self.findings.append(finding)
        return True

    def _entry(self, code: FindingCode) -> tuple[Holds | None, Severity]:
        """What the table's entry of a code says for the target."""
        found = self._entries.get(code)
        if found is None:
            from qdqtool.findings import (
                codes,  # the table costs time; most well placed models need little of it
            )

            entry = codes.get(code)
            found = self._entries[code] = entry.on(self.target), entry.severity_on(self.target)
        return found

    def place(self, code: FindingCode, convolution: str) -> str | None:
        """The node of the first finding of a code that concerns a convolution; None where there is none."""
        return next(iter(self._concerned[code].get(convolution, ())), None)

    def _new(self, code: FindingCode, node: str, convolutions: Iterable[str]) -> list[str]:
        """Those convolutions that the finding at a node does not name yet; from now on it does."""
        concerned = self._concerned[code]
        new = [c for c in dict.fromkeys(convolutions) if node not in concerned.get(c, ())]
        for name in new:
            concerned.setdefault(name, {})[node] = None
        return new

    def has(self, code: FindingCode, node: str) -> bool:
        """Whether a finding of that code at that node is there."""
        return (code, node) in self._known


# The refusals of a prediction, by node -------------------------------------------------------------------------------


R = TypeVar("R", bound=Refusal)
See = tuple[FindingCode, str]
"""Another finding: its code and node."""


@record
class Diagnosis:
    """What a refusal becomes.

    Attributes:
        node: The node at the boundary that costs: the Add, the Concat, the pooling ...
        cause: The refusal and what explains it.
        size: Of the tensor that is converted or stays float.
        convolutions: Those that it concerns.
        joined: Whether causes of the same code and node are reported one after the other.
        gains: Whether the change brings something here; a finding that would not is a note, and no automatic fix.
        automatic: Whether what the code's automatic fix needs is there.
    """

    node: str
    cause: Cause
    size: TensorSize | None = None
    convolutions: tuple[str, ...] = ()
    joined: bool = False
    gains: bool = True
    automatic: bool = True

    @property
    def code(self) -> FindingCode:
        """The finding code."""
        return finding_code(self.cause.refusal)


class Known:
    """A prediction's refusals by node, and the findings that were made so far.

    Attributes:
        report: Where findings go.
        outcomes: Convolutions by name.
        sums: By the DQ that makes its residual, the first convolution that could take a sum in whose result no Q reads.
        residuals: By the sum that a convolution could take in, the first refusal for its residual, which is float.
    """

    def __init__(self, prediction: Prediction, report: Report) -> None:
        self.report = report
        self.outcomes: dict[str, ConvOutcome] = {c.name: c for c in prediction.convolutions}
        self._found: dict[str, See] = {}  # the first finding that explains a refused node
        self._by_node: dict[str, list[Refusal]] = defaultdict(list)
        for refusal in prediction.refusals:
            self._by_node[refusal.node].append(refusal)
        self.sums: dict[str, str] = {}
        for sum_ in self.every(AddOutputNotQuantized):
            self.sums.setdefault(sum_.residual.node, sum_.node)
        self.residuals: dict[str, ResidualFloat] = {}
        for residual in self.every(ResidualFloat):
            self.residuals.setdefault(residual.add, residual)

    def at(self, node: str) -> list[Refusal]:
        """The refusals of a node, in the order of the passes."""
        return self._by_node.get(node, [])

    def first(self, kind: type[R], node: str) -> R | None:
        """The first refusal of a class at a node."""
        return next((r for r in self.at(node) if isinstance(r, kind)), None)

    def every(self, kind: type[R]) -> Iterator[R]:
        """All refusals of a class."""
        return (r for found in self._by_node.values() for r in found if isinstance(r, kind))

    def concerned(self, node: str) -> tuple[str, ...]:
        """The node, where it is a convolution of the prediction."""
        return (node,) if node in self.outcomes else ()

    def add(self, found: Diagnosis, about: Iterable[str] = ()) -> bool:
        """Reports a diagnosis; ``about`` are the refused nodes that it explains."""
        cause = found.cause.refusal  # what it or its outcome rests on, the finding rests on too
        rests = cause if isinstance(cause, RemainingConversion) else self.outcomes.get(cause.node)
        evidence = Evidence.SEEN if rests is None else rests.evidence
        size = found.size.values if found.size is not None else None
        holds = self.report.add(
            found.cause,
            found.node,
            found.convolutions,
            size,
            found.joined,
            evidence,
            gains=found.gains,
            automatic=found.automatic,
        )
        if isinstance(cause, RemainingConversion) and not isinstance(cause, ScalesAround):
            return holds  # what stays explains nothing else
        for node in (*about, found.node):
            self._found.setdefault(node, (found.code, found.node))
        return holds

    def refer(self, convolution: str, codes: tuple[FindingCode, ...]) -> None:
        """Notes that the first finding of one of these codes about a convolution explains it."""
        places = ((code, self.report.place(code, convolution)) for code in codes)
        found = next(((code, place) for code, place in places if place is not None), None)
        if found is not None:
            self._found.setdefault(convolution, found)

    def see(self, node: str) -> tuple[See, ...]:
        """The finding that explains a node; empty for a node that none explains."""
        found = self._found.get(node)
        if found is not None and self.report.has(*found):
            return (found,)
        codes: tuple[FindingCode, ...] = ("SILU-INNER-Q", "ACT-INNER-Q", "DOUBLE-QDQ")
        return next((((code, node),) for code in codes if self.report.has(code, node)), ())
