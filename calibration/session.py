"""The part of a model that computes the wanted tensors, and onnxruntime sessions on it that take little memory."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import re
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError
from onnx import external_data_helper

from calibration.dataset import InputSpec, Sample
from qdqtool.errors import ModelError
from qdqtool.ir.graph import Model
from qdqtool.proto import external_data as external
from qdqtool.proto.external_data import all_tensors, location_of
from qdqtool.proto.slim import without_data
from qdqtool.proto.subgraphs import extract_part
from qdqtool.runtime import sessions
from qdqtool.runtime.sessions import open_proto
from qdqtool.util import limits
from qdqtool.util.json_text import parse_json

Size = tuple[int, int]


def input_specs(model: Model) -> list[InputSpec]:
    """The model's inputs, initializers apart.

    Raises:
        ModelError: An input is not a tensor, or holds no numbers.
    """
    specs = []
    for value in model.proto.graph.input:
        if value.name in model.initializers:
            continue
        elem_type = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else 0
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
        except KeyError:
            raise ModelError(
                f"input '{value.name}' is not a tensor of numbers",
                _name(model),
                code="not-a-tensor",
                node=value.name,
            ) from None
        if dtype.kind not in "fiub":
            raise ModelError(
                f"input '{value.name}' holds {dtype}, which cannot be fed",
                _name(model),
                code="wrong-type",
                node=value.name,
            )
        if not value.type.tensor_type.HasField("shape"):
            raise ModelError(
                f"input '{value.name}' has no known rank; export the model with shapes",
                _name(model),
                code="unknown-rank",
                node=value.name,
            )
        # Some exporters write 0 or -1 for an open dimension.
        shape = tuple(d if d is not None and d > 0 else None for d in model.shape(value.name) or ())
        specs.append(InputSpec(value.name, shape, dtype.name))
    return specs


def metadata_size(model: Model) -> Size | None:
    """Height and width from the ``imgsz`` metadata that Ultralytics writes (``[640, 640]``); None without it."""
    text = model.metadata.get("imgsz", "")[
        :1000
    ]  # two numbers; as objects, megabytes of lists take forty times that
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        numbers = re.findall(r"\d+", text)
        value = [int(n) for n in numbers[:2]]
    if isinstance(value, int):
        value = [value, value]
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(v, int) and 0 < v <= 1 << 16 for v in value)
    ):
        return value[0], value[1]
    return None


def _name(model: Model) -> str:
    return model.path or "model"


def check_tensors(model: Model, tensors: Sequence[str]) -> None:
    """Makes sure that every tensor can be computed.

    Raises:
        ModelError: One does not exist, or is a constant.
    """
    known = {*model.producers, *model.inputs}
    for name in tensors:
        if model.is_constant(name):
            raise ModelError(
                f"tensor '{name}' is a constant; its range needs no calibration",
                _name(model),
                code="constant-tensor",
                node=name,
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ModelError(
                f"there is no tensor '{name}'{hint}",
                _name(model),
                code="unknown-choice",
                parameter="tensors",
                node=name,
            )


def partial_model(
    model: Model,
    tensors: Sequence[str],
    given: Sequence[onnx.ValueInfoProto] = (),
    *,
    weights: bool = True,
) -> onnx.ModelProto:
    """A model whose outputs are the given tensors; nodes, weights and inputs that they do not need are left out.

    External data stays external. It is made to be run: newest exporters state an IR version that the installed
    onnxruntime refuses, whatever is in the file. Tensors that are ``given`` will be fed instead of computed, where they
    are needed; large weights become placeholders without ``weights``.
    """
    fed = {v.name for v in given}
    source = model.proto
    stored = (
        t if weights or not external.is_separable(t) else without_data(t)
        for t in source.graph.initializer
    )
    outputs = [onnx.ValueInfoProto(name=t) for t in tensors]
    result, needed = extract_part(source, [n.proto for n in model.ordered], outputs, stored, fed)
    result.ir_version = min(source.ir_version, sessions.IR_VERSION)
    graph = result.graph
    graph.name = graph.name or "calibration"
    # Before IR version 4 initializers had to be inputs too; from then on listing them only stops constant folding.
    listed = model.initializers if source.ir_version < 4 else {}
    allowed = {*model.inputs, *listed} - fed
    graph.input.extend(v for v in source.graph.input if v.name in needed and v.name in allowed)
    graph.input.extend(v for v in given if v.name in needed)
    return result


def external_folder(model: Model) -> str:
    """The folder of the model's external weights; empty where it has none.

    Raises:
        ModelError: A weight file is missing or lies outside the model's folder.
    """
    folder = ""
    for tensor in all_tensors(model.proto.graph):
        if not external_data_helper.uses_external_data(tensor):
            continue
        location = location_of(tensor)
        if not model.base_dir:
            raise ModelError(
                f"tensor '{tensor.name}' has its weights in '{location}'; give the model's path",
                "model",
                code="external-weights",
                node=tensor.name,
            )
        if external.path_of(tensor, model.base_dir, model.path) is None:
            raise ModelError(
                f"weight file '{location}' of tensor '{tensor.name}' is missing",
                model.path,
                code="file-missing",
                node=tensor.name,
            )
        folder = model.base_dir
    return folder


# Sessions ------------------------------------------------------------------------------------------------------------

_MAX_WORKERS = 4


def worker_count(fetched_bytes: int, available: int, counted_bytes: int = 0) -> int:
    """Worker threads: each runs whole samples, so that one decodes and counts while another runs the network.

    Args:
        fetched_bytes: What each holds of a sample.
        available: Cores.
        counted_bytes: What each counts into; one alone needs nothing to merge them into.
    """
    wanted = max(1, min(_MAX_WORKERS, available // 2 if available > 3 else available))
    room = limits.COUNTED // max(counted_bytes, 1) - 1
    return max(1, min(wanted, limits.FETCHED // max(fetched_bytes, 1), room))


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
    finally:
        return_freed_memory()


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
        raise ModelError(
            "is over 2 GB, which cannot be sent to a cluster; calibrate it on one machine",
            _name(model),
            code="model-too-large",
        ) from None


def open_packed(source: bytes, threads: int, name: str, **options: Any) -> Any:
    """A session on what :func:`packed_model` gave; ``name`` is the model's, for messages.

    ``options`` are those of :func:`qdqtool.runtime.sessions.open_session`.

    Raises:
        ModelError: onnxruntime does not take it.
    """
    try:
        return sessions.open_session(source, threads, **options)
    except Exception as error:  # onnxruntime's exceptions have no common base but this
        raise _refused(name, error) from error


def _refused(name: str, error: BaseException) -> ModelError:
    return ModelError(
        f"onnxruntime cannot run it: {sessions.describe_failure(error)}",
        name or "model",
        code="onnxruntime-failed",
    )


def _take_weights_in(model: Model, partial: onnx.ModelProto) -> None:
    for tensor in partial.graph.initializer:
        if external_data_helper.uses_external_data(tensor):
            tensor.CopyFrom(model.external_tensor(tensor) or tensor)


def return_freed_memory() -> None:
    """Gives the system back what was freed. Of the copies that opening a session makes of all weights, glibc keeps
    those of a few megabytes for itself: 110 MB with YOLOv8s. Elsewhere nothing is done."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


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
            raise ModelError(
                f"onnxruntime failed on a sample: {sessions.describe_failure(error)}",
                code="onnxruntime-failed",
            ) from error
        return dict(zip(self.outputs, values, strict=True))
