"""Caches and clocks that tests of tuning share."""

import pickle
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from calibration import TensorStatistics
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup
from qdqtool.tuning import api, evaluator, planner, search, store, time_plan
from qdqtool.tuning.planner import PlacementCost, Planner
from qdqtool.tuning.recipe import Recipe
from qdqtool.util.notes import Note


@pytest.fixture(scope="package", autouse=True)
def cached_costs() -> Iterator[None]:
    """Cache costs and scales, because most tests tune the same network."""
    costs: dict[Any, PlacementCost] = {}
    scales: dict[Any, tuple[GroupScale, list[Note]]] = {}
    predict_cost, choose_scale = Planner.predict_cost, planner.choose_scale

    def cached_cost(self: Planner, recipe: Recipe) -> PlacementCost:
        model = self.light_model.proto.SerializeToString(deterministic=True)
        options = (self.target, self.gpu, self.fp16, tuple(self.fp32_tensors.items()))
        key = (model, *options, recipe.key)
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
        patch.setattr(planner, "choose_scale", cached_scale)
        yield


@pytest.fixture
def constant_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace predicted costs by constants, for tests that do not depend on costs."""
    cost = lambda self, recipe: PlacementCost(99, len(recipe.weights), 0)  # noqa: E731
    monkeypatch.setattr(Planner, "predict_cost", cost)


class Clock:
    """Clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time, self.process_time = time.time, time.process_time

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (api, evaluator, search, store, time_plan):
        monkeypatch.setattr(module, "time", clock)
    return clock
