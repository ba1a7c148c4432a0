import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from PIL import Image

import qdqtool
from qdqtool import prediction
from qdqtool.accuracy.metrics import OutputAgreementMetric
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.formats.tuning_text import render_tuning
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup, choose_scale
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.timing import gpus
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.targets import target_named
from qdqtool.tuning import api, store
from qdqtool.tuning.image_sets import open_sets
from qdqtool.tuning.measure import (
    Measurement,
    MeasurementTask,
    PartitionedNetwork,
    TaskMapper,
    TaskResult,
    TuningJob,
    map_on_threads,
)
from qdqtool.tuning.options import SearchBudget
from qdqtool.tuning.planner import Configuration
from qdqtool.tuning.recipe import Recipe
from qdqtool.tuning.result import PlacementResult, Tuning
from qdqtool.tuning.search import PlacementSearch
from qdqtool.tuning.summary import warn_small_sets
from tests.calibration.nets import conv_net
from tests.errors import has
from tests.insertion.nets import check, images, run
from tests.insertion.test_smoothing import add_outliers
from tests.insertion.transformers import samples, vit
from tests.notes import note_codes
from tests.slow import slow_after
from tests.tuning.conftest import Clock
from tests.tuning.nets import branchy, floats, planner_of, resnet, segmentation

DATA = images(16, 16, 16)
# Of each four samples, two set the ranges, one is a selection image and one a held-out image.
CALIBRATION, CHOSEN, JUDGED = [d for i, d in enumerate(DATA) if i % 4 < 2], DATA[2::4], DATA[3::4]
KEEP = 0.984
ROWS = PartitionedNetwork.measure


@pytest.fixture(scope="module", autouse=True)
def cached_rows() -> Iterator[None]:
    cache: dict[Any, Measurement] = {}

    def rows(
        self: PartitionedNetwork,
        number: int,
        sample: Any,
        candidates: Sequence[Recipe],
        whole: bool,
    ) -> Iterator[Any]:
        job, arrays = self.job, [sample[name].tobytes() for name in sorted(sample)]
        if not isinstance(job.metric, OutputAgreementMetric):
            yield from ROWS(self, number, sample, candidates, whole)
            return
        keys = {
            r.key: (job.model, job.compared, job.scores, whole, *arrays, r.key) for r in candidates
        }
        new = [r for r in candidates if keys[r.key] not in cache]
        yield from ((key, cache[full]) for key, full in keys.items() if full in cache)
        for key, row in ROWS(self, number, sample, new, whole) if new else ():
            cache[keys[key]] = row
            yield key, row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionedNetwork, "measure", rows)
        yield


@pytest.fixture(scope="module")
def tuned() -> Tuning:
    return tune(keep=KEEP)


def tune(data: Any = DATA, model: Any = None, **options: Any) -> Tuning:
    return qdqtool.tune(model or branchy(), data, **{"method": "mse", **options})


def insert(floats: Iterable[str], data: Any = CALIBRATION, **options: Any) -> Insertion:
    exclude = [f"^{name}$" for name in floats]
    return qdqtool.insert(branchy(), data, method="mse", exclude=exclude, **options)


