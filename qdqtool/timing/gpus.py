"""NVIDIA GPUs as data: what they compute and move in a second, found by any usual name.

``gpus.tsv`` has one line for each GPU, ``rates.tsv`` what one SM does per clock for each compute capability, both with
evidence and source.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqtool.errors import QdqtoolError
from qdqtool.types import BYTES, Evidence, Json, Precision
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import said
from qdqtool.util.tables import read_rows

if TYPE_CHECKING:
    from qdqtool.trt.targets import Target

_HERE = Path(__file__).parent
_SPLIT = re.compile(r"[\s_/()\-]+")
_MAKERS = (
    "nvidia",
    "geforce",
    "quadro",
    "tesla",
    "jetson",
    "gpu",
    "graphics",
    "module",
    "developer",
    "dev",
    "kit",
    "corporation",
    "tegra",
    "nvgpu",
)
_NUMBER = re.compile(
    r"\d{3,4}( (ti|super|laptop|d))*"
)  # a name without its series: 3060, 4070 ti super
_SERIES = ("rtx {}", "gtx {}")
_FAR = math.log(2.0)  # numbers further apart name GPUs that are not alike
_ALIKE = 0.8
_LISTED = 5


def spelled_alike(name: str) -> str:
    """A name in one spelling: ``NVIDIA GeForce RTX3080Ti`` and ``rtx-3080 ti`` are both ``rtx 3080 ti``."""
    text = _SPLIT.sub(" ", name.lower())
    text = re.sub(r"\b(rtx|gtx|titan)(?=\w)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super|laptop|gb)\b", r" \1", text)
    text = re.sub(r"\b(mobile|max q|notebook)\b|\blaptop gpu\b", "laptop", text)
    text = re.sub(r"(?<=\d) gb\b", "gb", text)
    text = re.sub(r"\b(pci ?e)\b", "pcie", text)
    text = re.sub(rf"\b({'|'.join(_MAKERS)})\b", " ", text)
    text = re.sub(r"\bada generation\b", "ada", text)
    return " ".join(text.split())


def spellings(wanted: str) -> list[str]:
    """What a name in :func:`spelled_alike` may stand for: without memory sizes and form factors, with its series."""
    tries = [
        wanted,
        re.sub(r"\b\d+gb\b", "", wanted),
        re.sub(r"\b\d+gb\b|\b(pcie|sxm\d?|super|hbm\w*)\b", "", wanted),
    ]
    found = [" ".join(t.split()) for t in tries if "super" not in wanted or "super" in t]
    found += [
        series.format(text) for text in found if _NUMBER.fullmatch(text) for series in _SERIES
    ]
    return list(dict.fromkeys(found))


def shared(name: str, boards: list[str]) -> str:
    """What to say of a name that several GPUs share."""
    return f"'{name}' is the name of {len(boards)} GPUs: {', '.join(boards)}; give one of these"


def variants(name: str, taken: str, names: list[str]) -> list[str]:
    """Other GPUs that a name without memory size or form factor could have meant: ``A100`` is three."""
    parts = set(spelled_alike(name).split())
    if parts >= set(spelled_alike(taken).split()):
        return []
    spelled = {other: set(spelled_alike(other).split()) for other in names if other != taken}
    return [other for other, own in spelled.items() if parts < own and "laptop" not in own - parts]


def nearest_names(wanted: str, names: Mapping[str, str]) -> list[str]:
    """Names that come nearest: of the same number, of the same series with a near number, or spelled alike.

    ``wanted`` and the keys of ``names`` are in :func:`spelled_alike`.
    """
    ranked = []
    series, number = _model(wanted)
    for key, name in names.items():
        other, value = _model(key)
        far = abs(math.log(number / value)) if number and value else math.inf
        alike = difflib.SequenceMatcher(None, wanted, key).ratio()
        if far == 0:
            ranked.append((0 if other == series else 1, -alike, name))
        elif other == series and far <= _FAR:
            ranked.append((2, far, name))
        elif alike >= _ALIKE and not (number and value and series):
            ranked.append((3, -alike, name))
    return list(dict.fromkeys(name for *_, name in sorted(ranked)))[:_LISTED]


def _model(name: str) -> tuple[str, int]:
    """Series and number of a name: ``rtx 3060 ti`` is ``("rtx", 3060)``, ``t1000`` is ``("t", 1000)``."""
    before = ""
    for word in name.split():
        match = re.fullmatch(r"([a-z]*)(\d+)[a-z]*", word)
        if match and not word.endswith("gb"):
            return match[1] or before, int(match[2])
        before = word
    return name, 0


_CLOCK_OF_POWER = 0.4
_FEW_WATTS = 0.5
_LAPTOP = 0.75  # clock of a laptop part over the desktop part's, as in the pairs of the table
MIN_CLOCK, MAX_CLOCK = 50.0, 5000.0  # MHz; anything else is a slip (GHz, kHz)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one SM does per clock, in dense multiply-accumulates (MAC)."""

    cc: str  # compute capability, ``8.6``
    architecture: str  # ``Ampere``, ...
    fp32_pipe: float  # FP32 MACs of the CUDA cores
    tf32: float  # TF32 MACs of the tensor cores, 0 for none
    fp16: float  # FP16 MACs, tensor cores where there are any
    int8: float  # INT8 MACs; 0 where the GPU has no INT8
    int8_path: str  # ``tensor``, ``dp4a`` or ``none``
    evidence: Evidence
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    name: str  # as NVIDIA calls it, without ``NVIDIA GeForce``
    aliases: tuple[str, ...]  # other names, in lower case
    sms: int  # streaming multiprocessors
    clock: float  # SM clock in MHz; boost unless the user gave another
    bandwidth: float  # of the memory, in GB/s
    l2: float  # l2 cache in MB
    power: float  # board or module limit in W; 0 where it does not matter (a clock was given) or is not known
    rates: Rates  # what an SM does per clock
    evidence: Evidence  # ``seen`` where a device listing of trtexec confirms the line
    source: str  # where the figures come from
    notes: tuple[
        Note, ...
    ] = ()  # what was assumed to make this entry, for a GPU that is not in the table

    @property
    def cc(self) -> str:
        return self.rates.cc

    @property
    def plain(self) -> Precision:
        """What a float is on it: FP16 where that is not slower."""
        return Precision.FP32 if self.rates.fp16 < self.rates.fp32_pipe else Precision.FP16

    @property
    def is_jetson(self) -> bool:
        return self.name.startswith("Jetson")

    @property
    def has_tensor_cores(self) -> bool:
        """From Volta on, but for the GTX 16 series."""
        return float(self.rates.cc) >= 7.0 and self.rates.fp16 > 2 * self.rates.fp32_pipe

    @property
    def has_tf32(self) -> bool:
        """Whether FP32 convolutions run on tensor cores."""
        return self.rates.tf32 > self.rates.fp32_pipe

    @property
    def fuses_conversions(self) -> bool:
        """Whether TensorRT runs whole networks in Myelin, which joins Q and DQ with their neighbours: Blackwell."""
        return float(self.rates.cc) >= 10.0

    @property
    def has_int8(self) -> bool:
        return self.rates.int8 > 0

    def mac_rate(self, precision: Precision) -> float:
        """Dense multiply-accumulates per second at the peak in a data type; FP32 counts TF32 (TensorRT's default)."""
        r = self.rates
        narrow = (
            r.int8
            if precision in (*BYTES, Precision.FP8)
            else (r.fp16 if precision in (Precision.FP16, Precision.BF16) else 0.0)
        )
        return (
            narrow or max(r.fp32_pipe, r.tf32)
        ) * self.per_second  # without INT8 such a layer runs in FP32

    @property
    def sustained(self) -> float:
        """Share of the boost clock that the board's power surely allows: 1, or less on boards of few watts.

        Those have less than half the watts per SM and clock of the usual board of their compute capability (T4, L4,
        A10). Clock goes with about the 0.4th power of the limit (MLPerf ResNet-50 on A100: 175 W against 300 W).
        """
        if not self.power or self.is_jetson or "Laptop" in self.name:
            return 1.0
        share = self.power / self.per_second / _usual_watts(self.cc)
        return float(share**_CLOCK_OF_POWER) if share < _FEW_WATTS else 1.0

    @property
    def per_second(self) -> float:
        """SM clocks per second: SMs x clock."""
        return self.sms * self.clock * 1e6

    def as_json(self) -> Json:
        r = self.rates
        tops = {"int8": r.int8, "fp16": r.fp16, "fp32": r.fp32_pipe}
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "architecture": r.architecture,
            "compute_capability": r.cc,
            "sms": self.sms,
            "clock_mhz": self.clock,
            "memory_gb_per_s": self.bandwidth,
            "l2_mb": self.l2,
            "power_w": self.power,
            "int8": r.int8_path,
            "tops": {name: round(2e-12 * rate * self.per_second, 1) for name, rate in tops.items()},
            "evidence": str(self.evidence),
            "source": self.source,
            "rates_source": r.source,
            "note": "; ".join(self.notes),
        }


