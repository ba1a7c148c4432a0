from dataclasses import replace
from types import SimpleNamespace

import pytest

from qdqtool import ConvOutcome, Precision, Prediction
from qdqtool.buildlog.agreement import DetailedDifference, Difference
from qdqtool.buildlog.layers import parse_info_line
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, LogEvent
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.prediction import predict
from qdqtool.reasons.weights import WeightsNotDequantized
from qdqtool.trt.trace import Event
from qdqtool.verification.convolutions import (
    BuiltNode,
    PassLines,
    compare_convolutions,
    find_built_nodes,
    read_built_convolution,
)
from qdqtool.verification.layer_mapping import NodeMapper
from qdqtool.verification.local_build import to_inspector_json
from tests.builders.models import two_convolutions
from tests.trt.builder import Graph
from tests.verification.test_api import layer

INT8, FP16, FP32, FLOAT = Precision.INT8, Precision.FP16, Precision.FP32, Precision.FLOAT
PASS = "QuantizeDoubleInputNodes"
TO_INT8 = (Difference.OUTPUT, "float", "INT8")
EPILOGUE = [("QDQ graph optimizer quantization epilogue pass", 99)]


def block() -> Model:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "a", 8), "ra")
    return Model(
        g.model(g.pool(g.relu(g.add(g.conv(x, "b", 8), g.pair(x, "skip"), "sum"), "rb"), "pool"))
    )


MODEL = block()
BASE = predict(MODEL, "trt8.5", advice=False)
FUSES_ADD = replace(
    BASE.convolution("b"), precision=INT8, inputs=[INT8, INT8], output=INT8, fused=["sum", "rb"]
)
PLAIN = replace(BASE.convolution("b"), precision=INT8, inputs=[INT8], output=FLOAT, fused=[])


def line(subject: str, number: int, conv: str = "b") -> LogEvent:
    return LogEvent(PASS, "fusing", subject, conv, line=number)


def compared(
    outcome: ConvOutcome, build: Build, *uncertain: str, **changes: object
) -> SimpleNamespace:
    prediction: Prediction = replace(BASE, convolutions=[outcome], refusals=[], trace=[], **changes)  # type: ignore[arg-type]
    counts, mismatches = compare_convolutions(
        MODEL, prediction, build, NodeMapper(MODEL, build.layers), uncertain
    )
    return SimpleNamespace(**counts.as_json(), mismatches=mismatches)


def difference(outcome: ConvOutcome, listed: BuiltLayer) -> tuple[object, ...]:
    result = compared(outcome, Build(layers=[listed]))
    assert (result.total, result.unknown) == (1, 0) and result.agree + len(result.mismatches) == 1
    return next(((m.differs, *m.values) for m in result.mismatches), ())


@pytest.mark.parametrize(
    ("outcome", "name", "inputs", "outputs", "expected"),
    [
        (PLAIN, "b", "INT8", "FP16", ()),
        (PLAIN, "b", "INT8", "FP32", ()),
        (PLAIN, "b", "FP16", "FP16", (Difference.PRECISION, "INT8", "FP16")),
        (PLAIN, "b", "INT8", "INT8", TO_INT8),
        (replace(PLAIN, precision=FLOAT, inputs=[FLOAT]), "b", "FP32", "FP32", ()),
        (
            replace(PLAIN, precision=FLOAT, inputs=[FLOAT]),
            "b",
            "INT8",
            "FP32",
            (Difference.PRECISION, "float", "INT8"),
        ),
        (replace(PLAIN, output=FP16), "b", "INT8", "FP32", (Difference.OUTPUT, "FP16", "FP32")),
        (FUSES_ADD, "b + sum + rb", "INT8 INT8", "INT8", ()),
        (FUSES_ADD, "b + sum + rb", "INT8 FP16", "INT8", (Difference.RESIDUAL, "INT8", "FP16")),
        (FUSES_ADD, "b + sum + rb", "INT8", "INT8", (Difference.LACKS_RESIDUAL,)),
        (PLAIN, "b + sum", "INT8 FP16", "FP16", (Difference.HAS_RESIDUAL,)),
        (PLAIN, "b", "INT8 FP16", "FP16", ()),  # a second input without an Add, such as weights
        (FUSES_ADD, "b", "INT8 INT8", "INT8", (Difference.ABSORBS, "sum")),
        (FUSES_ADD, "b + sum", "INT8 INT8", "INT8", ()),  # not every version lists the Relu
        (PLAIN, "b + pool", "INT8", "FP16", (Difference.ABSORBED, "pool")),
        (PLAIN, "b + rb", "INT8", "FP16", ()),
        (
            replace(FUSES_ADD, fused=["sum", "rb", "pool"]),
            "b + sum + rb + pool",
            "INT8 INT8",
            "INT8",
            (),
        ),
    ],
)
def test_convolution_and_its_layer(
    outcome: ConvOutcome, name: str, inputs: str, outputs: str, expected: tuple[object, ...]
) -> None:
    assert difference(outcome, layer(name, inputs=inputs, outputs=outputs)) == expected


