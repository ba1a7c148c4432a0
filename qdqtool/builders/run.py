"""Runs one build from the model's file to its answer, with a package of NVIDIA's or with a trtexec on PATH."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

import onnx

from qdqtool.base.files import NO_NAME
from qdqtool.base.outputs import atomic_write
from qdqtool.base.owntime import EVERY, OwnTime
from qdqtool.base.process import (
    adopt,
    descendants,
    end_marked,
    end_started,
    marked,
    temporary_folder,
    unmarked,
)
from qdqtool.builders.child import Child
from qdqtool.errors import BuilderError, BuildLogError
from qdqtool.model import modelfile
from qdqtool.model.graph import Model

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


def with_log_names(model: Model, names: dict[int, str], folder: Path) -> Path:
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
    modelfile.write_model(copy, path, at_once=True)  # the compiler reads it
    return path


# The run ------------------------------------------------------------------------------------------------------------

Shapes = Mapping[str, Sequence[Sequence[int]]]


def run_one(
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
                f"{os.fspath(output)!r}: {NO_NAME}", code="wrong-file-name", parameter="output"
            ) from None
    with temporary_folder("build-") as temporary:
        work = Path(temporary)
        names = log_names(model)
        result = compiled(with_log_names(model, names, work), work)
        read_log(model, names, work, result)
        if output is not None:
            result.log_path = _kept(work / "build.log", Path(output))
            result.engine_path = _kept(work / "engine.plan", Path(output))
    return result


def build_with(
    child: Child,
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
        "refused": first_words(errors),
    }
    result.message = said.get(result.status, "")
    return result


# TensorRT-RTX without a GPU prints the first beside each real error; the parser's frame says no more.
_FRAME = re.compile(
    r".*CUDA driver version is insufficient|Invalid Node|false$|Node name:|ModelImporter\.cpp(?!.*ERROR)"
)


def first_words(errors: Sequence[str]) -> str:
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


def _kept(source: Path, folder: Path) -> Path | None:
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
    """One build with the trtexec of this machine; leaves its files as :func:`build_with` does."""
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
    chosen = flags(
        (told.stdout + told.stderr).decode("utf-8", "replace"),
        path.resolve(),
        work / "inspector.json",
        engine,
        shapes,
    )
    start = time.monotonic()
    with (work / "build.log").open("w+b") as file:
        try:
            code = exit_code([program, *chosen], timeout, file)
        except OSError as error:
            raise BuilderError(
                f"cannot be run: {error.strerror or error}", program, code="not-started"
            ) from error
        file.seek(0)
        data = file.read()
    result = BuildResult("trtexec", "built", version_of(data), seconds=time.monotonic() - start)
    if code is None:
        result.status, result.message = "timeout", f"stopped after {timeout:g} s"
    elif code < 0:
        result.status, result.message = "crashed", f"trtexec died of signal {-code}"
    elif code > 0:
        lines = data.decode("utf-8", "replace").splitlines()
        result.errors = [
            line.split("[E] ", 1)[1].removeprefix("[TRT] ") for line in lines if "[E] " in line
        ]
        result.status, result.message = "refused", first_words(result.errors)
    return result


def flags(text: str, model: Path, layers: Path, engine: Path | None, shapes: Shapes) -> list[str]:
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


def version_of(log: bytes) -> str:
    """The version that the first line of a trtexec log states (``8.5.3`` for v8503, ``10.13.3`` for v101303)."""
    from qdqtool.buildlog import sections

    match = _VERSION.search(log[:4096].decode("utf-8", "replace"))
    return sections.version_of(match[1]) if match else ""


# Runs a command, and ends all that it started: what loses its parent there becomes a child of this process, whatever
# environment and session it has. Ends that early when its own parent has closed its stdin, if only by being killed.
# The command's parent is a process in between: one that kills or stops its parent does not reach this one. It is marked
# as well, so that it is found where it has killed both.
_RUNS = """
import ctypes, os, select, signal, sys
answer, parent, marks, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(), sys.argv[4:]
os.set_inheritable(answer, False)
try:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(1, signal.SIGCONT, 0, 0, 0)  # PR_SET_PDEATHSIG: the command may have stopped this process
except AttributeError:
    pass  # no Linux