@functools.cache
def rates() -> dict[str, Rates]:
    """Rates by compute capability."""
    return {
        row["cc"]: Rates(
            row["cc"],
            row["architecture"],
            float(row["fp32_pipe"]),
            float(row["tf32"]),
            float(row["fp16"]),
            float(row["int8"]),
            row["int8_path"],
            Evidence(row["evidence"]),
            row["source"],
        )
        for row in read_rows(_HERE / "rates.tsv")
    }


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the table, in its order."""
    return tuple(_gpu(row) for row in read_rows(_HERE / "gpus.tsv"))


@functools.cache
def _usual_watts(cc: str) -> float:
    """Watts per SM clock of a second, the median over the boards of a compute capability."""
    boards = [
        g for g in gpus() if g.cc == cc and g.power and not g.is_jetson and "Laptop" not in g.name
    ]
    return statistics.median(g.power / g.per_second for g in boards) if boards else math.inf


def _gpu(row: dict[str, str]) -> Gpu:
    found = rates()[row["cc"]]
    if row["tensor"] == "no":  # GTX 16: Turing without tensor cores
        found = replace(
            found,
            tf32=0,
            fp16=128,
            int8=256,
            int8_path="dp4a",
            evidence=Evidence.DOCUMENTED,
            source="Turing whitepaper: TU116 and TU117 have FP16 units and dp4a instead of tensor cores",
        )
    evidence = Evidence.SEEN if row["evidence"] == "measured" else Evidence(row["evidence"])
    aliases = tuple(a.strip().lower() for a in row["aliases"].split(";") if a.strip())
    return Gpu(
        row["name"],
        aliases,
        int(row["sms"]),
        float(row["clock"]),
        float(row["bandwidth"]),
        float(row["l2"]),
        float(row["power"]),
        found,
        evidence,
        row["source"],
    )


def find(name: str) -> Gpu:
    """The GPU of that name, in any case and with or without the maker's words.

    Memory sizes and form factors may be left out (``A100``), and unknown ones are ignored (``RTX 2060 6GB``).

    Raises:
        QdqtoolError: No GPU, or several different ones, answer to the name.
    """
    if len(name) > 200 or not name.strip():
        raise QdqtoolError(
            "give a GPU's name, such as 'RTX 3060'; see 'qdqtool gpus'",
            code="missing-argument",
            parameter="gpu",
        )
    found = answering(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise QdqtoolError(shared(name, [g.name for g in found]), code="ambiguous", parameter="gpu")
    near = near_names(name)
    hint = said("; did you mean {near:joined , }?", near=near) if near else ""
    raise QdqtoolError(
        said(
            "GPU '{name}' is not in the table{hint}; see 'qdqtool gpus', or describe it: "
            "{`gpu`:sm=8.6,sms=28,clock=1777,bandwidth=360,l2=3}",
            name=name,
            hint=hint,
        ),
        code="unknown-choice",
        parameter="gpu",
    )


def near_names(name: str) -> list[str]:
    """Names that an unknown one could have meant."""
    wanted = spelled_alike(name)
    known = {key: found[0].name for key, found in _by_words().items()}
    return [g.name for g in _longer(name, wanted)[:_LISTED]] or nearest_names(wanted, known)


def answering(name: str) -> list[Gpu]:
    """The GPUs that a name stands for: one, several that share it (``Orin``), or none."""
    wanted, table = spelled_alike(name), _by_words()
    for text in spellings(wanted):
        if text in table:
            return list(table[text])
    if wanted.endswith(" laptop") or " laptop " in wanted:
        desktop = table.get(
            " ".join(w for w in wanted.split() if w not in ("laptop", "with", "design")), ()
        )
        if len(desktop) == 1:
            board = desktop[0]
            return [
                replace(
                    board,
                    name=f"{board.name} Laptop",
                    clock=board.clock * _LAPTOP,
                    notes=(Remark.LAPTOP(board=board.name),),
                    evidence=Evidence.ASSUMED,
                )
            ]
    longer = _longer(name, wanted)
    return longer if len(longer) == 1 else []


@functools.cache
def _by_words() -> dict[str, tuple[Gpu, ...]]:
    """GPUs by their names and aliases in :func:`spelled_alike`; a GPU's own name comes before another's alias."""
    table: dict[str, tuple[Gpu, ...]] = {}
    for gpu in gpus():
        for key in dict.fromkeys(map(spelled_alike, gpu.aliases)):
            table[key] = (*table.get(key, ()), gpu)
    return table | {spelled_alike(gpu.name): (gpu,) for gpu in gpus()}


def _longer(name: str, wanted: str) -> list[Gpu]:
    """GPUs in whose name the wanted one is contained, word by word."""
    parts = set(wanted.split())
    return [
        gpu
        for gpu in gpus()
        if wanted in (own := spelled_alike(gpu.name)).split(" laptop")[0]
        and parts <= set(own.split())
        and (parts or name.strip().lower() in gpu.name.lower())
    ]


def of_description(text: str) -> Gpu:
    """A GPU that is not in the table, from ``sm=8.6,sms=28,clock=1777,bandwidth=360[,l2=3]``.

    An unknown compute capability takes the rates of the nearest known one.

    Raises:
        QdqtoolError: A part is missing or no sensible number.
    """
    parts: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip().lower() not in (
            "sm",
            "cc",
            "sms",
            "clock",
            "bandwidth",
            "l2",
            "name",
        ):
            raise QdqtoolError(
                said(
                    "{`gpu`}: '{part}' is none of sm=, sms=, clock= (MHz), bandwidth= (GB/s), l2= "
                    "(MB)",
                    part=part,
                ),
                code="wrong-format",
                parameter="gpu",
            )
        parts[key.strip().lower()] = value.strip()
    known, notes = rates_of(parts.get("sm", parts.get("cc", "")))
    numbers = {}
    limits = {
        "sms": (1, 1024),
        "clock": (MIN_CLOCK, MAX_CLOCK),
        "bandwidth": (1, 50_000),
        "l2": (0.01, 4096),
    }
    for key, (low, high) in limits.items():
        given = parts.get(key) or ("4" if key == "l2" else "")
        try:
            numbers[key] = float(given)
        except ValueError:
            raise QdqtoolError(
                said("{`gpu`}: {key}= needs a number, not '{given}'", key=key, given=given),
                code="wrong-type",
                parameter="gpu",
            ) from None
        if not low <= numbers[key] <= high:
            raise QdqtoolError(
                said(
                    "{`gpu`}: {key}={given} is outside {low:g} to {high:g}",
                    key=key,
                    given=given,
                    low=low,
                    high=high,
                ),
                code="out-of-range",
                parameter="gpu",
            )
    return Gpu(
        parts.get("name") or f"GPU of {known.cc} with {numbers['sms']:.0f} SMs",
        (),
        int(numbers["sms"]),
        numbers["clock"],
        numbers["bandwidth"],
        numbers["l2"],
        0.0,
        known,
        Evidence.ASSUMED,
        "described by the user",
        notes,
    )


def rates_of(cc: str) -> tuple[Rates, tuple[Note, ...]]:
    """Rates of a compute capability (``8.6`` or ``86``), of the nearest one below where it is not known, with a note.

    Raises:
        QdqtoolError: The text is not a compute capability, or one below 5.3.
    """
    text = cc.strip().lower().removeprefix("sm").strip("_")
    if text.isdigit() and len(text) >= 2:
        text = f"{text[:-1]}.{text[-1]}"
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise QdqtoolError(
            f"'{cc[:40]}' is not a compute capability; give one like 8.6",
            code="wrong-format",
            parameter="sm",
        )
    if text in rates():
        return rates()[text], ()
    number = float(text)
    below = [r for r in rates().values() if float(r.cc) <= number]
    if not below:
        raise QdqtoolError(
            f"compute capability {text}: TensorRT 8 starts at 5.3",
            code="out-of-range",
            parameter="sm",
        )
    nearest = max(below, key=lambda r: float(r.cc))
    note = Remark.RATES_OF_NEAREST(cc=text, nearest=nearest.cc, architecture=nearest.architecture)
    return replace(nearest, cc=text), (note,)


def chosen(name: str, clock: float | None = None, power: str | None = None) -> Gpu:
    """The GPU as the user runs it, by its name or a description (see :func:`of_description`).

    ``clock`` is the SM clock in MHz, as ``nvidia-smi`` or ``tegrastats`` show it under load. ``power`` is ``MAXN``, or
    a limit in W; without ``clock`` the clock is then scaled (a rough guess, and said so).

    Raises:
        QdqtoolError: The GPU is not known, or a number makes no sense.
    """
    gpu = of_description(name) if "=" in name else find(name)
    notes = list(gpu.notes)
    if "=" not in name and (others := variants(name, gpu.name, [g.name for g in gpus()])):
        notes.append(Remark.TAKEN_AS(name=name.strip(), gpu=gpu.name, others=others))
    if power is not None and clock is None:
        limit = _watts(power)
        if limit is not None and limit < gpu.power:
            # Dynamic power goes with f V^2 and V with f between its ends: f with the square root in between.
            share = max(0.3, (limit / gpu.power) ** (0.6 if gpu.is_jetson else _CLOCK_OF_POWER))
            gpu = replace(gpu, clock=gpu.clock * share)
            notes.append(Remark.CLOCK_GUESSED(clock=gpu.clock, limit=limit, watts=gpu.power))
    if clock is not None:
        if not MIN_CLOCK <= clock <= MAX_CLOCK:
            raise QdqtoolError(
                said(
                    "{`clock`} {clock:g}: give MHz between {least:g} and {most:g}",
                    clock=clock,
                    least=MIN_CLOCK,
                    most=MAX_CLOCK,
                ),
                code="out-of-range",
                parameter="clock",
            )
        gpu = replace(gpu, clock=clock, power=0.0)  # under load, whatever the board's limit
    return replace(gpu, notes=tuple(notes))


def used_by(target: Target, gpu: Gpu) -> Gpu:
    """The GPU with what a TensorRT has for it."""
    return gpu if target.has_int8 else replace(gpu, rates=replace(gpu.rates, int8=0.0))


def _watts(power: str) -> float | None:
    text = power.strip().lower()
    with contextlib.suppress(ValueError):
        if text.startswith("max") or 1 <= float(text.removesuffix("w")) <= 2000:
            return None if text.startswith("max") else float(text.removesuffix("w"))
    raise QdqtoolError(
        said("{`power`} {power}: give watts (15W) or MAXN", power=power[:40]),
        code="wrong-format",
        parameter="power",
    )
