"""The command line: loads the module of a command, runs it, and reports its errors."""

import errno
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import click

from qdqtool.commands import COMMANDS, process, render_overview
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.util import files
from qdqtool.util.process import INTERRUPTED, restore_gc, silence_stdout
from qdqtool.util.text import brief_repr, cut_middle, one_line
from qdqtool.version import TOOL_VERSION

_LONG_WORD = re.compile(r"\S{500,}")  # longer than the usual names of files and nodes
_MAX_WORD = 200  # maximum number of printed characters of a long word
_OUT_OF_MEMORY = "out of memory; use a smaller input, or close other programs"
# Texts in errors other than MemoryError that show a lack of memory: of Python's threads, of
# onnxruntime, and of protobuf.
_OUT_OF_MEMORY_TEXTS = ("start new thread", "Arena alloc failed", "bad_alloc")


class _WrappedInterrupt(BaseException):
    """Exception that replaces a KeyboardInterrupt, because click would catch the latter.

    The KeyboardInterrupt is the cause of the exception.
    """


# Commands by the names that other tools use for them.
_SYNONYMS = {
    "quantize": "insert",
    "quantise": "insert",
    "calibrate": "insert",
    "version": "--version",
    "diff": "compare",
    "repair": "fix",
    "analyze": "predict",
}


class LazyGroup(click.Group):
    """Group that imports the module of a command only when the command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if it is unknown."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"qdqtool.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does. The error for an unknown name suggests a command."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = _SYNONYMS.get(args[0].lower()) or (near[0] if near else "")
            hint = f"; did you mean '{meant}'?" if meant else "; see 'qdqtool --help'"
            raise UsageError(
                f"unknown command '{args[0]}'{hint}", code="unknown-choice", parameter="command"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke a command. click would turn KeyboardInterrupt and EOFError into Abort."""
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise QdqtoolError(
                f"an input file is truncated ({error or 'no more data'}); copy the input "
                "files again",
                code="file-damaged",
            ) from error
        except KeyboardInterrupt as stop:
            raise _WrappedInterrupt from stop

    def get_help(self, ctx: click.Context) -> str:
        """Return the overview of the commands."""
        return render_overview()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(TOOL_VERSION, prog_name="qdqtool")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Print the overview if no command is given."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _print_error(message: str, code: int) -> int:
    line = _LONG_WORD.sub(lambda word: cut_middle(word[0], _MAX_WORD), one_line(message))
    with suppress(OSError, ValueError):  # stderr may be closed
        print(f"qdqtool: {line}", file=sys.stderr)
    return code


@contextmanager
def _filter_streams() -> Iterator[None]:
    """Replace hidden characters in everything that is printed inside the block."""
    out = sys.stdout if sys.stdout is not None else process.ClosedOutput()
    error = sys.stderr if sys.stderr is not None else io.StringIO()
    with (
        redirect_stdout(process.FilteredStream(out)),
        redirect_stderr(process.FilteredErrorStream(error)),
    ):
        yield


def run(args: list[str]) -> int:
    """Run the command line in a process that continues, and return the exit code.

    An expected error is printed as one line on stderr. Garbage collection, which a command may stop
    until the process ends, is started again.
    """
    with restore_gc():
        return _run_filtered(args)


def _run_filtered(args: list[str] | None) -> int:
    with _filter_streams(), warnings.catch_warnings():
        if not sys.warnoptions:  # not if the user requested warnings (python -W)
            warnings.simplefilter("ignore")
        return _run_and_report(args)


def _run_and_report(args: list[str] | None) -> int:
    inputs = files.InputFiles()
    invalid = next((a for a in args or () if "\0" in a), None)
    if invalid is not None:  # the operating system rejects NUL in names
        return _print_error(f"{brief_repr(invalid)}: {files.INVALID_NAME}", 2)
    try:
        with files.record_inputs() as inputs:
            result: Any = cli.main(args=args, prog_name="qdqtool", standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
    except SystemExit:  # click exits with 1 if stdout is closed, but 1 means that a check failed
        return 0
    except (_WrappedInterrupt, click.exceptions.Abort, KeyboardInterrupt) as error:
        stop = error.__cause__ if isinstance(error, _WrappedInterrupt) else error
        return _print_error(process.stop_message(stop), getattr(stop, "code", INTERRUPTED))
    except BrokenPipeError:
        silence_stdout()
        return 0
    except Exception as error:
        message = _describe_error(error, inputs)
        if message is None:  # a defect of the program
            import traceback

            traceback.print_exc()
            message = "internal error, please report it with the lines above"
        return _print_error(message, 2)
    return result if isinstance(result, int) else 0


def _describe_error(error: Exception, inputs: files.InputFiles) -> str | None:
    """Return the message for an expected error; None if the error is a defect of the program."""
    if isinstance(error, click.ClickException):
        return _describe_click_error(error)
    if isinstance(error, QdqtoolError):
        from qdqtool.formats.output import as_options

        return as_options(str(error))
    if isinstance(error, OSError):
        return f"{_error_location(error)}{error.strerror or error}"
    if isinstance(error, RecursionError):
        return str(inputs.nesting_error())
    if isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return _OUT_OF_MEMORY
    if _is_import_failure(error):
        return (
            f"a library cannot be loaded ({str(error)[-160:].strip() or type(error).__name__}); "
            "free memory, or install the library again"
        )
    return None


def _describe_click_error(error: click.ClickException) -> str:
    """Return the message, with a reference to the help of the command that was used wrongly."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        message = _describe_unknown_option(error) or message
    if context is None or context.parent is None or "see 'qdqtool" in message:
        return message
    return f"{message} (see 'qdqtool {context.info_name} --help')"


def _describe_unknown_option(error: click.NoSuchOption) -> str:
    having = []
    for name in COMMANDS:
        command = importlib.import_module(f"qdqtool.commands.{name}").command
        if any(error.option_name in parameter.opts for parameter in command.params):
            having.append(name)
    if not having:
        return ""
    advice = ""
    parameters = error.ctx.command.params if error.ctx is not None else []
    if error.option_name == "--calib":
        advice = "For the accuracy, use 'qdqtool compare --calib'. "
    elif error.option_name == "--strongly-typed" and any(p.name == "target" for p in parameters):
        from qdqtool.trt.targets import DEFAULT_TARGET, STRONGLY_TYPED

        advice = f"Use '--target {DEFAULT_TARGET}{STRONGLY_TYPED}'. "
    return (
        f"No such option '{error.option_name}'. {advice}Commands with this option: "
        f"{', '.join(having)}"
    )


def _error_location(error: OSError) -> str:
    if error.filename:
        return f"{error.filename}: "
    try:
        os.getcwd()
    except OSError:
        return "the current folder was deleted: "
    # An error that concerns a file contains the file name. Without a file name, the error "no space
    # left" is therefore from standard output.
    return "standard output: " if error.errno == errno.ENOSPC else ""


def _is_import_failure(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        trace = trace.tb_next
    return isinstance(error, ImportError)


def main() -> None:
    """Run the `qdqtool` script."""
    try:
        process.set_up_process()
        code = _run_filtered(None)
    except KeyboardInterrupt as stop:  # Ctrl-C before or after the command
        code = getattr(stop, "code", INTERRUPTED)
    except MemoryError:  # there was too little memory to report an error
        code = _print_error(_OUT_OF_MEMORY, 2)
    process.exit_process(code)
