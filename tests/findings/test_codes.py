import re
import shlex
from pathlib import Path
from typing import Any

import onnx
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.evidence import Evidence
from qdqtool.findings import codes
from qdqtool.findings.api import report_regions
from qdqtool.findings.build_methods import (
    BUILD_METHODS,
    BuildMethod,
    find_build_method,
    trtexec_advice,
    trtexec_command,
)
from qdqtool.findings.codes import ALL_TARGETS
from qdqtool.findings.lines import HEADINGS, explain_line
from qdqtool.findings.report import FindingReport
from qdqtool.formats.log_text import render_log_line
from qdqtool.ir.input_shapes import ModelInfo
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Severity
from qdqtool.trt.pipeline import cases as all_cases, passes
from qdqtool.trt.result import MyelinRegion, Prediction
from qdqtool.trt.targets import BUILDS, TARGETS, target_named, target_of_version
from qdqtool.trt.trace import FORMATS
from tests.errors import has
from tests.findings.test_causes import residual
from tests.notes import note
from tests.slow import slow_after
from tests.trt.evidence import DIFFERENT, advised, truth


@pytest.mark.parametrize("entry", codes.CODES.values(), ids=lambda entry: entry.code)
def test_code_has_texts_and_sources(entry: codes.FindingCodeEntry) -> None:
    assert all((entry.title, entry.cause, entry.tensorrt, entry.log))
    assert entry.fix or (entry.severity == Severity.INFO and "No action needed" in entry.cause)
    assert "No action needed" not in entry.fix
    targets = [target for holds in entry.holds for target in holds.targets]
    assert targets and len(targets) == len(set(targets)) and set(targets) <= set(ALL_TARGETS)
    assert all(holds.source for holds in entry.holds)


def test_seen_codes_that_no_pass_shows_name_a_build() -> None:
    """The test skips codes of TensorRT-RTX, because other tables record their builds."""
    seen = [
        (code, holds)
        for code, entry in codes.CODES.items()
        for holds in entry.holds
        if not entry.passes
        and holds.evidence == Evidence.SEEN
        and not all(TARGETS[t].is_rtx for t in holds.targets)
    ]
    assert {code for code, _ in seen} == {"MYELIN-REGION", "GPU-JETSON", "STEM-POOL"}
    for code, holds in seen:
        names = set(re.findall(r"[\w.-]+", holds.source))
        builds = [build for name, build in BUILDS.items() if name in names]
        versions = [v for build in builds for v in re.findall(r"\d+(?:\.\d+)*", build.tensorrt)]
        assert set(holds.targets) <= {target_of_version(v).name for v in versions}, code


@pytest.mark.parametrize(
    ("fields", "target", "evidence"),
    [
        ({}, "trt10", Evidence.SEEN),
        ({"uncertain": 1}, "trt10", Evidence.ASSUMED),
        ({"possible": ["a.Q"]}, "trt10", Evidence.ASSUMED),
        ({}, "trt8.6", Evidence.ASSUMED),
    ],
)
def test_region_evidence_depends_on_its_certainty(
    fields: dict[str, Any], target: str, evidence: Evidence
) -> None:
    region = MyelinRegion("norm", "LayerNormalization", ["norm", "fc"], norms=1, **fields)
    report = FindingReport(target)
    report_regions(Prediction(ModelInfo("", "", 17, 2), target, regions=[region]), report)
    (finding,) = report.findings
    assert (finding.code, finding.node, finding.evidence) == ("MYELIN-REGION", "norm", evidence)


def test_similar_codes() -> None:
    assert codes.find_similar_codes("SKIP-FLAOT")[0] == "SKIP-FLOAT"
    assert "CONCAT-SCALE" in codes.find_similar_codes("concat")
    assert codes.find_similar_codes("%%%") == []


def test_code_severity_depends_on_target() -> None:
    entry = codes.get("WEIGHT-PREQUANT")
    assert entry.severity_on("trt8.4") == Severity.ERROR
    assert entry.severity_on("trt8.5") == Severity.WARNING and entry.scope_on("trt10") is None
    assert entry.severity_text == "warning or error, depending on the target"
    assert codes.get("POOL-FLOAT").severity_text == "warning or note, depending on the case"


@pytest.mark.parametrize(
    ("target", "start", "text"),
    [
        ("trt8.5", "TensorRT says: ", "zeroPt must be all"),
        ("trt10", "TensorRT 10.11 and later says: ", "kENABLE_UINT8"),  # the first with this text
        ("trt11", "TensorRT says: ", "kENABLE_UINT8"),
        ("rtx1.7", "TensorRT", "kENABLE_UINT8"),
    ],
)
def test_code_error_text_depends_on_target(target: str, start: str, text: str) -> None:
    quote = codes.get("ZP-NONZERO").quote_error(target)
    assert quote.startswith(start) and text in quote


