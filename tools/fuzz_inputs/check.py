"""Check the rules for all inputs of all commands.

A command prints an answer or an error of one line, ends within SECONDS, and does not change its
inputs.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qdqtool.commands.cli import run
from qdqtool.util.process import INTERRUPTED
from tools.fuzz_inputs.mutate import mutated
from tools.fuzz_inputs.seeds import COMMANDS, KINDS, PROGRESS, write_seeds

SECONDS = 10.0  # of processor time
MEMORY_MB = 1000
State = dict[str, tuple[int, ...]]
_OUTPUTS = {"OUT": "out", "MORE": "more"}
LEFT = {*_OUTPUTS.values(), "out.data", "out.tuning"}
_REPLACED = ("statistics.npz", "state.tuning")  # files that commands read and replace
_ARGUMENT = 100_000  # bytes of an argument; Linux accepts 128 KB
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


def _reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not a JSON number")


class Bench:
    """Folder with a valid file of each kind, and the commands that read these files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_seeds(folder)
        self.seeds = {kind: (folder / kind).read_bytes() for kind in COMMANDS}
        self.others = {p.name for p in folder.iterdir()}

    def case(self, number: int, seed: int) -> tuple[list[str], Path]:
        """Write the damaged file of a case, and return the command line and the file."""
        rng = random.Random(seed * 1_000_003 + number)
        kind = rng.choice(KINDS)
        file = self.folder / f"mutated-{kind}"
        data = mutated(self.seeds[kind], kind, rng)
        file.write_bytes(data)
        names = {
            "FILE": str(file),
            **{word: str(self.folder / name) for word, name in _OUTPUTS.items()},
            "TEXT": data[:_ARGUMENT].replace(b"\0", b"").decode("utf-8", "surrogateescape"),
            **{k: str(self.folder / k) for k in COMMANDS},
        }
        return [names.get(word, word) for word in rng.choice(COMMANDS[kind])], file

    def check(self, number: int, seed: int) -> int:
        """Run a case in this process, and return its exit code.

        Raises:
            AssertionError: A rule is broken.
        """
        args, file = self.case(number, seed)
        before = self._state(file)
        out, error = io.StringIO(), io.StringIO()
        started = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = run(args)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        self._check_result(
            args,
            code,
            out.getvalue(),
            error.getvalue(),
            time.process_time() - started,
            before,
            file,
        )
        return code

    def check_process(self, number: int, seed: int) -> int:
        """Run a case in a new process, and return its exit code."""
        args, file = self.case(number, seed)
        before = self._state(file)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
            process = subprocess.Popen(
                [sys.executable, "-m", "qdqtool", *args], stdout=out, stderr=error
            )
            _, status, used = os.wait4(process.pid, 0)
            code = process.returncode = os.waitstatus_to_exitcode(status)
            streams = []
            for stream in (out, error):
                stream.seek(0)
                streams.append(stream.read().decode("utf-8", "replace"))
        self._check_result(args, code, *streams, used.ru_utime + used.ru_stime, before, file)
        assert used.ru_maxrss <= MEMORY_MB << 10, f"{used.ru_maxrss >> 10} MB: {' '.join(args)}"
        return code

    def _state(self, file: Path) -> State:
        """Return the metadata that changes if a file is changed or replaced.

        Comparing the contents of all files would take too long.
        """
        stats = {
            n: os.lstat(self.folder / n)
            for n in (*self.others, file.name)
            if not n.endswith(_REPLACED)
        }
        return {n: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats.items()}

    def _check_result(
        self,
        args: list[str],
        code: int,
        out: str,
        error: str,
        seconds: float,
        before: State,
        file: Path,
    ) -> None:
        context = f"{' '.join(args)}: exit code {code}, {error[-2000:]}"
        assert code in (0, 1, 2), context
        assert "Traceback" not in error and "internal error" not in error, context
        assert "pass " not in error or " failed (" not in error, context
        assert seconds <= SECONDS, f"{seconds:.1f} s: {context}"
        assert not _HIDDEN.search(out + error), context
        if code == 2 and not out and not (self.folder / "out").exists():
            lines = [line for line in error.strip().splitlines() if not line.startswith(PROGRESS)]
            assert len(lines) == 1, context
        if "json" in args and out:
            json.loads(out, parse_constant=_reject_constant)
        left = {p.name for p in self.folder.iterdir()} - self.others - LEFT
        left = {name for name in left if not name.startswith("mutated-")}
        assert not left, f"{left}: {context}"
        assert self._state(file) == before, f"changed an input: {context}"
        for name in LEFT:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        file.unlink()
