import numpy as np
import pytest

from qdqtool.trt.passes.shuffle_erasure import ShuffleErasure
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def test_shuffle_after_softmax_is_removed(g: Graph) -> None:
    result = run_pass(
        g.model(g.relu(g.op("Softmax", g.input(1, 8), "s", axis=1), "r")), ShuffleErasure
    )
    running, removing = result.lines
    assert running[0] == "Running" and removing == ("Removing", running[1])
    assert running[1].endswith("[Shuffle]")
    assert result.layer("r").data.producer is result.layer("s")


def test_network_output_keeps_its_name(g: Graph) -> None:
    out = g.op("Softmax", g.input(1, 8), "s", axis=1)
    assert [t.name for t in run_pass(g.model(out), ShuffleErasure).network.outputs] == [out]


def test_flatten_and_its_inverse_are_removed(g: Graph) -> None:
    # Second turn: 1x8x1x1 is flattened for the Gemm, and reshaped back for the convolution that the
    # Gemm became.
    pooled = g.op("GlobalAveragePool", g.input(1, 8, 4, 4), "gap")
    flat = g.op("Flatten", g.pair(pooled, "p"), "Flatten_301")
    result = run_pass(g.model(g.gemm(flat, "Gemm_311", 8)), ShuffleErasure, turn=1)
    # The inner pair moved up past Flatten, its DQ back down past both shuffles.
    assert ("Running", "Flatten_301 + reshape_before_Gemm_311") in result.lines
    assert ("Removing", "Flatten_301 + reshape_before_Gemm_311") in result.lines


@pytest.mark.parametrize(
    ("dims", "producer"),
    [
        # Without these shuffles, no layer would write the output.
        pytest.param((4, 4), None, id="between input and output"),
        pytest.param((2, 8), "Neg", id="other dimensions"),
    ],
)
def test_reshapes_stay(g: Graph, dims: tuple[int, int], producer: str | None) -> None:
    x = g.input(4, 4) if producer is None else g.op(producer, g.input(4, 4), "before")
    result = run_pass(g.model(g.reshape(g.reshape(x, "a", 16), "b", *dims)), ShuffleErasure)
    assert (result.lines, [t.name for t in result.network.inputs]) == ([], ["x"])


@pytest.mark.parametrize("names", [("Transpose_1", "Reshape_2"), ("a", "b")])
def test_transpose_of_equal_dimensions_stays(g: Graph, names: tuple[str, str]) -> None:
    x = g.op("Transpose", g.input(4, 4), names[0], perm=[1, 0])
    result = run_pass(g.model(g.reshape(x, names[1], 4, 4)), ShuffleErasure)
    assert not result.lines and result.has_layer(" + ".join(names))


@pytest.mark.parametrize(
    ("first", "second", "removed"),
    [
        ((0, 2, 3, 1), (0, 3, 1, 2), True),
        ((0, 2, 3, 1), (0, 2, 3, 1), False),
        ((1, 0, 2, 3), (1, 0, 2, 3), True),
        ((0, 3, 1, 2), (1, 0, 2, 3), False),
    ],
)
def test_inverse_transposes_are_removed(
    g: Graph, first: tuple[int, ...], second: tuple[int, ...], removed: bool
) -> None:
    # All dimensions are equal, so the shapes do not show whether values moved. numpy computes the
    # values.
    values = np.arange(81).reshape(3, 3, 3, 3)
    assert (values.transpose(first).transpose(second) == values).all() == removed
    x = g.op("Transpose", g.op("Neg", g.input(3, 3, 3, 3), "n"), "a", perm=first)
    result = run_pass(
        g.model(g.op("Neg", g.op("Transpose", x, "b", perm=second), "m")), ShuffleErasure
    )
    assert bool(result.lines) is removed and result.has_layer("a + b") is not removed
