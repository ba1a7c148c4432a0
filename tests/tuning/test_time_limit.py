import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.tuning import api
from qdqtool.tuning.evaluator import CandidateEvaluator, OutOfTime
from qdqtool.tuning.image_sets import open_sets
from qdqtool.tuning.measure import (
    MeasurementTask,
    TaskMapper,
    TaskResult,
    TuningJob,
    map_on_threads,
)
from qdqtool.tuning.planner import Configuration, PlacementCost, Planner
from qdqtool.tuning.recipe import FLOAT_RECIPE, Recipe
from qdqtool.tuning.search import PlacementSearch
from qdqtool.tuning.store import MeasurementStore
from qdqtool.tuning.time_plan import fit_samples_to_time
from tests.errors import has
from tests.insertion.nets import detector, images
from tests.notes import note_codes
from tests.tuning.conftest import Clock
from tests.tuning.nets import branchy, planner_of
from tests.tuning.tuned import tune

DATA = images(4, 16, 16)

pytestmark = pytest.mark.usefixtures("constant_costs")


@pytest.mark.parametrize(
    ("seconds", "samples", "codes"),
    [
        pytest.param(0.0, (32, 32), [], id="time-for-all"),
        pytest.param(0.5, (6, 18), ["chosen-on", "judged-on"], id="short"),
        pytest.param(9.0, (4, 4), ["chosen-on", "judged-on"], id="at-least-four"),
    ],
)
def test_fit_samples_limits_both_sets(
    seconds: float, samples: tuple[int, int], codes: list[str]
) -> None:
    """The time limit is 90 s.

    Ten placements on selection images take 30 s, and one placement on held-out images takes 9 s.
    """
    planner = planner_of(branchy(), DATA)
    sets = open_sets(planner.model, images(5, 16, 16), images(64, 16, 16))
    evaluator = CandidateEvaluator(None, sets, None, MeasurementStore(None, {}), 1)  # type: ignore[arg-type]
    search = PlacementSearch(planner, evaluator, 0.9, None, False, print)
    fit_samples_to_time(search, 90.0, seconds)
    assert (len(sets.chosen_on), len(sets.judged_on)) == samples
    assert set(sets.swept_on) <= set(sets.chosen_on) and len(sets.swept_on) == 4
    assert max(sets.chosen_on) > 24 and note_codes(search.notes) == codes
    for note, use in zip(search.notes, (" of 32 selection ", " of 32 held-out "), strict=False):
        assert use in note
    evaluator.deadline = 0.0
    with pytest.raises(OutOfTime):  # before the first run
        evaluator.measure_metric([FLOAT_RECIPE], sets.chosen_on, "Float")


@pytest.mark.parametrize("limit", [90.0, 30.0])
def test_fit_samples_keeps_more_samples_of_an_earlier_run(limit: float) -> None:
    """A run takes 1.5 s, which the store knows: for a third of the time, fewer samples fit."""
    planner = planner_of(branchy(), DATA)
    sets = open_sets(planner.model, images(5, 16, 16), images(64, 16, 16))
    store, earlier = MeasurementStore(None, {}), (sets.chosen_on[::6], sets.judged_on[::6])
    store.record_samples(*earlier, seconds_per_run=1.5)
    evaluator = CandidateEvaluator(None, sets, None, store, 1)  # type: ignore[arg-type]
    fit_samples_to_time(PlacementSearch(planner, evaluator, 0.9, None, False, print), limit, 0.0)
    assert (sets.chosen_on, sets.judged_on) == earlier


