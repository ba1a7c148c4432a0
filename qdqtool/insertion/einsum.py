"""Conversion of Einsums to MatMuls, which TensorRT can run in INT8.

An Einsum is converted only if the sizes of its operands prove that a MatMul gives the same result.
"""

from __future__ import annotations

import functools
import math
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx

from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.sizes import Contraction, contraction
from qdqtool.patterns.view import View
from qdqtool.proto.shapes import infer_types
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import DOMAINS
from qdqtool.reasons.placement import EinsumObstacle

_AxisSizes = Mapping[tuple[str, int], str | int]
"""Size or symbolic size by tensor and axis."""


class MatMulOperand(NamedTuple):
    """Operand of a MatMul: an operand of an Einsum after Transpose and Reshape.

    Attributes:
        position: Index of the Einsum's input.
        axes: Letters of the input's axes after the Transpose.
        shape: Shape after the Reshape; empty if no Reshape is needed.
    """

    position: int
    axes: str
    shape: list[int]


class MatMulForm(NamedTuple):
    """MatMul, with Transposes and Reshapes around it, that replaces an Einsum.

    Attributes:
        operands: Left and right operand.
        axes: Letters of the axes of the result, before a Transpose to the Einsum's order.
        shape: Shape to which the MatMul's result is reshaped; empty if no Reshape is needed.
    """

    operands: tuple[MatMulOperand, MatMulOperand]
    axes: str
    shape: list[int]


