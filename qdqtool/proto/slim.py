"""Copies of models without the data of weights, if only types and dimensions are needed."""

from __future__ import annotations

import math
from collections.abc import Container

import onnx
from google.protobuf.message import EncodeError

# Constants of at most this size in bytes keep their data, because shape inference may need them.
_KEEP_FOR_SHAPES = 4096


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return the size of a serialized tensor in bytes; 2 GB if protobuf cannot compute it."""
    try:
        return int(tensor.ByteSize())
    except (ValueError, EncodeError):
        return 2**31


def strip_large_weights(
    proto: onnx.ModelProto, keep: int = _KEEP_FOR_SHAPES, only: Container[str] | None = None
) -> onnx.ModelProto:
    """Return a copy of a model without the data of large initializers.

    Initializers without data keep their types and dimensions.

    Args:
        proto: The model, which is not changed.
        keep: Maximum size in bytes of initializers that keep their data.
        only: Names of the initializers that may lose their data; None for all.
    """
    slim = copy_without_initializers(proto)
    for tensor in proto.graph.initializer:
        is_chosen = only is None or tensor.name in only
        keeps_data = not is_chosen or not _is_larger(tensor, keep)
        slim.graph.initializer.add().CopyFrom(tensor if keeps_data else strip_data(tensor))
    return slim


def _is_larger(tensor: onnx.TensorProto, size: int) -> bool:
    # Measuring a message is slow, because protobuf serializes the message. So the elements are
    # counted first. Each element takes half a byte or more.
    return math.prod(tensor.dims) > 2 * size or tensor_bytes(tensor) > size


def copy_without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model without initializers.

    Documentation that is not UTF-8 is left out, because protobuf does not accept it.
    """
    graph = {f.name: v for f, v in proto.graph.ListFields() if f.name != "initializer"}
    model = {f.name: v for f, v in proto.ListFields() if f.name != "graph"}
    for fields in (graph, model):
        if isinstance(fields.get("doc_string"), bytes):
            del fields["doc_string"]
    return onnx.ModelProto(graph=onnx.GraphProto(**graph), **model)


def strip_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a copy of a tensor that has only the name, type and dimensions."""
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
