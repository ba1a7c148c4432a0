"""The float remainder of a model in FP16 or FP32.

A strongly typed TensorRT (11, or 10 with --stronglyTyped) computes in the types that the ONNX file states, so an FP32
remainder runs in FP32 and costs about a sixth of the speed. TensorRT 8 chooses the width itself and takes no FP16
scales, so a float16 model is widened for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqtool.insertion.rewrite import round_up_to_half
from qdqtool.insertion.scales import GroupScale
from qdqtool.ir import qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.patterns.half import find_fp16_nodes, keeps_float32
from qdqtool.patterns.layernorm import fuse_layer_norms
from qdqtool.proto.external_data import to_array
from qdqtool.proto.subgraphs import nested_graphs, rename_tensors
from qdqtool.types import QuantizedTensor
from qdqtool.util.notes import Note, Remark

_RAISED = 1.01  # times, from which on a scale that FP16 holds is another one
_LEAST = float(np.finfo(np.float16).smallest_subnormal)


def to_half(model: Model, wide: Collection[str] = ()) -> int:
    """Turns the float remainder of a Q/DQ model into FP16, in place; graph inputs and outputs keep their types.

    What is behind the last convolutions, the DFL included, stays FP32: it is little work, and FP16 resolves pixel
    coordinates above 512 to half a pixel only. A normalization in pieces becomes a LayerNormalization, which takes FP32
    for its sums, or stays FP32 where none computes the same.

    Args:
        model: Opset 19 or newer.
        wide: Tensors that FP16 cannot hold; what writes or reads them stays FP32.

    Returns:
        The number of nodes that can compute in FP16, and now do.
    """
    fuse_layer_norms(model)
    return _Halver(model, wide).run()


class _Halver:
    def __init__(self, model: Model, wide: Collection[str]) -> None:
        self.model = model
        self.editor = Editor(model)
        self.half = find_fp16_nodes(model, wide)
        self.added: dict[str, str] = {}
        self.read: dict[str, tuple[bool, bool]] = {}  # whether as FP16, whether as FP32

    def run(self) -> int:
        model, editor = self.model, self.editor
        retyped: list[str] = []
        for tensor in model.inputs:  # a Cast that nothing reads is dropped in the end
            if model.elem_type(tensor) == TensorProto.FLOAT:
                editor.cast(tensor, self._half_name(tensor), TensorProto.FLOAT16, suffix="_to_fp16")
        for node in model.ordered:
            is_half = node.index in self.half
            if not is_half and qdq.is_qdq(node):
                self._round_scale(node.input(1))
            if is_half:
                self._take_half_inputs(node)
            for position, tensor in enumerate(node.outputs):
                if (
                    not tensor
                    or model.elem_type(tensor) != TensorProto.FLOAT
                    or node.op == "Constant"
                ):
                    continue
                needs_float = model.is_output(tensor) or self._is_read(tensor, False)
                if is_half and needs_float:
                    name = self._half_name(tensor)
                    editor.set_output(node, position, name)
                    editor.cast(name, tensor, TensorProto.FLOAT, node, "_to_fp32")
                elif is_half:
                    retyped.append(tensor)
                elif self._is_read(tensor, True):
                    editor.cast(
                        tensor, self._half_name(tensor), TensorProto.FLOAT16, node, "_to_fp16"
                    )
        editor.set_type(retyped, TensorProto.FLOAT16)
        editor.finish()
        return len(self.half)

    def _is_read(self, tensor: str, half: bool) -> bool:
        """Whether something reads a float tensor as FP16 (or as FP32)."""
        if tensor not in self.read:  # each of a thousand readers asks
            stays: list[bool] = []
            for node in dict.fromkeys(self.model.consumers(tensor)):
                positions = [
                    i for i, t in enumerate(node.inputs) if t == tensor
                ]  # none where a body inside reads it
                stays += [
                    node.index not in self.half or keeps_float32(self.model, node, i)
                    for i in positions
                ] or [True]
            self.read[tensor] = not all(stays), any(stays)
        return self.read[tensor][0 if half else 1]

    def _take_half_inputs(self, node: Node) -> None:
        for position, tensor in enumerate(node.inputs):
            if not tensor or keeps_float32(self.model, node, position):
                continue
            if self.model.elem_type(tensor) != TensorProto.FLOAT:
                continue
            if self.model.is_constant(tensor):
                is_scale = node.op in (qdq.Q, qdq.DQ) and position == 1
                self.editor.set_input(node, position, self._half_constant(tensor, is_scale))
                continue
            producer = self.model.producer(tensor)
            made_half = producer is not None and producer.index in self.half
            if not made_half or self.model.is_output(tensor) or self._is_read(tensor, False):
                self.editor.set_input(node, position, self._half_name(tensor))

    def _round_scale(self, tensor: str) -> None:
        """The scale of a pair that stays FP32 as FP16 can hold it: pairs that share a scale share it still."""
        value = self.model.constant(tensor)
        if value is not None and value.size == 1 and value.dtype == np.float32:
            rounded = round_up_to_half(value).astype(np.float32)
            if np.isfinite(rounded).all() and bool(np.all(rounded <= 1.001 * value)):
                self.editor.set_constant(tensor, rounded)

    def _half_name(self, tensor: str) -> str:
        if tensor not in self.added:
            self.added[tensor] = self.editor.unique_name(f"{tensor}_fp16")
        return self.added[tensor]

    def _half_constant(self, tensor: str, is_scale: bool) -> str:
        """A constant in FP16: itself where nothing reads it as FP32, a copy elsewhere."""
        if tensor not in self.added:
            value = self.model.constant(tensor)
            if (
                value is None
            ):  # a placeholder, in a model that is only simulated: all readers get the one
                self.editor.retype_constant(tensor, TensorProto.FLOAT16)
                self.added[tensor] = tensor
                return tensor
            half = np.asarray(round_up_to_half(value) if is_scale else value.astype(np.float16))
            if self.model.is_output(tensor) or self._is_read(tensor, False):
                self.added[tensor] = self.editor.constant(f"{tensor}_fp16", half)
            else:
                self.editor.set_constant(tensor, half)
                self.added[tensor] = tensor
        return self.added[tensor]


def scales_of_file(
    model: Model, quantized: Sequence[QuantizedTensor], tied: Sequence[GroupScale]
) -> tuple[list[GroupScale], list[Note]]:
    """Gives what was quantized the scales that an FP16 model holds, and returns the groups with theirs, and notes."""
    nodes = {n.name: n for n in model.nodes}
    raised: list[tuple[float, str]] = []
    groups = {s.group.quantized[0]: s for s in tied}
    for entry in quantized:
        node = nodes.get(entry.node)
        held = None if node is None else model.constant(node.input(1))
        if held is None:
            continue  # an input that takes the first Q's result
        factor = float(np.max(held.astype(np.float64) / np.asarray(entry.scale)))
        entry.scale = [float(s) for s in held] if held.ndim else float(held)
        if factor > _RAISED:
            raised.append((factor, entry.tensor))
        if entry.tensor in groups and not held.ndim:
            groups[entry.tensor] = replace(groups[entry.tensor], scale=float(held))
    notes = []
    if raised:
        factor, tensor = max(raised)
        notes.append(
            Remark.SCALES_RAISED(count=len(raised), least=_LEAST, tensor=tensor, factor=factor)
        )
    return list(groups.values()), notes


def has_half(model: Model) -> bool:
    """Whether a model holds float16 weights or data."""
    types = {t.data_type for t in model.proto.graph.initializer}
    types.update(
        v.type.tensor_type.elem_type
        for v in (*model.proto.graph.input, *model.proto.graph.value_info)
    )
    if TensorProto.FLOAT16 in types:
        return True
    return any(
        n.op == "Constant" and model.elem_type(n.output) == TensorProto.FLOAT16 for n in model.nodes
    )


def to_float(model: Model) -> None:
    """Turns a float16 model into float32, in place; graph inputs and outputs keep their types behind a Cast."""
    graph = model.proto.graph
    editor = Editor(model)
    renamed: dict[str, str] = {}
    for name in model.inputs:
        if model.elem_type(name) == TensorProto.FLOAT16:
            renamed[name] = editor.unique_name(f"{name}_fp32")
            editor.cast(name, renamed[name], TensorProto.FLOAT)
    for name in model.outputs:
        if model.elem_type(name) == TensorProto.FLOAT16 and name not in renamed:
            renamed[name] = editor.unique_name(f"{name}_fp32")
            editor.cast(renamed[name], name, TensorProto.FLOAT16, model.producer(name))
    for changed in model.nodes:
        editor.edit_proto(changed)
    rename_tensors(graph.node, renamed)
    for inner in (graph, *nested_graphs(graph.node)):
        for node in inner.node:
            _widen_attributes(node)
        for tensor in inner.initializer:
            _widen_tensor(tensor)
            if inner is graph:
                tensor.name = renamed.get(tensor.name, tensor.name)  # an output as well
        values: list[Any] = list(inner.value_info)
        if inner is not graph:
            values += [*inner.input, *inner.output]
        else:
            values += [
                v for v in graph.input if v.name in model.initializers
            ]  # as old exporters list them
        for value in values:
            if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    editor.finish()
    model.reindex()


def _widen_attributes(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            _widen_tensor(attribute.t)
        elif (
            attribute.name in ("to", "dtype", "output_dtype") and attribute.i == TensorProto.FLOAT16
        ):
            attribute.i = TensorProto.FLOAT


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT16:
        wide = to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
