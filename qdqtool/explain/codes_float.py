"""Codes of convolutions that stay float."""

from __future__ import annotations

from qdqtool.explain.knowledge import ALL_TARGETS, CLASSIC, RTX, Code, assumed, documented, seen
from qdqtool.types import Severity

FLOAT = (
    Code(
        "FP8-OUTSIDE",
        "FP8 or INT4 Q/DQ are outside the rules",
        Severity.WARNING,
        "The model has quantizers of FP8, INT4 or a smaller type.",
        "The rules of this prediction are those of INT8's Q/DQ passes. What TensorRT makes of other types is decided "
        "elsewhere, and no build at hand shows it.",
        "FP8 or Int4 in the layer information of a detailed profile.",
        "Build with --stronglyTyped, which takes the types from the model (10.2 needed it to try FP8 convolutions at "
        "all), and read the layer information of the engine.",
        (documented(CLASSIC, "NVIDIA in NVIDIA/TensorRT issue 3987 (10.2)"),),
    ),
    Code(
        "CONV3D-INT8",
        "A quantized 3D convolution, which 8.2 did not build",
        Severity.WARNING,
        "A Conv with three spatial dimensions has Q/DQ.",
        "Two users' builds of such models failed, on 8.2.2 and 8.2.5; no build at hand shows one that works.",
        "An internal error, or no implementation, at the convolution.",
        "Leave 3D convolutions float on these versions, or use a newer TensorRT.",
        (documented(("trt8.0",), "NVIDIA/TensorRT issues 1726 (8.2.2) and 2125 (8.2.5), users"),),
    ),
    Code(
        "KERNEL-LARGE",
        "A quantized convolution with a very large kernel",
        Severity.WARNING,
        "The patch embedding of a vision transformer: kernel and stride are the size of a patch.",
        "Two builds of one ViT with patches of 32x32 found no INT8 kernel on 8.6. No engine of TensorRT 8 at hand has "
        "an "
        "INT8 kernel above 7x7; TensorRT-RTX 1.7 builds 32x32.",
        "Could not find any implementation for node patch_embed.proj.weight + ...",
        "Leave this convolution float (insert --exclude): it is one of the first, reads the image, and is cheap.",
        (
            documented(("trt8.6",), "pytorch/TensorRT issue 2101 and NVIDIA/TensorRT issue 3139 (8.6.1, 32x32)"),
            assumed(("trt8.0", "trt8.4", "trt8.5", "trt10", "trt11"), "not known to be better there"),
        ),
        error=(("trt8.6", "Could not find any implementation for node"),),
    ),
    Code(
        "NORM-FLOAT",
        "A normalization or Softmax behind a DQ",
        Severity.INFO,
        "The input of a LayerNormalization, another normalization of activations or a Softmax is quantized.",
        "It is computed in float, on every version. A convolution in front of the pair still writes INT8, and what "
        "reads the pair dequantizes it.",
        "A Myelin region (ForeignNode) or a Softmax layer with float tensors.",
        "Keep the pair where a convolution in front of it gains INT8 output; NVIDIA puts Q/DQ between a convolution "
        "and its LayerNorm, through the Transpose, for that. Remove it elsewhere.",
        (documented(ALL_TARGETS, "NVIDIA/TensorRT issues 4084, 4242, 3243; NVIDIA/Model-Optimizer pull request 1117"),),
    ),
    Code(
        "PLUGIN-OUTSIDE",
        "A plugin or unknown operator",
        Severity.INFO,
        "The operator is not ONNX's: a plugin decides which types it takes.",
        "It is taken to have the types that the model gives it, with no Q or DQ moving past or into it. A plugin with "
        "an INT8 format may do more.",
        "A PluginV2 layer.",
        "Quantize the convolutions around it on their own: Q/DQ in front of each, none between plugin and DQ. Check "
        "the plugin's formats in the layer information.",
        (assumed(CLASSIC, "the plugin's own code decides"),),
    ),
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
        "INT8 attention was slower than FP16 in users' measurements (YOLOv12, YOLOv13). Fused INT8 attention needs "
        "compute capability 7.5, a head size of 16, 32 or 64, sequences of at most 512, and Q/DQ in front of the first "
        "MatMul, behind the Softmax and behind the second MatMul; without all of that each MatMul is a kernel of its "
        "own.",
        "Myelin blocks with Int8 gemm; fused attention has _mha in its kernel's name.",
        "Leave the MatMul and Softmax of attention blocks in float (FP16 attention is fused), and measure.",
        (
            documented(
                CLASSIC, "developer guide, MHA fusion (NVIDIA/TensorRT issues 2981, 4167); NVIDIA in issues 3243, 3724"
            ),
            assumed(RTX, "users' measurements on TensorRT"),
        ),
    ),
)
