"""A recipe makes the model that ``qdqtool.insert`` makes of the same choices."""

import gzip
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import qdqtool
from qdqtool.base import budgets
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.tuning import metrics as limited
from qdqtool.tuning.configuration import Configuration, Recipe, first_change
from qdqtool.tuning.measure import Row
from qdqtool.tuning.measurements import SWEEP, WHOLE, Store
from qdqtool.tuning.metrics import Outputs, UserMetric
from tests.insertion.nets import check, images, run
from tests.raising import raises
from tests.tuning.nets import branchy, planner_of


def test_recipes() -> None:
    data = images(4, 16, 16)
    planner = planner_of(branchy(), data)
    for floats in ((), ("c1", "c4"), ("add",), ("c0", "c6")):
        made, _ = planner.plan(Configuration(floats=frozenset(floats))).recipe.build(planner.model)
        proto = made.proto
        inserted = qdqtool.insert(
            branchy(),
            data,
            method="mse",
            exclude=[f"^{n}$" for n in floats],
            residual="skip",
            losses=0,
            predict=False,
        )
        check(proto)
        assert [(n.op_type, n.name, *n.input) for n in proto.graph.node] == [
            (n.op_type, n.name, *n.input) for n in inserted.model.graph.node
        ]
        assert np.array_equal(run(proto, data[0])[0], run(inserted.model, data[0])[0])
    changed = planner.plan(Configuration(methods=frozenset({("add.out", "max")}))).recipe
    inserted = qdqtool.insert(
        branchy(),
        data,
        method="mse",
        method_for=[("^add.out$", "max")],
        residual="skip",
        losses=0,
        predict=False,
    )
    wanted = {q.tensor: q.scale for q in inserted.activations}
    assert {p.tensor: p.scale for p in changed.pairs} == wanted
    apart = planner.plan(Configuration(apart=frozenset({"x"}))).recipe
    assert {p.group for p in apart.pairs if p.tensor == "x"} == {None}


def test_keys_and_first_changes() -> None:
    planner = planner_of(branchy(), images(2, 16, 16))
    base, other = (planner.plan(Configuration(floats=frozenset(f))).recipe for f in ((), ("c3",)))
    back: Recipe = pickle.loads(pickle.dumps(base))
    assert back == base and back.key == base.key != other.key
    names = [n.name for n in planner.model.ordered]
    for node in ("c0", "c2", "add", "c6"):
        other = planner.plan(Configuration(floats=frozenset({node}))).recipe
        assert names[first_change(planner.model, base, other)] == node
    assert first_change(planner.model, base, base) == len(names)


IDENTITY = {"model": "m", "images": "i", "settings": "s"}
ROWS = {"a": {0: Row(0.1), 3: None}, "b": {1: Row(1 / 3, [{"scores": [0.25]}])}}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    store = Store(tmp_path / "t.tuning", IDENTITY)
    store.add(WHOLE, ROWS)
    store.add(SWEEP, {"c": {0: Row(5e-324)}})
    store.save()
    return tmp_path / "t.tuning"


def test_what_was_kept_comes_back_bit_by_bit(kept: Path, tmp_path: Path) -> None:
    store = Store(kept, IDENTITY)
    assert store.rows[WHOLE] == ROWS
    assert store.known(SWEEP, "c")[0] == Row(5e-324)
    assert store.known(SWEEP, "a") == {}
    assert store.resumed == 4
    before = kept.stat().st_mtime_ns
    Store(kept, IDENTITY).save()
    assert kept.stat().st_mtime_ns == before
    store = Store(None, IDENTITY)
    store.add(WHOLE, ROWS)
    store.save()
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("name", "word"), [("model", "model"), ("images", "images"), ("settings", "setting")]
)
def test_of_another_tuning_is_refused(kept: Path, name: str, word: str) -> None:
    with raises(DataError, f"Store._read {word} `state`"):
        Store(kept, {**IDENTITY, name: "other"})


def test_bombs_and_other_versions(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(gzip.decompress(kept.read_bytes()))
    kept.write_bytes(gzip.compress(json.dumps({**data, "tool": "0.0.1"}).encode()))
    with raises(DataError, "Store._read another"):
        Store(kept, IDENTITY)
    monkeypatch.setattr(budgets, "TUNING_STATE", 1000)
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(DataError, match="the limit"):
        Store(path, IDENTITY)


def _packed(data: bytes) -> bytes:
    """Without the time of day: every process of a test run has to collect the same names."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\x1f\x8b\x08broken",
        _packed(b"[]"),
        _packed(b'{"schema": 1}'),
        _packed(b"[" * 100_000),
        _packed(b"\xff\xfe"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        Store(path, IDENTITY)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "rows",
    [
        3,
        {"sweep": 1, "whole": {}},
        {"sweep": {"a": {"x": [1, None]}}, "whole": {}},
        {"sweep": {"a": {"0": ["1", None]}}, "whole": {}},
        {"sweep": {}},
        {"sweep": {}, "whole": {"a": {"0": [0.0, 1e308], "1": [0.0, 1e308]}}},
    ],
)
def test_damaged_rows_are_refused(kept: Path, rows: object) -> None:
    data = json.loads(gzip.decompress(kept.read_bytes()))
    kept.write_bytes(gzip.compress(json.dumps({**data, "rows": rows}).encode()))
    with pytest.raises(DataError, match="is damaged"):
        Store(kept, IDENTITY)


SLEEP = "import sys, time; time.sleep(2); open(sys.argv[1], 'w')"
children = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="the system does not list threads' children"
)


def starts(mark: Path) -> Callable[[Outputs, Outputs, str], float]:
    """A metric that waits for a process."""

    def metric(reference: Outputs, outputs: Outputs, image: str) -> float:
        subprocess.run([sys.executable, "-c", SLEEP, str(mark)], check=False)
        return 1.0

    return metric


def test_results_and_errors_pass() -> None:
    assert limited.call_with_timeout(5.0, lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        limited.call_with_timeout(5.0, lambda: 1 / 0)


def test_user_metric_reports_a_timeout() -> None:
    end = threading.Event()

    def wait(*_: object) -> float:
        end.wait(60)
        return 1.0

    metric = UserMetric("m:f", ("o",), wait, seconds=0.05)
    with pytest.raises(QdqtoolError, match=r"m:f: did not end within 0\.05 s on a\.jpg"):
        metric.look({"o": np.zeros(2)}, {"o": np.zeros(2)}, "a.jpg")
    end.set()


def test_cancel_calls_ends_the_wait_for_a_call() -> None:
    started, end = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        end.wait(60)

    def wait() -> None:
        with pytest.raises(limited.CallNotFinished):
            limited.call_with_timeout(60.0, call)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert started.wait(60)
    limited.cancel_calls()
    waiting.join(60)
    assert not waiting.is_alive()
    end.set()
