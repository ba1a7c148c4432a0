"""Weights in files beside the model: which files they are, that they are the model's own, and how much they take.

The model's message is made in parts here too: as a whole protobuf makes it twice, beside the model itself.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from qdqtool.errors import ModelError
from qdqtool.proto.subgraphs import attribute_graphs
from qdqtool.util import limits
from qdqtool.util.files import INVALID_NAME, record_input

_LARGE = 1 << 14  # elements
_ELEMENTS = 1 << 63  # sizes are numbers of 64 bits
_PLAIN: dict[int, str] = {  # numpy's names of what is stored as it is, little-endian
    onnx.TensorProto.FLOAT: "<f4",
    onnx.TensorProto.DOUBLE: "<f8",
    onnx.TensorProto.FLOAT16: "<f2",
    onnx.TensorProto.INT8: "i1",
    onnx.TensorProto.UINT8: "u1",
    onnx.TensorProto.INT32: "<i4",
    onnx.TensorProto.INT64: "<i8",
    onnx.TensorProto.BOOL: "?",
}
_BITS = {
    number: int(bits[0])
    for name, number in onnx.TensorProto.DataType.items()  # of an element, in a file
    if (bits := re.search(r"\d+", name))
}
_BITS.update({onnx.TensorProto.FLOAT: 32, onnx.TensorProto.DOUBLE: 64, onnx.TensorProto.BOOL: 8})


def all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that a graph stores: initializers, and those in attributes and subgraphs."""
    yield from graph.initializer
    for node in (n for n in graph.node if n.attribute):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in attribute_graphs(attribute):
                yield from all_tensors(inner)


def to_array(tensor: onnx.TensorProto, model: str = "", name: str = "") -> npt.NDArray[Any]:
    """The values of a tensor whose data is in its message.

    Errors name the model by its path, and the tensor by ``name`` where it has none of its own.

    Raises:
        ModelError: It is damaged: of an unknown type, or with fewer values than its dimensions say.
    """
    try:
        dtype = _PLAIN.get(tensor.data_type)
        if (
            dtype is not None
            and tensor.HasField("raw_data")
            and not (is_external(tensor) or tensor.HasField("segment"))
        ):
            return np.frombuffer(tensor.raw_data, dtype).reshape(tensor.dims)
        from onnx import numpy_helper

        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, RuntimeError, KeyError, OverflowError) as error:
        raise ModelError(
            f"tensor '{name or tensor.name}' cannot be read: {error}",
            model or "model",
            code="tensor-damaged",
            node=name or tensor.name,
        ) from error


def is_possible(dims: Sequence[int]) -> bool:
    """Whether a tensor can have such dimensions: other libraries crash on more, whose product fits no number."""
    return len(dims) <= limits.RANK and abs(math.prod(dims)) < _ELEMENTS


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's values are in a file beside the model."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def has_data(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's values are there or in a file; not so in copies without large weights."""
    return is_external(tensor) or any(
        f.name.endswith("_data") and f.name != "external_data" for f, _ in tensor.ListFields()
    )


def is_bytes(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's values are bytes that may as well lie in a file: no texts, no packed half bytes in numbers."""
    return tensor.HasField("raw_data") or tensor.data_type in (*_PLAIN, onnx.TensorProto.BFLOAT16)


