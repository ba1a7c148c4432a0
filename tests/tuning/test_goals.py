from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.formats.tuning_text import render_tuning
from qdqtool.ir.graph import Model
from qdqtool.reasons.finding import Severity
from qdqtool.timing import gpus
from qdqtool.timing.estimate import estimate_time
from qdqtool.trt.targets import target_named
from qdqtool.tuning.measure import (
    MeasurementTask,
    TaskMapper,
    TaskResult,
    TuningJob,
    map_on_threads,
)
from qdqtool.util.notes import Note
from qdqtool.util.text import format_ms
from tests.insertion.nets import detector, images, relative_error
from tests.notes import note_codes
from tests.slow import slow_after
from tests.tuning.conftest import Clock
from tests.tuning.nets import branchy
from tests.tuning.tuned import (
    CHOSEN,
    JUDGED,
    agreement,
    insert,
    observed,
    points_of,
    tune,
)

pytestmark = pytest.mark.usefixtures("cached_rows")


def test_tune_takes_everything_int8_if_it_is_good_enough() -> None:
    tuning = tune(keep=0.9)
    assert tuning.reached and tuning.chosen.name == "INT8 by default" and not tuning.chosen.sites
    assert {(s.error_alone, s.why) for s in tuning.sites if not s.choices[0].left_out} == {
        (None, "the placement reaches the goal with this layer in INT8")
    }
    reason = "INT8 by default reaches the goal (--front measures every choice)"
    assert f"\nNo single layer was measured: {reason}\n" in str(render_tuning(tuning, 500))
    assert all(p.cost.int8 for p in points_of(tuning).values())  # without a GPU, no float model
    assert len(tune(keep=0.9, whole_front=True).front) > 2


def test_tune_takes_the_best_if_the_goal_is_not_reached() -> None:
    tuning = tune(keep=1.0, metric=always_worse)
    assert not tuning.reached and "goal-not-reached" in note_codes(tuning.notes)
    chosen = tuning.chosen
    assert chosen.chosen_on == max(p.chosen_on for p in tuning.front) < 1.0 and chosen.cost.int8
    lines = render_tuning(replace(tuning, chosen=replace(chosen, sites=[], changed={})), 500).lines
    assert "Every layer is INT8, except those that --head keeps in FP16" in lines


def test_layers_of_a_head_that_tune_quantized_are_notes() -> None:
    tuning = qdqtool.tune(
        detector(), images(4, 3, 64, name="images"), keep=0.5, metric=lambda *_: 1.0
    )
    quantized = tuning.chosen.changed
    assert points_of(tuning)["INT8 by default"].metric == 1.0  # although it is not in the front
    assert len(quantized) == 3 and "a note on these layers (HEAD-QUANT)" in str(
        render_tuning(tuning)
    )
    notes = [f for f in qdqtool.predict(tuning.model).findings if f.code == "HEAD-QUANT"]
    assert {(f.node, f.severity) for f in notes} == {(name, Severity.INFO) for name in quantized}


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


HELD_OUT = [f"sample {number}" for number in range(3, 16, 4)]
SLOW: Any = {"gpu": "T4", "clock": 300.0}  # INT8 is faster even in a network of this size


def test_budget_takes_the_most_accurate_that_fits() -> None:
    whole = tune(keep=0.995, **SLOW)
    assert whole.gpu is not None
    # A search with a budget looks for "fewer choices" elsewhere.
    points = [p for p in whole.front if p.name != "fewer choices"]
    assert len(points) > 2
    for point in points[1::2]:
        budget = point.cost.ms + 1e-9
        tuning = tune(budget_ms=budget, **SLOW)
        chosen = tuning.chosen
        assert tuning.reached and chosen.cost.ms is not None and chosen.cost.ms <= budget
        assert round(chosen.chosen_on, 3) >= round(point.chosen_on, 3)


@pytest.mark.parametrize(("scale", "weight", "decimals"), [(1.0, 0.01, 3), (1e-3, 1.0, 6)])
def test_budget_takes_the_cheapest_of_equal_printed_metrics(
    scale: float, weight: float, decimals: int
) -> None:
    """Metrics on a smaller scale have more decimals, so that their differences count."""
    metric = lambda a, b, image: scale * (1.0 - weight * output_error(a, b))  # noqa: E731
    tuning = tune(budget_ms=1000.0, metric=metric, swept_on=1, **SLOW)
    default = scale * (1.0 - weight * (1.0 - agreement(insert([]).model, CHOSEN)))
    shown = f"{default:.{decimals}f}"
    assert f" {shown}  " in str(render_tuning(tuning))
    assert tuning.chosen is tuning.front[0 if float(shown) == scale else -1]


def output_error(reference: Any, outputs: Any) -> float:
    (expected,), (actual,) = reference.values(), outputs.values()
    return relative_error(expected, actual)


