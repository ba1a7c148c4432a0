"""onnxruntime sessions that compute chosen tensors of a model, with as little memory as that takes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError
from onnx import external_data_helper

from calibration.dataset import Sample
from calibration.partial import external_folder, partial_model
from qdqtool import budgets, runtime
from qdqtool.errors import ModelError
from qdqtool.graph import Model
from qdqtool.sessions import open_proto

_MAX_WORKERS = 4


def worker_count(fetched_bytes: int, available: int) -> int:
    """Worker threads: each runs whole samples, so that one decodes and counts while another runs the network.

    Args:
        fetched_bytes: Size of one sample's wanted tensors.
        available: Cores.
    """
    wanted = max(1, min(_MAX_WORKERS, available // 2 if available > 3 else available))
    return max(1, min(wanted, budgets.FETCHED // max(fetched_bytes, 1)))


def fetched_bytes(model: Model, names: Sequence[str]) -> int:
    """Size of the named tensors as float32, open dimensions counted as 1."""
    total = 0
    for name in names:
        size = 4
        for dim in model.shape(name) or ():
            size *= 1 if dim is None else dim
        total += size
    return total


def open_session(model: Model, names: Sequence[str], threads: int) -> Any:
    """An onnxruntime session on the CPU that computes the given tensors.

    Raises:
        ModelError: onnxruntime does not take the model.
    """
    try:
        return _open(model, names, threads)
    finally:
        return_freed_memory()


def _open(model: Model, names: Sequence[str], threads: int) -> Any:
    folder = external_folder(model)
    partial = partial_model(model, names, weights=bool(folder))
    try:
        try:
            return open_proto(partial, threads, weights=model.initializers, folder=folder)
        except Exception:
            if not folder:
                raise
            # Older onnxruntime (seen with 1.20) does not know the folder's key: the weights go into the model instead.
            partial = partial_model(model, names)
            _take_weights_in(model, partial)
            return open_proto(partial, threads)
    except Exception as error:  # onnxruntime's exceptions have no common base but this
        raise _refused(model.path, error) from error


def packed_model(model: Model, names: Sequence[str]) -> bytes:
    """What a session elsewhere needs to compute the given tensors: a model with all its weights, serialized.

    Raises:
        ModelError: A weight file is missing, or it is over 2 GB.
    """
    folder = external_folder(model)
    partial = partial_model(model, names)
    try:
        if folder:
            _take_weights_in(model, partial)
        return bytes(partial.SerializeToString())
    except (ValueError, EncodeError):
        raise ModelError(f"{model.path or 'model'}: is over 2 GB, which cannot be sent to a cluster; calibrate it on "
                         "one machine") from None


def open_packed(source: bytes, threads: int, name: str) -> Any:
    """A session on what :func:`packed_model` gave; ``name`` is the model's, for messages.

    Raises:
        ModelError: onnxruntime does not take it.
    """
    try:
        return runtime.open_session(source, threads)
    except Exception as error:  # onnxruntime's exceptions have no common base but this
        raise _refused(name, error) from error


def _refused(name: str, error: BaseException) -> ModelError:
    return ModelError(f"{name or 'model'}: onnxruntime cannot run it: {_reason(error)}")


def _take_weights_in(model: Model, partial: onnx.ModelProto) -> None:
    for tensor in partial.graph.initializer:
        if external_data_helper.uses_external_data(tensor):
            tensor.CopyFrom(model.external_tensor(tensor) or tensor)


def return_freed_memory() -> None:
    """Gives the system back what was freed. Of the copies that opening a session makes of all weights, glibc keeps
    those of a few megabytes for itself: 110 MB with YOLOv8s. Elsewhere nothing is done."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


class Fetcher:
    """Runs a session on samples.

    The values lie where onnxruntime computed them, in memory that it uses again once they are let go of. Buffers of
    our own would be held in addition to all that a run takes before it has filled them.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.inputs = [i.name for i in session.get_inputs()]
        self.outputs = [o.name for o in session.get_outputs()]

    def run(self, sample: Sample) -> dict[str, npt.NDArray[Any]]:
        """The outputs by name; to be let go of before the next run.

        Raises:
            ModelError: onnxruntime fails.
        """
        try:
            values = self.session.run(self.outputs, {n: sample[n] for n in self.inputs})
        except Exception as error:
            raise ModelError(f"onnxruntime failed on a calibration sample: {_reason(error)}") from error
        return dict(zip(self.outputs, values, strict=True))
