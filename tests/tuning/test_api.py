import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool import Tuning, prediction
from qdqtool.errors import QdqtoolError
from qdqtool.formats.output import Style
from qdqtool.formats.tuning_text import render_tuning
from qdqtool.ir.graph import Model
from qdqtool.tuning.evaluator import CandidateEvaluator, OutOfTime
from qdqtool.tuning.image_sets import open_sets
from qdqtool.tuning.measure import (
    MeasurementTask,
    TaskResult,
    TuningJob,
    map_on_threads,
)
from qdqtool.tuning.options import SearchBudget
from qdqtool.tuning.planner import Configuration, PlacementCost
from qdqtool.tuning.recipe import Recipe
from qdqtool.tuning.result import PlacementResult, SiteChoice
from qdqtool.tuning.search import PlacementSearch
from qdqtool.tuning.selection import ResultSelection
from qdqtool.tuning.summary import warn_small_sets
from tests.accuracy.test_agreement import detecting_network
from tests.calibration.nets import conv_net, write_pictures
from tests.errors import has
from tests.insertion.nets import check, images, run, set_value, value_of
from tests.insertion.transformers import samples, vit
from tests.notes import note, note_codes
from tests.tuning.conftest import Clock
from tests.tuning.nets import branchy, floats, planner_of, resnet, segmentation
from tests.tuning.tuned import (
    CALIBRATION,
    CHOSEN,
    DATA,
    JUDGED,
    KEEP,
    agreement,
    float_output,
    insert,
    observed,
    points_of,
    tune,
)

pytestmark = pytest.mark.usefixtures("cached_rows")


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
    inserted = qdqtool.insert(branchy(), DATA, method="mse", **tuned.insert_arguments())
    assert inserted.model.graph == tuned.model.graph and tuned.chosen.configuration.floats
    (note,) = (n for n in tuned.notes if n.code == "ranges-from-all")
    assert note.values["images"] == len(DATA)
    metric = agreement(tuned.model, JUDGED)
    assert note.values["metric"] == tuned.written_metric == pytest.approx(metric, abs=1e-6)
    assert (
        render_tuning(replace(tuned, written_metric=0.5), 500)
        .lines[0]
        .startswith("goal met: 0.500 on ")
    )


def test_ranges_from_all_images_that_miss_the_goal_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ResultSelection, "judge_recipe", lambda selection, recipe: KEEP - 0.01)
    tuning = tune(keep=KEEP)
    assert [q.scale for q in tuning.quantized] == [
        q.scale for q in insert(tuning.chosen.configuration.floats).quantized
    ]
    assert "ranges-from-all-worse" in note_codes(tuning.notes)
    assert tuning.insert_arguments() is None and tuning.images["calibration"] == len(CALIBRATION)


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
    (line,) = (line for line in text.splitlines() if line.startswith("  Cheaper: "))
    assert f"{cheapest.metric:.3f} ({cheapest.low:.3f} to {cheapest.high:.3f})" in line


@pytest.mark.parametrize(
    ("chosen_on", "metric", "selection", "held_out", "goals"),
    [
        (0.96982, None, "0.9698", "not measured", "0.9700 on both sets of images"),
        (0.96932, None, "0.969", "not measured", "0.970 on both sets of images"),
        (0.96996, 0.5, "0.96996", "0.50000 (", "0.97000 on both sets of images"),
        (0.97, 0.969996, "0.970000", "0.969996 (", "0.970000 on both sets of images"),
        (0.98, 0.9699999, "0.980000", "0.970000 (", "0.970000 on both sets of images"),
    ],
)
def test_metric_below_the_goal_is_printed_below_it(
    tuned: Tuning, chosen_on: float, metric: float | None, selection: str, held_out: str, goals: str
) -> None:
    point = replace(tuned.front[0], chosen_on=chosen_on, metric=metric)
    shown = replace(tuned, keep=0.97, front=[point], chosen=point, cheapest_plausible=None)
    lines = render_tuning(replace(shown, written_metric=None), 500).lines
    assert any(line.endswith(f"; goal {goals}") for line in lines)
    (row,) = (line for line in lines if line.startswith("* "))
    assert f" {selection}  {held_out}" in row


