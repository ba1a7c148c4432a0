"""Description of a model, and shapes of inputs with dynamic dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import onnx

from qdqtool.ir.branches import count_subgraphs
from qdqtool.ir.graph import Model
from qdqtool.ir.metadata import INPUT_SIZE, is_marked_part, set_metadata
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import find_bfloat16, precision_of, states_float16
from qdqtool.proto.slim import strip_large_weights
from qdqtool.util.json_text import Json

_DEFAULT_SIZE = (640, 640)
_SIZE_KEYS = (INPUT_SIZE, "imgsz")  # Ultralytics writes the second key.
_IMAGE_SIZE = r"[\[(]?\s*(\d{1,5})\s*[,x]\s*(\d{1,5})\s*[\])]?|(\d{1,5})"
_MAX_SIDE = 1 << 16


def metadata_size(model: Model) -> tuple[int, int] | None:
    """Return height and width in pixels from the metadata; None if missing or invalid."""
    key = metadata_size_key(model)
    return _read_size(model, key) if key else None


def metadata_size_key(model: Model) -> str:
    """Return the metadata key of the height and width; empty if missing or invalid."""
    return next((key for key in _SIZE_KEYS if _read_size(model, key) is not None), "")


def _read_size(model: Model, key: str) -> tuple[int, int] | None:
    match = re.fullmatch(_IMAGE_SIZE, model.metadata.get(key, "").strip())
    if match is None:
        return None
    height, width = int(match[1] or match[3]), int(match[2] or match[3])
    if min(height, width) > 0 and max(height, width) <= _MAX_SIDE:
        return height, width
    return None


def image_shapes(model: Model) -> dict[str, tuple[int | None, int | None]]:
    """Return height and width of each four-dimensional input; None for a dynamic side."""
    shapes = {}
    for name in model.inputs:
        shape = [d if d is not None and d > 0 else None for d in model.shape(name) or ()]
        if len(shape) == 4:
            height, width = shape[side_axes(shape)]
            shapes[name] = height, width
    return shapes


def has_dynamic_size(model: Model) -> bool:
    """Return whether height or width of an image input is dynamic."""
    return any(None in sides for sides in image_shapes(model).values())


def find_common_size(*models: Model) -> tuple[int, int] | None:
    """Return the image size at which versions of one network are compared; None if unknown.

    A fixed size of a version comes first, then the size that ``insert`` or ``tune`` recorded, then
    the size that the exporter recorded. Earlier models come before later ones.
    """
    for model in models:
        fixed_sizes = set(image_shapes(model).values())
        if len(fixed_sizes) == 1:
            height, width = fixed_sizes.pop()
            if height and width:
                return height, width
    sizes = (_read_size(model, key) for key in _SIZE_KEYS for model in models)
    return next((size for size in sizes if size is not None), None)


def with_size(model: Model, size: tuple[int, int] | None) -> Model:
    """Return the model with a size in its metadata, if its image size is dynamic.

    The result is a copy, or the model itself if nothing changes.
    """
    if size is None or not has_dynamic_size(model) or metadata_size(model) == size:
        return model
    sized = model.copy()
    sized.sha256 = model.sha256
    store_image_size(sized, size)
    return sized


def is_channels_last(shape: Sequence[int | None]) -> bool:
    """Return whether the last of four axes has size 1 or 3, and the second axis does not."""
    return shape[3] in (1, 3) and shape[1] not in (1, 3)


def side_axes(shape: Sequence[int | None]) -> slice:
    """Return the axes of height and width of an NCHW or NHWC shape."""
    return slice(1, 3) if is_channels_last(shape) else slice(2, 4)


def store_image_size(model: Model, size: tuple[int, int] | None) -> None:
    """Write height and width into the metadata if they are dynamic in an input."""
    if size is None or not has_dynamic_size(model):
        return
    set_metadata(model.proto, INPUT_SIZE, str(list(size)))


def complete_shapes(model: Model, batch: int = 1) -> dict[str, tuple[int, ...]]:
    """Return a complete shape for each input with dynamic dimensions.

    A dynamic first dimension becomes `batch`. Dynamic height and width of a four-dimensional input
    are taken from the metadata, and are 640 without metadata. Other dynamic dimensions become 1.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in model.inputs:
        shape = model.shape(name)
        if shape is None or all(map(_is_fixed, shape)):
            continue
        defaults = [batch, *([1] * (len(shape) - 1))]
        if len(shape) == 4:
            defaults[side_axes(shape)] = metadata_size(model) or _DEFAULT_SIZE
        # Some exporters write 0 or -1 for a dynamic dimension.
        shapes[name] = tuple(
            size if _is_fixed(size) else default
            for size, default in zip(shape, defaults, strict=True)
        )
    return shapes


