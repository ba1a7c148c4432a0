"""Findings, their reasons, and the rules from reason to finding code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, dataclass_transform

from qdqtool.evidence import Evidence
from qdqtool.util.json_text import Json
from qdqtool.util.records import collect_names, field_names, field_values

if TYPE_CHECKING:
    from qdqtool.reasons.tensors import Scale

FindingCode = str
"""Code of a finding, a key of ``findings/codes.toml``."""


class Severity(StrEnum):
    """Severity of a finding.

    ERROR: the build fails or the result is wrong. WARNING: speed or accuracy is lost. INFO: worth
    knowing.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def word(self) -> str:
        """Word for users; ``info`` is a note, as in SARIF."""
        return "note" if self is Severity.INFO else self.value


class FindingRule(NamedTuple):
    """Rule that turns a reason into a finding: its code, and what ``fix`` does about it.

    Attributes:
        code: The code.
        when: Condition on the reason; None if the rule always applies. The first rule that applies
            counts.
        is_attempted: Whether ``fix`` tries to remove the finding.
        is_promised: Whether findings say that ``fix`` can remove them. Otherwise ``fix`` keeps the
            change only if the simulation shows a gain.
        is_on_request: Whether ``fix`` tries the fix only if the user names the code, or if the
            finding is an error. The fix may cost speed or accuracy.
    """

    code: FindingCode
    when: Callable[[Any], object] | None = None
    is_attempted: bool = False
    is_promised: bool = False
    is_on_request: bool = False

    def is_met_by(self, reason: Reason) -> bool:
        return self.when is None or bool(self.when(reason))


def fixable_rule(
    code: FindingCode, when: Callable[[Any], object] | None = None, *, on_request: bool = False
) -> FindingRule:
    """Return a rule whose findings ``fix`` can remove without data."""
    return FindingRule(code, when, is_attempted=True, is_promised=True, is_on_request=on_request)


def attempted_rule(code: FindingCode, when: Callable[[Any], object] | None = None) -> FindingRule:
    """Return a rule whose findings ``fix`` removes only if the simulation shows a gain."""
    return FindingRule(code, when, is_attempted=True)


@dataclass_transform()
@dataclass(eq=False, repr=False)
class Reason:
    """Reason of a finding: why a pass, a check or a placement rejected a node.

    Each kind of reason is a dataclass in `qdqtool.reasons`. Its fields are the nodes and values
    that led to the rejection. The class declares finding codes, and writes the message.

    Attributes:
        key: Short, stable code of the class that tests refer to; may be empty.
        quotes: Whether the message quotes TensorRT.
        identity_excludes: Fields that are ignored when findings are compared, such as the size of
            a tensor.
        unnamed_fields: Fields that contain no names of nodes or tensors.
        rules: Rules with the code of the finding; the first rule that applies counts. Empty if
            the class has no finding code.
        pass_name: Pass or check that recorded the reason.
        node: ONNX node that was rejected.
    """

    key: ClassVar[str] = ""
    quotes: ClassVar[bool] = False
    identity_excludes: ClassVar[tuple[str, ...]] = ("pass_name", "elements")
    unnamed_fields: ClassVar[tuple[str, ...]] = ("pass_name", "op")
    rules: ClassVar[tuple[FindingRule, ...]] = ()

    pass_name: str
    node: str

    def __init_subclass__(cls, key: str = "") -> None:
        cls.key = key
        # Subclasses are not frozen and inherit the comparison of this class. The commands import a
        # hundred subclasses, and each method that `dataclass` generates takes 0.1 ms.
        dataclass(eq=False, repr=False)(cls)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and field_values(self) == field_values(other)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Cached hash, because reasons may contain each other in long chains."""
        return hash((type(self), field_values(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without caches: hashes differ between processes."""
        return dict(zip(field_names(self), field_values(self), strict=True))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in field_names(self))
        return f"{type(self).__name__}({values})"

    def message(self, finding: Finding, cause: Cause) -> str | tuple[str, str]:
        """Return the message, and the fix if it differs from the general advice of the code.

        Raises:
            NotImplementedError: The class has no finding code.
        """
        raise NotImplementedError(type(self).__name__)

    def skip_reason(self) -> str:
        """Return the text that explains why a placement leaves the node float.

        Raises:
            NotImplementedError: No placement records reasons of this class.
        """
        raise NotImplementedError(type(self).__name__)

    def scales_to_unify(self) -> Sequence[Scale]:
        """Return the scales that a common scale would replace; empty if the fix is another one."""
        return ()

    def names(self) -> Iterator[str]:
        """Yield the names of nodes and tensors in the reason's fields, without duplicates."""
        return iter(collect_names(self))


@dataclass(frozen=True)
class Cause:
    """The reason that a finding reports, and further facts for its message.

    Attributes:
        reason: The reason.
        also: Further reasons that explain the finding.
        see: Other findings that explain this one, as pairs of code and node.
        fused: Whether the node of the finding is fused into the layer of a convolution.
    """

    reason: Reason
    also: tuple[Reason, ...] = ()
    see: tuple[tuple[FindingCode, str], ...] = ()
    fused: bool = False

    @property
    def refusal(self) -> Reason:
        """Name of `reason` in version 0.2.0. The release after the next one will not have it."""
        return self.reason


