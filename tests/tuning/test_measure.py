"""What is measured, against whole networks run by onnxruntime and errors worked out with numpy."""

import functools
import json
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.dataset import Dataset
from calibration.session import Fetcher
from qdqtool.base import budgets
from qdqtool.commands.demo_run import yolov8n
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.tuning.configuration import Configuration, Recipe
from qdqtool.tuning.measure import Job, Result, Row, Task, local, looked_at, run_task
from qdqtool.tuning.measurements import Measurements, Sets, open_sets
from qdqtool.tuning.metrics import AgreementMap, OutputAgreement, UserMetric, metric_for, resampled
from tests.insertion.nets import Net, images, run
from tests.raising import raises
from tests.tuning.nets import branchy, job_of, planner_of, resnet, segmentation

DATA = images(5, 16, 16)


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of(planner_of(branchy(), DATA), DATA)


@pytest.fixture(scope="module")
def recipes() -> list[Recipe]:
    planner = planner_of(branchy(), DATA)
    choices = [(), ("c6",), ("c0",), ("c3", "c4"), ("add",), ("c5",), ("c2",)]
    return [planner.plan(Configuration(floats=frozenset(c))).recipe for c in choices]


_ROW = {"a": {0: Row(0.5)}}
_NO_MAPPERS: dict[str, Callable[[list[Task]], Any]] = {
    "called None": lambda tasks: None,
    "called int": lambda tasks: 5,
    "called KeyError": lambda tasks: {}["x"],
    "wrong None": lambda tasks: [None],
    "wrong Result": lambda tasks: [Result("s", {"a": {0: 0.5}})],
    "left 0 4": lambda tasks: iter(()),
    "left 1 4": lambda tasks: [Result("s", _ROW)],
    "above t": lambda tasks: [Result("t", {"a": {0: Row(1e200)}})],
    "twice 1 4": lambda tasks: [Result("s", _ROW)] * 2,
    "given t": lambda tasks: [Result("t", {"c": {0: None}})],
    "read ZeroDivisionError": lambda tasks: (1 / 0 for _ in tasks),
}


@pytest.mark.parametrize("case", _NO_MAPPERS)
def test_what_a_mapper_gives_is_looked_at(case: str) -> None:
    tasks = [Task("s", (0, 1), tuple(SimpleNamespace(key=k) for k in "ab"))]  # type: ignore[misc]
    closed: list[str] = []

    def closing() -> Iterator[Any]:
        try:
            yield from _NO_MAPPERS[case](tasks)
        finally:
            closed.append(case)

    word = case.split()[-1]
    for mapper in (lambda job, given: _NO_MAPPERS[case](tasks), lambda job, given: closing()):
        with pytest.raises(QdqtoolError, match=rf"^`mapper.*{word}"):
            list(looked_at(mapper)(None, tasks))  # type: ignore[arg-type]
    assert closed


def test_what_a_mapper_gives_again_or_in_the_end_is_no_fault() -> None:
    """As one does that tries a task twice."""
    tasks = [Task("s", (0, 1), tuple(SimpleNamespace(key=k) for k in "ab"))]  # type: ignore[misc]
    given = [Result("s", {k: {0: None, 1: None}}) for k in "aab"]
    ended: list[bool] = []

    def mapper(job: Job, tasks: list[Task]) -> Iterator[Any]:
        yield from given
        ended.append(True)
        yield None

    assert list(looked_at(mapper)(None, tasks)) == given and ended  # type: ignore[arg-type]


@functools.cache
def output(recipe: Recipe | None, sample: int) -> Any:
    """What the last convolution of the network, or of what a recipe makes of it, gives."""
    proto = branchy() if recipe is None else recipe.build(Model(branchy()))[0].proto
    return run(proto, DATA[sample])[0].astype(np.float64)


def by_hand(recipe: Recipe, sample: int) -> float:
    """Root mean square difference of the last convolution's output, over the float output's standard deviation."""
    wanted, found = output(None, sample), output(recipe, sample)
    return float(np.sqrt(np.mean((wanted - found) ** 2)) / wanted.std())


