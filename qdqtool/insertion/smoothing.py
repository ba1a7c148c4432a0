"""Outlier channels moved from activations into weights before calibration: SmoothQuant (Xiao et al., 2022).

A few channels of a transformer's activations are many times as large as the others, and one scale for the tensor has to
reach them. For a tensor X [..., channels] that Linears with weights W [channels, outputs] read,

    X W = (X / s) (s W),    s = max|X|^alpha / max|W|^(1 - alpha)  for each channel

is the same in float, up to rounding. ``1 / s`` goes into the constants of what makes X: scale and bias of a
LayerNormalization (also in pieces), the output channels of a Linear, the constant of a Mul or Div (that of a GELU in
pieces). Everything between keeps the channels apart, and everything that reads X takes ``s`` in, or X stays as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.insertion import losses
from qdqtool.insertion.losses import AS_CALIBRATED, channel_maxima
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.placement import Placement
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of, rearranges, reduced_axes
from qdqtool.ir.qdq import QUANTIZABLE, SMOOTHED
from qdqtool.ir.sizes import MOVES, find_size_constants, is_linear
from qdqtool.patterns.layernorm import skip_identities
from qdqtool.proto.subgraphs import DOMAINS, STANDARD, copy_node
from qdqtool.types import Json
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import Said, said

Places = npt.NDArray[np.int64]
_ENTRIES = 1 << 25  # of a tensor whose every entry is followed
_SHAPE = "/qdqtool/shape"  # behind a tensor's name


class Sizes:
    """Dimensions of tensors and values computed from them, as one sample shows them where inputs have fixed sizes.

    Without that, or where values decide, only what the model states is known.

    Attributes:
        open: Whether an input has a size that is open.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """

    def __init__(self, model: Model, data: object, images: ImageOptions) -> None:
        self.model = model
        self._shapes: dict[str, tuple[int | None, ...]] = {}
        self._values: dict[str, npt.NDArray[Any]] = {}
        self.open = any(
            d is None or d <= 0 for t in model.inputs for d in model.shape(t) or (None,)
        )
        values, open_shapes = ([], []) if self.open else find_size_constants(model)
        if open_shapes:
            found = losses.values_of(
                model, values, {t: t + _SHAPE for t in open_shapes}, data, images
            )
            self._values = {t: found[t] for t in values}
            self._shapes = {t: tuple(int(d) for d in found[t + _SHAPE]) for t in open_shapes}

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """The dimensions of a tensor, None for those that are open; None where nothing is known."""
        return self._shapes.get(tensor) or self.model.shape(tensor)

    def value(self, tensor: str) -> npt.NDArray[Any] | None:
        """What a tensor holds, if that is the same for all data."""
        return self._values[tensor] if tensor in self._values else self.model.constant(tensor)

    def has_axes(self, tensor: str, places: Places) -> bool:
        """Whether a tensor has each axis along which places change."""
        shape = self.shape(tensor) or ()
        return len(shape) >= places.ndim and all(
            n in (1, d) for n, d in zip(reversed(places.shape), reversed(shape), strict=False)
        )

    def across(self, node: Node, place: int, places: Places, *, up: bool) -> list[Places] | None:
        """The places of a node's inputs by those of one output (up), or the other way round; ``place`` is which one.

        None for a node that does more than move values, and where an entry would belong to two channels.
        """
        inputs, outputs = self._entries(node)
        if not outputs or (not up and place >= len(inputs)):
            return None
        flat = np.full(sum(map(math.prod, inputs)), -1)
        ends = np.cumsum([math.prod(s) for s in inputs])
        if not up:
            flat[ends[place] - math.prod(inputs[place]) : ends[place]] = np.broadcast_to(
                places, inputs[place]
            ).ravel()
            return [least(flat[entries]) for entries in outputs]
        whole = np.broadcast_to(places, outputs[place].shape)
        flat[outputs[place]] = whole
        if (flat[outputs[place]] != whole).any():
            return None
        return [
            least(part.reshape(s))
            for part, s in zip(np.split(flat, ends[:-1]), inputs, strict=True)
        ]

    def _entries(self, node: Node) -> tuple[list[tuple[int, ...]], list[Places]]:
        """The dimensions of a node's inputs that hold data, and which of their entries (counted through) each output
        holds; nothing where that is not known."""
        known = operator_of(node)
        if node.domain not in STANDARD or not (known.joins or known.cuts or node.op in MOVES):
            return [], []
        count = len(node.inputs) if known.joins else 1
        inputs = [shape for t in node.inputs[:count] if (shape := self._complete(t)) is not None]
        values = [self.value(t) for t in node.inputs[count:]]
        if len(inputs) < count or any(
            v is None and t for v, t in zip(values, node.inputs[count:], strict=True)
        ):
            return [], []
        starts = np.cumsum([0, *map(math.prod, inputs)])
        data = [
            np.arange(a, a + math.prod(s)).reshape(s)
            for a, s in zip(starts[:-1], inputs, strict=True)
        ]
        alone = copy_node(
            node.proto, [f"{p}" if t else "" for p, t in enumerate(node.inputs)], node.outputs
        )
        from onnx.reference import ReferenceEvaluator

        try:
            made = ReferenceEvaluator(alone, opsets={"": self.model.opset}).run(
                None, {f"{p}": v for p, v in enumerate([*data, *values]) if v is not None}
            )
        except Exception:  # what it does not know of, and what a damaged model states, is not moved
            return [], []
        return inputs, [np.asarray(m) for m in made]

    def _complete(self, tensor: str) -> tuple[int, ...] | None:
        shape = self.shape(tensor)
        found = tuple(d for d in shape or () if d is not None)
        return (
            found
            if shape and len(found) == len(shape) and 0 < math.prod(found) <= _ENTRIES
            else None
        )


def least(places: Places) -> Places:
    """The same, of size 1 along axes where nothing changes, and without leading ones of these."""
    for axis in range(places.ndim):
        first = places.take([0], axis)
        if places.shape[axis] > 1 and (places == first).all():
            places = first
    while places.ndim > 1 and len(places) == 1:
        places = places[0]
    return places


# What is smoothed, and by how much -----------------------------------------------------------------------------------


SAMPLES = (
    32  # to find the channels' largest values on; the result is exact on all data whatever is found
)
_SMALLEST = 1e-5  # of the largest channel: a channel of zeros is taken for this much
_Array = npt.NDArray[Any]


class _Left(StrEnum):
    """What keeps a region's tensors as they are."""

    OUTPUT = "that are outputs of the network"
    INPUT = "that are inputs of the network or constants"
    MADE = "made by {op}"
    READ = "read by {op} too"