def test_budget_names_a_cheaper_candidate_that_is_better_on_held_out_images() -> None:
    tuning = tune(
        budget_ms=1000.0,
        metric=lambda *arguments: 2.0 - misleading_agreement(*arguments),
        swept_on=1,
        **SLOW,
    )
    cheaper = tuning.cheaper_alternative
    assert cheaper is points_of(tuning)["INT8 by default"]
    assert cheaper.metric == pytest.approx(2.0 - agreement(insert([]).model, JUDGED), abs=1e-6)
    assert tuning.as_json()["cheaper_alternative"] == cheaper.as_json()
    for changes, comparison in (
        ({}, f"but not on 4 selection images ({cheaper.chosen_on:.3f} instead of 1.000)"),
        ({"metric": 0.99}, "The 4 held-out images show no difference: its interval includes the"),
    ):
        shown = replace(tuning, cheaper_alternative=replace(cheaper, **changes))
        assert comparison in str(render_tuning(shown, 500))


def misleading_agreement(reference: Any, outputs: Any, image: str) -> float:
    """Agreement on held-out images; on selection images, the largest error is the best."""
    return 1.0 + output_error(reference, outputs) * (-1 if image in HELD_OUT else 1)


def test_goal_takes_the_cheapest_that_reaches_it_on_held_out_images_too() -> None:
    """On the selection images, `INT8 by default` is better and cheaper than all others."""
    tuning = tune(keep=0.984, metric=misleading_agreement)
    reaching = [
        p for p in points_of(tuning).values() if agreement(tuning.model_of(p), JUDGED) >= 0.984
    ]
    assert tuning.reached and tuning.chosen is min(reaching, key=lambda point: point.cost.value)
    default = points_of(tuning)["INT8 by default"]
    assert tuning.chosen.chosen_on < default.chosen_on
    for metric, end in ((default.metric, "images"), (None, "images or were not measured there")):
        default.metric = metric
        text = str(render_tuning(tuning, 500))
        assert ", and the chosen candidate (*); goal " in text and "; * marks" not in text
        assert f" as accurate on the selection images miss the goal on the held-out {end}\n" in text


@pytest.mark.usefixtures("clock")
def test_budget_that_nothing_fits_takes_the_fastest() -> None:
    tuning = tune(budget_ms=1e-4, **SLOW, time_limit=60)
    assert not tuning.reached and tuning.chosen.cost.ms == min(p.cost.ms or 0 for p in tuning.front)
    for stopped, candidates in (("", ""), ("time limit", " measured in this time")):
        shown = replace(tuning, effort={**tuning.effort, "stopped": stopped})
        assert (
            f"no candidate{candidates} is within 0.0001 ms. " in render_tuning(shown, 500).lines[0]
        )


def test_budget_that_the_float_model_fits_takes_it(tmp_path: Path) -> None:
    network = branchy()
    network.opset_import[0].version = 12  # the Q/DQ model gets a higher opset
    onnx.save(network, tmp_path / "m.onnx")
    tuning = tune(model=tmp_path / "m.onnx", budget_ms=1000.0, **SLOW, swept_on=1)
    (note,) = (n for n in tuning.notes if n.code in ("float-fits", "float-fits-and-written"))
    gpu, target = gpus.choose_gpu("T4", 300.0, None), target_named("trt8.5")
    time = estimate_time(Model(branchy()), qdqtool.predict(branchy()), gpu, target)
    assert note.values["ms"] == pytest.approx(time.total_ms, rel=5e-4)
    assert tuning.reached and tuning.unchanged and tuning.model == network
    assert tuning.chosen.cost.int8 == 0 and not tuning.quantized
    for reached, headline in (
        (True, "goal met by the float model. The float model is within 1000 ms."),
        (False, "goal NOT met: no candidate is within 1000 ms. The fastest candidate is the float"),
    ):
        shown = str(render_tuning(replace(tuning, reached=reached), 500))
        assert shown.startswith(headline) and "unchanged" in shown.splitlines()[0]
    stopped = {**tuning.effort, "stopped": "time limit"}
    late = replace(tuning.front[0], metric=None)
    changes = {"budget_ms": None, "keep": 0.97, "effort": stopped, "front": [late]}
    text = str(render_tuning(replace(tuning, **changes), 500))
    assert text.startswith("No measured INT8 placement faster than FP16 reached 0.970 on both")
    assert "unchanged. Give a longer --time-limit" in text and "70% are for the search" in text
    fastest = f"Fastest: INT8 by default, {format_ms(late.cost.ms)} predicted on Tesla T4, "
    assert fastest in text and ", not measured on the held-out images" in text
    assert " only this layer is INT8" in text and "; chosen:" not in text
    few = [Note("few images", code="few-images-to-judge")]
    assert "Give more images, a longer" in str(render_tuning(replace(tuning, **changes, notes=few)))


def test_front_has_the_float_model_if_its_time_is_known() -> None:
    tuning = tune(keep=1.0, **SLOW, whole_front=True, swept_on=1)
    (float_point,) = (p for p in points_of(tuning).values() if not p.cost.int8)
    assert float_point.chosen_on == pytest.approx(tuning.metric["float"], abs=1e-6)
    assert tuning.front[-1] is tuning.chosen is float_point and not tuning.bought
    assert not any("Linear" in n.op_type for n in tuning.model.graph.node)


