"""Pass lines, layers, conversions and tensors held against each other: each rule on builds of a few layers."""

import functools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from qdqtool.base.notes import Remark, remarks
from qdqtool.buildlog.agreement import (
    ConversionCounts,
    ConvolutionCounts,
    Difference,
    LayerCounts,
    Mismatch,
    MismatchKind,
    TraceCounts,
)
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.summary import listing_hole
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    Gap,
    Lack,
    LogEvent,
    Milestone,
    Section,
)
from qdqtool.errors import BuildLogError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.trt import trace
from qdqtool.trt.pipeline import passes
from qdqtool.types import EngineLayer, Event, Precision, Prediction, TensorPrecision
from qdqtool.verification.api import check_explicit, compare, exit_code, verify, verify_from_log
from qdqtool.verification.convolutions import BuiltConv, Mapper, common_names
from qdqtool.verification.lines import (
    _edge_difference,
    _layer_key,
    compare_conversions,
    compare_layers,
    compare_trace,
    compared_passes,
    inconsistent_tensors,
)
from tests.buildlog.samples import build_of
from tests.raising import raises
from tests.trt.builder import Graph
from tests.trt.evidence import HOME, prediction
from tests.verification.synthetic import log_of
from tests.verification.test_api import layer

pytestmark = pytest.mark.usefixtures("published_once")
INT8, FP16, FP32, FLOAT, INT32 = (
    Precision.INT8,
    Precision.FP16,
    Precision.FP32,
    Precision.FLOAT,
    Precision.INT32,
)
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
    return [
        LogEvent(e.pass_name, e.kind, e.subject, e.object, line=11 + i)
        for i, e in enumerate(events)
    ]


# Lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "kind"), [(QDQ, MismatchKind.TRACE), (COPIES, MismatchKind.COPY)]
)
@pytest.mark.parametrize("ended", [True, False])
def test_lines_of_one_side(events: list[Event], kind: MismatchKind, ended: bool) -> None:
    """One more in the log is always a mismatch; one less only where the log holds the passes to their end."""
    compare = functools.partial(compare_trace, kind=kind)
    more = compare(predicted(trace=events[:1]), Build(trace=logged(*events[:2], events[1])), ended)
    assert more.counts == TraceCounts(1, 3, 1, 1)
    assert [(m.kind, m.line, m.differs) for m in more.mismatches] == [
        (kind, 12, Difference.FIRST_LINE),
        (kind, 13, Difference.LOGGED),
    ]
    assert (more.mismatches[0].predicted, more.mismatches[0].name) == ({}, trace.render(events[1]))
    less = compare(
        predicted(trace=[*events[:2], events[1]]), Build(trace=logged(*events[:1])), ended
    )
    assert less.counts == TraceCounts(3, 1, 1, 1)
    assert [(m.differs, m.line, m.built) for m in less.mismatches] == [
        (Difference.NOT_LOGGED, None, {})
    ] * 2 * ended
    # a log without such lines says nothing
    none = compare(
        predicted(trace=events), Build(trace=logged(*(COPIES if events is QDQ else QDQ))), True
    )
    assert (none.counts, none.mismatches) == (TraceCounts(len(events)), [])


def test_lines_that_do_not_count() -> None:
    found = compare_trace(predicted(trace=QDQ[:2]), Build(trace=logged(*QDQ[1:])), True, QDQ[:1])
    assert found.counts == TraceCounts(1, 2, 1, 1)
    assert [m.name for m in found.mismatches] == [trace.render(QDQ[2])]
    other = Event("ConstShuffleFusion", trace.FUSING, "a", "b")
    found = compare_trace(
        predicted(trace=[*QDQ, other]), Build(trace=logged(other, *QDQ, other)), True
    )
    assert found.counts == TraceCounts(3, 3, 3, 3) and found.mismatches == []
    # After concat removal: N shows that it ran, so that a predicted line is missing
    build = Build(milestones=[Milestone("After concat removal", 9, 5)])
    found = compare_trace(predicted(trace=COPIES), build, True, kind=MismatchKind.COPY)
    assert found.counts == TraceCounts(2, 0, 0, 0) and len(found.mismatches) == 2
    assert compare_trace(predicted(trace=QDQ), build, True).counts == TraceCounts(3)


