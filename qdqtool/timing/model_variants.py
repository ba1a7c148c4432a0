"""Variants of a model: with fixed shapes, without Q/DQ, with the Q/DQ of ``insert``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import QdqtoolError
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor, make_placeholder
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.input_shapes import (
    complete_shapes,
    metadata_size_key,
    set_input_shapes,
    side_axes,
)
from qdqtool.ir.metadata import PIXEL_FACTOR
from qdqtool.ir.operators import is_no_op_cast
from qdqtool.ir.qdq import FLOATS, is_dq, is_qdq
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.patterns.view import View
from qdqtool.proto.external_data import has_data
from qdqtool.proto.node_types import infer_node
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import STANDARD
from qdqtool.reasons.placement import create_nothing_to_quantize_error
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note

_MAX_SMALL = 256  # maximum number of elements of a small constant, such as the bins of a DFL
_MAX_FILLED = 1 << 28  # maximum number of bytes of ones that stand in for missing weights


def has_qdq(model: Model) -> bool:
    """Return whether the model has any Q or DQ."""
    return any(is_qdq(node) for node in model.nodes)


def float_variant(model: Model) -> Model:
    """Return a copy of a model without Q and DQ, and without the data of large constants.

    Casts that do not change the type and Identities of constants are removed too, because exports
    of float networks have neither. If all consumers of an input are DQs, the input is float in the
    copy.
    """
    proto = strip_large_constants(model)
    for value in proto.graph.input:
        consumers = model.consumers(value.name)
        if consumers and all(is_dq(node) and node.input(0) == value.name for node in consumers):
            output_type = model.elem_type(consumers[0].output) or TensorProto.FLOAT
            value.type.tensor_type.elem_type = output_type
    variant = remove_quantizers(
        Model(proto, model.path, types=model),
        weights=True,
        stored=make_placeholder,
        constants=_dequantize_small_constants(View(model)),
    )
    _bypass_nodes(variant, _has_no_effect)
    variant.sha256 = model.sha256
    return variant


def _dequantize_small_constants(view: View) -> dict[str, TensorProto]:
    """Return small quantized constants as floats, by the name of their DQ's output.

    Only constants with one scale are converted. The code that recognizes detection heads reads
    these constants.
    """
    constants = {}
    for dq in filter(is_dq, view.quantizers):
        shape = view.model.constant_shape(dq.input(0))
        params = view.params(dq)
        scale, zero = params.scale, params.zero_point
        if shape is None or math.prod(shape) > _MAX_SMALL or scale is None or zero is None:
            continue
        stored = view.model.constant(dq.input(0))
        if stored is not None and stored.dtype.kind in "iu" and scale.size == zero.size == 1:
            values = (stored.astype(np.float32) - zero.reshape(())) * scale.reshape(())
            constants[dq.output] = numpy_helper.from_array(values.astype(np.float32), dq.output)
    return constants


def strip_large_constants(model: Model, only: Container[str] | None = None) -> onnx.ModelProto:
    """Return a ModelProto whose large constants are placeholders without data.

    Args:
        model: The model, which is not changed.
        only: Names of the constants to replace. Default: all.
    """
    proto = strip_large_weights(model.proto, only=only)
    originals = model.proto.graph.initializer
    for tensor, original in zip(proto.graph.initializer, originals, strict=True):
        if has_data(original) and not has_data(tensor):
            tensor.CopyFrom(make_placeholder(tensor.name, tensor.dims, tensor.data_type))
    return proto


def fill_missing_weights(model: Model) -> Model | None:
    """Return a copy of a model with ones as missing float weights; None if they are too large."""
    missing = [t for t in model.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    if sum(4 * math.prod(t.dims) for t in missing) > _MAX_FILLED:
        return None
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL and tensor.data_type in FLOATS:
            ones = np.ones(tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(ones, tensor.name))
    return Model(proto, model.path, sha256=model.sha256, types=model)


def quantized_variant(model: Model, target: Target, precision: str = "int8") -> Model:
    """Return a copy of a float network with the Q/DQ that ``insert`` would write.

    The scales are placeholders, one for each group of tensors that must share a scale.

    Raises:
        ModelError: Nothing can be quantized.
    """
    from qdqtool.insertion.fp16 import convert_to_fp16
    from qdqtool.insertion.network import prepare_network
    from qdqtool.insertion.number_formats import find_number_format
    from qdqtool.insertion.options import PlacementOptions
    from qdqtool.insertion.rules import build_simulation_model, choose_placement
    from qdqtool.insertion.scales import find_scale_groups

    options = PlacementOptions(precision=precision)
    number_format = find_number_format(precision)
    network = prepare_network(model, target, options.weights, None, model, number_format)
    _, placement = choose_placement(network.model, options, target)
    if not placement.inputs:
        raise create_nothing_to_quantize_error(placement.skipped, model.path or "model")
    groups = find_scale_groups(network.model, placement.inputs)
    variant = build_simulation_model(network.model, placement, groups)
    if network.fp16:
        for tensor in variant.proto.graph.initializer:
            if not has_data(tensor):
                tensor.CopyFrom(make_placeholder(tensor.name, tensor.dims, tensor.data_type))
        convert_to_fp16(variant)
    return _with_metadata(variant, model)


def _with_metadata(variant: Model, model: Model) -> Model:
    """Return `variant`, to which the model's metadata is copied if `variant` has none.

    The metadata may name the image size.
    """
    if not variant.metadata:
        variant.proto.metadata_props.extend(model.proto.metadata_props)
    return variant


def fp16_variant(model: Model, target: Target) -> Model | None:
    """Return a copy of a float network in FP16, as ``insert`` would write it.

    None if the network cannot be converted.
    """
    from qdqtool.insertion.fp16 import convert_to_fp16
    from qdqtool.insertion.network import prepare_network

    try:
        network = prepare_network(model, target, "float", None, model)
        is_converted = network.fp16 and convert_to_fp16(network.model)
    except QdqtoolError:
        return None
    return _with_metadata(network.model, model) if is_converted else None


def fp32_variant(model: Model) -> Model:
    """Return a copy of an FP16 network in FP32, without Casts between float types."""
    from qdqtool.insertion.fp16 import widen_float16

    variant = model.copy()
    widen_float16(variant)
    _bypass_nodes(variant, is_no_op_cast)
    variant.reindex()
    return _with_metadata(variant, model)


def undo_fp16_of_insert(model: Model) -> Model:
    """Return a float network before ``insert`` converted it to FP16.

    A network with FP16 nodes that ``insert`` leaves in FP32, such as the last nodes of a head, was
    exported in FP16. It is returned unchanged, as are networks in FP32.
    """
    from qdqtool.patterns.half import find_fp16_nodes

    halves = _count_fp16_operators(model)
    if not halves:
        return model
    variant = fp32_variant(model)
    converted = find_fp16_nodes(variant)
    possible = Counter(node.op for node in variant.nodes if node.index in converted)
    return variant if halves <= possible else model


def undo_uint8_input_of_insert(model: Model) -> Model:
    """Return a float network with float inputs instead of the uint8 inputs of ``insert``.

    The network is returned unchanged if its uint8 inputs are those of the export.
    """
    if PIXEL_FACTOR not in model.metadata:
        return model
    variant = model.copy()
    editor = Editor(variant)
    for name in variant.inputs:
        casts = variant.consumers(name)
        if variant.elem_type(name) == TensorProto.UINT8 and {n.op for n in casts} == {"Cast"}:
            editor.set_type([name], variant.elem_type(casts[0].output) or TensorProto.FLOAT)
            for cast in casts:
                editor.bypass(cast, name)
    return _with_metadata(editor.finish(), model)


def _count_fp16_operators(model: Model) -> Counter[str]:
    """Return the number of nodes that write FP16, by operator, without Casts and Constants."""
    return Counter(
        node.op
        for node in model.nodes
        if node.op not in ("Cast", "Constant")
        and model.elem_type(node.outputs[0]) == TensorProto.FLOAT16
    )


def _has_no_effect(model: Model, node: Node) -> bool:
    is_alias = node.op == "Identity" and model.is_constant(node.input(0))
    return is_alias or is_no_op_cast(model, node)


def _bypass_nodes(model: Model, is_bypassed: Callable[[Model, Node], bool]) -> None:
    editor = Editor(model)
    for node in model.nodes:
        if is_bypassed(model, node):
            _bypass(editor, node)
    editor.finish()


def _bypass(editor: Editor, node: Node) -> None:
    """Bypass a node. If it produces a network output, its producer does so instead if possible."""
    model, source = editor.model, node.input(0)
    producer = model.producer(source)
    if (
        producer is None
        or not model.is_output(node.output)
        or model.is_output(source)
        or len(model.consumers(source)) > 1
    ):
        editor.bypass(node, source)
        return
    editor.set_output(producer, producer.outputs.index(source), node.output)
    editor.remove(node)


def resolve_inputs(model: Model, batch: int = 1) -> Model:
    """Return the model with fixed input shapes, see :func:`complete_shapes`."""
    shapes = complete_shapes(model, batch)
    if not shapes:
        return model
    proto = strip_large_constants(model)
    set_input_shapes(proto, shapes)
    return Model(proto, model.path, sha256=model.sha256)


def note_assumed_shapes(
    model: Model, batch: int | None, *, is_size_given: bool = False
) -> list[Note]:
    """Return a note for each input with dynamic dimensions that the user did not give.

    The note states which dimensions are from the metadata, and which were assumed.
    """
    key = "" if is_size_given else metadata_size_key(model)
    notes = []
    for name, shape in complete_shapes(model, batch or 1).items():
        declared = model.shape(name) or ()
        dynamic = [n for n, size in enumerate(shape) if declared[n] != size]
        sides = range(len(shape))[side_axes(shape)] if len(shape) == 4 else ()
        given = [*([] if batch is None else [0]), *(sides if is_size_given or key else [])]
        texts = _describe_assumed(shape, [n for n in dynamic if n not in given], given)
        if key and not set(dynamic).isdisjoint(sides):
            size = "x".join(str(shape[n]) for n in sides)
            texts.append(f"the size {size} is from the model's metadata ({key})")
        if texts:
            text = f"input '{name}': {', '.join(texts)}"
            notes.append(Note(text, code="input-taken", shape=list(shape)))
    return notes


def _describe_assumed(
    shape: Sequence[int], assumed: Sequence[int], given: Sequence[int]
) -> list[str]:
    """Return a text on the assumed dimensions of an input, if there are any."""
    if not assumed:
        return []
    if not given:
        return [f"the shape {'x'.join(map(str, shape))} was assumed"]
    sizes = "x".join(str(shape[n]) for n in assumed)
    return [f"the {'batch size' if assumed == [0] else 'size'} {sizes} was assumed"]


# Shapes that depend on computed values --------------------------------------------------------

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
_SMALL = 4096  # maximum number of elements of a tensor that is treated as a shape


class TensorShapes:
    """Shapes of a model's tensors, including shapes that depend on computed values."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._computed: dict[str, Shape] = {}
        self._values: dict[str, Array] = {}
        self._evaluator = ConstantEvaluator(model)
        self._is_evaluated = False

    def get(self, tensor: str) -> Shape | None:
        """Return the shape of a tensor; None if a dimension is unknown."""
        shape = self._model_shape(tensor)
        if shape is None and not self._is_evaluated:
            self._is_evaluated = True
            self._infer_shapes()
        return shape if shape is not None else self._computed.get(tensor)

    def _model_shape(self, tensor: str) -> Shape | None:
        shape = self._model.shape(tensor)
        return None if shape is None or None in shape else tuple(d for d in shape if d is not None)

    def _current_shape(self, tensor: str) -> Shape | None:
        return self._model_shape(tensor) or self._computed.get(tensor)

    def _infer_shapes(self) -> None:
        """Infer unknown shapes in one walk over the graph, evaluating shape computations."""
        for node in self._model.ordered:
            for output in node.outputs:
                if output and node.domain in STANDARD and self._model_shape(output) is None:
                    shape = self._infer_outputs(node).get(output)
                    if shape is not None:
                        self._computed[output] = shape
            value = self._compute_small_value(node)
            if value is not None:
                self._values[node.output] = value
                self._computed.setdefault(node.output, value.shape)

    def _small_constant(self, tensor: str) -> Array | None:
        if tensor in self._values:
            return self._values[tensor]
        shape = self._model.constant_shape(tensor)
        if shape is None or int(np.prod(shape, dtype=np.float64)) > _SMALL:
            return None
        stored = self._model.constant_proto(tensor)
        return None if stored is not None and not has_data(stored) else self._model.constant(tensor)

    def _infer_outputs(self, node: Node) -> dict[str, Shape]:
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for tensor in filter(None, node.inputs):
            shape, value = self._current_shape(tensor), self._small_constant(tensor)
            kind = self._model.elem_type(tensor)
            if value is not None:
                data[tensor] = numpy_helper.from_array(np.ascontiguousarray(value), tensor)
                shape = value.shape if shape is None else shape
                kind = kind or helper.np_dtype_to_tensor_dtype(value.dtype)
            if shape is None:
                return {}
            types[tensor] = helper.make_tensor_type_proto(kind or TensorProto.FLOAT, shape)
        shapes: dict[str, Shape] = {}
        for name, output in infer_node(node.proto, types, self._model.opset, data).items():
            shape = _fixed_shape(output)
            if shape is not None:
                shapes[name] = shape
        return shapes

    def _compute_small_value(self, node: Node) -> Array | None:
        """Return the output of a Shape, or of a node whose inputs are small known constants.

        None for other nodes.
        """
        if node.op == "Shape" and not node.attributes:
            shape = self._current_shape(node.input(0))
            return None if shape is None else np.asarray(shape, np.int64)
        values: dict[str, Array] = {}
        for tensor in filter(None, node.inputs):
            value = self._small_constant(tensor)
            if value is None:
                return None
            values[tensor] = value
        outputs = self._evaluator.evaluate_node(node, values, _SMALL) if values else None
        return None if outputs is None else outputs[node.output]


def _fixed_shape(kind: onnx.TypeProto) -> Shape | None:
    dims = kind.tensor_type.shape.dim
    is_fixed = kind.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims)
    return tuple(d.dim_value for d in dims) if is_fixed else None