@dataclass
class _Region:
    """Tensors that are divided by one s, up to the nodes that make up for it.

    Attributes:
        channels: How many numbers s has.
        tensors: Their names, with the places of s in them.
        whole: Whether other parts of a tensor of which one part is read go along with it.
        linears: Those that read one of them as their data.
        folds: For a constant (by node and input) the powers of s that it is multiplied with, by the places of s in it.
        makers: What takes the scales in above.
        left: Why it cannot be done, and the operator that is why; None where it can.
        at: The node that is why.
    """

    channels: int
    tensors: dict[str, Places]
    whole: bool
    linears: list[Node] = field(default_factory=list)
    folds: dict[tuple[int, int], list[tuple[Places, int]]] = field(default_factory=dict)
    makers: list[Node] = field(default_factory=list)
    left: tuple[_Left, str] | None = None
    at: str = ""

    def fold(self, node: Node, position: int, places: Places, power: int) -> None:
        """Multiplies a constant by a power of s, beside what was noted for it before."""
        self.folds.setdefault((node.index, position), []).append((places, power))

    def made_by(self, node: Node, positions: Sequence[int], places: Places, power: int) -> bool:
        """Does so with constants of a node that takes the scales in above."""
        for position in positions:
            self.fold(node, position, places, power)
        if node not in self.makers:
            self.makers.append(node)
        return True

    def join(self, tensor: str, places: Places) -> bool:
        """Takes a tensor in, unless no part of it is divided; whether it has no other places already."""
        if (places < 0).all():
            return True
        return np.array_equal(self.tensors.setdefault(tensor, places), places)


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
        return {
            "tensors": list(self.tensors),
            "makers": list(self.makers),
            "linears": list(self.linears),
            "before": round(self.before, 3),
            "after": round(self.after, 3),
        }


