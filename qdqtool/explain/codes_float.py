"""Codes of convolutions that stay float."""

from __future__ import annotations

from qdqtool.explain.knowledge import ALL_TARGETS, CLASSIC, RTX, Code, assumed, documented, seen
from qdqtool.types import Severity

FLOAT = (
    Code(
        "NOT-QUANTIZED",
        "A convolution has no Q/DQ",
        Severity.INFO,
        "Neither its input nor its weights are quantized: left out on purpose, or missed.",
        "It runs in float.",
        "No line of a Q/DQ pass names it.",
        "Nothing, where it was left out for accuracy (the last convolutions of a detection head). Else quantize its "
        "input and weights.",
        (seen(("trt8.4", "trt8.5", *RTX), "float convolutions of quantized networks"), assumed(
            ("trt8.0", "trt8.6", "trt10", "trt11"), "the same law")),
    ),
    Code(
        "IN-FLOAT",
        "The weights are quantized, the input is not",
        Severity.WARNING,
        "The input does not come from a DQ: its pair is missing, or stands too far up, in front of an operator that "
        "a DQ cannot pass.",
        "The convolution runs in float; its weights are dequantized when the engine is built.",
        "No 'fusing (... and ...) into' line for it.",
        "Put Q/DQ directly in front of the convolution.",
        (seen(RTX, "built: FP32"), documented(CLASSIC, "developer guide: Q/DQ on every input of a quantizable layer")),
    ),
    Code(
        "IN-BLOCKED",
        "An operator stands between the DQ and the convolution",
        Severity.WARNING,
        "The DQ's output passes through an operator that does not commute with it (Relu, Add, AveragePool, a linear "
        "Resize, Pad with another value ...).",
        "The DQ cannot move down to the convolution, which runs in float.",
        "No 'VanillaSwapWithPreceedingDQ on' line for the operator.",
        "Move the pair behind the operator, directly in front of the convolution.",
        (
            seen(RTX, "built: FP32 behind Relu, Clip, Add, BatchNormalization, AveragePool, Resize"),
            documented(CLASSIC, "developer guide: DQ moves forward past commuting operators only"),
        ),
    ),
    Code(
        "FLOAT-OTHER",
        "A convolution runs in float, for a reason that only the pass tells",
        Severity.WARNING,
        "Data and weights seem to be quantized, and still no pass makes an INT8 convolution of it; the message quotes "
        "the pass that refused.",
        "The convolution runs in float, and its Q and DQ stay as conversions.",
        "No 'fusing (... and ...) into' line for it.",
        "Change what the message names.",
        (assumed(ALL_TARGETS, "the simulated pass"),),
    ),
    Code(
        "FLOAT-SM75",
        "TensorRT-RTX has no INT8 convolution for compute capability 7.5",
        Severity.WARNING,
        "7.5 (Turing) is among the GPUs that the engine is built for.",
        "Every convolution of the engine is computed in float, for the other GPUs as well.",
        "Float tensors in every convolution of the layer information.",
        "Build for 8.0 and newer only, or use TensorRT 8 or 10 on Turing.",
        (seen(RTX, "built: 163 patterns, none INT8"),),
    ),
    Code(
        "BUILD-FAILS",
        "The builder refuses the model",
        Severity.ERROR,
        "Something outside the other codes: an operator or type that this target does not take; the message says "
        "which.",
        "It stops with the error text that the message quotes.",
        "The text quoted in the finding.",
        "Change what the message names, or choose another target.",
        (seen(RTX, "built: refused"),),
    ),
    Code(
        "BUILD-CRASHES",
        "The builder dies",
        Severity.ERROR,
        "A placement that crashes this version of the builder; the message says which.",
        "The process ends with a signal; there is no error text.",
        "The log simply ends.",
        "Change what the message names.",
        (seen(RTX, "built: the process died"),),
    ),
    Code(
        "PAD-SPLIT",
        "A Q/DQ pair between Pad and its convolution",
        Severity.INFO,
        "The pair stands behind the Pad.",
        "Pad joins the convolution only if nothing stands between them.",
        "A layer of its own with the Pad's name.",
        "Move the pair in front of the Pad (zeros stay zeros).",
        (documented(CLASSIC, "NVIDIA in NVIDIA/TensorRT issue 2592"),),
    ),
    Code(
        "MATMUL-COMPUTED",
        "A MatMul of two activations is quantized",
        Severity.INFO,
        "Attention: both inputs are computed.",
        "INT8 attention was slower than FP16 in users' measurements (YOLOv12, YOLOv13).",
        "Myelin blocks with Int8 gemm.",
        "Leave the MatMul and Softmax of attention blocks in float, and measure.",
        (assumed(ALL_TARGETS, "users' measurements"),),
    ),
)