def test_a_pass_is_compared_unless_it_says_that_it_is_not() -> None:
    """Not compared are those of constants and shuffles alone, and those that no log names."""
    assert {kind.__name__ for kind in passes()} - compared_passes() == {
        "ConstCastFold",
        "ConstEltFusion",
        "ConstShuffleFusion",
        "ConstantFoldDanglingQDQ",
        "MyelinOptimization",
        "MyelinRegions",
        "PadConvFusion",
        "RequantizeFusion",
        "ScaleScaleFusion",
        "ShuffleErasure",
        "ShuffleShuffleFusion",
        "SqueezePushDownJoin",
    }  # those that print lines without a name have none to compare


# Conversions ----------------------------------------------------------------------------------------------------


def q(name: str, line: int = 0) -> BuiltLayer:
    return layer(name, "Reformat", "FP32", "INT8", line=line)


@pytest.mark.parametrize(
    ("build", "ended", "built"),
    [
        (Build(layers=[q("q0_QuantizeLinear"), q("q1_QuantizeLinear")]), False, 2),
        (
            Build(layers=[q("q0_QuantizeLinear")], trace=logged(*QDQ)),
            True,
            1,
        ),  # the listing outranks the lines
        (Build(layers=[q("q0_QuantizeLinear")], names_only=True, trace=logged(*QDQ)), True, 3),
        (
            Build(
                layers=[q("q0_QuantizeLinear")],
                gaps=[Gap(Section.LISTING, Lack.CUT)],
                trace=logged(*QDQ),
            ),
            True,
            3,
        ),
        (
            Build(layers=[q("q0_QuantizeLinear")], gaps=[Gap(Section.PROFILE)], trace=logged(*QDQ)),
            True,
            1,
        ),
        (Build(trace=logged(*QDQ)), True, 3),
        (Build(trace=logged(*QDQ)), False, None),  # cut off: more may have stayed
        (
            Build(trace=logged(Event("QDQToCopy", trace.SWAP_TYPE, "q0", "x"))),
            True,
            0,
        ),  # one line for each counts
        (Build(trace=logged(Event("ConstShuffleFusion", trace.FUSING, "a", "b"))), True, None),
        (Build(), True, None),
    ],
)
def test_conversions_are_counted_where_the_build_tells(
    build: Build, ended: bool, built: int | None
) -> None:
    assert compare_conversions(predicted(), build, ended).counts == ConversionCounts(
        BASE.conversions, built
    )


