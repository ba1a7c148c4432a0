"""Real builds: hands a model to a TensorRT on this machine and reads what it printed.

:func:`build` is the only entry; ``tensorrt-rtx`` needs no GPU, ``tensorrt`` and ``trtexec`` do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from qdqtool.base import limits
from qdqtool.base.options import takes
from qdqtool.errors import BuilderError, ModelError
from qdqtool.options import BUILDERS, DEFAULT_SM, Building

if TYPE_CHECKING:
    from qdqtool.builders.run import BuildResult


@takes(how=Building)
def build(model: str | os.PathLike[str], how: Building) -> BuildResult:
    """Builds a model and reads the build.

    Args:
        model: Path of an ONNX model; it is not changed.
        {options}

    Returns:
        What came out. A model that the compiler refuses, or that crashes it, is an answer and not an error.

    Raises:
        BuilderError: The builder is unknown, not installed, or cannot run here.
        ModelError: The model cannot be read.
        QdqtoolError: ``timeout`` is no number of seconds.
    """
    builder, output, sm = how.builder, how.output, how.sm
    if builder not in BUILDERS:
        raise BuilderError(
            f"unknown builder '{builder}'; use one of {', '.join(BUILDERS)}",
            code="unknown-choice",
            parameter="builder",
        )
    timeout = limits.check_seconds(how.timeout, "timeout")
    if sm and builder != "tensorrt-rtx":
        raise BuilderError(
            f"compute capabilities are for tensorrt-rtx; {builder} builds for the GPU of this machine",
            code="option-conflict",
            parameter="sm",
        )
    if sm:
        from qdqtool.trt.targets import RTX

        for capability in sm:
            if capability not in RTX.buildable:
                raise BuilderError(
                    f"TensorRT-RTX 1.7 cannot build for SM{capability}; it knows "
                    f"SM{', SM'.join(map(str, RTX.buildable))}",
                    code="unknown-choice",
                    parameter="sm",
                )
    if how.keep_engine and output is None:
        raise BuilderError(
            "an engine needs a folder to be kept in", code="missing-argument", parameter="output"
        )
    if builder == "trtexec":
        from qdqtool.builders.run import build_with_trtexec, run_one

        return run_one(
            model,
            output,
            lambda path, work: build_with_trtexec(
                path, work, timeout, how.keep_engine, how.shapes or {}
            ),
        )
    from qdqtool.builders.child import Child

    if isinstance(model, (str, os.PathLike)) and not os.path.exists(model):
        # The same with and without a compiler on this machine.
        raise ModelError("no such file", os.fspath(model), code="file-missing")
    with Child("tensorrt_rtx" if builder == "tensorrt-rtx" else "tensorrt") as child:
        child.start()  # the compiler loads while onnx is imported and the model is read
        from qdqtool.builders.run import build_with, run_one

        return run_one(
            model,
            output,
            lambda path, work: build_with(
                child,
                path,
                work,
                builder,
                tuple(sm or DEFAULT_SM),
                timeout,
                how.keep_engine,
                how.shapes,
            ),
        )