@pytest.mark.parametrize(
    ("place", "outputs", "expected"),
    [
        (0, "FP16 INT8", ()),
        (1, "INT8 FP16", ()),
        (0, "INT8 FP16", TO_INT8),
        (1, "FP16 INT8", TO_INT8),
        (1, "FP16", ()),
    ],
)
def test_convolution_in_a_merged_layer(
    place: int, outputs: str, expected: tuple[object, ...]
) -> None:
    """A merged layer has an output per convolution.

    Its second input is not a residual. Fused names do not count.
    """
    name = " || ".join(["a + pool", "a + pool"][:place] + ["b + pool"] + ["a"][place:])
    assert difference(PLAIN, layer(name, inputs="INT8 FP16", outputs=outputs)) == expected


@pytest.mark.parametrize(
    ("inputs", "outputs"), [("", "INT8"), ("INT8", ""), ("UNKNOWN", "INT8"), ("INT8", "UNKNOWN")]
)
def test_layer_without_types_is_unknown(inputs: str, outputs: str) -> None:
    result = compared(
        PLAIN, Build(layers=[layer("b", inputs=inputs, outputs=outputs.replace("INT8", "FP16"))])
    )
    assert (result.unknown_names, result.mismatches) == (["b"], [])


@pytest.mark.parametrize(
    ("names_only", "uncertain", "mismatches", "unknown"),
    [(False, [], 1, []), (False, ["b"], 0, ["b"]), (True, [], 0, ["b"])],
    ids=["compared", "uncertain", "names only"],
)
def test_layers_that_are_not_compared(
    names_only: bool, uncertain: list[str], mismatches: int, unknown: list[str]
) -> None:
    result = compared(
        PLAIN,
        Build(layers=[layer("b", inputs="FP32", outputs="FP32")], names_only=names_only),
        *uncertain,
    )
    assert (len(result.mismatches), result.unknown_names) == (mismatches, unknown)


def test_precision_of_two_products_in_one_kernel_is_unknown() -> None:
    both = row_of(
        "__myl_CorrMulMinMaxRounCastCorr_myl0_0",
        "kgen",
        "Float",
        "Int8",
        "Float",
        "first",
        "second",
    )
    assert {r.precision for r in nodes_of(both)} == {Precision.UNKNOWN}


def test_kernel_with_the_operators_between_two_products() -> None:
    """TensorRT builds a squeeze-and-excitation block of four channels like this."""
    own = row_of("first_myl0_0", "correlation", "Int8", "Int8 Float", "Float", "first")
    name = "__myl_MulCastAddReluMulMinMaxRounCastCorrMulCastAdd_myl0_10"
    second = row_of(name, "kgen", "Float", "Float Half Int8 Float", "Half", "first", "second")
    assert [(r.name, r.precision, r.layer) for r in nodes_of(own, second)] == [
        ("first", Precision.INT8, own.name),
        ("second", Precision.INT8, name),
    ]


