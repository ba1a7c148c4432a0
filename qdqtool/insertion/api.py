"""``qdqtool.insert``: from a float model and images to a calibrated Q/DQ model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qdqtool import prediction
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.findings.left_float import nothing_to_quantize
from qdqtool.findings.lint.activation_scales import outliers
from qdqtool.findings.lint.floats import norms
from qdqtool.findings.report import Report
from qdqtool.insertion import fp16
from qdqtool.insertion.batchnorm import fold_leading_batch_normalization
from qdqtool.insertion.input_types import change_inputs, check_input_type, check_pixels
from qdqtool.insertion.losses import (
    SAMPLES,
    compare_outputs,
    measure_losses,
    predict_changes,
    rank_activations,
)
from qdqtool.insertion.options import (
    CacheOptions,
    ClusterOptions,
    ImageOptions,
    InsertOptions,
    NetworkOptions,
    PlacementOptions,
    RangeOptions,
)
from qdqtool.insertion.placement import place
from qdqtool.insertion.prepare import MIN_OPSET, prepare
from qdqtool.insertion.ranges import collect_statistics, read_table_scales
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.rewrite import ActivationScale, insert_pairs
from qdqtool.insertion.rules import choose_placement
from qdqtool.insertion.sample_runs import DEFAULT_IMAGES, largest_values
from qdqtool.insertion.scales import (
    LEVELS,
    GroupScale,
    MethodChoice,
    choose_scale,
    find_scale_groups,
)
from qdqtool.insertion.smoothing import ScaleMigration, smooth
from qdqtool.ir.graph import EDITED, Model
from qdqtool.ir.modelfile import ModelSource, load_full
from qdqtool.ir.qdq import is_quantized
from qdqtool.patterns.half import HALF_OPSET, WIDE
from qdqtool.patterns.layernorm import (
    computes_in_fp16,
    find_decomposed_layer_norms,
    find_sums_of_squares,
    layer_norm_inputs,
)
from qdqtool.patterns.view import View
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import Finding, Json, Prediction, QuantizedTensor, Severity
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import of_error, said

if TYPE_CHECKING:
    from calibration import Statistics
    from calibration.options import Preprocess

# The finished model's error is FP16's where it is so large, and so many times that of INT8 activations alone.
_DIFFERS, _TIMES = 0.1, 5.0


def insert(
    model: ModelSource | Model,
    data: object = None,
    *,
    progress: bool = False,
    method: str = "focus",
    method_for: Sequence[tuple[str, str]] = (),
    percentile: float = 99.99,
    max_images: int = 512,
    preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
    calib_cache: str | os.PathLike[str] | None = None,
    overwrite_cache: bool = False,
    target: str | Target = DEFAULT_TARGET,
    head: str = "box",
    residual: str = "auto",
    attention: str = "float",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_op: Sequence[str] = (),
    weights: str = "float",
    high_precision: str | None = None,
    smooth: float | None = None,
    input_type: str = "float",
    cluster: object = None,
    mixed_cpus: bool = False,
    calib_table: str | os.PathLike[str] | None = None,
    losses: int | None = 0,
    predict: bool = True,
) -> Insertion:
    """Insert calibrated Q/DQ pairs where TensorRT uses them.

    Args:
        model: Float ONNX model; it is not changed.
        data: Images, as for :func:`calibration.open_data`: folder, list file, npz, npy or arrays.
            Not needed with `calib_table`.
        progress: Whether to draw progress on stderr if that is a terminal.
        method: ``focus``, ``mse``, ``percentile``, ``entropy`` or ``max``: how the range of an
            activation is chosen.
        method_for: Pairs of a regular expression on tensor names and the method for these
            tensors.
        percentile: For the method ``percentile``, in percent of the absolute values.
        max_images: Maximum number of samples, spread evenly over the data.
        preprocess: How images become inputs. Default: letterbox, RGB, divided by 255.
        size: Height and width in pixels if the model leaves them open. Default: its ``imgsz``
            metadata.
        calib_cache: File that keeps the statistics, so that another run needs no inference.
        overwrite_cache: Whether a cache of another model or of other data is replaced. Otherwise
            it is an error.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        head: ``box`` leaves DFL and box outputs of a YOLOv8-style head float, and the layers of a
            DETR that compute boxes, reference points and sampling offsets. ``float`` leaves every
            last convolution and such scores float. ``none`` leaves nothing float.
        residual: ``auto``, ``skip``, ``both`` or ``none``: which inputs of a residual Add are
            quantized.
        attention: ``float`` leaves the products of attention (queries with keys, Softmax with
            values) float. ``int8`` quantizes their inputs, the Softmax's result with its fixed
            range 0 to 1. Users measured INT8 attention to be slower: 800 us instead of 200 on an
            Orin with 8.6 (NVIDIA/TensorRT issue 3243), 111 ms instead of 43 for a UNet of Stable
            Diffusion on an A10 (2905). TensorRT-RTX 1.7 makes one kernel of each attention of
            ViT-B/16 and Swin-T in either type, and several of YOLO11's.
        unify: Whether tensors tied by Concat, Split, Slice, MaxPool, Resize and the like share
            one scale.
        exclude: Regular expressions (``re.search``) on names of nodes that stay float.
        include: The same for nodes to quantize although a preset would leave them float.
        exclude_op: Operator types that stay float.
        weights: ``float`` keeps float weights with Q and DQ, ``int8`` stores int8 with DQ alone.
        high_precision: ``fp32`` leaves the float remainder as it is. ``fp16`` converts it, except
            tensors near the largest value of FP16, inputs and outputs. Default: ``fp16`` if the
            target computes in the types of the file (TensorRT 11, TensorRT-RTX), else ``fp32``.
        smooth: SmoothQuant before the calibration, for networks with outlier channels
            (ACT-OUTLIER): scales of the inputs of Linears move into their weights, and the
            inverse into the LayerNormalization, Linear or Mul before them, which is the same in
            float. Strength from 0 to 1, mostly 0.5.
        input_type: ``float`` leaves the network's inputs as they are. ``int8`` and ``uint8``: see
            :mod:`qdqtool.insertion.input_types`.
        cluster: Workers that calibrate and measure: address of a Dask scheduler, ``local:N`` for
            N processes on this machine, or a ``distributed.Client``. Default: this process. The
            result is the same, bit for bit.
        mixed_cpus: Whether workers are allowed whose results may differ in the last bits.
        calib_table: TensorRT calibration table with the ranges, instead of `data`.
        losses: Number of samples to measure on how far INT8 moves the outputs, which activations
            cost most (:mod:`qdqtool.insertion.losses`), and how far an FP16 model is from the
            float model. The network runs up to ten times for each sample. 0 measures nothing.
            None: 2 samples, and single activations only if the outputs move by 10 % or more; the
            command's default.
        predict: Whether to predict the result.

    Returns:
        The Q/DQ model with scales (units of the tensor per integer step) and reasons.

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
        PlacementOptions(head, residual, attention, unify, exclude, include, exclude_op, weights),
        NetworkOptions(high_precision, smooth, input_type),
        ClusterOptions(cluster, mixed_cpus),
        calib_table,
        losses,
        predict,
        progress,
    )
    with record_inputs() as inputs:
        insertion = _insert(model, data, target_named(target), options)
    insertion.read = inputs
    return insertion