def test_sweeps_and_whole_runs(job: Job, recipes: list[Recipe]) -> None:
    swept = run_task(job, Task("s", (0, 1, 3), tuple(recipes)))
    whole = run_task(job, Task("w", (0, 1, 3), tuple(recipes), whole=True))
    for recipe in recipes:
        for sample in (0, 1, 3):
            one, other = swept.rows[recipe.key][sample], whole.rows[recipe.key][sample]
            assert one is not None and other is not None
            assert (
                one.error == other.error == pytest.approx(by_hand(recipe, sample), rel=1e-3)
            )  # other kernels
            assert other.evidence == pytest.approx(1.0 - other.error)
    assert "c0.weight" in job.network.weights  # they lie in memory once, for all sessions
    assert job.network.model.proto.ByteSize() < branchy().ByteSize() // 4


def test_outputs_that_nothing_computes() -> None:
    proto = branchy()
    value = onnx.numpy_helper.from_array(np.array([1.0, 2.0], np.float32))
    proto.graph.node.append(onnx.helper.make_node("Constant", [], ["k"], name="k", value=value))
    proto.graph.output.extend(
        onnx.helper.make_tensor_value_info(t, 1, [n]) for t, n in (("c0.bias", 16), ("k", 2))
    )
    planner = planner_of(proto, DATA)
    job, recipe = job_of(planner, DATA), planner.plan(Configuration()).recipe
    row = run_task(job, Task("t", (0,), (recipe,), whole=True)).rows[recipe.key][0]
    assert job.metric.tensors == ("c6.out", "c0.bias", "k") and row is not None
    assert row.evidence == pytest.approx(1.0 - by_hand(recipe, 0) / 3, rel=1e-3)  # constants agree


def with_metric(job: Job, metric: Any) -> Job:
    return Job(job.model, job.images, job.compared, (), metric)


def rows_of(results: Iterable[Result]) -> dict[tuple[str, int], Any]:
    """By candidate and sample; each once."""
    found: dict[tuple[str, int], Any] = {}
    for result in results:
        rows = {(key, number): row for key, by in result.rows.items() for number, row in by.items()}
        assert not found.keys() & rows.keys()
        found |= rows
    return found


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_same_bits_for_any_number_of_workers(
    job: Job, recipes: list[Recipe], workers: int
) -> None:
    tasks = [Task(f"{i} {k}", (i,), tuple(recipes[k::2])) for i in range(5) for k in range(2)]
    wanted = rows_of([run_task(job, Task("all", tuple(range(5)), tuple(recipes)))])
    assert rows_of(local(workers)(job, tasks)) == wanted


