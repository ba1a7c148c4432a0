"""Error of a model's outputs, relative to those of a model with more float layers.

The error of an output is the root mean square of its difference to the reference output, divided by
the standard deviation of the latter. The error includes only the positions of objects, or all
positions if the positions of objects are unknown. The reported error is the mean over the outputs.
The outputs are those of the last convolutions, before any decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.insertion.sample_runs import DEFAULT_IMAGES, run_samples
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_head
from qdqtool.util.json_text import Json

if TYPE_CHECKING:
    from calibration import FocusMap
    from calibration.arrays import CalibrationSource


# An output error below this fraction of the outputs' standard deviation hardly changes the
# detections (docs/accuracy.md).
SMALL_ERROR = 0.1


def round_error(error: float) -> float:
    """Round an output error as in the text, to 0.1 %. Limits apply to the rounded error."""
    return round(error, 3)


class ReferenceOutputs:
    """Outputs of a run with float activations, reduced to the values to compare.

    Attributes:
        focus: Positions to compare; None for all.
    """

    def __init__(self, outputs: Mapping[str, npt.NDArray[Any]], focus: FocusMap | None) -> None:
        self.focus = focus
        self._values = {name: self._select_values(array) for name, array in outputs.items()}
        self._variances = {
            name: float(values.var()) if values.size else 0.0
            for name, values in self._values.items()
        }

    def _select_values(self, array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        selected = [] if self.focus is None else self.focus.values(array)
        return np.concatenate([a.reshape(-1) for a in selected or [array]]).astype(np.float64)

    @property
    def has_variance(self) -> bool:
        """Whether any output varies. If none does, the relative error is undefined."""
        return any(variance > 0.0 for variance in self._variances.values())

    @property
    def nbytes(self) -> int:
        """Memory of the values, in bytes."""
        return sum(values.nbytes for values in self._values.values())

    def error(self, outputs: Mapping[str, npt.NDArray[Any]]) -> float:
        """Return the error of `outputs` as the module's docstring defines it.

        It is 0 if no output of the reference varies.
        """
        errors = []
        for name, values in self._values.items():
            variance = self._variances[name]
            if variance > 0.0:
                difference = self._select_values(outputs[name])
                difference -= values
                errors.append(np.sqrt(np.square(difference, out=difference).mean() / variance))
        return float(np.mean(errors)) if errors else 0.0


@dataclass(frozen=True)
class ComparedOutputs:
    """Tensors whose values an output error compares.

    Attributes:
        tensors: Outputs of the last convolutions, or else the network's outputs.
        scores: Those of the tensors that show where objects are; empty if unknown.
    """

    tensors: tuple[str, ...]
    scores: tuple[str, ...]

    @property
    def at_objects(self) -> bool:
        """Whether only the positions of objects are compared."""
        return bool(self.scores)


def find_compared_outputs(float_model: Model, model: Model) -> ComparedOutputs:
    """Return the outputs of a Q/DQ model to compare with those of the float model.

    These are the outputs of the last convolutions, before any decoding. If the float model has no
    tensors of these names, they are the outputs of the network.
    """
    tensors = []
    for tensor in find_last_convolution_outputs(model):
        # An FP16 model converts these outputs to FP32 tensors, which have the original names.
        casts = [node.output for node in model.consumers(tensor) if node.op == "Cast"]
        tensors += [t for t in (tensor, *casts) if t in float_model.producers][:1]
    tensors = tensors or list(model.outputs)
    scores = find_class_outputs(float_model)
    return ComparedOutputs(tuple(tensors), scores if set(scores) <= set(tensors) else ())


def find_last_convolution_outputs(model: Model) -> list[str]:
    """Return the outputs of the last convolutions, or else the network's outputs."""
    last = find_head(model).last_convolutions
    ends = [n.output for n in model.ordered if n.index in last and n.op == "Conv"]
    return list(dict.fromkeys(ends)) or list(model.outputs)


class SampleErrors(NamedTuple):
    """Output errors of models on calibration samples.

    Attributes:
        values: The errors, of shape [samples, models].
        images: Number of images in the samples. With a fixed batch, a sample has several images.
    """

    values: npt.NDArray[np.float64]
    images: int


def measure_sample_errors(
    float_model: Model,
    models: Sequence[Model],
    data: CalibrationSource,
    compared: ComparedOutputs,
    *,
    samples: int,
    images: ImageOptions = DEFAULT_IMAGES,
) -> SampleErrors:
    """Return the output errors of Q/DQ models on samples.

    An error is NaN if an output is not finite. The errors have no rows if no sample can be read, or
    if the data is an iterator.

    Raises:
        ModelError: onnxruntime cannot run one of the models.
    """
    from calibration import Focus

    if isinstance(data, Iterator):
        return SampleErrors(np.empty((0, len(models))), 0)
    focus = Focus(compared.scores) if compared.at_objects else None
    rows: list[list[float]] = []
    image_count = 0
    for (floats, *others), count in run_samples(
        [float_model, *models], compared.tensors, data, images, samples
    ):
        image_count += count
        reference = ReferenceOutputs(floats, focus.find(floats) if focus else None)
        rows.append([_measure_error(reference, outputs) for outputs in others])
    return SampleErrors(np.array(rows, np.float64).reshape(-1, len(models)), image_count)


def _measure_error(reference: ReferenceOutputs, outputs: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the error of outputs; NaN if one of them is not finite."""
    is_finite = all(np.isfinite(array).all() for array in outputs.values())
    return reference.error(outputs) if is_finite else float("nan")


@dataclass(frozen=True)
class Fp16Agreement:
    """Difference between the outputs of a Q/DQ model and those of its float model.

    Attributes:
        error: Mean over samples and outputs of the root mean squared difference, as a fraction of
            the float output's standard deviation; NaN if an output is not finite.
        samples: Number of calibration images.
        at_objects: Whether the compared outputs are those of the last convolutions at the positions
            of objects, as in the output error of a detector.
    """

    error: float
    samples: int
    at_objects: bool = False

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "error": round(self.error, 5) if np.isfinite(self.error) else None,
            "samples": self.samples,
            "at_objects": self.at_objects,
        }


def compare_outputs(
    float_model: Model, model: Model, data: CalibrationSource, *, samples: int, images: ImageOptions
) -> Fp16Agreement | None:
    """Compare the outputs of a Q/DQ model with those of its float model.

    The compared tensors are those of :func:`find_compared_outputs`. If the positions of objects are
    known, only these positions are compared.

    Returns:
        The difference; None if no sample can be read, or if the data is an iterator.

    Raises:
        ModelError: onnxruntime cannot run one of the models.
    """
    compared = find_compared_outputs(float_model, model)
    errors = measure_sample_errors(
        float_model, [model], data, compared, samples=samples, images=images
    )
    if not errors.images:
        return None
    return Fp16Agreement(float(errors.values.mean()), errors.images, compared.at_objects)
