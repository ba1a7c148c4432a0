from pathlib import Path
from typing import Any

import pytest

import qdqtool
from qdqtool.errors import DataError
from qdqtool.tuning import api, store
from qdqtool.tuning.measure import (
    PartitionedNetwork,
    TaskResult,
    TuningJob,
)
from qdqtool.tuning.planner import Planner
from tests.errors import has
from tests.insertion.test_smoothing import add_outliers
from tests.insertion.transformers import samples, vit
from tests.notes import note_codes
from tests.slow import slow_after
from tests.tuning.nets import branchy
from tests.tuning.tuned import DATA, KEEP, ROWS, observed, tune, without_effort

pytestmark = pytest.mark.usefixtures("cached_rows")


@pytest.mark.parametrize("workers", slow_after(1, [3, 1]))
def test_tune_result_does_not_depend_on_workers(
    tuned: qdqtool.Tuning, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartitionedNetwork, "measure", ROWS)  # without the cache
    again = tune(keep=KEEP, workers=workers)
    first, second = (t.model.SerializeToString(deterministic=True) for t in (tuned, again))
    assert without_effort(again) == without_effort(tuned) and first == second


@pytest.mark.parametrize("after", slow_after(1, [40, 1]))
def test_tune_continues_from_state(tuned: qdqtool.Tuning, tmp_path: Path, after: int) -> None:
    state = tmp_path / "t.tuning"
    results: list[TaskResult] = []

    def kill(job: TuningJob, result: TaskResult) -> None:
        if len(results) == after:
            raise SystemExit
        results.append(result)

    with pytest.raises(SystemExit):
        tune(keep=KEEP, state=state, mapper=observed(kill))
    again = tune(keep=KEEP, state=state)
    assert without_effort(again) == without_effort(tuned) and again.effort["resumed"] >= after
    assert tune(keep=0.979, state=state).effort["runs"] < tuned.effort["runs"] / 2


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "t.tuning"
    tune(keep=0.9, state=path)
    return path


def test_tune_reads_the_ranges_of_an_earlier_run(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Any] = []
    collect = api.collect_statistics
    monkeypatch.setattr(
        api, "collect_statistics", lambda *a, **o: [reports.append(r := collect(*a, **o)), r][1]
    )
    tune(keep=KEEP, state=state)
    assert note_codes(reports[0][1]["notes"]) == ["reused"]


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
    monkeypatch.setattr(Planner, "predict_cost", None)  # the file has the costs
    assert tune(**options).effort["runs"] == 0
    source.write_text("def same(reference, outputs, image):\n    return 2.0\n")
    with pytest.raises(DataError, check=has("different-settings", parameter="state")):
        tune(**options)
