"""Open onnxruntime sessions for models in memory.

Opening a session prints nothing, works for models of any size, and avoids copies of weights.
"""

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

from qdqtool.errors import QdqtoolError
from qdqtool.ir.modelfile import write_external, write_model
from qdqtool.proto import external_data as external
from qdqtool.proto.subgraphs import find_captured_tensors
from qdqtool.runtime.session_memory import session_memory_limit
from qdqtool.util import limits
from qdqtool.util.subprocesses import temporary_folder
from qdqtool.util.text import format_reason

OUT_OF_MEMORY = "bfc_arena"  # onnxruntime's message contains this text if an allocation fails
# All versions of onnxruntime from 1.20 on support this IR version. Later IR versions only add types
# and annotations.
IR_VERSION = 10
# Optimizations of onnxruntime (1.24 to 1.32) that are wrong for FP8. The first removes a Relu
# before a Q, although FP8 has negative values. The second fails for a Clip before a Q.
_INTEGER_OPTIMIZERS = ("ReluQuantRewrite", "ClipQuantRewrite")
FOLDER_KEY = "session.model_external_initializers_file_folder_path"


def core_count() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_onnxruntime() -> Any:
    """Import onnxruntime with telemetry off, because telemetry leaves a temporary file."""
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
    """Open an onnxruntime session on the CPU.

    Args:
        source: Serialized model, or path of a model.
        threads: Number of threads for one operator; 0 for onnxruntime's default.
        optimize: Graph optimizations: ``all``, ``extended`` (without changes of the layout),
            ``basic`` or ``none``.
        folder: Folder of external weights, for a serialized model.
        fold_qdq: Whether onnxruntime may replace Q/DQ pairs by integer kernels. Must be False for
            models with FP8.
        values: OrtValues of weights that the model declares as external, by name.
        one_arena: Whether the session uses the memory arena that the sessions of this process
            share. The size of the arena is limited. Its memory is held until the process ends.
            Otherwise the session keeps the memory of its largest run until it is closed.

    Raises:
        Exception: onnxruntime rejects the model. Its exceptions share no narrower base class.
    """
    with silence_output():
        onnxruntime = load_onnxruntime()
        onnxruntime.set_default_logger_severity(4)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        # With memory patterns, a session would hold the memory of the first run and the planned
        # block at the same time.
        options.enable_mem_pattern = False
        # By default, threads wait actively between operators and runs. With two threads, this
        # wastes a quarter of the processor time, which decoding and statistics need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        level = "ORT_DISABLE_ALL" if optimize == "none" else f"ORT_ENABLE_{optimize.upper()}"
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        if not fold_qdq:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if one_arena and _create_arena():
            options.add_session_config_entry("session.use_env_allocators", "1")
        if folder:
            options.add_session_config_entry(FOLDER_KEY, folder)
        if values:
            options.add_external_initializers(list(values), list(values.values()))
        # onnxruntime's fallback to other providers is off. It would only repeat a failed attempt,
        # and print a line.
        session = onnxruntime.InferenceSession(
            source,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=None if fold_qdq else _INTEGER_OPTIMIZERS,
            enable_fallback=0,
        )
        # onnxruntime keeps a copy of the model for other providers. None of them is used here.
        if getattr(session, "_model_bytes", None) is not None:
            session._model_bytes = None
        return session


@functools.cache
def _create_arena() -> bool:
    """Create the memory arena that sessions share; return whether this succeeded."""
    ort = load_onnxruntime()
    try:
        cpu = ort.OrtMemoryInfo(
            "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
        )
        # The arena grows by the requested size, not by powers of two.
        ort.create_and_register_allocator(cpu, ort.OrtArenaCfg(session_memory_limit(), 1, -1, -1))
    except Exception:  # for example, another library has registered an arena
        return False
    return True


def describe_failure(error: BaseException) -> str:
    """Return the reason why a session cannot be opened or run, in one line."""
    if OUT_OF_MEMORY in str(error):
        return (
            "the model needs more memory than is available, or more than the limit of "
            f"{limits.format_bytes(session_memory_limit())}"
        )
    return format_reason(error, 300)


