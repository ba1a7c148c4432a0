"""Inference of the output types of single nodes with onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from qdqtool.proto.inference_checks import has_sane_attributes, is_safe_to_infer
from qdqtool.proto.shapes import Types
from qdqtool.proto.subgraphs import STANDARD
from qdqtool.util import limits

KnownType = tuple[int, tuple[int | None, ...] | None]
"""Element type (0 if unknown) and dimensions (None if unknown) of a tensor."""

# Operators whose output types depend only on the types of the inputs, not on their values.
_TYPED_BY_INPUTS = frozenset(
    """
    Add AveragePool BatchNormalization Clip Concat Conv ConvTranspose Div Flatten Gemm
    GlobalAveragePool HardSigmoid HardSwish LeakyRelu MatMul MaxPool Mul Relu Sigmoid Softmax Split
    Sub Tanh Transpose
    """.split()
)


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
        """Return the types of a node's outputs; None if the cache cannot infer them.

        ``op`` is the operator of the node.
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
            if kind is None or not _has_fixed_shape(kind):
                return None
            outputs.append((kind.elem_type, tuple(dim.dim_value for dim in kind.shape.dim)))
        return outputs


def _has_fixed_shape(tensor_type: onnx.TypeProto.Tensor) -> bool:
    is_fixed = all(dim.HasField("dim_value") for dim in tensor_type.shape.dim)
    return tensor_type.HasField("shape") and is_fixed


def _is_complete_type(tensor_type: KnownType) -> bool:
    elem_type, dims = tensor_type
    return bool(elem_type) and dims is not None and None not in dims and len(dims) <= limits.RANK
