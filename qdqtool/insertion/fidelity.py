"""What FP16 would do to a Q/DQ model, by running it: values that FP16 cannot hold, and how far outputs move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from qdqtool.insertion.losses import Compared, compared_tensors
from qdqtool.model.graph import EDITED, Model, without_large_weights
from qdqtool.model.half import half_nodes
from qdqtool.model.sessions import cores
from qdqtool.types import Json

if TYPE_CHECKING:
    from calibration import Preprocess

_LARGEST = "/qdqtool/largest"  # behind a tensor's name
_AXES_OPSET = 18  # the first in which ReduceMax reads its axes
SAMPLES = 8  # to find large values on, beside the ranges of the calibration


@dataclass(frozen=True)
class Fidelity:
    """How near the outputs of the finished model are to those of the float model.

    Attributes:
        error: Root of the squared difference over the variance of the float model's outputs, the mean over the outputs;
            NaN where an output is not finite.
        samples: Calibration samples that it was measured on.
    """

    error: float
    samples: int

    def as_json(self) -> Json:
        return {"error": round(self.error, 5) if np.isfinite(self.error) else None, "samples": self.samples}


def largest_values(
    model: Model, data: object, *, preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None, samples: int = SAMPLES,
) -> dict[str, float]:
    """The largest absolute value of every tensor that FP16 would hold, on a few samples.

    Args:
        model: The Q/DQ model in FP32, its float inputs unchanged; it is not changed.
        data: The calibration data; nothing is found where it cannot be read a second time.
        preprocess: As for the calibration.
        size: As for the calibration.
        samples: How many samples, spread evenly.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    if isinstance(data, Iterator):
        return {}
    half = half_nodes(model)
    tensors = list(dict.fromkeys(
        t for n in model.ordered if n.index in half for t in (*n.inputs, *n.outputs)
        if t and model.elem_type(t) == TensorProto.FLOAT and not model.is_constant(t)
        and 0 not in (model.shape(t) or ())
    ))
    found = _largest(model, tensors, data, preprocess, size, samples)
    return {t: float(v) if np.isfinite(v) else float("inf") for t, v in found.items()}


def channel_maxima(
    model: Model, tensors: Sequence[str], data: object, *, preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None, samples: int = SAMPLES,
) -> dict[str, npt.NDArray[Any]]:
    """The largest absolute value of tensors for each place of their last axis, ``[channels]``, on a few samples.

    Args:
        model: The float model; it is not changed.
        tensors: Their names; all have known ranks.
        data: As for :func:`largest_values`.
        preprocess: As for the calibration.
        size: As for the calibration.
        samples: How many samples, spread evenly.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    axes = {t: list(range(len(model.shape(t) or ()) - 1)) for t in tensors}
    return _largest(model, tensors, data, preprocess, size, samples, axes)


def _largest(
    model: Model, tensors: Sequence[str], data: object, preprocess: Preprocess | None, size: tuple[int, int] | None,
    samples: int, axes: Mapping[str, list[int]] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """The largest absolute values, over these axes (by tensor) or all, as float32; a NaN stays one."""
    copy = without_large_weights(model.proto)
    for tensor in tensors:
        over: list[str] = []
        attributes: dict[str, Any] = {}
        if axes is not None and model.opset >= _AXES_OPSET:
            over = [f"{tensor}{_LARGEST}/axes"]
            copy.graph.initializer.append(numpy_helper.from_array(np.array(axes[tensor], np.int64), over[0]))
        elif axes is not None:
            attributes["axes"] = axes[tensor]
        if axes is not None and not axes[tensor]:  # a reduction over no axes is one over all
            copy.graph.node.append(helper.make_node("Abs", [tensor], [tensor + _LARGEST]))
            continue
        copy.graph.node.append(helper.make_node("Abs", [tensor], [f"{tensor}{_LARGEST}/abs"]))
        copy.graph.node.append(helper.make_node("ReduceMax", [f"{tensor}{_LARGEST}/abs", *over], [tensor + _LARGEST],
                                                keepdims=0, **attributes))
    watched = Model(copy, sha256=EDITED, constants=model)
    found: dict[str, npt.NDArray[Any]] = {}
    for values in _runs([watched], [t + _LARGEST for t in tensors], data, preprocess, size, samples):
        for tensor in tensors:
            value = values[0][tensor + _LARGEST]
            found[tensor] = np.maximum(found[tensor], value) if tensor in found else value
    return found


def compare(
    floats: Model, made: Model, data: object, *, samples: int, preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
) -> Fidelity | None:
    """How far the outputs of a Q/DQ model are from those of the float model that it was made from.

    The outputs are the last convolutions in front of any decoding, where both models name them alike.

    Args:
        floats: The float model.
        made: The finished Q/DQ model, with the float model's inputs.
        data: The calibration data; None is returned where it cannot be read a second time.
        samples: How many samples, spread evenly.
        preprocess: As for the calibration.
        size: As for the calibration.

    Raises:
        ModelError: onnxruntime cannot run one of them.
    """
    if isinstance(data, Iterator):
        return None
    ends = [t for t in compared_tensors(made) if t in floats.producers] or list(made.outputs)
    errors = []
    for one, two in _runs([floats, made], ends, data, preprocess, size, samples):
        before = Compared(one, None)
        finite = all(np.isfinite(v).all() for v in two.values())
        errors.append(before.error(two) if finite else float("nan"))
    return Fidelity(float(np.mean(errors)), len(errors)) if errors else None


def _runs(
    models: Sequence[Model], tensors: Sequence[str], data: object, preprocess: Preprocess | None,
    size: tuple[int, int] | None, samples: int,
) -> Iterator[list[dict[str, npt.NDArray[Any]]]]:
    """The tensors of each model, for one sample after the other."""
    from calibration import Preprocess, open_data
    from calibration.session import Fetcher, input_specs, open_session

    fetchers = [Fetcher(open_session(model, tensors, cores())) for model in models]
    for sample in open_data(data, input_specs(models[0]), preprocess or Preprocess(), samples, size):
        yield [{t: np.array(v, np.float32) for t, v in f.run(sample).items()} for f in fetchers]
