"""Builds a model on this machine, says in which type each convolution runs, and compares that with a prediction."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from qdqtool import builders
from qdqtool.builders.run import BuildResult
from qdqtool.buildlog.types import BuiltLayer
from qdqtool.trt.rtx.predict import status_of
from qdqtool.types import TOOL_VERSION, ConvOutcome, Json, Precision, Prediction
from qdqtool.util.outputs import write_text
from qdqtool.util.records import published
from qdqtool.verification.convolutions import BuiltNode, built_nodes

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
        """The row of that name; KeyError where there is none."""
        return {row.name: row for row in reversed(self.nodes)}[name]

    def as_json(self) -> Json:
        int8 = sum(n.precision == Precision.INT8 for n in self.nodes)
        paths = {"log": self.log_path, "layers": self.layers_path, "engine": self.engine_path}
        return {
            "schema": SCHEMA,
            "tool": TOOL_VERSION,
            **published(self, "builder", "version"),
            "targets": [f"SM{s}" for s in self.targets],
            **published(self, "status", "message"),
            "seconds": round(self.seconds, 3),
            "summary": {"convolutions": len(self.nodes), "int8": int8},
            **published(self, "nodes"),
            **{name: str(path) if path else None for name, path in paths.items()},
        }


def build_model(
    model: str | os.PathLike[str],
    builder: str = "tensorrt-rtx",
    output: str | os.PathLike[str] | None = None,
    sm: Sequence[int] | None = None,
    timeout: float = 1800.0,
    keep_engine: bool = False,
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> BuiltModel:
    """Build a model and map the build back to its nodes.

    Arguments and errors are those of :func:`qdqtool.builders.build`. With ``output``, the layers
    and convolutions are written to ``layers.json`` there.
    """
    result = mapped(
        builders.build(
            model,
            builder=builder,
            output=output,
            sm=sm,
            timeout=timeout,
            keep_engine=keep_engine,
            shapes=shapes,
        )
    )
    if output is not None and result.build is not None and result.status == "built":
        result.layers_path = Path(output) / "layers.json"
        table = {
            **published(result, "builder", "version"),
            "targets": [f"SM{s}" for s in result.targets],
            **inspector_json(result.build.layers, result.build.bindings),
            **published(result, "nodes"),
        }
        write_text(result.layers_path, json.dumps(table, indent=1) + "\n")
    return result


def mapped(result: BuildResult) -> BuiltModel:
    """A build with a row for each convolution, and with the model's own names in its layers."""
    read = BuiltModel(**{f.name: getattr(result, f.name) for f in fields(BuildResult)})
    model, build = result.model, result.build
    if model is None or build is None:
        return read
    if result.status == "built":
        read.nodes = built_nodes(model, build.layers, result.names)
    back = {result.names[n.index]: n.name for n in model.nodes}
    for layer in build.layers:
        layer.onnx_names = [back.get(n, n) for n in layer.onnx_names]
    return read


def inspector_json(layers: Sequence[BuiltLayer], bindings: Sequence[str]) -> Json:
    """The layers, and the names of the network's inputs and outputs, in the form of TensorRT's engine inspector."""

    def tensor(item: Any) -> dict[str, Any]:
        return {
            "Name": item.tensor,
            "Dimensions": [-1 if d is None else d for d in item.shape or ()],
            "Datatype": _INSPECTOR.get(item.precision, str(item.precision)),
            "Format": item.format,
        }

    def listed(layer: BuiltLayer) -> dict[str, Any]:
        ends = {"Inputs": layer.inputs, "Constants": layer.constants, "Outputs": layer.outputs}
        return {
            "Name": layer.name,
            "LayerType": layer.type,
            **{key: list(map(tensor, end)) for key, end in ends.items()},
            "TacticName": layer.tactic,
            "Metadata": "".join(f"[ONNX Layer: {n}]" for n in layer.onnx_names),
        }

    return {"Layers": [listed(x) for x in layers], "Bindings": list(bindings)}


_INSPECTOR = {
    Precision.INT8: "Int8",
    Precision.FP32: "Float",
    Precision.FP16: "Half",
    Precision.BF16: "BFloat16",
    Precision.FP8: "FP8",
    Precision.INT4: "Int4",
    Precision.INT32: "Int32",
    Precision.INT64: "Int64",
    Precision.BOOL: "Bool",
    Precision.UINT8: "UInt8",
}


@dataclass(frozen=True)
class Pair:
    """One convolution, predicted and built; ``built`` is None where the plan has no layer for it."""

    predicted: ConvOutcome
    built: BuiltNode | None

    @property
    def same_precision(self) -> bool | None:
        """Whether both multiply in the same type; None where the plan does not say."""
        return None if self.built is None else self.predicted.precision.agrees(self.built.precision)

    @property
    def agrees(self) -> bool | None:
        """Whether both multiply in the same type and write the same; None where the plan does not say."""
        if self.built is None:
            return None
        written = self.built.output
        return self.same_precision and (
            self.predicted.output.agrees(written) or written == Precision.UNKNOWN
        )


def compare(prediction: Prediction, result: BuiltModel) -> list[Pair]:
    """Every predicted convolution with what was built of it, in graph order.

    A convolution that the compiler removed (dead code), folded, or merged with an equal one has no layer of its own.
    """
    rows = {n.index: n for n in result.nodes if n.precision != Precision.UNKNOWN}
    return [Pair(c, rows.get(c.index)) for c in prediction.convolutions]


def status_agrees(prediction: Prediction, result: BuiltModel) -> bool | None:
    """Whether the model was predicted to build, be refused or crash as it did; None when the time was over."""
    return None if result.status == "timeout" else status_of(prediction) == result.status
