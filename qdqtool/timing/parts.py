"""What an estimate of time is made of: other versions of the network, kernels, fixes."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.types import Json, Precision

PAYS = 1.02  # gain below which INT8 is not worth building


@dataclass(slots=True)
class FloatTime:
    """The same network without its Q/DQ; ``fp32_ms`` beside it where its floats are FP32 as it is built."""

    precision: Precision
    total_ms: float
    fp32_ms: float | None = None

    def as_json(self) -> Json:
        single = None if self.fp32_ms is None else rounded(self.fp32_ms)
        return {"precision": str(self.precision), "total_ms": rounded(self.total_ms), "fp32_ms": single}


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast the network with Q/DQ is as the same in float.

    ``low`` to ``high`` holds 80 % of measured gains; ``right`` of ``pairs`` is how often the faster of the two was
    named rightly for networks and GPUs that the fit had not seen, where they differ by more than 5 %.
    """

    low: float
    value: float
    high: float
    precision: Precision
    right: int
    pairs: int

    @property
    def faster(self) -> str:
        return "INT8" if self.value > 1 else str(self.precision)

    @property
    def is_sure(self) -> bool:
        """Whether the whole range lies on one side."""
        return self.low > 1 or self.high < 1

    def as_json(self) -> Json:
        return {
            "low": round(self.low, 3),
            "value": round(self.value, 3),
            "high": round(self.high, 3),
            "faster": self.faster,
            "signs_right": self.right,
            "signs_measured": self.pairs,
        }


@dataclass(slots=True)
class Kernel:
    """One kernel of the engine, for the list of the slowest.

    ``ms`` is what a profile would show; ``title`` is the node that people know the layer by.
    """

    name: str
    kind: str
    ms: float
    title: str = ""

    def as_json(self) -> Json:
        return {"name": self.name, "kind": self.kind, "ms": rounded(self.ms)}


@dataclass(slots=True)
class FixTime:
    """What the fixes of one kind save together, by simulating the fixed network.

    ``codes`` are the findings that they remove, ``nodes`` where.
    """

    codes: list[str]
    nodes: list[str]
    saves_ms: float

    def as_json(self) -> Json:
        return {"codes": list(self.codes), "nodes": list(self.nodes), "saves_ms": rounded(self.saves_ms)}


@dataclass(slots=True)
class BestTime:
    """A float network with Q/DQ wherever ``insert`` would put it."""

    total_ms: float
    gain: float
    int8: int
    convolutions: int
    conversions: int | None

    def as_json(self) -> Json:
        return {
            "total_ms": rounded(self.total_ms),
            "gain": round(self.gain, 3),
            "int8": self.int8,
            "convolutions": self.convolutions,
            "conversions": self.conversions,
        }


def rounded(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")
