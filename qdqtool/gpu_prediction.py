"""``qdqtool.predict``: a prediction, with estimated times if a GPU is named."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qdqtool import prediction as prediction_module
from qdqtool.errors import QdqtoolError
from qdqtool.findings.rules import UNPROMISED_CODES
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.reasons.finding import Finding
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util.files import record_inputs

if TYPE_CHECKING:
    from qdqtool.timing.results import TimeEstimate

_ONE_GPU = ("clock", "power", "calibrate", "save_calibration")
_NEED_GPU = ("clock", "power", "batch", "no_fp16", "calibrate", "save_calibration", "size")


def predict(
    model: ModelSource | Model,
    target: str | Target = DEFAULT_TARGET,
    *,
    advice: bool = True,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
    gpu: str | Sequence[str] | None = None,
    clock: float | None = None,
    power: str | None = None,
    sm: str | None = None,
    batch: int | None = None,
    no_fp16: bool = False,
    calibrate: str | None = None,
    save_calibration: str | None = None,
    size: tuple[int, int] | None = None,
) -> Prediction:
    """Predict in which type TensorRT runs each convolution, and what prevents INT8.

    No GPU and no TensorRT are needed. If `gpu` is set, the prediction has estimated times::

        prediction = qdqtool.predict("model_qdq.onnx", gpu="RTX 4090")
        prediction.time["total_ms"], prediction.time["gain"]["value"]

    Args:
        model: Path, bytes, ModelProto or onnx-graphsurgeon graph of a Q/DQ model. External data
            may be missing.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        advice: Whether to add findings to the prediction.
        assume: Assumed outcome of a fusion that TensorRT decides by timing: ``{"silu-add":
            "fused"}`` or ``{"silu-add": "apart"}``.
        way: Build method, such as ``trtexec`` or ``onnxruntime``. The findings name its flags. The
            error for an unknown method lists the choices.
        gpu: GPU for which the time is estimated, or a list of GPUs; see ``qdqtool gpus``.
        clock: SM clock in MHz under load. Default: the boost clock.
        power: Power mode of a Jetson, such as ``15W`` or ``MAXN``; see ``qdqtool gpus NAME``.
        sm: Compute capability such as ``7.5``. Findings on limits of GPUs with this capability are
            added, but no times.
        batch: Batch size for which the time is estimated. Default: the model's batch size, or 1.
        no_fp16: Whether the builder may not use FP16, so that float layers are FP32.
        calibrate: Measurement by which the estimate is corrected: a time (``5.3ms``), a trtexec
            profile of this model, or a file that `save_calibration` wrote.
        save_calibration: File to which the correction is written, for later calls.
        size: Height and width in pixels for which the time is estimated, if they are dynamic in the
            model. Default: the size in the model's metadata, else 640x640.

    Returns:
        The prediction: outcomes of every Conv, ConvTranspose, Gemm and MatMul, engine layers, the
        optimizer's trace, remaining conversions, and findings with their fixes. If `gpu` is set,
        ``time`` has the fields of the command's JSON, each layer has ``ms``, and each finding has
        ``saves_ms`` and ``saving_included_in``. With a list of GPUs, ``times`` has these fields for
        each GPU, and ``time``, ``ms`` and ``saves_ms`` are for the first GPU that an engine can be
        built for.

    Raises:
        ModelError: The model cannot be read.
        QdqtoolError: The target, the assumption, the build method or the GPU is unknown, or an
            option has no effect.
    """
    version = target_named(target)
    names = [gpu] if gpu is None or isinstance(gpu, str) else list(dict.fromkeys(gpu))
    options = TimingOptions(
        names[0] if names else None,
        clock,
        power,
        sm,
        batch,
        no_fp16,
        calibrate,
        save_calibration,
        size,
    )
    _require_gpu(options)
    with record_inputs() as inputs:
        if gpu is None and sm is None:
            prediction = predict_without_gpu(model, version, advice=advice, assume=assume, way=way)
        elif gpu is None or isinstance(gpu, str):
            prediction, _ = predict_with_time(model, version, options, assume=assume, way=way)
        else:
            _check_gpu_list(names, options)
            requests = [replace(options, gpu=name) for name in names]
            prediction, _ = predict_on_gpus(model, version, requests, assume=assume, way=way)
    prediction.read = inputs
    if not advice:
        prediction.findings = []
    return prediction


def _require_gpu(options: TimingOptions) -> None:
    """Check that `gpu` is set if an option for estimated times is set.

    Raises:
        QdqtoolError: An option for estimated times is set, but `gpu` is not.
    """
    given = [name for name in _NEED_GPU if getattr(options, name) not in (None, False)]
    if options.gpu is None and given:
        raise QdqtoolError(
            f"`{given[0]}` has no effect without `gpu`; give `gpu` as well",
            code="option-without-effect",
            parameter=given[0],
        )


def _check_gpu_list(names: Sequence[object], options: TimingOptions) -> None:
    """Check a list of GPUs. For several GPUs, no option may be set that is for a single GPU.

    Raises:
        QdqtoolError: The list is empty or has other items than names, or an option does not fit.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise QdqtoolError(
            "`gpu` is neither a name nor a list of names; give names from the list of `qdqtool "
            "gpus`",
            code="wrong-type",
            parameter="gpu",
        )
    given = [name for name in _ONE_GPU if getattr(options, name) is not None]
    if len(names) > 1 and given:
        raise QdqtoolError(
            f"`{given[0]}` needs a single `gpu`; call predict once for each GPU",
            code="option-conflict",
            parameter="gpu",
        )


