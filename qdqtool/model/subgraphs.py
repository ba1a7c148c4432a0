"""Nodes as messages: what they read, what depends on what, and how many a model's own functions stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import onnx

from qdqtool.base import limits
from qdqtool.errors import ModelError

_Any = TypeVar("_Any")
STANDARD = ("", "ai.onnx")  # the domain of ONNX's own operators
DOMAINS = (*STANDARD, "com.microsoft")  # whose operators of one name mean the same
INNER_DOMAINS = ("com.microsoft.", "com.ms.")  # how those begin that onnxruntime's optimizer writes
RUN_DOMAINS = (*DOMAINS, "ai.onnx.ml")  # that onnxruntime comes with


def attribute_graphs(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """The graphs of one attribute."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def nested_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs inside nodes, and inside the nodes of these."""
    levels = [
        _graphs_of(nodes)
    ]  # no recursion: each graph would be handed up through all levels around it
    while levels:
        graph = next(levels[-1], None)
        if graph is None:
            levels.pop()
        else:
            yield graph
            levels.append(_graphs_of(graph.node))


def _graphs_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in nodes:
        if (
            node.attribute
        ):  # most nodes have none, and an iteration over them takes longer than a look
            for attribute in node.attribute:
                yield from attribute_graphs(attribute)


