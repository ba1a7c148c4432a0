"""Ranges of a network's activations from calibration images.

This package depends neither on TensorRT nor on Q/DQ nodes::

    tensors = ["images", "/model.0/act/Mul_output_0"]
    statistics = calibration.collect("yolov8n.onnx", "images/", tensors)
    amax = calibration.amax_of(statistics["images"], "mse")

One pass over the images collects the statistics for all methods; see :func:`collect` and
:data:`METHODS`.
"""

from calibration.arrays import CalibrationSource, open_data
from calibration.cache import Statistics, load_statistics, save_statistics
from calibration.dataset import Dataset, InputSpec
from calibration.focus import Focus, FocusMap
from calibration.methods import METHODS, amax_of, clipped_fraction, focused_error, squared_error
from calibration.options import DaskCluster, Preprocess
from calibration.presets import PRESETS
from calibration.runner import collect
from calibration.statistics import TensorStatistics, merge_all

__all__ = [
    "METHODS",
    "PRESETS",
    "CalibrationSource",
    "DaskCluster",
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
