"""A line of a log leads to its pass, the cases behind it and their test."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqtool.explain.lines import MEANINGS, explain_line
from qdqtool.render.explain_text import line_text
from qdqtool.trt.rules import passes
from qdqtool.types import Evidence

ROOT = Path(__file__).parents[2]
PREFIXES = ("", "[01/10/2024-21:52:53] [V] [TRT] ", "[V] [TRT] ", "[TRT] [V] ", "TensorRT VERBOSE ", "[V] ")
LINES = [
    ("Running: VanillaSwapWithFollowingQ on Resize_724", "VanillaSwapWithFollowingQ"),
    ("Eliminating QuantizeLinear_38 which duplicates (Q) QuantizeLinear_15", "HorizontalMergeQNodes"),
    ("QuantizeDoubleInputNodes: fusing QuantizeLinear_46 into Conv_34", "QuantizeDoubleInputNodes"),
    ("ConvEltwiseSumFusion: Fusing w + QuantizeLinear_32 + Conv_34 with Add_42 + Relu_43", "ConvEltwiseSumFusion"),
    ("Swap the layer type of QuantizeLinear_2 from QUANTIZE to kQDQ", "QDQToCopy"),
    ("Replacing slice Slice_895 with copy from 1549 to 1554", "SliceRemoval"),
    ("Generating copy for a to b because input does not support striding.", "ConcatRemoval"),
    ("Merging layers: A || B", "MergeLayers"),
    ("Running: DqQFusion on DequantizeLinear_772", "DqQFusion"),
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("line", "owner"), LINES)
def test_line(line: str, owner: str, prefix: str) -> None:
    answer = explain_line(prefix + line)
    assert answer is not None and answer.line == line
    rule = answer.rules[0]
    assert rule.pass_name == owner
    assert rule.does and rule.means and rule.cases
    assert (ROOT / rule.file).is_file() and (ROOT / rule.test).is_file()
    assert any((c.evidence == Evidence.SEEN and c.builds) or c.source for c in rule.cases.values())


def test_line_that_may_be_of_several_passes_says_so() -> None:
    answer = explain_line("Removing QuantizeLinear_46")
    assert answer is not None and len(answer.rules) > 1
    assert "last 'Running: ...' line" in answer.note


@pytest.mark.parametrize(("line", "case"), [
    ("QuantizeDoubleInputNodes: fusing /m/q/QuantizeLinear into /m/conv/Conv", "int8-convolution"),
    ("QuantizeDoubleInputNodes: fusing /m/q/QuantizeLinear_1 into /m/Add_2", "sum"),
    ("QuantizeDoubleInputNodes: fusing a into b", "int8-convolution"),
])  # fmt: skip
def test_the_case_that_fits_the_line_comes_first(line: str, case: str) -> None:
    answer = explain_line(line)
    assert answer is not None
    rule = answer.rules[0]
    assert next(iter(rule.cases)) == f"{rule.pass_name}/{case}" and len(rule.cases) == 12
    assert line_text(answer, 80).count(" - ") == 1


def test_pass_that_is_not_known_says_so() -> None:
    answer = explain_line("Running: SomethingNew on Conv_1")
    assert answer is not None and answer.rules == ()
    assert "SomethingNew is a pass that no available build shows" in answer.note


def test_heading_with_a_count() -> None:
    answer = explain_line("[V] [TRT] After Myelin optimization: 504 layers")
    assert answer is not None and answer.counted == 504
    assert "Myelin" in answer.note


@pytest.mark.parametrize("line", ["", "hello", "Error Code 2: Internal Error", "SKIP-FLOAT"])
def test_other_texts_are_left_to_others(line: str) -> None:
    assert explain_line(line) is None


def test_every_pass_has_a_meaning_and_a_test() -> None:
    for kind in passes():
        assert kind.__name__ in MEANINGS
        assert (ROOT / f"tests/trt/passes/test_{kind.__module__.rpartition('.')[2]}.py").is_file()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("HorizontalMergeQNodes", "qdqtool/trt/passes/horizontal_merge_q_nodes.py"),
        ("HorizontalMergeQNodes/clone", "qdqtool/trt/passes/horizontal_merge_q_nodes.py"),
        ("MaxPool/q-past-maxpool", "qdqtool/model/operators.py"),
    ],
)
def test_passes_and_cases_are_answered_by_name(name: str, file: str) -> None:
    answer = explain_line(name)
    assert answer is not None
    (rule,) = answer.rules
    assert rule.file == file and (ROOT / rule.test).is_file()
    assert "/" not in name or list(rule.cases) == [name]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    from qdqtool.cli import run

    assert run(["explain", "[V] [TRT] Running: QDQToCopy on QuantizeLinear_28"]) == 0
    out = capsys.readouterr().out
    assert "A conversion that stays in the engine" in out
    assert "bevfusion-camera-orin-trt8502:870" in out
    assert "Rule: qdqtool/trt/passes/qdq_to_copy.py" in out
    assert "Test: tests/trt/passes/test_qdq_to_copy.py" in out
    assert all(len(line) <= 80 for line in out.splitlines())
