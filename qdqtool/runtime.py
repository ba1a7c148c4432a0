"""onnxruntime sessions that print nothing: neither its own coloured lines nor what its Python part says on stdout."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

IR_VERSION = 10  # what every onnxruntime from 1.20 reads; later ones add types and annotations that no network here has
FOLDER_KEY = "session.model_external_initializers_file_folder_path"


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def open_session(
    source: bytes | str | os.PathLike[str], threads: int, *, optimize: str = "all", folder: str = "",
    fold_qdq: bool = True,
) -> Any:
    """A session on the CPU.

    Args:
        source: The model's bytes, or its path.
        threads: For one operator.
        optimize: Graph optimizations: ``all``, ``extended`` (those that keep the layout), ``basic`` or ``none``.
        folder: Where external weights lie, for a model given as bytes.
        fold_qdq: Whether Q/DQ pairs may become integer kernels.

    Raises:
        Exception: onnxruntime does not take the model; its classes have no common base but this.
    """
    with silent():
        import onnxruntime

        onnxruntime.set_default_logger_severity(4)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        # With a pattern, all that the first run took is held beside the one block that is planned for the next ones.
        options.enable_mem_pattern = False
        # Between two runs its threads would go on waiting busily, while others count what the first one gave.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = {
            "all": levels.ORT_ENABLE_ALL, "extended": levels.ORT_ENABLE_EXTENDED, "basic": levels.ORT_ENABLE_BASIC,
            "none": levels.ORT_DISABLE_ALL,
        }[optimize]
        if not fold_qdq:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if folder:
            options.add_session_config_entry(FOLDER_KEY, folder)
        # The fallback is to the same CPU, and printed on stdout.
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        # Kept for opening it again with other providers: as much as all weights.
        if getattr(session, "_model_bytes", None) is not None:
            session._model_bytes = None
        return session


_descriptors = threading.RLock()  # two threads would each keep what the other one put there


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Points descriptors 1 and 2 at nothing: C++ code writes there past Python's streams. One thread at a time."""
    with _descriptors:
        yield from _pointed_away()


def _pointed_away() -> Iterator[None]:
    saved: list[tuple[int, int]] = []
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            try:
                for number in (1, 2):
                    saved.append((number, os.dup(number)))
                    os.dup2(nothing, number)
            finally:
                os.close(nothing)
        yield
    finally:
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)
