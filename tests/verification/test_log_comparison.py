from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from qdqtool.buildlog.agreement import (
    ConversionCounts,
    ConvolutionCounts,
    Difference,
    LayerCounts,
    MismatchKind,
    TraceCounts,
)
from qdqtool.buildlog.build_status import find_missing_layer_gap
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    Gap,
    GapKind,
    LogEvent,
    Milestone,
    Section,
)
from qdqtool.errors import BuildLogError
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt import trace
from qdqtool.trt.pipeline import passes
from qdqtool.trt.result import EngineLayer, Prediction, TensorPrecision
from qdqtool.trt.trace import Event
from qdqtool.verification.api import compare_with_build, verify, verify_from_log
from qdqtool.verification.convolutions import BuiltConvolution
from qdqtool.verification.layer_mapping import NodeMapper
from qdqtool.verification.log_comparison import (
    PartComparison,
    compare_conversions,
    compare_layers,
    compare_trace,
    find_inconsistent_tensors,
    qdq_pass_names,
)
from tests.buildlog.samples import build_of
from tests.errors import has
from tests.notes import note, note_codes
from tests.test_agreement_of_findings import forked
from tests.trt.builder import Graph
from tests.trt.evidence import model as published, prediction
from tests.verification.synthetic import log_of
from tests.verification.test_api import layer

INT8, FP16, FP32, FLOAT, INT32 = (
    Precision.INT8,
    Precision.FP16,
    Precision.FP32,
    Precision.FLOAT,
    Precision.INT32,
)
QDQ = [Event("QDQToCopy", trace.RUNNING, name) for name in ("q0", "q1", "q2")]
COPIES = [Event("", trace.ELIMINATING_CONCAT, "cat"), Event("", trace.RETARGETING, "a", "b")]


def convolution() -> Model:
    g = Graph()
    return Model(g.model(g.conv(g.input(1, 8, 4, 4), "c", 8, 1)))


MODEL = convolution()
BASE = predict(MODEL, "trt8.5", advice=False)


def predicted(**changes: object) -> Prediction:
    return replace(BASE, **changes)  # type: ignore[arg-type]


def logged(*events: Event) -> list[LogEvent]:
    return [
        LogEvent(e.pass_name, e.kind, e.subject, e.object, line=11 + i)
        for i, e in enumerate(events)
    ]


# Lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "kind"), [(QDQ, MismatchKind.TRACE), (COPIES, MismatchKind.COPY)]
)
@pytest.mark.parametrize("ended", [True, False])
def test_additional_lines_are_mismatches(
    events: list[Event], kind: MismatchKind, ended: bool
) -> None:
    result = compare_trace(
        predicted(trace=events[:1]), Build(trace=logged(*events[:2], events[1])), ended, kind=kind
    )
    assert result.counts == TraceCounts(1, 3, 1, 1)
    text = trace.render(events[1])
    assert [(m.kind, m.line, m.differs, m.name, m.predicted) for m in result.mismatches] == [
        (kind, 12, Difference.FIRST_LINE, text, {}),
        (kind, 13, Difference.LOGGED, text, {}),
    ]


@pytest.mark.parametrize(
    ("events", "kind"), [(QDQ, MismatchKind.TRACE), (COPIES, MismatchKind.COPY)]
)
@pytest.mark.parametrize("ended", [True, False])
def test_missing_lines_are_mismatches_if_the_passes_ended(
    events: list[Event], kind: MismatchKind, ended: bool
) -> None:
    result = compare_trace(
        predicted(trace=[*events[:2], events[1]]),
        Build(trace=logged(*events[:1])),
        ended,
        kind=kind,
    )
    assert result.counts == TraceCounts(3, 1, 1, 1)
    assert [(m.differs, m.line, m.built) for m in result.mismatches] == [
        (Difference.NOT_LOGGED, None, {})
    ] * 2 * ended


