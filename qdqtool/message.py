"""The bytes of a model's message in parts: as a whole protobuf makes them twice, beside the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_BYTES_FOLLOW = 2  # the wire type of messages and strings


class Parts:
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
        graph = sum(map(len, around_weights)) + sum(len(_head(_INITIALIZER, n)) + n for n in self._sizes)
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
    around = _around(tensor, _RAW) if tensor.HasField("raw_data") else None
    if around is None:
        return [_whole(tensor)]
    raw = tensor.raw_data
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
