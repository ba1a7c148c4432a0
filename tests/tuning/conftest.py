"""What tests of tuning share."""

import contextlib
import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from calibration import Dataset, Statistics, TensorStatistics
from calibration.arrays import MemorySource
from qdqtool import prediction
from qdqtool.base.notes import Note
from qdqtool.insertion import rules
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup
from qdqtool.model.graph import Model
from qdqtool.trt.targets import Target
from qdqtool.tuning import api, configuration
from qdqtool.tuning.configuration import Cost, Planner, Recipe
from qdqtool.types import Json, Prediction


@contextlib.contextmanager
def predicted_once() -> Iterator[None]:
    """Most tests tune one and the same network, which takes as long as all predictions of its placements."""
    kept: dict[Any, Cost] = {}
    predictions: dict[Any, Prediction] = {}
    scales: dict[Any, tuple[GroupScale, list[Note]]] = {}
    counted: dict[Any, tuple[Statistics, Json]] = {}
    real, predict, settle, choose = (
        Planner._cost,
        prediction.predict,
        rules.settled,
        configuration.choose_scale,
    )
    collect = api.collect_for

    def cost(self: Planner, recipe: Recipe) -> Cost:
        model = self._slim.proto.SerializeToString(deterministic=True)
        key = (model, self.target, self.gpu, self.half, tuple(self.wide.items()), recipe.key)
        if key not in kept:
            kept[key] = real(self, recipe)
        return kept[key]

    def predicted(index: Model, target: Target, advice: bool) -> Prediction:
        """Whatever the GPU."""
        key = (index.proto.SerializeToString(deterministic=True), target, advice)
        if key not in predictions:
            predictions[key] = predict(index, target, advice=advice)
        return predictions[key]

    def told(made: Model, target: Target) -> Prediction:
        """Of what was chosen, with findings: a copy, for what it is written to changes it."""
        return copy.deepcopy(predicted(made, target, True))

    def settled(index: Model, target: Target) -> Prediction:
        """What the rules for residual Adds are chosen by."""
        key = (index.proto.SerializeToString(deterministic=True), target)
        if key not in predictions:
            predictions[key] = settle(index, target)
        return predictions[key]

    def chosen(
        group: ScaleGroup, statistics: Mapping[str, TensorStatistics], choice: MethodChoice
    ) -> tuple[GroupScale, list[Note]]:
        """Of the same values the scale is the same."""
        key = (group, choice, *(pickle.dumps(statistics[t]) for t in group.sources))
        if key not in scales:
            scales[key] = choose(group, statistics, choice)
        return scales[key]

    def collected(
        model: Model, data: Dataset, groups: Sequence[ScaleGroup], **others: Any
    ) -> tuple[Statistics, Json]:
        """What one process counts on samples in memory."""
        whole = getattr(data.source, "whole", None)
        if (
            not isinstance(whole, MemorySource)
            or not whole.repeatable
            or others["workers"].cluster is not None
        ):
            return collect(model, data, groups, **others)
        samples = tuple((n, v.tobytes()) for sample in data for n, v in sorted(sample.items()))
        key = (
            model.proto.SerializeToString(deterministic=True),
            samples,
            tuple(groups),
            others["max_images"],
        )
        if key not in counted:
            counted[key] = collect(model, data, groups, **others)
        return counted[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "collect_for", collected)
        patch.setattr(Planner, "_cost", cost)
        patch.setattr(configuration, "choose_scale", chosen)
        patch.setattr(rules, "settled", settled)
        patch.setattr(configuration, "prediction", SimpleNamespace(predict=predicted))
        patch.setattr(api, "prediction", SimpleNamespace(predict=told))
        yield


@pytest.fixture(scope="package", autouse=True)
def each_placement_is_predicted_once() -> Iterator[None]:
    with predicted_once():
        yield


@pytest.fixture
def costs_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of which no placement's cost decides anything: predicting them takes most of the time."""
    monkeypatch.setattr(Planner, "_cost", lambda self, recipe: Cost(99, len(recipe.weights), 0))
