"""Signs that a network is not a YOLO-like detector, so that it needs other inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_dfl
from qdqtool.patterns.input_values import find_normalized_inputs, warn_own_normalization
from qdqtool.patterns.layernorm import find_decomposed_layer_norms
from qdqtool.util.notes import Note

_NORMS = ("LayerNormalization", "LayerNorm", "SkipLayerNormalization", "RMSNormalization")
_MIN_NORMS = 2  # one normalization may be part of any head
_SUPPRESSION = ("NonMaxSuppression", "EfficientNMS_TRT", "BatchedNMS_TRT", "EfficientNMSX_TRT")
_POOLINGS = ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ReduceMean")
_HEAD = (
    *("Softmax", "LogSoftmax", "Sigmoid", "Gemm", "MatMul", "Add", "Flatten", "Reshape", "Squeeze"),
    *("Conv", "Relu", "HardSwish", "Dropout", "Identity", "Cast", "ArgMax", "TopK"),
)
_MAX_HEAD = 24
_DENSE_STRIDE = 4  # maximum stride of a dense output; heads of detectors have strides of 8 and more
_ULTRALYTICS = ("names", "stride", "imgsz")  # metadata keys of its exports, next to `task`
_ROWS = 2  # rank of boxes without a batch
_MAPS = 4  # rank of images and feature maps


def describe_other_kind(model: Model) -> str | None:
    """Return why a network is probably not a YOLO-like detector; None if it may be one."""
    task = model.metadata.get("task", "")
    if task == "classify":
        return "the model's metadata has task=classify"
    if "task" in model.metadata or find_dfl(model):
        return None
    ops = {node.op for node in model.nodes}
    if not ops.isdisjoint(_SUPPRESSION):
        return None
    first = f"the network's output '{model.outputs[0]}'" if model.outputs else ""
    for name in model.outputs:
        if _ends_in_pooling(model, name):
            return f"output '{name}' comes from a global pooling, as in a classifier"
    shapes = [model.shape(name) for name in model.outputs]
    if any(shape is None for shape in shapes):
        return _describe_transformer(model)
    known = [shape for shape in shapes if shape is not None]
    if known and all(_has_no_batch(model, shape) for shape in known):
        return f"{first} has rows without a batch, as in SCRFD"
    if known and all(_has_no_positions(shape) for shape in known):
        shape = ", ".join("?" if size is None else str(size) for size in known[0])
        return f"{first} [{shape}] has no positions, as in a classifier"
    if known and all(_is_dense(model, shape) for shape in known):
        return f"{first} is a dense map, as in segmentation"
    return _describe_transformer(model)


def _ends_in_pooling(model: Model, tensor: str) -> bool:
    """Return whether an output follows a pooling, with only classifier layers in between."""
    for _ in range(_MAX_HEAD):
        node = model.producer(tensor)
        if node is None:
            return False
        if node.op in _POOLINGS:
            return True
        if node.op not in _HEAD and not (qdq.is_q(node) or qdq.is_dq(node)):
            return False
        tensor = next((name for name in node.inputs if name and not model.is_constant(name)), "")
    return False


def _has_no_batch(model: Model, shape: tuple[int | None, ...]) -> bool:
    """Return whether an output has rows of anchors, such as [12800, 4]."""
    batches = {s[0] for s in map(model.shape, model.inputs) if s}
    return (
        len(shape) == _ROWS
        and bool(shape[0])
        and None not in batches | {shape[0]}
        and shape[0] not in batches
    )


def _has_no_positions(shape: tuple[int | None, ...]) -> bool:
    """Return whether an output is one vector per image: [1, 1000] or [1, 512, 1, 1]."""
    return len(shape) <= 2 or (len(shape) == _MAPS and shape[2:] == (1, 1))


def _is_dense(model: Model, shape: tuple[int | None, ...]) -> bool:
    """Return whether an output has a value for each block of 4 x 4 pixels, or finer."""
    inputs = [model.shape(name) for name in model.inputs]
    sides = [s[2] for s in inputs if s is not None and len(s) == _MAPS and s[2]]
    if not sides or len(shape) not in (3, _MAPS) or not shape[-2] or not shape[-1]:
        return False
    is_map = len(shape) == _MAPS or shape[-1] > sides[0] // _DENSE_STRIDE
    return is_map and sides[0] // _DENSE_STRIDE <= shape[-2] <= 4 * sides[0]


def _describe_transformer(model: Model) -> str | None:
    norms = [node for node in model.nodes if node.op in _NORMS]
    count = len(norms) or len(find_decomposed_layer_norms(model))
    if count < _MIN_NORMS:
        return None
    return f"the network has {count} layer normalizations, as in a transformer"


def warn_preprocess(model: Model, used: Mapping[str, Any]) -> list[Note]:
    """Return warnings about the preprocessing of a run that does not fit the network.

    Args:
        model: The network, with or without Q/DQ.
        used: The preprocessing, as in the JSON of the run.
    """
    own = warn_own_normalization(model, used)
    return own or warn_default_preprocess(model, used.get("origin", "option"))


def warn_default_preprocess(model: Model, origin: str) -> list[Note]:
    """Return a warning if images of another kind of network were prepared as for YOLO.

    Args:
        model: The network.
        origin: Who chose the preprocessing, see :class:`calibration.presets.PreprocessChoice`.
    """
    metadata = model.metadata
    kind = describe_other_kind(model)
    if origin == "function":
        kind = "the model was calibrated with a preprocessing function"
    is_ultralytics = origin == "metadata" and not metadata.keys().isdisjoint(_ULTRALYTICS)
    if origin in ("option", "model") or is_ultralytics or kind is None:
        return []
    used = "`preprocess='yolo'` (letterbox, RGB, divided by 255) is the default"
    if origin == "metadata":
        used = "`preprocess='ultralytics-classify'` (center crop, divided by 255) was assumed"
    example = "`preprocess='imagenet'` (resize, center crop, mean and std)"
    if find_normalized_inputs(model):
        example = "`preprocess='ultralytics-classify'` (center crop, without mean and std)"
    return [
        Note(
            f"preprocessing: {used}, but {kind}. The ranges fit only images that are prepared as "
            f"in the deployment: give the preprocessing of the deployment, such as {example} "
            "(docs/insert.md lists all presets)",
            code="default-preprocess",
            kind=kind,
        )
    ]
