"""Memory that the onnxruntime sessions of this process may use."""

from __future__ import annotations

import contextlib
import os

from qdqtool.util.limits import PROCESSES

MACHINE_SHARE = 0.75  # fraction of the machine's or container's memory
# Files that contain the memory limit of a container.
CONTAINER_FILES = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def session_memory_limit() -> int:
    """Return the memory in bytes that all sessions of this process may use; 0 if unknown."""
    sizes = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in CONTAINER_FILES:
        with contextlib.suppress(ValueError, OSError), open(path, encoding="ascii") as file:
            sizes.append(int(file.read(32)))  # without a limit, the file contains "max"
    processes = 1
    with contextlib.suppress(ValueError):
        processes = max(1, int(os.environ.get(PROCESSES, "1")))
    return int(MACHINE_SHARE * min(sizes, default=0) / processes)
