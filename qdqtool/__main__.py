"""Where the `qdqtool` script begins: the overview of the commands takes nothing of what they need."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Entry point of the `qdqtool` script."""
    try:
        sys.unraisablehook = _lost
        completing = "_QDQTOOL_COMPLETE" in os.environ  # click answers the shell
        if not completing and sys.argv[1:] in ([], ["-h"], ["--help"]) and sys.stdout is not None:
            _overview()
        from qdqtool.commands.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # another one would end Python while it ends, by the signal
        sys.exit(130)


def _lost(unraisable: sys.UnraisableHookArgs) -> None:
    """Raises Ctrl-C again, soon, that came where Python drops exceptions, as in what it calls when a module was loaded;
    until base/process.py sees to that."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
    elif hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01)


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
