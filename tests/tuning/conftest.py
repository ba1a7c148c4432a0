"""Caches and clocks that tests of tuning share."""

import contextlib
import copy
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from calibration import Dataset, Statistics, TensorStatistics
from calibration.arrays import MemorySource
from qdqtool import prediction
from qdqtool.insertion import rules
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup
from qdqtool.ir.graph import Model
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target
from qdqtool.tuning import api, evaluator, planner, search, store, time_plan
from qdqtool.tuning.planner import PlacementCost, Planner
from qdqtool.tuning.recipe import Recipe
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note


@contextlib.contextmanager
def predicted_once() -> Iterator[None]:
    """Cache predictions, costs, scales and statistics until the context ends.

    Most tests tune the same network.
    """
    costs: dict[Any, PlacementCost] = {}
    predictions: dict[Any, Prediction] = {}
    scales: dict[Any, tuple[GroupScale, list[Note]]] = {}
    collections: dict[Any, tuple[Statistics, Json]] = {}
    predict_cost, predict = Planner.predict_cost, prediction.predict
    settled, choose_scale = rules.simulate_without_alternatives, planner.choose_scale
    collect_statistics = api.collect_statistics

    def cached_cost(self: Planner, recipe: Recipe) -> PlacementCost:
        model = self.light_model.proto.SerializeToString(deterministic=True)
        key = (
            model,
            self.target,
            self.gpu,
            self.fp16,
            tuple(self.fp32_tensors.items()),
            recipe.key,
        )
        if key not in costs:
            costs[key] = predict_cost(self, recipe)
        return costs[key]

    def cached_prediction(index: Model, target: Target, advice: bool) -> Prediction:
        key = (index.proto.SerializeToString(deterministic=True), target, advice)
        if key not in predictions:
            predictions[key] = predict(index, target, advice=advice)
        return predictions[key]

    def copied_prediction(index: Model, target: Target) -> Prediction:
        """Return a copy with findings, which `tune` changes."""
        return copy.deepcopy(cached_prediction(index, target, True))

    def cached_settled(index: Model, target: Target) -> Prediction:
        key = (index.proto.SerializeToString(deterministic=True), target)
        if key not in predictions:
            predictions[key] = settled(index, target)
        return predictions[key]

    def cached_scale(
        group: ScaleGroup, statistics: Mapping[str, TensorStatistics], choice: MethodChoice
    ) -> tuple[GroupScale, list[Note]]:
        key = (group, choice, *(pickle.dumps(statistics[t]) for t in group.sources))
        if key not in scales:
            scales[key] = choose_scale(group, statistics, choice)
        return scales[key]

    def cached_statistics(
        model: Model, data: Dataset, groups: Sequence[ScaleGroup], **options: Any
    ) -> tuple[Statistics, Json]:
        whole = getattr(data.source, "whole", None)
        in_memory = isinstance(whole, MemorySource) and whole.repeatable
        if not in_memory or options["cluster"].cluster is not None:
            return collect_statistics(model, data, groups, **options)
        samples = tuple((n, v.tobytes()) for sample in data for n, v in sorted(sample.items()))
        proto = model.proto.SerializeToString(deterministic=True)
        key = (proto, samples, tuple(groups), options["max_images"])
        if key not in collections:
            collections[key] = collect_statistics(model, data, groups, **options)
        return collections[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "collect_statistics", cached_statistics)
        patch.setattr(Planner, "predict_cost", cached_cost)
        patch.setattr(planner, "choose_scale", cached_scale)
        patch.setattr(rules, "simulate_without_alternatives", cached_settled)
        patch.setattr(planner, "prediction", SimpleNamespace(predict=cached_prediction))
        patch.setattr(api, "prediction", SimpleNamespace(predict=copied_prediction))
        yield


@pytest.fixture(scope="package", autouse=True)
def cached_predictions() -> Iterator[None]:
    with predicted_once():
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
    """Return the clock of the time limits."""
    clock = Clock()
    for module in (api, evaluator, search, store, time_plan):
        monkeypatch.setattr(module, "time", clock)
    return clock
