"""Decomposed layer normalizations, and other sums of squares that may exceed FP16.

Exporters write a layer normalization below opset 17 as ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt,
Div, or in another form of the same computation. The forms are recognized by structure. Casts
between float types may be anywhere in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir.bounds import WITHIN_ONE
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import is_run_time, operator_of, rearranges, reduction_axes
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import FLOATS, is_dq, is_q, read_params
from qdqtool.ir.sizes import find_contraction
from qdqtool.proto.subgraphs import DOMAINS

NORM_OPSET = 17  # first opset with LayerNormalization
NORMALIZATIONS = (
    "LayerNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "RMSNormalization",
)
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
# Arithmetic that may be between the mean of squares and its root
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Clip", "Relu")
# Operators whose results do not exceed the magnitudes of the input
_NOT_LARGER = ("Relu", "Abs", "Neg", "Identity", "Dropout", "Cast", "Gather")
_FP16_MAX, _FP16_MIN = 65504.0, 6e-8
_MAX_DEPTH = 4  # maximum number of arithmetic nodes before the root, and of consecutive Casts
_Array = npt.NDArray[Any]


class DecomposedLayerNorm(NamedTuple):
    """A layer or RMS normalization that is written in several nodes.

    Attributes:
        input: The tensor to normalize, before Casts.
        nodes: Nodes of the normalization with the Casts between them. The last node produces the
            result.
        fp32_nodes: Nodes to compute in FP32: those that subtract the mean, square, average, take
            the root and divide by the root.
        square: The node that squares.
        mean: The ReduceMean (or ReduceSum) of the squares.
        axes: Normalized axes, counted from the end (-1 is the last), ascending. None if they are
            unknown or if no LayerNormalization computes this form.
        epsilon: The constant that is added to the variance; None if it is not a single constant or
            if other arithmetic follows.
        scale: Name of the constant that multiplies the result; empty without a scale.
        bias: Name of the constant that is added after the scale; empty without a bias.
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
        """The normalized result."""
        return self.nodes[-1].output


class LayerNormInputs(NamedTuple):
    """Inputs of the LayerNormalization that can replace a decomposed normalization.

    Attributes:
        tensor: The tensor to normalize.
        scale: Factors of the shape of the normalized axes.
        bias: Summands of the shape of the normalized axes; None without a bias.
    """

    tensor: str
    scale: _Array
    bias: _Array | None


def find_decomposed_layer_norms(model: Model) -> list[DecomposedLayerNorm]:
    """Return the decomposed layer normalizations in graph order."""
    norms = [_match_norm(model, node) for node in model.ordered if node.op in _ROOTS]
    return [norm for norm in norms if norm is not None]


def last_axis_gains(model: Model) -> dict[str, str]:
    """Return the name of the gains of each normalization over the last axis, by output tensor.

    Decomposed normalizations are included. The name is empty for a normalization without gains.
    """
    gains: dict[str, str] = {}
    for node in model.nodes:
        is_norm = _has_op(node, "LayerNormalization", "RMSNormalization")
        if is_norm and node.integer("axis", -1) == -1:
            gains[node.output] = node.input(1)
    for norm in find_decomposed_layer_norms(model):
        if norm.axes == (-1,):
            gains[norm.output] = norm.scale
    return gains


# Sums of squares -------------------------------------------------------------------------------


def find_sums_of_squares(
    model: Model, norms: Iterable[DecomposedLayerNorm]
) -> list[tuple[Node, ...]]:
    """Return the sums of squares outside `norms` that have to be computed in FP32.

    PyTorch's F.normalize contains a sum of squares. The product of a vector with itself (Einsum,
    MatMul) is a sum of squares as well. A sum is left out if a scale, a gain or an upstream
    operator proves that the sum fits FP16.

    Args:
        model: The model.
        norms: Decomposed normalizations of the model. Their sums are left out.

    Returns:
        The nodes of each sum and of its square roots. The first node squares.
    """
    norm_nodes = {node.index for norm in norms for node in norm.nodes}
    groups: list[tuple[Node, ...]] = []
    for node in model.ordered:
        if node.op not in _SQUARES or node.index in norm_nodes:
            continue
        sums = _sums_of_square(model, node)
        if (sums or _squares_and_sums(model, node)) and not _fits_fp16(model, node, sums):
            groups.append((node, *sums, *_downstream_sqrt_nodes(model, [node, *sums])))
    return groups


