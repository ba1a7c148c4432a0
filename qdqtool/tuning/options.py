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
    """Goal of a tuning, and the images and the metric that measure it.

    Attributes:
        evaluation: Images like those of the deployment, to choose and to judge on. None: up to half
            of the calibration data, held out of the calibration.
        keep: Part of the float model's metric to keep, above 0 and at most 1. None: :data:`KEEP`
            without a budget.
        budget_ms: Maximum predicted milliseconds on the GPU; excludes `keep`.
        metric: The user's function, or its name ``package.module:function``. None: a metric that
            fits the model.
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
            if number is not None:  # JSON cannot store numbers of numpy
                object.__setattr__(self, parameter, float(number))

    @property
    def required_part(self) -> float | None:
        """Part of the float model's metric to keep; None with a budget."""
        return KEEP if self.keep is None and self.budget_ms is None else self.keep

    def check_timeout(self, seconds: float | None) -> float:
        """Return the time limit for one call of the user's metric, in seconds.

        None gives the default. The limit has no effect without a metric of the user.

        Raises:
            QdqtoolError: `seconds` is not a valid time, or the user gave no metric.
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
        """Check that a budget is a time above 0 and comes with a GPU.

        Raises:
            QdqtoolError: The budget has no GPU, or is not a time above 0.
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
        time_limit: Seconds for the whole tuning; None: no limit.
        check_timeout: Seconds for one call of the user's metric; None: the default.
        whole_front: Whether to measure the front (the placements that no other one beats in both
            cost and accuracy) even if all-INT8 is accurate enough.
        chosen_on: Maximum number of images on which the search compares placements.
        judged_on: Maximum number of held-out images on which the result is judged.
        swept_on: Maximum number of images for the sensitivity of single sites. None: `chosen_on`.
        workers: Threads that measure. None: one for each core, up to 8.
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
    """All options of a tuning except its target.

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
