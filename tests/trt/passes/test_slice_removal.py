"""Slice elimination: yolov8-orin-trt8412-excerpts, three slices of a head."""

import numpy as np

from qdqtool.prediction import predict
from qdqtool.trt.passes.slice_removal import SliceRemoval
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_slices(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    found = step(g.model(g.op("Tanh", g.slice(x, "Slice", 0, 4), "t")), SliceRemoval)
    assert found.rows == [("Eliminating slice", "Slice", "Slice:0 from Slice:0 to s:0")]
    assert found.layer("Slice").out.memory.name == "s:0"
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    parts = g.ops("Split", [x], "Split", count=2, axis=1)
    found = step(g.model(*(g.op("Tanh", p, f"t{i}") for i, p in enumerate(parts))), SliceRemoval)
    assert sorted(r[2] for r in found.rows) == [
        "Split:0 from Split:0 to s:0",
        "Split:1 from Split:1 to s:0",
    ]
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    assert (
        step(g.model(g.op("Tanh", g.slice(x, "Slice", 0, 8, step=2), "t")), SliceRemoval).rows == []
    )
    g = Graph()
    assert (
        step(
            g.model(g.op("Tanh", g.slice(g.input(1, 8, 4, 4), "Slice", 0, 4), "t")), SliceRemoval
        ).rows
        == []
    )


def test_tiles_and_views(g: Graph) -> None:
    """NVIDIA/TensorRT issue 2627: Layer(Slice): Tile_28 in float, the Q behind it a conversion."""
    x = g.relu(g.conv(g.input(1, 16, 8, 1), "c", 16, k=1), "r")
    tile = g.op("Tile", [x, g.const("repeats", np.array([1, 1, 1, 8], np.int64))], "tile")
    proto = g.model(g.op("Softmax", g.pair(tile, "q"), "end"))
    assert step(proto, SliceRemoval).rows == []
    prediction = predict(proto, "trt8.5")
    assert [
        (layer.type, str(layer.outputs[0].precision))
        for layer in prediction.layers
        if "tile" in layer.nodes
    ] == [("Slice", "FLOAT")]
    assert prediction.conversion_nodes == ["c.in.Q", "q.Q", "q.DQ"]
    # What is eliminated is not listed; a slice with a step is
    for size, listed in ((1, []), (2, ["cut"])):
        g = Graph()
        cut = g.slice(g.op("Sigmoid", g.input(1, 8, 4, 4), "s"), "cut", 0, 4, step=size)
        prediction = predict(g.model(g.op("Tanh", cut, "t")), "trt8.5")
        assert [layer.name for layer in prediction.layers if layer.type == "Slice"] == listed
