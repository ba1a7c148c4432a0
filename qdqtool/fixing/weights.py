"""Fixes of weights and biases: float biases, weights of their own, folded constants, Q/DQ on bare weights."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.errors import ModelError
from qdqtool.findings import messages
from qdqtool.findings.lint.weight_granularity import find_per_tensor
from qdqtool.fixing.site import Site, along, at, named, nodes_of, only
from qdqtool.insertion.rewrite import quantize, round_up_to_half
from qdqtool.insertion.scales import weight_scale
from qdqtool.ir import qdq
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import LayerKind, operator_of, weight_scale_axis
from qdqtool.patterns.rewrites import copy_weights
from qdqtool.patterns.view import View, WeightSource
from qdqtool.trt.faults import WeightsPerTensor, WeightsStored
from qdqtool.trt.refusals import STEPS, BatchNormNotConstant, WeightsShared
from qdqtool.trt.targets import Target
from qdqtool.types import Precision, Refusal

_Array = npt.NDArray[Any]


def biases(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """The dequantized bias as a float constant."""
    sites: list[Site] = []
    for dq in nodes_of(view, reported):
        value = dequantized(view, dq)
        if (
            value is None
            or view.model.is_output(dq.output)
            or any(n.captured for n in view.model.consumers(dq.output))
        ):
            continue

        def apply(editor: Editor, dq: Node = dq, value: Callable[[], _Array] = value) -> None:
            editor.redirect(dq.output, editor.constant(f"{dq.input(0)}_float", value()))
            editor.remove(dq)

        sites.append(Site(dq.name, f"{dq.name}: bias stored as float", apply))
    return sites


def dequantized(view: View, dq: Node) -> Callable[[], _Array] | None:
    """Makes stored integers (or floats behind a Q) the float constant that a DQ makes of them, in the scale's type.

    Made when it is needed: the weights of a whole network are large.
    """
    stored = view.model.constant(dq.input(0))
    params = view.params(dq)
    scale = view.model.constant(dq.input(1))
    if stored is None or scale is None or params.scale is None or params.zero_point is None:
        return None
    try:
        zero, steps = (
            along(v.reshape(-1), stored.shape, view.axis(dq), dq.name)
            for v in (params.zero_point, scale)
        )
    except ModelError:  # the lint says so
        return None
    # In the scale's own type, as the DequantizeLinear computes it: the result is the same to the last bit.
    return lambda: np.asarray(
        (stored.astype(np.int64) - zero).astype(scale.dtype) * steps, scale.dtype
    )


def stored_integers(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """Float weights with a Q in front of the DQ; the integers come out the same."""
    sites: list[Site] = []
    for conv in at(view, (r.convolution for r in only(WeightsStored, reported))):
        weights = view.weights(conv)
        dq = weights.dq
        value = dequantized(view, dq) if dq is not None and weights.constant else None
        if dq is None or value is None or view.params(dq).precision != Precision.INT8:
            continue

        def apply(editor: Editor, dq: Node = dq, value: Callable[[], _Array] = value) -> None:
            name = editor.constant(f"{dq.input(0)}_float", value())
            inputs = [name, *dq.inputs[1:]]
            axis = {"axis": int(dq.attributes["axis"])} if "axis" in dq.attributes else {}
            editor.set_input(dq, 0, editor.insert(dq, qdq.Q, f"{dq.name}_quantize", inputs, axis))

        sites.append(Site(dq.name, f"{dq.name}: weights stored as float, with a Q", apply))
    return sites


def shared(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """Constant, Q and DQ copied for every convolution but the first."""
    users: dict[str, list[tuple[Node, WeightSource]]] = defaultdict(list)
    refused = only(WeightsShared, reported)
    sources = {r.weight for r in refused}
    for conv in at(view, (name for r in refused for name in r.convolutions)):
        weights = view.weights(conv)
        if weights.source in sources and weights.constant and not weights.after:
            users[weights.source].append((conv, weights))
    sites: list[Site] = []
    for source, found in users.items():
        value = view.model.constant(source) if len(found) > 1 else None
        if value is None:
            continue

        def apply(
            editor: Editor, found: list[tuple[Node, WeightSource]] = found, value: _Array = value
        ) -> None:
            for conv, weights in found[1:]:
                copy_weights(editor, conv, weights, value)

        readers = messages.names(c.name for c, _ in found)
        sites.append(Site(source, f"'{source}': weights copied for each of {readers}", apply))
    return sites


def computed(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """What is between the constant and its quantizer, computed now."""
    sites: list[Site] = []
    constants = ConstantEvaluator(view.model)
    names = named(reported)
    for conv in view.weighted:
        weights = view.weights(conv)
        first = weights.first_quantizer
        between = list(itertools.islice(weights.before, STEPS))
        places = [conv.name, *(n.name for n in between)]
        if names.isdisjoint(places):
            continue
        if first is None or not between:
            continue
        value = constants.evaluate(weights.source)
        if value is None:
            continue

        def apply(
            editor: Editor, first: Node = first, source: str = weights.source, value: _Array = value
        ) -> None:
            editor.set_input(first, 0, editor.constant(f"{source}_folded", value))

        further = len(weights.before) - len(between)
        ops = ", ".join(n.op for n in between) + (f" and {further} more" if further else "")
        what = f"{first.name}: {ops} in front of it folded into the weights"
        sites.append(Site(conv.name, what, apply, places))
    return sites


def bare(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """Q/DQ for the weights of a convolution whose input is quantized."""
    sites: list[Site] = []
    for conv in nodes_of(view, reported):
        weights = view.weights(conv)
        if (
            weights.dq is not None
            or not weights.constant
            or qdq.find_pair(view.model, conv.input(0)) is None
        ):
            continue
        value = view.model.constant(weights.source)
        if value is None or value.ndim < 2 or not np.all(np.isfinite(value)):
            continue
        axis = weight_scale_axis(conv, value.ndim, target.transposed_per_channel)

        def apply(
            editor: Editor, conv: Node = conv, value: _Array = value, axis: int | None = axis
        ) -> None:
            scale = weight_scale(value, axis).astype(value.dtype)
            inputs = [
                editor.constant(f"{conv.name}/weight_scale", scale),
                editor.constant(f"{conv.name}/weight_zero_point", np.zeros(scale.shape, np.int8)),
            ]
            attributes = {} if axis is None else {"axis": axis}
            q = editor.insert(
                conv,
                qdq.Q,
                f"{conv.name}/weight_quantizer/{qdq.Q}",
                [conv.input(1), *inputs],
                attributes,
            )
            dq = editor.insert(
                conv, qdq.DQ, f"{conv.name}/weight_quantizer/{qdq.DQ}", [q, *inputs], attributes
            )
            editor.set_input(conv, 1, dq)

        sites.append(Site(conv.name, f"{conv.name}: weights quantized {_granularity(axis)}", apply))
    return sites


def _granularity(axis: int | None) -> str:
    return "with one scale" if axis is None else "per output channel"


def transposed(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """One scale, from the largest weight, where a ConvTranspose has one for each channel.

    Done where the target is not known to take a scale for each output channel, and where the axis is the wrong one.
    """
    sites: list[Site] = []
    for conv in nodes_of(view, reported):
        weights = view.weights(conv)
        if (
            operator_of(conv).kind != LayerKind.DECONVOLUTION
            or weights.first_quantizer is None
            or not weights.constant
            or weights.after
        ):
            continue
        value = view.model.constant(weights.source)
        wanted = weight_scale_axis(
            conv, 4 if value is None else value.ndim, target.transposed_per_channel
        )
        axes = [view.axis(n) for n in (weights.q, weights.dq) if n is not None]
        if value is None or all(a is None or a == wanted for a in axes):
            continue
        integers = dequantized(view, weights.first_quantizer) if weights.q is None else None
        real = integers() if integers is not None else value if weights.q is not None else None
        if (
            real is None
            or view.params(weights.first_quantizer).precision != Precision.INT8
            or not np.all(np.isfinite(real))
        ):
            continue

        def apply(
            editor: Editor,
            conv: Node = conv,
            weights: WeightSource = weights,
            value: _Array = real,
            like: _Array = value,
        ) -> None:
            _one_scale(editor, conv, weights, value, like)

        sites.append(Site(conv.name, f"{conv.name}: one scale for all its weights", apply))
    return sites


def _one_scale(
    editor: Editor, conv: Node, weights: WeightSource, value: _Array, like: _Array
) -> None:
    """Q and DQ of a convolution's weights, with one scale for all of them."""
    assert weights.dq is not None
    scale: _Array = weight_scale(value, None)
    kind = editor.model.elem_type(weights.dq.input(1))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind) if kind else np.dtype(np.float32)
    if dtype == np.float16:
        scale = round_up_to_half(scale)
    if weights.q is None:
        stored: _Array = quantize(value, scale.astype(np.float32), None).astype(like.dtype)
        tensor = editor.constant(f"{weights.source}_one_scale", stored)
    else:
        tensor = weights.source
    names = [
        editor.constant(f"{conv.name}/weight_scale", scale.astype(dtype)),
        editor.constant(f"{conv.name}/weight_zero_point", np.zeros((), np.int8)),
    ]
    for node in (weights.q, weights.dq):
        if node is not None:
            tensor = editor.insert(conv, node.op, f"{node.name}_one_scale", [tensor, *names])
    editor.set_input(conv, 1, tensor)