def _sums_of_square(model: Model, node: Node) -> list[Node]:
    if _exponent(model, node) != 2.0:
        return []
    return [c for c in _find_consumers(model, node) if _has_op(c, "ReduceMean", "ReduceSum")]


def _squares_and_sums(model: Model, node: Node) -> bool:
    if _has_op(node, "ReduceL2", "ReduceSumSquare"):
        return True
    if _has_op(node, "LpNormalization"):
        return node.integer("p", 2) == 2
    if _has_op(node, "RMSNormalization"):
        stash_type = node.integer("stash_type", onnx.TensorProto.FLOAT)
        return stash_type == onnx.TensorProto.FLOAT16
    return bool(_self_product_axes(model, node))


def _self_product_axes(model: Model, node: Node) -> list[int]:
    """Return the summed axes of a product of vectors with themselves, counted from the end.

    Empty for any other node.
    """
    product = find_contraction(model, node)
    if product is not None:
        letters = product.operands[0]
        if product.operands[1] != letters or len(set(_inputs_before_casts(model, node))) != 1:
            return []
        return [letters.index(letter) - len(letters) for letter in product.summed]
    if not _has_op(node, "MatMul") or not _multiplies_row_by_column(model, node):
        return []
    return [-1] if len({_skip_moves(model, tensor) for tensor in node.inputs}) == 1 else []


def _multiplies_row_by_column(model: Model, matmul: Node) -> bool:
    row, column = model.shape(matmul.input(0)) or (), model.shape(matmul.input(1)) or ()
    return len(row) > 1 and len(column) > 1 and row[-2] == column[-1] == 1


def _skip_moves(model: Model, tensor: str) -> str:
    node = model.producer(tensor)
    while node is not None and (rearranges(node) or _is_float_cast(model, node)):
        tensor = node.input(0)
        node = model.producer(tensor)
    return tensor


def _downstream_sqrt_nodes(model: Model, sums: Iterable[Node]) -> list[Node]:
    nodes: list[Node] = []
    for node in sums:
        for consumer in _find_consumers(model, node):
            if _has_op(consumer, "Sqrt"):
                nodes.append(consumer)
            elif rearranges(consumer):
                roots = _downstream_sqrt_nodes(model, [consumer])
                if roots:
                    nodes += [consumer, *roots]
    return nodes


def _fits_fp16(model: Model, square: Node, sums: list[Node]) -> bool:
    """Return whether the smallest and the largest sum of squares are known to fit FP16.

    A sum over a constant is not computed at run time and counts as fitting. The result of a
    LayerNormalization has a mean square of 1 before its gains, unless all channels are equal.
    """
    if not is_run_time(model, square.input(0)):
        return True
    tensor = _skip_casts(model, square.input(0))
    shape, axes = model.shape(tensor), _find_summed_axes(model, square, sums)
    if shape is None or not axes:
        return False
    count = _axes_size(shape, axes)
    is_last = axes <= {-1, len(shape) - 1}
    gains = _affine_magnitudes(model, model.producer(tensor)) if is_last else None
    magnitudes = gains or magnitude_range(model, tensor)
    if magnitudes is None or not count:
        return False
    smallest, largest = magnitudes
    mean_count = 1 if gains else count
    return smallest**2 / mean_count > _FP16_MIN and count * largest**2 < _FP16_MAX


def _find_summed_axes(model: Model, square: Node, sums: list[Node]) -> set[int]:
    axes = set(_self_product_axes(model, square))
    for reduction in sums or [square]:
        axes.update(reduction_axes(model, reduction) or ())
    return axes


def _axes_size(shape: tuple[int | None, ...], axes: Iterable[int]) -> int | None:
    count = 1
    for axis in axes:
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if size is None:
            return None
        count *= size
    return count


# Magnitudes ------------------------------------------------------------------------------------


