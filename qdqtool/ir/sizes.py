"""Values and shapes that depend only on input sizes, and axes of matrix products.

Exporters add nodes that compute shapes at run time, although many shapes depend only on the sizes
of the network's inputs.
"""

from __future__ import annotations

import string
from typing import NamedTuple

from onnx import TensorProto

from qdqtool.ir.graph import Model, Node, Shape
from qdqtool.ir.operators import CUTS, WEIGHTED, LayerKind, operator_of, rearranges
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.proto.subgraphs import DOMAINS, STANDARD

MOVES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Gather", "Expand")
RANDOM = (
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)
_PICKS = ("Gather", "GatherElements", "GatherND")  # output sizes do not depend on index values
_SIZED_BY_VALUES = ("NonZero", "NonMaxSuppression", "Unique", "Compress", "If", "Loop", "Scan")
_INTEGERS = (TensorProto.UNDEFINED, TensorProto.INT64, TensorProto.INT32)
_ELLIPSIS = "..."  # axes without letters in an equation of Einsum
_MAX_RANK = 64  # maximum number of axes of an ellipsis; tensors of real networks have fewer
_FIRST_ELLIPSIS_LETTER = ord("\N{GREEK SMALL LETTER ALPHA}")


# Constants of one input size -------------------------------------------------------------------


def find_size_constants(model: Model) -> tuple[list[str], list[str]]:
    """Return tensors whose values or dimensions depend only on the network's input sizes.

    Returns:
        Two lists of names. First: parameters of nodes that move, cut or pad tensors, such as the
        shape of a Reshape, if their values depend only on input sizes. Second: tensors without
        stated dimensions, if the dimensions depend only on input sizes.
    """
    constants = _SizeConstants(model)
    parameters: set[str] = set()
    shapes: list[str] = []
    for node in model.ordered:
        if node.op in (*MOVES, *CUTS, "Pad"):
            parameters.update(node.inputs[1:])
        shapes += [
            tensor
            for tensor in node.outputs
            if tensor and not model.is_constant(tensor) and constants.has_open_shape(tensor)
        ]
    return [tensor for tensor in constants.tensors if tensor in parameters], shapes


class _SizeConstants:
    """Tensors whose values depend only on the sizes of the network's inputs.

    Attributes:
        tensors: Names of the tensors.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tensors: set[str] = set()
        self._sized_by_values: set[str] = set()  # tensors whose dimensions depend on data
        for node in model.ordered:
            inputs = [tensor for tensor in node.inputs if tensor]
            if self._has_unknown_size(node, inputs):
                self._sized_by_values.update(node.outputs)
            elif self._has_constant_value(node, inputs):
                self.tensors.update(node.outputs)
            elif node.op not in _PICKS and any(self._is_variable_integer(t) for t in inputs):
                self._sized_by_values.update(node.outputs)

    def has_open_shape(self, tensor: str) -> bool:
        """Return whether a tensor's dimensions are unknown but depend only on input sizes."""
        return (
            tensor not in self._sized_by_values
            and tensor not in self.tensors
            and None in (self.model.shape(tensor) or (None,))
        )

    def _has_unknown_size(self, node: Node, inputs: list[str]) -> bool:
        return (
            node.domain not in STANDARD
            or bool(node.captured)
            or node.op in _SIZED_BY_VALUES
            or not self._sized_by_values.isdisjoint(inputs)
        )

    def _has_constant_value(self, node: Node, inputs: list[str]) -> bool:
        if operator_of(node).kind == LayerKind.SHAPE:
            return True
        if not inputs or node.op in RANDOM:
            return False
        return all(map(self._is_constant, inputs))

    def _is_constant(self, tensor: str) -> bool:
        return tensor in self.tensors or self.model.is_constant(tensor)

    def _is_variable_integer(self, tensor: str) -> bool:
        return not self._is_constant(tensor) and self.model.elem_type(tensor) in _INTEGERS


# Linears ---------------------------------------------------------------------------------------


def is_linear(model: Model, node: Node) -> bool:
    """Return whether a node multiplies the last axis of its data with constant 2-D weights."""
    if operator_of(node).kind != LayerKind.MATRIX_MULTIPLY or node.integer("transA", 0):
        return False
    shape = model.constant_shape(node.input(1))
    return shape is not None and len(shape) == 2 and model.elem_type(node.input(1)) in QUANTIZABLE


def last_axis_sources(model: Model, tensor: str) -> list[str]:
    """Return the inputs of a tensor's producer whose last axis becomes the tensor's last axis.

    Empty unless the producer only moves, joins or cuts other axes. A Reshape keeps the last axis if
    its size is equal before and after, because values are in row-major order.
    """
    node, size = model.producer(tensor), _last_size(model, tensor)
    if node is None or size is None or not _keeps_last_axis(node):
        return []
    sources = node.inputs if operator_of(node).joins else node.inputs[:1]
    return [source for source in sources if _last_size(model, source) == size]


def _last_size(model: Model, tensor: str) -> int | None:
    return (model.shape(tensor) or (None,))[-1]