def smooth(
    model: Model,
    placement: Placement,
    alpha: float,
    data: object,
    images: ImageOptions = AS_CALIBRATED,
) -> tuple[list[Smoothed], Note]:
    """Moves scales of activations into weights, in place; placement has to be done again afterwards.

    The model's metadata name the tensors (:func:`qdqtool.ir.qdq.smoothed_tensors`), for ``predict``.

    Args:
        model: The prepared float model.
        placement: What is to be quantized.
        alpha: How much of the difference between channels goes into the weights: 0 to 1, mostly .5.
        data: The calibration data, which is read for this alone.
        images: How images become inputs.

    Returns:
        What was done, nothing where nothing could be, and that in a sentence.

    Raises:
        QdqtoolError: ``alpha`` is none, or the data can be read only once.
        ModelError: onnxruntime cannot run the model.
    """
    if not 0.0 <= alpha <= 1.0:
        raise QdqtoolError(
            said(
                "{`smooth`:{alpha:g}}: give 0 (all stays in the activations) to 1, mostly 0.5",
                alpha=alpha,
            ),
            code="out-of-range",
            parameter="smooth",
        )
    if data is None:
        raise QdqtoolError(
            said(
                "{`smooth`} needs calibration images: ranges of a table are those of the network "
                "as it was"
            ),
            code="option-conflict",
            parameter="smooth",
        )
    if isinstance(data, Iterator):
        raise QdqtoolError(
            said(
                "{`smooth`} reads the data before the calibration does; give a folder or a list "
                "instead of an iterator"
            ),
            code="read-once",
            parameter="data",
        )
    quantized = {site.node.index for site in placement.weights}
    sizes = Sizes(model, data, images)
    found = list(
        _regions(sizes, [r.node for readers in placement.inputs.values() for r in readers])
    )
    fit = [region for region in found if not region.left]
    left = Counter(region.left for region in found if region.left)
    first = {region.left: region.at for region in reversed(found)}
    reasons = [_stay(count, *why, first[why]) for why, count in left.most_common()]
    further = said(
        " (it may be more where all inputs have fixed sizes: export so)"
        if left and sizes.open
        else ""
    )
    if not found:
        return [], Remark.NO_LINEAR(alpha=alpha)
    if not fit:
        return [], Remark.NONE_SMOOTHED(
            alpha=alpha, tensors=len(found), reasons=reasons, further=further
        )
    read = [[n for n in region.linears if n.index in quantized] for region in fit]
    largest = channel_maxima(
        model,
        {n.input(0): _channels(model, n) for linears in read for n in linears},
        data,
        images=images,
        samples=SAMPLES,
    )
    values: dict[tuple[int, int], _Array] = {}
    done = []
    for region, linears in zip(fit, read, strict=True):
        seen, weights = np.zeros(region.channels, np.float32), np.zeros(region.channels)
        for node in linears:
            places = region.tensors[node.input(0)]
            np.maximum.at(seen, places[places >= 0], largest[node.input(0)][places >= 0])
            np.maximum.at(weights, places[places >= 0], _by_channel(model, node)[places >= 0])
        factors = _factors(seen, weights, alpha)
        if factors is not None and _apply(model, region, factors, values):
            done.append(
                Smoothed(
                    tuple(dict.fromkeys(n.input(0) for n in linears)),
                    tuple(n.name for n in region.makers),
                    tuple(n.name for n in linears),
                    _spread(seen),
                    _spread(seen / factors),
                )
            )
    if not done:
        return [], Remark.TOO_LARGE_TO_SMOOTH(alpha=alpha)
    _write(model, values)
    model.proto.metadata_props.add(
        key=SMOOTHED, value="\n".join(t for s in done for t in s.tensors)
    )
    remark = Remark.SMOOTHED_IN_PART if left else Remark.SMOOTHED
    return done, remark(
        alpha=alpha,
        linears=sum(len(s.linears) for s in done),
        places=len(done),
        reasons=reasons,
        further=further,
    )


