"""BatchNormalization in front of a convolution, folded into its weights where that is exact.

    conv(norm(x)) = conv'(x),  W' = W * factor,  b' = b + sum of W * shift over the input channels and the kernel

Padding is the catch: it adds zeros behind the normalization, which in front of it would have to be ``-shift / factor``.
Where the convolution pads, folding is exact only for a normalization that leaves zero at zero.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from qdqtool.graph import Model, Node

_Floats = npt.NDArray[np.float64]


def fold_leading(proto: onnx.ModelProto) -> int:
    """Folds, in place, each BatchNormalization that convolutions with constant weights alone read; returns how many."""
    model = Model(proto, sha256="edited")
    removed: set[int] = set()
    changed: set[int] = set()
    for norm in model.nodes:
        if norm.op != "BatchNormalization" or norm.domain not in ("", "ai.onnx") or norm.integer("training_mode", 0):
            continue
        readers = model.readers(norm.output)
        if not readers or model.is_output(norm.output) or any(norm.outputs[1:]) or {r.index for r in readers} & changed:
            continue
        affine = _affine(model, norm)
        if affine is None:
            continue
        folded = [_folded(model, conv, norm.output, *affine) for conv in readers]
        if any(f is None for f in folded):
            continue
        for conv, values in zip(readers, folded, strict=True):
            assert values is not None
            _replace(model, conv, norm.input(0), *values)
            changed.add(conv.index)
        removed.add(norm.index)
    if removed:
        kept = [n.proto for n in model.nodes if n.index not in removed]
        del proto.graph.node[:]
        proto.graph.node.extend(kept)
        _drop_unread(proto, {t for n in model.nodes if n.index in removed | changed for t in (*n.inputs, *n.outputs)})
    return len(removed)


def _affine(model: Model, norm: Node) -> tuple[_Floats, _Floats] | None:
    """Factor and shift of each channel, finite; None when they are computed."""
    values = [model.constant(t) for t in norm.inputs[1:5]]
    if len(values) != 4 or any(v is None for v in values):
        return None
    gamma, beta, mean, variance = (np.asarray(v, np.float64) for v in values)
    with np.errstate(all="ignore"):
        factor = gamma / np.sqrt(variance + float(norm.attributes.get("epsilon", 1e-5)))
        shift = beta - mean * factor
    return (factor, shift) if np.isfinite(factor).all() and np.isfinite(shift).all() else None


def _folded(
    model: Model, conv: Node, tensor: str, factor: _Floats, shift: _Floats
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]] | None:
    """New weights and bias; None where folding is not exact, or something is not constant."""
    if conv.op != "Conv" or conv.domain not in ("", "ai.onnx") or list(conv.inputs).count(tensor) != 1:
        return None
    if conv.input(0) != tensor or len(model.readers(conv.input(1))) != 1:
        return None
    weight = model.constant(conv.input(1))
    bias = model.constant(conv.input(2)) if conv.input(2) else None
    if weight is None or weight.dtype.kind != "f" or weight.ndim < 3 or (conv.input(2) and bias is None):
        return None
    pads = conv.attributes.get("pads", [])
    padded = any(pads) or conv.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
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


def _replace(
    model: Model, conv: Node, data: str, weight: npt.NDArray[np.floating], bias: npt.NDArray[np.floating]
) -> None:
    graph = model.proto.graph
    taken = {*model.producers, *model.initializers, *model.inputs, *(t.name for t in graph.initializer)}
    names = []
    for value, what in ((weight, "folded_norm"), (bias, "folded_norm_bias")):
        name = f"{conv.input(1)}_{what}"
        while name in taken:
            name += "_"
        taken.add(name)
        graph.initializer.append(numpy_helper.from_array(value, name))
        names.append(name)
    del conv.proto.input[:]
    conv.proto.input.extend([data, *names])


def _drop_unread(proto: onnx.ModelProto, names: set[str]) -> None:
    """Removes those of the named constants and shape entries that nothing mentions any more."""
    graph = proto.graph
    read = {t for n in graph.node for t in (*n.input, *n.output)} | {o.name for o in graph.output}
    unread = names - read
    for items in (graph.initializer, graph.value_info, graph.input):
        for i in reversed(range(len(items))):
            if items[i].name in unread:
                del items[i]
    kept = [n for n in graph.node if not (n.op_type == "Constant" and n.output[0] in unread)]
    if len(kept) != len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