def observed(observe: Callable[[TuningJob, TaskResult], None], workers: int = 1) -> TaskMapper:
    """Return a mapper that passes each result to a function first."""

    def run(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        for result in map_on_threads(workers)(job, tasks):
            observe(job, result)
            yield result

    return run


def without_effort(tuning: Tuning) -> dict[str, Any]:
    return {k: v for k, v in tuning.as_json().items() if k != "effort"}


def points_of(tuning: Tuning) -> dict[str, PlacementResult]:
    return {point.name: point for point in [*tuning.front, *tuning.others]}


def agreement(model: onnx.ModelProto, samples: Sequence[dict[str, Any]]) -> float:
    values = []
    for sample in samples:
        expected = float_output(sample["x"].tobytes())
        actual = run(model, sample)[0].astype(np.float64)
        values.append(1.0 - np.sqrt(np.mean((expected - actual) ** 2)) / expected.std())
    return float(np.mean(values))


@functools.cache
def float_output(image: bytes) -> npt.NDArray[np.float64]:
    sample = {"x": np.frombuffer(image, np.float32).reshape(DATA[0]["x"].shape)}
    return run(branchy(), sample)[0].astype(np.float64)


def test_tune_reaches_the_goal_that_it_reports(tuned: Tuning) -> None:
    check(tuned.model)
    assert tuned.reached and tuned.chosen.metric is not None and tuned.chosen.metric >= KEEP
    searched = insert(tuned.chosen.configuration.floats).model
    assert agreement(searched, JUDGED) == pytest.approx(tuned.chosen.metric, abs=1e-6)
    assert agreement(searched, CHOSEN) == pytest.approx(tuned.chosen.chosen_on, abs=1e-6)
    summary, cost = qdqtool.predict(tuned.model).summary(), tuned.chosen.cost
    assert (summary["int8"], summary["conversions"]) == (cost.int8, cost.conversions)


def test_result_has_ranges_from_all_images(tuned: Tuning) -> None:
    """Held-out images affect the ranges only after the last measurement."""
    assert [(q.tensor, q.scale) for q in tuned.quantized] == [
        (q.tensor, q.scale) for q in insert(tuned.chosen.configuration.floats, DATA).quantized
    ]
    (note,) = (n for n in tuned.notes if n.code == "ranges-from-all")
    assert note.values["images"] == len(DATA)
    assert note.values["metric"] == pytest.approx(agreement(tuned.model, JUDGED), abs=1e-6)


def test_ranges_from_all_images_that_miss_the_goal_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlacementSearch, "judge_recipe", lambda search, recipe: KEEP - 0.01)
    tuning = tune(keep=KEEP)
    expected = insert(tuning.chosen.configuration.floats)
    assert [q.scale for q in tuning.quantized] == [q.scale for q in expected.quantized]
    assert "ranges-from-all-worse" in note_codes(tuning.notes)
    assert tuning.images["calibration"] == len(CALIBRATION)


def test_cheapest_placement_whose_interval_reaches_the_goal_is_named(tuned: Tuning) -> None:
    plausible = [
        point
        for point in points_of(tuned).values()
        if point.high is not None
        and point.high >= KEEP
        and point.cost.value < tuned.chosen.cost.value
    ]
    expected = min(plausible, key=lambda point: point.cost.value)
    cheapest = tuned.cheapest_plausible
    assert cheapest is not None and cheapest.as_json() == expected.as_json()
    assert tuned.as_json()["cheapest_plausible"] == expected.as_json()
    text = str(render_tuning(tuned, 500))
    (line,) = (line for line in text.splitlines() if cheapest.name in line and "goal" in line)
    assert f"{cheapest.metric:.3f} ({cheapest.low:.3f} to {cheapest.high:.3f})" in line


@pytest.mark.parametrize(
    ("low", "expected"),
    [
        (KEEP - 0.01, "its interval includes the goal"),
        (KEEP + 0.001, "its interval is above the goal, but on 4 selection images it has 0.123"),
    ],
)
def test_interval_of_the_cheaper_placement_is_compared_with_the_goal(
    tuned: Tuning, low: float, expected: str
) -> None:
    cheapest = tuned.cheapest_plausible
    assert cheapest is not None and tuned.metric["float"] == 1
    shown = replace(cheapest, low=low, high=KEEP + 0.002, chosen_on=0.1234)
    assert expected in str(render_tuning(replace(tuned, cheapest_plausible=shown), 500))


def test_matrix_products_are_named_where_they_are_counted(tuned: Tuning) -> None:
    counted = f"{tuned.chosen.cost.int8} of {tuned.chosen.cost.convolutions} convolutions"
    with_products = replace(tuned, prediction=qdqtool.predict(vit(1)))
    assert f"{counted} in INT8" in str(render_tuning(tuned, 500))
    assert f"{counted} and matrix products in INT8" in str(render_tuning(with_products, 500))


@pytest.mark.parametrize("sites", [[], ["c6"]])
def test_layers_in_float_and_other_choices_are_named(tuned: Tuning, sites: list[str]) -> None:
    chosen = replace(tuned.chosen, sites=sites, changed={"head": "int8"})
    lines = render_tuning(replace(tuned, chosen=chosen, bought=[]), 500).lines
    assert [line for line in lines if line.startswith("Kept in")] == [
        f"Kept in FP16: {site}" for site in sites
    ]
    assert "  head: int8" in lines


@pytest.mark.parametrize(
    ("images", "evaluation", "enough"),
    [(16, 0, 64), (256, 0, None), (16, 16, 64), (16, 128, None)],
)
def test_small_sets_are_reported_before_the_search(
    images: int, evaluation: int, enough: int | None
) -> None:
    def source(count: int) -> npt.NDArray[np.float32]:
        return np.zeros((count, *DATA[0]["x"].shape[1:]), np.float32)

    sets = open_sets(Model(branchy()), source(images), source(evaluation) if evaluation else None)
    warnings = warn_small_sets(sets, SearchBudget(), evaluation or None)
    assert [w.values["enough"] for w in warnings] == ([] if enough is None else [enough])
    if enough is not None:
        assert f"{2 * enough} images" in warnings[0]
        assert (f"{4 * enough} images" in warnings[0]) == (not evaluation)


