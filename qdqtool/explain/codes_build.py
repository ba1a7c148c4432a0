"""Codes of what makes a build fail, or a built engine compute something else: scales, zero points, types, opsets.

Error texts are those of TensorRT's ONNX parser (its published source) or of builds that were run.
"""

from __future__ import annotations

from qdqtool.explain.knowledge import (
    ALL_TARGETS,
    CLASSIC,
    RTX,
    TRT8,
    Code,
    assumed,
    documented,
    seen,
)
from qdqtool.types import Severity

_ZP_8 = "TRT only supports symmetric quantization - zeroPt must be all zeros"
_ZP_10 = (
    "Non-zero zero point is not supported. Please set kENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA to enable "
    "asymmetric quantization if it is on DLA."
)
_POSITIVE = "Scale coefficients must all be positive"

BUILD = (
    Code(
        "ZP-NONZERO",
        "A zero point is not 0",
        Severity.ERROR,
        "The model was quantized asymmetrically, as onnxruntime does unless it is told not to "
        "(ActivationSymmetric, WeightSymmetric).",
        "TensorRT's INT8 is symmetric: real value = scale * integer. The parser refuses the node.",
        f"8.x: [6] Assertion failed: shiftIsAllZeros(zeroPoint) && \"{_ZP_8}\"; 10.11 and later: {_ZP_10}",
        "Quantize again with symmetric ranges. A uint8 tensor with zero point 128 is the same numbers as int8 with "
        "zero point 0 and is rewritten exactly; any other zero point gets the smallest symmetric scale that holds "
        "its range, which costs up to one bit.",
        (
            seen(RTX, "built: refused"),
            documented(CLASSIC, "parser source 8.0 to 11; NVIDIA/TensorRT issues 2774, 4698"),
        ),
        automatic=True,
        error=(("trt8", _ZP_8), ("", _ZP_10)),
    ),
    Code(
        "ZP-UINT8",
        "A uint8 tensor with zero point 0: codes above 127 are lost",
        Severity.ERROR,
        "The zero point has type uint8, or is missing (ONNX then means uint8). Ranges of 0 to 255 steps are meant, "
        "as onnxruntime makes them after a ReLU.",
        "There is no uint8 quantization on the GPU. TensorRT reads the node as int8: everything above 127 steps is "
        "cut off, so half the range is lost without an error. 8.5 to 10.1 may refuse the node instead.",
        "10.11 and later: \"TensorRT supports QuantizeLinear/DequantizeLinear with UINT8 zero_point only on DLA ... "
        "Defaulting to INT8 instead.\" 9.0 to 10.1: \"TensorRT will use INT8 instead.\"",
        "Make the zero point int8 and double the scale (up to one bit is lost), or quantize again with int8.",
        (
            seen(RTX, "built: imported as INT8 with that warning"),
            documented(("trt10", "trt11"), "parser source: warning, then INT8"),
            assumed(("trt8.5", "trt8.6"), "parser source: checks for UINT8; whether it fires is not tested"),
            assumed(("trt8.0", "trt8.4"), "parser source: the zero point's type is not read"),
        ),
        automatic=True,
    ),
    Code(
        "DQ-3-INPUTS",
        "A Q or DQ has no zero-point input, which TensorRT 8 wants",
        Severity.ERROR,
        "The zero point is optional in ONNX; many tools leave it out.",
        "The 8.x parser stops at the node. 9.0 and later take two inputs.",
        "[6] Assertion failed: (inputs.size() == 3) && \"This version of TensorRT requires 3 inputs for the "
        "DequantizeLinear operator.\"",
        "Add an int8 zero point of zeros, of the scale's shape.",
        (documented(TRT8, "parser source 8.0 to 8.6"),),
        automatic=True,
        error=(("trt8", "This version of TensorRT requires 3 inputs for the DequantizeLinear operator."),),
    ),
    Code(
        "ZP-VOLUME",
        "Scale and zero point have different sizes",
        Severity.ERROR,
        "A per-channel scale with a scalar zero point, or the other way round.",
        "The parser refuses the node.",
        "The scale and zero point must have the same volume. Size of zero point = 1, size of the scale = 64.",
        "Give the zero point the scale's shape.",
        (documented(ALL_TARGETS, "parser source 8.0 to 11"),),
        automatic=True,
        error=(
            ("trt8", "The scale and zero-point must have the same size"),
            ("", "The scale and zero point must have the same volume."),
        ),
    ),
    Code(
        "SCALE-NONPOS",
        "A scale is zero, negative or not a number",
        Severity.ERROR,
        "A channel of weights is all zero (pruned, or dead), or a tensor was zero on every calibration image.",
        "The parser refuses the node.",
        f"[6] Assertion failed: scaleAllPositive && \"{_POSITIVE}\"",
        "Any positive scale represents a tensor of zeros. A negative scale becomes its absolute value where weights "
        "are stored as floats.",
        (
            seen(RTX, "built: refused, for one zero among the weights' scales as well"),
            documented(CLASSIC, "parser source 8.0 to 11; onnx-tensorrt issue 764"),
        ),
        automatic=True,
        error=(("", _POSITIVE),),
    ),
    Code(
        "SCALE-FP16",
        "A float16 scale, which TensorRT 8 reads as float32",
        Severity.ERROR,
        "The model was exported with half-precision floats around its Q/DQ (ONNX allows that from opset 19).",
        "The 8.x parser reads the bytes of float16 scales as float32 and finds nonsense, mostly not positive. The "
        "scales are fine; the message misleads. 10 and later read float16 and bfloat16.",
        f"[6] Assertion failed: scaleAllPositive && \"{_POSITIVE}\", although every scale is positive",
        "Write the scales as float32 (with the float part of the model in float32 too, TensorRT 8 picks the width "
        "itself with --fp16), or use TensorRT 10.",
        (documented(TRT8, "parser source; a YOLOv8n with 262 positive float16 scales refused by 8.6.1"),),
        automatic=True,
        error=(("trt8", _POSITIVE),),
    ),
    Code(
        "SCALE-RANK",
        "A scale tensor has more than one dimension",
        Severity.ERROR,
        "Scales of shape [64,1,1,1] instead of [64], or blocked quantization on an operator that has none.",
        "The parser wants a scalar or a vector. From 10.x on it takes more dimensions for blocks along one of the last "
        "two dimensions of a MatMul's weights, and refuses the rest.",
        "Only a single blocking dimension is allowed. / Invalid rank for the scale tensor. Rank = 2.",
        "Reshape the scale and the zero point to one dimension.",
        (
            documented(("trt11",), "parser source"),
            seen(RTX, "built: blocked INT8 weights of a convolution refused"),
            assumed(("trt10",), "parser source differs between 10.0 and 10.16"),
            assumed(TRT8, "parser source counts the scales only", Severity.WARNING),
        ),
        error=(("trt11", "Only a single blocking dimension is allowed."),),
    ),
    Code(
        "SCALE-COUNT",
        "The number of scales is not the size of the axis",
        Severity.ERROR,
        "Per-channel scales on the wrong axis, or a grouped ConvTranspose, whose weights have only the channels of "
        "one group on axis 1.",
        "The parser refuses the node.",
        "The number of scales is not equal to the number of output channels. Number of output channels = 4, number "
        "of scales = 16.",
        "Put the axis right: 0 for Conv, 1 for ConvTranspose. For a grouped ConvTranspose use one scale for all.",
        (
            seen(RTX, "built: refused"),
            documented(CLASSIC, "parser source 8.0 to 11"),
        ),
        error=(("", "The number of scales is not equal to the number of output channels."),),
    ),
    Code(
        "SCALE-DYNAMIC",
        "A scale is computed at run time",
        Severity.ERROR,
        "Dynamic quantization, or a scale behind operators that nobody folded into a constant.",
        "TensorRT needs every scale when it builds.",
        "TensorRT-RTX 1.7 died (signal 11) in the build; the documentation asks for build-time constants.",
        "Fold the constants (polygraphy surgeon sanitize --fold-constants), or quantize statically.",
        (
            seen(RTX, "built: the builder crashed"),
            documented(CLASSIC, "operator documentation: scales are build-time constants"),
        ),
    ),
    Code(
        "SCALE-SHAPE1",
        "An activation's scale has shape [1] instead of being a scalar",
        Severity.WARNING,
        "pytorch-quantization and some converters write one-element vectors.",
        "TensorRT-RTX 1.7 takes it as per-channel quantization with one channel and computes the convolution in "
        "float. The parsers of TensorRT 8.0 to 10 take one element as per-tensor.",
        "RTX: the convolution's kernel has Float inputs in the layer information.",
        "Reshape the scale and the zero point to scalars (shape []).",
        (seen(RTX, "built: 64 of 64 convolutions of YOLOv8n in float"),),
        automatic=True,
    ),
    Code(
        "QTYPE",
        "A quantized type that TensorRT does not have",
        Severity.ERROR,
        "int16 or uint16 activations (onnxruntime offers them for other hardware), or FP8 E5M2.",
        "The parser cannot import the zero point.",
        "Failed to import initializer ... (importInitializers): UNSUPPORTED_NODE",
        "Quantize to int8.",
        (seen(RTX, "built: refused"), assumed(CLASSIC, "no such type in the API")),
        error=(("", "Failed to import initializer"),),
    ),
    Code(
        "QOPERATOR",
        "Integer operators instead of Q/DQ",
        Severity.ERROR,
        "The model was quantized in onnxruntime's QOperator format or dynamically: QLinearConv, QLinearMatMul, "
        "ConvInteger, MatMulInteger, DynamicQuantizeLinear.",
        "TensorRT has no importer for them.",
        "No importer registered for op: QLinearConv. Attempting to import as plugin.",
        "Quantize again with QuantFormat.QDQ and static ranges, or start from the float model.",
        (
            seen(RTX, "built: refused"),
            documented(CLASSIC, "developer guide: QLinearConv and QLinearMatMul are import errors"),
        ),
        error=(("", "No importer registered for op"),),
    ),
    Code(
        "OPSET-AXIS",
        "Per-channel Q/DQ in an opset below 13",
        Severity.ERROR,
        "QuantizeLinear has had the attribute axis since opset 13. In an older model it is not valid ONNX.",
        "With the attribute, ONNX's own checks refuse the node; without it TensorRT takes axis 0.",
        "Unrecognized attribute: axis for operator QuantizeLinear",
        "Export with opset 13 or later, or convert the model (onnx.version_converter).",
        (
            documented(CLASSIC, "NVIDIA/TensorRT issue 1685; developer guide: opset 13 for per-channel"),
            assumed(RTX, "the same parser; only opsets 10 and 12 without axis were built"),
        ),
        error=(("", "Unrecognized attribute: axis for operator QuantizeLinear"),),
    ),
    Code(
        "FLOAT-FP32",
        "What is not quantized stays FP32 on a strongly typed target",
        Severity.WARNING,
        "The model's float tensors are FP32. TensorRT 11 and TensorRT-RTX have no --fp16: the ONNX types decide.",
        "Every operator outside Q/DQ, and the float side of every conversion, runs in FP32.",
        "Layer information: Float where you expect Half. trtexec 11: [E] Unknown option: --int8 / --fp16",
        "Convert the float part to FP16 (float16 scales need opset 19). Ultralytics measured 18 % less latency from "
        "this alone, with the same Q/DQ pairs.",
        (
            seen(RTX, "built: FP32 kernels"),
            documented(("trt11",), "release notes: weak typing removed; ultralytics pull request 26167"),
        ),
        automatic=True,
    ),
    Code(
        "FLOAT-MIXED",
        "Data and weights of a convolution have different float types",
        Severity.ERROR,
        "Part of the model was converted to FP16 or BF16, for instance the scale of one DQ and not that of the other "
        "(a DQ writes the type of its scale). It is no valid ONNX.",
        "Where types are those of the model (11, TensorRT-RTX, 10 with --stronglyTyped) the builder refuses the "
        "convolution. It is not counted as INT8.",
        "IConvolutionLayer `input` and `kernel` must be of same type. `input` type is Half but `kernel` is of type "
        "Float.",
        "Give both the same float type: cast the other input, or convert the scale of its Q and DQ.",
        (
            assumed(("trt11",), "TensorRT-RTX 1.7 refuses the same (convolutionNode.cpp)"),
            assumed(("trt10",), "the same if built --stronglyTyped; weakly typed it is not known", Severity.WARNING),
        ),
    ),
    Code(
        "FLAG-FP16",
        "Build with --fp16 beside --int8, or the rest runs in FP32",
        Severity.INFO,
        "On weakly typed targets (before 11) Q/DQ alone allows only INT8 and FP32.",
        "Without --fp16 (or --best) every operator that is not quantized runs in FP32.",
        "FP32 and INT8 precisions have been specified - more performance might be enabled by additionally "
        "specifying --fp16 or --best",
        "trtexec --int8 --fp16 ...",
        (documented((*TRT8, "trt10"), "TensorRT's own hint; NVIDIA/TensorRT issues 550, 3762"),),
    ),
)
