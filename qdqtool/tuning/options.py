"""Options of a tuning."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.options import (
    ClusterOptions,
    ImageOptions,
    NetworkOptions,
    PlacementOptions,
    RangeOptions,
)
from qdqtool.timing.options import GpuOptions
from qdqtool.util import limits

if TYPE_CHECKING:
    from qdqtool.accuracy.metrics import MetricFunction

KEEP = 0.97  # part of the float model's metric to keep without a budget


@dataclass(frozen=True)
class TuningGoal:
    """Goal of a tuning, and the data that decides about it.

    Attributes:
        evaluation: Data like that of the deployment. None: two quarters of the calibration data.
        keep: Part of the float model's metric to keep. None: :data:`KEEP` without a budget.
        budget_ms: Milliseconds on the GPU.
        metric: The user's metric, or the name of it.
    """

    evaluation: object = None
    keep: float | None = None
    budget_ms: float | None = None
    metric: str | MetricFunction | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.budget_ms is not None:
            raise QdqtoolError(
                "`keep` and `budget_ms` exclude each other: each sets the goal of the search; "
                "give one of them",
                code="option-conflict",
                parameter="keep",
            )
        if self.keep is not None and not 0.0 < self.keep <= 1.0:
            raise QdqtoolError(
                f"`keep` {self.keep:g}: give a fraction of the float model's metric, above 0 and "
                "at most 1",
                code="out-of-range",
                parameter="keep",
            )
        for parameter in ("keep", "budget_ms"):
            number = getattr(self, parameter)
            if number is not None:  # JSON has no numbers of numpy
                object.__setattr__(self, parameter, float(number))

    @property
    def required_part(self) -> float | None:
        """Part of the float model's metric to keep; None with a budget."""
        return KEEP if self.keep is None and self.budget_ms is None else self.keep

    def check_timeout(self, seconds: float | None) -> float:
        """Return the limit for one call of the metric.

        Raises:
            QdqtoolError: It is not a time, or there is no metric to limit.
        """
        if seconds is not None and self.metric is None:
            raise QdqtoolError(
                "`check_timeout`: limits the calls of a metric, so it has no effect without "
                "`metric`; give `metric` as well",
                code="option-without-effect",
                parameter="check_timeout",
            )
        return limits.check_seconds(seconds, "check_timeout")

    def check_budget(self, gpu: str | None) -> None:
        """Check the budget for a GPU.

        Raises:
            QdqtoolError: There is a budget and no GPU, or the budget is not a time.
        """
        budget_ms = self.budget_ms
        if budget_ms is None or (gpu is not None and budget_ms > 0 and math.isfinite(budget_ms)):
            return
        raise QdqtoolError(
            f"`budget_ms` {budget_ms:g}: give a number of milliseconds above 0, and the GPU with "
            "`gpu`",
            code="missing-argument" if gpu is None else "out-of-range",
            parameter="gpu" if gpu is None else "budget_ms",
        )


@dataclass(frozen=True)
class SearchBudget:
    """Time and images of a search, and the file that keeps its measurements.

    Attributes:
        state: File that keeps the measurements.
        time_limit: Seconds for the search.
        check_timeout: Seconds for one call of the metric.
        whole_front: Whether to measure the front even if the all-INT8 candidate is good enough.
        chosen_on: Maximum number of images to choose on.
        judged_on: Maximum number of images to judge on.
        swept_on: Maximum number of images for the sensitivity of single sites. None: `chosen_on`.
        workers: Threads that measure. None: one for each core.
    """

    state: str | os.PathLike[str] | None = None
    time_limit: float | None = None
    check_timeout: float | None = None
    whole_front: bool = False
    chosen_on: int = 32
    judged_on: int = 64
    swept_on: int | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.time_limit is not None:
            seconds = limits.check_seconds(self.time_limit, "time_limit")
            object.__setattr__(self, "time_limit", seconds)
        for parameter in ("workers", "chosen_on", "judged_on", "swept_on"):
            number = getattr(self, parameter)
            if number is None:
                continue
            object.__setattr__(self, parameter, operator.index(number))
            if number < 1:
                raise QdqtoolError(
                    f"`{parameter}` {number}: give a number above 0",
                    code="out-of-range",
                    parameter=parameter,
                )


@dataclass(frozen=True)
class TuneOptions:
    """All options of a tuning but its target.

    Attributes:
        goal: Goal of the tuning.
        gpu: GPU that times are estimated for.
        ranges: How ranges are chosen.
        images: How images become inputs.
        placement: Nodes that may be quantized.
        network: Changes of the network around the pairs.
        cluster: Workers that run the network.
        search: Time and images of the search.
    """

    goal: TuningGoal
    gpu: GpuOptions
    ranges: RangeOptions
    images: ImageOptions
    placement: PlacementOptions
    network: NetworkOptions
    cluster: ClusterOptions
    search: SearchBudget
