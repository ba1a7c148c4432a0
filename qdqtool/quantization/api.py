"""Implementation of :func:`qdqtool.insert`, which makes a Q/DQ model from a float model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qdqtool.errors import QdqtoolError
from qdqtool.insertion import rules
from qdqtool.insertion.format_choice import FLOAT, FormatChoice, choose_number_format
from qdqtool.insertion.number_formats import FORMATS, FP8, INT8, find_number_format
from qdqtool.insertion.options import (
    AttentionChoice,
    CacheOptions,
    ClusterOptions,
    HeadChoice,
    HighPrecision,
    ImageOptions,
    InputType,
    InsertOptions,
    NetworkOptions,
    PlacementOptions,
    RangeMethod,
    RangeOptions,
    ResidualChoice,
    WeightForm,
)
from qdqtool.insertion.result import Insertion
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource
from qdqtool.quantization.inserter import Inserter, InsertRequest
from qdqtool.reasons.placement import NothingToQuantize
from qdqtool.timing import gpus
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.results import TimeEstimate
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util.files import record_inputs

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource
    from calibration.options import DaskCluster, ImageFunction, Preprocess


def insert(
    model: ModelSource | Model,
    data: CalibrationSource | None = None,
    *,
    progress: bool = False,
    method: RangeMethod = "focus",
    method_for: Sequence[tuple[str, RangeMethod]] = (),
    percentile: float = 99.99,
    max_images: int = 512,
    preprocess: Preprocess | str | ImageFunction | None = None,
    size: tuple[int, int] | None = None,
    calib_cache: str | os.PathLike[str] | None = None,
    overwrite_cache: bool = False,
    target: str | Target = DEFAULT_TARGET,
    precision: str = "int8",
    head: HeadChoice = "box",
    residual: ResidualChoice = "auto",
    attention: AttentionChoice = "auto",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    tuned: Sequence[str] = (),
    exclude_op: Sequence[str] = (),
    weights: WeightForm = "float",
    high_precision: HighPrecision | None = None,
    smooth: float | None = None,
    input_type: InputType = "float",
    cluster: DaskCluster | None = None,
    mixed_cpus: bool = False,
    calib_table: str | os.PathLike[str] | None = None,
    losses: int | None = 0,
    predict: bool = True,
    gpu: str | None = None,
    power: str | None = None,
) -> Insertion:
    """Insert calibrated Q/DQ pairs into a float model where TensorRT can use them.

    Args:
        model: Float ONNX model; it is not changed.
        data: Images, as for :func:`calibration.open_data`: folder, list file, list of paths, npz,
            npy or arrays. Not needed with `calib_table`.
        progress: Whether to report progress on stderr.
        method: How the range of an activation is chosen: ``focus``, ``mse``, ``percentile``,
            ``entropy`` or ``max``.
        method_for: Pairs of a regular expression on tensor names and the method for these
            tensors.
        percentile: Percentage of the absolute values that the range covers, for the method
            ``percentile``.
        max_images: Maximum number of samples, spread evenly over the data.
        preprocess: How images become inputs: a name of :data:`calibration.PRESETS` (``yolo``,
            ``imagenet``, ...), a :class:`calibration.Preprocess`, or a function from an RGB image
            of Pillow to the input. Default: the preprocessing in the model's metadata, else
            ``yolo`` (letterbox, RGB, divided by 255).
        size: Height and width in pixels if they are dynamic in the model. Default: ``imgsz`` in the
            model's metadata.
        calib_cache: File that keeps the statistics, so that another run needs no inference.
        overwrite_cache: Whether a cache of another model or of other data is replaced. Otherwise
            such a cache is an error.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        precision: ``int8``, or ``fp8`` (E4M3) for GPUs from compute capability 8.9 on and
            TensorRT 10.3 or newer, strongly typed. With FP8, the range of a tensor is its largest
            magnitude, and more nodes remain float (:mod:`qdqtool.insertion.placement`). ``auto``
            measures the output error of both formats on 8 images, and chooses by error and time
            (:func:`qdqtool.insertion.format_choice.choose_number_format`). If neither format suits,
            the result is the float model: in FP16 if the target is strongly typed (it computes in
            the types of the ONNX file), else unchanged.
        head: ``box`` leaves the layers float that compute boxes: DFL and box outputs of a
            YOLOv8-style head; boxes, reference points and sampling offsets of a DETR. ``float``
            also leaves every last convolution float, and the scores by which a DETR selects
            queries. ``none`` leaves no part of the head float.
        residual: Which inputs of a residual Add are quantized: ``auto``, ``skip``, ``both`` or
            ``none``.
        attention: ``float`` leaves the products of attention (queries with keys, Softmax with
            values) float. ``int8`` and ``fp8`` quantize the inputs of the products. The range of
            the Softmax's result is then 0 to 1. ``auto``: with INT8, the same as ``float``; with
            FP8, attentions that TensorRT fuses are quantized. Users measured INT8 attention to be
            slower: 800 us instead of 200 us on an Orin with TensorRT 8.6 (NVIDIA/TensorRT issue
            3243), 111 ms instead of 43 ms for a UNet of Stable Diffusion on an A10 (issue 2905).
            Both with float and with INT8 products, TensorRT-RTX 1.7 builds each attention of
            ViT-B/16 and Swin-T as one kernel, and each attention of YOLO11 as several kernels.
        unify: Whether tensors share one scale if Concat, Split, Slice, MaxPool, Resize or a similar
            operator connects them.
        exclude: Regular expressions (``re.search``) on names of nodes that remain float.
        include: Regular expressions on names of nodes to quantize even if `head` or `attention`
            leaves them float.
        tuned: Like `include`, for nodes that :func:`qdqtool.tune` chose by the measured accuracy.
            Their names are in the metadata of the result, so :func:`qdqtool.predict` reports a note
            on them instead of a warning.
        exclude_op: Operator types that remain float.
        weights: ``float`` keeps float weights with Q and DQ, ``int8`` and ``fp8`` store quantized
            weights with DQ alone.
        high_precision: Type of the layers without Q/DQ. ``fp32`` leaves them unchanged. ``fp16``
            converts them, except inputs, outputs, and tensors near the largest FP16 number.
            Default: ``fp16`` if the target computes in the types of the file (FP8, TensorRT 11,
            TensorRT-RTX), else ``fp32``.
        smooth: Strength of SmoothQuant from 0 to 1, usually 0.5; None: no SmoothQuant. SmoothQuant
            helps networks with outlier channels (ACT-OUTLIER). Before the calibration, each
            channel of a Linear's input is divided by a factor in the LayerNormalization, Linear or
            Mul before it, and the Linear's weights are multiplied by this factor. The outputs of
            the float model do not change.
        input_type: ``float`` leaves the network's inputs as they are. ``int8`` and ``uint8``: see
            :mod:`qdqtool.insertion.input_types`.
        cluster: Workers that run the calibration: address of a Dask scheduler, ``local:N`` for N
            processes on this machine, or a ``distributed.Client``. Default: this process. Without
            `mixed_cpus`, the result is the same with and without workers, bit for bit.
        mixed_cpus: Whether workers are allowed whose results may differ in the last bits.
        calib_table: Table with the ranges, instead of `data`: a TensorRT calibration table, AIMET
            encodings, JSON of PPQ or onnxruntime, or lines of Paddle; see
            :mod:`calibration.range_tables`.
        losses: Number of images for three measurements: the output error, the activations that
            cause most of it (:mod:`qdqtool.insertion.losses`), and the difference between an FP16
            model and the float model. The network runs up to 14 times for each image. Default: 0,
            which measures nothing. None, the default of the command line: the error is measured on
            8 images. If the error is 10 % or more, the gain of leaving single activations float is
            measured on 2 of the images, and the largest gains are confirmed on the other 6. If a
            gain is confirmed, the error with the excluded layers is measured on all images.
        predict: Whether to predict the engine of the result.
        gpu: GPU whose estimated times count for ``precision="auto"``; see ``qdqtool gpus``. With
            ``precision="fp8"``, a GPU without FP8 is an error.
        power: Power mode of a Jetson, such as ``15W`` or ``MAXN``; see ``qdqtool gpus NAME``.

    Returns:
        The Q/DQ model, with scales (units of the tensor per integer step), and reasons why nodes
        remain float.

    Raises:
        ModelError: The model cannot be read, is quantized already, or has nothing to quantize.
        DataError: The data, cache or table cannot be used.
        ClusterError: The cluster cannot be reached, or is not fit for the work.
        QdqtoolError: An option is wrong, or a pattern matches nothing.
    """
    options = InsertOptions(
        RangeOptions(method, method_for, percentile, max_images),
        ImageOptions(preprocess, size),
        CacheOptions(calib_cache, overwrite_cache),
        PlacementOptions(
            head,
            residual,
            attention,
            unify,
            exclude,
            include,
            exclude_op,
            weights,
            precision,
            tuned,
        ),
        NetworkOptions(high_precision, smooth, input_type),
        ClusterOptions(cluster, mixed_cpus),
        calib_table,
        losses,
        predict,
        progress,
    )
    if precision == FP8.name and gpu is not None and not gpus.choose_gpu(gpu).has_fp8:
        raise QdqtoolError(
            f"`gpu` {gpu} has no FP8. Use `precision='int8'`, or give a GPU of compute capability "
            "8.9 or newer",
            code="unsupported",
            parameter="gpu",
        )
    version = target_named(target)
    if gpu is not None and version.needs_hopper_for_fp8:
        version = version.with_capability(gpus.choose_gpu(gpu).cc)
    request = InsertRequest(model, data, version, options, TimingOptions(gpu=gpu, power=power))
    with record_inputs() as inputs:
        trials = _start_trials(request)
        for trial in trials:
            trial.choose_placement()
            trial.choose_scales()
            trial.insert_pairs()
        chosen = _choose_trial(trials, request) if precision == "auto" else trials[0]
        chosen.check_outliers()
        chosen.measure_losses()
        chosen.convert_to_fp16()
        if chosen.result.precision != FLOAT:
            chosen.convert_inputs()
            chosen.check_layer_norms()
        chosen.predict()
    chosen.result.read = inputs
    return chosen.result


def _start_trials(request: InsertRequest) -> list[Inserter]:
    """Return an insertion for the requested format, or one for each format to compare.

    With ``auto``, FP8 is not tried if the target, the GPU or the layers do not allow FP8. Both
    formats use the same calibration, unless SmoothQuant changes the networks.

    Raises:
        QdqtoolError: Formats are compared, and the data cannot be read twice, or a table replaces
            the data.
    """
    options, target = request.options, request.target
    if options.placement.precision != "auto":
        return [Inserter(request)]
    if options.calib_table is not None or isinstance(request.data, Iterator):
        raise QdqtoolError(
            "`precision='auto'` compares INT8 and FP8 on images. Give a folder, a list or arrays "
            "of images, or choose a format with `precision`",
            code="option-conflict",
            parameter="precision",
        )
    formats = FORMATS if target.has_fp8 else (INT8.name,)
    int8, *fp8 = [Inserter(request.with_precision(name)) for name in formats]
    int8.fp8_obstacle = _find_fp8_obstacle(target, request.timing.gpu, fp8)
    if int8.fp8_obstacle:
        return [int8]
    if options.network.smooth is None:  # with SmoothQuant, each format has its own network
        int8.collect_shared_statistics(fp8[0])
    return [int8, *fp8]


def _choose_trial(trials: Sequence[Inserter], request: InsertRequest) -> Inserter:
    """Return the INT8 model, the FP8 model or the float model, by errors and estimated times."""
    int8 = trials[0]
    choice = _choose_format(trials, request.timing)
    if int8.fp8_obstacle:
        choice = replace(choice, reason=f"{int8.fp8_obstacle}; {choice.reason}")
    if choice.is_float:
        chosen = Inserter(request.with_precision(INT8.name))
        chosen.keep_float_model(int8)
    else:
        chosen = int8 if choice.precision == INT8.name else trials[1]
    chosen.result.choice = choice
    return chosen


def _choose_format(trials: Sequence[Inserter], timing: TimingOptions) -> FormatChoice:
    models = [trial.copy_final_model() for trial in trials]
    errors, at_objects = trials[0].measure_errors(models)
    targets = [trial.target for trial in trials]
    names = [trial.result.precision for trial in trials]
    times: dict[str, TimeEstimate] = {}
    if timing.gpu is not None:
        for name, model, target in zip(names, models, targets, strict=True):
            _, time = predict_on_gpu(model.proto, target, timing)
            assert time is not None
            times[name] = time
    ms = {name: time.total_ms for name, time in times.items()}
    floats = [time.float_time.total_ms for time in times.values() if time.float_time is not None]
    if len(floats) == len(trials):
        ms[FLOAT] = min(floats)
    else:
        ms = {}
    title = next((time.gpu.name for time in times.values()), "")
    formats = [find_number_format(name) for name in names]
    choice = choose_number_format(errors.values, ms, title, formats, errors.images)
    return replace(choice, at_objects=at_objects)


def _find_fp8_obstacle(target: Target, gpu: str | None, fp8: Sequence[Inserter]) -> str:
    """Return why FP8 is not possible; empty if it is possible.

    `fp8` contains the FP8 trial; it is empty if the target has no FP8.
    """
    if not target.has_fp8:
        return f"{target.name} has no FP8"
    if gpu is not None:
        named = gpus.choose_gpu(gpu)
        if not named.has_fp8:
            return f"{named.name} has no FP8"
    try:
        for inserter in fp8:
            placement = inserter.choose_placement()
            if not target.has_fp8_convolutions and rules.warn_fp8_version(
                placement, inserter.target
            ):
                place = "" if gpu is None else f" on {gpus.choose_gpu(gpu).name}"
                return f"TensorRT {target.version_name} has no FP8 convolutions{place}"
    except NothingToQuantize as error:
        return f"no layer suits FP8: {error.reason}"
    return ""
