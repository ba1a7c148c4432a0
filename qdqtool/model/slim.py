"""Models without the data of their weights, for what looks at types and dimensions alone."""

from __future__ import annotations

from collections.abc import Container

import onnx
from google.protobuf.message import EncodeError

_KEEP_FOR_SHAPES = (
    4096  # bytes; constants up to this size may be shapes that shape inference has to read
)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a tensor's message; 2 GB for one that protobuf cannot measure because it is larger."""
    try:
        return int(tensor.ByteSize())
    except (ValueError, EncodeError):
        return 2**31


def without_large_weights(
    proto: onnx.ModelProto, keep: int = _KEEP_FOR_SHAPES, only: Container[str] | None = None
) -> onnx.ModelProto:
    """A copy whose initializers of more than ``keep`` bytes, or those ``only``, have no data, but type and dimensions."""
    slim = onnx.ModelProto()
    slim.ir_version = proto.ir_version
    slim.opset_import.extend(proto.opset_import)
    slim.functions.extend(proto.functions)
    slim.graph.name = proto.graph.name
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(slim.graph, field).extend(getattr(proto.graph, field))
    for tensor in proto.graph.initializer:
        whole = tensor_bytes(tensor) <= keep or (only is not None and tensor.name not in only)
        slim.graph.initializer.add().CopyFrom(tensor if whole else without_data(tensor))
    return slim


def without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Name, type and dimensions of a tensor, without its data."""
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
