"""Warnings and errors of TensorRT are recognised by their wording."""

from __future__ import annotations

import pytest

from qdqtool.buildlog.errors_table import KNOWN, lookup

# Wordings as users reported them, with the names and numbers of their builds.
TEXTS = [
    ("Assertion failed: shiftIsAllZeros(zeroPoint) && \"TRT only supports symmetric quantization - zeroPt "
    "must be all zeros\"",
     "zero-point"),
    ("Non-zero zero point is not supported. Please set kENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA", "zero-point"),
    ("TensorRT supports QuantizeLinear/DequantizeLinear with UINT8 zero_point only on DLA. Defaulting to INT8",
     "uint8-zero-point"),
    ("ModelImporter.cpp:741: Scale coefficients must all be positive", "scale-positive"),
    ("The number of scales is not equal to the number of output channels", "scale-count"),
    ("shift weights has count 64 but 3 was expected", "scale-count"), ("K == scale.count()", "scale-count"),
    ("Invalid rank for the scale tensor", "scale-rank"),
    ("The scale and zero point must have the same volume", "zero-point-volume"),
    ("This version of TensorRT requires 3 inputs for the DequantizeLinear operator.", "dq-three-inputs"),
    ("model.0.conv.bias_DequantizeLinear: only activation types allowed as input to this layer", "bias-quantized"),
    ("conv.bias_quantized: invalid weights type of Int8", "bias-quantized"),
    ("[qdqGraphOptimizer.cpp::reportWeightlessTwoInputConvolutionAsError::230] Error Code 2: Internal Error "
    "(Conv_1444: "
     "Could not fuse 2nd input (kernel weights) of CONVOLUTION)", "weights-not-folded"),
    ("graphOptimizer.cpp::fusePattern::1777] Assertion matchPattern(context, first) && matchBackend(first) failed",
     "weights-pattern"),
    ("10: Could not find any implementation for node w + node_of_dqconv.dwconv + PWN(x).", "no-implementation"),
    ("pointWiseV2Builder.cpp::toExpr::38] Assertion outScales.size() == 1 failed", "pointwise-out-scales"),
    ("graphOptimizer.cpp::sameExprValues::587] Assertion lhs.expr failed", "same-expr"),
    ("candidateRequirements.empty() was incorrectly marked as an int8 node", "marked-int8"),
    ("Int8 precision has been set for a layer or layer output, but int8 is not configured in the builder", "int8-flag"),
    ("Calibrator won't be used in explicit precision mode. Use quantization aware training", "calibrator-unused"),
    ("Missing scale and zero-point for tensor 495, expect fall back to non-int8", "missing-scale"),
    ("Unrecognized attribute: axis for operator QuantizeLinear", "axis-attribute"),
    ("[E] Unknown option: --int8", "flag-removed"),
    ("AttributeError: type object 'tensorrt.BuilderFlag' has no attribute 'FP16'", "api-removed"),
    ("'/model/conv/_input_quantizer/Constant_output_0' is not supported on DLA", "dla-qdq"),
    ("FP32 and INT8 precisions have been specified - more performance might be enabled by additionally "
    "specifying --fp16",
     "more-performance"),
    ("Weakly-typed networks have been deprecated in TensorRT.", "weak-typing"),
    ("Invalid usage, setting int8 mode is not allowed if graph is strongly typed.", "strong-int8"),
    ("* GPU compute time is unstable, with coefficient of variance = 7.69863%.", "unstable"),
]


@pytest.mark.parametrize(("text", "wanted"), TEXTS)
def test_known_texts(text: str, wanted: str) -> None:
    found = lookup(text)
    assert found is not None
    assert found.id == wanted


@pytest.mark.parametrize("text", ["", "Conv_1", "Parsing node: conv [Conv]", "Engine built in 5 sec.", "x" * 100_000])
def test_other_texts_are_not_explained(text: str) -> None:
    assert lookup(text) is None


def test_entries_are_complete_and_their_ids_unique() -> None:
    assert len({entry.id for entry in KNOWN}) == len(KNOWN)
    for entry in KNOWN:
        assert entry.title
        assert entry.cause.endswith(".")
        assert entry.fix.rstrip().endswith((".", ")."))
        assert entry.severity in ("error", "warning", "harmless")
        assert entry.source


def test_codes_are_those_of_the_findings() -> None:
    codes = pytest.importorskip("qdqtool.explain.codes")
    unknown = {code for entry in KNOWN for code in entry.codes} - set(codes.CODES)
    assert unknown == set()
