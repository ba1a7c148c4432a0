"""``qdqtool.tune`` as a whole, on networks small enough to try everything."""

import functools
import itertools
import math
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

import qdqtool
from qdqtool import prediction
from qdqtool.base.notes import Remark, remarks
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup, choose_scale
from qdqtool.model.graph import Model
from qdqtool.options import Request
from qdqtool.timing import gpus
from qdqtool.timing.estimate import estimate, predict_on
from qdqtool.trt.targets import target_named
from qdqtool.tuning import api, expected, measurements
from qdqtool.tuning import search as search_module
from qdqtool.tuning.configuration import Configuration, Recipe
from qdqtool.tuning.measure import Job, Mapper, Network, Result, Row, Task, local
from qdqtool.tuning.metrics import OutputAgreement
from qdqtool.tuning.result import Tuning
from qdqtool.types import Precision
from tests.calibration.nets import conv_net
from tests.insertion.nets import check, images, run
from tests.insertion.test_smoothing import heavy
from tests.insertion.transformers import samples, vit
from tests.raising import raises
from tests.slow import slow_after
from tests.tuning.nets import branchy, planner_of, resnet, segmentation

DATA = images(16, 16, 16)
# Blocks of four: of each the first two for ranges, one to choose on, one to judge on.
CALIBRATION, CHOSEN, JUDGED = [d for i, d in enumerate(DATA) if i % 4 < 2], DATA[2::4], DATA[3::4]
KEEP = 0.984
ROWS = Network.rows


@pytest.fixture(scope="module", autouse=True)
def each_placement_runs_once_on_a_sample() -> Iterator[None]:
    """What is measured of it is the same in every tuning, which `test_measure.py` holds against whole networks."""
    kept: dict[Any, Row] = {}

    def rows(
        self: Network, number: int, sample: Any, candidates: Sequence[Recipe], whole: bool
    ) -> Iterator[Any]:
        job = self.job
        network = (
            job.model,
            job.compared,
            job.scores,
            whole,
            *(sample[t].tobytes() for t in sorted(sample)),
        )
        if not isinstance(job.metric, OutputAgreement):
            yield from ROWS(self, number, sample, candidates, whole)
            return
        yield from ((r.key, kept[*network, r.key]) for r in candidates if (*network, r.key) in kept)
        left = [r for r in candidates if (*network, r.key) not in kept]
        for key, row in ROWS(self, number, sample, left, whole) if left else ():
            kept[*network, key] = row
            yield key, row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "rows", rows)
        yield


@pytest.fixture(scope="module")
def tuned() -> Tuning:
    return tune(keep=KEEP)


def tune(data: Any = DATA, model: Any = None, **options: Any) -> Tuning:
    return qdqtool.tune(model or branchy(), data, **{"method": "mse", **options})


def inserted(floats: Iterable[str], **options: Any) -> Insertion:
    """What ``insert`` makes where these nodes are float."""
    return qdqtool.insert(
        branchy(), CALIBRATION, method="mse", exclude=[f"^{n}$" for n in floats], **options
    )