def test_conversions_and_layers_by_name() -> None:
    """8.0 appends to a Q's name; each side's own ones are told, a built one with its line."""
    build = Build(layers=[q("a_QuantizeLinear_quantize_scale_node", 7), q("b_QuantizeLinear", 8)])
    ours = predicted(conversion_nodes=["a_QuantizeLinear", "c"], conversions=2)
    found = compare_conversions(ours, build, True)
    assert found.counts == ConversionCounts(2, 2)
    assert [(m.name, m.line, m.differs) for m in found.mismatches] == [
        ("b_QuantizeLinear", 8, Difference.STAYS),
        ("c", None, Difference.GONE),
    ]
    unknown = compare_conversions(predicted(conversions=None), build, True)
    assert (unknown.counts, unknown.mismatches) == (ConversionCounts(None, 2), [])
    prediction = predicted(
        layers=[mine("a", [INT8], [FLOAT]), mine("b", [INT8], [INT8]), mine("d", [INT8], [INT8])]
    )
    build = Build(
        layers=[
            layer("a", inputs="INT8", outputs="FP16"),
            layer("b", inputs="FP32", outputs="INT8", line=5),
            layer("c", inputs="INT8", outputs="INT8"),
        ]
    )
    found = layers_of(prediction, build)
    assert found.counts == LayerCounts(3, 1)
    assert [(m.name, m.differs, m.values, m.line) for m in found.mismatches] == [
        ("b", Difference.INPUT, (INT8, FP32), 5)
    ]
    told = layers_of(prediction, build, "b")
    assert (told.counts, told.mismatches) == (LayerCounts(3, 1), []), (
        "its convolution is a mismatch already"
    )
    # Layout reformats; and a layer without a type, but in a listing of names
    names = [
        layer("a"),
        layer("Reformatting CopyNode for Input Tensor 0 to a", "Reformat"),
        layer("b", ""),
    ]
    prediction = predicted(layers=[mine("a", [], []), mine("b", [], [])])
    assert layers_of(prediction, Build(layers=names)).counts == LayerCounts(1, 1)
    assert layers_of(prediction, Build(layers=names, names_only=True)).counts == LayerCounts(2, 2)
    assert layers_of(prediction, Build()).counts == LayerCounts(None)
    assert layers_of(predicted(conversions=None), Build(layers=names)).counts == LayerCounts(
        1, None
    )


# Layers ---------------------------------------------------------------------------------------------------------


def mine(name: str, inputs: list[Precision], outputs: list[Precision]) -> EngineLayer:
    edges = (
        [TensorPrecision(f"t{i}", p) for i, p in enumerate(side)] for side in (inputs, outputs)
    )
    return EngineLayer(name, "Convolution", *edges, [])


def layers_of(prediction: Prediction, build: Build, *reported: str):  # type: ignore[no-untyped-def]
    return compare_layers(prediction, build, Mapper(MODEL, build.layers), reported)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("/NonMaxSuppression_246", "/NonMaxSuppression", True),
        ("/Conv_246", "/Conv", False),
        ("/NonMaxSuppression_a", "/NonMaxSuppression", False),
        ("Q_1_quantize_scale_node", "Q_1", True),
        ("a", "b", False),
        ("/NonMaxSuppression_1", "/NonMaxSuppression_2", True),
        ("Conv_1", "Conv_2", False),
    ],
)
def test_names_that_mean_one_layer(first: str, second: str, same: bool) -> None:
    """The parser numbers some layers by itself; ONNX names with numbers are kept."""
    assert (_layer_key(first) == _layer_key(second)) is same
    assert not _layer_key(first).endswith("_") and _layer_key(first)


@pytest.mark.parametrize(
    ("predicted_types", "built_types", "different"),
    [
        ([INT8], [INT8], False),
        ([INT8], [FP16], True),
        ([FLOAT], [FP16], False),
        ([FLOAT], [INT8], True),
        ([FP16], [FP32], True),
        ([INT8, INT8], [INT8], False),
        ([INT8, INT8], [INT8, FP32], True),
        ([INT8], [Precision.UNKNOWN], False),
        ([INT32], [INT8], False),
        ([INT8], [INT32], False),
        ([], [INT8], False),
    ],
)
def test_types_at_an_edge(
    predicted_types: list[Precision], built_types: list[Precision], different: bool
) -> None:
    """INT8 and floats are compared where both sides tell; shapes and indices are the builder's own matter."""
    said = _edge_difference(
        Difference.OUTPUT,
        [TensorPrecision("t", p) for p in predicted_types],
        [BuiltTensor("t", p) for p in built_types],
    )
    assert (said is not None) is different and (said is None or said[0] == Difference.OUTPUT)


# Tensors --------------------------------------------------------------------------------------------------------


def tensors(**types: Precision) -> list[BuiltTensor]:
    return [BuiltTensor(name, p) for name, p in types.items()]


