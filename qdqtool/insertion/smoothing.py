"""Outlier channels moved from activations into weights before calibration: SmoothQuant (Xiao et al., 2022).

A few channels of a transformer's activations are many times as large as the others, and one scale for the tensor has to
reach them. For a tensor X [..., channels] that Linears with weights W [channels, outputs] read,

    X W = (X / s) (s W),    s = max|X|^alpha / max|W|^(1 - alpha)  for each channel

is the same in float, up to rounding. ``1 / s`` goes into the constants of what makes X: scale and bias of a
LayerNormalization (also in pieces), the output channels of a Linear, the constant of a Mul or Div (that of a GELU in
pieces). Everything between keeps the channels apart, and everything that reads X takes ``s`` in, or X stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.fidelity import channel_maxima
from qdqtool.insertion.placement import Placement
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model, Node
from qdqtool.model.layernorm import constant_behind
from qdqtool.model.operators import DOMAINS, LayerKind, of, rearranges, reduced_axes
from qdqtool.types import Json

if TYPE_CHECKING:
    from calibration import Preprocess

SAMPLES = 32  # to find the channels' largest values on; the result is exact on all data whatever is found
_SMALLEST = 1e-5  # of the largest channel: a channel of zeros is taken for this much
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_Array = npt.NDArray[Any]
_Join = Callable[[Iterable[str]], None]


@dataclass
class _Region:
    """Tensors that are divided by one s, up to the nodes that make up for it.

    Attributes:
        channels: Of all of them, along the last axis.
        tensors: Their names.
        linears: Those that read one of them as their data.
        folds: For a constant (by node and input) the power of s that it is multiplied with, by the axis that s lies
            along.
        makers: What takes the scales in above.
        reason: Why it cannot be done; empty where it can.
    """

    channels: int
    tensors: dict[str, None]
    linears: list[Node] = field(default_factory=list)
    folds: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    makers: list[Node] = field(default_factory=list)
    reason: str = ""

    def fold(self, node: Node, position: int, power: int, axis: int = -1) -> None:
        """Multiplies a constant by a power of s, beside what was noted for it before."""
        powers = self.folds.setdefault((node.index, position), {})
        powers[axis] = powers.get(axis, 0) + power

    def made_by(self, node: Node, positions: Sequence[int], power: int, axis: int = -1) -> bool:
        """Does so with constants of a node that takes the scales in above."""
        for position in positions:
            self.fold(node, position, power, axis)
        if node not in self.makers:
            self.makers.append(node)
        return True


@dataclass(frozen=True)
class Smoothed:
    """Scales of one tensor that were moved.

    Attributes:
        tensors: What quantized Linears read of it: the tensor, or what only moves its values.
        makers: The nodes that took ``1 / s`` in.
        linears: Those that took s in.
        before: The largest channel over the median of all, by their largest values.
        after: The same afterwards.
    """

    tensors: tuple[str, ...]
    makers: tuple[str, ...]
    linears: tuple[str, ...]
    before: float
    after: float

    def as_json(self) -> Json:
        return {"tensors": list(self.tensors), "makers": list(self.makers), "linears": list(self.linears),
                "before": round(self.before, 3), "after": round(self.after, 3)}


def smooth(
    model: Model, placement: Placement, alpha: float, data: object, *, preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[list[Smoothed], str]:
    """Moves scales of activations into weights, in place; placement has to be done again afterwards.

    Args:
        model: The prepared float model.
        placement: What is to be quantized.
        alpha: How much of the difference between channels goes into the weights: 0 to 1, mostly .5.
        data: The calibration data, which is read for this alone.
        preprocess: As for the calibration.
        size: As for the calibration.

    Returns:
        What was done, and that in a sentence.

    Raises:
        QdqtoolError: ``alpha`` is none, or the data can be read only once.
        ModelError: There is nothing that could be smoothed.
    """
    if not 0.0 <= alpha <= 1.0:
        raise QdqtoolError(f"`smooth={alpha:g}`: give 0 (all stays in the activations) to 1, mostly 0.5")
    if data is None:
        raise QdqtoolError("`smooth` needs calibration images: ranges of a table are those of the network as it was")
    if isinstance(data, Iterator):
        raise QdqtoolError("`smooth` reads the data before the calibration does; give a folder or a list instead of an "
                           "iterator")
    quantized = {site.node.index for site in placement.weights}
    found = list(_regions(model, [t for t, readers in placement.readers.items()
                                  if any(_is_linear(model, r.node) for r in readers)]))
    fit = [region for region in found if not region.reason]
    left = Counter(region.reason for region in found if region.reason)
    reasons = ", ".join(f"{count} {reason}" for reason, count in left.most_common())
    if not fit:
        what = f"of {len(found)} tensors that quantized Linears read, {reasons}" if found else "no Linear is quantized"
        raise ModelError(f"{model.path or 'model'}: `smooth`: nothing can be smoothed; {what}")
    read = {id(g): tuple(dict.fromkeys(n.input(0) for n in g.linears if n.index in quantized)) for g in fit}
    largest = channel_maxima(model, [t for g in fit for t in read[id(g)]], data, preprocess=preprocess, size=size,
                             samples=SAMPLES)
    values: dict[tuple[int, int], _Array] = {}
    done = []
    for region in fit:
        seen = np.max([largest[t] for t in read[id(region)]], axis=0)
        linears = [n for n in region.linears if n.index in quantized]
        factors = _factors(seen, np.max([_by_channel(model, n) for n in linears], axis=0), alpha)
        if factors is not None and _apply(model, region, factors, values):
            done.append(Smoothed(read[id(region)], tuple(n.name for n in region.makers),
                                 tuple(n.name for n in linears), _spread(seen), _spread(seen / factors)))
    if not done:
        raise ModelError(f"{model.path or 'model'}: `smooth`: nothing can be smoothed; values or constants are not "
                         "finite, or too large for FP16")
    _write(model, values)
    left_float = f"; not of {reasons}" if left else ""
    count = sum(len(s.linears) for s in done)
    return done, (f"`smooth={alpha:g}`: scales of the activations that {count} Linears read were moved into their "
                  f"weights, at {len(done)} places{left_float}")


def _spread(largest: _Array) -> float:
    middle = float(np.median(largest))
    return float(largest.max()) / middle if middle > 0.0 else float(largest.max() > 0.0)


def _factors(seen: _Array, weights: _Array, alpha: float) -> npt.NDArray[np.float64] | None:
    """s by channel; None where the channels have no finite values or no weights."""
    if not (np.isfinite(seen).all() and np.isfinite(weights).all() and seen.max() > 0.0 and weights.max() > 0.0):
        return None
    high = np.maximum(seen.astype(np.float64), _SMALLEST * float(seen.max()))
    low = np.maximum(weights.astype(np.float64), _SMALLEST * float(weights.max()))
    found: npt.NDArray[np.float64] = high**alpha / low ** (1.0 - alpha)
    return found


def _by_channel(model: Model, linear: Node) -> _Array:
    """The largest magnitude of a Linear's weights for each input channel."""
    value = model.constant(linear.input(1))
    assert value is not None
    found: _Array = np.abs(value.astype(np.float64)).max(axis=1 - _channels_axis(linear), initial=0.0)
    return found


