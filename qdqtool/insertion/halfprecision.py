"""The float remainder of a model in FP16 or FP32.

A strongly typed TensorRT (11, or 10 with --stronglyTyped) computes in the types that the ONNX file states, so an FP32
remainder runs in FP32 and costs about a sixth of the speed. TensorRT 8 chooses the width itself and takes no FP16
scales, so a float16 model is widened for it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqtool import qdq
from qdqtool.external import array_of
from qdqtool.graph import Model, Node
from qdqtool.insertion.rewrite import round_up_to_half
from qdqtool.onnxgraph.editor import Editor
from qdqtool.onnxgraph.heads import feeding_weighted, find_head
from qdqtool.operators import WEIGHTED, inputs_behind_q
from qdqtool.subgraphs import inner_graphs

_HALF_MAX = float(np.finfo(np.float16).max)
_FLOAT, _HALF = "tensor(float)", "tensor(float16)"
_STATED = frozenset({"to", "dtype", "output_datatype"})  # attributes that state a type
_SMALL = 16  # elements; in constants up to this size a value that FP16 rounds to zero matters (an epsilon, say)


@functools.cache
def _form(op: str, opset: int, outputs: int) -> frozenset[int] | None:
    """How an operator takes float16, by ONNX's own schema: the inputs that stay float32, or None where it cannot.

    It cannot where an output's type is float32 whatever the inputs are, is stated in an attribute, or comes out of a
    body (If, Loop, Scan); an input stays where its type is float32 alone (the scales of a Resize).

    Args:
        op: An operator of ONNX's own domain.
        opset: Version of that domain.
        outputs: How many of its outputs are used.
    """
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return None
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    kinds = {a.type for a in schema.attributes.values()}
    if onnx.defs.OpSchema.AttrType.GRAPH in kinds or not _STATED.isdisjoint(schema.attributes):
        return None
    inputs = [i.type_str for i in schema.inputs]
    for output in schema.outputs[:outputs]:
        kind = output.type_str
        if _FLOAT in allowed.get(kind, {kind}) and not (kind in inputs and _HALF in allowed.get(kind, ())):
            return None
    floats = [i for i, kind in enumerate(inputs) if _FLOAT in allowed.get(kind, {kind})]
    stay = frozenset(i for i in floats if _HALF not in allowed.get(inputs[i], ()))
    return None if stay and len(stay) == len(floats) else stay


def to_half(model: Model) -> int:
    """Turns the float remainder of a Q/DQ model into FP16, in place; graph inputs and outputs keep their types.

    What stands behind the last convolutions, the DFL included, stays FP32: it is little work, and FP16 cannot tell
    pixel coordinates above 512 closer than half a pixel apart.

    Args:
        model: Opset 19 or newer.

    Returns:
        The number of nodes that now compute in FP16.
    """
    return _Halver(model).run()


class _Halver:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.editor = Editor(model)
        self.half = self._half_nodes()
        self.added: dict[str, str] = {}

    def _half_nodes(self) -> set[int]:
        tail = _tail(self.model)
        return {n.index for n in self.model.nodes if n.index not in tail and self._can_be_half(n)}

    def _can_be_half(self, node: Node) -> bool:
        model = self.model
        if node.domain not in ("", "ai.onnx") or self._form(node) is None:
            return False
        types = [model.elem_type(t) for t in (*node.inputs, *node.outputs) if t]
        if TensorProto.FLOAT not in types or 0 in types:
            return False
        for position, tensor in enumerate(node.inputs):
            if self._stays(node, position) or model.elem_type(tensor) != TensorProto.FLOAT:
                continue
            value = model.constant(tensor)
            if value is None:
                continue
            if float(np.abs(value).max()) > _HALF_MAX:
                return False
            scale = node.op in (qdq.Q, qdq.DQ) and position == 1
            if value.size <= _SMALL and not scale and np.any((value != 0) & (value.astype(np.float16) == 0)):
                return False
        return True

    def _form(self, node: Node) -> frozenset[int] | None:
        return _form(node.op, self.model.opset, len(node.outputs))

    def _stays(self, node: Node, position: int) -> bool:
        """Whether an input stays float32: its type says so, or it is a constant with no values in it."""
        empty = 0 in (self.model.constant_shape(node.input(position)) or ())
        return empty or position in (self._form(node) or ())

    def run(self) -> int:
        model, editor = self.model, self.editor
        retyped: list[str] = []
        for tensor in model.inputs:  # a Cast that nothing reads is dropped in the end
            if model.elem_type(tensor) == TensorProto.FLOAT:
                editor.cast(tensor, self._half_name(tensor), TensorProto.FLOAT16, suffix="_to_fp16")
        for node in model.ordered:
            is_half = node.index in self.half
            if is_half:
                self._take_half_inputs(node)
            for position, tensor in enumerate(node.outputs):
                if not tensor or model.elem_type(tensor) != TensorProto.FLOAT or node.op == "Constant":
                    continue
                needs_float = model.is_output(tensor) or bool(self._readers(tensor, False))
                if is_half and needs_float:
                    name = self._half_name(tensor)
                    editor.set_output(node, position, name)
                    editor.cast(name, tensor, TensorProto.FLOAT, node, "_to_fp32")
                elif is_half:
                    retyped.append(tensor)
                elif self._readers(tensor, True):
                    editor.cast(tensor, self._half_name(tensor), TensorProto.FLOAT16, node, "_to_fp16")
        editor.set_type(retyped, TensorProto.FLOAT16)
        editor.finish()
        return len(self.half)

    def _readers(self, tensor: str, half: bool) -> list[Node]:
        """Readers that want a float tensor as FP16 (or as FP32)."""
        result = []
        for reader in self.model.readers(tensor):
            positions = [i for i, t in enumerate(reader.inputs) if t == tensor]
            stays = [reader.index not in self.half or self._stays(reader, i) for i in positions]
            wants_half, wants_float = not all(stays), any(stays) or not positions
            if (half and wants_half) or (not half and wants_float):
                result.append(reader)
        return result

    def _take_half_inputs(self, node: Node) -> None:
        for position, tensor in enumerate(node.inputs):
            if not tensor or self._stays(node, position):
                continue
            if self.model.elem_type(tensor) != TensorProto.FLOAT:
                continue
            if self.model.is_constant(tensor):
                is_scale = node.op in (qdq.Q, qdq.DQ) and position == 1
                self.editor.set_input(node, position, self._half_constant(tensor, is_scale))
                continue
            producer = self.model.producer(tensor)
            made_half = producer is not None and producer.index in self.half
            if not made_half or self.model.is_output(tensor) or self._readers(tensor, False):
                self.editor.set_input(node, position, self._half_name(tensor))

    def _half_name(self, tensor: str) -> str:
        if tensor not in self.added:
            self.added[tensor] = self.editor.name(f"{tensor}_fp16")
        return self.added[tensor]

    def _half_constant(self, tensor: str, is_scale: bool) -> str:
        """A constant in FP16: itself where nothing reads it as FP32, a copy elsewhere."""
        if tensor not in self.added:
            value = self.model.constant(tensor)
            assert value is not None
            half = np.asarray(round_up_to_half(value) if is_scale else value.astype(np.float16))
            if self.model.is_output(tensor) or self._readers(tensor, False):
                self.added[tensor] = self.editor.constant(f"{tensor}_fp16", half)
            else:
                self.editor.set_constant(tensor, half)
                self.added[tensor] = tensor
        return self.added[tensor]


def _tail(model: Model) -> set[int]:
    """Nodes behind the last convolutions, from the first that computes something."""
    dfl = find_head(model).dfl
    feeding = feeding_weighted(model, dfl)
    tail: set[int] = set()
    for node in model.ordered:
        if not feeding.isdisjoint(node.outputs) or (node.op in WEIGHTED and node.index not in dfl):
            continue
        makers = [p.index for t in node.inputs if (p := model.producer(t)) is not None]
        if not inputs_behind_q(model, node) or any(i in tail for i in makers):
            tail.add(node.index)
    return tail


def has_half(model: Model) -> bool:
    """Whether a model holds float16 weights or data."""
    types = {t.data_type for t in model.proto.graph.initializer}
    types.update(v.type.tensor_type.elem_type for v in (*model.proto.graph.input, *model.proto.graph.value_info))
    if TensorProto.FLOAT16 in types:
        return True
    return any(n.op == "Constant" and model.elem_type(n.output) == TensorProto.FLOAT16 for n in model.nodes)


def to_float(model: Model) -> None:
    """Turns a float16 model into float32, in place; graph inputs and outputs keep their types behind a Cast."""
    graph = model.proto.graph
    editor = Editor(model)
    renamed: dict[str, str] = {}
    for name in model.inputs:
        if model.elem_type(name) == TensorProto.FLOAT16:
            renamed[name] = editor.name(f"{name}_fp32")
            editor.cast(name, renamed[name], TensorProto.FLOAT)
    for name in model.outputs:
        if model.elem_type(name) == TensorProto.FLOAT16 and name not in renamed:
            renamed[name] = editor.name(f"{name}_fp32")
            editor.cast(renamed[name], name, TensorProto.FLOAT16, model.producer(name))
    for changed in model.nodes:
        editor.proto_of(changed)
    for inner in (graph, *inner_graphs(graph.node)):
        for node in inner.node:
            for i, name in enumerate(node.input):
                node.input[i] = renamed.get(name, name)
            for i, name in enumerate(node.output):
                node.output[i] = renamed.get(name, name)
            _widen_attributes(node)
        for tensor in inner.initializer:
            _widen_tensor(tensor)
            if inner is graph:
                tensor.name = renamed.get(tensor.name, tensor.name)  # an output as well
        values: list[Any] = list(inner.value_info)
        if inner is not graph:
            values += [*inner.input, *inner.output]
        else:
            values += [v for v in graph.input if v.name in model.initializers]  # as old exporters list them
        for value in values:
            if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    editor.finish()
    model.read_again()


def _widen_attributes(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            _widen_tensor(attribute.t)
        elif attribute.name in ("to", "dtype", "output_dtype") and attribute.i == TensorProto.FLOAT16:
            attribute.i = TensorProto.FLOAT


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT16:
        wide = array_of(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