# Pass lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "ended", "outcome", "agree", "wrong"),
    [
        ([line("(d and w)", 7)], True, PLAIN, 1, 0),
        ([line("(d and w)", 7)], True, replace(PLAIN, output=INT8), 0, 1),
        ([line("q", 6), line("(d and w)", 7)], True, replace(PLAIN, output=INT8), 1, 0),
        ([line("q", 6), line("(d and w)", 7)], False, replace(PLAIN, output=INT8), 1, 0),
        ([line("q", 6), line("(d and w)", 7)], True, PLAIN, 0, 1),
        ([line("(d and w)", 7)], False, PLAIN, 0, 0),  # cut off: its output is unknown
        ([line("(d and w)", 7, "a")], True, PLAIN, 0, 1),  # another convolution
        ([], True, PLAIN, 0, 1),
        ([], False, PLAIN, 0, 0),
        ([], True, replace(PLAIN, precision=FLOAT, inputs=[FLOAT]), 1, 0),
        (
            [LogEvent("QConvScaleFusion", "fusing", "(d and w)", "b")],
            False,
            PLAIN,
            0,
            0,
        ),  # another pass
        ([LogEvent(PASS, "Removing", "(d and w)", "b")], False, PLAIN, 0, 0),  # another line
    ],
)
def test_convolution_and_its_pass_lines(
    events: list[LogEvent], ended: bool, outcome: ConvOutcome, agree: int, wrong: int
) -> None:
    """One line shows INT8 inputs, an earlier line an INT8 output.

    Without lines, the convolution is float if the passes ended.
    """
    result = compared(
        outcome, Build(trace=events, headings=EPILOGUE if ended else [("another heading", 3)])
    )
    assert (result.agree, result.unknown) == (agree, 1 - agree - wrong)
    number = events[-1].line if events and events[-1].object == "b" else None
    assert [m.line for m in result.mismatches] == [number] * wrong


def test_pass_lines_of_fused_and_merged_layers(g: Graph) -> None:
    """The first line of inputs and outputs counts."""
    model = Model(g.model(g.conv(g.conv(g.input(1, 8, 4, 4), "my + conv", 8, 1), "d", 8, 1)))
    mapper = NodeMapper(model, [])
    events = [
        line("q", 3, "my + conv"),
        line("(x)", 4, "w + d + PWN(r)"),
        line("q", 5, "d"),
        line("q", 8, "d"),
        line("(x)", 9, "other || my + conv"),
        line("(x)", 10, "unknown"),
    ]
    lines = PassLines(Build(trace=events), mapper)
    assert lines.outputs == {"my + conv": 3, "d": 5}
    assert lines.inputs["d"] == 4 and "unknown" not in lines.inputs
    assert not lines.complete and PassLines(Build(headings=EPILOGUE), mapper).complete


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
def test_pass_lines_show_the_type_of_the_model(g: Graph, precision: Precision) -> None:
    """Lines name quantizers, not their type."""
    g.opset, g.fp8 = 19, precision == Precision.FP8
    proto = g.model(g.op("Softmax", g.conv(g.input(1, 32, 4, 4), "c", 32), "s"))
    prediction, model = predict(proto, "trt10"), Model(proto)
    lines = PassLines(Build(trace=[line("(x)", 4, "c")], headings=EPILOGUE), NodeMapper(model, []))
    built = read_built_convolution(
        model.node("c"), prediction.convolution("c"), Build(), NodeMapper(model, []), lines
    )
    assert built.precision == precision == prediction.convolution("c").precision


def test_mismatch_fields() -> None:
    """The convolution, its quantizers and its constants are not fused nodes."""
    name = "b.weight + b.w.Q + b + pool"
    (mismatch,) = compared(
        PLAIN, Build(layers=[layer(name, inputs="INT8", outputs="INT8", line=12)])
    ).mismatches
    assert mismatch.predicted == {
        k: PLAIN.as_json()[k]
        for k in ("precision", "inputs", "output", "fused", "layer", "evidence")
    }
    assert mismatch.built == {
        "precision": "INT8",
        "inputs": ["INT8"],
        "output": "INT8",
        "fused": ["pool"],
        "layer": name,
    }
    assert (mismatch.name, mismatch.line) == ("b", 12)


A, B = (WeightsNotDequantized("ThePass", name, f"{name}.w") for name in "ab")
FUSED, OTHER = line("(d)", 0, "w + b + sum").event, line("(d)", 0, "bb").event


@pytest.mark.parametrize(
    ("reasons", "events", "rule"),
    [
        ([A, B], BASE.trace, "by ThePass: weights-not-dequantized"),
        ([A], [], "as layer the layer"),
        ([], [FUSED, OTHER], f"by {PASS}"),
        ([], [OTHER], "as layer the layer"),
    ],
    ids=["missed optimization", "of another", "line", "line of another"],
)
def test_rule_of_a_mismatch(
    reasons: list[WeightsNotDequantized], events: list[Event], rule: str
) -> None:
    build = Build(layers=[layer("b", inputs="FP16", outputs="FP16")])
    prediction = replace(
        BASE, convolutions=[replace(PLAIN, layer="the layer")], refusals=reasons, trace=events
    )
    _, (mismatch,) = compare_convolutions(MODEL, prediction, build, NodeMapper(MODEL, build.layers))
    assert mismatch.rule == rule


