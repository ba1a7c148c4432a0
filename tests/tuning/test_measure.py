import functools
import itertools
import json
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from calibration.dataset import Dataset
from calibration.session import TensorFetcher
from qdqtool.accuracy.metrics import (
    DetectionAgreementMetric,
    MaskAgreementMetric,
    OutputAgreementMetric,
    UserMetric,
    choose_metric,
    estimate_interval,
    note_wide_interval,
    resample_metric,
)
from qdqtool.demo.network import yolov8n
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.tuning.evaluator import CandidateEvaluator
from qdqtool.tuning.image_sets import ImageSets, open_sets
from qdqtool.tuning.measure import (
    Measurement,
    MeasurementTask,
    TaskMapper,
    TaskResult,
    TuningJob,
    map_on_threads,
    run_task,
)
from qdqtool.tuning.planner import Configuration
from qdqtool.tuning.recipe import Recipe
from qdqtool.tuning.store import MeasurementStore
from qdqtool.util import limits
from tests.errors import has
from tests.insertion.nets import Net, images, relative_error, run
from tests.notes import note_codes
from tests.tuning.nets import (
    branchy,
    floats,
    job_of,
    open_dimensions,
    planner_of,
    resnet,
    segmentation,
)

DATA = images(5, 16, 16)
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def job() -> TuningJob:
    return job_of(planner_of(branchy(), DATA), DATA)


@pytest.fixture(scope="module")
def recipes() -> tuple[Recipe, ...]:
    planner = planner_of(branchy(), DATA)
    choices = ((), ("c6",), ("c0",), ("c3", "c4"), ("add",), ("c5",), ("c2",))
    return tuple(planner.plan(floats(*names)).recipe for names in choices)


RECIPES: Any = (SimpleNamespace(key="a"), SimpleNamespace(key="b"))
HALF = {"a": {0: Measurement(0.5)}}


@pytest.mark.parametrize(
    ("results", "count"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([HALF], 1, id="one"),
        pytest.param([HALF, HALF], 1, id="one-twice"),
    ],
)
def test_mapper_that_leaves_measurements_out_is_an_error(
    results: list[TaskResult], count: int
) -> None:
    with pytest.raises(
        QdqtoolError, check=has("result-missing", f"{count} of 4", parameter="mapper")
    ):
        evaluator_with(lambda job, tasks: iter(results)).measure_output_errors(RECIPES, (0, 1), "")


