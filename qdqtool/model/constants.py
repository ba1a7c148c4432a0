"""What operators make of constants, computed a node at a time within limits on size and work.

Files may ask for anything: a node is computed only where its result's size is known before, from the values that it
reads and not from what the file states.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.model.graph import Model, Node
from qdqtool.model.qdq import is_qdq
from qdqtool.model.shapes import has_sane_attributes
from qdqtool.model.subgraphs import DOMAINS

_Array = npt.NDArray[Any]

MOST_ELEMENTS = 1 << 25  # of all tensors on the way to one constant
MOST_WORK = 1 << 29  # operations for all constants of a model
_MOST_NODES = 1000  # on the way to one constant
_SHAPES = 4096  # elements of what may be a shape
_KEPT = 1 << 22  # elements of all results that are kept for the next constant
# Those whose time goes with what they read and write (products apart), in the reference implementation too.
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
    """Computes constants of a model.

    Attributes:
        operations_left: Operations that are left for all of them together.
    """

    def __init__(self, model: Model, work: int = MOST_WORK) -> None:
        self.model = model
        self.operations_left = work
        self._place: dict[int, int] = {}
        self._kept: dict[str, _Array] = {}
        self._room = _KEPT

    def evaluate(self, tensor: str) -> _Array | None:
        """A constant's value; None where it depends on an input or a quantizer, or where limits forbid that."""
        model = self.model
        known: dict[str, _Array] = {}
        found: dict[int, Node] = {}
        stack = [tensor]
        while stack:
            name = stack.pop()
            if name in known:
                continue
            value = self._kept[name] if name in self._kept else model.constant(name)
            node = model.producer(name)
            if value is not None:
                known[name] = value
            elif node is None or len(found) >= _MOST_NODES or is_qdq(node):
                return None
            elif node.index not in found:
                found[node.index] = node
                stack.extend(t for t in node.inputs if t)
        if found and not self._place:
            self._place = {n.index: i for i, n in enumerate(model.ordered)}
        elements = 0
        for node in sorted(found.values(), key=lambda n: self._place[n.index]):
            made = self.evaluate_node(node, known, MOST_ELEMENTS - elements)
            if made is None:
                return None
            size = sum(v.size for v in made.values())
            elements += size
            known.update(made)
            if size <= self._room:
                self._room -= size
                self._kept.update(made)
        return known.get(tensor)

    def evaluate_node(
        self, node: Node, known: Mapping[str, _Array], most: int
    ) -> dict[str, _Array] | None:
        """What one node makes of the values of its inputs: its outputs by name, with no more elements than ``most``.

        None for an operator that is not looked at, for sizes that nobody knows or too large ones, and for inputs that
        do not fit.
        """
        if node.op not in _LINEAR or node.domain not in DOMAINS or node.captured:
            return None
        inputs = {t: known[t] for t in node.inputs if t}
        outputs = [t for t in node.outputs if t]
        if not has_sane_attributes(node.proto):
            return None
        single = self._single(node, inputs, outputs)
        sizes = _sizes(single)
        read = sum(v.size for v in inputs.values())
        if sizes is None or len(sizes) < len(outputs) or sum(sizes) > most:
            return None
        work = read + sum(sizes)
        if node.op in _PRODUCTS:
            first = inputs[node.input(0)]
            work += sum(sizes) * max(first.shape[-1:] + first.shape[:1], default=1)
        if work > self.operations_left:
            return None
        self.operations_left -= work
        from onnx.reference import ReferenceEvaluator

        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                made: Any = ReferenceEvaluator(single).run(outputs, inputs)
        except (
            Exception
        ):  # what the operators raise; the reference implementation has no common base for it
            return None
        return dict(zip(outputs, map(np.asarray, made), strict=True))

    def _single(
        self, node: Node, inputs: Mapping[str, _Array], outputs: list[str]
    ) -> onnx.ModelProto:
        graph = onnx.helper.make_graph(
            [node.proto],
            "constant",
            [
                onnx.helper.make_tensor_value_info(
                    n, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape
                )
                for n, v in inputs.items()
            ],
            [onnx.helper.make_empty_tensor_value_info(t) for t in outputs],
            [
                onnx.numpy_helper.from_array(np.asarray(v), n)
                for n, v in inputs.items()
                if v.size <= _SHAPES
            ],
        )
        return onnx.helper.make_model(graph, opset_imports=self.model.proto.opset_import)


def _sizes(single: onnx.ModelProto) -> list[int] | None:
    """Elements of each output, as far as onnx infers them from the inputs' types and small values."""
    try:
        inferred = onnx.shape_inference.infer_shapes(single)
    except Exception:  # C++
        return None
    shapes = [
        v.type.tensor_type.shape
        for v in inferred.graph.output
        if v.type.tensor_type.HasField("shape")
    ]
    if not all(d.HasField("dim_value") for s in shapes for d in s.dim):
        return None
    return [math.prod(d.dim_value for d in s.dim) for s in shapes]
