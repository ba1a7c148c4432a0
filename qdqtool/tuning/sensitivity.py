"""Sensitivity: the part of the output error that each choice alone removes."""

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

FIRST_SAMPLES = 2  # samples that all choices are measured on
BETTER_PART = 1 / 4  # part of them that is measured on twice as many samples


@dataclass
class SensitivitySweep:
    """Measures choices alone, and computes their gains.

    Attributes:
        planner: Plans the choices.
        evaluator: Measures them.
        start: Configuration that the choices change.
    """

    planner: Planner
    evaluator: CandidateEvaluator
    start: Configuration
    _isolated: dict[Candidate, tuple[Recipe, Recipe]] = field(default_factory=dict)
    # Samples of each choice. The store may have more of a recipe, from other choices.
    _measured_on: dict[Candidate, list[int]] = field(default_factory=dict)

    def apply(self, candidate: Candidate) -> Configuration:
        """Return the start with a choice."""
        return self.start.merge(candidate.configuration)

    def isolate(self, candidate: Candidate) -> tuple[Recipe, Recipe]:
        """Return recipes that quantize only the nodes that a choice changes.

        The first one has them as they are without the choice, the second one as with it. The rest
        of the network is float, because in a quantized network any change flips downstream
        rounding. That moves the error by more than most choices do.
        """
        if candidate not in self._isolated:
            before = self.planner.plan(self.start).recipe
            after = self.planner.plan(self.apply(candidate)).recipe
            self._isolated[candidate] = restrict_to_differences(before, after)
        return self._isolated[candidate]

    def list_sample_sets(self) -> Iterator[list[int]]:
        """Yield growing sets of samples for single sites: a few, twice as many, up to all."""
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
        """Measure choices alone on a few samples, and the better ones on more and more.

        Only choices with more than `least_gain` are measured on more samples. Return whether there
        was time for all until the time `until`.
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
        """Return the better part of choices, all if none of the images can be read."""
        gains = {c: self.gain(c, images) for c in candidates}
        if all(map(math.isnan, gains.values())):
            return candidates
        better = sorted(
            (c for c in candidates if gains[c] > least_gain), key=gains.__getitem__, reverse=True
        )
        return better[: math.ceil(BETTER_PART * len(candidates))]

    def missing_work(self, candidate: Candidate, images: Sequence[int]) -> float:
        """Return the work of the missing measurements of a choice on samples, in whole runs."""
        count = 0
        for recipe in self.isolate(candidate):
            if not recipe.is_float:
                stored = self.evaluator.store.measurements(SWEEP, recipe.key)
                count += sum(n not in stored for n in images)
        return count * self.share_of_run(candidate)

    def share_of_run(self, candidate: Candidate) -> float:
        """Return the part of a run's multiplications that a sweep repeats for a choice."""
        position = find_first_difference(self.planner.model, *self.isolate(candidate))
        return self._remaining_work[position]

    @functools.cached_property
    def _remaining_work(self) -> list[float]:
        return list_remaining_work(self.planner.model)

    def error(self, images: Sequence[int] | None = None) -> float | None:
        """Return the root mean square output error of the start; None if it was not measured.

        The samples are those for single sites by default.
        """
        images = self.evaluator.sets.swept_on if images is None else images
        recipe = self.planner.plan(self.start).recipe
        errors = self.evaluator.errors(recipe, images, (WHOLE, SWEEP))
        return None if np.isnan(errors).all() else float(np.sqrt(np.nanmean(errors**2)))

    def errors_with(self, candidate: Candidate) -> tuple[float, float] | None:
        """Return the error of the start without and with a choice, on the samples of the choice.

        None if they were not measured.
        """
        gain = self.gain(candidate)
        before = None if math.isnan(gain) else self.error(self._measured_on[candidate])
        return None if before is None else (before, math.sqrt(max(0.0, before**2 - gain)))

    def gain(self, candidate: Candidate, images: Sequence[int] | None = None) -> float:
        """Return the mean gain of a choice, NaN if it was not measured; see `gains`."""
        gains = self.gains(candidate, images)
        return float(gains.mean()) if len(gains) else math.nan

    def gains(
        self, candidate: Candidate, images: Sequence[int] | None = None
    ) -> npt.NDArray[np.float64]:
        """Return by how much a choice alone reduces the squared error of each sample.

        The samples are all of the choice by default. Those not measured are left out.
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
