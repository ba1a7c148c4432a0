"""What TensorRT's warnings and errors mean for a Q/DQ model: text, cause, fix.

The texts are in ``qdqtool/knowledge/errors.toml``: wording and causes from NVIDIA's issue threads, from the sources of
onnx-tensorrt and trtexec, and from TensorRT's documentation. A text is matched by a fragment that is the same in every
version; names and numbers in it may differ. An error that is not in the table is described by its form.
"""

from __future__ import annotations

import re

from qdqtool.explain.errors_entry import ERROR, HARMLESS, WARNING, KnownError
from qdqtool.explain.errors_nodes import for_node
from qdqtool.explain.errors_shape import from_shape
from qdqtool.knowledge import entry, table
from qdqtool.types import Json

__all__ = ["ERROR", "HARMLESS", "KNOWN", "WARNING", "KnownError", "annotate", "lookup"]

KNOWN = tuple(entry(KnownError, given, given.get("id", "error")) for given in table("errors")["error"])
"""Every known text, the ones that say most before those that are consequences of others."""

_COMPILED = [(re.compile(known.pattern, re.IGNORECASE | re.DOTALL), known) for known in KNOWN]
_MAX_TEXT = 4000


def lookup(text: str) -> KnownError | None:
    """The entry for a warning or error of TensorRT, made for the node that it names.

    Where the words are in no entry and the text has the form of an error of TensorRT: what the form says, and that the
    cause is not known. None for any other text.

    Args:
        text: The message or a part of it; only the first 4,000 characters are looked at.
    """
    head = text[:_MAX_TEXT]
    found = next((known for pattern, known in _COMPILED if pattern.search(head)), None)
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