@pytest.mark.parametrize(
    ("name", "sites", "shown", "below"),
    [
        (
            "1 worst",
            ["/model.22/cv2.2/cv2.2.2/Conv"],
            "1 choice",
            "FP16: /model.22/cv2.2/cv2.2.2/Conv",
        ),
        ("1 worst", ["branch of /head/Conv"], "branch of /head/Conv", ""),
        ("1 worst by a very long name", ["c1", "c2"], "2 choices", "1 worst by a very long name"),
        (
            "/model.22/cv2.2/cv2.2.2/Conv in INT8",
            [],
            "1 choice",
            "/model.22/cv2.2/cv2.2.2/Conv in INT8",
        ),
    ],
)
def test_trade_off_has_whole_names(
    tuned: Tuning, name: str, sites: list[str], shown: str, below: str
) -> None:
    point = replace(tuned.front[0], name=name, sites=sites)
    changes = {"front": [point], "chosen": point, "cheapest_plausible": point}
    lines = render_tuning(replace(tuned, **changes), everything=True).lines
    (index,) = (n for n, line in enumerate(lines) if line.startswith("* "))
    assert lines[index].endswith(f" {shown}") and len(lines[index]) <= 80
    assert lines[index + 1].strip() == below


@pytest.mark.parametrize(
    ("keep", "low", "headline", "style"),
    [
        (KEEP, KEEP + 1e-4, "goal met: ", Style.GOOD),
        (KEEP, KEEP - 1e-4, "goal met, but not certainly: ", Style.UNCLEAR),
        (0.9999, 1.0, "goal met: ", Style.GOOD),
    ],
)
def test_headline_has_the_exact_goal_and_whether_it_is_certainly_met(
    tuned: Tuning, keep: float, low: float, headline: str, style: Style
) -> None:
    page = render_tuning(replace(tuned, keep=keep, chosen=replace(tuned.chosen, low=low)), 500)
    assert page.lines[0].startswith(headline) and (
        f"goal {keep}" in page.lines[0],
        page.styles[0],
    ) == (True, style)


def test_each_set_of_images_has_its_goal() -> None:
    tuning = tune(keep=0.5, metric=lambda expected, actual, _: 1e4 * actual["c6.out"].std())
    goals = [
        5e3 * np.mean([float_output(sample["x"].tobytes()).std() for sample in samples])
        for samples in (CHOSEN, JUDGED)
    ]
    assert "; goal {:.3f} on the selection images and {:.3f} on the held-out images\n".format(
        *goals
    ) in str(render_tuning(tuning, 500))
    assert "; goal" not in str(render_tuning(replace(tuning, keep=None, budget_ms=5.0), 500))


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
    changes: Any = {"name": "1 worst", "sites": ["c6"], "chosen_on": 0.1234}
    shown = replace(tuned.cheapest_plausible, low=low, high=KEEP + 0.002, **changes)
    images = tuned.images | {"judged_detections": 7}
    text = str(render_tuning(replace(tuned, cheapest_plausible=shown, images=images), 500))
    assert "  Cheaper: c6 in FP16, " in text and expected in text
    assert text.count("on 4 held-out images with 7 detections") == 2


def test_matrix_products_are_named_where_they_are_counted(tuned: Tuning) -> None:
    counted = f"{tuned.chosen.cost.int8} of {tuned.chosen.cost.convolutions} convolutions"
    with_products = replace(tuned, prediction=qdqtool.predict(vit(1)))
    assert f"{counted} in INT8" in str(render_tuning(tuned, 500))
    assert f"{counted} and matrix products in INT8" in str(render_tuning(with_products, 500))


