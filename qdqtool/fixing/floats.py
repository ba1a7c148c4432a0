"""Fixes of floats: FP16 for the float part where types are strong, float32 scales for TensorRT 8, normalizations."""

from __future__ import annotations

from onnx import helper

from qdqtool.insertion import halfprecision
from qdqtool.insertion.prepare import prepare, raise_opset
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model
from qdqtool.model.half import HALF_OPSET
from qdqtool.model.layernorm import NORM_OPSET, as_one, layer_norms
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


def to_layer_norm(model: Model, target: Target) -> Model | None:
    """NORM-PIECES: each layer normalization in pieces that a LayerNormalization computes exactly, as one.

    Its last node becomes the LayerNormalization, so that name and output stay.

    Raises:
        ModelError: The opset cannot be raised to 17.
    """
    if not target.layer_normalization:
        return None
    copy = model.copy()
    if copy.opset < NORM_OPSET:
        raise_opset(copy, NORM_OPSET)
    editor = Editor(copy)
    found = [(p, values) for p in layer_norms(copy) if (values := as_one(copy, p)) is not None]
    for pieces, (scale, bias) in found:
        assert pieces.axes is not None and pieces.epsilon is not None
        last = pieces.nodes[-1]
        inputs = [pieces.tensor, editor.constant(f"{last.name}/scale", scale)]
        if bias is not None:
            inputs.append(editor.constant(f"{last.name}/bias", bias))
        proto = editor.proto_of(last)
        proto.CopyFrom(helper.make_node(
            "LayerNormalization", inputs, last.outputs, last.proto.name, axis=pieces.axes[0], epsilon=pieces.epsilon,
        ))  # fmt: skip
    return editor.finish() if found else None
