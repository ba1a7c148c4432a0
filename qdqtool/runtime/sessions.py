"""onnxruntime sessions that print nothing, on models in memory, of any size, whose weights are not copied for it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError

from qdqtool.errors import QdqtoolError
from qdqtool.ir.modelfile import write_apart, write_model
from qdqtool.proto import external_data as external
from qdqtool.proto.subgraphs import captured_tensors
from qdqtool.runtime.session_memory import session_memory
from qdqtool.util import limits
from qdqtool.util.subprocesses import temporary_folder
from qdqtool.util.text import reason_of

OUT_OF_MEMORY = "bfc_arena"  # part of onnxruntime's message if it gets no memory
IR_VERSION = 10  # what every onnxruntime from 1.20 reads; later ones add types and annotations that no network here has
FOLDER_KEY = "session.model_external_initializers_file_folder_path"


def core_count() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_onnxruntime() -> Any:
    """Import onnxruntime without telemetry, which leaves a file in the folder for temporary files."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def open_session(
    source: bytes | str | os.PathLike[str],
    threads: int,
    *,
    optimize: str = "all",
    folder: str = "",
    fold_qdq: bool = True,
    values: Mapping[str, Any] | None = None,
    one_arena: bool = False,
) -> Any:
    """A session on the CPU.

    Args:
        source: The model's bytes, or its path.
        threads: For one operator.
        optimize: Graph optimizations: ``all``, ``extended`` (those that keep the layout), ``basic`` or ``none``.
        folder: Where external weights lie, for a model given as bytes.
        fold_qdq: Whether Q/DQ pairs may become integer kernels.
        values: onnxruntime's values of weights that the model names as external.
        one_arena: Whether it computes in the memory of all sessions that are opened so, which has a limit and is kept
            until the process ends. Each one's own would keep what its largest run took, as long as it is open.

    Raises:
        Exception: onnxruntime does not take the model; its classes have no common base but this.
    """
    with silence_output():
        onnxruntime = load_onnxruntime()
        onnxruntime.set_default_logger_severity(4)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        # With a pattern, all that the first run took is held beside the one block that is planned for the next ones.
        options.enable_mem_pattern = False
        # Its threads would wait busily for each other, and between two runs: a quarter of the processor time of two
        # threads, which those need that decode and count meanwhile.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        level = "ORT_DISABLE_ALL" if optimize == "none" else f"ORT_ENABLE_{optimize.upper()}"
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        if not fold_qdq:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if one_arena and _has_arena():
            options.add_session_config_entry("session.use_env_allocators", "1")
        if folder:
            options.add_session_config_entry(FOLDER_KEY, folder)
        if values:
            options.add_external_initializers(list(values), list(values.values()))
        # The fallback is to the same CPU, and printed on stdout.
        session = onnxruntime.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
        # Kept for opening it again with other providers: as much as all weights.
        if getattr(session, "_model_bytes", None) is not None:
            session._model_bytes = None
        return session


@functools.cache
def _has_arena() -> bool:
    """Makes the arena of this process's sessions; False where onnxruntime does not, or has one of somebody else's."""
    ort = load_onnxruntime()
    try:
        cpu = ort.OrtMemoryInfo(
            "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
        )
        # Takes what is asked for, not twice that.
        ort.create_and_register_allocator(cpu, ort.OrtArenaCfg(session_memory(), 1, -1, -1))
    except Exception:  # onnxruntime's exceptions have no common base but this
        return False
    return True


def describe_failure(error: BaseException) -> str:
    """Why a session does not open or run, in a line."""
    if OUT_OF_MEMORY in str(error):
        return (
            f"it takes more memory than there is, or than {limits.format_bytes(session_memory())}"
        )
    return reason_of(error, 300)


_descriptors = threading.RLock()  # two threads would each keep what the other one put there


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Points descriptors 1 and 2 at nothing: C++ code writes there past Python's streams. One thread at a time."""
    with _descriptors, contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, nothing)
            for number in (1, 2):
                copy = os.dup(number)
                stack.callback(os.close, copy)
                stack.callback(os.dup2, copy, number)
                os.dup2(nothing, number)
        yield


class SharedWeights:
    """Weights that lie in memory once, for any number of sessions; a session on a part of YOLOv8s opens in a tenth of
    the time that it takes with weights of its own."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[onnx.TensorProto, Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Takes weights of any shape, float32 or float16, in."""
        tensor = onnx.TensorProto(
            name=name,
            dims=array.shape,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=onnx.TensorProto.EXTERNAL,
        )
        for key, entry in (("location", "memory"), ("offset", "0"), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=entry)
        value = load_onnxruntime().OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        self._tensors[name] = tensor, value

    def used_by(self, proto: onnx.ModelProto) -> dict[str, Any]:
        """onnxruntime's values of the weights that a model reads, for :func:`open_session`; in the model they are named
        as external, in the place of those of the same name."""
        graph = proto.graph
        read = (t for n in graph.node for t in (*n.input, *captured_tensors(n)))
        used = {name: self._tensors[name] for name in read if name in self._tensors}
        own = [t for t in graph.initializer if t.name not in used]
        del graph.initializer[:]
        graph.initializer.extend([*own, *(tensor for tensor, _ in used.values())])
        return {name: value for name, (_, value) in used.items()}


_NOTHING: Mapping[str, onnx.TensorProto] = MappingProxyType({})


def open_proto(
    proto: onnx.ModelProto,
    threads: int,
    *,
    weights: Mapping[str, onnx.TensorProto] = _NOTHING,
    **options: Any,
) -> Any:
    """A session on the CPU; large weights, and a model of over 2 GB, go through a temporary file.

    From a file onnxruntime takes one weight after the other; from a message it holds all of them twice.

    Args:
        proto: The model. Its placeholders are filled in, and of one that is over 2 GB in memory the weights may be
            taken away on the way.
        threads: For one operator.
        weights: Where the data of its placeholders is, by name.
        options: Of :func:`qdqtool.runtime.sessions.open_session`.

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
        source = serialize(proto)
    except (ValueError, EncodeError):
        with temporary_folder() as temporary:
            path = Path(temporary) / "model.onnx"
            write_model(proto, path)
            proto.Clear()
            return open_session(
                path, threads, **{k: v for k, v in options.items() if k != "folder"}
            )
    return open_session(source, threads, **options)


def _opened(path: Path, threads: int, options: Mapping[str, Any]) -> Any:
    try:
        return open_session(path, threads, **options)
    except Exception as error:
        prefix = f"Load model from {path} failed:"  # nobody knows this file
        if prefix not in str(error):
            raise
        raise type(error)(str(error).replace(prefix, "")) from None


def _is_missing(tensor: onnx.TensorProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    return (
        not external.has_data(tensor)
        and tensor.name in weights
        and external.has_data(weights[tensor.name])
    )


@contextlib.contextmanager
def _apart(
    proto: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]
) -> Iterator[Path | None]:
    """A temporary file with the model, its weights beside it; None where there is no room for one."""
    with contextlib.ExitStack() as stack:
        path = None
        if (
            os.name != "nt"
        ):  # Windows keeps a file that is mapped, as onnxruntime does with weights that it can use so
            with contextlib.suppress(OSError, QdqtoolError):
                written = Path(stack.enter_context(temporary_folder())) / "model.onnx"
                write_apart(proto, weights, written)
                path = written
        yield path


def serialize(proto: onnx.ModelProto) -> bytes:
    """The bytes of a model.

    Raises:
        ValueError: It is over 2 GB; also EncodeError, by version of protobuf.
    """
    data: bytes = proto.SerializeToString()
    return data