def is_separable(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor is large, and its values may lie in a file."""
    return (
        is_bytes(tensor)
        and math.prod(tensor.dims) > _LARGE
        and has_data(tensor)
        and not tensor.external_data
    )


def location_of(tensor: onnx.TensorProto) -> str:
    """The file, relative to the model's folder, that holds an external tensor."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def path_of(tensor: onnx.TensorProto, base_dir: str, model: str) -> Path | None:
    """The file that holds an external tensor; None where there is no such regular file.

    Raises:
        ModelError: It lies outside the model's folder.
    """
    if not base_dir:
        return None
    location = location_of(tensor)
    if "\0" in location:
        raise ModelError(
            f"weight file {location!r} of tensor '{tensor.name}': {INVALID_NAME}",
            model,
            code="invalid-path",
            node=tensor.name,
        )
    base = Path(os.path.realpath(base_dir))
    path = Path(os.path.realpath(base / location))
    if os.path.isabs(location) or not path.is_relative_to(base):
        raise ModelError(
            f"weight file '{location}' of tensor '{tensor.name}' lies outside the model's "
            "folder; refused",
            model,
            code="outside-folder",
            node=tensor.name,
        )
    try:
        return path if path.is_file() else None
    except OSError:  # a name longer than the file system takes
        return None


def check(proto: onnx.ModelProto, base_dir: str, model: str) -> None:
    """Looks at all external weights, without reading any, and notes their files as read.

    Raises:
        ModelError: A file lies outside the model's folder, an entry is damaged, or together they are too much.
    """
    found: dict[str, tuple[Path | None, int]] = {}
    total = 0
    for tensor in all_tensors(proto.graph):
        if not is_external(tensor):
            continue
        location = location_of(tensor)
        if location not in found:
            path = path_of(tensor, base_dir, model)
            found[location] = path, path.stat().st_size if path is not None else 0
            if path is not None:
                record_input(path)
        total += _length(tensor, found[location][1], model)
    if not found:
        return
    what = "the external weights of all tensors together take"
    limits.check_size(
        total, limits.EXTERNAL_DATA, what, ModelError, path=model, code="weights-too-large"
    )
    there = sum(size for _, size in found.values())
    if total > there + limits.EXTERNAL_SHARED:
        raise ModelError(
            f"{what} {limits.format_bytes(total)}, but their files hold {limits.format_bytes(there)}; "
            "the model is damaged, export it again",
            model,
            code="weights-damaged",
        )


def _length(tensor: onnx.TensorProto, size: int, model: str) -> int:
    """Bytes of the file that a tensor takes."""
    needed = stored_bytes(tensor)
    numbers = {"offset": 0, "length": min(size, needed)}
    keys = [entry.key for entry in tensor.external_data]
    for entry in tensor.external_data:
        if keys.count(entry.key) > 1 and entry.key in (
            "location",
            *numbers,
        ):  # readers differ in which they take
            raise ModelError(
                f"tensor '{tensor.name}' is damaged: it has more than one {entry.key}",
                model,
                code="tensor-damaged",
                node=tensor.name,
            )
        if entry.key in numbers:
            if not (entry.value.isascii() and entry.value.isdecimal() and len(entry.value) < 19):
                raise ModelError(
                    f"tensor '{tensor.name}' is damaged: its {entry.key} in "
                    f"'{location_of(tensor)}' is '{entry.value[:40]}'",
                    model,
                    code="tensor-damaged",
                    node=tensor.name,
                )
            numbers[entry.key] = int(entry.value)
    if numbers["length"] > needed:
        raise ModelError(
            f"tensor '{tensor.name}' is damaged: its length in '{location_of(tensor)}' is "
            f"{numbers['length']}, and its dimensions take {needed} at most",
            model,
            code="tensor-damaged",
            node=tensor.name,
        )
    return max(0, min(numbers["length"], size - numbers["offset"]))


def stored_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes that a tensor of such dimensions takes; of an unknown type the most that there may be."""
    elements: int = math.prod(tensor.dims)
    return max(0, -(-elements * _BITS.get(tensor.data_type, 128) // 8))


def with_length(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A copy of an external tensor that states how much of the file it is; else that is all behind its offset."""
    made = onnx.TensorProto()
    made.CopyFrom(tensor)
    if tensor.data_type in _BITS and all(entry.key != "length" for entry in tensor.external_data):
        made.external_data.add(key="length", value=str(stored_bytes(tensor)))
    return made


_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_BYTES_FOLLOW = 2  # the wire type of messages and strings
_COPIED = 1 << 12  # bytes of a tensor that are not copied once more


class MessageParts:
    """The parts of a model's message, one for each initializer; joined they are what protobuf makes of the whole.

    Attributes:
        size: Bytes of the whole.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        """Measures the parts.

        Raises:
            ValueError: One is over 2 GB; also EncodeError, by version of protobuf.
        """
        self._tensors = proto.graph.initializer
        around_graph = _around(proto, _GRAPH)
        around_weights = _around(proto.graph, _INITIALIZER)
        if around_graph is None or around_weights is None or not proto.HasField("graph"):
            self._front, self._back, self._sizes = _whole(proto), b"", None
            self.size = len(self._front)
            return
        self._sizes = [sum(map(len, _tensor(t))) for t in self._tensors]
        graph = sum(map(len, around_weights)) + sum(
            len(_head(_INITIALIZER, n)) + n for n in self._sizes
        )
        self._front = around_graph[0] + _head(_GRAPH, graph) + around_weights[0]
        self._back = around_weights[1] + around_graph[1]
        self.size = len(around_graph[0]) + len(_head(_GRAPH, graph)) + graph + len(around_graph[1])

    def __iter__(self) -> Iterator[bytes]:
        yield self._front
        for tensor, size in zip(self._tensors, self._sizes or (), strict=self._sizes is not None):
            yield _head(_INITIALIZER, size)
            yield from _tensor(tensor)
        yield self._back


def _tensor(tensor: onnx.TensorProto) -> list[bytes]:
    raw = tensor.raw_data
    around = _around(tensor, _RAW) if len(raw) > _COPIED else None
    if around is None:
        return [_whole(tensor)]
    return [around[0], _head(_RAW, len(raw)), raw, around[1]]


def _whole(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _around(message: Any, number: int) -> tuple[bytes, bytes] | None:
    """The bytes of the fields in front of one and behind it; None where onnx does not know a field, or a text is not
    UTF-8: that of documentation, which protobuf reads as bytes and does not take back."""
    if len(UnknownFieldSet(message)):
        return None
    front, back = type(message)(), type(message)()
    for field, value in message.ListFields():
        if field.number == number:
            continue
        if field.type == field.TYPE_STRING and isinstance(value, bytes):
            return None
        copy = front if field.number < number else back
        if isinstance(value, Message):
            getattr(copy, field.name).CopyFrom(value)
        elif hasattr(value, "extend"):
            getattr(copy, field.name).extend(value)
        else:
            setattr(copy, field.name, value)
    return _whole(front), _whole(back)


def _head(number: int, length: int) -> bytes:
    """What is in front of a field of so many bytes: its number and wire type, and the length."""
    made = bytearray([number << 3 | _BYTES_FOLLOW])
    while length > 0x7F:
        made.append(length & 0x7F | 0x80)
        length >>= 7
    made.append(length)
    return bytes(made)
