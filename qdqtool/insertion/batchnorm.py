"""BatchNormalization folded into the weights of a convolution: behind one always, in front of one where that is exact.

    conv(norm(x)) = conv'(x),  W' = W * factor,  b' = b + sum of W * shift over the input channels and the kernel

Padding is the catch: it adds zeros behind the normalization, which in front of it would have to be ``-shift / factor``.
Where the convolution pads, folding is exact only for a normalization that leaves zero at zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.insertion.structure import is_convolution
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import LayerKind, of, output_axis

_Array = npt.NDArray[Any]
_Floats = npt.NDArray[np.float64]
_TEXTS = "OSU"  # kinds of numpy types


def fold_batch_normalization(model: Model) -> int:
    """Folds each BatchNormalization that alone reads a convolution with constant weights, in place."""
    editor = Editor(model)
    count = 0
    for norm in model.nodes:
        conv = model.producer(norm.input(0))
        if of(norm).kind != LayerKind.SCALE or conv is None or not _foldable(model, conv, norm):
            continue
        folded = _fold(model, conv, norm)
        if folded is None:
            continue
        weight, bias = folded
        editor.set_input(conv, 1, editor.constant(f"{conv.input(1)}_folded", weight))
        editor.set_input(conv, 2, editor.constant(f"{conv.input(1)}_folded_bias", bias))
        editor.set_output(conv, 0, norm.output)
        editor.remove(norm)
        count += 1
    if count:
        editor.finish()
    return count


def _foldable(model: Model, conv: Node, norm: Node) -> bool:
    return (
        is_convolution(conv)
        and len(model.readers(conv.output)) == 1
        and not model.is_output(conv.output)
        and not norm.integer("training_mode", 0)
        and not any(norm.outputs[1:])
    )


def _fold(model: Model, conv: Node, norm: Node) -> tuple[_Array, _Array] | None:
    constants, parameters = _constants(model, conv), _parameters(model, norm)
    if constants is None or parameters is None:
        return None
    (weight, bias), (factor, beta, mean) = constants, parameters
    if _output_channels(conv, weight) != len(factor) or (bias is not None and bias.shape != factor.shape):
        return None
    dtype = weight.dtype
    weight = weight.astype(np.float64)
    with np.errstate(all="ignore"):  # NaN in the result is found and named when the weights are quantized
        shift = beta + ((0.0 if bias is None else bias.astype(np.float64)) - mean) * factor
    ones = (1,) * (weight.ndim - 2)
    if output_axis(conv, weight.ndim) == 0:
        weight = weight * factor.reshape(-1, 1, *ones)
    else:  # [in, out / groups, ...]: the channels of each group follow one another
        groups = conv.integer("group", 1)
        per_group = factor.reshape(groups, 1, -1)
        shaped = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        weight = (shaped * per_group[..., None]).reshape(weight.shape)
    return weight.astype(dtype), shift.astype(dtype)


def _output_channels(conv: Node, weight: _Array) -> int | None:
    """How many there are; None for weights that no convolution can have."""
    if weight.ndim < 3 or weight.dtype.kind in _TEXTS:
        return None
    first, second = int(weight.shape[0]), int(weight.shape[1])
    if output_axis(conv, weight.ndim) == 0:
        return first
    groups = conv.integer("group", 1)
    return second * groups if groups > 0 and first % groups == 0 else None


def fold_leading(model: Model) -> int:
    """Folds, in place, each BatchNormalization that convolutions with constant weights alone read; returns how many."""
    editor = Editor(model)
    count = 0
    for norm in model.nodes:
        if of(norm).kind != LayerKind.SCALE or norm.integer("training_mode", 0):
            continue
        readers = model.readers(norm.output)
        if not readers or model.is_output(norm.output) or any(norm.outputs[1:]):
            continue
        parameters = _parameters(model, norm)
        if parameters is None:
            continue
        factor, beta, mean = parameters
        with np.errstate(all="ignore"):
            shift = beta - mean * factor
        if not (np.isfinite(factor).all() and np.isfinite(shift).all()):
            continue
        folded = [_folded(model, conv, factor, shift) for conv in readers]
        if any(f is None for f in folded):
            continue
        for conv, values in zip(readers, folded, strict=True):
            assert values is not None
            weight, bias = values
            editor.set_input(conv, 0, norm.input(0))
            editor.set_input(conv, 1, editor.constant(f"{conv.input(1)}_folded_norm", weight))
            editor.set_input(conv, 2, editor.constant(f"{conv.input(1)}_folded_norm_bias", bias))
        editor.remove(norm)
        count += 1
    if count:
        editor.finish()
    return count


def _folded(model: Model, conv: Node, factor: _Floats, shift: _Floats) -> tuple[_Array, _Array] | None:
    """New weights and bias; None where folding is not exact, or something other than the data is not constant."""
    if of(conv).kind != LayerKind.CONVOLUTION:
        return None
    constants = _constants(model, conv)
    if constants is None or constants[0].dtype.kind != "f" or constants[0].ndim < 3:
        return None
    weight, bias = constants
    pads = conv.attributes.get("pads", [])
    padded = not isinstance(pads, list) or any(pads)
    padded = padded or conv.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    groups = conv.integer("group", 1)
    if (padded and shift.any()) or weight.shape[1] * groups != len(factor) or weight.shape[0] % groups:
        return None
    out = weight.shape[0] // groups
    channels = np.arange(len(factor)).reshape(groups, -1).repeat(out, axis=0)  # [out, in of its group]
    wide = weight.astype(np.float64).reshape(*weight.shape[:2], -1)
    moved = (wide * shift[channels][..., None]).sum(axis=(1, 2))
    new_bias = moved if bias is None else moved + bias.astype(np.float64)
    new_weight = (wide * factor[channels][..., None]).reshape(weight.shape)
    return new_weight.astype(weight.dtype), new_bias.astype(weight.dtype)


def _parameters(model: Model, norm: Node) -> tuple[_Floats, _Floats, _Floats] | None:
    """Factor, beta and mean of each channel, maybe not finite; None when they are computed, or no such numbers."""
    values = [v for t in norm.inputs[1:] if (v := model.constant(t)) is not None and v.dtype.kind not in _TEXTS]
    if len(values) != 4 or len(norm.inputs) != 5 or {v.shape for v in values} != {(values[0].size,)}:
        return None
    gamma, beta, mean, variance = (v.astype(np.float64) for v in values)
    with np.errstate(all="ignore"):
        return gamma / np.sqrt(variance + float(norm.attributes.get("epsilon", 1e-5))), beta, mean


def _constants(model: Model, conv: Node) -> tuple[_Array, _Array | None] | None:
    """Weights and bias, if it has one; None when they are computed."""
    weight = model.constant(conv.input(1))
    bias = model.constant(conv.input(2)) if conv.input(2) else None
    return None if weight is None or (conv.input(2) and bias is None) else (weight, bias)
