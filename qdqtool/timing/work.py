"""What one engine layer computes and moves: the input of the time model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from onnx import TensorProto

from qdqtool.model.graph import Node
from qdqtool.model.operators import CONVOLUTIONS
from qdqtool.types import Precision

CONV, DEPTHWISE, DECONV = "conv", "depthwise", "deconv"
POOL, REDUCE, RESIZE, SOFTMAX, POINTWISE = "pool", "reduce", "resize", "softmax", "pointwise"
COPY, CONVERSION, REFORMAT, SHUFFLE = "copy", "conversion", "reformat", "shuffle"
MYELIN, NOTHING, UNKNOWN = "myelin", "nothing", "unknown"
COMPUTING = (CONV, DEPTHWISE, DECONV)
FEW_CHANNELS = 16  # input channels below which a convolution's kernel cannot feed the tensor cores

WIDTH = {
    Precision.INT8: 1.0,
    Precision.UINT8: 1.0,
    Precision.FP8: 1.0,
    Precision.BOOL: 1.0,
    Precision.INT4: 0.5,
    Precision.FP16: 2.0,
    Precision.BF16: 2.0,
    Precision.FP32: 4.0,
    Precision.FLOAT: 4.0,
    Precision.INT32: 4.0,
    Precision.INT64: 8.0,
}


@dataclass(frozen=True, slots=True)
class Work:
    """A layer as the time model sees it.

    Attributes:
        kind: One of the words above.
        precision: What it computes in; FP16 or FP32 for a float.
        written_as: Precision of its output.
        rows: Output positions of the convolution (batch x height x width, before a fused pooling); 0 for others.
        columns: Output channels of one group.
        depth: Products per output value: input channels of one group x kernel positions.
        channels: Input channels of one group; of a conversion, the tensor's channels.
        groups: Of the convolution.
        read: Bytes read, weights apart.
        weights: Bytes of the weights.
        written: Bytes written.
        steps: Kernels that it takes; 1 but for a region of many operators.
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

    @property
    def macs(self) -> float:
        """Multiply-accumulates, without padding."""
        return self.rows * self.columns * self.groups * self.depth

    @property
    def moved(self) -> float:
        """Bytes read and written, weights included."""
        return self.read + self.weights + self.written


def touched(source: float, rows: float, depth: float, groups: float) -> float:
    """Elements of a convolution's input that it reads: a 1x1 kernel of stride 2 skips three positions of four."""
    return min(source, rows * depth * groups)


def width(precision: Precision) -> float:
    """Bytes of an element; 4 where the type is not known."""
    return WIDTH.get(precision, 4.0)


FREE = (  # views and what is computed before the network runs
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Identity",
    "Cast",
    "Dropout",
    "Constant",
    "Shape",
    "ConstantOfShape",
    "Concat",
    "Split",
    "Slice",
    "QuantizeLinear",
    "DequantizeLinear",
    "Gather",
    "Range",
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
    "Reformat": COPY,
    "Concatenation": COPY,
    "Slice": COPY,
    "Padding": COPY,
}
ELEMENTS: dict[int, Precision] = {
    TensorProto.FLOAT: Precision.FP32,
    TensorProto.FLOAT16: Precision.FP16,
    TensorProto.BFLOAT16: Precision.BF16,
    TensorProto.INT8: Precision.INT8,
    TensorProto.UINT8: Precision.UINT8,
    TensorProto.INT32: Precision.INT32,
    TensorProto.INT64: Precision.INT64,
    TensorProto.BOOL: Precision.BOOL,
}


@dataclass(slots=True)
class Product:
    """A matrix product: ``rows`` x ``depth`` times ``depth`` x ``columns`` for each of ``groups``.

    ``source`` and ``out`` are the elements of the data input and of the output.
    """

    kind: str
    rows: float
    columns: float
    depth: float
    channels: float
    groups: float
    source: float
    out: float


def product_of(node: Node, shape_of: Callable[[str], tuple[int, ...] | None]) -> Product | None:
    """Rows, columns and depth of a Conv, ConvTranspose, Gemm or MatMul; None where a shape is not known."""
    source, target, weights = (shape_of(t) for t in (node.input(0), node.output, node.input(1)))
    if source is None or target is None or weights is None or not target:
        return None
    total, out = float(math.prod(source)), float(math.prod(target))
    if node.op in CONVOLUTIONS:
        if len(weights) < 3 or len(target) < 3:
            return None
        groups = max(1, node.integer("group", 1))
        kernel = float(math.prod(weights[2:]))
        if node.op == "ConvTranspose":
            rows = total / max(1, source[1])
            return Product(DECONV, rows, weights[1] * kernel, float(source[1] // groups),
                            float(source[1] // groups), float(groups), total, out)  # fmt: skip
        channels = float(weights[1])
        columns = target[1] / groups
        kind = DEPTHWISE if groups > 1 and columns * channels <= 16 else CONV
        return Product(
            kind, out / max(1, target[1]), columns, channels * kernel, channels, float(groups), total, out
        )
    depth = float(source[0] if node.op == "Gemm" and node.integer("transA", 0) else source[-1])
    columns = float(target[-1])
    return Product(CONV, out / max(1.0, columns), columns, depth, depth, 1.0, total, out)
