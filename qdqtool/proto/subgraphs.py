"""Operations on protobuf nodes: subgraphs, dependencies, and extraction of submodels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_Node = TypeVar("_Node")
STANDARD = ("", "ai.onnx")  # both names of the domain of ONNX's own operators
DOMAINS = (*STANDARD, "com.microsoft")  # domains in which a name stands for one operator
INNER_DOMAINS = ("com.microsoft.", "com.ms.")  # prefixes of domains of onnxruntime's optimizer
RUN_DOMAINS = (*DOMAINS, "ai.onnx.ml")  # domains that onnxruntime supports


def attribute_graphs(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that an attribute contains."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def subgraphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that the attributes of a node contain."""
    for attribute in node.attribute:
        yield from attribute_graphs(attribute)


def nested_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """Yield all subgraphs of nodes, including subgraphs of subgraphs."""
    # A recursive generator would pass each graph through all levels above it, which is slow.
    levels = [_direct_graphs(nodes)]
    while levels:
        graph = next(levels[-1], None)
        if graph is None:
            levels.pop()
        else:
            yield graph
            levels.append(_direct_graphs(graph.node))


def _direct_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in nodes:
        # Most nodes have no attributes. The check is faster than iterating over an empty list.
        if node.attribute:
            yield from subgraphs_of(node)


