"""Finding codes of the classes of reasons, and the codes that ``fix`` can fix."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from qdqtool.reasons.finding import Finding, FindingCode, FindingRule, Reason

_SUBJECTS = (
    "attention",
    "compiler",
    "conversions",
    "convolutions",
    "float_types",
    "fp8",
    "fusions",
    "gpus",
    "heads",
    "inputs",
    "operators",
    "outputs",
    "quantizers",
    "residuals",
    "scales",
    "weights",
)
REASON_MODULES = (
    *(importlib.import_module(f"qdqtool.reasons.{subject}") for subject in _SUBJECTS),
    importlib.import_module("qdqtool.findings.build_methods"),
)
"""Modules with classes of reasons that become findings."""


def reason_classes() -> Iterator[type[Reason]]:
    """Yield the classes of reasons that declare rules themselves."""
    for module in REASON_MODULES:
        for value in vars(module).values():
            is_reason = isinstance(value, type) and issubclass(value, Reason)
            if is_reason and value.__module__ == module.__name__ and vars(value).get("rules"):
                yield value


def finding_code(reason: Reason) -> FindingCode:
    """Return the code of the finding that a reason becomes.

    Raises:
        KeyError: The class has no finding code.
    """
    for rule in reason.rules:
        if rule.is_met_by(reason):
            return rule.code
    raise KeyError(type(reason))


def finding_codes(kind: type[Reason]) -> tuple[FindingCode, ...]:
    """Return the finding codes of a class of reasons; empty if it has none."""
    return tuple(rule.code for rule in kind.rules)


def attempted_codes(kinds: Sequence[type[Reason]]) -> tuple[FindingCode, ...]:
    """Return the codes that ``fix`` tries to fix, in the order of the classes."""
    return tuple(dict.fromkeys(r.code for kind in kinds for r in kind.rules if r.is_attempted))


def attempted_reasons(finding: Finding) -> list[Reason]:
    """Return the reasons of a finding that ``fix`` tries to remove."""
    if finding.code not in ATTEMPTED_CODES:
        return []
    return [
        reason
        for cause in finding.causes
        for reason in (cause.reason, *cause.also)
        if _is_attempted(reason, finding.code)
    ]


def _is_attempted(reason: Reason, code: str) -> bool:
    rules = (rule for rule in reason.rules if rule.code == code and rule.is_met_by(reason))
    first = next(rules, None)
    return first is not None and first.is_attempted


_RULES: tuple[FindingRule, ...] = tuple(rule for kind in reason_classes() for rule in kind.rules)
PROMISED_CODES = frozenset(rule.code for rule in _RULES if rule.is_promised)
"""Codes of findings that ``qdqtool fix`` can fix without data."""
ATTEMPTED_CODES = frozenset(rule.code for rule in _RULES if rule.is_attempted)
"""Codes of findings that ``qdqtool fix`` tries to fix."""
UNPROMISED_CODES = ATTEMPTED_CODES - PROMISED_CODES
"""Codes of findings whose fix seldom improves the prediction, so that none is promised."""
ON_REQUEST_CODES = frozenset(rule.code for rule in _RULES if rule.is_on_request)
"""Codes of findings that ``qdqtool fix`` may fix only on request."""
