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


def captured(node: onnx.NodeProto) -> Iterator[str]:
    """Tensors that the subgraphs of a node read from outside."""
    for attribute in node.attribute:
        for graph in held(attribute):
            inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
            seen: set[str] = set()
            for inner in graph.node:
                for name in (*inner.input, *captured(inner)):
                    if name and name not in inside and name not in seen:
                        seen.add(name)
                        yield name
                inside.update(inner.output)
            for value in graph.output:
                if value.name not in inside and value.name not in seen:
                    seen.add(value.name)
                    yield value.name
