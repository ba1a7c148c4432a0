"""What the ONNX parser says: models that it refuses, and its remarks."""

from __future__ import annotations

from qdqtool.explain.errors_entry import ERROR, HARMLESS, WARNING, KnownError

IMPORTER: tuple[KnownError, ...] = (
    KnownError(
        "zero-point", "A zero point that is not 0",
        r"shiftIsAllZeros|only supports symmetric quantization|Non-zero zero point is not supported"
        r"|zeroPt must be all zeros",
        ERROR,
        "A QuantizeLinear or DequantizeLinear has a zero point other than 0. TensorRT quantizes symmetrically only.",
        "Calibrate symmetrically (int8, zero point 0; torch's fbgemm and x86 configurations quantize activations to "
        "uint8 "
        "with zero points: take symmetric qint8 observers). 'qdqtool fix' rewrites uint8 with zero point 128 exactly; "
        "other "
        "asymmetric scales must be calibrated again ('qdqtool insert').",
        "issue 2774, onnx-tensorrt importer",
        ("ZP-NONZERO",),
        versions="all; other wording from 10.11",
    ),
    KnownError(
        "uint8-zero-point", "A uint8 zero point",
        r"UINT8 zero_point only on DLA|Defaulting to INT8|Found invalid input type of UINT8",
        WARNING,
        "A zero point of type uint8. TensorRT reads the codes as int8, so that those above 127 saturate.",
        "Store int8 zero points: run 'qdqtool fix', or quantize with signed activations "
        "(onnxruntime: ActivationSymmetric=True, QuantType.QInt8).",
        "onnx-tensorrt importer, 10.10 and later",
        ("ZP-UINT8",),
        versions="warning from 9.0, refused before in part",
    ),
    KnownError(
        "scale-positive", "A scale that is not positive",
        r"Scale coefficients must all be positive",
        ERROR,
        "A scale is zero or negative (a dead channel), or, on TensorRT 8.x, the scales are FP16, which 8.x misreads.",
        "'qdqtool fix' replaces zero scales; give TensorRT 8.x FP32 scales.",
        "onnx-tensorrt issue 764",
        ("SCALE-NONPOS", "SCALE-FP16"),
        versions="zero scales: all; FP16 scales: 8.x",
    ),
    KnownError(
        "scale-count", "The number of scales does not fit the channels",
        r"number of scales is not equal to the number of output channels|K == scale\.count|"
        r"shift weights has count \d+ but|mis-matched Scale shape and dimension",
        ERROR,
        "Per-channel scales lie along the wrong axis, or there are too few or too many of them.",
        "The axis is that of the output channels: 0 for Conv, 0 for Gemm with transB=1, else 1. For ConvTranspose give "
        "one scale per tensor, which every version takes: TensorRT 8 wants axis 0 there, newer versions axis 1.",
        "developer guide; issues 1694, 1519, 2380; onnxruntime issue 10045 (Myelin's words for it)",
        ("SCALE-COUNT", "CT-AXIS"),
    ),
    KnownError(
        "scale-rank", "A scale with too many dimensions",
        r"Invalid rank for the scale tensor",
        ERROR,
        "A scale tensor with two or more dimensions that is not a blocked scale.",
        "Make the scale a scalar (per tensor) or one-dimensional (per channel).",
        "onnx-tensorrt importer",
        ("SCALE-RANK",),
    ),
    KnownError(
        "zero-point-volume", "Zero point and scale differ in size",
        r"scale and zero point must have the same volume",
        ERROR,
        "One zero point for many scales, or the other way round.",
        "Give the zero point the shape of the scale: 'qdqtool fix'.",
        "onnx-tensorrt importer",
    ),
    KnownError(
        "dq-three-inputs", "A Q or DQ without a zero point",
        r"requires 3 inputs for the (?:De)?QuantizeLinear operator",
        ERROR,
        "TensorRT 8.x needs the zero point of a Q or DQ written out.",
        "Add an int8 zero point of zeros, or build with TensorRT 10.",
        "onnx-tensorrt importer, 8.x",
        versions="8.x",
    ),
    KnownError(
        "bias-quantized", "A quantized bias, stored int8 weights, or a shared zero point",
        r"only activation types allowed as input to this layer|Invalid Node - \S*bias\S*_DequantizeLinear"
        r"|invalid weights type of Int8",
        ERROR,
        "An int32 bias behind a DequantizeLinear, or int8 weights stored in the file: TensorRT 8.x takes neither. "
        "Where the lines around name an Identity: the export (PyTorch 1.12) shares one int8 zero point among many "
        "quantizers through Identity nodes, which is no stored weight at all.",
        "'qdqtool fix' folds the bias and turns stored int8 weights into float weights with Q and DQ (exact). "
        "onnxruntime: QuantizeBias=False, AddQDQPairToWeight=True. Shared zero points: fold constants ('polygraphy "
        "surgeon sanitize model.onnx --fold-constants -o folded.onnx').",
        "onnx-tensorrt issue 850; issue 2163 and Sparsebit issue 16 (zero points)",
        ("BIAS-DQ", "WEIGHT-PREQUANT"),
        versions="8.x",
    ),
    KnownError(
        "kernel-not-set", "Weights that come through Q and DQ",
        r"Kernel weights are not set yet",
        HARMLESS,
        "The parser says it of every convolution whose weights come through Q and DQ.",
        "Nothing to do.",
        "seen in every Q/DQ build",
    ),
    KnownError(
        "axis-attribute", "Per-channel Q/DQ needs opset 13",
        r"Unrecognized attribute: axis for operator",
        ERROR,
        "Per-channel Q/DQ needs ONNX opset 13.",
        "Export with opset 13 or later.",
        "issue 1685",
        versions="all",
    ),
    KnownError(
        "int64-weights", "64-bit integers",
        r"ONNX model has been generated with INT64 weights",
        HARMLESS,
        "Indices and shapes are 64-bit in ONNX; TensorRT 8 narrows them to 32 bits.",
        "Nothing to do.",
        "onnx-tensorrt importer",
    ),
    KnownError(
        "int64-clamped", "A 64-bit integer narrowed",
        r"One or more weights outside the range of INT32 was clamped",
        HARMLESS,
        "A slice end of 'the maximum' was narrowed to 32 bits.",
        "Nothing to do.",
        "onnx-tensorrt importer",
    ),
    KnownError(
        "integer-operators", "ONNX integer operators",
        r"QLinear(?:Conv|MatMul|Add|Mul|Sigmoid|Concat|LeakyRelu|GlobalAveragePool|AveragePool)|DynamicQuantize\w{1,20}"
        r"|ConvInteger|MatMulInteger|QGemm|QAttention",
        ERROR,
        "The model uses integer operators (onnxruntime's QOperator format, or dynamic quantization, which finds the "
        "scales while running). TensorRT imports none of them, and there is no plugin for them.",
        "Quantize statically in Q/DQ form (onnxruntime: quantize_static with QuantFormat.QDQ, symmetric int8), or "
        "start from the float model ('qdqtool insert').",
        "developer guide; issue 3963 (DynamicQuantizeLinear, 8.6.1)",
        ("QOPERATOR",),
    ),
    KnownError(
        "weights-tensor", "Weights of a convolution that are computed, in a network without Q/DQ",
        r"two inputs \(data and weights\) are allowed only",
        ERROR,
        "The weights of the convolution are not stored in the file: nodes compute them. The parser takes that only "
        "where Q/DQ stand in the network.",
        "Fold constants ('polygraphy surgeon sanitize model.onnx --fold-constants -o folded.onnx', or onnxsim). "
        "Weights that really change at run time (dynamic convolutions) need a MatMul or a plugin. If the model should "
        "have Q/DQ: it has none, check the file.",
        "mmdeploy issue 926",
        versions="8.x",
    ),
    KnownError(
        "dq-type", "A quantizer of a type that TensorRT does not have",
        r"quantize\]: input has type \w+ but must have type|must have type FP8, FP4, Int4, or Int8",
        ERROR,
        "A DequantizeLinear reads a type that TensorRT cannot dequantize, mostly UINT8 (a uint8 network input, or "
        "onnxruntime's uint8 activations) or INT32 (a quantized bias).",
        "Quantize to int8 with zero point 0 ('qdqtool fix' rewrites uint8 with zero point 128 and folds a quantized "
        "bias). A uint8 network input goes through a Cast and a Mul in float instead.",
        "rustnn issue 153 (TensorRT-RTX); operator documentation of Dequantize",
        ("ZP-UINT8", "QTYPE", "BIAS-DQ"),
        versions="seen on TensorRT-RTX; the wording of 10",
    ),
    KnownError(
        "plugin-missing", "An operator that TensorRT does not know",
        r"No importer registered for op|Plugin not found|could not find plugin",
        ERROR,
        "The model has an operator that TensorRT does not know.",
        "Load its plugin (--plugins=... or --staticPlugins), or export the model without the operator.",
        "onnx-tensorrt importer",
    ),
)
