"""Static check of models before onnx infers their shapes in this process.

onnx's shape inference is C++ code that trusts the model. Some invalid models crash the process (a
7x7 Conv over a 4x4 input, followed by a Slice) or take all memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from qdqtool.proto.subgraphs import STANDARD, all_nodes, attribute_graphs
from qdqtool.util import limits

_MAX_INT32 = 1 << 31  # onnx reads attributes as 32-bit integers
_LARGE_SIZE = 1 << 24  # models with larger constant sizes are not inferred in this process

# Operators whose inference neither crashes nor allocates much memory. All operators were tried.
_HARMLESS = frozenset(
    """
    Abs Add And ArgMax ArgMin AveragePool BatchNormalization Cast CastLike Ceil Celu Clip Concat
    Constant ConstantOfShape Conv ConvTranspose Cos CumSum DepthToSpace DequantizeLinear Div Dropout
    Einsum Elu Equal Erf Exp Expand Flatten Floor Gather GatherElements GatherND Gelu Gemm
    GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid
    HardSwish Hardmax Identity If InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu
    Less LessOrEqual Log LogSoftmax Loop LpNormalization MatMul Max MaxPool Mean Min Mish Mod Mul
    Neg NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow QuantizeLinear RMSNormalization Range
    Reciprocal ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    Relu Reshape Resize Round ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Size Slice
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tanh Tile TopK Transpose
    Trilu Unsqueeze Upsample Where Xor
    """.split()
)
_CRASH_ON_NEGATIVE = frozenset(("GatherND", "Slice"))  # inference crashes on negative dimensions
_WINDOWED = frozenset(("AveragePool", "Conv", "ConvTranspose", "MaxPool"))
# Operators whose inputs or attributes state the output size.
_RESIZING = frozenset(
    "DepthToSpace Expand GatherND Pad Resize SpaceToDepth Split Tile TopK Upsample".split()
)
# Operators for which onnx computes the values of vectors ("data propagation").
_PROPAGATED = frozenset(
    "Add Cast Concat Gather MeanVarianceNormalization Mul Size Slice Squeeze Sub Unsqueeze".split()
)
# Inputs whose values determine the output size: first position, and position after the last one.
_SIZE_INPUTS = {
    "ConstantOfShape": (0, 1),
    "Expand": (1, 2),
    "Pad": (1, 2),
    "Range": (1, 2),
    "Reshape": (1, 2),
    "Resize": (1, 4),
    "Slice": (4, 5),
    "Split": (1, 2),
    "Tile": (1, 2),
    "TopK": (1, 2),
    "Upsample": (1, 2),
}


def is_safe_to_infer(proto: onnx.ModelProto) -> bool:
    """Return whether inference of a model certainly neither crashes nor takes much memory."""
    nodes = list(all_nodes(proto))
    if proto.functions or not all(map(_is_harmless_node, nodes)):
        return False
    constants = _collect_constants(proto, nodes)
    lengths = _vector_lengths(proto, constants)
    if not all(_has_usual_sizes(node, constants, lengths) for node in nodes):
        return False
    if _may_crash_on_negative_size(proto, nodes, constants):
        return False
    return not _has_long_vectors(nodes, lengths, _largest_input(proto))


def _may_crash_on_negative_size(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, onnx.TensorProto],
) -> bool:
    if not any(node.op_type in _CRASH_ON_NEGATIVE for node in nodes):
        return False
    producers = {node.output[0]: node for node in nodes if node.output}
    return _has_negative_size(proto, constants) or not all(
        _keeps_sizes_positive(node, constants, producers) for node in nodes
    )


def _is_harmless_node(node: onnx.NodeProto) -> bool:
    if node.domain not in STANDARD:  # onnx ignores unknown domains
        return not node.domain.startswith("ai.onnx")
    if node.op_type.startswith("Gather") and len(set(node.input)) < len(node.input):
        # If data and indices are the same tensor, each node of a chain doubles the rank.
        return False
    return node.op_type in _HARMLESS and has_sane_attributes(node)


def has_sane_attributes(node: onnx.NodeProto) -> bool:
    """Return whether onnx uses a node's attributes with the values that the model states.

    onnx reads integers as 32-bit numbers. For a Split, onnx counts the outputs of the node instead
    of reading ``num_outputs``.
    """
    attributes = node.attribute
    if node.op_type != "Constant" and any(abs(a.i) >= _MAX_INT32 for a in attributes):
        return False
    if node.op_type != "Split":
        return True
    return all(a.i == len(node.output) for a in attributes if a.name == "num_outputs")


def _collect_constants(
    proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]
) -> dict[str, onnx.TensorProto]:
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Constant" and node.output:
                constants[node.output[0]] = _read_constant_attribute(attribute)
            for graph in attribute_graphs(attribute):
                constants.update((tensor.name, tensor) for tensor in graph.initializer)
    return constants


def _read_constant_attribute(attribute: onnx.AttributeProto) -> onnx.TensorProto:
    if attribute.name == "value":
        return attribute.t
    ints = attribute.ints or ([attribute.i] if attribute.name == "value_int" else [])
    count = len(ints) or len(attribute.floats) or len(attribute.strings)
    return onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[count], int64_data=ints)


def _has_negative_size(proto: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    graph = proto.graph
    values = (*graph.input, *graph.output, *graph.value_info)
    return any(d.dim_value < 0 for v in values for d in v.type.tensor_type.shape.dim) or any(
        size < 0 for tensor in constants.values() for size in tensor.dims
    )


def _has_usual_sizes(
    node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto], lengths: Mapping[str, int]
) -> bool:
    """Return whether inputs and attributes that state sizes are short, without huge values."""
    if any(len(a.ints) > limits.RANK for a in node.attribute if node.op_type != "Constant"):
        return False
    for tensor in _size_inputs(node):
        if tensor in constants:
            values = _read_small_constant(constants[tensor], len(node.output))
            if values is None or max(map(abs, values), default=0) > _LARGE_SIZE:
                return False
        elif lengths.get(tensor, 0) > limits.RANK or node.op_type == "Slice":
            return False  # inference of a Slice never ends if the step is 2^31
    return True


def _size_inputs(node: onnx.NodeProto) -> list[str]:
    start, end = _SIZE_INPUTS.get(node.op_type, (0, 0))
    return [tensor for tensor in node.input[start:end] if tensor]


def _keeps_sizes_positive(
    node: onnx.NodeProto,
    constants: Mapping[str, onnx.TensorProto],
    producers: Mapping[str, onnx.NodeProto],
) -> bool:
    """Return whether the output sizes of a node cannot be negative if its input sizes are not."""
    if node.op_type in _WINDOWED:
        return _keeps_window_sizes_positive(node, constants, producers)
    if node.op_type not in _RESIZING:
        return True
    numbers: list[float] = []
    for tensor in _size_inputs(node):
        values = _read_small_constant(constants.get(tensor), len(node.output))
        if values is None:
            return False
        numbers += values
    for attribute in node.attribute:
        # The last of several parts of a Split may get a negative size.
        if attribute.name == "num_outputs" and attribute.i > 2:
            return False
        if attribute.name not in ("axis", "axes"):
            numbers += (attribute.i, *attribute.ints, *attribute.floats)
    return _are_usual_sizes(numbers)


def _are_usual_sizes(numbers: Iterable[float]) -> bool:
    return all(0 <= number <= _LARGE_SIZE for number in numbers)


def _keeps_window_sizes_positive(
    node: onnx.NodeProto,
    constants: Mapping[str, onnx.TensorProto],
    producers: Mapping[str, onnx.NodeProto],
) -> bool:
    stated = _read_integer_lists(node)
    if stated is None:
        return False
    if any(a.name == "auto_pad" and a.s.startswith(b"SAME") for a in node.attribute):
        return "pads" not in stated
    kernel = stated.get("kernel_shape") or _weight_sizes(node, constants, producers)
    if not kernel or "output_shape" in stated:
        return False
    if not _are_usual_sizes(itertools.chain.from_iterable(stated.values())):
        return False
    return _has_positive_sizes(kernel, stated, node.op_type == "ConvTranspose")


def _read_integer_lists(node: onnx.NodeProto) -> dict[str, list[int]] | None:
    """Return the attributes with several integers; None if one has another type."""
    lists = [attribute for attribute in node.attribute if attribute.ints]
    if any(attribute.type != attribute.INTS for attribute in lists):
        return None
    return {attribute.name: list(attribute.ints) for attribute in lists}


def _weight_sizes(
    node: onnx.NodeProto,
    constants: Mapping[str, onnx.TensorProto],
    producers: Mapping[str, onnx.NodeProto],
) -> Sequence[int]:
    """Return the kernel size of a convolution; empty if its weights are unknown.

    The weights may be before a Q/DQ pair.
    """
    tensor = "".join(node.input[1:2])
    for _ in range(2):
        producer = producers.get(tensor)
        if producer is not None and producer.op_type in ("DequantizeLinear", "QuantizeLinear"):
            tensor = producer.input[0]
    return constants[tensor].dims[2:] if tensor in constants else ()


def _has_positive_sizes(
    kernel: Sequence[int], stated: Mapping[str, list[int]], is_transposed: bool
) -> bool:
    rank = len(kernel)
    strides = stated.get("strides", [1] * rank)
    dilations = stated.get("dilations", [1] * rank)
    pads = stated.get("pads", [0, 0] * rank)
    added = stated.get("output_padding", [0] * rank)
    if not len(strides) == len(dilations) == len(added) == len(pads) / 2 == rank:
        return False
    for axis in range(rank):
        extent = dilations[axis] * (kernel[axis] - 1) + 1 - pads[axis] - pads[axis + rank]
        if is_transposed and added[axis] + extent < strides[axis]:
            return False
        if not is_transposed and extent >= 2 * strides[axis]:
            return False
    return True


def _read_small_constant(tensor: onnx.TensorProto | None, outputs: int) -> list[Any] | None:
    """Return the values of a short constant; None for other constants.

    A short constant has at most one value for each output or each possible dimension.
    """
    longest = max(limits.RANK, outputs)
    if tensor is None or tensor.external_data or not 0 <= math.prod(tensor.dims) <= longest:
        return None
    try:
        return list(onnx.numpy_helper.to_array(tensor).flat)
    except Exception:  # the tensor is damaged
        return None


def _vector_lengths(
    proto: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]
) -> dict[str, int]:
    lengths = {
        name: math.prod(tensor.dims) for name, tensor in constants.items() if len(tensor.dims) <= 1
    }
    for value in (*proto.graph.input, *proto.graph.value_info):
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 1:
            lengths[value.name] = dims[0].dim_value
        elif len(dims) > limits.RANK:
            lengths[value.name] = _LARGE_SIZE
    return lengths


def _largest_input(proto: onnx.ModelProto) -> int:
    """Return the number of elements of the largest input; dynamic dimensions count as 1."""
    shapes = [value.type.tensor_type.shape for value in proto.graph.input]
    return max((math.prod(d.dim_value or 1 for d in shape.dim) for shape in shapes), default=0)


def _has_long_vectors(
    nodes: Iterable[onnx.NodeProto], lengths: dict[str, int], largest_input: int
) -> bool:
    """Return whether onnx would compute very long vectors, element by element.

    The check uses upper bounds of the lengths. Tensors without a known length count as empty. A
    tensor of unknown length that is reshaped to a vector has the length ``largest_input``. Lengths
    of outputs are added to ``lengths``, the lengths of vectors by name.
    """
    if max(lengths.values(), default=0) >= _LARGE_SIZE:
        return True
    total = 0
    for node in nodes:
        if node.op_type == "Reshape" and lengths.get("".join(node.input[1:2])) == 1:
            lengths[node.output[0]] = lengths.get(node.input[0], largest_input)
        if node.op_type not in _PROPAGATED or not node.output:
            continue
        inputs = [lengths.get(tensor, 0) for tensor in node.input]
        length = sum(inputs) if node.op_type == "Concat" else max(inputs, default=0)
        lengths[node.output[0]] = length
        total += length
        if length > limits.SHAPE_ENTRIES or total > limits.SHAPE_ENTRIES_ALL:
            return True
    return False
