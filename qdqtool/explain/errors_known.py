"""The entries of :mod:`qdqtool.explain.errors`."""

from __future__ import annotations

from dataclasses import dataclass

HARMLESS = "harmless"
WARNING = "warning"
ERROR = "error"


@dataclass(frozen=True, slots=True)
class KnownError:
    """A message that is known.

    Attributes:
        id: Stable short name.
        title: What it is, in a few words.
        pattern: Regular expression, searched without regard to case; short and free of nested repetition.
        severity: ``error``, ``warning`` or ``harmless``.
        cause: Why TensorRT says it, in one sentence or two.
        fix: What to do.
        source: Where cause and fix come from.
        versions: TensorRT versions that say it, where that is known.
        codes: Finding codes of ``qdqtool predict`` that tell it before the build.
    """

    id: str
    title: str
    pattern: str
    severity: str
    cause: str
    fix: str
    source: str
    codes: tuple[str, ...] = ()
    versions: str = ""


KNOWN: tuple[KnownError, ...] = (
    KnownError(
        "zero-point", "A zero point that is not 0",
        r"shiftIsAllZeros|only supports symmetric quantization|Non-zero zero point is not supported"
        r"|zeroPt must be all zeros",
        ERROR,
        "A QuantizeLinear or DequantizeLinear has a zero point other than 0. TensorRT quantizes symmetrically only.",
        "Calibrate symmetrically (int8, zero point 0). 'qdqtool fix' rewrites uint8 with zero point 128 exactly; other "
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
        r"shift weights has count \d+ but",
        ERROR,
        "Per-channel scales lie along the wrong axis, or there are too few or too many of them.",
        "The axis is that of the output channels: 0 for Conv, 1 for ConvTranspose, 0 for Gemm with transB=1, else 1.",
        "developer guide; issue 1694",
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
        "bias-quantized", "A quantized bias, or stored int8 weights",
        r"only activation types allowed as input to this layer|Invalid Node - \S*bias\S*_DequantizeLinear"
        r"|invalid weights type of Int8",
        ERROR,
        "An int32 bias behind a DequantizeLinear, or int8 weights stored in the file: TensorRT 8.x takes neither.",
        "'qdqtool fix' folds the bias and turns stored int8 weights into float weights with Q and DQ (exact). "
        "onnxruntime: QuantizeBias=False, AddQDQPairToWeight=True.",
        "onnx-tensorrt issue 850",
        ("BIAS-DQ", "WEIGHT-PREQUANT"),
        versions="8.x",
    ),
    KnownError(
        "weights-not-folded", "Quantized weights that cannot be folded into their convolution",
        r"reportWeightlessTwoInputConvolutionAsError|Could not fuse 2nd input \(kernel weights\)",
        ERROR,
        "The quantized weights of a convolution could not be folded into it: two convolutions share them, their Q is a "
        "graph output, or something that is no constant stands in front of the Q.",
        "Give each convolution its own weights and fold Identity, Cast and Reshape in front of the Q: 'qdqtool fix'.",
        "issues 1864, 2131",
        ("W-SHARED", "W-NONCONST", "W-Q-OUTPUT"),
        versions="seen on 8.2.3 and 8.4.1",
    ),
    KnownError(
        "weights-pattern", "A failed fusion of quantized weights",
        r"fusePattern.{0,200}matchPattern",
        ERROR,
        "TensorRT 8.5 failed while fusing quantized weights into a layer.",
        "Fold what stands between the weights and their Q ('qdqtool fix'), or build with a newer TensorRT.",
        "issue 2719",
        ("W-NONCONST",),
        versions="seen on 8.5",
    ),
    KnownError(
        "no-implementation", "No kernel for a fused layer",
        r"Could not find any implementation for node",
        ERROR,
        "No kernel of this GPU and version runs the fused layer in the precision that its Q/DQ asks for. Usual cases: "
        "depthwise convolution with SiLU (8.5) or followed by Add (before 10), INT8 on compute capability 7.5, "
        "quantized ConvTranspose before 8.5, or too small a workspace.",
        "Leave the Q/DQ of the named convolution out, raise the workspace (--memPoolSize=workspace:...), or build with "
        "a newer TensorRT.",
        "issues 3385, 4060, 2280; documentation, 'Q/DQ limitations'",
    ),
    KnownError(
        "pointwise-out-scales", "A pointwise output read with different scales",
        r"toExpr.{0,200}outScales\.size\(\) == 1",
        ERROR,
        "The output of one pointwise layer is read by Qs with different scales.",
        "Give the Qs on that tensor one scale ('qdqtool insert' ties them), or move one behind its own node.",
        "issue 2664",
        ("CONCAT-SCALE",),
        versions="seen on 8.5",
    ),
    KnownError(
        "same-expr", "Q/DQ on both inputs of an Add",
        r"sameExprValues.{0,200}lhs\.expr",
        ERROR,
        "TensorRT 8.0 cannot fuse an Add with Q/DQ on both inputs behind a Relu.",
        "Keep the Q/DQ on the residual input alone, or build with a newer TensorRT.",
        "issue 1574",
        ("ADD-BOTH",),
        versions="seen on 8.0",
    ),
    KnownError(
        "marked-int8", "An operator without an INT8 kernel",
        r"candidateRequirements\.empty\(\)|incorrectly marked as an int8 node",
        ERROR,
        "An operator got an INT8 input and has no INT8 kernel.",
        "Remove the Q/DQ in front of that operator.",
        "issue 3040",
    ),
    KnownError(
        "copying-leaf", "A Q/DQ pattern that 8.0 cannot build",
        r"asCopyingLeafNode\(\)",
        ERROR,
        "A Q/DQ pattern that TensorRT 8.0 cannot build.",
        "Build with TensorRT 8.4 or newer.",
        "issue 1337",
        versions="seen on 8.0",
    ),
    KnownError(
        "int8-flag", "Q/DQ without --int8",
        r"int8 is not configured in the builder|Int8 precision has been set for a layer",
        ERROR,
        "The model has Q/DQ, and the weakly typed builder (up to TensorRT 10) was not told to use INT8.",
        "Add --int8 (and --fp16 for what stays float).",
        "issue 4021",
        versions="to 10",
    ),
    KnownError(
        "calibrator-unused", "No calibration for a Q/DQ model",
        r"Calibrator won't be used in explicit precision mode",
        HARMLESS,
        "The model has Q/DQ, so that the builder takes its scales and calibrates nothing. As it should be.",
        "Nothing to do.",
        "seen in real builds of 8.5",
    ),
    KnownError(
        "missing-scale", "A tensor without a range",
        r"Missing scale and zero-point for tensor",
        WARNING,
        "The builder is in implicit mode (calibration cache): no Q/DQ is there, and the tensor has no range.",
        "If you meant to build a Q/DQ model, this is not one: check the file that was given to trtexec.",
        "documentation, implicit quantization",
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
        "flag-removed", "A precision flag on TensorRT 11",
        r"Unknown option: --(?:int8|fp16|best|bf16|fp8|calib|precision\w+|layerPrecisions)\b",
        ERROR,
        "TensorRT 11 has no precision flags: the types in the ONNX model decide.",
        "Drop the flag; make what is to run in FP16 float16 in the model ('qdqtool insert --high-precision fp16').",
        "documentation, TensorRT 11 migration",
        versions="11 and later",
    ),
    KnownError(
        "api-removed", "A script for TensorRT 10 on TensorRT 11",
        r"BuilderFlag.{0,40}no attribute '?(?:FP16|INT8|BF16)|no attribute '?CalibrationAlgoType",
        ERROR,
        "The script was written for TensorRT 10 or older: 11 removed precision flags and calibrators.",
        "Install TensorRT 10, or drop the flags and give a model whose types say what is to run in FP16.",
        "documentation, TensorRT 11 migration",
        versions="11 and later",
    ),
    KnownError(
        "dla-qdq", "Q/DQ on DLA",
        r"_quantizer/Constant\S* is not supported on DLA|QuantizeLinear\S* is not supported on DLA|"
        r"DLA.{0,60}(?:de)?quantize",
        ERROR,
        "DLA takes no Q/DQ model.",
        "Build for the GPU, or give DLA a calibration cache instead of Q/DQ.",
        "issue 2222",
    ),
    KnownError(
        "more-performance", "Built without --fp16",
        r"more performance might be enabled by additionally specifying",
        WARNING,
        "The builder may use FP32 and INT8 only: everything that is not INT8 runs in FP32.",
        "Build with --int8 --fp16 (or --best).",
        "trtexec",
        versions="to 10",
    ),
    KnownError(
        "weak-typing", "Weak typing is deprecated",
        r"Weakly-typed networks have been deprecated|precision flags? .{0,40}deprecated",
        WARNING,
        "TensorRT 10.12 and later warn that 11 will know strongly typed networks only.",
        "Nothing to do on 10. For 11 the float types in the model decide: convert them to FP16 where wanted.",
        "trtexec 10.12",
        versions="10.12 and later",
    ),
    KnownError(
        "strong-int8", "A precision flag with --stronglyTyped",
        r"setting \w+ mode is not allowed if graph is strongly typed",
        WARNING,
        "--stronglyTyped was given with a precision flag; the flag is ignored and the model's types decide.",
        "Give one of the two: the flags, or --stronglyTyped with a model of the wanted types.",
        "trtexec 10",
        versions="10",
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
        "subnormal", "Weights too small for FP16",
        r"subnormal FP16|weights are affected by this issue",
        WARNING,
        "Some weights are too small for FP16 and lose accuracy.",
        "Compare the accuracy; keep the named layers in FP32 if it drops.",
        "documentation",
    ),
    KnownError(
        "workspace", "Too little memory for fast kernels",
        r"do not have sufficient workspace|insufficient memory on requested size|"
        r"Skipping tactic .{0,60}insufficient memory|OutOfMemory|out of memory",
        WARNING,
        "Fast kernels were passed over because the workspace or the GPU's memory was too small.",
        "Raise it: --memPoolSize=workspace:<MiB> (8.4 and later), --workspace=<MiB> (before), and free GPU memory.",
        "documentation",
    ),
    KnownError(
        "unstable", "Unstable measurement",
        r"GPU compute time is unstable|If not already in use, locking GPU clock",
        WARNING,
        "The clock changed during the measurement: the times are worth less.",
        "Lock the clock (nvidia-smi -lgc; jetson_clocks) or add --useSpinWait.",
        "trtexec",
    ),
    KnownError(
        "enqueue-bound", "Launching is slower than running",
        r"bound by Enqueue Time",
        WARNING,
        "Launching the kernels takes longer than running them: the GPU waits, and faster layers will not show.",
        "Measure with --useCudaGraph, or with a larger batch.",
        "trtexec",
    ),
    KnownError(
        "transfer-bound", "Copying is slower than running",
        r"bound by (?:host-to-device|device-to-host) transfers",
        WARNING,
        "Copying inputs and outputs takes longer than the network.",
        "Measure the network alone with --noDataTransfers.",
        "trtexec",
    ),
    KnownError(
        "names-only", "An engine without precisions in its listing",
        r"ProfilingVerbosity::kLAYER_NAMES_ONLY",
        WARNING,
        "The engine keeps layer names alone, so that its listing shows no precisions.",
        "Build again with --profilingVerbosity=detailed.",
        "trtexec 8.2 and later",
        (),
        versions="8.2 and later",
    ),
    KnownError(
        "graph-capture", "Layer times and CUDA graphs",
        r"Skip layer timing collection in CUDA graph|Failed to collect layer timing info",
        HARMLESS,
        "Layers cannot be timed inside a CUDA graph; trtexec times them in a run of their own.",
        "Nothing to do.",
        "trtexec",
    ),
    KnownError(
        "deserialize", "An engine of another TensorRT or GPU",
        r"Serialization (?:assertion|error)|Version tag does not match|current Version:|magicTagRead",
        ERROR,
        "The engine file was built with another TensorRT version or for another GPU.",
        "Build the engine on the machine that runs it.",
        "documentation",
    ),
    KnownError(
        "plugin-missing", "An operator that TensorRT does not know",
        r"No importer registered for op|Plugin not found|could not find plugin",
        ERROR,
        "The model has an operator that TensorRT does not know.",
        "Load its plugin (--plugins=... or --staticPlugins), or export the model without the operator.",
        "onnx-tensorrt importer",
    ),
    KnownError(
        "dynamic-profile", "Dynamic input without shapes",
        r"Dynamic dimensions required for input|no optimization profile|has no profile",
        WARNING,
        "An input has dynamic dimensions and no shapes were given; trtexec takes 1 for each.",
        "Give --minShapes, --optShapes and --maxShapes.",
        "trtexec",
    ),
    KnownError(
        "integer-operators", "ONNX integer operators",
        r"QLinear(?:Conv|MatMul)|ConvInteger|MatMulInteger",
        ERROR,
        "The model uses ONNX's integer operators, which TensorRT does not import.",
        "Quantize in Q/DQ form (onnxruntime: QuantFormat.QDQ).",
        "developer guide",
    ),
)