def per_channel(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """A scale for each output channel of float weights that have one for all of them."""
    sites: list[Site] = []
    found, _ = find_per_tensor(view, target.name)
    layers = {name for r in only(WeightsPerTensor, reported) if r.lossy for name in r.layers}
    for granularity in found:
        conv = granularity.node
        weights, shape = view.weights(conv), view.weight_shape(conv)
        value = view.model.constant(weights.source)
        if granularity.rounded or conv.name not in layers or value is None or shape is None:
            continue
        axis = weight_scale_axis(conv, len(shape), target.transposed_per_channel)
        if weights.q is None or weights.dq is None or axis is None:
            continue

        def apply(
            editor: Editor,
            conv: Node = conv,
            weights: WeightSource = weights,
            value: _Array = value,
            axis: int = axis,
        ) -> None:
            _rescale(editor, conv, weights, weight_scale(value, axis), axis)

        sites.append(Site(conv.name, f"{conv.name}: a weight scale for each channel", apply))
    return sites


def _rescale(editor: Editor, conv: Node, weights: WeightSource, scale: _Array, axis: int) -> None:
    """New Q and DQ for the weights of one layer; others may share those that it has."""
    assert weights.dq is not None
    kind = editor.model.elem_type(weights.dq.input(1))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind) if kind else np.dtype(np.float32)
    if dtype == np.float16:
        scale = round_up_to_half(scale)
    names = [
        editor.constant(f"{conv.name}/weight_scale", scale.astype(dtype)),
        editor.constant(f"{conv.name}/weight_zero_point", np.zeros(scale.shape, np.int8)),
    ]
    tensor = weights.source
    for node in (weights.q, weights.dq):
        if node is not None:
            tensor = editor.insert(
                conv, node.op, f"{node.name}_per_channel", [tensor, *names], {"axis": axis}
            )
    editor.set_input(conv, 1, tensor)