told, tell = os.pipe()
between = os.fork()
if not between:
    child = os.fork()
    if not child:
        try:
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvpe(words[0], words, {**os.environ, **dict(mark.split("=") for mark in marks)})
        except Exception as error:
            os.write(answer, b"failed %d " % (getattr(error, "errno", 0) or 2))  # ENOENT
        finally:
            os._exit(127)
    os.write(tell, b"ended %d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
os.close(tell)
said, ended, died, gone = None, 1, 0, False
while said is None and os.getppid() == parent:
    ready = select.select([0, told], [], [], 1)[0]
    if 0 in ready:
        break
    if told in ready:
        said = os.read(told, 64)
    while ended and not gone:
        ended, status = os.waitpid(-1, os.WNOHANG) if said != b"" else os.waitpid(between, 0)
        if ended == between:
            died, gone = os.waitstatus_to_exitcode(status), True
    ended = 1
try:
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            for started in map(int, children.read().split()):
                os.kill(started, 9)
        os.waitpid(-1, 0)
except OSError:
    pass  # there is none any more
if said is not None:
    os.write(answer, said or b"killed %d" % -died)
"""


_ENDING = 5  # seconds that ending a command may take


def exit_code(
    command: Sequence[str],
    timeout: float,
    output: IO[bytes] | int = subprocess.DEVNULL,
    own: OwnTime | None = None,
) -> int | None:
    """The exit code of a command that reads nothing; None when it did not end within ``timeout`` seconds of the clock,
    or in its ``own`` time.

    No shell reads its words; its errors go to ``output`` as well. Nothing that it started runs on. It raises OSError
    where the command cannot be started, BuilderError where what waits for it was killed.
    """
    before = adopt()
    mark = f"QDQTOOL_COMMAND={os.urandom(8).hex()}"
    marks = " ".join((mark, *(f"{name}={value}" for name, value in marked({}).items())))
    read, write = os.pipe()
    with os.fdopen(read, "rb") as answer:
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _RUNS,
                    str(write),
                    str(os.getpid()),
                    marks,
                    *command,
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=unmarked(),
                pass_fds=[write],
            )
        finally:
            os.close(write)
        try:
            in_time = _answers(answer, process.pid, timeout, own)
        finally:
            _end(process, mark, before)
        if not in_time:
            return None
        words = answer.read().decode().split()
    if not words or words[0] == "killed":
        number = words[1] if words else -process.returncode
        raise BuilderError(
            f"its exit code is not known: what waits for it was killed (signal {number}), "
            "by the command itself or for want of memory",
            command[0],
            code="exit-code-unknown",
        )
    if words[0] == "failed":
        raise OSError(int(words[1]), os.strerror(int(words[1])))
    return int(words[1])


def _answers(answer: IO[bytes], process: int, timeout: float, own: OwnTime | None) -> bool:
    """Waits for an answer; whether there is one before the time is over."""
    end = time.monotonic() + timeout
    while True:
        left = max(0.0, end - time.monotonic())
        if select.select([answer], [], [], left if own is None else min(left, EVERY))[0]:
            return True
        if not left or (own is not None and own.is_over(process)):
            return False


def _end(process: subprocess.Popen[bytes], mark: str, before: Collection[int] | None) -> None:
    """Ends what waits for a command, and all that the command started, even where the command has stopped it.

    Args:
        process: What waits.
        mark: Of the command.
        before: The processes that ran before; None where this one's are not to be ended.
    """
    assert process.stdin is not None
    process.stdin.close()
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        for started in (*descendants(process.pid), process.pid):
            with contextlib.suppress(OSError):
                os.kill(started, signal.SIGKILL)
        process.wait()
    if process.returncode:
        end_marked(mark)
        if before is not None:
            end_started(before)
