"""Runs one build from the model's file to its answer, with a package of NVIDIA's or with a trtexec on PATH."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from qdqtool.builders.compiler_process import CompilerProcess
from qdqtool.errors import BuilderError, BuildLogError
from qdqtool.ir import modelfile
from qdqtool.ir.graph import Model
from qdqtool.util.files import INVALID_NAME
from qdqtool.util.outputs import atomic_write
from qdqtool.util.subprocesses import run_command, temporary_folder

if TYPE_CHECKING:
    from qdqtool.buildlog.types import Build


@dataclass(slots=True)
class BuildResult:
    """One build.

    Attributes:
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        status: ``built``; ``refused`` (the parser or the builder says no); ``crashed`` (the compiler died);
            ``timeout``.
        version: The compiler's version, empty when not known.
        targets: Compute capabilities built for (TensorRT-RTX).
        message: The compiler's own words for a refusal, one line; empty for ``built``.
        errors: All error lines, in order.
        seconds: Wall time of the child process.
        model: The model that was built; None before it was read.
        names: Node index to the node's name in the build's own listing.
        build: The log, read, with those names; None when nothing was written.
        log_path: The verbose log; None when not kept.
        engine_path: The engine; None when not kept.
    """

    builder: str
    status: str
    version: str = ""
    targets: tuple[int, ...] = ()
    message: str = ""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    model: Model | None = None
    names: dict[int, str] = field(default_factory=dict)
    build: Build | None = None
    log_path: Path | None = None
    engine_path: Path | None = None


# Names that a log can carry -----------------------------------------------------------------------------------------

_SAFE = re.compile(r"[A-Za-z0-9_./:@#$%&*=|~^-]{1,200}")


def log_names(model: Model) -> dict[int, str]:
    """Node index to the name that it gets for the build; the node's own wherever the log can carry that."""
    result = {
        n.index: n.name for n in model.nodes if n.proto.name == n.name and _SAFE.fullmatch(n.name)
    }
    taken = set(result.values())
    for node in model.nodes:
        if node.index not in result:
            name = node.name if _SAFE.fullmatch(node.name) else f"node_{node.index}"
            while name in taken:
                name = f"{name}.{node.index}"
            result[node.index] = name
            taken.add(name)
    return result


def prepare_model_file(model: Model, names: dict[int, str], folder: Path) -> Path:
    """The path to build from: the model's own file, or a copy in ``folder`` where a node needs another name."""
    same = all(names[n.index] == n.proto.name for n in model.nodes)
    if same and model.path and not model.path.endswith(".gz"):
        modelfile.require_weights(
            model
        )  # the compiler would say no more than "Failed to import initializer"
        return Path(model.path)
    copy = onnx.ModelProto()
    copy.CopyFrom(modelfile.load_full(model).proto)
    for node in model.nodes:
        copy.graph.node[node.index].name = names[node.index]
    path = folder / "model.onnx"
    modelfile.write_model(copy, path)  # the compiler reads it
    return path


# The run ------------------------------------------------------------------------------------------------------------

Shapes = Mapping[str, Sequence[Sequence[int]]]


