"""The words of findings are those that were agreed on; all other tests look at codes and data."""

import json

import pytest

import qdqtool
from qdqtool.base.notes import Remark
from qdqtool.explain import left_float
from qdqtool.explain.coded import MADE
from qdqtool.explain.messages import worded
from qdqtool.trt.refusals import ScalesDiffer
from qdqtool.trt.rtx.operands import CompilerFault, Fault, Form
from qdqtool.types import Cause, Evidence, Finding, Refusal, Severity
from tests.extraction.networks import residual
from tests.wording import DATA, kinds_worded, of_findings, of_obstacles, of_skipped

EXPECTED = json.loads(DATA.read_text("utf-8"))["findings"]


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return of_findings()


@pytest.mark.parametrize("network", EXPECTED)
def test_wording(found: dict[str, list[str]], network: str) -> None:
    assert found.keys() == EXPECTED.keys()
    assert found[network] == EXPECTED[network], "if it is meant so: python -m tests.wording"


def test_the_words_of_each_kind_are_held() -> None:
    """Of scales that differ on one tensor nothing is reported: where they cost something, the conversion is."""
    assert kinds_worded() == MADE.keys() - {ScalesDiffer}


def test_wording_of_what_keeps_a_model_from_being_built() -> None:
    assert of_obstacles() == json.loads(DATA.read_text("utf-8"))["obstacles"], (
        "if it is meant so: tests.wording"
    )


def test_findings_that_name_the_program() -> None:
    """Their words stand in the Python interface as well; these send to another command."""
    named = {
        text.partition(":")[0] for texts in EXPECTED.values() for text in texts if "qdqtool" in text
    }
    assert named == {"NO-QDQ", "ACT-SCALE", "NORM-PIECES"}


def test_wording_of_what_a_placement_leaves_float() -> None:
    expected = json.loads(DATA.read_text(encoding="utf-8"))["skipped"]
    assert of_skipped() == expected, "if it is meant so: python -m tests.wording"
    kinds = {
        k for k in vars(left_float).values() if isinstance(k, type) and issubclass(k, Refusal)
    } - {Refusal}
    assert kinds == left_float.WORDS.keys()
    below = type("Below", (left_float.NoNeighbour,), {})
    reasons = {
        left_float.SkippedNode(kind("placement", "n")).reason
        for kind in (below, left_float.NoNeighbour)
    }
    assert len(reasons) == 1


def test_each_form_of_an_operator_has_words() -> None:
    for form in Form:
        fault = CompilerFault("", "n", Fault.OPERATOR, (form, "Resize"))
        found = Finding(
            "BUILD-FAILS",
            Severity.ERROR,
            "n",
            (Cause(fault),),
            Evidence.SEEN,
            worded,
            target="rtx1.7",
        )
        assert found.message.startswith("n: ") and found.fix and "{" not in found.message


def test_private_names_are_hidden_where_they_are_names() -> None:
    """A node that is called as a word of ours hides no word; where a compiler's words name it, they are searched."""
    model = residual()
    for node in model.graph.node:
        if node.name == "b0.c1":
            node.name = "prediction"
    hidden = qdqtool.extract(model, node="prediction", private=True)
    assert hidden.private is not None
    name = hidden.private.names["prediction"]
    assert f": what the prediction of {name} depends on; " in hidden.kept
    assert hidden.kept.endswith(f", the prediction of {name}")
    quoted = Remark.CHECKED_BUILD_SAYING(
        builder="b", status="refused", message="at 'prediction': no prediction"
    )
    assert quoted.renamed(hidden.private.value) == f"b: refused: at '{name}': no {name}"
