"""Normalization in pieces, as below opset 17: ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, and its other forms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.base.records import record
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import is_run_time, operator_of, rearranges, reduced_axes
from qdqtool.model.qdq import FLOATS, is_dq, is_q, read_params
from qdqtool.model.sizes import contraction
from qdqtool.model.subgraphs import DOMAINS
from qdqtool.types import Precision

NORM_OPSET = 17  # the first with LayerNormalization
NORMALIZATIONS = (
    "LayerNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "RMSNormalization",
)
_ARITHMETIC = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Max",
    "Clip",
    "Relu",
)  # between the mean of squares and its root
_MOST, _LEAST = 65504.0, 6e-8  # of FP16
_DEEPEST = 4  # nodes of it, and Casts behind one another
_WITHIN_ONE = ("Softmax", "Sigmoid", "HardSigmoid", "Tanh", "Softsign", "Erf", "Sin", "Cos")
_NO_LARGER = ("Relu", "Abs", "Neg", "Identity", "Dropout", "Cast", "Gather")  # than what they read
_Array = npt.NDArray[Any]


@record
class DecomposedLayerNorm:
    """A normalization in pieces: of a layer, or of its root mean square alone.

    Attributes:
        input: What is normalized, in front of Casts.
        nodes: Its nodes, Casts between them too; the one that makes its result last.
        fp32_nodes: Those to compute in FP32: squares, their mean and the root, and what leads to and divides by these.
        square: The node that squares.
        mean: The ReduceMean over the squares.
        axes: The axes that it works on, from the end (-1 is the last), ascending; None where they are not known, or
            where it is of a form that no LayerNormalization computes.
        epsilon: What is added to the variance, and nothing else done to it; None where that is no constant number.
        scale: The constant that the result is multiplied with; empty for none.
        bias: The constant that is added then; empty for none.
    """

    input: str
    nodes: tuple[Node, ...]
    fp32_nodes: tuple[Node, ...]
    square: Node
    mean: Node
    axes: tuple[int, ...] | None
    epsilon: float | None
    scale: str
    bias: str

    @property
    def output(self) -> str:
        return self.nodes[-1].output


_ROOTS = ("Sqrt", "Pow")
_SQUARES = (
    "ReduceL2",
    "ReduceSumSquare",
    "LpNormalization",
    "RMSNormalization",
    "Mul",
    "Pow",
    "Einsum",
    "MatMul",
)


def find_decomposed_layer_norms(model: Model) -> list[DecomposedLayerNorm]:
    """Every normalization in pieces, in graph order, recognised by what reads what past Casts between float types."""
    return [
        found
        for root in model.ordered
        if root.op in _ROOTS and (found := _pieces(model, root)) is not None
    ]


def last_axis_gains(model: Model) -> dict[str, str]:
    """The gains of normalizations over the last axis, also those in pieces, by what they make; empty for none."""
    found = {
        n.output: n.input(1)
        for n in model.nodes
        if _is(n, "LayerNormalization", "RMSNormalization") and n.integer("axis", -1) == -1
    }
    return found | {
        p.output: p.scale for p in find_decomposed_layer_norms(model) if p.axes == (-1,)
    }


def find_sums_of_squares(
    model: Model, norms: Iterable[DecomposedLayerNorm]
) -> list[tuple[Node, ...]]:
    """Other squares that are summed, as in F.normalize: the nodes to compute in FP32, what squares first.

    A product of vectors with themselves (Einsum, MatMul) squares and sums as well. Those are left out of which a scale,
    a gain or an operator in front proves that FP16 holds them. ``norms`` are the model's :func:`find_decomposed_layer_norms`.
    """
    inside = {n.index for pieces in norms for n in pieces.nodes}
    found: list[tuple[Node, ...]] = []
    for node in model.ordered:
        if node.op not in _SQUARES or node.index in inside:
            continue
        alone = _is(node, "ReduceL2", "ReduceSumSquare") or (
            _is(node, "LpNormalization") and node.integer("p", 2) == 2
        )
        half = node.integer("stash_type", onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT16
        sums = (
            [r for r in _readers(model, node) if _is(r, "ReduceMean", "ReduceSum")]
            if _power(model, node) == 2.0
            else []
        )
        squares = (
            alone or sums or (_is(node, "RMSNormalization") and half) or _with_itself(model, node)
        )
        if squares and is_run_time(model, node.input(0)) and not _held(model, node, sums):
            found.append((node, *sums, *(r for s in (node, *sums) for r in _to_root(model, s))))
    return found


def _with_itself(model: Model, node: Node) -> list[int]:
    """The axes that a product of vectors with themselves sums over, from the end; empty for another node."""
    known = contraction(model, node)
    if known is not None:
        letters = known.operands[0]
        same = len(set(_sources(model, node))) == 1 and known.operands[1] == letters
        return [letters.index(c) - len(letters) for c in known.summed] if same else []
    if not _is(node, "MatMul"):
        return []
    row, column = (model.shape(node.input(i)) or () for i in range(2))
    vectors = len(row) > 1 and len(column) > 1 and row[-2] == column[-1] == 1
    return [-1] if vectors and len({_unmoved(model, t) for t in node.inputs}) == 1 else []


def _unmoved(model: Model, tensor: str) -> str:
    """A tensor, or the one that only was moved and cast to make it."""
    while (node := model.producer(tensor)) is not None and (
        rearranges(node) or _is_cast(model, node)
    ):
        tensor = node.input(0)
    return tensor


def _to_root(model: Model, node: Node) -> list[Node]:
    """The Sqrt nodes behind a sum, with what only moves it in between."""
    found: list[Node] = []
    for reader in _readers(model, node):
        behind = (
            [reader]
            if _is(reader, "Sqrt")
            else _to_root(model, reader)
            if rearranges(reader)
            else []
        )
        found += behind if _is(reader, "Sqrt") or not behind else [reader, *behind]
    return found


def _held(model: Model, square: Node, sums: list[Node]) -> bool:
    """Whether neither the smallest nor the largest sum of squares is beyond FP16, by what the values are known to be.

    What a LayerNormalization makes has a mean square of 1 before its gains (unless all channels are alike).
    """
    tensor = _source(model, square.input(0))
    maker, shape = model.producer(tensor), model.shape(tensor)
    axes = {a for r in sums or [square] for a in reduced_axes(model, r) or ()} or {
        *_with_itself(model, square)
    }
    if maker is None or shape is None or not axes:
        return False
    sizes = [shape[a] if -len(shape) <= a < len(shape) else None for a in axes]
    if None in sizes:
        return False
    count = math.prod(d or 0 for d in sizes)
    gains = _gains(model, maker) if axes <= {-1, len(shape) - 1} else None
    known = magnitude_range(model, tensor) if gains is None else gains
    if known is None or not count:
        return False
    least = known[0] ** 2 / (1 if gains else count)
    return least > _LEAST and count * known[1] ** 2 < _MOST


def magnitude_range(model: Model, tensor: str) -> tuple[float, float] | None:
    """What a tensor's magnitudes are by what makes it, whatever the data are: those above zero, and the largest.

    Known behind a DQ (its step and range), a Clip, a LayerNormalization, and functions that stay within 1, also where
    that was only moved or made positive. None where nothing says it.
    """
    node = model.producer(tensor)
    while node is not None and (
        _is(node, *_NO_LARGER) or is_q(node) or rearranges(node) or operator_of(node).cuts
    ):
        tensor = node.input(0)
        node = model.producer(tensor)
    if node is None or node.domain not in DOMAINS:
        return None
    if is_dq(node):
        params = read_params(model, node)
        if params.scale is None or not params.scale.size or params.precision != Precision.INT8:
            return None
        return float(params.scale.min()), (255 if np.any(params.zero_point != 0) else 128) * float(
            params.scale.max()
        )
    if node.op in _WITHIN_ONE:
        return 1.0, 1.0
    if node.op == "Clip":
        bounds = [
            _number(model, node.input(i)) if node.input(i) else node.attributes.get(name)
            for i, name in ((1, "min"), (2, "max"))
        ]
        largest = max(
            float("inf" if b is None else np.abs(np.asarray(b, np.float64)).max()) for b in bounds
        )
        return (largest, largest) if math.isfinite(largest) else None
    gains, last = _gains(model, node), (model.shape(tensor) or (None,))[-1]
    return None if gains is None or last is None else (gains[0], math.sqrt(last) * gains[1])


def _gains(model: Model, node: Node) -> tuple[float, float] | None:
    """The smallest gain of a LayerNormalization over the last axis, and the largest with that of its biases added."""
    rank = len(model.shape(node.output) or ())
    if not _is(node, "LayerNormalization") or node.integer("axis", -1) not in (-1, rank - 1):
        return None
    values = [_number(model, t) for t in node.inputs[1:3] if t]
    if any(v is None or not v.size for v in values):
        return None
    sizes = [np.abs(v.astype(np.float64)) for v in values if v is not None]
    return float(sizes[0].min()), sum(float(v.max()) for v in sizes)


def layer_norm_inputs(
    model: Model, pieces: DecomposedLayerNorm
) -> tuple[str, _Array, _Array | None] | None:
    """What the LayerNormalization that computes the same reads, its scale and its bias; None where none does.

    It normalizes the last axes, with a scale and a bias of their shape, and nothing else reads what is between.
    """
    axes = pieces.axes
    if (
        axes is None
        or axes != tuple(range(-len(axes), 0))
        or pieces.epsilon is None
        or not pieces.epsilon > 0.0
    ):
        return None
    inside = {n.index for n in pieces.nodes}
    for node in pieces.nodes[:-1]:
        if model.is_output(node.output) or any(
            r.index not in inside for r in model.consumers(node.output)
        ):
            return None
    ends = [shape for t in (pieces.input, pieces.output) if (shape := model.shape(t)) is not None]
    if len(ends) == 2 and len(ends[0]) != len(ends[1]):
        return None
    given = [_number(model, name) if name else None for name in (pieces.scale, pieces.bias)]
    sizes = _sizes(model, pieces.input, len(axes), given[0])
    if sizes is None or any(
        name and not _fits(v, sizes)
        for name, v in zip((pieces.scale, pieces.bias), given, strict=True)
    ):
        return None
    # Of a tensor and what a Cast makes of it, that of the result's type is read.
    kind, tensors = model.elem_type(pieces.output), [pieces.nodes[0].input(0), pieces.input]
    tensor = next((t for t in tensors if kind in (0, model.elem_type(t))), None)
    if tensor is None:
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind or onnx.TensorProto.FLOAT)
    values = [
        None
        if v is None
        else np.broadcast_to(v.reshape(sizes if v.size > 1 else ()), sizes).astype(dtype)
        for v in given
    ]
    return tensor, values[0] if values[0] is not None else np.ones(sizes, dtype), values[1]


def computes_in_fp16(model: Model, nodes: Iterable[Node]) -> bool:
    """Whether the file states FP16 for the squares or their sum."""
    return any(model.elem_type(n.output) == onnx.TensorProto.FLOAT16 for n in nodes)


def fuse_layer_norms(model: Model) -> int:
    """Writes those that a LayerNormalization computes exactly as one, in place, and returns how many they are.

    The last node of each becomes the LayerNormalization, so that name and output stay. Needs opset 17 or newer.
    """
    editor = Editor(model)
    found = [
        (p, made)
        for p in find_decomposed_layer_norms(model)
        if (made := layer_norm_inputs(model, p)) is not None
    ]
    for pieces, (tensor, scale, bias) in found:
        assert pieces.axes is not None and pieces.epsilon is not None
        last = pieces.nodes[-1]
        inputs = [tensor, editor.constant(f"{last.name}/scale", scale)]
        if bias is not None:
            inputs.append(editor.constant(f"{last.name}/bias", bias))
        proto = editor.edit_proto(last)
        proto.CopyFrom(
            onnx.helper.make_node(
                "LayerNormalization",
                inputs,
                last.outputs,
                last.proto.name,
                axis=pieces.axes[0],
                epsilon=pieces.epsilon,
            )
        )
    if found:
        editor.finish()
    return len(found)


def _sizes(model: Model, tensor: str, count: int, scale: _Array | None) -> list[int] | None:
    """The last dimensions of a tensor; where they are not known those of the scale, which fits nothing else."""
    shape = model.shape(tensor)
    last = [d for d in shape[-count:] if d is not None] if shape is not None else []
    if len(last) == count:
        return last
    return (
        list(scale.shape) if scale is not None and scale.ndim == count and scale.size > 1 else None
    )


def _fits(value: _Array | None, sizes: list[int]) -> bool:
    """Whether a constant is one number, or one for each place of the dimensions."""
    if value is None or value.size == 1:
        return value is not None
    return value.size == math.prod(sizes) and list(value.shape[-len(sizes) :]) == sizes


def skip_identities(model: Model, tensor: str) -> str:
    """A tensor, or the one behind Identity nodes, which exporters write for equal weights."""
    while (node := model.producer(tensor)) is not None and node.op == "Identity":
        tensor = node.input(0)
    return tensor


def _pieces(model: Model, root: Node) -> DecomposedLayerNorm | None:
    """The normalization of which a node takes the root."""
    inner = _squares(model, root.input(0)) if abs(_power(model, root) or 0.0) == 0.5 else []
    if not inner:
        return None
    square, reduced, *behind = inner
    base = _maker(model, square.input(0), "Sub")
    mean = _mean(model, base)
    tensor = _source(model, (square if mean is None or base is None else base).input(0))
    powers, products = _divided(model, root)
    first = next(
        (p for p in products if p.op == "Div" or powers[-1].output in _sources(model, p)), None
    )
    read = [t for p in products for t in _sources(model, p) if t not in {n.output for n in powers}]
    subs = [
        sub
        for t in read
        for s in (t, *_factors(model, t))
        if (sub := _maker(model, s, "Sub")) is not None
    ]
    if first is None or tensor not in {*read, *(t for n in subs for t in _sources(model, n))}:
        return None
    plain = [n.op for n in behind] == ["Add"]
    epsilon = [
        e
        for t in (behind[0].inputs if plain else ())
        if (e := _number(model, t)) is not None and e.size == 1
    ]
    before = [
        *dict.fromkeys(
            n
            for n in (mean, base, *(_mean(model, b) for b in subs), *subs)
            if mean is not None and n is not None
        )
    ]
    wide = [*before, *inner, *powers, *products]
    nodes, scale, bias = list(wide), "", ""
    if len(products) == 1:
        scaled, scale = _applied(model, first, "Mul")
        shifted, bias = _applied(model, scaled, "Add") if scaled is not None else (None, "")
        nodes += [n for n in (scaled, shifted) if n is not None]
    axes = {_axes(model, n) for n in before + [reduced] if n.op != "Sub"}
    exact = (
        mean is not None
        and reduced.op == "ReduceMean"
        and plain
        and len(subs) == len(products) == len(axes) == 1
        and _inverts(model, first, powers)
        and {_source(model, n.input(0)) for n in before if n.op != "Sub"} == {tensor}
        and _source(model, subs[0].input(0)) == tensor
        and _mean(model, subs[0]) is not None
    )
    return DecomposedLayerNorm(
        tensor,
        _with_casts(model, nodes),
        tuple(wide),
        square,
        reduced,
        axes.pop() if exact else None,
        float(epsilon[0].reshape(-1)[0]) if len(epsilon) == 1 else None,
        scale,
        bias,
    )


def _factors(model: Model, tensor: str) -> list[str]:
    """What a product with a constant multiplies: some multiply with the gain before they divide."""
    product = _maker(model, tensor, "Mul")
    found = _sources(model, product) if product is not None else []
    return found if any(not is_run_time(model, t) for t in found) else []


def _mean(model: Model, sub: Node | None) -> Node | None:
    """The mean that is taken off the tensor that it is the mean of."""
    mean = _maker(model, sub.input(1), "ReduceMean") if sub is not None else None
    same = (
        mean is not None and sub is not None and _sources(model, mean)[0] == _sources(model, sub)[0]
    )
    return mean if same else None


def _squares(model: Model, tensor: str, depth: int = _DEEPEST) -> list[Node]:
    """What squares, the mean or sum of the squares, and the arithmetic behind it; empty for another tensor."""
    node = _maker(model, tensor, "ReduceMean", "ReduceSum", *_ARITHMETIC)
    if node is None:
        return []
    if node.op not in _ARITHMETIC:
        square = model.producer(_source(model, node.input(0)))
        return [square, node] if square is not None and _power(model, square) == 2 else []
    found = (_squares(model, t, depth - 1) for t in node.inputs[:2] if depth)
    return next(([*f, node] for f in found if f), [])


def _divided(model: Model, root: Node) -> tuple[list[Node], list[Node]]:
    """The root and what it becomes with constants alone (its inverse), and the nodes that multiply or divide by it."""
    powers, products = [root], dict[int, Node]()
    for node in powers:
        for reader in _readers(model, node):
            others = [t for t in _sources(model, reader) if t != node.output]
            fixed = all(not is_run_time(model, t) for t in others)
            if reader.op == "Reciprocal" or (_is(reader, *_ARITHMETIC) and others and fixed):
                powers.append(reader)
            elif _is(reader, "Mul", "Div") and others:
                products[reader.index] = reader
    return powers, [*products.values()]


def _inverts(model: Model, product: Node, powers: list[Node]) -> bool:
    """Whether a product is that of the difference and of one over the root, and nothing else."""
    inverted = (_power(model, powers[0]) or 0.0) < 0.0
    for node in powers[1:]:
        one = _number(model, node.input(0)) if node.op == "Div" else None
        if inverted or not (
            node.op == "Reciprocal" or (one is not None and bool(np.all(one == 1.0)))
        ):
            return False
        inverted = True
    return (
        product.op == "Mul"
        if inverted
        else _sources(model, product)[1] == powers[0].output and product.op == "Div"
    )


def _is(node: Node | None, *ops: str) -> bool:
    return node is not None and node.op in ops and node.domain in DOMAINS


def _is_cast(model: Model, node: Node | None) -> bool:
    return (
        node is not None
        and _is(node, "Cast")
        and {node.integer("to", 0), model.elem_type(node.input(0)) or onnx.TensorProto.FLOAT}
        <= FLOATS
    )


def _source(model: Model, tensor: str) -> str:
    """A tensor, or the one in front of Casts."""
    for _ in range(_DEEPEST):
        node = model.producer(tensor)
        if node is None or not _is_cast(model, node):
            break
        tensor = node.input(0)
    return tensor


def _sources(model: Model, node: Node) -> list[str]:
    return [_source(model, t) for t in node.inputs]


def _maker(model: Model, tensor: str, *ops: str) -> Node | None:
    """What makes a tensor, where it is one of these operators."""
    node = model.producer(_source(model, tensor))
    return node if _is(node, *ops) else None


def _readers(model: Model, node: Node, depth: int = _DEEPEST) -> list[Node]:
    """What reads a node's result, also behind Casts."""
    return [
        r
        for n in model.consumers(node.output)
        for r in (_readers(model, n, depth - 1) if depth and _is_cast(model, n) else [n])
    ]


