"""Collection of the findings of one prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from qdqtool.evidence import Evidence
from qdqtool.findings.rules import PROMISED_CODES, attempted_reasons, finding_code
from qdqtool.reasons.conversions import ConversionBetweenScales, RemainingConversion
from qdqtool.reasons.finding import Cause, Finding, FindingCode, Reason, Severity
from qdqtool.reasons.quantizers import FakeQuantizers
from qdqtool.reasons.residuals import AddOutputNotQuantized, ResidualFloat
from qdqtool.reasons.scales import needs_coarse_common_scale
from qdqtool.reasons.tensors import TensorSize
from qdqtool.reasons.text import NO_ACTION, Message
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.trt.targets import Target, target_named

if TYPE_CHECKING:
    from qdqtool.findings.codes import CodeScope


def title_of(code: FindingCode) -> str:
    """Return the title of a code."""
    from qdqtool.findings import codes

    return codes.get(code).title


def group_findings(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings by code and severity: errors first, then in the order of the first finding."""
    groups: dict[tuple[FindingCode, Severity], list[Finding]] = defaultdict(list)
    for finding in sorted(findings, key=lambda f: f.severity != Severity.ERROR):
        groups[finding.code, finding.severity].append(finding)
    return list(groups.values())


def sort_conversions(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings on Q/DQ layers, those that convert the most values first."""
    return sorted(findings, key=lambda f: -(f.values or 0))


def list_shown_findings(prediction: Prediction) -> list[Finding]:
    """Return the findings that texts and pages show.

    If TensorRT rejects the model, findings on its Q/DQ layers are omitted: these layers never
    run.
    """
    if not prediction.rejected:
        return prediction.findings
    return [finding for finding in prediction.findings if finding.code != "CONVERSION"]


def describe_finding(finding: Finding) -> Message:
    """Return the message of a finding, and its fix. The fix is empty if no action is needed."""
    from qdqtool.findings import codes

    entry = codes.get(finding.code)
    general = entry.fix_on(finding.has_fast_int8)
    message = fix = ""
    for cause in finding.causes:
        reason = cause.reason
        description = reason.message(finding, cause)
        text, advice = (description, "") if isinstance(description, str) else description
        if not message:
            message, fix = text, "" if advice == NO_ACTION else advice or general
            is_failure = finding.severity == Severity.ERROR and not reason.quotes
            error = entry.quote_error(finding.target) if is_failure else ""
            message += f" {error}" if error else ""
        elif text not in message:
            message += f" {text}"
    return message, fix


def _is_built(code: FindingCode, reason: Reason) -> bool:
    """Return whether TensorRT builds an engine in spite of an error, but with wrong results."""
    from qdqtool.findings import codes

    is_misread = isinstance(reason, FakeQuantizers) and reason.is_misread
    return codes.get(code).builds or is_misread


class FindingReport:
    """Findings for one target. A finding is left out if its code does not apply to the target.

    Attributes:
        target: Name of the target.
        tensorrt: The target, with the version that the user named.
        way: Build method (``qdqtool.findings.build_methods``); None if no method is named.
        ignored_codes: Codes of findings that are not added, because another check reports them.
        findings: The findings, in the order in which they were added.
    """

    def __init__(self, target: str | Target, way: str | None = None) -> None:
        self.tensorrt = target_named(target)
        self.target = self.tensorrt.name
        self.way = way
        self.ignored_codes: frozenset[FindingCode] = frozenset()
        self.findings: list[Finding] = []
        self._scopes: dict[FindingCode, tuple[CodeScope | None, Severity]] = {}
        self._by_place: dict[tuple[FindingCode, str], Finding] = {}
        # Nodes of the findings, by code and affected convolution.
        self._nodes: dict[FindingCode, dict[str, dict[str, None]]] = defaultdict(dict)

    def add(
        self,
        cause: Cause | Reason,
        node: str | None = None,
        convolutions: Iterable[str] = (),
        values: int | None = None,
        joined: bool = False,
        evidence: Evidence | None = None,
        fatal: bool | None = None,
        gains: bool = True,
        automatic: bool = True,
    ) -> bool:
        """Add a finding, or add its convolutions to the finding with the same code and node.

        Args:
            cause: The reason, or a cause with the reason and the reasons that explain it. The class
                of the reason determines the code.
            node: Node of the finding. By default the node of the reason.
            convolutions: Convolutions that the finding affects.
            values: Number of elements of the tensor that is converted or remains float.
            joined: Whether to add the cause to a finding that already has the same code and node.
                For example, both inputs of an Add may be a cause.
            evidence: Evidence of the rules that decide the outcome of this node; None if it is
                unknown. The finding has the weaker of this evidence and that of the code.
            fatal: Whether the fault makes the build fail; None if the code decides this.
            gains: Whether the fix improves the engine. If not, the finding is a note without an
                automatic fix.
            automatic: Whether the model has all data that an automatic fix needs.

        Returns:
            Whether the code applies to the target and is not ignored.
        """
        if isinstance(cause, Reason):
            cause = Cause(cause)
        code = finding_code(cause.reason)
        scope, severity = self._find_scope_and_severity(code)
        if scope is None or code in self.ignored_codes:
            return False
        place = cause.reason.node if node is None else node
        first = self._by_place.get((code, place))
        if first is not None:
            first.convolutions.extend(self._record_new_convolutions(code, place, convolutions))
            if gains and not first.gains:
                first.gains, first.severity = True, severity
            first.automatic = first.automatic and automatic
            if joined:
                _join_cause(first, cause, values)
            return True
        severity = _adjust_severity(severity, fatal) if gains else Severity.INFO
        finding = Finding(
            code,
            severity,
            place,
            (cause,),
            scope.evidence_at(evidence),
            describe_finding,
            target=self.target,
            way=self.way,
            convolutions=self._record_new_convolutions(code, place, convolutions),
            values=values,
            gains=gains,
            is_built=_is_built(code, cause.reason),
        )
        is_fixable = code in PROMISED_CODES and gains and automatic
        finding.automatic = is_fixable and bool(attempted_reasons(finding))
        self._by_place[code, place] = finding
        self.findings.append(finding)
        return True

    def find_node(self, code: FindingCode, convolution: str) -> str | None:
        """Return the node of the first finding of a code that affects a convolution, or None."""
        return next(iter(self._nodes[code].get(convolution, ())), None)

    def has(self, code: FindingCode, node: str) -> bool:
        """Return whether the report has a finding with a code at a node."""
        return (code, node) in self._by_place

    def has_code(self, code: FindingCode) -> bool:
        """Return whether the report has a finding with a code."""
        return any(finding.code == code for finding in self.findings)

    def _find_scope_and_severity(self, code: FindingCode) -> tuple[CodeScope | None, Severity]:
        """Return the scope of a code that includes the target, and the severity on the target.

        The scope is None if the code does not apply to the target.
        """
        scope = self._scopes.get(code)
        if scope is None:
            from qdqtool.findings import codes  # models without findings do not need this import

            entry = codes.get(code)
            scope = entry.scope_on(self.target), entry.severity_on(self.target)
            self._scopes[code] = scope
        return scope

    def _record_new_convolutions(
        self, code: FindingCode, node: str, convolutions: Iterable[str]
    ) -> list[str]:
        nodes = self._nodes[code]
        new = [c for c in dict.fromkeys(convolutions) if node not in nodes.get(c, ())]
        for name in new:
            nodes.setdefault(name, {})[node] = None
        return new


R = TypeVar("R", bound=Reason)
FindingReference = tuple[FindingCode, str]
"""Code and node of another finding."""


class Diagnosis(NamedTuple):
    """A finding before it is added to a report.

    Attributes:
        node: Node of the finding, such as the Add, the Concat or the pooling.
        cause: The reason, and further reasons that explain it.
        size: Size of the tensor that is converted or remains float.
        convolutions: Convolutions that the finding affects.
        joined: Whether several causes with the same code and node are reported in one finding.
        gains: Whether the fix improves the engine. If not, the finding is a note.
        automatic: Whether the model has all data that the automatic fix of the code needs.
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
        return finding_code(self.cause.reason)

    @property
    def needs_coarse_scale(self) -> bool:
        """Whether the fix is a common scale of several tensors, which costs too much precision."""
        return needs_coarse_common_scale(self.cause)


class RecordedReasons:
    """Reasons of a prediction by node, and the findings that explain nodes.

    Attributes:
        report: Report to which findings are added.
        outcomes: Outcomes of convolutions by name.
        sums: By DQ of an Add's residual, the first convolution that could fuse the Add. Only for
            Adds whose output no Q reads.
        residuals: By name of an Add, the first reason why its residual is float.
    """

    def __init__(self, prediction: Prediction, report: FindingReport) -> None:
        self.report = report
        self.outcomes: dict[str, ConvOutcome] = {c.name: c for c in prediction.convolutions}
        self._explanations: dict[str, FindingReference] = {}  # first explanation of each node
        self._by_node: dict[str, list[Reason]] = defaultdict(list)
        for reason in prediction.refusals:
            self._by_node[reason.node].append(reason)
        self.sums: dict[str, str] = {}
        for add in self.reasons_of_kind(AddOutputNotQuantized):
            self.sums.setdefault(add.residual.node, add.node)
        self.residuals: dict[str, ResidualFloat] = {}
        for residual in self.reasons_of_kind(ResidualFloat):
            self.residuals.setdefault(residual.add, residual)

    def reasons_at(self, node: str) -> list[Reason]:
        """Return the reasons of a node, in the order of the passes."""
        return self._by_node.get(node, [])

    def first_reason(self, kind: type[R], node: str) -> R | None:
        """Return the first reason of a class at a node, else None."""
        return next((r for r in self.reasons_at(node) if isinstance(r, kind)), None)

    def reasons_of_kind(self, kind: type[R]) -> Iterator[R]:
        """Return all reasons of a class."""
        return (r for reasons in self._by_node.values() for r in reasons if isinstance(r, kind))

    def affected_convolutions(self, node: str) -> tuple[str, ...]:
        """Return ``(node,)`` if the node is a convolution of the prediction, else ``()``."""
        return (node,) if node in self.outcomes else ()

    def add(self, diagnosis: Diagnosis, explained: Iterable[str] = ()) -> bool:
        """Add the finding of a diagnosis, and record which nodes the finding explains.

        A finding on a remaining conversion explains no node, unless it is about different scales.

        Args:
            diagnosis: The diagnosis.
            explained: Nodes that the finding explains, in addition to the node of the diagnosis.

        Returns:
            Whether the code of the finding applies to the target.
        """
        reason = diagnosis.cause.reason
        applies = self.report.add(
            diagnosis.cause,
            diagnosis.node,
            diagnosis.convolutions,
            diagnosis.size.values if diagnosis.size is not None else None,
            diagnosis.joined,
            self._find_evidence(reason),
            gains=diagnosis.gains,
            automatic=diagnosis.automatic and not diagnosis.needs_coarse_scale,
        )
        if isinstance(reason, RemainingConversion) and not isinstance(
            reason, ConversionBetweenScales
        ):
            return applies
        for node in (*explained, diagnosis.node):
            self._explanations.setdefault(node, (diagnosis.code, diagnosis.node))
        return applies

    def _find_evidence(self, reason: Reason) -> Evidence | None:
        """Return the evidence of the rules that decide the outcome of a reason's node."""
        if isinstance(reason, RemainingConversion):
            # Its evidence has only the rules that moved or kept the Q or DQ.
            return reason.evidence.choose_weaker(self.report.tensorrt.evidence)
        outcome = self.outcomes.get(reason.node)
        return None if outcome is None else outcome.evidence

    def explain_by_codes(self, convolution: str, codes: tuple[FindingCode, ...]) -> None:
        """Record which finding explains a convolution.

        It is the first finding that affects the convolution and has the first of the codes, else
        the first with the second code, and so on. If there is none, nothing is recorded.
        """
        for code in codes:
            node = self.report.find_node(code, convolution)
            if node is not None:
                self._explanations.setdefault(convolution, (code, node))
                return

    def explanation(self, node: str) -> tuple[FindingReference, ...]:
        """Return code and node of the finding that explains a node; empty if there is none."""
        reference = self._explanations.get(node)
        if reference is not None and self.report.has(*reference):
            return (reference,)
        for code in ("SILU-INNER-Q", "ACT-INNER-Q", "DOUBLE-QDQ"):
            if self.report.has(code, node):
                return ((code, node),)
        return ()


def _join_cause(finding: Finding, cause: Cause, values: int | None) -> None:
    if cause not in finding.causes:
        finding.causes += (cause,)
        finding.values = max(finding.values or 0, values or 0) or None


def _adjust_severity(severity: Severity, fatal: bool | None) -> Severity:
    if fatal:
        return Severity.ERROR
    is_harmless = fatal is False and severity == Severity.ERROR
    return Severity.WARNING if is_harmless else severity
