"""Random numbers in place of a model's weights and scales, which keep what TensorRT's decisions rest on.

Scales: equal ones stay equal, and single scales stay in order (a Concat takes the largest). Weights: each output
channel fills the same part of its quantizer's range as before. None of the new numbers is an old one times a random
one: knowing the random numbers does not give the old ones back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from qdqtool.extraction.cut import FLOATS
from qdqtool.model import qdq
from qdqtool.model.external import array_of
from qdqtool.model.graph import Model
from qdqtool.model.subgraphs import inner_graphs

Array = npt.NDArray[Any]

_STRUCTURE = ("Resize", "Upsample", "Clip", "Pad", "Range", "NonMaxSuppression", "Pow", "OneHot", "TopK")
_WIDEN = 1.5  # new scales lie between the smallest over this and the largest times this,
_SHIFT = 1.0  # all of them times one factor of at most e or at least 1/e
_FEW = 9  # numbers of a channel: a 3x3 kernel
_LARGE = 64  # elements; a table of integers this long is data and no shape
_WEIGHTS = frozenset({
    *FLOATS, onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT4, onnx.TensorProto.UINT4,
    onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2,
})


def masked(proto: onnx.ModelProto, random: np.random.Generator) -> None:
    """Replaces the numbers of a model, in place."""
    model = Model(proto)
    scales = {n.input(1) for n in qdq.quantizers(model) if model.is_constant(n.input(1))}
    zeros = {n.input(2) for n in qdq.quantizers(model) if n.input(2)}
    kept = zeros | {t for n in model.nodes if n.op in _STRUCTURE for t in n.inputs[1:]}
    before = {t: v for t in sorted(scales) if (v := model.constant(t)) is not None}
    after = _new_scales(before, random)
    for name, tensor in _constants(proto):
        if name in after:
            tensor.CopyFrom(_tensor(after[name], tensor))
        elif name not in kept and tensor.data_type in _WEIGHTS and tensor.dims:
            value = array_of(tensor)
            ratio = _ratio(model, name, value, before, after)
            tensor.CopyFrom(_tensor(_like(value, ratio, random), tensor))
        elif name not in kept and np.prod(tensor.dims) > _LARGE and tensor.data_type != onnx.TensorProto.STRING:
            value = array_of(tensor)
            if value.dtype.kind in "iuf":
                tensor.CopyFrom(_tensor(_like(value, 1.0, random), tensor))
    for _, node in _nodes(proto):
        _mask_lists(node, random)


def _mask_lists(node: onnx.NodeProto, random: np.random.Generator) -> None:
    """Numbers in attributes: lists of floats but those of Resize and recurrent layers, and long lists of integers."""
    if node.domain in ("", "ai.onnx") and node.op_type != "Constant":
        return
    for attribute in node.attribute:
        for values, few in ((attribute.floats, 1), (attribute.ints, _LARGE)):
            if len(values) > few:
                old = np.asarray(values)
                values[:] = _like(old, 1.0, random).tolist()


def _all_graphs(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Every graph of a model; names of the inner ones are no names of the main one and get a prefix."""
    yield "", proto.graph
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        yield from (("/", g) for g in inner_graphs(nodes))


def _nodes(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.NodeProto]]:
    for at, graph in _all_graphs(proto):
        yield from ((at, n) for n in graph.node)
    for function in proto.functions:
        yield from (("/", n) for n in function.node)


