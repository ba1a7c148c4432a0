"""What tests of tuning share."""

from collections.abc import Iterator
from typing import Any

import pytest

from qdqtool.tuning.configuration import Cost, Planner, Recipe


@pytest.fixture(scope="package", autouse=True)
def each_placement_is_predicted_once() -> Iterator[None]:
    """Most tests tune one and the same network, which takes as long as all predictions of its placements."""
    kept: dict[Any, Cost] = {}
    real = Planner._cost

    def cost(self: Planner, recipe: Recipe) -> Cost:
        model = self._slim.proto.SerializeToString(deterministic=True)
        key = (model, self.target, self.gpu, self.half, tuple(self.wide.items()), recipe.key)
        if key not in kept:
            kept[key] = real(self, recipe)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "_cost", cost)
        yield
