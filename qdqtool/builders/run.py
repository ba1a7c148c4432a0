"""Runs one build from the model's file to its answer."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from qdqtool import modelfile
from qdqtool.builders import trtexec
from qdqtool.builders.child import Child
from qdqtool.errors import BuilderError, BuildLogError
from qdqtool.graph import Model
from qdqtool.outputs import atomic_write

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
    taken: set[str] = set()
    result: dict[int, str] = {}
    for node in model.nodes:
        if node.proto.name == node.name and _SAFE.fullmatch(node.name):
            result[node.index] = node.name
            taken.add(node.name)
    for node in model.nodes:
        if node.index in result:
            continue
        name = node.name if _SAFE.fullmatch(node.name) else f"node_{node.index}"
        while name in taken:
            name = f"{name}.{node.index}"
        result[node.index] = name
        taken.add(name)
    return result


def with_log_names(model: Model, names: dict[int, str], folder: Path) -> Path:
    """The path to build from: the model's own file, or a copy in ``folder`` where a node needs another name.

    Raises:
        ModelError: An external weight file is missing.
    """
    same = all(names[n.index] == n.proto.name for n in model.nodes)
    if same and model.path and not model.path.endswith(".gz"):
        modelfile.require_weights(model)  # the compiler would say no more than "Failed to import initializer"
        return Path(model.path)
    full = modelfile.load_full(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(full.proto)
    for node in model.nodes:
        copy.graph.node[node.index].name = names[node.index]
    path = folder / "model.onnx"
    modelfile.write_model(copy, path, at_once=True)  # the compiler reads it
    return path


# The run ------------------------------------------------------------------------------------------------------------


DEFAULT_SM = (86,)
Shapes = dict[str, Sequence[Sequence[int]]]


def run_package(
    child: Child, source: str | os.PathLike[str], builder: str, output: str | os.PathLike[str] | None,
    sm: tuple[int, ...], timeout: float, keep_engine: bool, shapes: Shapes,
) -> BuildResult:
    """A build with a Python package of NVIDIA's; see :func:`qdqtool.builders.build`."""
    def compiled(path: Path, work: Path) -> BuildResult:
        return build_with(child, path, work, builder, sm or DEFAULT_SM, timeout, keep_engine, shapes)

    return _run(source, output, compiled)


def run_trtexec(
    source: str | os.PathLike[str], output: str | os.PathLike[str] | None, timeout: float, keep_engine: bool,
    shapes: Shapes,
) -> BuildResult:
    """A build with trtexec; see :func:`qdqtool.builders.build`."""
    return _run(source, output, lambda path, work: _with_trtexec(path, work, timeout, keep_engine, shapes))


def _run(
    source: str | os.PathLike[str], output: str | os.PathLike[str] | None, compiled: Callable[[Path, Path], BuildResult]
) -> BuildResult:
    model = modelfile.load(source)
    folder = _folder(output)
    with tempfile.TemporaryDirectory(prefix="qdqtool-build-") as temporary:
        work = Path(temporary)
        names = log_names(model)
        result = compiled(with_log_names(model, names, work), work)
        read_log(model, names, work, result)
        if folder is not None:
            _keep(work, folder, result)
    return result


def _folder(output: str | os.PathLike[str] | None) -> Path | None:
    if output is None:
        return None
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuilderError(f"{folder}: cannot be made: {error.strerror or error}") from error
    return folder


def build_with(
    child: Child, path: Path, work: Path, builder: str, sm: tuple[int, ...], timeout: float, keep_engine: bool = False,
    shapes: Shapes | None = None,
) -> BuildResult:
    """One build in a running child; leaves ``build.log`` (and ``engine.plan``, ``inspector.json``) in ``work``.

    Raises:
        BuilderError: The compiler cannot run here.
    """
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
    answer = child.ask(request, timeout, _load_reader)
    errors = [str(e) for e in answer.get("errors", [])]
    result = BuildResult(builder, str(answer["status"]), str(answer.get("version", "")), sm if rtx else (),
                         errors=errors, seconds=time.monotonic() - start)
    if result.status == "timeout":
        result.message = f"stopped after {timeout:g} s"
    elif result.status == "crashed":
        result.message = str(answer.get("message", ""))
    elif result.status == "refused":
        result.message = first_words(errors)
    return result


def _load_reader() -> None:
    importlib.import_module("qdqtool.buildlog.read")


def first_words(errors: Sequence[str]) -> str:
    """The line that matters of a refusal: what the parser or the builder asserts, without the lines around it."""
    lines = [line.strip() for e in errors for line in e.splitlines() if line.strip()]
    for line in lines:
        # TensorRT-RTX without a GPU prints the first beside each real error; the parser's frame says no more.
        if "CUDA driver version is insufficient" in line or line.startswith("Invalid Node") or line == "false":
            continue
        if line.startswith("Node name:") or (line.startswith("ModelImporter.cpp") and "ERROR" not in line):
            continue
        return line
    return lines[0] if lines else "the compiler gave no reason"


def _with_trtexec(path: Path, work: Path, timeout: float, keep_engine: bool, shapes: Shapes) -> BuildResult:
    program = trtexec.find()
    engine = work / "engine.plan" if keep_engine else None
    chosen = trtexec.flags(trtexec.help_of(program), path.resolve(), work / "inspector.json", engine, shapes)
    log = work / "build.log"
    done = trtexec.run([program, *chosen], log, timeout)
    data = log.read_bytes()
    result = BuildResult("trtexec", "built", trtexec.version_of(data), seconds=done.seconds)
    if done.code is None:
        result.status, result.message = "timeout", f"stopped after {timeout:g} s"
    elif done.code < 0:
        result.status, result.message = "crashed", f"trtexec died of signal {-done.code}"
    elif done.code > 0:
        lines = data.decode("utf-8", "replace").splitlines()
        result.errors = [line.split("[E] ", 1)[1].removeprefix("[TRT] ") for line in lines if "[E] " in line]
        result.status, result.message = "refused", first_words(result.errors)
    return result


def read_log(model: Model, names: dict[int, str], work: Path, result: BuildResult) -> None:
    """Reads the log (and the layer JSON, where there is one) and fills in ``build``, ``model`` and ``names``."""
    from qdqtool.buildlog.read import read_build

    result.model, result.names = model, names
    sources = [p for p in (work / "build.log", work / "inspector.json") if p.exists() and p.stat().st_size]
    try:
        result.build = read_build(*map(str, sources)) if sources else None
    except BuildLogError as error:
        if result.status == "built":
            raise BuildLogError(f"the build's own log cannot be read: {error}") from error
    build = result.build
    if build is None:
        return
    if not build.tensorrt and result.version:
        build.tensorrt = result.version
    if result.builder == "tensorrt-rtx":
        build.is_rtx = True


def _keep(work: Path, folder: Path, result: BuildResult) -> None:
    """Moves what is to be kept into the user's folder."""
    log = work / "build.log"
    if log.exists():
        result.log_path = _move(log, folder / "build.log")
    if (work / "engine.plan").exists():
        result.engine_path = _move(work / "engine.plan", folder / "engine.plan")


def _move(source: Path, target: Path) -> Path:
    with source.open("rb") as from_file, atomic_write(target) as to_file:
        shutil.copyfileobj(from_file, to_file)
    return target