def test_a_tensor_with_two_types() -> None:
    """In two layers, or in two listings of one engine; a type that is not told contradicts nothing."""
    first = BuiltLayer("a", "CaskConvolution", tensors(s=FP16), tensors(t=INT8), line=3)
    build = Build(layers=[first, BuiltLayer("b", "CaskConvolution", tensors(t=FP16), [], line=4)])
    found = inconsistent_tensors(MODEL, build)
    assert [(m.name, m.differs, m.values, m.line) for m in found] == [
        ("t", Difference.TWO_TYPES, (INT8, 3, FP16, 4), 4)
    ]
    again = BuiltLayer("a", "CaskConvolution", tensors(s=FP32), tensors(t=INT8), line=9)
    assert [
        m.name for m in inconsistent_tensors(MODEL, Build(layers=[first], second_layers=[again]))
    ] == ["s"]
    untold = BuiltLayer("b", "CaskConvolution", tensors(t=Precision.UNKNOWN), [], line=4)
    assert inconsistent_tensors(MODEL, Build(layers=[untold, first, untold])) == []


@pytest.mark.parametrize(
    ("tensor", "precision", "bindings", "wrong"),
    [
        ("x", FP32, [], False),
        ("x", FP16, [], False),
        ("x", INT8, [], True),
        ("c:0", INT8, [], True),
        ("middle", INT8, [], False),
        ("renamed", INT8, ["renamed"], True),
        ("renamed", FP16, ["renamed"], False),
        ("x", INT32, [], False),
    ],
)
def test_the_networks_ends_cannot_be_int8(
    tensor: str, precision: Precision, bindings: list[str], wrong: bool
) -> None:
    """The model says what they are, under its name or the one that the build binds."""
    build = Build(
        layers=[BuiltLayer("a", "Reformat", tensors(**{tensor: precision}), [], line=3)],
        bindings=bindings,
    )
    found = inconsistent_tensors(MODEL, build)
    assert [m.name for m in found] == [tensor] * wrong
    assert all(m.differs == Difference.END and m.values[-1] == INT8 and m.line == 3 for m in found)


# The edges of the comparison: contradictions within a log, what is unknown, residuals in another place.

CASE = "resnet18-qat-rtx2000-trt8510"
MODEL_EDGES = HOME / CASE / "model.onnx.gz"
LINES = log_of(prediction(CASE))


def engine_line(conv: str) -> int:
    return next(
        i
        for i, x in enumerate(LINES)
        if x.startswith("Layer(C") and f" {conv} " in x.replace(",", " ")
    )


def mismatches(changes: dict[int, str], lines: list[str] = LINES) -> dict[str, Mismatch]:
    """Those of convolutions, by name, of the log with some lines exchanged."""
    result = verify(MODEL_EDGES, build_of([changes.get(i, x) for i, x in enumerate(lines)]))
    return {m.name: m for m in result.mismatches if m.kind == "convolution"}


