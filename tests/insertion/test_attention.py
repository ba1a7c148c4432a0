from __future__ import annotations

import numpy as np
import pytest

from qdqtool.demo.model import yolov8n
from qdqtool.insertion.placement import class_outputs
from qdqtool.model.graph import Model
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


def scored(net: Net, tensor: str) -> tuple[str, ...]:
    """The class outputs of a network whose scores are the Sigmoid of a tensor."""
    net.output(net.op("Sigmoid", "sigmoid", tensor))
    return class_outputs(net.index())


def test_only_maps_of_convolutions_are_looked_at() -> None:
    """A point in [n, classes, h, w] is a place in the picture; in a row of numbers or a sound it is none."""
    made = Net()
    assert scored(made, made.conv("c", "x")) == ("c.out",)
    made = Net()
    row = made.op("Reshape", "row", "x", made.const("shape", [1, 16, 64], np.int64))
    assert scored(made, made.op("Conv", "c", row, made.const("w", np.ones((3, 16, 1))))) == ()
    made = Net()
    assert scored(made, made.op("MatMul", "m", "x", made.const("w", np.ones((8, 3))))) == ()
    made = Net()
    made.output(made.op("Sigmoid", "sigmoid", made.conv("c", made.op("Strange", "any", "x", domain="example"))))
    assert class_outputs(Model(made.open_model())) == ()


@pytest.mark.parametrize("moved", ["Reshape", "Transpose", "Concat", ""])
@pytest.mark.parametrize(("end", "found"), [("Mul", ()), ("Sqrt", ()), ("", ("c.out",)), ("TopK", ("c.out",))])
def test_scores_go_out_or_are_sorted_but_not_calculated_with(moved: str, end: str, found: tuple[str, ...]) -> None:
    made = Net()
    scores = made.op("Sigmoid", "sigmoid", made.conv("c", "x"))
    if moved == "Reshape":
        scores = made.op("Reshape", "moved", scores, made.const("shape", [1, 16, 64], np.int64))
    elif moved == "Transpose":
        scores = made.op("Transpose", "moved", scores, perm=[0, 2, 3, 1])
    elif moved == "Concat":
        scores = made.op("Concat", "moved", scores, "x", axis=1)
    if end == "Mul":
        scores = made.op("Mul", "end", made.const("two", 2.0), scores)
    elif end == "Sqrt":
        scores = made.op("Sqrt", "end", scores)
    elif end == "TopK":  # what is done with the best of them is no matter
        best = made.op("TopK", "top", scores, made.const("k", [1], np.int64), outputs=2, axis=1)
        scores = made.op("Mul", "end", best[0], made.const("two", 2.0))
    made.output(scores)
    assert class_outputs(made.index()) == found
