"""Translation of a Q/DQ model for DLA to a float model with a calibration cache.

DLA does not support Q/DQ. TensorRT builds INT8 layers for DLA from a float model, a calibration
cache and layer precisions. NVIDIA's qdq-translator writes the same files.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from calibration.arrays import CalibrationSource
from calibration.options import ImageFunction, Preprocess
from qdqtool.errors import ModelError
from qdqtool.findings.preprocess_notes import describe_preprocess
from qdqtool.fixing.quantizers import make_constant_change
from qdqtool.fixing.site import broadcast_along
from qdqtool.fixing.weights import make_dequantizer
from qdqtool.insertion.batchnorm import fold_batch_normalization
from qdqtool.insertion.calibration_cache import (
    CacheReport,
    LayerPrecisions,
    TensorScales,
    cache_header,
    choose_precisions,
    measure_scales,
    write_cache,
)
from qdqtool.insertion.number_formats import LEVELS
from qdqtool.insertion.options import ImageOptions, RangeOptions
from qdqtool.insertion.prepare import MIN_OPSET, raise_opset
from qdqtool.insertion.preprocessing import resolve_images
from qdqtool.insertion.ranges import collect_statistics
from qdqtool.insertion.scales import MethodChoice, choose_tensor_scales, group_separately
from qdqtool.ir.branches import fold_constant_branches
from qdqtool.ir.constants import ConstantEvaluator, find_computed_parameters
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.modelfile import ModelSource, load_full, save
from qdqtool.ir.precision import INTEGER_RANGES, Precision
from qdqtool.ir.qdq import DQ, Q, is_dq, is_qdq, is_quantized
from qdqtool.patterns.fake_quantizers import find_fake_quantizers, rewrite_fake_quantizers
from qdqtool.patterns.rewrites import insert_clipping_relus, remove_quantizers
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import nested_graphs
from qdqtool.trt.fault_checks import LARGEST_SCALE, compute_channel_maxima
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util.files import InputFiles, forbid_overwrite, record_inputs
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

_WEIGHT_TOLERANCE = 0.01  # permitted relative difference between a weight scale and max|w| / 127
_MAX_CLIPPING = 4.0  # if max|w| is a larger multiple of the range, the scale counts as wrong


@dataclass(repr=False)
class DlaTranslation:
    """A Q/DQ model translated for DLA.

    Attributes:
        model: The float model, without Q and DQ.
        scales: Scales of the float model's tensors.
        precisions: Precisions of the float model's layers.
        target: TensorRT version of the build.
        source: Path of the Q/DQ model; empty for a model in memory.
        notes: Notes on properties of the Q/DQ model that the translation cannot keep, and on the
            calibration data.
        read: Files that were read; :meth:`save` does not overwrite them.
    """

    model: onnx.ModelProto
    scales: TensorScales
    precisions: LayerPrecisions
    target: Target
    source: str = ""
    notes: list[Note] = field(default_factory=list)
    read: InputFiles | None = field(default=None, repr=False, compare=False)

    def save(self, model: str | os.PathLike[str], cache: str | os.PathLike[str]) -> CacheReport:
        """Write the float model and the calibration cache, and return the report.

        Raises:
            QdqtoolError: A path is that of a file that was read, or a file cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.model, model, source=self.source)
            return write_cache(cache, model, self.target, self.scales, self.precisions)


def translate_for_dla(
    model: ModelSource | Model,
    target: str | Target = DEFAULT_TARGET,
    *,
    data: CalibrationSource | None = None,
    preprocess: Preprocess | str | ImageFunction | None = None,
    size: tuple[int, int] | None = None,
) -> DlaTranslation:
    """Translate a Q/DQ model for DLA to a float model with scales and layer precisions.

    Args:
        model: The Q/DQ model with all its weights.
        target: TensorRT version of the build, such as ``8.5.2`` or ``10.3``; older than 11.
        data: Images on which the ranges of tensors without a Q are measured, as for
            :func:`calibration.open_data`. Default: some of these tensors get scales by the rules of
            :mod:`qdqtool.insertion.calibration_cache`, and the others have no scale.
        preprocess: How images become inputs, as for :func:`qdqtool.fix`.
        size: Height and width in pixels, if they are dynamic in the model.

    Raises:
        ModelError: The model cannot be read, has no Q/DQ, or has quantizers that a cache cannot
            represent (computed scales, FP8).
        DataError: The data cannot be used.
        QdqtoolError: The target cannot read a calibration cache.
    """
    version = target_named(target)
    cache_header(version)
    with record_inputs() as read:
        model = insert_clipping_relus(_prepare_quantized_model(load_full(model)))
        view = View(model)
        notes: list[Note] = []
        quantizer_scales = _read_scales(view, notes)
        int8 = {n.name for n in view.nodes_with_weights if n.index in view.fully_quantized_nodes}
        _note_custom_weight_scales(view, notes)
        constants = _dequantize_constants(view) | _clip_weights(view)
        floats = remove_quantizers(model.copy(), weights=True, constants=constants)
        _require_no_quantizers(floats)
        fold_batch_normalization(floats)
        images = ImageOptions(preprocess, size)
        measure = None
        if data is not None:
            measure = functools.partial(_measure_scales, data, images, notes)
        unary = version.recovers_scales_on_dla
        scales = measure_scales(floats, quantizer_scales, measure, unary=unary)
    precisions = choose_precisions(floats, scales, int8)
    return DlaTranslation(floats.proto, scales, precisions, version, model.path, notes, read)