def _insert(
    model: ModelSource | Model, data: object, chosen: Target, options: InsertOptions
) -> Insertion:
    from calibration import Preprocess

    ranges, images, network = options.ranges, options.images, options.network
    calib_table, losses = options.calib_table, options.losses
    preprocess = images.preprocess or Preprocess()
    if options.cluster.cluster is not None:
        from calibration.cluster.connection import check_cluster

        check_cluster(options.cluster.cluster)
    check_input_type(network.input_type, chosen)
    loaded = load_full(model)
    source = loaded.path
    ours = is_ours(loaded, model)
    work, half, notes, warnings = prepared(
        model, loaded, chosen, options.placement.weights, network.high_precision
    )
    rules, placement = choose_placement(work, options.placement, chosen)
    notes.extend(placement.notes)
    smoothed: list[ScaleMigration] = []
    if network.smooth is not None:
        smoothed, done = smooth(
            work, placement, network.smooth, None if calib_table is not None else data, images
        )
        notes.append(done)
    if smoothed:
        work.sha256 = None  # statistics of the model as it was do not fit
        placement = place(work, rules)
    if not placement.inputs:
        raise nothing_to_quantize(placement.skipped, source or "model")
    groups = find_scale_groups(work, placement.inputs, options.placement.unify)
    methods = MethodChoice.from_options(ranges)
    methods.check([t for g in groups for t in g.tensors])
    statistics = None
    if calib_table is not None:
        found = read_table_scales(calib_table, groups)
        calibration: Json = {"table": os.fspath(calib_table), "images": 0}
    else:
        statistics, calibration = collect_statistics(
            work,
            data,
            groups,
            max_images=ranges.max_images,
            images=images,
            cache=options.cache,
            cluster=options.cluster,
            progress=options.progress,
        )
        found = []
        if network.input_type == "uint8":
            for name in work.inputs:
                if name in statistics and statistics[name].count:
                    check_pixels(
                        name, statistics[name].minimum, statistics[name].maximum, preprocess
                    )
        for group in groups:
            scale, warned = choose_scale(group, statistics, methods)
            found.append(scale)
            warnings.extend(warned)
    tied = [s for s in found if s.group.is_shared]
    calibration["methods"] = dict(Counter(s.method for s in found for _ in s.group.quantized))
    calibration["powers"] = {
        t: round(s.power, 2) for s in found if s.power for t in s.group.quantized
    }
    numbers = {id(s): i for i, s in enumerate(tied)}
    scales = {
        t: ActivationScale(s.scale, s.method, numbers.get(id(s)))
        for s in found
        for t in s.group.quantized
    }
    quantized = insert_pairs(work, placement, scales, options.placement.weights)
    findings = (
        [] if statistics is None else _of_outliers(work, found, quantized, statistics, chosen)
    )
    advice = network.smooth is None or bool(smoothed)  # not, where it was taken in vain
    remark = Remark.OF_FINDING_TO_FIX if advice else Remark.OF_FINDING
    warnings.extend(remark(code=f.code, finding=f) for f in findings)
    seen = {} if statistics is None else {t: s.absmax for t, s in statistics.items()}
    measured = None
    if losses != 0 and statistics is not None:
        activations = [q for q in quantized if q.method != "weights-max"]
        tried = rank_activations(
            activations, statistics, {t: g.sources for g in groups for t in g.quantized}
        )
        statistics = None  # tens of megabytes, and not needed any more
        try:
            measured = measure_losses(
                work, tried, data, activations=activations, images=images, samples=losses
            )
        except ModelError as error:  # operators behind the last convolutions may be TensorRT's own
            warnings.append(Remark.LOSSES_NOT_MEASURED(error=of_error(error)))
    wide: dict[str, float] = {}
    agreement = None
    if half:
        readable = data if calib_table is None else None
        wide = too_large(work, quantized, seen, readable, warnings, images)
        notes.extend(said_of_half(work, chosen, wide, network.high_precision is None))
        first = work if network.input_type == "float" else work.copy()
        fp16.convert_to_fp16(first, wide)
        if losses != 0 and readable is not None:
            try:
                floats = load_full(model) if ours else loaded
                found_half = compare_outputs(
                    floats, [first], readable, samples=losses or SAMPLES, images=images
                )
                agreement = found_half[0] if found_half else None
                if (
                    measured
                    and agreement
                    and not agreement.error <= max(_DIFFERS, _TIMES * measured.error)
                ):
                    warnings.append(Remark.HALF_DIFFERS(int8=measured.error, half=agreement.error))
            except ModelError as error:
                warnings.append(Remark.AGREEMENT_NOT_MEASURED(error=of_error(error)))
    if network.input_type != "float":
        notes.extend(change_inputs(work, network.input_type, preprocess))
        if half:
            fp16.convert_to_fp16(work, wide)
    in_pieces = _of_norms(work, chosen)
    findings.extend(in_pieces)
    if in_pieces:  # the first for all of them
        remark = Remark.OF_ALL_TO_FIX if len(in_pieces) > 1 else Remark.OF_FINDING_TO_FIX
        warnings.append(
            remark(code=in_pieces[0].code, finding=in_pieces[0], more=len(in_pieces) - 1)
        )
    if half:
        tied, raised = fp16.update_scales(work, quantized, tied)
        notes.extend(raised)
    result = Insertion(
        work.proto,
        quantized,
        placement.skipped,
        calibration,
        tied,
        notes,
        warnings,
        chosen.name,
        source=source,
        losses=measured,
        float_type="fp16" if half else "fp32",
        float32=wide,
        agreement=agreement,
        smoothed=smoothed,
        findings=findings,
        compute_capabilities=chosen.capability_names,
    )
    if options.predict:
        try:
            work.path, work.sha256 = "", None  # from here on it is a model in memory as any other
            result.prediction = prediction.predict(work, chosen)
            if measured is not None:
                result.losses = predict_changes(
                    measured,
                    work,
                    result.activations,
                    result.prediction,
                    lambda p: prediction.predict_outcome(p, chosen),
                )
            result.warnings.extend(_refused(result.prediction))
        except QdqtoolError as error:  # the Q/DQ model is good without it
            result.warnings.append(Remark.NOT_PREDICTED(error=of_error(error)))
    return result


