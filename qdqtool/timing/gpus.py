"""Table of NVIDIA GPUs with rates and sizes, and the search for a GPU by any usual name.

``gpus.tsv`` has one line for each GPU, ``rates.tsv`` the rates of one SM for each compute
capability, both with evidence and source.
"""

from __future__ import annotations

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
from qdqtool.evidence import Evidence
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.timing.power_modes import (
    ESTIMATE_OVER_MODE,
    PowerMode,
    estimate_clock_share,
    find_power_mode,
    list_power_modes,
)
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.tables import read_rows

if TYPE_CHECKING:
    from qdqtool.trt.targets import Target

_HERE = Path(__file__).parent
_SEPARATORS = re.compile(r"[\s_/()\-]+")
_BRAND_WORDS = (
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
# Patterns and their replacements, applied in this order.
_SPELLINGS = (
    (r"\b(rtx|gtx|titan)(?=\w)", r"\1 "),
    (r"(?<=\d)(ti|super|laptop|gb)\b", r" \1"),
    (r"\b(mobile|max q|notebook)\b|\blaptop gpu\b", "laptop"),
    (r"(?<=\d) gb\b", "gb"),
    (r"\b(pci ?e)\b", "pcie"),
    (rf"\b({'|'.join(_BRAND_WORDS)})\b", " "),
    (r"\bada generation\b", "ada"),
)
# Prefixes of the names of Jetsons with a DLA, by the data sheets of the modules.
_JETSONS_WITH_DLA = (
    "Jetson Xavier NX",
    "Jetson AGX Xavier",
    "Jetson Orin NX",
    "Jetson AGX Orin",
)
# A GPU name without its series, such as 3060 or 4070 ti super.
_NUMBER = re.compile(r"\d{3,4}( (ti|super|laptop|d))*")
_SERIES = ("rtx {}", "gtx {}")
_MAX_NUMBER_DISTANCE = math.log(2.0)  # maximum logarithmic distance of similar GPU numbers
_MIN_SIMILARITY = 0.8
_MAX_SUGGESTIONS = 5


def normalize_name(name: str) -> str:
    """Return a GPU's name in a standard spelling: lower case, without brand words.

    ``NVIDIA GeForce RTX3080Ti`` and ``rtx-3080 ti`` both become ``rtx 3080 ti``.
    """
    text = _SEPARATORS.sub(" ", name.lower())
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def expand_name(normalized: str) -> list[str]:
    """Return a normalized name and its likely full forms.

    The other forms omit the memory size and the form factor. If a form is a number without a
    series, forms with each known series are added.
    """
    texts = [
        normalized,
        re.sub(r"\b\d+gb\b", "", normalized),
        re.sub(r"\b\d+gb\b|\b(pcie|sxm\d?|super|hbm\w*)\b", "", normalized),
    ]
    names = [" ".join(t.split()) for t in texts if "super" not in normalized or "super" in t]
    for name in [name for name in names if _NUMBER.fullmatch(name)]:
        names += [series.format(name) for series in _SERIES]
    return list(dict.fromkeys(names))


def describe_ambiguity(name: str, boards: list[str]) -> str:
    """Return the message for a name that several GPUs share."""
    return f"'{name}' can be one of {len(boards)} GPUs; give a full name: {', '.join(boards)}"


def find_variants(name: str, gpu: str, names: list[str]) -> list[str]:
    """Return other GPUs that a name without memory size or form factor could mean.

    Example: ``A100`` could mean three GPUs.

    Args:
        name: The name as the user wrote it.
        gpu: Name of the GPU that was chosen for `name`.
        names: Names of all GPUs.
    """
    words = set(normalize_name(name).split())
    if words >= set(normalize_name(gpu).split()):
        return []
    variants = []
    for other in names:
        other_words = set(normalize_name(other).split())
        if other != gpu and words < other_words and "laptop" not in other_words - words:
            variants.append(other)
    return variants


def nearest_names(normalized: str, names: Mapping[str, str]) -> list[str]:
    """Return a few known names that are similar to an unknown name, the most similar first.

    Names with the same number come first, then names of the same series: first those whose number
    has a typing error (see :func:`_is_mistyped`), then those with near numbers. Names with a
    similar spelling come last.

    Args:
        normalized: The unknown name, normalized.
        names: Known names by their normalized names.
    """
    ranked = []
    series, number = _split_model(normalized)
    for key, name in names.items():
        other_series, other_number = _split_model(key)
        is_numbered = bool(number and other_number)
        distance = abs(math.log(number / other_number)) if is_numbered else math.inf
        similarity = difflib.SequenceMatcher(None, normalized, key).ratio()
        if distance == 0:
            ranked.append((0 if other_series == series else 1, -similarity, name))
        elif other_series == series and is_numbered and _is_mistyped(number, other_number):
            ranked.append((2, -similarity, name))
        elif other_series == series and distance <= _MAX_NUMBER_DISTANCE:
            ranked.append((3, distance, name))
        elif similarity >= _MIN_SIMILARITY and not (is_numbered and series):
            ranked.append((4, -similarity, name))
    return list(dict.fromkeys(name for *_, name in sorted(ranked)))[:_MAX_SUGGESTIONS]


def _is_mistyped(number: int, other: int) -> bool:
    """Return whether one number differs from the other by a typing error.

    The digits are in another order, one number has one additional digit, or one digit is wrong.
    The first digit is the generation, so it has to be equal if one digit is wrong.
    """
    short, long = sorted((str(number), str(other)), key=len)
    if len(long) == len(short) + 1:
        return short in {long[:k] + long[k + 1 :] for k in range(len(long))}
    if sorted(short) == sorted(long):
        return True
    wrong = [k for k, (a, b) in enumerate(zip(short, long, strict=False)) if a != b]
    return len(short) == len(long) and len(wrong) == 1 and wrong[0] > 0


def _split_model(name: str) -> tuple[str, int]:
    """Return series and model number of a normalized name.

    ``rtx 3060 ti`` gives ``("rtx", 3060)``, ``t1000`` gives ``("t", 1000)``. A name without a
    number gives the name and 0.
    """
    previous = ""
    for word in name.split():
        match = re.fullmatch(r"([a-z]*)(\d+)[a-z]*", word)
        if match and not word.endswith("gb"):
            return match[1] or previous, int(match[2])
        previous = word
    return name, 0


_GEFORCE = re.compile(r"RTX [45]0\d0(?! (?:SFF )?Ada)|GB10")
_CLOCK_OF_POWER = 0.4
_FEW_WATTS = 0.5
_POWER_WITHOUT_PRODUCTS = 0.3  # share of a board's power under load if no tensor core multiplies
_LAPTOP_CLOCK = 0.75  # typical clock of a laptop GPU divided by the clock of the desktop GPU
MIN_CLOCK, MAX_CLOCK = 50.0, 5000.0  # MHz; other numbers are probably in another unit


@dataclass(frozen=True, slots=True)
class SmRates:
    """Dense multiply-accumulates (MAC) of one SM per clock.

    Attributes:
        cc: Compute capability such as ``8.6``.
        architecture: Name such as ``Ampere``.
        fp32_pipe: FP32 MACs of the CUDA cores.
        tf32: TF32 MACs of the tensor cores; 0 without TF32.
        fp16: FP16 MACs; of the tensor cores if the SM has tensor cores.
        int8: INT8 MACs; 0 without INT8.
        fp8: FP8 MACs with FP32 accumulation on professional GPUs; 0 without FP8.
        int8_path: ``tensor``, ``dp4a`` or ``none``.
        evidence: How well the figures are known.
        source: Source of the figures.
    """

    cc: str
    architecture: str
    fp32_pipe: float
    tf32: float
    fp16: float
    int8: float
    fp8: float
    int8_path: str
    evidence: Evidence
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: Name as NVIDIA writes it, without ``NVIDIA GeForce``.
        aliases: Other names, in lower case.
        sms: Number of streaming multiprocessors.
        clock: SM clock in MHz: the boost clock, unless the user, a log or a power mode gives
            another clock.
        bandwidth: Memory bandwidth in GB/s.
        l2: L2 cache in MB.
        power: Limit of the board or module in W; 0 if unknown, or if the user or a log gives the
            clock.
        rates: Multiply-accumulates of an SM per clock.
        evidence: ``seen`` if a device listing of trtexec confirms the figures.
        source: Where the figures come from.
        notes: Notes on the choice of the GPU, and on figures that were assumed.
    """

    name: str
    aliases: tuple[str, ...]
    sms: int
    clock: float
    bandwidth: float
    l2: float
    power: float
    rates: SmRates
    evidence: Evidence
    source: str
    notes: tuple[Note, ...] = ()

    @property
    def cc(self) -> str:
        """Compute capability such as ``8.6``."""
        return self.rates.cc

    @property
    def float_type(self) -> Precision:
        """The faster float type: FP16 or FP32."""
        return Precision.FP32 if self.rates.fp16 < self.rates.fp32_pipe else Precision.FP16

    @property
    def is_jetson(self) -> bool:
        """Whether the GPU is part of a Jetson module."""
        return self.name.startswith("Jetson")

    @property
    def power_modes(self) -> list[PowerMode]:
        """Known power modes of the Jetson, the fastest first."""
        return list_power_modes(self.name)

    @property
    def has_dla(self) -> bool:
        """Whether the Jetson has a DLA: NX and AGX of Xavier and Orin; not Nano, TX2 and Thor."""
        return self.name.startswith(_JETSONS_WITH_DLA)

    @property
    def is_laptop(self) -> bool:
        """Whether the GPU is a laptop GPU."""
        return "Laptop" in self.name

    @property
    def has_tensor_cores(self) -> bool:
        """Whether the GPU has tensor cores: from Volta on, except for the GTX 16 series."""
        return float(self.rates.cc) >= 7.0 and self.rates.fp16 > 2 * self.rates.fp32_pipe

    @property
    def has_tf32(self) -> bool:
        """Whether FP32 convolutions run on tensor cores."""
        return self.rates.tf32 > self.rates.fp32_pipe

    @property
    def has_fused_conversions(self) -> bool:
        """Whether TensorRT fuses Q and DQ with their neighbors in Myelin (from Blackwell on)."""
        return float(self.rates.cc) >= 10.0

    @property
    def has_int8(self) -> bool:
        """Whether the GPU computes INT8, on tensor cores or by dp4a."""
        return self.rates.int8 > 0

    @property
    def int8_rate_over_fp16(self) -> float:
        """Rate of INT8 divided by the rate of the faster float type (FP16 or FP32)."""
        return self.mac_rate(Precision.INT8) / self.mac_rate(self.float_type)

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU has FP8: from compute capability 8.9 on."""
        return self.rates.fp8 > 0

    @property
    def is_geforce(self) -> bool:
        """Whether the GPU is a GeForce of Ada or Blackwell, or has the same cores (GB10)."""
        return _GEFORCE.match(self.name) is not None

    @property
    def fp8_rate(self) -> float:
        """FP8 MACs of one SM per clock.

        TensorRT accumulates FP8 products in FP32. GeForce GPUs do this at half the rate (measured:
        209 TFLOPS on an RTX 4080, 370 on an RTX 5090).
        """
        return self.rates.fp8 / 2 if self.is_geforce else self.rates.fp8

    def mac_rate(self, precision: Precision) -> float:
        """Return the peak rate of dense multiply-accumulates in a data type, per second.

        FP32 uses the rate of TF32 where available, as TensorRT does by default. A type that the GPU
        lacks has the rate of FP32.
        """
        r = self.rates
        rate = 0.0
        if precision in BYTES:
            rate = r.int8
        elif precision == Precision.FP8:
            rate = self.fp8_rate
        elif precision in (Precision.FP16, Precision.BF16):
            rate = r.fp16
        return (rate or max(r.fp32_pipe, r.tf32)) * self.clocks_per_second

    @property
    def clock_share_under_load(self) -> float:
        """Share of the boost clock that the board's power limit allows under load, at most 1.

        The share is below 1 on boards with few watts per SM and clock: less than half of what is
        usual for the compute capability (T4, L4, A10). The clock is about proportional to the power
        limit raised to 0.4 (MLPerf ResNet-50 on A100: 175 W against 300 W).
        """
        if not self.power or self.is_jetson or self.is_laptop:
            return 1.0
        share = self.power / self.clocks_per_second / _median_watts_per_clock(self.cc)
        return float(share**_CLOCK_OF_POWER) if share < _FEW_WATTS else 1.0

    def clock_share_at(self, utilization: float) -> float:
        """Return the share of the boost clock at a utilization of the tensor cores.

        A board whose tensor cores do not multiply is assumed to take 30 % of its power under load.

        Args:
            utilization: Share of the time in which the tensor cores multiply at their usual rate.
        """
        limit = self.clock_share_under_load
        if limit == 1.0:
            return 1.0
        power = _POWER_WITHOUT_PRODUCTS + (1 - _POWER_WITHOUT_PRODUCTS) * min(utilization, 1.0)
        return float(min(limit * power**-_CLOCK_OF_POWER, 1.0))

    @property
    def clocks_per_second(self) -> float:
        """Clocks per second, summed over all SMs."""
        return self.sms * self.clock * 1e6

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        r = self.rates
        tops = {"int8": r.int8, "fp8": self.fp8_rate, "fp16": r.fp16, "fp32": r.fp32_pipe}
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
            "power_modes": [mode.as_json() for mode in self.power_modes],
            "int8": r.int8_path,
            "tops": {
                name: round(2e-12 * rate * self.clocks_per_second, 1) for name, rate in tops.items()
            },
            "evidence": str(self.evidence),
            "source": self.source,
            "rates_source": r.source,
            "note": "; ".join(self.notes),
        }


