"""Stored tensors of a model, its external weights, and serialization."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from qdqtool.errors import ModelError
from qdqtool.proto.slim import copy_without_initializers
from qdqtool.proto.subgraphs import attribute_graphs
from qdqtool.util import limits
from qdqtool.util.files import record_input

_LARGE_ELEMENTS = 1 << 14
_MAX_ELEMENTS = 1 << 63  # limit of 64-bit sizes
_NUMPY_TYPES: dict[int, str] = {  # ONNX types whose stored little-endian data numpy can read
    onnx.TensorProto.FLOAT: "<f4",
    onnx.TensorProto.DOUBLE: "<f8",
    onnx.TensorProto.FLOAT16: "<f2",
    onnx.TensorProto.INT8: "i1",
    onnx.TensorProto.UINT8: "u1",
    onnx.TensorProto.INT32: "<i4",
    onnx.TensorProto.INT64: "<i8",
    onnx.TensorProto.BOOL: "?",
}
_BITS = {  # number of bits of an element by ONNX type, from the digits in the name of the type
    number: int(bits[0])
    for name, number in onnx.TensorProto.DataType.items()
    if (bits := re.search(r"\d+", name))
}
_BITS.update({onnx.TensorProto.FLOAT: 32, onnx.TensorProto.DOUBLE: 64, onnx.TensorProto.BOOL: 8})


def all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a graph: initializers, and tensors in attributes and subgraphs."""
    yield from graph.initializer
    for node in (n for n in graph.node if n.attribute):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in attribute_graphs(attribute):
                yield from all_tensors(inner)


def external_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of :func:`all_tensors` whose values are in a file next to the model."""
    return filter(is_external, all_tensors(graph))


def to_array(tensor: onnx.TensorProto, model: str = "", name: str = "") -> npt.NDArray[Any]:
    """Return the values of a tensor that is stored in the model, not in an external file.

    Messages contain the path of the model (``model``), and ``name`` if the tensor has no name.

    Raises:
        ModelError: The type is unknown, or the number of values does not match the dimensions.
    """
    try:
        dtype = _NUMPY_TYPES.get(tensor.data_type)
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
            f"tensor '{name or tensor.name}' cannot be read: {error}; export the model again",
            model or "model",
            code="tensor-damaged",
            node=name or tensor.name,
        ) from error


def are_possible_dims(dims: Sequence[int]) -> bool:
    """Return whether libraries can handle dimensions without a crash.

    The limits are 64 dimensions and fewer than 2**63 elements.
    """
    return len(dims) <= limits.RANK and abs(math.prod(dims)) < _MAX_ELEMENTS


def is_external(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor's values are in a file next to the model."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def has_data(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor has its values, in the model or in an external file.

    Copies of models without large weights have tensors without values.
    """
    return is_external(tensor) or any(
        f.name.endswith("_data") and f.name != "external_data" for f, _ in tensor.ListFields()
    )


