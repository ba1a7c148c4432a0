"""Checks that a smaller model behaves like the whole model, by a builder or a command."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx

from qdqtool.builders.compiler_process import CompilerProcess
from qdqtool.builders.options import BuildOptions
from qdqtool.builders.run import build_with_package, choose_log_names, read_log
from qdqtool.buildlog.agreement import MismatchKind
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import write_model
from qdqtool.prediction import predict
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import RTX
from qdqtool.util import limits
from qdqtool.util.notes import Note
from qdqtool.util.subprocesses import run_command, temporary_folder
from qdqtool.verification.local_build import (
    BuiltModel,
    build_model,
    is_status_as_predicted,
    map_build_to_nodes,
    pair_convolutions,
)

TIMEOUT = 600.0  # seconds for one build
# The time limit for a smaller model is at most five times the time that the whole model took, plus
# a minute.
_EXTRA_SECONDS, _SECONDS_FACTOR = 60.0, 5.0
_BLOCK = 2**20  # number of bytes of output that are read at once


class ModelCheck(Protocol):
    """Check that a smaller model behaves like the whole model.

    Attributes:
        is_ambiguous: Whether a model with a different fault could pass the check.
    """

    is_ambiguous: bool

    def describe_behavior(self, hide: Callable[[str], str] | None = None) -> Note:
        """Describe the behavior of the whole model.

        Args:
            hide: Function that replaces names in a text, for a private model. If it is given, the
                description does not contain texts of the user.
        """
        ...

    def has_same_behavior(self, proto: onnx.ModelProto) -> bool:
        """Return whether a smaller model behaves like the whole model."""
        ...

    def close(self) -> None:
        """End processes and remove temporary files."""
        ...


@dataclass(frozen=True)
class BuildOutcome:
    """Outcome of a build, for comparison with other builds.

    Attributes:
        status: ``built``, ``refused``, ``crashed`` or ``timeout``.
        message: Message of the compiler, with placeholders for names and numbers; empty if the
            model was built.
        version: Version of the compiler.
        differences: Predicted and built outcome of the convolutions for which the two differ.
    """

    status: str
    message: str
    version: str
    differences: frozenset[tuple[str, str]]

    @property
    def is_as_predicted(self) -> bool:
        """Whether the model was built as predicted."""
        return self.status == "built" and not self.differences

    def is_same_fault(self, other: BuildOutcome) -> bool:
        """Return whether another outcome has the same status and message, and a common difference.

        If the other outcome has no differences, those of this outcome are ignored.
        """
        return (
            self.status == other.status
            and self.message == other.message
            and (not other.differences or bool(self.differences & other.differences))
        )


class BuilderCheck:
    """Check that the build of a smaller model has the outcome of the whole model's build.

    Args:
        proto: The whole model.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        target: TensorRT version to predict for. With ``tensorrt-rtx``, the prediction is always
            for TensorRT-RTX.

    Attributes:
        whole: Outcome of the build of the whole model.
        is_ambiguous: Always False, because messages distinguish faults.

    Raises:
        BuilderError: The builder is not on this machine, or the build exceeded the time limit.
    """

    def __init__(self, proto: onnx.ModelProto, builder: str, target: str) -> None:
        self.is_ambiguous = False
        self._builder = builder
        self._target = RTX.name if builder == "tensorrt-rtx" else target
        self._folder = temporary_folder("extract-")
        self._process: CompilerProcess | None = None
        try:
            if builder == "tensorrt-rtx":
                self._process = CompilerProcess("tensorrt_rtx")
            self.whole = self.build(proto)
            if self.whole.status == "timeout":
                raise BuilderError(
                    f"the build of the whole model did not end within {TIMEOUT:g} s; extract from "
                    "a smaller model",
                    code="timeout",
                )
        except BaseException:
            self.close()
            raise

    def describe_behavior(self, hide: Callable[[str], str] | None = None) -> Note:
        """Describe the build of the whole model. `hide` replaces names in the message."""
        builder, status, message = self._builder, self.whole.status, self.whole.message
        if status != "built":
            if hide is not None:
                message = hide(message)
            return Note(
                f"{builder}: {status}" + (f": {message}" if message else ""),
                code="checked-build-saying" if message else "checked-build",
                builder=builder,
                status=status,
                message=message,
            )
        if self.whole.differences:
            differences = sorted(self.whole.differences)
            texts = [f"predicted {predicted}, built {built}" for predicted, built in differences]
            return Note(
                f"{builder}: built, but {', '.join(texts)}",
                code="checked-differences",
                builder=builder,
                differences=differences,
            )
        return Note(f"{builder}: built as predicted", code="checked-as-predicted", builder=builder)

    def build(self, proto: onnx.ModelProto) -> BuildOutcome:
        """Build a model on this machine, and return the outcome."""
        folder = Path(self._folder.name)
        path = folder / "model.onnx"
        write_model(proto, path)  # the file may exceed 2 GB
        model = Model(proto)
        if self._process is not None:
            (folder / "build.log").unlink(missing_ok=True)
            options = BuildOptions(self._builder, timeout=TIMEOUT)
            result = build_with_package(self._process, options, path, folder)
            read_log(model, choose_log_names(model), folder, result)
            built = map_build_to_nodes(result)
        else:
            built = build_model(path, self._builder, timeout=TIMEOUT)
        message = "" if built.status == "built" else _generalize_message(built.message, model)
        return BuildOutcome(
            built.status, message, built.version, self._find_differences(model, built)
        )

    def _find_differences(self, model: Model, built: BuiltModel) -> frozenset[tuple[str, str]]:
        prediction = predict(model, self._target, advice=False)
        if self._builder == "tensorrt-rtx":
            return _find_compiler_differences(prediction, built)
        if built.status != "built" or built.build is None:
            return frozenset()
        from qdqtool.verification.api import verify

        return frozenset(
            (str(m.predicted.get("precision", "")), str(m.built.get("precision", "")))
            for m in verify(model, built.build).mismatches
            if m.kind == MismatchKind.CONVOLUTION
        )

    def has_same_behavior(self, proto: onnx.ModelProto) -> bool:
        """Return whether the build of a model has the outcome of the whole model's build."""
        return self.build(proto).is_same_fault(self.whole)

    def close(self) -> None:
        """End the compiler and remove temporary files."""
        if self._process is not None:
            self._process.close()
        self._folder.cleanup()


