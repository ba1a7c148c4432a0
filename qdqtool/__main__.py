"""Entry point of the `qdqtool` script. For speed, `qdqtool --help` imports no command."""

from __future__ import annotations

import gc
import os
import sys

OBJECTS_BETWEEN_COLLECTIONS = 500_000  # garbage collection of this many takes about 0.1 s


def main() -> None:
    """Run the command line, and exit with its exit code."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)  # imports create many objects, but no garbage
    try:
        completing = "_QDQTOOL_COMPLETE" in os.environ  # shell completion
        if not completing and sys.argv[1:] in ([], ["-h"], ["--help"]) and sys.stdout is not None:
            _print_overview()
        from qdqtool.commands.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.exit(130)


def _print_overview() -> None:
    from qdqtool.commands import process, render_overview
    from qdqtool.util.process import silence_stdout

    try:
        print(render_overview())
    except BrokenPipeError:  # the reader of the pipe has ended
        silence_stdout()
    except OSError as error:
        sys.stderr.write(f"qdqtool: standard output: {error.strerror}\n")
        sys.exit(2)
    process.exit_process(0)


if __name__ == "__main__":
    main()