def _measure_scales(
    data: CalibrationSource,
    images: ImageOptions,
    notes: list[Note],
    model: Model,
    tensors: Sequence[str],
) -> dict[str, float]:
    images, origin = resolve_images(model, images)
    groups, ranges = group_separately(tensors), RangeOptions()
    statistics, _ = collect_statistics(
        model, data, groups, max_images=ranges.max_images, images=images
    )
    notes += map(Note.from_text, (*statistics.notes, *statistics.warnings))
    notes += describe_preprocess(model, statistics.preprocessing, origin, data)
    return choose_tensor_scales(groups, statistics, MethodChoice.from_options(ranges))


def _require_quantizers(model: Model) -> None:
    branches = nested_graphs(n.proto for n in model.nodes)
    if any(node.op_type in (Q, DQ) for graph in branches for node in graph.node):
        raise ModelError(
            "has Q/DQ nodes in branches of If or bodies of Loop and Scan, which DLA does not run; "
            "export a model without control flow",
            model.path or "model",
            code="unsupported",
        )
    if not is_quantized(model):
        raise ModelError(
            "has no Q/DQ; give a Q/DQ model, or write the calibration cache from a float model "
            "with 'qdqtool insert --write-table'",
            model.path or "model",
            code="not-quantized",
        )


def _prepare_quantized_model(model: Model) -> Model:
    model = fold_constant_branches(model)
    if not is_quantized(model) and find_fake_quantizers(model):
        model = model.copy()
        if model.opset < MIN_OPSET:
            raise_opset(model, MIN_OPSET)
        rewrite_fake_quantizers(model)
    _require_quantizers(model)
    model = model.copy()
    _fold_computed_parameters(model)
    return _make_names_unique(model)


def _make_names_unique(model: Model) -> Model:
    """Give each node a unique name, in place. trtexec sets precisions by name."""
    editor, names = Editor(model), Counter(node.proto.name for node in model.nodes)
    for node in model.nodes:
        if not node.proto.name or names[node.proto.name] > 1:
            base = node.proto.name or f"{node.op}_{node.output}"
            editor.edit_proto(node).name = editor.unique_name(base)
    return editor.finish()


def _fold_computed_parameters(model: Model) -> None:
    evaluator, editor = ConstantEvaluator(model), Editor(model)
    for tensor, consumers in find_computed_parameters(model).items():
        value = evaluator.evaluate(tensor)
        if value is not None:
            make_constant_change(consumers, tensor, value)(editor)
    editor.finish()


def _read_scales(view: View, notes: list[Note]) -> dict[str, float]:
    """Return the symmetric INT8 scale of each quantized activation, by tensor name.

    The names are those of the input of a Q and of the outputs of its DQs. If a tensor has several
    Qs, their largest scale is returned, and a note is added.
    """
    scales: dict[str, float] = {}
    several: set[str] = set()
    for q, dqs in view.pairs():
        scale = _symmetric_scale(view, q)
        for tensor in (q.input(0), *(dq.output for dq in dqs)):
            if scales.get(tensor, scale) != scale:
                several.add(tensor)
            scales[tensor] = max(scale, scales.get(tensor, 0.0))
    if several:
        notes.append(
            Note(
                f"{format_count(len(several), 'tensor')} with several scales, for example "
                f"'{min(several)}': the cache has the largest scale of each",
                code="several-scales",
                count=len(several),
                first=min(several),
            )
        )
    return scales


