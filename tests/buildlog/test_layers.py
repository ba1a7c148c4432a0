from string import ascii_letters, digits

import pytest
from hypothesis import given, strategies as st

from qdqtool.buildlog import layers
from qdqtool.buildlog.names import base_name, parse_layer_name
from qdqtool.buildlog.types import MAX_DIMENSION
from qdqtool.ir.precision import Precision
from tests.growth_factor import LINEAR, growth_factor


@pytest.mark.parametrize(
    ("text", "precision", "vector"),
    [
        ("Thirty-two wide channel vectorized row major Int8 format", "INT8", 32),
        ("Row major Int8 format", "INT8", 1),
        ("Four wide channel vectorized row major Int8 format", "INT8", 4),
        ("Row major linear FP32", "FP32", 1),
        ("Row major linear FP16 format", "FP16", 1),
        ("Channel major FP16 format where channel % 8 == 0", "FP16", 1),
        ("Two wide channel vectorized row major FP16 format", "FP16", 2),
        ("Row major linear BOOL", "BOOL", 1),
        ("Row major linear Int32", "INT32", 1),
        ("Half", "FP16", 1),
        ("Float", "FP32", 1),
        ("INT8", "INT8", 1),
        ("FP8", "FP8", 1),
        ("BFloat16", "BF16", 1),
        ("", "UNKNOWN", 1),
        ("wide", "UNKNOWN", 1),
    ],
)
def test_precision_and_vector_of_formats(text: str, precision: str, vector: int) -> None:
    assert (layers.find_precision(text), layers.find_vector_width(text)) == (precision, vector)


@pytest.mark.parametrize(
    ("text", "shape", "vector"),
    [
        ("1,64:32,552,968", (1, 64, 552, 968), 32),
        ("1,3,-17,-18", (1, 3, None, None), 1),
        ("", (), 1),
        ("9" * 30, (None,), 1),
        (f"{MAX_DIMENSION - 1},{MAX_DIMENSION},0", (MAX_DIMENSION - 1, None, 0), 1),
        (",".join("1" * 80), (1,) * 64, 1),  # as many dimensions as a tensor can have
        ("1,8:x,2", (1, 8, 2), 1),
    ],
)
def test_parse_dims(text: str, shape: tuple[int | None, ...], vector: int) -> None:
    assert layers.parse_dims(text) == (shape, vector)


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ("", []),
        *(
            (f"[ONNX Layer: a]{separator}[ONNX Layer: /b[0]/Conv]", ["a", "/b[0]/Conv"])
            for separator in ("", "\x1e", "\x1f", " ")
        ),
    ],
)
def test_onnx_names(metadata: str, names: list[str]) -> None:
    assert layers.onnx_names(metadata) == names


def test_engine_line_before_8_5() -> None:
    layer = layers.parse_engine_line(
        "Layer(CaskConvolution): layer1.0.conv2.weight + Q_32_quantize_scale_node + Conv_34 + Add_42, Tactic: "
        "4871133328510103657, 284[Int8(1,64,-21,-24)], 270[Float(1,64,-21,-24)] -> 305[Half(1,64,-21,-24)]",
        7,
    )
    assert (layer.type, layer.tactic, layer.line) == ("CaskConvolution", "4871133328510103657", 7)
    assert layer.name == "layer1.0.conv2.weight + Q_32_quantize_scale_node + Conv_34 + Add_42"
    assert [(t.tensor, t.precision) for t in layer.inputs] == [("284", "INT8"), ("270", "FP32")]
    assert [(t.tensor, t.precision, t.shape, t.elements) for t in layer.outputs] == [
        ("305", "FP16", (1, 64, None, None), None)
    ]


def test_engine_line_with_brackets_in_names() -> None:
    layer = layers.parse_engine_line(
        "Layer(PointWiseV2): PWN((Unnamed Layer* 1) [Constant], b), Tactic: 0x1c, PWN(a, b)_out (Float[1,8:4,2,2]), "
        "(Unnamed Layer* 718) [NMS]_1_output (Int32[]) -> c[0] (Int8[1,8:32,2,2])"
    )
    assert layer.name == "PWN((Unnamed Layer* 1) [Constant], b)"
    assert [(t.tensor, t.precision, t.vector) for t in layer.inputs] == [
        ("PWN(a, b)_out", "FP32", 4),
        ("(Unnamed Layer* 718) [NMS]_1_output", "INT32", 1),
    ]
    assert [(t.tensor, t.shape, t.vector) for t in layer.outputs] == [("c[0]", (1, 8, 2, 2), 32)]


