"""onnxruntime sessions on models in memory, of any size."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import EncodeError

from qdqtool import runtime
from qdqtool.modelfile import write_model


def open_proto(proto: onnx.ModelProto, threads: int, **options: Any) -> Any:
    """A session on the CPU; a model of over 2 GB goes through a temporary file with external weights.

    Args:
        proto: The model. Of one that is over 2 GB in memory the weights may be taken away on the way.
        threads: For one operator.
        options: Of :func:`qdqtool.runtime.open_session`.

    Raises:
        Exception: onnxruntime does not take the model; its classes have no common base but this.
    """
    try:
        source = serialized(proto)
    except (ValueError, EncodeError):
        with tempfile.TemporaryDirectory(prefix="qdqtool-") as temporary:
            path = Path(temporary) / "model.onnx"
            write_model(proto, path, at_once=True)
            proto.Clear()
            return runtime.open_session(path, threads, **{k: v for k, v in options.items() if k != "folder"})
    return runtime.open_session(source, threads, **options)


def serialized(proto: onnx.ModelProto) -> bytes:
    """The bytes of a model.

    Raises:
        ValueError: It is over 2 GB; also EncodeError, by version of protobuf.
    """
    data: bytes = proto.SerializeToString()
    return data
