import numpy as np
import pytest

from qdqtool.prediction import predict
from tests.trt.builder import Graph


@pytest.mark.parametrize(
    ("op", "is_int8"),
    [("Identity", True), ("Plugin", False)],  # the shape of a plugin's output is unknown
)
def test_pads_from_the_shape_of_a_constant(g: Graph, op: str, is_int8: bool) -> None:
    table = g.const("table", np.zeros((0, 0, 1, 1, 0, 0, 1, 1), np.float32))
    domain = "plugins" if op == "Plugin" else ""
    pads = g.op("Shape", g.op(op, table, "copy", domain=domain), "pads")
    x = g.op("Pad", [g.pair(g.input(1, 16, 8, 8), "in"), pads], "pad")
    model = g.model(g.op("Conv", [x, g.weights("c", (16, 16, 1, 1), "qdq")], "c"))
    assert predict(model, "rtx1.7").convolution("c").is_int8 == is_int8


@pytest.mark.parametrize(
    ("axis", "scales", "refused"),
    [
        (0, (2, 4, 4, 4), True),
        (1, (4, 2, 4, 4), True),
        (2, (4, 4, 2, 4), False),
        (-1, (4, 4, 4, 2), False),
    ],
)
def test_blocks_of_scales_are_along_one_of_the_last_two_axes(
    axis: int, scales: tuple[int, ...], refused: bool
) -> None:
    g = Graph(21)
    inputs = [g.const("w", np.ones((4, 4, 4, 4), np.int8)), g.const("s", np.ones(scales))]
    w = g.op("DequantizeLinear", inputs, "dq", axis=axis, block_size=2)
    findings = predict(g.model(g.op("Conv", [g.input(1, 4, 8, 8), w], "c")), "rtx1.7").findings
    assert any(f"blocks of scales along axis {axis}." in f.message for f in findings) is refused


@pytest.mark.parametrize(
    ("op", "output"),
    [("Relu", "INT8"), ("Transpose", "INT8"), ("Softmax", "FP32"), ("Add", "FP32")],
)
def test_product_writes_int8_if_it_fuses_the_q_after_it(g: Graph, op: str, output: str) -> None:
    weights = g.pair(g.const("w", np.ones((16, 16))), "wq", 0.01)
    x = g.op("MatMul", [g.pair(g.input(4, 16), "in"), weights], "product")
    x = g.op(op, [x, x] if op == "Add" else x, "end")
    assert predict(g.model(g.pair(x, "out")), "rtx1.7").convolution("product").output == output
