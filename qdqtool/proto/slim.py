"""Models without the data of their weights, for uses that need types and dimensions only."""

from __future__ import annotations

from collections.abc import Container

import onnx
from google.protobuf.message import EncodeError

# Maximum bytes of constants that keep their data, because shape inference may have to read them.
_KEEP_FOR_SHAPES = 4096


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes of a tensor's message; 2 GB if it is too large for protobuf to measure."""
    try:
        return int(tensor.ByteSize())
    except (ValueError, EncodeError):
        return 2**31


def strip_large_weights(
    proto: onnx.ModelProto, keep: int = _KEEP_FOR_SHAPES, only: Container[str] | None = None
) -> onnx.ModelProto:
    """Return a copy without the data of large initializers, which keep type and dimensions.

    Args:
        proto: The model. It is not changed.
        keep: Initializers of at most this many bytes keep their data.
        only: Names of the initializers that may lose their data; all by default.
    """
    slim = onnx.ModelProto()
    slim.ir_version = proto.ir_version
    slim.opset_import.extend(proto.opset_import)
    slim.functions.extend(proto.functions)
    slim.graph.name = proto.graph.name
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(slim.graph, field).extend(getattr(proto.graph, field))
    for tensor in proto.graph.initializer:
        is_chosen = only is None or tensor.name in only
        keeps_data = not is_chosen or tensor_bytes(tensor) <= keep
        slim.graph.initializer.add().CopyFrom(tensor if keeps_data else strip_data(tensor))
    return slim


def strip_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a tensor with the same name, type and dimensions, without its data."""
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
