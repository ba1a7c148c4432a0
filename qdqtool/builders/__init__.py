"""Real builds: hands a model to a TensorRT on this machine and reads what it printed.

:func:`build` is the only entry; ``tensorrt-rtx`` needs no GPU, ``tensorrt`` and ``trtexec`` do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from qdqtool.errors import BuilderError, ModelError
from qdqtool.options import BUILDERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qdqtool.builders.run import BuildResult

# What ComputeCapability of TensorRT-RTX 1.7.1 has.
RTX_TARGETS = (75, 80, 86, 89, 120, 121)
DEFAULT_SM = (86,)
TIMEOUT = 1800.0  # seconds; classic TensorRT times tactics for minutes on a Jetson


def build(
    model: str | os.PathLike[str],
    builder: str = "tensorrt-rtx",
    output: str | os.PathLike[str] | None = None,
    sm: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
    keep_engine: bool = False,
    shapes: dict[str, Sequence[Sequence[int]]] | None = None,
) -> BuildResult:
    """Builds a model and reads the build.

    Args:
        model: Path of an ONNX model; it is not changed.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        output: Folder for ``build.log`` and the engine; made when missing. None keeps nothing on disk.
        sm: Compute capabilities to build for, as ``[86]`` (TensorRT-RTX only; default 86).
        timeout: Seconds after which the build is stopped.
        keep_engine: Whether to write ``engine.plan`` into ``output``.
        shapes: Input name to its minimum, preferred and maximum shape, for inputs with run-time dimensions.

    Returns:
        What came out. A model that the compiler refuses, or that crashes it, is an answer and not an error.

    Raises:
        BuilderError: The builder is unknown, not installed, or cannot run here.
        ModelError: The model cannot be read.
    """
    if builder not in BUILDERS:
        raise BuilderError(f"unknown builder '{builder}'; use one of {', '.join(BUILDERS)}")
    if timeout <= 0:
        raise BuilderError(f"time limit {timeout:g} s is not positive")
    if sm and builder != "tensorrt-rtx":
        raise BuilderError(f"compute capabilities are for tensorrt-rtx; {builder} builds for the GPU of this machine")
    for capability in sm or ():
        if capability not in RTX_TARGETS:
            raise BuilderError(
                f"TensorRT-RTX 1.7 cannot build for SM{capability}; it knows SM{', SM'.join(map(str, RTX_TARGETS))}")
    if keep_engine and output is None:
        raise BuilderError("an engine needs a folder to be kept in")
    if builder == "trtexec":
        from qdqtool.builders.run import build_with_trtexec, run_one

        return run_one(model, output, lambda path, work: build_with_trtexec(
            path, work, timeout, keep_engine, shapes or {}))
    from qdqtool.builders.child import Child

    if isinstance(model, (str, os.PathLike)) and not os.path.exists(model):
        raise ModelError(f"{os.fspath(model)}: no such file")  # said with or without a compiler here
    with Child("tensorrt_rtx" if builder == "tensorrt-rtx" else "tensorrt") as child:
        child.start()  # the compiler loads while onnx is imported and the model is read
        from qdqtool.builders.run import build_with, run_one

        return run_one(model, output, lambda path, work: build_with(
            child, path, work, builder, tuple(sm or DEFAULT_SM), timeout, keep_engine, shapes))