def test_chosen_placement_has_the_range_of_conversions_that_predict_gives(tuned: Tuning) -> None:
    prediction = qdqtool.predict(qdqtool.insert(vit(1), samples(vit(1), 4)).model)
    low, high = prediction.conversions_range
    assert low < high
    text = str(render_tuning(replace(tuned, prediction=prediction), 500))
    assert (
        f"{low} to {high} Q/DQ layers remain, depending on how many of them Myelin absorbs" in text
    )


def test_numbers_of_choices_and_of_images_add_up(tuned: Tuning) -> None:
    assert {s.swept_on for s in tuned.sites if s.error_alone} == {tuned.images["swept_on"]}
    site = tuned.sites[0]
    left_out, late = (
        replace(site, error_alone=None, choices=[replace(site.choices[0], why=why, left_out=left)])
        for why, left in (("no gain", True), ("no time", False))
    )
    measured = [replace(site, error_alone=0.1, swept_on=n) for n in (2, *[4] * 9)]
    shown = replace(
        tuned,
        sites=[left_out] * 3 + measured + [late] * 2,
        images={**tuned.images, "swept_on": 6},
    )
    text, everything = (str(render_tuning(shown, 500, everything=e)) for e in (False, True))
    assert "Most sensitive layers (10 of 15 choices measured on 2 to 4 of 6 images): " in text
    assert (
        "    and 2 more (--all)\n"
        "    3 choices left out: no benefit possible (--all gives the reasons)\n"
        "    2 choices not measured: no time\n"
    ) in text
    counted = ("10.00%; ", "not measured: no gain; ", "not measured: no time; ")
    assert [everything.count(words) for words in counted] == [10, 3, 2]


def test_change_of_cost_of_a_layer_that_is_float_by_default_is_that_of_float(tuned: Tuning) -> None:
    cost = replace(tuned.base, int8=tuned.base.int8 + 2, conversions=tuned.base.conversions - 1)
    site = replace(tuned.sites[0], error_alone=0.1, choices=[SiteChoice("int8", cost)])
    assert ": 10.00%; -2 INT8, +1 Q/DQ layer; chosen: " in str(
        render_tuning(replace(tuned, sites=[site]), 500)
    )


@pytest.mark.parametrize(("high", "is_named"), [(0.99, False), (0.994, True)])
def test_start_whose_interval_overlaps_that_of_the_result_is_named(
    tuned: Tuning, high: float, is_named: bool
) -> None:
    """The interval of the result starts at 0.993."""
    start = replace(tuned.front[0], metric=0.98, low=0.97, high=high)
    lines = render_tuning(replace(tuned, front=[start, *tuned.front[1:]]), 500).lines
    measured = "0.980 (0.970 to 0.994) on 4 held-out images"
    line = f"  Not distinguishable from INT8 by default by the 95 % intervals: {measured}"
    assert (line in lines) == is_named


@pytest.mark.parametrize("sites", [[], ["last convolutions"]])
def test_layers_in_float_and_other_choices_are_named(tuned: Tuning, sites: list[str]) -> None:
    chosen = replace(tuned.chosen, sites=sites, changed={"head": "int8"})
    head = replace(tuned.sites[0], site="last convolutions", kind="head", nodes=("c5", "c6"))
    changes = {"chosen": chosen, "bought": [], "prediction": qdqtool.predict(branchy())}
    lines = render_tuning(replace(tuned, sites=[head], **changes), 500).lines
    assert [s for s in lines if s.startswith(("Kept in", "  and ", "  head", "  last"))] == [
        *[
            "Kept in FP16 for accuracy: last convolutions",
            "  last convolutions: c5, c6",
            "  and 5 that are FP16 by default (such as by --head, or without gain in INT8): "
            "c0, c1, c2, c3, c4",
        ][: 3 * len(sites)],
        "  head: int8",
    ]


