"""What one engine layer computes and moves, the input of the time model; memory layouts and reformats between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import CONVOLUTIONS
from qdqtool.patterns.heads import is_computed_product
from qdqtool.types import EngineLayer, Precision

CONV, DEPTHWISE, DECONV = "conv", "depthwise", "deconv"
POOL, REDUCE, RESIZE, SOFTMAX, POINTWISE = "pool", "reduce", "resize", "softmax", "pointwise"
COPY, CONVERSION, REFORMAT, SHUFFLE = "copy", "conversion", "reformat", "shuffle"
MYELIN, NOTHING, UNKNOWN = "myelin", "nothing", "unknown"
COMPUTING = (CONV, DEPTHWISE, DECONV)
ShapeOf = Callable[[str], tuple[int, ...] | None]
FEW_CHANNELS = 16  # input channels below which a convolution's kernel cannot feed the tensor cores


@dataclass(frozen=True, slots=True)
class Work:
    """A layer as the time model sees it."""

    kind: str  # one of the words above
    precision: Precision = Precision.FP32  # what it computes in; FP16 or FP32 for a float
    written_as: Precision = Precision.FP32  # precision of its output
    # output positions of the convolution (batch x height x width, before a fused pooling); 0 for others
    rows: float = 0.0
    columns: float = 0.0  # output channels of one group
    depth: float = 0.0  # products per output value: input channels of one group x kernel positions
    channels: float = 0.0  # input channels of one group; of a conversion, the tensor's channels
    groups: float = 1.0  # of the convolution
    read: float = 0.0  # bytes read, weights apart
    weights: float = 0.0  # bytes of the weights
    written: float = 0.0  # bytes written
    steps: float = 1.0  # kernels that it takes; 1 but for a region of many operators

    @property
    def macs(self) -> float:
        """Multiply-accumulates, without padding."""
        return self.rows * self.columns * self.groups * self.depth

    @property
    def moved(self) -> float:
        """Bytes read and written, weights included."""
        return self.read + self.weights + self.written

    def writing_fp32(self) -> Work:
        """The same with an output in FP32."""
        elements = self.written / width(self.written_as)
        return replace(self, written_as=Precision.FP32, written=elements * width(Precision.FP32))


def touched(source: float, rows: float, depth: float, groups: float) -> float:
    """Elements of a convolution's input that it reads: a 1x1 kernel of stride 2 skips three positions of four."""
    return min(source, rows * depth * groups)


def width(precision: Precision) -> float:
    """Bytes of an element; 4 where the type is not known."""
    return precision.width or 4.0


# Views, and what is computed before the network runs.
FREE = (
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Identity",
    "Cast",
    "Dropout",
    "Constant",
    "Shape",
    "Range",
    "ConstantOfShape",
    "Concat",
    "Split",
    "Slice",
    "QuantizeLinear",
    "DequantizeLinear",
    "Gather",
    "Expand",
)
HEAVY = (
    "Softmax",
    "LogSoftmax",
    "LayerNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "ReduceMean",
    "ReduceSum",
    "ReduceMax",
    "GlobalAveragePool",
    "Transpose",
    "TopK",
    "NonMaxSuppression",
    "ArgMax",
    "Einsum",
)
KINDS = {
    "Pooling": POOL,
    "Reduce": POOL,
    "Resize": RESIZE,
    "Softmax": SOFTMAX,
    "Conversion": CONVERSION,
    **dict.fromkeys(("Reformat", "Concatenation", "Slice", "Padding"), COPY),
}


