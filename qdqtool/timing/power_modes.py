"""Power modes of Jetsons.

``power_modes.tsv`` has the limits that NVIDIA's nvpmodel configurations set in each mode. For a
Jetson that is missing there, the clock is estimated from the power limit.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from qdqtool.errors import QdqtoolError
from qdqtool.evidence import Evidence
from qdqtool.util.json_text import Json
from qdqtool.util.tables import read_rows

_TABLE = Path(__file__).parent / "power_modes.tsv"
_MIN_WATTS = 5.0  # lowest power mode of a Jetson (Nano)
_MIN_CLOCK_SHARE = 0.3
# Power is proportional to f V^2. The voltage V depends on the clock f, so f is proportional to the
# power limit raised to a power between 1/3 and 1.
_CLOCK_OF_POWER = 0.6
# Clock and SMs that are estimated from the power limit, divided by those of the mode: at most this
# for 80 % of the modes of the table that are named after a power. No mode is more than 6 % faster
# than its estimate.
ESTIMATE_OVER_MODE = 2.25


@dataclass(frozen=True, slots=True)
class PowerMode:
    """Limits of a Jetson's GPU in one power mode.

    Attributes:
        gpu: Name of the Jetson.
        name: Name that nvpmodel prints, without ``MODE_``.
        other_names: Modes that differ only in CPU cores, and other common names.
        sms: Number of SMs that stay on.
        clock: Highest SM clock in MHz.
        bandwidth: Memory bandwidth in GB/s; None for that of the module.
        evidence: How well the figures are known.
        source: Where the figures come from.
    """

    gpu: str
    name: str
    other_names: tuple[str, ...]
    sms: int
    clock: float
    bandwidth: float | None
    evidence: Evidence
    source: str

    def has_name(self, name: str) -> bool:
        """Whether this is the mode with a name in upper case."""
        return name in (self.name, *self.other_names)

    @property
    def limits(self) -> str:
        """SMs, clock and memory bandwidth as a text, such as ``4 SMs, 612 MHz, 68.3 GB/s``."""
        memory = "" if self.bandwidth is None else f", {self.bandwidth:g} GB/s"
        return f"{self.sms} SMs, {self.clock:.0f} MHz{memory}"

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "name": self.name,
            "other_names": list(self.other_names),
            "sms": self.sms,
            "clock_mhz": self.clock,
            "memory_gb_per_s": self.bandwidth,
            "evidence": str(self.evidence),
            "source": self.source,
        }


@functools.cache
def _all_modes() -> tuple[PowerMode, ...]:
    return tuple(
        PowerMode(
            gpu=row["gpu"],
            name=row["mode"],
            other_names=tuple(name for name in row["other_names"].split("; ") if name),
            sms=int(row["sms"]),
            clock=float(row["clock"]),
            bandwidth=float(row["bandwidth"]) if row["bandwidth"] else None,
            evidence=Evidence(row["evidence"]),
            source=row["source"],
        )
        for row in read_rows(_TABLE)
    )


def list_power_modes(gpu_name: str) -> list[PowerMode]:
    """Return the power modes of a Jetson, the fastest first; empty if they are unknown."""
    return [mode for mode in _all_modes() if mode.gpu == gpu_name]


def find_power_mode(gpu_name: str, power: str) -> PowerMode:
    """Return a power mode of a Jetson whose modes are known.

    Args:
        gpu_name: Name of the Jetson.
        power: Name of a mode, such as ``15W``, ``MODE_15W`` or ``MAXN``, in upper or lower case.

    Raises:
        QdqtoolError: The Jetson lacks this mode.
    """
    name, modes = _normalize_mode(power), list_power_modes(gpu_name)
    for mode in modes:
        if mode.has_name(name):
            return mode
    listed = ", ".join(mode.name for mode in modes)
    raise QdqtoolError(
        f"`power` {power[:40]}: {gpu_name} has the modes {listed} (nvpmodel -q prints the current "
        f"mode). Give one of them{_suggest_alternatives(gpu_name, name)}",
        code="unknown-choice",
        parameter="power",
    )


def _normalize_mode(power: str) -> str:
    """Return the name of a mode as in the table: ``mode_15w`` and ``15`` both become ``15W``."""
    name = power.strip().upper().removeprefix("MODE_")
    watts = re.fullmatch(r"(\d+)(?:\.0*)?\s*W?", name)
    return f"{watts[1]}W" if watts else name


def _suggest_alternatives(gpu_name: str, name: str) -> str:
    """Name a custom clock, and the modules of the Jetson's series that have a mode of this name.

    If the module has this mode with Super mode, only this module with Super mode is named.
    """
    series = re.sub(r" \d+GB.*", " ", gpu_name)
    modules = [
        mode.gpu for mode in _all_modes() if mode.gpu.startswith(series) and mode.has_name(name)
    ]
    modules = [module for module in modules if module.startswith(gpu_name)] or modules
    if modules:
        names = " or ".join(f"'{module}'" for module in modules)
        return f", `clock` for a custom mode, or `gpu` {names}"
    return ", or `clock` for a custom mode"


def estimate_clock_share(gpu_name: str, max_watts: float, power: str) -> float | None:
    """Return the estimated share of a Jetson's clock for a power limit; None for ``MAXN``.

    Args:
        gpu_name: Name of the Jetson, whose modes are unknown.
        max_watts: Power of the Jetson without a limit.
        power: Limit in watts, such as ``70W``, or ``MAXN``.

    Raises:
        QdqtoolError: The text is neither a number of watts nor ``MAXN``, or is out of range.
    """
    name = _normalize_mode(power)
    if name == "MAXN":
        return None
    watts = parse_watts(name)
    if watts is None:
        raise QdqtoolError(
            f"`power` {power[:40]}: give watts (15W) or MAXN",
            code="wrong-format",
            parameter="power",
        )
    if not _MIN_WATTS <= watts <= max_watts:
        raise QdqtoolError(
            f"`power` {power[:40]}: give a limit from {_MIN_WATTS:g}W to {max_watts:g}W for "
            f"{gpu_name}, or MAXN (nvpmodel -q prints the current mode)",
            code="out-of-range",
            parameter="power",
        )
    share: float = (watts / max_watts) ** _CLOCK_OF_POWER
    return max(_MIN_CLOCK_SHARE, share)


def parse_watts(power: str) -> float | None:
    """Return the number of a text such as ``15W``; None for other texts."""
    try:
        watts = float(power.removesuffix("W"))
    except ValueError:
        return None
    return watts if math.isfinite(watts) else None
