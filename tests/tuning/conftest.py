import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from calibration import TensorStatistics
from qdqtool.accuracy.metrics import OutputAgreementMetric
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup
from qdqtool.quantization import inserter
from qdqtool.tuning import api, evaluator, planner, search, store, time_plan
from qdqtool.tuning.measure import Measurement, PartitionedNetwork
from qdqtool.tuning.planner import PlacementCost, Planner
from qdqtool.tuning.recipe import Recipe
from qdqtool.tuning.result import Tuning
from qdqtool.util.notes import Note
from tests.tuning.tuned import KEEP, ROWS, tune


@pytest.fixture(scope="package", autouse=True)
def cached_costs() -> Iterator[None]:
    """Cache costs and scales, because most tests tune the same network."""
    costs: dict[Any, PlacementCost] = {}
    scales: dict[Any, tuple[GroupScale, list[Note]]] = {}
    predict_cost, choose_scale = Planner.predict_cost, planner.choose_scale

    def cached_cost(self: Planner, recipe: Recipe) -> PlacementCost:
        options = (self.target, self.gpu, self.fp16, tuple(self.fp32_tensors.items()))
        key = (self.light_model.proto.SerializeToString(deterministic=True), *options, recipe.key)
        if key not in costs:
            costs[key] = predict_cost(self, recipe)
        return costs[key]

    def cached_scale(
        group: ScaleGroup, statistics: Mapping[str, TensorStatistics], choice: MethodChoice
    ) -> tuple[GroupScale, list[Note]]:
        key = (group, choice, *(pickle.dumps(statistics[t]) for t in group.sources))
        if key not in scales:
            scales[key] = choose_scale(group, statistics, choice)
        return scales[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "predict_cost", cached_cost)
        for module in (planner, inserter):
            patch.setattr(module, "choose_scale", cached_scale)
        yield


@pytest.fixture
def constant_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = lambda self, recipe: PlacementCost(99, len(recipe.weights), 0)  # noqa: E731
    monkeypatch.setattr(Planner, "predict_cost", cost)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.time, self.process_time = time.time, time.process_time

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (api, evaluator, search, store, time_plan):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(scope="package")
def cache() -> dict[Any, Measurement]:
    return {}


@pytest.fixture(scope="module")
def cached_rows(cache: dict[Any, Measurement]) -> Iterator[None]:
    """Cache errors on samples, because the tests of a network measure the same placements."""

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