def _constants(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor that a model stores, with the name that nodes of the main graph read it by."""
    for at, graph in _all_graphs(proto):
        yield from ((at + t.name, t) for t in graph.initializer)
        yield from ((at + s.values.name, s.values) for s in graph.sparse_initializer)
    for at, node in _nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield (at + node.output[0] if node.op_type == "Constant" else ""), attribute.t
            yield from (("", t) for t in attribute.tensors)
            sparse = (*((attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()),
                      *attribute.sparse_tensors)
            yield from (("", s.values) for s in sparse)


def _tensor(value: Array, like: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, order="C"), like.name)


def _new_scales(before: dict[str, Array], random: np.random.Generator) -> dict[str, Array]:
    shift = random.uniform(-_SHIFT, _SHIFT)
    single = sorted({float(v.reshape(-1)[0]) for v in before.values() if v.size == 1})
    vectors = sorted({float(x) for v in before.values() if v.size != 1 for x in v.reshape(-1)})
    drawn = _drawn(vectors, random, shift, ordered=False) | _drawn(single, random, shift, ordered=True)
    return {
        name: np.array([drawn.get(float(x), float(x)) for x in value.reshape(-1)], np.float64).astype(value.dtype)
        .reshape(value.shape)
        for name, value in before.items()
    }


def _drawn(values: list[float], random: np.random.Generator, shift: float, ordered: bool) -> dict[float, float]:
    """Old to new; zeros and what is no number stay, signs too."""
    usable = [v for v in values if v != 0 and np.isfinite(v)]
    if not usable:
        return {}
    sizes = sorted({abs(v) for v in usable})
    low, high = np.log(sizes[0] / _WIDEN) + shift, np.log(sizes[-1] * _WIDEN) + shift
    new = np.exp(random.uniform(low, high, len(sizes)))
    if ordered:
        new = np.sort(new)
    by_size = dict(zip(sizes, (float(x) for x in new), strict=True))
    return {v: float(np.copysign(by_size[abs(v)], v)) for v in usable}


def _ratio(
    model: Model, name: str, value: Array, before: dict[str, Array], after: dict[str, Array]
) -> Array | float:
    """New over old scale of what quantizes a constant, shaped to be multiplied with it; 1 where nothing does."""
    if value.dtype.kind != "f":
        return 1.0
    for node in model.readers(name):
        scale = node.input(1)
        if qdq.is_q(node) and node.input(0) == name and scale in before:
            old, new = before[scale].astype(np.float64).reshape(-1), after[scale].astype(np.float64).reshape(-1)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where((old != 0) & np.isfinite(old), new / old, 1.0)
            if ratio.size == 1:
                return float(ratio[0])
            axis = qdq.read_params(model, node).axis or 0
            if -value.ndim <= axis < value.ndim and value.shape[axis] == ratio.size:
                shape = [1] * value.ndim
                shape[axis] = ratio.size
                return ratio.reshape(shape)
    return 1.0


def _like(value: Array, ratio: Array | float, random: np.random.Generator) -> Array:
    """Random numbers between the smallest and largest of each channel, both of which occur."""
    if value.size > 1 and np.array_equal(value.reshape(-1), np.arange(value.size)):
        return value  # 0, 1, 2, ... is an index (the DFL's bins) and no weights
    wide = value.astype(np.float64) * ratio
    as_it_was = isinstance(ratio, float) and ratio == 1.0  # then a range of few numbers would reveal them all
    channels = wide.ndim > 1 and (wide.size >= _FEW * wide.shape[0] or not as_it_was)
    rows = wide.reshape(wide.shape[0] if channels else 1, -1)
    finite = np.isfinite(rows)  # infinities and NaN are a fault to show, and stay where they are
    if not rows.size or not finite.any(axis=1).all():
        return value
    low = np.where(finite, rows, np.inf).min(axis=1, keepdims=True)
    high = np.where(finite, rows, -np.inf).max(axis=1, keepdims=True)
    new = random.uniform(low, np.where(high > low, high, low + 1), rows.shape)
    new = np.where(high > low, new, low)
    order = np.argsort(random.random(rows.shape), axis=1)
    places = np.arange(len(rows))
    new[places, order[:, 0]] = high[:, 0]
    new[places, order[:, -1]] = low[:, 0]
    new = np.where(finite, new, rows)
    if value.dtype.kind in "iu":
        new = np.rint(new)
    return new.reshape(value.shape).astype(value.dtype)
