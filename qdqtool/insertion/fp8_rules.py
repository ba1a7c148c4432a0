"""Rules for nodes that are quantized in INT8 but remain float in FP8.

Sources: NVIDIA's release notes of TensorRT 10.6 and 10.16 (attention; kernels of more than 32
elements), NVIDIA/TensorRT issue 4524 (groups), ModelOpt (few channels, single rows), and builds of
TensorRT-RTX 1.7.1 for 8.9 and 12.0 (kernels, ConvTranspose, attention).
"""

from __future__ import annotations

import math

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of
from qdqtool.patterns.heads import Attention
from qdqtool.reasons.placement import PLACEMENT, FloatNode, PresetPart, SkipCause
from qdqtool.trt.fault_checks import MAX_FP8_KERNEL, fuses_fp8_attention

_MIN_CHANNELS = 17  # smallest number of input and of output channels of a convolution in FP8
_MIN_PRODUCT = 16  # smallest number of columns and smallest depth of a matrix product in FP8


def find_fp8_obstacle(model: Model, node: Node, weights: str = "") -> FloatNode | None:
    """Return why a node with constant weights is not quantized in FP8; None if FP8 suits it.

    Args:
        model: The model.
        node: A convolution or matrix product.
        weights: Name of the node's float weights, if the node reads them through Q/DQ.
    """
    shape = model.constant_shape(weights or node.input(1)) or ()
    kind = operator_of(node).kind
    obstacle: SkipCause | None = None
    if kind == LayerKind.DECONVOLUTION:
        obstacle = SkipCause.FP8_DECONVOLUTION
    elif kind == LayerKind.CONVOLUTION:
        obstacle = _find_convolution_obstacle(node, shape)
    elif min(shape, default=_MIN_PRODUCT) < _MIN_PRODUCT:
        obstacle = SkipCause.FP8_CHANNELS
    elif _has_single_row(model.shape(node.input(0))):
        obstacle = SkipCause.FP8_SINGLE_ROW
    return None if obstacle is None else FloatNode(PLACEMENT, node.name, obstacle)


def _find_convolution_obstacle(node: Node, shape: tuple[int, ...]) -> SkipCause | None:
    if math.prod(shape[2:]) > MAX_FP8_KERNEL:
        return SkipCause.FP8_KERNEL
    if node.integer("group", 1) > 1:
        return SkipCause.FP8_GROUPS
    if min(shape[:2], default=_MIN_CHANNELS) < _MIN_CHANNELS:
        return SkipCause.FP8_CHANNELS
    return None


def _has_single_row(shape: tuple[int | None, ...] | None) -> bool:
    return shape is not None and all(size == 1 for size in shape[:-1])


def find_attention_obstacle(model: Model, attention: Attention, max_head: int) -> PresetPart | None:
    """Return the reason not to quantize an attention; None if TensorRT fuses it in FP8.

    Args:
        model: The float network.
        attention: The attention.
        max_head: Largest head size that the target fuses.
    """
    queries = model.shape(attention.scores.input(0))
    scores = model.shape(attention.scores.output)
    if not queries or not scores:
        return PresetPart.ATTENTION_UNFUSED
    is_fused = fuses_fp8_attention(queries[-1], scores[-1], max_head)
    return None if is_fused else PresetPart.ATTENTION_UNFUSED
