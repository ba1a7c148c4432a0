"""ShuffleErasure: both complete 8.5 logs (behind a Softmax; resnet18 line 2569: Flatten with its inverse)."""

from __future__ import annotations

import pytest

from qdqtool.trt.passes.shuffle_erasure import ShuffleErasure
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_shuffle_of_a_softmax() -> None:
    g = Graph()
    found = step(g.model(g.relu(g.op("Softmax", g.input(1, 8), "s", axis=1), "r")), ShuffleErasure)
    assert len(found.rows) == 2
    running, removing = found.rows
    assert running[0] == "Running" and removing == ("Removing", running[1])
    assert running[1].endswith("[Shuffle]")
    assert found.layer("r").data.producer is found.layer("s")


def test_pair_that_gives_the_shape_back() -> None:
    """The second turn: 1x8x1x1 flattened for the Gemm, and back for the convolution that it became."""
    g = Graph()
    pooled = g.op("GlobalAveragePool", g.input(1, 8, 4, 4), "gap")
    flat = g.op("Flatten", g.pair(pooled, "p"), "Flatten_301")
    found = step(g.model(g.gemm(flat, "Gemm_311", 8)), ShuffleErasure, nth=1)
    # The inner pair moved in front of Flatten, its DQ back behind both shuffles.
    assert ("Running", "Flatten_301 + reshape_before_Gemm_311") in found.rows
    assert ("Removing", "Flatten_301 + reshape_before_Gemm_311") in found.rows


def test_name_of_a_network_output_survives() -> None:
    g = Graph()
    out = g.op("Softmax", g.input(1, 8), "s", axis=1)
    found = step(g.model(out), ShuffleErasure)
    assert [t.name for t in found.network.outputs] == [out]


def test_network_input_that_is_an_output() -> None:
    """Nothing is left to write the output if the shuffles between go."""
    g = Graph()
    found = step(g.model(g.reshape(g.reshape(g.input(4, 4), "a", 16), "b", 4, 4)), ShuffleErasure)
    assert found.rows == []
    assert [t.name for t in found.network.inputs] == ["x"]


@pytest.mark.parametrize("names", [("Transpose_1", "Reshape_2"), ("a", "b")])
def test_transpose_of_equal_dimensions_is_left(names: tuple[str, str]) -> None:
    g = Graph()
    x = g.op("Transpose", g.input(4, 4), names[0], perm=[1, 0])
    found = step(g.model(g.reshape(x, names[1], 4, 4)), ShuffleErasure)
    assert found.rows == []
    assert found.has(" + ".join(names))


def test_shuffle_that_changes_the_shape_is_left() -> None:
    g = Graph()
    x = g.reshape(g.input(4, 4), "a", 16)
    assert step(g.model(g.reshape(x, "b", 2, 8)), ShuffleErasure).rows == []