def test_mapper_that_raises_is_closed() -> None:
    closed: list[bool] = []

    def mapper(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        try:
            yield HALF
            raise ZeroDivisionError
        finally:
            closed.append(True)

    with pytest.raises(ZeroDivisionError):
        evaluator_with(mapper).measure_output_errors(RECIPES, (0, 1), "")
    assert closed


def test_mapper_may_repeat_results_and_run_on_after_the_last() -> None:
    results = [{key: {0: None, 1: None}} for key in "aab"]
    ended: list[bool] = []

    def mapper(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        yield from results
        ended.append(True)

    evaluator = evaluator_with(mapper)
    assert evaluator.measure_output_errors(RECIPES, (0, 1), "") and ended
    assert evaluator.store.rows == {key: {0: None, 1: None} for key in "ab"}


def evaluator_with(mapper: TaskMapper) -> CandidateEvaluator:
    unused: Any = None
    return CandidateEvaluator(unused, unused, mapper, MeasurementStore(None, {}), 1)


@functools.cache
def output(recipe: Recipe | None, sample: int) -> Any:
    proto = branchy() if recipe is None else recipe.build(Model(branchy()))[0].proto
    return run(proto, DATA[sample])[0].astype(np.float64)


def test_sweep_and_whole_run_measure_the_output_error(
    job: TuningJob, recipes: tuple[Recipe, ...]
) -> None:
    swept = run_task(job, MeasurementTask((0, 1, 3), recipes))
    whole = run_task(job, MeasurementTask((0, 1, 3), recipes, with_metric=True))
    for recipe, sample in itertools.product(recipes, (0, 1, 3)):
        row, whole_row = (r[recipe.key][sample] for r in (swept, whole))
        # onnxruntime uses other kernels for a part than for the whole network.
        expected = pytest.approx(
            relative_error(output(None, sample), output(recipe, sample)), rel=1e-3
        )
        assert row.error == whole_row.error == expected
        assert whole_row.evidence == pytest.approx(1.0 - whole_row.error)


def test_sessions_share_weights(job: TuningJob) -> None:
    assert "c0.weight" in job.network.weights
    assert job.network.model.proto.ByteSize() < branchy().ByteSize() // 4


def test_constant_outputs_agree() -> None:
    proto = branchy()
    value = onnx.numpy_helper.from_array(np.array([1.0, 2.0], np.float32))
    proto.graph.node.append(onnx.helper.make_node("Constant", [], ["k"], name="k", value=value))
    proto.graph.output.extend(
        onnx.helper.make_tensor_value_info(t, 1, [n]) for t, n in (("c0.bias", 16), ("k", 2))
    )
    planner = planner_of(proto, DATA)
    job, recipe = job_of(planner, DATA), planner.plan(Configuration()).recipe
    row = run_task(job, MeasurementTask((0,), (recipe,), with_metric=True))[recipe.key][0]
    assert job.metric.tensors == ("c6.out", "c0.bias", "k") and row is not None
    error = relative_error(output(None, 0), output(recipe, 0))
    assert row.evidence == pytest.approx(1.0 - error / 3, rel=1e-3)


def with_metric(job: TuningJob, metric: Any) -> TuningJob:
    return TuningJob(job.model, job.images, job.compared, (), metric)


def rows_of(results: Iterable[TaskResult]) -> dict[tuple[str, int], Any]:
    rows: dict[tuple[str, int], Any] = {}
    for result in results:
        new = {(key, number): row for key, by in result.items() for number, row in by.items()}
        assert not rows.keys() & new.keys()
        rows |= new
    return rows


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_give_the_same_bits(
    job: TuningJob, recipes: tuple[Recipe, ...], workers: int
) -> None:
    tasks = [MeasurementTask((i,), recipes[k::2]) for i in range(5) for k in range(2)]
    expected = rows_of([run_task(job, MeasurementTask(tuple(range(5)), recipes))])
    assert rows_of(map_on_threads(workers)(job, tasks)) == expected


def test_metric_of_current_folder_is_imported(
    current_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (current_folder / "only_here.py").write_text("def f(*arguments):\n    return 1.0\n", "utf-8")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(current_folder))])
    assert choose_metric(Model(branchy()), "only_here:f").name == "only_here:f"


def test_job_and_task_survive_pickle(job: TuningJob, recipes: tuple[Recipe, ...]) -> None:
    task = MeasurementTask((1,), recipes[:3], with_metric=True)
    expected = run_task(job, task)  # the sessions of this process are not pickled
    result = run_task(pickle.loads(pickle.dumps(job)), pickle.loads(pickle.dumps(task)))
    assert pickle.loads(pickle.dumps(result)) == expected


def test_metric_that_writes_into_outputs_changes_nothing(
    job: TuningJob, recipes: tuple[Recipe, ...]
) -> None:
    def overwrite(reference: Arrays, outputs: Arrays, image: str) -> float:
        (expected,), (actual,) = reference.values(), outputs.values()
        value = float(np.abs(expected - actual).mean())
        expected[:] = actual[:] = 0.0
        return value

    writing = with_metric(job, UserMetric("m:f", job.metric.tensors, overwrite))
    orders = recipes, recipes[::-1]
    first, second = (run_task(writing, MeasurementTask((0,), r, with_metric=True)) for r in orders)
    assert first == second