@functools.cache
def load_rates() -> dict[str, SmRates]:
    """Return the rates of an SM by compute capability."""
    return {
        row["cc"]: SmRates(
            row["cc"],
            row["architecture"],
            float(row["fp32_pipe"]),
            float(row["tf32"]),
            float(row["fp16"]),
            float(row["int8"]),
            float(row["fp8"]),
            row["int8_path"],
            Evidence(row["evidence"]),
            row["source"],
        )
        for row in read_rows(_HERE / "rates.tsv")
    }


@functools.cache
def all_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs in the order of the table."""
    return tuple(_parse_row(row) for row in read_rows(_HERE / "gpus.tsv"))


@functools.cache
def _median_watts_per_clock(cc: str) -> float:
    shares = [
        gpu.power / gpu.clocks_per_second
        for gpu in all_gpus()
        if gpu.cc == cc and gpu.power and not gpu.is_jetson and not gpu.is_laptop
    ]
    return statistics.median(shares) if shares else math.inf


def _parse_row(row: dict[str, str]) -> Gpu:
    rates = load_rates()[row["cc"]]
    if row["tensor"] == "no":  # the GTX 16 series is Turing without tensor cores
        rates = replace(
            rates,
            tf32=0,
            fp16=128,
            int8=256,
            int8_path="dp4a",
            evidence=Evidence.DOCUMENTED,
            source="Turing whitepaper: TU116 and TU117 have FP16 units and dp4a instead of tensor "
            "cores",
        )
    return Gpu(
        name=row["name"],
        aliases=tuple(a.strip().lower() for a in row["aliases"].split(";") if a.strip()),
        sms=int(row["sms"]),
        clock=float(row["clock"]),
        bandwidth=float(row["bandwidth"]),
        l2=float(row["l2"]),
        power=float(row["power"]),
        rates=rates,
        evidence=Evidence.SEEN if row["evidence"] == "measured" else Evidence(row["evidence"]),
        source=row["source"],
    )


def find_gpu(name: str) -> Gpu:
    """Return the GPU with a name, in upper or lower case, with or without brand words.

    The order of the words does not matter (``Orin AGX``).
    The name need not contain the memory size and form factor (``A100``). A memory size or form
    factor that the table lacks is ignored (``RTX 2060 6GB``).

    Raises:
        QdqtoolError: No GPU has this name, or several GPUs share it.
    """
    if len(name) > 200 or not name.strip():
        raise QdqtoolError(
            "give a GPU's name, such as 'RTX 3060'; see 'qdqtool gpus'",
            code="missing-argument",
            parameter="gpu",
        )
    matches = match_gpus(name)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise QdqtoolError(
            describe_ambiguity(name, [gpu.name for gpu in matches]),
            code="ambiguous",
            parameter="gpu",
        )
    suggestions = suggest_names(name)
    hint = f"did you mean {', '.join(suggestions)}? Otherwise " if suggestions else ""
    raise QdqtoolError(
        f"GPU '{name}' is not in the table; {hint}see 'qdqtool gpus', or describe the GPU as in "
        "this example of an RTX 3060: `gpu='sm=8.6,sms=28,clock=1777,bandwidth=360,l2=3'`",
        code="unknown-choice",
        parameter="gpu",
    )


def suggest_names(name: str) -> list[str]:
    """Return the names of GPUs that an unknown name could stand for, the most likely first."""
    normalized = normalize_name(name)
    longer = [gpu.name for gpu in _find_longer_names(name, normalized)[:_MAX_SUGGESTIONS]]
    names = {key: gpus[0].name for key, gpus in _gpus_by_name().items()}
    return longer or _find_other_orders(normalized) or nearest_names(normalized, names)


def _find_other_orders(normalized: str) -> list[str]:
    """Return the GPUs whose words begin with the words of a name, in any order: ``orin agx 64``."""
    words = normalized.split()
    if len(words) < 2:
        return []
    names = [
        gpu.name
        for gpu in all_gpus()
        if all(any(w.startswith(word) for w in normalize_name(gpu.name).split()) for word in words)
    ]
    return names[:_MAX_SUGGESTIONS]


def match_gpus(name: str) -> list[Gpu]:
    """Return the GPUs that share a name, such as ``Orin``; empty if the name is unknown."""
    normalized, table = normalize_name(name), _gpus_by_name()
    names = expand_name(normalized)
    for text in [*names, *(_names_by_words().get(_sort_words(name), "") for name in names)]:
        if text in table:
            return list(table[text])
    if "laptop" in normalized.split()[1:]:
        words = [w for w in normalized.split() if w not in ("laptop", "with", "design")]
        desktop = table.get(" ".join(words), ())
        if len(desktop) == 1:
            return [_laptop_variant(desktop[0])]
    longer = _find_longer_names(name, normalized)
    return longer if len(longer) == 1 else []


def _laptop_variant(board: Gpu) -> Gpu:
    note = Note(
        f"the laptop GPU is not in the table: it was assumed to have the SMs of the {board.name} "
        "and a lower clock. Set `clock` if you know the GPU's clock",
        code="laptop",
    )
    return replace(
        board,
        name=f"{board.name} Laptop",
        clock=board.clock * _LAPTOP_CLOCK,
        notes=(note,),
        evidence=Evidence.ASSUMED,
    )


@functools.cache
def _gpus_by_name() -> dict[str, tuple[Gpu, ...]]:
    """Return the GPUs by normalized name and alias.

    An alias may stand for several GPUs. Names take precedence over aliases.
    """
    table: dict[str, tuple[Gpu, ...]] = {}
    for gpu in all_gpus():
        for key in dict.fromkeys(map(normalize_name, gpu.aliases)):
            table[key] = (*table.get(key, ()), gpu)
    return table | {normalize_name(gpu.name): (gpu,) for gpu in all_gpus()}


def _sort_words(name: str) -> tuple[str, ...]:
    return tuple(sorted(name.split()))


@functools.cache
def _names_by_words() -> dict[tuple[str, ...], str]:
    """Return the normalized names and aliases by their sorted words: ``Orin AGX`` is found too."""
    return {_sort_words(name): name for name in _gpus_by_name()}


def _find_longer_names(name: str, normalized: str) -> list[Gpu]:
    """Return the GPUs whose name contains the words of `name` next to each other."""
    words = set(normalized.split())
    matches = []
    for gpu in all_gpus():
        gpu_name = normalize_name(gpu.name)
        if normalized not in gpu_name.split(" laptop")[0] or not words <= set(gpu_name.split()):
            continue
        if words or name.strip().lower() in gpu.name.lower():
            matches.append(gpu)
    return matches


_LIMITS = {
    "sms": (1, 1024),
    "clock": (MIN_CLOCK, MAX_CLOCK),
    "bandwidth": (1, 50_000),
    "l2": (0.01, 4096),
}


def parse_description(text: str) -> Gpu:
    """Return a GPU that is not in the table, described by the user.

    An unknown compute capability has the rates of the next lower known capability, with a note.

    Args:
        text: Description such as ``sm=8.6,sms=28,clock=1777,bandwidth=360[,l2=3]``.

    Raises:
        QdqtoolError: A part of the description is missing, unknown or not a valid number.
    """
    parts = _split_description(text)
    rates, notes = find_rates(parts["sm"])
    numbers = {key: _parse_number(key, parts[key]) for key in _LIMITS}
    return Gpu(
        name=parts.get("name") or f"GPU of {rates.cc} with {numbers['sms']:.0f} SMs",
        aliases=(),
        sms=int(numbers["sms"]),
        clock=numbers["clock"],
        bandwidth=numbers["bandwidth"],
        l2=numbers["l2"],
        power=0.0,
        rates=rates,
        evidence=Evidence.ASSUMED,
        source="described by the user",
        notes=notes,
    )


def _split_description(text: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    advice = "give sm=, sms=, clock= (MHz), bandwidth= (GB/s) and l2= (MB)"
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip().lower()
        if not equals or key not in ("sm", "cc", *_LIMITS, "name"):
            raise QdqtoolError(
                f"`gpu`: unknown part '{part}'; {advice}", code="wrong-format", parameter="gpu"
            )
        parts["sm" if key == "cc" else key] = value.strip()
    parts["l2"] = parts.get("l2") or "4"
    missing = ", ".join(f"{key}=" for key in ("sm", *_LIMITS) if not parts.get(key))
    if missing:
        raise QdqtoolError(
            f"`gpu`: the description lacks {missing}; {advice}", code="wrong-type", parameter="gpu"
        )
    return parts


def _parse_number(key: str, text: str) -> float:
    low, high = _LIMITS[key]
    try:
        number = float(text)
    except ValueError:
        raise QdqtoolError(
            f"`gpu`: {key}= needs a number, not '{text}'", code="wrong-type", parameter="gpu"
        ) from None
    if not low <= number <= high:
        raise QdqtoolError(
            f"`gpu`: {key}={text}: give a number from {low:g} to {high:g}",
            code="out-of-range",
            parameter="gpu",
        )
    return number


def find_rates(cc: str) -> tuple[SmRates, tuple[Note, ...]]:
    """Return the rates of a compute capability (``8.6`` or ``86``).

    An unknown compute capability has the rates of the next lower known capability, with a note.

    Raises:
        QdqtoolError: The text is not a compute capability, or is below 5.3.
    """
    text = cc.strip().lower().removeprefix("sm").strip("_")
    if text.isdigit() and len(text) >= 2:
        text = f"{text[:-1]}.{text[-1]}"
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise QdqtoolError(
            f"'{cc[:40]}' is not a compute capability; give a number such as 8.6",
            code="wrong-format",
            parameter="sm",
        )
    if text in load_rates():
        return load_rates()[text], ()
    below = [rates for rates in load_rates().values() if float(rates.cc) <= float(text)]
    if not below:
        raise QdqtoolError(
            f"compute capability {text} is too low, because TensorRT 8 needs 5.3; give 5.3 or "
            "higher",
            code="out-of-range",
            parameter="sm",
        )
    nearest = max(below, key=lambda rates: float(rates.cc))
    note = Note(
        f"compute capability {text} is unknown; times are estimated with the peak rates of compute "
        f"capability {nearest.cc} ({nearest.architecture}), and are less certain",
        code="rates-of-nearest",
        nearest=nearest.cc,
    )
    return replace(nearest, cc=text), (note,)


def find_super_variant(gpu: Gpu) -> Gpu | None:
    """Return the same Jetson with Super mode, which has another name.

    None if there is none, or if the user chose a clock or power mode, or gave an ambiguous name.
    """
    if not gpu.is_jetson or gpu != find_gpu(gpu.name):
        return None
    return next((other for other in all_gpus() if other.name == f"{gpu.name} Super"), None)


def choose_gpu(name: str, clock: float | None = None, power: str | None = None) -> Gpu:
    """Return a GPU with the user's clock or power mode.

    Args:
        name: Name of the GPU, or a description (see :func:`parse_description`).
        clock: SM clock in MHz, as ``nvidia-smi`` or ``tegrastats`` show it under load.
        power: Power mode such as ``15W`` or ``MAXN``; only for a Jetson, and without ``clock``. If
            the modes of the Jetson are unknown, the clock is roughly estimated.

    Raises:
        QdqtoolError: The GPU is unknown, it lacks the power mode, a number is out of range, or the
            power has no effect.
    """
    is_text: bool = isinstance(name, str)  # False if a caller ignores the annotation
    if not is_text:
        raise QdqtoolError(
            f"`gpu`: {type(name).__name__} is not the name of a GPU. Give one name, and call the "
            "function once for each GPU",
            code="wrong-type",
            parameter="gpu",
        )
    gpu = parse_description(name) if "=" in name else find_gpu(name)
    if power is not None:
        _check_power(gpu, power, clock)
    notes = list(gpu.notes)
    others = find_variants(name, gpu.name, [g.name for g in all_gpus()]) if "=" not in name else []
    if others:
        notes.append(
            Note(
                f"'{name.strip()}' was read as {gpu.name}; the name could also mean "
                f"{', '.join(others)}",
                code="taken-as",
            )
        )
    elif "=" not in name and (size := _find_ignored_size(name, gpu)):
        notes.append(
            Note(
                f"'{name.strip()}' was read as {gpu.name}: the table of GPUs does not have this "
                f"name with {size}",
                code="size-ignored",
            )
        )
    if clock is not None:
        if not MIN_CLOCK <= clock <= MAX_CLOCK:
            raise QdqtoolError(
                f"`clock` {clock:g}: give MHz between {MIN_CLOCK:g} and {MAX_CLOCK:g}",
                code="out-of-range",
                parameter="clock",
            )
        gpu = replace(gpu, clock=clock, power=0.0)  # a clock under load includes the power limit
    elif power is not None:
        limit = _limit_to_mode if gpu.power_modes else _estimate_mode
        gpu, mode_notes = limit(gpu, power)
        notes += mode_notes
    return replace(gpu, notes=tuple(notes))


def _find_ignored_size(name: str, gpu: Gpu) -> str:
    """Return the memory size in a name if the table of GPUs does not have it; else empty."""
    normalized = normalize_name(name)
    size = re.search(r"\b(\d+)gb\b", normalized)
    if size is None or normalized in _gpus_by_name() or size[0] in normalize_name(gpu.name):
        return ""
    return f"{size[1]} GB"


def _limit_to_mode(gpu: Gpu, power: str) -> tuple[Gpu, list[Note]]:
    mode = find_power_mode(gpu.name, power)
    bandwidth = gpu.bandwidth if mode.bandwidth is None else mode.bandwidth
    limited = replace(gpu, sms=mode.sms, clock=mode.clock, bandwidth=bandwidth)
    if limited == gpu:
        return gpu, []
    sms = f"{mode.sms} of {gpu.sms}" if mode.sms < gpu.sms else f"all {gpu.sms}"
    memory = "" if mode.bandwidth is None else f" and a memory bandwidth of {bandwidth:g} GB/s"
    is_assumed = mode.evidence == Evidence.ASSUMED
    note = Note(
        f"the mode {mode.name} {'probably ' if is_assumed else ''}has {sms} SMs at up to "
        f"{mode.clock:.0f} MHz{memory}",
        code="power-mode-assumed" if is_assumed else "power-mode",
    )
    return limited, [note]


def _estimate_mode(gpu: Gpu, power: str) -> tuple[Gpu, list[Note]]:
    share = estimate_clock_share(gpu.name, gpu.power, power)
    if share is None:
        return gpu, []
    limited = replace(gpu, clock=gpu.clock * share)
    note = Note(
        f"the power modes of {gpu.name} are unknown, so a clock of {limited.clock:.0f} MHz was "
        f"estimated from {power.strip()} (the maximum is {gpu.power:g} W). 80 % of the modes of "
        f"other Jetsons are at most {ESTIMATE_OVER_MODE:g} times slower than such an estimate; set "
        "`clock` if you know the clock",
        code="clock-guessed",
    )
    return limited, [note]


def _check_power(gpu: Gpu, power: str, clock: float | None) -> None:
    """Check that a power mode changes the clock of a GPU.

    Raises:
        QdqtoolError: The power mode has no effect.
    """
    if not gpu.is_jetson:
        reason = (
            f"{gpu.name} has no power modes; give `clock`, the SM clock that nvidia-smi shows "
            "under load"
        )
    elif clock is not None:
        reason = "`clock` takes precedence; leave one of the two out"
    else:
        return
    raise QdqtoolError(
        f"`power` {power[:40]}: has no effect, because {reason}",
        code="option-without-effect",
        parameter="power",
    )


def remove_unsupported_int8(target: Target, gpu: Gpu) -> Gpu:
    """Return the GPU, without INT8 if the target does not support INT8."""
    return gpu if target.has_int8 else replace(gpu, rates=replace(gpu.rates, int8=0.0))
