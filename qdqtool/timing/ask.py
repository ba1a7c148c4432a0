"""A prediction with its time: what ``qdqtool predict --gpu`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qdqtool.errors import QdqtoolError
from qdqtool.io.outputs import json_text, write_text
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import ModelSource, load
from qdqtool.prediction import predict
from qdqtool.timing import gpus
from qdqtool.timing.estimate import TimeEstimate, estimate
from qdqtool.timing.gpu_findings import gpu_findings
from qdqtool.trt.outcome import assumed_target
from qdqtool.trt.targets import Target, target_named
from qdqtool.types import Evidence, Precision, Prediction


@dataclass(frozen=True, slots=True)
class Request:
    """What the user said of the machine.

    Attributes:
        gpu: A name or a description; None for ``sm`` alone.
        sm: A compute capability, for findings without times.
        clock: SM clock in MHz.
        power: Power mode.
        batch: Batch to estimate for.
        no_fp16: Floats are FP32.
        calibrate: A measured time, a profile or a calibration file.
        save_calibration: Where to keep the correction.
    """

    gpu: str | None = None
    sm: str | None = None
    clock: float | None = None
    power: str | None = None
    batch: int | None = None
    no_fp16: bool = False
    calibrate: str | None = None
    save_calibration: str | None = None


def predict_on(
    model: ModelSource | Model,
    target: str | Target,
    request: Request,
    *,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
    also: Callable[[Model, Prediction, TimeEstimate, Target], None] | None = None,
) -> tuple[Prediction, TimeEstimate | None]:
    """Predicts, adds what the GPU cannot do, and estimates the time where a GPU is named.

    ``also`` is called with the estimate before it is written into the prediction: what a room above knows of it.

    Raises:
        QdqtoolError: The GPU is not known, or the calibration cannot be used.
        ModelError: The model cannot be read.
    """
    chosen = gpus.chosen(request.gpu, request.clock, request.power) if request.gpu is not None else None
    if request.save_calibration and not request.calibrate:
        raise QdqtoolError("`save_calibration` keeps what `calibrate` measures; give both")
    if chosen is not None and request.sm and of_capability(request.sm).cc != chosen.cc:
        raise QdqtoolError(
            f"`sm` {request.sm}: '{chosen.name}' has compute capability {chosen.cc}; give one of the two"
        )
    index = load(model)
    prediction = predict(index, target, assume=assume, way=way)
    time = None
    if chosen is not None:
        settled_on = assumed_target(target_named(target), assume)
        plain = Precision.FP32 if request.no_fp16 else chosen.plain
        time = estimate(
            index,
            prediction,
            chosen,
            settled_on,
            plain=plain,
            batch=request.batch,
            calibrate=request.calibrate,
        )
        if also is not None:
            also(index, prediction, time, settled_on)
        prediction.time = time.as_json()
        if request.save_calibration and time.calibration is not None:
            write_text(request.save_calibration, json_text(time.calibration.as_json()) + "\n")
    prediction.findings += gpu_findings(prediction, chosen or of_capability(request.sm or ""), index)
    return prediction, time


def of_capability(sm: str) -> gpus.Gpu:
    """A nameless GPU of a compute capability, for findings; the GPU itself where a name is given (``GTX 1660``)."""
    if any(c.isalpha() for c in sm.strip().lower().removeprefix("sm").strip("_")):
        return gpus.find(sm)
    found, note = gpus.rates_of(sm)
    return gpus.Gpu(f"sm {found.cc}", (), 1, 1000.0, 100.0, 1.0, 0.0, found, Evidence.ASSUMED, "", note)
