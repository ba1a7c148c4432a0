"""One convolution held against what a build says of it: engine layer, pass lines, both, or neither."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qdqtool.buildlog.agreement import Difference, Said
from qdqtool.buildlog.layers import parse_info_line
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, LogEvent
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.trt.refusals import WeightsNotDequantized
from qdqtool.types import ConvOutcome, Precision, Prediction
from qdqtool.verification.build_model import inspector_json
from qdqtool.verification.convolutions import (
    BuiltNode,
    Mapper,
    PassLines,
    built_nodes,
    compare_convolutions,
)
from tests.builders.models import two_convolutions
from tests.trt.builder import Graph
from tests.verification.test_api import layer

INT8, FP16, FP32, FLOAT = Precision.INT8, Precision.FP16, Precision.FP32, Precision.FLOAT
PASS = "QuantizeDoubleInputNodes"
TO_INT8 = (Difference.OUTPUT, "float", "INT8")
EPILOGUE = [("QDQ graph optimizer quantization epilogue pass", 99)]


def block() -> Model:
    """``a``, then ``b`` added to what ``a`` wrote, then a MaxPool."""
    g = Graph()
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "a", 8), "ra")
    return Model(
        g.model(g.pool(g.relu(g.add(g.conv(x, "b", 8), g.pair(x, "skip"), "sum"), "rb"), "pool"))
    )


MODEL = block()
BASE = predict(MODEL, "trt8.5", advice=False)
TAKES = replace(
    BASE.convolution("b"), precision=INT8, inputs=[INT8, INT8], output=INT8, fused=["sum", "rb"]
)
PLAIN = replace(BASE.convolution("b"), precision=INT8, inputs=[INT8], output=FLOAT, fused=[])


def line(subject: str, at: int, conv: str = "b") -> LogEvent:
    return LogEvent(PASS, "fusing", subject, conv, line=at)


def compared(
    outcome: ConvOutcome, build: Build, *unsure: str, **changes: object
) -> SimpleNamespace:
    prediction: Prediction = replace(BASE, convolutions=[outcome], refusals=[], trace=[], **changes)  # type: ignore[arg-type]
    counts, mismatches = compare_convolutions(
        MODEL, prediction, build, Mapper(MODEL, build.layers), unsure
    )
    return SimpleNamespace(**counts.as_json(), mismatches=mismatches)


def said_of(outcome: ConvOutcome, *layers: BuiltLayer, **build: object) -> tuple[object, ...]:
    """The difference and its values; empty where both agree."""
    found = compared(outcome, Build(layers=list(layers), **build))  # type: ignore[arg-type]
    assert found.total == 1 == found.agree + found.unknown + len(found.mismatches)
    assert not found.unknown, "a layer with types tells"
    return (found.mismatches[0].differs, *found.mismatches[0].values) if found.mismatches else ()


@pytest.mark.parametrize(
    ("outcome", "name", "inputs", "outputs", "said"),
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
        (TAKES, "b + sum + rb", "INT8 INT8", "INT8", ()),
        (TAKES, "b + sum + rb", "INT8 FP16", "INT8", (Difference.RESIDUAL, "INT8", "FP16")),
        (TAKES, "b + sum + rb", "INT8", "INT8", (Difference.TAKES_RESIDUAL,)),
        (PLAIN, "b + sum", "INT8 FP16", "FP16", (Difference.TAKES_NONE,)),
        (PLAIN, "b", "INT8 FP16", "FP16", ()),  # a second input without an Add: weights, say
        (TAKES, "b", "INT8 INT8", "INT8", (Difference.ABSORBS, "sum")),
        (TAKES, "b + sum", "INT8 INT8", "INT8", ()),  # a Relu's name is not kept by every version
        (PLAIN, "b + pool", "INT8", "FP16", (Difference.ABSORBED, "pool")),
        (PLAIN, "b + rb", "INT8", "FP16", ()),
        (
            replace(TAKES, fused=["sum", "rb", "pool"]),
            "b + sum + rb + pool",
            "INT8 INT8",
            "INT8",
            (),
        ),
    ],
)
def test_a_layer(
    outcome: ConvOutcome, name: str, inputs: str, outputs: str, said: tuple[object, ...]
) -> None:
    assert said_of(outcome, layer(name, inputs=inputs, outputs=outputs)) == said


@pytest.mark.parametrize(
    ("place", "outputs", "said"),
    [
        (0, "FP16 INT8", ()),
        (1, "INT8 FP16", ()),
        (0, "INT8 FP16", TO_INT8),
        (1, "FP16 INT8", TO_INT8),
        (1, "FP16", ()),
    ],
)
def test_each_of_two_merged_convolutions_has_its_output(
    place: int, outputs: str, said: tuple[object, ...]
) -> None:
    """A merged layer has one output for each; a second input is no residual there, and names tell no absorption."""
    name = " || ".join(["a + pool", "a + pool"][:place] + ["b + pool"] + ["a"][place:])
    assert said_of(PLAIN, layer(name, inputs="INT8 FP16", outputs=outputs)) == said


@pytest.mark.parametrize(
    ("inputs", "outputs"), [("", "INT8"), ("INT8", ""), ("UNKNOWN", "INT8"), ("INT8", "UNKNOWN")]
)
def test_a_layer_that_tells_no_types_is_unknown(inputs: str, outputs: str) -> None:
    found = compared(
        PLAIN, Build(layers=[layer("b", inputs=inputs, outputs=outputs.replace("INT8", "FP16"))])
    )
    assert (found.unknown_names, found.mismatches) == (["b"], [])


def test_what_tells_nothing() -> None:
    found = compared(
        PLAIN, Build(layers=[layer("b", inputs="FP32", outputs="FP32")], names_only=True)
    )
    assert (found.unknown, found.mismatches) == (1, [])
    wrong = Build(layers=[layer("b", inputs="FP32", outputs="FP32")])
    assert compared(PLAIN, wrong).mismatches and not compared(PLAIN, wrong, "b").mismatches
    assert compared(PLAIN, wrong, "b").unknown_names == ["b"]
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
    # As a squeeze and excitation of four channels is built: what stands behind the first is in the second's kernel.
    own = row_of("first_myl0_0", "correlation", "Int8", "Int8 Float", "Float", "first")
    name = "__myl_MulCastAddReluMulMinMaxRounCastCorrMulCastAdd_myl0_10"
    behind = row_of(name, "kgen", "Float", "Float Half Int8 Float", "Half", "first", "second")
    assert [(r.name, r.precision, r.layer) for r in nodes_of(own, behind)] == [
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
        ([line("(d and w)", 7)], False, PLAIN, 0, 0),  # cut off: its output may come
        ([line("(d and w)", 7, "a")], True, PLAIN, 0, 1),  # another one
        ([], True, PLAIN, 0, 1),
        ([], False, PLAIN, 0, 0),
        ([], True, replace(PLAIN, precision=FLOAT, inputs=[FLOAT]), 1, 0),
        (
            [LogEvent("QConvScaleFusion", "fusing", "(d and w)", "b")],
            False,
            PLAIN,
            0,
            0,
        ),  # not the pass
        ([LogEvent(PASS, "Removing", "(d and w)", "b")], False, PLAIN, 0, 0),  # not the line
    ],
)
def test_lines_alone(
    events: list[LogEvent], ended: bool, outcome: ConvOutcome, agree: int, wrong: int
) -> None:
    """The input side makes it INT8, the output side before it its output; no line says float once all were printed."""
    found = compared(
        outcome, Build(trace=events, headings=EPILOGUE if ended else [("another heading", 3)])
    )
    assert (found.agree, len(found.mismatches), found.unknown) == (agree, wrong, 1 - agree - wrong)
    for mismatch in found.mismatches:
        assert mismatch.line == (events[-1].line if events and events[-1].object == "b" else None)


def test_what_is_told_of_a_line(g: Graph) -> None:
    """A name with a plus in it, one of a fused layer, one of a merged layer; the first line of each side counts."""
    x = g.conv(g.input(1, 8, 4, 4), "my + conv", 8, 1)
    model = Model(g.model(g.conv(x, "d", 8, 1)))
    mapper = Mapper(model, [])
    events = [
        line("q", 3, "my + conv"),
        line("(x)", 4, "w + d + PWN(r)"),
        line("q", 5, "d"),
        line("q", 8, "d"),
        line("(x)", 9, "other || my + conv"),
        line("(x)", 10, "unknown"),
    ]
    found = PassLines(Build(trace=events), mapper)
    assert found.outputs == {"my + conv": 3, "d": 5}
    assert found.inputs["d"] == 4 and "unknown" not in found.inputs
    assert not found.complete and PassLines(Build(headings=EPILOGUE), mapper).complete
    found = compared(
        PLAIN, Build(layers=[layer("b + pool", inputs="INT8", outputs="INT8", line=12)])
    ).mismatches[0]
    assert found.predicted == {
        k: PLAIN.as_json()[k]
        for k in ("precision", "inputs", "output", "fused", "layer", "evidence")
    }
    assert found.built == {
        "precision": "INT8",
        "inputs": ["INT8"],
        "output": "INT8",
        "fused": ["pool"],
        "layer": "b + pool",
    }
    assert (found.name, found.line) == ("b", 12)
    # The refusal of that very convolution, else the pass that fused into it, else the layer's name
    wrong = Build(layers=[layer("b", inputs="FP16", outputs="FP16")])
    mapper = Mapper(MODEL, wrong.layers)
    refusals = [WeightsNotDequantized("ThePass", name, f"{name}.w") for name in ("a", "b")]

    def rule(**changes: object) -> str:
        told = replace(BASE, convolutions=[replace(PLAIN, layer="the layer")], **changes)  # type: ignore[arg-type]
        _, (mismatch,) = compare_convolutions(MODEL, told, wrong, mapper)
        return mismatch.rule

    assert rule(refusals=refusals) == "by ThePass: weights-not-dequantized"
    assert rule(refusals=refusals[:1], trace=[]) == "as layer the layer"
    events = [line("(d)", 0, "w + b + sum").event, line("(d)", 0, "bb").event]
    assert rule(refusals=[], trace=events) == f"by {PASS}"
    assert rule(refusals=[], trace=events[1:]) == "as layer the layer"


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
def test_a_log_that_says_two_things(
    events: list[LogEvent], ended: bool, inputs: str, outputs: str, contradiction: Said | None
) -> None:
    listed = layer("b", inputs=inputs, outputs=outputs, line=50)
    found = compared(
        PLAIN, Build(layers=[listed], trace=events, headings=EPILOGUE if ended else [])
    )
    twice = (Difference.LINE_AND_INPUT, Difference.LINE_AND_OUTPUT, Difference.NO_LINE)
    said = [(m.differs, m.values) for m in found.mismatches if m.differs in twice]
    assert said == ([] if contradiction is None else [contradiction])
    assert all(m.line == 50 for m in found.mismatches), "the listing's line comes first"


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
        ),  # it names nothing of what it absorbed
    ],
)
def test_a_kernel(
    kind: str, nodes: list[str], inputs: str, outputs: str, agree: int | None
) -> None:
    listed = replace(layer("k_myl0_1", kind, inputs, outputs), onnx_names=nodes)
    found = compared(PLAIN, Build(layers=[listed]))
    assert (found.agree, found.unknown) == ((0, 1) if agree is None else (agree, 0))


# Words ----------------------------------------------------------------------------------------------------------


def row_of(
    name: str, kind: str, inputs: str, constants: str, output: str, *nodes: str
) -> BuiltLayer:
    """A line of the engine listing in TensorRT-RTX's form; types are lists such as ``Int8 Float``."""

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
    found = parse_info_line(text)
    assert found is not None
    return found


