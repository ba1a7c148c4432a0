"""Fixes of weights and biases, such as copies of shared weights or Q/DQ on float weights."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.errors import ModelError
from qdqtool.findings.lint.weight_granularity import find_scales_per_tensor
from qdqtool.fixing.site import (
    FixSite,
    broadcast_along,
    collect_names,
    drop_missing_sites,
    find_nodes,
    find_reason_nodes,
    map_reason_nodes,
    select_reasons,
)
from qdqtool.insertion.batchnorm import read_norm_parameters
from qdqtool.insertion.number_formats import FP8, INT8, NumberFormat
from qdqtool.insertion.rewrite import quantize_to_int8, round_up_to_half
from qdqtool.insertion.scales import weight_scale
from qdqtool.ir import qdq
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import LayerKind, operator_of, weight_scale_axis
from qdqtool.ir.precision import Precision
from qdqtool.patterns.rewrites import copy_weights
from qdqtool.patterns.view import View, WeightSource
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fusions import BatchNormNotConstant
from qdqtool.reasons.tensors import STEPS
from qdqtool.reasons.text import list_names
from qdqtool.reasons.weights import (
    WeightsNotDequantized,
    WeightsPerTensor,
    WeightsShared,
    WeightsStoredAsIntegers,
)
from qdqtool.trt.targets import Target

Array = npt.NDArray[Any]
_MAX_STEPS = 127.5  # larger multiples of the scale are clipped; tools divide by 127 or 127.5


@map_reason_nodes
def find_quantized_biases(view: View, target: Target, dq: Node) -> FixSite | None:
    """Return a site that replaces an integer bias and its DQ by a float constant."""
    return make_float_constant_site(view, dq, "bias stored as float")


def make_float_constant_site(
    view: View, dq: Node, description: str, exact: Array | None = None
) -> FixSite | None:
    """Return a site that replaces an integer constant and its DQ by a float constant.

    None if values are unknown, or if the output of the DQ is a graph output or used in a subgraph.

    Args:
        view: The model.
        dq: The DQ of the constant.
        description: Description of the change.
        exact: Values of the float constant. None for the output of the DQ.
    """
    dequantize = make_dequantizer(view, dq)
    if (
        dequantize is None
        or view.model.is_output(dq.output)
        or any(n.captured for n in view.model.consumers(dq.output))
    ):
        return None

    def apply(editor: Editor) -> None:
        values = dequantize() if exact is None else exact
        editor.redirect_consumers(dq.output, editor.add_constant(f"{dq.input(0)}_float", values))
        editor.remove(dq)

    return FixSite(dq.name, f"{dq.name}: {description}", apply)


def make_dequantizer(view: View, dq: Node) -> Callable[[], Array] | None:
    """Return a function that computes the output of the DQ of a constant.

    None if values or parameters are not constant, or if their shapes do not match. The values are
    computed when they are needed, which saves memory: the weights of a whole network are large.
    """
    stored = view.model.constant(dq.input(0))
    params = view.params(dq)
    scale = view.model.constant(dq.input(1))
    if stored is None or scale is None or params.scale is None or params.zero_point is None:
        return None
    try:
        zero, steps = (
            broadcast_along(v.reshape(-1), stored.shape, view.axis(dq), dq.name)
            for v in (params.zero_point, scale)
        )
    except ModelError:  # another finding reports scales of a wrong shape
        return None
    # Compute in the type of the scale, so that the result equals that of DequantizeLinear in all
    # bits.
    return lambda: np.asarray(
        (stored.astype(np.int64) - zero).astype(scale.dtype) * steps, scale.dtype
    )


def find_stored_integers(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that replace integer weights by float weights and a Q with the same result."""
    stored = select_reasons(WeightsStoredAsIntegers, reasons)
    convolutions = find_nodes(view, (r.convolution for r in stored))
    return drop_missing_sites(_integer_weights_site(view, conv) for conv in convolutions)


def _integer_weights_site(view: View, conv: Node) -> FixSite | None:
    weights = view.weights(conv)
    dq = weights.dq
    dequantize = make_dequantizer(view, dq) if dq is not None and weights.constant else None
    if dq is None or dequantize is None or view.params(dq).precision != Precision.INT8:
        return None

    def apply(editor: Editor) -> None:
        inputs = [editor.add_constant(f"{dq.input(0)}_float", dequantize()), *dq.inputs[1:]]
        attributes = {"axis": int(dq.attributes["axis"])} if "axis" in dq.attributes else {}
        q = editor.insert_node(dq, qdq.Q, f"{dq.name}_quantize", inputs, attributes)
        editor.set_input(dq, 0, q)

    return FixSite(dq.name, f"{dq.name}: weights stored as float, with a Q", apply)