def predict_without_gpu(
    model: ModelSource | Model,
    target: Target,
    *,
    advice: bool = True,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
) -> Prediction:
    """Predict without times. The parameters are those of :func:`predict`."""
    model = load(model)
    prediction = prediction_module.predict(model, target, advice=advice, assume=assume, way=way)
    _review_promises(model, prediction)
    return prediction


def _review_promises(model: Model, prediction: Prediction) -> None:
    if any(f.automatic or f.code in UNPROMISED_CODES for f in prediction.findings):
        from qdqtool.fixing.promises import review_promises

        review_promises(model, prediction)


def predict_on_gpus(
    model: ModelSource | Model,
    target: Target,
    requests: Sequence[TimingOptions],
    *,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
) -> tuple[Prediction, list[TimeEstimate]]:
    """Predict once for each GPU, and return one prediction with the findings for all GPUs.

    Args:
        model: The model.
        target: TensorRT version.
        requests: Options of each GPU.
        assume: As for :func:`predict`.
        way: As for :func:`predict`.

    Returns:
        The prediction with ``times``, and the time estimates.
    """
    model = load(model)
    results = [
        predict_with_time(model, target, request, assume=assume, way=way) for request in requests
    ]
    times = [time for _, time in results if time is not None]
    ordered = results
    if any(time.is_supported for time in times):
        # The first prediction provides the facts of the model. So GPUs that the engine can be
        # built for come first.
        ordered = sorted(results, key=lambda result: _is_unsupported(result[1]))
    prediction = _merge_findings([prediction for prediction, _ in ordered], model)
    capabilities = itertools.chain.from_iterable(p.compute_capabilities for p, _ in results)
    prediction.compute_capabilities = list(dict.fromkeys(capabilities))
    # A prediction without `time` is that of a model that TensorRT rejects.
    prediction.times = [] if prediction.time is None else [time.as_json() for time in times]
    return prediction, times


def _is_unsupported(time: TimeEstimate | None) -> bool:
    return time is not None and not time.is_supported


def _merge_findings(predictions: Sequence[Prediction], model: Model) -> Prediction:
    first, *others = predictions
    places = {_make_finding_key(finding) for finding in first.findings}
    added: list[Finding] = []
    for other in others:
        added += [f for f in other.findings if _make_finding_key(f) not in places]
        places |= {_make_finding_key(finding) for finding in other.findings}
        first.notes += [note for note in other.notes if note not in first.notes]
    prediction_module.add_findings(first, added, model)
    return first


def _make_finding_key(finding: Finding) -> tuple[str, ...]:
    """Return a key that is equal for the same finding on several GPUs.

    Findings about limits of a GPU include the message, because it names the GPU.
    """
    is_limit = finding.code.startswith("GPU-")
    return finding.code, finding.node, finding.message if is_limit else ""


def predict_with_time(
    model: ModelSource | Model,
    target: Target,
    options: TimingOptions,
    *,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
) -> tuple[Prediction, TimeEstimate | None]:
    """Predict. If a GPU is named, estimate times and the savings of automatic fixes.

    Args:
        model: The model.
        target: TensorRT version.
        options: GPU or compute capability, batch, image size and calibration.
        assume: As for :func:`predict`.
        way: As for :func:`predict`.

    Returns:
        The prediction, and the time estimate, which is None if no GPU is named.
    """
    from qdqtool.timing.on_gpu import check_image_size, predict_on_gpu

    model = load(model)
    check_image_size(options.size, model)
    prediction, time = predict_on_gpu(
        model, target, options, assume=assume, way=way, extend=add_fix_savings
    )
    if time is None:
        _review_promises(model, prediction)
    return prediction, time


def add_fix_savings(
    model: Model, prediction: Prediction, time: TimeEstimate, target: Target
) -> None:
    """Add what automatic fixes save, and withdraw those that ``fix`` does not make, in place."""
    _review_promises(model, prediction)
    if time.is_supported and any(f.automatic for f in prediction.findings):
        from qdqtool.fixing import savings

        savings.add_fix_savings(model, prediction, time, target)