def _stay(count: int, why: _Left, op: str, node: str) -> Said:
    """How many tensors stay as they are for a reason, and which node is the reason for the first of them."""
    where = "" if not node else " ({node})" if count == 1 else " (first {node})"
    return said(f"{{count}} {why}{where}", count=count, op=op, node=node)


def _spread(largest: _Array) -> float:
    middle = float(np.median(largest))
    return float(largest.max()) / middle if middle > 0.0 else float(largest.max() > 0.0)


def _factors(seen: _Array, weights: _Array, alpha: float) -> npt.NDArray[np.float64] | None:
    """s by channel; None where the channels have no finite values or no weights."""
    if not (
        np.isfinite(seen).all()
        and np.isfinite(weights).all()
        and seen.max() > 0.0
        and weights.max() > 0.0
    ):
        return None
    high = np.maximum(seen.astype(np.float64), _SMALLEST * float(seen.max()))
    low = np.maximum(weights.astype(np.float64), _SMALLEST * float(weights.max()))
    found: npt.NDArray[np.float64] = high**alpha / low ** (1.0 - alpha)
    return found


def _by_channel(model: Model, linear: Node) -> _Array:
    """The largest magnitude of a Linear's weights for each input channel."""
    value = model.constant(linear.input(1))
    assert value is not None
    found: _Array = np.abs(value.astype(np.float64)).max(
        axis=1 - _channels_axis(linear), initial=0.0
    )
    return found


def _channels_axis(linear: Node) -> int:
    """The axis of a Linear's weights [in, out] that counts input channels; 1 where they are stored transposed."""
    return int(linear.op == "Gemm" and bool(linear.integer("transB", 0)))


def _channels(model: Model, linear: Node) -> int:
    """How many input channels a Linear's weights have."""
    shape = model.constant_shape(linear.input(1)) or (0, 0)
    return shape[_channels_axis(linear)]


def _regions(sizes: Sizes, readers: Iterable[Node]) -> Iterator[_Region]:
    """The regions of what Linears read, each once."""
    seen: set[str] = set()
    for linear in readers:
        tensor = linear.input(0)
        if tensor in seen or not is_linear(sizes.model, linear):
            continue
        channels = _channels(sizes.model, linear)
        region = _grown(sizes, tensor, channels, whole=True)
        if region.left:  # values alone of queries, keys and values in one tensor
            part = _grown(sizes, tensor, channels, whole=False)
            region = region if part.left else part
        seen.update(region.tensors)
        yield region


def _grown(sizes: Sizes, tensor: str, channels: int, *, whole: bool) -> _Region:
    region = _Region(channels, {tensor: np.arange(channels)}, whole)
    entered = 0
    while entered < len(region.tensors) and not region.left:
        region.left = _enter(sizes, region, list(region.tensors)[entered])
        entered += 1
    return region


def _enter(sizes: Sizes, region: _Region, tensor: str) -> tuple[_Left, str] | None:
    """Looks at what makes and reads a tensor of a region; why it cannot be divided, None where it can."""
    model = sizes.model
    if model.is_output(tensor):
        return _Left.OUTPUT, ""
    maker = model.producer(tensor)
    if maker is None:
        return _Left.INPUT, ""
    places = region.tensors[tensor]
    if not _takes_above(sizes, region, maker, tensor, places):
        region.at = maker.name
        return _Left.MADE, maker.op
    for reader in dict.fromkeys(model.consumers(tensor)):
        if reader.op != "Shape" and not _takes_below(sizes, region, reader, tensor, places):
            region.at = reader.name
            return _Left.READ, reader.op
    return None


