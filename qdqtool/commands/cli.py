"""The command line: one command per verb, each in its own module under qdqtool.commands, loaded when it is used."""

from __future__ import annotations

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

from qdqtool.commands import COMMANDS, overview, process
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.types import TOOL_VERSION
from qdqtool.util import files
from qdqtool.util.process import INTERRUPTED, silence_stdout
from qdqtool.util.text import brief_repr, cut_middle, one_line

_LONG = re.compile(r"\S{500,}")  # what no name of a file or node should be
_SHOWN = 200  # characters of such a word
_OUT_OF_MEMORY = "out of memory; use a smaller input, or close other programs"


class _Interruption(BaseException):
    """A KeyboardInterrupt on its way through click."""

    def __init__(self, stop: KeyboardInterrupt) -> None:
        super().__init__()
        self.stop = stop


class LazyGroup(click.Group):
    """Loads the module of a command only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"qdqtool.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "; see 'qdqtool --help'"
            raise UsageError(
                f"there is no command '{args[0]}'{hint}", code="unknown-choice", parameter="command"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:  # click would take it for Ctrl-C
            raise QdqtoolError(
                f"a file ended too soon ({error or 'no more data'}); copy it again",
                code="file-damaged",
            ) from error
        except KeyboardInterrupt as stop:  # click would turn it into Abort
            raise _Interruption(stop) from None

    def get_help(self, ctx: click.Context) -> str:
        return overview()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(TOOL_VERSION, prog_name="qdqtool")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """The overview of the commands is :func:`qdqtool.commands.overview`."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _fail(message: str, code: int) -> int:
    with suppress(OSError, ValueError):  # nobody may be there to read it; the exit code says it too
        print(
            f"qdqtool: {_LONG.sub(lambda word: cut_middle(word[0], _SHOWN), one_line(message))}",
            file=sys.stderr,
        )
    return code


def _report_stop(stop: KeyboardInterrupt) -> int:
    return _fail(process.stop_message(stop), getattr(stop, "code", INTERRUPTED))


@contextmanager
def _filtered() -> Iterator[None]:
    """Puts the filter of :mod:`qdqtool.util.text` over everything that is printed."""
    out = sys.stdout if sys.stdout is not None else process.ClosedOutput()
    error = (
        sys.stderr if sys.stderr is not None else io.StringIO()
    )  # nobody reads it; the exit code says it
    with (
        redirect_stdout(process.FilteredStream(out)),
        redirect_stderr(process.FilteredErrorStream(error)),
    ):
        yield


def run(args: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code; every expected error ends as one line on stderr."""
    with _filtered(), warnings.catch_warnings():
        if (
            not sys.warnoptions
        ):  # numpy's remarks on damaged numbers do not help users; who wants them asks Python
            warnings.simplefilter("ignore")
        return _run(args)


def _run(args: list[str] | None) -> int:
    read = files.InputFiles()
    if nameless := next(
        (a for a in args or () if "\0" in a), None
    ):  # click asks the system about names as they are
        return _fail(f"{brief_repr(nameless)}: {files.INVALID_NAME}", 2)
    try:
        with files.record_inputs() as read:
            result: Any = cli.main(args=args, prog_name="qdqtool", standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
    except SystemExit:  # how click ends when nobody reads stdout any more; that is no "no"
        return 0
    except _Interruption as interruption:
        return _report_stop(interruption.stop)
    except click.exceptions.Abort:
        return _report_stop(KeyboardInterrupt())
    except KeyboardInterrupt as stop:
        return _report_stop(stop)
    except click.UsageError as error:
        hint = (
            f" (see 'qdqtool {error.ctx.info_name} --help')"
            if error.ctx and error.ctx.parent
            else ""
        )
        return _fail(error.format_message() + hint, 2)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except QdqtoolError as error:
        from qdqtool.formats.output import as_options

        return _fail(as_options(str(error)), 2)
    except BrokenPipeError:
        silence_stdout()
        return 0
    except OSError as error:
        return _fail(f"{_place(error)}{error.strerror or error}", 2)
    except MemoryError:
        return _fail(_OUT_OF_MEMORY, 2)
    except RecursionError:
        return _fail(str(read.nesting_error()), 2)
    except Exception as error:  # a defect of ours; exit code 1 would read as an answer
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            return _fail(_OUT_OF_MEMORY, 2)
        if _was_importing(error):
            return _fail(
                f"a library cannot be loaded ({str(error)[-160:].strip() or type(error).__name__}): memory is "
                "out, or it has to be installed again",
                2,
            )
        import traceback

        traceback.print_exc()
        return _fail("internal error, please report it with the lines above", 2)
    return result if isinstance(result, int) else 0


def _place(error: OSError) -> str:
    """What an error of the system is about, with a colon; empty where that is not known."""
    if error.filename:
        return f"{error.filename}: "
    try:
        os.getcwd()
    except OSError:
        return "the current folder was deleted: "
    return (
        "standard output: " if error.errno == errno.ENOSPC else ""
    )  # what is written to files names these


def _was_importing(error: BaseException) -> bool:
    """Whether an error came while a module was being loaded; half loaded ones raise other than ImportError too."""
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return isinstance(error, ImportError) or any(f.startswith("<frozen importlib") for f in files)


def main() -> None:
    """Entry point of the `qdqtool` script."""
    try:
        process.prepare()
        code = run()
    except KeyboardInterrupt as stop:  # before or after the block that reports it
        code = getattr(stop, "code", INTERRUPTED)
    except MemoryError:  # while an error was reported
        code = _fail(_OUT_OF_MEMORY, 2)
    process.exit_process(code)


if __name__ == "__main__":
    main()
