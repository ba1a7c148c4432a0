"""Ways to make a model smaller. Each takes a model and yields smaller ones, the boldest first; none changes its own."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from qdqtool.ir import qdq
from qdqtool.proto.external_data import to_array
from qdqtool.proto.subgraphs import STANDARD, captured_tensors, extract_part
from qdqtool.util import limits

Move = Callable[..., Iterator[onnx.ModelProto]]
Whole = Callable[[onnx.TensorProto], onnx.TensorProto]
"""Gives a constant with its data, where a model has none of it."""

_Message = TypeVar("_Message", onnx.ModelProto, onnx.TensorProto)
_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})
LARGE = 4096  # bytes of a constant that is put apart from what is tried, unless it may hold sizes
_PLAIN = 64  # elements; a constant of fewer is small enough as it is


def _as_it_is(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return tensor


def copied(proto: _Message) -> _Message:
    """A copy."""
    result = type(proto)()
    result.CopyFrom(proto)
    return result


def pruned(proto: onnx.ModelProto, stored: Whole = _as_it_is) -> onnx.ModelProto:
    """The nodes, constants, inputs and types that its outputs need; other types shape inference is to find again.

    Args:
        proto: The model.
        stored: What is put in the place of an initializer.
    """
    graph = proto.graph
    result, needed = extract_part(proto, graph.node, graph.output, map(stored, graph.initializer))
    result.graph.input.extend(v for v in graph.input if v.name in needed)
    unknown = {o for n in result.graph.node if not _is_inferred(n, proto) for o in n.output}
    result.graph.value_info.extend(
        v for v in graph.value_info if v.name in unknown and v.name in needed
    )
    return result


def _is_inferred(node: onnx.NodeProto, proto: onnx.ModelProto) -> bool:
    """Whether onnx finds the types of what a node makes; it does not know plugins."""
    if any(f.name == node.op_type and f.domain == node.domain for f in proto.functions):
        return True
    version = next((o.version for o in proto.opset_import if o.domain in STANDARD), 1)
    return node.domain in STANDARD and bool(onnx.defs.has(node.op_type, max(version, 1)))


def types_of(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Tensor to its type."""
    graph = proto.graph
    found = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
    found.update(
        {
            t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims))
            for t in graph.initializer
        }
    )
    return found


def constants_of(proto: onnx.ModelProto) -> set[str]:
    """Names of initializers and of what Constant nodes make."""
    found = {t.name for t in proto.graph.initializer}
    found.update(o for n in proto.graph.node if n.op_type == "Constant" for o in n.output)
    return found


def ends(proto: onnx.ModelProto, floats: bool = True) -> Iterator[onnx.ModelProto]:
    """Fewer outputs: one alone, high up, or one less; with ``floats`` no output splits a Q/DQ pair."""
    types = types_of(proto)
    graph = proto.graph
    usable = [
        n.output[0]
        for n in graph.node
        if n.op_type != "Constant"
        and n.output[0] in types
        and (not floats or _is_float(types[n.output[0]]))
    ]
    for name in usable:
        if len(graph.output) == 1 and graph.output[0].name == name:
            continue
        candidate = copied(proto)
        del candidate.graph.output[:]
        candidate.graph.output.append(helper.make_value_info(name, types[name]))
        yield candidate
    for index in range(len(graph.output)):
        if len(graph.output) > 1:
            candidate = copied(proto)
            del candidate.graph.output[index]
            yield candidate


def starts(proto: onnx.ModelProto, floats: bool = True) -> Iterator[onnx.ModelProto]:
    """What nodes make becomes a network input: half of the nodes, a quarter, ..., single ones from the end.

    Args:
        proto: The model.
        floats: Only floats may enter; a Q/DQ pair is not cut in two.
    """
    types, constants = types_of(proto), constants_of(proto)
    nodes = proto.graph.node
    left = {o.name for o in proto.graph.output}

    def without(gone: range) -> Iterator[onnx.ModelProto]:
        made = {o: nodes[i] for i in gone for o in nodes[i].output if o and o not in constants}
        read = {
            t
            for i, n in enumerate(nodes)
            if i not in gone
            for t in (*n.input, *captured_tensors(n))
        }
        entering = [t for t in made if t in read]
        if left & set(made) or any(t not in types for t in entering):
            return
        if floats and any(not _is_float(types[t]) or made[t].op_type == qdq.DQ for t in entering):
            return
        candidate = copied(proto)
        for index in reversed(gone):
            if nodes[index].op_type != "Constant":
                del candidate.graph.node[index]
        candidate.graph.input.extend(helper.make_value_info(t, types[t]) for t in entering)
        yield candidate

    size = len(nodes) // 2
    while size > 1:
        for start in range(0, len(nodes) - size + 1, size):
            yield from without(range(start, start + size))
        size //= 2
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if node.op_type != "Constant" and not all(not i or i in constants for i in node.input):
            yield from without(range(index, index + 1))


