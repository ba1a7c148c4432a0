"""Evaluation of candidates: measurements, and values that are computed from them.

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

from qdqtool.accuracy.metrics import Evidence, resample
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.tuning.image_sets import ImageSets
from qdqtool.tuning.measure import (
    MeasurementTask,
    SampleMeasurements,
    TaskMapper,
    TaskResult,
    TuningJob,
)
from qdqtool.tuning.recipe import Recipe
from qdqtool.tuning.store import SWEEP, WHOLE, MeasurementStore
from qdqtool.util.progress import track

RESAMPLES = 300


class OutOfTime(Exception):
    """The time limit is reached. Measurements so far are kept."""


@dataclass
class CandidateEvaluator:
    """Measures candidates of a tuning.

    Attributes:
        job: Data that all measurements share.
        sets: Samples.
        mapper: Runs the measurements.
        store: Keeps the measurements.
        workers: Number of tasks that run at the same time.
        deadline: Time of ``time.monotonic()`` when measurements end; None without a limit.
        progress: Whether to draw a progress bar.
        runs: Candidates times samples that this process measured.
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
    _resampled: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.float64]] = field(
        default_factory=dict
    )

    # Sweeps: the error of single sites ------------------------------------------------

    def sweep(
        self,
        recipes: Sequence[Recipe],
        images: Sequence[int],
        title: str,
        until: float | None = None,
    ) -> bool:
        """Measure the error of recipes, and return whether there was time for all.

        The sweep ends at `until` if that is before the deadline.
        """
        try:
            self._measure_missing(SWEEP, recipes, images, title, until)
        except OutOfTime:
            return False
        return True

    def errors(
        self, recipe: Recipe, images: Sequence[int], kinds: Sequence[str] = (SWEEP,)
    ) -> npt.NDArray[np.float64]:
        """Return errors of a recipe on samples, NaN for those that were not measured.

        The last one of `kinds` takes precedence.
        """
        rows: SampleMeasurements = {}
        for kind in kinds:
            rows |= self.store.measurements(kind, recipe.key)
        measurements = map(rows.get, images)
        return np.asarray([math.nan if m is None else m.error for m in measurements], np.float64)

    # Whole measurements: the metric ---------------------------------------------------

    def measure_metric(self, recipes: Iterable[Recipe], samples: Sequence[int], title: str) -> None:
        """Measure the metric of recipes.

        Raises:
            OutOfTime: The time limit is reached first.
        """
        self._measure_missing(WHOLE, recipes, samples, title)

    def _list_evidence(self, recipe: Recipe, samples: Sequence[int]) -> list[Evidence]:
        """Return the evidence of the metric in the order of the samples, without broken samples."""
        rows = self.store.measurements(WHOLE, recipe.key)
        return [row.evidence for n in samples if (row := rows.get(n)) is not None]

    def value(self, recipe: Recipe, samples: Sequence[int]) -> float:
        """Return the value of the metric.

        Raises:
            DataError: No sample could be read, or the file of the store is damaged.
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
                "the file is damaged; remove it to start again",
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
        """Return values over resamples of the samples, which are the same for every recipe."""
        key = (recipe.key, tuple(samples))
        if key not in self._resampled:
            evidence = self._list_evidence(recipe, samples)
            self._resampled[key] = resample(self.job.metric, evidence, RESAMPLES)
        return self._resampled[key]

    # Running --------------------------------------------------------------------------

    def _list_tasks(
        self, kind: str, recipes: Sequence[Recipe], samples: Sequence[int]
    ) -> list[MeasurementTask]:
        """Return one task for each sample with the measurements that the store lacks."""
        unique = {r.key: r for r in recipes}
        stored = {key: self.store.measurements(kind, key) for key in unique}
        missing = {
            n: tuple(r for key, r in unique.items() if n not in stored[key]) for n in samples
        }
        return [MeasurementTask((n,), rs, kind == WHOLE) for n, rs in missing.items() if rs]

    def _measure_missing(
        self,
        kind: str,
        recipes: Iterable[Recipe],
        samples: Sequence[int],
        title: str,
        until: float | None = None,
    ) -> None:
        recipes = list(recipes)
        tasks = self._list_tasks(kind, recipes, samples)
        if not tasks:
            return
        end = min((t for t in (self.deadline, until) if t is not None), default=math.inf)
        steps = self._store_results(kind, self.mapper(self.job, tasks), end)
        total = sum(len(task.candidates) for task in tasks)
        try:
            for _ in track(steps, title, total) if self.progress else steps:
                pass
        finally:
            self.store.save()
        missing = sum(len(task.candidates) for task in self._list_tasks(kind, recipes, samples))
        if missing:
            raise QdqtoolError(
                f"`mapper`: ended with {total - missing} of {total} results; a mapper must yield "
                "a result for each candidate and sample of its tasks",
                code="result-missing",
                parameter="mapper",
            )

    def _store_results(
        self, kind: str, results: Iterator[TaskResult], end: float
    ) -> Iterator[None]:
        """Store results as they come, and yield once for each measurement."""
        try:
            for result in results:
                count = sum(map(len, result.values()))
                self.store.add(kind, result)
                self.runs += count
                yield from itertools.repeat(None, count)
                if time.monotonic() > end:
                    raise OutOfTime
        finally:
            close = getattr(results, "close", None)  # a generator's, which ends its threads
            if close is not None:
                close()

    @property
    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return self.deadline is not None and time.monotonic() > self.deadline