def nodes_of(*layers: BuiltLayer) -> list[BuiltNode]:
    """What was built of ``first`` and ``second``."""
    model = load(two_convolutions())
    return built_nodes(model, layers, {n.index: n.name for n in model.nodes})


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
        ),  # the weights are no integers
        ("correlation", "first_myl0_1", "Int8", "Float", "Half", "FP32"),  # its weights are floats
        ("gemm", "first_myl0_1", "Half", "Int4 Float", "Half", "FP16"),
        ("gemm", "first_myl0_1", "Int8", "Int4 Float", "Half", "INT8"),
        (
            "CaskConvolution",
            "first",
            "Int8 Float",
            "",
            "Float",
            "INT8",
        ),  # a classic row_of: its data input
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
        ),  # what it writes is no float: its first one
        ("kgen", "__myl_CastMulCorr_myl0_1", "Int32", "", "Int32", "UNKNOWN"),
        (
            "kgen",
            "__myl_MoveCorrMul_myl0_0",
            "Int8",
            "Float Int8",
            "Float",
            "INT8",
        ),  # no Cast: what its first input is
        ("kgen", "__myl_MoveCorrMul_myl0_0", "Float", "Int8 Int8", "Float", "FP32"),
        (
            "kgen",
            "__myl_MulAddRelu_myl0_0",
            "Float",
            "Float",
            "Float",
            "UNKNOWN",
        ),  # only what follows it
    ],
)
def test_precision_of_a_layer(
    kind: str, name: str, inputs: str, constants: str, output: str, expected: str
) -> None:
    assert nodes_of(row_of(name, kind, inputs, constants, output, "first"))[0].precision == expected