@pytest.mark.parametrize(
    ("events", "kind", "others"),
    [(QDQ, MismatchKind.TRACE, COPIES), (COPIES, MismatchKind.COPY, QDQ)],
)
def test_log_without_lines_of_the_kind_is_not_compared(
    events: list[Event], kind: MismatchKind, others: list[Event]
) -> None:
    result = compare_trace(predicted(trace=events), Build(trace=logged(*others)), True, kind=kind)
    assert (result.counts, result.mismatches) == (TraceCounts(len(events)), [])


def test_compare_trace_skips_uncertain_lines() -> None:
    result = compare_trace(predicted(trace=QDQ[:2]), Build(trace=logged(*QDQ[1:])), True, QDQ[:1])
    assert result.counts == TraceCounts(1, 2, 1, 1)
    assert [m.name for m in result.mismatches] == [trace.render(QDQ[2])]


def test_lines_of_passes_that_are_not_compared() -> None:
    other = Event("ConstShuffleFusion", trace.FUSING, "a", "b")
    result = compare_trace(
        predicted(trace=[*QDQ, other]), Build(trace=logged(other, *QDQ, other)), True
    )
    assert (result.counts, result.mismatches) == (TraceCounts(3, 3, 3, 3), [])


def test_milestone_shows_that_concat_removal_ran() -> None:
    build = Build(milestones=[Milestone("After concat removal", 9, 5)])
    result = compare_trace(predicted(trace=COPIES), build, True, kind=MismatchKind.COPY)
    assert (result.counts, len(result.mismatches)) == (TraceCounts(2, 0, 0, 0), 2)
    assert compare_trace(predicted(trace=QDQ), build, True).counts == TraceCounts(3)


def test_qdq_pass_names() -> None:
    """Passes of constants and shuffles are not listed, nor passes that no log names."""
    assert {kind.__name__ for kind in passes()} - qdq_pass_names() == {
        "ConstCastFold",
        "ConstEltFusion",
        "ConstShuffleFusion",
        "ConstantFoldDanglingQDQ",
        "MyelinOptimization",
        "MyelinRegions",
        "PadConvFusion",
        "QuantizedReluFusion",
        "RequantizeFusion",
        "ScaleScaleFusion",
        "ShuffleErasure",
        "ShuffleShuffleFusion",
        "SqueezePushDownJoin",
    }


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
        ),  # the listing counts, not the lines
        (Build(layers=[q("q0_QuantizeLinear")], names_only=True, trace=logged(*QDQ)), True, 3),
        (
            Build(
                layers=[q("q0_QuantizeLinear")],
                gaps=[Gap(Section.LISTING, GapKind.CUT)],
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
        (Build(trace=logged(*QDQ)), False, None),  # cut off: more may remain
        (
            Build(trace=logged(Event("QDQToCopy", trace.SWAP_TYPE, "q0", "x"))),
            True,
            0,
        ),  # only the first line of each conversion counts
        (Build(trace=logged(Event("ConstShuffleFusion", trace.FUSING, "a", "b"))), True, None),
        (Build(), True, None),
    ],
)
def test_number_of_built_conversions(build: Build, ended: bool, built: int | None) -> None:
    assert compare_conversions(predicted(), build, ended).counts == ConversionCounts(
        BASE.conversions, built
    )


TWO_CONVERSIONS = Build(
    layers=[q("a_QuantizeLinear_quantize_scale_node", 7), q("b_QuantizeLinear", 8)]
)


def test_conversions_of_one_side_are_mismatches() -> None:
    """TensorRT 8.0 appends a suffix to the name of a Q."""
    result = compare_conversions(
        predicted(conversion_nodes=["a_QuantizeLinear", "c"], conversions=2), TWO_CONVERSIONS, True
    )
    assert result.counts == ConversionCounts(2, 2)
    assert [(m.name, m.line, m.differs) for m in result.mismatches] == [
        ("b_QuantizeLinear", 8, Difference.REMAINS),
        ("c", None, Difference.ABSENT),
    ]


def test_conversions_that_are_not_predicted() -> None:
    result = compare_conversions(predicted(conversions=None), TWO_CONVERSIONS, True)
    assert (result.counts, result.mismatches) == (ConversionCounts(None, 2), [])


# Layers ---------------------------------------------------------------------------------------------------------


