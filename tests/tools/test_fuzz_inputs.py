"""Thirty damaged inputs.

`.ci/run` runs the fuzzer for a minute, and `make fuzz-inputs` with fifty thousand inputs.
"""

import contextlib
import io
import json
import random

import pytest

from qdqtool.commands.cli import run
from tests.slow import slow_after
from tools.fuzz_inputs import mutate
from tools.fuzz_inputs.check import LEFT, Bench
from tools.fuzz_inputs.seeds import COMMANDS


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def test_fuzz_inputs_mutated_json_has_a_size_limit() -> None:
    """Without the limit, 3,000 copies of 3,000 copies of a list take 22 GB."""
    data = json.dumps([[[[["a" * 100]]]]]).encode()
    sizes = [len(mutate.mutate_json(data, random.Random(seed))) for seed in (40, 80, 189)]
    assert all(mutate.MAX_BYTES < size < mutate.MAX_BYTES + 100_000 for size in sizes)


@pytest.mark.parametrize(("some", "refused"), slow_after(1, [(slice(1), 0), (slice(1, None), 9)]))
def test_fuzz_inputs_valid_files_are_read(bench: Bench, some: slice, refused: int) -> None:
    """Commands read the undamaged files, or mutations would only test the first check.

    Nine commands reject their file: logs, layer table, float model and tuning belong to another
    network, and a name is not an assumption, a compute capability, a pass or a path.
    """
    codes = []
    for kind, commands in COMMANDS.items():
        names = {"FILE": kind, "OUT": "out", "MORE": "more", **{k: k for k in COMMANDS}}
        text = (bench.folder / kind).read_text("latin-1")
        for words in commands[some]:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                arguments = [
                    text if w == "TEXT" else str(bench.folder / names[w]) if w in names else w
                    for w in words
                ]
                codes.append(run(arguments))
    for name in LEFT:
        (bench.folder / name).unlink(missing_ok=True)
    assert codes.count(0) >= len(codes) - refused


@pytest.mark.parametrize("part", slow_after(1, range(2)))
def test_fuzz_inputs_damaged_files_are_handled(bench: Bench, part: int) -> None:
    codes = [bench.check(number, 7) for number in range(part * 30, part * 30 + 30)]
    for file in bench.folder.glob("mutated-*"):
        file.unlink()
    assert 0 in codes and 2 in codes
