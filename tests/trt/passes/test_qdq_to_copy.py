"""QDQToCopy: yolo-resnet18-orin-trt8502, line 5741 (12 Qs); a DQ: engine of resnet18-a100-qat-residual."""

import pytest

from qdqtool.model.operators import LayerKind
from qdqtool.trt.passes.qdq_to_copy import QDQToCopy
from qdqtool.trt.refusals import Stays
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_what_stays_a_copy(g: Graph) -> None:
    found = step(g.model(g.conv(g.input(1, 3, 8, 8), "c")), QDQToCopy)
    assert found.rows == [
        ("Running", "c.in.Q"),
        ("Swap the layer type", "c.in.Q", "QUANTIZE to kQDQ"),
    ]
    assert found.layer("c.in.Q").kind == LayerKind.COPY
    assert found.reasons == [("c.in.Q", "stays")]
    assert found.refusals[0].tensor == "x"
    assert found.refusals[0].scale == pytest.approx(0.1)
    g = Graph()
    out = g.conv(g.conv(g.input(1, 3, 8, 8), "a"), "b")
    assert [r[1] for r in step(g.model(out), QDQToCopy).rows] == ["a.in.Q", "a.in.Q"]
    g = Graph()
    # Last block of resnet18-a100-qat-residual: DequantizeLinear_291
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "a"), "r")
    out = g.add(g.pair(x, "skip", 0.1), g.conv(x, "b", scale=0.1), "Add")
    found = step(g.model(g.op("Softmax", out, "s")), QDQToCopy)
    assert ("Swap the layer type", "skip.DQ", "DEQUANTIZE to kQDQ") in found.rows
    assert False in [r.quantize for r in found.refusals if isinstance(r, Stays)]
