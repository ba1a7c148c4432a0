"""Pass lines, layers, conversions and tensors held against each other: each rule on builds of a few layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdqtool.buildlog.agreement import ConversionCounts, LayerCounts, TraceCounts
from qdqtool.buildlog.records import Milestone
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, LogEvent
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt import trace
from qdqtool.types import EngineLayer, Event, Precision, Prediction, TensorPrecision
from qdqtool.verification.lines import (
    _edge_difference,
    _layer_key,
    compare_conversions,
    compare_copies,
    compare_layers,
    compare_trace,
    inconsistent_tensors,
)
from qdqtool.verification.mapping import Mapper
from tests.trt.builder import Graph
from tests.verification.test_api_rules import layer

INT8, FP16, FP32, FLOAT, INT32 = Precision.INT8, Precision.FP16, Precision.FP32, Precision.FLOAT, Precision.INT32
QDQ = [Event("QDQToCopy", trace.RUNNING, name) for name in ("q0", "q1", "q2")]
COPIES = [Event("", trace.ELIMINATING_CONCAT, "cat"), Event("", trace.RETARGETING, "a", "b")]


def a_model() -> Model:
    g = Graph()
    return Model(g.model(g.conv(g.input(1, 8, 4, 4), "c", 8, 1)))


MODEL = a_model()
BASE = predict(MODEL, "trt8.5", advice=False)


def predicted(**changes: object) -> Prediction:
    return replace(BASE, **changes)  # type: ignore[arg-type]


def logged(*events: Event) -> list[LogEvent]:
    """Lines 11, 12, ... of a log."""
    return [LogEvent(e.pass_name, e.kind, e.subject, e.object, line=11 + i) for i, e in enumerate(events)]


# Lines ----------------------------------------------------------------------------------------------------------

COMPARERS = [(compare_trace, QDQ, "trace"), (compare_copies, COPIES, "copy")]


@pytest.mark.parametrize(("compare", "events", "kind"), COMPARERS)
@pytest.mark.parametrize("ended", [True, False])
def test_lines_of_one_side(compare, events, kind, ended) -> None:  # type: ignore[no-untyped-def]
    """One more in the log is always a mismatch; one less only where the log holds the passes to their end."""
    more = compare(predicted(trace=events[:1]), Build(trace=logged(*events[:2], events[1])), ended)
    assert more.counts == TraceCounts(1, 3, 1, 1)
    assert [(str(m.kind), m.line, m.why) for m in more.mismatches] == [
        (kind, 12, "first line at which prediction and log part"), (kind, 13, "logged, not predicted")]
    assert (more.mismatches[0].predicted, more.mismatches[0].name) == ({}, trace.render(events[1]))
    less = compare(predicted(trace=[*events[:2], events[1]]), Build(trace=logged(*events[:1])), ended)
    assert less.counts == TraceCounts(3, 1, 1, 1)
    assert [(m.why, m.line, m.built) for m in less.mismatches] == [("predicted, not logged", None, {})] * 2 * ended


@pytest.mark.parametrize(("compare", "events", "kind"), COMPARERS)
def test_a_log_without_such_lines_says_nothing(compare, events, kind) -> None:  # type: ignore[no-untyped-def]
    other = COPIES if kind == "trace" else QDQ
    found = compare(predicted(trace=events), Build(trace=logged(*other)), True)
    assert (found.counts, found.mismatches) == (TraceCounts(len(events)), [])


def test_removal_that_ran_and_printed_nothing() -> None:
    """After concat removal: N shows that it ran, so that a predicted line is missing."""
    build = Build(milestones=[Milestone("After concat removal", 9, 5)])
    found = compare_copies(predicted(trace=COPIES), build, True)
    assert found.counts == TraceCounts(2, 0, 0, 0) and len(found.mismatches) == 2
    assert compare_trace(predicted(trace=QDQ), build, True).counts == TraceCounts(3)


def test_lines_that_rest_on_unknown_scales_are_left_out_on_both_sides() -> None:
    found = compare_trace(predicted(trace=QDQ[:2]), Build(trace=logged(*QDQ[1:])), True, QDQ[:1])
    assert found.counts == TraceCounts(1, 2, 1, 1)
    assert [m.name for m in found.mismatches] == [trace.render(QDQ[2])]


def test_lines_of_other_passes_do_not_count() -> None:
    other = Event("ConstShuffleFusion", trace.FUSING, "a", "b")
    found = compare_trace(predicted(trace=[*QDQ, other]), Build(trace=logged(other, *QDQ, other)), True)
    assert found.counts == TraceCounts(3, 3, 3, 3) and found.mismatches == []


# Conversions ----------------------------------------------------------------------------------------------------


def q(name: str, line: int = 0) -> BuiltLayer:
    return layer(name, "Reformat", "FP32", "INT8", line=line)


@pytest.mark.parametrize(("build", "ended", "built"), [
    (Build(layers=[q("q0_QuantizeLinear"), q("q1_QuantizeLinear")]), False, 2),
    (Build(layers=[q("q0_QuantizeLinear")], trace=logged(*QDQ)), True, 1),  # the listing outranks the lines
    (Build(layers=[q("q0_QuantizeLinear")], names_only=True, trace=logged(*QDQ)), True, 3),
    (Build(layers=[q("q0_QuantizeLinear")], missing=["engine listing (its end)"], trace=logged(*QDQ)), True, 3),
    (Build(layers=[q("q0_QuantizeLinear")], missing=["profile"], trace=logged(*QDQ)), True, 1),
    (Build(trace=logged(*QDQ)), True, 3),
    (Build(trace=logged(*QDQ)), False, None),  # cut off: more may have stayed
    (Build(trace=logged(Event("QDQToCopy", trace.SWAP_TYPE, "q0", "x"))), True, 0),  # one line for each counts
    (Build(trace=logged(Event("ConstShuffleFusion", trace.FUSING, "a", "b"))), True, None),
    (Build(), True, None),
])  # fmt: skip
def test_conversions_are_counted_where_the_build_tells(build: Build, ended: bool, built: int | None) -> None:
    assert compare_conversions(predicted(), build, ended).counts == ConversionCounts(BASE.conversions, built)


def test_conversions_by_name() -> None:
    """8.0 appends to a Q's name; each side's own ones are told, a built one with its line."""
    build = Build(layers=[q("a_QuantizeLinear_quantize_scale_node", 7), q("b_QuantizeLinear", 8)])
    mine = predicted(conversion_nodes=["a_QuantizeLinear", "c"], conversions=2)
    found = compare_conversions(mine, build, True)
    assert (found.counts, found.agree) == (ConversionCounts(2, 2), 1)
    assert [(m.name, m.line, m.why) for m in found.mismatches] == [
        ("b_QuantizeLinear", 8, "stays in the engine, not predicted"),
        ("c", None, "predicted to stay, the engine has none"),
    ]
    unknown = compare_conversions(predicted(conversions=None), build, True)
    assert (unknown.counts, unknown.agree, unknown.mismatches) == (ConversionCounts(None, 2), None, [])


# Layers ---------------------------------------------------------------------------------------------------------


def mine(name: str, inputs: list[Precision], outputs: list[Precision]) -> EngineLayer:
    edges = ([TensorPrecision(f"t{i}", p) for i, p in enumerate(side)] for side in (inputs, outputs))
    return EngineLayer(name, "Convolution", *edges, [])


def layers_of(prediction: Prediction, build: Build, *reported: str):  # type: ignore[no-untyped-def]
    return compare_layers(prediction, build, Mapper(MODEL, build.layers), reported)


def test_layers_by_name_and_types() -> None:
    prediction = predicted(layers=[mine("a", [INT8], [FLOAT]), mine("b", [INT8], [INT8]), mine("d", [INT8], [INT8])])
    build = Build(layers=[layer("a", inputs="INT8", outputs="FP16"), layer("b", inputs="FP32", outputs="INT8", line=5),
                          layer("c", inputs="INT8", outputs="INT8")])  # fmt: skip
    found = layers_of(prediction, build)
    assert (found.predicted, found.counts) == (3, LayerCounts(3, 1))
    assert [(m.name, m.why, m.line) for m in found.mismatches] == [("b", "predicted INT8 input, built FP32 input", 5)]
    told = layers_of(prediction, build, "b")
    assert (told.counts, told.mismatches) == (LayerCounts(3, 1), []), "its convolution is a mismatch already"


def test_what_is_no_layer_of_the_network_does_not_count() -> None:
    """Layout reformats; and a layer without a type, but in a listing of names."""
    names = [layer("a"), layer("Reformatting CopyNode for Input Tensor 0 to a", "Reformat"), layer("b", "")]
    prediction = predicted(layers=[mine("a", [], []), mine("b", [], [])])
    assert layers_of(prediction, Build(layers=names)).counts == LayerCounts(1, 1)
    assert layers_of(prediction, Build(layers=names, names_only=True)).counts == LayerCounts(2, 2)
    assert layers_of(prediction, Build()).counts == LayerCounts(None)
    assert layers_of(predicted(conversions=None), Build(layers=names)).counts == LayerCounts(1, None)


@pytest.mark.parametrize(("first", "second", "same"), [
    ("/NonMaxSuppression_246", "/NonMaxSuppression", True), ("/Conv_246", "/Conv", False),
    ("/NonMaxSuppression_a", "/NonMaxSuppression", False), ("Q_1_quantize_scale_node", "Q_1", True), ("a", "b", False),
    ("/NonMaxSuppression_1", "/NonMaxSuppression_2", True), ("Conv_1", "Conv_2", False),
])  # fmt: skip
def test_names_that_mean_one_layer(first: str, second: str, same: bool) -> None:
    """The parser numbers some layers by itself; ONNX names with numbers are kept."""
    assert (_layer_key(first) == _layer_key(second)) is same
    assert not _layer_key(first).endswith("_") and _layer_key(first)


@pytest.mark.parametrize(("predicted_types", "built_types", "different"), [
    ([INT8], [INT8], False), ([INT8], [FP16], True), ([FLOAT], [FP16], False), ([FLOAT], [INT8], True),
    ([FP16], [FP32], True), ([INT8, INT8], [INT8], False), ([INT8, INT8], [INT8, FP32], True),
    ([INT8], [Precision.UNKNOWN], False), ([INT32], [INT8], False), ([INT8], [INT32], False), ([], [INT8], False),
])  # fmt: skip
def test_types_at_an_edge(
    predicted_types: list[Precision], built_types: list[Precision], different: bool
) -> None:
    """INT8 and floats are compared where both sides tell; shapes and indices are the builder's own matter."""
    said = _edge_difference("output", [TensorPrecision("t", p) for p in predicted_types],
                            [BuiltTensor("t", p) for p in built_types])  # fmt: skip
    assert bool(said) is different
    assert not said or said.endswith(" output")


