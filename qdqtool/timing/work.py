"""Work of an engine layer (multiply-accumulates and bytes), the input of the time model.

The module also determines the memory layouts of an engine's tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from qdqtool.ir.graph import Node
from qdqtool.ir.operators import CONVOLUTIONS
from qdqtool.ir.precision import Precision
from qdqtool.trt.result import EngineLayer

CONV, DEPTHWISE, DECONV = "conv", "depthwise", "deconv"
POOL, REDUCE, RESIZE, SOFTMAX, POINTWISE = "pool", "reduce", "resize", "softmax", "pointwise"
COPY, CONVERSION, REFORMAT, SHUFFLE = "copy", "conversion", "reformat", "shuffle"
MYELIN, NOTHING, UNKNOWN = "myelin", "nothing", "unknown"
COMPUTING = (CONV, DEPTHWISE, DECONV)
ShapeLookup = Callable[[str], tuple[int, ...] | None]
"""Shape of a tensor by its name; None if unknown."""
FEW_CHANNELS = 16  # a convolution with fewer input channels cannot use the tensor cores fully


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of a layer: the properties that decide its time.

    Attributes:
        kind: One of the constants of this module, such as :data:`CONV`.
        precision: Type that the layer computes in; FP16 or FP32 for a float layer.
        written_as: Type of the output.
        rows: Output positions of a convolution (batch x height x width, before a fused
            pooling), input positions of a deconvolution, rows of a matrix product; 0 for other
            layers.
        columns: Output channels of one group; for a deconvolution, times kernel positions.
        depth: Products per output value: input channels of one group; for a convolution,
            times kernel positions.
        channels: Input channels of one group; for a conversion, channels of the tensor.
        groups: Groups of the convolution.
        read: Bytes read, without the weights.
        weights: Bytes of the weights.
        written: Bytes written.
        steps: Number of kernels: 1, except in a region of many operators.
        is_matrix_product: Whether the layer is a MatMul or Gemm instead of a convolution.
    """

    kind: str
    precision: Precision = Precision.FP32
    written_as: Precision = Precision.FP32
    rows: float = 0.0
    columns: float = 0.0
    depth: float = 0.0
    channels: float = 0.0
    groups: float = 1.0
    read: float = 0.0
    weights: float = 0.0
    written: float = 0.0
    steps: float = 1.0
    is_matrix_product: bool = False

    @property
    def macs(self) -> float:
        """Multiply-accumulates, without padding."""
        return self.rows * self.columns * self.groups * self.depth

    @property
    def bytes_moved(self) -> float:
        """Bytes read and written, including weights."""
        return self.read + self.weights + self.written

    def with_fp32_output(self) -> LayerWork:
        """Return the same work with an output in FP32."""
        elements = self.written / bytes_per_element(self.written_as)
        return replace(
            self, written_as=Precision.FP32, written=elements * bytes_per_element(Precision.FP32)
        )


def count_read_elements(source: float, rows: float, depth: float, groups: float) -> float:
    """Return how many elements of the input a convolution reads.

    A 1x1 kernel of stride 2 skips three of four positions.
    """
    return min(source, rows * depth * groups)


def bytes_per_element(precision: Precision) -> float:
    """Return the bytes per element of a type; 4 if the type is unknown."""
    return precision.width or 4.0


