"""The graphs that nodes hold in attributes (If, Loop, Scan)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def held(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """The graphs of one attribute."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs inside nodes, and inside the nodes of these."""
    for node in nodes:
        for attribute in node.attribute:
            for graph in held(attribute):
                yield graph
                yield from inner_graphs(graph.node)
