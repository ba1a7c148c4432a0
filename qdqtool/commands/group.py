"""The click group of all commands, each of which is loaded when it is used."""

from __future__ import annotations

import importlib
from typing import Any

import click

from qdqtool import process
from qdqtool.commands import COMMANDS, overview
from qdqtool.errors import QdqtoolError
from qdqtool.types import TOOL_VERSION


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

    def get_help(self, ctx: click.Context) -> str:
        return overview()


@click.group(cls=LazyGroup, invoke_without_command=True,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(TOOL_VERSION, prog_name="qdqtool")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """The overview is :func:`qdqtool.commands.overview`."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
