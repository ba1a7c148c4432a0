"""Codes about what a GPU cannot do: found only where a GPU or a compute capability is named."""

from __future__ import annotations

from qdqtool.explain.knowledge import CLASSIC, Code, assumed, documented, seen
from qdqtool.types import Severity

GPU = (
    Code(
        "GPU-NO-INT8",
        "The GPU has no INT8",
        Severity.ERROR,
        "The GPU named has neither INT8 tensor cores nor dp4a: Maxwell, the Pascal of P100 and Jetson TX2, "
        "Jetson Nano.",
        "The build of a network with Q/DQ fails.",
        "Networks with QuantizeLayer/DequantizeLayer layers require hardware with Int8 support.",
        "Build the float model with --fp16 on this GPU; keep the Q/DQ model for GPUs with INT8.",
        (documented(CLASSIC, "TensorRT support matrix; NVIDIA/TensorRT issue 3157 (P100, 8.6)"),),
        error=(("trt8", "Networks with QuantizeLayer/DequantizeLayer layers require hardware with Int8 support."),),
    ),
    Code(
        "GPU-DP4A",
        "INT8 without tensor cores",
        Severity.WARNING,
        "The GPU named computes INT8 by dp4a: Pascal 6.1, V100, GTX 16.",
        "INT8 works and runs on the CUDA cores. Where FP16 has tensor cores (V100) or double rate (GTX 16), INT8 gains "
        "little or loses; on Pascal 6.1, which has no FP16, it is up to four times FP32.",
        "Tactic names with int8x4 or dp4a instead of imma, i8816 or i16832.",
        "On V100 and GTX 16 build with --fp16 as well as --int8 and compare with the float model before deploying.",
        (
            documented(
                CLASSIC,
                "TensorRT support matrix (INT8 tensor cores: no); 1,500 INT8 convolutions measured on a V100; "
                "NVIDIA/TensorRT issue 983 (GTX 1660)",
            ),
        ),
    ),
    Code(
        "GPU-NO-FP16",
        "The GPU has no fast FP16",
        Severity.INFO,
        "The GPU named computes FP16 at a fraction of FP32's rate: Pascal 6.1.",
        "What is not quantized runs in FP32, --fp16 or not.",
        "Half precision is not natively supported on this platform, or Float types in the layers.",
        "Quantize as much as accuracy allows: every float layer costs four times its INT8 time.",
        (documented(CLASSIC, "TensorRT support matrix (6.1: FP16 no)"),),
    ),
    Code(
        "GPU-VERSION",
        "This TensorRT does not know the GPU",
        Severity.WARNING,
        "The target is older than the GPU's architecture, or has dropped it.",
        "The build fails or the engine does not load.",
        "Target GPU SM ... is not supported by this TensorRT release.",
        "Choose a target that supports the GPU: 8.5 or newer for Ada and Hopper, 10.8 or newer for Blackwell, "
        "8.6 or older "
        "for Pascal.",
        (assumed(CLASSIC, "TensorRT release notes, as far as known; the point releases were not checked"),),
    ),
    Code(
        "GPU-FUSION",
        "An activation other than Relu may stay apart on this GPU",
        Severity.WARNING,
        "The GPU named has INT8 without tensor cores; the convolution's activation is LeakyRelu, SiLU, GELU or another "
        "pointwise function.",
        "Fused INT8 kernels for such activations are those of tensor cores: Turing and newer. Elsewhere the activation "
        "is a kernel of its own behind a convolution that writes float.",
        "A PointWise layer behind a convolution Int8 -> Float.",
        "Use Relu where the network may be trained again; else compare with the float engine, or build for Turing and "
        "newer.",
        (documented(CLASSIC, "NVIDIA in NVIDIA/TensorRT issues 2134 (LeakyRelu) and 3127 (GELU on a GTX 1080 Ti)"),),
    ),
    Code(
        "GPU-KERNELS",
        "No INT8 kernel may exist for a depthwise convolution on this GPU",
        Severity.WARNING,
        "The GPU named has INT8 without tensor cores, and the model quantized depthwise convolutions.",
        "The build may end for want of a kernel.",
        "Could not find any implementation for node ...",
        "Leave these convolutions float (insert --exclude), or build on the GPU that is deployed to: a quantized "
        "depthwise network is known to build on Turing with tensor cores (MobileNetV2 on a TITAN RTX).",
        (
            documented(
                CLASSIC, "developer guide: GPUs up to 7.5 may lack INT8 for a layer; NVIDIA/TensorRT issue 4060 (T2000)"
            ),
        ),
    ),
    Code(
        "GPU-JETSON",
        "On a Jetson this speaks of the GPU, not of the DLA",
        Severity.INFO,
        "A Jetson was named.",
        "Its GPU runs the same Q/DQ passes as a desktop GPU. The DLA takes no Q/DQ (up to TensorRT 10): it wants a "
        "calibration table. Fused attention kernels are missing on Orin with 8.6.",
        "Layers 'not supported on DLA' for Q/DQ; no _mha kernel in a profile.",
        "Build for the GPU; for the DLA use a calibration table of the float model.",
        (
            seen(("trt8.5",), "bevfusion-camera-orin-trt8502, against bevfusion-camera-rtx3080ti-trt8600"),
            documented(
                tuple(t for t in CLASSIC if t != "trt8.5"), "NVIDIA/TensorRT issues 2222 (DLA), 3575 (attention)"
            ),
        ),
    ),
)