def test_the_multiplying_layer_is_found_among_those_of_a_node() -> None:
    first, second = nodes_of(
        row_of("__myl_MulMinMaxRounCast_myl0_0", "kgen", "Float", "Float", "Int8", "first"),
        row_of("first_myl0_1", "correlation", "Int8", "Int8 Float", "Float", "first"),
        row_of("__myl_MulAddRelu_myl0_2", "kgen", "Float", "Float", "Float", "first", "second"),
        row_of("second_myl0_3", "correlation", "Float", "Float", "Float", "second"),
    )
    assert (first.precision, first.output, first.layer) == (INT8, FP32, "first_myl0_1")
    assert second.precision == FP32


@pytest.mark.parametrize(("constants", "told"), [("Int8 Float", (INT8,)), ("", (INT8, FP32))])
def test_inputs_of_a_product(constants: str, told: tuple[Precision, ...]) -> None:
    """The data alone where the weights are constants; otherwise what stands second as well, and no third."""
    first, _ = nodes_of(
        row_of("first_myl0_1", "correlation", "Int8 Float Half", constants, "Float", "first")
    )
    assert (first.inputs, first.output) == (told, FP32)
    assert first.as_json()["inputs"] == [str(p) for p in told]


@pytest.mark.parametrize(
    ("constants", "precision"), [("Half Half", "FP16"), ("Half Int8", "UNKNOWN")]
)
def test_a_kernel_whose_name_leaves_steps_out_tells_by_its_floats(
    constants: str, precision: str
) -> None:
    one = row_of(
        "__myl_SlicReshAddMulReshSlicReshMulEtc_myl0_5",
        "kgen",
        "Half Half",
        constants,
        "Half Int8",
        "first",
    )
    assert [str(r.precision) for r in nodes_of(one)] == [precision, "UNKNOWN"]