def watched(look: Callable[[Job, Result], None], workers: int = 1) -> Mapper:
    """A mapper that shows each result before it is given back."""

    def run(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        for result in local(workers)(job, tasks):
            look(job, result)
            yield result

    return run


def told(tuning: Tuning) -> dict[str, Any]:
    """The JSON without what depends on the clock."""
    return {k: v for k, v in tuning.as_json().items() if k != "effort"}


def agreement(model: onnx.ModelProto, samples: Sequence[dict[str, Any]]) -> float:
    """One minus the relative error of the output, by onnxruntime and numpy alone."""
    values = []
    for sample in samples:
        wanted, found = wanted_of(sample["x"].tobytes()), run(model, sample)[0].astype(np.float64)
        values.append(1.0 - np.sqrt(np.mean((wanted - found) ** 2)) / wanted.std())
    return float(np.mean(values))


@functools.cache
def wanted_of(image: bytes) -> npt.NDArray[np.float64]:
    """The output of the float network."""
    return run(branchy(), {"x": np.frombuffer(image, np.float32).reshape(DATA[0]["x"].shape)})[
        0
    ].astype(np.float64)


def test_the_model_does_what_is_said_of_it_and_the_front_rises(tuned: Tuning) -> None:
    check(tuned.model)
    assert tuned.reached and tuned.chosen.metric is not None and tuned.chosen.metric >= KEEP
    assert agreement(tuned.model, JUDGED) == pytest.approx(tuned.chosen.metric, abs=1e-6)
    assert agreement(tuned.model, CHOSEN) == pytest.approx(tuned.chosen.chosen_on, abs=1e-6)
    prediction = qdqtool.predict(tuned.model).summary()
    assert (prediction["int8"], prediction["conversions"]) == (
        tuned.chosen.cost.int8,
        tuned.chosen.cost.conversions,
    )
    for low, high in itertools.pairwise(tuned.front):
        assert low.cost.value < high.cost.value and low.chosen_on < high.chosen_on
    for other in tuned.others:
        assert any(
            p.cost.value <= other.cost.value and p.chosen_on >= other.chosen_on for p in tuned.front
        )
    assert {"1 worst by sensitivity", "2 worst by sensitivity"} <= {
        p.name for p in [*tuned.front, *tuned.others]
    }


@pytest.mark.slow
def test_no_set_of_convolutions_is_cheaper_and_good(
    tuned: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 64 sets of at most three float convolutions, placed by ``insert``: none that is good costs less.

    What one costs has nothing to do with the ranges: quick ones tell which sets are cheaper than the chosen one. The
    scale of the same tensors is the same in every set, and is searched once.
    """
    searched: dict[Any, Any] = {}

    def once(
        group: ScaleGroup, statistics: Any, choice: MethodChoice
    ) -> tuple[GroupScale, list[Any]]:
        key = (choice.of(group), group.sources, group.largest)
        if key not in searched:
            searched[key] = choose_scale(group, statistics, choice)
        scale, notes = searched[key]
        return replace(scale, group=group), notes

    monkeypatch.setattr("qdqtool.insertion.api.choose_scale", once)
    quick: Any = {
        "method": "max",
        "calib_cache": tmp_path / "one.npz",
        "losses": 0,
        "predict": False,
    }
    whole: Any = {"calib_cache": tmp_path / "all.npz", "losses": 0, "predict": False}
    cheaper = 0
    for count in range(4):
        for floats in itertools.combinations([f"c{i}" for i in range(7)], count):
            made = qdqtool.insert(
                branchy(), CALIBRATION[:1], exclude=[f"^{n}$" for n in floats], **quick
            )
            summary = prediction.predict(made.model, advice=False).summary()
            if summary["float"] + summary["conversions"] < tuned.chosen.cost.value:
                cheaper += 1
                assert agreement(inserted(floats, **whole).model, CHOSEN) < KEEP, floats
    assert cheaper > 10


def test_choices_points_and_json(tuned: Tuning) -> None:
    assert tuned.bought
    for one in tuned.bought:
        site = next(s for s in tuned.sites if s.site == one.site)
        made = inserted(tuned.chosen.configuration.floats - set(site.nodes))
        assert made.prediction is not None
        assert one.metric == pytest.approx(
            tuned.chosen.chosen_on - agreement(made.model, CHOSEN), abs=1e-6
        )
        assert one.int8 == tuned.chosen.cost.int8 - made.prediction.summary()["int8"]
    data = tuned.as_json()
    assert data["schema"] == "qdqtool/tuning/1"
    assert {
        "metric",
        "sites",
        "front",
        "chosen",
        "goal",
        "cost",
        "images",
        "effort",
        "model",
    } <= set(data)
    assert data["front"][data["chosen"]["index"]]["nodes"] == data["chosen"]["nodes"]
    for site in data["sites"]:
        assert {"site", "nodes", "loss", "ms", "kind", "choice", "why"} <= set(site)
    for point in data["front"]:
        assert {"int8", "conversions", "ms", "metric", "low", "high", "float"} <= set(point)
        assert point["low"] <= point["metric"] <= point["high"]
    assert (
        data["images"]["calibration"] == 8
        and data["images"]["chosen_on"] == data["images"]["judged_on"] == 4
    )
    for point in tuned.front:
        assert qdqtool.predict(tuned.model_of(point)).summary()["int8"] == point.cost.int8


def test_what_cannot_pay_is_never_measured() -> None:
    asked: set[str] = set()

    def look(job: Job, result: Result) -> None:
        asked.update(
            key
            for key, rows in result.rows.items()
            if all(r and r.evidence is None for r in rows.values())
        )

    tuning = tune(keep=KEEP, mapper=watched(look))
    never = [c for s in tuning.sites for c in s.choices if c.why]
    assert never and all(c.error is None for c in never)
    measured = [c for s in tuning.sites for c in s.choices if not c.why]
    floats = sum(c.choice == "float" for c in measured)
    assert len(asked) <= floats + 2 * (len(measured) - floats)  # other scales: without and with
    assert tuning.effort["never_measured"] == len(never)


def test_what_a_choice_takes_away_is_the_error_of_its_nodes_alone() -> None:
    """On the samples that it was measured on, of which one is unlike the others: all or the first two."""
    data = [{n: 2 * v for n, v in d.items()} if d is CHOSEN[0] else d for d in DATA]
    chosen = data[2::4]
    tuning = tune(data, keep=KEEP, whole_front=True)
    planner = planner_of(branchy(), CALIBRATION, "auto")
    whole = planner.plan(Configuration()).recipe

    def squared(recipe: Recipe) -> npt.NDArray[np.float64]:
        model = recipe.build(planner.model)[0].proto
        return np.asarray([(1.0 - agreement(model, [sample])) ** 2 for sample in chosen])

    base, compared = squared(whole), Counter[int]()
    few = [0, len(chosen) - 1]
    assert np.sqrt(base[few].mean()) > 1.1 * np.sqrt(
        base.mean()
    )  # two sets are not the same to this test
    for site in tuning.sites:
        nodes = {planner.model.node(n).index for n in site.nodes}
        without = planner.plan(Configuration(floats=frozenset(site.nodes))).recipe
        if (
            site.loss is None or without.key != whole.only({*whole.reads} - nodes).key
        ):  # others read something else too
            continue
        alone = squared(whole.only(nodes))
        wanted = {
            len(s): (math.sqrt(base[s].mean()), math.sqrt(base[s].mean() - alone[s].mean()))
            for s in (few, list(range(len(chosen))))
        }
        (count,) = (
            n for n, w in wanted.items() if site.choices[0].error == pytest.approx(w[1], rel=1e-3)
        )
        assert site.loss == pytest.approx(wanted[count][0] - wanted[count][1], rel=1e-3, abs=1e-6)
        compared[count] += 1
    assert compared[2] >= 2 and compared[4] >= 1


def test_what_is_not_quantized_is_fp16_where_the_types_of_the_file_decide() -> None:
    tuning = tune(keep=KEEP, target="trt11", exclude=["^c3$"])
    check(tuning.model)
    model = Model(tuning.model)
    excluded = model.node("c3")
    assert {model.elem_type(t) for t in excluded.inputs} == {onnx.TensorProto.FLOAT16}
    assert [o.type.tensor_type.elem_type for o in tuning.model.graph.output] == [
        onnx.TensorProto.FLOAT
    ]
    made = inserted({"c3", *tuning.chosen.configuration.floats}, target="trt11")
    assert tuning.model.graph.node == made.model.graph.node
    assert np.array_equal(run(tuning.model, DATA[0])[0], run(made.model, DATA[0])[0])
    assert set(made.notes) <= set(tuning.notes) and tuning.as_json()["float_type"] == "fp16"
    predicted = qdqtool.predict(tuning.model, "trt11")
    assert predicted.summary()["int8"] == tuning.chosen.cost.int8
    assert "FLOAT-FP32" not in {f.code for f in predicted.findings}
    (error,) = (n for n in tuning.notes if n.remark is Remark.MEASURED_IN_FP32)
    judged = [1.0 - agreement(tuning.model, [d]) for d in CALIBRATION]
    assert error.values["after"] == pytest.approx(np.mean(judged), abs=5e-5)


@pytest.mark.usefixtures("costs_take_no_time")
def test_tensors_that_fp16_cannot_hold_and_fp32_on_request() -> None:
    net = branchy()
    tensor = next(t for t in net.graph.initializer if t.name == "c6.weight")
    tensor.CopyFrom(
        onnx.numpy_helper.from_array(1.5e5 * onnx.numpy_helper.to_array(tensor), tensor.name)
    )
    tuning = qdqtool.tune(net, DATA, keep=0.5, method="mse", target="trt11", exclude=["^c6$"])
    _, time_of = predict_on(tuning.model, "trt11", Request(gpu="RTX 3060"))
    assert time_of is not None and time_of.float_time is not None
    assert (
        time_of.float_time.precision == Precision.FP16
    )  # the type of most of it, not of the one that stays FP32
    assert "c6.out" in tuning.float32 and np.isfinite(run(tuning.model, DATA[0])[0]).all()
    single = tune(keep=0.5, target="trt11", high_precision="fp32")
    assert single.float_type == "fp32" and not single.notes
    assert all(t.data_type != onnx.TensorProto.FLOAT16 for t in single.model.graph.initializer)
    with raises(QdqtoolError, "_copied trt8.5"):
        qdqtool.tune(branchy(), DATA, target="trt8.5", high_precision="fp16")


@pytest.mark.parametrize("workers", slow_after(1, [3, 1]))
def test_the_same_for_any_number_of_workers(
    tuned: Tuning, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "rows", ROWS)  # measured anew
    again = tune(keep=KEEP, workers=workers)
    assert told(again) == told(tuned)
    assert again.model.SerializeToString(deterministic=True) == tuned.model.SerializeToString(
        deterministic=True
    )


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", slow_after(1, [40, 1]))
def test_it_goes_on_where_it_was_killed(
    tuned: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    state = tmp_path / "t.tuning"
    seen: list[Result] = []

    def kill(job: Job, result: Result) -> None:
        if len(seen) == after:
            raise Killed
        seen.append(result)

    with pytest.raises(Killed):
        tune(keep=KEEP, state=state, mapper=watched(kill))
    again = tune(keep=KEEP, state=state)
    assert told(again) == told(tuned)
    assert again.effort["resumed"] >= after
    third = tune(keep=0.979, state=state)
    assert third.effort["runs"] < tuned.effort["runs"] / 2
    monkeypatch.setattr(
        api, "_calibrate", None
    )  # another state is refused before anything takes long
    for given, what in (
        ({"method": "max"}, "setting"),
        ({"data": DATA[1:]}, "set of images"),
        ({"model": branchy(1)}, "model"),
    ):
        with pytest.raises(DataError, match=f"another {what}"):
            tune(keep=KEEP, state=state, **given)
    monkeypatch.setattr(measurements, "REVISION", measurements.REVISION + 1)
    with raises(DataError, "Store._read another"):
        tune(keep=KEEP, state=state)


@pytest.mark.usefixtures("costs_take_no_time")
def test_activations_are_smoothed_first(tmp_path: Path) -> None:
    """What is written is the smoothed network, as a state of it is no state of the other."""
    model, data, state = heavy(vit(1)), samples(vit(1), 16), tmp_path / "t.tuning"
    tuning = qdqtool.tune(model, data, keep=0.5, smooth=0.5, state=state)
    assert any(n.remark is Remark.SMOOTHED and n.values["alpha"] == 0.5 for n in tuning.notes)
    before, after = ({t.name: t for t in m.graph.initializer} for m in (model, tuning.model))
    assert before["b0.ln1.gamma"] != after["b0.ln1.gamma"]
    with pytest.raises(DataError, match="another setting"):
        qdqtool.tune(model, data, keep=0.5, state=state)


def test_a_metric_whose_source_changed_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "measures_of_mine.py"
    source.write_text("def same(reference, outputs, image):\n    return 1.0\n")
    state = tmp_path / "t.tuning"

    again: dict[str, Any] = {"metric": "measures_of_mine:same", "state": state}
    tune(**again)
    assert tune(**again).effort["runs"] == 0
    source.write_text("def same(reference, outputs, image):\n    return 2.0\n")
    with raises(DataError, "Store._read another"):
        tune(**again)


def test_fewer_images_for_single_sites(tuned: Tuning) -> None:
    swept: set[int] = set()
    whole: set[int] = set()

    def watching(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        for task in tasks:
            (whole if task.whole else swept).update(task.images)
        return local(1)(job, tasks)

    fewer = tune(keep=KEEP, swept_on=2, mapper=watching)
    assert len(swept) == 2 and swept < {0, 1, 2, 3} < whole
    assert (
        fewer.images["swept_on"] == 2 and tuned.images["swept_on"] == tuned.images["chosen_on"] == 4
    )
    known = {p.name: p.chosen_on for p in [*tuned.front, *tuned.others]}
    assert (
        next(p.chosen_on for p in fewer.front if p.name == "everything INT8")
        == known["everything INT8"]
    )


# Goals ------------------------------------------------------------------------------------------------------------


def test_fronts_and_goals() -> None:
    tuning = tune(keep=0.9)
    assert tuning.reached and tuning.chosen.name == "everything INT8" and not tuning.chosen.sites
    assert all(s.loss is None for s in tuning.sites)
    assert len(tune(keep=0.9, whole_front=True).front) > 2
    tuning = tune(keep=1.0, metric=always_worse)
    assert not tuning.reached
    best = max(p.chosen_on for p in tuning.front)
    assert tuning.chosen.chosen_on == best < 1.0
    assert tuning.chosen.cost.int8 > 0 and Remark.GOAL_NOT_REACHED in remarks(tuning.notes)
    # Beside what one would try without a search, also where that costs more than the goal needs
    tuning = tune(keep=0.978, whole_front=True)
    worst = next(p for p in tuning.others if p.name == "4 worst by sensitivity")
    assert worst.cost.value > tuning.chosen.cost.value
    beside = [p for p in tuning.front if p.cost.value <= worst.cost.value][-1]
    one, other = (agreement(tuning.model_of(p), JUDGED) for p in (beside, worst))
    assert beside.name == "5 choices" and one > other  # on images that nothing was chosen by


def always_worse(reference: Any, outputs: Any, image: str) -> float:
    (wanted,), (found,) = reference.values(), outputs.values()
    return 1.0 if np.array_equal(wanted, found) else 0.5 - float(np.abs(wanted - found).mean())


SLOW: Any = {"gpu": "T4", "clock": 300.0}  # where INT8 is faster even in a network of this size


def test_a_budget_takes_the_most_accurate_that_fits() -> None:
    whole = tune(keep=0.995, **SLOW)
    times = [p.cost.ms for p in whole.front]
    assert all(t is not None for t in times) and whole.gpu is not None
    found = [
        p for p in whole.front if p.name != "fewer choices"
    ]  # those are looked for around a goal alone
    assert len(found) > 2
    for point in found[1::2]:
        assert point.cost.ms is not None
        tuning = tune(budget_ms=point.cost.ms + 1e-9, **SLOW)
        assert tuning.reached and tuning.chosen.cost.ms is not None
        assert (
            tuning.chosen.cost.ms <= point.cost.ms + 1e-9
            and tuning.chosen.chosen_on >= point.chosen_on
        )
    none = tune(budget_ms=1e-4, **SLOW, time_limit=60)
    assert not none.reached and none.chosen.cost.ms == min(p.cost.ms or 0 for p in none.front)


def test_budgets_and_fast_models() -> None:
    tuning = tune(budget_ms=1000.0, **SLOW, swept_on=1)
    (said,) = (
        n for n in tuning.notes if n.remark in (Remark.FLOAT_FITS, Remark.FLOAT_FITS_AND_WRITTEN)
    )
    model, target = Model(branchy()), target_named("trt8.5")
    alone = estimate(
        model, qdqtool.predict(branchy()), gpus.chosen("T4", 300.0, None), target
    ).total_ms
    assert said.values["ms"] == pytest.approx(alone, rel=5e-4)
    assert (
        tuning.reached and tuning.chosen.cost.int8 == 0 and not tuning.quantized
    )  # none is more accurate
    # With the time of a GPU it is in the front; where nothing else is faster and good enough it is what is written
    tuning = tune(keep=1.0, **SLOW, whole_front=True, swept_on=1)
    floats = [p for p in [*tuning.front, *tuning.others] if not p.cost.int8]
    assert len(floats) == 1 and floats[0].chosen_on == pytest.approx(
        tuning.metric["float"], abs=1e-6
    )
    for point in tuning.front:
        assert (
            point is floats[0] or point.cost.value < floats[0].cost.value
        )  # it is the most accurate
    if tuning.chosen is floats[0]:
        assert not any("Linear" in n.op_type for n in tuning.model.graph.node) and not tuning.bought
    without = tune(keep=0.9, swept_on=1)
    assert all(p.cost.int8 for p in [*without.front, *without.others])


@pytest.mark.parametrize("after", slow_after(1, [16, 60, 40]))
def test_a_time_limit_ends_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    seen: list[Result] = []
    clock = types.SimpleNamespace(monotonic=lambda: 1e12 if len(seen) > after else time.monotonic())
    monkeypatch.setattr(measurements, "time", clock)
    counting = watched(lambda job, result: seen.append(result))
    tuning = tune(keep=0.99, mapper=counting, time_limit=600)
    assert tuning.effort["stopped"] == "time limit"
    assert tuning.front and tuning.chosen.metric is not None
    assert agreement(tuning.model, JUDGED) == pytest.approx(tuning.chosen.metric, abs=1e-6)
    with raises(QdqtoolError, "_run time_limit"):
        qdqtool.tune(branchy(), DATA, keep=0.99, mapper=counting, time_limit=1e-9)


def test_the_better_choices_are_measured_on_all_samples_and_lead_to_the_same_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = images(48, 16, 16)
    found = []
    for first in (2, 100):
        monkeypatch.setattr(search_module, "FIRST_SAMPLES", first)
        rows: dict[str, set[int]] = defaultdict(set)

        def counting(job: Job, result: Result, rows: dict[str, set[int]] = rows) -> None:
            for key, measured in result.rows.items():
                rows[key].update(
                    n for n, row in measured.items() if row is not None and row.evidence is None
                )

        found.append(tune(data, keep=KEEP, mapper=watched(counting, 2)))
        rows = {key: measured for key, measured in rows.items() if measured}
        sizes = sorted(map(len, rows.values()))
        assert set(sizes) == (
            {2, 4, 12} if first == 2 else {12}
        )  # the quarter of four is one, on 8 and on all
        assert first == 100 or sizes.count(2) > 2 * sizes.count(12) > 0
    assert (
        found[0].chosen.sites == found[1].chosen.sites
        and found[0].chosen.metric == found[1].chosen.metric
    )
    assert all(s.loss is None or isinstance(s.loss, float) for s in found[0].sites)


@pytest.mark.parametrize("limit", slow_after(2, [60.0, 150.0, 40.0, 90.0]))
def test_a_limited_run_measures_the_obvious_first_and_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    """Each run on a sample takes a second of a clock of its own, everything else none."""
    now = [0.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], process_time=time.process_time, time=time.time
    )
    for module in (api, expected, measurements, search_module):
        monkeypatch.setattr(module, "time", clock)
    sweeps: list[float] = []
    together = [0.0]  # seconds that combinations took on the images to choose on, the first four
    swept: list[set[int]] = []  # convolutions that a sweep quantizes
    before: list[set[int]] = []  # those that are float in what was measured as a whole before that
    base: set[int] = set()

    def counting(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        whole = any(t.whole for t in tasks)
        asked = [{n for n, _, _ in c.weights} for t in tasks for c in t.candidates if c.weights]
        base.update(
            asked[0] if asked and not base else ()
        )  # the first to be quantized is everything INT8
        if not whole:
            swept.extend(asked)
        elif not swept:
            before.extend(base - nodes for nodes in asked)
        for result in local(1)(job, tasks):
            took = sum(map(len, result.rows.values()))
            now[0] += took
            sweeps.extend([] if whole else [now[0]])
            together[0] += took * (
                whole and all(n < 4 for rows in result.rows.values() for n in rows)
            )
            yield result

    tuning = tune(keep=0.9999, mapper=counting, workers=1, time_limit=limit)
    assert now[0] <= 1.1 * limit and tuning.chosen.metric is not None
    points = [p.name for p in (*tuning.front, *tuning.others)]
    assert {f"{k} by their own error" for k in (1, 2, 4)} | {"everything INT8"} <= set(points)
    assert all(at <= 0.7 * limit for at in sweeps) or together[0] >= limit / 3
    assert not swept or {1, 2, 4} <= {
        len(nodes) for nodes in before
    }  # these before any sensitivity,
    assert not swept or swept[0] in before  # of which the largest error of its own comes first
    assert limit >= 90 or len({frozenset(nodes) for nodes in swept}) < len(tuning.sites)
    if limit >= 90:
        assert sweeps and any("sensitivity" in p or "choice" in p for p in points)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": 1.5}, "_check `keep` 1.5"),
        ({"keep": 0.9, "budget_ms": 1.0, "gpu": "T4"}, "_check `keep` `budget_ms`"),
        ({"budget_ms": 1.0}, "_check `budget_ms` `gpu`"),
        ({"gpu": "no such gpu"}, "find 'no such gpu'"),
        ({"gpu": "Jetson Nano"}, "_gpu `gpu` Jetson"),
        ({"gpu": "T4", "target": "rtx1.7"}, "_gpu `gpu` T4"),
        ({"head": "x"}, "concern.<locals>.init `head='x'"),
        ({"method": "kl"}, "concern.<locals>.init `method='kl'"),
        ({"metric": "nowhere:f"}, "imported `metric` 'nowhere'"),
        ({"workers": 0}, "_check `workers` 0"),
        ({"time_limit": -1.0}, "_check `time_limit` -1"),
        ({"exclude": ["("]}, "compile_pattern `exclude` '('"),
        ({"method_for": [("nothing", "max")]}, "MethodChoice.check `method_for` nothing=max"),
    ],
)
def test_wrong_options(options: dict[str, Any], told: str) -> None:
    with raises(QdqtoolError, told):
        qdqtool.tune(branchy(), DATA, **options)


def test_no_number_without_a_positive_metric() -> None:
    made = qdqtool.insert(branchy(), DATA, predict=False).model
    for model, options, told in (
        (branchy(), {"keep": 0.9, "metric": below_zero}, "_require_agreement :below_zero: 0"),
        (made, {}, "_copied Q/DQ"),
        (branchy(), {"exclude_op": ["Conv"]}, "_calibrate 7 `exclude_op` Conv"),
    ):
        with raises(QdqtoolError, told):
            qdqtool.tune(model, DATA, **options)


# Other networks ---------------------------------------------------------------------------------------------------


def top1(reference: Any, outputs: Any, image: str) -> float:
    (wanted,), (found,) = reference.values(), outputs.values()
    return float((wanted.argmax(axis=1) == found.argmax(axis=1)).mean())


@pytest.mark.parametrize("make", [resnet, segmentation])
@pytest.mark.parametrize("metric", [None, top1])
def test_classifiers_and_segmentation(make: Any, metric: Any) -> None:
    tuning = qdqtool.tune(make(), images(12, 3, 16), keep=0.98, metric=metric)
    assert tuning.reached and tuning.chosen.metric is not None and tuning.chosen.metric >= 0.98
    assert tuning.metric["name"] == ("output-agreement" if metric is None else f"{__name__}:top1")
    check(tuning.model)


def below_zero(reference: Any, outputs: Any, image: str) -> float:
    (wanted,), (found,) = reference.values(), outputs.values()
    return -float(np.abs(wanted - found).mean())


def test_broken_images_are_left_out_and_told(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(16):
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(
            tmp_path / f"{number:02}.png"
        )
    whole = qdqtool.tune(segmentation(), tmp_path, keep=0.9)
    (tmp_path / "03.png").write_bytes(b"no picture")
    tuning = qdqtool.tune(segmentation(), tmp_path, keep=0.9)
    (unread,) = (w for w in tuning.warnings if w.remark is Remark.UNREAD_IMAGES)
    assert (unread.values["count"], unread.values["file"]) == (1, "03.png")
    assert (
        tuning.chosen.metric != whole.chosen.metric
        and tuning.chosen.chosen_on == whole.chosen.chosen_on
    )


def test_nothing_that_was_read_is_overwritten_by_either_file(tmp_path: Path) -> None:
    model, data = tmp_path / "m.onnx", tmp_path / "x.npy"
    onnx.save(branchy(), model)
    np.save(data, np.concatenate([next(iter(d.values())) for d in DATA]))
    tuning = qdqtool.tune(model, data, keep=0.9, method="mse")
    before = model.read_bytes(), data.read_bytes()
    for save in (tuning.save, tuning.save_result):
        for path in (model, data):
            with raises(QdqtoolError, "InputFiles.forbid_overwrite|_is_input|save"):
                save(path)
    assert (model.read_bytes(), data.read_bytes()) == before
    tuning.save_result(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes().startswith(b"{")


def test_networks_without_int8_and_more_convolutions() -> None:
    net = conv_net()
    next(n for n in net.graph.node if n.name == "conv2").name = "other"
    samples = [
        {"images": np.random.default_rng(i).random((1, 3, 16, 16), np.float32)} for i in range(8)
    ]
    for whole_front in (False, True):
        with raises(QdqtoolError, "Search.choose"):
            qdqtool.tune(net, samples, include=["conv"], whole_front=whole_front)
    with raises(QdqtoolError, "seconds time_limit=1e+308"):
        qdqtool.tune(net, samples, time_limit=1e308)
    # A pattern leaves a convolution out; making another one float may still put a Q on what it reads
    model = conv_net()
    model.graph.node[-1].name = "last"
    samples = np.random.default_rng(0).random((8, 3, 16, 16), np.float32)
    found = qdqtool.tune(model, samples, keep=0.999, include=["conv"], whole_front=True)
    assert found.chosen.cost.int8 <= 3 and found.front
