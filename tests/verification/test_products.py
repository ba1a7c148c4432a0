from __future__ import annotations

import pytest

from qdqtool.buildlog.layers import parse_info_line
from qdqtool.buildlog.types import BuiltLayer, BuiltTensor
from qdqtool.modelfile import load
from qdqtool.types import Precision
from qdqtool.verification.build_model import inspector_json
from qdqtool.verification.products import built_nodes
from tests.builders.models import two_convolutions


def layer(name: str, kind: str, inputs: str, constants: str, output: str, *nodes: str) -> BuiltLayer:
    """A line of the engine listing in TensorRT-RTX's form; types are lists such as ``Int8 Float``."""
    def tensors(types: str) -> str:
        space = " " if types else ""  # an empty list is []
        return space + ", ".join(
            f"{{ Name: t{i}, Dimensions: [1,8], Strides: [8,1], StrideOrder: [1,0], Datatype: {t}, "
            "Format: (Linear) Row major linear format }" for i, t in enumerate(types.split()))

    text = (f"Name: {name}, LayerType: {kind}, Inputs: [{tensors(inputs)}], Constants: [{tensors(constants)}], "
            f"Outputs: [{tensors(output)}], TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: "
            + "".join(f"[ONNX Layer: {n}]" for n in nodes))
    found = parse_info_line(text)
    assert found is not None
    return found


def precision_of(one: BuiltLayer) -> str:
    model = load(two_convolutions())
    rows = built_nodes(model, [one], {n.index: n.name for n in model.nodes})
    return str(next(r.precision for r in rows if r.name == "first"))


@pytest.mark.parametrize(("kind", "name", "inputs", "constants", "output", "expected"), [
    ("correlation", "first_myl0_1", "Int8", "Int8 Float Float", "Float", "INT8"),
    ("correlation", "first_myl0_1", "Int8 Float", "Int8 Float", "Float", "INT8"),  # a residual is fused
    ("correlation", "first_myl0_1", "Int8 Int8", "Float", "Float", "INT8"),  # computed weights
    ("correlation", "first_myl0_1", "Float Float", "Float", "Float", "FP32"),
    ("correlation", "first_myl0_1", "Half", "Half Float", "Half", "FP16"),
    ("correlation", "first_myl0_1", "", "Int8 Int8 Float", "Float", "INT8"),  # a constant input
    ("correlation", "first_myl0_1", "", "Int8 Float Float", "Half", "FP32"),  # a constant input, float weights
    ("correlation", "first_myl0_1", "Int8 Float", "Float Float", "Half", "FP32"),  # the weights are no integers
    ("correlation", "first_myl0_1", "Int8", "Float", "Half", "FP32"),  # its weights are floats
    ("gemm", "first_myl0_1", "Half", "Int4 Float", "Half", "FP16"),
    ("gemm", "first_myl0_1", "Int8", "Int4 Float", "Half", "INT8"),
    ("CaskConvolution", "first", "Int8 Float", "", "Float", "INT8"),  # a classic layer: its data input
    ("deconv", "first_myl0_1", "Half Half", "Float", "Half", "FP16"),
    ("gemm", "first_myl0_1", "Int8", "Int8 Float", "Int8", "INT8"),
    ("gemm", "first_myl0_1", "FP8", "FP8 Float", "Float", "FP8"),
    ("runtime_fusion", "__myl_CastMulFc_myl0_1", "Int8", "Float", "Float", "FP32"),
    ("runtime_fusion", "__myl_CastMulCastFc_myl0_0", "Float", "Float Int8", "Float", "FP32"),
    ("runtime_fusion", "__myl_CastMulFc_myl0_0", "Float", "Int8", "Float", "FP32"),
    ("kgen", "__myl_MulMinMaxRounCastCorrMulAddMove_myl0_0", "Float", "Float Int8", "Float", "INT8"),
    ("kgen", "__myl_CastCorrMulAdd_myl0_2", "Float", "Float Int8", "Float", "INT8"),
    ("kgen", "__myl_CastMulReshMulSum_myl0_0", "Float", "Int8 Float", "Float", "FP32"),
    ("kgen", "__myl_MulMinMaxRounCastCastMulReluReshMulSum_myl0_0", "Float", "Float Float", "Float", "FP32"),
    ("kgen", "__myl_CastMulCorr_myl0_1", "Half Float", "", "Int8", "FP16"),  # what it writes is no float: its first one
    ("kgen", "__myl_CastMulCorr_myl0_1", "Int32", "", "Int32", "UNKNOWN"),
    ("kgen", "__myl_MoveCorrMul_myl0_0", "Int8", "Float Int8", "Float", "INT8"),  # no Cast: what its first input is
    ("kgen", "__myl_MoveCorrMul_myl0_0", "Float", "Int8 Int8", "Float", "FP32"),
    ("kgen", "__myl_MulAddRelu_myl0_0", "Float", "Float", "Float", "UNKNOWN"),  # only what follows it
])
def test_precision_of_a_layer(
    kind: str, name: str, inputs: str, constants: str, output: str, expected: str
) -> None:
    assert precision_of(layer(name, kind, inputs, constants, output, "first")) == expected


