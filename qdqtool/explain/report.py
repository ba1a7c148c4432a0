"""Collecting findings for one target."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from qdqtool.base.text import counted
from qdqtool.types import Cause, Evidence, Finding, FindingCode, Refusal, Severity


def title_of(code: FindingCode) -> str:
    """The one-line form of a code."""
    from qdqtool.explain import codes

    return codes.get(code).title


_OBSTACLES: dict[FindingCode, str] = {
    "QOPERATOR": "integer operators instead of Q/DQ ({ops})",
    "ZP-NONZERO": "zero points other than 0 at {n}",
    "ZP-UINT8": "{n} to UINT8",
}


_SYMMETRIC = ("quantize_static(..., quant_format=QuantFormat.QDQ, activation_type=QuantType.QInt8, "
              "weight_type=QuantType.QInt8, extra_options={'ActivationSymmetric': True})")


def obstacles(findings: Iterable[Finding]) -> str:
    """In what forms a model is quantized that TensorRT does not take at all; empty for none."""
    found: dict[FindingCode, list[Refusal]] = defaultdict(list)
    for finding in findings:
        if finding.code in _OBSTACLES:
            found[finding.code] += [cause.refusal for cause in finding.causes]
    parts = []
    for code, refusals in found.items():
        counts = Counter(getattr(r, "op", "") for r in refusals).most_common()
        ops = ", ".join(f"{count} {op}" for op, count in counts[:3]) + ", ..." * (len(counts) > 3)
        parts.append(_OBSTACLES[code].format(ops=ops, n=counted(len(refusals), "quantizer")))
    if not parts:
        return ""
    cut = set(found) == {"ZP-UINT8"}
    built = "and refuses this or loses every code above 127" if cut else "so nothing of it builds as it stands"
    mend = "" if "QOPERATOR" in found else "'qdqtool fix' changes it, or "
    return (f"{' and '.join(parts)}: TensorRT takes Q/DQ with symmetric INT8 only, {built}; {mend}"
            f"quantize again, with onnxruntime {_SYMMETRIC}")


def worded(finding: Finding) -> tuple[str, str]:
    """The message and the fix of a finding; the words are loaded with the first that is asked for."""
    from qdqtool.explain import messages

    return messages.worded(finding)


class Report:
    """Findings for one target; a code that does not hold there is left out."""

    def __init__(self, target: str, way: str | None = None) -> None:
        self.target = target
        #: How the engine is built (``qdqtool.explain.ways``), None where that is not known.
        self.way = way
        self.findings: list[Finding] = []
        self._known: dict[tuple[FindingCode, str], Finding] = {}
        # Convolutions and the nodes of the findings that concern them.
        self._concerned: dict[FindingCode, dict[str, dict[str, None]]] = defaultdict(dict)

    def add(
        self,
        code: FindingCode,
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
            code: The finding code.
            cause: The refusal that decided, with what explains it or alone.
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
        from qdqtool.explain import codes  # the table costs time; most well placed models need little of it

        entry = codes.get(code)
        holds = entry.on(self.target)
        if holds is None:
            return False
        if isinstance(cause, Refusal):
            cause = Cause(cause)
        place = cause.refusal.node if node is None else node
        first = self._known.get((code, place))
        if first is not None:
            first.convolutions.extend(self._new(code, place, convolutions))
            if gains and not first.gains:
                first.gains, first.severity = True, entry.severity_on(self.target)
            first.automatic = first.automatic and automatic
            if joined and cause not in first.causes:
                first.causes += (cause,)
                first.values = max(first.values or 0, values or 0) or None
            return True
        severity = Severity.ERROR if fatal else entry.severity_on(self.target)
        if fatal is False and severity == Severity.ERROR:
            severity = Severity.WARNING
        if not gains:
            severity = Severity.INFO
        finding = Finding(
            code, severity, place, (cause,), holds.evidence.weaker(evidence), worded, target=self.target,
            way=self.way, convolutions=self._new(code, place, convolutions), values=values,
            automatic=entry.automatic and gains and automatic, gains=gains,
        )
        self._known[code, place] = finding
        self.findings.append(finding)
        return True

    def place(self, code: FindingCode, convolution: str) -> str | None:
        """The node of the first finding of a code that concerns a convolution; None where there is none."""
        return next(iter(self._concerned[code].get(convolution, ())), None)

    def _new(self, code: FindingCode, node: str, convolutions: Iterable[str]) -> list[str]:
        """Those convolutions that the finding at a node does not name yet; from now on it does."""
        new = [c for c in dict.fromkeys(convolutions) if node not in self._concerned[code].get(c, ())]
        for name in new:
            self._concerned[code].setdefault(name, {})[node] = None
        return new

    def has(self, code: FindingCode, node: str) -> bool:
        """Whether a finding of that code at that node is there."""
        return (code, node) in self._known
