"""Collecting findings for one target, with the wording they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from qdqtool.explain.words import names, number
from qdqtool.finding_codes import FindingCode
from qdqtool.qdq import QuantParams
from qdqtool.types import Evidence, Finding, Severity

__all__ = ["Report", "names", "number", "scalar", "scale_text"]


def title_of(code: FindingCode) -> str:
    """The one-line form of a code."""
    from qdqtool.explain import codes

    return codes.get(code).title


class Report:
    """Findings for one target; a code that does not hold there is left out."""

    def __init__(self, target: str, way: str | None = None) -> None:
        self.target = target
        #: How the engine is built (``qdqtool.explain.ways``), None where that is not told.
        self.way = way
        self.findings: list[Finding] = []
        self._known: dict[tuple[FindingCode, str], Finding] = {}
        self._concerned: dict[FindingCode, dict[str, set[str]]] = defaultdict(dict)  # convolution to findings' nodes

    def add(
        self,
        code: FindingCode,
        node: str,
        message: str,
        fix: str = "",
        convolutions: Iterable[str] = (),
        values: int | None = None,
        joined: bool = False,
        evidence: Evidence | None = None,
        gains: bool = True,
        automatic: bool = True,
    ) -> bool:
        """Adds a finding, once for a code and node; convolutions of a second one are joined to the first.

        ``evidence`` tells of a place that is proven less well than its code.
        ``gains`` says whether the change brings something here; a finding that would not is a note, with no automatic
        fix. ``automatic`` says whether what such a fix needs is there.
        ``joined`` joins the second message as well: an Add costs the convolution in front and the one it is fused into.

        Returns:
            Whether the code holds on the target.
        """
        from qdqtool.explain import codes  # the tables cost time; most well placed models need few or none

        entry = codes.get(code)
        holds = entry.on(self.target)
        if holds is None:
            return False
        first = self._known.get((code, node))
        if first is not None:
            self.concerns(first, convolutions)
            if gains:
                first.severity = entry.severity_on(self.target)
            first.automatic = first.automatic and automatic
            if joined and message not in first.message:
                first.message += f" {message}"
                first.values = max(first.values or 0, values or 0) or None
            return True
        severity = entry.severity_on(self.target) if gains else Severity.INFO
        error = entry.error_text(self.target)
        if severity == Severity.ERROR and error:
            message += f' TensorRT says: "{error}"'
        finding = Finding(
            code, severity, node, message, fix or entry.fix,
            holds.evidence if evidence is None else holds.evidence.weaker(evidence), target=self.target,
            convolutions=self._new(code, node, convolutions), values=values,
            automatic=entry.automatic and gains and automatic,
        )
        self._known[code, node] = finding
        self.findings.append(finding)
        return True

    def concerns(self, finding: Finding, convolutions: Iterable[str]) -> None:
        """Lets a finding concern further convolutions."""
        finding.convolutions.extend(self._new(finding.code, finding.node, convolutions))

    def names(self, code: FindingCode, convolution: str) -> bool:
        """Whether a finding of that code says that it concerns a convolution."""
        return convolution in self._concerned[code]

    def _new(self, code: FindingCode, node: str, convolutions: Iterable[str]) -> list[str]:
        """Those convolutions that the finding at a node does not name yet; from now on it does."""
        new = [c for c in dict.fromkeys(convolutions) if node not in self._concerned[code].get(c, ())]
        for name in new:
            self._concerned[code].setdefault(name, set()).add(node)
        return new

    def has(self, code: FindingCode, node: str) -> bool:
        """Whether a finding of that code at that node is there."""
        return (code, node) in self._known


def scale_text(params: QuantParams) -> str:
    """The scale of a quantizer as text: a number, or the range of a per-channel one."""
    if params.scale is None or not params.scale.size:
        return "unknown"
    if params.scale.size == 1:
        return number(float(params.scale[0]))
    return f"{number(float(np.min(params.scale)))} to {number(float(np.max(params.scale)))}"


def scalar(params: QuantParams) -> float | None:
    """The one scale of a per-tensor quantizer; None for a per-channel or unknown one."""
    return float(params.scale[0]) if params.scale is not None and params.scale.size == 1 else None
