"""What a time limit leaves time for."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import qdqtool
from qdqtool.insertion.sample_runs import FP16_SAMPLES
from qdqtool.ir.graph import Model
from qdqtool.trt.targets import target_named
from qdqtool.tuning import api
from qdqtool.tuning.evaluator import CandidateEvaluator, OutOfTime
from qdqtool.tuning.image_sets import open_sets
from qdqtool.tuning.measure import map_on_threads
from qdqtool.tuning.planner import Configuration
from qdqtool.tuning.recipe import Recipe
from qdqtool.tuning.search import PlacementSearch
from qdqtool.tuning.store import MeasurementStore
from qdqtool.tuning.time_plan import reserve_time
from tests.insertion.nets import detector, images
from tests.notes import note_codes
from tests.tuning.conftest import Clock
from tests.tuning.nets import branchy, job_of, planner_of

DATA = images(4, 16, 16)

pytestmark = pytest.mark.usefixtures("constant_costs")


def search_with(evaluator: Any, planner: Any = None, limit: float = 0.0) -> PlacementSearch:
    return PlacementSearch(
        planner or planner_of(branchy(), DATA), evaluator, 0.9, None, False, print, limit
    )


def test_ranges_take_a_quarter_of_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each sample takes a second for ranges, everything else takes no time."""
    collect_statistics = api.collect_statistics

    def collect_slowly(model: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        clock.now += len(data)
        return collect_statistics(model, data, *arguments, **options)

    monkeypatch.setattr(api, "collect_statistics", collect_slowly)
    data, options = images(48, 16, 16), {"method": "mse", "state": tmp_path / "state"}
    results = []
    for limit in (40.0, 20.0, None, 40.0):
        clock.now = 0.0
        tuning = qdqtool.tune(branchy(), data, keep=0.9, time_limit=limit, **options)
        rooms = [n.values["room"] for n in tuning.notes if n.code == "ranges-on"]
        used = tuning.images["calibration"]
        results.append((clock.now, used, rooms, tuning.effort["runs"] > 0))
    # The second run uses the ranges of the first one, the last one those of the third one. Without
    # a limit, the ranges of the result are from all images.
    assert results == [
        (14.0, 10, [10], True),
        (10.0, 10, [10], False),
        (24.0 + 48.0, 48, [], True),
        (24.0, 24, [24], False),
    ]


def test_predictions_end_at_the_deadline() -> None:
    evaluator = CandidateEvaluator(None, None, None, None, 1)  # type: ignore[arg-type]
    search = search_with(evaluator)
    search.prepare()
    assert search.decisions
    evaluator.deadline = 0.0
    with pytest.raises(OutOfTime):
        search.prepare()


@pytest.fixture
def limited(clock: Clock) -> PlacementSearch:
    """Return a search of 90 s, in which building a model takes 4 s."""

    def build(plan: object, weights: str) -> tuple[Model, list[object]]:
        clock.now += 4.0
        return Model(branchy()), []

    planner = SimpleNamespace(
        fp16=False, target=target_named("trt8.5"), plan=lambda configuration: None, build=build
    )
    sets = SimpleNamespace(
        chosen_on=tuple(range(32)), swept_on=tuple(range(8)), judged_on=tuple(range(36))
    )
    return search_with(SimpleNamespace(deadline=90.0, sets=sets), planner, 90.0)


def test_reserve_time_keeps_time_to_judge_and_write(limited: PlacementSearch, clock: Clock) -> None:
    """Writing takes twice as long as building once, and judging two placements a fifth of the time.

    Ten placements are measured in a third of the time, and a third is left for combinations.
    """
    reserve_time(limited, 0.5)
    sets = limited.evaluator.sets
    assert (len(sets.chosen_on), len(sets.judged_on)) == (6, 18)
    assert sets.swept_on == sets.chosen_on and max(sets.chosen_on) > 24
    assert note_codes(limited.notes) == ["chosen-on", "judged-on"]
    assert (limited.final_deadline, limited.last_judging, limited.evaluator.deadline) == (
        82.0,
        68.5,
        64.0,
    )
    assert limited.fp16_samples == FP16_SAMPLES
    clock.now = 0.0
    assert limited.sweep_end == 34.0
    clock.now = 55.0
    assert limited.sweep_end == 58.0  # two thirds of the 9 s that are left


@pytest.mark.parametrize(
    ("each", "samples", "end"), [(0.5, 4, 76.0), (0.25, 6, 77.5), (0.01, FP16_SAMPLES, 81.76)]
)
def test_reserve_time_keeps_time_to_compare_fp16(
    limited: PlacementSearch, each: float, samples: int, end: float
) -> None:
    """Running three models may take a twentieth of the time, and takes four samples at least."""
    limited.planner.fp16 = True
    reserve_time(limited, each)
    assert limited.fp16_samples == samples and limited.final_deadline == pytest.approx(end)


def test_fp16_is_compared_on_samples_that_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def compare(floats: Any, models: Any, data: Any, *, samples: int) -> list[Any]:
        calls.append((len(models), len(data), samples))
        return []

    monkeypatch.setattr(
        api, "reserve_time", lambda search, each: setattr(search, "fp16_samples", 5)
    )
    monkeypatch.setattr(api.losses, "compare_outputs", compare)
    options: Any = {"method": "mse", "keep": 0.1, "target": "trt11", "say": lambda line: None}
    tuning = qdqtool.tune(branchy(), images(16, 16, 16), **options)
    assert calls == [(2, 5, 5)] and "measured-in-fp32" in note_codes(tuning.notes)


def test_placements_measured_before_the_deadline_are_kept() -> None:
    recipes: list[Recipe] = []

    def measure_metric(new: Sequence[Recipe], samples: Sequence[int], what: str) -> None:
        recipes.extend(new)
        if len(recipes) > 1:
            raise OutOfTime

    evaluator = SimpleNamespace(
        deadline=1e12,
        is_late=False,
        measure_metric=measure_metric,
        value=lambda *_: 0.5,
        sets=SimpleNamespace(chosen_on=(0,)),
    )
    search = search_with(evaluator)
    search.prepare()
    configurations = [j.candidate.configuration for j in search.list_measured_decisions()]
    choice = search.start.merge(next(c for c in configurations if c.floats))
    with pytest.raises(OutOfTime):
        search.measure([("everything INT8", search.start), ("less", choice)])
    assert [p.name for p in search.pool.values()] == ["everything INT8"]


class EndingMeasurements(CandidateEvaluator):
    """CandidateEvaluator whose first sweeps of single choices end early, after some runs."""

    def __init__(self, runs: Sequence[int]) -> None:
        planner = planner_of(branchy(), DATA)
        sets = open_sets(planner.model, images(16, 16, 16))
        super().__init__(
            job_of(planner, images(16, 16, 16)),
            sets,
            map_on_threads(1),
            MeasurementStore(None, {}),
            1,
        )
        self.early = iter(runs)
        self.sweeps: list[str] = []

    def sweep(self, recipes: Any, images: Any, title: str, until: Any = None) -> bool:
        self.sweeps.append(title)
        for runs in self.early if title == "Sensitivity" else ():
            self.runs += runs
            return False
        return super().sweep(recipes, images, title, until)


@pytest.mark.parametrize(("runs", "rounds"), [((3, 2), 3), ((3, 0, 1), 2)])
def test_search_goes_back_to_single_choices_as_long_as_it_measures(
    runs: tuple[int, ...], rounds: int
) -> None:
    evaluator = EndingMeasurements(runs)
    lines: list[str] = []
    search = PlacementSearch(planner_of(branchy(), DATA), evaluator, 1.0, None, True, lines.append)
    search.prepare()
    search.run()
    assert lines.count("putting choices together") == rounds
    assert ("Other ranges" in evaluator.sweeps) is (rounds == 3)  # once all choices are measured


@pytest.mark.slow
def test_limited_search_measures_heads_and_own_errors_before_sensitivity(
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
    monkeypatch.setattr(CandidateEvaluator, "sweep", end)
    tuning = qdqtool.tune(
        detector(), images(8, 3, 64, name="images"), keep=1.0, metric=correlate, time_limit=3600
    )
    first = names[: names.index("sensitivity")]
    worst = [f"{k} by their own error" for k in (1, 2, 4, 8, 16)]
    assert first[-7:] == ["last convolutions float", "whole head float", *worst]
    assert set(first[:-7]) == {"everything INT8"}
    points = {p.name: p for p in [*tuning.front, *tuning.others]}
    assert points.keys() >= set(first) and not tuning.reached
    assert tuning.chosen.chosen_on == max(p.chosen_on for p in points.values())


def correlate(reference: Any, outputs: Any, image: str) -> float:
    pairs = [(reference[n].ravel(), outputs[n].ravel()) for n in reference]
    return float(np.mean([np.corrcoef(*pair)[0, 1] for pair in pairs]))