def predicted_layer(
    name: str, inputs: Iterable[Precision] = (), outputs: Iterable[Precision] = ()
) -> EngineLayer:
    edges = (
        [TensorPrecision(f"t{i}", p) for i, p in enumerate(side)] for side in (inputs, outputs)
    )
    return EngineLayer(name, "Convolution", *edges, [])


def layers_compared(
    prediction: Prediction, build: Build, *reported: str
) -> PartComparison[LayerCounts]:
    return compare_layers(prediction, build, NodeMapper(MODEL, build.layers), reported)


def test_layers_are_compared_by_name() -> None:
    prediction = predicted(
        layers=[
            predicted_layer("a", [INT8], [FLOAT]),
            predicted_layer("b", [INT8], [INT8]),
            predicted_layer("d", [INT8], [INT8]),
        ]
    )
    build = Build(
        layers=[
            layer("a", inputs="INT8", outputs="FP16"),
            layer("b", inputs="FP32", outputs="INT8", line=5),
            layer("c", inputs="INT8", outputs="INT8"),
        ]
    )
    result = layers_compared(prediction, build)
    assert result.counts == LayerCounts(3, 1, ("c",))
    assert [(m.name, m.differs, m.values, m.line) for m in result.mismatches] == [
        ("b", Difference.INPUT, (INT8, FP32), 5)
    ]
    # A layer whose convolution is a mismatch is not reported twice.
    result = layers_compared(prediction, build, "b")
    assert (result.counts, result.mismatches) == (LayerCounts(3, 1, ("c",)), [])


NAMES = [
    layer("a"),
    layer("Reformatting CopyNode for Input Tensor 0 to a", "Reformat"),
    layer("b", ""),
]


@pytest.mark.parametrize(
    ("conversions", "build", "counts"),
    [
        (0, Build(layers=NAMES), LayerCounts(1, 1, (), {"Reformat": 1})),
        (0, Build(layers=NAMES, names_only=True), LayerCounts(2, 2, (), {"Reformat": 1})),
        (0, Build(), LayerCounts(None)),
        (None, Build(layers=NAMES), LayerCounts(1, None)),
    ],
)
def test_compare_layers_counts(conversions: int | None, build: Build, counts: LayerCounts) -> None:
    """Layout reformats do not count, nor layers without a type unless the listing is of names."""
    prediction = predicted(
        conversions=conversions, layers=[predicted_layer("a"), predicted_layer("b")]
    )
    assert layers_compared(prediction, build).counts == counts


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
def test_compare_layers_with_equivalent_names(first: str, second: str, same: bool) -> None:
    """The parser appends numbers to some names. Numbers in ONNX names are kept."""
    prediction = predicted(conversions=0, layers=[predicted_layer(first)])
    counts = layers_compared(prediction, Build(layers=[layer(second)])).counts
    assert (counts.total, counts.agree, len(counts.unmatched)) == (1, int(same), int(not same))


@pytest.mark.parametrize(
    ("predicted_types", "built_types", "different"),
    [
        ([INT8], [INT8], False),
        ([INT8], [FP16], True),
        ([FLOAT], [FP16], False),
        ([FLOAT], [INT8], True),
        ([FP32], [FP16], False),  # a network input, with --inputIOFormats
        ([FP32, INT8], [FP16, FP32], True),
        ([INT8, INT8], [INT8], False),
        ([INT8, INT8], [INT8, FP32], True),
        ([INT8], [Precision.UNKNOWN], False),
        ([INT32], [INT8], False),
        ([INT8], [INT32], False),
        ([], [INT8], False),
    ],
)
def test_compare_layers_output_types(
    predicted_types: list[Precision], built_types: list[Precision], different: bool
) -> None:
    """INT8 and floats are compared, but not integers, such as shapes and indices."""
    prediction = predicted(conversions=0, layers=[predicted_layer("a", outputs=predicted_types)])
    build = Build(layers=[layer("a", outputs=" ".join(built_types))])
    differences = [m.differs for m in layers_compared(prediction, build).mismatches]
    assert differences == [Difference.OUTPUT] * different
    prediction.target = "trt11"  # strongly typed: the widths of floats are compared too
    assert bool(layers_compared(prediction, build).mismatches) == (
        different or predicted_types[:1] == [FP32]
    )