# Both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "ended", "inputs", "outputs", "contradiction"),
    [
        ([line("(d)", 7)], True, "INT8", "FP16", None),
        ([line("(d)", 7)], True, "FP16", "FP16", (Difference.LINE_AND_INPUT, (7,))),
        ([line("q", 6), line("(d)", 7)], True, "INT8", "FP16", (Difference.LINE_AND_OUTPUT, (6,))),
        ([line("q", 6), line("(d)", 7)], True, "INT8", "UNKNOWN", None),
        ([line("(d)", 7, "a")], True, "INT8", "FP16", (Difference.NO_LINE, ())),
        ([line("(d)", 7, "a")], False, "INT8", "FP16", None),  # cut off
        ([], True, "INT8", "FP16", None),  # a log without any such line
        ([line("(d)", 7, "a")], True, "FP16", "FP16", None),
    ],
)
def test_layer_and_pass_lines_that_contradict(
    events: list[LogEvent],
    ended: bool,
    inputs: str,
    outputs: str,
    contradiction: DetailedDifference | None,
) -> None:
    listed = layer("b", inputs=inputs, outputs=outputs, line=50)
    result = compared(
        PLAIN, Build(layers=[listed], trace=events, headings=EPILOGUE if ended else [])
    )
    kinds = (Difference.LINE_AND_INPUT, Difference.LINE_AND_OUTPUT, Difference.NO_LINE)
    contradictions = [(m.differs, m.values) for m in result.mismatches if m.differs in kinds]
    assert contradictions == ([] if contradiction is None else [contradiction])
    assert all(m.line == 50 for m in result.mismatches)  # that of the layer


# Kernels of Myelin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "nodes", "inputs", "outputs", "agree"),
    [
        ("correlation", ["b"], "INT8 INT8", "FP16", 1),
        ("correlation", ["b"], "FP16 FP16", "FP16", 0),
        ("correlation", ["a", "b"], "FP16 FP16", "FP16", None),  # two products in one kernel
        ("kgen", ["b"], "INT8", "FP16", None),  # nothing in it multiplies
        (
            "correlation",
            ["b", "sum", "pool"],
            "INT8 INT8",
            "FP16",
            1,
        ),  # the name does not contain the fused nodes
    ],
)
def test_convolution_and_a_kernel_of_myelin(
    kind: str, nodes: list[str], inputs: str, outputs: str, agree: int | None
) -> None:
    result = compared(
        PLAIN, Build(layers=[replace(layer("k_myl0_1", kind, inputs, outputs), onnx_names=nodes)])
    )
    assert (result.agree, result.unknown) == ((0, 1) if agree is None else (agree, 0))


# Rows of an engine listing of TensorRT-RTX ----------------------------------------------------------------------------------------------------------


def row_of(
    name: str, kind: str, inputs: str, constants: str, output: str, *nodes: str
) -> BuiltLayer:
    def tensors(types: str) -> str:
        space = " " if types else ""  # an empty list is []
        return space + ", ".join(
            f"{{ Name: t{i}, Dimensions: [1,8], Strides: [8,1], StrideOrder: [1,0], Datatype: {t}, "
            "Format: (Linear) Row major linear format }"
            for i, t in enumerate(types.split())
        )

    text = (
        f"Name: {name}, LayerType: {kind}, Inputs: [{tensors(inputs)}], Constants: [{tensors(constants)}], "
        f"Outputs: [{tensors(output)}], TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: "
        + "".join(f"[ONNX Layer: {n}]" for n in nodes)
    )
    return parse_info_line(text)


def nodes_of(*layers: BuiltLayer) -> list[BuiltNode]:
    model = load(two_convolutions())
    return find_built_nodes(model, layers, {n.index: n.name for n in model.nodes})


