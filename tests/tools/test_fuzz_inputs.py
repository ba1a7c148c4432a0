"""Thirty mutated inputs.

`.ci/run` takes a minute of others and `make fuzz-inputs` fifty thousand.
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


def test_lists_of_lists_of_lists_are_written_no_further_than_a_file_may_be_long() -> None:
    """Each may be made 3,000 times as long, of which case 3,237 of seed 4511003 took 22 GB."""
    data = json.dumps([[[[["a" * 100]]]]]).encode()
    sizes = [len(mutate._json(data, random.Random(seed))) for seed in (40, 80, 189)]
    assert all(
        mutate.MAX_BYTES < size < mutate.MAX_BYTES + 100_000 for size in sizes
    )  # which is then cut to it


@pytest.mark.parametrize(("some", "refused"), slow_after(1, [(slice(1), 0), (slice(1, None), 9)]))
def test_whole_inputs_are_read(bench: Bench, some: slice, refused: int) -> None:
    """Else the mutations would only ever meet the first check.

    Of each kind the first command, and the others.

    Logs, layer table, float model and tuning are of another network; a name is no --assume, --sm,
    pass or path.
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
                said = [
                    text if w == "TEXT" else str(bench.folder / names[w]) if w in names else w
                    for w in words
                ]
                codes.append(run(said))
    for name in LEFT:
        (bench.folder / name).unlink(missing_ok=True)
    assert codes.count(0) >= len(codes) - refused


@pytest.mark.parametrize("part", slow_after(1, range(2)))
def test_no_input_breaks_a_command(bench: Bench, part: int) -> None:
    codes = [bench.check(number, 7) for number in range(part * 30, part * 30 + 30)]
    for file in bench.folder.glob("mutated-*"):
        file.unlink()
    assert 0 in codes and 2 in codes
