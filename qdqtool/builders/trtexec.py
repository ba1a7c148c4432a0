"""Builds with a trtexec found on PATH: the flags that its version has, a verbose log, the layer listing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from qdqtool.errors import BuilderError


def exit_code(command: Sequence[str], timeout: float, output: IO[bytes] | int = subprocess.DEVNULL) -> int | None:
    """The exit code of a command that reads nothing; None when it did not end within ``timeout`` seconds.

    Args:
        command: The words; no shell reads them.
        timeout: In seconds.
        output: Where its output goes, errors included.

    Raises:
        OSError: It cannot be started.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)  # what it left running as well


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_VERSION = re.compile(r"\[TensorRT v(\d+)\]")
# Where JetPack and NVIDIA's packages put it, without adding it to PATH.
_USUAL = ("/usr/src/tensorrt/bin/trtexec", "/opt/tensorrt/bin/trtexec", "/usr/local/tensorrt/bin/trtexec")


@dataclass(frozen=True)
class Run:
    """How a trtexec run ended: ``code`` is negative for a signal, None when the time was over."""

    code: int | None
    seconds: float
    command: list[str]


def find() -> str:
    """The path of trtexec.

    Raises:
        BuilderError: There is none.
    """
    found = shutil.which("trtexec") or next((p for p in _USUAL if os.access(p, os.X_OK)), None)
    if found is None:
        raise BuilderError(
            "no trtexec on PATH nor in /usr/src/tensorrt/bin; add its folder to PATH, or build with tensorrt-rtx")
    return found


def help_of(trtexec: str) -> str:
    """What ``trtexec --help`` prints: the flags of its version.

    Raises:
        BuilderError: It cannot be run.
    """
    try:
        done = subprocess.run(
            [trtexec, "--help"], capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuilderError(f"{trtexec}: cannot be run: {error}") from error
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def flags(
    text: str, model: Path, layers: Path, engine: Path | None, shapes: dict[str, Sequence[Sequence[int]]]
) -> list[str]:
    """The flags for a build that can be verified.

    Args:
        text: Output of ``trtexec --help``.
        model: The ONNX model.
        layers: Where the layer JSON goes.
        engine: Where the engine goes; None for nowhere.
        shapes: Input name to minimum, preferred and maximum shape.

    Sources: trtexec's options by version, 8.0 to 11. Up to TensorRT 10 a Q/DQ model needs ``--int8``, and ``--fp16``
    for its float part; 11 takes the types from the model.
    """
    def has(flag: str) -> bool:
        return re.search(rf"--{flag}\b", text) is not None

    chosen = [f"--onnx={model}", "--verbose"]
    chosen += [f"--{p}" for p in ("int8", "fp16") if has(p)]
    if has("profilingVerbosity"):
        # 8.2 and 8.3 call the value "verbose", all later ones "detailed".
        chosen.append("--profilingVerbosity=" + ("detailed" if "detailed" in text else "verbose"))
    elif has("nvtxMode"):
        chosen.append("--nvtxMode=verbose")
    if has("dumpLayerInfo"):
        chosen.append("--dumpLayerInfo")
    if has("exportLayerInfo"):
        chosen.append(f"--exportLayerInfo={layers}")
    if has("skipInference"):
        chosen.append("--skipInference")
    elif has("buildOnly"):
        chosen.append("--buildOnly")
    if engine is not None:
        chosen.append(f"--saveEngine={engine}")
    for place, key in enumerate(("minShapes", "optShapes", "maxShapes")):
        if shapes:
            parts = [f"{name}:{'x'.join(str(d) for d in s[place])}" for name, s in shapes.items()]
            chosen.append(f"--{key}={','.join(parts)}")
    return chosen


def run(command: list[str], log: Path, timeout: float) -> Run:
    """Runs trtexec with its output in ``log``; stops it and what it started when the time is over."""
    start = time.monotonic()
    with log.open("wb") as file:
        try:
            code = exit_code(command, timeout, file)
        except OSError as error:
            raise BuilderError(f"{command[0]}: cannot be run: {error.strerror or error}") from error
    return Run(code, time.monotonic() - start, command)


def version_of(log: bytes) -> str:
    """The version that the first line of a trtexec log states (``8.5.3`` for v8503, ``10.13.3`` for v101303)."""
    match = _VERSION.search(log[:4096].decode("utf-8", "replace"))
    if match is None:
        return ""
    digits = match[1]
    if len(digits) >= 6:
        return f"{int(digits[:-4])}.{int(digits[-4:-2])}.{int(digits[-2:])}"
    return f"{digits[0]}.{digits[1]}.{int(digits[2:] or 0)}"
