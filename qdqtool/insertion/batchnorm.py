"""Folding of BatchNormalizations into the weights of convolutions.

TensorRT folds a BatchNormalization into the weights of a convolution before it quantizes these
weights. The scales of the weights must therefore fit the folded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import CONVOLVE, LayerKind, operator_of, output_axis

_Array = npt.NDArray[Any]
_Floats = npt.NDArray[np.float64]
_TEXT_KINDS = "OSU"  # numpy's dtype kinds for strings and objects


def fold_batch_normalization(model: Model) -> int:
    """Fold BatchNormalizations into the convolutions before them, in place.

    A BatchNormalization in inference mode is folded if nothing else uses the convolution's output,
    and if the weights of the convolution and the parameters of the BatchNormalization are constants
    of matching shapes.

    Returns:
        The number of BatchNormalizations that were folded.
    """
    editor = Editor(model)
    count = 0
    for norm in model.nodes:
        conv = model.producer(norm.input(0))
        if conv is None or not _can_fold(model, conv, norm):
            continue
        folded = _fold_into_producer(model, conv, norm)
        if folded is None:
            continue
        _set_weights(editor, conv, "folded", folded)
        editor.set_output(conv, 0, norm.output)
        editor.remove(norm)
        count += 1
    if count:
        editor.finish()
    return count


def fold_leading_batch_normalization(model: Model) -> int:
    """Fold BatchNormalizations into the convolutions after them, in place.

    A BatchNormalization in inference mode is folded if only convolutions with constant weights of
    matching shapes use its output. If it maps 0 to another value, it is folded only if none of
    these convolutions pads its input.

    Returns:
        The number of BatchNormalizations that were folded.
    """
    editor = Editor(model)
    count = 0
    for norm in model.nodes:
        consumers = model.consumers(norm.output)
        if not _is_inference_norm(norm) or not consumers or model.is_output(norm.output):
            continue
        folded = _fold_into_consumers(model, norm, consumers)
        if folded is None:
            continue
        for conv, weights in zip(consumers, folded, strict=True):
            editor.set_input(conv, 0, norm.input(0))
            _set_weights(editor, conv, "folded_norm", weights)
        editor.remove(norm)
        count += 1
    if count:
        editor.finish()
    return count


def _is_inference_norm(node: Node) -> bool:
    return (
        operator_of(node).kind == LayerKind.SCALE
        and not node.integer("training_mode", 0)
        and not any(node.outputs[1:])
    )


def _can_fold(model: Model, conv: Node, norm: Node) -> bool:
    return (
        _is_inference_norm(norm)
        and operator_of(conv).kind in CONVOLVE
        and len(model.consumers(conv.output)) == 1
        and not model.is_output(conv.output)
    )


def _set_weights(editor: Editor, conv: Node, suffix: str, weights: tuple[_Array, _Array]) -> None:
    name = f"{conv.input(1)}_{suffix}"
    editor.set_input(conv, 1, editor.add_constant(name, weights[0]))
    editor.set_input(conv, 2, editor.add_constant(f"{name}_bias", weights[1]))


def _fold_into_producer(model: Model, conv: Node, norm: Node) -> tuple[_Array, _Array] | None:
    """Return a convolution's weights and bias with the BatchNormalization folded in.

    None if weights, bias or a parameter of the BatchNormalization are not constant, or if the
    shapes or types do not match.
    """
    weights, parameters = _read_weights(model, conv), read_norm_parameters(model, norm)
    if weights is None or parameters is None:
        return None
    weight, bias = weights
    factor = parameters.factor
    if _count_output_channels(conv, weight) != len(factor):
        return None
    if bias is not None and bias.shape != factor.shape:
        return None
    old_bias = 0.0 if bias is None else bias.astype(np.float64)
    with np.errstate(all="ignore"):  # NaN is reported when the weights are quantized
        new_bias = parameters.beta + (old_bias - parameters.mean) * factor
    if output_axis(conv, weight.ndim) == 0:
        factors = factor[:, None]
    else:  # weights of a ConvTranspose have shape [in, out / groups, ...]
        groups = conv.integer("group", 1)
        factors = factor.reshape(groups, -1).repeat(weight.shape[0] // groups, axis=0)
    factors = factors.reshape(*factors.shape, *(1,) * (weight.ndim - 2))
    new_weight = weight.astype(np.float64) * factors
    return new_weight.astype(weight.dtype), new_bias.astype(weight.dtype)


def _count_output_channels(conv: Node, weight: _Array) -> int | None:
    if weight.ndim < 3 or weight.dtype.kind in _TEXT_KINDS:
        return None
    first, second = int(weight.shape[0]), int(weight.shape[1])
    if output_axis(conv, weight.ndim) == 0:
        return first
    groups = conv.integer("group", 1)
    return second * groups if groups > 0 and first % groups == 0 else None


def _fold_into_consumers(
    model: Model, norm: Node, convs: Sequence[Node]
) -> list[tuple[_Array, _Array]] | None:
    """Return the weights and bias of each convolution with the BatchNormalization folded in.

    None if the BatchNormalization cannot be folded exactly into all of the convolutions.
    """
    parameters = read_norm_parameters(model, norm)
    if parameters is None:
        return None
    factor = parameters.factor
    with np.errstate(all="ignore"):
        shift = parameters.beta - parameters.mean * factor
    if not (np.isfinite(factor).all() and np.isfinite(shift).all()):
        return None
    folded = []
    for conv in convs:
        weights = _fold_into_consumer(model, conv, factor, shift)
        if weights is None:
            return None
        folded.append(weights)
    return folded


def _fold_into_consumer(
    model: Model, conv: Node, factor: _Floats, shift: _Floats
) -> tuple[_Array, _Array] | None:
    """Fold ``x * factor + shift`` before a convolution into its weights and bias.

    None if the node is not a Conv with constant float weights of a matching shape. None also if the
    convolution pads its input and `shift` is not zero.
    """
    if operator_of(conv).kind != LayerKind.CONVOLUTION:
        return None
    weights = _read_weights(model, conv)
    if weights is None or weights[0].dtype.kind != "f" or weights[0].ndim < 3:
        return None
    weight, bias = weights
    if shift.any() and _has_padding(conv):  # a folded shift would also apply to the padding
        return None
    groups = conv.integer("group", 1)
    if weight.shape[1] * groups != len(factor) or weight.shape[0] % groups:
        return None
    outputs_per_group = weight.shape[0] // groups
    # The input channel that each weight multiplies. Shape: [out, in / groups].
    channels = np.arange(len(factor)).reshape(groups, -1).repeat(outputs_per_group, axis=0)
    flat = weight.astype(np.float64).reshape(*weight.shape[:2], -1)
    new_bias = (flat * shift[channels][..., None]).sum(axis=(1, 2))
    if bias is not None:
        new_bias = new_bias + bias.astype(np.float64)
    new_weight = (flat * factor[channels][..., None]).reshape(weight.shape)
    return new_weight.astype(weight.dtype), new_bias.astype(weight.dtype)


def _has_padding(conv: Node) -> bool:
    pads = conv.attributes.get("pads", [])
    return (
        not isinstance(pads, list)
        or any(pads)
        or conv.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    )


class NormParameters(NamedTuple):
    """Parameters of ``(x - mean) * factor + beta`` for each channel."""

    factor: _Floats
    beta: _Floats
    mean: _Floats


def read_norm_parameters(model: Model, norm: Node) -> NormParameters | None:
    """Return the parameters of a BatchNormalization.

    None if a parameter is not constant, or if the shapes differ. Values may be NaN or infinite.
    """
    arrays = [model.constant(t) for t in norm.inputs[1:]]
    values = [a for a in arrays if a is not None and a.dtype.kind not in _TEXT_KINDS]
    if len(values) != 4 or len(norm.inputs) != 5:
        return None
    if {v.shape for v in values} != {(values[0].size,)}:
        return None
    gamma, beta, mean, variance = (v.astype(np.float64) for v in values)
    epsilon = float(norm.attributes.get("epsilon", 1e-5))
    with np.errstate(all="ignore"):
        return NormParameters(gamma / np.sqrt(variance + epsilon), beta, mean)


def _read_weights(model: Model, conv: Node) -> tuple[_Array, _Array | None] | None:
    """Return weights and bias; None if either is not constant. The bias may be absent (None)."""
    weight = model.constant(conv.input(1))
    bias = model.constant(conv.input(2)) if conv.input(2) else None
    return None if weight is None or (conv.input(2) and bias is None) else (weight, bias)
