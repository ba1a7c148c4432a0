"""Recognition of detectors with objectness: YOLOv3, YOLOv5, YOLOv7 and YOLOX.

Such a detector has one output of rows with center, size, objectness and class scores. The score of
a detection is objectness times class score. Boxes are in pixels only if the model decodes them: an
export of YOLOX contains offsets by default.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from qdqtool.accuracy.output_shapes import find_output_shapes
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.ir.graph import Model, Node
from qdqtool.patterns.heads import find_head

_BOX_ROWS = 5  # center (x and y), size (width and height) and objectness
_ROWS_RANK, _MAPS_RANK = 3, 4  # ranks of outputs: rows of detections, and prototypes of masks
_ANCHOR_RANK = 5  # rank of maps with one axis for the anchors
_MIN_ANCHORS = 2  # minimum number of boxes at a position in a head with anchors
_SIZES = ("Exp", "Pow")  # operators that compute sizes of boxes


class ObjectnessOutput(NamedTuple):
    """Output with center, size, objectness and class scores of each anchor.

    Attributes:
        name: Name of the output.
        classes: Number of classes.
        transposed: Whether the anchors are the second dimension.
    """

    name: str
    classes: int
    transposed: bool


def find_objectness_output(model: Model) -> ObjectnessOutput | None:
    """Return the output of a detector with objectness that decodes its boxes; else None.

    The channels of the last convolutions must agree with the rows of the output. Networks with
    masks are not recognized.
    """
    if not _decodes_sizes(model):
        return None
    shapes = find_output_shapes(model)
    if any(len(shape) == _MAPS_RANK for shape in shapes.values()):
        return None
    for name, shape in shapes.items():
        if len(shape) != _ROWS_RANK or None in shape[1:]:
            continue
        rows, anchors = sorted(int(d or 0) for d in shape[1:])
        if rows < anchors and (_has_anchors(model, rows) or _has_branches(model, rows)):
            return ObjectnessOutput(name, rows - _BOX_ROWS, rows != shape[1])
    return None


def resembles_detector(model: Model) -> bool:
    """Return whether an output has rows, as of detections, after class scores or sizes of boxes."""
    if not find_class_outputs(model) and not _decodes_sizes(model):
        return False
    return any(len(shape) == _ROWS_RANK for shape in find_output_shapes(model).values())


def _find_last_convolutions(model: Model) -> list[Node]:
    nodes = [model.nodes[index] for index in sorted(find_head(model).finals)]
    return [node for node in nodes if node.op == "Conv"]


def _count_channels(model: Model) -> Counter[int]:
    """Return how many of the last convolutions have each number of output channels."""
    return Counter(_count_rows(model, node.output) for node in _find_last_convolutions(model))


def _has_anchors(model: Model, rows: int) -> bool:
    """Return whether Sigmoids read all rows of two or more anchors per convolution (YOLOv5)."""
    counts = _count_channels(model)
    shapes = [model.shape(node.output) or () for node in model.nodes if node.op == "Sigmoid"]
    maps = [shape for shape in shapes if len(shape) == _ANCHOR_RANK and shape[-1] == rows]
    return (
        rows > _BOX_ROWS
        and len(maps) == sum(counts.values()) > 0
        and all(c % rows == 0 and c >= _MIN_ANCHORS * rows for c in counts)
    )


def _has_branches(model: Model, rows: int) -> bool:
    """Return whether boxes, objectness and classes are joined in this order (YOLOX)."""
    joined = [_BOX_ROWS - 1, 1, rows - _BOX_ROWS]
    levels = 0
    for node in model.nodes:
        if node.op == "Concat" and [_count_rows(model, t) for t in node.inputs] == joined:
            levels += all(_is_sigmoid(model.producer(t)) for t in node.inputs[1:])
    return levels > 0 and _count_channels(model) == Counter(joined * levels)


def _count_rows(model: Model, tensor: str) -> int:
    shape = model.shape(tensor) or ()
    return shape[1] or 0 if len(shape) == _MAPS_RANK else 0


def _is_sigmoid(node: Node | None) -> bool:
    return node is not None and node.op == "Sigmoid"


def _decodes_sizes(model: Model) -> bool:
    """Return whether Exp or a square is computed downstream of the last convolutions."""
    found = model.find_downstream(node.index for node in _find_last_convolutions(model))
    return any(_computes_size(model.nodes[index]) for index in found)


def _computes_size(node: Node) -> bool:
    return node.op in _SIZES or (node.op == "Mul" and node.input(0) == node.input(1))
