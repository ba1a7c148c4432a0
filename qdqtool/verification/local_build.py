"""Builds of models on this machine, whose convolutions are compared with a prediction."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from qdqtool import builders
from qdqtool.builders.run import BuildResult
from qdqtool.buildlog.types import BuiltLayer, BuiltTensor
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource
from qdqtool.ir.precision import Precision
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.trt.rtx.predict import build_status
from qdqtool.util.files import write_text
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields
from qdqtool.verification.convolutions import BuiltNode, find_built_nodes
from qdqtool.version import TOOL_VERSION

SCHEMA = "qdqtool/build/1"


@dataclass(slots=True)
class BuiltModel(BuildResult):
    """A build whose layers are mapped to the model's nodes.

    Attributes:
        nodes: Each convolution and matrix product as built.
        layers_path: Path of the layer table; None if no table was written.
    """

    nodes: list[BuiltNode] = field(default_factory=list)
    layers_path: Path | None = None

    def node(self, name: str) -> BuiltNode:
        """Return a convolution or matrix product by name.

        Raises:
            KeyError: No convolution or matrix product has the name.
        """
        return {row.name: row for row in reversed(self.nodes)}[name]

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        int8 = sum(n.precision == Precision.INT8 for n in self.nodes)
        fp8 = sum(n.precision == Precision.FP8 for n in self.nodes)
        paths = {"log": self.log_path, "layers": self.layers_path, "engine": self.engine_path}
        return {
            "schema": SCHEMA,
            "tool": TOOL_VERSION,
            **to_json_fields(self, "builder", "version"),
            "targets": [f"SM{s}" for s in self.targets],
            **to_json_fields(self, "status", "message"),
            "seconds": round(self.seconds, 3),
            "summary": {"convolutions": len(self.nodes), "int8": int8, "fp8": fp8},
            **to_json_fields(self, "nodes"),
            **{name: str(path) if path else None for name, path in paths.items()},
        }


def build_model(
    model: ModelSource | Model,
    builder: str = "tensorrt-rtx",
    output: str | os.PathLike[str] | None = None,
    sm: Sequence[int] | None = None,
    timeout: float = 1800.0,
    keep_engine: bool = False,
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> BuiltModel:
    """Build a model, and map the layers of the build to the model's nodes.

    Arguments and errors are those of :func:`qdqtool.builders.build`. With ``output``, the layers
    and convolutions are written to ``layers.json`` in this folder.
    """
    built = map_build_to_nodes(
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
    if output is not None and built.build is not None and built.status == "built":
        built.layers_path = Path(output) / "layers.json"
        table = {
            **to_json_fields(built, "builder", "version"),
            "targets": [f"SM{s}" for s in built.targets],
            **to_inspector_json(built.build.layers, built.build.bindings),
            **to_json_fields(built, "nodes"),
        }
        write_text(built.layers_path, json.dumps(table, indent=1) + "\n")
    return built


def map_build_to_nodes(result: BuildResult) -> BuiltModel:
    """Return a build together with the convolutions and matrix products as built.

    The layers of ``result`` are changed: their ``onnx_names`` become the names in the model.
    """
    built = BuiltModel(**{f.name: getattr(result, f.name) for f in fields(BuildResult)})
    model, build = result.model, result.build
    if model is None or build is None:
        return built
    if result.status == "built":
        built.nodes = find_built_nodes(model, build.layers, result.names)
    model_names = {result.names[n.index]: n.name for n in model.nodes}
    for layer in build.layers:
        layer.onnx_names = [model_names.get(name, name) for name in layer.onnx_names]
    return built


def to_inspector_json(layers: Sequence[BuiltLayer], bindings: Sequence[str]) -> Json:
    """Return layers in the format of TensorRT's engine inspector.

    Args:
        layers: Layers of the engine listing.
        bindings: Names of the network's inputs and outputs.
    """
    return {"Layers": [_inspector_layer(x) for x in layers], "Bindings": list(bindings)}


def _inspector_layer(layer: BuiltLayer) -> Json:
    return {
        "Name": layer.name,
        "LayerType": layer.type,
        "Inputs": [_inspector_tensor(t) for t in layer.inputs],
        "Constants": [_inspector_tensor(t) for t in layer.constants],
        "Outputs": [_inspector_tensor(t) for t in layer.outputs],
        "TacticName": layer.tactic,
        "Metadata": "".join(f"[ONNX Layer: {n}]" for n in layer.onnx_names),
    }


def _inspector_tensor(tensor: BuiltTensor) -> Json:
    return {
        "Name": tensor.tensor,
        "Dimensions": [-1 if size is None else size for size in tensor.shape or ()],
        "Datatype": _INSPECTOR_TYPES.get(tensor.precision, str(tensor.precision)),
        "Format": tensor.format,
    }


_INSPECTOR_TYPES = {
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
class ConvolutionPair:
    """A convolution as predicted and as built.

    Attributes:
        predicted: The prediction.
        built: The node as built; None if no layer of the engine shows the node's type.
    """

    predicted: ConvOutcome
    built: BuiltNode | None

    @property
    def same_precision(self) -> bool | None:
        """Whether prediction and build multiply in the same type; None without `built`."""
        return None if self.built is None else self.predicted.precision.agrees(self.built.precision)

    @property
    def agrees(self) -> bool | None:
        """Whether compute type and output type are as predicted; None without `built`.

        An output type that the build does not show counts as predicted.
        """
        if self.built is None:
            return None
        output = self.built.output
        is_same_output = output == Precision.UNKNOWN or self.predicted.output.agrees(output)
        return self.same_precision and is_same_output


def pair_convolutions(prediction: Prediction, nodes: Sequence[BuiltNode]) -> list[ConvolutionPair]:
    """Pair every predicted convolution with its built node, in graph order.

    The built node is None if the compiler removed or folded the convolution or merged it with an
    equal convolution, or if its layer does not show the type.
    """
    built = {n.index: n for n in nodes if n.precision != Precision.UNKNOWN}
    return [ConvolutionPair(c, built.get(c.index)) for c in prediction.convolutions]


def is_status_as_predicted(prediction: Prediction, result: BuiltModel) -> bool | None:
    """Return whether the build ended as predicted (built, refused, crashed); None on timeout."""
    return None if result.status == "timeout" else build_status(prediction) == result.status
