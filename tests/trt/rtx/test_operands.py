import numpy as np
import pytest

from qdqtool.prediction import predict
from tests.trt.builder import Graph


@pytest.mark.parametrize(("op", "is_int8"), [("Identity", True), ("Plugin", False)])
def test_pads_from_the_shape_of_a_constant(g: Graph, op: str, is_int8: bool) -> None:
    """The shape of a plugin's output is unknown."""
    table = g.const("table", np.zeros((0, 0, 1, 1, 0, 0, 1, 1), np.float32))
    domain = "plugins" if op == "Plugin" else ""
    pads = g.op("Shape", g.op(op, table, "copy", domain=domain), "pads")
    x = g.op("Pad", [g.pair(g.input(1, 16, 8, 8), "in"), pads], "pad")
    model = g.model(g.op("Conv", [x, g.weights("c", (16, 16, 1, 1), "qdq")], "c"))
    assert predict(model, "rtx1.7").convolution("c").is_int8 == is_int8
