"""The command line: one command per verb, each in its own module under qdqtool.commands, loaded when it is used."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import click

from qdqtool import files, outputs, process
from qdqtool.errors import QdqtoolError
from qdqtool.text import Filtered, one_line
from qdqtool.types import TOOL_VERSION

# Module and one-line help are kept here so that `qdqtool --help` imports none of them.
COMMANDS = {
    "insert": "Insert calibrated Q/DQ pairs where TensorRT will use them.",
    "tune": "Find the fastest placement of Q/DQ that keeps its accuracy.",
    "predict": "Say which convolutions TensorRT will run in INT8, and why not.",
    "verify": "Compare the prediction with a real TensorRT build.",
    "compare": "Show what differs between two models, builds, or a model and build.",
    "report": "Write one HTML page: the network as a graph, tables and plots.",
    "fix": "Apply the fixes that need no new data to a Q/DQ model.",
    "extract": "Cut out the smallest model that still shows a finding.",
    "explain": "Explain a finding code or a TensorRT error message.",
    "log": "Summarize a TensorRT build log.",
    "gpus": "List the GPUs that times can be estimated for.",
    "engine": "Per-layer precision, memory, MACs and time of a built engine.",
    "build": "Build a model with a TensorRT found on this machine.",
    "demo": "Insert, predict and verify on an embedded YOLOv8-style model.",
}


class LazyGroup(click.Group):
    """Loads the module of a command only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"qdqtool.commands.{cmd_name}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "; see 'qdqtool --help'"
            raise click.UsageError(f"there is no command '{args[0]}'{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:  # click would take it for Ctrl-C
            raise QdqtoolError(f"a file ended too soon ({error or 'no more data'}); copy it again") from error
        except KeyboardInterrupt:
            raise process.Stopped(process.INTERRUPTED) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        formatter.write("\nqdqtool COMMAND --help lists its options, with examples.\n")


@click.group(cls=LazyGroup, invoke_without_command=True,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(TOOL_VERSION, prog_name="qdqtool")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """INT8 for TensorRT without surprises, and without a GPU.

    Exit codes: 0 done (and, for verify, everything agreed); 1 the answer is "no"; 2 bad input or usage.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _fail(message: str, code: int) -> int:
    stop = process.stopped()
    if stop is not None:
        message, code = stop.message, stop.code
    with suppress(OSError, ValueError):  # nobody may be there to read it; the exit code says it too
        print(f"qdqtool: {one_line(message)}", file=sys.stderr)
    return code


@contextmanager
def _filtered() -> Iterator[None]:
    """Puts the filter of :mod:`qdqtool.text` over everything that is printed."""
    out = sys.stdout if sys.stdout is not None else process.ClosedOutput()
    error = sys.stderr if sys.stderr is not None else io.StringIO()  # nobody reads it; the exit code tells
    with redirect_stdout(Filtered(out)), redirect_stderr(Filtered(error)):
        yield


def run(args: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code; every expected error ends as one line on stderr."""
    with _filtered(), warnings.catch_warnings():
        if not sys.warnoptions:  # numpy's remarks on damaged numbers tell users nothing; who wants them asks Python
            warnings.simplefilter("ignore")
        return _run(args)


def _run(args: list[str] | None) -> int:
    try:
        with files.watch(), outputs.together():
            result: Any = cli.main(args=args, prog_name="qdqtool", standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
    except SystemExit:  # how click ends when nobody reads stdout any more; that is no "no"
        return 0
    except process.Stopped as stop:
        return _fail(stop.message, stop.code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail(process.Stopped(process.INTERRUPTED).message, process.INTERRUPTED)
    except click.UsageError as error:
        hint = f" (see 'qdqtool {error.ctx.info_name} --help')" if error.ctx and error.ctx.parent else ""
        return _fail(error.format_message() + hint, 2)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except QdqtoolError as error:
        from qdqtool.render.output import as_options

        return _fail(as_options(str(error)), 2)
    except BrokenPipeError:
        process.silence_stdout()
        return 0
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{error.strerror or error}", 2)
    except MemoryError:
        return _fail("out of memory; use a smaller input, or close other programs", 2)
    except RecursionError:
        return _fail("the input is nested too deeply", 2)
    except Exception:  # a defect of ours; exit code 1 would read as an answer
        if process.stopped() is not None:
            return _fail("", 2)
        import traceback

        traceback.print_exc()
        return _fail("internal error, please report it with the lines above", 2)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the `qdqtool` script."""
    try:
        process.prepare()
        code = run()
    except (KeyboardInterrupt, process.Stopped):  # before or behind what `run` answers for
        code = process.INTERRUPTED
    sys.exit(process.finish(code))


if __name__ == "__main__":
    main()
