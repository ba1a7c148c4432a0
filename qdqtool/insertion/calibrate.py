"""Between placement and the calibration package: which tensors to look at, with which inputs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from qdqtool.errors import DataError, ModelError
from qdqtool.graph import Model
from qdqtool.insertion.groups import ScaleGroup
from qdqtool.insertion.scales import LEVELS, GroupScale, Member, positive
from qdqtool.types import Json

if TYPE_CHECKING:
    from calibration.images import Dataset, InputSpec, Preprocess
    from calibration.statistics import Statistics

Size = int | tuple[int, int] | None


def input_specs(model: Model) -> list[InputSpec]:
    """The model's inputs as calibration needs them: name, shape (None for an open dimension), numpy type.

    Raises:
        ModelError: An input is not a tensor of a known type.
    """
    from calibration.images import InputSpec

    specs = []
    for value in model.proto.graph.input:
        if value.name not in model.inputs:
            continue
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not tensor.HasField("shape") or not tensor.elem_type:
            raise ModelError(f"{model.path or 'model'}: input '{value.name}' has no known shape or type")
        shape = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in tensor.shape.dim)
        try:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        except (KeyError, ValueError):
            name = onnx.TensorProto.DataType.Name(tensor.elem_type)
            raise ModelError(f"{model.path or 'model'}: input '{value.name}' is of type {name}") from None
        specs.append(InputSpec(value.name, shape, dtype))
    return specs


def image_size(model: Model, size: Size) -> tuple[int, int] | None:
    """Height and width in pixels for open dimensions: what the user says, else ``imgsz`` from the metadata.

    Raises:
        DataError: ``size`` is not positive.
    """
    if size is None:
        try:
            size = json.loads(model.metadata.get("imgsz", "null"))
        except ValueError:
            return None
    pair = [size, size] if isinstance(size, int) else list(size or ())
    if not pair:
        return None
    if len(pair) != 2 or not all(isinstance(v, int) and v > 0 for v in pair):
        raise DataError(f"image size {size} is not one or two positive numbers")
    return pair[0], pair[1]


def collect_for(
    model: Model,
    data: str | os.PathLike[str] | Dataset | None,
    groups: Sequence[ScaleGroup],
    *,
    max_images: int,
    preprocess: Preprocess | None,
    size: Size,
    cache: str | os.PathLike[str] | None,
    progress: bool,
) -> tuple[Statistics, Json]:
    """Runs the model over the data and returns statistics of the groups' sources, and what to report.

    Raises:
        DataError: There is no usable data.
    """
    from calibration import collect
    from calibration.images import Preprocess, open_data

    if data is None:
        raise DataError("no calibration data; give a folder of images (--calib) or a TensorRT table (--calib-table)")
    dataset = open_data(data, input_specs(model), preprocess or Preprocess(), max_images, image_size(model, size))
    tensors = list(dict.fromkeys(t for g in groups for t in g.sources))
    statistics = collect(model.proto, dataset, tensors, cache=cache, progress=progress)
    report: Json = {
        "images": statistics.images,
        "data": str(data) if isinstance(data, str | os.PathLike) else "",
        "tensors": len(tensors),
        "fingerprint": statistics.fingerprint,
        "cache": os.fspath(cache) if cache is not None else None,
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
        known = {t: table[t] for t in group.tensors if table.get(t, 0.0) > 0.0}
        if not known:
            raise DataError(f"{path}: has no scale for tensor '{group.quantized[0]}'")
        scale = positive(max(known.values()))
        members = tuple(Member(t, s * LEVELS, 0.0) for t, s in known.items() if t in group.sources)
        result.append(GroupScale(group, scale, "table", members))
    return result
