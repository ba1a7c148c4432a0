"""Warnings and remarks about flags, measurement and engines."""

from __future__ import annotations

from qdqtool.explain.errors_entry import ERROR, HARMLESS, WARNING, KnownError

NOTES: tuple[KnownError, ...] = (
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
        "If you meant to build a Q/DQ model, this was no Q/DQ build: check the file that was given to trtexec, and "
        "that "
        "no step in between (a simplifier, onnxruntime) removed the pairs.",
        "documentation, implicit quantization",
        versions="to 10; 11 has no implicit quantization",
    ),
    KnownError(
        "dla-absent", "A DLA that this machine does not have",
        r"Cannot create DLA engine, \d{1,3} not available",
        ERROR,
        "The build was asked to use a DLA (--useDLACore, default device DLA), and the module has none, or has none "
        "that "
        "this TensorRT supports: desktop GPUs and Orin Nano have no DLA, TensorRT 11 knows that of AGX Orin only.",
        "Drop --useDLACore (and --allowGPUFallback): a Q/DQ model is one for the GPU.",
        "release notes of 11; Jetson modules' data sheets",
    ),
    KnownError(
        "quantizer-not-calibrated", "A quantizer of ModelOpt without a range",
        r"Quantizer has not been calibrated",
        ERROR,
        "A TensorQuantizer of ModelOpt was exported or run before calibration gave it an amax. This is no message of "
        "TensorRT's.",
        "Run the calibration loop over every branch of the network (mtq.quantize(model, config, forward_loop)), or "
        "disable the quantizers that no sample reaches (mtq.disable_quantizer). "
        "The exporter of qdqtool.qat checks every range first.",
        "NVIDIA ModelOpt, tensor_quantizer",
    ),
    KnownError(
        "precision-ignored", "A precision that was asked for and that no kernel has",
        r"No implementation of layer .{1,400} obeys|No implementation obeys",
        WARNING,
        "A layer was given a precision (setPrecision, --layerPrecisions, a calibration table with strict types) for "
        "which it has no kernel; the fastest kernel of any precision is taken instead.",
        "Nothing, where the layer may run in float. In a Q/DQ model precisions are set by the Q and DQ: drop the "
        "constraints.",
        "issue 1231; trtexec --precisionConstraints",
        versions="to 10",
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
        "workspace-flag", "An old name of a flag",
        r"--workspace flag has been deprecated",
        HARMLESS,
        "trtexec of 8.4 and later calls --workspace=<MiB> --memPoolSize=workspace:<MiB>; it still takes both.",
        "Nothing on 8.x. TensorRT 10 has no --workspace any more.",
        "trtexec",
        versions="8.4 to 8.6",
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
        "subnormal", "Weights too small for FP16",
        r"subnormal FP16|weights are affected by this issue",
        WARNING,
        "Some weights are too small for FP16 and lose accuracy.",
        "Compare the accuracy; keep the named layers in FP32 if it drops.",
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
        "dynamic-profile", "Dynamic input without shapes",
        r"Dynamic dimensions required for input|no optimization profile|has no profile",
        WARNING,
        "An input has dynamic dimensions and no shapes were given; trtexec takes 1 for each.",
        "Give --minShapes, --optShapes and --maxShapes.",
        "trtexec",
    ),
)