def test_tune_front_rises_and_others_lie_below(tuned: Tuning) -> None:
    for low, high in itertools.pairwise(tuned.front):
        assert low.cost.value < high.cost.value and low.chosen_on < high.chosen_on
    for other in tuned.others:
        assert any(
            p.cost.value <= other.cost.value and p.chosen_on >= other.chosen_on for p in tuned.front
        )
    assert {"1 worst by sensitivity", "2 worst by sensitivity"} <= points_of(tuned).keys()


@pytest.mark.slow
def test_tune_result_is_the_cheapest_of_all_sets(
    tuned: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 64 sets of at most three float convolutions, no cheaper set reaches the goal.

    Costs do not depend on ranges, so costs are computed with fast ranges. Scales of equal tensors
    are
    equal in all sets, and are computed once.
    """
    scales: dict[Any, Any] = {}

    def cached_scale(
        group: ScaleGroup, statistics: Any, choice: MethodChoice
    ) -> tuple[GroupScale, list[Any]]:
        key = (choice.method_for(group), group.sources, group.largest)
        if key not in scales:
            scales[key] = choose_scale(group, statistics, choice)
        scale, notes = scales[key]
        return replace(scale, group=group), notes

    monkeypatch.setattr("qdqtool.quantization.api.choose_scale", cached_scale)
    options: Any = {"losses": 0, "predict": False}
    quick: Any = {"method": "max", "calib_cache": tmp_path / "one.npz", **options}
    cheaper = 0
    for count in range(4):
        for names in itertools.combinations([f"c{i}" for i in range(7)], count):
            exclude = [f"^{name}$" for name in names]
            model = qdqtool.insert(branchy(), CALIBRATION[:1], exclude=exclude, **quick).model
            summary = prediction.predict(model, advice=False).summary()
            if summary["float"] + summary["conversions"] < tuned.chosen.cost.value:
                cheaper += 1
                model = insert(names, calib_cache=tmp_path / "all.npz", **options).model
                assert agreement(model, CHOSEN) < KEEP, names
    assert cheaper > 10


def test_bought_choices_are_measured_without_each(tuned: Tuning) -> None:
    assert tuned.bought
    for choice in tuned.bought:
        site = next(s for s in tuned.sites if s.site == choice.site)
        without = insert(tuned.chosen.configuration.floats - set(site.nodes))
        assert without.prediction is not None
        loss = tuned.chosen.chosen_on - agreement(without.model, CHOSEN)
        assert choice.metric == pytest.approx(loss, abs=1e-6)
        assert choice.int8 == tuned.chosen.cost.int8 - without.prediction.summary()["int8"]


def test_tuning_json_has_intervals_and_counts(tuned: Tuning) -> None:
    data = tuned.as_json()
    assert data["front"][data["chosen"]["index"]]["nodes"] == data["chosen"]["nodes"]
    for point in data["front"]:
        assert point["low"] <= point["metric"] <= point["high"]
    counts = [data["images"][name] for name in ("calibration", "chosen_on", "judged_on")]
    assert counts == [16, 4, 4] and data["images"]["search_calibration"] == 8
    assert data["unchanged"] is False


def test_model_of_point_has_its_cost(tuned: Tuning) -> None:
    for point in tuned.front:
        assert qdqtool.predict(tuned.model_of(point)).summary()["int8"] == point.cost.int8


def test_tune_measures_no_choice_that_cannot_pay() -> None:
    swept: set[str] = set()

    def observe(job: TuningJob, result: TaskResult) -> None:
        for key, rows in result.items():
            if all(row and row.evidence is None for row in rows.values()):
                swept.add(key)

    tuning = tune(keep=KEEP, mapper=observed(observe))
    choices = [choice for site in tuning.sites for choice in site.choices]
    never = [c for c in choices if c.why]
    assert never and all(c.error is None for c in never)
    assert tuning.effort["never_measured"] == len(never)
    # Other scales are measured without and with the choice.
    assert len(swept) <= sum(1 if c.choice == "float" else 2 for c in choices if not c.why)


def test_site_loss_is_the_error_of_its_nodes_alone() -> None:
    tuning = tune(keep=KEEP, whole_front=True)
    planner = planner_of(branchy(), CALIBRATION, "auto")
    whole = planner.plan(Configuration()).recipe

    def squared_errors(recipe: Recipe) -> npt.NDArray[np.float64]:
        model = recipe.build(planner.model)[0].proto
        return np.asarray([(1.0 - agreement(model, [sample])) ** 2 for sample in CHOSEN])

    base = squared_errors(whole)
    selected = 0
    for site in tuning.sites:
        nodes = {planner.model.node(n).index for n in site.nodes}
        without = planner.plan(floats(*site.nodes)).recipe
        others_unchanged = (
            without.key == whole.restrict_to_nodes({*whole.quantized_inputs} - nodes).key
        )
        if site.loss is None or not others_unchanged:
            continue
        alone = squared_errors(whole.restrict_to_nodes(nodes))
        before, after = math.sqrt(base.mean()), math.sqrt(base.mean() - alone.mean())
        assert site.choices[0].error == pytest.approx(after, rel=1e-3)
        assert site.loss == pytest.approx(before - after, rel=1e-3, abs=1e-6)
        selected += 1
    assert selected >= 3


@pytest.mark.usefixtures("constant_costs")
@pytest.mark.parametrize(
    ("seconds", "workers", "end"),
    [(1.0, 1, "about 3 minutes with 1 worker"), (0.1, 2, "about a minute with 2 workers")],
)
def test_tune_estimates_its_duration(clock: Clock, seconds: float, workers: int, end: str) -> None:
    """30 combinations on 4 selection images and a third of the 4 held-out images are 160 runs."""

    def mapper(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        for result in map_on_threads(1)(job, tasks):
            clock.now += seconds * sum(map(len, result.values()))
            yield result

    lines: list[str] = []
    tuning = tune(keep=0.5, mapper=mapper, workers=workers, say=lines.append)
    choices = tuning.effort["candidates"] - tuning.effort["never_measured"]
    assert any(
        line.startswith(f"testing {choices} choices on 4 images") and line.endswith(end)
        for line in lines
    )


def test_tune_for_strongly_typed_target_is_fp16() -> None:
    tuning = tune(keep=KEEP, target="trt11", exclude=["^c3$"])
    check(tuning.model)
    model = Model(tuning.model)
    types = {model.elem_type(t) for t in model.node("c3").inputs}
    assert types == {onnx.TensorProto.FLOAT16} and tuning.as_json()["float_type"] == "fp16"
    ends = [o.type.tensor_type.elem_type for o in tuning.model.graph.output]
    assert ends == [onnx.TensorProto.FLOAT]
    inserted = insert({"c3", *tuning.chosen.configuration.floats}, DATA, target="trt11")
    assert tuning.model.graph.node == inserted.model.graph.node
    assert np.array_equal(run(tuning.model, DATA[0])[0], run(inserted.model, DATA[0])[0])
    assert set(inserted.notes) <= set(tuning.notes)
    predicted = qdqtool.predict(tuning.model, "trt11")
    assert predicted.summary()["int8"] == tuning.chosen.cost.int8
    assert "FLOAT-FP32" not in predicted.findings_by_code()
    (note,) = (n for n in tuning.notes if n.code == "measured-in-fp32")
    errors = [1.0 - agreement(tuning.model, [d]) for d in CALIBRATION]
    assert note.values["after"] == pytest.approx(np.mean(errors), abs=5e-5)


@pytest.mark.usefixtures("constant_costs")
def test_tensor_too_large_for_fp16_stays_fp32() -> None:
    proto = branchy()
    tensor = next(t for t in proto.graph.initializer if t.name == "c6.weight")
    array = 1.5e5 * onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    tuning = tune(model=proto, keep=0.5, target="trt11", exclude=["^c6$"])
    _, time = predict_on_gpu(tuning.model, "trt11", TimingOptions(gpu="RTX 3060"))
    assert time is not None and time.float_time is not None
    assert time.float_time.precision == Precision.FP16  # the type of most of the model
    assert "c6.out" in tuning.float32 and np.isfinite(run(tuning.model, DATA[0])[0]).all()


@pytest.mark.usefixtures("constant_costs")
def test_high_precision_fp32_writes_no_fp16() -> None:
    tuning = tune(keep=0.5, target="trt11", high_precision="fp32")
    assert tuning.float_type == "fp32" and note_codes(tuning.notes) == ["ranges-from-all"]
    assert onnx.TensorProto.FLOAT16 not in {t.data_type for t in tuning.model.graph.initializer}


@pytest.mark.parametrize("workers", slow_after(1, [3, 1]))
def test_tune_result_does_not_depend_on_workers(
    tuned: Tuning, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartitionedNetwork, "measure", ROWS)  # without the cache
    again = tune(keep=KEEP, workers=workers)
    first, second = (t.model.SerializeToString(deterministic=True) for t in (tuned, again))
    assert without_effort(again) == without_effort(tuned) and first == second


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", slow_after(1, [40, 1]))
def test_tune_continues_from_state(tuned: Tuning, tmp_path: Path, after: int) -> None:
    state = tmp_path / "t.tuning"
    results: list[TaskResult] = []

    def kill(job: TuningJob, result: TaskResult) -> None:
        if len(results) == after:
            raise Killed
        results.append(result)

    with pytest.raises(Killed):
        tune(keep=KEEP, state=state, mapper=observed(kill))
    again = tune(keep=KEEP, state=state)
    assert without_effort(again) == without_effort(tuned)
    assert again.effort["resumed"] >= after
    assert tune(keep=0.979, state=state).effort["runs"] < tuned.effort["runs"] / 2


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "t.tuning"
    tune(keep=0.9, state=path)
    return path


@pytest.mark.parametrize(
    ("options", "newer", "code"),
    [
        pytest.param({"method": "max"}, 0, "different-settings", id="method"),
        pytest.param({"data": DATA[1:]}, 0, "different-images", id="data"),
        pytest.param({"model": branchy(1)}, 0, "different-models", id="model"),
        pytest.param({}, 1, "different-methods", id="revision"),
    ],
)
def test_tune_refuses_another_state_before_it_collects_ranges(
    state: Path, options: dict[str, Any], newer: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "REVISION", store.REVISION + newer)
    monkeypatch.setattr(api, "collect_statistics", None)
    with pytest.raises(DataError, check=has(code, path=str(state), parameter="state")):
        tune(keep=KEEP, state=state, **options)


@pytest.mark.usefixtures("constant_costs")
def test_tune_smooths_activations_and_keeps_their_state_apart(tmp_path: Path) -> None:
    model, data, state = add_outliers(vit(1)), samples(vit(1), 16), tmp_path / "t.tuning"
    tuning = qdqtool.tune(model, data, keep=0.5, smooth=0.5, state=state)
    assert any(n.code == "smoothed" and n.values["alpha"] == 0.5 for n in tuning.notes)
    before, after = ({t.name: t for t in m.graph.initializer} for m in (model, tuning.model))
    assert before["b0.ln1.gamma"] != after["b0.ln1.gamma"]
    with pytest.raises(DataError, check=has("different-settings", parameter="state")):
        qdqtool.tune(model, data, keep=0.5, state=state)


def test_tune_refuses_state_of_an_edited_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "edited_metric.py"
    source.write_text("def same(reference, outputs, image):\n    return 1.0\n")
    options: Any = {"metric": "edited_metric:same", "state": tmp_path / "t.tuning"}
    tune(**options)
    assert tune(**options).effort["runs"] == 0
    source.write_text("def same(reference, outputs, image):\n    return 2.0\n")
    with pytest.raises(DataError, check=has("different-settings", parameter="state")):
        tune(**options)


def test_swept_on_limits_images_for_single_choices(tuned: Tuning) -> None:
    swept: set[int] = set()
    whole: set[int] = set()

    def mapper(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        for task in tasks:
            (whole if task.with_metric else swept).update(task.images)
        return map_on_threads(1)(job, tasks)

    fewer = tune(keep=KEEP, swept_on=2, mapper=mapper)
    assert len(swept) == 2 and swept < {0, 1, 2, 3} < whole
    assert fewer.images["swept_on"] == 2
    assert tuned.images["swept_on"] == tuned.images["chosen_on"] == 4
    first, second = (points_of(t)["everything INT8"].chosen_on for t in (fewer, tuned))
    assert first == second


# Goals --------------------------------------------------------------------------------


def test_tune_takes_everything_int8_if_it_is_good_enough() -> None:
    tuning = tune(keep=0.9)
    assert tuning.reached and tuning.chosen.name == "everything INT8" and not tuning.chosen.sites
    assert all(s.loss is None for s in tuning.sites)
    assert len(tune(keep=0.9, whole_front=True).front) > 2


def test_tune_takes_the_best_if_the_goal_is_not_reached() -> None:
    tuning = tune(keep=1.0, metric=always_worse)
    assert not tuning.reached and "goal-not-reached" in note_codes(tuning.notes)
    best = max(p.chosen_on for p in tuning.front)
    assert tuning.chosen.chosen_on == best < 1.0 and tuning.chosen.cost.int8 > 0


def test_tune_front_is_better_than_the_worst_by_sensitivity() -> None:
    """The simple placement costs more than the goal needs. Both are compared on unseen images."""
    tuning = tune(keep=0.978, whole_front=True)
    obvious = points_of(tuning)["4 worst by sensitivity"]
    assert obvious in tuning.others and obvious.cost.value > tuning.chosen.cost.value
    point = [p for p in tuning.front if p.cost.value <= obvious.cost.value][-1]
    first, second = (agreement(tuning.model_of(p), JUDGED) for p in (point, obvious))
    assert point.name == "5 choices" and first > second


def always_worse(reference: Any, outputs: Any, image: str) -> float:
    (expected,), (actual,) = reference.values(), outputs.values()
    difference = float(np.abs(expected - actual).mean())
    return 0.5 - difference if difference else 1.0


SLOW: Any = {"gpu": "T4", "clock": 300.0}  # INT8 is faster even in a network of this size


def test_budget_takes_the_most_accurate_that_fits() -> None:
    whole = tune(keep=0.995, **SLOW)
    assert whole.gpu is not None
    # A search with a budget looks for "fewer choices" elsewhere.
    points = [p for p in whole.front if p.name != "fewer choices"]
    assert len(points) > 2
    for point in points[1::2]:
        assert point.cost.ms is not None
        budget = point.cost.ms + 1e-9
        tuning = tune(budget_ms=budget, **SLOW)
        assert tuning.reached and tuning.chosen.cost.ms is not None
        assert tuning.chosen.cost.ms <= budget and tuning.chosen.chosen_on >= point.chosen_on


@pytest.mark.usefixtures("clock")
def test_budget_that_nothing_fits_takes_the_fastest() -> None:
    tuning = tune(budget_ms=1e-4, **SLOW, time_limit=60)
    assert not tuning.reached
    assert tuning.chosen.cost.ms == min(p.cost.ms or 0 for p in tuning.front)


def test_budget_that_the_float_model_fits_takes_it() -> None:
    tuning = tune(budget_ms=1000.0, **SLOW, swept_on=1)
    fits = ("float-fits", "float-fits-and-written")
    (note,) = (n for n in tuning.notes if n.code in fits)
    gpu, target = gpus.choose_gpu("T4", 300.0, None), target_named("trt8.5")
    time = estimate_time(Model(branchy()), qdqtool.predict(branchy()), gpu, target)
    assert note.values["ms"] == pytest.approx(time.total_ms, rel=5e-4)
    assert tuning.reached and tuning.chosen.cost.int8 == 0 and not tuning.quantized
    assert tuning.unchanged and tuning.model == branchy()
    assert "unchanged" in render_tuning(tuning, 500).lines[0]
    stopped = {**tuning.effort, "stopped": "time limit"}
    for reached in (False, True):  # only a complete search can say that there is none
        other = replace(tuning, budget_ms=None, keep=0.97, reached=reached, effort=stopped)
        first = render_tuning(other, 500).lines[0]
        assert "0.970" in first and "unchanged" in first and "--time-limit" in first


def test_front_has_the_float_model_if_its_time_is_known() -> None:
    tuning = tune(keep=1.0, **SLOW, whole_front=True, swept_on=1)
    (float_point,) = (p for p in points_of(tuning).values() if not p.cost.int8)
    assert float_point.chosen_on == pytest.approx(tuning.metric["float"], abs=1e-6)
    for point in tuning.front:  # the float model is the most accurate
        assert point is float_point or point.cost.value < float_point.cost.value
    if tuning.chosen is float_point:
        assert not any("Linear" in n.op_type for n in tuning.model.graph.node) and not tuning.bought


def test_front_has_no_float_model_without_gpu() -> None:
    assert all(p.cost.int8 for p in points_of(tune(keep=0.9, swept_on=1)).values())


@pytest.mark.parametrize("after", slow_after(1, [16, 60, 40]))
def test_time_limit_ends_with_the_best_so_far(clock: Clock, after: int) -> None:
    results: list[TaskResult] = []

    def observe(job: TuningJob, result: TaskResult) -> None:
        results.append(result)
        if len(results) > after:
            clock.now = 450.0  # after the search, before the end

    tuning = tune(keep=0.99, mapper=observed(observe), time_limit=600)
    assert tuning.effort["stopped"] == "time limit"
    assert tuning.front and tuning.chosen.metric is not None
    (note,) = (n for n in tuning.notes if n.code == "ranges-from-all")
    assert agreement(tuning.model, JUDGED) == pytest.approx(note.values["metric"], abs=1e-6)


def test_time_limit_after_everything_int8_is_not_an_error(clock: Clock) -> None:
    """The float and the INT8 model on 4 images are measured after 80 % of the time limit."""
    results: list[TaskResult] = []

    def observe(job: TuningJob, result: TaskResult) -> None:
        results.append(result)
        if len(results) == 8:
            clock.now = 480.0

    tuning = tune(keep=0.99, mapper=observed(observe), time_limit=600)
    assert tuning.effort["stopped"] == "time limit" and tuning.chosen.metric is not None
    assert tuning.chosen.name == "everything INT8"


def test_time_limit_before_everything_int8_is_an_error() -> None:
    with pytest.raises(QdqtoolError, check=has("timeout", parameter="time_limit")):
        tune(keep=0.99, time_limit=1e-9)


@pytest.mark.parametrize("limit", slow_after(2, [60.0, 150.0, 40.0, 90.0]))
def test_time_limit_measures_the_obvious_first_and_ends_in_time(clock: Clock, limit: float) -> None:
    """A run on a sample takes one second by the test's clock, and nothing else takes time."""
    sweep_ends: list[float] = []
    combining = 0.0  # seconds for combinations on the selection images, the first four
    swept: list[set[int]] = []  # convolutions that a sweep quantizes
    before: list[set[int]] = []  # float convolutions of combinations before the first sweep
    everything: set[int] = set()  # convolutions of the first candidate, "everything INT8"

    def mapper(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        nonlocal combining
        whole = any(t.with_metric for t in tasks)
        new = [{n for n, _, _ in c.weights} for t in tasks for c in t.candidates if c.weights]
        everything.update(() if everything else next(iter(new), ()))
        if not whole:
            swept.extend(new)
        elif not swept:
            before.extend(everything - nodes for nodes in new)
        for result in map_on_threads(1)(job, tasks):
            seconds = sum(map(len, result.values()))
            clock.now += seconds
            if not whole:
                sweep_ends.append(clock.now)
            elif all(n < 4 for rows in result.values() for n in rows):
                combining += seconds
            yield result

    tuning = tune(keep=0.9999, mapper=mapper, workers=1, time_limit=limit)
    assert clock.now <= 1.1 * limit and tuning.chosen.metric is not None
    names = points_of(tuning).keys()
    assert {f"{k} by their own error" for k in (1, 2, 4)} | {"everything INT8"} <= names
    assert max(sweep_ends, default=0.0) <= 0.7 * limit
    # Sweeps come after one, two and four nodes by their own error, the largest error first.
    if swept:
        assert {1, 2, 4} <= {len(nodes) for nodes in before} and swept[0] in before
    if limit < 90:
        assert len({frozenset(nodes) for nodes in swept}) < len(tuning.sites)
    else:
        assert sweep_ends and any("sensitivity" in name or "choice" in name for name in names)


def negative(reference: Any, outputs: Any, image: str) -> float:
    (expected,), (actual,) = reference.values(), outputs.values()
    return -float(np.abs(expected - actual).mean())


T4: Any = {"gpu": "T4"}
BAD_OPTIONS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "keep": ({"keep": 1.5}, "out-of-range", "keep", "1.5"),
    "keep-and-budget": (
        {"keep": 0.9, "budget_ms": 1.0, **T4},
        "option-conflict",
        "keep",
        "`budget_ms`",
    ),
    "budget-without-gpu": ({"budget_ms": 1.0}, "missing-argument", "gpu", "`budget_ms`"),
    "budget-of-zero": ({"budget_ms": 0.0, **T4}, "out-of-range", "budget_ms", "0"),
    "gpu-of-another-version": ({"gpu": "RTX 5090", "target": "8.6"}, "unsupported", "gpu", "5090"),
    "gpu-without-int8": ({"gpu": "Jetson Nano", "target": "8.5"}, "no-int8", "gpu", "--fp16"),
    "gpu-without-int8-by-default": ({"gpu": "Jetson Nano"}, "no-int8", "gpu", "--fp16"),
    "gpu-without-int8-on-rtx": ({**T4, "target": "rtx1.7"}, "no-int8", "gpu", "T4"),
    "metric": ({"metric": "nowhere:f"}, "import-failed", "metric", "nowhere"),
    "metric-negative": (
        {"keep": 0.9, "metric": negative},
        "metric-not-positive",
        "metric",
        ":negative returned ",
    ),
    "workers": ({"workers": 0}, "out-of-range", "workers", "0"),
    "time-limit": ({"time_limit": -1.0}, "out-of-range", "time_limit", "-1"),
    "nothing-left": ({"exclude_op": ["Conv"]}, "nothing-to-quantize", "", "7 `exclude_op` Conv"),
    "gpu": ({"gpu": "no such gpu"}, "unknown-choice", "gpu", "no such gpu"),
    "pattern": ({"exclude": ["("]}, "invalid-pattern", "", "`exclude` '('"),
    "typed": (
        {"target": "trt8.5", "high_precision": "fp16"},
        "option-conflict",
        "high_precision",
        "trt8.5",
    ),
    "head": ({"head": "x"}, "unknown-choice", "head", "`head='x'"),
    "method": ({"method": "kl"}, "unknown-choice", "method", "`method='kl'"),
    "long-time": ({"time_limit": 1e308}, "out-of-range", "time_limit", "time_limit=1e+308"),
    "method-for": ({"method_for": [("no", "max")]}, "no-match", "method_for", "no=max"),
}


@pytest.mark.parametrize(
    ("options", "code", "parameter", "values"), BAD_OPTIONS.values(), ids=BAD_OPTIONS
)
def test_tune_refuses_options(
    options: dict[str, Any], code: str, parameter: str, values: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter)) as caught:
        qdqtool.tune(branchy(), DATA, **options)
    assert all(value in str(caught.value) for value in values.split())