@pytest.mark.parametrize(
    ("text", "code"),
    [("skip-float", "SKIP-FLOAT"), ("SKIP_FLOAT", "SKIP-FLOAT"), (" zp nonzero ", "ZP-NONZERO")],
)
def test_find_ignores_case_and_separators(text: str, code: str) -> None:
    assert codes.find(text).code == code


@pytest.mark.parametrize("case", slow_after(2, DIFFERENT))
def test_recorded_builds_are_explained(case: str) -> None:
    prediction = advised(case, truth(case)["target"])
    for conv in prediction.convolutions:
        assert conv.int8_in_int8_out or conv.findings, conv.name
    nodes = {f.node for f in prediction.findings if f.code in ("CONVERSION", "INPUT-CONVERSION")}
    assert nodes == set(prediction.conversion_nodes)
    for finding in prediction.findings:
        assert finding.message and finding.fix and finding.causes


def test_findings_of_recorded_yolo() -> None:
    """The log has all faults.

    It has 8 Adds with a float residual, a MaxPool with two consumers, and 3 unfolded
    BatchNormalizations.
    """
    prediction = advised("yolo-resnet18-orin-trt8502", "trt8.5")
    counts = prediction.findings_by_code()
    assert (counts["SKIP-FLOAT"], counts["POOL-MIXED"], counts["BN-UNFOLDED"]) == (8, 1, 3)
    assert (counts["CONVERSION"], counts["INPUT-CONVERSION"]) == (11, 1)
    (pool,) = (f for f in prediction.findings if f.code == "POOL-MIXED")
    assert (pool.node, *pool.convolutions) == ("/backbone/maxpool/MaxPool", "/backbone/conv1/Conv")


def test_findings_of_recorded_resnet() -> None:
    """The residual DQ remains as a layer, and the last convolution reads and writes float."""
    prediction = advised("resnet18-a100-qat-residual", "trt8.5")
    add = next(f for f in prediction.findings if f.code == "ADD-OUT-FLOAT")
    assert add.node == "Add_292" and add.convolutions == ["Conv_284"]
    assert "DequantizeLinear_291" in add.nodes


@pytest.mark.parametrize(
    "case", ["resnet18-qat-rtx2000-trt8510", "resnet18-a100-qat-residual-qgap"]
)
def test_well_placed_models_have_no_warning(case: str) -> None:
    assert {f.severity for f in advised(case, "trt8.5").findings} == {Severity.INFO}


# Build methods -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", BUILD_METHODS.values(), ids=BUILD_METHODS)
def test_build_method_has_source_and_no_int8_flag_if_strongly_typed(way: BuildMethod) -> None:
    assert way.source and way.log and "--int8" not in way.flags("trt11").partition(":")[0]


def test_strongly_typed_build_has_no_flag_finding() -> None:
    assert (
        "FLAG-FP16"
        not in qdqtool.predict(residual("own"), "trt11", way="python").findings_by_code()
    )


@pytest.mark.parametrize("name", BUILD_METHODS)
def test_flag_finding_has_the_words_of_the_build_method(name: str) -> None:
    prediction = qdqtool.predict(residual("own"), way=name)
    (flag,) = (f for f in prediction.findings if f.code == "FLAG-FP16")
    named = [n for n in BUILD_METHODS if BUILD_METHODS[n].weak in flag.fix]
    assert (flag.way, named) == (name, [name])


@pytest.mark.parametrize(
    ("name", "hint"), [("onnxruntim", "did you mean onnxruntime?"), ("qqqq", "'qqqq'; choose")]
)
def test_unknown_build_method_is_an_error(name: str, hint: str) -> None:
    with pytest.raises(QdqtoolError, check=has("unknown-choice", hint, parameter="way")):
        find_build_method(name)


def test_build_method_has_other_names() -> None:
    method = find_build_method("ORT")
    assert method.name == "onnxruntime" and "trt_int8_calibration_table_name" in method.care