def test_text_names_the_float_layers_of_each_placement_and_both_results(tuned: Tuning) -> None:
    chosen = replace(tuned.chosen, sites=["c6", "add"], chosen_on=0.875)
    other = replace(tuned.front[0], changed={}, cost=replace(tuned.front[0].cost, int8=6))
    front = [replace(other, sites=[]), replace(other, sites=[*"abcd"]), chosen]
    text = str(render_tuning(replace(tuned, front=front, chosen=chosen, reached=False), 500))
    assert re.findall("(?m)^ +(FP16: .*)|^goal NOT met: .*( and 0.875 .*?);", text) == [
        ("", " and 0.875 on 4 selection images"),
        ("FP16: only layers that insert leaves float, or without gain in INT8", ""),
        ("FP16: a, b, c and 1 more (--all)", ""),
        ("FP16: as listed above", ""),
    ]


@pytest.mark.parametrize(
    ("images", "evaluation", "enough"),
    [(16, 0, 64), (256, 0, None), (16, 16, 64), (16, 128, None)],
)
def test_small_sets_are_reported_before_the_search(
    images: int, evaluation: int, enough: int | None
) -> None:
    rows = np.zeros((256, *DATA[0]["x"].shape[1:]), np.float32)
    sets = open_sets(Model(branchy()), rows[:images], rows[:evaluation] if evaluation else None)
    warnings = warn_small_sets(sets, SearchBudget(), evaluation or None)
    assert [w.values["enough"] for w in warnings] == ([] if enough is None else [enough])
    if enough is not None:
        assert f"{2 * enough} images" in warnings[0]
        assert (f"{4 * enough} images" in warnings[0]) == (not evaluation)


def test_tune_front_rises_and_others_lie_below(tuned: Tuning) -> None:
    assert all(
        low.cost.value < high.cost.value and low.chosen_on < high.chosen_on
        for low, high in itertools.pairwise(tuned.front)
    )
    assert all(
        any(p.cost.value <= o.cost.value and p.chosen_on >= o.chosen_on for p in tuned.front)
        for o in tuned.others
    )
    assert {"1 worst by sensitivity", "2 worst by sensitivity"} <= points_of(tuned).keys()


def test_combinations_tried_on_held_out_images_are_limited() -> None:
    """All reach the goal on the selection images, and only `INT8 by default` on the others.

    "Cheaper" is then a placement that reaches the goal on the selection images.
    """
    planner = planner_of(branchy(), DATA[:2])
    sets = [floats(f"c{a}", f"c{b}") for a, b in itertools.combinations(range(7), 2)][:10]
    pool = {
        planner.plan(c).recipe.key: PlacementResult(
            f"{n} choices", c, [], {}, PlacementCost(20, 10, n), 1.0
        )
        for n, c in enumerate([*sets, Configuration()])
    }
    *others, default = pool
    evaluator = Mock(
        value=lambda recipe, samples: (
            0.5 if recipe.key in others and samples == evaluator.sets.judged_on else 1.0
        ),
        is_measured=lambda recipe, _: pool[recipe.key].metric is not None,
        estimate_interval=lambda *_: (0.0, 1.0),
    )
    search = PlacementSearch(planner, evaluator, 0.9, None, False, print, pool=pool)
    selection = ResultSelection(search)
    assert selection.choose_placement() == (pool[default], True)
    assert [pool[key].metric for key in others] == [0.5] * 9 + [None]
    assert [n.values for n in search.notes] == [{"count": 1, "name": "9 choices"}]
    pool[others[0]].chosen_on = 0.5
    assert selection.find_cheapest_plausible(pool[default]) is pool[others[1]]


@pytest.mark.slow
def test_tune_result_is_the_cheapest_of_all_sets(tuned: Tuning, tmp_path: Path) -> None:
    """Of the 64 sets of at most three float convolutions, no cheaper set reaches the goal.

    Costs do not depend on ranges, so costs are computed with fast ranges.
    """
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


