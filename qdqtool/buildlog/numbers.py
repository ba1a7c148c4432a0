"""The numbers of a log: memory, performance summary, profile table."""

from __future__ import annotations

import re

from qdqtool.buildlog.records import Memory, ProfileRow
from qdqtool.buildlog.types import Build

_LAYER_MEMORY = re.compile(
    r"Layer: (.*) Host Persistent: (\d{1,15})(?: bytes)? Device Persistent: (\d{1,15})(?: bytes)? "
    r"Scratch Memory: (\d{1,15})(?: bytes)?"
)
_TOTALS = {
    "Total Host Persistent Memory": "host_persistent",
    "Total Device Persistent Memory": "device_persistent",
    "Total Scratch Memory": "scratch",
    "Max Scratch Memory": "scratch",
    "Total Activation Memory": "activation",
    "Total Weights Memory": "weights",
}
_TOTAL = re.compile(r"(Total [A-Z][a-z]+(?: [A-Z][a-z]+)? Memory|Max Scratch Memory): (\d{1,19})(?: bytes)?")
_PEAK = re.compile(
    r"\[MemUsageStats\] Peak memory usage of TRT CPU/GPU memory allocators: CPU (\d{1,9}) MiB, GPU (\d{1,9}) MiB"
)
_ENGINE = re.compile(r"Loaded engine size: (\d{1,9}) MiB")
_METRIC = re.compile(r"(Throughput|Total Host Walltime|Total GPU Compute Time): ([\d.e+-]{1,20}) (qps|s)")
_LATENCY = re.compile(r"([\w-]{1,20}(?: [\w-]{1,20}){0,4}): (min = .*)")
_PART = re.compile(r"([\w()%.]{1,30}) = ([\d.e+-]{1,20}|-?nan|inf) ?(?:ms)?")
_MAX_ROWS = 100_000


def read_memory(memory: Memory, text: str) -> bool:
    """Takes a line about memory; False when it is none."""
    if text.startswith("Layer: "):
        match = _LAYER_MEMORY.fullmatch(text)
        if match is None:
            return False
        if len(memory.layers) < _MAX_ROWS:
            memory.layers[match[1]] = (int(match[2]), int(match[3]), int(match[4]))
        return True
    match = _TOTAL.fullmatch(text)
    if match:
        if match[1] in _TOTALS:  # printed before and after block assignment: the last one is the engine's
            setattr(memory, _TOTALS[match[1]], int(match[2]))
        return True
    match = _PEAK.fullmatch(text)
    if match:
        memory.peak_cpu_mib, memory.peak_gpu_mib = int(match[1]), int(match[2])
        return True
    match = _ENGINE.fullmatch(text)
    if match:
        memory.engine_mib = int(match[1])
        return True
    return text.startswith(("[MemUsageChange]", "[MemUsageStats]", "[MemUsageSnapshot]", "[BlockAssignment]"))


def read_metric(performance: dict[str, dict[str, float]], text: str) -> bool:
    """Takes a line of the performance summary; False when it is none."""
    match = _METRIC.fullmatch(text)
    if match:
        value = number(match[2])
        if value is not None:
            performance[match[1]] = {"value": value}
        return value is not None
    match = _LATENCY.match(text)
    if match is None:
        return False
    values = {part[1]: number(part[2]) for part in _PART.finditer(match[2])}
    if len(performance) < 50:
        performance[match[1]] = {name: value for name, value in values.items() if value is not None}
    return bool(values)


def is_profile_head(text: str) -> bool:
    """Whether a line is the head of the profile table, in the spelling to 8.5 or from 8.6 on."""
    return "Layer" in text and ("Time (ms)" in text or "Time(ms)" in text) and "Avg" in text


def read_profile_row(build: Build, text: str) -> bool:
    """Takes a row of the profile table, name first (to 8.5) or last (from 8.6); False when it is none.

    The columns are total, average, median (from 8.4) and percent; the heading says which.
    """
    columns = build.options.setdefault("Profile columns", {})
    if "Time (ms)" in text and "Layer" in text:
        columns.update(order="first", median="yes" if "Median" in text else "")
        return True
    if "Time(ms)" in text and "Layer" in text:
        columns.update(order="last", median="yes" if "Median" in text else "")
        return True
    if not columns and not _guess_columns(columns, text):
        return False
    count = 4 if columns["median"] else 3
    pieces = text.rsplit(None, count) if columns["order"] == "first" else text.split(None, count)
    if len(pieces) != count + 1:
        return False
    name = pieces.pop(0 if columns["order"] == "first" else -1).strip()
    values = [number(piece) for piece in pieces]
    if any(value is None for value in values):
        return False
    total, average, *rest = [value for value in values if value is not None]
    median = rest[0] if columns["median"] else None
    if name == "Total":
        build.profile_total_ms = average
    elif len(build.profile_rows) < _MAX_ROWS:
        build.profile_rows.append(ProfileRow(name, total, average, median, rest[-1]))
    return True


def _guess_columns(columns: dict[str, str], text: str) -> bool:
    """The columns of a row without a head: three or four numbers behind the name, or in front of it."""
    for count in (4, 3):
        for order, pieces in (("first", text.rsplit(None, count)), ("last", text.split(None, count))):
            numbers = pieces[1:] if order == "first" else pieces[:-1]
            if len(pieces) == count + 1 and all("." in p and number(p) is not None for p in numbers):
                columns.update(order=order, median="yes" if count == 4 else "")
                return True
    return False


def number(text: str | bytes) -> float | None:
    """The number that a short text is, None when it is none or not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None
