"""What a build came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqtool.types import TOOL_VERSION, Precision

if TYPE_CHECKING:
    from qdqtool.buildlog.types import Build

SCHEMA = "qdqtool/build/1"


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """What the compiler made of one Conv, ConvTranspose, Gemm or MatMul.

    Attributes:
        index: Place of the node in the ONNX graph's node list.
        name: The node's name, or its first output's name where the name is missing or not unique.
        op: ``Conv``, ``ConvTranspose``, ``Gemm`` or ``MatMul``.
        precision: The data type it multiplies in; UNKNOWN where the plan has no layer of its own for it (removed, or
            merged with an equal node).
        inputs: Types that its layer reads: the data input, and the second one where that is no constant.
        output: Type that its layer writes.
        layer: The engine layer's name; None where there is none.
    """

    index: int
    name: str
    op: str
    precision: Precision
    inputs: tuple[Precision, ...] = ()
    output: Precision = Precision.UNKNOWN
    layer: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "name": self.name,
            "op": self.op,
            "precision": str(self.precision),
            "inputs": [str(p) for p in self.inputs],
            "output": str(self.output),
            "layer": self.layer,
        }


@dataclass(slots=True)
class BuildResult:
    """One build.

    Attributes:
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        status: ``built``; ``refused`` (the parser or the builder says no); ``crashed`` (the compiler died);
            ``timeout``.
        version: The compiler's version, empty when not known.
        targets: Compute capabilities built for (TensorRT-RTX).
        message: The compiler's own words for a refusal, one line; empty for ``built``.
        errors: All error lines, in order.
        seconds: Wall time of the child process.
        nodes: One row for each convolution.
        build: The log, read; None when nothing was written.
        log: The verbose log as text, where it was not kept on disk.
        log_path: The verbose log; None when not kept.
        layers_path: The layer table; None when not kept.
        engine_path: The engine; None when not kept.
    """

    builder: str
    status: str
    version: str = ""
    targets: tuple[int, ...] = ()
    message: str = ""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    nodes: list[BuiltNode] = field(default_factory=list)
    build: Build | None = None
    log_path: Path | None = None
    layers_path: Path | None = None
    engine_path: Path | None = None

    def node(self, name: str) -> BuiltNode:
        """The row of that name.

        Raises:
            KeyError: There is none.
        """
        for row in self.nodes:
            if row.name == name:
                return row
        raise KeyError(name)

    def as_json(self) -> dict[str, Any]:
        int8 = sum(n.precision == Precision.INT8 for n in self.nodes)
        return {
            "schema": SCHEMA,
            "tool": TOOL_VERSION,
            "builder": self.builder,
            "version": self.version,
            "targets": [f"SM{s}" for s in self.targets],
            "status": self.status,
            "message": self.message,
            "seconds": round(self.seconds, 3),
            "summary": {"convolutions": len(self.nodes), "int8": int8},
            "nodes": [n.as_json() for n in self.nodes],
            "log": str(self.log_path) if self.log_path else None,
            "layers": str(self.layers_path) if self.layers_path else None,
            "engine": str(self.engine_path) if self.engine_path else None,
        }
