"""Inference of tensor types and shapes with onnx.

onnx's shape inference is C++ code that trusts the model. Some invalid models crash the process (a
7x7 Conv over a 4x4 input, followed by a Slice) or take all memory. So only models that a static
check accepts are inferred in this process. All other models are inferred in a child process with
limited memory and time. Conversion to another operator set always uses a child process.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from qdqtool.proto.subgraphs import STANDARD, all_nodes, attribute_graphs
from qdqtool.util import limits

Types = dict[str, onnx.TypeProto]
KnownType = tuple[int, tuple[int | None, ...] | None]
"""Element type (0 if unknown) and dimensions (None if unknown) of a tensor."""

_WORKER = Path(__file__).parent / "shapes_worker.py"
_SMALL_MODEL = 1 << 20  # bytes; results for larger models are not kept in memory
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

# Operators whose output types depend only on the types of the inputs, not on their values.
_TYPED_BY_INPUTS = frozenset(
    """
    Add AveragePool BatchNormalization Clip Concat Conv ConvTranspose Div Flatten Gemm
    GlobalAveragePool HardSigmoid HardSwish LeakyRelu MatMul MaxPool Mul Relu Sigmoid Softmax Split
    Sub Tanh Transpose
    """.split()
)


def infer_types(proto: onnx.ModelProto) -> Types | None:
    """Return the types of tensors in a model's main graph, by name; None if inference fails.

    Args:
        proto: Model, which is not changed; preferably without large weights.
    """
    for data_prop in (True, False):
        try:
            graph = infer_shapes(proto, data_prop=data_prop).graph
        except Exception:  # inference fails for custom operators and unusual types
            continue
        return {value.name: value.type for value in (*graph.value_info, *graph.output)}
    return None


def infer_shapes(
    proto: onnx.ModelProto,
    *,
    check_type: bool = False,
    strict_mode: bool = False,
    data_prop: bool = False,
) -> onnx.ModelProto:
    """Return a copy of a model with inferred types; the options are those of onnx.

    Raises:
        Exception: onnx rejects the model, crashes, or exceeds its limits.
    """
    if is_safe_to_infer(proto):
        return onnx.shape_inference.infer_shapes(
            proto, check_type=check_type, strict_mode=strict_mode, data_prop=data_prop
        )
    numbers = int(check_type), int(strict_mode), int(data_prop)
    return _parse_model(_run_in_child(proto.SerializeToString(), "infer", *numbers))


def convert_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Convert a model to another version of ONNX's operator set.

    Raises:
        Exception: onnx rejects the model, crashes, or exceeds its limits.
    """
    source = proto.SerializeToString(deterministic=True)
    convert = _convert_small if len(source) <= _SMALL_MODEL else _convert_opset
    return _parse_model(convert(source, opset))


def _convert_opset(source: bytes, opset: int) -> bytes:
    return _run_in_child(source, "convert", opset)


# Cached, because one command may convert the same network for an INT8 and for an FP8 variant.
_convert_small = functools.lru_cache(16)(_convert_opset)


def _parse_model(data: bytes) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    return model


def _run_in_child(source: bytes, task: str, *numbers: int) -> bytes:
    """Run a task of shapes_worker.py in a child process, and return the resulting model.

    Raises:
        RuntimeError: onnx rejects the model, crashes, or exceeds the limits of time or memory.
    """
    memory = limits.ONNX_BYTES + limits.ONNX_BYTES_BYTE * len(source)
    command = [sys.executable, "-P", str(_WORKER), str(memory), task, *map(str, numbers)]
    try:
        child = subprocess.run(
            command, input=source, capture_output=True, timeout=limits.ONNX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"onnx needs more than {limits.ONNX_SECONDS} s") from None
    if child.returncode < 0:
        raise RuntimeError("onnx crashes on this model")
    if child.returncode:
        reason = child.stderr.decode("utf-8", "replace").strip()
        raise RuntimeError(reason.splitlines()[-1] if reason else "onnx fails on this model")
    return child.stdout


# Static check -----------------------------------------------------------------------------------


def is_safe_to_infer(proto: onnx.ModelProto) -> bool:
    """Return whether inference of a model certainly neither crashes nor takes much memory."""
    nodes = list(all_nodes(proto))
    if proto.functions or not all(map(_is_harmless_node, nodes)):
        return False
    constants = _collect_constants(proto, nodes)
    lengths = _vector_lengths(proto, constants)
    if not all(_has_usual_sizes(node, constants, lengths) for node in nodes):
        return False
    if any(node.op_type in _CRASH_ON_NEGATIVE for node in nodes):
        if _has_negative_size(proto, constants):
            return False
        producers = {node.output[0]: node for node in nodes if node.output}
        if not all(_keeps_sizes_positive(node, constants, producers) for node in nodes):
            return False
    return not _has_long_vectors(nodes, lengths, _largest_input(proto))


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
    return all(0 <= number <= _LARGE_SIZE for number in numbers)


