"""What the engine's layers are called, and the types that they are listed with."""

from __future__ import annotations

import pytest

from qdqtool.prediction import predict
from tests.trt.builder import Graph


@pytest.mark.parametrize(
    ("op", "attributes", "kind"),
    [("LRN", {"size": 3}, "LRN"), ("GlobalMaxPool", {}, "Pooling"), ("MaxPool", {"kernel_shape": [2, 2]}, "Pooling"),
     ("Softmax", {}, "Softmax")],
)  # fmt: skip
def test_a_layer_of_no_known_type_has_its_operators_name(op: str, attributes: dict[str, object], kind: str) -> None:
    g = Graph()
    layers = predict(g.model(g.op(op, g.input(1, 8, 4, 4), "n", **attributes))).layers
    assert [layer.type for layer in layers if layer.nodes == ["n"]] == [kind]