def skips(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """A node is left out: what read its result reads an input of the same type."""
    types, constants = types_of(proto), constants_of(proto)
    nodes = proto.graph.node
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        for source in node.input:
            if (
                source in types
                and source not in constants
                and types[source] == types.get(node.output[0])
            ):
                candidate = copied(proto)
                _bypass(candidate, index, source)
                yield candidate
    pairs = {n.output[0]: i for i, n in enumerate(nodes) if n.op_type == qdq.Q}
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if (
            node.op_type == qdq.DQ and node.input[0] in pairs
        ):  # a pair, whose halves have other types
            q = pairs[node.input[0]]
            if nodes[q].input[0] not in constants:
                candidate = copied(proto)
                _bypass(candidate, index, nodes[q].input[0])
                yield candidate


def constants(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Constant nodes become initializers of the same names: the same model with fewer nodes."""
    ends = {o.name for o in proto.graph.output}
    stored = {
        i: a.t
        for i, n in enumerate(proto.graph.node)
        if n.op_type == "Constant"
        and n.domain in STANDARD
        and len(n.output) == 1
        and n.output[0] not in ends
        for a in n.attribute
        if a.name == "value" and a.HasField("t")
    }
    if stored:
        candidate = copied(proto)
        for index, tensor in stored.items():
            added = candidate.graph.initializer.add()
            added.CopyFrom(tensor)
            added.name = proto.graph.node[index].output[0]
        for index in sorted(stored, reverse=True):
            del candidate.graph.node[index]
        gone = {proto.graph.node[i].output[0] for i in stored}
        types = [v for v in candidate.graph.value_info if v.name not in gone]
        del candidate.graph.value_info[:]
        candidate.graph.value_info.extend(types)
        yield candidate


def _bypass(proto: onnx.ModelProto, index: int, new: str) -> None:
    """Takes a node out; what read its output reads ``new``."""
    old = proto.graph.node[index].output[0]
    del proto.graph.node[index]
    for other in proto.graph.node:
        for place, name in enumerate(other.input):
            if name == old:
                other.input[place] = new
    for output in proto.graph.output:
        if output.name == old:
            output.name = new


def _is_float(kind: onnx.TypeProto) -> bool:
    return kind.tensor_type.elem_type in qdq.FLOATS


# Sizes -----------------------------------------------------------------------------------------------------------


def channels(proto: onnx.ModelProto, whole: Whole = _as_it_is) -> Iterator[onnx.ModelProto]:
    """Fewer channels: every number of channels that a factor divides is divided by it, then single ones become 1."""
    found = {d for t in _tensors(proto) if t.data_type not in _INTEGERS for d in t.dims[:2]}
    found |= {
        v.type.tensor_type.shape.dim[1].dim_value
        for v in proto.graph.input
        if len(v.type.tensor_type.shape.dim) > 1
    }
    sizes = sorted((d for d in found if d > 1), reverse=True)
    for factor in _factors(sizes):
        if all(size % factor for size in sizes):
            continue
        for content in (True, False):
            yield _resized(proto, lambda d, f=factor: d // f if d % f == 0 else d, whole, content)  # type: ignore[misc]
    for size in sizes:
        for content in (True, False):
            yield _resized(proto, lambda d, s=size: 1 if d == s else d, whole, content)  # type: ignore[misc]


def spatial(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Smaller images and a batch of one."""
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input]
    if any(s and s[0] > 1 for s in shapes):
        candidate = copied(proto)
        for value in candidate.graph.input:
            dims = value.type.tensor_type.shape.dim
            if dims and dims[0].dim_value > 1:
                dims[0].dim_value = 1
        yield _forget_outputs(candidate)
    sides = sorted({d for s in shapes for d in s[2:] if d > 1}, reverse=True)
    for factor in _factors(sides):
        for power in (0, 1, 2):  # constants that hold no size, a side, an area
            candidate = copied(proto)
            for value in candidate.graph.input:
                for dim in value.type.tensor_type.shape.dim[2:]:
                    if dim.dim_value > 1:
                        dim.dim_value = max(1, dim.dim_value // factor)
            if power:
                _map_contents(candidate, lambda d, f=factor**power: d // f if d % f == 0 else d)  # type: ignore[misc]
            yield _forget_outputs(candidate)


def weights(proto: onnx.ModelProto, whole: Whole = _as_it_is) -> Iterator[onnx.ModelProto]:
    """Constants of one value, all at once and one by one: the largest magnitude that they had."""
    large = [i for i, t in enumerate(proto.graph.initializer) if _can_be_plain(t, whole)]
    for group in ([large] if len(large) > 1 else []) + [[i] for i in large]:
        candidate = copied(proto)
        for index in group:
            tensor = candidate.graph.initializer[index]
            array = to_array(whole(tensor))
            flat = array.reshape(-1)
            plain = np.full_like(array, flat[int(np.argmax(np.abs(flat.astype(np.float64))))])
            tensor.CopyFrom(numpy_helper.from_array(plain, tensor.name))
        yield candidate


def _can_be_plain(tensor: onnx.TensorProto, whole: Whole) -> bool:
    if (
        tensor.data_type not in qdq.FLOATS | {onnx.TensorProto.INT8}
        or np.prod(tensor.dims) <= _PLAIN
    ):
        return False
    array = to_array(whole(tensor))
    return bool((array != array.reshape(-1)[0]).any())


def _factors(sizes: list[int]) -> list[int]:
    """Powers of two up to the largest size, and odd sizes themselves; the largest first."""
    top = sizes[0] if sizes else 1
    found = {2**i for i in range(1, top.bit_length())} | {3, 5, 7} | set(sizes)
    return sorted((f for f in found if 1 < f <= top), reverse=True)


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for node in proto.graph.node:
        if node.op_type == "Constant":
            yield from (a.t for a in node.attribute if a.HasField("t"))


def _resized(
    proto: onnx.ModelProto, change: Callable[[int], int], whole: Whole, content: bool
) -> onnx.ModelProto:
    """A copy with other numbers of channels in weights, inputs and groups."""
    structural = {
        t for n in proto.graph.node if n.op_type in ("Resize", "Upsample") for t in n.input[1:]
    }

    def resized(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
        if (
            tensor.data_type in _INTEGERS | {onnx.TensorProto.BOOL, onnx.TensorProto.STRING}
            or name in structural
        ):
            return tensor
        wanted = [change(d) if axis < 2 else d for axis, d in enumerate(tensor.dims)]
        if wanted == list(tensor.dims):
            return tensor
        part: npt.NDArray[Any] = to_array(whole(tensor))[tuple(slice(0, w) for w in wanted)]
        return numpy_helper.from_array(np.ascontiguousarray(part), tensor.name)

    candidate = pruned(proto, lambda tensor: resized(tensor, tensor.name))
    for node in candidate.graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    attribute.t.CopyFrom(resized(attribute.t, node.output[0]))
    for value in candidate.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) > 1 and dims[1].dim_value > 1:
            dims[1].dim_value = change(dims[1].dim_value)
    for node in candidate.graph.node:
        for attribute in node.attribute:
            if attribute.name == "group" and attribute.i > 1:
                attribute.i = change(attribute.i)
    if content:
        _map_contents(candidate, change)
    return _forget_outputs(candidate)


def may_hold_sizes(tensor: onnx.TensorProto) -> bool:
    """Whether a constant may be one of which shapes are computed: a vector of integers, no table of them."""
    return (
        tensor.data_type in _INTEGERS
        and len(tensor.dims) <= 1
        and math.prod(tensor.dims) <= limits.SHAPE_ENTRIES
    )


def _map_contents(proto: onnx.ModelProto, change: Callable[[int], int]) -> None:
    """Changes the sizes that Reshape, Slice, Split and the like take from constants and attributes."""
    for tensor in _tensors(proto):
        if may_hold_sizes(tensor):
            array = to_array(tensor)
            changed = np.array(
                [change(int(v)) if 1 < v < 2**31 else int(v) for v in array.reshape(-1)],
                array.dtype,
            )
            tensor.CopyFrom(numpy_helper.from_array(changed.reshape(array.shape), tensor.name))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("split", "starts", "ends", "shape"):
                attribute.ints[:] = [change(v) if 1 < v < 2**31 else v for v in attribute.ints]


def _forget_outputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Takes the dimensions from the outputs, so that shape inference finds the new ones."""
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    del proto.graph.value_info[:]
    return proto


OF_DATA: frozenset[Move] = frozenset((channels, weights))
"""Those that read large constants, which they ask for; all may get them without data."""

ALL: tuple[Move, ...] = (ends, starts, constants, skips, channels, spatial, weights)
# Where each byte of a model costs more than trying what cannot hold: what sheds most of them is tried first.
BYTES_FIRST: tuple[Move, ...] = (
    constants,
    channels,
    *(move for move in ALL if move not in (constants, channels)),
)
# For networks that are no user's: any tensor may enter or leave.
LOOSE: tuple[Move, ...] = (
    functools.partial(ends, floats=False),
    functools.partial(starts, floats=False),
    constants,
    skips,
)
