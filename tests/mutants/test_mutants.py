"""The mutants are what they are said to be, and a test that holds a rule kills them."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="needs qdqtool[mutants]")

from tests.mutants.sample import draw, mutants_of
from tests.mutants.trial import Trials, changed_lines, copy_of, mirrored_tests, statement_at

SOURCE = '''\
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import os


def small(x: int, names: tuple[str, ...] = ()) -> bool:
    assert x is not None
    return x <= 3 and "a" not in names
'''
TESTS = """\
from calibration.own import small

def test_small():
    assert small(3)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "calibration").mkdir(parents=True)
    (root / "tests" / "calibration").mkdir(parents=True)
    (root / "calibration" / "own.py").write_text(SOURCE)
    (root / "tests" / "calibration" / "test_own.py").write_text(TESTS)
    (root / "tests" / "calibration" / "test_another.py").write_text("def test_nothing(): pass\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return copy_of(root, tmp_path / "tree")


def test_places(tree: Path) -> None:
    """Neither assertions nor what is for type checkers; each place with all that can be done to it."""
    places = mutants_of(tree, "calibration/own.py")
    changes = {changed_lines(tree, m)[1].replace("  ", " ") for place in places for m in place}
    assert changes == {
        'return x < 3 and "a" not in names', 'return x > 3 and "a" not in names', 'return x <= 4 and "a" not in names',
        'return x <= 2 and "a" not in names', 'return x <= 3 or "a" not in names', 'return x <= 3 and "a" in names',
    }  # fmt: skip
    assert len(places) == 4  # the comparison, its number, and, not in


def test_the_seed_decides(tree: Path) -> None:
    first, count = draw(tree, "calibration", 3, random.Random(1))
    assert count == 4 and len({(m.line, m.column) for m in first}) == 3
    assert draw(tree, "calibration", 3, random.Random(1))[0] == first
    assert len(draw(tree, "calibration", 99, random.Random(2))[0]) == 4


def test_tests_that_come_by_come_first(tree: Path) -> None:
    assert mirrored_tests(tree, "qdqtool/trt") == []
    trials = Trials(tree, "calibration")
    assert len(trials.took) == 2
    last = mutants_of(tree, "calibration/own.py")[-1][0]
    assert trials.seen_by(last) == ["tests/calibration/test_own.py::test_small"]


def test_a_statement_is_taken_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = [\n    i for i in y\n    if i\n]\nif (x\n        or y):\n    z = 1\nelse:\n    z = 2\n")
    assert [list(statement_at(path, n)) for n in (3, 6, 7, 9)] == [[1, 2, 3, 4], [5, 6], [7], [9]]


def test_what_survives(tree: Path) -> None:
    """The test holds half of the rule; the file is as before afterwards."""
    trials = Trials(tree, "calibration")
    assert trials.pass_unchanged
    said = {}
    for place in mutants_of(tree, "calibration/own.py"):
        for mutant in place:
            said[changed_lines(tree, mutant)[1].replace("  ", " ")] = trials.try_mutant(mutant)[0]
    assert (tree / "calibration" / "own.py").read_text() == SOURCE
    assert {change for change, result in said.items() if result == "survived"} == {
        'return x <= 4 and "a" not in names', 'return x <= 3 or "a" not in names'}  # fmt: skip


def test_a_loop_without_end_is_stopped(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutants.trial.LEAST", 1.0)
    monkeypatch.setattr("tests.mutants.trial.MORE", 0.0)
    (tree / "calibration" / "own.py").write_text(
        "def small(x):\n    n = 0\n    while n < 3:\n        n += 1\n    return True\n")  # fmt: skip
    trials = Trials(tree, "calibration")
    step = next(m for place in mutants_of(tree, "calibration/own.py") for m in place
                if changed_lines(tree, m)[1].replace("  ", " ") == "n += 0")  # fmt: skip
    assert trials.try_mutant(step)[0] == "timeout"