def with_subgraph_nodes(nodes: Collection[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, and those of their subgraphs."""
    yield from nodes
    for graph in nested_graphs(nodes):
        yield from graph.node


def all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of a model's graph, and of its own functions."""
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        yield from with_subgraph_nodes(nodes)


def rename_tensors(nodes: Collection[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Renames tensors wherever nodes read or make them, in their subgraphs as well."""
    for node in with_subgraph_nodes(nodes):
        for tensors in (node.input, node.output):
            for position, tensor in enumerate(tensors):
                if tensor in names:
                    tensors[position] = names[tensor]
    for graph in nested_graphs(nodes):
        for value in graph.output:
            value.name = names.get(value.name, value.name)


def copy_node(
    node: onnx.NodeProto, inputs: Iterable[str], outputs: Iterable[str]
) -> onnx.NodeProto:
    """A node that does the same with other tensors."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.input[:], made.output[:] = inputs, outputs
    return made


def captured_tensors(node: onnx.NodeProto) -> Iterator[str]:
    """Tensors that the subgraphs of a node read from outside."""
    for attribute in node.attribute:
        for graph in attribute_graphs(attribute):
            inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
            seen: set[str] = set()
            for inner in graph.node:
                for name in (*inner.input, *captured_tensors(inner)):
                    if name and name not in inside and name not in seen:
                        seen.add(name)
                        yield name
                inside.update(inner.output)
            for value in graph.output:
                if value.name not in inside and value.name not in seen:
                    seen.add(value.name)
                    yield value.name


def require_utf8(texts: Collection[Any], what: str) -> None:
    """Looks whether texts of a model called ``what`` are UTF-8: protobuf gives others as bytes.

    Raises:
        ModelError: One is not.
    """
    if set(map(type, texts)) - {str}:
        damaged = next(text for text in texts if type(text) is not str)
        shown = bytes(damaged[:80]).decode("utf-8", "backslashreplace")
        raise ModelError(
            f"a name is not UTF-8: '{shown}'; export the model again", what, code="wrong-encoding"
        )


def sort_topologically(
    nodes: list[_Any],
    reads: Callable[[_Any], Iterable[str]],
    makes: Callable[[_Any], Iterable[str]],
) -> list[_Any]:
    """Nodes in a topological order, by what each reads and makes: as they are where that is one; none of a cycle."""
    made = {t for n in nodes for t in makes(n) if t}
    later = set(made)
    for node in nodes:
        if not later.isdisjoint(reads(node)):
            break
        later.difference_update(makes(node))
    else:
        return nodes
    readers: dict[str, list[int]] = {t: [] for t in made}
    waiting = []
    for position, node in enumerate(nodes):
        found = [t for t in dict.fromkeys(reads(node)) if t in made]
        waiting.append(len(found))
        for tensor in found:
            readers[tensor].append(position)
    queue = [position for position, count in enumerate(waiting) if not count]
    for position in queue:
        for reader in (r for t in makes(nodes[position]) if t for r in readers[t]):
            waiting[reader] -= 1
            if not waiting[reader]:
                queue.append(reader)
    return [nodes[position] for position in queue]


_Key = tuple[str, str, str]


def find_dependencies(
    nodes: Sequence[onnx.NodeProto], tensors: Iterable[str], given: Container[str] = ()
) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that tensors depend on, those ``given`` apart, and the tensors with all that these nodes read.

    The nodes are a graph's, each behind those that it reads, and so are the results.
    """
    needed = set(tensors)
    kept = []
    for node in reversed(nodes):
        if any(t and t in needed and t not in given for t in node.output):
            kept.append(node)
            needed.update((*node.input, *captured_tensors(node)))
    return kept[::-1], needed


_HEADER = (
    "ir_version",
    "producer_name",
    "producer_version",
    "domain",
    "model_version",
    "doc_string",
)


def extract_part(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    outputs: Iterable[onnx.ValueInfoProto],
    constants: Iterable[onnx.TensorProto],
    given: Container[str] = (),
) -> tuple[onnx.ModelProto, set[str]]:
    """The part of a model that some outputs depend on, and the tensors that it needs, see :func:`find_dependencies`.

    Opsets, functions and metadata are those of the whole; inputs and types are for the caller to state.

    Args:
        proto: The whole.
        nodes: Those of its nodes to choose from, each behind those that it reads.
        outputs: The part's.
        constants: Those of its initializers to choose from.
        given: Tensors that will be fed instead.
    """
    result = onnx.ModelProto()
    graph, whole = result.graph, proto.graph
    graph.output.extend(outputs)
    kept, needed = find_dependencies(nodes, (v.name for v in graph.output), given)
    for field in _HEADER:
        if proto.HasField(field):
            setattr(result, field, getattr(proto, field))
    result.opset_import.extend(proto.opset_import)
    result.functions.extend(proto.functions)
    result.metadata_props.extend(proto.metadata_props)
    graph.name, graph.doc_string = whole.name, whole.doc_string
    graph.metadata_props.extend(whole.metadata_props)
    graph.node.extend(kept)
    graph.initializer.extend(t for t in constants if t.name in needed)
    sparse = (
        t
        for t in whole.sparse_initializer
        if t.values.name in needed and t.values.name not in given
    )
    graph.sparse_initializer.extend(sparse)
    named = needed.union(*(n.output for n in kept)) if whole.quantization_annotation else needed
    graph.quantization_annotation.extend(
        a for a in whole.quantization_annotation if a.tensor_name in named
    )
    return result, needed


def check_functions(proto: onnx.ModelProto, what: str) -> None:
    """Counts the nodes of a model, called ``what`` in messages, with each call of a function replaced by its nodes.

    Thirty functions that each call the next one twice are a billion nodes; shape inference and inlining follow all, and
    copy the constants inside for each call.

    Raises:
        ModelError: A function calls itself, or functions call one another through more levels than
            :data:`qdqtool.base.limits.FUNCTION_LEVELS`, or there would be more nodes than FUNCTION_CALLS, or more
            copies than FUNCTION_COPIES.
    """
    if not proto.functions:
        return
    from graphlib import CycleError, TopologicalSorter

    functions = _functions(proto)
    calls = function_calls(proto)
    own = {key: sum(1 for _ in with_subgraph_nodes(f.node)) for key, f in functions.items()}
    own_bytes = {key: f.ByteSize() for key, f in functions.items()}
    sizes: dict[_Key, int] = {}
    copied: dict[_Key, int] = {}
    levels: dict[_Key, int] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            sizes[key] = own[key] + sum(sizes[c] for c in calls[key])
            copied[key] = own_bytes[key] + sum(copied[c] for c in calls[key])
            levels[key] = 1 + max((levels[c] for c in calls[key]), default=0)
    except CycleError as error:
        name = next(key[1] for key in functions if key in error.args[1])
        raise ModelError(
            f"the model's own function '{name}' calls itself; the file is damaged",
            what,
            code="recursive-function",
            node=name,
        ) from None
    deepest = max(levels.values())
    if deepest > limits.FUNCTION_LEVELS:
        raise ModelError(
            f"its own functions call one another through {deepest} levels; the limit is "
            f"{limits.FUNCTION_LEVELS}; export the model without functions",
            what,
            code="nested-too-deeply",
        )
    calling = [_called(n) for n in with_subgraph_nodes(proto.graph.node)]
    total = sum(sizes.get(c, 0) for c in calling)
    if total > limits.FUNCTION_CALLS:
        about = total if total < 10**9 else "more than a billion"
        raise ModelError(
            f"its own functions stand for {about} nodes; the limit is "
            f"{limits.FUNCTION_CALLS}; export the model without functions",
            what,
            code="too-many-nodes",
        )
    copies = sum(copied.get(c, 0) for c in calling) - sum(own_bytes.values())
    if copies > limits.FUNCTION_COPIES:
        raise ModelError(
            "what its own functions hold would be copied for each call, which takes "
            f"{limits.format_excess(copies, limits.FUNCTION_COPIES)}; export the model without functions",
            what,
            code="too-many-copies",
        )


def function_calls(proto: onnx.ModelProto) -> dict[_Key, list[_Key]]:
    """What each of a model's functions calls of them, also from subgraphs, in the file's order."""
    functions = _functions(proto)
    return {
        key: [c for n in with_subgraph_nodes(f.node) if (c := _called(n)) in functions]
        for key, f in functions.items()
    }


def called_functions(proto: onnx.ModelProto) -> list[onnx.FunctionProto]:
    """The functions that a model's graph calls, also from subgraphs and other functions, in the file's order."""
    functions = _functions(proto)
    found: set[_Key] = set()
    work = [proto.graph.node]
    while work:
        for key in {_called(n) for n in with_subgraph_nodes(work.pop())} & set(functions) - found:
            found.add(key)
            work.append(functions[key].node)
    return [f for key, f in functions.items() if key in found]


def _functions(proto: onnx.ModelProto) -> dict[_Key, onnx.FunctionProto]:
    return {_key(f.domain, f.name, getattr(f, "overload", "")): f for f in proto.functions}


def _key(domain: str, name: str, overload: str) -> _Key:
    return "" if domain == "ai.onnx" else domain, name, overload


def _called(node: onnx.NodeProto) -> _Key:
    return _key(node.domain, node.op_type, getattr(node, "overload", ""))
