"""What TensorRT's warnings and errors mean for a Q/DQ model: text, cause, fix.

Wording and causes from NVIDIA's issue threads (numbers are those of github.com/NVIDIA/TensorRT), from the sources of
onnx-tensorrt and trtexec, and from TensorRT's documentation. A text is matched by a fragment that is the same in
every version; names and numbers in it may differ.
"""

from __future__ import annotations

import re

from qdqtool.buildlog.known_errors import ERROR, HARMLESS, KNOWN, WARNING, KnownError

__all__ = ["ERROR", "HARMLESS", "KNOWN", "WARNING", "KnownError", "lookup"]

_COMPILED = [(re.compile(entry.pattern, re.IGNORECASE | re.DOTALL), entry) for entry in KNOWN]
_MAX_TEXT = 4000


def lookup(text: str) -> KnownError | None:
    """The entry for a warning or error of TensorRT, None when it is not known.

    Args:
        text: The message or a part of it; only the first 4,000 characters are looked at.
    """
    head = text[:_MAX_TEXT]
    return next((entry for pattern, entry in _COMPILED if pattern.search(head)), None)