def test_contradictions_and_residuals() -> None:
    """A pass line quantizes the convolution, the engine lists a float input; the same of its output; and no line."""
    at = engine_line("Conv_22")
    found = mismatches({at: LINES[at].replace("Int8", "Float", 1)})["Conv_22"]
    assert (found.differs, found.rule) == (Difference.LINE_AND_INPUT, "by QuantizeDoubleInputNodes")
    # The JSON of a mismatch: types as words, null where the build does not tell
    told = found.built
    assert (told["precision"], told["inputs"], told["output"], told["fused"]) == (
        "FP32",
        ["FP32"],
        "INT8",
        [],
    )
    assert " Conv_22" in str(told["layer"])
    assert BuiltConv().as_json() == {
        "precision": None,
        "inputs": None,
        "output": None,
        "fused": None,
        "layer": "",
    }
    names = [f"n{i}" for i in range(101)]
    assert (
        BuiltConv(fused=names).as_json()["fused"] == names[:100]
        and BuiltConv(fused=[]).as_json()["fused"] == []
    )
    # It absorbed the Add and the Relu; neither the convolution itself nor its quantizers nor its constants
    other = engine_line("Conv_34")
    found = mismatches({other: LINES[other].replace("Int8", "Float", 1)})["Conv_34"]
    assert found.built["fused"] == ["Add_42", "Relu_43"]
    before, _, after = LINES[at].rpartition("Int8")
    assert (
        mismatches({at: f"{before}Float{after}"})["Conv_22"].differs == Difference.LINE_AND_OUTPUT
    )
    without = [x for x in LINES if "fusing" not in x or "Conv_22" not in x]
    assert mismatches({}, without)["Conv_22"].differs == Difference.NO_LINE
    # The builder may let either convolution take the Add; a prediction of the other one is wrong about both
    taker, other = engine_line("Conv_96"), engine_line("Conv_107")
    alone = LINES[taker].replace(" + Add_115 + Relu_116", "").replace(", 301 (Int8[1,8,8,8])", "")
    with_add = LINES[other].replace("+ Conv_107", "+ Conv_107 + Add_115 + Relu_116")
    with_add = with_add.replace(" -> ", ", 275 (Int8[1,8,8,8]) -> ")
    assert {name: m.differs for name, m in mismatches({taker: alone, other: with_add}).items()} == {
        "Conv_96": Difference.TAKES_RESIDUAL,
        "Conv_107": Difference.TAKES_NONE,
    }
    # Weights that the engine lists as an input, say
    at = engine_line("Conv_107")
    assert mismatches({at: LINES[at].replace(" -> ", ", weights (Float[64,64,1,1]) -> ")}) == {}


def test_cut_passes_and_lines_too_many() -> None:
    """Only behind the optimizer's epilogue does a missing line mean that a convolution stayed float."""
    first = next(
        i
        for i, x in enumerate(LINES)
        if "QuantizeDoubleInputNodes: fusing" in x and x.endswith("Conv_22")
    )
    result = verify(MODEL_EDGES, build_of(LINES[: first + 1]))
    counts = result.convolutions
    assert (
        result.mismatches == []
        and counts.agree + counts.unknown == counts.total
        and counts.unknown > 10
    )
    # Lines are held against each other as often as they are said; every layer of a build that agrees is counted
    at = next(i for i, x in enumerate(LINES) if "QuantizeDoubleInputNodes: fusing" in x)
    for extra in (1, 50, 51, 70):
        result = verify(MODEL_EDGES, build_of([*LINES[:at], *[LINES[at]] * extra, *LINES[at:]]))
        assert [m.differs for m in result.mismatches] == [
            Difference.FIRST_LINE,
            *[Difference.LOGGED] * (min(extra, 50) - 1),
        ]
        assert {str(m.kind) for m in result.mismatches} == {"trace"}
        assert (
            result.layers.agree == result.layers.total == sum(x.startswith("Layer(") for x in LINES)
        )
        # The rest are counted in a note, kind by kind
        told = [note for note in result.notes if note.remark is Remark.MORE_MISMATCHES]
        assert told == (
            [Remark.MORE_MISMATCHES(count=extra - 50, kind="trace")] if extra > 50 else []
        )


@pytest.mark.parametrize("unsure", [("Conv_9",), ("Conv_9", "Conv_22")])
def test_what_rests_on_unknown_scales_is_unknown_whatever_the_build_says(
    unsure: tuple[str, ...],
) -> None:
    build = build_of(LINES)
    result = compare(load(MODEL_EDGES), prediction(CASE), build, unsure)
    assert result.convolutions == ConvolutionCounts(21, 21 - len(unsure), len(unsure), unsure)
    assert exit_code(result) == 2


