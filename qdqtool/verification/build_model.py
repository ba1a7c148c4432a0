"""Builds a model on this machine and says in which type each of its convolutions runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqtool.builders import TIMEOUT
from qdqtool.builders.run import BuildResult
from qdqtool.types import TOOL_VERSION, Json, Precision

if TYPE_CHECKING:
    from qdqtool.buildlog.types import BuiltLayer
    from qdqtool.verification.convolutions import BuiltNode

SCHEMA = "qdqtool/build/1"


@dataclass(slots=True)
class BuiltModel(BuildResult):
    """A build, with its layers taken back to the model's nodes.

    Attributes:
        nodes: One row for each convolution.
        layers_path: The layer table; None when not kept.
    """

    nodes: list[BuiltNode] = field(default_factory=list)
    layers_path: Path | None = None

    def node(self, name: str) -> BuiltNode:
        """The row of that name.

        Raises:
            KeyError: There is none.
        """
        for row in self.nodes:
            if row.name == name:
                return row
        raise KeyError(name)

    def as_json(self) -> Json:
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


def build_model(
    model: str | os.PathLike[str],
    builder: str = "tensorrt-rtx",
    output: str | os.PathLike[str] | None = None,
    sm: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
    keep_engine: bool = False,
    shapes: dict[str, Sequence[Sequence[int]]] | None = None,
) -> BuiltModel:
    """Builds a model and maps the build back to it; arguments and errors as for :func:`qdqtool.builders.build`.

    Returns:
        What came out; with ``output``, the layers and convolutions are written to ``layers.json`` there.
    """
    from qdqtool import builders

    result = mapped(builders.build(model, builder, output, sm, timeout, keep_engine, shapes))
    if output is not None and result.build is not None and result.status == "built":
        from qdqtool.io.outputs import write_text

        result.layers_path = Path(output) / "layers.json"
        table: dict[str, Any] = {"builder": result.builder, "version": result.version}
        table |= inspector_json(result.build.layers, result.build.bindings, {})
        table["nodes"] = [n.as_json() for n in result.nodes]
        write_text(result.layers_path, json.dumps(table, indent=1) + "\n")
    return result


def mapped(result: BuildResult) -> BuiltModel:
    """A build with a row for each convolution, and with the model's own names in its layers."""
    read = BuiltModel(**{f.name: getattr(result, f.name) for f in fields(BuildResult)})
    model, build = result.model, result.build
    if model is None or build is None:
        return read
    if result.status == "built":
        from qdqtool.verification.convolutions import built_nodes

        read.nodes = built_nodes(model, build.layers, result.names)
    back = {result.names[n.index]: n.name for n in model.nodes if result.names[n.index] != n.name}
    if back:
        for layer in build.layers:
            layer.onnx_names = [back.get(n, n) for n in layer.onnx_names]
    return read


def inspector_json(layers: Sequence[BuiltLayer], bindings: Sequence[str], back: Mapping[str, str]) -> Json:
    """The layers in the form of TensorRT's engine inspector, ONNX names as the model has them.

    Args:
        layers: The engine's layers.
        bindings: Names of the network's inputs and outputs.
        back: Name in the build to name in the model.
    """
    def tensor(item: Any) -> dict[str, Any]:
        return {"Name": item.tensor, "Dimensions": [-1 if d is None else d for d in item.shape or ()],
                "Datatype": _INSPECTOR.get(item.precision, str(item.precision)), "Format": item.format}

    def listed(layer: BuiltLayer) -> dict[str, Any]:
        return {
            "Name": layer.name,
            "LayerType": layer.type,
            "Inputs": [tensor(t) for t in layer.inputs],
            "Constants": [tensor(t) for t in layer.constants],
            "Outputs": [tensor(t) for t in layer.outputs],
            "TacticName": layer.tactic,
            "Metadata": "".join(f"[ONNX Layer: {back.get(n, n)}]" for n in layer.onnx_names),
        }

    return {"Layers": [listed(x) for x in layers], "Bindings": list(bindings)}


_INSPECTOR = {
    Precision.INT8: "Int8", Precision.FP32: "Float", Precision.FP16: "Half", Precision.BF16: "BFloat16",
    Precision.FP8: "FP8", Precision.INT4: "Int4", Precision.INT32: "Int32", Precision.INT64: "Int64",
    Precision.BOOL: "Bool", Precision.UINT8: "UInt8",
}
