"""Builds of models with a local TensorRT installation; call :func:`build`.

The builder ``tensorrt-rtx`` needs no GPU. The builders ``tensorrt`` and ``trtexec`` need a GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qdqtool.builders.options import BuildOptions
from qdqtool.errors import BuilderError, ModelError

if TYPE_CHECKING:
    from qdqtool.builders.run import BuildResult
    from qdqtool.ir.graph import Model
    from qdqtool.ir.modelfile import ModelSource
    from qdqtool.trt.targets import Target


def build(
    model: ModelSource | Model,
    builder: str = "tensorrt-rtx",
    output: str | os.PathLike[str] | None = None,
    sm: Sequence[int] | None = None,
    timeout: float = 1800.0,
    keep_engine: bool = False,
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> BuildResult:
    """Build a model with a local TensorRT installation, and read the log of the build.

    Args:
        model: ONNX model, which is not changed.
        builder: ``tensorrt-rtx`` (needs no GPU), ``trtexec`` or ``tensorrt`` (for the GPU of this
            machine).
        output: Folder for ``build.log`` and the engine. A missing folder is created. If None, no
            files are kept.
        sm: Compute capabilities to build for, such as ``[86]`` (TensorRT-RTX only). Default: 86,
            or 89 for a model with FP8.
        timeout: Time limit of the build in seconds.
        keep_engine: Whether to write ``engine.plan`` into `output`.
        shapes: Minimum, preferred and maximum shape of each input with dynamic dimensions, by name
            of the input.

    Returns:
        Result of the build. If the compiler rejects the model or crashes, `status` of the result
        states this, and no error is raised.

    Raises:
        BuilderError: The builder is unknown, not installed, or cannot run on this machine; or it
            does not support an argument.
        ModelError: The model cannot be read.
        QdqtoolError: `timeout` is 0 or less, or more than a million seconds.
    """
    options = BuildOptions(builder, output, sm, timeout, keep_engine, shapes)
    if options.sm:
        from qdqtool.trt.targets import RTX

        check_capabilities(options.sm, RTX)
    if options.builder == "trtexec":
        from qdqtool.builders.run import run_build
        from qdqtool.builders.trtexec import build_with_trtexec
        from qdqtool.ir.modelfile import load

        return run_build(
            load(model), options.output, functools.partial(build_with_trtexec, options)
        )
    from qdqtool.builders.compiler_process import CompilerProcess

    if isinstance(model, (str, os.PathLike)) and not os.path.exists(model):
        # Checked first, so that the error is the same with and without a compiler.
        raise ModelError("no such file", os.fspath(model), code="file-missing")
    package = "tensorrt_rtx" if options.builder == "tensorrt-rtx" else "tensorrt"
    with CompilerProcess(package) as process:
        process.start()  # loads the compiler while this process imports onnx and reads the model
        from qdqtool.builders.run import build_with_package, run_build
        from qdqtool.ir.modelfile import load
        from qdqtool.ir.qdq import uses_fp8
        from qdqtool.trt.targets import DEFAULT_FP8_SM

        loaded = load(model)
        if options.builder == "tensorrt-rtx" and not options.sm and uses_fp8(loaded):
            options = replace(options, sm=DEFAULT_FP8_SM)
        return run_build(
            loaded, options.output, functools.partial(build_with_package, process, options)
        )


def check_capabilities(capabilities: Sequence[int], target: Target) -> None:
    """Raise an error if TensorRT-RTX cannot build for a compute capability.

    Args:
        capabilities: Compute capabilities as numbers, such as 86.
        target: Target for TensorRT-RTX, which lists the supported capabilities.

    Raises:
        BuilderError: A compute capability is not supported.
    """
    for capability in capabilities:
        if capability not in target.buildable:
            raise BuilderError(
                f"TensorRT-RTX 1.7 cannot build for SM{capability}; choose from "
                f"SM{', SM'.join(map(str, target.buildable))}",
                code="unknown-choice",
                parameter="sm",
            )
