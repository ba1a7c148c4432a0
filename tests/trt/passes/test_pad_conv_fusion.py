import pytest

from qdqtool.evidence import Evidence
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt.passes.pad_conv_fusion import PadConvFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass, weakest_evidence


def convolution_layers(
    pair: str, mode: str = "constant", value: float | None = None
) -> list[tuple[str, list[Precision]]]:
    """Return names and input precisions of the convolution and of the Pad, if the Pad remains.

    Args:
        pair: Place of the Q/DQ pair: before the Pad, between Pad and convolution, or "" for a float network.
    """
    g = Graph()
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    x = g.pad(g.pair(x, "p") if pair == "before" else x, "Pad_6", mode, value)
    x = g.pair(x, "p") if pair == "between" else x
    g.op(
        "LeakyRelu",
        g.conv(x, "Conv_13", scale=None, weights="qdq" if pair else "float"),
        "act",
    )
    layers = predict(g.model("act:0"), advice=False).layers
    return [
        (layer.name, [t.precision for t in layer.inputs])
        for layer in layers
        if layer.type in ("Padding", "Convolution")
    ]


@pytest.mark.parametrize("value", [None, 0.0])
def test_zero_pad_after_pair_is_fused_into_convolution(value: float | None) -> None:
    assert convolution_layers("before", value=value) == [
        ("Pad_6 + Conv_13.weight + Conv_13.w.Q + Conv_13 + PWN(act)", [Precision.INT8]),
    ]


def test_zero_pad_before_pair_runs_in_int8_as_own_layer() -> None:
    # NVIDIA/TensorRT issue 2592. A published ResNet engine runs such a Pad in INT8.
    assert convolution_layers("between") == [
        ("Pad_6", [Precision.INT8]),
        ("Conv_13.weight + Conv_13.w.Q + Conv_13 + PWN(act)", [Precision.INT8]),
    ]


def test_zero_pad_is_fused_into_float_convolution() -> None:
    assert convolution_layers("") == [("Pad_6 + Conv_13 + PWN(act)", [Precision.FLOAT])]


def test_q_does_not_move_past_pad_of_other_value() -> None:
    pad, convolution = convolution_layers("between", "constant", 1.0)
    assert pad == ("Pad_6", [Precision.FLOAT])
    assert convolution[1] == [Precision.INT8]


def test_pad_of_quantized_convolution_is_fused_without_a_line(g: Graph) -> None:
    x = g.pad(g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "p"), "Pad_6")
    result = run_pass(g.model(g.conv(x, "c", scale=None)), PadConvFusion)
    assert result.lines == []
    assert weakest_evidence(result.layer("Pad_6 + c.weight + c.w.Q + c")) == Evidence.DOCUMENTED


@pytest.mark.parametrize("mode", ["reflect", "edge"])
@pytest.mark.parametrize("place", ["before", "between"])
def test_copying_pad_runs_in_int8_as_own_layer(mode: str, place: str) -> None:
    pad, convolution = convolution_layers(place, mode)
    assert pad == ("Pad_6", [Precision.INT8])
    assert convolution[1] == [Precision.INT8]


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_copying_pad_is_not_fused_into_float_convolution(mode: str) -> None:
    assert convolution_layers("", mode)[0][0] == "Pad_6"


@pytest.mark.parametrize(
    ("place", "value", "reasons"),
    [
        ("between", None, [("c", "behind-pad")]),
        ("before", None, []),
        ("between", 1.0, []),
        ("", None, []),
    ],
)
def test_pair_after_zero_pad_is_reported(
    g: Graph, place: str, value: float | None, reasons: list[tuple[str, str]]
) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    x = g.pad(g.pair(x, "p") if place == "before" else x, "Pad_6", "constant", value)
    x = g.pair(x, "p") if place == "between" else x
    result = run_pass(
        g.model(g.conv(x, "c", scale=None, weights="qdq" if place else "float")), PadConvFusion
    )
    assert result.reasons == reasons