def _find_compiler_differences(
    prediction: Prediction, built: BuiltModel
) -> frozenset[tuple[str, str]]:
    if is_status_as_predicted(prediction, built) is False:
        return frozenset({("another status", built.status)})
    if built.status != "built":
        return frozenset()
    return frozenset(
        (
            f"{p.predicted.precision} writing {p.predicted.output}",
            f"{p.built.precision} writing {p.built.output}",
        )
        for p in pair_convolutions(prediction, built.nodes)
        if p.built is not None and p.agrees is False
    )


class CommandCheck:
    """Check that a user's command exits with the same code as for the whole model.

    If a text is given, the command must also print this text.

    The command is split into words as by a shell, but runs without a shell. The path of the model
    replaces ``{}``, or is added as the last argument.

    For smaller models, the time limit is at most five times the time that the whole model took,
    plus a minute. A command that hangs then does not take the whole timeout each time.

    Args:
        proto: The whole model.
        command: Command of the user.
        says: Text that standard output or standard error must contain. It is useful because most
            programs exit with 1 after any error. If empty, the output is not checked.
        timeout: Maximum time of a run, in seconds.

    Attributes:
        is_ambiguous: Whether the command fails for the whole model, and only the exit code is
            checked.

    Raises:
        QdqtoolError: The command is empty, cannot be split or started, exceeds the time limit, or
            does not print the text.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        command: str,
        says: str = "",
        timeout: float = limits.USER_SECONDS,
    ) -> None:
        self._arguments = _split_command(command)
        self._says = says.encode()
        self._folder = temporary_folder("extract-")
        try:
            start = time.monotonic()
            code = self.run(proto, timeout)
            self._timeout = min(
                timeout, _EXTRA_SECONDS + _SECONDS_FACTOR * (time.monotonic() - start)
            )
            if code is None:
                raise QdqtoolError(
                    f"`check`: '{self._arguments[0]}' did not end within {timeout:g} s on the "
                    "whole model; increase `check_timeout`",
                    code="timeout",
                    parameter="check",
                )
            if not self._has_printed_text():
                raise QdqtoolError(
                    f"`says`: the command does not print '{says}' for the whole model (exit code "
                    f"{code}); correct the text, or leave `says` out",
                    code="text-not-printed",
                    parameter="says",
                )
        except BaseException:
            self.close()
            raise
        self.is_ambiguous = code != 0 and not says
        self._code = code

    def describe_behavior(self, hide: Callable[[str], str] | None = None) -> Note:
        """Describe exit code and output for the whole model; with `hide`, without user texts."""
        code, says = self._code, self._says.decode()
        if hide is not None:
            text = f"the command: exit code {code}"
            return Note(text + (", and a text in its output" if says else ""))
        command = self._arguments[0]
        text = f"{command}: exit code {code}"
        if not says:
            return Note(text, code="checked-command", command=command, exit_code=code)
        return Note(
            f"{text}, output contains '{says}'",
            code="checked-command-saying",
            command=command,
            exit_code=code,
            says=says,
        )

    def run(self, proto: onnx.ModelProto, timeout: float) -> int | None:
        """Run the command on a model, and return the exit code; None if it exceeds the time limit.

        Raises:
            QdqtoolError: The command cannot be started.
        """
        path = Path(self._folder.name) / "model.onnx"
        write_model(proto, path)  # the file may exceed 2 GB
        arguments = [argument.replace("{}", str(path)) for argument in self._arguments]
        try:
            if not self._says:
                return run_command(arguments, timeout)
            with self.output.open("wb") as output:
                return run_command(arguments, timeout, output)
        # A command with NUL or an unpaired surrogate causes a ValueError.
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise QdqtoolError(
                f"`check`: {self._arguments[0]!r} cannot be run: {reason}; correct the command",
                code="missing-program" if isinstance(error, FileNotFoundError) else "not-started",
                parameter="check",
            ) from None

    def has_same_behavior(self, proto: onnx.ModelProto) -> bool:
        """Return whether the command exits as for the whole model, and prints the given text."""
        return self.run(proto, self._timeout) == self._code and self._has_printed_text()

    @property
    def output(self) -> Path:
        """File with the output of the last run; not written if no text is required."""
        return Path(self._folder.name) / "output"

    def _has_printed_text(self) -> bool:
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
        """Remove temporary files."""
        self._folder.cleanup()


def _split_command(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise QdqtoolError(
            f"`check` cannot be split into words: {error}; correct the quotes",
            code="wrong-format",
            parameter="check",
        ) from None
    if not arguments:
        raise QdqtoolError(
            "`check` is empty; give a command whose exit code changes when the fault is gone",
            code="empty",
            parameter="check",
        )
    if not any("{}" in argument for argument in arguments):
        arguments.append("{}")
    return arguments


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _generalize_message(message: str, model: Model) -> str:
    """Replace names and numbers in a compiler's message, so that messages can be compared."""
    names = {name for n in model.nodes for name in (n.name, n.proto.name)}
    names.update(model.producers, model.initializers, model.inputs)
    contained = [n for n in names if len(n) > 2 and n in message]
    for name in sorted(contained, key=len, reverse=True):
        message = message.replace(name, "*")
    return " ".join(_NUMBER.sub("#", message).split())
