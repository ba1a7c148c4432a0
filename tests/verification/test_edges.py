"""The edges of the comparison: contradictions within a log, what is unknown, residuals in another place."""

from __future__ import annotations

import io

import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.modelfile import load
from qdqtool.types import Mismatch
from qdqtool.verification.api import compare, exit_code, verify
from tests.trt.evidence import HOME, prediction
from tests.verification.synthetic import log_of

CASE = "resnet18-qat-rtx2000-trt8510"
MODEL = HOME / CASE / "model.onnx.gz"
LINES = log_of(prediction(CASE))


def engine_line(conv: str) -> int:
    return next(i for i, x in enumerate(LINES) if x.startswith("Layer(C") and f" {conv} " in x.replace(",", " "))


def mismatches(changes: dict[int, str], lines: list[str] | None = None) -> dict[str, Mismatch]:
    """Those of convolutions, by name, of the log with some lines exchanged."""
    text = "\n".join(changes.get(i, x) for i, x in enumerate(lines or LINES))
    result = verify(MODEL, read_build(io.BytesIO(text.encode())))
    return {m.name: m for m in result.mismatches if m.kind == "convolution"}


def test_a_log_that_says_both_things_is_not_to_be_trusted() -> None:
    """A pass line quantizes the convolution, the engine lists a float input; the same of its output; and no line."""
    at = engine_line("Conv_22")
    found = mismatches({at: LINES[at].replace("Int8", "Float", 1)})
    assert "quantizes it, the engine lists a float input" in found["Conv_22"].why
    assert found["Conv_22"].built["fused"] == []
    before, _, after = LINES[at].rpartition("Int8")
    assert "quantizes the output, the engine lists float" in mismatches({at: f"{before}Float{after}"})["Conv_22"].why
    without = [x for x in LINES if "fusing" not in x or "Conv_22" not in x]
    assert "the engine lists INT8, no pass line quantizes it" in mismatches({}, without)["Conv_22"].why


def test_what_a_layer_absorbed() -> None:
    """The Add and the Relu; neither the convolution itself nor its quantizers nor its constants."""
    at = engine_line("Conv_34")
    found = mismatches({at: LINES[at].replace("Int8", "Float", 1)})
    assert found["Conv_34"].built["fused"] == ["Add_42", "Relu_43"]


def test_a_residual_on_the_other_side() -> None:
    """The builder may let either convolution take the Add; a prediction of the other one is wrong about both."""
    taker, other = engine_line("Conv_96"), engine_line("Conv_107")
    alone = LINES[taker].replace(" + Add_115 + Relu_116", "").replace(", 301 (Int8[1,8,8,8])", "")
    with_add = LINES[other].replace("+ Conv_107", "+ Conv_107 + Add_115 + Relu_116")
    with_add = with_add.replace(" -> ", ", 275 (Int8[1,8,8,8]) -> ")
    assert set(mismatches({taker: alone, other: with_add})) == {"Conv_96", "Conv_107"}


@pytest.mark.parametrize("unsure", [("Conv_9",), ("Conv_9", "Conv_22")])
def test_what_rests_on_unknown_scales_is_unknown_whatever_the_build_says(unsure: tuple[str, ...]) -> None:
    build = read_build(io.BytesIO("\n".join(LINES).encode()))
    result = compare(load(MODEL), prediction(CASE), build, unsure)
    counts = result.as_json()["convolutions"]
    assert (counts["agree"], counts["unknown"]) == (21 - len(unsure), len(unsure))
    assert list(counts["unknown_names"]) == list(unsure)
    assert exit_code(result) == 2