_descriptors = threading.RLock()  # threads must not restore each other's descriptors


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Redirect descriptors 1 and 2 to the null device until the context ends.

    This silences C++ code, which does not use Python's streams. Only one thread at a time can be in
    the context.
    """
    with _descriptors, contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, null)
            for number in (1, 2):
                copy = os.dup(number)
                stack.callback(os.close, copy)
                stack.callback(os.dup2, copy, number)
                os.dup2(null, number)
        yield


class SharedWeights:
    """Weights in memory that several sessions share.

    Opening a session on a part of YOLOv8s is ten times faster than with a copy of the weights.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[onnx.TensorProto, Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Add weights of any shape, float32 or float16."""
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

    def attach(self, proto: onnx.ModelProto) -> dict[str, Any]:
        """Replace initializers of a model by shared weights of the same names, in place.

        Returns:
            OrtValues of the weights that the model uses, for :func:`open_session`. The model
            declares these weights as external.
        """
        graph = proto.graph
        read = (t for n in graph.node for t in (*n.input, *find_captured_tensors(n)))
        shared = {name: self._tensors[name] for name in read if name in self._tensors}
        own = [tensor for tensor in graph.initializer if tensor.name not in shared]
        del graph.initializer[:]
        graph.initializer.extend([*own, *(tensor for tensor, _ in shared.values())])
        return {name: value for name, (_, value) in shared.items()}


_NO_WEIGHTS: Mapping[str, onnx.TensorProto] = MappingProxyType({})


def open_proto(
    proto: onnx.ModelProto,
    threads: int,
    *,
    weights: Mapping[str, onnx.TensorProto] = _NO_WEIGHTS,
    **options: Any,
) -> Any:
    """Open an onnxruntime session for a model in memory.

    If `weights` has data for the model, or if the model is larger than 2 GB, the model is written
    to a temporary file first. From a file, onnxruntime reads one weight at a time. If onnxruntime
    gets a serialized model, it holds all weights twice.

    Args:
        proto: The model, which may be changed: initializers without data receive their data, and a
            model above 2 GB is cleared.
        threads: Number of threads for one operator.
        weights: Weights for initializers without data, by name.
        options: Options of :func:`open_session`.

    Raises:
        Exception: onnxruntime rejects the model. Its exceptions share no narrower base class.
    """
    missing = {
        t.name: weights[t.name] for t in proto.graph.initializer if _is_data_missing(t, weights)
    }
    if missing:
        with _write_temporary_model(proto, missing) as path:
            if path is not None:
                return _open_model_file(path, threads, options)
        for tensor in proto.graph.initializer:
            if tensor.name in missing:
                tensor.CopyFrom(missing[tensor.name])
    source = external.serialize(proto)
    if source is not None:
        return open_session(source, threads, **options)
    with temporary_folder() as temporary:
        path = Path(temporary) / "model.onnx"
        write_model(proto, path)
        proto.Clear()
        options.pop("folder", None)
        return open_session(path, threads, **options)


def _open_model_file(path: Path, threads: int, options: Mapping[str, Any]) -> Any:
    try:
        return open_session(path, threads, **options)
    except Exception as error:
        prefix = f"Load model from {path} failed:"  # the user does not know the temporary file
        if prefix not in str(error):
            raise
        raise type(error)(str(error).replace(prefix, "")) from None


def _is_data_missing(tensor: onnx.TensorProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    return (
        not external.has_data(tensor)
        and tensor.name in weights
        and external.has_data(weights[tensor.name])
    )


@contextlib.contextmanager
def _write_temporary_model(
    proto: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]
) -> Iterator[Path | None]:
    """Write a model and weights to temporary files; yield the path, or None if not written."""
    with contextlib.ExitStack() as stack:
        path = None
        if os.name != "nt":  # Windows cannot delete files that onnxruntime has mapped
            with contextlib.suppress(OSError, QdqtoolError):
                written = Path(stack.enter_context(temporary_folder())) / "model.onnx"
                write_external(proto, weights, written)
                path = written
        yield path
