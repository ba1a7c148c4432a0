"""Evaluation of constants, node by node, within limits on size and work.

Files may request results of any size. A node is evaluated only if the values of its inputs
determine the size of the result beforehand. The dimensions that the file states are not trusted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from qdqtool.ir.editor import make_placeholder
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import rearranges
from qdqtool.ir.qdq import FLOATS, is_qdq
from qdqtool.proto.inference_checks import has_sane_attributes
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import DOMAINS

_Array = npt.NDArray[Any]

MAX_ELEMENTS = 1 << 25  # maximum number of elements of all tensors upstream of a constant
MAX_OPERATIONS = 1 << 29  # maximum number of operations for all constants of a model
_MAX_NODES = 1000  # maximum number of nodes upstream of a constant
_MAX_SHAPE_ELEMENTS = 4096  # maximum number of elements of a tensor that may be a shape
_MAX_CACHED_ELEMENTS = 1 << 22  # maximum number of elements of all cached results
# Matrix products, and operators whose time is linear in the sizes of their inputs and outputs, also
# in the reference implementation.
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
_SHAPE_OPERATORS = ("Shape", "Size")


class ConstantEvaluator:
    """Evaluates constants of a model.

    Attributes:
        model: The model.
        operations_left: Number of operations that may still be spent on constants.
    """

    def __init__(self, model: Model, work: int = MAX_OPERATIONS) -> None:
        self.model = model
        self.operations_left = work
        self._cache: dict[str, _Array] = {}
        self._cache_elements_left = _MAX_CACHED_ELEMENTS

    def evaluate(self, tensor: str) -> _Array | None:
        """Return the value of a tensor that depends on constants only.

        None if the tensor depends on a network input, a quantizer or an unsupported operator, or
        if a limit is exceeded.
        """
        values: dict[str, _Array] = {}
        nodes = self._find_nodes(tensor, values)
        if nodes is None:
            return None
        elements = 0
        for node in nodes:
            outputs = self.evaluate_node(node, values, MAX_ELEMENTS - elements)
            if outputs is None:
                return None
            size = sum(value.size for value in outputs.values())
            elements += size
            values.update(outputs)
            if size <= self._cache_elements_left:
                self._cache_elements_left -= size
                self._cache.update(outputs)
        return values.get(tensor)

    def find_nodes(self, tensor: str) -> list[Node]:
        """Return the nodes that compute a constant, in topological order.

        Empty for stored constants, for tensors that depend on network inputs or quantizers, and if
        more than 1000 nodes compute the constant.
        """
        return self._find_nodes(tensor, {}) or []

    def _find_nodes(self, tensor: str, values: dict[str, _Array]) -> list[Node] | None:
        """Return the nodes to evaluate for a tensor, in topological order.

        None if there are too many nodes or if the tensor is not constant. The constants that the
        nodes read are added to ``values``, the known values by tensor.
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
            if node.op in _SHAPE_OPERATORS and not node.attributes:
                value = self._static_shape(node)
                if value is None:
                    return None
                values[name] = value
                continue
            if node.index not in nodes:
                nodes[node.index] = node
                stack.extend(source for source in node.inputs if source)
        return sorted(nodes.values(), key=lambda node: self.model.positions[node.index])

    def _static_shape(self, node: Node) -> _Array | None:
        shape = self.model.shape(node.input(0))
        if shape is None or None in shape:
            return None
        dims = np.asarray(shape, np.int64)
        return dims if node.op == "Shape" else dims.prod()

    def evaluate_node(
        self, node: Node, values: Mapping[str, _Array], max_elements: int
    ) -> dict[str, _Array] | None:
        """Return the outputs of one node by name.

        None for an unsupported operator, for unknown sizes, if all outputs together have more than
        ``max_elements`` elements or take too many operations, and for inputs that the operator
        rejects. ``values`` has the values of the inputs by name.
        """
        if not _is_evaluable(node):
            return None
        inputs = {tensor: values[tensor] for tensor in filter(None, node.inputs)}
        outputs = list(filter(None, node.outputs))
        model = self._single_node_model(node, inputs, outputs)
        size = _infer_output_elements(model)
        if size is None or size > max_elements:
            return None
        operations = _count_operations(node, inputs, size)
        if operations > self.operations_left:
            return None
        self.operations_left -= operations
        arrays = _run_reference(model, inputs, outputs)
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


def _run_reference(
    model: onnx.ModelProto, inputs: dict[str, _Array], outputs: list[str]
) -> list[_Array] | None:
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            arrays: Any = ReferenceEvaluator(model).run(outputs, inputs)
    except Exception:  # The reference implementation raises errors of any class.
        return None
    return [np.asarray(array) for array in arrays]