def parameters(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """Parameters that other nodes make from constants, as constants."""
    sites: list[Site] = []
    constants = ConstantEvaluator(view.model)
    for norm in at(view, (r.batchnorm for r in only(BatchNormNotConstant, reported))):
        values: dict[int, _Array] = {}
        for position, tensor in enumerate(norm.inputs[1:], 1):
            if view.model.constant_proto(tensor) is None:
                value = constants.evaluate(tensor)
                if value is not None:
                    values[position] = value
        if not values:
            continue

        def apply(editor: Editor, norm: Node = norm, values: dict[int, _Array] = values) -> None:
            for position, value in values.items():
                editor.set_input(
                    norm, position, editor.constant(f"{norm.name}/{norm.input(position)}", value)
                )

        sites.append(
            Site(norm.name, f"{norm.name}: its parameters stored as plain constants", apply)
        )
    return sites


def folded_into_transposed(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """A BatchNormalization folded into the quantized weights of the ConvTranspose in front of it.

    Weights and scales are multiplied by the same factor for each output channel, so that the integers stay the same.
    """
    sites: list[Site] = []
    for conv in nodes_of(view, reported):
        readers = view.model.consumers(conv.output)
        if len(readers) != 1 or readers[0].op != "BatchNormalization":
            continue
        site = _fold(view, conv, readers[0])
        if site is not None:
            sites.append(site)
    return sites


def _fold(view: View, conv: Node, norm: Node) -> Site | None:
    model = view.model
    weights = view.weights(conv)
    bias = model.constant(conv.input(2)) if conv.input(2) else np.zeros((), np.float32)
    parts = [model.constant(t) for t in norm.inputs[1:5]]
    value = model.constant(weights.source) if weights.constant and not weights.after else None
    params = view.params(weights.first_quantizer) if weights.first_quantizer is not None else None
    if (
        value is None
        or bias is None
        or params is None
        or params.scale is None
        or any(p is None for p in parts)
        or conv.integer("group", 1) != 1
        or model.is_output(conv.output)
        or view.axis(weights.first_quantizer) not in (None, 1)  # type: ignore[arg-type]
        or params.zero_point is None
        or np.any(params.zero_point != 0)
    ):
        return None
    gamma, beta, mean, variance = (np.asarray(p, np.float64) for p in parts)
    factor = gamma / np.sqrt(variance + float(norm.attributes.get("epsilon", 1e-5)))
    if not np.all(np.isfinite(factor)) or np.any(factor == 0):
        return None
    if value.ndim < 2 or value.shape[1] != factor.size or params.scale.size not in (1, factor.size):
        return None
    scale = np.broadcast_to(params.scale, factor.shape) * np.abs(factor)
    signed = factor if weights.q is not None else np.sign(factor)
    along = signed.reshape(1, -1, *(1,) * (value.ndim - 2))
    folded = value.astype(np.float64) * along
    if weights.q is None:
        folded = np.clip(folded, -128, 127)
    shift = beta + (np.asarray(bias, np.float64) - mean) * factor
    dtype = onnx.helper.tensor_dtype_to_np_dtype(params.scale_type or onnx.TensorProto.FLOAT)

    def apply(editor: Editor) -> None:
        tensor = editor.constant(f"{weights.source}_folded", folded.astype(value.dtype))
        for node in (weights.q, weights.dq):
            if node is not None:
                names = [
                    editor.constant(f"{node.name}_folded/scale", scale.astype(dtype)),
                    editor.constant(
                        f"{node.name}_folded/zero_point", np.zeros(scale.shape, np.int8)
                    ),
                ]
                tensor = editor.insert(
                    conv, node.op, f"{node.name}_folded", [tensor, *names], {"axis": 1}
                )
        editor.set_input(conv, 1, tensor)
        editor.set_input(conv, 2, editor.constant(f"{conv.name}/folded_bias", shift.astype(dtype)))
        editor.remove(norm)
        editor.set_output(conv, 0, norm.output)

    return Site(conv.name, f"{norm.name} folded into {conv.name}", apply)
