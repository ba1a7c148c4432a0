"""Asks a compiler or a command of the user's whether a smaller model still does what the whole one does."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import onnx

from qdqtool.builders.compiler_process import CompilerProcess
from qdqtool.builders.run import build_with_package, log_names, read_log
from qdqtool.buildlog.agreement import MismatchKind
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import write_model
from qdqtool.prediction import predict
from qdqtool.trt.targets import RTX
from qdqtool.util import limits
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import Said, said
from qdqtool.util.subprocesses import run_command, temporary_folder
from qdqtool.verification.build_model import (
    BuiltModel,
    build_model,
    is_status_as_predicted,
    map_build,
    pair_convolutions,
)

TIMEOUT = 600.0  # seconds for one build
PATIENCE, SLOWER = 60.0, 5.0  # seconds, and times the seconds of the whole model
_SM = (86,)
_BLOCK = 2**20
_AGAIN = 0.1  # seconds


class Check(Protocol):
    """Something that a smaller model has to do as the whole one does."""

    words: Note
    """What the whole one does."""
    shareable: Said
    """The same without the user's paths."""
    loose: bool
    """Whether another fault could look the same."""

    def holds(self, proto: onnx.ModelProto) -> bool:
        """Whether a model does the same."""
        ...

    def close(self) -> None:
        """Ends processes and removes temporary files."""
        ...


@dataclass(frozen=True)
class Behaviour:
    """What a build came to.

    Attributes:
        status: ``built``, ``refused`` or ``crashed``.
        message: The compiler's words without names and numbers.
        version: The compiler's.
        differences: (predicted, built) of convolutions on which prediction and build part.
    """

    status: str
    message: str
    version: str
    differences: frozenset[tuple[str, str]]

    @property
    def healthy(self) -> bool:
        return self.status == "built" and not self.differences

    def like(self, other: Behaviour) -> bool:
        """Whether this is the same fault."""
        if self.status != other.status or self.message != other.message:
            return False
        return not other.differences or bool(self.differences & other.differences)


