"""What a limit on time leaves time for."""

import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qdqtool
from qdqtool.base.notes import Remark, remarks
from qdqtool.insertion.losses import FEW
from qdqtool.tuning import api, expected, measurements
from qdqtool.tuning import search as search_module
from qdqtool.tuning.configuration import Configuration, Recipe
from qdqtool.tuning.search import Search
from tests.insertion.nets import detector, images
from tests.tuning.nets import branchy, planner_of

DATA = images(4, 16, 16)

pytestmark = pytest.mark.usefixtures("costs_take_no_time")


def test_ranges_take_a_quarter_of_the_time_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sample takes a second of a clock of its own then, everything else none."""
    now = [0.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], process_time=time.process_time, time=time.time
    )
    for module in (api, expected, measurements, search_module):
        monkeypatch.setattr(module, "time", clock)
    collect = api.collect_for

    def collecting(model: Any, data: Any, *given: Any, **how: Any) -> Any:
        now[0] += len(data)
        return collect(model, data, *given, **how)

    monkeypatch.setattr(api, "collect_for", collecting)
    data = images(48, 16, 16)
    found = []
    for limit in (40.0, 20.0, None, 40.0):
        began = now[0]
        tuning = qdqtool.tune(
            branchy(), data, method="mse", keep=0.9, time_limit=limit, state=tmp_path / "state"
        )
        said = [n.values["room"] for n in tuning.notes if n.remark is Remark.RANGES_ON]
        found.append(
            (now[0] - began, tuning.images["calibration"], said, tuning.effort["runs"] > 0)
        )
    # The second goes on with the ranges of the first, the third begins anew, and the last goes on with those.
    assert found == [
        (14.0, 10, [10], True),
        (10.0, 10, [10], False),
        (24.0, 24, [], True),
        (24.0, 24, [], False),
    ]


def test_predictions_end_with_the_time() -> None:
    bench = measurements.Measurements(None, None, None, None, 1)  # type: ignore[arg-type]
    search = Search(planner_of(branchy(), DATA), bench, 0.9, None, False, print)
    search.prepare()
    assert search.judged
    bench.deadline = 0.0
    with pytest.raises(measurements.OutOfTime):
        search.prepare()


def test_what_time_is_left_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 90 seconds a third for combinations; at the end so many as predicting and writing take twice, and judging two
    placements on as many samples as a fifth is enough for. Ten are measured on what a third is enough for. With FP16
    beside INT8 a twentieth goes into running three models on some samples more, four at least."""
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    for module in (expected, search_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(expected, "_write_once", lambda search: 4.0)
    sets = types.SimpleNamespace(
        chosen_on=tuple(range(32)), swept_on=tuple(range(8)), judged_on=tuple(range(36))
    )
    bench = types.SimpleNamespace(deadline=90.0, sets=sets)
    planner = types.SimpleNamespace(half=False)
    search = Search(planner, bench, 0.9, None, False, print, 90.0)  # type: ignore[arg-type]
    expected.leave_time(search, 0.5)
    assert (len(sets.chosen_on), len(sets.judged_on)) == (6, 18) and sets.swept_on == sets.chosen_on
    assert max(sets.chosen_on) > 24 and remarks(search.notes) == [
        Remark.CHOSEN_ON,
        Remark.JUDGED_ON,
    ]
    assert (search.ends, search.last_judged, bench.deadline) == (82.0, 68.5, 64.0)
    assert search._until == 34.0
    now[0] = 55.0
    assert search._until == 58.0  # of 9 that are left, two thirds
    assert search.moved_on == FEW
    planner.half, now[0] = True, 0.0
    for each, samples, ends in ((0.5, 4, 76.0), (0.25, 6, 77.5), (0.01, FEW, 81.76)):
        bench.deadline = 90.0
        expected.leave_time(search, each)
        assert search.moved_on == samples and search.ends == pytest.approx(ends)


def test_fp16_is_compared_on_as_many_samples_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(api, "leave_time", lambda search, each: setattr(search, "moved_on", 5))
    monkeypatch.setattr(
        api.losses,
        "compare",
        lambda floats, made, data, *, samples: asked.append((len(made), len(data), samples)) or [],
    )
    tuning = qdqtool.tune(
        branchy(), images(16, 16, 16), method="mse", keep=0.1, target="trt11", say=lambda line: None
    )
    assert asked == [(2, 5, 5)] and Remark.MEASURED_IN_FP32 in remarks(tuning.notes)


def test_what_was_measured_before_the_time_was_over_counts() -> None:
    measured: list[Recipe] = []

    def whole(recipes: Sequence[Recipe], samples: Sequence[int], what: str) -> None:
        measured.extend(recipes)
        if len(measured) > 1:
            raise measurements.OutOfTime

    bench = types.SimpleNamespace(
        deadline=1e12,
        require_time=lambda: None,
        whole=whole,
        value=lambda *_: 0.5,
        sets=types.SimpleNamespace(chosen_on=(0,)),
    )
    search = Search(planner_of(branchy(), DATA), bench, 0.9, None, False, print)  # type: ignore[arg-type]
    search.prepare()
    less = next(
        j.candidate.configuration for j in search.swept() if j.candidate.configuration.floats
    )
    with pytest.raises(measurements.OutOfTime):
        search.measure([("everything INT8", search.start), ("less", search.start.joined(less))])
    assert [p.name for p in search.pool.values()] == ["everything INT8"]


def test_time_that_combinations_leave_goes_back_to_single_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until all are measured, or none more is."""
    for swept, rounds in (
        ([(False, 3), (False, 2), (True, 1)], 3),
        ([(False, 3), (False, 0), (True, 1)], 2),
    ):
        bench = types.SimpleNamespace(
            deadline=None, runs=0, value=lambda *_: 0.5, sets=types.SimpleNamespace(chosen_on=())
        )
        search = Search(planner_of(branchy(), DATA), bench, 0.9, None, False, print)  # type: ignore[arg-type]
        left, combined = iter(swept), []

        def sweep(self: Search, left: Any = left) -> bool:
            done, runs = next(left)
            self.bench.runs += runs
            return bool(done)

        for name in ("_everything_int8", "_float_model", "_is_enough"):
            monkeypatch.setattr(Search, name, lambda self: False)
        monkeypatch.setattr(Search, "_sweep", sweep)
        monkeypatch.setattr(Search, "_ranges", lambda self: "other")
        monkeypatch.setattr(
            Search, "_combinations", lambda self, ranges, found=combined: found.append(ranges)
        )
        search.run()
        assert len(combined) == rounds and (combined[-1] == "other") is (rounds == 3)


@pytest.mark.slow
def test_a_limited_run_knows_heads_and_own_errors_before_any_sensitivity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    measure = Search.measure

    def watching(self: Search, named: Sequence[tuple[str, Configuration]]) -> None:
        asked.extend(name for name, _ in named)
        measure(self, named)

    monkeypatch.setattr(Search, "measure", watching)
    monkeypatch.setattr(
        Search, "_sweep", lambda self: asked.append("sensitivity")
    )  # the time for it is over
    tuning = qdqtool.tune(
        detector(), images(8, 3, 64, name="images"), keep=1.0, metric=agrees, time_limit=3600
    )
    first = asked[: asked.index("sensitivity")]
    worst = [f"{k} by their own error" for k in (1, 2, 4, 8, 16)]
    assert first[-7:] == ["last convolutions float", "whole head float", *worst]
    assert set(first[:-7]) == {"everything INT8"}
    points = {p.name: p for p in [*tuning.front, *tuning.others]}
    assert points.keys() >= set(first) and not tuning.reached
    assert tuning.chosen.chosen_on == max(p.chosen_on for p in points.values())


def agrees(reference: Any, outputs: Any, image: str) -> float:
    return float(
        np.mean([np.corrcoef(reference[n].ravel(), outputs[n].ravel())[0, 1] for n in reference])
    )