def test_float_network_runs_once_per_sample(
    job: TuningJob, recipes: tuple[Recipe, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [
        MeasurementTask((i, i + 1), (r,), whole)
        for r, i, whole in itertools.product(recipes[:3], (0, 2), (True, False))
    ]
    results: list[list[TaskResult]] = []
    calls: list[Any] = []
    kept = OutputAgreementMetric.prepare_reference
    monkeypatch.setattr(
        OutputAgreementMetric,
        "prepare_reference",
        lambda self, outputs: calls.append(1) or kept(self, outputs),
    )
    for room, runs in ((limits.TUNING_REFERENCES, 4), (0, 2 * len(tasks))):
        monkeypatch.setattr(limits, "TUNING_REFERENCES", room)
        calls.clear()
        new = with_metric(job, job.metric)
        results.append([run_task(new, task) for task in tasks])
        assert len(calls) == runs
    assert results[0] == results[1]


def test_parts_that_a_change_does_not_reach_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(16, 16)
    x = net.silu("a0", net.conv("c0", "x"))
    ends = [net.conv(f"e{n}", net.silu(f"a{n}", net.conv(f"c{n}", x)), 16, 8) for n in (1, 2)]
    net.output(ends[0])
    proto = net.model()
    proto.graph.output.append(onnx.helper.make_tensor_value_info(ends[1], 1, None))
    planner = planner_of(proto, DATA)
    choices = floats(), floats("c1"), floats("c2"), floats("c0")
    recipes = tuple(planner.plan(choice).recipe for choice in choices)
    alone = {
        r.key: run_task(job_of(planner, DATA), MeasurementTask((0,), (r,)))[r.key] for r in recipes
    }
    runs: list[Any] = []
    fetch = TensorFetcher.run
    monkeypatch.setattr(
        TensorFetcher, "run", lambda self, sample: runs.append(1) or fetch(self, sample)
    )
    for room in (limits.TUNING_HELD, 0):
        monkeypatch.setattr(limits, "TUNING_HELD", room)
        runs.clear()
        assert run_task(job_of(planner, DATA), MeasurementTask((0,), recipes)) == alone
        # Five parts in float, in INT8 and with c0 float; c1 and c2 each with the part after it.
        assert (len(runs) == 3 * 5 + 2 + 2) if room else (len(runs) > 19)


def test_open_sessions_are_limited(
    job: TuningJob, recipes: tuple[Recipe, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session takes 128 KiB, and up to 18 KB of weights."""
    task = MeasurementTask((0, 1), recipes)
    expected = run_task(job, task)
    monkeypatch.setattr(limits, "TUNING_SESSIONS", 300_000)
    new = with_metric(job, job.metric)
    sessions, counts = new.network.sessions, list[int]()
    get = sessions.get
    monkeypatch.setattr(sessions, "get", lambda *a: (get(*a), counts.append(sessions.count))[0])
    assert run_task(new, task) == expected and max(counts) == 2 < job.network.sessions.count


@pytest.mark.parametrize("opened", [(), (0, 1, 2), (0, 2)])
def test_choose_metric_of_detector_is_agreement_map(opened: tuple[int, ...]) -> None:
    proto = yolov8n(64, classes=3)
    open_dimensions(proto, opened)
    assert choose_metric(Model(proto), None) == DetectionAgreementMetric("output0", 3)
    proto.graph.node.append(
        onnx.helper.make_node("Transpose", ["output0"], ["turned"], name="turn", perm=[0, 2, 1])
    )
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("turned", 1, [1, 84, 7]))
    assert choose_metric(Model(proto), None) == DetectionAgreementMetric("turned", 3, True)


def test_metric_for_topk_compares_another_tensor() -> None:
    proto = resnet()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3], np.int64), "k"))
    proto.graph.node.append(
        onnx.helper.make_node("TopK", ["fc.out", "k"], ["best", "which"], name="top")
    )
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("best", 1, [1, 3]))
    metric = choose_metric(Model(proto), None)
    assert isinstance(metric, OutputAgreementMetric) and metric.tensors != ("best",)


@pytest.mark.parametrize("build", [branchy, resnet, segmentation])
def test_metric_for_other_networks_is_output_agreement(
    build: Callable[[], onnx.ModelProto],
) -> None:
    model = Model(build())
    assert choose_metric(model, None) == OutputAgreementMetric(tuple(model.outputs))


Box = tuple[float, float, float, float, int, float]
"""Center, size, class and score."""


def detections(*boxes: Box) -> Arrays:
    rows = np.zeros((1, 6, max(len(boxes), 8)), np.float32)
    for i, (x, y, w, h, label, score) in enumerate(boxes):
        rows[0, :4, i] = x, y, w, h
        rows[0, 4 + label, i] = score
    return {"o": rows}


FIRST, SECOND = (50, 50, 20, 20, 0, 0.9), (150, 50, 20, 20, 1, 0.8)
UNSURE = (200, 50, 9, 9, 1, 0.1)


METRIC = DetectionAgreementMetric("o", 2)


@pytest.mark.parametrize(
    ("boxes", "value"),
    [
        pytest.param([FIRST, SECOND, UNSURE], 1.0, id="equal"),
        # Precision is 1 up to a recall of a half, which are 51 of 101 points at each overlap.
        pytest.param([FIRST], 51 / 101, id="one-missing"),
        # A shift by 2 of 20 pixels overlaps by 18 / 22 = 0.818, which counts at 7 of 10 thresholds.
        pytest.param(
            [FIRST, (152, 50, 20, 20, 1, 0.8)], (7 * 1.0 + 3 * 51 / 101) / 10, id="one-shifted"
        ),
        pytest.param([FIRST, (150, 50, 20, 20, 0, 0.8)], 51 / 101, id="another-class"),
    ],
)
def test_agreement_map_values(boxes: list[Box], value: float) -> None:
    kept = METRIC.prepare_reference(detections(FIRST, SECOND, UNSURE))
    assert METRIC.value([METRIC.observe(kept, detections(*boxes), "a")]) == pytest.approx(value)


@pytest.mark.parametrize(("equal", "missing"), [(3, 0), (12, 0), (0, 3)])
def test_interval_of_few_or_equal_images_is_that_of_wilson(equal: int, missing: int) -> None:
    """At each end, the share differs from the value by 1.96 standard deviations of the share."""
    kept = METRIC.prepare_reference(detections(FIRST, SECOND))
    images = [detections(FIRST, SECOND)] * equal + [detections(FIRST)] * missing
    evidence = [METRIC.observe(kept, image, "a") for image in images]
    ends = np.array(estimate_interval(METRIC, evidence))
    assert np.abs(METRIC.value(evidence) - ends) == pytest.approx(
        1.96 * np.sqrt(ends * (1 - ends) / len(images))
    )
    codes = note_codes(note_wide_interval(METRIC, len(images)))
    assert codes == (["wide-interval"] if len(images) < 10 else [])


def test_agreement_map_without_detections_is_nan() -> None:
    assert math.isnan(
        METRIC.value([METRIC.observe(METRIC.prepare_reference(detections()), detections(), "a")])
    )


def test_mask_agreement_is_overlap_inside_of_reference_box() -> None:
    """The first two columns of the prototypes are in the box. A third score is too low."""
    metric = MaskAgreementMetric(DetectionAgreementMetric("o", 1), "p")
    rows = np.array([[4, 8, 8, 16, 0.9, 1], [8, 8, 16, 16, 0.5, -1], [8, 8, 16, 16, 0.1, 1]])
    sides = []
    for positive in (np.s_[:, :], np.s_[1:, :]):  # all prototype pixels; three of four rows
        prototypes = np.full((1, 1, 4, 4), -1.0)
        prototypes[0, 0][positive] = 1.0
        sides.append({"o": rows.T[None], "p": prototypes})
    evidence = [metric.observe(metric.prepare_reference(sides[0]), sides[1], "a")]
    # The second mask has a negative coefficient: it is empty in the first, and one row in the other.
    assert evidence == [[6 / 8, 0.0]] and metric.value(evidence) == 3 / 8


def test_output_agreement_is_one_minus_the_relative_error() -> None:
    metric = OutputAgreementMetric(("o",))
    expected, actual = ({"o": np.array([[1.0, 2.0, x, 6.0]], np.float32)} for x in (3.0, 4.0))
    assert metric.observe(metric.prepare_reference(expected), actual, "a") == pytest.approx(
        1.0 - 0.5 / np.std([1, 2, 3, 6])
    )
    low, high = (resample_metric(metric, [x, x + 0.1, x + 0.2], 50) for x in (0.1, 0.2))
    assert np.allclose(high - low, 0.1)


def test_evidence_survives_json_bit_by_bit() -> None:
    rng = np.random.default_rng(0)
    scale = np.array([99, 99, 30, 30, 1, 1], np.float32)[None, :, None]
    outputs = [{"o": rng.random((1, 6, 40), np.float32) * scale} for _ in range(8)]
    evidence = [
        METRIC.observe(METRIC.prepare_reference(a), b, "a")
        for a, b in zip(outputs[::2], outputs[1::2], strict=True)
    ]
    copy = json.loads(json.dumps(evidence))
    assert METRIC.value(copy) == METRIC.value(evidence)
    assert (resample_metric(METRIC, copy, 20) == resample_metric(METRIC, evidence, 20)).all()


# Metrics of the user ------------------------------------------------------------------


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


def test_user_metric_is_found_by_name(module: str) -> None:
    metric = UserMetric(f"{module}:top1", ("o",))
    kept = metric.prepare_reference({"o": np.array([0.1, 0.9])})
    values = [metric.observe(kept, {"o": np.array(o)}, "a") for o in ([0.2, 0.8], [0.8, 0.2])]
    assert values == [1.0, 0.0] and metric.value(values) == 0.5


@pytest.mark.parametrize(
    ("function", "code", "value"),
    [
        ("broken", "function-raised", "KeyError on a.jpg: 'labels of a.jpg'"),
        ("leaves", "function-raised", "SystemExit on a.jpg: 3"),
        ("nothing", "out-of-range", "nan on a.jpg"),
        ("huge", "out-of-range", "1e+200 on a.jpg"),
    ],
)
def test_user_metric_that_fails_is_named_with_the_image(
    module: str, function: str, code: str, value: str
) -> None:
    metric, outputs = UserMetric(f"{module}:{function}", ("o",)), {"o": np.zeros(2)}
    with pytest.raises(
        QdqtoolError, check=has(code, f"{module}:{function}: ", value, parameter="metric")
    ):
        metric.observe(outputs, outputs, "a.jpg")


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("top1", "wrong-format", "package.module:function"),
        (":top1", "wrong-format", "package.module:function"),
        ("mymetrics:", "wrong-format", "package.module:function"),
        ("nowhere.at.all:f", "import-failed", "ModuleNotFoundError"),
        ("mymetrics:missing", "import-failed", "'missing'"),
        ("mymetrics:number", "wrong-type", "function"),
    ],
)
@pytest.mark.usefixtures("module")
def test_user_metric_name_that_cannot_be_used_is_an_error(name: str, code: str, value: str) -> None:
    with pytest.raises(
        QdqtoolError, check=has(code, f"`metric` {name} ", value, parameter="metric")
    ):
        choose_metric(Model(branchy()), name)


def model(batch: int = 1) -> Model:
    net = Net(1, 2, batch=batch)
    net.output(net.conv("c", "x", 1, 16))
    return Model(net.model())


def numbered(count: int, first: int = 0) -> list[Arrays]:
    return [{"x": np.full((1, 1, 2, 2), first + i, np.float32)} for i in range(count)]


def values(sets: ImageSets, numbers: tuple[int, ...]) -> list[int]:
    samples = [sets.measured.load(number) for number in numbers]
    return [int(row.flat[0]) for sample in samples if sample is not None for row in sample["x"]]


def calibrated(sets: ImageSets) -> list[int]:
    return [int(row.flat[0]) for sample in sets.calibration for row in sample["x"]]


@given(st.integers(4, 300), st.integers(1, 40), st.integers(1, 70))
def test_sets_share_no_sample(count: int, chosen: int, judged: int) -> None:
    sets = open_sets(model(), numbered(count), chosen_on=chosen, judged_on=judged)
    parts = [calibrated(sets), values(sets, sets.chosen_on), values(sets, sets.judged_on)]
    samples = [sample for part in parts for sample in part]
    assert len(samples) == len(set(samples)) == count
    assert 1 <= len(parts[1]) <= min(chosen, max(1, count // 4))
    assert 1 <= len(parts[2]) <= min(judged, max(1, count // 4))


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 70))
def test_sets_halve_evaluation_data(count: int, chosen: int, judged: int) -> None:
    sets = open_sets(
        model(), numbered(5), numbered(count, 1000), chosen_on=chosen, judged_on=judged
    )
    assert calibrated(sets) == [0, 1, 2, 3, 4]
    to_choose, to_judge = values(sets, sets.chosen_on), values(sets, sets.judged_on)
    assert not set(to_choose) & set(to_judge) and min([*to_choose, *to_judge]) >= 1000
    assert 1 <= len(to_choose) <= max(chosen, 4) and 1 <= len(to_judge) <= max(judged, 4)


def test_sets_are_blocks_of_neighbors() -> None:
    """Of 64 frames of a video, few have a neighbor in another set.

    These frames are at the edges of the blocks.
    """
    sets = open_sets(model(), numbered(5), numbered(64, 1000))
    chosen = set(values(sets, sets.chosen_on))
    edges = [v for v in range(1000, 1063) if (v in chosen) != (v + 1 in chosen)]
    assert len(chosen) == 32 and len(edges) == 7
    assert open_sets(model(), numbered(5), numbered(28)).judged_on == tuple(range(16, 28))


def test_sets_count_batches() -> None:
    rows = np.arange(64, dtype=np.float32).reshape(16, 4, 1, 1, 1).repeat(2, 3).repeat(2, 4)
    sets = open_sets(model(4), [{"x": row} for row in rows])
    assert len(sets.chosen_on) == 4 and len(values(sets, sets.chosen_on)) == 16


def test_evaluation_data_must_differ_from_calibration_data(tmp_path: Path) -> None:
    path, link = tmp_path / "x.npy", tmp_path / "link.npy"
    np.save(path, np.zeros((9, 1, 2, 2), np.float32))
    link.symlink_to(path)
    with pytest.raises(
        DataError, check=has("option-conflict", link, "`data`", parameter="evaluation")
    ):
        open_sets(model(), path, str(link))


def sets_of_files(folder: Path, offset: int = 0) -> ImageSets:
    rows = np.arange(40, dtype=np.float32).reshape(10, 1, 2, 2)
    rows[-1] += offset
    np.save(folder / "x.npy", rows)
    np.save(folder / "c.npy", rows[:4])
    return open_sets(model(), folder / "c.npy", folder / "x.npy")


def test_sets_of_files_survive_pickle(tmp_path: Path) -> None:
    measured = sets_of_files(tmp_path).measured
    copy: Dataset = pickle.loads(pickle.dumps(measured))
    assert [copy.name(i) for i in range(4)] == [measured.name(i) for i in range(4)]
    assert copy.name(0) == "x.npy[0]"
    before, after = measured.load(3), copy.load(3)
    assert before is not None and after is not None and np.array_equal(before["x"], after["x"])


def test_sets_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    prints = [sets_of_files(tmp_path, offset).fingerprint for offset in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("data", "evaluation", "expected"),
    [
        (numbered(3), None, has("too-few-images", "3 image", parameter="data")),
        (numbered(8), numbered(1), has("too-few-images", "1 image", parameter="evaluation")),
        (iter(numbered(9)), None, has("read-once", parameter="data")),
        (numbered(8), iter(numbered(9)), has("read-once", parameter="evaluation")),
    ],
    ids=["3-images", "1-evaluation-image", "iterator", "evaluation-iterator"],
)
def test_sets_refuse_data(
    data: object, evaluation: object, expected: Callable[[BaseException], bool]
) -> None:
    with pytest.raises(DataError, check=expected):
        open_sets(model(), data, evaluation)
