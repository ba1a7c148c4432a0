import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import mutants

# find_spec does not import it: importing takes a second.
pytestmark = pytest.mark.skipif(find_spec("cosmic_ray") is None, reason="needs qdqtool[mutants]")

SOURCE = """\
@frozen(slots=True)
def small(x: int | None, names: tuple[str, ...] = ()) -> bool:
    assert x is not None
    return x <= 3 and "a" not in names
"""


def test_mutants_seed_selects_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decorators, assertions and annotations are not changed, and each place is changed once."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import use_db

    (tmp_path / "own.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "CONFIG", str(mutants.ROOT / mutants.CONFIG))
    samples = []
    for count in (2, 2, 99):
        with use_db(str(tmp_path / "session.sqlite")) as db:
            init([tmp_path / "own.py"], db, {})
            places = mutants.sample(db, count, random.Random(1))
            assert places == 3  # the comparison, its number, `and`
            samples.append(sorted(i.mutations[0].start_pos for i in db.work_items))
    assert samples[0] == samples[1] and len(samples[0]) == 2 and len(set(samples[2])) == 3
    assert {line for line, _ in samples[2]} == {4}
