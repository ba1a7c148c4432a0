"""Evaluation of constants, node by node, within limits on size and work.

Files may request results of any size. A node is evaluated only if the size of its result is known
beforehand, from the values that it reads and not from the dimensions that the file states.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import is_qdq
from qdqtool.proto.shapes import has_sane_attributes
from qdqtool.proto.subgraphs import DOMAINS

_Array = npt.NDArray[Any]

MOST_ELEMENTS = 1 << 25  # of all tensors upstream of one constant
MOST_WORK = 1 << 29  # operations for all constants of a model
_MAX_NODES = 1000  # upstream of one constant
_MAX_SHAPE_ELEMENTS = 4096  # of a tensor that may be a shape
_MAX_CACHED_ELEMENTS = 1 << 22  # of all results that are kept for the next constant
# Operators whose time is linear in their inputs and outputs, except products. This holds for
# the reference implementation as well.
_LINEAR = frozenset(
    {
        "Abs",
        "Add",
        "And",
        "BatchNormalization",
        "Cast",
        "Ceil",
        "Clip",
        "Concat",
        "ConstantOfShape",
        "CumSum",
        "Div",
        "Equal",
        "Exp",
        "Expand",
        "Flatten",
        "Floor",
        "Gather",
        "Gemm",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "InstanceNormalization",
        "LayerNormalization",
        "Less",
        "LessOrEqual",
        "Log",
        "LpNormalization",
        "MatMul",
        "Max",
        "Mean",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pad",
        "Pow",
        "Range",
        "Reciprocal",
        "ReduceL1",
        "ReduceL2",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
        "Relu",
        "Reshape",
        "Round",
        "Shape",
        "Sigmoid",
        "Sign",
        "Size",
        "Slice",
        "Softmax",
        "Softplus",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Sum",
        "Tanh",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    }
)
_PRODUCTS = ("MatMul", "Gemm")


class ConstantEvaluator:
    """Evaluates constants of a model.

    Attributes:
        model: The model.
        operations_left: Operations that are left for all constants together.
    """

    def __init__(self, model: Model, work: int = MOST_WORK) -> None:
        self.model = model
        self.operations_left = work
        self._positions: dict[int, int] = {}
        self._cache: dict[str, _Array] = {}
        self._cache_elements_left = _MAX_CACHED_ELEMENTS

    def evaluate(self, tensor: str) -> _Array | None:
        """Return a constant's value.

        None if it depends on a network input or a quantizer, or if a limit is exceeded.
        """
        values: dict[str, _Array] = {}
        nodes = self._find_nodes(tensor, values)
        if nodes is None:
            return None
        elements = 0
        for node in nodes:
            outputs = self.evaluate_node(node, values, MOST_ELEMENTS - elements)
            if outputs is None:
                return None
            size = sum(value.size for value in outputs.values())
            elements += size
            values.update(outputs)
            if size <= self._cache_elements_left:
                self._cache_elements_left -= size
                self._cache.update(outputs)
        return values.get(tensor)

    def _find_nodes(self, tensor: str, values: dict[str, _Array]) -> list[Node] | None:
        """Return the nodes to evaluate for a tensor, in topological order.

        None if there are too many or if the tensor is not constant.

        Args:
            tensor: Name of the tensor.
            values: Gets the known values that the nodes read.
        """
        nodes: dict[int, Node] = {}
        stack = [tensor]
        while stack:
            name = stack.pop()
            if name in values:
                continue
            value = self._cache[name] if name in self._cache else self.model.constant(name)
            if value is not None:
                values[name] = value
                continue
            node = self.model.producer(name)
            if node is None or len(nodes) >= _MAX_NODES or is_qdq(node):
                return None
            if node.index not in nodes:
                nodes[node.index] = node
                stack.extend(source for source in node.inputs if source)
        return self._sort(nodes.values())

    def _sort(self, nodes: Collection[Node]) -> list[Node]:
        if nodes and not self._positions:
            self._positions = {n.index: i for i, n in enumerate(self.model.ordered)}
        return sorted(nodes, key=lambda node: self._positions[node.index])

    def evaluate_node(
        self, node: Node, values: Mapping[str, _Array], max_elements: int
    ) -> dict[str, _Array] | None:
        """Return the outputs of one node by name.

        None for an unsupported operator, for unknown or too large sizes, and for inputs that do not
        fit.

        Args:
            node: The node.
            values: Values of its inputs.
            max_elements: Limit on the elements of all outputs together.
        """
        if node.op not in _LINEAR or node.domain not in DOMAINS or node.captured:
            return None
        if not has_sane_attributes(node.proto):
            return None
        inputs = {tensor: values[tensor] for tensor in node.inputs if tensor}
        outputs = [tensor for tensor in node.outputs if tensor]
        model = self._single_node_model(node, inputs, outputs)
        size = _infer_size(model)
        if size is None or size > max_elements:
            return None
        operations = _count_operations(node, inputs, size)
        if operations > self.operations_left:
            return None
        self.operations_left -= operations
        arrays = _run(model, inputs, outputs)
        return None if arrays is None else dict(zip(outputs, arrays, strict=True))

    def _single_node_model(
        self, node: Node, inputs: Mapping[str, _Array], outputs: list[str]
    ) -> onnx.ModelProto:
        infos, shapes = [], []
        for name, value in inputs.items():
            elem_type = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            infos.append(onnx.helper.make_tensor_value_info(name, elem_type, value.shape))
            if value.size <= _MAX_SHAPE_ELEMENTS:
                shapes.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        results = [onnx.helper.make_empty_tensor_value_info(tensor) for tensor in outputs]
        graph = onnx.helper.make_graph([node.proto], "constant", infos, results, shapes)
        return onnx.helper.make_model(graph, opset_imports=self.model.proto.opset_import)


def _count_operations(node: Node, inputs: Mapping[str, _Array], written: int) -> int:
    operations = written + sum(value.size for value in inputs.values())
    if node.op in _PRODUCTS:
        shape = inputs[node.input(0)].shape
        operations += written * max(shape[-1:] + shape[:1], default=1)
    return operations


def _run(
    model: onnx.ModelProto, inputs: dict[str, _Array], outputs: list[str]
) -> list[_Array] | None:
    """Return the outputs of a model of one node; None if the operator refuses the inputs."""
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            arrays: Any = ReferenceEvaluator(model).run(outputs, inputs)
    except Exception:  # operators of the reference implementation raise anything
        return None
    return [np.asarray(array) for array in arrays]


def _infer_size(model: onnx.ModelProto) -> int | None:
    """Return the number of elements of all outputs; None if a shape is unknown.

    onnx infers the shapes from the inputs' types and small values.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # C++
        return None
    size = 0
    for value in inferred.graph.output:
        shape = value.type.tensor_type.shape
        if not value.type.tensor_type.HasField("shape"):
            return None
        if not all(dim.HasField("dim_value") for dim in shape.dim):
            return None
        size += math.prod(dim.dim_value for dim in shape.dim)
    return size