def test_the_rule_behind_a_prediction() -> None:
    """The refusal where a pass refused, with what was predicted in words."""
    at = engine_line("Gemm_311")
    before, _, after = LINES[at].rpartition("(Float")
    found = mismatches({at: f"{before}(Int8{after}"})["Gemm_311"]
    assert (found.differs, found.values) == (Difference.OUTPUT, ("float", "INT8"))
    assert found.rule.startswith("by QuantizeDoubleInputNodes: output-")
    # Conv_9 is no part of Conv_96: without a line of its own it has the name of its layer for a rule
    whole = prediction(CASE)
    assert {"Conv_9", "Conv_96"} <= {c.name for c in whole.convolutions}
    mute = replace(
        whole, trace=[e for e in whole.trace if "Conv_9" not in re.split(r" \+ | \|\| ", e.object)]
    )
    assert 0 < len(mute.trace) < len(whole.trace)
    at = engine_line("Conv_9")
    lines = [LINES[at].replace("Int8", "Float", 1) if i == at else x for i, x in enumerate(LINES)]
    build = build_of(lines)
    for told, rule in (
        (whole, "QuantizeDoubleInputNodes"),
        (mute, f"as layer {whole.convolution('Conv_9').layer}"),
    ):
        found = next(
            m for m in compare(load(MODEL_EDGES), told, build).mismatches if m.name == "Conv_9"
        )
        assert found.rule == (f"by {rule}" if told is whole else rule)


def parse_section(proto: onnx.ModelProto) -> list[str]:
    """What the ONNX parser logs of a model, in TensorRT 8.5's wording."""
    graph = onnx.shape_inference.infer_shapes(proto).graph
    shapes = {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in (*graph.input, *graph.value_info, *graph.output)
    }
    types = dict.fromkeys(shapes, "FLOAT")
    for tensor in graph.initializer:
        shapes[tensor.name], types[tensor.name] = (
            tuple(tensor.dims),
            onnx.TensorProto.DataType.Name(tensor.data_type),
        )

    def told(names: Iterable[str]) -> str:
        return "".join(f"[{n} -> ({', '.join(map(str, shapes[n]))})[{types[n]}]], " for n in names)

    lines = [
        f"Adding network input: {v.name} with dtype: float32, dimensions: "
        f"({', '.join(map(str, shapes[v.name]))})"
        for v in graph.input
    ]
    lines += [f"Importing initializer: {t.name}" for t in graph.initializer]
    for node in graph.node:
        head = f"{node.name} [{node.op_type}]"
        lines += [
            f"Parsing node: {head}",
            f"{head} inputs: {told(node.input)}",
            f"{head} outputs: {told(node.output)}",
        ]
    lines += [f"Marking {v.name} as output: {v.name}" for v in graph.output]
    return [f"[11/21/2026-12:00:00] [V] [TRT] {line}" for line in lines]


def chain(quantized: bool = True) -> onnx.ModelProto:
    """Two convolutions with an activation between them, which no scale can change."""
    g = Graph()
    form, scale = ("qdq", 0.1) if quantized else ("float", None)
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", 8, 1, scale=scale, weights=form), "r0")
    return g.model(g.conv(x, "c1", 8, 1, scale=scale, weights=form))


def log_with_parse_section(proto: onnx.ModelProto) -> str:
    lines = log_of(predict(proto, "trt8.5"))
    return "\n".join([*lines[:2], *parse_section(proto), *lines[2:]]) + "\n"


def test_a_log_alone(tmp_path: Path) -> None:
    """Read from a file and given as a build, a log says the same; without Q/DQ there is nothing to predict."""
    path = tmp_path / "build.log"
    path.write_text(log_with_parse_section(chain()))
    from_file, from_build = verify_from_log(path), verify_from_log(read_build(path))
    assert from_file.as_json() == from_build.as_json()
    assert from_file.convolutions == ConvolutionCounts(2, 2)
    assert from_file.mismatches == [] and not (
        {Remark.CONVERSIONS_BETWEEN, Remark.LINES_LEFT_OUT} & set(remarks(from_file.notes))
    )
    with raises(BuildLogError, "verify_from_log TensorRT"):
        verify_from_log(path, target="rtx1.7")
    path.write_text(log_with_parse_section(chain(quantized=False)))
    with raises(BuildLogError, "verify_from_log section"):
        verify_from_log(path)