def run_build(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    compiled: Callable[[Path, Path], BuildResult],
) -> BuildResult:
    """One build from the model's file to its answer; see :func:`qdqtool.builders.build`.

    ``compiled`` builds the file given first, and leaves what it printed in the folder given second.
    """
    model = modelfile.load(source)
    if output is not None:
        try:
            Path(output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuilderError(
                f"cannot be made: {error.strerror or error}",
                str(Path(output)),
                code="not-written",
                parameter="output",
            ) from error
        except ValueError:
            raise BuilderError(
                f"{os.fspath(output)!r}: {INVALID_NAME}", code="wrong-file-name", parameter="output"
            ) from None
    with temporary_folder("build-") as temporary:
        work = Path(temporary)
        names = log_names(model)
        result = compiled(prepare_model_file(model, names, work), work)
        read_log(model, names, work, result)
        if output is not None:
            result.log_path = _copy_output(work / "build.log", Path(output))
            result.engine_path = _copy_output(work / "engine.plan", Path(output))
    return result


def build_with_package(
    child: CompilerProcess,
    path: Path,
    work: Path,
    builder: str,
    sm: tuple[int, ...],
    timeout: float,
    keep_engine: bool = False,
    shapes: Shapes | None = None,
) -> BuildResult:
    """One build in a running child; leaves ``build.log`` (and ``engine.plan``, ``inspector.json``) in ``work``."""
    rtx = builder == "tensorrt-rtx"
    request = {
        "model": str(path.resolve()),
        "log": str(work / "build.log"),
        "sm": list(sm) if rtx else [],
        "engine": str(work / "engine.plan") if keep_engine else None,
        "layers": None if rtx else str(work / "inspector.json"),
        "profiles": {k: [list(s) for s in v] for k, v in (shapes or {}).items()},
    }
    start = time.monotonic()
    answer = child.ask(request, timeout, lambda: importlib.import_module("qdqtool.buildlog.read"))
    errors = [str(e) for e in answer.get("errors", [])]
    result = BuildResult(
        builder,
        str(answer["status"]),
        str(answer.get("version", "")),
        sm if rtx else (),
        errors=errors,
        seconds=time.monotonic() - start,
    )
    said = {
        "timeout": f"stopped after {timeout:g} s",
        "crashed": str(answer.get("message", "")),
        "refused": find_refusal_reason(errors),
    }
    result.message = said.get(result.status, "")
    return result


# TensorRT-RTX without a GPU prints the first beside each real error; the parser's frame says no more.
_FRAME = re.compile(
    r".*CUDA driver version is insufficient|Invalid Node|false$|Node name:|ModelImporter\.cpp(?!.*ERROR)"
)


def find_refusal_reason(errors: Sequence[str]) -> str:
    """The line that matters of a refusal: what the parser or the builder asserts, without the lines around it."""
    lines = [line.strip() for e in errors for line in e.splitlines() if line.strip()] or [
        "the compiler gave no reason"
    ]
    return next((line for line in lines if not _FRAME.match(line)), lines[0])


def read_log(model: Model, names: dict[int, str], work: Path, result: BuildResult) -> None:
    """Reads the log (and the layer JSON, where there is one) and fills in ``build``, ``model`` and ``names``."""
    from qdqtool.buildlog.read import read_build

    result.model, result.names = model, names
    sources = [
        p for p in (work / "build.log", work / "inspector.json") if p.exists() and p.stat().st_size
    ]
    try:
        result.build = read_build(*map(str, sources)) if sources else None
    except BuildLogError as error:
        if result.status == "built":
            raise BuildLogError(
                f"the build's own log cannot be read: {error}", code="file-unreadable"
            ) from error
    if result.build is not None:
        result.build.tensorrt = result.build.tensorrt or result.version or None
        result.build.is_rtx = result.build.is_rtx or result.builder == "tensorrt-rtx"


def _copy_output(source: Path, folder: Path) -> Path | None:
    """Where a file went in the user's folder; None where there is none."""
    if not source.exists():
        return None
    target = folder / source.name
    with source.open("rb") as from_file, atomic_write(target) as to_file:
        shutil.copyfileobj(from_file, to_file)
    return target


# trtexec: the flags that its version has, a verbose log, the layer listing ------------------------------------------

_VERSION = re.compile(r"\[TensorRT v(\d+)\]")
# JetPack and NVIDIA's packages install it here and do not add the folder to PATH.
TRTEXEC_PATHS = (
    "/usr/src/tensorrt/bin/trtexec",
    "/opt/tensorrt/bin/trtexec",
    "/usr/local/tensorrt/bin/trtexec",
)


def build_with_trtexec(
    path: Path, work: Path, timeout: float, keep_engine: bool, shapes: Shapes
) -> BuildResult:
    """One build with the trtexec of this machine; leaves its files as :func:`build_with_package` does."""
    program = shutil.which("trtexec") or next(
        (p for p in TRTEXEC_PATHS if os.access(p, os.X_OK)), None
    )
    if program is None:
        raise BuilderError(
            "no trtexec on PATH nor in /usr/src/tensorrt/bin; add its folder to PATH, or build with tensorrt-rtx",
            code="missing-program",
            parameter="builder",
        )
    try:
        told = subprocess.run(
            [program, "--help"],
            capture_output=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuilderError(f"cannot be run: {error}", program, code="not-started") from error
    engine = work / "engine.plan" if keep_engine else None
    chosen = trtexec_flags(
        (told.stdout + told.stderr).decode("utf-8", "replace"),
        path.resolve(),
        work / "inspector.json",
        engine,
        shapes,
    )
    start = time.monotonic()
    with (work / "build.log").open("w+b") as file:
        try:
            code = run_command([program, *chosen], timeout, file)
        except OSError as error:
            raise BuilderError(
                f"cannot be run: {error.strerror or error}", program, code="not-started"
            ) from error
        file.seek(0)
        data = file.read()
    result = BuildResult(
        "trtexec", "built", find_trtexec_version(data), seconds=time.monotonic() - start
    )
    if code is None:
        result.status, result.message = "timeout", f"stopped after {timeout:g} s"
    elif code < 0:
        result.status, result.message = "crashed", f"trtexec died of signal {-code}"
    elif code > 0:
        lines = data.decode("utf-8", "replace").splitlines()
        result.errors = [
            line.split("[E] ", 1)[1].removeprefix("[TRT] ") for line in lines if "[E] " in line
        ]
        result.status, result.message = "refused", find_refusal_reason(result.errors)
    return result


def trtexec_flags(
    text: str, model: Path, layers: Path, engine: Path | None, shapes: Shapes
) -> list[str]:
    """The flags for a build that can be verified, of those that the output of ``trtexec --help`` names.

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
    chosen += ["--dumpLayerInfo"] if has("dumpLayerInfo") else []
    chosen += [f"--exportLayerInfo={layers}"] if has("exportLayerInfo") else []
    chosen += [f"--{flag}" for flag in ("skipInference", "buildOnly") if has(flag)][:1]
    chosen += [f"--saveEngine={engine}"] if engine is not None else []
    for place, key in enumerate(("minShapes", "optShapes", "maxShapes") if shapes else ()):
        chosen.append(
            f"--{key}="
            + ",".join(f"{name}:{'x'.join(map(str, s[place]))}" for name, s in shapes.items())
        )
    return chosen


def find_trtexec_version(log: bytes) -> str:
    """The version that the first line of a trtexec log states (``8.5.3`` for v8503, ``10.13.3`` for v101303)."""
    from qdqtool.buildlog import sections

    match = _VERSION.search(log[:4096].decode("utf-8", "replace"))
    return sections.parse_version_digits(match[1]) if match else ""