@pytest.mark.parametrize(
    ("text", "name", "inputs", "outputs"),
    [
        ("Layer(Constant): c, Tactic: 0x0,  -> out (Float[1,512,1,1])", "c", [], ["out"]),
        ("Layer(DeviceToShapeHost): d, Tactic: 0x0, x (Int32[]) -> ", "d", ["x"], []),
        ("Layer(CaskConvolution): conv + re", "conv + re", [], []),
        (
            "Layer(C): n, Tactic: 0x1, a (Int8[1,8]), b, c (Half[1]) -> d (Float[1]), e (Int8[2])",
            "n",
            ["a", "b, c"],
            ["d", "e"],
        ),
    ],
)
def test_engine_line_tensors(text: str, name: str, inputs: list[str], outputs: list[str]) -> None:
    layer = layers.parse_engine_line(text)
    assert (layer.name, [t.tensor for t in layer.inputs]) == (name, inputs)
    assert [t.tensor for t in layer.outputs] == outputs


@pytest.mark.parametrize("text", ["Layer: conv", "Name: x, IOMode: Input"])
def test_lines_of_other_kinds_are_not_layers(text: str) -> None:
    assert layers.parse_engine_line(text) is None and layers.parse_info_line(text) is None


def test_info_line_of_tensorrt_8_with_brackets_in_names() -> None:
    layer = layers.parse_info_line(
        "Name: fc + (Unnamed Layer* 355) [Shuffle], LayerType: CaskConvolution, Inputs: [ { Name: Reformatted Input "
        "Tensor 0 to fc + (Unnamed Layer* 355) [Shuffle], Location: Device, Dimensions: [1,512,1,1], Format/Datatype: "
        "Four wide channel vectorized row major Int8 format }, { Name: r, Location: Device, Dimensions: [1,5], "
        "Format/Datatype: Row major linear FP16 format }], Outputs: [ { Name: o, Location: Device, Dimensions: "
        "[1,1000,1,1], Format/Datatype: Row major linear FP32 }], ParameterType: Convolution, Kernel: [1,1], Weights: "
        '{"Type": "Int8", "Count": 512000}, ConvXAsActInputIdx: -1, Activation: NONE, TacticValue: 0x9'
    )
    assert layer.name == "fc + (Unnamed Layer* 355) [Shuffle]" and layer.is_convolution
    assert [(t.tensor, t.precision, t.vector, t.shape) for t in layer.inputs] == [
        (f"Reformatted Input Tensor 0 to {layer.name}", "INT8", 4, (1, 512, 1, 1)),
        ("r", "FP16", 1, (1, 5)),
    ]
    assert layer.outputs[0].precision == Precision.FP32
    assert layer.extras["Weights"] == {"Type": "Int8", "Count": 512000}
    assert (layer.extras["ConvXAsActInputIdx"], layer.extras["Activation"]) == (-1, "NONE")


def test_info_line_of_rtx() -> None:
    layer = layers.parse_info_line(
        "Name: cv1_myl0_1, LayerType: correlation, Inputs: [ { Name: a, Dimensions: [1,32,8,8], Strides: "
        "[2048,1,256,32], StrideOrder: [3,0,2,1], Datatype: Int8, Format: (NHWC) Channel major format }], Constants: "
        "[ { Name: w, Dimensions: [64,32,1,1], Strides: [32,1,32,32], StrideOrder: [3,0,2,1], Datatype: Int8, Format: "
        "(NHWC) Channel major format }], Outputs: [ { Name: b, Dimensions: [1,64,8,8], Strides: [4096,1,512,64], "
        "StrideOrder: [3,0,2,1], Datatype: Float, Format: (NHWC) Channel major format }], TacticName: t, StreamId: 0, "
        "Metadata: [ONNX Layer: cv1]\x1f[ONNX Layer: cv1/b]"
    )
    assert (layer.input_precision, layer.output_precision) == (Precision.INT8, Precision.FP32)
    assert [(t.tensor, t.shape) for t in layer.constants] == [("w", (64, 32, 1, 1))]
    assert layer.inputs[0].format == "(NHWC) Channel major format"
    assert (layer.onnx_names, layer.parse_name().components) == (["cv1", "cv1/b"], ["cv1"])