def _takes_above(sizes: Sizes, region: _Region, node: Node, tensor: str, places: Places) -> bool:
    """Whether a node that makes a tensor of a region can make it divided by s; notes what that takes."""
    model, known = sizes.model, node.domain in DOMAINS
    if is_linear(model, node):
        if places.ndim > 1 or (node.input(2) and not _is_vector(model, node.input(2), places)):
            return False
        transposed = _channels_axis(node)
        region.made_by(node, [1], places[:, None] if transposed else places, -1)
        return region.made_by(node, [2] if node.input(2) else [], places, -1)
    fixed = _fixed(model, node)
    if node.op == "LayerNormalization" and known and tensor == node.output and places.ndim == 1:
        positions = [p for p in (1, 2) if node.input(p)]
        fits = all(
            model.constant_shape(skip_identities(model, node.input(p))) == places.shape
            for p in positions
        )
        return bool(positions) and fits and region.made_by(node, positions, places, -1)
    if known and _multiplies(node, fixed):
        return _is_vector(model, node.input(fixed[0]), places) and region.made_by(
            node, fixed, places, 1 if node.op == "Div" else -1
        )
    if not known:
        return False
    if _sums(node):
        return _adds(sizes, region, node, places)
    if node.op == "MatMul":
        # Of a product of two operands the one takes it over whose channels it does not sum over.
        taken = [p for p in (1, 0) if node.input(p) in region.tensors] or [1, 0]
        return any(
            _mixes(places, p)
            and sizes.has_axes(node.input(p), places)
            and region.join(node.input(p), places)
            for p in taken
        )
    return _handed_on(sizes, region, node, node.outputs.index(tensor), places, up=True)


def _takes_below(sizes: Sizes, region: _Region, node: Node, tensor: str, places: Places) -> bool:
    """Whether a node that reads a tensor of a region can make up for s, or hand it on; notes what that takes."""
    model, positions = sizes.model, [p for p, t in enumerate(node.inputs) if t == tensor]
    if is_linear(model, node):
        if positions != [0] or places.ndim > 1:
            return False
        region.linears.append(node)
        region.fold(node, 1, places if _channels_axis(node) else places[:, None], 1)
        return True
    fixed = _fixed(model, node)
    if node.domain not in DOMAINS:
        return False
    if _multiplies(node, fixed):
        region.fold(node, fixed[0], places, 1 if node.op == "Mul" else -1)
        return _is_vector(model, node.input(fixed[0]), places)
    if _sums(node):
        return _adds(sizes, region, node, places) and region.join(node.output, places)
    if node.op == "MatMul":
        other = node.input(1 - positions[0])
        return (
            other not in region.tensors
            and _mixes(places, positions[0])
            and region.join(node.output, places)
        )
    return all(_handed_on(sizes, region, node, p, places, up=False) for p in positions)


def _adds(sizes: Sizes, region: _Region, node: Node, places: Places) -> bool:
    """Whether all that a sum adds can be divided alike; its constant is, and its other tensors join the region."""
    fixed = _fixed(sizes.model, node)
    if len(node.inputs) != 2 or not all(
        _is_vector(sizes.model, node.input(p), places) for p in fixed
    ):
        return False
    if fixed and (node.index, fixed[0]) not in region.folds:
        region.fold(node, fixed[0], places, -1)
    return all(
        sizes.has_axes(t, places) and region.join(t, places)
        for p, t in enumerate(node.inputs)
        if p not in fixed
    )


def _handed_on(
    sizes: Sizes, region: _Region, node: Node, place: int, places: Places, *, up: bool
) -> bool:
    """Whether a node that computes nothing of several channels hands s on, and what it makes of it joins."""
    ends = node.inputs if up else node.outputs
    kept = _keeps(sizes, node, places) and (up or operator_of(node).joins or not place)
    moved = [places] * (len(ends) if operator_of(node).joins or not up else 1) if kept else None
    if moved is None or not region.whole:
        moved = sizes.across(node, place, places, up=up) or moved
    return moved is not None and all(
        region.join(t, p) for t, p in zip(ends, moved, strict=False) if t
    )


def _mixes(places: Places, position: int) -> bool:
    """Whether an operand of a product can have these places, and its result then has: it sums over another axis."""
    axis = 2 if position else 1
    return places.ndim < axis or places.shape[-axis] == 1


