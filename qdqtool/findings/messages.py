"""Messages of findings, assembled from their reasons."""

from __future__ import annotations

from qdqtool.findings import codes
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.reasons.text import NO_ACTION, Message


def describe_finding(finding: Finding) -> Message:
    """Return the message of a finding, and its fix; the fix is empty if no action is needed."""
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
            error = entry.error_text(finding.target) if is_failure else ""
            message += f' TensorRT says: "{error}"' if error else ""
        elif text not in message:
            message += f" {text}"
    return message, fix
