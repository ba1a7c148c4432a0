"""onnxruntime sessions on models in memory, of any size, whose weights are not copied for it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
from google.protobuf.message import EncodeError

from qdqtool import external, runtime
from qdqtool.errors import QdqtoolError
from qdqtool.modelfile import write_apart, write_model

_NOTHING: Mapping[str, onnx.TensorProto] = MappingProxyType({})


def open_proto(
    proto: onnx.ModelProto, threads: int, *, weights: Mapping[str, onnx.TensorProto] = _NOTHING, **options: Any
) -> Any:
    """A session on the CPU; large weights, and a model of over 2 GB, go through a temporary file.

    From a file onnxruntime takes one weight after the other; from a message it holds all of them twice.

    Args:
        proto: The model. Its placeholders are filled in, and of one that is over 2 GB in memory the weights may be
            taken away on the way.
        threads: For one operator.
        weights: Where the data of its placeholders is, by name.
        options: Of :func:`qdqtool.runtime.open_session`.

    Raises:
        Exception: onnxruntime does not take the model; its classes have no common base but this.
    """
    missing = {t.name: weights[t.name] for t in proto.graph.initializer if _is_missing(t, weights)}
    if missing:
        with _apart(proto, missing) as path:
            if path is not None:
                return _opened(path, threads, options)
        for tensor in proto.graph.initializer:
            if tensor.name in missing:
                tensor.CopyFrom(missing[tensor.name])
    try:
        source = serialized(proto)
    except (ValueError, EncodeError):
        with tempfile.TemporaryDirectory(prefix="qdqtool-") as temporary:
            path = Path(temporary) / "model.onnx"
            write_model(proto, path, at_once=True)
            proto.Clear()
            return runtime.open_session(path, threads, **{k: v for k, v in options.items() if k != "folder"})
    return runtime.open_session(source, threads, **options)


def _opened(path: Path, threads: int, options: Mapping[str, Any]) -> Any:
    try:
        return runtime.open_session(path, threads, **options)
    except Exception as error:
        prefix = f"Load model from {path} failed:"  # nobody knows this file
        if prefix not in str(error):
            raise
        raise type(error)(str(error).replace(prefix, "")) from None


def _is_missing(tensor: onnx.TensorProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    return not external.has_data(tensor) and tensor.name in weights and external.has_data(weights[tensor.name])


@contextlib.contextmanager
def _apart(proto: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> Iterator[Path | None]:
    """A temporary file with the model, its weights beside it; None where there is no room for one."""
    with contextlib.ExitStack() as stack:
        path = None
        if os.name != "nt":  # Windows keeps a file that is mapped, as onnxruntime does with weights that it can use so
            with contextlib.suppress(OSError, QdqtoolError):
                folder = tempfile.TemporaryDirectory(prefix="qdqtool-", ignore_cleanup_errors=True)
                written = Path(stack.enter_context(folder)) / "model.onnx"
                write_apart(proto, weights, written, at_once=True)
                path = written
        yield path


def serialized(proto: onnx.ModelProto) -> bytes:
    """The bytes of a model.

    Raises:
        ValueError: It is over 2 GB; also EncodeError, by version of protobuf.
    """
    data: bytes = proto.SerializeToString()
    return data
