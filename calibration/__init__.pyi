"""The signatures that functions have at run time; ``python -m tests.tools.make_stub`` writes them."""

import numpy as np
import numpy.typing as npt
import os
from calibration.cache import Statistics as Statistics
from calibration.dataset import Dataset as Dataset
from calibration.dataset import InputSpec as InputSpec
from calibration.focus import Focus as Focus
from calibration.focus import FocusMap as FocusMap
from calibration.methods import METHODS as METHODS
from calibration.statistics import Floats
from calibration.statistics import TensorStatistics as TensorStatistics
from collections.abc import Iterable
from collections.abc import Sequence
from qdqtool.base.options import Preprocess as Preprocess
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import ModelSource

__all__ = [
    "METHODS",
    "Dataset",
    "Focus",
    "FocusMap",
    "InputSpec",
    "Preprocess",
    "Statistics",
    "TensorStatistics",
    "amax_of",
    "clipped_fraction",
    "collect",
    "focused_error",
    "load_statistics",
    "merge_all",
    "open_data",
    "save_statistics",
    "squared_error",
]

def amax_of(stats: TensorStatistics, method: str, percentile: float = 99.99) -> float: ...
def clipped_fraction(stats: TensorStatistics, amax: float) -> float: ...
def collect(
    model: ModelSource | Model,
    data: object,
    tensors: Sequence[str],
    *,
    bins: int = 2048,
    progress: bool = True,
    focus: Focus | None = None,
    preprocess: Preprocess = ...,
    max_images: int = 512,
    size: tuple[int, int] | None = None,
    cache: str | os.PathLike[str] | None = None,
    overwrite_cache: bool = False,
    cluster: object = None,
    mixed_cpus: bool = False,
) -> Statistics: ...
def focused_error(
    stats: TensorStatistics,
    amax: npt.NDArray[np.float64],
    power: float = 2.0,
    bits: int | None = None,
) -> Floats: ...
def load_statistics(path: str | os.PathLike[str]) -> Statistics: ...
def merge_all(parts: Iterable[TensorStatistics]) -> TensorStatistics: ...
def open_data(
    source: object,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess = ...,
    max_images: int = 512,
    size: tuple[int, int] | None = None,
) -> Dataset: ...
def save_statistics(statistics: Statistics, path: str | os.PathLike[str]) -> None: ...
def squared_error(
    stats: TensorStatistics,
    amax: float | npt.NDArray[np.float64],
    levels: int = 127,
) -> float | Floats: ...
