"""What an insertion tells of each tensor and node."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.types import Json


@dataclass(slots=True)
class QuantizedTensor:
    """A tensor that got a Q/DQ pair.

    Attributes:
        tensor: Name of the tensor in the model that was given.
        scale: Float, in units of the tensor per integer step; a list for per-channel weights.
        method: How the range was chosen (``mse``, ``max``, ``percentile``, ``entropy``, ``weights-max``, ...).
        group: Index of the scale group, None for a tensor with a scale of its own.
        node: Name of the inserted QuantizeLinear.
    """

    tensor: str
    scale: float | list[float]
    method: str
    group: int | None
    node: str

    def as_json(self) -> Json:
        return {
            "tensor": self.tensor, "scale": self.scale, "method": self.method, "group": self.group,
            "node": self.node,
        }


@dataclass(frozen=True, slots=True)
class SkippedNode:
    """A node that could have been quantized and was left float, and why."""

    node: str
    reason: str

    def as_json(self) -> Json:
        return {"node": self.node, "reason": self.reason}
