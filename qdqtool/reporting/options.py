"""Options of a report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource
from qdqtool.timing.options import GpuOptions
from qdqtool.trt.targets import Target


@dataclass(frozen=True)
class ReportInputs:
    """Additional input files of a report, and options of the prediction.

    Attributes:
        before: Another model to compare with, such as the float model.
        calib_cache: Calibration cache, for histograms.
        tuning: JSON of ``qdqtool tune``.
        target: TensorRT version to predict for. None: the version of the build, else ``trt10``.
        gpu: GPU to estimate times for.
        assume: Outcome of fusions that TensorRT decides by timing.
        size: Height and width in pixels if they are dynamic in the models.
    """

    before: ModelSource | Model | None = None
    calib_cache: str | os.PathLike[str] | None = None
    tuning: str | os.PathLike[str] | None = None
    target: str | Target | None = None
    gpu: GpuOptions = field(default_factory=GpuOptions)
    assume: Mapping[str, str] | None = None
    size: tuple[int, int] | None = None