def _refused(prediction: Prediction) -> list[Note]:
    """What ends the build, a sentence for each code: operators beside the quantized ones that the target lacks."""
    first: dict[str, Finding] = {}
    for finding in prediction.findings:
        if finding.severity == Severity.ERROR:
            first.setdefault(finding.code, finding)
    counts = prediction.findings_by_code()
    return [
        (Remark.OF_FINDINGS_TO_FIX if counts[code] > 1 else Remark.OF_FINDING_TO_FIX)(
            code=code, finding=f, more=counts[code] - 1
        )
        for code, f in first.items()
    ]


def _of_outliers(
    model: Model,
    found: Sequence[GroupScale],
    quantized: Sequence[QuantizedTensor],
    statistics: Statistics,
    target: Target,
) -> list[Finding]:
    """Findings about outliers, for scales as they were chosen."""
    nodes = {q.tensor: q.node for q in quantized}
    report = Report(target.name)
    outliers(
        report,
        model,
        [
            (
                nodes[t],
                t,
                s.scale,
                [statistics[n] for n in ((t,) if t in s.group.sources else s.group.sources)],
            )
            for s in found
            if s.group.largest is None
            for t in s.group.quantized
        ],
        statistics.images,
    )
    return report.findings


def _of_norms(model: Model, target: Target) -> list[Finding]:
    """Findings about layer normalizations, for the finished model."""
    report = Report(target.name)
    norms(View(model), report)
    return report.findings


