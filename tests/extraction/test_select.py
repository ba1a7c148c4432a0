"""Making a part smaller while it shows the same."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qdqtool
from qdqtool.base import budgets
from qdqtool.extraction import moves
from qdqtool.extraction.select import Shrinker
from tests.extraction.networks import residual


def test_a_vector_of_many_sizes_stays_with_what_is_tried() -> None:
    """Above 512 parts it has more bytes than weights that are put apart: the part was no model any more."""
    parts = 600
    sizes = np.full(parts, 2, np.int64)
    names = [f"s{i}" for i in range(parts)]
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"], "wide"),
             helper.make_node("Split", ["a", "sizes"], names, "split", axis=1),
             helper.make_node("Conv", ["s0", "k"], ["z"], "narrow")]
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), name)
               for name, shape in (("w", (2 * parts, 4, 1, 1)), ("k", (4, 2, 1, 1)))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (("x", [1, 4, 8, 8]), ("z", [1, 4, 8, 8]))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [*weights, numpy_helper.from_array(sizes, "sizes")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    found = qdqtool.extract(model, outputs=["z"], minimize=True, target="trt8.6").proto
    onnx.shape_inference.infer_shapes(found, check_type=True, strict_mode=True)
    assert found.graph.initializer[0].dims[0] < 2 * parts


def test_candidates_that_are_no_models_use_up_the_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copies all weights: 300 of 60 MB, of which none could be tried, took a minute."""
    model = residual(1)
    monkeypatch.setattr(budgets, "MINIMIZED_BYTES", model.ByteSize())
    for move, ends in ((moves.channels, True), (moves.skips, False)):  # these are made without the weights
        shrinker = Shrinker(model, lambda proto: False, (move,), bounded=True)
        monkeypatch.setattr(shrinker, "_typed", lambda proto: 1 / 0)
        shrinker.run()
        assert shrinker.tried == 0 and shrinker.exhausted is ends
