"""Reductions: functions that propose smaller versions of a model.

Each function receives a model and yields smaller candidates, usually the smallest first. Candidates
may be invalid. The model itself is not changed.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from qdqtool.ir import qdq
from qdqtool.proto.external_data import to_array
from qdqtool.proto.subgraphs import STANDARD, extract_submodel, find_captured_tensors
from qdqtool.util import limits

Reduction = Callable[..., Iterator[onnx.ModelProto]]
ConstantLookup = Callable[[onnx.TensorProto], onnx.TensorProto]
"""Function that takes a constant whose data was removed, and returns the constant with data."""

_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})
LARGE = 4096  # if a constant has more bytes, candidates do not contain its data
_PLAIN = 64  # constants with at most this number of elements are not flattened
_NOT_RESIZED = _INTEGERS | {onnx.TensorProto.BOOL, onnx.TensorProto.STRING}


def prune_unused(proto: onnx.ModelProto, convert: ConstantLookup) -> onnx.ModelProto:
    """Return a copy of a model without the nodes, constants and inputs that no output needs.

    Declared types are kept only if shape inference cannot infer them.

    Args:
        proto: The model.
        convert: Function that is applied to each initializer, and returns the tensor to store.
    """
    graph = proto.graph
    pruned, needed = extract_submodel(
        proto, graph.node, graph.output, map(convert, graph.initializer)
    )
    pruned.graph.input.extend(v for v in graph.input if v.name in needed)
    nodes = (n for n in pruned.graph.node if not _is_inferred(n, proto))
    unknown = {o for n in nodes for o in n.output}
    pruned.graph.value_info.extend(
        v for v in graph.value_info if v.name in unknown and v.name in needed
    )
    return pruned


def _is_inferred(node: onnx.NodeProto, proto: onnx.ModelProto) -> bool:
    version = next((o.version for o in proto.opset_import if o.domain in STANDARD), 1)
    return node.domain in STANDARD and bool(onnx.defs.has(node.op_type, max(version, 1)))


def collect_types(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Return the declared types of a model's tensors, by name."""
    graph = proto.graph
    types = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
    for t in graph.initializer:
        types[t.name] = helper.make_tensor_type_proto(t.data_type, list(t.dims))
    return types


def collect_constants(proto: onnx.ModelProto) -> set[str]:
    """Return the names of initializers, and of the outputs of Constant nodes."""
    names = {t.name for t in proto.graph.initializer}
    names.update(o for n in proto.graph.node if n.op_type == "Constant" for o in n.output)
    return names


def _is_float(kind: onnx.TypeProto) -> bool:
    return kind.tensor_type.elem_type in qdq.FLOATS


