"""CancelDQThenQ: documented; scales decide."""

from __future__ import annotations

from qdqtool.trt.passes.cancel_dq_then_q import CancelDQThenQ
from qdqtool.types import Evidence
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_equal_scales() -> None:
    g = Graph()
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    found = step(g.model(g.conv(x, "c")), CancelDQThenQ)
    assert found.rows == [("Removing", "c.in.Q"), ("Removing", "a.DQ")]
    reader = found.layer("c.in.DQ")
    assert reader.data.producer is found.layer("a.Q")
    assert reader.attrs["evidence"] == Evidence.DOCUMENTED


def test_dq_with_another_reader_stays() -> None:
    g = Graph()
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    found = step(g.model(g.conv(x, "c"), g.op("Neg", x, "n")), CancelDQThenQ)
    assert found.rows == [("Removing", "c.in.Q")]
    assert found.has("a.DQ")


def test_different_scales_are_refused() -> None:
    g = Graph()
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a", 0.2)
    found = step(g.model(g.conv(x, "c")), CancelDQThenQ)
    assert found.rows == []
    assert found.reasons == [("c.in.Q", "scales-differ")]


def test_q_that_writes_a_network_output_stays() -> None:
    g = Graph()
    x = g.pair(g.op("Sigmoid", g.input(1, 3, 4, 4), "s"), "a")
    assert step(g.model(g.q(x, "out")), CancelDQThenQ).rows == []


def test_q_behind_something_else_is_left() -> None:
    g = Graph()
    assert step(g.model(g.conv(g.relu(g.input(1, 3, 4, 4), "r"), "c")), CancelDQThenQ).rows == []