def _keeps_last_axis(node: Node) -> bool:
    operator = operator_of(node)
    if not (rearranges(node) or operator.joins or operator.cuts):
        return False
    if node.op != "Transpose":
        return True
    perm = node.attributes.get("perm")
    return isinstance(perm, list) and bool(perm) and perm[-1] == len(perm) - 1


def find_linear_inputs(model: Model) -> set[str]:
    """Return the tensors over whose last axis a Linear sums.

    These are the data inputs of Linears, and upstream tensors whose last axis becomes the last axis
    of a data input (see :func:`last_axis_sources`).
    """
    tensors = {node.input(0) for node in model.nodes if is_linear(model, node)}
    queue = list(tensors)
    for tensor in queue:
        for source in last_axis_sources(model, tensor):
            if source not in tensors:
                tensors.add(source)
                queue.append(source)
    return tensors


def is_multiplication(model: Model, node: Node) -> bool:
    """Return whether a node is a convolution, or a matrix product (Gemm, MatMul or Einsum)."""
    return node.op in WEIGHTED or find_contraction(model, node) is not None


# Einsum ----------------------------------------------------------------------------------------


class Contraction(NamedTuple):
    """An Einsum that is a matrix product: the letters of its axes by their role.

    Attributes:
        operands: Axes of each operand, one letter per axis, including the axes of an ellipsis.
        result: Axes of the result.
        batch: Letters that both operands and the result have.
        summed: Letters that both operands have, but not the result.
        free: Letters that the first operand and the result have, but not the second operand; then
            letters that the second operand and the result have, but not the first.
        exact: Whether the number of axes of every ellipsis is known. An unknown number is assumed
            to equal the number of the other operand, or to be 1.
    """

    operands: tuple[str, str]
    result: str
    batch: str
    summed: str
    free: tuple[str, str]
    exact: bool


def find_contraction(model: Model, node: Node) -> Contraction | None:
    """Return the matrix product that an Einsum of two operands computes.

    None for any other node, and for an Einsum that computes anything else.
    """
    if node.op != "Einsum" or node.domain not in DOMAINS or len(node.inputs) != 2:
        return None
    terms = _parse_equation(str(node.attributes.get("equation", "")).replace(" ", ""))
    if terms is None:
        return None
    counts = [_count_ellipsis_axes(terms[i], model.shape(node.input(i))) for i in range(2)]
    expanded = _expand_ellipses(terms, counts)
    if expanded is None:
        return None
    left, right, result = expanded
    known_counts = sum(count is not None for count in counts)
    exact = known_counts == sum(_ELLIPSIS in term for term in terms[:2])
    return _classify_axes(left, right, result, exact)


def _parse_equation(equation: str) -> list[str] | None:
    operands, arrow, result = equation.partition("->")
    if not arrow:
        letters = set(operands) - set(",.")
        result = "".join(sorted(letter for letter in letters if operands.count(letter) == 1))
        if _ELLIPSIS in operands:
            result = _ELLIPSIS + result
    terms = [*operands.split(","), result]
    if len(terms) != 3 or (_ELLIPSIS in operands) != (_ELLIPSIS in result):
        return None
    for term in terms:
        named = term.replace(_ELLIPSIS, "", 1)
        if len(set(named)) < len(named) or not set(named) <= set(string.ascii_letters):
            return None
    return terms


def _count_ellipsis_axes(term: str, shape: Shape | None) -> int | None:
    if shape is None or _ELLIPSIS not in term:
        return None
    return len(shape) - len(term.replace(_ELLIPSIS, "", 1))


def _expand_ellipses(terms: list[str], counts: list[int | None]) -> list[str] | None:
    """Return the terms with letters for the axes of ellipses, aligned at their last axis.

    ``terms`` are the axes of both operands and of the result. ``counts`` has the number of axes
    that the ellipsis of each operand stands for; None if unknown. The result is None if an ellipsis
    would stand for a negative number of axes or for 64 axes or more.
    """
    known_counts = [count for count in counts if count is not None]
    if not all(0 <= count < _MAX_RANK for count in known_counts):
        return None
    total = max(known_counts, default=1)
    letters = "".join(chr(_FIRST_ELLIPSIS_LETTER + i) for i in range(total))
    expanded = []
    for term, count in zip(terms, (*counts, None), strict=True):
        axes = letters if count is None else letters[total - count :]
        expanded.append(term.replace(_ELLIPSIS, axes))
    return expanded


def _classify_axes(left: str, right: str, result: str, exact: bool) -> Contraction | None:
    """Return the matrix product with its axes sorted by role.

    None if no axis is summed or if an axis has no role in a matrix product, such as an axis that
    is only in one operand and not in the result.
    """
    batch = _select_axes(_select_axes(result, left), right)
    summed = _select_axes(left, right, but_not=result)
    left_free = _select_axes(result, left, but_not=right)
    right_free = _select_axes(result, right, but_not=left)
    classified = {*batch, *summed, *left_free, *right_free}
    if not summed or not {*left, *right, *result} <= classified:
        return None
    return Contraction((left, right), result, batch, summed, (left_free, right_free), exact)


def _select_axes(axes: str, term: str, but_not: str = "") -> str:
    return "".join(letter for letter in axes if letter in term and letter not in but_not)
