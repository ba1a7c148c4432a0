import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import qdqtool
from qdqtool.accuracy.metrics import CallNotFinished, UserMetric, call_with_timeout, cancel_calls
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.tuning.measure import Measurement
from qdqtool.tuning.planner import Configuration
from qdqtool.tuning.store import MeasurementStore
from qdqtool.util import limits
from tests.errors import has
from tests.insertion.nets import check, images, run
from tests.tuning.nets import branchy, floats, planner_of

DATA = images(4, 16, 16)


def insert(**options: object) -> qdqtool.Insertion:
    fixed = {"method": "mse", "residual": "skip", "losses": 0, "predict": False}
    return qdqtool.insert(branchy(), DATA, **fixed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(), ("c1", "c4"), ("add",), ("c0", "c6")])
def test_recipe_makes_the_model_of_insert(names: tuple[str, ...]) -> None:
    planner = planner_of(branchy(), DATA)
    proto = planner.plan(floats(*names)).recipe.build(planner.model)[0].proto
    inserted = insert(exclude=[f"^{name}$" for name in names]).model
    check(proto)
    assert [(n.op_type, n.name, *n.input) for n in proto.graph.node] == [
        (n.op_type, n.name, *n.input) for n in inserted.graph.node
    ]
    assert np.array_equal(run(proto, DATA[0])[0], run(inserted, DATA[0])[0])


def test_recipe_takes_methods_of_tensors() -> None:
    planner = planner_of(branchy(), DATA)
    recipe = planner.plan(Configuration(methods=frozenset({("add.out", "max")}))).recipe
    scales = {q.tensor: q.scale for q in insert(method_for=[("^add.out$", "max")]).activations}
    assert {p.tensor: p.scale for p in recipe.pairs} == scales


def test_recipe_takes_tensors_out_of_their_group() -> None:
    recipe = planner_of(branchy(), DATA).plan(Configuration(own_scales=frozenset({"x"}))).recipe
    assert {p.group for p in recipe.pairs if p.tensor == "x"} == {None}


# State --------------------------------------------------------------------------------

IDENTITY = {"model": "m", "images": "i", "settings": "s"}
ROWS = {
    "a": {0: Measurement(0.1), 3: None},
    "b": {1: Measurement(1 / 3, [{"scores": [0.25]}]), 2: Measurement(5e-324)},
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    store = MeasurementStore(tmp_path / "t.tuning", IDENTITY)
    store.add(ROWS)
    store.save()
    return tmp_path / "t.tuning"


def pack(data: bytes) -> bytes:
    """Compress without a time stamp, because test ids must be equal in all processes."""
    return gzip.compress(data, mtime=0)


def test_store_reads_rows_bit_by_bit_and_writes_nothing_without_changes(state: Path) -> None:
    store, before = MeasurementStore(state, IDENTITY), state.stat().st_mtime_ns
    store.save()
    assert store.rows == ROWS and store.resumed == 4 and store.measurements("c") == {}
    assert state.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("field", "content", "code"),
    [
        ("model", "other", "different-models"),
        ("images", "other", "different-images"),
        ("settings", "other", "different-settings"),
        ("tool", "other", "wrong-version"),
        ("measurement", "other", "different-methods"),
        ("rows", 3, "file-damaged"),
        ("rows", {"a": 1}, "file-damaged"),
        ("rows", {"a": {"x": [1, None]}}, "file-damaged"),
        ("rows", {"a": {"0": ["1", None]}}, "file-damaged"),
        ("rows", {"a": {"0": [0.0, 1e308], "1": [0.0, 1e308]}}, "file-damaged"),
    ],
)
def test_store_refuses_state_of_another_tuning_and_damaged_rows(
    state: Path, field: str, content: object, code: str
) -> None:
    data = json.loads(gzip.decompress(state.read_bytes()))
    state.write_bytes(pack(json.dumps({**data, field: content}).encode()))
    with pytest.raises(DataError, check=has(code, path=str(state), parameter="state")):
        MeasurementStore(state, IDENTITY)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "", id="empty"),
        pytest.param(b"hello", "", id="text"),
        pytest.param(b"\x1f\x8b\x08broken", "", id="gzip-broken"),
        pytest.param(pack(b"[]"), "", id="list"),
        pytest.param(pack(b'{"schema": 1}'), "", id="schema"),
        pytest.param(pack(b"[" * 100_000), "", id="nested-deeply"),
        pytest.param(pack(b"\xff\xfe"), "", id="not-utf8"),
        pytest.param(pack(bytes(200_001)), "the limit", id="unpacks-to-too-much"),
    ],
)
def test_store_refuses_and_keeps_another_file(
    tmp_path: Path, content: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TUNING_STATE", 200_000)
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}.*{reason}"):
        MeasurementStore(path, IDENTITY)
    assert path.read_bytes() == content


# Metrics with a time limit ------------------------------------------------------------


def test_call_with_timeout_returns_results_and_raises_errors() -> None:
    assert call_with_timeout(60.0, lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(60.0, lambda: 1 / 0)


def test_user_metric_reports_a_timeout() -> None:
    end = threading.Event()

    def wait(*_: object) -> float:
        end.wait(60)
        return 1.0

    metric = UserMetric("m:f", ("o",), wait, seconds=0.05)
    with pytest.raises(QdqtoolError, match=r"m:f: did not end within 0\.05 s on a\.jpg"):
        metric.observe({"o": np.zeros(2)}, {"o": np.zeros(2)}, "a.jpg")
    end.set()


def test_cancel_calls_ends_the_wait_for_a_call() -> None:
    started, end = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(call_with_timeout, 60.0, lambda: (started.set(), end.wait(60)))
        assert started.wait(60)
        cancel_calls()
        assert isinstance(call.exception(60), CallNotFinished)
    end.set()
