import numpy as np
import pytest

from qdqtool.prediction import predict
from qdqtool.trt.passes.slice_removal import SliceRemoval
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


def test_slice_is_removed(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    result = run_pass(g.model(g.op("Tanh", g.slice(x, "Slice", 0, 4), "t")), SliceRemoval)
    assert result.lines == [("Eliminating slice", "Slice", "Slice:0 from Slice:0 to s:0")]
    assert result.layer("Slice").out.memory.name == "s:0"


def test_split_is_removed(g: Graph) -> None:
    parts = g.ops("Split", [g.op("Sigmoid", g.input(1, 8, 4, 4), "s")], "Split", count=2, axis=1)
    result = run_pass(
        g.model(*(g.op("Tanh", p, f"t{i}") for i, p in enumerate(parts))), SliceRemoval
    )
    assert sorted(r[2] for r in result.lines) == [
        "Split:0 from Split:0 to s:0",
        "Split:1 from Split:1 to s:0",
    ]


def test_tile_stays_in_float(g: Graph) -> None:
    # NVIDIA/TensorRT issue 2627: Layer(Slice): Tile_28 in float, the Q after it a conversion.
    x = g.relu(g.conv(g.input(1, 16, 8, 1), "c", 16, k=1), "r")
    tile = g.op("Tile", [x, g.const("repeats", np.array([1, 1, 1, 8], np.int64))], "tile")
    proto = g.model(g.op("Softmax", g.pair(tile, "q"), "end"))
    assert run_pass(proto, SliceRemoval).lines == []
    prediction = predict(proto, "trt8.5")
    assert [
        (layer.type, str(layer.outputs[0].precision))
        for layer in prediction.layers
        if "tile" in layer.nodes
    ] == [("Slice", "FLOAT")]
    assert prediction.conversion_nodes == ["c.in.Q", "q.Q", "q.DQ"]


@pytest.mark.parametrize(("step", "layers"), [(1, []), (2, ["cut"])])
def test_prediction_lists_remaining_slices_only(g: Graph, step: int, layers: list[str]) -> None:
    part = g.slice(g.op("Sigmoid", g.input(1, 8, 4, 4), "s"), "cut", 0, 4, step=step)
    prediction = predict(g.model(g.op("Tanh", part, "t")), "trt8.5")
    assert [layer.name for layer in prediction.layers if layer.type == "Slice"] == layers


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [
                g.op(
                    "Tanh",
                    g.slice(g.op("Sigmoid", g.input(1, 8, 4, 4), "s"), "Slice", 0, 8, step=2),
                    "t",
                )
            ],
            id="step",
        ),
        pytest.param(
            lambda g: [g.op("Tanh", g.slice(g.input(1, 8, 4, 4), "Slice", 0, 4), "t")],
            id="network input",
        ),
    ],
)
def test_slice_stays(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), SliceRemoval).lines == []
