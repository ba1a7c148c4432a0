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
        possible: Conversions of the engine that may be part of it instead (TensorRT 8, where no log shows it).
        products: Matrix products in it.
        int8_products: Those of them that compute in INT8.
        softmaxes: Softmax nodes in it.
        norms: Normalizations in it, written as one node or in pieces.
    """

    trigger: str
    op: str
    nodes: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    uncertain: int = 0
    possible: list[str] = field(default_factory=list)
    products: int = 0
    int8_products: int = 0
    softmaxes: int = 0
    norms: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "trigger": self.trigger, "op": self.op, "nodes": list(self.nodes), "fused": list(self.fused),
            "kernels": list(self.kernels), "uncertain": self.uncertain, "possible": list(self.possible),
            "matrix_products": self.products, "matrix_products_int8": self.int8_products, "softmax": self.softmaxes,
            "normalizations": self.norms,
        }
