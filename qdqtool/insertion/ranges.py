"""Ranges of activations, from calibration data or from a table of ranges."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from qdqtool.errors import DataError, shorten_text
from qdqtool.insertion.number_formats import INT8, LEVELS, NumberFormat, find_number_format
from qdqtool.insertion.options import CacheOptions, ClusterOptions, ImageOptions
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.insertion.sample_runs import DEFAULT_IMAGES
from qdqtool.insertion.scales import (
    GroupMember,
    GroupScale,
    ScaleGroup,
    clamp_scale,
    constant_scale,
)
from qdqtool.ir.graph import Model
from qdqtool.trt.fault_checks import LARGEST_SCALE, SMALLEST_SCALE, find_implausible_limit
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from calibration import Statistics
    from calibration.arrays import CalibrationSource
    from calibration.range_tables import RangeTable
    from qdqtool.insertion.calibration_cache import CacheReport
    from qdqtool.insertion.result import Insertion

_NO_CACHE = CacheOptions()
_NO_CLUSTER = ClusterOptions()


def collect_statistics(
    model: Model,
    data: CalibrationSource | None,
    groups: Sequence[ScaleGroup],
    *,
    max_images: int,
    images: ImageOptions = DEFAULT_IMAGES,
    cache: CacheOptions = _NO_CACHE,
    cluster: ClusterOptions = _NO_CLUSTER,
    progress: bool = False,
) -> tuple[Statistics, Json]:
    """Run the model on the data, and return the statistics of the groups' sources.

    Returns:
        The statistics, and the JSON object `calibration` of the result.

    Raises:
        ModelError: onnxruntime cannot run the model.
        DataError: The data is empty, or cannot be used.
    """
    from calibration import Focus, collect
    from calibration.options import YOLO_PREPROCESS

    if data is None:
        raise DataError(
            "no calibration data; give a folder of images (`data`) or a table of ranges "
            "(`calib_table`)",
            code="missing-argument",
            parameter="data",
        )
    tensors = list(dict.fromkeys(t for g in groups for t in g.sources))
    scores = find_class_outputs(model)
    statistics = collect(
        model,
        data,
        tensors,
        cache=cache.calib_cache,
        overwrite_cache=cache.overwrite_cache,
        progress=progress,
        preprocess=images.preprocess or YOLO_PREPROCESS,
        max_images=max_images,
        size=images.size,
        focus=Focus(scores) if scores else None,
        cluster=cluster.cluster,
        mixed_cpus=cluster.mixed_cpus,
    )
    report: Json = {
        "images": statistics.images,
        "data": str(data) if isinstance(data, str | os.PathLike) else "",
        "tensors": len(tensors),
        "preprocess": statistics.preprocessing,
        "focus": list(scores),
        "fingerprint": statistics.fingerprint,
        "cache": os.fspath(cache.calib_cache) if cache.calib_cache is not None else None,
        "skipped": [{"file": name, "reason": reason} for name, reason in statistics.skipped],
        "warnings": list(statistics.warnings),
        "notes": list(statistics.notes),
    }
    return statistics, report


def read_table_scales(
    path: str | os.PathLike[str],
    groups: Sequence[ScaleGroup],
    model: Model,
    number_format: NumberFormat = INT8,
) -> tuple[list[GroupScale], Json]:
    """Return the scales of all groups from a table, and the JSON `calibration` of the result.

    A group gets the largest of the scales of its tensors, unless the largest value of the group
    does not depend on the data. :mod:`calibration.range_tables` describes the formats of tables.
    The table has INT8 scales. FP8 scales are computed for the same ranges.

    Raises:
        DataError: The table cannot be read, has an implausible scale, or lacks a scale for a group.
    """
    from calibration.range_tables import read_range_table

    source = read_range_table(path)
    table = source.scales
    limit = find_implausible_limit(table.values())
    result = []
    missing = []
    for group in groups:
        scales = {t: table[t] for t in group.tensors if table.get(t, 0.0) > 0.0}
        if group.largest is not None:
            result.append(constant_scale(group, group.largest, number_format))
        elif scales:
            for tensor, scale in scales.items():
                _check_table_scale(tensor, scale, limit, path)
            sources = {t: scale * LEVELS for t, scale in scales.items() if t in group.sources}
            members = tuple(GroupMember(t, amax, 0.0) for t, amax in sources.items())
            scale = clamp_scale(max(scales.values()) * LEVELS / number_format.largest)
            result.append(GroupScale(group, scale, "table", members))
        else:
            missing.append(group.quantized[0])
    tensors = {*model.producers, *model.inputs, *model.initializers}
    if missing:
        _raise_missing_scale(missing, source, tensors, path)
    unknown = [t for t in table if t not in tensors]
    report: Json = {
        "table": os.fspath(path),
        "images": 0,
        "format": source.format,
        "entries": len(table),
        "unknown": len(unknown),
        "skipped_entries": len(source.skipped),
        "notes": _note_ignored_entries(source, unknown),
    }
    return result, report


def _raise_missing_scale(
    missing: Sequence[str], source: RangeTable, tensors: set[str], path: str | os.PathLike[str]
) -> NoReturn:
    """Raise the error for tensors that the table has no scale for.

    `missing` has one quantized tensor for each group without a scale. `tensors` has all tensors of
    the model.
    """
    first, table, code = shorten_text(missing[0]), source.scales, "missing-scale"
    if table and tensors.isdisjoint(table):
        code = "other-model"
        reason = (
            f"no tensor of the table (such as '{shorten_text(next(iter(table)))}') is in the "
            "model, so the table belongs to another model or export. Give the table of this "
            "export, or images"
        )
    elif missing[0] in source.skipped:
        reason = (
            f"the entry of tensor '{first}' is not a single 8-bit scale: it is for another number "
            f"of bits, for a float type or for each channel, as {len(source.skipped)} of "
            f"{len(table) + len(source.skipped)} entries are. Export one 8-bit range for each "
            "tensor, or give images"
        )
    else:
        reason = (
            f"has no scale for {format_count(len(missing), 'quantized tensor')}, such as "
            f"'{first}'. Leave the consumers of such tensors in float with `exclude`, or give "
            "images"
        )
    raise DataError(
        reason,
        os.fspath(path),
        code=code,
        parameter="calib_table",
        node="" if code == "other-model" else missing[0],
    )


def _check_table_scale(
    tensor: str, scale: float, limit: float, path: str | os.PathLike[str]
) -> None:
    if min(limit, SMALLEST_SCALE) < scale <= LARGEST_SCALE:
        return
    raise DataError(
        f"scale {scale:g} of tensor '{shorten_text(tensor)}' (range +-{scale * LEVELS:g}) is "
        "implausible, because the quantizer was not calibrated or training diverged. Calibrate "
        "again",
        os.fspath(path),
        code="invalid-scale",
        parameter="calib_table",
        node=tensor,
    )


def _note_ignored_entries(source: RangeTable, unknown: Sequence[str]) -> list[Note]:
    notes = []
    count = len(source.scales)
    if unknown:
        notes.append(
            Note(
                f"the model lacks {len(unknown)} of {format_count(count, 'tensor')} in the table, "
                f"such as '{shorten_text(unknown[0])}'; the entries were ignored",
                code="table-unknown-tensors",
                count=len(unknown),
                first=unknown[0],
            )
        )
    if source.skipped:
        notes.append(
            Note(
                "entries of the table without a single 8-bit scale were ignored: "
                f"{len(source.skipped)}, such as '{shorten_text(source.skipped[0])}'",
                code="table-skipped-entries",
                count=len(source.skipped),
                first=source.skipped[0],
            )
        )
    return notes


def write_table(insertion: Insertion, path: str | os.PathLike[str]) -> CacheReport:
    """Write a TensorRT calibration table with the scales of the float network's tensors.

    ``IInt8Calibrator::readCalibrationCache`` reads the file. The first line names the target's
    TensorRT version. For tensors without a Q, the scales follow from the rules of
    :mod:`qdqtool.insertion.calibration_cache`, or are measured if the calibration data can be read
    again.

    Returns:
        A report with the scales of the table, the tensors without a scale, and layer precisions for
        trtexec.

    Raises:
        QdqtoolError: The target cannot read a calibration table, or the file cannot be written.
        DataError: The format of a table does not allow a scale or a tensor name.
    """
    from qdqtool.insertion.calibration_cache import (
        cache_header,
        choose_precisions,
        measure_scales,
        write_cache,
    )
    from qdqtool.patterns.view import View

    target = insertion.named_target
    cache_header(target)  # raises the error of an unsupported target before the long measurement
    quantized = Model(insertion.model)
    smoothed = {tensor for entry in insertion.smoothed for tensor in entry.tensors}
    factor = find_number_format(insertion.precision).largest / LEVELS
    quantizer_scales = {
        q.tensor: q.scale * factor
        for q in insertion.activations
        if not isinstance(q.scale, list) and q.tensor not in smoothed
    }
    model = quantized if insertion.load_float_model is None else insertion.load_float_model()
    scales = measure_scales(model, quantizer_scales, insertion.measure_scales)
    view = View(quantized)
    int8 = {n.name for n in view.nodes_with_weights if n.index in view.fully_quantized_nodes}
    precisions = choose_precisions(model, scales, int8)
    return write_cache(path, insertion.source, target, scales, precisions)
