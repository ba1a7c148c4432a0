"""Words for findings, made last: one function for each class of refusal gives its message and what to change.

Nothing else words a finding, and nothing reads these words again. The functions of the simulation's refusals are here;
those of the other rooms are loaded with the first finding that needs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from qdqtool.base.records import replaced
from qdqtool.types import Cause, Finding, Refusal, Severity

Words = tuple[str, str]
"""The message, and what to change; the second is empty where the code's general advice fits."""
Wording = Callable[[Finding, Cause, Any], "Words | str"]
F = TypeVar("F", bound=Callable[..., "Words | str"])

_WORDINGS: dict[type[Refusal], Wording] = {}
_ROOMS = {
    "qdqtool.trt.refusals": "qdqtool.explain.messages_passes", "qdqtool.trt.faults": "qdqtool.explain.messages_model",
    "qdqtool.rtx.records": "qdqtool.explain.messages_rtx", "qdqtool.explain.gpu": "qdqtool.explain.messages_gpu",
}


def words(*kinds: type[Refusal]) -> Callable[[F], F]:
    """Registers a function as that which words these classes."""

    def register(function: F) -> F:
        for kind in kinds:
            if kind in _WORDINGS:
                raise ValueError(f"{kind.__name__} is worded twice")
            _WORDINGS[kind] = function
        return function

    return register


def worded(finding: Finding, sizes: bool = True) -> Words:
    """The message and the fix of a finding.

    Args:
        finding: The finding.
        sizes: Whether dimensions of tensors are named, which a part of a model may have otherwise.
    """
    from qdqtool.explain import codes

    entry = codes.get(finding.code)
    message = fix = ""
    for cause in finding.causes:
        refusal = cause.refusal if sizes else _without_size(cause.refusal)
        found = _wording(type(refusal))(finding, cause, refusal)
        text, advice = (found, "") if isinstance(found, str) else found
        if not message:
            message, fix = text, advice or entry.fix
            fails = finding.severity == Severity.ERROR and not refusal.quotes
            error = entry.error_text(finding.target) if fails else ""
            message += f' TensorRT says: "{error}"' if error else ""
        elif text not in message:
            message += f" {text}"
    return message, fix


def _wording(kind: type[Refusal]) -> Wording:
    if kind not in _WORDINGS:
        importlib.import_module(_ROOMS[kind.__module__])
    return _WORDINGS[kind]


def _without_size(refusal: Refusal) -> Refusal:
    return replaced(refusal, elements=None) if hasattr(refusal, "elements") else refusal
