"""PadConvFusion: engine names of NVIDIA/TensorRT issue 2527, ``Pad_6 + W + QuantizeLinear_9 + Conv_13 + PWN(...)``."""

import pytest

from qdqtool.prediction import predict
from qdqtool.trt.passes.pad_conv_fusion import PadConvFusion
from qdqtool.types import Evidence, Precision
from tests.trt.builder import Graph
from tests.trt.passes.step import evidence_of, step


def engine(
    quantized: str, mode: str = "constant", value: float | None = None
) -> list[tuple[str, list[Precision]]]:
    """Names and input precisions of the convolution and, if it stays, the Pad."""
    g = Graph()
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    x = g.pad(g.pair(x, "p") if quantized == "before" else x, "Pad_6", mode, value)
    x = g.pair(x, "p") if quantized == "between" else x
    g.op(
        "LeakyRelu",
        g.conv(x, "Conv_13", scale=None, weights="qdq" if quantized else "float"),
        "act",
    )
    layers = predict(g.model("act:0"), advice=False).layers
    kept = [layer for layer in layers if layer.type in ("Padding", "Convolution")]
    return [(layer.name, [t.precision for t in layer.inputs]) for layer in kept]


@pytest.mark.parametrize("value", [None, 0.0])
def test_pair_in_front_of_the_pad(value: float | None) -> None:
    """DQ moves behind the Pad, which then joins the convolution."""
    assert engine("before", value=value) == [
        ("Pad_6 + Conv_13.weight + Conv_13.w.Q + Conv_13 + PWN(act)", [Precision.INT8]),
    ]


def test_pads_in_front_of_a_convolution(g: Graph) -> None:
    """NVIDIA/TensorRT issue 2592; a published ResNet engine runs such a Pad in INT8."""
    assert engine("between") == [
        ("Pad_6", [Precision.INT8]),
        ("Conv_13.weight + Conv_13.w.Q + Conv_13 + PWN(act)", [Precision.INT8]),
    ]
    assert engine("") == [("Pad_6 + Conv_13 + PWN(act)", [Precision.FLOAT])]
    # A Q does not pass it
    names = engine("between", "constant", 1.0)
    assert names[0] == ("Pad_6", [Precision.FLOAT])
    assert names[1][1] == [Precision.INT8]
    x = g.pad(g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "p"), "Pad_6")
    found = step(g.model(g.conv(x, "c", scale=None)), PadConvFusion)
    assert found.rows == []
    assert evidence_of(found.layer("Pad_6 + c.weight + c.w.Q + c")) == Evidence.DOCUMENTED


@pytest.mark.parametrize("mode", ["reflect", "edge"])
@pytest.mark.parametrize("place", ["before", "between"])
def test_a_pad_that_copies_runs_in_int8_and_stays_apart(mode: str, place: str) -> None:
    """A Q passes it, but it is no padding of a convolution."""
    names = engine(place, mode)
    assert names[0] == ("Pad_6", [Precision.INT8])
    assert names[1][1] == [Precision.INT8]


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_a_float_convolution_takes_no_pad_that_copies(mode: str) -> None:
    assert next(name for name, _ in engine("", mode)) == "Pad_6"


@pytest.mark.parametrize(
    ("place", "value", "refused"),
    [
        ("between", None, [("c", "behind-pad")]),
        ("before", None, []),
        ("between", 1.0, []),
        ("", None, []),
    ],
)
def test_a_pair_behind_the_pad_is_refused(
    g: Graph,
    place: str,
    value: float | None,
    refused: list[tuple[str, str]],
) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    x = g.pad(g.pair(x, "p") if place == "before" else x, "Pad_6", "constant", value)
    x = g.pair(x, "p") if place == "between" else x
    found = step(
        g.model(g.conv(x, "c", scale=None, weights="qdq" if place else "float")), PadConvFusion
    )
    assert found.reasons == refused