def too_large(
    model: Model,
    quantized: Sequence[QuantizedTensor],
    seen: Mapping[str, float],
    data: object,
    warnings: list[Note],
    images: ImageOptions = DEFAULT_IMAGES,
) -> dict[str, float]:
    """Tensors of a Q/DQ model that near the largest value of FP16: as ``seen`` in the calibration, by their scale, or
    on a few samples of the data, where there is any; ``warnings`` gets what could not be looked at."""
    found = {t: amax for t, amax in seen.items() if amax > WIDE}
    for entry in quantized:
        if (
            not isinstance(entry.scale, list)
            and entry.method != "weights-max"
            and entry.scale * LEVELS > WIDE
        ):
            found[entry.tensor] = max(found.get(entry.tensor, 0.0), entry.scale * LEVELS)
    try:
        if data is not None:
            largest = largest_values(model, data, images=images)
            found.update({t: max(v, found.get(t, 0.0)) for t, v in largest.items() if v > WIDE})
    except ModelError as error:
        warnings.append(Remark.NOT_LOOKED_AT(error=of_error(error)))
    return found


def said_of_half(
    model: Model, target: Target, kept: Mapping[str, float], by_default: bool
) -> list[Note]:
    """The notes on an FP16 remainder to come: that it is one by default, and what stays FP32 (largest values given)."""
    notes = []
    if by_default:
        notes.append(Remark.HALF_BY_DEFAULT(target=target.name))
    if kept:
        notes.append(Remark.STAY_FP32(count=len(kept), kept=list(kept.items())))
    pieces = find_decomposed_layer_norms(model)
    others = [p for p in pieces if layer_norm_inputs(model, p) is None]
    left = [p for p in others if not computes_in_fp16(model, (p.square, p.mean))]
    if len(pieces) > len(others):
        notes.append(Remark.NORMS_WRITTEN(count=len(pieces) - len(others)))
    if left:
        notes.append(Remark.NORMS_STAY_FP32(count=len(left), first=left[0].square.name))
    if loose := [
        nodes[0].name
        for nodes in find_sums_of_squares(model, pieces)
        if not computes_in_fp16(model, nodes)
    ]:
        notes.append(Remark.SQUARES_STAY_FP32(count=len(loose), first=loose[0]))
    return notes


