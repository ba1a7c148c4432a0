"""What must hold for any input of any command: an answer or one line, in time, and nothing changed that was read."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from qdqtool.cli import run
from tests.fuzz_inputs.mutate import mutated
from tests.fuzz_inputs.seeds import COMMANDS, write_seeds

SECONDS = 10.0
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


class Bench:
    """A folder with one whole file of each kind, and the commands that read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_seeds(folder)
        self.seeds = {kind: (folder / kind).read_bytes() for kind in COMMANDS}
        self.others = {p.name for p in folder.iterdir()}

    def case(self, number: int, seed: int) -> tuple[list[str], Path]:
        """The command line of a number, with its mutated file written."""
        rng = random.Random(seed * 1_000_003 + number)
        kind = rng.choice(list(COMMANDS))
        file = self.folder / f"mutated-{kind}"
        file.write_bytes(mutated(self.seeds[kind], kind, rng))
        names = {"FILE": str(file), "OUT": str(self.folder / "out"), **{k: str(self.folder / k) for k in COMMANDS}}
        return [names.get(word, word) for word in rng.choice(COMMANDS[kind])], file

    def check(self, number: int, seed: int) -> int:
        """Runs a case in this process; its exit code.

        Raises:
            AssertionError: Something does not hold.
        """
        args, file = self.case(number, seed)
        before = self._state(file)
        out, error = io.StringIO(), io.StringIO()
        started = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = run(args)
        self._judge(args, code, out.getvalue(), error.getvalue(), time.process_time() - started, before, file)
        return code

    def check_process(self, number: int, seed: int) -> int:
        """Runs a case as a process of its own."""
        args, file = self.case(number, seed)
        before = self._state(file)
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "qdqtool", *args], capture_output=True, timeout=300, check=False)
        out, error = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        self._judge(args, done.returncode, out, error, min(time.monotonic() - started, SECONDS), before, file)
        return done.returncode

    def _state(self, file: Path) -> dict[str, str]:
        names = [n for n in (*self.others, file.name) if "statistics" not in n]  # a cache is replaced
        return {n: hashlib.sha1((self.folder / n).read_bytes()).hexdigest() for n in names}

    def _judge(
        self, args: list[str], code: int, out: str, error: str, seconds: float, before: dict[str, str], file: Path
    ) -> None:
        what = f"{' '.join(args)}: exit code {code}, {error[-2000:]}"
        assert code in (0, 1, 2), what
        assert "Traceback" not in error and "internal error" not in error, what
        assert "pass " not in error or " failed (" not in error, what
        assert seconds <= SECONDS, f"{seconds:.1f} s: {what}"
        assert not _HIDDEN.search(out + error), what
        if code == 2 and not out:
            assert len(error.strip().splitlines()) == 1, what
        if "json" in args and out:
            json.loads(out)
        left = {p.name for p in self.folder.iterdir()} - self.others - {"out", "out.data"}
        left = {name for name in left if not name.startswith("mutated-")}
        assert not left, f"{left}: {what}"
        assert self._state(file) == before, f"changed what was read: {what}"
        for name in ("out", "out.data"):
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        file.unlink()
