"""The reason that is told where Qs of a tensor, or the parts of a Concat, have scales that differ."""

import numpy as np
import pytest

from tests.explain.graphs import concat, outcome, split
from tests.trt.builder import Graph


@pytest.mark.parametrize(("outer", "expected"), [(0.05, False), (0.02, True)])
def test_pool_scales(outer, expected):
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
    a = g.conv(x, "direct", 16, scale=outer)
    b = g.conv(g.pool(x, "pool"), "pooled", 16, scale=0.05)
    _, codes = outcome(g.model(a, b))
    assert ("POOL-SCALE" in codes) is expected
    if expected:
        assert "0.02 (direct.in.Q)" in codes["POOL-SCALE"].message
        assert "0.05 (pooled.in.Q)" in codes["POOL-SCALE"].message


def test_siblings():
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
    prediction, codes = outcome(g.model(g.conv(x, "a", 16, scale=0.02), g.conv(x, "b", 16, scale=0.05)))
    found = codes["SIBLING-SCALE"]
    assert "0.02 (a.in.Q), 0.05 (b.in.Q)" in found.message
    assert "one scale, 0.05" in found.fix and f"{np.log2(0.05 / 0.02):.1f} bits" in found.fix
    assert prediction.conversions == 3  # the input's, and one for each


def test_concat_scales():
    _, codes = outcome(concat((0.0213, 0.0213, 0.048), 0.048))
    found = codes["CONCAT-SCALE"]
    assert found.node == "join"
    assert "join takes scales 0.0213, 0.0213, 0.048 and is quantized with 0.048" in found.message
    assert set(found.convolutions) >= {"c0", "c1"} and "c2" not in found.convolutions


def test_concat_of_equal_scales():
    prediction, codes = outcome(concat((0.048, 0.048, 0.048), 0.048))
    assert "CONCAT-SCALE" not in codes
    assert prediction.conversions == 1


def test_split_scales():
    _, codes = outcome(split(0.02, 0.05))
    assert codes["SPLIT-SCALE"].node == "cut"
    assert "SPLIT-SCALE" not in outcome(split(0.05, 0.05))[1]


def test_pair_behind_pad():
    g = Graph()
    x = g.relu(g.input(1, 16, 8, 8), "r")
    pads = g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    y = g.op("Pad", [x, pads], "pad")
    assert "PAD-SPLIT" in outcome(g.model(g.conv(y, "c", 16)))[1]


def test_concat_scale_counts_the_bits_of_the_smallest_part():
    g = Graph()
    a = g.pair(g.pool(g.conv(g.input(1, 16, 8, 8), "c0", 16), "p", k=3, stride=1), "a", 0.05)
    b = g.pair(g.conv("x", "c1", 16), "b", 0.1)
    _, codes = outcome(g.model(g.conv(g.concat([a, b], "cat"), "c2", 16, scale=0.2)))
    assert "loses 2.0 bits" in codes["CONCAT-SCALE"].fix  # log2(0.2 / 0.05)


def test_a_pair_in_front_of_a_resize_and_a_q_behind_the_concat_tell_both_scales():
    """What the Q behind the Concat meets is the pair's own scale, whichever quantizers read the tensor between them."""
    g = Graph()
    low = g.pair(g.input(1, 16, 8, 8), "low", 0.045)
    joined = g.concat([g.resize(low, "up"), g.input(1, 16, 16, 16, name="y")], "join")
    _, codes = outcome(g.model(g.pair(joined, "joined", 0.06), low))
    assert "join (Concat) stands between scales 0.045 (low.Q) and 0.06 (joined.Q)" in codes["CONCAT-SCALE"].message
    assert "0.06 (the smallest range loses 0.4 bits)" in codes["CONCAT-SCALE"].fix  # log2(0.06 / 0.045)
