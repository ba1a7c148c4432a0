"""What one engine layer computes and moves: the input of the time model."""

from __future__ import annotations

from dataclasses import dataclass

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