@pytest.mark.parametrize(
    ("name", "inputs", "constants", "output", "precision"),
    [
        (
            "FcCastAddAddSigm",
            "Float Half",
            "Float Half",
            "Float",
            "FP16",
        ),  # a DETR's last box Linear, as built
        ("FcAddAddSigm", "Half Half", "Half Half", "Half", "FP16"),
        (
            "SlicSlicSlicSlicMulMulMulMulAddAddAddAddReluMulMinMaxRounCast",
            "Half Half Half Half",
            "Half",
            "Int8",
            "FP16",
        ),
        ("SlicSlicMulMulAddRelu", "Float Float", "Float", "Float", "FP32"),
    ],
)
def test_products_with_casts_behind_and_products_written_out(
    name: str, inputs: str, constants: str, output: str, precision: str
) -> None:
    kind = "kgen" if "Slic" in name else "runtime_fusion"
    one = row_of(f"__myl_{name}_myl0_4", kind, inputs, constants, output, "first")
    assert nodes_of(one)[0].precision == precision


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
def test_a_kernel_of_a_whole_attention_tells_by_its_inputs(inputs: str, precision: str) -> None:
    for name in ("_gemm_mha_v2_myl0_5", "_gemv_mha_v1_myl0_62"):
        rows = nodes_of(row_of(name, "kgen", inputs, "", "Int8", "first", "second"))
        assert {str(r.precision) for r in rows} == {precision} and {r.output for r in rows} == {
            Precision.UNKNOWN
        }


def test_inspector_json() -> None:
    # A dimension that varies is -1, a shape that is not known is empty, a type without a word of its own its name
    shapes: tuple[tuple[int | None, ...] | None, ...] = ((None, 3, None), None, (0, 1))
    tensors = [
        BuiltTensor("t", p, s)
        for p, s in zip((Precision.INT8, Precision.UNKNOWN, Precision.BF16), shapes, strict=True)
    ]
    one = BuiltLayer("n", "kgen", tensors[:1], tensors[1:], tactic="0x1", onnx_names=["a", "b"])
    table = inspector_json([one], ["x", "y"])
    assert table["Bindings"] == ["x", "y"]
    (told,) = table["Layers"]
    sides = [*told["Inputs"], *told["Outputs"]]
    assert [t["Dimensions"] for t in sides] == [[-1, 3, -1], [], [0, 1]]
    assert [t["Datatype"] for t in sides] == ["Int8", "UNKNOWN", "BFloat16"]
    assert (told["Constants"], told["TacticName"], told["Metadata"]) == (
        [],
        "0x1",
        "[ONNX Layer: a][ONNX Layer: b]",
    )