def reduce_outputs(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield models with a single tensor as output, then models without one of the outputs.

    Models with a single output are in the order of the nodes. Their output is a float tensor, so
    that no Q/DQ pair is split. Models without one output are yielded only if the model has several.
    """
    types = collect_types(proto)
    graph = proto.graph
    for node in graph.node:
        name = node.output[0]
        if node.op_type == "Constant" or name not in types:
            continue
        if _is_float(types[name]) and [o.name for o in graph.output] != [name]:
            candidate = deepcopy(proto)
            del candidate.graph.output[:]
            candidate.graph.output.append(helper.make_value_info(name, types[name]))
            yield candidate
    if len(graph.output) > 1:
        for index in range(len(graph.output)):
            candidate = deepcopy(proto)
            del candidate.graph.output[index]
            yield candidate


def remove_nodes(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield models without half of the nodes, then without a quarter, ..., then without one.

    Outputs of the removed nodes become network inputs. These must be float tensors that no DQ
    produces, so that no Q/DQ pair is split.
    """
    nodes, constants, types = proto.graph.node, collect_constants(proto), collect_types(proto)
    dequantized = {o for node in nodes if node.op_type == qdq.DQ for o in node.output}
    types = {t: k for t, k in types.items() if _is_float(k) and t not in dequantized}
    for indices in _list_ranges(nodes, constants):
        candidate = _remove_range(proto, indices, constants, types)
        if candidate is not None:
            yield candidate


def _list_ranges(nodes: Sequence[onnx.NodeProto], constants: set[str]) -> Iterator[range]:
    """Yield the index ranges of halves, quarters, ... of the nodes, then of single nodes.

    Single nodes are in reverse order, without the nodes that have only constant inputs.
    """
    size = len(nodes) // 2
    while size > 1:
        yield from (range(i, i + size) for i in range(0, len(nodes) - size + 1, size))
        size //= 2
    for index in range(len(nodes) - 1, -1, -1):
        depends_on_input = any(i and i not in constants for i in nodes[index].input)
        if nodes[index].op_type != "Constant" and depends_on_input:
            yield range(index, index + 1)


def _remove_range(
    proto: onnx.ModelProto, indices: range, constants: set[str], types: dict[str, onnx.TypeProto]
) -> onnx.ModelProto | None:
    """Return a copy of the model without some nodes. Their outputs become network inputs.

    Args:
        proto: The model.
        indices: Indices of the nodes to remove; Constant nodes remain.
        constants: Names of constants.
        types: Types of the tensors that can become network inputs.

    Returns:
        The copy. None if a removed node computes a network output, or if a tensor cannot become a
        network input.
    """
    nodes = proto.graph.node
    produced = _list_produced([nodes[i] for i in indices], constants)
    if not {o.name for o in proto.graph.output}.isdisjoint(produced):
        return None
    consumed = _find_consumed([n for i, n in enumerate(nodes) if i not in indices])
    inputs = [t for t in produced if t in consumed]
    if not types.keys() >= set(inputs):
        return None
    candidate = deepcopy(proto)
    _delete_nodes(candidate.graph, indices)
    candidate.graph.input.extend(helper.make_value_info(t, types[t]) for t in inputs)
    return candidate


def _delete_nodes(graph: onnx.GraphProto, indices: range) -> None:
    for index in reversed(indices):
        if graph.node[index].op_type != "Constant":
            del graph.node[index]


def _list_produced(nodes: Iterable[onnx.NodeProto], constants: Container[str]) -> list[str]:
    outputs = dict.fromkeys(tensor for node in nodes for tensor in node.output)
    return [tensor for tensor in outputs if tensor and tensor not in constants]


def _find_consumed(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {t for node in nodes for t in (*node.input, *find_captured_tensors(node))}


def bypass_nodes(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield models without one node. The node's consumers read one of its inputs instead.

    The input must have the type and shape of the node's output. A Q/DQ pair is removed as a whole.
    """
    types, constants = collect_types(proto), collect_constants(proto)
    nodes = proto.graph.node
    for index in range(len(nodes) - 1, -1, -1):
        for source in nodes[index].input:
            if source not in types or source in constants:
                continue
            if types[source] == types.get(nodes[index].output[0]):
                yield _bypass_node(proto, index, source)
    yield from _bypass_pairs(proto, constants)


def _bypass_pairs(proto: onnx.ModelProto, constants: Container[str]) -> Iterator[onnx.ModelProto]:
    nodes = proto.graph.node
    quantizers = {n.output[0]: n for n in nodes if n.op_type == qdq.Q}
    for index in range(len(nodes) - 1, -1, -1):
        if nodes[index].op_type == qdq.DQ and nodes[index].input[0] in quantizers:
            source = quantizers[nodes[index].input[0]].input[0]
            if source not in constants:
                yield _bypass_node(proto, index, source)


def _bypass_node(proto: onnx.ModelProto, index: int, source: str) -> onnx.ModelProto:
    candidate = deepcopy(proto)
    graph = candidate.graph
    removed = graph.node[index].output[0]
    del graph.node[index]
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name == removed:
                node.input[position] = source
    for output in graph.output:
        if output.name == removed:
            output.name = source
    return candidate


def store_constants(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield a model with initializers in place of Constant nodes, if the model has such nodes."""
    tensors = _find_constant_tensors(proto)
    if not tensors:
        return
    candidate = deepcopy(proto)
    names = {index: proto.graph.node[index].output[0] for index in tensors}
    for index, tensor in tensors.items():
        initializer = candidate.graph.initializer.add()
        initializer.CopyFrom(tensor)
        initializer.name = names[index]
    for index in sorted(tensors, reverse=True):
        del candidate.graph.node[index]
    types = [v for v in candidate.graph.value_info if v.name not in names.values()]
    del candidate.graph.value_info[:]
    candidate.graph.value_info.extend(types)
    yield candidate


def _find_constant_tensors(proto: onnx.ModelProto) -> dict[int, onnx.TensorProto]:
    outputs = {o.name for o in proto.graph.output}
    tensors: dict[int, onnx.TensorProto] = {}
    for index, node in enumerate(proto.graph.node):
        if node.op_type != "Constant" or node.domain not in STANDARD:
            continue
        if len(node.output) != 1 or node.output[0] in outputs:
            continue
        for attribute in node.attribute:
            if attribute.name == "value":
                tensors[index] = attribute.t
    return tensors


# Sizes --------------------------------------------------------------------------------------------


def _divide_size(size: int, factor: int) -> int:
    return size // factor if size % factor == 0 else size


def reduce_channels(
    proto: onnx.ModelProto, find_constant: ConstantLookup
) -> Iterator[onnx.ModelProto]:
    """Yield models with fewer channels.

    Each of the first models divides the numbers of channels by one factor, if there is no
    remainder. Each of the other models replaces one number of channels by 1.
    """
    sizes = _list_channel_counts(proto)
    factors = [f for f in _list_factors(sizes) if any(size % f == 0 for size in sizes)]
    changes = [
        *(functools.partial(_divide_size, factor=factor) for factor in factors),
        *(functools.partial(_replace_size_by_one, old=size) for size in sizes),
    ]
    for change in changes:
        for change_contents in (True, False):
            yield _resize_channels(proto, change, find_constant, change_contents)


def _list_channel_counts(proto: onnx.ModelProto) -> list[int]:
    shapes = [t.dims for t in _iterate_tensors(proto) if t.data_type not in _INTEGERS]
    counts = {d for shape in shapes for d in shape[:2]}
    for value in proto.graph.input:
        counts.update(d.dim_value for d in value.type.tensor_type.shape.dim[1:2])
    return sorted((c for c in counts if c > 1), reverse=True)


def _replace_size_by_one(size: int, old: int) -> int:
    return 1 if size == old else size


def _reduce_batch(proto: onnx.ModelProto) -> onnx.ModelProto:
    candidate = deepcopy(proto)
    for value in candidate.graph.input:
        _change_dims(value.type.tensor_type.shape.dim[:1], lambda size: 1)
    return _remove_types(candidate)


def reduce_images(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield a model with a batch size of 1, then models with smaller images."""
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input]
    if any(shape and shape[0] > 1 for shape in shapes):
        yield _reduce_batch(proto)
    sides = sorted({d for shape in shapes for d in shape[2:] if d > 1}, reverse=True)
    for factor in _list_factors(sides):
        # A number in a constant may be a side (power 1) or an area (power 2), or it may not depend
        # on the image size (power 0).
        for power in (0, 1, 2):
            yield _divide_sides(proto, factor, power)


def _divide_sides(proto: onnx.ModelProto, factor: int, power: int) -> onnx.ModelProto:
    candidate = deepcopy(proto)
    for value in candidate.graph.input:
        divide = functools.partial(_divide_side, factor=factor)
        _change_dims(value.type.tensor_type.shape.dim[2:], divide)
    if power:
        _change_contents(candidate, functools.partial(_divide_size, factor=factor**power))
    return _remove_types(candidate)


def _divide_side(size: int, factor: int) -> int:
    return max(1, size // factor)


def _change_dims(
    dims: Iterable[onnx.TensorShapeProto.Dimension], change: Callable[[int], int]
) -> None:
    for dim in dims:
        if dim.dim_value > 1:
            dim.dim_value = change(dim.dim_value)


def flatten_weights(
    proto: onnx.ModelProto, find_constant: ConstantLookup
) -> Iterator[onnx.ModelProto]:
    """Yield models in which the elements of large weight tensors have one value per scale.

    The value is the element with the largest magnitude, so that the scale still fits the weights.
    If there are several such tensors, the first model changes all of them, and each later model
    changes one.
    """
    graph = proto.graph
    scales = {n.input[1] for n in graph.node if n.op_type in (qdq.Q, qdq.DQ)}
    axes = _find_scale_axes(proto)
    flattened: dict[int, npt.NDArray[Any]] = {}
    for index, tensor in enumerate(graph.initializer):
        if _is_large_weight(tensor) and tensor.name not in scales:
            array = to_array(find_constant(tensor))
            plain = _flatten(array, axes.get(tensor.name))
            if (plain != array).any():
                flattened[index] = plain
    groups = [[index] for index in flattened]
    if len(flattened) > 1:
        groups.insert(0, list(flattened))
    for group in groups:
        candidate = deepcopy(proto)
        for index in group:
            tensor = candidate.graph.initializer[index]
            tensor.CopyFrom(numpy_helper.from_array(flattened[index], tensor.name))
        yield candidate


def _is_large_weight(tensor: onnx.TensorProto) -> bool:
    is_weight = tensor.data_type in qdq.FLOATS | {onnx.TensorProto.INT8}
    return is_weight and bool(np.prod(tensor.dims) > _PLAIN)


def _find_scale_axes(proto: onnx.ModelProto) -> dict[str, int | None]:
    """Return the channel axis of each tensor that a QuantizeLinear reads; None for one scale."""
    counts = {t.name: np.prod(t.dims) for t in proto.graph.initializer}
    axes: dict[str, int | None] = {}
    for node in proto.graph.node:
        if node.op_type == qdq.Q:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
            axes[node.input[0]] = axis if counts.get(node.input[1], 1) > 1 else None
    return axes


def _flatten(array: npt.NDArray[Any], axis: int | None) -> npt.NDArray[Any]:
    """Return an array whose elements, of each channel or of all, are the largest in magnitude."""
    shape = [1] * array.ndim
    if axis is not None and -array.ndim <= axis < array.ndim:
        shape[axis] = -1
    return np.broadcast_to(_find_largest(_to_rows(array, axis)).reshape(shape), array.shape)


def _restore_largest(
    part: npt.NDArray[Any], whole: npt.NDArray[Any], axis: int | None
) -> npt.NDArray[Any]:
    """Return a part of weights with the largest magnitude that each channel has in the whole.

    The scales of the whole then fit the part.
    """
    rows = _to_rows(part, axis).copy()
    largest = _find_largest(_to_rows(whole, axis))[: len(rows)]
    np.put_along_axis(rows, _find_places(rows), largest[:, None], axis=1)
    if len(rows) == 1:
        return rows.reshape(part.shape)
    moved = np.moveaxis(part, axis or 0, 0)
    return np.ascontiguousarray(np.moveaxis(rows.reshape(moved.shape), 0, axis or 0))


def are_positions(array: npt.NDArray[Any]) -> bool:
    """Return whether the elements are 0, 1, 2, ..., such as the bins of a DFL, and not weights."""
    return array.size > 1 and np.array_equal(array.reshape(-1), np.arange(array.size))


def _to_rows(array: npt.NDArray[Any], axis: int | None) -> npt.NDArray[Any]:
    """Return an array of shape [channels, values], with one row if the axis is not valid."""
    if axis is None or not -array.ndim <= axis < array.ndim:
        return array.reshape(1, -1)
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def _find_places(rows: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    places: npt.NDArray[np.intp] = np.abs(rows.astype(np.float64)).argmax(axis=1, keepdims=True)
    return places


def _find_largest(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.take_along_axis(rows, _find_places(rows), axis=1)[:, 0]


def _list_factors(sizes: list[int]) -> list[int]:
    """Return factors by which to try to divide sizes, in descending order.

    The factors are powers of two, small odd numbers, and the sizes themselves.
    """
    largest = sizes[0] if sizes else 1
    factors = {2**i for i in range(1, largest.bit_length())} | {3, 5, 7} | set(sizes)
    return sorted((f for f in factors if 1 < f <= largest), reverse=True)


def _iterate_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for node in proto.graph.node:
        if node.op_type == "Constant":
            yield from (a.t for a in node.attribute if a.HasField("t"))


def _resize_attributes(
    node: onnx.NodeProto,
    resize: Callable[[onnx.TensorProto, str], onnx.TensorProto],
    change: Callable[[int], int],
) -> None:
    for attribute in node.attribute:
        if node.op_type == "Constant" and attribute.HasField("t"):
            attribute.t.CopyFrom(resize(attribute.t, node.output[0]))
        if attribute.name == "group" and attribute.i > 1:
            attribute.i = change(attribute.i)


def _resize_channels(
    proto: onnx.ModelProto,
    change: Callable[[int], int],
    find_constant: ConstantLookup,
    change_contents: bool,
) -> onnx.ModelProto:
    """Return a copy of a model with changed numbers of channels in weights, inputs and groups.

    Args:
        proto: The model.
        change: Function that returns the new number of channels for an old number.
        find_constant: Function that returns a constant with data.
        change_contents: Whether to change sizes in constants too, such as the shape of a Reshape.
    """
    resizing = (n for n in proto.graph.node if n.op_type in ("Resize", "Upsample"))
    structural = {t for n in resizing for t in n.input[1:]}
    axes = _find_scale_axes(proto)

    def resize(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
        if name in structural or tensor.data_type in _NOT_RESIZED:
            return tensor
        dims = [change(d) if axis < 2 else d for axis, d in enumerate(tensor.dims)]
        if dims == list(tensor.dims):
            return tensor
        whole: npt.NDArray[Any] = to_array(find_constant(tensor))
        part = np.ascontiguousarray(whole[tuple(slice(0, d) for d in dims)])
        if name in axes and part.size and not are_positions(whole):
            part = _restore_largest(part, whole, axes[name])
        return numpy_helper.from_array(part, tensor.name)

    candidate = prune_unused(proto, lambda tensor: resize(tensor, tensor.name))
    for node in candidate.graph.node:
        _resize_attributes(node, resize, change)
    for value in candidate.graph.input:
        _change_dims(value.type.tensor_type.shape.dim[1:2], change)
    if change_contents:
        _change_contents(candidate, change)
    return _remove_types(candidate)


def can_hold_sizes(tensor: onnx.TensorProto) -> bool:
    """Return whether a constant is a scalar or short vector of integers, which may be sizes."""
    return (
        tensor.data_type in _INTEGERS
        and len(tensor.dims) <= 1
        and math.prod(tensor.dims) <= limits.SHAPE_ENTRIES
    )


def _change_contents(proto: onnx.ModelProto, change: Callable[[int], int]) -> None:
    def change_size(size: int) -> int:
        return change(size) if 1 < size < 2**31 else size

    for tensor in _iterate_tensors(proto):
        if can_hold_sizes(tensor):
            array = to_array(tensor)
            sizes = np.array([change_size(int(v)) for v in array.reshape(-1)], array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(sizes.reshape(array.shape), tensor.name))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("split", "starts", "ends", "shape"):
                attribute.ints[:] = map(change_size, attribute.ints)


def _remove_types(proto: onnx.ModelProto) -> onnx.ModelProto:
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    del proto.graph.value_info[:]
    return proto


READING_CONSTANTS: frozenset[Reduction] = frozenset((reduce_channels, flatten_weights))
"""Reductions that need the data of large constants. Their second argument is a ConstantLookup."""

ALL: tuple[Reduction, ...] = (
    reduce_outputs,
    remove_nodes,
    store_constants,
    bypass_nodes,
    reduce_channels,
    reduce_images,
    flatten_weights,
)
# Order for checks whose time depends on the size of the model: the reductions that remove the most
# bytes come first.
BYTES_FIRST: tuple[Reduction, ...] = (
    store_constants,
    reduce_channels,
    *(reduction for reduction in ALL if reduction not in (store_constants, reduce_channels)),
)