def test_tune_refuses_quantized_model() -> None:
    model = qdqtool.insert(branchy(), DATA, predict=False).model
    with pytest.raises(QdqtoolError, match="Q/DQ"):
        qdqtool.tune(model, DATA)


# Other networks -----------------------------------------------------------------------


def top1(reference: Any, outputs: Any, image: str) -> float:
    (expected,), (actual,) = reference.values(), outputs.values()
    return float((expected.argmax(axis=1) == actual.argmax(axis=1)).mean())


@pytest.mark.parametrize("build", [resnet, segmentation])
@pytest.mark.parametrize("metric", [None, top1])
def test_tune_classifier_and_segmentation(build: Any, metric: Any) -> None:
    tuning = qdqtool.tune(build(), images(12, 3, 16), keep=0.98, metric=metric)
    assert tuning.reached and tuning.chosen.metric is not None and tuning.chosen.metric >= 0.98
    assert tuning.metric["name"] == ("output-agreement" if metric is None else f"{__name__}:top1")
    check(tuning.model)


def test_tune_leaves_broken_images_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(16):
        pixels = rng.integers(0, 255, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
    whole = qdqtool.tune(segmentation(), tmp_path, keep=0.9)
    (tmp_path / "03.png").write_bytes(b"no image")
    tuning = qdqtool.tune(segmentation(), tmp_path, keep=0.9)
    (unread,) = (w for w in tuning.warnings if w.code == "unread-images")
    assert (unread.values["count"], unread.values["file"]) == (1, "03.png")
    assert tuning.chosen.metric != whole.chosen.metric
    assert tuning.chosen.chosen_on == whole.chosen.chosen_on


def test_save_never_replaces_an_input(tmp_path: Path) -> None:
    model, data = tmp_path / "m.onnx", tmp_path / "x.npy"
    onnx.save(branchy(), model)
    np.save(data, np.concatenate([next(iter(d.values())) for d in DATA]))
    tuning = qdqtool.tune(model, data, keep=0.9, method="mse")
    before = model.read_bytes(), data.read_bytes()
    for save, path in itertools.product((tuning.save, tuning.save_result), (model, data)):
        with pytest.raises(QdqtoolError, match=path.name):
            save(path)
    assert (model.read_bytes(), data.read_bytes()) == before
    tuning.save_result(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes().startswith(b"{")


def random_images() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"images": rng.random((1, 3, 16, 16), np.float32)} for _ in range(8)]


@pytest.mark.parametrize("whole_front", [False, True])
def test_tune_without_gain_by_int8_is_an_error(whole_front: bool) -> None:
    proto = conv_net()
    next(n for n in proto.graph.node if n.name == "conv2").name = "other"
    with pytest.raises(QdqtoolError, check=has("no-candidates")):
        qdqtool.tune(proto, random_images(), include=["conv"], whole_front=whole_front)


def test_tune_leaves_excluded_convolution_float() -> None:
    """A float convolution may still add a Q to the tensor that an excluded convolution consumes."""
    proto = conv_net()
    proto.graph.node[-1].name = "last"
    tuning = qdqtool.tune(proto, random_images(), keep=0.999, include=["conv"], whole_front=True)
    assert tuning.chosen.cost.int8 <= 3 and tuning.front
