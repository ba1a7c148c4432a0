"""Codes about the weights and bias of a convolution."""

from __future__ import annotations

from qdqtool.explain.knowledge import CLASSIC, RTX, TRT8, Code, assumed, documented, seen
from qdqtool.types import Severity

_SECOND_INPUT = "Could not fuse 2nd input (kernel weights) of CONVOLUTION"
_BEFORE_DQ = "Quantized constant is only allowed before DQ"

WEIGHTS = (
    Code(
        "BIAS-DQ",
        "A bias is int32 behind a DequantizeLinear",
        Severity.ERROR,
        "onnxruntime quantizes biases unless extra_options has QuantizeBias=False.",
        "TensorRT has no int32 DequantizeLinear: the bias of an INT8 convolution is float.",
        "8.x: model.0.conv.bias_DequantizeLinear: only activation types allowed as input to this layer. "
        "Newer: input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8.",
        "Fold it: bias = int32 * scale, stored as float. The numbers stay exactly the same.",
        (
            seen(RTX, "built: refused"),
            documented(TRT8, "onnx-tensorrt issue 850; NVIDIA/TensorRT issue 3360"),
            assumed(("trt10", "trt11"), "the same type check as in TensorRT-RTX"),
        ),
        automatic=True,
        error=(
            ("trt8", "only activation types allowed as input to this layer."),
            ("", "input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8."),
        ),
    ),
    Code(
        "WEIGHT-PREQUANT",
        "Weights are stored as integers with a DequantizeLinear only",
        Severity.WARNING,
        "onnxruntime and ModelOpt (--dq_only) store int8 weights to save space.",
        "TensorRT 8.0 to 8.4 want float weights with Q and DQ and refuse the constant. One 8.5.2 build took int8 "
        "weights; 10 and later take them by documentation.",
        "..._DequantizeLinear: only activation types allowed as input to this layer, or ...: invalid weights type of "
        "Int8. 8.5.2 prints Running: ConstantInt8Validator instead.",
        "Store float weights (integer * scale) with a Q in front of the DQ: the same numbers, a larger file. In "
        "onnxruntime: AddQDQPairToWeight=True.",
        (
            documented(("trt8.0", "trt8.4"), "onnx-tensorrt issue 850, onnxruntime issue 11535", Severity.ERROR),
            assumed(("trt8.5", "trt8.6"), "taken by one 8.5.2 build (NVIDIA/TensorRT issue 3385); the 8.x guide asks "
                    "for FP32", Severity.WARNING),
        ),
        automatic=True,
        error=(("trt8.0", "invalid weights type of Int8"), ("trt8.4", "invalid weights type of Int8")),
    ),
    Code(
        "W-SHARED",
        "Two convolutions share their weights",
        Severity.ERROR,
        "One initializer, or one weight Q/DQ, feeds several convolutions (a detection head shared between scales, a "
        "tied layer).",
        "ConstWeightsFusion folds the INT8 weights into one convolution; the other is left without.",
        f"[qdqGraphOptimizer.cpp::reportWeightlessTwoInputConvolutionAsError] Error Code 2: Internal Error (...: "
        f"{_SECOND_INPUT})",
        "Copy the weights and their Q/DQ for each convolution.",
        (
            documented(TRT8, "NVIDIA/TensorRT issue 2131 (8.4.1); advice from NVIDIA support to copy the weights"),
            assumed(("trt10", "trt11"), "the same fusion; no build seen", Severity.WARNING),
        ),
        automatic=True,
        error=(("trt", _SECOND_INPUT),),
    ),
    Code(
        "W-NONCONST",
        "Weights are not a constant when TensorRT folds them",
        Severity.WARNING,
        "An Identity, Cast, Transpose, Reshape or Mul stands between the constant and its Q or DQ, or the weights are "
        "computed or fed at run time.",
        "ConstWeightsQuantizeFusion wants the constant directly in front of the Q. What the parser does not fold "
        "first leaves the convolution without its weights.",
        f"... {_SECOND_INPUT}, or Assertion matchPattern(context, first) && matchBackend(first) failed (8.5)",
        "Fold the constants (polygraphy surgeon sanitize --fold-constants). Weights that really change at run time "
        "cannot be INT8.",
        (documented(CLASSIC, "NVIDIA/TensorRT issues 2163, 2719, 1864"),),
        automatic=True,
        error=(("trt", _SECOND_INPUT),),
    ),
    Code(
        "WEIGHT-INDIRECT",
        "Stored integers that their DequantizeLinear does not read directly",
        Severity.ERROR,
        "The weights are stored as int8 (int4, FP8), and an Identity, Reshape, Transpose or Cast stands between them "
        "and the DequantizeLinear.",
        "A stored quantized constant may be read by a DequantizeLinear or a plugin only; the build ends at any other "
        "reader.",
        f"{_BEFORE_DQ} or PLUGIN_V2 or kPLUGIN_V3 node.",
        "Fold the node into the stored integers, or move it behind the DequantizeLinear.",
        (
            seen(RTX, "built: refused with that text"),
            documented(("trt10", "trt11"), "the same text from users' builds: NVIDIA/TensorRT issue 3919 (10.0.1), "
                       "NVIDIA/TensorRT-Edge-LLM issue 217"),
            assumed(TRT8, "8.5 and 8.6 check int8 constants in the same file of theirs, 8.4 and older take none"),
        ),
        automatic=True,
        error=(("trt10", _BEFORE_DQ), ("trt11", _BEFORE_DQ), ("rtx", _BEFORE_DQ)),
    ),
    Code(
        "W-NO-DQ",
        "The weights are not quantized: the convolution stays float",
        Severity.WARNING,
        "The input comes from a DequantizeLinear, the weights do not.",
        "A convolution runs in INT8 only if data and weights both come from a DQ. The activation's Q and DQ stay as "
        "two conversions around nothing.",
        "No 'QuantizeDoubleInputNodes: fusing (... and ...) into' line for this convolution.",
        "Add Q/DQ to the weights: per output channel, scale = max|w| / 127. No calibration is needed.",
        (
            seen(RTX, "built: FP32"),
            documented(CLASSIC, "developer guide: Q/DQ on every input of a quantizable layer"),
        ),
        automatic=True,
    ),
    Code(
        "W-Q-OUTPUT",
        "Quantized weights are an output of the network",
        Severity.ERROR,
        "The weight's Q (or DQ) was left in the list of graph outputs.",
        "The constant cannot be folded into the convolution.",
        _SECOND_INPUT,
        "Remove the output.",
        (documented(TRT8, "NVIDIA/TensorRT issue 1864 (8.2.3)"), assumed(("trt10", "trt11"), "the same fusion")),
        error=(("trt", _SECOND_INPUT),),
    ),
    Code(
        "W-AXIS",
        "Weights are quantized along an axis that is not the output channel",
        Severity.WARNING,
        "The axis attribute is missing (ONNX then means 1) or names the input channels.",
        "TensorRT 8 and 9 read a missing axis as 0, ONNX as 1: the engine computes something else than onnxruntime. "
        "Along the input channels no INT8 kernel exists.",
        "RTX: the convolution is FP32 in the layer information.",
        "Quantize weights per output channel: axis 0 for Conv, 1 for ConvTranspose, 0 or 1 for Gemm with or without "
        "transB.",
        (
            seen(RTX, "built: FP32 for axis 1 of a Conv"),
            documented(CLASSIC, "developer guide: per-channel along the output channel; parser source 8.0 to 10.1"),
        ),
    ),
    Code(
        "CT-AXIS",
        "A ConvTranspose has one weight scale for each channel",
        Severity.WARNING,
        "Weights of ConvTranspose are [input channels, output channels, ...]: older toolkits quantize along axis 0, "
        "newer ones along axis 1.",
        "Neither axis is proven on any version. NVIDIA's answers differ: axis 0 for TensorRT 8 (issue 1694), and per "
        "input channel in the kernels, with no support per output channel (issue 2380). Axis 1 did not build on 8.0.1 "
        "unless input and output channels were as many (issues 1519, 1293), or computed wrongly (issue 1699).",
        "Nothing in the log where it computes wrongly.",
        "Use one scale for all weights of the ConvTranspose: that is safe on every version.",
        (
            documented(TRT8, "NVIDIA/TensorRT issues 1694, 2380, 1519, 1293, 1699"),
            assumed(
                ("trt10", "trt11"), "newer toolkits write axis 1; no build at hand shows that it is right",
                Severity.INFO,
            ),
            seen(RTX, "never INT8 there"),
        ),
        automatic=True,
    ),
    Code(
        "CT-BN",
        "A BatchNormalization behind a quantized ConvTranspose",
        Severity.WARNING,
        "The model was exported without folding it.",
        "TensorRT folds BatchNormalization into quantized convolutions, not into quantized ConvTranspose: the output "
        "stays float.",
        "No 'QConvScaleFusion on' line for the ConvTranspose.",
        "Fold the BatchNormalization into the weights before quantizing.",
        (documented(TRT8, "NVIDIA in NVIDIA/TensorRT issue 3412 (2023): not supported yet"),
         assumed(("trt10", "trt11"), "nothing newer says that it is")),
        automatic=True,
    ),
    Code(
        "CT-FLOAT",
        "A ConvTranspose is never INT8 on this target",
        Severity.WARNING,
        "It has Q/DQ.",
        "TensorRT-RTX 1.7 dequantizes both sides and computes in float.",
        "deconv with Float inputs in the layer information.",
        "Leave it unquantized for this target: the Q and DQ only cost time.",
        (seen(RTX, "built: 12 patterns, none INT8"),),
    ),
    Code(
        "CT3D-FLOAT",
        "A quantized 3D ConvTranspose, INT8 in one pattern alone",
        Severity.WARNING,
        "A ConvTranspose with three spatial dimensions has Q/DQ.",
        "A user's engines of 10.13 ran such layers in FP16, the 3D convolutions around them in INT8. NVIDIA named one "
        "pattern that is to work: Q/DQ, ConvTranspose, activation, Q/DQ. Predicted is INT8 there and float elsewhere; "
        "no build log of either is at hand.",
        "A deconvolution with Half or Float tensors in the layer information.",
        "Put an activation and a Q/DQ pair behind it and look at the layer's types in the engine. Where it stays "
        "float, leave its Q/DQ out, or use a Resize and a convolution instead.",
        (
            documented(
                CLASSIC, "NVIDIA in NVIDIA/TensorRT issue 3412; NVIDIA/Model-Optimizer issue 688 (a user, 10.13)"
            ),
        ),
    ),
    Code(
        "BN-UNFOLDED",
        "A BatchNormalization cannot be folded into its convolution",
        Severity.WARNING,
        "Its parameters are not plain constants (an Identity or another node makes them, or they are shared).",
        "The parser makes element-wise layers of it. The convolution in front reads INT8 and writes float.",
        "A PointWise or Scale layer with the BatchNormalization's name; no 'QConvScaleFusion on' line.",
        "Fold constants, then fold the BatchNormalization into the weights and quantize again.",
        (seen(("trt8.4", "trt8.5"), "a complete 8.5.2 log"), assumed(("trt8.0", "trt8.6", "trt10", "trt11"),
                                                                     "the same importer")),
        automatic=True,
    ),
    Code(
        "ACT-PER-CHANNEL",
        "An activation has one scale per channel",
        Severity.WARNING,
        "The quantizer was set to per-channel for activations as well.",
        "INT8 activations have one scale per tensor. The convolution behind it stays float.",
        "RTX: the convolution is FP32 in the layer information, even where all scales are equal.",
        "Use one scale: the largest of them holds every channel (up to some bits are lost in the small channels).",
        (
            seen(RTX, "built: FP32"),
            documented(CLASSIC, "developer guide: activations per tensor only"),
        ),
        automatic=True,
    ),
)
