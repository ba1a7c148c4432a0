"""Words that are no secret: of ONNX, TensorRT, onnxruntime and the programs that write models."""

from __future__ import annotations

import functools
import re

import onnx

from qdqtool.model import operators

PUBLIC_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training", "trt"})
# Attributes of known operators whose text is one of a few words of the standard, and these words.
_WORDS = frozenset({
    "auto_pad", "mode", "coordinate_transformation_mode", "nearest_mode", "padding_mode", "direction", "reduction",
    "activations", "activation", "equation", "approximate", "keep_aspect_ratio_policy", "norm", "round_mode",
})
_VALUES = frozenset({
    "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", "constant", "reflect", "edge", "wrap", "nearest", "linear",
    "cubic", "bilinear", "bicubic", "DCR", "CRD", "avg", "max", "half_pixel", "half_pixel_symmetric",
    "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn", "tf_crop_and_resize",
    "output_half_pixel", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "zeros", "border", "reflection",
    "forward", "reverse", "bidirectional", "LEFT", "RIGHT", "none", "add", "mul", "min", "mean", "sum", "tanh",
    "stretch", "not_larger", "not_smaller", "MAX", "L1", "L2", "up", "down",
})
_EQUATION = re.compile(r"[A-Za-z]{0,8}(?:(?:,|->|\.\.\.| )[A-Za-z]{0,8}){0,16}")
# Plugins that come with TensorRT, and the quantizers that its tools write.
_PLUGINS = frozenset({
    "EfficientNMS_TRT", "EfficientNMS_ONNX_TRT", "EfficientNMS_Explicit_TF_TRT", "EfficientNMS_Implicit_TF_TRT",
    "BatchedNMS_TRT", "BatchedNMSDynamic_TRT", "NMS_TRT", "NMSDynamic_TRT", "ROIAlign_TRT", "ResizeNearest_TRT",
    "InstanceNormalization_TRT", "PriorBox_TRT", "GridAnchor_TRT", "FlattenConcat_TRT", "DecodeBbox3DPlugin",
    "TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear", "TRT_FP4DynamicQuantize", "TRT_INT4QuantizeLinear",
    "TRT_INT4DequantizeLinear",
})
_PLUGIN_ATTRIBUTES = frozenset({
    "plugin_version", "plugin_namespace", "background_class", "max_output_boxes", "score_threshold", "iou_threshold",
    "score_activation", "class_agnostic", "box_coding", "shareLocation", "backgroundLabelId", "numClasses", "topK",
    "keepTopK", "scoreThreshold", "iouThreshold", "isNormalized", "clipBoxes", "scoreBits", "caffeSemantics",
    "saturate", "axis",
})
_PROGRAMS = frozenset({
    "pytorch", "onnx-graphsurgeon", "onnx.quantize", "onnxruntime", "onnx.compose", "tf2onnx", "keras2onnx", "skl2onnx",
    "paddle2onnx", "onnx", "qdqtool",
})


def is_public(text: str) -> bool:
    """Whether a text is a word of ONNX, TensorRT or this tool and no secret."""
    return text in _vocabulary()


@functools.cache
def _vocabulary() -> frozenset[str]:
    known = {*_PLUGINS, *_WORDS, *PUBLIC_DOMAINS, *_PROGRAMS}
    for schema in onnx.defs.get_all_schemas_with_history():
        known.update((schema.name, *schema.attributes))
        known.update(i.name for i in (*schema.inputs, *schema.outputs))
    return frozenset(known)


def public_attributes(node: onnx.NodeProto) -> frozenset[str] | None:
    """The attributes of a public operator, None for one that nobody knows."""
    op, domain = node.op_type, node.domain
    if domain == "com.microsoft":
        return _runtime_operators().get(op)
    if op in _PLUGINS:
        return _PLUGIN_ATTRIBUTES
    if domain in PUBLIC_DOMAINS and (op in _vocabulary() or op in operators.OPERATORS):
        return _vocabulary()
    return None


@functools.cache
def _runtime_operators() -> dict[str, frozenset[str]]:
    """The operators that onnxruntime adds, with their attributes."""
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    return {s.name: frozenset(s.attributes) for s in runtime.get_all_operator_schema() if s.domain == "com.microsoft"}


def is_word(attribute: str, text: str) -> bool:
    if attribute == "equation":
        return _EQUATION.fullmatch(text) is not None
    return attribute in _WORDS and (text in _VALUES or is_public(text))
