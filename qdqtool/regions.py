"""What Myelin takes of a network: one kernel generator behind many layers, with the Q and DQ in it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class MyelinRegion:
    """Layers that Myelin compiles together.

    Attributes:
        trigger: The ONNX node that brings it about.
        op: That node's operator.
        nodes: ONNX nodes in it, Q and DQ apart.
        fused: Q and DQ that are fused into a kernel of another node.
        kernels: Q and DQ at its edge, each with a kernel of its own; no conversions of the engine.
        uncertain: How many of ``fused`` may be conversions instead.
    """

    trigger: str
    op: str
    nodes: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    uncertain: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "trigger": self.trigger, "op": self.op, "nodes": list(self.nodes), "fused": list(self.fused),
            "kernels": list(self.kernels), "uncertain": self.uncertain,
        }
