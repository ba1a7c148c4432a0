"""Fixes of float types: FP16 for the float part on strongly typed targets, float32 scales for TensorRT 8."""

from __future__ import annotations

from qdqtool.graph import Model
from qdqtool.insertion import halfprecision
from qdqtool.insertion.prepare import prepare
from qdqtool.onnxgraph.half import HALF_OPSET
from qdqtool.trt.targets import Target


def to_half(model: Model, target: Target) -> Model | None:
    """FLOAT-FP32: the float part in FP16; None where the target chooses the width itself.

    Raises:
        ModelError: The opset cannot be raised to 19.
    """
    if not target.strongly_typed:
        return None
    copy = model.copy()
    prepare(copy, opset=HALF_OPSET)
    return copy if halfprecision.to_half(copy) else None


def to_float(model: Model, target: Target) -> Model | None:
    """SCALE-FP16: the whole model in float32; None where the target takes float16 scales."""
    if target.float16_scales or not halfprecision.has_half(model):
        return None
    copy = model.copy()
    halfprecision.to_float(copy)
    return copy