def test_modules_and_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job, recipes: list[Recipe]
) -> None:
    (tmp_path / "only_here.py").write_text(
        "def f(reference, outputs, image):\n    return 1.0\n", "utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert metric_for(Model(branchy()), "only_here:f").name == "only_here:f"
    task = Task("t", (1,), tuple(recipes[:3]), whole=True)
    job.network  # noqa: B018 - what is kept for one process stays there
    back: Job = pickle.loads(pickle.dumps(job))
    again: Task = pickle.loads(pickle.dumps(task))
    result: Result = pickle.loads(pickle.dumps(run_task(back, again)))
    assert result == run_task(job, task)


def test_metrics_that_fail_or_write(job: Job, recipes: list[Recipe]) -> None:
    def broken(reference: object, outputs: object, image: str) -> float:
        raise RuntimeError("no labels")

    failing = with_metric(job, UserMetric("m:f", job.metric.tensors, broken))
    tasks = [Task(f"{i}", (i,), tuple(recipes), whole=True) for i in range(5)]
    with raises(QdqtoolError, "UserMetric.look metric m:f RuntimeError"):
        list(local(2)(failing, tasks))

    def rude(reference: dict[str, np.ndarray], outputs: dict[str, np.ndarray], image: str) -> float:
        (wanted,), (found,) = reference.values(), outputs.values()
        value = float(np.abs(wanted - found).mean())
        wanted[:] = found[:] = 0.0
        return value

    metric = UserMetric("m:f", job.metric.tensors, rude)
    one, other = (
        run_task(with_metric(job, metric), Task("t", (0,), candidates, whole=True))
        for candidates in (tuple(recipes), tuple(recipes[::-1]))
    )
    assert one.rows == other.rows


def test_the_float_network_runs_once_for_each_sample(
    job: Job, recipes: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [
        Task(f"{r.key} {i}", (i, i + 1), (r,), whole)
        for r in recipes[:3]
        for i in (0, 2)
        for whole in (True, False)
    ]
    found: list[list[Result]] = []
    asked: list[Any] = []
    kept = OutputAgreement.kept
    monkeypatch.setattr(
        OutputAgreement, "kept", lambda self, outputs: asked.append(1) or kept(self, outputs)
    )
    for room, runs in ((budgets.TUNING_REFERENCES, 4), (0, 2 * len(tasks))):
        monkeypatch.setattr(budgets, "TUNING_REFERENCES", room)
        asked.clear()
        one = with_metric(job, job.metric)
        found.append([run_task(one, task) for task in tasks])
        assert len(asked) == runs
    assert found[0] == found[1]


def test_what_a_change_does_not_reach_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(16, 16)
    x = net.silu("a0", net.conv("c0", "x"))
    one, other = (net.conv(f"e{n}", net.silu(f"a{n}", net.conv(f"c{n}", x)), 16, 8) for n in (1, 2))
    net.output(one)
    proto = net.model()
    proto.graph.output.append(onnx.helper.make_tensor_value_info(other, 1, None))
    planner = planner_of(proto, DATA)
    recipes = tuple(
        planner.plan(Configuration(floats=frozenset(f))).recipe
        for f in ((), ("c1",), ("c2",), ("c0",))
    )
    alone = {
        r.key: run_task(job_of(planner, DATA), Task("t", (0,), (r,))).rows[r.key] for r in recipes
    }
    runs: list[Any] = []
    real = Fetcher.run
    monkeypatch.setattr(Fetcher, "run", lambda self, sample: runs.append(1) or real(self, sample))
    for room in (budgets.TUNING_HELD, 0):
        monkeypatch.setattr(budgets, "TUNING_HELD", room)
        runs.clear()
        assert run_task(job_of(planner, DATA), Task("t", (0,), recipes)).rows == alone
        # All five parts in float, INT8 and with c0 float; c1 and c2 each with what is behind it.
        assert (len(runs) == 3 * 5 + 2 + 2) if room else (len(runs) > 19)


def test_open_sessions_have_a_bound(
    job: Job, recipes: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task("t", (0, 1), tuple(recipes))
    wanted = run_task(job, task)
    room, most = (
        300_000,
        [],
    )  # two of these sessions take 128 KiB each beside their weights of up to 18 KB
    monkeypatch.setattr(budgets, "TUNING_SESSIONS", room)
    again = with_metric(job, job.metric)
    sessions = again.network.sessions
    real = sessions.get
    monkeypatch.setattr(sessions, "get", lambda *a: (real(*a), most.append(sessions.count))[0])
    assert run_task(again, task) == wanted
    assert max(most) == 2 < job.network.sessions.count


def test_metrics_of_outputs() -> None:
    proto = yolov8n(64, classes=3)
    assert metric_for(Model(proto), None) == AgreementMap("output0", 3)
    proto.graph.node.append(
        onnx.helper.make_node("Transpose", ["output0"], ["turned"], name="turn", perm=[0, 2, 1])
    )
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("turned", 1, [1, 84, 7]))
    assert metric_for(Model(proto), None) == AgreementMap("turned", 3, True)
    proto = resnet()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3], np.int64), "k"))
    proto.graph.node.append(
        onnx.helper.make_node("TopK", ["fc.out", "k"], ["best", "which"], name="top")
    )
    del proto.graph.output[:]
    proto.graph.output.append(onnx.helper.make_tensor_value_info("best", 1, [1, 3]))
    found = metric_for(Model(proto), None)
    assert isinstance(found, OutputAgreement) and found.tensors != ("best",)


@pytest.mark.parametrize("make", [branchy, resnet, segmentation])
def test_other_networks_get_output_agreement(make: object) -> None:
    model = Model(make())  # type: ignore[operator]
    assert metric_for(model, None) == OutputAgreement(tuple(model.outputs))


def detections(*boxes: tuple[float, float, float, float, int, float]) -> dict[str, np.ndarray]:
    """An output [1, 4 + 2, n] of boxes given as centre, size, class and score."""
    rows = np.zeros((1, 6, max(len(boxes), 8)), np.float32)
    for i, (x, y, w, h, label, score) in enumerate(boxes):
        rows[0, :4, i] = x, y, w, h
        rows[0, 4 + label, i] = score
    return {"o": rows}