def _fixed(model: Model, node: Node) -> list[int]:
    """The inputs of an operator on two tensors that are constant, where the other is not."""
    found = [p for p, t in enumerate(node.inputs) if model.is_constant(skip_identities(model, t))]
    return found if len(found) == 1 and len(node.inputs) == 2 else []


def _is_vector(model: Model, tensor: str, places: Places) -> bool:
    """Whether a constant is one number, or has axes where those along which s changes are, as long as these."""
    shape = model.constant_shape(skip_identities(model, tensor))
    if shape is None or model.elem_type(tensor) not in QUANTIZABLE:
        return False
    return all(d == 1 for d in shape) or (
        len(shape) >= places.ndim
        and all(n in (1, d) for n, d in zip(reversed(places.shape), reversed(shape), strict=False))
    )


def _multiplies(node: Node, fixed: Sequence[int]) -> bool:
    return (node.op == "Mul" and bool(fixed)) or (node.op == "Div" and fixed == [1])


def _sums(node: Node) -> bool:
    return operator_of(node).operation in ("SUM", "SUB")


def _keeps(sizes: Sizes, node: Node, places: Places) -> bool:
    """Whether a node does the same to each channel, and leaves them where they are; a Reshape and its like do where the
    last axis has one size before and after, as they go row by row."""
    model, last = sizes.model, places.ndim == 1
    if node.op == "Cast":
        return (
            node.integer("to", 0) in QUANTIZABLE and model.elem_type(node.input(0)) in QUANTIZABLE
        )
    if node.op == "Transpose":
        perm = node.attributes.get("perm")
        return last and isinstance(perm, list) and bool(perm) and perm[-1] == len(perm) - 1
    if node.op == "Slice":
        axes = sizes.value(node.input(3)) if node.input(3) else None
        return last and axes is not None and _apart(sizes, node, [int(a) for a in axes.reshape(-1)])
    if node.op == "Pad":
        amounts = sizes.value(node.input(1))
        return amounts is not None and not amounts.any()
    if node.op == "ReduceMean":
        return last and _apart(sizes, node, reduced_axes(model, node))
    if operator_of(node).averages:  # height and width, behind the channels
        return (
            places.shape[1:] == (1, 1) and len(sizes.shape(node.input(0)) or ()) == places.ndim + 1
        )
    if node.op == "Gather" or operator_of(node).cuts or operator_of(node).joins:
        return last and _apart(sizes, node, [node.integer("axis", 0)])
    if node.op == "Relu" or operator_of(node).kind == LayerKind.IDENTITY:
        return not any(node.outputs[1:])
    ends = [(sizes.shape(t) or (None,))[-1] for t in (node.input(0), node.output)]
    return (
        rearranges(node)
        and not operator_of(node).moves
        and last
        and ends[0] == ends[1] == len(places)
    )


def _apart(sizes: Sizes, node: Node, axes: Sequence[int] | None) -> bool:
    """Whether axes are known, and the last is none of them."""
    rank = len(sizes.shape(node.input(0)) or ())
    return bool(axes) and rank > 0 and all(a % rank != rank - 1 for a in axes or ())


def _apply(
    model: Model,
    region: _Region,
    factors: npt.NDArray[np.float64],
    values: dict[tuple[int, int], _Array],
) -> bool:
    """Multiplies the constants of a region in ``values``; nothing is done where one would not be finite."""
    made = {}
    for (index, position), powers in region.folds.items():
        name = skip_identities(model, model.nodes[index].input(position))
        before = values.get((index, position), model.constant(name))
        if before is None:
            return False
        changed = before.astype(np.float64)
        for places, power in powers:
            changed = changed * np.where(places < 0, 1.0, factors[places] ** power)
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
        if (
            name in model.initializers
            and len(model.consumers(name)) == 1
            and not model.is_output(name)
        ):
            editor.set_constant(name, value)
        else:
            editor.set_input(node, position, editor.constant(f"{name}_smoothed", value))
    editor.finish()