def is_storable(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor's values can be stored in an external file.

    A tensor without ``raw_data`` can be stored only if its type is BFLOAT16, or a type that numpy
    can read.
    """
    return tensor.HasField("raw_data") or tensor.data_type in (
        *_NUMPY_TYPES,
        onnx.TensorProto.BFLOAT16,
    )


def is_separable(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor is large, and its values can be moved to an external file."""
    return (
        is_storable(tensor)
        and math.prod(tensor.dims) > _LARGE_ELEMENTS
        and has_data(tensor)
        and not tensor.external_data
    )


def read_location(tensor: onnx.TensorProto) -> str:
    """Return an external tensor's file relative to the model's folder; empty if absent."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def find_weight_file(tensor: onnx.TensorProto, base_dir: str, model: str) -> Path | None:
    """Return the path of an external tensor's file; None if it is not a regular file.

    None also if ``base_dir``, the folder of the model, is empty. ``model`` is the path of the model
    for messages.

    Raises:
        ModelError: The file lies outside the model's folder, or the file name is not valid.
    """
    if not base_dir:
        return None
    location = read_location(tensor)
    if "\0" in location:
        raise ModelError(
            f"weight file {location!r} of tensor '{tensor.name}' has NUL in its name; export the "
            "model again",
            model,
            code="invalid-path",
            node=tensor.name,
        )
    base = Path(os.path.realpath(base_dir))
    path = Path(os.path.realpath(base / location))
    if os.path.isabs(location) or not path.is_relative_to(base):
        raise ModelError(
            f"weight file '{location}' of tensor '{tensor.name}' lies outside the model's folder "
            "and is not read; export the model again, with the weights in the model's folder",
            model,
            code="outside-folder",
            node=tensor.name,
        )
    try:
        return path if path.is_file() else None
    except OSError:  # The name is too long for the file system.
        return None


def check_external_weights(proto: onnx.ModelProto, base_dir: str, model: str) -> None:
    """Check the locations and sizes of all external weights, and record their files as inputs.

    The weights themselves are not read. ``model`` is the path of the model for messages.

    Raises:
        ModelError: A file lies outside the model's folder, an entry is damaged, or all weights
            together are too large.
    """
    file_sizes: dict[str, int] = {}
    total = 0
    for tensor in external_tensors(proto.graph):
        location = read_location(tensor)
        if location not in file_sizes:
            path = find_weight_file(tensor, base_dir, model)
            file_sizes[location] = 0 if path is None else path.stat().st_size
            if path is not None:
                record_input(path)
        total += _count_used_bytes(tensor, file_sizes[location], model)
    subject = "the external weights of all tensors together take"
    limits.check_size(
        total, limits.EXTERNAL_DATA, subject, ModelError, path=model, code="weights-too-large"
    )
    available = sum(file_sizes.values())
    if total > available + limits.EXTERNAL_SHARED:
        raise ModelError(
            f"{subject} {limits.format_bytes(total)}, but the weight files contain "
            f"{limits.format_bytes(available)}; the model is damaged, export it again",
            model,
            code="weights-damaged",
        )


def _count_used_bytes(tensor: onnx.TensorProto, file_size: int, model: str) -> int:
    """Return the number of bytes that an external tensor uses in its file.

    Raises:
        ModelError: The location, offset or length is stated twice, or the offset or length is not a
            number or is too large.
    """
    needed = data_size(tensor)
    numbers = {"offset": 0, "length": min(file_size, needed)}
    keys = [entry.key for entry in tensor.external_data]
    for entry in tensor.external_data:
        # If a key is present twice, libraries differ in the entry that they use.
        if keys.count(entry.key) > 1 and entry.key in ("location", *numbers):
            raise _damaged_tensor_error(tensor, f"it has more than one {entry.key}", model)
        if entry.key in numbers:
            if not (entry.value.isascii() and entry.value.isdecimal() and len(entry.value) < 19):
                state = (
                    f"its {entry.key} in '{read_location(tensor)}' is '{entry.value[:40]}', which "
                    "is not a number of bytes"
                )
                raise _damaged_tensor_error(tensor, state, model)
            numbers[entry.key] = int(entry.value)
    if numbers["length"] > needed:
        state = (
            f"its length in '{read_location(tensor)}' is {numbers['length']}, but its "
            f"dimensions need at most {needed}"
        )
        raise _damaged_tensor_error(tensor, state, model)
    return max(0, min(numbers["length"], file_size - numbers["offset"]))


def _damaged_tensor_error(tensor: onnx.TensorProto, state: str, model: str) -> ModelError:
    return ModelError(
        f"tensor '{tensor.name}' is damaged: {state}. Export the model again",
        model,
        code="tensor-damaged",
        node=tensor.name,
    )


def data_size(tensor: onnx.TensorProto) -> int:
    """Return the size of a tensor in bytes, with 16 bytes per element for unknown types."""
    elements: int = math.prod(tensor.dims)
    return max(0, -(-elements * _BITS.get(tensor.data_type, 128) // 8))


def copy_with_length(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a copy of an external tensor that states its length.

    Without a length, libraries read the rest of the file.
    """
    copy = deepcopy(tensor)
    if tensor.data_type in _BITS and all(entry.key != "length" for entry in tensor.external_data):
        copy.external_data.add(key="length", value=str(data_size(tensor)))
    return copy


def serialize(proto: onnx.ModelProto) -> bytes | None:
    """Return the bytes of a model; None if the model is larger than 2 GB."""
    try:
        return bytes(proto.SerializeToString(deterministic=True))
    except (ValueError, EncodeError):  # the class depends on the version of protobuf
        return None


_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_LENGTH_DELIMITED = 2  # wire type of messages and strings


def serialize_in_parts(proto: onnx.ModelProto) -> list[bytes] | None:
    """Return byte strings that together are the serialized model; None if one exceeds 2 GB.

    Weights are serialized one at a time, because for each message, protobuf needs three times as
    much memory as the message has bytes.
    """
    try:
        if _has_inseparable_fields(proto):
            return [proto.SerializeToString(deterministic=True)]
        light = copy_without_initializers(proto)
        # This initializer marks the place of the weights. No other text contains its name.
        light.graph.initializer.add(name=uuid.uuid4().hex)
        graph = light.graph.SerializeToString(deterministic=True)
        marker = _encode_field(_INITIALIZER, light.graph.initializer[0].SerializeToString())
        before, after = graph.split(marker)
        front, back = light.SerializeToString(deterministic=True).split(
            _encode_field(_GRAPH, graph)
        )
        weights: list[bytes] = []
        for tensor in proto.graph.initializer:
            data = tensor.SerializeToString(deterministic=True)
            weights += (_encode_field_header(_INITIALIZER, len(data)), data)
    except (ValueError, EncodeError):  # the class depends on the version of protobuf
        return None
    content = [before, *weights, after]
    return [front, _encode_field_header(_GRAPH, sum(map(len, content))), *content, back]


def _has_inseparable_fields(proto: onnx.ModelProto) -> bool:
    """Return whether a copy of a model without weights would lose a field."""
    messages = (proto, proto.graph)
    return not proto.HasField("graph") or any(
        len(UnknownFieldSet(message)) or isinstance(message.doc_string, bytes)
        for message in messages
    )


def _encode_field(number: int, content: bytes) -> bytes:
    return _encode_field_header(number, len(content)) + content


def _encode_field_header(number: int, length: int) -> bytes:
    """Return protobuf's bytes before a field's content: field number, wire type and length."""
    header = bytearray([number << 3 | _LENGTH_DELIMITED])
    while length > 0x7F:
        header.append(length & 0x7F | 0x80)
        length >>= 7
    header.append(length)
    return bytes(header)