@pytest.mark.parametrize(
    ("late", "measured_on", "images", "samples"),
    [(False, "judged_on", "held-out", JUDGED), (True, "chosen_on", "selection", CHOSEN)],
)
def test_bought_choices_are_measured_without_each(
    monkeypatch: pytest.MonkeyPatch, late: bool, measured_on: str, images: str, samples: Any
) -> None:
    """If the time limit leaves no time for held-out images, the selection images are used."""
    measure = CandidateEvaluator.measure_metric

    def measure_in_time(self: CandidateEvaluator, recipes: Any, numbers: Any, title: str) -> None:
        if late and title == "Benefit of each choice":
            raise OutOfTime
        measure(self, recipes, numbers, title)

    monkeypatch.setattr(CandidateEvaluator, "measure_metric", measure_in_time)
    tuned = tune(keep=KEEP)
    assert {choice["measured_on"] for choice in tuned.as_json()["chosen"]["choices"]} == {
        measured_on
    }
    assert f" (accuracy on the {images} images, " in str(render_tuning(tuned, 500))
    whole = agreement(insert(tuned.chosen.configuration.floats).model, samples)
    nodes = {site.site: set(site.nodes) for site in tuned.sites}
    for choice in tuned.bought:
        without = insert(tuned.chosen.configuration.floats - nodes[choice.site])
        assert choice.metric == pytest.approx(whole - agreement(without.model, samples), abs=1e-6)
        assert choice.int8 == tuned.chosen.cost.int8 - without.prediction.summary()["int8"]


def test_tuning_json_has_intervals_and_counts(tuned: Tuning) -> None:
    data = tuned.as_json()
    assert data["front"][data["chosen"]["index"]]["nodes"] == data["chosen"]["nodes"]
    assert all(point["low"] <= point["metric"] <= point["high"] for point in data["front"])
    kinds = ("calibration", "search_calibration", "chosen_on", "judged_on")
    assert [data["images"][name] for name in kinds] == [16, 8, 4, 4] and not data["unchanged"]


def test_model_of_point_has_its_cost(tuned: Tuning) -> None:
    assert [point.cost.int8 for point in tuned.front] == [
        qdqtool.predict(tuned.model_of(p)).summary()["int8"] for p in tuned.front
    ]


def test_tune_measures_no_choice_that_cannot_pay() -> None:
    swept: set[str] = set()
    tuning = tune(
        keep=KEEP,
        mapper=observed(
            lambda job, result: swept.update(
                key
                for key, rows in result.items()
                if all(row and row.evidence is None for row in rows.values())
            )
        ),
    )
    choices = [choice for site in tuning.sites for choice in site.choices]
    assert (
        [c.error for c in choices if c.left_out] == [None] * tuning.effort["never_measured"] != []
    )
    # Other scales are measured without and with the choice.
    assert len(swept) <= sum(1 if c.choice == "float" else 2 for c in choices if not c.left_out)


def test_sensitivity_is_the_error_of_the_nodes_of_a_site_alone() -> None:
    tuning = tune(keep=KEEP, whole_front=True)
    planner = planner_of(branchy(), CALIBRATION, "auto")
    whole = planner.plan(Configuration()).recipe

    def squared_errors(recipe: Recipe) -> np.ndarray:
        model = recipe.build(planner.model)[0].proto
        return np.asarray([(1.0 - agreement(model, [sample])) ** 2 for sample in CHOSEN])

    base, text = squared_errors(whole), str(render_tuning(tuning, 500, everything=True))
    selected = 0
    for site in tuning.sites:
        nodes = {planner.model.node(n).index for n in site.nodes}
        without = planner.plan(floats(*site.nodes)).recipe
        others_unchanged = (
            without.key == whole.restrict_to_nodes({*whole.quantized_inputs} - nodes).key
        )
        if site.error_alone is None or not others_unchanged:
            continue
        alone = squared_errors(whole.restrict_to_nodes(nodes))
        before, after = math.sqrt(base.mean()), math.sqrt(base.mean() - alone.mean())
        assert site.error_alone == pytest.approx(math.sqrt(alone.mean()), rel=1e-3)
        assert f"  - {site.site} ({site.kind}" in text and f": {site.error_alone:.2%}; " in text
        assert site.choices[0].error == pytest.approx(after, rel=1e-3)
        assert site.loss == pytest.approx(before - after, rel=1e-3, abs=1e-6)
        selected += 1
    assert selected >= 3