def _keeps_window_sizes_positive(
    node: onnx.NodeProto,
    constants: Mapping[str, onnx.TensorProto],
    producers: Mapping[str, onnx.NodeProto],
) -> bool:
    if any(a.ints and a.type != a.INTS for a in node.attribute):
        return False
    stated = {a.name: list(a.ints) for a in node.attribute if a.ints}
    if any(a.name == "auto_pad" and a.s.startswith(b"SAME") for a in node.attribute):
        return "pads" not in stated
    kernel = stated.get("kernel_shape") or _weight_sizes(node, constants, producers)
    if not kernel or "output_shape" in stated:
        return False
    if not all(0 <= number <= _LARGE_SIZE for numbers in stated.values() for number in numbers):
        return False
    return _has_positive_sizes(kernel, stated, node.op_type == "ConvTranspose")


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
    tensor of unknown length that is reshaped to a vector counts as long as the largest input.

    Args:
        nodes: All nodes of the model.
        lengths: Lengths of vectors by name, to which lengths of outputs are added.
        largest_input: Number of elements of the largest input.
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


# Single nodes -----------------------------------------------------------------------------------


def infer_node(
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    opset: int,
    values: Mapping[str, onnx.TensorProto],
) -> Types:
    """Return the output types of a single ONNX node by name; empty if inference fails.

    Args:
        node: Node of a standard operator; nodes with subgraphs are not inferred.
        types: Types of the inputs by name.
        opset: Version of ONNX's operator set.
        values: Values of constant inputs by name.
    """
    proto = onnx.ModelProto(opset_import=[onnx.helper.make_opsetid("", opset)])
    proto.graph.node.append(node)
    proto.graph.input.extend(
        onnx.ValueInfoProto(name=name, type=kind) for name, kind in types.items()
    )
    proto.graph.initializer.extend(values.values())
    if any(a.HasField("g") for a in node.attribute) or not is_safe_to_infer(proto):
        return {}
    return _infer_outputs(node, opset, types, values)


def _infer_outputs(
    node: onnx.NodeProto,
    opset: int,
    types: Mapping[str, onnx.TypeProto],
    values: Mapping[str, onnx.TensorProto],
) -> Types:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        return dict(
            onnx.shape_inference.infer_node_outputs(schema, node, dict(types), dict(values))
        )
    except Exception:  # the node is custom or damaged
        return {}


class NodeTypeCache:
    """Output types of single nodes, cached by operator, attributes and input types.

    In networks with many equal nodes, the cache is much faster than inference of the whole network.
    The cache supports operators whose output types depend only on the input types, if all input
    types and dimensions are known.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._opset = next((o.version for o in proto.opset_import if o.domain in STANDARD), 0)
        functions = {f.name for f in proto.functions if f.domain in STANDARD}
        self._operators = _TYPED_BY_INPUTS - functions
        self._outputs: dict[tuple[object, ...], list[KnownType] | None] = {}

    def infer_outputs(
        self, node: onnx.NodeProto, op: str, inputs: Sequence[KnownType]
    ) -> list[KnownType] | None:
        """Return the types of a node's outputs; None if the cache does not support the node.

        Args:
            node: The node.
            op: Operator of the node.
            inputs: Type of each input.
        """
        if op not in self._operators or node.domain not in STANDARD:
            return None
        attributes = [a.SerializeToString() for a in node.attribute] if node.attribute else ()
        key = (op, len(node.output), *inputs, *attributes)
        if key not in self._outputs:
            self._outputs[key] = self._infer_output_types(node, inputs)
        return self._outputs[key]

    def _infer_output_types(
        self, node: onnx.NodeProto, inputs: Sequence[KnownType]
    ) -> list[KnownType] | None:
        if not has_sane_attributes(node) or not all(map(_is_complete_type, inputs)):
            return None
        types = {
            tensor: onnx.helper.make_tensor_type_proto(*tensor_type)
            for tensor, tensor_type in zip(node.input, inputs, strict=True)
        }
        inferred = _infer_outputs(node, self._opset, types, {})
        outputs: list[KnownType] = []
        for tensor in node.output:
            kind = inferred[tensor].tensor_type if tensor in inferred else None
            if kind is None or not kind.HasField("shape"):
                return None
            if not all(dim.HasField("dim_value") for dim in kind.shape.dim):
                return None
            outputs.append((kind.elem_type, tuple(dim.dim_value for dim in kind.shape.dim)))
        return outputs


def _is_complete_type(tensor_type: KnownType) -> bool:
    elem_type, dims = tensor_type
    return bool(elem_type) and dims is not None and None not in dims and len(dims) <= limits.RANK