def _is_fixed(size: int | None) -> TypeGuard[int]:
    return size is not None and size > 0


def set_input_shapes(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Set the shapes of inputs in place, and remove the stated shapes of all other tensors."""
    del proto.graph.value_info[:]
    for value in proto.graph.input:
        if value.name in shapes:
            # The whole shape is replaced, because the input may have declared another rank.
            tensor_shape = value.type.tensor_type.shape
            del tensor_shape.dim[:]
            tensor_shape.dim.extend(
                onnx.TensorShapeProto.Dimension(dim_value=d) for d in shapes[value.name]
            )
    for value in proto.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")


def resolve_output_shapes(model: Model) -> Model:
    """Return the model with complete input shapes if it states an output shape incompletely.

    All shapes of the copy follow from the input shapes of :func:`complete_shapes`. The copy has no
    data of large weights.
    """
    if all(None not in (model.shape(name) or (None,)) for name in model.outputs):
        return model
    proto = strip_large_weights(model.proto)
    set_input_shapes(proto, complete_shapes(model))
    return Model(proto, model.path, sha256=model.sha256)


@dataclass(slots=True)
class ModelInfo:
    """The model that a result refers to.

    Attributes:
        path: Path of the file, empty for a model in memory.
        sha256: Hash of the file.
        opset: Opset version; 0 if the file states none.
        nodes: Number of nodes.
        open_inputs: Shape of each input with dynamic dimensions: -1 for a dynamic batch, and the
            size to build for in place of other dynamic dimensions.
        has_bfloat16: Whether the model has bfloat16 tensors.
        has_float16: Whether the model has float16 tensors.
        assumed_size: Height and width that were assumed, because they are dynamic and the metadata
            does not state them; None if they are known.
        subgraphs: Numbers of ``convolutions``, ``matrix_products`` and ``quantizers`` in branches
            of If and bodies of Loop and Scan, which are not analyzed. Can be empty.
        input_types: Data types of the network's inputs.
        is_part: Whether the model is marked as a part of another model, without its head.
    """

    path: str
    sha256: str
    opset: int
    nodes: int
    open_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_bfloat16: bool = False
    subgraphs: Mapping[str, int] = field(default_factory=dict)
    assumed_size: tuple[int, int] | None = None
    input_types: tuple[Precision, ...] = ()
    is_part: bool = False
    has_float16: bool = False

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "path": self.path,
            "sha256": self.sha256,
            "opset": self.opset,
            "nodes": self.nodes,
            "open_inputs": {name: list(shape) for name, shape in self.open_inputs.items()},
            "subgraphs": dict(self.subgraphs),
        }


def describe_model(model: Model) -> ModelInfo:
    """Describe the model that a result refers to."""
    return ModelInfo(
        model.path,
        model.sha256,
        model.opset,
        len(model.nodes),
        complete_shapes(model, batch=-1),
        bool(find_bfloat16(model)),
        count_subgraphs(model),
        _DEFAULT_SIZE if has_dynamic_size(model) and metadata_size(model) is None else None,
        tuple(precision_of(model.elem_type(name)) for name in model.inputs),
        is_marked_part(model),
        states_float16(model),
    )