class EinsumConverter:
    """Search for MatMuls that can replace the Einsums of one model.

    The results are equal unless a tensor is empty.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._view = View(model)

    def find_matmul(self, node: Node, product: Contraction) -> MatMulForm | EinsumObstacle:
        """Return the MatMul with the fewest Transposes and Reshapes, or why none is equivalent."""
        sizes: dict[str, int | None] = {}
        for tensor, axes in zip(node.inputs, product.operands, strict=True):
            shape = self._model.shape(tensor) or (None,) * len(axes)
            if not product.exact or len(shape) != len(axes):
                return EinsumObstacle.RANK
            sizes.update(zip(axes, shape, strict=True))
        if not all(product.free):
            return EinsumObstacle.VECTOR
        for letter in product.summed:
            left, right = (axes.index(letter) for axes in product.operands)
            if not self._is_same_size(node, left, right):
                return EinsumObstacle.SUMMED
        is_constant = [t in self._view.constants for t in node.inputs]

        def count_moves(form: MatMulForm) -> tuple[int, int]:
            transposes = int(form.axes != product.result)
            reshapes = int(bool(form.shape))
            for operand in form.operands:
                if not is_constant[operand.position]:
                    transposes += operand.axes != product.operands[operand.position]
                    reshapes += bool(operand.shape)
            return transposes, reshapes

        forms = _list_forms(product, is_constant, sizes)
        return min(forms, key=count_moves, default=EinsumObstacle.SIZES)

    def _is_same_size(self, node: Node, left: int, right: int) -> bool:
        """Return whether axis `left` of input 0 always has the size of axis `right` of input 1."""
        axes = tuple(zip(node.inputs, (left, right), strict=True))
        sizes = []
        for tensor, axis in axes:
            shape = self._model.shape(tensor)
            sizes.append(shape[axis] if shape else None)
        if None not in sizes:
            return sizes[0] == sizes[1]
        for symbols in self._axis_sizes:
            names = {n or symbols.get(a) or a for n, a in zip(sizes, axes, strict=True)}
            if len(names) == 1:
                return True
        return False

    @functools.cached_property
    def _axis_sizes(self) -> tuple[_AxisSizes, _AxisSizes]:
        """Axis sizes that the file states, and axis sizes that shape inference finds."""
        slim = strip_large_weights(self._model.proto)
        inputs = {v.name: v.type for v in slim.graph.input}
        stated = inputs | {v.name: v.type for v in slim.graph.value_info}
        del slim.graph.value_info[:]
        inferred = inputs | (infer_types(slim) or {})
        slim.graph.value_info.extend(_infer_reshape_sizes(slim, inferred))
        inferred = inputs | (infer_types(slim) or {})
        return _index_sizes(stated), _index_sizes(inferred)


def _index_sizes(types: Mapping[str, onnx.TypeProto]) -> _AxisSizes:
    return {
        (tensor, axis): size
        for tensor, tensor_type in types.items()
        for axis, size in enumerate(_read_sizes(tensor_type))
        if size
    }


def _read_sizes(tensor_type: onnx.TypeProto) -> list[str | int]:
    return [d.dim_value or d.dim_param for d in tensor_type.tensor_type.shape.dim]


def _infer_reshape_sizes(
    proto: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]
) -> list[onnx.ValueInfoProto]:
    """Return the outputs of Reshapes whose only unknown size follows from the element count."""
    results = []
    for node in proto.graph.node:
        if node.op_type != "Reshape" or node.domain not in DOMAINS:
            continue
        known_types = [types[t] for t in (*node.input[:1], *node.output[:1]) if t in types]
        if len(known_types) < 2 or not all(t.tensor_type.HasField("shape") for t in known_types):
            continue
        input_type, output_type = known_types
        before, after = _read_sizes(input_type), _read_sizes(output_type)
        dimension = _solve_new_size(before, after)
        if dimension is not None:
            axis, size = dimension
            result = onnx.ValueInfoProto(name=node.output[0], type=output_type)
            result.type.tensor_type.shape.dim[axis].dim_value = size
            results.append(result)
    return results


def _split_sizes(sizes: Sequence[str | int]) -> tuple[Counter[str], int]:
    """Return how often each symbolic size occurs in a shape, and the product of its numbers."""
    symbols = Counter(size for size in sizes if isinstance(size, str))
    return symbols, math.prod(size for size in sizes if isinstance(size, int))


def _solve_new_size(
    before: Sequence[str | int], after: Sequence[str | int]
) -> tuple[int, int] | None:
    """Return output axis and size of the only new symbolic dimension of a Reshape, or None."""
    symbols_before, elements = _split_sizes(before)
    symbols_after, rest = _split_sizes(after)
    new = symbols_after - symbols_before
    if new.total() != 1 or symbols_after - new != symbols_before or "" in before:
        return None
    return None if elements % rest else (after.index(next(iter(new))), elements // rest)


def _list_forms(
    product: Contraction, is_constant: Sequence[bool], sizes: Mapping[str, int | None]
) -> list[MatMulForm]:
    """Return the MatMuls in both orders of the operands; a constant can only be the second."""
    forms = []
    for left, right in ((0, 1), (1, 0)):
        if is_constant[left] and not is_constant[right]:
            continue
        for axes in product.operands:
            summed = "".join(c for c in axes if c in product.summed)
            form = _build_form(product, (left, right), summed, sizes)
            if form is not None:
                forms.append(form)
    return forms


def _build_form(
    product: Contraction, order: tuple[int, int], summed: str, sizes: Mapping[str, int | None]
) -> MatMulForm | None:
    """Return the MatMul for one order of the operands; None if a Reshape is impossible."""
    rows, columns = (product.free[position] for position in order)
    outer, inner, batch = rows[:-1] + product.batch, rows[-1], product.batch
    depth, width = _merge_sizes(summed, sizes), _merge_sizes(columns, sizes)
    merges_summed, merges_columns = len(summed) > 1, len(columns) > 1
    left: list[int] | None = []
    right: list[int] | None = []
    result: list[int] | None = []
    if merges_summed:
        left = _reshape_target(len(outer) + 1, [depth])
        right = _reshape_target(len(batch), [depth, width])
    elif merges_columns:
        right = _reshape_target(len(batch) + 1, [width])
    if merges_columns:
        result = _reshape_target(len(outer) + 1, [sizes[c] for c in columns])
    if left is None or right is None or result is None:
        return None
    operands = (
        MatMulOperand(order[0], outer + inner + summed, left),
        MatMulOperand(order[1], batch + summed + columns, right),
    )
    return MatMulForm(operands, outer + inner + columns, result)


def _merge_sizes(axes: str, sizes: Mapping[str, int | None]) -> int | None:
    product = 1
    for axis in axes:
        size = sizes[axis]
        if size is None:
            return None
        product *= size
    return product


def _reshape_target(unchanged: int, sizes: Sequence[int | None]) -> list[int] | None:
    """Return the shape input of a Reshape that keeps the first `unchanged` axes.

    None if more than one of the other sizes is unknown, or if a size is 0.
    """
    if list(sizes).count(None) > 1 or 0 in sizes:
        return None
    return [0] * unchanged + [-1 if n is None else n for n in sizes]


def replace_einsums(model: Model) -> int:
    """Replace Einsums by equivalent MatMuls, in place, and return the number of Einsums.

    The Einsum's node becomes the last node of the replacement. Weights become the second operand,
    with two dimensions unless the Einsum has batch axes. Einsums that have only constant inputs
    are not replaced.
    """
    editor, converter, varying, count = (
        Editor(model),
        EinsumConverter(model),
        View(model).varying,
        0,
    )
    for node in model.nodes:
        product = contraction(model, node)
        if product is None or node.output not in varying:
            continue
        form = converter.find_matmul(node, product)
        if isinstance(form, MatMulForm):
            _replace_einsum(editor, node, product, form)
            count += 1
    if count:
        editor.finish()
    return count


def _replace_einsum(editor: Editor, node: Node, product: Contraction, form: MatMulForm) -> None:
    operands = [
        _insert_operand(editor, node, operand, product.operands[operand.position])
        for operand in form.operands
    ]
    steps: list[tuple[str, list[str], dict[str, Any]]] = [("MatMul", operands, {})]
    if form.shape:
        shape = editor.add_constant(f"{node.name}/shape", np.array(form.shape, np.int64))
        steps.append(("Reshape", [shape], {}))
    if form.axes != product.result:
        steps.append(("Transpose", [], {"perm": [form.axes.index(c) for c in product.result]}))
    source: list[str] = []
    for op, inputs, attributes in steps[:-1]:
        source = [editor.insert_node(node, op, f"{node.name}/{op}", source + inputs, attributes)]
    op, inputs, attributes = steps[-1]
    editor.rewrite(node, op, source + inputs, attributes)


def _insert_operand(editor: Editor, node: Node, operand: MatMulOperand, axes: str) -> str:
    """Insert the Transpose and Reshape of an operand, and return the name of the result.

    A constant operand is transposed and reshaped here and stored as a new constant.
    """
    tensor, shape = node.input(operand.position), operand.shape
    perm = [axes.index(c) for c in operand.axes]
    is_transposed = perm != sorted(perm)
    value = editor.model.constant(tensor) if is_transposed or shape else None
    if value is not None:
        value = value.transpose(perm)
        if shape:
            value = value.reshape([n or value.shape[i] for i, n in enumerate(shape)])
        return editor.add_constant(f"{tensor}_turned", np.ascontiguousarray(value))
    if is_transposed:
        name = f"{node.name}/Transpose"
        tensor = editor.insert_node(node, "Transpose", name, [tensor], {"perm": perm})
    if not shape:
        return tensor
    shape_input = editor.add_constant(f"{node.name}/shape", np.array(shape, np.int64))
    return editor.insert_node(node, "Reshape", f"{node.name}/Reshape", [tensor, shape_input])


def lower_equation(node: onnx.NodeProto) -> bool:
    """Write the equation of an Einsum in lower case, in place; return whether it changed.

    ONNX allows lower-case letters only, but exporters write capitals. An equation without an output
    part is not changed, because the alphabetical order of its letters defines the output.
    """
    attribute = next((a for a in node.attribute if a.name == "equation"), None)
    if attribute is None:
        return False
    equation = attribute.s.decode("utf-8", "replace")
    letters = [c for c in dict.fromkeys(equation) if c.isalpha()]
    free = iter([c for c in string.ascii_lowercase if c not in letters])
    replacements = {ord(c): new for c in letters if c.isupper() and (new := next(free, ""))}
    if not replacements or "->" not in equation:
        return False
    attribute.s = equation.translate(replacements).encode()
    return True
