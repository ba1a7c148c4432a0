import pytest

import qdqtool
from qdqtool.evidence import Evidence
from qdqtool.findings.report import describe_finding
from qdqtool.reasons.compiler import CompilerFault, FaultKind, UnsupportedForm
from qdqtool.reasons.finding import Cause, Finding, Severity
from tests.extraction.networks import residual
from tests.wording import left_float_reasons, skip_classes


def test_wording_covers_each_reason_of_a_skipped_node() -> None:
    assert {kind.__name__ for kind in skip_classes()} == left_float_reasons().keys()


@pytest.mark.parametrize("form", UnsupportedForm)
def test_compiler_fault_of_each_form_has_words(form: UnsupportedForm) -> None:
    cause = Cause(CompilerFault("", "n", FaultKind.OPERATOR, (form, "Resize")))
    context = "BUILD-FAILS", Severity.ERROR, "n", (cause,), Evidence.SEEN
    finding = Finding(*context, describe_finding, target="rtx1.7")
    assert finding.message.startswith("n: ") and finding.fix and "{" not in finding.message


def test_private_part_renames_nodes_but_no_words() -> None:
    """The name of a node can be a word of a message.

    The word is replaced only in texts of a compiler.
    """
    model = residual()
    for node in model.graph.node:
        if node.name == "b0.c1":
            node.name = "prediction"
    hidden = qdqtool.extract(model, node="prediction", private=True)
    name = hidden.private.names["prediction"]
    assert hidden.kept.count(name) == 2 and "prediction" in hidden.kept
    assert (
        hidden.private.replace_names("at 'prediction': no prediction") == f"at '{name}': no {name}"
    )
