"""Where the `qdqtool` script begins: the overview of the commands takes nothing of what they need."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `qdqtool` script."""
    try:
        completing = "_QDQTOOL_COMPLETE" in os.environ  # click answers the shell
        if not completing and sys.argv[1:] in ([], ["-h"], ["--help"]) and sys.stdout is not None:
            _overview()
        from qdqtool.commands.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would end Python while it ends, by the signal
        sys.exit(130)


def _overview() -> None:
    from qdqtool.base import process
    from qdqtool.commands import overview

    try:
        print(overview())
    except BrokenPipeError:  # nobody reads on
        process.silence_stdout()
    except OSError:
        sys.exit(2)
    sys.exit(process.finish(0))


if __name__ == "__main__":
    main()