def find_shared_weights(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that copy shared weights and their Q/DQ for all consumers except the first."""
    users: dict[str, list[tuple[Node, WeightSource]]] = defaultdict(list)
    shared = select_reasons(WeightsShared, reasons)
    sources = {r.weight for r in shared}
    for conv in find_nodes(view, (name for r in shared for name in r.convolutions)):
        weights = view.weights(conv)
        if weights.source in sources and weights.constant and not weights.after:
            users[weights.source].append((conv, weights))
    return drop_missing_sites(
        _shared_weights_site(view, source, group) for source, group in users.items()
    )


def _shared_weights_site(
    view: View, source: str, users: list[tuple[Node, WeightSource]]
) -> FixSite | None:
    value = view.model.constant(source) if len(users) > 1 else None
    if value is None:
        return None

    def apply(editor: Editor) -> None:
        for conv, weights in users[1:]:
            copy_weights(editor, conv, weights, value)

    consumers = list_names(c.name for c, _ in users)
    return FixSite(source, f"'{source}': weights copied for each of {consumers}", apply)


def find_computed_weights(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that replace the nodes between weights and their quantizer by a constant."""
    constants = ConstantEvaluator(view.model)
    names = collect_names(reasons)
    return drop_missing_sites(
        _fold_weights_site(view, c, constants, names) for c in view.nodes_with_weights
    )


def _fold_weights_site(
    view: View, conv: Node, constants: ConstantEvaluator, names: set[str]
) -> FixSite | None:
    weights = view.weights(conv)
    quantizer = weights.first_quantizer
    between = list(itertools.islice(weights.before, STEPS))
    places = [conv.name, *(n.name for n in between)]
    if names.isdisjoint(places) or quantizer is None or not between:
        return None
    value = constants.evaluate(weights.source)
    if value is None:
        return None

    def apply(editor: Editor) -> None:
        editor.set_input(quantizer, 0, editor.add_constant(f"{weights.source}_folded", value))

    further = len(weights.before) - len(between)
    ops = ", ".join(n.op for n in between) + (f" and {further} more" if further else "")
    description = f"{quantizer.name}: {ops} before it folded into the weights"
    return FixSite(conv.name, description, apply, places)


def find_float_weights(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that add Q/DQ to the weights of layers whose input is quantized.

    The weights get the format of the input, INT8 or FP8. Left out are weights that have a DQ, are
    not constant or not finite, and those of layers without a fast FP8 kernel.
    """
    found = [r for r in select_reasons(WeightsNotDequantized, reasons) if not r.slow_fp8]
    fp8 = {reason.node for reason in found if reason.fp8}
    layers = find_reason_nodes(view, found)
    formats = (FP8 if layer.name in fp8 else INT8 for layer in layers)
    return drop_missing_sites(
        map(functools.partial(_float_weights_site, view, target), layers, formats)
    )


def _float_weights_site(
    view: View, target: Target, conv: Node, number_format: NumberFormat
) -> FixSite | None:
    weights = view.weights(conv)
    if weights.dq is not None or not weights.constant:
        return None
    value = view.model.constant(weights.source)
    if value is None or value.ndim < 2 or not np.all(np.isfinite(value)):
        return None
    axis = weight_scale_axis(conv, value.ndim, target.transposed_per_channel)
    is_product = operator_of(conv).kind == LayerKind.MATRIX_MULTIPLY
    if number_format is FP8 and is_product and not target.has_fp8_product_channels:
        axis = None

    def apply(editor: Editor) -> None:
        scale = weight_scale(value, axis, number_format.largest).astype(value.dtype)
        parameters = _add_weight_parameters(editor, conv, scale, number_format)
        attributes = {} if axis is None else {"axis": axis}
        tensor = conv.input(1)
        for op in (qdq.Q, qdq.DQ):
            name = f"{conv.name}/weight_quantizer/{op}"
            tensor = editor.insert_node(conv, op, name, [tensor, *parameters], attributes)
        editor.set_input(conv, 1, tensor)

    granularity = "with one scale" if axis is None else "per output channel"
    return FixSite(conv.name, f"{conv.name}: weights quantized {granularity}", apply)


def _add_weight_parameters(
    editor: Editor, conv: Node, scale: Array, number_format: NumberFormat = INT8
) -> list[str]:
    zeros = np.zeros(scale.shape, np.float32)
    zero_point = number_format.make_tensor(f"{conv.name}/weight_zero_point", zeros)
    return [
        editor.add_constant(f"{conv.name}/weight_scale", scale),
        editor.add_constant_tensor(zero_point),
    ]


@map_reason_nodes
def find_transposed_weights(view: View, target: Target, conv: Node) -> FixSite | None:
    """Return a site that quantizes the weights of a ConvTranspose with one scale.

    The scale is the largest magnitude divided by 127. None if the target supports the axis of the
    present scales, or if the weights are unknown, not INT8, or changed by a node after their Q/DQ.
    """
    weights = view.weights(conv)
    quantizer = weights.first_quantizer
    if operator_of(conv).kind != LayerKind.DECONVOLUTION or quantizer is None:
        return None
    stored = view.model.constant(weights.source) if weights.constant else None
    if stored is None or weights.after or view.params(quantizer).precision != Precision.INT8:
        return None
    supported = weight_scale_axis(conv, stored.ndim, target.transposed_per_channel)
    if _scale_axes(view, weights) <= {None, supported}:
        return None
    value = stored
    if weights.q is None:
        dequantize = make_dequantizer(view, quantizer)
        if dequantize is None:
            return None
        value = dequantize()
    if not np.all(np.isfinite(value)):
        return None

    def apply(editor: Editor) -> None:
        scale = _round_scale_if_fp16(editor, weights, weight_scale(value, None))
        tensor = weights.source
        if weights.q is None:
            integers: Array = quantize_to_int8(value, scale.astype(np.float32), None)
            tensor = editor.add_constant(f"{tensor}_one_scale", integers.astype(stored.dtype))
        _insert_weight_pair(editor, conv, weights, tensor, scale, None, "one_scale")

    return FixSite(conv.name, f"{conv.name}: one scale for all its weights", apply)


def _scale_type(editor: Editor, weights: WeightSource) -> np.dtype[Any]:
    quantizer = weights.first_quantizer
    assert quantizer is not None
    kind = editor.model.elem_type(quantizer.input(1))
    dtype: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(kind or onnx.TensorProto.FLOAT)
    return dtype


def _round_scale_if_fp16(editor: Editor, weights: WeightSource, scale: Array) -> Array:
    is_half = _scale_type(editor, weights) == np.float16
    return round_up_to_half(scale) if is_half else scale


def _insert_weight_pair(
    editor: Editor,
    conv: Node,
    weights: WeightSource,
    tensor: str,
    scale: Array,
    axis: int | None,
    suffix: str,
) -> None:
    """Insert copies of Q and DQ for the weights of one layer. Other layers keep the old nodes.

    `tensor` is the input of the first new quantizer, `suffix` the end of the new names.
    """
    scale = scale.astype(_scale_type(editor, weights))
    parameters = _add_weight_parameters(editor, conv, scale)
    attributes = {} if axis is None else {"axis": axis}
    for node in (weights.q, weights.dq):
        if node is not None:
            name = f"{node.name}_{suffix}"
            tensor = editor.insert_node(conv, node.op, name, [tensor, *parameters], attributes)
    editor.set_input(conv, 1, tensor)


def find_per_tensor_weights(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
    """Return sites that replace a single weight scale by scales per output channel.

    Only layers whose single scale loses accuracy have a site.
    """
    granularities, _ = find_scales_per_tensor(view, target.name)
    lossy = [r for r in select_reasons(WeightsPerTensor, reasons) if r.lossy]
    layers = {name for r in lossy for name in r.layers}
    convolutions = [g.node for g in granularities if not g.rounded and g.node.name in layers]
    return drop_missing_sites(_channel_scales_site(view, target, conv) for conv in convolutions)


def _channel_scales_site(view: View, target: Target, conv: Node) -> FixSite | None:
    weights, shape = view.weights(conv), view.weight_shape(conv)
    value = view.model.constant(weights.source)
    if value is None or shape is None or weights.q is None or weights.dq is None:
        return None
    axis = weight_scale_axis(conv, len(shape), target.transposed_per_channel)
    old = view.params(weights.q).scale
    if axis is None or old is None or old.size != 1:
        return None
    clipped = _clip_to_range(value, float(old.reshape(-1)[0]))

    def apply(editor: Editor) -> None:
        source = weights.source
        if clipped is not value:
            source = editor.add_constant(f"{source}_clipped", clipped)
        scale = _round_scale_if_fp16(editor, weights, weight_scale(clipped, axis))
        _insert_weight_pair(editor, conv, weights, source, scale, axis, "per_channel")

    return FixSite(conv.name, f"{conv.name}: a weight scale for each channel", apply)


def _clip_to_range(value: Array, scale: float) -> Array:
    if np.abs(value).max(initial=0) <= _MAX_STEPS * scale:
        return value
    return np.clip(value, -128 * scale, 127 * scale).astype(value.dtype)


def find_batchnorm_parameters(
    view: View, target: Target, reasons: Sequence[Reason]
) -> list[FixSite]:
    """Return sites that store computed parameters of a BatchNormalization as constants."""
    constants = ConstantEvaluator(view.model)
    computed = select_reasons(BatchNormNotConstant, reasons)
    norms = find_nodes(view, (r.batchnorm for r in computed))
    return drop_missing_sites(_batchnorm_parameters_site(view, norm, constants) for norm in norms)


def _batchnorm_parameters_site(
    view: View, norm: Node, constants: ConstantEvaluator
) -> FixSite | None:
    values: dict[int, Array] = {}
    for position, tensor in enumerate(norm.inputs[1:], 1):
        if view.model.constant_proto(tensor) is None:
            value = constants.evaluate(tensor)
            if value is not None:
                values[position] = value
    if not values:
        return None

    def apply(editor: Editor) -> None:
        for position, value in values.items():
            name = f"{norm.name}/{norm.input(position)}"
            editor.set_input(norm, position, editor.add_constant(name, value))

    return FixSite(norm.name, f"{norm.name}: its parameters stored as plain constants", apply)


@map_reason_nodes
def find_batchnorms_after_transposed(view: View, target: Target, conv: Node) -> FixSite | None:
    """Return a site that folds a BatchNormalization into the weights of a ConvTranspose.

    For each output channel, the weights are multiplied by the factor of the BatchNormalization, and
    their scale by its magnitude. The quantized integers therefore stay the same, except that a
    negative factor changes their signs. None if the nodes cannot be merged, for example because the
    convolution has groups, or its output is an output of the network.
    """
    consumers = view.model.consumers(conv.output)
    if len(consumers) != 1 or consumers[0].op != "BatchNormalization":
        return None
    norm, weights = consumers[0], view.weights(conv)
    quantizer, affine = weights.first_quantizer, _batchnorm_affine(view, conv, norm)
    if affine is None or quantizer is None or not weights.constant or weights.after:
        return None
    factor, shift = affine
    value, params = view.model.constant(weights.source), view.params(quantizer)
    if value is None or value.ndim < 2 or value.shape[1] != factor.size:
        return None
    if params.scale is None or not _can_merge_factor(view, quantizer, factor.size):
        return None
    scale = np.broadcast_to(params.scale, factor.shape) * np.abs(factor)
    multiplier = factor if weights.q is not None else np.sign(factor)
    folded = value.astype(np.float64) * multiplier.reshape(1, -1, *(1,) * (value.ndim - 2))
    if weights.q is None:
        folded = np.clip(folded, -128, 127)

    def apply(editor: Editor) -> None:
        tensor = editor.add_constant(f"{weights.source}_folded", folded.astype(value.dtype))
        _insert_weight_pair(editor, conv, weights, tensor, scale, 1, "folded")
        bias = shift.astype(_scale_type(editor, weights))
        editor.set_input(conv, 2, editor.add_constant(f"{conv.name}/folded_bias", bias))
        editor.remove(norm)
        editor.set_output(conv, 0, norm.output)

    return FixSite(conv.name, f"{norm.name} folded into {conv.name}", apply)


def _scale_axes(view: View, weights: WeightSource) -> set[int | None]:
    return {view.axis(node) for node in (weights.q, weights.dq) if node is not None}


def _can_merge_factor(view: View, quantizer: Node, channels: int) -> bool:
    params = view.params(quantizer)
    is_symmetric = params.zero_point is not None and not np.any(params.zero_point != 0)
    has_scales = params.scale is not None and params.scale.size in (1, channels)
    return is_symmetric and has_scales and view.axis(quantizer) in (None, 1)


def _batchnorm_affine(view: View, conv: Node, norm: Node) -> tuple[Array, Array] | None:
    """Return factor and shift of a BatchNormalization for each output channel.

    The shift includes the bias of the convolution. None if parameters are not constant, or if a
    factor is 0 or not finite. None also if the convolution has groups, or if its output is an
    output of the network.
    """
    model = view.model
    if conv.integer("group", 1) != 1 or model.is_output(conv.output):
        return None
    bias = model.constant(conv.input(2)) if conv.input(2) else np.zeros((), np.float32)
    parameters = read_norm_parameters(model, norm)
    if bias is None or parameters is None:
        return None
    factor, beta, mean = parameters
    if not np.all(np.isfinite(factor)) or np.any(factor == 0):
        return None
    return factor, beta + (np.asarray(bias, np.float64) - mean) * factor