def magnitude_range(model: Model, tensor: str) -> tuple[float, float] | None:
    """Return the smallest magnitude of a tensor that matters for FP16, and the largest.

    The smallest magnitude is the step of a DQ, or the smallest gain of a LayerNormalization. For a
    Clip and for functions with results of at most 1, both magnitudes are equal, because small
    values do not matter there. Nodes that move values, and Relu, Abs and Neg, may follow. None if
    unknown.
    """
    while _keeps_magnitude(model.producer(tensor)):
        tensor = model.producers[tensor].input(0)
    node = model.producer(tensor)
    if node is None or node.domain not in DOMAINS:
        return None
    if is_dq(node):
        return _dq_magnitudes(model, node)
    if node.op in WITHIN_ONE:
        return 1.0, 1.0
    if node.op == "Clip":
        return _clip_magnitudes(model, node)
    gains, last_size = _affine_magnitudes(model, node), (model.shape(tensor) or (None,))[-1]
    if gains is None or last_size is None:
        return None
    return gains[0], math.sqrt(last_size) * gains[1]


def _keeps_magnitude(node: Node | None) -> bool:
    return _has_op(node, *_NOT_LARGER) or is_q(node) or rearranges(node) or operator_of(node).cuts


def _dq_magnitudes(model: Model, dq: Node) -> tuple[float, float] | None:
    params = read_params(model, dq)
    if params.scale is None or not params.scale.size or params.precision != Precision.INT8:
        return None
    steps = 255 if np.any(params.zero_point != 0) else 128
    return float(params.scale.min()), steps * float(params.scale.max())


def _clip_magnitudes(model: Model, clip: Node) -> tuple[float, float] | None:
    magnitudes: list[float] = []
    for position, name in ((1, "min"), (2, "max")):
        tensor = clip.input(position)
        bound = _read_constant(model, tensor) if tensor else clip.attributes.get(name)
        if bound is None:
            return None
        magnitudes.append(float(np.abs(np.asarray(bound, np.float64)).max()))
    largest = max(magnitudes)
    return (largest, largest) if math.isfinite(largest) else None


def _affine_magnitudes(model: Model, node: Node | None) -> tuple[float, float] | None:
    """Return a LayerNormalization's smallest gain, and its largest gain plus its largest bias.

    Signs of gains and biases are ignored. None for any other node, for axes other than the last,
    and if a constant is unknown.
    """
    if node is None or not _has_op(node, "LayerNormalization"):
        return None
    rank = len(model.shape(node.output) or ())
    if node.integer("axis", -1) not in (-1, rank - 1):
        return None
    magnitudes: list[_Array] = []
    for tensor in node.inputs[1:3]:
        if tensor:
            value = _read_constant(model, tensor)
            if value is None or not value.size:
                return None
            magnitudes.append(np.abs(value.astype(np.float64)))
    return float(magnitudes[0].min()), sum(float(m.max()) for m in magnitudes)


# Fusing ----------------------------------------------------------------------------------------


def layer_norm_inputs(model: Model, norm: DecomposedLayerNorm) -> LayerNormInputs | None:
    """Return the inputs of a LayerNormalization that can replace a decomposed normalization.

    None unless the normalized axes are the last ones, the epsilon is known, the scale and the bias
    fit the shape of these axes, and no other node reads a tensor inside the normalization.
    """
    if not _normalizes_last_axes(model, norm) or _is_used_inside(model, norm):
        return None
    scale, bias = _read_constant(model, norm.scale), _read_constant(model, norm.bias)
    sizes = _layer_norm_sizes(model, norm, scale)
    if sizes is None or not _is_broadcastable(norm.scale, scale, sizes):
        return None
    if not _is_broadcastable(norm.bias, bias, sizes):
        return None
    elem_type = model.elem_type(norm.output)
    tensor = _find_input_of_type(model, norm, elem_type)
    if tensor is None:
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type or onnx.TensorProto.FLOAT)
    full_scale = _broadcast_parameter(scale, sizes, dtype)
    full_bias = _broadcast_parameter(bias, sizes, dtype)
    return LayerNormInputs(
        tensor, np.ones(sizes, dtype) if full_scale is None else full_scale, full_bias
    )


