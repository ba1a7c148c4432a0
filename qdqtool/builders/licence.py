"""What a user of TensorRT-RTX has to know about its licence, said once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qdqtool.errors import QdqtoolError
from qdqtool.outputs import write_text

NOTICE = (
    "TensorRT-RTX is NVIDIA's software, under NVIDIA's licence, which was accepted by\n"
    "installing it: it may not be passed on, and NVIDIA may collect system information.\n"
    "qdqtool neither contains nor ships it. (Shown only once.)"
)


def _marker() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "qdqtool" / "tensorrt-rtx-notice-shown"


def print_once() -> bool:
    """Prints the notice on stderr unless this user has seen it; whether it was printed.

    Where the mark cannot be kept (no home folder, read-only disk), the notice is printed each time.
    """
    marker = _marker()
    if os.path.exists(marker):  # Path.exists raises where a folder may not be looked into
        return False
    print(NOTICE, file=sys.stderr)
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_text(marker, "shown\n", at_once=True)
    except (OSError, QdqtoolError):
        return True
    return True
