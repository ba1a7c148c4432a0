"""Between placement and the calibration package: which tensors to look at, and what to report of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qdqtool.errors import DataError
from qdqtool.insertion.attention import class_outputs
from qdqtool.insertion.groups import ScaleGroup
from qdqtool.insertion.options import Images, Kept, Workers
from qdqtool.insertion.scales import LEVELS, GroupScale, Member, known_scale, positive
from qdqtool.model.graph import Model
from qdqtool.types import Json

if TYPE_CHECKING:
    from calibration import Statistics
    from qdqtool.insertion.result import Insertion


def collect_for(
    model: Model,
    data: object,
    groups: Sequence[ScaleGroup],
    *,
    max_images: int,
    images: Images | None = None,
    kept: Kept | None = None,
    workers: Workers | None = None,
    progress: bool = False,
) -> tuple[Statistics, Json]:
    """Runs the model over the data and returns statistics of the groups' sources, and what to report.

    Raises:
        ModelError: onnxruntime cannot run the model.
        DataError: There is no usable data.
    """
    from calibration import Focus, Preprocess, collect

    if data is None:
        raise DataError("no calibration data; give a folder of images (`data`) or a TensorRT table (`calib_table`)")
    images, kept, workers = images or Images(), kept or Kept(), workers or Workers()
    tensors = list(dict.fromkeys(t for g in groups for t in g.sources))
    scores = class_outputs(model)
    statistics = collect(
        model, data, tensors, cache=kept.calib_cache, overwrite_cache=kept.overwrite_cache, progress=progress,
        preprocess=images.preprocess or Preprocess(), max_images=max_images, size=images.size,
        focus=Focus(scores) if scores else None, cluster=workers.cluster, mixed_cpus=workers.mixed_cpus,
    )  # fmt: skip
    report: Json = {
        "images": statistics.images,
        "data": str(data) if isinstance(data, str | os.PathLike) else "",
        "tensors": len(tensors),
        "focus": list(scores),
        "fingerprint": statistics.fingerprint,
        "cache": os.fspath(kept.calib_cache) if kept.calib_cache is not None else None,
        "skipped": [{"file": name, "reason": reason} for name, reason in statistics.skipped],
        "warnings": list(statistics.warnings),
        "notes": list(statistics.notes),
    }
    return statistics, report


def scales_from_table(path: str | os.PathLike[str], groups: Sequence[ScaleGroup]) -> list[GroupScale]:
    """Scales of all groups from a TensorRT calibration table; a group takes the largest of its tensors' scales.

    Raises:
        DataError: The table cannot be read, or has no entry for a group.
    """
    from calibration.cache import read_tensorrt_cache

    table = read_tensorrt_cache(path)
    result = []
    for group in groups:
        if group.largest is not None:
            result.append(known_scale(group, group.largest))
            continue
        known = {t: table[t] for t in group.tensors if table.get(t, 0.0) > 0.0}
        if not known:
            raise DataError(f"{path}: has no scale for tensor '{group.quantized[0]}'")
        scale = positive(max(known.values()))
        members = tuple(Member(t, s * LEVELS, 0.0) for t, s in known.items() if t in group.sources)
        result.append(GroupScale(group, scale, "table", members))
    return result


def write_table(insertion: Insertion, path: str | os.PathLike[str]) -> None:
    """Writes the activation scales as a TensorRT calibration table (``IInt8Calibrator::readCalibrationCache``).

    Raises:
        QdqtoolError: The file cannot be written.
    """
    from calibration.cache import write_tensorrt_cache

    scales = {q.tensor: q.scale for q in insertion.activations if not isinstance(q.scale, list)}
    write_tensorrt_cache(path, scales)