def _normalizes_last_axes(model: Model, norm: DecomposedLayerNorm) -> bool:
    if norm.axes is None or norm.epsilon is None or not norm.epsilon > 0.0:
        return False
    before, after = model.shape(norm.input), model.shape(norm.output)
    if before is not None and after is not None and len(before) != len(after):
        return False
    return norm.axes == tuple(range(-len(norm.axes), 0))


def _is_used_inside(model: Model, norm: DecomposedLayerNorm) -> bool:
    inside = {node.index for node in norm.nodes}
    for node in norm.nodes[:-1]:
        if model.is_output(node.output):
            return True
        if any(consumer.index not in inside for consumer in model.consumers(node.output)):
            return True
    return False


def _layer_norm_sizes(
    model: Model, norm: DecomposedLayerNorm, scale: _Array | None
) -> list[int] | None:
    """Return the sizes of the normalized axes; None if unknown.

    The sizes are read from the scale if the tensor's dimensions are unknown.
    """
    count = len(norm.axes or ())
    shape = model.shape(norm.input)
    sizes = [size for size in (shape or ())[-count:] if size is not None]
    if len(sizes) == count:
        return sizes
    if scale is not None and scale.ndim == count and scale.size > 1:
        return list(scale.shape)
    return None


def _is_broadcastable(name: str, value: _Array | None, sizes: list[int]) -> bool:
    """Return whether a scale or bias is absent, has one element, or has the shape `sizes`."""
    if not name or value is None:
        return not name
    return value.size == 1 or (
        value.size == math.prod(sizes) and list(value.shape[-len(sizes) :]) == sizes
    )


def _find_input_of_type(model: Model, norm: DecomposedLayerNorm, elem_type: int) -> str | None:
    """Return the input of a normalization, before or after its Cast, that has a given type.

    None if neither tensor has the type. If `elem_type` is 0 (unknown), the tensor after the Cast is
    returned.
    """
    for tensor in (norm.nodes[0].input(0), norm.input):
        if elem_type in (0, model.elem_type(tensor)):
            return tensor
    return None


def _broadcast_parameter(value: _Array | None, sizes: list[int], dtype: Any) -> _Array | None:
    if value is None:
        return None
    shaped = value.reshape(sizes if value.size > 1 else ())
    return np.broadcast_to(shaped, sizes).astype(dtype)


def computes_in_fp16(model: Model, nodes: Iterable[Node]) -> bool:
    """Return whether the file states FP16 for the result of at least one of the nodes."""
    return any(model.elem_type(node.output) == onnx.TensorProto.FLOAT16 for node in nodes)


def fuse_layer_norms(model: Model) -> int:
    """Replace decomposed normalizations by LayerNormalization nodes in place.

    A normalization is replaced only if one LayerNormalization computes the same result. The last
    node of the normalization becomes the LayerNormalization, so that name and output do not change.
    The model must have opset 17 or newer.

    Returns:
        The number of replaced normalizations.
    """
    editor = Editor(model)
    count = 0
    for norm in find_decomposed_layer_norms(model):
        inputs = layer_norm_inputs(model, norm)
        if inputs is not None:
            _fuse_norm(editor, norm, inputs)
            count += 1
    if count:
        editor.finish()
    return count


def _fuse_norm(editor: Editor, norm: DecomposedLayerNorm, inputs: LayerNormInputs) -> None:
    assert norm.axes is not None and norm.epsilon is not None
    last = norm.nodes[-1]
    names = [inputs.tensor, editor.add_constant(f"{last.name}/scale", inputs.scale)]
    if inputs.bias is not None:
        names.append(editor.add_constant(f"{last.name}/bias", inputs.bias))
    fused = onnx.helper.make_node(
        "LayerNormalization",
        names,
        last.outputs,
        last.proto.name,
        axis=norm.axes[0],
        epsilon=norm.epsilon,
    )
    editor.edit_proto(last).CopyFrom(fused)


def skip_identities(model: Model, tensor: str) -> str:
    """Return the tensor upstream of Identity nodes, which exporters write for equal weights."""
    node = model.producer(tensor)
    while node is not None and node.op == "Identity":
        tensor = node.input(0)
        node = model.producer(tensor)
    return tensor