def product_of(node: Node, shape_of: ShapeOf) -> Work | None:
    """The matrix product of a Conv, ConvTranspose, Gemm or MatMul, what it moves in elements instead of bytes.

    None where a shape is not known.
    """
    source, target, weights = (shape_of(t) for t in (node.input(0), node.output, node.input(1)))
    if not source or not target or weights is None:
        return None
    kind, groups, out = CONV, 1, float(math.prod(target))
    if node.op in CONVOLUTIONS:
        if min(len(source), len(weights), len(target)) < 3:
            return None
        groups = max(1, node.integer("group", 1))
        kernel = float(math.prod(weights[2:]))
        if node.op == "ConvTranspose":
            kind, channels = DECONV, float(source[1] // groups)
            rows, columns, depth = (
                float(math.prod(source)) / max(1, source[1]),
                weights[1] * kernel,
                channels,
            )
        else:
            channels, columns = float(weights[1]), target[1] / groups
            kind = DEPTHWISE if groups > 1 and columns * channels <= 16 else CONV
            rows, depth = out / max(1, target[1]), channels * kernel
    else:
        depth = channels = float(
            source[0] if node.op == "Gemm" and node.integer("transA", 0) else source[-1]
        )
        columns = float(target[-1])
        rows = out / max(1.0, columns)
    return Work(
        kind,
        rows=rows,
        columns=columns,
        depth=depth,
        channels=channels,
        groups=float(groups),
        written=out,
        read=touched(float(math.prod(source)), rows, depth, float(groups)),
        weights=columns * depth * groups,
    )


class Layout(StrEnum):
    """Where the channels of a tensor are in memory, in TensorRT's words."""

    LINEAR = "linear"
    PAIRS = "NC/2HW2"
    FOURS = "NC/4HW4"
    BLOCKS = "NC/32HW32"
    CHANNELS_LAST = "NHWC8"


@dataclass(frozen=True, slots=True)
class Reformat:
    """A change of layout in front of a layer, or in front of the network's output (``layer`` is empty)."""

    tensor: str
    layer: str
    source: Layout
    target: Layout
    elements: float
    channels: float
    precision: Precision

    @property
    def needs_tf32(self) -> bool:
        """Whether only a GPU that multiplies FP32 by TF32 has it."""
        return self.precision == Precision.FP32 and Layout.CHANNELS_LAST in (
            self.source,
            self.target,
        )


_LINEAR = (Layout.LINEAR,)
_HALF_MAPS = (Layout.PAIRS, Layout.LINEAR, Layout.CHANNELS_LAST)
_BLOCK = 32  # channels of NC/32HW32
_HALVES = (
    Precision.FP16,
    Precision.BF16,
    Precision.FLOAT,
)  # a float whose width is left open as FP16
_LINEAR_TYPES = ("Shuffle", "Softmax", "TopK", "NMS", "NoOp", "Gather", "Reduce", "Myelin")


def reformats_of(
    engine: Sequence[tuple[EngineLayer, Work]],
    shape_of: ShapeOf,
    inputs: Iterable[str],
    outputs: Iterable[str],
) -> list[Reformat]:
    """The reformats of a predicted engine: layers, each behind those whose results it reads, and the work of each.

    The network's inputs are linear, its outputs have to be.
    """
    return _Layouts(engine, shape_of).run(inputs, outputs)


class _Layouts:
    def __init__(self, engine: Sequence[tuple[EngineLayer, Work]], shape_of: ShapeOf) -> None:
        self.engine, self.shape_of = engine, shape_of
        self.at: dict[str, Layout] = {}
        self.made: set[tuple[str, Layout, str]] = set()
        self.result: list[Reformat] = []
        self.reads = [self._reads(layer, found) for layer, found in engine]
        self.readers: dict[str, list[int]] = defaultdict(list)
        self.writers: dict[str, list[int]] = defaultdict(list)
        for i, (layer, _) in enumerate(engine):
            for edge in layer.inputs:
                self.readers[edge.tensor].append(i)
            for edge in layer.outputs:
                self.writers[edge.tensor].append(i)
        # What all readers want in one layout is changed once, behind its maker (ResNet-18 in FP32 on an A100).
        self.alike = {
            t for t, readers in self.readers.items() if len({self.reads[i] for i in readers}) == 1
        }

    def run(self, inputs: Iterable[str], outputs: Iterable[str]) -> list[Reformat]:
        self.at = dict.fromkeys(inputs, Layout.LINEAR)
        for i, (layer, found) in enumerate(self.engine):
            wanted = self.reads[i]
            have = [self.at.get(edge.tensor) for edge in layer.inputs]
            if len(wanted) > 1 and layer.type not in ("Convolution", "Deconvolution"):
                # One layout for all its inputs: the first that needs no reformat.
                wanted = (next((h for h in have if h in wanted), wanted[0]),)
            for k, edge in enumerate(layer.inputs):
                residual = k and found.kind in COMPUTING
                is_open = edge.precision in (Precision.FLOAT, Precision.UNKNOWN)
                self._reach(
                    edge.tensor,
                    layer.name,
                    (self._writes(i),) if residual else wanted,
                    found.precision if is_open else edge.precision,
                )
            for edge in layer.outputs:
                if edge.tensor not in self.at or len(self.writers[edge.tensor]) == 1:
                    self.at[edge.tensor] = self._writes(i)
        for tensor in outputs:
            for i in self.writers.get(tensor, ())[:1]:
                self._reach(tensor, "", _LINEAR, self.engine[i][1].written_as)
        return self.result

    def _reach(
        self, tensor: str, layer: str, wanted: tuple[Layout, ...], precision: Precision
    ) -> None:
        """Brings a tensor into one of the layouts; nothing to do where it has no layout (or one position only)."""
        have = self.at.get(tensor)
        shape = None if have is None or not wanted or have in wanted else self.shape_of(tensor)
        if have is None or shape is None or len(shape) != 4 or shape[2] * shape[3] == 1:
            return
        key = (tensor, wanted[0], "" if tensor in self.alike else layer)
        if key not in self.made:
            self.made.add(key)
            elements = float(math.prod(shape))
            self.result.append(
                Reformat(tensor, layer, have, wanted[0], elements, float(shape[1]), precision)
            )

    def _reads(self, layer: EngineLayer, found: Work) -> tuple[Layout, ...]:
        """Layouts that a layer's data input may have, the one that it would be brought into first; none for any."""
        if layer.type == "Conversion" or found.kind == UNKNOWN:
            return ()
        if layer.type in _LINEAR_TYPES:
            return () if self._keeps(layer) else _LINEAR
        integer = found.precision == Precision.INT8
        if found.kind in COMPUTING:
            if integer:
                few = found.channels < FEW_CHANNELS and found.kind != DEPTHWISE
                return (Layout.FOURS, Layout.LINEAR, Layout.BLOCKS) if few else (Layout.BLOCKS,)
            return (self._floats(found),)
        if found.kind in (COPY, RESIZE):
            return ()
        if integer:
            return (Layout.BLOCKS, Layout.FOURS)
        if found.precision in _HALVES:
            return (Layout.PAIRS, Layout.CHANNELS_LAST) if found.kind == POOL else _HALF_MAPS
        return (Layout.LINEAR, Layout.CHANNELS_LAST)

    def _floats(self, found: Work) -> Layout:
        """What a convolution that computes in floats reads and writes."""
        few = found.precision not in _HALVES and found.channels < FEW_CHANNELS
        return Layout.LINEAR if few else Layout.CHANNELS_LAST

    def _keeps(self, layer: EngineLayer) -> bool:
        """Whether a NoOp leaves the tensor's shape as it is."""
        return (
            layer.type == "NoOp"
            and bool(layer.inputs)
            and bool(layer.outputs)
            and (self.shape_of(layer.inputs[0].tensor) == self.shape_of(layer.outputs[0].tensor))
        )

    def _writes(self, i: int) -> Layout:
        layer, found = self.engine[i]
        if found.kind in COMPUTING:
            if found.precision == Precision.INT8:
                return Layout.LINEAR if found.written_as == Precision.FP32 else Layout.BLOCKS
            return self._floats(found)
        if layer.type == "Conversion":  # what the first reader that is not open wants
            readers = (
                self.reads[j] for edge in layer.outputs for j in self.readers.get(edge.tensor, ())
            )
            if wanted := next(filter(None, readers), ()):
                return wanted[0]
            return Layout.BLOCKS if found.written_as == Precision.INT8 else Layout.LINEAR
        if layer.type in _LINEAR_TYPES and not self._keeps(layer):
            return Layout.LINEAR
        have = self.at.get(layer.inputs[0].tensor) if layer.inputs else None
        wanted = self.reads[i]
        if not wanted:
            return have or Layout.LINEAR
        known = [self.at.get(edge.tensor) for edge in layer.inputs]
        return next((h for h in known if h is not None and h in wanted), wanted[0])


_NORMS = ("LayerNormalization", "ReduceMean", "GroupNormalization", "InstanceNormalization")
_OUTSIDE = (
    "Conv",
    "ConvTranspose",
    "MaxPool",
    "AveragePool",
    "Resize",
    "TopK",
    "NonMaxSuppression",
)


def region_nodes(model: Model) -> frozenset[str]:
    """Names of the nodes that lie in a region: those on a path from one attention or normalization to the next."""
    seeds = {
        n.name for n in model.nodes if n.op == "LayerNormalization" or is_computed_product(model, n)
    }
    if not seeds:
        return frozenset()
    behind, front = set(seeds), set(seeds)
    for node in model.ordered:
        if node.name not in behind and node.op not in _OUTSIDE:
            if any(
                p is not None and p.name in behind
                for p in map(model.producer, filter(None, node.inputs))
            ):
                behind.add(node.name)
    for node in reversed(model.ordered):
        if node.name not in front and node.op not in _OUTSIDE:
            if any(r.name in front for t in node.outputs for r in model.consumers(t)):
                front.add(node.name)
    return frozenset(behind & front)


def work_in_region(model: Model, node: Node, shape_of: ShapeOf, plain: Precision) -> Work:
    """The kernel of a node of a region that has no weights; nothing where it is part of another kernel."""
    nothing = Work(NOTHING, plain, plain)
    written = _elements(shape_of(node.output))
    sizes = [_elements(shape_of(t)) for t in node.inputs if t and not model.is_constant(t)]
    if not written or any(s is None for s in sizes):
        return nothing
    read = sum(s for s in sizes if s is not None)
    size = width(plain)
    if is_computed_product(model, node):
        shape, target = shape_of(node.input(0)), shape_of(node.output)
        if not shape:
            return nothing
        depth, columns = float(shape[-1]), float(target[-1]) if target else 1.0
        first = any(r.op in ("Softmax", "Mul", "Div", "Add") for r in model.consumers(node.output))
        ends = (read, 0.0) if first else ((sizes[-1] or 0.0), written)  # the scores stay inside
        return Work(
            CONV,
            plain,
            plain,
            written / columns,
            columns,
            depth,
            depth,
            1.0,
            ends[0] * size,
            0.0,
            ends[1] * size,
            1.0 if first else 0.0,
        )
    if node.op in _NORMS:
        return Work(POOL, plain, plain, read=read * size, written=written * size)
    if (
        node.op == "Add" and len(sizes) > 1 and min(s or 0.0 for s in sizes) == written
    ):  # a skip: read and kept
        return Work(POINTWISE, plain, plain, read=written * size, written=written * size, steps=0.0)
    return nothing


def _elements(shape: tuple[int, ...] | None) -> float | None:
    return None if shape is None else float(math.prod(shape))