# Operators without a kernel: views, and operators that are computed before the network runs.
FREE_OPERATORS = (
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
# Operators that do not share a kernel with their neighbors.
SEPARATE_OPERATORS = (
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
# Kind of work by the type of an engine layer.
LAYER_KINDS = {
    "Pooling": POOL,
    "Reduce": POOL,
    "Resize": RESIZE,
    "Softmax": SOFTMAX,
    "Conversion": CONVERSION,
    **dict.fromkeys(("Reformat", "Concatenation", "Slice", "Padding"), COPY),
}


def product_work(node: Node, lookup_shape: ShapeLookup) -> LayerWork | None:
    """Return the work of a Conv, ConvTranspose, Gemm or MatMul; None if a shape is unknown.

    ``read``, ``weights`` and ``written`` are in elements instead of bytes.
    """
    source, target, weights = (
        lookup_shape(tensor) for tensor in (node.input(0), node.output, node.input(1))
    )
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
            rows = float(math.prod(source)) / max(1, source[1])
            columns, depth = weights[1] * kernel, channels
        else:
            channels, columns = float(weights[1]), target[1] / groups
            kind = DEPTHWISE if groups > 1 and columns * channels <= 16 else CONV
            rows, depth = out / max(1, target[1]), channels * kernel
    else:
        is_transposed = node.op == "Gemm" and node.integer("transA", 0)
        depth = channels = float(source[0] if is_transposed else source[-1])
        columns = float(target[-1])
        rows = out / max(1.0, columns)
    return LayerWork(
        kind,
        rows=rows,
        columns=columns,
        depth=depth,
        channels=channels,
        groups=float(groups),
        written=out,
        read=count_read_elements(float(math.prod(source)), rows, depth, float(groups)),
        weights=columns * depth * groups,
        is_matrix_product=node.op not in CONVOLUTIONS,
    )


class Layout(StrEnum):
    """Memory layout of a tensor, in the spelling of TensorRT."""

    LINEAR = "linear"
    PAIRS = "NC/2HW2"
    FOURS = "NC/4HW4"
    BLOCKS = "NC/32HW32"
    CHANNELS_LAST = "NHWC8"


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """Change of a tensor's layout before a layer.

    ``layer`` is empty for a change at an output of the network.
    """

    tensor: str
    layer: str
    source: Layout
    target: Layout
    elements: float
    channels: float
    precision: Precision

    @property
    def needs_tf32(self) -> bool:
        """Whether the change only happens on GPUs with TF32."""
        return self.precision == Precision.FP32 and Layout.CHANNELS_LAST in (
            self.source,
            self.target,
        )


_LINEAR = (Layout.LINEAR,)
_HALF_MAPS = (Layout.PAIRS, Layout.LINEAR, Layout.CHANNELS_LAST)
# Types treated as 16-bit. FLOAT, whose width the builder chooses, counts as FP16.
_HALVES = (Precision.FP16, Precision.BF16, Precision.FLOAT)
_LINEAR_TYPES = ("Shuffle", "Softmax", "TopK", "NMS", "NoOp", "Gather", "Reduce", "Myelin")


def find_layout_changes(
    engine: Sequence[tuple[EngineLayer, LayerWork]],
    lookup_shape: ShapeLookup,
    inputs: Iterable[str],
    outputs: Iterable[str],
) -> list[LayoutChange]:
    """Return the layout changes of a predicted engine.

    Inputs and outputs of the network have the linear layout.

    Args:
        engine: Layers with their work, in topological order.
        lookup_shape: Function that returns the shape of a tensor; None if unknown.
        inputs: Names of the network's inputs.
        outputs: Names of the network's outputs.
    """
    return _LayoutTracker(engine, lookup_shape).run(inputs, outputs)


class _LayoutTracker:
    def __init__(
        self, engine: Sequence[tuple[EngineLayer, LayerWork]], lookup_shape: ShapeLookup
    ) -> None:
        self.engine, self.lookup_shape = engine, lookup_shape
        self.layouts: dict[str, Layout] = {}
        self.keys: set[tuple[str, Layout, str]] = set()  # changes recorded so far
        self.changes: list[LayoutChange] = []
        self.accepted = [self._input_layouts(layer, work) for layer, work in engine]
        self.consumers: dict[str, list[int]] = defaultdict(list)
        self.producers: dict[str, list[int]] = defaultdict(list)
        for i, (layer, _) in enumerate(engine):
            for edge in layer.inputs:
                self.consumers[edge.tensor].append(i)
            for edge in layer.outputs:
                self.producers[edge.tensor].append(i)
        # Tensors whose consumers all accept the same layouts. Their layout changes once, after
        # the producer (seen for ResNet-18 in FP32 on an A100).
        self.uniform = set()
        for tensor, consumers in self.consumers.items():
            if len({self.accepted[i] for i in consumers}) == 1:
                self.uniform.add(tensor)

    def run(self, inputs: Iterable[str], outputs: Iterable[str]) -> list[LayoutChange]:
        self.layouts = dict.fromkeys(inputs, Layout.LINEAR)
        for i, (layer, _) in enumerate(self.engine):
            self._record_input_changes(i)
            for edge in layer.outputs:
                if edge.tensor not in self.layouts or len(self.producers[edge.tensor]) == 1:
                    self.layouts[edge.tensor] = self._output_layout(i)
        for tensor in outputs:
            for i in self.producers.get(tensor, ())[:1]:
                self._record_change(tensor, "", _LINEAR, self.engine[i][1].written_as)
        return self.changes

    def _record_input_changes(self, i: int) -> None:
        (layer, work), accepted = self.engine[i], self.accepted[i]
        if len(accepted) > 1 and layer.type not in ("Convolution", "Deconvolution"):
            # All inputs get the same layout: the first of their layouts that the layer accepts.
            current = [self.layouts.get(edge.tensor) for edge in layer.inputs]
            accepted = (next((c for c in current if c in accepted), accepted[0]),)
        for position, edge in enumerate(layer.inputs):
            is_residual = position and work.kind in COMPUTING
            is_open = edge.precision in (Precision.FLOAT, Precision.UNKNOWN)
            self._record_change(
                edge.tensor,
                layer.name,
                (self._output_layout(i),) if is_residual else accepted,
                work.precision if is_open else edge.precision,
            )

    def _record_change(
        self, tensor: str, layer: str, accepted: tuple[Layout, ...], precision: Precision
    ) -> None:
        """Record a layout change if the tensor's current layout is not accepted.

        Nothing happens if the layout is unknown, or if the tensor's shape is not [N, C, H, W] with
        more than one pixel.
        """
        current = self.layouts.get(tensor)
        if current is None or not accepted or current in accepted:
            return
        shape = self.lookup_shape(tensor)
        if shape is None or len(shape) != 4 or shape[2] * shape[3] == 1:
            return
        key = (tensor, accepted[0], "" if tensor in self.uniform else layer)
        if key not in self.keys:
            self.keys.add(key)
            elements, channels = float(math.prod(shape)), float(shape[1])
            change = LayoutChange(
                tensor, layer, current, accepted[0], elements, channels, precision
            )
            self.changes.append(change)

    def _input_layouts(self, layer: EngineLayer, work: LayerWork) -> tuple[Layout, ...]:
        """Return the layouts that a layer's data input may have, the preferred layout first.

        Empty if every layout is accepted.
        """
        if layer.type == "Conversion" or work.kind == UNKNOWN:
            return ()
        if layer.type in _LINEAR_TYPES:
            return () if self._is_noop_of_equal_shape(layer) else _LINEAR
        if work.kind in COMPUTING:
            return _convolution_input_layouts(work)
        if work.kind in (COPY, RESIZE):
            return ()
        if work.precision == Precision.INT8:
            return (Layout.BLOCKS, Layout.FOURS)
        if work.precision in _HALVES:
            return (Layout.PAIRS, Layout.CHANNELS_LAST) if work.kind == POOL else _HALF_MAPS
        return (Layout.LINEAR, Layout.CHANNELS_LAST)

    def _is_noop_of_equal_shape(self, layer: EngineLayer) -> bool:
        if layer.type != "NoOp" or not layer.inputs or not layer.outputs:
            return False
        before = self.lookup_shape(layer.inputs[0].tensor)
        return before == self.lookup_shape(layer.outputs[0].tensor)

    def _output_layout(self, i: int) -> Layout:
        layer, work = self.engine[i]
        if work.kind in COMPUTING:
            if work.precision != Precision.INT8:
                return _float_convolution_layout(work)
            return Layout.LINEAR if work.written_as == Precision.FP32 else Layout.BLOCKS
        if layer.type == "Conversion":
            return self._conversion_layout(layer, work)
        if layer.type in _LINEAR_TYPES and not self._is_noop_of_equal_shape(layer):
            return Layout.LINEAR
        current = [self.layouts.get(edge.tensor) for edge in layer.inputs]
        accepted = self.accepted[i]
        if not accepted:
            return (current[0] if current else None) or Layout.LINEAR
        return next((c for c in current if c is not None and c in accepted), accepted[0])

    def _conversion_layout(self, layer: EngineLayer, work: LayerWork) -> Layout:
        """Return the layout that a Q or DQ writes: the layout that its consumer prefers.

        Consumers that accept every layout do not count. Of the others, the first one decides.
        Without others, INT8 has the layout NC/32HW32, and float the linear layout.
        """
        for edge in layer.outputs:
            for consumer in self.consumers.get(edge.tensor, ()):
                if self.accepted[consumer]:
                    return self.accepted[consumer][0]
        return Layout.BLOCKS if work.written_as == Precision.INT8 else Layout.LINEAR


def _float_convolution_layout(work: LayerWork) -> Layout:
    is_starved = work.precision not in _HALVES and work.channels < FEW_CHANNELS
    return Layout.LINEAR if is_starved else Layout.CHANNELS_LAST


def _convolution_input_layouts(work: LayerWork) -> tuple[Layout, ...]:
    if work.precision != Precision.INT8:
        return (_float_convolution_layout(work),)
    if work.channels < FEW_CHANNELS and work.kind != DEPTHWISE:
        return (Layout.FOURS, Layout.LINEAR, Layout.BLOCKS)
    return (Layout.BLOCKS,)