# Recognizing -----------------------------------------------------------------------------------


def _match_norm(model: Model, root: Node) -> DecomposedLayerNorm | None:
    if abs(_exponent(model, root) or 0.0) != 0.5:
        return None
    variance = _variance_nodes(model, root.input(0))
    if not variance:
        return None
    candidate = _NormCandidate(model, root, variance)
    return candidate.build() if candidate.divides_input() else None


class _NormCandidate:
    """Nodes around the root of a mean of squares, which may form a normalization.

    Attributes:
        variance: Nodes from the square to the last node before the root.
        centered: The Sub whose result is squared; None if the input itself is squared.
        mean: The ReduceMean that ``centered`` subtracts.
        input: The tensor that may be normalized.
        roots: The root, and nodes that compute functions of the root and constants, such as its
            inverse.
        products: Nodes that multiply with a root or divide by it.
        differences: Sub nodes that produce the other factors of the products.
    """

    def __init__(self, model: Model, root: Node, variance: list[Node]) -> None:
        self.model = model
        self.variance = variance
        square = variance[0]
        self.centered = _find_producer(model, square.input(0), "Sub")
        self.mean = _find_subtracted_mean(model, self.centered)
        first = square if self.mean is None or self.centered is None else self.centered
        self.input = _skip_casts(model, first.input(0))
        self.roots, self.products = _root_and_products(model, root)
        root_outputs = {node.output for node in self.roots}
        self._factors: list[str] = []
        for product in self.products:
            sources = _inputs_before_casts(model, product)
            self._factors += [tensor for tensor in sources if tensor not in root_outputs]
        self.differences = self._find_differences()

    def _find_differences(self) -> list[Node]:
        differences: list[Node] = []
        for factor in self._factors:
            for tensor in (factor, *_factors_with_constant(self.model, factor)):
                difference = _find_producer(self.model, tensor, "Sub")
                if difference is not None:
                    differences.append(difference)
        return differences

    def divides_input(self) -> bool:
        """Return whether the root divides the input, or a difference that contains the input."""
        if self._first_product() is None:
            return False
        divided = set(self._factors)
        for difference in self.differences:
            divided.update(_inputs_before_casts(self.model, difference))
        return self.input in divided

    def _first_product(self) -> Node | None:
        last_root = self.roots[-1].output
        for product in self.products:
            if product.op == "Div" or last_root in _inputs_before_casts(self.model, product):
                return product
        return None

    def build(self) -> DecomposedLayerNorm:
        product = self._first_product()
        assert product is not None
        square, reduction = self.variance[:2]
        centering = self._centering_nodes()
        fp32_nodes = [*centering, *self.variance, *self.roots, *self.products]
        nodes, scale, bias = list(fp32_nodes), "", ""
        if len(self.products) == 1:
            scaled, scale = _following_constant(self.model, product, "Mul")
            if scaled is not None:
                nodes.append(scaled)
                shifted, bias = _following_constant(self.model, scaled, "Add")
                if shifted is not None:
                    nodes.append(shifted)
        return DecomposedLayerNorm(
            input=self.input,
            nodes=_include_casts(self.model, nodes),
            fp32_nodes=tuple(fp32_nodes),
            square=square,
            mean=reduction,
            axes=self._find_axes(product, centering),
            epsilon=self._read_epsilon(),
            scale=scale,
            bias=bias,
        )

    def _centering_nodes(self) -> list[Node]:
        if self.mean is None:
            return []
        means = [_find_subtracted_mean(self.model, difference) for difference in self.differences]
        nodes = (self.mean, self.centered, *means, *self.differences)
        return list(dict.fromkeys(node for node in nodes if node is not None))

    def _adds_only_epsilon(self) -> bool:
        return [node.op for node in self.variance[2:]] == ["Add"]

    def _read_epsilon(self) -> float | None:
        if not self._adds_only_epsilon():
            return None
        values = [_read_constant(self.model, tensor) for tensor in self.variance[2].inputs]
        numbers = [value for value in values if value is not None and value.size == 1]
        return float(numbers[0].reshape(-1)[0]) if len(numbers) == 1 else None

    def _find_axes(self, product: Node, centering: list[Node]) -> tuple[int, ...] | None:
        """Return the normalized axes.

        None if they are unknown, or if no LayerNormalization computes the same result.
        """
        reduction = self.variance[1]
        means = [node for node in centering if node.op != "Sub"]
        axes = {_axes_from_end(self.model, node) for node in (*means, reduction)}
        if self.mean is None or reduction.op != "ReduceMean" or not self._adds_only_epsilon():
            return None
        if not len(self.differences) == len(self.products) == len(axes) == 1:
            return None
        return axes.pop() if self._divides_centered_input(product, means) else None

    def _divides_centered_input(self, product: Node, means: list[Node]) -> bool:
        difference = self.differences[0]
        sources = {_skip_casts(self.model, node.input(0)) for node in (*means, difference)}
        return (
            sources == {self.input}
            and _find_subtracted_mean(self.model, difference) is not None
            and _divides_by_root(self.model, product, self.roots)
        )


