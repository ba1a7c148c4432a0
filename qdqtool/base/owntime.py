"""How long a command has been at work: a limit on it gives the same under any load of the machine.

But for a command that waits for programs that it has not started, as those of a server: that counts as sleep.
"""

from __future__ import annotations

import math
import os
import time

from qdqtool.base.process import descendants

EVERY = 0.25  # seconds between two looks
_LATE = 4  # times that at most: whoever looks may have been stopped, too


class OwnTime:
    """Seconds that a process and all that it started computed, on all cores together, or had nothing to compute.

    Where one of them wants a core or a disk, or is stopped, what they computed counts and the clock does not. Where all
    sleep, as those that wait for each other forever, the clock counts. Neither grows with what other programs do.

    Args:
        most: How many they may take.

    Attributes:
        seconds: How many that were when they were last looked at; those of the clock where the system does not show
            processes.
    """

    def __init__(self, most: float = math.inf) -> None:
        self.seconds = 0.0
        self._most = most
        self._used = 0.0
        self._last = time.monotonic()

    def is_over(self, process: int) -> bool:
        """Looks at a process; to be called every :data:`EVERY` seconds."""
        try:
            used, wants = _looked_at(process)
        except (OSError, ValueError, IndexError, AttributeError):  # no Linux, or it has ended
            used, wants = self._used, False
        now = time.monotonic()
        computed = max(0.0, used - self._used)
        self.seconds += computed if wants else max(computed, min(now - self._last, _LATE * EVERY))
        self._used, self._last = max(used, self._used), now
        return self.seconds > self._most


def _looked_at(process: int) -> tuple[float, bool]:
    """Seconds of the processor that a process and those that it started have used, ended ones included, and whether one
    of their threads wants to go on."""
    ticks, found = 0, descendants(process)
    wants = False
    for one in (process, *found):
        try:
            ticks += sum(map(int, _stat(f"/proc/{one}/stat")[11:15]))
            wants = wants or any(
                _stat(f"/proc/{one}/task/{thread}/stat")[0] in _WANT
                for thread in os.listdir(f"/proc/{one}/task")
            )
        except FileNotFoundError:  # it has ended meanwhile, and counts for who waited for it
            if one == process:
                raise
    return ticks / os.sysconf("SC_CLK_TCK"), wants


_WANT = "RDTt"  # runs or could, waits for a disk, is stopped


def _stat(path: str) -> list[str]:
    """What the system says of a process or thread, from its state on."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
