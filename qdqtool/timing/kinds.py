"""Operators and layers by what they cost: nothing, a pass over their values, or a kernel of a kind."""

from __future__ import annotations

from onnx import TensorProto

from qdqtool.timing import work
from qdqtool.types import Precision

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
    "Pooling": work.POOL,
    "Reduce": work.POOL,
    "Resize": work.RESIZE,
    "Softmax": work.SOFTMAX,
    "Conversion": work.CONVERSION,
    "Reformat": work.COPY,
    "Concatenation": work.COPY,
    "Slice": work.COPY,
    "Padding": work.COPY,
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
