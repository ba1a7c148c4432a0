"""What TensorRT says about INT8 outside of Q/DQ pairs: network inputs, calibration, DLA, old versions."""

from __future__ import annotations

from qdqtool.explain.errors_entry import ERROR, HARMLESS, WARNING, KnownError

RANGES = (
    KnownError(
        "int8-input", "A Q that quantizes what is INT8 already",
        r"quantizePaths|cannot be quantized by",
        ERROR,
        "What the Q reads is INT8 before it gets there, as a rule the network's input: --inputIOFormats=int8 (or "
        "set_type on the input) makes it INT8, and the Q would quantize it a second time.",
        "Leave the input float (drop the format), or take the Q out and make the input of its DequantizeLinear the "
        "network's INT8 input ('qdqtool insert --input-type int8' writes such a model).",
        "issue 3265 (8.6)",
        ("INPUT-CONVERSION",),
    ),
    KnownError(
        "int8-io-range", "An INT8 input or output without a scale",
        r"input/output with DataType Int8 in network without Q/DQ",
        ERROR,
        "A network input or output is INT8, the network has no Q/DQ, and nothing says which real number one step of "
        "it is. A Cast does not: in TensorRT INT8 always means quantized.",
        "Let a DequantizeLinear with the scale read the input (scale 1 for the plain numbers), or give the tensor a "
        "dynamic range.",
        "issue 1973 (8.2)",
    ),
    KnownError(
        "int8-only-layer", "A layer with INT8 kernels only, and no scales for it",
        r"No non-int8 implementation of layer",
        ERROR,
        "The layer, mostly a plugin whose supportsFormatCombination takes nothing but INT8, needs scales for its "
        "inputs and outputs, and there are none.",
        "With Q/DQ: a Q directly in front of it and a DQ directly behind it. Without: a dynamic range for each of its "
        "tensors. A plugin that brings its own scales may also offer a float format.",
        "the text; issue 4078 (10.1)",
        ("PLUGIN-OUTSIDE",),
    ),
    KnownError(
        "calibrator-absent", "INT8 without a calibrator",
        r"Calibrator is not being used\. Users must provide dynamic range",
        WARNING,
        "INT8 is on, the network has no Q/DQ and no calibrator: layers whose tensors have no range run in float. "
        "Through onnxruntime: the calibration table was not given or not read.",
        "For a Q/DQ model: this is not one, check the file. Else give a calibration table with all tensors of the "
        "network.",
        "onnxruntime issue 17235",
    ),
    KnownError(
        "calibration-profile", "Calibration with the first profile",
        r"Calibration Profile is not defined",
        HARMLESS,
        "The network has dynamic shapes and no profile for the calibration was set, so that it runs at the shapes of "
        "profile 0.",
        "Nothing, where the opt shapes of profile 0 are the usual ones; else IBuilderConfig::setCalibrationProfile. "
        "Q/DQ models are not calibrated.",
        "API documentation, setCalibrationProfile",
    ),
    KnownError(
        "calibration-file", "No calibration file for DeepStream",
        r"INT8 calibration file not specified/accessible",
        WARNING,
        "network-mode=1 (INT8) is set, and int8-calib-file is not, or cannot be read.",
        "For a Q/DQ model: nothing, its scales are in the model. Else give the path of the calibration table, written "
        "by this version of TensorRT.",
        "nvinfer of DeepStream, in whose builder the text stands",
    ),
    KnownError(
        "no-int8", "A GPU without INT8",
        r"require hardware with Int8 support|platformHasFastInt8|INT8 not supported by platform",
        ERROR,
        "The GPU has neither INT8 tensor cores nor dp4a: Maxwell, P100, Jetson Nano and TX2.",
        "Build for another GPU, or the float model with --fp16.",
        "issue 3157 (P100); DeepStream-Yolo issue 302 (TX2)",
        ("GPU-NO-INT8",),
    ),
    KnownError(
        "dla-no-scale", "A layer that DLA does not take for want of a scale",
        r"cannot run in INT8 mode due to missing scale and zero point",
        WARNING,
        "DLA runs a layer in INT8 only where its tensors have a range of a calibration cache. A Q/DQ model gives none: "
        "DLA takes no Q/DQ.",
        "For DLA build the float model with a calibration cache; a Q/DQ model is for the GPU (drop --useDLACore).",
        "super-gradients issue 1760 (Jetson); developer guide, DLA: no explicit quantization",
    ),
    KnownError(
        "trt7", "Q/DQ on TensorRT 7",
        r"Assertion Error in checkSanity|multi-input conv for explicit precision QAT",
        ERROR,
        "TensorRT 7 builds Q/DQ only in part: with a flag of its own (EXPLICIT_PRECISION) and not as exporters write "
        "them.",
        "Build with TensorRT 8.0 or newer; 8.5 and newer take most.",
        "issues 1406, 1972; onnx-tensorrt issue 608",
        versions="7.x",
    ),
    KnownError(
        "explicit-precision-gone", "A flag that is gone",
        r"no attribute '?EXPLICIT_PRECISION",
        ERROR,
        "The script sets NetworkDefinitionCreationFlag.EXPLICIT_PRECISION. From 8.0 Q/DQ alone make a network "
        "explicitly quantized, and TensorRT 10 has no such flag.",
        "Delete the flag.",
        "pytorch/TensorRT issue 3362",
        versions="10 and later",
    ),
)
