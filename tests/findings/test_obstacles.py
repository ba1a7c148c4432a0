import ml_dtypes
import numpy as np

import qdqtool
from qdqtool.findings.obstacles import describe_obstacles
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from tests.trt.builder import Graph


def test_obstacles_count_int8_and_int4_nodes(g: Graph) -> None:
    """Q and DQ of the data have a zero point other than 0, and the INT4 DQ of the weights.

    The finding of the data is the first, although its nodes are the last.
    """
    weights = g.const("w", np.zeros((16, 16, 1, 1), ml_dtypes.int4))
    weights = g.dq(weights, "w.DQ", zero=3, integer=ml_dtypes.int4)
    inputs = [g.pair(g.input(1, 16, 8, 8), "in", zero=2), weights]
    model = g.model(g.op("Conv", inputs, "c", kernel_shape=[1, 1]))
    findings = [f for f in qdqtool.predict(model).findings if f.code == "ZP-NONZERO"]
    assert [f.node for f in findings] == ["in.Q", "w.DQ"]
    text = describe_obstacles(findings, View(Model(model)))
    assert text.startswith("zero points other than 0 at 3 Q or DQ nodes:")
