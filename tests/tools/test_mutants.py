"""What `make mutants` draws."""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import mutants

#: Only looked for: reading all tests does not load it.
pytestmark = pytest.mark.skipif(find_spec("cosmic_ray") is None, reason="needs qdqtool[mutants]")

SOURCE = """\
@frozen(slots=True)
def small(x: int | None, names: tuple[str, ...] = ()) -> bool:
    assert x is not None
    return x <= 3 and "a" not in names
"""


def test_the_seed_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a decorator nor an assertion nor an annotation is changed; no place twice."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import use_db

    (tmp_path / "own.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "CONFIG", str(mutants.ROOT / mutants.CONFIG))
    drawn = []
    for count in (2, 2, 99):
        with use_db(str(tmp_path / "session.sqlite")) as db:
            init([tmp_path / "own.py"], db, {})
            assert (
                mutants.sample(db, count, random.Random(1)) == 3
            )  # the comparison, its number, and
            drawn.append(sorted(i.mutations[0].start_pos for i in db.work_items))
    assert drawn[0] == drawn[1] and len(drawn[0]) == 2 and len(set(drawn[2])) == 3
    assert {line for line, _ in drawn[2]} == {4}