def _factors_with_constant(model: Model, tensor: str) -> list[str]:
    """Return the factors of a product with a constant, such as a gain; else an empty list."""
    product = _find_producer(model, tensor, "Mul")
    factors = [] if product is None else _inputs_before_casts(model, product)
    return factors if any(not is_run_time(model, factor) for factor in factors) else []


def _find_subtracted_mean(model: Model, difference: Node | None) -> Node | None:
    """Return the ReduceMean node in ``x - ReduceMean(x)``; None for any other difference."""
    if difference is None:
        return None
    mean = _find_producer(model, difference.input(1), "ReduceMean")
    if mean is None:
        return None
    reduced, minuend = (_inputs_before_casts(model, node)[0] for node in (mean, difference))
    return mean if reduced == minuend else None


def _variance_nodes(model: Model, tensor: str, depth: int = _MAX_DEPTH) -> list[Node]:
    """Return the nodes of a mean of squares: square, reduction and the arithmetic after it.

    Empty if the tensor is not computed from such a mean.
    """
    node = _find_producer(model, tensor, "ReduceMean", "ReduceSum", *_ARITHMETIC)
    if node is None:
        return []
    if node.op not in _ARITHMETIC:
        square = model.producer(_skip_casts(model, node.input(0)))
        is_square = square is not None and _exponent(model, square) == 2
        return [square, node] if is_square and square is not None else []
    if depth:
        for operand in node.inputs[:2]:
            nodes = _variance_nodes(model, operand, depth - 1)
            if nodes:
                return [*nodes, node]
    return []


def _root_and_products(model: Model, root: Node) -> tuple[list[Node], list[Node]]:
    """Return the nodes that combine a root with constants, and products of the results.

    The root is the first of these nodes. Divisions count as products.
    """
    roots, products = [root], dict[int, Node]()
    for node in roots:
        for consumer in _find_consumers(model, node):
            others = [t for t in _inputs_before_casts(model, consumer) if t != node.output]
            if consumer.op == "Reciprocal" or _combines_constants(model, consumer, others):
                roots.append(consumer)
            elif others and _has_op(consumer, "Mul", "Div"):
                products[consumer.index] = consumer
    return roots, list(products.values())


def _combines_constants(model: Model, node: Node, operands: list[str]) -> bool:
    return (
        bool(operands)
        and _has_op(node, *_ARITHMETIC)
        and not any(is_run_time(model, tensor) for tensor in operands)
    )


def _divides_by_root(model: Model, product: Node, roots: list[Node]) -> bool:
    """Return whether a product divides by the root, or multiplies by the root's reciprocal."""
    inverted = (_exponent(model, roots[0]) or 0.0) < 0.0
    for node in roots[1:]:
        if inverted or not _is_reciprocal(model, node):
            return False
        inverted = True
    if inverted:
        return product.op == "Mul"
    divisor = _inputs_before_casts(model, product)[1]
    return divisor == roots[0].output and product.op == "Div"


