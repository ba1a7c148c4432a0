import onnx
import pytest

from qdqtool.evidence import Evidence
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt.passes.pad_conv_fusion import PadConvFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass, weakest_evidence


def padded(
    g: Graph, pair: str, mode: str = "constant", value: float | None = None
) -> onnx.ModelProto:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    x = g.pad(g.pair(x, "p") if pair == "before" else x, "Pad_6", mode, value)
    x = g.pair(x, "p") if pair == "between" else x
    x = g.conv(x, "Conv_13", scale=None, weights="qdq" if pair else "float")
    return g.model(g.op("LeakyRelu", x, "act"))


INT8, FLOAT = [Precision.INT8], [Precision.FLOAT]
CONVOLUTION = "Conv_13.weight + Conv_13.w.Q + Conv_13 + PWN(act)"


@pytest.mark.parametrize(
    ("pair", "mode", "value", "layers"),
    [
        ("before", "constant", None, [(f"Pad_6 + {CONVOLUTION}", INT8)]),
        ("before", "constant", 0.0, [(f"Pad_6 + {CONVOLUTION}", INT8)]),
        # NVIDIA/TensorRT issue 2592. A published ResNet engine runs such a Pad in INT8.
        ("between", "constant", None, [("Pad_6", INT8), (CONVOLUTION, INT8)]),
        ("between", "constant", 1.0, [("Pad_6", FLOAT), (CONVOLUTION, INT8)]),
        ("", "constant", None, [("Pad_6 + Conv_13 + PWN(act)", FLOAT)]),
        *(
            row
            for mode in ("reflect", "edge")
            for row in (
                ("before", mode, None, [("Pad_6", INT8), (CONVOLUTION, INT8)]),
                ("between", mode, None, [("Pad_6", INT8), (CONVOLUTION, INT8)]),
                ("", mode, None, [("Pad_6", FLOAT), ("Conv_13 + PWN(act)", FLOAT)]),
            )
        ),
    ],
)
def test_pad_is_fused_if_it_writes_zeros(
    g: Graph, pair: str, mode: str, value: float | None, layers: list[tuple[str, list[Precision]]]
) -> None:
    """A Q moves past a Pad of zeros or copies, which then runs in INT8."""
    # The pair is before the Pad, between Pad and convolution, or missing in a float network.
    assert [
        (layer.name, [t.precision for t in layer.inputs])
        for layer in predict(padded(g, pair, mode, value), advice=False).layers
        if layer.type in ("Padding", "Convolution")
    ] == layers


def test_pad_of_quantized_convolution_is_fused_without_a_line(g: Graph) -> None:
    x = g.pad(g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "p"), "Pad_6")
    result = run_pass(g.model(g.conv(x, "c", scale=None)), PadConvFusion)
    assert result.lines == []
    assert weakest_evidence(result.layer("Pad_6 + c.weight + c.w.Q + c")) == Evidence.DOCUMENTED


@pytest.mark.parametrize(
    ("place", "value", "reasons"),
    [
        ("between", None, [("Conv_13", "behind-pad")]),
        ("before", None, []),
        ("between", 1.0, []),
        ("", None, []),
    ],
)
def test_pair_after_zero_pad_is_reported(
    g: Graph, place: str, value: float | None, reasons: list[tuple[str, str]]
) -> None:
    assert run_pass(padded(g, place, value=value), PadConvFusion).reasons == reasons