class BuilderCheck:
    """Builds a model here; holds while the build ends as the whole model's did.

    Args:
        model: The whole model.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        target: What to predict for, where the build is compared.

    Raises:
        BuilderError: The builder is not here, or the build ran out of time.
    """

    def __init__(self, proto: onnx.ModelProto, builder: str, target: str) -> None:
        self.loose = False
        self._builder = builder
        self._target = RTX.name if builder == "tensorrt-rtx" else target
        self._folder = temporary_folder("extract-")
        try:
            self._child = CompilerProcess("tensorrt_rtx") if builder == "tensorrt-rtx" else None
            self.whole = self.behaviour(proto)
        except BaseException:
            self.close()
            raise
        if self.whole.status == "timeout":
            self.close()
            raise BuilderError(
                f"the build of the whole model did not end within {TIMEOUT:g} s", code="timeout"
            )
        self.words = self._words()
        self.shareable: Said = self.words

    def _words(self) -> Note:
        if self.whole.status != "built":
            remark = Remark.CHECKED_BUILD_SAYING if self.whole.message else Remark.CHECKED_BUILD
            return remark(
                builder=self._builder, status=self.whole.status, message=self.whole.message
            )
        if self.whole.differences:
            return Remark.CHECKED_DIFFERENCES(
                builder=self._builder, differences=sorted(self.whole.differences)
            )
        return Remark.CHECKED_AS_PREDICTED(builder=self._builder)

    def behaviour(self, proto: onnx.ModelProto) -> Behaviour:
        """Builds a model."""
        work = Path(self._folder.name)
        path = work / "model.onnx"
        write_model(proto, path)  # over 2 GB as well
        model = Model(proto)
        if self._child is not None:
            (work / "build.log").unlink(missing_ok=True)
            result = build_with_package(self._child, path, work, self._builder, _SM, TIMEOUT)
            read_log(model, log_names(model), work, result)
            built = map_build(result)
        else:
            built = build_model(path, self._builder, timeout=TIMEOUT)
        message = "" if built.status == "built" else _kind(built.message, model)
        return Behaviour(built.status, message, built.version, self._differences(model, built))

    def _differences(self, model: Model, built: BuiltModel) -> frozenset[tuple[str, str]]:
        prediction = predict(model, self._target, advice=False)
        if self._builder == "tensorrt-rtx":
            if is_status_as_predicted(prediction, built) is False:
                return frozenset({("another status", built.status)})
            if built.status != "built":
                return frozenset()
            return frozenset(
                (
                    f"{p.predicted.precision} writing {p.predicted.output}",
                    f"{p.built.precision} writing {p.built.output}",
                )
                for p in pair_convolutions(prediction, built)
                if p.built is not None and p.agrees is False
            )
        if built.status != "built" or built.build is None:
            return frozenset()
        from qdqtool.verification.api import verify

        verified = verify(model, built.build)
        return frozenset(
            (str(m.predicted.get("precision", "")), str(m.built.get("precision", "")))
            for m in verified.mismatches
            if m.kind == MismatchKind.CONVOLUTION
        )

    def holds(self, proto: onnx.ModelProto) -> bool:
        return self.behaviour(proto).like(self.whole)

    def close(self) -> None:
        child = getattr(self, "_child", None)
        if child is not None:
            child.close()
        self._folder.cleanup()

    def __enter__(self) -> BuilderCheck:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CommandCheck:
    """Runs a command of the user's on a model; holds while it ends with the same exit code and says the same text.

    The command is split as a shell would, and run without one; ``{}`` in it stands for the model's file, which is
    appended where there is none.

    A command that hangs on a smaller model must not cost the whole timeout each time. So each smaller model gets
    five times the seconds of the whole model, and one more minute for a busy machine.

    Args:
        proto: The whole model.
        command: The command.
        says: A text that is in its output, errors included; most programs end with 1 whatever went wrong. An
            empty one is not looked for.
        timeout: Seconds for each run.

    Raises:
        QdqtoolError: The command is empty, cannot be split or started, does not end in time, or does not say the text.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        command: str,
        says: str = "",
        timeout: float = limits.USER_SECONDS,
    ) -> None:
        if len(command) > limits.COMMAND:
            raise QdqtoolError(
                said(
                    "{`check`}: has {count} characters; the limit is {limit}",
                    count=len(command),
                    limit=limits.COMMAND,
                ),
                code="too-long",
                parameter="check",
            )
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise QdqtoolError(
                said("{`check`}: cannot be split into words: {error}", error=str(error)),
                code="wrong-format",
                parameter="check",
            ) from None
        if not self._words:
            raise QdqtoolError(
                said(
                    "{`check`}: is empty; give a command that exits otherwise when the fault is gone"
                ),
                code="empty",
                parameter="check",
            )
        if not any("{}" in w for w in self._words):
            self._words.append("{}")
        self._says = says.encode()
        self._folder = temporary_folder("extract-")
        try:
            start = time.monotonic()
            code = self.code(proto, timeout)
            self._timeout = min(timeout, PATIENCE + SLOWER * (time.monotonic() - start))
        except BaseException:
            self.close()
            raise
        if code is None:
            self.close()
            raise QdqtoolError(
                said(
                    "{`check`}: '{command}' did not end within {timeout:g} s on the whole model; give "
                    "it more with {`check_timeout`}",
                    command=self._words[0],
                    timeout=timeout,
                ),
                code="timeout",
                parameter="check",
            )
        if not self._said():
            self.close()
            raise QdqtoolError(
                said(
                    "{`says`}: the command does not say '{says}' of the whole model (exit code "
                    "{code}); correct the text, or leave it out",
                    says=says,
                    code=code,
                ),
                code="text-not-printed",
                parameter="says",
            )
        self.loose = code != 0 and not says
        self._code = code
        remark = Remark.CHECKED_COMMAND_SAYING if says else Remark.CHECKED_COMMAND
        self.words = remark(command=self._words[0], code=code, says=says)
        self.shareable = said(
            "the command: exit code {code}" + ", and a text in its output" * bool(says), code=code
        )

    def code(self, proto: onnx.ModelProto, timeout: float) -> int | None:
        """Return the exit code for a model, None after a timeout."""
        path = Path(self._folder.name) / "model.onnx"
        write_model(proto, path)  # over 2 GB as well
        words = [w.replace("{}", str(path)) for w in self._words]
        try:
            if not self._says:
                return run_command(words, timeout)
            with _kept(self.output) as output:
                return run_command(words, timeout, output)
        except (
            OSError,
            ValueError,
        ) as error:  # a NUL or half a character in its words is a ValueError
            raise QdqtoolError(
                said(
                    "{`check`}: {command!r} cannot be run: {reason}",
                    command=self._words[0],
                    reason=getattr(error, "strerror", None) or error,
                ),
                code="missing-program" if isinstance(error, FileNotFoundError) else "not-started",
                parameter="check",
            ) from None

    def holds(self, proto: onnx.ModelProto) -> bool:
        return self.code(proto, self._timeout) == self._code and self._said()

    @property
    def output(self) -> Path:
        return Path(self._folder.name) / "output"

    def _said(self) -> bool:
        """Whether the text is in what the last run printed."""
        if not self._says:
            return True
        with self.output.open("rb") as output:
            end = b""
            while block := output.read(_BLOCK):
                if self._says in end + block:
                    return True
                end = (end + block)[-len(self._says) :]
        return False

    def close(self) -> None:
        self._folder.cleanup()


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[int]:
    """A descriptor to write to; the first of what is written is kept in a file, the rest goes nowhere."""
    read, write = os.pipe()
    ended = threading.Event()

    def keep() -> None:
        left = limits.COMMAND_OUTPUT
        with os.fdopen(read, "rb", 0) as source, path.open("wb") as kept:
            while True:
                last = (
                    ended.is_set()
                )  # what is left of its output is in the pipe, which holds no more than a block
                more = bool(select.select([source], [], [], 0 if last else _AGAIN)[0])
                block = source.read(_BLOCK) if more else b""
                kept.write(block[:left])
                left -= min(left, len(block))
                if last or (more and not block):
                    return

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield write
    finally:
        os.close(write)
        ended.set()  # what it left running elsewhere may hold the other end
        keeper.join()


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _kind(message: str, model: Model) -> str:
    """A compiler's words without the names and numbers that a smaller model changes."""
    names = (
        {n.name for n in model.nodes} | {n.proto.name for n in model.nodes} | set(model.producers)
    )
    names |= set(model.initializers) | set(model.inputs)
    long = sorted((n for n in names if len(n) > 2 and n in message), key=len, reverse=True)
    for name in long:
        message = message.replace(name, "*")
    return " ".join(_NUMBER.sub("#", message).split())