def test_the_multiplying_layer_is_found_among_those_of_a_node() -> None:
    model = load(two_convolutions())
    names = {n.index: n.name for n in model.nodes}
    layers = [
        layer("__myl_MulMinMaxRounCast_myl0_0", "kgen", "Float", "Float", "Int8", "first"),
        layer("first_myl0_1", "correlation", "Int8", "Int8 Float", "Float", "first"),
        layer("__myl_MulAddRelu_myl0_2", "kgen", "Float", "Float", "Float", "first", "second"),
        layer("second_myl0_3", "correlation", "Float", "Float", "Float", "second"),
    ]
    rows = {r.name: r for r in built_nodes(model, layers, names)}
    assert (rows["first"].precision, rows["first"].output, rows["first"].layer) == (
        Precision.INT8, Precision.FP32, "first_myl0_1")
    assert rows["second"].precision == Precision.FP32


@pytest.mark.parametrize(
    ("constants", "told"), [("Int8 Float", (Precision.INT8,)), ("", (Precision.INT8, Precision.FP32))]
)
def test_inputs_of_a_product(constants: str, told: tuple[Precision, ...]) -> None:
    """The data alone where the weights are constants; otherwise what stands second as well, and no third."""
    model = load(two_convolutions())
    one = layer("first_myl0_1", "correlation", "Int8 Float Half", constants, "Float", "first")
    rows = built_nodes(model, [one], {n.index: n.name for n in model.nodes})
    first = next(r for r in rows if r.name == "first")
    assert (first.inputs, first.output) == (told, Precision.FP32)
    assert first.as_json()["inputs"] == [str(p) for p in told]


def test_a_kernel_of_two_products_tells_nothing() -> None:
    model = load(two_convolutions())
    both = layer("__myl_CorrMulMinMaxRounCastCorr_myl0_0", "kgen", "Float", "Int8", "Float", "first", "second")
    rows = built_nodes(model, [both], {n.index: n.name for n in model.nodes})
    assert {r.precision for r in rows} == {Precision.UNKNOWN}


@pytest.mark.parametrize(("inputs", "precision"), [
    ("Int8 Int8 Int8", "INT8"), ("Half Half Half", "FP16"), ("Int8 Int8 Half", "UNKNOWN"),
])  # fmt: skip
def test_a_kernel_of_a_whole_attention_tells_by_its_inputs(inputs: str, precision: str) -> None:
    model = load(two_convolutions())
    one = layer("_gemm_mha_v2_myl0_5", "kgen", inputs, "", "Int8", "first", "second")
    rows = built_nodes(model, [one], {n.index: n.name for n in model.nodes})
    assert {str(r.precision) for r in rows} == {precision} and {r.output for r in rows} == {Precision.UNKNOWN}


def test_inspector_json_has_the_models_names() -> None:
    one = layer("n_myl0_1", "correlation", "Int8", "Int8", "Float", "node_7")
    table = inspector_json([one], ["x", "y"], {"node_7": "my conv"})
    assert table["Layers"][0]["Metadata"] == "[ONNX Layer: my conv]"
    assert table["Layers"][0]["Inputs"][0]["Datatype"] == "Int8"
    assert table["Bindings"] == ["x", "y"]


def test_inspector_json_of_what_is_not_told() -> None:
    """A dimension that varies is -1, a shape that is not known is empty, a type without a word of its own its name."""
    shapes: tuple[tuple[int | None, ...] | None, ...] = ((None, 3, None), None, (0, 1))
    tensors = [BuiltTensor("t", p, s) for p, s in zip((Precision.FP16, Precision.UNKNOWN, Precision.BF16), shapes,
                                                      strict=True)]  # fmt: skip
    one = BuiltLayer("n", "kgen", tensors[:1], tensors[1:], tactic="0x1", onnx_names=["a", "b"])
    (told,) = inspector_json([one], [], {"b": "c"})["Layers"]
    sides = [*told["Inputs"], *told["Outputs"]]
    assert [t["Dimensions"] for t in sides] == [[-1, 3, -1], [], [0, 1]]
    assert [t["Datatype"] for t in sides] == ["Half", "UNKNOWN", "BFloat16"]
    assert (told["Constants"], told["TacticName"], told["Metadata"]) == ([], "0x1", "[ONNX Layer: a][ONNX Layer: c]")