# Tensors --------------------------------------------------------------------------------------------------------


def tensors(**types: Precision) -> list[BuiltTensor]:
    return [BuiltTensor(name, p) for name, p in types.items()]


LAYER = BuiltLayer("a", "CaskConvolution", tensors(s=FP16), tensors(t=INT8), line=3)


def consumer(precision: Precision) -> BuiltLayer:
    return BuiltLayer("b", "CaskConvolution", tensors(t=precision), [], line=4)


@pytest.mark.parametrize(
    ("build", "mismatches"),
    [
        (Build(layers=[LAYER, consumer(FP16)]), [("t", (INT8, 3, FP16, 4), 4)]),
        (
            Build(layers=[LAYER], second_layers=[replace(LAYER, inputs=tensors(s=FP32), line=9)]),
            [("s", (FP16, 3, FP32, 9), 9)],
        ),
        (Build(layers=[consumer(Precision.UNKNOWN), LAYER, consumer(Precision.UNKNOWN)]), []),
    ],
    ids=["two layers", "two listings", "unknown types"],
)
def test_tensor_with_two_types(
    build: Build, mismatches: list[tuple[str, tuple[object, ...], int]]
) -> None:
    result = find_inconsistent_tensors(MODEL, build)
    assert [(m.name, m.values, m.line, m.differs) for m in result] == [
        (*mismatch, Difference.TWO_TYPES) for mismatch in mismatches
    ]


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
def test_inputs_and_outputs_of_the_network_cannot_be_int8(
    tensor: str, precision: Precision, bindings: list[str], wrong: bool
) -> None:
    """Their names are those of the model or the bindings of the build.

    If the model has an INT8 input, that input may be listed under another name.
    """
    listed = BuiltLayer("a", "Reformat", tensors(**{tensor: precision}), [], line=3)
    build = Build(layers=[listed], bindings=bindings)
    result = find_inconsistent_tensors(MODEL, build)
    expected = [(tensor, Difference.END, INT8, 3)] * wrong
    assert [(m.name, m.differs, m.values[-1], m.line) for m in result] == expected
    integers = convolution()
    integers.proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT8
    assert bool(find_inconsistent_tensors(integers, build)) is (wrong and tensor == "c:0")


# Contradictions within a log, unknown results, and residuals of another convolution.

CASE = "resnet18-qat-rtx2000-trt8510"
RESNET = published(CASE)
LINES = log_of(prediction(CASE))


def test_built_convolution_json_without_layer() -> None:
    unknown = dict.fromkeys(("precision", "inputs", "output", "fused"))
    assert BuiltConvolution().as_json() == {**unknown, "layer": ""}


@pytest.mark.parametrize("count", [0, 100, 101])
def test_built_convolution_json_has_at_most_100_fused_nodes(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    assert BuiltConvolution(fused=names).as_json()["fused"] == names[:100]


@pytest.mark.parametrize("extra", [1, 50, 51, 70])
def test_at_most_50_mismatches_of_a_kind_are_listed(extra: int) -> None:
    index = next(i for i, x in enumerate(LINES) if "QuantizeDoubleInputNodes: fusing" in x)
    result = verify(RESNET, build_of([*LINES[:index], *[LINES[index]] * extra, *LINES[index:]]))
    assert [(m.kind, m.differs) for m in result.mismatches] == [
        (MismatchKind.TRACE, Difference.FIRST_LINE),
        *[(MismatchKind.TRACE, Difference.LOGGED)] * (min(extra, 50) - 1),
    ]
    assert result.layers.agree == result.layers.total == sum(x.startswith("Layer(") for x in LINES)
    assert [note for note in result.notes if note.code == "more-mismatches"] == (
        [note("more-mismatches", count=extra - 50, kind="trace")] if extra > 50 else []
    )
    if extra == 51:
        assert "1 more mismatch of kind 'trace' is not listed" in map(str, result.notes)


def parse_section(proto: onnx.ModelProto) -> list[str]:
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

    def tensors(names: Iterable[str]) -> str:
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
            f"{head} inputs: {tensors(node.input)}",
            f"{head} outputs: {tensors(node.output)}",
        ]
    lines += [f"Marking {v.name} as output: {v.name}" for v in graph.output]
    return [f"[11/21/2026-12:00:00] [V] [TRT] {line}" for line in lines]


