"""`python -m tools.fuzz_inputs.interrupts [--trials 1000] [--seed S]`: Ctrl-C at random moments ends with 130.

The moment lies anywhere from the first line of ``main`` to the end that the command takes undisturbed.
"""

import argparse
import collections
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qdqtool.base.process import INTERRUPTED
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
    """One run; exit code, seconds since ``main`` began, and what it said on stderr.

    Args:
        command: One of :data:`COMMANDS`.
        folder: With ``model.onnx``.
        wait: Seconds from the beginning of ``main`` to the signal; None: no signal.
    """
    names = {"MODEL": str(folder / "model.onnx"), "OUT": str(folder / "out")}
    with tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *(names.get(w, w) for w in COMMANDS[command])],
            stdout=subprocess.PIPE,
            stderr=error,
        )
        assert process.stdout is not None
        process.stdout.readline()
        begun = time.monotonic()
        if wait is not None:
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
        process.communicate()
        seconds = time.monotonic() - begun
        error.seek(0)
        said = error.read().decode("utf-8", "replace")
    left = [p.name for p in folder.iterdir() if p.name not in ("model.onnx", "out")]
    assert not left, f"{left} left behind"
    return process.returncode, seconds, said


def right(code: int, said: str) -> bool:
    """Whether a run ended as it may: interrupted with at most one line, or done before the signal came."""
    if code == -signal.SIGINT and said.count("File ") == 1:
        return True  # on a busy machine it came between what says that `main` begins, and its first line
    return code in (0, INTERRUPTED) and "Traceback" not in said and said.count("\n") <= 1


def main() -> int:
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
        takes = {command: trial(command, folder, None)[1] for command in COMMANDS}
        for number in range(options.trials):
            command = rng.choice(list(COMMANDS))
            wait = rng.random() * takes[command]
            code, _, said = trial(command, folder, wait)
            codes[code] += 1
            if not right(code, said):
                wrong += 1
                print(
                    f"trial {number}: {command} after {wait:.3f} s: exit code {code}, {said[-600:]}",
                    flush=True,
                )
    print(f"{options.trials} trials: exit codes {dict(sorted(codes.items()))}, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