@dataclass(slots=True, repr=False)
class Finding:
    """A problem of a model, or a note about it, with its cause and its fix.

    Attributes:
        code: Kind of the finding, such as ``SKIP-FLOAT``.
        severity: Error, warning or note.
        node: ONNX node of the finding.
        causes: The reasons that the finding reports. All have the same code and node.
        evidence: Evidence of the rule that the finding rests on.
        words: Function that returns the message and the fix of a finding.
        id: Number of the finding in its prediction.
        target: Target of the prediction.
        way: Build method (trtexec, Python, ...), if the user named it.
        nodes: Nodes of the model that the causes name, ``node`` first.
        convolutions: Names of the convolutions that the finding concerns.
        values: Number of tensor elements that are converted because of the finding; None if shapes
            are unknown.
        automatic: Whether ``qdqtool fix`` has a change for the finding: by default, or if the user
            names its code (:func:`split_fixable`).
        saves_ms: Largest time in milliseconds that the fix can save in one execution; None
            without a GPU, or if the fix saves no time. The sum over several findings may exceed
            the saving of their fixes together.
        saving_included_in: Code of another finding whose ``saves_ms`` includes that of this
            finding, so that the two must not be added; else None.
        gains: Whether the fix improves this model.
        has_fast_int8: Whether the GPU of the prediction computes INT8 faster than FP16; None
            without a GPU.
        is_built: Whether TensorRT builds an engine in spite of an error, but with wrong results.
    """

    code: FindingCode
    severity: Severity
    node: str
    causes: tuple[Cause, ...]
    evidence: Evidence
    words: Callable[[Finding], tuple[str, str]] = field(repr=False, compare=False)
    id: int = -1
    target: str = ""
    way: str | None = None
    nodes: tuple[str, ...] = ()
    convolutions: list[str] = field(default_factory=list)
    values: int | None = None
    automatic: bool = False
    saves_ms: float | None = None
    gains: bool = True
    has_fast_int8: bool | None = field(default=None, kw_only=True)
    is_built: bool = field(default=False, kw_only=True)
    saving_included_in: FindingCode | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        place = f" at {self.node}" if self.node else ""
        return f"<Finding {self.code} ({self.severity}){place}>"

    @property
    def message(self) -> str:
        """One or two sentences about the problem and its causes."""
        return self.words(self)[0]

    @property
    def fix(self) -> str:
        """Instruction for fixing the problem; empty if no action is needed."""
        return self.words(self)[1]

    def as_json(self) -> Json:
        message, fix = self.words(self)
        return {
            "id": self.id,
            "code": self.code,
            "severity": str(self.severity),
            "node": self.node,
            "fix": fix,
            "message": message,
            "evidence": str(self.evidence),
            "target": self.target,
            "values": self.values,
            "nodes": list(self.nodes),
            "convolutions": list(self.convolutions),
            "automatic": self.automatic,
            "saves_ms": self.saves_ms,
            "saving_included_in": self.saving_included_in,
        }


def needs_request(finding: Finding) -> bool:
    """Return whether ``fix`` fixes a finding only if the user names its code.

    Errors are fixed without a request.
    """
    return finding.severity != Severity.ERROR and any(
        _is_on_request(cause.reason) for cause in finding.causes
    )


def _is_on_request(reason: Reason) -> bool:
    for rule in reason.rules:
        if rule.is_met_by(reason):
            return rule.is_on_request
    return False


def split_fixable(findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that ``fix`` fixes by default, and those that need ``--only``.

    An error that has an automatic fix is fixed by default, together with the warnings of the same
    code.
    """
    listed = list(findings)
    errors = {f.code for f in listed if f.severity == Severity.ERROR}
    default: list[Finding] = []
    on_request: list[Finding] = []
    for finding in listed:
        if finding.automatic:
            is_default = finding.code in errors or not needs_request(finding)
            (default if is_default else on_request).append(finding)
    return default, on_request


def list_as_json(findings: Sequence[Finding]) -> list[Json]:
    """Return the JSON of findings. ``on_request`` is true if their fix needs ``--only``."""
    _, on_request = split_fixable(findings)
    ids = {id(f) for f in on_request}
    return [f.as_json() | {"on_request": id(f) in ids} for f in findings]


def name_rejection(findings: Iterable[Finding]) -> str:
    """Return ``will reject``, ``will probably reject``, or empty if TensorRT builds the model.

    The text has "probably" if the rules of all errors that prevent the build are assumed.
    """
    errors = [f for f in findings if f.severity == Severity.ERROR and not f.is_built]
    if not errors:
        return ""
    is_assumed = all(finding.evidence == Evidence.ASSUMED for finding in errors)
    return "will probably reject" if is_assumed else "will reject"
