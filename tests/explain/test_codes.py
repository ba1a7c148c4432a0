"""The table of codes is complete, and says for every target where it comes from."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest

import qdqtool
from qdqtool.base.notes import Remark
from qdqtool.errors import QdqtoolError
from qdqtool.explain import codes
from qdqtool.explain.api import name_regions
from qdqtool.explain.codes import ALL_TARGETS
from qdqtool.explain.errors import KNOWN
from qdqtool.explain.lines import HEADINGS, MEANINGS, LineAnswer, explain_line
from qdqtool.explain.report import Report
from qdqtool.explain.ways import WAYS, way_named
from qdqtool.render.log_text import line_text
from qdqtool.trt.pipeline import cases as all_cases
from qdqtool.trt.pipeline import passes
from qdqtool.trt.targets import BUILDS, TARGETS, target_of_version
from qdqtool.trt.trace import FORMATS
from qdqtool.types import Evidence, ModelInfo, MyelinRegion, Prediction, Severity
from tests.explain.test_causes import residual
from tests.raising import raises
from tests.slow import slow_after
from tests.trt.evidence import DIFFERENT, advised, truth


@pytest.mark.parametrize("entry", codes.CODES.values())
def test_every_entry_is_whole(entry):
    for text in (entry.title, entry.cause, entry.tensorrt, entry.log, entry.fix):
        assert text and "  " not in text
    assert entry.holds
    named = [t for h in entry.holds for t in h.targets]
    assert len(named) == len(set(named)), "a target has two entries"
    assert set(named) <= set(ALL_TARGETS)
    assert all(h.source for h in entry.holds)


def test_what_is_seen_and_is_of_no_pass_names_a_build() -> None:
    """A code of the passes is proven as well as these are; what is seen on TensorRT-RTX is in its record."""
    seen = [
        (code, held)
        for code, entry in codes.CODES.items()
        for held in entry.holds
        if not entry.passes
        and held.evidence == Evidence.SEEN
        and not all(TARGETS[t].is_rtx for t in held.targets)
    ]
    assert {code for code, _ in seen} == {"MYELIN-REGION", "GPU-JETSON"}
    for code, held in seen:
        named = [
            b for name, b in BUILDS.items() if re.search(rf"(?<![\w-]){name}(?![\w-])", held.source)
        ]
        versions = [version for b in named for version in re.findall(r"\d+(?:\.\d+)*", b.tensorrt)]
        assert set(held.targets) <= {target_of_version(version).name for version in versions}, code


@pytest.mark.parametrize(
    ("reach", "target", "evidence"),
    [
        ({}, "trt10", Evidence.SEEN),
        ({"uncertain": 1}, "trt10", Evidence.ASSUMED),
        ({"possible": ["a.Q"]}, "trt10", Evidence.ASSUMED),
        ({}, "trt8.6", Evidence.ASSUMED),
    ],
)
def test_a_region_is_seen_where_its_reach_is_known(
    reach: dict[str, Any], target: str, evidence: Evidence
) -> None:
    region = MyelinRegion("norm", "LayerNormalization", ["norm", "fc"], norms=1, **reach)
    report = Report(target)
    name_regions(Prediction(ModelInfo("", "", 17, 2), target, regions=[region]), report)
    assert [(f.code, f.node, f.evidence) for f in report.findings] == [
        ("MYELIN-REGION", "norm", evidence)
    ]


def test_codes_and_lines():
    for known in KNOWN:
        for code in known.codes:
            assert code in codes.CODES, (known.id, code)
    assert codes.similar("SKIP-FLAOT")[0] == "SKIP-FLOAT"
    assert "CONCAT-SCALE" in codes.similar("concat")
    assert codes.similar("%%%") == []
    entry = codes.get("WEIGHT-PREQUANT")
    assert entry.severity_on("trt8.4") == Severity.ERROR
    assert entry.severity_on("trt8.5") == Severity.WARNING
    assert entry.on("trt10") is None
    entry = codes.get("ZP-NONZERO")
    for target, said in (
        ("trt8.5", "zeroPt must be all"),
        ("trt11", "kENABLE_UINT8"),
        ("rtx1.7", "kENABLE_UINT8"),
    ):
        assert said in entry.error_text(target)


@pytest.mark.parametrize(
    ("typed", "code"),
    [("skip-float", "SKIP-FLOAT"), ("SKIP_FLOAT", "SKIP-FLOAT"), (" zp nonzero ", "ZP-NONZERO")],
)
def test_codes_are_found_however_they_are_typed(typed, code):
    found = codes.find(typed)
    assert found is not None and found.code == code


@pytest.mark.parametrize("case", slow_after(2, DIFFERENT))
def test_everything_is_explained(case):
    prediction = advised(case, truth(case)["target"])
    for conv in prediction.convolutions:
        assert conv.int8_in_int8_out or conv.findings, conv.name
    told = {f.node for f in prediction.findings if f.code in ("CONVERSION", "INPUT-CONVERSION")}
    assert told == set(prediction.conversion_nodes)
    for finding in prediction.findings:
        assert finding.message and finding.fix and finding.causes


def test_engines_and_ways_to_build():
    """The log has eight Adds fused with a float residual, a MaxPool with two readers, three unfolded norms."""
    prediction = advised("yolo-resnet18-orin-trt8502", "trt8.5")
    found = Counter(f.code for f in prediction.findings)
    assert found["SKIP-FLOAT"] == 8 and found["POOL-MIXED"] == 1 and found["BN-UNFOLDED"] == 3
    pool = next(f for f in prediction.findings if f.code == "POOL-MIXED")
    assert pool.node == "/backbone/maxpool/MaxPool" and pool.convolutions == [
        "/backbone/conv1/Conv"
    ]
    assert found["CONVERSION"] == 11 and found["INPUT-CONVERSION"] == 1
    # Its residual DQ stays as a layer of its own, and the last convolution reads and writes float
    prediction = advised("resnet18-a100-qat-residual", "trt8.5")
    found = next(f for f in prediction.findings if f.code == "ADD-OUT-FLOAT")
    assert (
        found.node == "Add_292"
        and found.convolutions == ["Conv_284"]
        and "DequantizeLinear_291" in found.nodes
    )
    for way in WAYS.values():
        assert "--int8" not in way.flags("trt11").partition(":")[0]
        assert way.source and way.log
    assert (
        "FLAG-FP16"
        not in qdqtool.predict(residual("own"), "trt11", way="python").findings_by_code()
    )
    assert "trt_int8_calibration_table_name" in WAYS["onnxruntime"].care
    with raises(QdqtoolError, "way_named"):
        way_named("onnxruntim")
    assert way_named("ORT").name == "onnxruntime"
    with raises(QdqtoolError, "way_named qqqq"):
        way_named("qqqq")


@pytest.mark.parametrize(
    "case", ["resnet18-qat-rtx2000-trt8510", "resnet18-a100-qat-residual-qgap"]
)
def test_well_placed_models_have_no_warning(case):
    prediction = advised(case, "trt8.5")
    assert not [f for f in prediction.findings if f.severity != "info"]


@pytest.mark.parametrize("way", WAYS)
def test_the_flag_finding_speaks_the_words_of_the_way(way: str) -> None:
    prediction = qdqtool.predict(residual("own"), way=way)
    (flag,) = (f for f in prediction.findings if f.code == "FLAG-FP16")
    assert flag.way == way and {name for name, known in WAYS.items() if known.weak in flag.fix} == {
        way
    }


# A line of a log leads to its pass, the cases behind it and their test.

ROOT = Path(__file__).parents[2]
PREFIXES = (
    "",
    "[01/10/2024-21:52:53] [V] [TRT] ",
    "[V] [TRT] ",
    "[TRT] [V] ",
    "TensorRT VERBOSE ",
    "[V] ",
)
LINES = [
    ("Running: VanillaSwapWithFollowingQ on Resize_724", "VanillaSwapWithFollowingQ"),
    (
        "Eliminating QuantizeLinear_38 which duplicates (Q) QuantizeLinear_15",
        "HorizontalMergeQNodes",
    ),
    ("QuantizeDoubleInputNodes: fusing QuantizeLinear_46 into Conv_34", "QuantizeDoubleInputNodes"),
    (
        "ConvEltwiseSumFusion: Fusing w + QuantizeLinear_32 + Conv_34 with Add_42 + Relu_43",
        "ConvEltwiseSumFusion",
    ),
    ("Swap the layer type of QuantizeLinear_2 from QUANTIZE to kQDQ", "QDQToCopy"),
    ("Replacing slice Slice_895 with copy from 1549 to 1554", "SliceRemoval"),
    ("Generating copy for a to b because input does not support striding.", "ConcatRemoval"),
    ("Merging layers: A || B", "MergeLayers"),
    ("Running: DqQFusion on DequantizeLinear_772", "DqQFusion"),
]


def answered(line: str) -> LineAnswer:
    answer = explain_line(line)
    assert answer is not None
    return answer


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("line", "owner"), LINES)
def test_line(line: str, owner: str, prefix: str) -> None:
    answer = answered(prefix + line)
    rule = answer.rules[0]
    assert (
        (answer.line, rule.pass_name) == (line, owner) and rule.does and rule.means and rule.cases
    )
    assert (ROOT / rule.file).is_file() and (ROOT / rule.test).is_file()
    assert any((c.evidence == Evidence.SEEN and c.builds) or c.source for c in rule.cases.values())


def test_lines_of_passes() -> None:
    answer = answered("Removing QuantizeLinear_46")
    assert len(answer.rules) > 1 and answer.note == Remark.PASSES_SHARE_LINE()
    answer = answered("Running: SomethingNew on Conv_1")
    assert answer.rules == () and answer.note == Remark.PASS_UNKNOWN(name="SomethingNew")
    answer = answered("[V] [TRT] After Myelin optimization: 504 layers")
    assert answer.counted == 504 and answer.note == HEADINGS["After Myelin optimization"]
    for kind in passes():
        assert kind.__name__ in MEANINGS
        assert (ROOT / f"tests/trt/passes/test_{kind.__module__.rpartition('.')[2]}.py").is_file()


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
def test_the_case_that_fits_the_line_comes_first(line: str, case: str) -> None:
    answer = answered(line)
    rule = answer.rules[0]
    assert next(iter(rule.cases)) == f"{rule.pass_name}/{case}" and len(rule.cases) == 12
    assert line_text(answer, 80).count(" - ") == 1


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
def test_the_kind_of_line_and_its_operators_choose_the_case(line: str, case: str) -> None:
    assert next(iter(answered(line).rules[0].cases)) == case


@pytest.mark.parametrize(
    ("line", "owner"),
    [
        ("Swap the layer type of QuantizeLinear_2 from QUANTIZE to kQDQ", "QDQToCopy"),
        ("Swap the layer type of Add_1 from ELEMENTWISE to POINTWISE", "EltwiseAddToPwn"),
        (
            "Swap the layer type of Tanh_1 from ACTIVATION to POINTWISE",
            "ActivationToPointwiseConversion",
        ),
        ("Swap the layer type of ReduceMean_1 from REDUCE to POOLING", "ReduceToPoolingFusion"),
    ],
)
def test_a_line_about_types_is_of_one_pass(line: str, owner: str) -> None:
    found = answered(line)
    assert [rule.pass_name for rule in found.rules] == [owner] and not found.note


def test_what_cases_are_about_is_an_operator_or_a_kind_of_line() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas()} | FORMATS.keys()
    for name, case in all_cases().items():
        assert set(case.about) <= known and len(set(case.about)) == len(case.about), name


@pytest.mark.parametrize("line", ["", "hello", "Error Code 2: Internal Error", "SKIP-FLOAT"])
def test_other_texts_are_left_to_others(line: str) -> None:
    assert explain_line(line) is None


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("HorizontalMergeQNodes", "qdqtool/trt/passes/horizontal_merge_q_nodes.py"),
        ("HorizontalMergeQNodes/clone", "qdqtool/trt/passes/horizontal_merge_q_nodes.py"),
        ("MaxPool/q-past-maxpool", "qdqtool/model/operators.py"),
    ],
)
def test_passes_and_cases_are_answered_by_name(name: str, file: str) -> None:
    (rule,) = answered(name).rules
    assert rule.file == file and (ROOT / rule.test).is_file()
    assert "/" not in name or list(rule.cases) == [name]
