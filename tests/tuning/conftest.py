"""What tests of tuning share."""

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from calibration import TensorStatistics
from qdqtool import prediction
from qdqtool.base.notes import Note
from qdqtool.insertion import rules
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup
from qdqtool.model.graph import Model
from qdqtool.trt.targets import Target
from qdqtool.tuning import configuration
from qdqtool.tuning.configuration import Cost, Planner, Recipe
from qdqtool.types import Prediction


@contextlib.contextmanager
def predicted_once() -> Iterator[None]:
    """Most tests tune one and the same network, which takes as long as all predictions of its placements."""
    kept: dict[Any, Cost] = {}
    predictions: dict[Any, Prediction] = {}
    scales: dict[Any, tuple[GroupScale, list[Note]]] = {}
    real, predict, settle, choose = Planner._cost, prediction.predict, rules.settled, configuration.choose_scale

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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "_cost", cost)
        patch.setattr(configuration, "choose_scale", chosen)
        patch.setattr(rules, "settled", settled)
        patch.setattr(configuration, "prediction", SimpleNamespace(predict=predicted))
        yield


@pytest.fixture(scope="package", autouse=True)
def each_placement_is_predicted_once() -> Iterator[None]:
    with predicted_once():
        yield
