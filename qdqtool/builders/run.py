"""Run one build of a model, and read its log and its list of layers."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from qdqtool.builders.compiler_process import CompilerProcess
from qdqtool.builders.options import BuildOptions
from qdqtool.errors import BuilderError, BuildLogError
from qdqtool.ir import modelfile
from qdqtool.ir.graph import Model
from qdqtool.trt.targets import DEFAULT_SM
from qdqtool.util.files import INVALID_NAME, atomic_write
from qdqtool.util.subprocesses import temporary_folder

if TYPE_CHECKING:
    from qdqtool.buildlog.types import Build


_SAFE_NAME = re.compile(r"[A-Za-z0-9_./:@#$%&*=|~^-]{1,200}")
# Error lines that give no reason. Without a GPU, TensorRT-RTX prints the line about the CUDA driver
# with each error. The other lines precede or follow the parser's error.
_UNINFORMATIVE_LINE = re.compile(
    r".*CUDA driver version is insufficient|Invalid Node|false$|Node name:|"
    r"ModelImporter\.cpp(?!.*ERROR)"
)


@dataclass(slots=True)
class BuildResult:
    """Result of one build.

    Attributes:
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        status: ``built``; ``refused`` (by the parser or the builder); ``crashed`` (the compiler
            died); ``timeout``.
        version: Version of the compiler; empty if unknown.
        targets: Compute capabilities of the build (TensorRT-RTX only).
        message: Reason for the status in one line; empty for ``built``.
        errors: All error lines, in order.
        seconds: Wall-clock time of the build in seconds.
        model: The model that was built; None until `read_log` sets it.
        names: Name of each node in the log, by index of the node.
        build: Contents of the log and the list of layers; None if the compiler wrote no log, or if
            the build failed and its log cannot be read.
        log_path: File of the verbose log; None if it was not kept.
        engine_path: File of the engine; None if it was not kept.
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


def choose_log_names(model: Model) -> dict[int, str]:
    """Return a unique name for each node, by index of the node.

    A name that is unique and can be printed in a log is kept. All other nodes get new names.
    """
    names = {
        node.index: node.name
        for node in model.nodes
        if node.proto.name == node.name and _SAFE_NAME.fullmatch(node.name)
    }
    used = set(names.values())
    for node in model.nodes:
        if node.index in names:
            continue
        name = node.name if _SAFE_NAME.fullmatch(node.name) else f"node_{node.index}"
        while name in used:
            name = f"{name}.{node.index}"
        names[node.index] = name
        used.add(name)
    return names


def prepare_model_file(model: Model, names: dict[int, str], folder: Path) -> Path:
    """Return the path of a model file whose nodes have the given names.

    If the nodes in the model's own file have these names, and the file is not compressed, its path
    is returned. Otherwise, a copy is written.

    Args:
        model: The model.
        names: Name of each node, by index of the node.
        folder: Folder for the copy.
    """
    has_names = all(names[node.index] == node.proto.name for node in model.nodes)
    if has_names and model.path and not model.path.endswith(".gz"):
        # Missing weights raise an error here: the compiler would only print "Failed to import
        # initializer".
        modelfile.require_weights(model)
        return Path(model.path)
    copy = onnx.ModelProto()
    copy.CopyFrom(modelfile.load_full(model).proto)
    for node in model.nodes:
        copy.graph.node[node.index].name = names[node.index]
    path = folder / "model.onnx"
    modelfile.write_model(copy, path)
    return path


def run_build(
    model: Model,
    output: str | os.PathLike[str] | None,
    build: Callable[[Path, Path], BuildResult],
) -> BuildResult:
    """Build a model, and read the log of the build.

    Args:
        model: The model.
        output: Folder for the log and the engine; None to keep neither.
        build: Function that takes the path of a model and a folder, builds the model, and writes
            the log and the engine into the folder.
    """
    if output is not None:
        _create_folder(output)
    with temporary_folder("build-") as temporary:
        work = Path(temporary)
        names = choose_log_names(model)
        result = build(prepare_model_file(model, names, work), work)
        read_log(model, names, work, result)
        if output is not None:
            result.log_path = _copy_output(work / "build.log", Path(output))
            result.engine_path = _copy_output(work / "engine.plan", Path(output))
    return result


