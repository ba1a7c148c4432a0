"""Values of a network's tensors on a few calibration samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.insertion.options import ImageOptions
from qdqtool.ir.editor import copy_with_nodes
from qdqtool.ir.graph import Model
from qdqtool.patterns.half import find_fp16_nodes
from qdqtool.runtime.sessions import core_count

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource

DEFAULT_IMAGES = ImageOptions()
FP16_SAMPLES = 8  # number of samples on which values are compared with the range of FP16
_SUFFIX = "/qdqtool/largest"
_MIN_AXES_OPSET = 18  # first opset in which ReduceMax has its axes as an input


def measure_fp16_maxima(
    model: Model,
    data: CalibrationSource,
    *,
    images: ImageOptions = DEFAULT_IMAGES,
    samples: int = FP16_SAMPLES,
) -> dict[str, float]:
    """Return the largest magnitude of each FP32 tensor of the nodes that can compute in FP16.

    Constants are left out. The magnitude is infinity if a value is NaN. The samples are spread
    evenly over the data. The result is empty if the data is an iterator.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    if isinstance(data, Iterator):
        return {}
    half = find_fp16_nodes(model)
    tensors = dict.fromkeys(
        tensor
        for node in model.ordered
        if node.index in half
        for tensor in (*node.inputs, *node.outputs)
        if tensor and _is_float_variable(model, tensor)
    )
    maxima = _measure_maxima(model, list(tensors), data, images, samples)
    return {t: float(v) if np.isfinite(v) else float("inf") for t, v in maxima.items()}


def _is_float_variable(model: Model, tensor: str) -> bool:
    return (
        model.elem_type(tensor) == TensorProto.FLOAT
        and not model.is_constant(tensor)
        and 0 not in (model.shape(tensor) or ())
    )


def measure_channel_maxima(
    model: Model,
    channels: Mapping[str, int],
    data: CalibrationSource,
    *,
    images: ImageOptions = DEFAULT_IMAGES,
    samples: int = FP16_SAMPLES,
) -> dict[str, npt.NDArray[Any]]:
    """Return the largest magnitude of each channel, by tensor. Shape: [channels].

    The channels are along the last axis. `channels` maps the names of the tensors to the lengths of
    their last axes.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    return _measure_maxima(model, list(channels), data, images, samples, channels)


def compute_sample_values(
    model: Model,
    tensors: Sequence[str],
    shapes: Mapping[str, str],
    data: CalibrationSource,
    images: ImageOptions,
) -> dict[str, npt.NDArray[Any]]:
    """Return the values of tensors for the first sample.

    `shapes` maps further tensors to names. The result has the shapes of these tensors under these
    names.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    nodes = [helper.make_node("Shape", [t], [name]) for t, name in shapes.items()]
    outputs = [*tensors, *shapes.values()]
    (values,), _ = next(
        run_samples([copy_with_nodes(model, nodes)], outputs, data, images, 1, exact=True)
    )
    return values


def _measure_maxima(
    model: Model,
    tensors: Sequence[str],
    data: CalibrationSource,
    images: ImageOptions,
    samples: int,
    channels: Mapping[str, int] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Return the largest magnitude by tensor; with `channels`, of each channel (last axis).

    The magnitude is NaN if a value is NaN.
    """
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    for tensor in tensors:
        source, name = tensor, f"{tensor}{_SUFFIX}"
        axes: list[str] = []
        attributes: dict[str, Any] = {}
        if channels is not None:
            source = f"{name}/rows"
            shape = np.array([-1, channels[tensor]], np.int64)
            constants.append(numpy_helper.from_array(shape, f"{source}/shape"))
            nodes.append(helper.make_node("Reshape", [tensor, f"{source}/shape"], [source]))
            if model.opset >= _MIN_AXES_OPSET:
                axes = [f"{source}/axes"]
                constants.append(numpy_helper.from_array(np.array([0], np.int64), axes[0]))
            else:
                attributes["axes"] = [0]
        nodes.append(helper.make_node("Abs", [source], [f"{name}/abs"]))
        inputs = [f"{name}/abs", *axes]
        nodes.append(helper.make_node("ReduceMax", inputs, [name], keepdims=0, **attributes))
    watched = copy_with_nodes(model, nodes, constants)
    maxima: dict[str, npt.NDArray[Any]] = {}
    for (values,), _ in run_samples(
        [watched], [t + _SUFFIX for t in tensors], data, images, samples
    ):
        for tensor in tensors:
            value = values[tensor + _SUFFIX]
            maxima[tensor] = np.maximum(maxima[tensor], value) if tensor in maxima else value
    return maxima


def run_samples(
    models: Sequence[Model],
    tensors: Sequence[str],
    data: CalibrationSource,
    images: ImageOptions,
    samples: int,
    *,
    exact: bool = False,
) -> Iterator[tuple[list[dict[str, npt.NDArray[Any]]], int]]:
    """Yield a list for each sample, and the sample's number of images.

    The list contains, for each model, the values of the tensors by name. Values are converted to
    float32 unless `exact` is set.
    """
    from calibration import open_data
    from calibration.options import YOLO_PREPROCESS
    from calibration.session import TensorFetcher, input_specs, open_session

    fetchers = [TensorFetcher(open_session(model, tensors, core_count())) for model in models]
    preprocess = images.preprocess or YOLO_PREPROCESS
    dataset = open_data(data, input_specs(models[0]), preprocess, samples, images.size)
    for _, load in dataset.tasks():
        loaded = load()
        if loaded is None:
            continue
        sample, count = loaded
        values = [
            {t: np.array(v, None if exact else np.float32) for t, v in f.run(sample).items()}
            for f in fetchers
        ]
        yield values, count