@pytest.mark.parametrize(
    ("kind", "name", "inputs", "constants", "output", "expected"),
    [
        ("correlation", "first_myl0_1", "Int8", "Int8 Float Float", "Float", "INT8"),
        (
            "correlation",
            "first_myl0_1",
            "Int8 Float",
            "Int8 Float",
            "Float",
            "INT8",
        ),  # a residual is fused
        ("correlation", "first_myl0_1", "Int8 Int8", "Float", "Float", "INT8"),  # computed weights
        ("correlation", "first_myl0_1", "Float Float", "Float", "Float", "FP32"),
        ("correlation", "first_myl0_1", "Half", "Half Float", "Half", "FP16"),
        ("correlation", "first_myl0_1", "", "Int8 Int8 Float", "Float", "INT8"),  # a constant input
        (
            "correlation",
            "first_myl0_1",
            "",
            "Int8 Float Float",
            "Half",
            "FP32",
        ),  # a constant input, float weights
        (
            "correlation",
            "first_myl0_1",
            "Int8 Float",
            "Float Float",
            "Half",
            "FP32",
        ),  # float weights
        ("correlation", "first_myl0_1", "Int8", "Float", "Half", "FP32"),  # float weights
        ("gemm", "first_myl0_1", "Half", "Int4 Float", "Half", "FP16"),
        ("gemm", "first_myl0_1", "Int8", "Int4 Float", "Half", "INT8"),
        (
            "CaskConvolution",
            "first",
            "Int8 Float",
            "",
            "Float",
            "INT8",
        ),  # a layer of classic TensorRT: its data input
        ("deconv", "first_myl0_1", "Half Half", "Float", "Half", "FP16"),
        ("gemm", "first_myl0_1", "Int8", "Int8 Float", "Int8", "INT8"),
        ("gemm", "first_myl0_1", "FP8", "FP8 Float", "Float", "FP8"),
        ("runtime_fusion", "__myl_CastMulFc_myl0_1", "Int8", "Float", "Float", "FP32"),
        ("runtime_fusion", "__myl_CastMulCastFc_myl0_0", "Float", "Float Int8", "Float", "FP32"),
        ("runtime_fusion", "__myl_CastMulFc_myl0_0", "Float", "Int8", "Float", "FP32"),
        (
            "kgen",
            "__myl_MulMinMaxRounCastCorrMulAddMove_myl0_0",
            "Float",
            "Float Int8",
            "Float",
            "INT8",
        ),
        ("kgen", "__myl_CastCorrMulAdd_myl0_2", "Float", "Float Int8", "Float", "INT8"),
        ("kgen", "__myl_CastMulReshMulSum_myl0_0", "Float", "Int8 Float", "Float", "FP32"),
        (
            "kgen",
            "__myl_MulMinMaxRounCastCastMulReluReshMulSum_myl0_0",
            "Float",
            "Float Float",
            "Float",
            "FP32",
        ),
        (
            "kgen",
            "__myl_CastMulCorr_myl0_1",
            "Half Float",
            "",
            "Int8",
            "FP16",
        ),  # the output is not a float: the first input
        ("kgen", "__myl_CastMulCorr_myl0_1", "Int32", "", "Int32", "UNKNOWN"),
        (
            "kgen",
            "__myl_MoveCorrMul_myl0_0",
            "Int8",
            "Float Int8",
            "Float",
            "INT8",
        ),  # without a Cast: the first input
        ("kgen", "__myl_MoveCorrMul_myl0_0", "Float", "Int8 Int8", "Float", "FP32"),
        (
            "kgen",
            "__myl_MulAddRelu_myl0_0",
            "Float",
            "Float",
            "Float",
            "UNKNOWN",
        ),  # only the operators after it
        (
            "runtime_fusion",
            "__myl_FcCastAddAddSigm_myl0_4",
            "Float Half",
            "Float Half",
            "Float",
            "FP16",
        ),  # the last Linear of DETR's boxes
        (
            "runtime_fusion",
            "__myl_FcAddAddSigm_myl0_4",
            "Half Half",
            "Half Half",
            "Half",
            "FP16",
        ),
        (
            "runtime_fusion",
            "__myl_FcAddCast_myl0_4",
            "Half",
            "Half Half",
            "Float",
            "FP16",
        ),  # the Cast of a network output
        ("runtime_fusion", "__myl_CastFcAdd_myl0_4", "Half", "Float Float", "Float", "FP32"),
        (
            "kgen",
            "__myl_SlicSlicSlicSlicMulMulMulMulAddAddAddAddReluMulMinMaxRounCast_myl0_4",
            "Half Half Half Half",
            "Half",
            "Int8",
            "FP16",
        ),
        ("kgen", "__myl_SlicSlicMulMulAddRelu_myl0_4", "Float Float", "Float", "Float", "FP32"),
    ],
)
def test_precision_of_a_layer(
    kind: str, name: str, inputs: str, constants: str, output: str, expected: str
) -> None:
    assert nodes_of(row_of(name, kind, inputs, constants, output, "first"))[0].precision == expected


