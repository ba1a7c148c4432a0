"""Two builds of one network: a raw 8.6.0 log with its layer JSON, and a transcribed 8.5.2 log with its tables."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build, Listing
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.types import Event
from qdqtool.verification.api import compare, exit_code, verify
from qdqtool.verification.lines import agreement, is_copy_line
from tests.buildlog.evidence import build_file
from tests.verification.transcribed import layers_of, outcomes

RAW, TRANSCRIBED = "bevfusion-camera-rtx3080ti-trt8600", "bevfusion-camera-orin-trt8502"
CONSTANTS = "ConstQDQInitializersFusion"


@pytest.fixture(scope="module")
def raw() -> Build:
    return read_build(build_file(RAW), build_file(RAW, "layer_info.json"))


def test_all_of_the_raw_log_is_read(raw: Build) -> None:
    assert (raw.tensorrt, raw.device, raw.complete, raw.missing) == ("8.6.0", "NVIDIA GeForce RTX 3080 Ti", True, [])
    assert raw.lines.unexplained == 0
    assert (raw.milestone("Original"), raw.milestone("After Myelin optimization")) == (860, 504)
    assert (len(raw.parse.nodes), len(raw.layers), len(raw.trace)) == (443, 78, 1513)  # counted with grep
    assert sum(e.pass_name != CONSTANTS for e in raw.trace) == 868
    assert sum(layer.type == "NoOp" for layer in raw.layers) == 2
    assert sum(map(is_copy_line, raw.trace)) == 11
    assert [e.object for e in raw.trace if e.kind == "Replacing slice"] == ["1446 to 1451"]
    assert any(r.target == "Half(557568,2816,88,1)" for r in raw.reformats)  # long-strided


def test_the_raw_log_verifies() -> None:
    """All files at once; the rules were made from this build, too."""
    result = verify(build_file(RAW, "model.onnx.gz"), build_file(RAW), build_file(RAW, "layer_info.json"))
    assert result.mismatches == []
    assert exit_code(result) == 0
    assert result.convolutions.agree == result.convolutions.total == 63
    assert (result.conversions.predicted, result.conversions.built) == (2, 2)
    assert result.layers.agree == result.layers.total == 76
    assert result.copies.agree == result.copies.built == result.copies.predicted == 11
    assert result.copies.in_order == 11


@pytest.mark.parametrize(("words", "change", "why"), [
    ("Generating copy for Concat_712_1253", lambda _: None, "predicted, not logged"),
    ("Replacing slice Slice_851", lambda line: line.replace("1446", "1447"), "first line at which"),
    ("Eliminating concatenation", lambda line: f"{line}_x", "first line at which"),
])
def test_a_changed_copy_line_is_a_mismatch(
    words: str, change: Callable[[str], str | None], why: str, model: Model
) -> None:
    lines = build_file(RAW).read_text().split("\n")  # metadata holds other line separators
    at = next(i for i, line in enumerate(lines) if words in line)
    made = change(lines[at])
    changed = [*lines[:at], *([] if made is None else [made]), *lines[at + 1 :]]
    result = verify(model, read_build(io.BytesIO("\n".join(changed).encode())))
    assert exit_code(result) == 1
    found = [m for m in result.mismatches if m.kind == "copy"]
    assert found[0].why.startswith(why)
    assert found[0].line == (None if made is None else at + 1)
    assert {m.kind for m in result.mismatches} == {"copy"}


@pytest.fixture(scope="module")
def model() -> Model:
    return load(build_file(RAW, "model.onnx.gz"))


def test_lines_stand_in_the_logs_order(raw: Build, model: Model) -> None:
    """All but the folding of constants, whose order is that of the parser's tables."""
    def others(events: list[Event]) -> list[Event]:
        return [e for e in events if e.pass_name != CONSTANTS]

    found = agreement(others(predict(model, "trt8.6").trace), others([e.event for e in raw.trace]))
    assert (found.predicted, found.built) == (868, 868)
    assert found.agree is not None and found.agree >= 866  # two lines name an unnamed layer by its number
    assert found.in_order is not None and found.in_order >= 0.95 * 868


def test_the_transcribed_build() -> None:
    source = load(build_file(TRANSCRIBED, "model.onnx.gz"))
    build = read_build(build_file(TRANSCRIBED, "lines.txt"))
    prediction = predict(source, "trt8.5")
    assert (build.milestone("Original"), build.milestone("After Myelin optimization")) == (860, 504)
    layers = layers_of(build_file(TRANSCRIBED, "layers.tsv"))
    build = replace(build, layers=layers, listing=Listing.LAYER_JSON, missing=[])
    folded = tuple(e for e in prediction.trace if e.pass_name == CONSTANTS)  # counted in it, not written out
    result = compare(source, prediction, build, unsure_events=folded)
    assert result.mismatches == []
    assert result.convolutions.agree == result.convolutions.total == 63
    assert result.trace.agree == result.trace.built == result.trace.predicted
    assert result.copies.agree == result.copies.built == result.copies.predicted == 11
    assert (result.conversions.predicted, result.conversions.built) == (2, 2)
    assert result.layers.agree == result.layers.total == 76


def test_the_table_of_outcomes_is_that_of_the_layers() -> None:
    """Two transcriptions of one log agree, so that neither was bent to fit."""
    table = outcomes(build_file(TRANSCRIBED, "outcomes.json"))
    layers = layers_of(build_file(TRANSCRIBED, "layers.tsv"))
    assert sorted(layer.name for layer in layers if layer.is_qdq) == sorted(table["conversions"])
    listed = {part: layer for layer in layers if layer.is_convolution for part in layer.fused().components}
    assert len(table["convolutions"]) == 63
    for name, row in table["convolutions"].items():
        assert [str(t.precision) for t in listed[name].inputs] == row["inputs"], name
        assert str(listed[name].output_precision) == row["output"], name
