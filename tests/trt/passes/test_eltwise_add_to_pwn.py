"""EltwiseAddToPwn: yolov8-orin-trt8412-excerpts; NVIDIA/TensorRT issue 3345 on ``<Add> + <Relu>``."""

from qdqtool.model.operators import LayerKind
from qdqtool.trt.passes.eltwise_add_to_pwn import EltwiseAddToPwn
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_sums(g: Graph) -> None:
    left, right = (g.op("Softmax", g.input(1, 8, name=n), f"s{n}") for n in "ab")
    out = g.relu(g.add(left, right, "Add"), "Relu")
    found = step(g.model(out), EltwiseAddToPwn)
    assert found.rows == [
        ("Running", "Add + Relu"),
        ("Swap the layer type", "Add + Relu", "ELEMENTWISE to POINTWISE"),
    ]
    assert found.layer("Add + Relu").kind == LayerKind.POINTWISE
    g = Graph()
    x = g.input(1, 8, 8, 8)
    assert step(g.model(g.add(g.conv(x, "c"), x, "Add")), EltwiseAddToPwn).rows == []
    g = Graph()
    x = [g.op("Softmax", g.input(1, 8, name=n), f"s{n}") for n in "ab"]
    found = step(g.model(g.op("Mul", x, "Mul")), EltwiseAddToPwn)
    assert found.rows == []
    assert found.layer("Mul").kind == LayerKind.ELEMENTWISE