def chain(quantized: bool = True) -> onnx.ModelProto:
    """Return two convolutions. Their result does not depend on scales."""
    g = Graph()
    form, scale = ("qdq", 0.1) if quantized else ("float", None)
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", 8, 1, scale=scale, weights=form), "r0")
    return g.model(g.conv(x, "c1", 8, 1, scale=scale, weights=form))


def log_with_parse_section(proto: onnx.ModelProto) -> str:
    lines = log_of(predict(proto, "trt8.5"))
    return "\n".join([*lines[:2], *parse_section(proto), *lines[2:]]) + "\n"


def test_verify_from_log_file_and_build(tmp_path: Path) -> None:
    path = tmp_path / "build.log"
    path.write_text(log_with_parse_section(chain()))
    result = verify_from_log(path)
    assert result.as_json() == verify_from_log(read_build(path)).as_json()
    assert (result.convolutions, result.mismatches) == (ConvolutionCounts(2, 2), [])
    assert not {"conversions-between", "lines-left-out"} & set(note_codes(result.notes))


@pytest.mark.parametrize(
    ("quantized", "target", "code"),
    [(True, "rtx1.7", "no-pass-lines"), (False, None, "no-qdq")],
)
def test_verify_from_log_needs_pass_lines_and_qdq(
    quantized: bool, target: str | None, code: str
) -> None:
    build = build_of(log_with_parse_section(chain(quantized)))
    with pytest.raises(BuildLogError, check=has(code)):
        verify_from_log(build, target=target)


@pytest.mark.parametrize(
    ("first", "next_line", "tensor", "reason"),
    [
        ("Adding network input", "Parsing node: c0 [Conv]", "", "cut off"),
        ("Parsing node: r0", "Parsing node: c1.in.Q", "r0:0", "r0:0"),
    ],
)
def test_verify_from_log_rejects_a_parse_section_with_holes(
    first: str, next_line: str, tensor: str, reason: str
) -> None:
    lines = log_with_parse_section(chain()).splitlines()
    start, end = (next(i for i, x in enumerate(lines) if text in x) for text in (first, next_line))
    with pytest.raises(BuildLogError, match=reason, check=has("incomplete-graph", node=tensor)):
        verify_from_log(build_of([*lines[:start], *lines[end:]]))


@pytest.mark.parametrize("complete", [True, False])
def test_missing_layer_is_found_from_the_inputs_of_the_model(complete: bool) -> None:
    """A listing without bindings seems complete.

    A gap that is already known is not reported again.
    """
    whole = replace(build_of(LINES), milestones=[])  # without a count of layers
    assert whole.complete and not whole.bindings
    assert compare_with_build(RESNET, prediction(CASE), whole).build.complete
    cut = replace(whole, layers=[*whole.layers[:5], *whole.layers[6:]], complete=complete, gaps=[])
    facts = compare_with_build(RESNET, prediction(CASE), cut).build
    hole = find_missing_layer_gap(cut, RESNET.inputs)
    assert hole is not None
    assert (facts.complete, list(facts.missing)) == (False, [str(hole)] * complete)


def test_verify_from_log_result_that_depends_on_scales_is_unknown() -> None:
    result = verify_from_log(build_of(log_with_parse_section(forked("nothing", (0.1, 0.1)))))
    assert result.convolutions == ConvolutionCounts(3, 2, 1, ("c0",))
    assert not [m for m in result.mismatches if m.kind == "convolution"]
    few, many = (
        predict(forked("nothing", s), "trt8.5").conversions for s in ((0.1, 0.1), (0.1, 0.2))
    )
    assert note("conversions-between", few=few, many=many) in result.notes
    assert result.conversions.predicted is None
