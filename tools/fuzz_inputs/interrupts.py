"""Press Ctrl-C at random moments.

``python -m tools.fuzz_inputs.interrupts [--trials 1000] [--seed S]``.

The moment is between the first line of ``main`` and the usual end of the command. The exit code
must be 130.
"""

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qdqtool.util.process import INTERRUPTED
from tools.growth.families import FAMILIES

_START = "import sys; from qdqtool.__main__ import main; print('begun', file=sys.__stdout__, flush=True); main()"
COMMANDS = {
    "predict": ("predict", "MODEL", "--format", "json"),
    "fix": ("fix", "MODEL", "-o", "OUT"),
    "extract": ("extract", "MODEL", "--node", "n2", "-o", "OUT"),
    "report": ("report", "MODEL", "-o", "OUT"),
    "compare": ("compare", "MODEL", "MODEL"),
    "help": ("--help",),
}


def trial(command: str, folder: Path, wait: float | None) -> tuple[int, float, str]:
    """Run a command; return its exit code, seconds since the start of ``main``, and stderr.

    Args:
        command: One of :data:`COMMANDS`.
        folder: Folder with ``model.onnx``.
        wait: Seconds from the start of ``main`` to the signal; None for no signal.
    """
    names = {"MODEL": str(folder / "model.onnx"), "OUT": str(folder / "out")}
    with tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *(names.get(w, w) for w in COMMANDS[command])],
            stdout=subprocess.PIPE,
            stderr=error,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        assert process.stdout is not None
        process.stdout.readline()
        begin = time.monotonic()
        if wait is not None:
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
        process.communicate()
        seconds = time.monotonic() - begin
        error.seek(0)
        stderr = error.read().decode("utf-8", "replace")
    left = [p.name for p in folder.iterdir() if p.name not in ("model.onnx", "out")]
    assert not left, f"{left} left behind"
    return process.returncode, seconds, stderr


def right(code: int, stderr: str) -> bool:
    """Return whether a run ended correctly.

    A correct run printed at most one line after the signal, or ended before the signal. During the
    import of a library, any end is correct, because extension modules crash on Ctrl-C.
    """
    if code == -signal.SIGINT and stderr.count("File ") == 1:
        return True  # on a busy computer, the signal may come before the first line of `main`
    if "<frozen importlib" in stderr or "Error calling __set_name__" in stderr:
        return True
    return code in (0, INTERRUPTED) and "Traceback" not in stderr and stderr.count("\n") <= 1


def main() -> int:
    """Run trials, and return 1 if a run did not end correctly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    codes: collections.Counter[int] = collections.Counter()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="qdqtool-interrupt-") as temporary:
        folder = Path(temporary)
        (folder / "model.onnx").write_bytes(FAMILIES["residual"](120).SerializeToString())
        durations = {command: trial(command, folder, None)[1] for command in COMMANDS}
        for number in range(options.trials):
            command = rng.choice(list(COMMANDS))
            wait = rng.random() * durations[command]
            code, _, stderr = trial(command, folder, wait)
            codes[code] += 1
            if not right(code, stderr):
                wrong += 1
                print(
                    f"trial {number}: {command} after {wait:.3f} s: exit code {code}, {stderr[-600:]}",
                    flush=True,
                )
    print(f"{options.trials} trials: exit codes {dict(sorted(codes.items()))}, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
