"""Prediction on a GPU (options ``--gpu`` and ``--sm``): findings about the GPU, and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from qdqtool.errors import QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import with_size
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.precision import Precision
from qdqtool.prediction import add_findings, choose_typing, predict
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.timing import gpus
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpu_checks import gpu_findings, gpu_from_capability
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.results import TimeEstimate
from qdqtool.timing.savings import mark_included_savings
from qdqtool.trt.outcome import apply_assumptions
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target, target_named
from qdqtool.util.files import write_text
from qdqtool.util.json_text import json_text
from qdqtool.util.notes import Note
from qdqtool.util.process import pause_gc

# Codes of findings about a GPU for which no engine can be built.
UNSUPPORTED_GPU = ("GPU-NO-INT8", "GPU-NO-BF16", "GPU-VERSION", "FP8-GPU")


def check_image_size(size: tuple[int, int] | None, *models: Model) -> None:
    """Check the image size that the user gives for an estimate, unless it is None.

    Raises:
        DataError: A model has another fixed size, or the size is not a multiple of the
            model's stride.
    """
    if size is None:
        return
    from calibration.session import choose_size

    for model in models:
        choose_size(model, size)


def predict_on_gpu(
    model: ModelSource | Model,
    target: str | Target,
    options: TimingOptions,
    *,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
    with_insert: bool = True,
    extend: Callable[[Model, Prediction, TimeEstimate, Target], None] | None = None,
) -> tuple[Prediction, TimeEstimate | None]:
    """Predict, add findings about the GPU, and estimate the time if a GPU is named.

    The prediction has no time and no savings if TensorRT rejects the model.

    Args:
        model: The model.
        target: TensorRT version.
        options: GPU, batch, image size and calibration.
        assume: As for :func:`qdqtool.predict`.
        way: As for :func:`qdqtool.predict`.
        with_insert: Whether to estimate the network with the Q/DQ of ``insert`` as well.
        extend: Function that is called with the estimate before the prediction receives it.

    Raises:
        QdqtoolError: An option has an unknown or contradictory value, or the calibration cannot be
            used.
        ModelError: The model cannot be read.
    """
    named = None
    if options.gpu is not None:
        named = gpus.choose_gpu(options.gpu, options.clock, options.power)
    _check_options(options, named)
    model = with_size(load(model), options.size)
    gpu = named or gpu_from_capability(options.sm or "")
    gpu_target = target_named(target).with_capability(gpu.cc, named.name if named else "")
    gpu_target, requested = choose_typing(model, gpu_target), gpu_target
    prediction = predict(model, gpu_target, assume=assume, way=way)
    prediction.requested_target = requested.display_name
    prediction.compute_capabilities = gpu_target.capability_names or [gpu.cc]
    findings = gpu_findings(prediction, gpu, model)
    time = None
    if named is not None:
        named = gpus.remove_unsupported_int8(gpu_target, named)
        assumed_target = apply_assumptions(gpu_target, assume)
        with pause_gc():
            time = estimate_time(
                model,
                prediction,
                named,
                assumed_target,
                float_type=Precision.FP32 if options.no_fp16 else named.float_type,
                batch=options.batch,
                is_size_given=options.size is not None,
                calibrate=options.calibrate,
                with_insert=with_insert,
            )
            time.obstacle = _find_unsupported_code(findings)
            if extend is not None:
                extend(model, prediction, time, assumed_target)
        if options.save_calibration and time.calibration is not None:
            write_text(options.save_calibration, json_text(time.calibration.as_json()) + "\n")
    add_findings(prediction, findings, model)
    for finding in prediction.findings:
        finding.has_fast_int8 = gpu.int8_rate_over_fp16 > 1
    if time is not None:
        _set_time(prediction, time)
    return prediction, time


def _set_time(prediction: Prediction, time: TimeEstimate) -> None:
    """Add a time to a prediction, or a note without savings if TensorRT rejects the model."""
    if prediction.rejected:  # no engine runs these layers
        for layer in prediction.layers:
            layer.ms, layer.layouts = None, []
    if time.is_supported and prediction.rejected:
        for finding in prediction.findings:
            finding.saves_ms = None
        text = f"no times for {time.gpu.name}: TensorRT {prediction.rejection} the model"
        prediction.notes.append(Note(text, code="no-times", gpu=time.gpu.name))
    else:
        mark_included_savings(prediction.findings)
        prediction.time = time.as_json()


def _find_unsupported_code(findings: Iterable[Finding]) -> str | None:
    errors = (finding.code for finding in findings if finding.severity == Severity.ERROR)
    return next((code for code in errors if code in UNSUPPORTED_GPU), None)


def _check_options(options: TimingOptions, gpu: Gpu | None) -> None:
    if options.save_calibration and not options.calibrate:
        raise QdqtoolError(
            "`save_calibration` stores the result of `calibrate`; give `calibrate` as well",
            code="option-without-effect",
            parameter="save_calibration",
        )
    if gpu is not None and options.sm and gpu_from_capability(options.sm).cc != gpu.cc:
        raise QdqtoolError(
            f"`sm` {options.sm}: '{gpu.name}' has compute capability {gpu.cc}; leave `sm` or "
            "`gpu` out",
            code="option-conflict",
            parameter="sm",
        )