def test_layer_that_multiplies_among_the_layers_of_a_node() -> None:
    first, second = nodes_of(
        row_of("__myl_MulMinMaxRounCast_myl0_0", "kgen", "Float", "Float", "Int8", "first"),
        row_of("first_myl0_1", "correlation", "Int8", "Int8 Float", "Float", "first"),
        row_of("__myl_MulAddRelu_myl0_2", "kgen", "Float", "Float", "Float", "first", "second"),
        row_of("second_myl0_3", "correlation", "Float", "Float", "Float", "second"),
    )
    assert (first.precision, first.output, first.layer) == (INT8, FP32, "first_myl0_1")
    assert second.precision == FP32


@pytest.mark.parametrize(("constants", "inputs"), [("Int8 Float", (INT8,)), ("", (INT8, FP32))])
def test_inputs_of_a_product(constants: str, inputs: tuple[Precision, ...]) -> None:
    first, _ = nodes_of(
        row_of("first_myl0_1", "correlation", "Int8 Float Half", constants, "Float", "first")
    )
    assert (first.inputs, first.output) == (inputs, FP32)
    assert first.as_json()["inputs"] == [str(p) for p in inputs]


@pytest.mark.parametrize(
    ("constants", "precision"), [("Half Half", "FP16"), ("Half Int8", "UNKNOWN")]
)
def test_precision_of_a_kernel_with_a_shortened_name(constants: str, precision: str) -> None:
    kernel = row_of(
        "__myl_SlicReshAddMulReshSlicReshMulEtc_myl0_5",
        "kgen",
        "Half Half",
        constants,
        "Half Int8",
        "first",
    )
    assert [str(r.precision) for r in nodes_of(kernel)] == [precision, "UNKNOWN"]


@pytest.mark.parametrize(
    ("name", "output"), [("FcAddCast", "Float"), ("DecoAddMulCast", "FP8"), ("FcAdd", "Half")]
)
def test_later_cast_hides_output_type_of_product(name: str, output: str) -> None:
    kernel = row_of(f"__myl_{name}_myl0_4", "runtime_fusion", "Half", "Half Half", output, "first")
    node = nodes_of(kernel)[0]
    assert (node.precision, node.output) == (FP16, Precision.UNKNOWN if "Cast" in name else FP16)


@pytest.mark.parametrize(
    ("inputs", "precision"),
    [
        ("Int8 Int8 Int8", "INT8"),
        ("Half Half Half", "FP16"),
        ("Int8 Int8 Half", "UNKNOWN"),
        ("Half Half Int8 Int8 Int8", "INT8"),
        ("Half Half Bool Bool Half", "FP16"),
    ],
)
@pytest.mark.parametrize("name", ["_gemm_mha_v2_myl0_5", "_gemv_mha_v1_myl0_62"])
def test_precision_of_an_attention_kernel(name: str, inputs: str, precision: str) -> None:
    rows = nodes_of(row_of(name, "kgen", inputs, "", "Int8", "first", "second"))
    assert {(str(r.precision), r.output) for r in rows} == {(precision, Precision.UNKNOWN)}


def test_inspector_json() -> None:
    """Dynamic dimensions are -1, and an unknown shape is empty."""
    shapes: tuple[tuple[int | None, ...] | None, ...] = ((None, 3, None), None, (0, 1))
    tensors = [
        BuiltTensor("t", p, s)
        for p, s in zip((Precision.INT8, Precision.UNKNOWN, Precision.BF16), shapes, strict=True)
    ]
    listed = BuiltLayer("n", "kgen", tensors[:1], tensors[1:], tactic="0x1", onnx_names=["a", "b"])
    table = to_inspector_json([listed], ["x", "y"])
    assert table["Bindings"] == ["x", "y"]
    (data,) = table["Layers"]
    edges = [(t["Dimensions"], t["Datatype"]) for t in (*data["Inputs"], *data["Outputs"])]
    assert edges == [([-1, 3, -1], "Int8"), ([], "UNKNOWN"), ([0, 1], "BFloat16")]
    assert (data["Constants"], data["TacticName"]) == ([], "0x1")
    assert data["Metadata"] == "[ONNX Layer: a][ONNX Layer: b]"
