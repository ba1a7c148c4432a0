"""Conversion of the layers without Q/DQ to FP16 or FP32.

A strongly typed build (TensorRT 11, or 10 with --stronglyTyped) computes in the types of the ONNX
file. FP32 for the layers without Q/DQ costs such a build about a sixth of its speed. TensorRT 8
chooses the types itself and does not read FP16 scales. For TensorRT 8, a float16 model is therefore
converted to float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.insertion.number_formats import INT8, NumberFormat
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.rewrite import QuantizedTensor, round_up_to_half
from qdqtool.insertion.sample_runs import DEFAULT_IMAGES, measure_fp16_maxima
from qdqtool.insertion.scales import GroupScale
from qdqtool.ir import qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.patterns.half import WIDE, find_fp16_nodes, find_tail, keeps_float32
from qdqtool.patterns.heads import find_dfl
from qdqtool.patterns.layernorm import (
    computes_in_fp16,
    find_decomposed_layer_norms,
    find_sums_of_squares,
    fuse_layer_norms,
    layer_norm_inputs,
)
from qdqtool.proto.external_data import to_array
from qdqtool.proto.subgraphs import nested_graphs, rename_tensors
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count, format_count_were

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource

_MIN_RAISE = 1.01  # a scale is reported if rounding to FP16 raises it by a larger factor
_MAX_RAISE = 2.0  # a larger factor loses a bit or more
_SMALLEST = float(np.finfo(np.float16).smallest_subnormal)


def convert_to_fp16(model: Model, wide: Collection[str] = ()) -> int:
    """Convert the layers without Q/DQ to FP16, in place.

    Graph inputs and outputs keep their types. The DFL and other nodes after the last convolutions
    remain FP32. They take little time, and above 512 the FP16 numbers are half a pixel or more
    apart. A decomposed LayerNorm becomes a LayerNormalization, which computes its sums in FP32. If
    no LayerNormalization computes the same values, the decomposed LayerNorm remains FP32.

    Args:
        model: Model of opset 19 or newer.
        wide: Tensors with values outside the range of FP16. Their producers and consumers remain
            FP32.

    Returns:
        The number of nodes that compute in FP16 after the conversion.
    """
    fuse_layer_norms(model)
    return _Fp16Converter(model, wide).run()


class _Fp16Converter:
    def __init__(self, model: Model, wide: Collection[str]) -> None:
        self.model = model
        self.editor = Editor(model)
        self.fp16_nodes = find_fp16_nodes(model, wide)
        self.fp16_names: dict[str, str] = {}
        # For each tensor: whether a consumer reads it as FP16, and whether a consumer reads it as
        # FP32.
        self.consumer_types: dict[str, tuple[bool, bool]] = {}

    def run(self) -> int:
        model, editor = self.model, self.editor
        for tensor in model.inputs:  # editor.finish() removes Casts without consumers
            if model.elem_type(tensor) == TensorProto.FLOAT:
                editor.add_cast(
                    tensor, self._fp16_name(tensor), TensorProto.FLOAT16, suffix="_to_fp16"
                )
        retyped: list[str] = []
        for node in model.ordered:
            if node.index in self.fp16_nodes:
                self._convert_inputs(node)
                if qdq.is_dq(node):
                    self._remove_output_type(node)
            elif qdq.is_qdq(node):
                self._round_scale(node.input(1))
            if node.op != "Constant":
                retyped += self._convert_outputs(node)
        editor.set_type(retyped, TensorProto.FLOAT16)
        editor.finish()
        return len(self.fp16_nodes)

    def _remove_output_type(self, node: Node) -> None:
        """Remove the attribute output_dtype of a DQ. The output gets the type of the scale."""
        if node.integer("output_dtype", 0):
            proto = self.editor.edit_proto(node)
            kept = [attribute for attribute in proto.attribute if attribute.name != "output_dtype"]
            del proto.attribute[:]
            proto.attribute.extend(kept)

    def _convert_outputs(self, node: Node) -> list[str]:
        """Insert Casts after a node, and return the outputs that become FP16 without a Cast."""
        editor, retyped = self.editor, []
        for position, tensor in enumerate(node.outputs):
            if not tensor or self.model.elem_type(tensor) != TensorProto.FLOAT:
                continue
            if node.index not in self.fp16_nodes:
                if self._has_consumers(tensor, half=True):
                    name = self._fp16_name(tensor)
                    editor.add_cast(tensor, name, TensorProto.FLOAT16, node, "_to_fp16")
            elif self._is_needed_as_float(tensor):
                name = self._fp16_name(tensor)
                editor.set_output(node, position, name)
                editor.add_cast(name, tensor, TensorProto.FLOAT, node, "_to_fp32")
            else:
                retyped.append(tensor)
        return retyped

    def _is_needed_as_float(self, tensor: str) -> bool:
        return self.model.is_output(tensor) or self._has_consumers(tensor, half=False)

    def _has_consumers(self, tensor: str, *, half: bool) -> bool:
        """Return whether a node reads a float tensor as FP16 (`half`) or as FP32 (not `half`)."""
        if tensor not in self.consumer_types:  # cached: a tensor may have thousands of consumers
            stays_float: list[bool] = []
            for node in dict.fromkeys(self.model.consumers(tensor)):
                positions = [i for i, t in enumerate(node.inputs) if t == tensor]
                if not positions:  # the consumer is in a subgraph (If, Loop, Scan) of the node
                    stays_float.append(True)
                for position in positions:
                    is_float = node.index not in self.fp16_nodes
                    stays_float.append(is_float or keeps_float32(self.model, node, position))
            self.consumer_types[tensor] = not all(stays_float), any(stays_float)
        return self.consumer_types[tensor][0 if half else 1]

    def _convert_inputs(self, node: Node) -> None:
        model = self.model
        for position, tensor in enumerate(node.inputs):
            if not tensor or keeps_float32(model, node, position):
                continue
            if model.elem_type(tensor) != TensorProto.FLOAT:
                continue
            if model.is_constant(tensor):
                is_scale = node.op in (qdq.Q, qdq.DQ) and position == 1
                self.editor.set_input(node, position, self._store_fp16_constant(tensor, is_scale))
                continue
            producer = model.producer(tensor)
            is_half = producer is not None and producer.index in self.fp16_nodes
            if not is_half or self._is_needed_as_float(tensor):
                self.editor.set_input(node, position, self._fp16_name(tensor))

    def _round_scale(self, tensor: str) -> None:
        """Round a per-tensor scale of a pair that remains FP32 to an FP16 number.

        The scales of pairs that become FP16 are rounded too, so equal scales remain equal. A scale
        is not rounded if that would increase it by more than 0.1 %.
        """
        value = self.model.constant(tensor)
        if value is not None and value.size == 1 and value.dtype == np.float32:
            rounded = round_up_to_half(value).astype(np.float32)
            if np.isfinite(rounded).all() and bool(np.all(rounded <= 1.001 * value)):
                self.editor.set_constant(tensor, rounded)

    def _fp16_name(self, tensor: str) -> str:
        if tensor not in self.fp16_names:
            self.fp16_names[tensor] = self.editor.unique_name(f"{tensor}_fp16")
        return self.fp16_names[tensor]

    def _store_fp16_constant(self, tensor: str, is_scale: bool) -> str:
        """Convert a constant to FP16, and return its name.

        If a node or a graph output needs the constant as FP32, a copy is converted.
        """
        if tensor in self.fp16_names:
            return self.fp16_names[tensor]
        name = tensor
        value = self.model.constant(tensor)
        if value is None:  # in models for simulation, large constants have no values
            self.editor.retype_constant(tensor, TensorProto.FLOAT16)
        else:
            half = np.asarray(round_up_to_half(value) if is_scale else value.astype(np.float16))
            if self._is_needed_as_float(tensor):
                name = self.editor.add_constant(f"{tensor}_fp16", half)
            else:
                self.editor.set_constant(tensor, half)
        self.fp16_names[tensor] = name
        return name


def update_recorded_scales(
    model: Model, quantized: Sequence[QuantizedTensor], groups: Sequence[GroupScale]
) -> tuple[list[GroupScale], list[Note]]:
    """Write the scales of an FP16 model's Qs into `quantized`, in place.

    Entries whose Q the model no longer has do not change.

    Returns:
        The groups with their new scales, and a note if scales were raised.
    """
    raised: list[tuple[float, str]] = []
    by_tensor = {s.group.quantized[0]: s for s in groups}
    for quantized_tensor in quantized:
        node = model.find_node(quantized_tensor.node)
        if node is None:
            continue  # the model has an int8 input in place of this Q
        # For a uint8 input, the scale of the Q includes the factor of the preprocessing. The scale
        # of the DQ does not.
        dq = next(filter(qdq.is_dq, model.consumers(node.output)), node)
        scale = model.constant(dq.input(1))
        if scale is None:
            continue
        factor = float(np.max(scale.astype(np.float64) / np.asarray(quantized_tensor.scale)))
        quantized_tensor.scale = [float(s) for s in scale] if scale.ndim else float(scale)
        if factor > _MIN_RAISE:
            raised.append((factor, quantized_tensor.tensor))
        if quantized_tensor.tensor in by_tensor and not scale.ndim:
            by_tensor[quantized_tensor.tensor] = replace(
                by_tensor[quantized_tensor.tensor], scale=float(scale)
            )
    return list(by_tensor.values()), [_describe_raised_scales(raised)] if raised else []


def warn_coarse_scales(notes: Sequence[Note]) -> list[Note]:
    """Return a warning for the note on raised scales of a model whose file is float16."""
    return [
        Note(
            f"'{note.values['tensor']}' and other tensors have values too small for INT8 in "
            f"float16: their scales were raised by a factor of up to {note.values['factor']:.3g}. "
            "Export the model in float32, and quantize that model",
            code="scales-coarse",
            **note.values,
        )
        for note in notes
        if note.values["factor"] > _MAX_RAISE
    ]


def _describe_raised_scales(raised: Sequence[tuple[float, str]]) -> Note:
    factor, tensor = max(raised)
    return Note(
        f"scales of {format_count(len(raised), 'tensor')} that FP16 cannot hold were raised to at "
        f"least {_SMALLEST:.3g}; the largest factor is {factor:.3g}, at '{tensor}' "
        "(`high_precision='fp32'` keeps the scales)",
        code="scales-raised",
        count=len(raised),
        tensor=tensor,
        factor=factor,
    )


def find_wide_tensors(
    model: Model,
    quantized: Sequence[QuantizedTensor],
    maxima: Mapping[str, float],
    data: CalibrationSource | None,
    warnings: list[Note],
    images: ImageOptions = DEFAULT_IMAGES,
    number_format: NumberFormat = INT8,
) -> dict[str, float]:
    """Return the largest magnitude of each tensor that may exceed the range of FP16.

    A magnitude is the largest of three: the calibration's (`maxima`), the range of the tensor's
    scale, and that of a run of a few samples. Without data, the model is not run. If onnxruntime
    cannot run the model, a warning is added to `warnings`.
    """
    wide = {t: amax for t, amax in maxima.items() if amax > WIDE}
    for quantized_tensor in quantized:
        if isinstance(quantized_tensor.scale, list) or quantized_tensor.method == "weights-max":
            continue
        largest = quantized_tensor.scale * number_format.largest
        if largest > WIDE:
            wide[quantized_tensor.tensor] = max(wide.get(quantized_tensor.tensor, 0.0), largest)
    if data is None:
        return wide
    try:
        for tensor, largest in measure_fp16_maxima(model, data, images=images).items():
            if largest > WIDE:
                wide[tensor] = max(largest, wide.get(tensor, 0.0))
    except ModelError as error:
        warnings.append(
            Note(
                f"tensors without Q/DQ were not checked for values that FP16 cannot hold: {error}",
                code="not-looked-at",
                error=str(error),
            )
        )
    return wide


def describe_fp16_conversion(
    model: Model, target: Target, wide: Mapping[str, float], is_default: bool
) -> list[Note]:
    """Return notes on a conversion to FP16, and on the nodes that remain FP32."""
    notes = []
    if is_default:
        notes.append(
            Note(
                f"layers without Q/DQ were converted to FP16{_describe_fp32_tail(model)}, because "
                f"{target.display_name} computes in the types of the file; the network's inputs "
                "and outputs keep their types "
                "(`high_precision='fp32'` keeps FP32 everywhere)",
                code="half-by-default",
                target=target.name,
            )
        )
    if wide:
        tensors = ", ".join(f"{tensor} ({largest:.4g})" for tensor, largest in wide.items())
        notes.append(
            Note(
                f"FP32 is kept for {format_count(len(wide), 'tensor')} with values near or above "
                "FP16's limit of 65504, and for the nodes that compute or read such values; "
                f"largest values: {tensors}",
                code="stay-fp32",
                count=len(wide),
                kept=list(wide.items()),
            )
        )
    return notes + _describe_squares(model)


def _describe_fp32_tail(model: Model) -> str:
    """Return the exception from the conversion to FP16; empty if there is none."""
    if not find_tail(model):
        return ""
    dfl = "the DFL and other " if find_dfl(model) else ""
    return (
        f" (except {dfl}layers after the last convolutions, which take little time and need FP32 "
        "for values such as box coordinates)"
    )


def _describe_squares(model: Model) -> list[Note]:
    notes = []
    layer_norms = find_decomposed_layer_norms(model)
    remaining = [p for p in layer_norms if layer_norm_inputs(model, p) is None]
    if count := len(layer_norms) - len(remaining):
        notes.append(
            Note(
                f"{format_count_were(count, 'decomposed normalization')} replaced by "
                "LayerNormalization, because FP16 cannot hold the squares of large inputs",
                code="norms-written",
                count=count,
            )
        )
    float_norms = [p for p in remaining if not computes_in_fp16(model, (p.square, p.mean))]
    if float_norms:
        count, first = len(float_norms), float_norms[0].square.name
        notes.append(
            Note(
                f"decomposed normalizations that remain FP32: {count}, such as '{first}'. FP16 "
                "cannot hold the squares of their inputs, and a LayerNormalization would compute "
                "other values",
                code="norms-stay-fp32",
                count=count,
                first=first,
            )
        )
    sums = find_sums_of_squares(model, layer_norms)
    float_sums = [nodes for nodes in sums if not computes_in_fp16(model, nodes)]
    if float_sums:
        count, first = len(float_sums), float_sums[0][0].name
        notes.append(
            Note(
                "sums of squares outside decomposed normalizations that remain FP32: "
                f"{count}, such as '{first}'. Their values may be outside the range of FP16",
                code="squares-stay-fp32",
                count=count,
                first=first,
            )
        )
    return notes


def has_fp16(model: Model) -> bool:
    """Return whether a model has float16 weights or tensors."""
    graph = model.proto.graph
    types = {t.data_type for t in graph.initializer}
    types.update(
        (v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info)),
        (model.elem_type(n.output) for n in model.nodes if n.op == "Constant"),
    )
    return TensorProto.FLOAT16 in types


def widen_bfloat16(model: Model) -> None:
    """Convert a bfloat16 model to float32, in place, including its inputs and outputs.

    On a CPU, onnxruntime does not support bfloat16 convolutions or bfloat16 input arrays.
    """
    graph = model.proto.graph
    for part in (graph, *nested_graphs(graph.node)):
        _widen_graph(part, [*part.input, *part.output], TensorProto.BFLOAT16)
    model.reindex()


def widen_float16(model: Model) -> None:
    """Convert a float16 model to float32, in place.

    Graph inputs and outputs keep their types. Casts convert their values.
    """
    graph = model.proto.graph
    editor = Editor(model)
    renamed: dict[str, str] = {}
    for name in model.inputs:
        if model.elem_type(name) == TensorProto.FLOAT16:
            renamed[name] = editor.unique_name(f"{name}_fp32")
            editor.add_cast(name, renamed[name], TensorProto.FLOAT)
    for name in model.outputs:
        if model.elem_type(name) == TensorProto.FLOAT16 and name not in renamed:
            renamed[name] = editor.unique_name(f"{name}_fp32")
            editor.add_cast(renamed[name], name, TensorProto.FLOAT16, model.producer(name))
    for changed in model.nodes:
        editor.edit_proto(changed)
    rename_tensors(graph.node, renamed)
    for tensor in graph.initializer:  # a graph output may be an initializer
        tensor.name = renamed.get(tensor.name, tensor.name)
    # Old exporters list initializers as inputs too.
    _widen_graph(graph, [v for v in graph.input if v.name in model.initializers])
    for body in nested_graphs(graph.node):
        _widen_graph(body, [*body.input, *body.output])
    editor.finish()
    model.reindex()


def _widen_graph(
    graph: onnx.GraphProto,
    values: Iterable[onnx.ValueInfoProto],
    elem_type: int = TensorProto.FLOAT16,
) -> None:
    """Convert constants of `elem_type` to float32, and the types of value_info and `values`."""
    for attribute in (a for node in graph.node for a in node.attribute):
        if attribute.HasField("t"):
            _widen_tensor(attribute.t, elem_type)
        elif attribute.name in ("to", "dtype", "output_dtype") and attribute.i == elem_type:
            attribute.i = TensorProto.FLOAT
    for tensor in graph.initializer:
        _widen_tensor(tensor, elem_type)
    for value in (*graph.value_info, *values):
        if value.type.tensor_type.elem_type == elem_type:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _widen_tensor(tensor: onnx.TensorProto, elem_type: int) -> None:
    if tensor.data_type == elem_type:
        array = to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