def set_clock(clock: Clock, seconds: float, runs: int) -> TaskMapper:
    """Measure in this process, and set the clock after a number of runs."""
    results: list[TaskResult] = []

    def observe(job: TuningJob, result: TaskResult) -> None:
        results.append(result)
        if len(results) >= runs:
            clock.now = seconds

    return observed(observe)


@pytest.mark.parametrize(
    ("seconds", "runs"), slow_after(2, [(450.0, 17), (480.0, 8), (450.0, 61), (450.0, 41)])
)
def test_time_limit_ends_with_the_best_so_far(clock: Clock, seconds: float, runs: int) -> None:
    """The search ends after 420 s. 8 runs are those of the float and the INT8 model on 4 images."""
    tuning = tune(keep=0.99, mapper=set_clock(clock, seconds, runs), time_limit=600)
    assert tuning.effort["stopped"] == "time limit" and tuning.chosen.metric is not None
    assert tuning.front and (runs > 8 or tuning.chosen.name == "INT8 by default")
    (note,) = (n for n in tuning.notes if n.code == "ranges-from-all")
    assert agreement(tuning.model, JUDGED) == pytest.approx(note.values["metric"], abs=1e-6)


@pytest.mark.parametrize("limit", slow_after(2, [60.0, 150.0, 40.0, 90.0]))
def test_time_limit_measures_the_obvious_first_and_ends_in_time(clock: Clock, limit: float) -> None:
    """A run on a sample takes one second by the test's clock, and nothing else takes time."""
    sweep_ends: list[float] = []
    swept: list[set[int]] = []  # convolutions that a sweep quantizes
    before: list[set[int]] = []  # float convolutions of combinations before the first sweep
    everything: set[int] = set()  # convolutions of the first candidate, "INT8 by default"

    def mapper(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        whole = any(t.with_metric for t in tasks)
        new = [{n for n, _, _ in c.weights} for t in tasks for c in t.candidates if c.weights]
        everything.update(() if everything else next(iter(new), ()))
        if not whole:
            swept.extend(new)
        elif not swept:
            before.extend(everything - nodes for nodes in new)
        for result in map_on_threads(1)(job, tasks):
            clock.now += sum(map(len, result.values()))
            sweep_ends.extend(() if whole else (clock.now,))
            yield result

    tuning = tune(keep=0.9999, mapper=mapper, workers=1, time_limit=limit)
    assert clock.now <= 1.1 * limit and tuning.chosen.metric is not None
    names = points_of(tuning).keys()
    assert {f"{k} worst by input error" for k in (1, 2, 4)} | {"INT8 by default"} <= names
    assert max(sweep_ends, default=0.0) <= 0.7 * limit
    late = {c.why for s in tuning.sites for c in s.choices if not c.left_out and c.error is None}
    assert all(why.startswith("the time limit left no time") for why in late) and bool(late) == (
        limit < 60
    )
    # Sweeps come after one, two and four nodes worst by input error, the largest error first.
    if swept:
        assert {1, 2, 4} <= {len(nodes) for nodes in before} and swept[0] in before
    if limit < 90:
        assert len({frozenset(nodes) for nodes in swept}) < len(tuning.sites)
    else:
        assert sweep_ends and any("sensitivity" in name or "choice" in name for name in names)


def test_time_left_by_the_combinations_is_for_further_choices(clock: Clock) -> None:
    """Single choices take 280 s, and combinations no time: half of the search, 210 s, is short."""
    mapper = observed(
        lambda job, result: clock.advance(
            10.0
            * any(row and row.evidence is None for rows in result.values() for row in rows.values())
        )
    )
    tuning = tune(keep=1.0, mapper=mapper, workers=1, time_limit=600)
    assert {s.swept_on for s in tuning.sites if not s.choices[0].left_out} == {4}
    assert clock.now > 210.0 and note_codes(tuning.notes).count("goal-not-reached") == 1


def test_late_result_has_the_metric_of_candidates_that_failed(clock: Clock) -> None:
    """Candidates reach the goal on the selection images, and miss it on the held-out images."""

    def metric(reference: Any, outputs: Any, image: str) -> float:
        error = output_error(reference, outputs)
        misses = error > 0.0 and image in HELD_OUT
        clock.now = 500.0 if misses else clock.now  # after the end of the evaluation
        return 0.5 if misses else 1.0 - error

    tuning = tune(keep=0.978, metric=metric, time_limit=600, whole_front=True, workers=1)
    assert not tuning.reached and tuning.effort["stopped"] == "time limit"
    assert tuning.front[0].chosen_on < 0.978
    assert [p.metric for p in tuning.front[:3]] == [None, 0.5, None]
    (late,) = (n for n in tuning.notes if n.code == "candidates-not-tried")
    assert "80% of the time limit had passed" in late and late.values["count"] == sum(
        p.chosen_on >= 0.978 and p.metric is None for p in points_of(tuning).values()
    )