FIRST, SECOND = (50, 50, 20, 20, 0, 0.9), (150, 50, 20, 20, 1, 0.8)


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ([FIRST, SECOND, (200, 50, 9, 9, 1, 0.1)], 1.0),
        # One of two found, exactly: precision 1 up to a recall of a half, which are 51 of 101 points at each overlap.
        ([FIRST], 51 / 101),
        # The other one moved by 2 of 20 pixels: it overlaps by 18 / 22 = 0.818, which counts at 7 of 10 thresholds.
        ([FIRST, (152, 50, 20, 20, 1, 0.8)], (7 * 1.0 + 3 * 51 / 101) / 10),
        ([FIRST, (150, 50, 20, 20, 0, 0.8)], 51 / 101),  # of another class
    ],
)
def test_detections_by_hand(found: list[Any], value: float) -> None:
    metric = AgreementMap("o", 2)
    kept = metric.kept(detections(FIRST, SECOND, (200, 50, 9, 9, 1, 0.1)))
    assert metric.value([metric.look(kept, detections(*found), "a")]) == pytest.approx(value)
    assert math.isnan(metric.value([metric.look(metric.kept(detections()), detections(), "a")]))


def test_values_by_hand() -> None:
    metric = OutputAgreement(("o",))
    wanted, found = (
        np.array([[1.0, 2.0, 3.0, 6.0]], np.float32),
        np.array([[1.0, 2.0, 4.0, 6.0]], np.float32),
    )
    assert metric.look(metric.kept({"o": wanted}), {"o": found}, "a") == pytest.approx(
        1.0 - 0.5 / np.std([1, 2, 3, 6])
    )
    low, high = resampled(metric, [0.1, 0.2, 0.3], 50), resampled(metric, [0.2, 0.3, 0.4], 50)
    assert np.allclose(high - low, 0.1)


def test_evidence_survives_json_bit_by_bit() -> None:
    rng = np.random.default_rng(0)
    metric = AgreementMap("o", 2)

    def made() -> dict[str, np.ndarray]:
        return {
            "o": rng.random((1, 6, 40), np.float32)
            * np.array([99, 99, 30, 30, 1, 1], np.float32)[None, :, None]
        }

    evidence = [metric.look(metric.kept(made()), made(), "a") for _ in range(4)]
    back = json.loads(json.dumps(evidence))
    assert metric.value(back) == metric.value(evidence)
    assert (resampled(metric, back, 20) == resampled(metric, evidence, 20)).all()


# The user's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mymetrics.py").write_text(
        "def top1(reference, outputs, image):\n"
        "    return float(reference['o'].argmax() == outputs['o'].argmax())\n"
        "def broken(reference, outputs, image):\n    raise KeyError('labels of ' + image)\n"
        "def leaves(reference, outputs, image):\n    raise SystemExit(3)\n"
        "def nothing(reference, outputs, image):\n    return float('nan')\n"
        "def huge(reference, outputs, image):\n    return 1e200\n"
        "number = 3\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mymetrics", raising=False)
    return "mymetrics"


def test_functions_by_name(module: str) -> None:
    metric = UserMetric(f"{module}:top1", ("o",))
    kept = metric.kept({"o": np.array([0.1, 0.9])})
    values = [metric.look(kept, {"o": np.array(o)}, "a") for o in ([0.2, 0.8], [0.8, 0.2])]
    assert values == [1.0, 0.0] and metric.value(values) == 0.5


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("broken", "KeyError 'labels"),
        ("leaves", "SystemExit 3"),
        ("nothing", "nan"),
        ("huge", "1e+200"),
    ],
)
def test_a_function_that_fails_is_named_with_the_image(
    module: str, function: str, named: str
) -> None:
    with raises(QdqtoolError, f"UserMetric.look `metric` {module}:{function}: a.jpg {named}"):
        UserMetric(f"{module}:{function}", ("o",)).look(
            {"o": np.zeros(2)}, {"o": np.zeros(2)}, "a.jpg"
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("top1", "package.module:function"),
        (":top1", "package.module:function"),
        ("mymetrics:", "package.module:function"),
        ("nowhere.at.all:f", "ModuleNotFoundError"),
        ("mymetrics:missing", "AttributeError 'missing'"),
        ("mymetrics:number", "function"),
    ],
)
def test_a_name_that_is_none(module: str, name: str, message: str) -> None:
    with raises(QdqtoolError, f"imported {name}: {message}"):
        metric_for(Model(branchy()), name)


def model(batch: int = 1) -> Model:
    net = Net(1, 2, batch=batch)
    net.output(net.conv("c", "x", 1, 16))
    return Model(net.model())