def _with_casts(model: Model, nodes: list[Node]) -> tuple[Node, ...]:
    """Nodes, with the Casts between them in front of their last."""
    made = {n.output for n in nodes[:-1]}
    casts: dict[int, Node] = {}
    for tensor in (t for n in nodes for t in n.inputs if _source(model, t) in made):
        while tensor not in made:
            cast = model.producers[tensor]
            casts[cast.index], tensor = cast, cast.input(0)
    return (*nodes[:-1], *casts.values(), nodes[-1])


def _number(model: Model, tensor: str) -> _Array | None:
    """The value of a constant, also behind Casts and Identity nodes."""
    behind = ""
    while behind != tensor:
        behind, tensor = tensor, skip_identities(model, _source(model, tensor))
    return model.constant(tensor)


def _power(model: Model, node: Node) -> float | None:
    """The exponent that a node raises its input to; None for other operators and where it is not known."""
    if _is(node, "Sqrt"):
        return 0.5
    if _is(node, "Mul") and len(set(_sources(model, node))) == 1:
        return 2.0
    exponent = _number(model, node.input(1)) if _is(node, "Pow") else None
    return float(exponent.reshape(-1)[0]) if exponent is not None and exponent.size == 1 else None


def _applied(model: Model, node: Node, op: str) -> tuple[Node | None, str]:
    """The node that alone reads another's result and multiplies it with (adds to it) a constant vector."""
    readers = _readers(model, node)
    if len(readers) != 1 or not _is(readers[0], op):
        return None, ""
    other = next((t for t in readers[0].inputs if _source(model, t) != node.output), "")
    return (readers[0], other) if other and not is_run_time(model, other) else (None, "")


def _axes(model: Model, reduce: Node) -> tuple[int, ...] | None:
    if not reduce.integer("keepdims", 1):
        return None
    axes, shape = reduced_axes(model, reduce), model.shape(reduce.input(0))
    if not axes:
        return None
    if any(a >= 0 for a in axes):
        if shape is None:
            return None
        axes = [a - len(shape) if a >= 0 else a for a in axes]
    return tuple(sorted(axes))
