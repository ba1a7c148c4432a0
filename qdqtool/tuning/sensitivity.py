"""Sensitivity: decrease of the output error by a single choice, such as one float site."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qdqtool.tuning.evaluator import CandidateEvaluator
from qdqtool.tuning.planner import FLOAT, Configuration, Planner
from qdqtool.tuning.recipe import Recipe, restrict_to_differences
from qdqtool.tuning.sites import Candidate


@dataclass
class SensitivitySweep:
    """Measures each choice alone, and its gain: the decrease of the squared output error.

    Attributes:
        planner: Plans the choices.
        evaluator: Measures recipes.
        start: Configuration to which each choice is applied.
    """

    planner: Planner
    evaluator: CandidateEvaluator
    start: Configuration
    _isolated: dict[Candidate, tuple[Recipe, Recipe]] = field(default_factory=dict)

    def apply_choice(self, candidate: Candidate) -> Configuration:
        """Return the start configuration with a choice applied."""
        return self.start.merge(candidate.configuration)

    def isolate_choice(self, candidate: Candidate) -> tuple[Recipe, Recipe]:
        """Return two recipes, without and with a choice, that quantize only the nodes that change.

        All other nodes are float. In a quantized network, a change would also change rounded values
        downstream, which affects the error more than most choices do.
        """
        if candidate not in self._isolated:
            before = self.planner.plan(self.start).recipe
            after = self.planner.plan(self.apply_choice(candidate)).recipe
            self._isolated[candidate] = restrict_to_differences(before, after)
        return self._isolated[candidate]

    def measure(self, candidates: Iterable[Candidate], title: str, until: float | None) -> bool:
        """Measure the output errors of the two recipes of :meth:`isolate_choice` for each choice.

        The samples are those in `sets.swept_on` of the evaluator, which stores the errors.

        Args:
            candidates: Choices to measure.
            title: Title of the progress bar.
            until: Value of ``time.monotonic()`` at which the measurement ends; None for the
                deadline of the evaluator.

        Returns:
            False if the time ended before the last measurement.
        """
        recipes = [r for c in candidates for r in self.isolate_choice(c) if not r.is_float]
        return self.evaluator.measure_output_errors(
            recipes, self.evaluator.sets.swept_on, title, until
        )

    def start_error(self) -> float:
        """Return the root mean square output error of `start`; NaN if it was not measured."""
        recipe = self.planner.plan(self.start).recipe
        errors = self.evaluator.errors(recipe)
        return math.sqrt(np.nanmean(errors**2)) if np.isfinite(errors).any() else math.nan

    def errors_with(self, candidate: Candidate) -> tuple[float, float] | None:
        """Return the output errors of the start configuration without and with a choice.

        The error with the choice is estimated from the gain of the choice.

        Returns:
            None if the start configuration or the choice was not measured.
        """
        before, gain = self.start_error(), self.mean_gain(candidate)
        if math.isnan(before + gain):
            return None
        return before, math.sqrt(max(0.0, before**2 - gain))

    def error_alone(self, candidate: Candidate) -> float | None:
        """Return the output error if only the site of a choice is quantized.

        If a float site changes the scales of other nodes, the error is estimated from the gain of
        the choice, and is 0 if float does not decrease the error.

        Returns:
            None if the choice was not measured.
        """
        gain = self.mean_gain(candidate)
        if math.isnan(gain):
            return None
        return math.sqrt(max(0.0, gain if candidate.choice == FLOAT else -gain))

    def mean_gain(self, candidate: Candidate) -> float:
        """Return the mean gain of a choice over samples; NaN if the choice was not measured."""
        gains = self.gains(candidate)
        return float(gains.mean()) if len(gains) else math.nan

    def gains(self, candidate: Candidate) -> npt.NDArray[np.float64]:
        """Return the gain of a choice on each sample on which the choice was measured."""
        before, after = (
            0.0 if r.is_float else self.evaluator.errors(r) ** 2
            for r in self.isolate_choice(candidate)
        )
        gains: npt.NDArray[np.float64] = np.atleast_1d(before - after)
        return gains[~np.isnan(gains)]
