"""The GPU that a log describes: its SMs, clocks, memory and bus decide before its name, which several boards may share.

``Orin`` is what every Jetson Orin calls itself. A board of the table that fits what the log prints gives what is not
printed (the L2; on a Jetson the memory's bandwidth); everything printed is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from qdqtool.errors import QdqtoolError
from qdqtool.timing import gpus
from qdqtool.timing.gpus import Gpu
from qdqtool.types import Evidence

_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([A-Za-z]*)")
_MEMORY = re.compile(r"\b(\d{1,4})GB\b")
_SIZES = (2, 4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)  # GB that boards have
_NEAR = 2.0  # a bandwidth further from the table's than this factor is no bandwidth
_DOUBLE = 2  # transfers in a clock, as drivers print the memory's clock
_WORTH_SAYING = 0.97


@dataclass(frozen=True, slots=True)
class Device:
    """What a log's device information says; None for what it does not.

    Attributes:
        name: What the driver calls the GPU.
        cc: Compute capability.
        sms: Streaming multiprocessors in use.
        clock: SM clock in MHz.
        memory: Size of the memory in GB, as boards are sold.
        bus: Width of the memory's bus in bits.
        memory_clock: Clock of the memory in MHz.
    """

    name: str
    cc: str | None = None
    sms: int | None = None
    clock: float | None = None
    memory: int | None = None
    bus: int | None = None
    memory_clock: float | None = None

    @property
    def bandwidth(self) -> float | None:
        """GB/s of the memory."""
        if self.bus is None or self.memory_clock is None:
            return None
        return self.bus / 8 * self.memory_clock * _DOUBLE * 1e-3


def of_facts(name: str, facts: Mapping[str, str]) -> Device:
    """Reads the lines of trtexec's device information, ``SMs`` to ``80``."""
    stated = {k.lower().removeprefix("application "): v for k, v in facts.items()}
    cc = stated.get("compute capability", "")
    sms = _number(stated.get("sms", ""))
    clock = _mhz(stated.get("compute clock rate", ""))
    size = _number(stated.get("device global memory", ""))
    bus = _number(stated.get("memory bus width", ""))
    return Device(
        name,
        cc if re.fullmatch(r"\d{1,2}\.\d", cc) else None,
        int(sms) if sms and 1 <= sms <= 1024 else None,
        clock if clock and gpus.MIN_CLOCK <= clock <= gpus.MAX_CLOCK else None,
        next((s for s in _SIZES if size / 1024 <= s), None) if size else None,
        int(bus) if bus and 16 <= bus <= 16384 else None,
        _mhz(stated.get("memory clock rate", "")),
    )


def gpu_of_device(device: Device, clock: float | None = None) -> Gpu:
    """The GPU as the log describes it.

    Args:
        device: What the log says.
        clock: SM clock in MHz; the user's word, which comes first.

    Raises:
        QdqtoolError: Neither the name nor the figures say which GPU it is.
    """
    named = [g for g in gpus.answering(device.name) if device.cc in (None, g.cc)]
    if device.sms is None and len(named) != 1:
        if not named:
            gpus.find(device.name)  # raises, with the nearest names
        raise QdqtoolError(gpus.shared(device.name, [g.name for g in named]))
    if not named:
        if device.cc is None:
            gpus.find(device.name)
        return _unnamed(device, clock)
    board = min(named, key=lambda g: _distance(g, device))
    return _as_stated(board, device, clock)


def _distance(board: Gpu, device: Device) -> tuple[bool, bool, int, float]:
    """How far a board is from what the log says: boards switch SMs off and clocks down, never up."""
    size = _MEMORY.search(board.name)
    sms, clock = device.sms or board.sms, device.clock or board.clock
    return (
        sms > board.sms,
        bool(size and device.memory and int(size[1]) != device.memory),
        board.sms - sms,
        abs(clock / board.clock - 1),
    )


def _as_stated(board: Gpu, device: Device, clock: float | None) -> Gpu:
    notes = [board.note] if board.note else []
    sms = device.sms or board.sms
    if sms != board.sms:
        notes.append(f"the log says {sms} SMs where the {board.name} has {board.sms}: taken as the log says")
    said = device.clock
    if board.is_jetson and said and device.memory_clock and device.memory_clock < _WORTH_SAYING * said:
        # A Jetson's driver prints a clock of the GPU there: 1.275 GHz of both on an AGX Orin.
        notes.append(
            f"the log prints {said:.0f} MHz and {device.memory_clock:.0f} MHz; a Jetson prints the GPU's clock for the "
            "memory's, and the lower one is taken; `clock` is better"
        )
        said = device.memory_clock
    moved = device.bandwidth
    if board.is_jetson or moved is None or not board.bandwidth / _NEAR <= moved <= board.bandwidth * _NEAR:
        moved = board.bandwidth
    used = clock or said
    return replace(
        board, sms=sms, bandwidth=moved, clock=used or board.clock, power=0.0 if used else board.power,
        note="; ".join(notes),
    )  # fmt: skip


def _unnamed(device: Device, clock: float | None) -> Gpu:
    """A GPU that is in no table: rates by its compute capability, the L2 of the board nearest in size."""
    rates, note = gpus.rates_of(device.cc or "")
    used, moved = clock or device.clock, device.bandwidth
    kin = [g for g in gpus.gpus() if g.cc == rates.cc]
    near = min(kin, key=lambda g: abs(g.sms - (device.sms or 0)), default=None)
    if device.sms is None or used is None or (moved is None and near is None):
        gpus.find(device.name)  # raises
    assert device.sms is not None and used is not None
    notes = [note] if note else []
    if moved is None and near is not None:
        moved = near.bandwidth * device.sms / near.sms
        notes.append(f"the log says nothing of the memory: taken as that of the {near.name} for as many SMs")
    assert moved is not None
    return Gpu(device.name, (), device.sms, used, moved, near.l2 if near else 4.0, 0.0, rates, Evidence.SEEN,
               "the log's device information", "; ".join(notes))  # fmt: skip


def _number(text: str) -> float | None:
    match = _NUMBER.match(text)
    return float(match[1]) if match else None


def _mhz(text: str) -> float | None:
    match = _NUMBER.match(text)
    return float(match[1]) * (1 if match[2].lower() == "mhz" else 1000) if match else None