def is_ours(loaded: Model, model: ModelSource | Model) -> bool:
    """Whether a model was read for this call, so that it may be edited."""
    return model is not loaded.proto and model is not loaded


def prepared(
    model: ModelSource | Model,
    loaded: Model,
    target: Target,
    weights: str,
    high_precision: str | None,
) -> tuple[Model, bool, list[Note], list[Note]]:
    """What :func:`_copied` gives for what is to have an FP16 remainder (by default where the target computes in the
    file's types), and whether it is to: one whose opset cannot be raised stays FP32 unless FP16 was asked for."""
    half = high_precision == "fp16" or (high_precision is None and target.strongly_typed)
    ours = is_ours(loaded, model)
    try:
        work, notes, warnings = _copied(loaded, ours, target, weights, "fp16" if half else "fp32")
    except ModelError as error:
        if not half or high_precision is not None:
            raise
        half = False
        work, notes, warnings = _copied(load_full(model), ours, target, weights, "fp32")
        warnings.append(Remark.HALF_IMPOSSIBLE(target=target.name, error=of_error(error)))
    return work, half, notes, warnings


def _copied(
    loaded: Model, ours: bool, target: Target, weights: str, high_precision: str
) -> tuple[Model, list[Note], list[Note]]:
    """A prepared model that may be edited (a copy unless it is ours), notes and warnings."""
    if is_quantized(loaded):
        raise ModelError(
            "is quantized already (it has Q/DQ or integer operators); give the float model it was made "
            "from, or predict this one",
            loaded.path or "model",
            code="already-quantized",
        )
    sparse = [s.values.name for s in loaded.proto.graph.sparse_initializer]
    known = (loaded.producers, loaded.initializers, loaded.inputs, sparse)
    loose = next((o for o in loaded.outputs if not any(o in names for names in known)), None)
    if loose is not None:
        raise ModelError(
            said("no node makes the output '{name}'; export the model again", name=loose),
            loaded.path or "model",
            code="output-without-producer",
            node=loose,
        )
    work = loaded if ours else loaded.copy()
    notes: list[Note] = []
    warnings: list[Note] = []
    half = fp16.has_fp16(loaded)
    if high_precision == "fp16" and not target.float16_scales:
        raise QdqtoolError(
            said(
                "{`high_precision`:'fp16'}: {name} takes no FP16 scales and chooses FP16 itself; leave "
                "it out and let the builder use INT8 and FP16",
                name=target.name,
            ),
            code="option-conflict",
            parameter="high_precision",
        )
    if half and not target.float16_scales:
        fp16.convert_to_fp32(work)
        notes.append(Remark.WIDENED(target=target.name))
        half = False
    if weights == "int8" and not target.int8_weights:
        warnings.append(Remark.INT8_WEIGHTS_UNREAD(target=target.name))
    opset = HALF_OPSET if half or high_precision == "fp16" else MIN_OPSET
    # A calibration cache knows the model again by what it was made from: preparing it gives every target the same
    # tensors, at whatever opset. Widened to float32, or edited by the caller, it is a model of its own.
    identity = None if notes or loaded.sha256 == EDITED else loaded.sha256
    notes.extend(prepare(work, opset=opset))
    if leading := fold_leading_batch_normalization(work):
        notes.append(Remark.NORMS_FOLDED_BEHIND(count=leading))
    work.sha256 = identity
    return work, notes, warnings