def _is_reciprocal(model: Model, node: Node) -> bool:
    if node.op == "Reciprocal":
        return True
    dividend = _read_constant(model, node.input(0)) if node.op == "Div" else None
    return dividend is not None and bool(np.all(dividend == 1.0))


def _following_constant(model: Model, node: Node, op: str) -> tuple[Node | None, str]:
    """Return the only consumer of a node, and the constant that this consumer applies.

    Return ``(None, "")`` if the consumer has an operator other than ``op``, if there are several
    consumers, or if the consumer's other operand is not constant.
    """
    consumers = _find_consumers(model, node)
    if len(consumers) != 1 or not _has_op(consumers[0], op):
        return None, ""
    consumer = consumers[0]
    for tensor in consumer.inputs:
        if _skip_casts(model, tensor) != node.output:
            is_constant = bool(tensor) and not is_run_time(model, tensor)
            return (consumer, tensor) if is_constant else (None, "")
    return None, ""


def _axes_from_end(model: Model, reduction: Node) -> tuple[int, ...] | None:
    """Return the axes of a reduction, counted from the end.

    None if they are unknown, or if the reduction does not keep dimensions.
    """
    if not reduction.integer("keepdims", 1):
        return None
    axes, shape = reduction_axes(model, reduction), model.shape(reduction.input(0))
    if not axes:
        return None
    if any(axis >= 0 for axis in axes):
        if shape is None:
            return None
        axes = [axis - len(shape) if axis >= 0 else axis for axis in axes]
    return tuple(sorted(axes))


# Neighbors across Casts ------------------------------------------------------------------------


def _has_op(node: Node | None, *ops: str) -> bool:
    return node is not None and node.op in ops and node.domain in DOMAINS


def _is_float_cast(model: Model, node: Node) -> bool:
    if not _has_op(node, "Cast"):
        return False
    source_type = model.elem_type(node.input(0)) or onnx.TensorProto.FLOAT
    return {node.integer("to", 0), source_type} <= FLOATS


def _skip_casts(model: Model, tensor: str) -> str:
    for _ in range(_MAX_DEPTH):
        node = model.producer(tensor)
        if node is None or not _is_float_cast(model, node):
            break
        tensor = node.input(0)
    return tensor


def _inputs_before_casts(model: Model, node: Node) -> list[str]:
    return [_skip_casts(model, tensor) for tensor in node.inputs]


def _find_producer(model: Model, tensor: str, *ops: str) -> Node | None:
    """Return the producer before a tensor's Casts; None unless its operator is in `ops`."""
    node = model.producer(_skip_casts(model, tensor))
    return node if _has_op(node, *ops) else None


def _find_consumers(model: Model, node: Node, depth: int = _MAX_DEPTH) -> list[Node]:
    """Return the consumers of a node's output, downstream of Casts."""
    consumers: list[Node] = []
    for consumer in model.consumers(node.output):
        if depth and _is_float_cast(model, consumer):
            consumers += _find_consumers(model, consumer, depth - 1)
        else:
            consumers.append(consumer)
    return consumers


def _include_casts(model: Model, nodes: list[Node]) -> tuple[Node, ...]:
    outputs = {node.output for node in nodes[:-1]}
    casts: dict[int, Node] = {}
    for node in nodes:
        for tensor in node.inputs:
            if _skip_casts(model, tensor) in outputs:
                while tensor not in outputs:
                    cast = model.producers[tensor]
                    casts[cast.index], tensor = cast, cast.input(0)
    return (*nodes[:-1], *casts.values(), nodes[-1])


def _read_constant(model: Model, tensor: str) -> _Array | None:
    after = None
    while after != tensor:
        after, tensor = tensor, skip_identities(model, _skip_casts(model, tensor))
    return model.constant(tensor)


def _exponent(model: Model, node: Node) -> float | None:
    if _has_op(node, "Sqrt"):
        return 0.5
    if _has_op(node, "Mul") and len(set(_inputs_before_casts(model, node))) == 1:
        return 2.0
    exponent = _read_constant(model, node.input(1)) if _has_op(node, "Pow") else None
    if exponent is None or exponent.size != 1:
        return None
    return float(exponent.reshape(-1)[0])