def _infer_output_elements(model: onnx.ModelProto) -> int | None:
    """Return the number of elements of all outputs; None if a shape is unknown.

    onnx infers the shapes from the inputs' types and small values.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # onnx's C++ code raises errors of various classes.
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


# Folding --------------------------------------------------------------------------------------

MAX_FOLDED_ELEMENTS = 1 << 20  # maximum number of elements of a folded constant with data


def fold_constants(model: Model) -> Model:
    """Return the model with initializers in place of values computed from constants alone.

    The builder computes these values when it builds the engine: the results of ConstantOfShape,
    Expand and arithmetic on constants, also on static shapes. Scales and zero points are folded.
    Values of three kinds are not folded:

    * INT64 and INT32 values, which are shapes and indices.
    * Data that is only cast or reshaped. Passes of the optimizer fold this data.
    * Data that a Q or DQ reads or writes. TensorRT requires a stored constant there, and a finding
      reports data that is not stored.

    Args:
        model: The model. It is not changed.

    Returns:
        The same model if there is nothing to fold. Otherwise a variant without folded nodes, in
        which a value of more than ``MAX_FOLDED_ELEMENTS`` elements has type and shape, but no data.
    """
    cache: dict[str, Model] = model.cache.setdefault("folded constants", {})
    if not cache:
        constants = _find_foldable(model)
        cache["model"] = _replace_by_constants(model, constants) if constants else model
    return cache["model"]


def _find_foldable(model: Model) -> list[str]:
    computed: dict[str, bool] = {}  # whether each constant is computed, not only moved or cast
    nodes: set[int] = set()
    for node in model.ordered:
        is_computed = _computes_constant(model, node, computed)
        if is_computed is not None:
            nodes.add(node.index)
            computed.update(dict.fromkeys(filter(None, node.outputs), is_computed))
    return [
        tensor
        for tensor, is_generated in computed.items()
        if model.elem_type(tensor) in (*FLOATS, TensorProto.INT8, TensorProto.UINT8)
        and any(consumer.index not in nodes for consumer in model.consumers(tensor))
        and _is_foldable(model, tensor, is_generated)
        and not model.is_output(tensor)
    ]


def _is_foldable(model: Model, tensor: str, is_generated: bool) -> bool:
    """Return whether a computed constant is to be folded.

    If quantizers read the tensor, all of them must use it as scale or zero point. If no quantizer
    reads the tensor, it must be computed, not only moved or cast (`is_generated`).
    """
    quantizers = [node for node in model.consumers(tensor) if is_qdq(node)]
    if not quantizers:
        return is_generated
    return all(node.input(0) != tensor for node in quantizers)


def find_computed_parameters(model: Model) -> dict[str, list[Node]]:
    """Find scales and zero points that operators compute from constants.

    Returns:
        The quantizers that read each of these tensors, by tensor.
    """
    parameters: dict[str, list[Node]] = {}
    for node in model.nodes:
        for tensor in node.inputs[1:3] if is_qdq(node) else ():
            if tensor and not model.is_constant(tensor):
                parameters.setdefault(tensor, []).append(node)
    if not parameters:
        return {}
    evaluator = ConstantEvaluator(model)
    return {t: nodes for t, nodes in parameters.items() if evaluator.evaluate(t) is not None}


def _is_evaluable(node: Node) -> bool:
    is_linear = node.op in _LINEAR and node.domain in DOMAINS
    return is_linear and not node.captured and has_sane_attributes(node.proto)


def _computes_constant(model: Model, node: Node, computed: Mapping[str, bool]) -> bool | None:
    """Return whether a node's constant outputs are computed, not only moved or cast.

    None if the outputs are not constants, or cannot be folded. ``computed`` has the results of this
    function for earlier nodes, by output.
    """
    if node.op == "Constant" or node.op not in _LINEAR or node.captured:
        return None
    if node.op in _SHAPE_OPERATORS:
        shape = model.shape(node.input(0))
        is_static = shape is not None and None not in shape and not node.attributes
        return True if is_static else None
    inputs = list(filter(None, node.inputs))
    if not inputs or not all(t in computed or model.is_constant(t) for t in inputs):
        return None
    if rearranges(node):
        return any(computed.get(tensor, False) for tensor in inputs)
    return True


def _replace_by_constants(model: Model, tensors: Collection[str]) -> Model:
    evaluator = ConstantEvaluator(model)
    constants = {t: c for t in tensors if (c := _make_constant(model, evaluator, t)) is not None}
    if not constants:
        return model
    proto = strip_large_weights(model.proto)
    proto.graph.initializer.extend(constants.values())
    remaining = _find_used_nodes(model, constants)
    del proto.graph.node[:]
    proto.graph.node.extend(node.proto for node in model.nodes if node.index in remaining)
    variant = Model(proto, model.path, model.sha256, model.base_dir, types=model, constants=model)
    variant.inlined_functions = model.inlined_functions
    variant.function_node_names = model.function_node_names
    return variant


def _make_constant(model: Model, evaluator: ConstantEvaluator, tensor: str) -> TensorProto | None:
    """Return the constant for a tensor; None if neither value nor shape is known.

    A constant that is too large to be evaluated or stored has no data.
    """
    elem_type, shape = model.tensor_type(tensor)
    is_known = shape is not None and None not in shape
    if not is_known or math.prod(d or 0 for d in shape or ()) <= MAX_FOLDED_ELEMENTS:
        value = evaluator.evaluate(tensor)
        if value is not None and value.size <= MAX_FOLDED_ELEMENTS:
            return onnx.numpy_helper.from_array(np.ascontiguousarray(value), tensor)
        if value is not None:
            shape, is_known = value.shape, True
    if not is_known:
        return None
    return make_placeholder(tensor, [d or 0 for d in shape or ()], elem_type)


def _find_used_nodes(model: Model, constants: Mapping[str, TensorProto]) -> set[int]:
    """Return the indices of the nodes that remain after constants have replaced tensors.

    Nodes that are needed only for the replaced tensors are left out. Nodes on which no output
    depends remain.
    """
    reachable = _find_upstream(model, model.outputs, frozenset())
    remaining = _find_upstream(model, model.outputs, constants.keys())
    return {n.index for n in model.nodes if n.index not in reachable or n.index in remaining}


def _find_upstream(model: Model, outputs: Collection[str], ends: Collection[str]) -> set[int]:
    nodes: set[int] = set()
    stack = list(outputs)
    while stack:
        tensor = stack.pop()
        node = None if tensor in ends else model.producer(tensor)
        if node is not None and node.index not in nodes:
            nodes.add(node.index)
            stack.extend(node.consumed_tensors)
    return nodes