@pytest.mark.usefixtures("constant_costs")
@pytest.mark.parametrize(
    ("seconds", "workers", "limit", "most", "end"),
    [
        (1.0, 1, None, "", "about 3 minutes with 1 worker (the first runs took 1 s each)"),
        (0.1, 2, 3600, "at most ", "the search goes on within 70% of the time limit of 60 minutes"),
        (
            1.0,
            1,
            90,
            "at most ",
            " s each); the search ends earlier, after 70% of the time limit of 90 s",
        ),
    ],
)
def test_tune_estimates_its_duration(
    clock: Clock, seconds: float, workers: int, limit: float | None, most: str, end: str
) -> None:
    """30 combinations on 4 selection images and a third of the 4 held-out images are 160 runs."""
    mapper = observed(lambda job, result: clock.advance(seconds * sum(map(len, result.values()))))
    lines: list[str] = []
    tuning = tune(keep=0.5, mapper=mapper, workers=workers, say=lines.append, time_limit=limit)
    choices = tuning.effort["candidates"] - tuning.effort["never_measured"]
    assert any(
        line.startswith(f"testing {most}{choices} choices on {most}4 images") and line.endswith(end)
        for line in lines
    )


def test_tune_for_strongly_typed_target_is_fp16() -> None:
    tuning = tune(keep=KEEP, target="trt11", exclude=["^c3$"])
    check(tuning.model)
    model = Model(tuning.model)
    types = {model.elem_type(t) for t in model.node("c3").inputs}
    assert types == {onnx.TensorProto.FLOAT16} and tuning.as_json()["float_type"] == "fp16"
    assert [o.type.tensor_type.elem_type for o in tuning.model.graph.output] == [
        onnx.TensorProto.FLOAT
    ]
    inserted = insert({"c3", *tuning.chosen.configuration.floats}, DATA, target="trt11")
    assert tuning.model.graph.node == inserted.model.graph.node
    assert np.array_equal(run(tuning.model, DATA[0])[0], run(inserted.model, DATA[0])[0])
    assert set(inserted.notes) <= set(tuning.notes)
    predicted = qdqtool.predict(tuning.model, "trt11")
    assert predicted.summary()["int8"] == tuning.chosen.cost.int8 and (
        "FLOAT-FP32" not in predicted.findings_by_code()
    )
    (note,) = (n for n in tuning.notes if n.code == "measured-in-fp32")
    errors = [1.0 - agreement(tuning.model, [d]) for d in CALIBRATION]
    assert note.values["after"] == pytest.approx(np.mean(errors), abs=5e-5)


@pytest.mark.usefixtures("constant_costs")
def test_tensor_too_large_for_fp16_stays_fp32() -> None:
    proto = branchy()
    set_value(proto, "c6.weight", 1.5e5 * value_of(proto, "c6.weight"))
    tuning = tune(model=proto, keep=0.5, target="trt11", exclude=["^c6$"])
    time = qdqtool.predict(tuning.model, "trt11", gpu="RTX 3060").time
    float_time = qdqtool.predict(proto, "trt11", gpu="RTX 3060").time["float"]
    assert time["float"]["precision"] == float_time["precision"] == "FP32"  # faster if this small
    assert "c6.out" in tuning.float32 and np.isfinite(run(tuning.model, DATA[0])[0]).all()


