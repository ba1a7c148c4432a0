"""Export a network between passes as ONNX, to compare its numbers before and after passes."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind
from qdqtool.ir.precision import Precision
from qdqtool.trt.importer import build
from qdqtool.trt.layers import Layer, Tensor
from qdqtool.trt.network import Network
from tests.insertion.nets import run


class Exporter:
    """Exports a network after passes that move, copy and remove Q and DQ.

    Create the exporter before the passes run.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.network: Network = build(model)
        self._nodes = {layer.id: self._node(layer) for layer in self.network.layers.values()}
        self._slots = {layer.id: self._slots_of(layer) for layer in self.network.layers.values()}
        self._parts = {layer.id: self._part(layer) for layer in self.network.layers.values()}
        self._names: dict[int, str] = {}

    def _node(self, layer: Layer) -> Node | None:
        return self.model.node(layer.nodes[0]) if layer.nodes else None

    def _part(self, layer: Layer) -> int:
        node = self._nodes[layer.id]
        return (
            node.outputs.index(layer.out.name)
            if node is not None and layer.out.name in node.outputs
            else 0
        )

    def _slots_of(self, layer: Layer) -> list[int]:
        node = self._nodes[layer.id]
        if node is None:
            return []
        slots: list[int] = []
        for tensor in layer.inputs:
            named = [i for i, n in enumerate(node.inputs) if n == tensor.name and i not in slots]
            slots.append(
                named[0] if named else next(i for i in range(len(node.inputs)) if i not in slots)
            )
        return slots

    def export(self) -> onnx.ModelProto:
        proto = self.model.proto
        self._names = {id(t): t.name for t in self.network.inputs}
        self._names.update(
            {id(t): n for t, n in zip(self.network.outputs, self.model.outputs, strict=True)}
        )
        self.nodes = [node for node in proto.graph.node if node.op_type == "Constant"]
        self.initializers = list(proto.graph.initializer)
        for layer in self.network.breadth_first():
            self._layer(layer)
        graph = onnx.helper.make_graph(
            self.nodes, "g", list(proto.graph.input), list(proto.graph.output), self.initializers
        )
        return onnx.helper.make_model(
            graph, opset_imports=list(proto.opset_import), ir_version=proto.ir_version
        )

    def _name(self, tensor: Tensor) -> str:
        return self._names.setdefault(id(tensor), f"t{len(self._names)}")

    def _layer(self, layer: Layer) -> None:
        inputs = [self._name(t) for t in layer.inputs]
        outputs = [self._name(t) for t in layer.outputs]
        if layer.kind == LayerKind.CONSTANT and self._nodes.get(layer.id) is None:
            self.nodes.append(onnx.helper.make_node("Identity", [layer.name], outputs))
        elif layer.kind in (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE):
            self._quantizer(layer, inputs[0], outputs[0])
        elif self._nodes.get(layer.id) is None:
            # A layer that the parser added: the sum of a Gemm, or a shuffle, which broadcasting replaces.
            self.nodes.append(
                onnx.helper.make_node("Add" if len(inputs) == 2 else "Identity", inputs, outputs)
            )
        else:
            self._copy(layer, inputs, outputs)

    def _copy(self, layer: Layer, inputs: list[str], outputs: list[str]) -> None:
        node, copy = self._nodes[layer.id], onnx.NodeProto()
        copy.CopyFrom(node.proto)
        copy.name = ""
        if node.op == "Dropout":  # onnxruntime has no Dropout of integers
            copy.op_type = "Identity"
            del copy.attribute[:]
        if node.op == "GlobalMaxPool":  # onnxruntime has no GlobalMaxPool of integers
            copy.op_type = "ReduceMax"
            axes = range(2, len(layer.data.shape or ()))
            copy.attribute.append(onnx.helper.make_attribute("axes", list(axes)))
        for slot, name in zip(self._slots[layer.id], inputs, strict=True):
            copy.input[slot] = name
        if node.op == "Gemm" and len(layer.inputs) == 2 and len(copy.input) == 3:
            del copy.input[2]
        if node.op == "Split":
            copy.output[:] = [
                outputs[0] if i == self._parts[layer.id] else f"{outputs[0]}:unused{i}"
                for i in range(len(copy.output))
            ]
        else:
            copy.output[:] = outputs
        self.nodes.append(copy)

    def _quantizer(self, layer: Layer, source: str, target: str) -> None:
        quant, stem = layer.quant, f"{target}:{layer.name}"
        shape = quant.scale_shape
        scale = quant.scale.astype(np.float32).reshape(shape if shape is not None else (-1,))
        zero = np.broadcast_to(quant.zero_point, quant.scale.shape).astype(
            {Precision.INT8: np.int8, Precision.UINT8: np.uint8}[quant.precision]
        )
        self.initializers += [
            onnx.numpy_helper.from_array(scale, f"{stem}.s"),
            onnx.numpy_helper.from_array(zero.reshape(scale.shape), f"{stem}.z"),
        ]
        attributes: dict[str, Any] = {} if quant.axis is None else {"axis": quant.axis}
        op = "QuantizeLinear" if layer.kind == LayerKind.QUANTIZE else "DequantizeLinear"
        self.nodes.append(
            onnx.helper.make_node(op, [source, f"{stem}.s", f"{stem}.z"], [target], **attributes)
        )


def evaluate(model: onnx.ModelProto, seed: int = 0) -> list[npt.NDArray[Any]]:
    random, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        feeds[value.name] = random.normal(0, 3, dims).astype(np.float32)
    return run(model, feeds)