def slow_mapper(clock: Clock, seconds: float) -> TaskMapper:
    def run(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        clock.now += seconds
        return map_on_threads(1)(job, tasks)

    return run


@pytest.mark.parametrize("measures", [True, False], ids=["ends-in-search", "ends-before-search"])
def test_shorter_time_limit_keeps_the_earlier_choice(
    clock: Clock, tmp_path: Path, measures: bool
) -> None:
    options: dict[str, Any] = {"keep": 0.984, "state": tmp_path / "t.tuning"}
    first = tune(**options)
    assert first.reached and first.chosen.name != "INT8 by default"

    mapper, limit = slow_mapper(clock, 100.0), 60.0 if measures else 1e-9
    second = tune(mapper=mapper, time_limit=limit, **options)
    assert second.reached and second.chosen.configuration == first.chosen.configuration
    assert (second.chosen.metric, second.chosen.cost) == (first.chosen.metric, first.chosen.cost)


def test_accurate_int8_of_an_earlier_run_is_a_complete_result(clock: Clock, tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep": 0.9, "state": tmp_path / "t.tuning"}
    first = tune(mapper=slow_mapper(clock, 30.0), time_limit=200.0, **options)
    assert first.reached and first.chosen.name == "INT8 by default"
    second = tune(time_limit=1e-9, **options)
    assert second.chosen.configuration == first.chosen.configuration
    assert second.effort["stopped"] == "" and second.effort["runs"] == 0
    # The third run is faster than the first one, so there is time for the ranges of all images.
    assert tune(time_limit=200.0, **options).images["calibration"] == 16


def collect_slowly(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    collect_statistics = api.collect_statistics

    def collect(model: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        clock.now += seconds * len(data)
        return collect_statistics(model, data, *arguments, **options)

    monkeypatch.setattr(api, "collect_statistics", collect)


@pytest.mark.parametrize(
    ("seconds", "images_used", "codes"),
    [
        (2.0, 16, {"ranges-from-all"}),
        (20.0, 8, {"ranges-on"}),
        (60.0, 4, {"searched-on", "ranges-on"}),
    ],
)
def test_ranges_come_from_as_many_images_as_there_is_time_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, images_used: int, codes: set[str]
) -> None:
    """The search collects ranges for at most a third of the time limit, or from 4 samples."""
    collect_slowly(clock, monkeypatch, seconds)
    tuning = tune(keep=0.9, time_limit=600.0)
    assert tuning.images["calibration"] == images_used and clock.now <= 600.0
    assert codes <= set(note_codes(tuning.notes))


@pytest.mark.parametrize(("sample", "prediction"), [(30.0, 0.0), (1.0, 9.0)])
def test_error_names_a_time_limit_that_is_long_enough(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sample: float,
    prediction: float,
) -> None:
    """The limit hardly depends on when the run ended. The next run predicts no cost again."""
    collect_slowly(clock, monkeypatch, sample)
    predicted: list[str] = []

    def predict_cost(self: Planner, recipe: Recipe) -> PlacementCost:
        clock.now += prediction
        predicted.append(recipe.key)
        return PlacementCost(99, len(recipe.weights), 0)

    monkeypatch.setattr(Planner, "predict_cost", predict_cost)
    limits, state = [], tmp_path / "t.tuning"
    for short, path in ((50.0, None), (90.0, None), (50.0, state)):
        predicted.clear()
        clock.now = 0.0
        with pytest.raises(QdqtoolError, check=has("timeout", parameter="time_limit")) as raised:
            tune(keep=0.9, time_limit=short, state=path)
        assert clock.now <= max(short, 6 * sample) + prediction
        limits.append(float(re.findall(r"about (\d+) s", str(raised.value))[0]))
        continues = f"s or more. The same command then continues from {state}" in str(raised.value)
        assert continues is (path is not None and bool(predicted))
    assert limits[1] == pytest.approx(limits[0], rel=0.2) and limits[2] <= limits[0]
    clock.now = 0.0
    assert tune(keep=0.9, time_limit=limits[2], state=state).reached
    assert len(predicted) == len(set(predicted))


@pytest.mark.slow
def test_limited_search_measures_heads_and_input_errors_before_sensitivity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    measure = PlacementSearch.measure

    def record(self: PlacementSearch, named: Sequence[tuple[str, Configuration]]) -> None:
        names.extend(name for name, _ in named)
        measure(self, named)

    def end(self: CandidateEvaluator, *arguments: object) -> bool:
        names.append("sensitivity")
        return False

    monkeypatch.setattr(PlacementSearch, "measure", record)
    monkeypatch.setattr(CandidateEvaluator, "measure_output_errors", end)
    tuning = qdqtool.tune(
        detector(), images(8, 3, 64, name="images"), keep=1.0, metric=correlate, time_limit=3600
    )
    first = names[: names.index("sensitivity")]
    worst = [f"{k} worst by input error" for k in (1, 2, 4, 8, 16)]
    assert first[-7:] == ["last convolutions float", "whole head float", *worst]
    assert first[0] == "INT8 by default" and "head in INT8 except DFL" in first[:-7]
    points = {p.name: p for p in [*tuning.front, *tuning.others]}
    assert points.keys() >= set(first) and not tuning.reached
    assert tuning.chosen.chosen_on == max(p.chosen_on for p in points.values())


def correlate(reference: Any, outputs: Any, image: str) -> float:
    pairs = [(reference[n].ravel(), outputs[n].ravel()) for n in reference]
    return float(np.mean([np.corrcoef(*pair)[0, 1] for pair in pairs]))