@pytest.mark.parametrize("damage", ["the beginning", "a node"])
def test_a_graph_with_holes_is_refused(damage: str) -> None:
    """Where later sections tell of all of it: its beginning torn off, or a node missing within."""
    lines = log_with_parse_section(chain()).splitlines()
    parse = [i for i, x in enumerate(lines) if "Parsing node: " in x]
    assert len(parse) > 8
    first, last, why = (
        (2, parse[4], "beginning") if damage == "the beginning" else (parse[5], parse[6], "r0:0")
    )
    del lines[first:last]
    with raises(BuildLogError, f"_check_whole {why}"):
        verify_from_log(build_of(lines))


@pytest.mark.parametrize("complete", [True, False])
def test_a_hole_that_the_models_inputs_show(complete: bool) -> None:
    """A listing without bindings seems whole until the model is at hand; one known to be torn is not told so twice."""
    whole = replace(build_of(LINES), milestones=[])  # no count of layers either
    assert whole.complete and not whole.bindings
    assert compare(load(MODEL_EDGES), prediction(CASE), whole).build.complete
    torn = replace(whole, layers=[*whole.layers[:5], *whole.layers[6:]], complete=complete, gaps=[])
    told = compare(load(MODEL_EDGES), prediction(CASE), torn).build
    hole = listing_hole(torn, load(MODEL_EDGES).inputs)
    assert hole is not None and (told.complete, list(told.missing)) == (
        False,
        [str(hole)] * complete,
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_build_is_known_by_its_nodes_or_by_what_they_write(named: bool) -> None:
    """TensorRT calls an unnamed node after its first output, and so is it looked for in the parse section."""
    proto = chain()
    for node in proto.graph.node:
        node.name = node.name if named else ""
    model = Model(proto)
    shown = parse_section(proto)
    build = build_of([*log_of(predict(chain(), "trt8.5"))[:2], *shown])
    assert len(build.parse.nodes) == len(proto.graph.node) and not build.layers
    assert common_names(model, build) == (2, 2)
    other = Model(forked((0.1, 0.1)))
    assert common_names(other, build)[1] == 3 and common_names(other, build)[0] <= 2


@pytest.mark.parametrize(
    ("files", "begins"), [(["a.log", "b.json"], "a.log, b.json: "), ([], "build: ")]
)
def test_a_build_from_a_calibration_table_is_named(
    files: list[str], begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtool.verification.api.implicit_int8", lambda build: True)
    build = replace(build_of(LINES), files=files)
    check_explicit(build, load(MODEL_EDGES))  # it names the model's Qs
    with pytest.raises(BuildLogError) as told:
        check_explicit(build)
    assert str(told.value).startswith(begins)


def forked(scales: tuple[float, float]) -> onnx.ModelProto:
    """A result that two convolutions quantize: it is INT8 if their scales are equal, which no log tells."""
    g = Graph()
    x = g.conv(g.input(1, 8, 8, 8), "c0", 8, 1, scale=0.05)
    return g.model(*(g.conv(x, f"c{i + 1}", 8, 1, scale=s) for i, s in enumerate(scales)))


def test_what_depends_on_scales_is_unknown_to_a_log_alone(tmp_path: Path) -> None:
    path = tmp_path / "build.log"
    path.write_text(log_with_parse_section(forked((0.1, 0.1))))
    result = verify_from_log(path)
    assert result.convolutions == ConvolutionCounts(3, 2, 1, ("c0",))
    assert not [m for m in result.mismatches if m.kind == "convolution"]
    few, many = (predict(forked(s), "trt8.5").conversions for s in ((0.1, 0.1), (0.1, 0.2)))
    assert Remark.CONVERSIONS_BETWEEN(few=few, many=many) in result.notes
    assert result.conversions.predicted is None
