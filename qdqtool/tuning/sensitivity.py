"""Sensitivity: decrease of the output error by a single choice, such as one float site."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from calibration.dataset import spread_indices
from qdqtool.tuning.evaluator import CandidateEvaluator
from qdqtool.tuning.planner import Configuration, Planner
from qdqtool.tuning.recipe import (
    Recipe,
    find_first_difference,
    list_remaining_work,
    restrict_to_differences,
)
from qdqtool.tuning.sites import Candidate
from qdqtool.tuning.store import SWEEP, WHOLE

FIRST_SAMPLES = 2  # number of samples on which all choices are measured
BETTER_PART = 1 / 4  # fraction of the choices that is also measured on twice as many samples


@dataclass
class SensitivitySweep:
    """Measures each choice alone, and computes its gain (decrease of the squared output error).

    Attributes:
        planner: Plans the choices.
        evaluator: Measures recipes.
        start: Configuration to which each choice is applied.
    """

    planner: Planner
    evaluator: CandidateEvaluator
    start: Configuration
    _isolated: dict[Candidate, tuple[Recipe, Recipe]] = field(default_factory=dict)
    # Samples on which each choice was measured. The store may have measurements of the choice's
    # recipes on more samples, because choices share recipes.
    _measured_on: dict[Candidate, list[int]] = field(default_factory=dict)

    def apply(self, candidate: Candidate) -> Configuration:
        """Return the start configuration with a choice applied."""
        return self.start.merge(candidate.configuration)

    def isolate(self, candidate: Candidate) -> tuple[Recipe, Recipe]:
        """Return two recipes, without and with a choice, that quantize only the nodes that change.

        All other nodes are float: in a quantized network, every change also changes rounded values
        downstream, which affects the error more than most choices do.
        """
        if candidate not in self._isolated:
            before = self.planner.plan(self.start).recipe
            after = self.planner.plan(self.apply(candidate)).recipe
            self._isolated[candidate] = restrict_to_differences(before, after)
        return self._isolated[candidate]

    def list_sample_sets(self) -> Iterator[list[int]]:
        """Yield sets of samples that double in size, from `FIRST_SAMPLES` up to all."""
        images = self.evaluator.sets.swept_on
        count = FIRST_SAMPLES
        selected: dict[int, None] = {}
        while len(selected) < len(images):
            rest = [n for n in images if n not in selected]
            added = spread_indices(len(rest), min(count - len(selected), len(rest)))
            selected |= dict.fromkeys(rest[i] for i in added)
            yield list(selected)
            count *= 2

    def race(
        self, candidates: Sequence[Candidate], title: str, least_gain: float, until: float | None
    ) -> bool:
        """Measure each choice alone, in rounds with more samples and only the better choices.

        Args:
            candidates: Choices of the first round.
            title: Title of the progress bar.
            least_gain: Choices with at most this gain are not measured on more samples.
            until: Value of ``time.monotonic()`` at which the measurement ends; None for the
                deadline.

        Returns:
            False if the time ended before the last measurement.
        """
        for images in self.list_sample_sets():
            for candidate in candidates:
                if len(images) > len(self._measured_on.get(candidate, ())):
                    self._measured_on[candidate] = images
            recipes = [r for c in candidates for r in self.isolate(c) if not r.is_float]
            if not self.evaluator.sweep(recipes, images, title, until):
                return False
            candidates = self._select_better(candidates, images, least_gain)
        return True

    def _select_better(
        self, candidates: Sequence[Candidate], images: Sequence[int], least_gain: float
    ) -> Sequence[Candidate]:
        """Return the best quarter of the choices; all choices if no image could be read."""
        gains = {c: self.gain(c, images) for c in candidates}
        if all(map(math.isnan, gains.values())):
            return candidates
        better = sorted(
            (c for c in candidates if gains[c] > least_gain), key=gains.__getitem__, reverse=True
        )
        return better[: math.ceil(BETTER_PART * len(candidates))]

    def missing_work(self, candidate: Candidate, images: Sequence[int]) -> float:
        """Return the work of measuring a choice on samples, in runs of the whole network.

        Measurements that the store has already are not counted.
        """
        count = 0
        for recipe in self.isolate(candidate):
            if not recipe.is_float:
                stored = self.evaluator.store.measurements(SWEEP, recipe.key)
                count += sum(n not in stored for n in images)
        return count * self.share_of_run(candidate)

    def share_of_run(self, candidate: Candidate) -> float:
        """Return the fraction of a run's multiplications that measuring a choice needs.

        All outputs before the first changed node are shared with other choices.
        """
        position = find_first_difference(self.planner.model, *self.isolate(candidate))
        return self._remaining_work[position]

    @functools.cached_property
    def _remaining_work(self) -> list[float]:
        return list_remaining_work(self.planner.model)

    def error(self, images: Sequence[int] | None = None) -> float | None:
        """Return the root mean square output error of the start; None if it was not measured.

        Args:
            images: Numbers of the samples; None for all samples of single sites.
        """
        images = self.evaluator.sets.swept_on if images is None else images
        recipe = self.planner.plan(self.start).recipe
        errors = self.evaluator.errors(recipe, images, (WHOLE, SWEEP))
        return None if np.isnan(errors).all() else float(np.sqrt(np.nanmean(errors**2)))

    def errors_with(self, candidate: Candidate) -> tuple[float, float] | None:
        """Return the output errors of the start without and with a choice.

        The error with the choice is estimated from the gain of the choice.

        Returns:
            None if the start or the choice was not measured.
        """
        gain = self.gain(candidate)
        before = None if math.isnan(gain) else self.error(self._measured_on[candidate])
        return None if before is None else (before, math.sqrt(max(0.0, before**2 - gain)))

    def gain(self, candidate: Candidate, images: Sequence[int] | None = None) -> float:
        """Return the mean gain of a choice over samples; NaN if the choice was not measured."""
        gains = self.gains(candidate, images)
        return float(gains.mean()) if len(gains) else math.nan

    def gains(
        self, candidate: Candidate, images: Sequence[int] | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the decrease of the squared output error by a choice alone, for each sample.

        Args:
            candidate: The choice.
            images: Numbers of the samples, of which those without a measurement are left out. None:
                all samples on which the choice was measured.
        """
        images = self._measured_on.get(candidate, ()) if images is None else images
        if not images:
            return np.empty(0)
        before, after = (
            0.0 if r.is_float else self.evaluator.errors(r, images) ** 2
            for r in self.isolate(candidate)
        )
        gains: npt.NDArray[np.float64] = np.atleast_1d(before - after)
        return gains[~np.isnan(gains)]
