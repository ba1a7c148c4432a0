from types import SimpleNamespace
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
    errors = {Recipe((), ((k, "w", 0),)): e for k, e in enumerate((without, with_choice))}
    recipes = [recipe if error else FLOAT_RECIPE for recipe, error in errors.items()]
    monkeypatch.setattr(SensitivitySweep, "isolate_choice", lambda sweep, candidate: recipes)
    fakes: Any = None, SimpleNamespace(errors=lambda recipe: np.full(4, errors[recipe]))
    sweep, site = SensitivitySweep(*fakes, Configuration()), TuningSite("a", "head", ("a",), ())
    assert sweep.error_alone(Candidate(site, choice, site.as_float())) == pytest.approx(alone)