def test_info_line_without_tensors() -> None:
    layer = layers.parse_info_line(
        "Name: {ForeignNode[a...b]}, LayerType: Myelin, Inputs: [], Outputs: [], TacticValue: 0x0"
    )
    assert (layer.inputs, layer.outputs, layer.tactic) == ([], [], "0x0")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param(
            {
                "Name": "QuantizeLinear_2",
                "LayerType": "Reformat",
                "Origin": "QDQ",
                "Inputs": [
                    {
                        "Name": "x",
                        "Dimensions": [1, 3, -1, 4],
                        "Format/Datatype": "Row major linear FP32",
                    }
                ],
                "Outputs": [
                    {
                        "Name": "y",
                        "Dimensions": [1, 3, 4, 4],
                        "Format/Datatype": "Row major Int8 format",
                    }
                ],
            },
            ("conversion", True, (1, 3, None, 4), Precision.FP32, []),
            id="before TensorRT 11",
        ),
        pytest.param(
            {
                "Name": "c",
                "LayerType": "CaskConvolution",
                "Metadata": "[ONNX Layer: /c/Conv]",
                "Inputs": [
                    {
                        "Name": "x",
                        "Dimensions": [1],
                        "Datatype": "Int8",
                        "Format": "(Linear) Row major linear format",
                    }
                ],
            },
            ("convolution", False, (1,), Precision.INT8, ["/c/Conv"]),
            id="TensorRT 11",
        ),
    ],
)
def test_json_fields(fields: dict[str, object], expected: tuple[object, ...]) -> None:
    layer = layers.layer_from_fields(fields)
    found = layer.kind, layer.is_qdq, layer.inputs[0].shape, layer.input_precision, layer.onnx_names
    assert found == expected


def test_json_fields_of_wrong_types() -> None:
    layer = layers.layer_from_fields(
        {"Name": None, "LayerType": 5, "Inputs": "?", "Outputs": [3, None], "Metadata": ["x"]}
    )
    assert (layer.name, layer.type, layer.inputs, len(layer.outputs)) == ("", "5", [], 2)
    (tensor,) = layers.layer_from_fields(
        {"Inputs": [{"Name": "t", "Dimensions": [0, -1, MAX_DIMENSION, "x"]}]}
    ).inputs
    assert tensor.shape == (0, None, None, None)


COPY = "Reformatting CopyNode for Input Tensor 0 to c"
WIDE = "Thirty-two wide channel vectorized row major Int8 format"


@pytest.mark.parametrize(
    ("name", "source", "target", "kind"),
    [
        (COPY, "Four wide channel vectorized row major Int8 format", WIDE, "reformat"),
        (COPY, "Row major linear FP32", WIDE, "conversion"),
        ("x copy", WIDE, WIDE, "reformat"),
    ],
)
def test_kind_of_a_reformat_layer(name: str, source: str, target: str, kind: str) -> None:
    inputs, outputs = ([{"Name": "a", "Format/Datatype": layout}] for layout in (source, target))
    fields = {"Name": name, "LayerType": "Reformat", "Inputs": inputs, "Outputs": outputs}
    assert layers.layer_from_fields(fields).kind == kind


@pytest.mark.parametrize(
    ("name", "kind", "of", "index", "components"),
    [
        (
            "Reformatting CopyNode for Input Tensor 1 to Conv_0 + PWN(Clip_3)",
            "reformat-input",
            "Conv_0 + PWN(Clip_3)",
            1,
            ["Conv_0", "Clip_3"],
        ),
        (
            "Reformatting CopyNode for Output Tensor 0 to Conv_64",
            "reformat-output",
            "Conv_64",
            0,
            ["Conv_64"],
        ),
        ("Reformatting CopyNode for Network Input voxels", "reformat-network", "voxels", 0, []),
        (
            "/neck/Concat_/neck/Resize_0_clone_0 copy",
            "copy",
            "/neck/Concat_/neck/Resize_0_clone_0",
            0,
            [],
        ),
    ],
)
def test_parse_layer_name_of_a_copy(
    name: str, kind: str, of: str, index: int, components: list[str]
) -> None:
    fused = parse_layer_name(name)
    assert (fused.kind, fused.subject, fused.index) == (kind, of, index)
    assert (fused.components, fused.is_copy) == (components, True)


@pytest.mark.parametrize(
    ("name", "kind", "is_qdq"),
    [
        ("QuantizeLinear_7", "Reformat", True),
        ("DequantizeLinear_291", "Reformat", True),
        ("QuantizeLinear_2_quantize_scale_node", "Scale", True),
        ("w + QuantizeLinear_7 + Conv_9", "CaskConvolution", False),
        ("Reformatting CopyNode for Input Tensor 0 to QuantizeLinear_7", "Reformat", False),
        ("Scale_1", "Scale", False),
    ],
)
def test_remaining_q_and_dq_are_recognized_by_their_names(
    name: str, kind: str, is_qdq: bool
) -> None:
    assert layers.layer_from_fields({"Name": name, "LayerType": kind}).is_qdq is is_qdq