@pytest.mark.usefixtures("constant_costs")
def test_high_precision_fp32_writes_no_fp16() -> None:
    tuning = tune(keep=0.5, target="trt11", high_precision="fp32")
    assert tuning.float_type == "fp32" and note_codes(tuning.notes) == ["ranges-from-all"]
    assert onnx.TensorProto.FLOAT16 not in {t.data_type for t in tuning.model.graph.initializer}


def test_swept_on_limits_images_for_single_choices(tuned: Tuning) -> None:
    swept, whole = set[int](), set[int]()

    def mapper(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        for task in tasks:
            (whole if task.with_metric else swept).update(task.images)
        return map_on_threads(1)(job, tasks)

    fewer = tune(keep=KEEP, swept_on=2, mapper=mapper)
    assert len(swept) == 2 and swept < {0, 1, 2, 3} < whole
    assert (fewer.images["swept_on"], tuned.images["swept_on"]) == (2, 4)
    first, second = (points_of(t)["INT8 by default"].chosen_on for t in (fewer, tuned))
    assert first == second


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
        {"keep": 0.9, "metric": lambda *_: -1.0},
        "metric-not-positive",
        "metric",
        ":<lambda> returned ",
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
    "precision": ({"precision": "auto"}, "unknown-choice", "precision", "auto"),
    "method-for": ({"method_for": [("no", "max")]}, "no-match", "method_for", "no=max"),
}


@pytest.mark.parametrize(
    ("options", "code", "parameter", "values"), BAD_OPTIONS.values(), ids=BAD_OPTIONS
)
def test_tune_refuses_options(
    options: dict[str, Any], code: str, parameter: str, values: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, *values.split(), parameter=parameter)):
        qdqtool.tune(branchy(), DATA, **options)


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


def test_interval_of_few_images_has_a_note() -> None:
    tuning = qdqtool.tune(detecting_network(), images(16, 3, 64, "images"), keep=0.1)
    assert tuning.metric["name"] == "agreement-map"
    assert note("wide-interval", images=4, enough=10) in tuning.notes


def test_tune_leaves_broken_images_out(tmp_path: Path) -> None:
    write_pictures(tmp_path, 16)
    whole = qdqtool.tune(segmentation(), tmp_path, keep=0.9)
    (tmp_path / "picture003.png").write_bytes(b"no image")
    tuning = qdqtool.tune(segmentation(), tmp_path, keep=0.9)
    (unread,) = (w for w in tuning.warnings if w.code == "unread-images")
    assert (unread.values["count"], unread.values["file"]) == (1, "picture003.png")
    first, second = whole.chosen, tuning.chosen
    assert first.metric != second.metric and first.chosen_on == second.chosen_on


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


@pytest.mark.parametrize("whole_front", [False, True])
def test_tune_without_gain_by_int8_is_an_error(whole_front: bool) -> None:
    proto = conv_net()
    next(n for n in proto.graph.node if n.name == "conv2").name = "other"
    with pytest.raises(QdqtoolError, check=has("no-candidates")):
        qdqtool.tune(
            proto, images(8, 3, 16, "images", seed=0), include=["conv"], whole_front=whole_front
        )


def test_tune_leaves_excluded_convolution_float() -> None:
    """A float convolution may still add a Q to the tensor that an excluded convolution consumes."""
    proto = conv_net()
    proto.graph.node[-1].name = "last"
    tuning = qdqtool.tune(
        proto, images(8, 3, 16, "images", seed=0), keep=0.999, include=["conv"], whole_front=True
    )
    assert tuning.chosen.cost.int8 <= 3 and tuning.front


def test_tune_warns_once_of_a_folder_named_test(tmp_path: Path) -> None:
    for name in ("calib", "test"):
        write_pictures(tmp_path / name, 4, 64, 48)
    warnings = qdqtool.tune(resnet(), tmp_path, gpu="T4").warnings
    assert [note.code for note in warnings].count("subfolders-read") == 1
