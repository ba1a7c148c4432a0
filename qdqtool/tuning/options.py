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
    from calibration.arrays import CalibrationSource
    from qdqtool.accuracy.metrics import MetricFunction

KEEP = 0.97  # default fraction of the float model's metric to keep, without a budget
SWEPT_ON = 4  # default number of samples for the sensitivity of single sites


@dataclass(frozen=True)
class TuningGoal:
    """Goal of a tuning, and the images and metric of the measurements.

    Attributes:
        evaluation: Images like those of the deployment, for the search and the final evaluation.
            None: up to half of the calibration data, which then does not set the ranges of the
            search.
        keep: Fraction of the float model's metric to keep, above 0 and at most 1. None:
            :data:`KEEP` without a budget.
        budget_ms: Maximum predicted milliseconds on the GPU; cannot be combined with `keep`.
        metric: Function of the user, or its name ``package.module:function``. None: agreement mAP
            for YOLOv8-style outputs, else one minus the relative output error.
    """

    evaluation: CalibrationSource | None = None
    keep: float | None = None
    budget_ms: float | None = None
    metric: str | MetricFunction | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.budget_ms is not None:
            raise QdqtoolError(
                "`keep` and `budget_ms` both set the goal of the search; give only one of them",
                code="option-conflict",
                parameter="keep",
            )
        if self.keep is not None and not 0.0 < self.keep <= 1.0:
            raise QdqtoolError(
                f"`keep` {self.keep:g} is out of range. Give a fraction of the float model's "
                "metric, above 0 and at most 1",
                code="out-of-range",
                parameter="keep",
            )
        for parameter in ("keep", "budget_ms"):
            number = getattr(self, parameter)
            if number is not None:  # the result is written as JSON, which rejects numpy's numbers
                object.__setattr__(self, parameter, float(number))

    @property
    def required_part(self) -> float | None:
        """Fraction of the float model's metric to keep; None if the goal is a time budget."""
        return KEEP if self.keep is None and self.budget_ms is None else self.keep

    def choose_metric_timeout(self, seconds: float | None) -> float:
        """Return the time limit for one call of the user's metric, in seconds.

        Args:
            seconds: Time limit of the user; None for the default.

        Raises:
            QdqtoolError: `seconds` is not a valid time, or is given without a metric.
        """
        if seconds is not None and self.metric is None:
            raise QdqtoolError(
                "`check_timeout` has no effect without `metric`; give `metric` as well",
                code="option-without-effect",
                parameter="check_timeout",
            )
        return limits.check_seconds(seconds, "check_timeout")

    def check_budget(self, gpu: str | None) -> None:
        """Check that the budget, if there is one, is a time above 0 and has a GPU.

        Raises:
            QdqtoolError: The GPU is missing, or the budget is not a time above 0.
        """
        budget_ms = self.budget_ms
        if budget_ms is None or (gpu is not None and budget_ms > 0 and math.isfinite(budget_ms)):
            return
        if gpu is None:
            raise QdqtoolError(
                "`budget_ms` needs a GPU; give `gpu` as well",
                code="missing-argument",
                parameter="gpu",
            )
        raise QdqtoolError(
            f"`budget_ms` {budget_ms:g}: give a number of milliseconds above 0",
            code="out-of-range",
            parameter="budget_ms",
        )


@dataclass(frozen=True)
class SearchBudget:
    """Time and images of a search, and the file that stores its measurements.

    Attributes:
        state: File that stores the measurements; None for no file.
        time_limit: Time limit of the whole tuning in seconds; None for no limit.
        check_timeout: Time limit of one call of the user's metric in seconds; None for 600.
        whole_front: Whether to measure the Pareto front (placements that no other placement beats
            in both cost and accuracy) even if the model with every layer in INT8 is accurate
            enough.
        chosen_on: Maximum number of samples on which the search compares placements. A sample is
            an image, or a batch of images if the model has a fixed batch size.
        judged_on: Maximum number of held-out samples on which the result is evaluated.
        swept_on: Maximum number of samples for the sensitivity of single sites. None:
            :data:`SWEPT_ON`.
        workers: Number of threads that measure; None for one thread per core, up to 8.
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
                    f"`{parameter}` is {number}; give a number above 0",
                    code="out-of-range",
                    parameter=parameter,
                )


@dataclass(frozen=True)
class TuneOptions:
    """All options of a tuning except its target.

    Attributes:
        goal: Goal of the tuning.
        gpu: GPU to estimate times for.
        ranges: Calibration methods.
        images: Preprocessing and size of images.
        placement: Nodes that may be quantized.
        network: Changes of the network in addition to the Q/DQ pairs.
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
