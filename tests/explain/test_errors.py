"""Warnings and errors of TensorRT are recognised by their wording."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.explain.errors import KNOWN, lookup, named_node, parse_error, short

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
    from qdqtool.explain import codes
    unknown = {code for entry in KNOWN for code in entry.codes} - set(codes.CODES)
    assert unknown == set()


# Section by section what users reported, and what has to be known of it.
REPORTED = [
    ("[scaleNode.cpp::getChannelAxis::20] Error Code 2: Internal Error (q [Quantize]: unexpected negative axis)",
     "negative-axis"),
    ("[optimizer.cpp::match::959] Error Code 2: Internal Error (Assertion !n23->cost.empty() failed)", "no-cost"),
    ("Error Code 2: Internal Error (Assertion start <= stop failed. )", "range-order"),
    ("[weightConvertors.cpp::quantizeBiasCommon::310] Error Code 2: Internal Error (Assertion getter(i) != 0 failed. )",
     "zero-scale-bias"),
    ("pluginV2Runner.cpp::getInputHostScale::88] Error Code 2: Internal Error (Assertion scales.size() == 1 failed.)",
     "plugin-scale"),
    ("[type.cpp:186: infer_type] Could not infer output types for operation: 291: dequantize: x", "infer-types"),
    ("Skipping tactic 0x0 due to exception Assertion numScales == mGlobRefs.scale.count() failed.",
     "scale-layer-count"),
    ("combineInOutScale::369] Error Code 2: Internal Error (Assertion p.quantizations.isOutputSet(0) failed. )",
     "output-scale"),
    ("Assertion vol == 1 || vol == params.nbOutputmaps failed", "scale-volume"),
    ("Assertion mCombinedScalesSize >= channelDst failed", "scale-volume"),
    ("[8] Assertion failed: inputs.at(2).is_weights()", "no-weights-input"),
    ("all backend strategies failed", "backends-failed"),
    ("[E] Engine set up failed", "consequence"),
    ("3: getPluginCreator could not find plugin: DynamicQuantizeLinear version: 1", "integer-operators"),
    ("No importer registered for op: QLinearConv. Attempting to import as plugin.", "integer-operators"),
    ("3: getPluginCreator could not find plugin: MyNms version: 1", "plugin-missing"),
    ("Internal Error (Assertion outScales.size() == 1 failed. )", "pointwise-out-scales"),
    ("Internal Error (: Int8 constant usage is restricted to explicit precision mode)", "int8-without-qdq"),
    ("(conv1.weight: Quantized constant is only allowed before DQ or PLUGIN_V2 node)", "constant-before-dq"),
    ("due to exception Assertion dims1.d[i] == 1 || dims2.d[i] == 1 failed. [64] cannot broadcast with [224]",
     "broadcast"),
    ("(n: could not find any supported formats consistent with input/output data types)", "plugin-formats"),
    ("Calibration failure occurred with no scaling factors detected. This could be due to no int8 calibrator",
     "no-scales"),
    ("[weightConvertors.cpp::transformWeightsIfFP::537] Error Code 2: Internal Error (Assertion w.type() == type || x)",
     "weights-type"),
    ("Conv_28: two inputs (data and weights) are allowed only in explicit-quantization mode.", "weights-tensor"),
    ("(Unnamed Layer* 27) [Dequantize]: input has type UInt8 but must have type FP8, FP4, Int4, or Int8.", "dq-type"),
    ("(Node q cannot be quantized by x. You might want to add a DQ node before q)", "int8-input"),
    ("4: x: input/output with DataType Int8 in network without Q/DQ layers must have dynamic range", "int8-io-range"),
    ("Error Code: 4: No non-int8 implementation of layer moe is supported. Please provide missing int8 scales",
     "int8-only-layer"),
    ("Calibrator is not being used. Users must provide dynamic range for all tensors that are not Int32 or Bool.",
     "calibrator-absent"),
    ("Calibration Profile is not defined. Calibrating with Profile 0", "calibration-profile"),
    ("INT8 calibration file not specified/accessible. INT8 calibration can be done through setDynamicRange API",
     "calibration-file"),
    ("Networks with QuantizeLayer/DequantizeLayer layers require hardware with Int8 support.", "no-int8"),
    ("INT8 not supported by platform. Trying FP16 mode.", "no-int8"),
    ("Node: /h/act/Relu cannot run in INT8 mode due to missing scale and zero point. This node will not run on DLA.",
     "dla-no-scale"),
    ("cudnnBuilderGraph.cpp (902) - Assertion Error in checkSanity: 0 (!overlap(t->start, t->extent))", "trt7"),
    ("ctx->network()->hasExplicitPrecision() && \"TensorRT only supports multi-input conv for explicit precision QAT",
     "trt7"),
    ("NetworkDefinitionCreationFlag' has no attribute 'EXPLICIT_PRECISION'", "explicit-precision-gone"),
    ("Quantize op q{ForeignNode[a...b]} has mis-matched Scale shape and dimension at axis)", "scale-count"),
    ("[W] --workspace flag has been deprecated by --memPoolSize flag.", "workspace-flag"),
    ("No implementation of layer conv obeys the requested constraints, using the fastest one", "precision-ignored"),
]


@pytest.mark.parametrize(("text", "wanted"), REPORTED)
def test_reported_texts(text: str, wanted: str) -> None:
    found = lookup(text)
    assert found is not None
    assert found.id == wanted


NODE = "[optimizer.cpp::computeCosts] Error Code 10: Internal Error (Could not find any implementation for node {}.)"


@pytest.mark.parametrize(("node", "title", "said", "unsaid"), [
    ("/0/model.22/Range", "shapes or indices", "static shapes", "Leave the Q/DQ"),
    ("/m/Shape_3", "shapes or indices", "static shapes", "Leave the Q/DQ"),
    ("{ForeignNode[a.weight...Transpose_259 + (Unnamed Layer* 379) [Shuffle]]}", "region", "Skipping tactic",
     "named conv"),
    ("w + QuantizeLinear_222_quantize_scale_node + Conv_224 + Add_243 + Relu_244", "fused layer", "Leave the Q/DQ", ""),
    ("/c/Conv + PWN(PWN(/c/act/Sigmoid), /c/act/Mul)", "a convolution", "workspace", "Leave the Q/DQ"),
    ("002_convolutional", "a convolution", "workspace", "Leave the Q/DQ"),
    ("up.weight + QuantizeLinear_629 + ConvTranspose_631", "transposed", "one scale (per tensor)", ""),
    ("/c/input_quantizer/QuantizeLinear_clone_0", "a Q or DQ of its own", "one scale", "workspace"),
    ("/model.23/EfficientIdxNMS_TRT", "a plugin", "linear format", "named conv"),
    ("/layers.0/LayerNormalization", "normalization", "runs in float", "named conv"),
    ("(Unnamed Layer* 12) [ElementWise]", "elementwise", "in front of or behind", "named conv"),
    ("/pool/MaxPool", "a pooling", "in front of or behind", "named conv"),
])
def test_advice_is_for_the_kind_of_node(node: str, title: str, said: str, unsaid: str) -> None:
    found = lookup(NODE.format(node))
    assert found is not None
    assert found.id == "no-implementation"
    assert title in found.title
    assert said in found.fix
    assert not unsaid or unsaid not in found.fix


@pytest.mark.parametrize(("text", "part", "code", "function", "condition"), [
    ("[E] Error[2]: [fooOpt.cpp::doThing::12] Error Code 2: Internal Error (Assertion mScaleVec.size() == n failed)",
     "", 2, "doThing", "mScaleVec.size() == n"),
    ("../builder/Layers.cpp (3986) - Assertion Error in validate: 0 (nbResizeDim >= 0)", "the network API", None,
     "validate", "nbResizeDim >= 0"),
    ("ERROR: builtin_op_importers.cpp:2249 In function importFoo:\n[8] Assertion failed: weights.rank() > 2",
     "the ONNX parser", None, "importFoo", "weights.rank() > 2"),
    ("trtexec: /x/myelin/src/optimizer/kqv_gemm_split.cpp:658: void f(): Assertion `status == myelinSuccess' failed.",
     "Myelin", None, "", "status == myelinSuccess"),
    ("[TRT] [E] 1: [caskUtils.cpp::createHardwareInfo::852] Error Code 1: Cask (Failed)",
     "the kernels of convolutions and matrix products", 1, "createHardwareInfo", ""),
])
def test_an_unknown_error_is_told_by_its_form(
    text: str, part: str, code: int | None, function: str, condition: str
) -> None:
    parsed = parse_error(text)
    assert (parsed.part, parsed.code, parsed.function, parsed.condition) == (part, code, function, condition)
    found = lookup(text)
    assert found is not None
    assert found.id == "unknown-error"
    assert found.unknown.startswith("Its cause")
    assert not part or part in found.title
    assert condition in found.cause


@pytest.mark.parametrize(("text", "severity"), [
    ("[11/21/2026-12:00:00] [W] [TRT] These words are new", "warning"),
    ("[TRT] [E] These words are new", "error"), ("[TensorRT] WARNING: These words are new", "warning"),
    ("[2022-05-10 08:31:40   ERROR] These words are new", "error"),
    ("build started\n2022-12-30 [E:onnxruntime:, x.h:5] [2022-12-30 12:38:57   ERROR] These words are new", "error"),
])
def test_a_marked_line_is_never_passed_over_in_silence(text: str, severity: str) -> None:
    found = lookup(text)
    assert found is not None
    assert found.severity == severity and found.id == f"unknown-{severity}"
    assert "These words are new" in found.unknown


@pytest.mark.parametrize("text", [
    "[11/21/2026-12:00:00] [I] [TRT] These words are new", "[W] another program", "WARNING: another program",
    "[11/21/2026-12:00:00] [E] [TRT] ",
])
def test_other_lines_are_not_taken_for_errors(text: str) -> None:
    assert lookup(text) is None


def test_what_the_parser_returns_is_an_error() -> None:
    found = lookup("In node 7 (parseNode): UNSUPPORTED_NODE: Foo is not there.")
    assert found is not None
    assert found.id == "unknown-error" and "the ONNX parser" in found.title
    assert "UNSUPPORTED_NODE: Foo is not there." in found.cause


def test_every_entry_is_found_by_its_own_words() -> None:
    """No entry stands behind another one that takes all of its texts."""
    for text, wanted in [*TEXTS, *REPORTED]:
        found = lookup(f"[11/21/2026-12:00:00] [E] [TRT] {text}")
        assert found is not None and found.id == wanted, text


@given(st.text(max_size=300))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    for words in (text, f"Could not find any implementation for node {text}.", f"Assertion {text} failed"):
        found = lookup(words)
        assert found is None or (found.cause and found.fix)


WORDS = ["Assertion ", "Error Code 1", "[a.cpp::b::", "Conv_1 + ", "_1", "In function ", "(", "due to "]


@pytest.mark.parametrize("word", WORDS)
def test_no_text_takes_long(word: str) -> None:
    started = time.process_time()
    lookup(word * (200_000 // len(word)))
    lookup("Could not find any implementation for node " + word * (200_000 // len(word)))
    assert time.process_time() - started < 3


@pytest.mark.parametrize(("rest", "name"), [
    (" /model.0/conv/Conv.\nnext line", "/model.0/conv/Conv"), (" conv due to insufficient workspace", "conv"),
    (" PWN(a, b).", "PWN(a, b)"), (" (conv).)", "(conv)"), (" conv)", "conv"), (" .:", None), ("", None),
    ("\nconv", None),
    (f" {'x' * 3999}yz", "x" * 3999),
])  # fmt: skip
def test_the_name_of_a_node_without_a_kernel(rest: str, name: str | None) -> None:
    found = named_node(f"[E] Error Code 10: Could not find any implementation for node{rest}")
    assert (found.name if found is not None else None) == name
    assert named_node("Could not find any kernel for node conv") is None


def test_long_names_are_cut_in_the_midst() -> None:
    assert short("x" * 90) == "x" * 90
    assert short("a" * 45 + "b" * 46) == f"{'a' * 40}...{'b' * 40}"
