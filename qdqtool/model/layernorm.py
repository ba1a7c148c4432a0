"""Layer normalization in pieces, as below opset 17: ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import DOMAINS, is_run_time, reduced_axes

NORM_OPSET = 17  # the first with LayerNormalization
NORMALIZES = ("LayerNormalization", "GroupNormalization", "InstanceNormalization", "SimplifiedLayerNormalization",
              "SkipLayerNormalization", "RMSNormalization")  # fmt: skip


@dataclass(frozen=True)
class Pieces:
    """A layer normalization in pieces.

    Attributes:
        tensor: What is normalized.
        nodes: Its nodes, the first ReduceMean first and the Div last, with scale and bias behind it where there are
            some.
        square: The node that squares, whose result FP16 may not hold.
        mean: The ReduceMean over the squares.
        axes: The axes that it works on, from the end (-1 is the last), ascending; None where they are not known.
        epsilon: What is added to the variance; None where that is no constant number.
        scale: The constant that the result is multiplied with; empty for none.
        bias: The constant that is added then; empty for none.
    """

    tensor: str
    nodes: tuple[Node, ...]
    square: Node
    mean: Node
    axes: tuple[int, ...] | None
    epsilon: float | None
    scale: str
    bias: str

    @property
    def output(self) -> str:
        return self.nodes[-1].output


def layer_norms(model: Model) -> list[Pieces]:
    """Every layer normalization in pieces, in graph order.

    The mean, the difference, the square and the root are recognised by what reads what; a Cast between them, as
    exporters of FP16 write, is none of these.
    """
    found = []
    for div in model.ordered:
        if _is(div, "Div"):
            pieces = _pieces(model, div)
            if pieces is not None:
                found.append(pieces)
    return found


def as_one(model: Model, pieces: Pieces) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None] | None:
    """Scale and bias of the LayerNormalization that computes the same; None where none does.

    It normalizes the last axes, with a scale and a bias of their shape, and nothing else reads what is between.
    """
    axes = pieces.axes
    if axes is None or axes != tuple(range(-len(axes), 0)) or pieces.epsilon is None or not pieces.epsilon > 0.0:
        return None
    inside = {n.index for n in pieces.nodes}
    for node in pieces.nodes[:-1]:
        if model.is_output(node.output) or any(r.index not in inside for r in model.readers(node.output)):
            return None
    given = [model.constant(constant_behind(model, name)) if name else None for name in (pieces.scale, pieces.bias)]
    sizes = _sizes(model, pieces.tensor, len(axes), given[0])
    if sizes is None or any(name and not _fits(v, sizes)
                            for name, v in zip((pieces.scale, pieces.bias), given, strict=True)):
        return None
    values = [None if v is None else np.broadcast_to(v.reshape(sizes if v.size > 1 else ()), sizes).copy()
              for v in given]
    kind = onnx.helper.tensor_dtype_to_np_dtype(model.elem_type(pieces.tensor) or onnx.TensorProto.FLOAT)
    return values[0] if values[0] is not None else np.ones(sizes, kind), values[1]


def _sizes(model: Model, tensor: str, count: int, scale: npt.NDArray[Any] | None) -> list[int] | None:
    """The last dimensions of a tensor; where they are not known those of the scale, which fits nothing else."""
    shape = model.shape(tensor)
    last = [d for d in shape[-count:] if d is not None] if shape is not None else []
    if len(last) == count:
        return last
    return list(scale.shape) if scale is not None and scale.ndim == count and scale.size > 1 else None


def _fits(value: npt.NDArray[Any] | None, sizes: list[int]) -> bool:
    """Whether a constant is one number, or one for each place of the dimensions."""
    if value is None or value.size == 1:
        return value is not None
    return value.size == math.prod(sizes) and list(value.shape[-len(sizes):]) == sizes


def constant_behind(model: Model, tensor: str) -> str:
    """A tensor, or the one behind Identity nodes, which exporters write for equal weights."""
    while (node := model.producer(tensor)) is not None and node.op == "Identity":
        tensor = node.input(0)
    return tensor


def _pieces(model: Model, div: Node) -> Pieces | None:
    centered, root = _maker(model, div.input(0), "Sub"), _maker(model, div.input(1), "Sqrt")
    added = _maker(model, root.input(0), "Add") if root is not None else None
    if centered is None or root is None or added is None:
        return None
    mean = _maker(model, centered.input(1), "ReduceMean")
    variances = [(1 - i, found) for i in (0, 1) if (found := _maker(model, added.input(i), "ReduceMean")) is not None]
    if mean is None or not variances or mean.input(0) != centered.input(0):
        return None
    other, variance = variances[0]
    square = model.producer(variance.input(0))
    difference = _squared(model, square) if square is not None else None
    again = _maker(model, difference, "Sub") if difference is not None else None  # older exporters subtract twice
    if square is None or again is None or again.inputs != centered.inputs:
        return None
    epsilon = model.constant(added.input(other))
    nodes = [mean, centered, *([again] if again is not centered else []), square, variance, added, root, div]
    scaled, scale = _applied(model, div, "Mul")
    bias = ""
    if scaled is not None:
        nodes.append(scaled)
        shifted, bias = _applied(model, scaled, "Add")
        nodes += [shifted] if shifted is not None else []
    axes = _axes(model, mean)
    return Pieces(
        centered.input(0), tuple(nodes), square, variance, axes if axes == _axes(model, variance) else None,
        float(epsilon.reshape(-1)[0]) if epsilon is not None and epsilon.size == 1 else None, scale, bias,
    )  # fmt: skip


def _is(node: Node | None, op: str) -> bool:
    return node is not None and node.op == op and node.domain in DOMAINS


def _maker(model: Model, tensor: str, op: str) -> Node | None:
    """What makes a tensor, where it is this operator."""
    node = model.producer(tensor)
    return node if _is(node, op) else None


def _squared(model: Model, node: Node) -> str | None:
    """The tensor of which a node gives the square."""
    if _is(node, "Mul") and node.input(0) == node.input(1):
        return node.input(0)
    if _is(node, "Pow"):
        exponent = model.constant(node.input(1))
        if exponent is not None and exponent.size == 1 and float(exponent.reshape(-1)[0]) == 2.0:
            return node.input(0)
    return None


def _applied(model: Model, node: Node, op: str) -> tuple[Node | None, str]:
    """The node that alone reads another's result and multiplies it with (adds to it) a constant vector."""
    readers = model.readers(node.output)
    if len(readers) != 1 or not _is(readers[0], op) or model.is_output(node.output):
        return None, ""
    other = next((t for t in readers[0].inputs if t != node.output), "")
    return (readers[0], other) if other and not is_run_time(model, other) else (None, "")


def _axes(model: Model, reduce: Node) -> tuple[int, ...] | None:
    if not reduce.integer("keepdims", 1):
        return None
    axes, shape = reduced_axes(model, reduce), model.shape(reduce.input(0))
    if not axes:
        return None
    if any(a >= 0 for a in axes):
        if shape is None:
            return None
        axes = [a - len(shape) if a >= 0 else a for a in axes]
    return tuple(sorted(axes))