@pytest.mark.parametrize(
    ("target", "flags", "remark"),
    [
        ("trt8.0", {"--fp16", "--int8"}, ""),
        ("8.6.1", {"--fp16", "--int8"}, ""),
        ("8.6.2", {"--fp16", "--int8"}, "on a Jetson"),  # JetPack 6.0
        ("trt10", {"--fp16", "--int8"}, ""),
        ("10.3", {"--fp16", "--int8"}, "on a Jetson"),
        ("10.11", {"--fp16", "--int8"}, ""),
        ("10.12", {"--fp16", "--int8"}, "deprecated"),
        ("10.15.1", {"--fp16", "--int8"}, "deprecated"),
        ("10.15.1-strongly-typed", {"--stronglyTyped"}, ""),
        ("trt11", set(), ""),
        ("11.4", set(), ""),
    ],
)
def test_trtexec_command_has_flags_of_version(target: str, flags: set[str], remark: str) -> None:
    # Release notes of 10.12 deprecate weak typing, those of 11.0 remove it with all precision flags.
    command = trtexec_command(target_named(target), "m.onnx")
    assert {"--int8", "--fp16", "--stronglyTyped", "--best"} & set(command.split()) == flags
    assert command.endswith("> build.log 2>&1")
    printed = trtexec_advice(target_named(target))
    assert remark in "".join(printed) and bool(remark) == bool(printed)
    # If a GPU is named, it decides, whatever the version.
    assert [
        "on a Jetson" in "".join(trtexec_advice(target_named(target), on_jetson))
        for on_jetson in (False, True)
    ] == [False, True]


@pytest.mark.parametrize(
    ("name", "shape", "flag"),
    [
        ("images", (1, 3, 64, 96), "--shapes=images:1x3x64x96"),
        ("images", (-1, 3, 64, 96), "--shapes=images:1x3x64x96"),
        ("x:0", (2, 3), "--shapes='x:0':2x3"),  # trtexec --help: names in quotes
    ],
)
def test_trtexec_command_has_shapes_of_open_inputs(
    name: str, shape: tuple[int, ...], flag: str
) -> None:
    assert flag in shlex.split(
        trtexec_command(target_named("trt10"), "m.onnx", open_inputs={name: shape})
    )
    assert "--shapes" not in trtexec_command(target_named("trt10"), "m.onnx", open_inputs={})


@pytest.mark.parametrize(
    ("types", "flags"),
    [
        ((Precision.INT8,), {"--inputIOFormats=int8:chw"}),
        ((Precision.INT8, Precision.FP32), {"--inputIOFormats=int8:chw,fp32:chw"}),
        ((Precision.UINT8, Precision.FP16), set()),  # trtexec keeps these types
    ],
)
def test_trtexec_command_keeps_int8_inputs(types: list[Precision], flags: set[str]) -> None:
    words = trtexec_command(target_named("trt10"), "m.onnx", input_types=types).split()
    assert {word for word in words if word.startswith("--inputIOFormats")} == flags


# Lines of a log -----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[01/10/2024-21:52:53] [V] [TRT] ",
        "[V] [TRT] ",
        "[TRT] [V] ",
        "TensorRT VERBOSE ",
        "[V] ",
    ],
)
@pytest.mark.parametrize(
    ("line", "pass_name"),
    [
        ("Running: VanillaSwapWithFollowingQ on Resize_724", "VanillaSwapWithFollowingQ"),
        (
            "Eliminating QuantizeLinear_38 which duplicates (Q) QuantizeLinear_15",
            "HorizontalMergeQNodes",
        ),
        (
            "QuantizeDoubleInputNodes: fusing QuantizeLinear_46 into Conv_34",
            "QuantizeDoubleInputNodes",
        ),
        (
            "ConvEltwiseSumFusion: Fusing w + QuantizeLinear_32 + Conv_34 with Add_42 + Relu_43",
            "ConvEltwiseSumFusion",
        ),
        ("Swap the layer type of QuantizeLinear_2 from QUANTIZE to kQDQ", "QDQToCopy"),
        ("Swap the layer type of Add_1 from ELEMENTWISE to POINTWISE", "EltwiseAddToPwn"),
        (
            "Swap the layer type of Tanh_1 from ACTIVATION to POINTWISE",
            "ActivationToPointwiseConversion",
        ),
        ("Swap the layer type of ReduceMean_1 from REDUCE to POOLING", "ReduceToPoolingFusion"),
        ("Replacing slice Slice_895 with copy from 1549 to 1554", "SliceRemoval"),
        ("Generating copy for a to b because input does not support striding.", "ConcatRemoval"),
        ("Merging layers: A || B", "MergeLayers"),
        ("Running: DqQFusion on DequantizeLinear_772", "DqQFusion"),
    ],
)
def test_line_leads_to_pass_cases_and_test(line: str, pass_name: str, prefix: str) -> None:
    answer = explain_line(prefix + line)
    (rule,) = answer.rules
    assert (answer.line, rule.pass_name, answer.note) == (line, pass_name, "")
    assert rule.does and rule.means and rule.cases
    assert (ROOT / rule.file).is_file() and (ROOT / rule.test).is_file()
    assert any((c.evidence == Evidence.SEEN and c.builds) or c.source for c in rule.cases.values())