def _symmetric_scale(view: View, q: Node) -> float:
    """Return the symmetric INT8 scale that covers the range of a Q.

    Raises:
        ModelError: The Q is not INT8 or UINT8 per tensor, or its scale is invalid.
    """
    params = view.params(q)
    limits = INTEGER_RANGES.get(params.precision)
    scale, zero = params.scale, params.zero_point
    if limits is None or scale is None or zero is None or scale.size != 1:
        raise ModelError(
            f"'{q.name}' is not an INT8 quantizer with one constant scale, so a calibration cache "
            "cannot contain its range. Quantize activations in INT8 per tensor.",
            view.model.path or "model",
            code="unsupported",
            node=q.name,
        )
    step, point = float(scale[0]), int(zero[0])
    if not (np.isfinite(step) and 0 < step <= LARGEST_SCALE):
        raise ModelError(
            f"'{q.name}': scale {step:g} is not a positive number of plausible size. Calibrate "
            "again.",
            view.model.path or "model",
            code="invalid-scale",
            node=q.name,
        )
    if params.precision == Precision.INT8 and point == 0:
        return step
    return max(abs(limits[0] - point), abs(limits[1] - point)) * step / LEVELS


def _note_custom_weight_scales(view: View, notes: list[Note]) -> None:
    """Add a note on weight scales that differ from TensorRT's, max|w| / 127 per channel."""
    others = [
        node.name
        for node, q, value in _quantized_weights(view)
        if _has_custom_scales(view, q, value)
    ]
    if others:
        notes.append(
            Note(
                f"{format_count(len(others), 'layer')} with weight scales other than max|w| / 127, "
                f"for example '{others[0]}': with a cache, TensorRT ignores these scales and "
                "computes max|w| / 127 for each channel",
                code="weight-scales",
                count=len(others),
                first=others[0],
            )
        )


def _quantized_weights(view: View) -> Iterator[tuple[Node, Node, npt.NDArray[Any]]]:
    """Yield node, Q and values of float weights that have a Q with known scales."""
    for node in view.nodes_with_weights:
        weights = view.weights(node)
        value = view.model.constant(weights.source)
        if weights.q is None or value is None or value.dtype.kind != "f" or value.ndim < 2:
            continue
        if value.size and view.params(weights.q).scale is not None:
            yield node, weights.q, value


def _has_custom_scales(view: View, q: Node, value: npt.NDArray[Any]) -> bool:
    """Return whether the scales of weights differ from max|w| / 127.

    Weights are first clipped to the range of the Q, unless max|w| is more than four times this
    range. True if the scales are unknown, or if their number is not that of the channels.
    """
    scale, largest = view.params(q).scale, compute_channel_maxima(value, view.axis(q))
    if scale is None or largest.size != scale.size:
        return True
    limit = scale * LEVELS
    largest = np.where(largest <= _MAX_CLIPPING * limit, np.minimum(largest, limit), largest)
    used = largest > 0
    return not np.allclose(limit[used], largest[used], rtol=_WEIGHT_TOLERANCE)


def _dequantize_constants(view: View) -> dict[str, onnx.TensorProto]:
    """Return the float values of integer constants that a DQ reads, by the output of the DQ.

    Raises:
        ModelError: Integers or scales are missing, or their shapes do not match.
    """
    constants = {}
    for dq in view.quantizers:
        if is_dq(dq) and view.model.is_constant(dq.input(0)):
            dequantize = make_dequantizer(view, dq)
            if dequantize is None:
                raise ModelError(
                    f"'{dq.name}': the integers or scales are missing, or their shapes do not "
                    "match. Export the model again.",
                    view.model.path or "model",
                    code="invalid-scale",
                    node=dq.name,
                )
            constants[dq.output] = numpy_helper.from_array(dequantize(), dq.output)
    return constants


def _clip_weights(view: View) -> dict[str, onnx.TensorProto]:
    """Return clipped copies of the weights that their Q clips, by the output of the DQ.

    Weights are not clipped if max|w| is more than four times the range of the Q.
    """
    constants = {}
    for node, q, value in _quantized_weights(view):
        dq, params, axis = view.weights(node).dq, view.params(q), view.axis(q)
        limits = INTEGER_RANGES.get(params.precision)
        if dq is None or limits is None or params.scale is None or params.zero_point is None:
            continue
        scale, zero = (
            broadcast_along(part, value.shape, axis, node.name)
            for part in (params.scale, params.zero_point)
        )
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            continue
        low, high = ((limit - zero) * scale for limit in limits)
        largest = broadcast_along(compute_channel_maxima(value, axis), value.shape, axis, node.name)
        is_plausible = largest <= _MAX_CLIPPING * np.maximum(-low, high)
        clipped = np.where(is_plausible, np.clip(value, low, high), value).astype(value.dtype)
        if not np.array_equal(clipped, value):
            constants[dq.output] = numpy_helper.from_array(clipped, dq.output)
    return constants


def _require_no_quantizers(model: Model) -> None:
    unpaired = next((n for n in model.nodes if is_qdq(n)), None)
    if unpaired is not None:
        raise ModelError(
            f"'{unpaired.name}' is a Q without DQ or a DQ without Q, so it cannot be removed. Give "
            "a model with Q/DQ pairs.",
            model.path or "model",
            code="unsupported",
            node=unpaired.name,
        )
