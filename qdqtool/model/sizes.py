"""What follows from the sizes of a network's inputs, whatever they hold: exporters leave shapes to be computed."""

from __future__ import annotations

import string
from typing import NamedTuple

from onnx import TensorProto

from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import CUTS, WEIGHTED, LayerKind, operator_of, rearranges
from qdqtool.model.qdq import QUANTIZABLE
from qdqtool.model.subgraphs import DOMAINS, STANDARD

MOVES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Gather", "Expand")
RANDOM = (
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)
_PICKS = (
    "Gather",
    "GatherElements",
    "GatherND",
)  # their sizes do not depend on the indices' values
_BY_VALUE = ("NonZero", "NonMaxSuppression", "Unique", "Compress", "If", "Loop", "Scan")
_DOTS = "..."  # in an equation of Einsum: axes without letters
_RANK = 64  # no tensor of a network has as many axes
_INTEGERS = (TensorProto.UNDEFINED, TensorProto.INT64, TensorProto.INT32)


def find_size_constants(model: Model) -> tuple[list[str], list[str]]:
    """What is the same for all data of one size, although the model does not state it.

    Returns:
        Tensors whose values are, of those that say how others are moved; and tensors whose dimensions are.
    """
    known: set[str] = set()
    loose: set[str] = set()  # of dimensions that values decide

    def fixed(tensor: str) -> bool:
        return not tensor or tensor in known or model.is_constant(tensor)

    for node in model.ordered:
        inputs = [t for t in node.inputs if t]
        if (
            node.domain not in STANDARD
            or node.captured
            or node.op in _BY_VALUE
            or loose.intersection(inputs)
        ):
            loose.update(node.outputs)
        elif operator_of(node).kind == LayerKind.SHAPE or (
            inputs and node.op not in RANDOM and all(map(fixed, inputs))
        ):
            known.update(node.outputs)
        elif node.op not in _PICKS and not all(
            fixed(t) or model.elem_type(t) not in _INTEGERS for t in inputs
        ):
            loose.update(node.outputs)
    computed = (
        t
        for n in model.ordered
        for t in n.outputs
        if t and not model.is_constant(t) and t not in loose
    )
    shapes = [t for t in computed if t not in known and None in (model.shape(t) or (None,))]
    read = {t for n in model.ordered if n.op in (*MOVES, *CUTS, "Pad") for t in n.inputs[1:]}
    return [t for t in known if t in read], shapes


def is_linear(model: Model, node: Node) -> bool:
    """Whether a node multiplies the last axis of its data with constant weights of two dimensions."""
    if operator_of(node).kind != LayerKind.MATRIX_MULTIPLY or node.integer("transA", 0):
        return False
    shape = model.constant_shape(node.input(1))
    return shape is not None and len(shape) == 2 and model.elem_type(node.input(1)) in QUANTIZABLE


def last_axis_sources(model: Model, tensor: str) -> list[str]:
    """The tensors of which one only has other axes moved, joined or cut: its last axis is theirs.

    A Reshape and its like keep the last axis where it is as long before and after, as they go row by row.
    """
    node, last = model.producer(tensor), (model.shape(tensor) or (None,))[-1]
    if (
        node is None
        or last is None
        or not (rearranges(node) or operator_of(node).joins or operator_of(node).cuts)
    ):
        return []
    perm = node.attributes.get("perm")
    if node.op == "Transpose" and not (
        isinstance(perm, list) and perm and perm[-1] == len(perm) - 1
    ):
        return []
    above = node.inputs if operator_of(node).joins else node.inputs[:1]
    return [t for t in above if (model.shape(t) or (None,))[-1] == last]


def linear_inputs(model: Model) -> set[str]:
    """Tensors whose last axis is the one that Linears sum over: what they read, and what that is moved from."""
    found = {n.input(0): None for n in model.nodes if is_linear(model, n)}
    pending = list(found)
    for tensor in pending:
        new = dict.fromkeys(t for t in last_axis_sources(model, tensor) if t not in found)
        found.update(new)
        pending += new
    return set(found)


def is_multiplication(model: Model, node: Node) -> bool:
    """Whether a node is a convolution or a matrix product, also one that an Einsum computes."""
    return node.op in WEIGHTED or contraction(model, node) is not None


class Contraction(NamedTuple):
    """An Einsum that is a matrix product: the letters of its two operands and its result, by what becomes of them.

    Attributes:
        operands: The axes of each operand, a letter for each, also for those of an ellipsis.
        result: Those of the result.
        batch: Letters of all three.
        summed: Letters of both operands alone.
        free: Letters of the first operand and the result, and of the second and the result.
        exact: Whether the number of axes of every ellipsis is known; else it is taken to be the other operand's, or 1.
    """

    operands: tuple[str, str]
    result: str
    batch: str
    summed: str
    free: tuple[str, str]
    exact: bool


def contraction(model: Model, node: Node) -> Contraction | None:
    """What an Einsum of two operands multiplies and sums; None for another node, and where it does anything else."""
    if node.op != "Einsum" or node.domain not in DOMAINS or len(node.inputs) != 2:
        return None
    before, arrow, result = (
        str(node.attributes.get("equation", "")).replace(" ", "").partition("->")
    )
    if not arrow:
        letters = sorted(c for c in {*before} - {*",."} if before.count(c) == 1)
        result = _DOTS * (_DOTS in before) + "".join(letters)
    terms = [*before.split(","), result]
    named = [t.replace(_DOTS, "", 1) for t in terms]
    if len(terms) != 3 or any(
        len(set(t)) < len(t) or not {*t} <= {*string.ascii_letters} for t in named
    ):
        return None
    shapes = [model.shape(t) for t in node.inputs]
    dots = [
        len(s) - len(n)
        for s, n, t in zip(shapes, named, terms, strict=False)
        if s is not None and _DOTS in t
    ]
    if (_DOTS in before) != (_DOTS in result) or not {*dots} <= {*range(_RANK)}:
        return None
    axes = "".join(
        chr(ord("\N{GREEK SMALL LETTER ALPHA}") + i) for i in range(max(dots, default=1))
    )
    left, right, result = (
        t.replace(_DOTS, axes if s is None else axes[len(axes) + len(n) - len(s) :])
        for t, n, s in zip(terms, named, (*shapes, None), strict=True)
    )
    batch = "".join(c for c in result if c in left and c in right)
    summed = "".join(c for c in left if c in right and c not in result)
    free = tuple(
        "".join(c for c in result if (c in a) > (c in b)) for a, b in ((left, right), (right, left))
    )
    kept = {*batch, *summed, *free[0], *free[1]}
    if not summed or not set(result) <= kept or not {*left, *right} <= kept:
        return None
    return Contraction(
        (left, right), result, batch, summed, (free[0], free[1]), len(dots) == before.count(_DOTS)
    )
