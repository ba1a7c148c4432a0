"""Builds with the trtexec of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from qdqtool.builders.options import BuildOptions, Shapes
from qdqtool.builders.run import BuildResult, find_refusal_reason
from qdqtool.errors import BuilderError
from qdqtool.util.subprocesses import run_command

_VERSION = re.compile(r"\[TensorRT v(\d+)\]")
# JetPack and NVIDIA's packages install trtexec here without adding the folder to PATH.
TRTEXEC_PATHS = (
    "/usr/src/tensorrt/bin/trtexec",
    "/opt/tensorrt/bin/trtexec",
    "/usr/local/tensorrt/bin/trtexec",
)


def build_with_trtexec(options: BuildOptions, path: Path, work: Path) -> BuildResult:
    """Build a model with the trtexec of this machine.

    Args:
        options: Options of the build.
        path: File of the model.
        work: Folder for ``build.log``, ``inspector.json`` and ``engine.plan``.

    Raises:
        BuilderError: trtexec is missing or cannot be run.
    """
    program = _find_trtexec()
    help_text = _read_help(program)
    engine = work / "engine.plan" if options.keep_engine else None
    flags = trtexec_flags(
        help_text, path.resolve(), work / "inspector.json", engine, options.shapes or {}
    )
    start = time.monotonic()
    with (work / "build.log").open("w+b") as file:
        code = run_command([program, *flags], options.timeout, file)
        file.seek(0)
        log = file.read()
    seconds = time.monotonic() - start
    result = BuildResult("trtexec", "built", find_trtexec_version(log), seconds=seconds)
    if code is None:
        result.status, result.message = "timeout", f"stopped after {options.timeout:g} s"
    elif code < 0:
        result.status, result.message = "crashed", f"trtexec was stopped by signal {-code}"
    elif code > 0:
        for line in log.decode("utf-8", "replace").splitlines():
            _, is_error, message = line.partition("[E] ")
            if is_error:
                result.errors.append(message.removeprefix("[TRT] "))
        result.status, result.message = "refused", find_refusal_reason(result.errors)
    return result


def _find_trtexec() -> str:
    installed = (path for path in TRTEXEC_PATHS if os.access(path, os.X_OK))
    program = shutil.which("trtexec") or next(installed, None)
    if program is None:
        raise BuilderError(
            "trtexec is neither on PATH nor where NVIDIA's packages install it, such as in "
            "/usr/src/tensorrt/bin; add its folder to PATH, or build with tensorrt-rtx",
            code="missing-program",
            parameter="builder",
        )
    return program


def _read_help(program: str) -> str:
    try:
        answer = subprocess.run(
            [program, "--help"],
            capture_output=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuilderError(
            f"cannot be run: {error}. Check that 'trtexec --help' works",
            program,
            code="not-started",
        ) from error
    return (answer.stdout + answer.stderr).decode("utf-8", "replace")


def trtexec_flags(
    help_text: str, model: Path, layers: Path, engine: Path | None, shapes: Shapes
) -> list[str]:
    """Return the trtexec flags for a build that ``verify`` can check.

    Flags that this trtexec does not have are left out. Up to TensorRT 10, a Q/DQ model needs
    ``--int8``, and ``--fp16`` for its float layers. TensorRT 11 uses the types in the model.
    Source: trtexec's options by version, 8.0 to 11.

    Args:
        help_text: Output of ``trtexec --help``.
        model: Model to build.
        layers: File for the list of layers.
        engine: File for the engine; None to write no engine.
        shapes: Minimum, preferred and maximum shape of inputs, by name.
    """

    def has_flag(flag: str) -> bool:
        return re.search(rf"--{flag}\b", help_text) is not None

    flags = [
        f"--onnx={model}",
        "--verbose",
        *(f"--{flag}" for flag in ("int8", "fp16", "dumpLayerInfo") if has_flag(flag)),
    ]
    if has_flag("profilingVerbosity"):
        # TensorRT 8.2 and 8.3 call the value "verbose", later versions "detailed".
        verbosity = "detailed" if "detailed" in help_text else "verbose"
        flags.append(f"--profilingVerbosity={verbosity}")
    elif has_flag("nvtxMode"):
        flags.append("--nvtxMode=verbose")
    if has_flag("exportLayerInfo"):
        flags.append(f"--exportLayerInfo={layers}")
    flags += [f"--{flag}" for flag in ("skipInference", "buildOnly") if has_flag(flag)][:1]
    if engine is not None:
        flags.append(f"--saveEngine={engine}")
    return flags + _format_shapes(shapes)


def _format_shapes(shapes: Shapes) -> list[str]:
    """Return flags such as ``--minShapes=a:1x3x32x32,b:1x8``."""
    flags = []
    for position, flag in enumerate(("minShapes", "optShapes", "maxShapes") if shapes else ()):
        texts = [f"{name}:{'x'.join(map(str, dims[position]))}" for name, dims in shapes.items()]
        flags.append(f"--{flag}={','.join(texts)}")
    return flags


def find_trtexec_version(log: bytes) -> str:
    """Return the version in a trtexec log, such as ``8.5.3`` for v8503; empty if unknown."""
    from qdqtool.buildlog.sections import parse_version_digits

    match = _VERSION.search(log[:4096].decode("utf-8", "replace"))
    return parse_version_digits(match[1]) if match else ""
