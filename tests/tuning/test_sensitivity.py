from typing import Any

import numpy as np
import pytest

from qdqtool.tuning.planner import FLOAT, Configuration
from qdqtool.tuning.recipe import FLOAT_RECIPE, Recipe
from qdqtool.tuning.sensitivity import SensitivitySweep
from qdqtool.tuning.sites import INT8, Candidate, TuningSite


@pytest.mark.parametrize(
    ("choice", "without", "with_choice", "alone"),
    [
        pytest.param(FLOAT, 0.05, 0.0, 0.05, id="float"),
        pytest.param(INT8, 0.0, 0.05, 0.05, id="int8"),
        pytest.param(FLOAT, 0.05, 0.03, 0.04, id="float-changes-other-scales"),
        pytest.param(FLOAT, 0.03, 0.05, 0.0, id="float-is-worse"),
    ],
)
def test_error_alone_follows_from_squared_errors(
    monkeypatch: pytest.MonkeyPatch, choice: str, without: float, with_choice: float, alone: float
) -> None:
    errors = {key: error for key, error in enumerate((without, with_choice)) if error}
    recipes = [Recipe((), ((key, "w", 0),)) if key in errors else FLOAT_RECIPE for key in (0, 1)]

    class Evaluator:
        def errors(self, recipe: Recipe) -> np.ndarray:
            return np.full(4, errors[recipe.weights[0][0]])

    monkeypatch.setattr(SensitivitySweep, "isolate_choice", lambda sweep, candidate: recipes)
    nothing: Any = None
    evaluator: Any = Evaluator()
    candidate = Candidate(TuningSite("a", "head", ("a",), ()), choice, Configuration())
    sweep = SensitivitySweep(nothing, evaluator, Configuration())
    assert sweep.error_alone(candidate) == pytest.approx(alone)