CASES = [
    ("Conv_1", "layer", [["Conv_1"]]),
    (
        "W + Q + Conv + PWN(PWN(a), b) + Add + Relu",
        "layer",
        [["W", "Q", "Conv", "a", "b", "Add", "Relu"]],
    ),
    (
        "conv1.weight + QuantizeLinear_7_quantize_scale_node + Conv_9",
        "layer",
        [["conv1.weight", "QuantizeLinear_7_quantize_scale_node", "Conv_9"]],
    ),
    (
        "Conv_62 + Relu_63 || Conv_65 + Relu_66",
        "layer",
        [["Conv_62", "Relu_63"], ["Conv_65", "Relu_66"]],
    ),
    (
        "PWN(PWN(/model.0/act/Sigmoid), PWN(/model.0/act/Mul))",
        "layer",
        [["/model.0/act/Sigmoid", "/model.0/act/Mul"]],
    ),
    (
        "PWN((Unnamed Layer* 112) [ElementWise], PWN(PWN((Unnamed Layer* 109) [Constant] + (Unnamed Layer* 110) "
        "[ElementWise], (Unnamed Layer* 111) [Unary]), (Unnamed Layer* 113) [ElementWise]))",
        "layer",
        [
            [
                "(Unnamed Layer* 112) [ElementWise]",
                "(Unnamed Layer* 109) [Constant]",
                "(Unnamed Layer* 110) [ElementWise]",
                "(Unnamed Layer* 111) [Unary]",
                "(Unnamed Layer* 113) [ElementWise]",
            ]
        ],
    ),
    (
        "{ForeignNode[/head/Constant_2_output_0.../Unsqueeze_2]}",
        "foreign",
        [["/head/Constant_2_output_0", "/Unsqueeze_2"]],
    ),
    ("/img/layer1/layer1_0/conv1/Conv_myl2_16", "myelin", [["/img/layer1/layer1_0/conv1/Conv"]]),
    ("__myl_MulAddSilu_myl0_2", "myelin", [[]]),
    ("[trainStation1]", "station", []),
    ("(Unnamed Layer* 718) [NMS]_1_output[DevicetoShapeHostCopy]", "station", []),
    ("", "layer", [[]]),
    ("odd(name + Conv_1 + Relu_2", "layer", [["odd(name", "Conv_1", "Relu_2"]]),
    ("a) + b", "layer", [["a)", "b"]]),
    ("w + f(a + b) + x", "layer", [["w", "f(a + b)", "x"]]),
]


@pytest.mark.parametrize(("name", "kind", "alternatives"), CASES)
def test_parts(name: str, kind: str, alternatives: list[list[str]]) -> None:
    fused = parse_layer_name(name)
    assert (fused.kind, fused.alternatives) == (kind, alternatives)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("QuantizeLinear_7751_clone_1_clone_2", "QuantizeLinear_7751"),
        ("QuantizeLinear_7_quantize_scale_node", "QuantizeLinear_7"),
        ("QuantizeLinear_7_clone_1_quantize_scale_node", "QuantizeLinear_7"),
        ("/a/clone_1/Conv", "/a/clone_1/Conv"),
        ("a_clone_1b", "a_clone_1b"),
        ("_clone_", "_clone_"),
        ("a_clone_1_quantize_scale_node_clone_2", "a"),
    ],
)
def test_base_name(name: str, base: str) -> None:
    assert base_name(name) == base


@pytest.mark.parametrize(
    ("start", "part", "end"), [("PWN(", "PWN(", ")"), ("x", " + x", ""), ("", "(a + ", "")]
)
def test_long_name_is_split_in_linear_time(start: str, part: str, end: str) -> None:
    def split(length: int) -> None:
        count = length // len(part)
        parse_layer_name(start + part * count + end * (count + 1))

    assert growth_factor(split, LINEAR) <= LINEAR


# A text of any letters makes hypothesis create its table of all characters, which takes 1.5 s.


@given(
    st.lists(
        st.lists(
            st.text(st.sampled_from(f"{ascii_letters}{digits}/._"), min_size=1, max_size=12),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_parse_layer_name_of_joined_names(groups: list[list[str]]) -> None:
    assert (
        parse_layer_name(" || ".join(" + ".join(group) for group in groups)).alternatives == groups
    )
