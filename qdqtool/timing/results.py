"""Parts of a time estimate: the float network, the gain, kernels, and savings of fixes."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.ir.precision import Precision
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields


@dataclass(slots=True)
class FloatTime:
    """Time of the same network without Q/DQ.

    Attributes:
        precision: Float type of the network.
        total_ms: Milliseconds.
        fp32_ms: Milliseconds in FP32, if the file or the options ask for FP32 but FP16 is faster.
            None otherwise.
    """

    precision: Precision
    total_ms: float
    fp32_ms: float | None = None

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "precision": str(self.precision),
            "total_ms": round_significant(self.total_ms),
            "fp32_ms": None if self.fp32_ms is None else round_significant(self.fp32_ms),
        }


@dataclass(frozen=True, slots=True)
class SpeedGain:
    """Time of the float network divided by the time of the network with Q/DQ.

    Attributes:
        low: Lower end of the range that contains 80 % of measured gains.
        value: The gain.
        high: Upper end of that range.
        precision: Type of the float network.
        right: Number of measured pairs whose faster type the time model predicted correctly,
            without a fit to the network and GPU of the pair.
        pairs: Number of measured pairs of INT8 and FP16 times that differ by more than 5 %.
        quantized: Type of the network with Q/DQ: INT8 or FP8.
    """

    low: float
    value: float
    high: float
    precision: Precision
    right: int
    pairs: int
    quantized: Precision = Precision.INT8

    @property
    def is_sure(self) -> bool:
        """Whether the whole range lies on one side of 1."""
        return self.low > 1 or self.high < 1

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "low": round(self.low, 3),
            "value": round(self.value, 3),
            "high": round(self.high, 3),
            "faster": str(self.quantized) if self.value > 1 else str(self.precision),
            "signs_right": self.right,
            "signs_measured": self.pairs,
        }


@dataclass(slots=True)
class KernelTime:
    """Time of one kernel of the engine.

    Attributes:
        name: Name of the layer.
        kind: Kind of the work (see :mod:`qdqtool.timing.work`).
        ms: Milliseconds as in a profile.
        title: ONNX node of the layer, or the layer's name.
    """

    name: str
    kind: str
    ms: float
    title: str = ""

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {"name": self.name, "kind": self.kind, "ms": round_significant(self.ms)}


@dataclass(slots=True)
class FixTime:
    """Time that all fixes of one kind save together, from a simulation of the fixed network.

    Attributes:
        codes: Codes of the findings that the fixes remove.
        nodes: Names of the nodes of these findings.
        saves_ms: Milliseconds.
    """

    codes: list[str]
    nodes: list[str]
    saves_ms: float

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "codes": list(self.codes),
            "nodes": list(self.nodes),
            "saves_ms": round_significant(self.saves_ms),
        }


@dataclass(slots=True)
class BestTime:
    """Time of a float network with the Q/DQ that ``insert`` would write.

    Attributes:
        total_ms: Milliseconds.
        gain: Time of the float network divided by this time.
        int8: Number of convolutions and products in INT8.
        fp8: Number of convolutions and products in FP8.
        convolutions: Number of convolutions and products.
        conversions: Number of remaining Q and DQ; None if the target does not count them.
    """

    total_ms: float
    gain: float
    int8: int
    fp8: int
    convolutions: int
    conversions: int | None

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "total_ms": round_significant(self.total_ms),
            "gain": round(self.gain, 3),
            **to_json_fields(self, "int8", "fp8", "convolutions", "conversions"),
        }


def round_significant(value: float) -> float:
    """Return the value with four significant digits."""
    return float(f"{value:.4g}")
