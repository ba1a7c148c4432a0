from __future__ import annotations

from qdqtool.demo.model import yolov8n
from qdqtool.graph import Model
from qdqtool.insertion.attention import class_outputs
from tests.insertion.nets import Net


def test_class_branches_of_a_yolov8_head() -> None:
    model = Model(yolov8n(64, classes=3))
    found = class_outputs(model)
    assert len(found) == 3
    assert [model.shape(t) for t in found] == [(1, 3, 8, 8), (1, 3, 4, 4), (1, 3, 2, 2)]


def test_heat_map_of_a_centernet_head() -> None:
    made = Net()
    body = made.op("Relu", "relu", made.conv("body", "x"))
    made.output(made.op("Sigmoid", "sigmoid", made.conv("heat", body, cout=3)), made.conv("size", body, cout=2))
    assert class_outputs(made.index()) == ("heat.out",)


def test_one_sigmoid_for_boxes_and_scores_tells_nothing() -> None:
    made = Net()
    scores = made.op("Sigmoid", "sigmoid", made.conv("head", "x", cout=6))
    made.output(scores, made.op("Mul", "boxes", scores, made.const("two", 2.0)))
    assert class_outputs(made.index()) == ()


def test_a_network_without_class_maps() -> None:
    made = Net()
    made.output(made.silu("act", made.conv("a", "x")))
    assert class_outputs(made.index()) == ()
