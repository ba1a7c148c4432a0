"""Nodes of two graphs find each other by structure, whatever they are called."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.comparing.matching import match
from qdqtool.graph import Model
from qdqtool.onnxgraph.view import View
from tests.comparing.networks import float_network, network
from tests.trt.builder import Graph


def pairs(first: onnx.ModelProto, second: onnx.ModelProto) -> dict[str, str]:
    one = Model(first)
    return {one.nodes[i].name: n.name for i, n in match(View(one), View(Model(second))).pairs.items()}


def test_equal_graphs_match_node_by_node() -> None:
    found = pairs(float_network(), float_network())
    assert found == {n.name: n.name for n in float_network().graph.node}


def test_quantizers_are_looked_through() -> None:
    found = pairs(float_network(), network())
    assert found == {n.name: n.name for n in float_network().graph.node}


@pytest.mark.parametrize("blocks", [1, 3, 12])
def test_other_names_match_by_structure(blocks: int) -> None:
    found = pairs(network(blocks, names="b"), network(blocks, names="layer", scale=0.3))
    assert found == {n: n.replace("b", "layer", 1) for n in found}
    assert len(found) == len(float_network(blocks).graph.node)


def test_a_block_left_out_has_no_partner() -> None:
    found = pairs(network(4), network(4, left_out=3))
    assert "b3.a" not in found and "b3.b" not in found
    assert all(a == b for a, b in found.items())
    assert {"b.stem", "b0.a", "b0.b", "b1.a", "b1.b", "b2.a", "b2.b"} <= set(found)


def test_names_that_moved_by_one_are_not_believed() -> None:
    """An exporter that numbers its nodes: with one convolution less, the same name is another convolution."""
    def chain(sizes: list[int]) -> onnx.ModelProto:
        g = Graph()
        x = g.input(1, 3, 8, 8)
        for i, size in enumerate(sizes):
            x = g.relu(g.conv(x, f"Conv_{i}", size, scale=None, weights="float"), f"Relu_{i}")
        return g.model(x)

    found = pairs(chain([4, 8, 8, 8, 16, 32, 16, 8, 4, 12]), chain([8, 8, 8, 16, 32, 16, 8, 4, 12]))
    assert {a: b for a, b in found.items() if a.startswith("Conv") and int(a[5:]) >= 4} == {
        f"Conv_{i}": f"Conv_{i - 1}" for i in range(4, 10)
    }


def test_parallel_branches_of_one_shape_match_by_name() -> None:
    def branches(order: list[str]) -> onnx.ModelProto:
        g = Graph()
        x = g.input(1, 4, 8, 8)
        made = {name: g.conv(x, name, scale=None, weights="float") for name in order}
        return g.model(g.concat([made["p"], made["q"], made["r"]], "cat"))

    found = pairs(branches(["p", "q", "r"]), branches(["r", "p", "q"]))
    assert found == {n: n for n in ("p", "q", "r", "cat")}


@given(st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from(["b", "x/y"]))
def test_no_node_has_two_partners_and_partners_are_alike(blocks: int, half: bool, quantized: bool, names: str) -> None:
    first = network(blocks) if quantized else float_network(blocks)
    second = network(blocks + half, names=names)
    one, two = Model(first), Model(second)
    found = match(View(one), View(two)).pairs
    assert len({n.index for n in found.values()}) == len(found)
    assert all(one.nodes[i].op == n.op for i, n in found.items())


def test_different_networks_share_nothing() -> None:
    g = Graph()
    other = g.model(g.conv(g.input(1, 3, 9, 9), "c", 5, k=5, scale=None, weights="float"))
    assert not any(a.startswith("b") and a.endswith((".a", ".b")) for a in pairs(float_network(), other))