def _channels_axis(linear: Node) -> int:
    """The axis of a Linear's weights [in, out] that counts input channels; 1 where they are stored transposed."""
    return int(linear.op == "Gemm" and bool(linear.integer("transB", 0)))


def _is_linear(model: Model, node: Node) -> bool:
    """Whether a node multiplies the last axis of its data with constant weights of two dimensions."""
    if of(node).kind != LayerKind.MATRIX_MULTIPLY or node.integer("transA", 0):
        return False
    shape = model.constant_shape(node.input(1))
    return shape is not None and len(shape) == 2 and model.elem_type(node.input(1)) in _FLOATS


def _regions(model: Model, tensors: Iterable[str]) -> Iterator[_Region]:
    """The regions of tensors, each once."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor not in seen:
            region = _grown(model, tensor)
            seen.update(region.tensors)
            yield region


def _grown(model: Model, tensor: str) -> _Region:
    region = _Region((model.shape(tensor) or (None,))[-1] or 0, {tensor: None})
    queue = [tensor]
    for name in queue:
        region.reason = _enter(model, region, name, queue)
        if region.reason:
            break
    return region


def _enter(model: Model, region: _Region, tensor: str, queue: list[str]) -> str:
    """Looks at what makes and reads a tensor of a region; why it cannot be divided, or an empty string."""

    def join(names: Iterable[str]) -> None:
        for name in names:
            if name not in region.tensors:
                region.tensors[name] = None
                queue.append(name)

    shape = model.shape(tensor)
    if not shape or shape[-1] is None:
        return "of unknown channels (a simplifier such as onnxslim makes shapes known)"
    if shape[-1] != region.channels:
        return "with channels that are moved to other places"
    if model.is_output(tensor):
        return "that are outputs of the network"
    maker = model.producer(tensor)
    if maker is None:
        return "that are inputs of the network or constants"
    if not _takes_above(model, region, maker, tensor, join):
        return f"made by {maker.op}"
    for reader in dict.fromkeys(model.readers(tensor)):
        if reader.op != "Shape" and not _takes_below(model, region, reader, tensor, join):
            return f"read by {reader.op} too"
    return ""


def _takes_above(model: Model, region: _Region, node: Node, tensor: str, join: _Join) -> bool:
    """Whether a node that makes a tensor of a region can make it divided by s; notes what that takes."""
    fixed = _fixed(model, node)
    positions: list[int] = []
    if node.op == "LayerNormalization" and tensor == node.output:
        positions = [p for p in (1, 2) if node.input(p)]
    elif _is_linear(model, node):
        if node.input(2) and not _is_vector(model, node.input(2), region.channels):
            return False
        region.made_by(node, [1], -1, 1 - _channels_axis(node))
        return region.made_by(node, [2] if node.input(2) else [], -1)
    elif (node.op == "Mul" and fixed) or (node.op == "Div" and fixed == [1]):
        positions = fixed
    else:
        return _passes(model, region, node, join)
    if node.domain not in DOMAINS or not all(_is_vector(model, node.input(p), region.channels) for p in positions):
        return False
    return bool(positions) and region.made_by(node, positions, 1 if node.op == "Div" else -1)


def _takes_below(model: Model, region: _Region, node: Node, tensor: str, join: _Join) -> bool:
    """Whether a node that reads a tensor of a region can make up for s, or hand it on; notes what that takes."""
    if _is_linear(model, node):
        if node.inputs.count(tensor) > 1 or node.input(0) != tensor:
            return False
        region.linears.append(node)
        region.fold(node, 1, 1, _channels_axis(node))
        return True
    fixed = _fixed(model, node)
    if node.domain in DOMAINS and ((node.op == "Mul" and fixed) or (node.op == "Div" and fixed == [1])):
        if not _is_vector(model, node.input(fixed[0]), region.channels):
            return False
        region.fold(node, fixed[0], 1 if node.op == "Mul" else -1)
        return True
    return (_joins(node) or node.input(0) == tensor) and _passes(model, region, node, join)


def _fixed(model: Model, node: Node) -> list[int]:
    """The inputs of an operator on two tensors that are constant, where the other is not."""
    found = [p for p, t in enumerate(node.inputs) if model.is_constant(constant_behind(model, t))]
    return found if len(found) == 1 and len(node.inputs) == 2 else []


def _is_vector(model: Model, tensor: str, channels: int) -> bool:
    """Whether a constant is one number, or has one for each channel along its last axis."""
    shape = model.constant_shape(constant_behind(model, tensor))
    if shape is None or model.elem_type(tensor) not in _FLOATS:
        return False
    return all(d == 1 for d in shape) or shape[-1] == channels


def _joins(node: Node) -> bool:
    return of(node).joins or of(node).operation in ("SUM", "SUB")


def _passes(model: Model, region: _Region, node: Node, join: _Join) -> bool:
    """Whether a node writes something divided by s where what it reads is; its tensors join the region."""
    if node.domain not in DOMAINS or not node.input(0):
        return False
    if of(node).joins:
        if not _apart(model, node, [node.integer("axis", 0)]):
            return False
        join(node.inputs)
    elif _joins(node):
        fixed = _fixed(model, node)
        if len(node.inputs) != 2 or not all(_is_vector(model, node.input(p), region.channels) for p in fixed):
            return False
        if fixed and (node.index, fixed[0]) not in region.folds:
            region.fold(node, fixed[0], -1)
        join(t for p, t in enumerate(node.inputs) if p not in fixed)
    elif _keeps(model, node):
        join(node.inputs[:1])
    else:
        return False
    join(t for t in node.outputs if t and (model.readers(t) or model.is_output(t)))
    return True


def _keeps(model: Model, node: Node) -> bool:
    """Whether a node of one tensor does the same to each channel, and leaves them where they are; a Reshape and its
    like do where the last axis has one size before and after, as they go row by row."""
    if node.op == "Transpose":
        perm = node.attributes.get("perm")
        return isinstance(perm, list) and bool(perm) and perm[-1] == len(perm) - 1
    if node.op == "Slice":
        axes = model.constant(node.input(3)) if node.input(3) else None
        return axes is not None and _apart(model, node, [int(a) for a in axes.reshape(-1)])
    if node.op == "ReduceMean":
        return _apart(model, node, reduced_axes(model, node))
    if node.op == "Gather" or of(node).cuts:
        return _apart(model, node, [node.integer("axis", 0)])
    if node.op == "Cast":
        return node.integer("to", 0) in _FLOATS and model.elem_type(node.input(0)) in _FLOATS
    return node.op == "Relu" or (rearranges(node) and not of(node).moves and not any(node.outputs[1:]))


def _apart(model: Model, node: Node, axes: Sequence[int] | None) -> bool:
    """Whether axes are known, and the last is none of them."""
    rank = len(model.shape(node.input(0)) or ())
    return bool(axes) and rank > 0 and all(a % rank != rank - 1 for a in axes or ())


def _apply(
    model: Model, region: _Region, factors: npt.NDArray[np.float64], values: dict[tuple[int, int], _Array]
) -> bool:
    """Multiplies the constants of a region in ``values``; nothing is done where one would not be finite."""
    made = {}
    for (index, position), powers in region.folds.items():
        name = constant_behind(model, model.nodes[index].input(position))
        before = values.get((index, position), model.constant(name))
        if before is None:
            return False
        changed = before.astype(np.float64)
        for axis, power in powers.items():
            changed = changed * (factors**power)[(slice(None), None) if axis == 0 else ...]
        with np.errstate(over="ignore"):
            made[index, position] = changed.astype(before.dtype)
    if not all(np.isfinite(v).all() for v in made.values()):
        return False
    values.update(made)
    return True


def _write(model: Model, values: dict[tuple[int, int], _Array]) -> None:
    """Gives nodes their new constants; one that others read as well stays for those."""
    editor = Editor(model)
    for (index, position), value in values.items():
        node = model.nodes[index]
        name = node.input(position)
        if name in model.initializers and len(model.readers(name)) == 1 and not model.is_output(name):
            editor.set_constant(name, value)
        else:
            editor.set_input(node, position, editor.constant(f"{name}_smoothed", value))
    editor.finish()