def _create_folder(path: str | os.PathLike[str]) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuilderError(
            f"cannot be created: {error.strerror or error}",
            str(Path(path)),
            code="not-written",
            parameter="output",
        ) from error
    except ValueError:
        raise BuilderError(
            f"{os.fspath(path)!r}: {INVALID_NAME}", code="wrong-file-name", parameter="output"
        ) from None


def build_with_package(
    process: CompilerProcess, options: BuildOptions, path: Path, work: Path
) -> BuildResult:
    """Build a model with NVIDIA's Python package ``tensorrt`` or ``tensorrt_rtx``.

    Args:
        process: Child process with the package.
        options: Options of the build.
        path: File of the model.
        work: Folder for ``build.log``, ``inspector.json`` and ``engine.plan``.
    """
    is_rtx = options.builder == "tensorrt-rtx"
    targets = tuple(options.sm or DEFAULT_SM) if is_rtx else ()
    shapes = options.shapes or {}
    request = {
        "model": str(path.resolve()),
        "log": str(work / "build.log"),
        "sm": list(targets),
        "engine": str(work / "engine.plan") if options.keep_engine else None,
        "layers": None if is_rtx else str(work / "inspector.json"),
        "profiles": {name: list(map(list, profile)) for name, profile in shapes.items()},
    }
    start = time.monotonic()
    answer = process.send_request(
        request, options.timeout, lambda: importlib.import_module("qdqtool.buildlog.read")
    )
    result = BuildResult(
        options.builder,
        str(answer["status"]),
        str(answer.get("version", "")),
        targets,
        errors=list(map(str, answer.get("errors", []))),
        seconds=time.monotonic() - start,
    )
    if result.status == "timeout":
        result.message = f"stopped after {options.timeout:g} s"
    elif result.status == "crashed":
        result.message = str(answer.get("message", ""))
    elif result.status == "refused":
        result.message = find_refusal_reason(result.errors)
    return result


def find_refusal_reason(errors: Sequence[str]) -> str:
    """Return the first error line that gives a reason why TensorRT rejected a model.

    If no line gives a reason, the first line is returned. Without lines, a text states that the
    reason is missing.
    """
    lines = [line.strip() for error in errors for line in error.splitlines() if line.strip()]
    reasons = [line for line in lines if not _UNINFORMATIVE_LINE.match(line)]
    return next(iter(reasons or lines), "the compiler gave no reason")


def read_log(model: Model, names: dict[int, str], work: Path, result: BuildResult) -> None:
    """Read the log and layer JSON of a build, and store them in a result.

    Args:
        model: The model that was built.
        names: Name of each node in the log, by index of the node.
        work: Folder with ``build.log`` and ``inspector.json``.
        result: Result of the build. The function sets its `build`, `model` and `names`.

    Raises:
        BuildLogError: The log of a successful build cannot be read.
    """
    from qdqtool.buildlog.read import read_build

    result.model, result.names = model, names
    files = [
        str(path)
        for path in (work / "build.log", work / "inspector.json")
        if path.exists() and path.stat().st_size
    ]
    if not files:
        return
    try:
        build = read_build(*files)
    except BuildLogError as error:
        if result.status == "built":
            raise BuildLogError(
                f"the log that the build wrote cannot be read: {error}; build again",
                code="file-unreadable",
            ) from error
        return
    build.tensorrt = build.tensorrt or result.version or None
    build.is_rtx |= result.builder == "tensorrt-rtx"
    result.build = build


def _copy_output(source: Path, folder: Path) -> Path | None:
    if not source.exists():
        return None
    target = folder / source.name
    with source.open("rb") as from_file, atomic_write(target) as to_file:
        shutil.copyfileobj(from_file, to_file)
    return target