@pytest.mark.parametrize(
    ("line", "rules", "counted", "expected"),
    [
        ("Removing QuantizeLinear_46", True, None, note("passes-share-line")),
        (
            "Running: SomethingNew on Conv_1",
            False,
            None,
            note("pass-unknown", name="SomethingNew"),
        ),
        (
            "[V] [TRT] After Myelin optimization: 504 layers",
            False,
            504,
            HEADINGS["After Myelin optimization"],
        ),
    ],
    ids=["several passes", "unknown pass", "layers"],
)
def test_note_of_line(line: str, rules: bool, counted: int | None, expected: str) -> None:
    answer = explain_line(line)
    assert (len(answer.rules) > 1, answer.counted, answer.note) == (rules, counted, expected)
    assert rules or not answer.rules


@pytest.mark.parametrize("kind", passes())
def test_pass_has_a_test(kind: type) -> None:
    assert (ROOT / explain_line(kind.__name__).rules[0].test).is_file()


@pytest.mark.parametrize(
    ("line", "case"),
    [
        (
            "QuantizeDoubleInputNodes: fusing /m/q/QuantizeLinear into /m/conv/Conv",
            "int8-convolution",
        ),
        ("QuantizeDoubleInputNodes: fusing /m/q/QuantizeLinear_1 into /m/Add_2", "sum"),
        ("QuantizeDoubleInputNodes: fusing a into b", "int8-convolution"),
        (
            "QuantizeDoubleInputNodes: fusing q into (Unnamed Layer* 3) [Pointwise]",
            "int8-convolution",
        ),  # no operator
    ],
)
def test_line_shows_fitting_case_first(line: str, case: str) -> None:
    answer = explain_line(line)
    rule = answer.rules[0]
    assert next(iter(rule.cases)) == f"{rule.pass_name}/{case}" and len(rule.cases) == 21
    assert str(render_log_line(answer, 80)).count(" - ") == 1


@pytest.mark.parametrize(
    ("line", "case"),
    [
        ("Generating copy for a to b because of stomping hazard.", "ConcatRemoval/stomping"),
        ("Replacing slice a with copy from b to c", "SliceRemoval/copy"),
        ("Eliminating slice a by retargeting b from b to c", "SliceRemoval/view"),
        (
            "Swap the layer type of DequantizeLinear_2 from DEQUANTIZE to kQDQ",
            "QDQToCopy/dequantize",
        ),
        (
            "GenericConvActFusion: Fusing Conv_1 with PWN(Sigmoid_2, Mul_3)",
            "GenericConvActFusion/pointwise",
        ),
        (
            "QConvScaleFusion: Fusing w + q + ConvTranspose_1 with BatchNormalization_2",
            "QConvScaleFusion/convtranspose",
        ),
        (
            "PointWiseFusion: Fusing PWN((Unnamed Layer* 1) [Constant] + b) with c",
            "PointWiseFusion/chain",
        ),
    ],
)
def test_line_kind_and_operators_choose_the_case(line: str, case: str) -> None:
    assert next(iter(explain_line(line).rules[0].cases)) == case


def test_cases_are_about_operators_or_kinds_of_lines() -> None:
    subjects = {schema.name for schema in onnx.defs.get_all_schemas()} | FORMATS.keys()
    for name, case in all_cases().items():
        assert set(case.about) <= subjects and len(set(case.about)) == len(case.about), name


@pytest.mark.parametrize("line", ["", "hello", "Error Code 2: Internal Error", "SKIP-FLOAT"])
def test_explain_line_ignores_other_texts(line: str) -> None:
    assert explain_line(line) is None


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("HorizontalMergeQNodes", "qdqtool/trt/passes/horizontal_merge_q_nodes.py"),
        ("HorizontalMergeQNodes/clone", "qdqtool/trt/passes/horizontal_merge_q_nodes.py"),
        ("MaxPool/q-past-maxpool", "qdqtool/ir/operators.py"),
    ],
)
def test_name_of_pass_or_case_is_explained(name: str, file: str) -> None:
    (rule,) = explain_line(name).rules
    assert rule.file == file and (ROOT / rule.test).is_file()
    assert "/" not in name or list(rule.cases) == [name]
