"""Ranges of activations: from calibration data, or from a TensorRT calibration table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qdqtool.errors import DataError
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
from qdqtool.types import Json

if TYPE_CHECKING:
    from calibration import Statistics
    from qdqtool.insertion.result import Insertion

_NO_CACHE = CacheOptions()
_NO_CLUSTER = ClusterOptions()


def collect_statistics(
    model: Model,
    data: object,
    groups: Sequence[ScaleGroup],
    *,
    max_images: int,
    images: ImageOptions = DEFAULT_IMAGES,
    cache: CacheOptions = _NO_CACHE,
    cluster: ClusterOptions = _NO_CLUSTER,
    progress: bool = False,
) -> tuple[Statistics, Json]:
    """Run the model over the data and return the statistics of the groups' sources.

    Returns:
        The statistics, and what the result reports of the calibration.

    Raises:
        ModelError: onnxruntime cannot run the model.
        DataError: The data is not usable.
    """
    from calibration import Focus, collect
    from calibration.options import YOLO_PREPROCESS

    if data is None:
        raise DataError(
            "no calibration data; give a folder of images (`data`) or a TensorRT table "
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
    number_format: NumberFormat = INT8,
) -> list[GroupScale]:
    """Return the scales of all groups from a TensorRT calibration table.

    A group takes the largest of its tensors' scales. The table has scales of INT8, so that FP8
    covers the same ranges.

    Raises:
        DataError: The table cannot be read, or has no entry for a group.
    """
    from calibration.cache import read_tensorrt_cache

    table = read_tensorrt_cache(path)
    result = []
    for group in groups:
        if group.largest is not None:
            result.append(constant_scale(group, group.largest, number_format))
            continue
        scales = {t: table[t] for t in group.tensors if table.get(t, 0.0) > 0.0}
        if not scales:
            raise DataError(
                f"has no scale for tensor '{group.quantized[0]}'",
                os.fspath(path),
                code="missing-scale",
                parameter="calib_table",
                node=group.quantized[0],
            )
        members = tuple(
            GroupMember(t, scale * LEVELS, 0.0) for t, scale in scales.items() if t in group.sources
        )
        scale = clamp_scale(max(scales.values()) * LEVELS / number_format.largest)
        result.append(GroupScale(group, scale, "table", members))
    return result


def write_table(insertion: Insertion, path: str | os.PathLike[str]) -> None:
    """Write the activation scales as a TensorRT calibration table.

    ``IInt8Calibrator::readCalibrationCache`` reads it.

    Raises:
        QdqtoolError: The file cannot be written.
    """
    from calibration.cache import write_tensorrt_cache

    factor = find_number_format(insertion.precision).largest / LEVELS
    scales = {
        q.tensor: q.scale * factor for q in insertion.activations if not isinstance(q.scale, list)
    }
    write_tensorrt_cache(path, scales)
