"""Measure recipes (sets of Q/DQ pairs with scales) on samples, and compute metric values.

The values do not depend on the order of the measurements.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qdqtool.accuracy.metrics import (
    DetectionAgreementMetric,
    Evidence,
    UserMetric,
    count_references,
    estimate_interval,
    resample_metric,
)
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.tuning.image_sets import ImageSets
from qdqtool.tuning.measure import (
    MeasurementTask,
    TaskMapper,
    TaskResult,
    TuningJob,
)
from qdqtool.tuning.recipe import FLOAT_RECIPE, Recipe
from qdqtool.tuning.store import MeasurementStore
from qdqtool.util.progress import track_progress


class OutOfTime(Exception):
    """The time limit was reached. The store contains the measurements so far."""


@dataclass
class CandidateEvaluator:
    """Measures recipes on samples, and stores the measurements.

    Attributes:
        job: Data that all measurements share.
        sets: Samples of the search and held-out samples.
        mapper: Function that runs measurement tasks.
        store: Measurements so far.
        workers: Number of tasks that run at the same time.
        deadline: Value of ``time.monotonic()`` at which measurements end; None without a limit.
        progress: Whether to draw a progress bar.
        runs: Number of measurements in this process, each of one recipe on one sample.
    """

    job: TuningJob
    sets: ImageSets
    mapper: TaskMapper
    store: MeasurementStore
    workers: int
    deadline: float | None = None
    progress: bool = False
    runs: int = 0
    _values: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)

    # Output errors of single sites, without the metric ---------------------------------

    def measure_output_errors(
        self,
        recipes: Sequence[Recipe],
        images: Sequence[int],
        title: str,
        until: float | None = None,
    ) -> bool:
        """Measure the output errors of recipes on samples, and store them.

        Args:
            recipes: Recipes to measure.
            images: Positions of the samples in `sets.measured`.
            title: Title of the progress bar.
            until: Value of ``time.monotonic()`` at which the measurement ends, if this is earlier
                than the deadline; None for the deadline.

        Returns:
            False if the time ended before the last measurement.
        """
        try:
            self._measure_missing(recipes, images, title, with_metric=False, until=until)
        except OutOfTime:
            return False
        return True

    def errors(self, recipe: Recipe) -> npt.NDArray[np.float64]:
        """Return the output error of a recipe on each sample of `sets.swept_on`, float64.

        The error is NaN if the sample was not measured or cannot be read.
        """
        rows = self.store.measurements(recipe.key)
        measurements = [rows.get(n) for n in self.sets.swept_on]
        return np.asarray([math.nan if m is None else m.error for m in measurements], np.float64)

    # Metric and output errors of whole placements -------------------------------------

    def measure_metric(self, recipes: Iterable[Recipe], samples: Sequence[int], title: str) -> None:
        """Measure the metric and the output error of recipes on samples, and store them.

        Raises:
            OutOfTime: The deadline passes before the last measurement.
        """
        self._measure_missing(recipes, samples, title, with_metric=True)

    def is_measured(self, recipe: Recipe, samples: Sequence[int]) -> bool:
        """Return whether the store has the metric or a reading error for each sample."""
        return not any(self._is_missing(recipe, n, with_metric=True) for n in samples)

    def _list_evidence(self, recipe: Recipe, samples: Sequence[int]) -> list[Evidence]:
        """Return the metric's intermediate result for each sample that could be read, in order."""
        rows = self.store.measurements(recipe.key)
        return [row.evidence for n in samples if (row := rows.get(n)) is not None]

    def value(self, recipe: Recipe, samples: Sequence[int]) -> float:
        """Return the value of the metric over measured samples.

        Raises:
            DataError: No sample could be read, the float model detects nothing on the samples, or
                the file of the store is damaged.
        """
        key = (recipe.key, tuple(samples))
        if key not in self._values:
            self._values[key] = self._compute_value(self._list_evidence(recipe, samples))
        return self._values[key]

    def _compute_value(self, evidence: list[Evidence]) -> float:
        if not evidence:
            raise DataError(
                "none of the images for measuring could be read; give JPEG or PNG files",
                code="no-images",
            )
        try:
            value = float(self.job.metric.value(evidence))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            if not self.store.resumed:
                raise
            raise DataError(
                "the file of measurements is damaged; remove the file to start again",
                str(self.store.path),
                code="file-damaged",
                parameter="state",
            ) from error
        if math.isnan(value):
            raise DataError(
                "the float model detects nothing on these images, so agreement cannot be "
                "measured; give images with objects that the model can detect, or your own "
                "`metric`",
                code="nothing-detected",
                parameter="data",
            )
        return value

    def resample(self, recipe: Recipe, samples: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the metric over bootstrap resamples of the samples, float64 [300].

        The resamples are equal for all recipes, so that recipes can be compared.
        """
        evidence = self._list_evidence(recipe, samples)
        return resample_metric(self.job.metric, evidence)

    def estimate_interval(self, recipe: Recipe, samples: Sequence[int]) -> tuple[float, float]:
        """Return the low and the high end of the metric's 95 % interval over measured samples.

        The agreement of the float model with itself is exact.
        """
        if recipe.key == FLOAT_RECIPE.key and not isinstance(self.job.metric, UserMetric):
            return self.value(recipe, samples), self.value(recipe, samples)
        return estimate_interval(self.job.metric, self._list_evidence(recipe, samples))

    def count_references(self, recipe: Recipe, samples: Sequence[int]) -> int | None:
        """Return the number of the float model's detections; None for other metrics.

        Args:
            recipe: A measured recipe.
            samples: Positions of the measured samples.
        """
        if not isinstance(self.job.metric, DetectionAgreementMetric):
            return None
        return count_references(self.job.metric, self._list_evidence(recipe, samples))

    # Running --------------------------------------------------------------------------

    def _list_tasks(
        self, recipes: Sequence[Recipe], samples: Sequence[int], with_metric: bool
    ) -> list[MeasurementTask]:
        """Return a task for each sample on which recipes are not measured yet."""
        unique = {r.key: r for r in recipes}.values()
        tasks = []
        for n in samples:
            missing = tuple(r for r in unique if self._is_missing(r, n, with_metric))
            if missing:
                tasks.append(MeasurementTask((n,), missing, with_metric))
        return tasks

    def _is_missing(self, recipe: Recipe, number: int, with_metric: bool) -> bool:
        rows = self.store.measurements(recipe.key)
        if number not in rows:
            return True
        row = rows[number]
        return with_metric and row is not None and row.evidence is None

    def _measure_missing(
        self,
        recipes: Iterable[Recipe],
        samples: Sequence[int],
        title: str,
        with_metric: bool,
        until: float | None = None,
    ) -> None:
        recipes = list(recipes)
        tasks = self._list_tasks(recipes, samples, with_metric)
        if not tasks:
            return
        end = min((t for t in (self.deadline, until) if t is not None), default=math.inf)
        if time.monotonic() > end:
            raise OutOfTime
        steps = self._store_results(self.mapper(self.job, tasks), end)
        total = sum(len(task.candidates) for task in tasks)
        try:
            for _ in track_progress(steps, title, total) if self.progress else steps:
                pass
        finally:
            self.store.save()
        rest = self._list_tasks(recipes, samples, with_metric)
        missing = sum(len(task.candidates) for task in rest)
        if missing:
            raise QdqtoolError(
                f"`mapper` ended with {total - missing} of {total} results; a mapper must yield a "
                "result for each candidate and sample of its tasks",
                code="result-missing",
                parameter="mapper",
            )

    def _store_results(self, results: Iterator[TaskResult], end: float) -> Iterator[None]:
        """Store each result as soon as it arrives, and yield once for each measurement.

        Raises:
            OutOfTime: A result arrives after `end`.
        """
        try:
            for result in results:
                count = sum(map(len, result.values()))
                self.store.add(result)
                self.runs += count
                yield from itertools.repeat(None, count)
                if time.monotonic() > end:
                    raise OutOfTime
        finally:
            close = getattr(results, "close", None)  # closing a generator ends its threads
            if close is not None:
                close()

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline
