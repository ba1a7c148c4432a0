"""Recognition of networks that are not YOLO-like detectors and need another preprocessing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.input_shapes import is_channels_last, resolve_output_shapes, side_axes
from qdqtool.ir.operators import CONVOLUTIONS
from qdqtool.patterns.heads import find_dfl
from qdqtool.patterns.input_values import find_normalized_inputs, warn_own_normalization
from qdqtool.patterns.layernorm import find_decomposed_layer_norms
from qdqtool.util.notes import Note
from qdqtool.util.text import format_list

_NORMS = ("LayerNormalization", "LayerNorm", "SkipLayerNormalization", "RMSNormalization")
_MIN_NORMS = 2  # minimum number in a transformer; other networks may have one LayerNorm
_SUPPRESSION = ("NonMaxSuppression", "EfficientNMS_TRT", "BatchedNMS_TRT", "EfficientNMSX_TRT")
_POOLINGS = ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ReduceMean")
_UPSCALING = ("Resize", "Upsample", "ConvTranspose", "DepthToSpace")
_HEAD = (
    *("Softmax", "LogSoftmax", "Sigmoid", "Gemm", "MatMul", "Add", "Flatten", "Reshape", "Squeeze"),
    *("Conv", "Relu", "HardSwish", "Dropout", "Identity", "Cast", "ArgMax", "TopK"),
)
_MOVES = ("Identity", "Cast", "Transpose", "Softmax", "Sigmoid", "ArgMax", "Squeeze")
_HEAD_ENDS = (*CONVOLUTIONS, *_UPSCALING, "Concat")  # last operators of heads, not of backbones
_MAX_HEAD = 24
_DENSE_STRIDE = 4  # maximum stride of a dense output; heads of detectors have strides of 8 and more
_MAP_STRIDE = 16  # maximum stride of a single map; YOLOv2 has a single map of stride 32
_MIN_PATCH = 4  # minimum side in pixels of the patches of a transformer's first convolution
_MIN_FEATURES = 64  # minimum number of channels of a backbone's feature map
_MIN_LINE = 2.5  # minimum ratio of width to height of an image that shows a line of text
_ULTRALYTICS = ("names", "stride", "imgsz")  # metadata keys of Ultralytics, in addition to `task`
_DETECTING = ("detect", "segment", "pose", "obb")  # tasks of Ultralytics with YOLO's preprocessing
_SCALE_TOLERANCE = 0.01  # of the largest prepared value, which is 1
_ROWS = 2  # rank of boxes without a batch
_TOKENS = 3  # rank of sequences and boxes
_MAPS = 4  # rank of images and feature maps

_Shape = tuple[int | None, ...]


class NetworkKind(StrEnum):
    """Kind of a network; the value is the usual preprocessing of this kind, for messages."""

    CLASSIFIER = "`preprocess='imagenet'` (resize, center crop, mean and std)"
    MAP = "`preprocess='imagenet-stretch'` (whole image, mean and std)"
    IMAGE = "`preprocess='rtdetr'` (whole image, 0 to 1) or `preprocess='none'` (0 to 255)"
    TRANSFORMER = "`preprocess='imagenet'`, `'vit'`, `'clip'` or `'imagenet-stretch'`"
    DETR = "`preprocess='detr'` (mean and std) or `preprocess='rtdetr'` (0 to 1)"
    ROWS = "`preprocess='scrfd'`"
    TEXT = "`preprocess='inception'` (-1 to 1), or npz files"
    CHANNELS = "npz files with inputs of the deployment"


@dataclass(frozen=True)
class NonDetectorKind:
    """Kind of a network that is probably not a YOLO-like detector, and the reason."""

    kind: NetworkKind
    reason: str


def find_non_detector_kind(model: Model) -> NonDetectorKind | None:
    """Return the kind of a network that is not a YOLO-like detector; None if it may be one."""
    task = model.metadata.get("task", "")
    if task == "classify":
        return NonDetectorKind(NetworkKind.CLASSIFIER, "the model's metadata has task=classify")
    if task in _DETECTING or find_dfl(model):
        return None
    if not {node.op for node in model.nodes}.isdisjoint(_SUPPRESSION):
        return None
    resolved = resolve_output_shapes(model)
    checks = (
        _find_single_channel,
        _find_classifier,
        _find_map_network,
        _find_transformer,
        _find_token_network,
    )
    kinds = (check(resolved) for check in checks)
    return next((kind for kind in kinds if kind is not None), None)


def _image_shapes(model: Model) -> dict[str, _Shape]:
    shapes = {name: model.shape(name) for name in model.inputs}
    return {name: s for name, s in shapes.items() if s is not None and len(s) == _MAPS}


def _output_shapes(model: Model) -> list[_Shape] | None:
    shapes = [model.shape(name) for name in model.outputs]
    known = [shape for shape in shapes if shape is not None]
    return known if known and len(known) == len(shapes) else None


def _channel_count(shape: _Shape) -> int | None:
    return shape[3] if is_channels_last(shape) else shape[1]


def _image_sides(shape: _Shape) -> tuple[int, int] | None:
    height, width = shape[side_axes(shape)]
    return (height, width) if height and width else None


def _find_single_channel(model: Model) -> NonDetectorKind | None:
    for name, shape in _image_shapes(model).items():
        channels = _channel_count(shape)
        if channels == 1:
            return NonDetectorKind(
                NetworkKind.CHANNELS,
                f"input '{name}' has one channel, like a gray image or a spectrogram",
            )
    return None


# Classifiers and rows -------------------------------------------------------------------------


def _find_classifier(model: Model) -> NonDetectorKind | None:
    for name in model.outputs:
        if _ends_in_pooling(model, name):
            return NonDetectorKind(
                NetworkKind.CLASSIFIER,
                f"output '{name}' comes from a global pooling, as in a classifier",
            )
    shapes = _output_shapes(model)
    if shapes is None:
        return None
    first = f"the network's output '{model.outputs[0]}'"
    if all(_has_no_batch_axis(model, shape) for shape in shapes):
        return NonDetectorKind(
            NetworkKind.ROWS, f"{first} has rows without a batch axis, as in SCRFD"
        )
    if all(_has_no_positions(shape) for shape in shapes):
        text = ", ".join("?" if size is None else str(size) for size in shapes[0])
        return NonDetectorKind(
            NetworkKind.CLASSIFIER, f"{first} [{text}] has no height and width, as in a classifier"
        )
    return None


def _ends_in_pooling(model: Model, tensor: str) -> bool:
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


def _has_no_batch_axis(model: Model, shape: _Shape) -> bool:
    """Return whether an output has rows of anchors without a batch axis, such as [12800, 4]."""
    batches = {s[0] for s in map(model.shape, model.inputs) if s}
    return (
        len(shape) == _ROWS
        and bool(shape[0])
        and None not in batches | {shape[0]}
        and shape[0] not in batches
    )


def _has_no_positions(shape: _Shape) -> bool:
    """Return whether an output is one vector per image: [1, 1000] or [1, 512, 1, 1]."""
    return len(shape) <= 2 or (len(shape) == _MAPS and shape[2:] == (1, 1))


# Maps -----------------------------------------------------------------------------------------


def _find_map_network(model: Model) -> NonDetectorKind | None:
    shapes, images = _output_shapes(model), list(_image_shapes(model).values())
    if shapes is None or not images or any(len(shape) != _MAPS for shape in shapes):
        return None
    first, sides = f"the network's output '{model.outputs[0]}'", _image_sides(images[0])
    strides = [_stride(sides, shape) for shape in shapes]
    if None in strides:
        return _find_upscaled_map(model) if len(shapes) == 1 else None
    known_strides = [stride for stride in strides if stride is not None]
    channels = _channel_count(images[0])
    if max(known_strides) <= 1 and all(_channel_count(shape) == channels for shape in shapes):
        return NonDetectorKind(
            NetworkKind.IMAGE, f"{first} is an image, as in super-resolution or restoration"
        )
    if _are_features(model, shapes, known_strides):
        return NonDetectorKind(
            NetworkKind.CLASSIFIER, f"{first} is a feature map, as in a backbone"
        )
    if max(known_strides) <= _largest_map_stride(model):
        return NonDetectorKind(
            NetworkKind.MAP, f"{first} is a map, as in segmentation, depth or pose"
        )
    return None


def _largest_map_stride(model: Model) -> int:
    is_single = len(model.outputs) == 1 and _last_operator(model) != "Concat"
    return _MAP_STRIDE if is_single else _DENSE_STRIDE


def _stride(sides: tuple[int, int] | None, shape: Sequence[int | None]) -> float | None:
    """Return the ratio of the image size to a feature map's size; None if it is unknown.

    The ratio is unknown if no image size is given, or if height and width give different ratios.
    Height and width of a map are its last two axes, or the two axes before the channels.
    """
    if sides is None:
        return None
    for height, width in (shape[-2:], shape[-3:-1]):
        if height and width and len(shape) > 2:
            ratio = sides[0] / height
            # Convolutions without padding and odd sizes round the sides of a map.
            if abs(sides[1] / ratio - width) <= max(1.0, width / 16):
                return ratio
    return None


def _last_operator(model: Model) -> str:
    return node.op if (node := _find_last_node(model, model.outputs[0])) is not None else ""


def _find_last_node(model: Model, tensor: str) -> Node | None:
    node = model.producer(tensor)
    for _ in range(_MAX_HEAD):
        if node is None or not (node.op in _MOVES or qdq.is_q(node) or qdq.is_dq(node)):
            break
        node = model.producer(node.input(0))
    return node


def _find_upscaled_map(model: Model) -> NonDetectorKind | None:
    if _last_operator(model) not in _UPSCALING:
        return None
    return NonDetectorKind(
        NetworkKind.MAP,
        f"the network's output '{model.outputs[0]}' is an upscaled map, as in segmentation",
    )


def _are_features(model: Model, shapes: Sequence[_Shape], strides: Sequence[float]) -> bool:
    """Return whether outputs are feature maps of a backbone, not the grids of a detector.

    In a backbone, maps of larger stride have more channels. A single feature map has a usual number
    of channels (at least 64, a multiple of 16) and does not come from a convolution without an
    activation.
    """
    channels = [shape[1] for _, shape in sorted(zip(strides, shapes, strict=True))]
    if None in channels:
        return False
    numbers = [channel for channel in channels if channel is not None]
    if len(shapes) == 1:
        is_usual = numbers[0] >= _MIN_FEATURES and numbers[0] % 16 == 0
        return is_usual and _last_operator(model) not in _HEAD_ENDS
    return len(set(strides)) == len(shapes) and all(
        low < high for low, high in itertools.pairwise(numbers)
    )


# Transformers and tokens ----------------------------------------------------------------------


def _find_transformer(model: Model) -> NonDetectorKind | None:
    norms = [node for node in model.nodes if node.op in _NORMS]
    count = len(norms) or len(find_decomposed_layer_norms(model))
    if count >= _MIN_NORMS:
        reason = f"the network has {count} layer normalizations, as in a transformer"
    elif _embeds_patches(model) and any(node.op == "Softmax" for node in model.nodes):
        reason = "the network splits the image into patches, as in a transformer"
    else:
        return None
    shapes = _output_shapes(model) or []
    has_boxes = any(len(s) == _TOKENS and s[-1] in (4, 6) for s in shapes)
    return NonDetectorKind(NetworkKind.DETR if has_boxes else NetworkKind.TRANSFORMER, reason)


def _embeds_patches(model: Model) -> bool:
    for node in model.nodes:
        kernel = (model.shape(node.input(1)) or ())[2:]
        if node.op == "Conv" and kernel and (model.shape(node.input(0)) or (0, 0))[1] in (1, 3):
            strides = tuple(node.attributes.get("strides", ()))
            if strides == tuple(kernel) and min(strides) >= _MIN_PATCH:
                return True
    return False


def _find_token_network(model: Model) -> NonDetectorKind | None:
    """Return the kind of a network with three-dimensional outputs; None for other networks.

    The outputs may be maps without a channel dimension, scores along the sides of the image, or one
    sequence along the width.
    """
    shapes, images = _output_shapes(model), list(_image_shapes(model).values())
    sides = _image_sides(images[0]) if images else None
    if shapes is None or sides is None or any(len(shape) != _TOKENS for shape in shapes):
        return None
    first, (height, width) = f"the network's output '{model.outputs[0]}'", sides
    if all(_is_dense_map(sides, shape) for shape in shapes):
        return NonDetectorKind(NetworkKind.MAP, f"{first} is a map, as in segmentation or depth")
    lengths = {shape[-1] for shape in shapes}
    if len(shapes) == 2 and any(lengths == {k * width, k * height} for k in (1, 2, 3, 4)):
        return NonDetectorKind(
            NetworkKind.MAP,
            f"{first} has scores along one side of the image, as in pose networks (SimCC)",
        )
    steps = {width // stride for stride in (2, 4, 8, 16)}
    if width >= _MIN_LINE * height and len(shapes) == 1 and not steps.isdisjoint(shapes[0]):
        return NonDetectorKind(
            NetworkKind.TEXT, f"{first} is a sequence along the width, as in text recognition"
        )
    return None


def _is_dense_map(sides: tuple[int, int], shape: _Shape) -> bool:
    height, width = shape[-2:]
    ratio = sides[0] / height if height else 0
    return 0 < ratio <= _DENSE_STRIDE and width == sides[1] / ratio


# Warnings -------------------------------------------------------------------------------------


def warn_preprocess(model: Model, used: Mapping[str, Any]) -> list[Note]:
    """Return a list with a warning if the preprocessing of a run does not fit the network.

    Args:
        model: The network, with or without Q/DQ.
        used: The preprocessing, as in the JSON of the run.
    """
    warnings = warn_own_normalization(model, used) or warn_task_mismatch(model, used)
    return warnings or warn_default_preprocess(model, used.get("origin", "option"))


def warn_task_mismatch(model: Model, used: Mapping[str, Any]) -> list[Note]:
    """Return a warning if the pixel values differ from those of Ultralytics for the task.

    Ultralytics uses RGB from 0 to 1 for all tasks. The kind of resize is not compared, because
    deployments resize differently. A network that takes pixels from 0 to 255, because its input is
    an integer or because it divides the input itself, is not judged.

    Args:
        model: The network, whose metadata names the task.
        used: The preprocessing, as in the JSON of the run.
    """
    task = model.metadata.get("task", "")
    has_task = task in (*_DETECTING, "classify")
    if not has_task or model.metadata.keys().isdisjoint(_ULTRALYTICS):
        return []
    if used.get("origin", "option") != "option":
        return []
    is_unit = abs(255.0 * used.get("scale", 1 / 255) - 1.0) < _SCALE_TOLERANCE
    differences = {
        "bgr": used.get("bgr"),
        "scale": not is_unit and not _takes_pixels(model),
        "mean": any(used.get("mean", ())),
        "std": not set(used.get("std", ())) <= {1.0},
    }
    if not any(differences.values()):
        return []
    settings = [f"`preprocess='{used.get('name')}'`"]
    if used.get("name") == "custom":  # not a preset that the user could have named
        settings = [f"`{name}`" for name, differs in differences.items() if differs]
    verb, pronoun = ("does", "it") if len(settings) == 1 else ("do", "them")
    return [
        Note(
            f"preprocessing: {format_list(settings)} {verb} not fit the model's metadata: for "
            f"task={task} Ultralytics uses RGB from 0 to 1, without mean and std. Leave {pronoun} "
            "out, unless the deployment prepares images in another way",
            code="preprocess-of-task",
            task=task,
        )
    ]


def _takes_pixels(model: Model) -> bool:
    """Return whether a network has an input for pixels from 0 to 255."""
    has_integers = any(model.elem_type(tensor) not in qdq.FLOATS for tensor in model.inputs)
    return has_integers or 255 in find_normalized_inputs(model).values()


def warn_default_preprocess(model: Model, origin: str) -> list[Note]:
    """Return a warning if the assumed preprocessing does not fit the kind of network.

    Args:
        model: The network.
        origin: Source of the preprocessing, see :class:`calibration.presets.PreprocessChoice`.
    """
    metadata = model.metadata
    is_ultralytics = origin == "metadata" and not metadata.keys().isdisjoint(_ULTRALYTICS)
    if origin in ("option", "model") or is_ultralytics:
        return []
    other = find_non_detector_kind(model)
    if origin == "function":
        kind = other.kind if other is not None else NetworkKind.CLASSIFIER
        other = NonDetectorKind(kind, "the model was calibrated with a preprocessing function")
    if other is None:
        return []
    used = "`preprocess='yolo'` (letterbox, RGB, divided by 255) is the default"
    if origin == "metadata":
        used = "`preprocess='ultralytics-classify'` (center crop, divided by 255) was assumed"
    example = other.kind.value
    if find_normalized_inputs(model) and other.kind == NetworkKind.CLASSIFIER:
        example = "`preprocess='ultralytics-classify'` (center crop, without mean and std)"
    return [
        Note(
            f"preprocessing: {used}, but {other.reason}. The ranges fit only images that are "
            "prepared as in the deployment: give the preprocessing of the deployment, such as "
            f"{example} (docs/insert.md lists all presets)",
            code="default-preprocess",
            kind=other.reason,
        )
    ]