def numbered(count: int, first: int = 0) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((1, 1, 2, 2), first + i, np.float32)} for i in range(count)]


def values(sets: Sets, numbers: tuple[int, ...]) -> list[int]:
    samples = [sets.measured.load(number) for number in numbers]
    return [int(row.flat[0]) for sample in samples if sample is not None for row in sample["x"]]


def calibrated(sets: Sets) -> list[int]:
    return [int(row.flat[0]) for sample in sets.calibration for row in sample["x"]]


@given(st.integers(4, 300), st.integers(1, 40), st.integers(1, 70))
def test_the_sets_share_nothing(count: int, chosen: int, judged: int) -> None:
    sets = open_sets(model(), numbered(count), chosen_on=chosen, judged_on=judged)
    parts = [calibrated(sets), values(sets, sets.chosen_on), values(sets, sets.judged_on)]
    everything = [v for part in parts for v in part]
    assert len(everything) == len(set(everything)) == count
    assert 1 <= len(parts[1]) <= min(chosen, max(1, count // 4))
    assert 1 <= len(parts[2]) <= min(judged, max(1, count // 4))


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 70))
def test_evaluation_data_is_halved(count: int, chosen: int, judged: int) -> None:
    sets = open_sets(
        model(), numbered(5), numbered(count, 1000), chosen_on=chosen, judged_on=judged
    )
    assert calibrated(sets) == [0, 1, 2, 3, 4]
    one, other = values(sets, sets.chosen_on), values(sets, sets.judged_on)
    assert not set(one) & set(other) and min([*one, *other]) >= 1000
    assert 1 <= len(one) <= max(chosen, 4) and 1 <= len(other) <= max(judged, 4)


def test_sets_of_samples(tmp_path: Path) -> None:
    """Of 64 frames of a video all but those at the edges of blocks have both neighbours in the same set."""
    sets = open_sets(model(), numbered(5), numbered(64, 1000))
    one = set(values(sets, sets.chosen_on))
    assert len(one) == 32
    edges = [v for v in range(1000, 1063) if (v in one) != (v + 1 in one)]
    assert len(edges) == 7
    rows = np.arange(64, dtype=np.float32).reshape(16, 4, 1, 1, 1).repeat(2, 3).repeat(2, 4)
    sets = open_sets(model(4), [{"x": r} for r in rows])
    assert len(sets.chosen_on) == 4 and len(values(sets, sets.chosen_on)) == 16
    np.save(tmp_path / "x.npy", np.zeros((9, 1, 2, 2), np.float32))
    (tmp_path / "link.npy").symlink_to(tmp_path / "x.npy")
    with raises(DataError, "open_sets link.npy data"):
        open_sets(model(), tmp_path / "x.npy", str(tmp_path / "link.npy"))


def test_sets_of_files_go_through_pickle_and_are_told_by_content(tmp_path: Path) -> None:
    def sets(bright: int = 0) -> Sets:
        rows = np.arange(40, dtype=np.float32).reshape(10, 1, 2, 2)
        rows[-1] += bright
        np.save(tmp_path / "x.npy", rows)
        np.save(tmp_path / "c.npy", rows[:4])
        return open_sets(model(), tmp_path / "c.npy", tmp_path / "x.npy")

    one = sets()
    again: Dataset = pickle.loads(pickle.dumps(one.measured))
    assert [again.name(i) for i in range(4)] == [one.measured.name(i) for i in range(4)]
    assert again.name(0) == "x.npy[0]"
    mine, theirs = one.measured.load(3), again.load(3)
    assert mine is not None and theirs is not None and np.array_equal(mine["x"], theirs["x"])
    assert sets().fingerprint == one.fingerprint != sets(1).fingerprint


@pytest.mark.parametrize(
    ("data", "evaluation", "message"),
    [
        (numbered(3), None, "open_sets 3"),
        (numbered(8), numbered(1), "open_sets 1"),
        (iter(numbered(9)), None, "_open once"),
        (None, None, "_open images"),
        (numbered(8), iter(numbered(9)), "_open once"),
    ],
)
def test_too_little(data: object, evaluation: object, message: str) -> None:
    with raises(DataError, message):
        open_sets(model(), data, evaluation)


def test_it_is_late_behind_the_deadline_alone() -> None:
    found = [Measurements.is_late.fget(SimpleNamespace(deadline=d)) for d in (None, 0.0, 1e12)]  # type: ignore[attr-defined]
    assert found == [False, True, False]
