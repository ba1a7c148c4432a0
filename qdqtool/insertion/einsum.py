"""Conversion of Einsums to MatMuls. TensorRT runs MatMuls in INT8, but not Einsums.

An Einsum is converted only if the sizes of its operands prove that a MatMul gives the same result.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx

from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.sizes import Contraction, find_contraction
from qdqtool.patterns.view import View
from qdqtool.reasons.placement import EinsumObstacle


class MatMulOperand(NamedTuple):
    """Operand of a MatMul, made from an operand of an Einsum by Transpose and Reshape.

    Attributes:
        position: Index of the Einsum's input.
        axes: Letters of the input's axes after the Transpose.
        shape: Shape after the Reshape; empty if no Reshape is needed.
    """

    position: int
    axes: str
    shape: list[int]


class MatMulForm(NamedTuple):
    """MatMul that replaces an Einsum, with the Transposes and Reshapes that it needs.

    Attributes:
        operands: Left and right operand.
        axes: Letters of the axes of the MatMul's result, before it is transposed to the axes of the
            Einsum's result.
        shape: Shape to which the MatMul's result is reshaped; empty if no Reshape is needed.
    """

    operands: tuple[MatMulOperand, MatMulOperand]
    axes: str
    shape: list[int]


def find_equivalent_matmul(
    view: View, node: Node, product: Contraction
) -> MatMulForm | EinsumObstacle:
    """Return the simplest equivalent MatMul, or the reason why no MatMul is equivalent.

    The simplest MatMul has the fewest Transposes and Reshapes. Its result equals that of the
    Einsum, unless a tensor is empty.
    """
    sizes: dict[str, int | None] = {}
    summed_sizes: list[list[int | None]] = []
    for tensor, axes in zip(node.inputs, product.operands, strict=True):
        shape = view.model.shape(tensor) or (None,) * len(axes)
        if not product.exact or len(shape) != len(axes):
            return EinsumObstacle.RANK
        sizes.update(zip(axes, shape, strict=True))
        summed_sizes.append([shape[axes.index(letter)] for letter in product.summed])
    if not all(product.free):
        return EinsumObstacle.VECTOR
    if None in summed_sizes[0] or summed_sizes[0] != summed_sizes[1]:
        return EinsumObstacle.SUMMED
    is_constant = [t in view.constants for t in node.inputs]

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


def _list_forms(
    product: Contraction, is_constant: Sequence[bool], sizes: Mapping[str, int | None]
) -> list[MatMulForm]:
    """Return the possible MatMuls: each order of the operands, and of the summed axes.

    A constant operand is never before a variable one.
    """
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
    fixed = [size for axis in axes if (size := sizes[axis]) is not None]
    return math.prod(fixed) if len(fixed) == len(axes) else None


def _reshape_target(unchanged: int, sizes: Sequence[int | None]) -> list[int] | None:
    """Return the shape input of a Reshape that keeps the first `unchanged` axes.

    `sizes` are the sizes of the other axes. None if more than one of them is unknown, or if one is
    0.
    """
    if list(sizes).count(None) > 1 or 0 in sizes:
        return None
    return [0] * unchanged + [-1 if n is None else n for n in sizes]


def replace_einsums(model: Model) -> int:
    """Replace Einsums by equivalent MatMuls, in place, and return how many were replaced.

    The node of the Einsum becomes the last node of its replacement. Weights become the second
    operand, with two dimensions unless the Einsum has batch axes. Einsums that have only constant
    inputs are not replaced.
    """
    editor, view = Editor(model), View(model)
    count = 0
    for node in model.nodes:
        product = find_contraction(model, node)
        if product is None or node.output not in view.varying:
            continue
        form = find_equivalent_matmul(view, node, product)
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

    If a constant operand is transposed or reshaped, the result is a new constant, without nodes.
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


def lowercase_equation(node: onnx.NodeProto) -> bool:
    """Write the equation of an Einsum in lower case, in place, and return whether it changed.

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
