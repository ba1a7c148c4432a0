"""ShuffleErasure: both complete 8.5 logs (behind a Softmax; resnet18 line 2569: Flatten with its inverse)."""

import numpy as np
import pytest

from qdqtool.trt.passes.shuffle_erasure import ShuffleErasure
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_shuffles_that_go_and_that_stay(g: Graph) -> None:
    found = step(g.model(g.relu(g.op("Softmax", g.input(1, 8), "s", axis=1), "r")), ShuffleErasure)
    assert len(found.rows) == 2
    running, removing = found.rows
    assert running[0] == "Running" and removing == ("Removing", running[1])
    assert running[1].endswith("[Shuffle]")
    assert found.layer("r").data.producer is found.layer("s")
    g = Graph()
    out = g.op("Softmax", g.input(1, 8), "s", axis=1)
    assert [t.name for t in step(g.model(out), ShuffleErasure).network.outputs] == [out]
    g = Graph()
    # The second turn: 1x8x1x1 flattened for the Gemm, and back for the convolution that it became
    pooled = g.op("GlobalAveragePool", g.input(1, 8, 4, 4), "gap")
    flat = g.op("Flatten", g.pair(pooled, "p"), "Flatten_301")
    found = step(g.model(g.gemm(flat, "Gemm_311", 8)), ShuffleErasure, nth=1)
    # The inner pair moved in front of Flatten, its DQ back behind both shuffles.
    assert ("Running", "Flatten_301 + reshape_before_Gemm_311") in found.rows
    assert ("Removing", "Flatten_301 + reshape_before_Gemm_311") in found.rows
    g = Graph()
    # Nothing is left to write the output if the shuffles between go
    found = step(g.model(g.reshape(g.reshape(g.input(4, 4), "a", 16), "b", 4, 4)), ShuffleErasure)
    assert found.rows == []
    assert [t.name for t in found.network.inputs] == ["x"]
    g = Graph()
    x = g.reshape(g.input(4, 4), "a", 16)
    assert step(g.model(g.reshape(x, "b", 2, 8)), ShuffleErasure).rows == []


@pytest.mark.parametrize("names", [("Transpose_1", "Reshape_2"), ("a", "b")])
def test_transpose_of_equal_dimensions_is_left(g: Graph, names: tuple[str, str]) -> None:
    x = g.op("Transpose", g.input(4, 4), names[0], perm=[1, 0])
    found = step(g.model(g.reshape(x, names[1], 4, 4)), ShuffleErasure)
    assert found.rows == []
    assert found.has(" + ".join(names))


@pytest.mark.parametrize(
    ("first", "second", "nothing"),
    [
        ((0, 2, 3, 1), (0, 3, 1, 2), True),
        ((0, 2, 3, 1), (0, 2, 3, 1), False),
        ((1, 0, 2, 3), (1, 0, 2, 3), True),
        ((0, 3, 1, 2), (1, 0, 2, 3), False),
    ],
)
def test_transposes_that_undo_each_other(
    g: Graph, first: tuple[int, ...], second: tuple[int, ...], nothing: bool
) -> None:
    """Whatever the dimensions, which are equal here: what numpy says of the values decides."""
    values = np.arange(81).reshape(3, 3, 3, 3)
    assert (values.transpose(first).transpose(second) == values).all() == nothing
    x = g.op("Transpose", g.op("Neg", g.input(3, 3, 3, 3), "n"), "a", perm=first)
    found = step(g.model(g.op("Neg", g.op("Transpose", x, "b", perm=second), "m")), ShuffleErasure)
    assert bool(found.rows) is nothing and found.has("a + b") is not nothing


def test_what_three_transposes_come_to(g: Graph) -> None:
    """Joined one after the other, as numpy turns the values."""
    turns = ((1, 2, 0), (2, 1, 0), (1, 0, 2))
    values = np.arange(24).reshape(2, 3, 4)
    x = g.op("Neg", g.input(2, 3, 4), "n")
    for i, perm in enumerate(turns):
        x, values = g.op("Transpose", x, f"t{i}", perm=perm), values.transpose(perm)
    found = step(g.model(g.op("Neg", x, "m")), ShuffleErasure)
    perm = found.layer("t0 + t1 + t2").shuffling.perm
    assert perm is not None
    assert (np.arange(24).reshape(2, 3, 4).transpose(perm) == values).all()
