"""What TensorRT's warnings and errors mean for a Q/DQ model: text, cause, fix.

Wording and causes from NVIDIA's issue threads (numbers are those of github.com/NVIDIA/TensorRT), from the sources of
onnx-tensorrt and trtexec, and from TensorRT's documentation. A text is matched by a fragment that is the same in
every version; names and numbers in it may differ. An error whose words are not known is told by its form.
"""

from __future__ import annotations

import re

from qdqtool.explain.errors_known import ERROR, HARMLESS, KNOWN, WARNING, KnownError
from qdqtool.explain.errors_nodes import for_node
from qdqtool.explain.errors_shape import from_shape
from qdqtool.types import Json

__all__ = ["ERROR", "HARMLESS", "KNOWN", "WARNING", "KnownError", "annotate", "lookup"]

_COMPILED = [(re.compile(entry.pattern, re.IGNORECASE | re.DOTALL), entry) for entry in KNOWN]
_MAX_TEXT = 4000


def lookup(text: str) -> KnownError | None:
    """The entry for a warning or error of TensorRT, told for the node that it names.

    Where the words are in no entry and the text has the form of an error of TensorRT: what the form tells, and that the
    cause is not known. None for any other text.

    Args:
        text: The message or a part of it; only the first 4,000 characters are looked at.
    """
    head = text[:_MAX_TEXT]
    found = next((entry for pattern, entry in _COMPILED if pattern.search(head)), None)
    if found is None:
        return from_shape(head)
    return for_node(found, head) if found.id == "no-implementation" else found


def annotate(facts: Json) -> Json:
    """Adds what is known of each message to the facts of a build (:func:`qdqtool.buildlog.summary.summarize`)."""
    for message in facts["messages"]:
        known = lookup(message["text"])
        message |= {
            "known": known.id if known else None,
            "severity": known.severity if known else None,
            "cause": known.cause if known else None,
            "fix": known.fix if known else None,
        }
    return facts