def with_subgraph_nodes(nodes: Collection[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, and then the nodes of all their subgraphs."""
    yield from nodes
    for graph in nested_graphs(nodes):
        yield from graph.node


def all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of a model: of the graph, of its own functions, and of all subgraphs."""
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        yield from with_subgraph_nodes(nodes)


def remove_unused_opsets(proto: onnx.ModelProto) -> None:
    """Remove the operator sets of domains that no node uses, in place; ONNX's own remain."""
    used = {*STANDARD, *(node.domain for node in all_nodes(proto))}
    for position in reversed(range(len(proto.opset_import))):
        if proto.opset_import[position].domain not in used:
            del proto.opset_import[position]


def rename_tensors(nodes: Collection[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename tensors in the inputs and outputs of nodes and of their subgraphs, in place."""
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
    """Return a copy of a node with the given inputs and outputs."""
    copy = deepcopy(node)
    copy.input[:], copy.output[:] = inputs, outputs
    return copy


def find_captured_tensors(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the outer tensors that the subgraphs of a node read, once for each subgraph."""
    for graph in subgraphs_of(node):
        yield from find_outside_tensors(graph)


def find_outside_tensors(graph: onnx.GraphProto) -> Iterable[str]:
    """Return the outer tensors that a subgraph reads."""
    inside = {value.name for value in graph.input} | {t.name for t in graph.initializer}
    outside: dict[str, None] = {}
    for node in graph.node:
        for name in (*node.input, *find_captured_tensors(node)):
            if name and name not in inside:
                outside[name] = None
        inside.update(node.output)
    outside.update(dict.fromkeys(v.name for v in graph.output if v.name not in inside))
    return outside


def message_fields(message: Message) -> Iterator[tuple[Any, Any]]:
    """Yield the descriptor and the values of each field that is set in a message."""
    for field, value in message.ListFields():
        yield field, value if is_repeated(field) else [value]


@functools.cache  # protobuf takes long to read a property of a descriptor
def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field of a message is a list."""
    is_new = hasattr(field, "is_repeated")
    return bool(field.is_repeated if is_new else field.label == field.LABEL_REPEATED)


def sort_topologically(
    nodes: list[_Node],
    inputs: Callable[[_Node], Iterable[str]],
    outputs: Callable[[_Node], Iterable[str]],
) -> list[_Node]:
    """Return nodes in topological order, without nodes on a cycle or downstream of a cycle.

    If the nodes are in a topological order already, their order is kept.

    Args:
        nodes: Nodes of a graph.
        inputs: Function that returns the tensors that a node consumes.
        outputs: Function that returns the tensors that a node produces.
    """
    produced = set(itertools.chain.from_iterable(map(outputs, nodes))) - {""}
    if _is_sorted(nodes, inputs, outputs, produced):
        return nodes
    # For each node, the number of inputs whose producers are not yet in the order.
    missing = [len(produced.intersection(inputs(node))) for node in nodes]
    consumers = _index_consumers(nodes, inputs, produced)
    queue = [position for position, count in enumerate(missing) if not count]
    for position in queue:
        for tensor in outputs(nodes[position]):
            for consumer in consumers.get(tensor, ()):
                missing[consumer] -= 1
                if not missing[consumer]:
                    queue.append(consumer)
    return [nodes[position] for position in queue]


def _index_consumers(
    nodes: list[_Node], inputs: Callable[[_Node], Iterable[str]], produced: set[str]
) -> dict[str, list[int]]:
    consumers: dict[str, list[int]] = {tensor: [] for tensor in produced}
    for position, node in enumerate(nodes):
        for tensor in dict.fromkeys(inputs(node)):
            if tensor in consumers:
                consumers[tensor].append(position)
    return consumers


def _is_sorted(
    nodes: list[_Node],
    inputs: Callable[[_Node], Iterable[str]],
    outputs: Callable[[_Node], Iterable[str]],
    produced: set[str],
) -> bool:
    later = set(produced)
    for node in nodes:
        if not later.isdisjoint(inputs(node)):
            return False
        later.difference_update(outputs(node))
    return True


# Parts of models -------------------------------------------------------------------------------

_HEADER = (
    "ir_version",
    "producer_name",
    "producer_version",
    "domain",
    "model_version",
    "doc_string",
    "name",
)


def find_dependencies(
    nodes: Sequence[onnx.NodeProto], tensors: Iterable[str], fed: Container[str] = ()
) -> tuple[list[onnx.NodeProto], set[str]]:
    """Find the nodes on which some tensors depend.

    Args:
        nodes: Nodes of a graph in topological order, which the result keeps.
        tensors: Tensors to compute.
        fed: Tensors that the caller supplies, whose producers are therefore not needed.

    Returns:
        The nodes, and the names of the tensors and of all inputs of the nodes.
    """
    needed = set(tensors)
    dependencies = []
    for node in reversed(nodes):
        if any(tensor and tensor in needed and tensor not in fed for tensor in node.output):
            dependencies.append(node)
            needed.update((*node.input, *find_captured_tensors(node)))
    return dependencies[::-1], needed


def extract_submodel(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    outputs: Iterable[onnx.ValueInfoProto],
    constants: Iterable[onnx.TensorProto],
    fed: Container[str] = (),
) -> tuple[onnx.ModelProto, set[str]]:
    """Return the part of a model on which some outputs depend, and the tensors that it needs.

    Opsets, functions and metadata are those of the whole model. The caller adds inputs and types.

    Args:
        proto: The whole model.
        nodes: Nodes of the model to select from, in topological order.
        outputs: Outputs of the part.
        constants: Initializers of the model to select from.
        fed: Tensors that become inputs of the part, whose producers are therefore left out.
    """
    part = onnx.ModelProto()
    part.graph.output.extend(outputs)
    part_nodes, needed = find_dependencies(nodes, (v.name for v in part.graph.output), fed)
    copy_header(proto, part)
    graph, whole = part.graph, proto.graph
    graph.node.extend(part_nodes)
    graph.initializer.extend(tensor for tensor in constants if tensor.name in needed)
    graph.sparse_initializer.extend(
        sparse
        for sparse in whole.sparse_initializer
        if sparse.values.name in needed and sparse.values.name not in fed
    )
    tensors = needed.union(*(node.output for node in part_nodes))
    graph.quantization_annotation.extend(
        annotation
        for annotation in whole.quantization_annotation
        if annotation.tensor_name in tensors
    )
    return part, needed


def copy_header(proto: onnx.ModelProto, part: onnx.ModelProto) -> None:
    """Copy operator sets, functions, metadata and documentation of a model to an empty model.

    Documentation that is not UTF-8 is left out, because protobuf does not accept it.
    """
    for source, copy in ((proto, part), (proto.graph, part.graph)):
        for field, value in source.ListFields():
            if field.name in _HEADER and not isinstance(value, bytes):
                setattr(copy, field.name, value)
        copy.metadata_props.extend(source.metadata_props)
    part.opset_import.extend(proto.opset_import)
    part.functions.extend(proto.functions)