# Tensors --------------------------------------------------------------------------------------------------------


def tensors(**types: Precision) -> list[BuiltTensor]:
    return [BuiltTensor(name, p) for name, p in types.items()]


def test_a_tensor_with_two_types() -> None:
    """In two layers, or in two listings of one engine; a type that is not told contradicts nothing."""
    first = BuiltLayer("a", "CaskConvolution", tensors(s=FP16), tensors(t=INT8), line=3)
    build = Build(layers=[first, BuiltLayer("b", "CaskConvolution", tensors(t=FP16), [], line=4)])
    found = inconsistent_tensors(MODEL, build)
    assert [(m.name, m.why, m.line) for m in found] == [
        ("t", "the log contradicts itself: INT8 in line 3, FP16 in line 4", 4)]
    again = BuiltLayer("a", "CaskConvolution", tensors(s=FP32), tensors(t=INT8), line=9)
    assert [m.name for m in inconsistent_tensors(MODEL, Build(layers=[first], second_layers=[again]))] == ["s"]
    untold = BuiltLayer("b", "CaskConvolution", tensors(t=Precision.UNKNOWN), [], line=4)
    assert inconsistent_tensors(MODEL, Build(layers=[untold, first, untold])) == []


@pytest.mark.parametrize(("tensor", "precision", "bindings", "wrong"), [
    ("x", FP32, [], False), ("x", FP16, [], False), ("x", INT8, [], True), ("c:0", INT8, [], True),
    ("middle", INT8, [], False), ("renamed", INT8, ["renamed"], True), ("renamed", FP16, ["renamed"], False),
    ("x", INT32, [], False),
])  # fmt: skip
def test_the_networks_ends_cannot_be_int8(
    tensor: str, precision: Precision, bindings: list[str], wrong: bool
) -> None:
    """The model says what they are, under its name or the one that the build binds."""
    build = Build(layers=[BuiltLayer("a", "Reformat", tensors(**{tensor: precision}), [], line=3)], bindings=bindings)
    found = inconsistent_tensors(MODEL, build)
    assert [m.name for m in found] == [tensor] * wrong
    assert all("the engine lists INT8" in m.why and m.line == 3 for m in found)
