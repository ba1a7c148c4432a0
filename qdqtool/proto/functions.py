"""Functions that a model defines: their size, and calls replaced by the functions' nodes.

TensorRT's parser replaces calls since 9.0. onnx's inliner leaves calls of functions of another
operator set, and gives nodes numbers as names, which do not show the call that they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx

from qdqtool.errors import ModelError
from qdqtool.proto.shapes import convert_opset
from qdqtool.proto.subgraphs import STANDARD, nested_graphs, with_subgraph_nodes
from qdqtool.util import limits

_MAX_REASON = 120  # maximum characters of onnx's error text in a message
_Key = tuple[str, str, str]  # domain, name and overload of a function


@dataclass(frozen=True, slots=True)
class _FunctionSize:
    """Size of a function with all calls replaced by the nodes of the functions.

    Attributes:
        nodes: Number of nodes.
        size: Bytes.
        levels: Length of the longest chain of calls, including this function.
    """

    nodes: int
    size: int
    levels: int


def check_functions(proto: onnx.ModelProto, path: str) -> None:
    """Check the size of a model with each call of a function replaced by its nodes.

    Thirty functions that each call the next one twice result in a billion nodes. Shape inference
    and inlining visit all of them, and copy the constants inside for each call.

    Args:
        proto: The model.
        path: Name of the model in errors.

    Raises:
        ModelError: A function calls itself, or functions call one another through more levels than
            :data:`qdqtool.util.limits.FUNCTION_LEVELS`, or there would be more nodes than
            FUNCTION_CALLS, or more bytes of copies than FUNCTION_COPIES.
    """
    if not proto.functions:
        return
    sizes = _measure_functions(proto, path)
    deepest = max(size.levels for size in sizes.values())
    if deepest > limits.FUNCTION_LEVELS:
        raise ModelError(
            f"the model's own functions are nested {deepest} levels deep; the limit is "
            f"{limits.FUNCTION_LEVELS}; export the model without functions",
            path,
            code="nested-too-deeply",
        )
    keys = [_callee_key(node) for node in with_subgraph_nodes(proto.graph.node)]
    called = [sizes[key] for key in keys if key in sizes]
    _check_totals(called, sum(f.ByteSize() for f in _functions(proto).values()), path)


def _check_totals(called: list[_FunctionSize], stored: int, path: str) -> None:
    """Check the nodes and the copies of all called functions together.

    Args:
        called: Sizes of the functions that the graph calls, one for each call.
        stored: Bytes of the functions in the file.
        path: Name of the model in errors.
    """
    total = sum(size.nodes for size in called)
    if total > limits.FUNCTION_CALLS:
        about = total if total < 10**9 else "more than a billion"
        raise ModelError(
            f"the model's own functions expand to {about} nodes; the limit is "
            f"{limits.FUNCTION_CALLS}; export the model without functions",
            path,
            code="too-many-nodes",
        )
    copies = sum(size.size for size in called) - stored
    if copies > limits.FUNCTION_COPIES:
        raise ModelError(
            "copying the contents of the model's functions for each call would take "
            f"{limits.format_excess(copies, limits.FUNCTION_COPIES)}; export the model without "
            "functions",
            path,
            code="too-many-copies",
        )


def _measure_functions(proto: onnx.ModelProto, path: str) -> dict[_Key, _FunctionSize]:
    functions = _functions(proto)
    calls = function_calls(proto)
    sizes: dict[_Key, _FunctionSize] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            called = [sizes[callee] for callee in calls[key]]
            own_nodes = sum(1 for _ in with_subgraph_nodes(functions[key].node))
            sizes[key] = _FunctionSize(
                nodes=own_nodes + sum(size.nodes for size in called),
                size=functions[key].ByteSize() + sum(size.size for size in called),
                levels=1 + max((size.levels for size in called), default=0),
            )
    except CycleError as error:
        name = next(key[1] for key in functions if key in error.args[1])
        raise ModelError(
            f"the model's own function '{name}' calls itself; the file is damaged",
            path,
            code="recursive-function",
            node=name,
        ) from None
    return sizes


def function_calls(proto: onnx.ModelProto) -> dict[_Key, list[_Key]]:
    """Return the calls that each function of a model makes, including from subgraphs.

    Functions and calls are in the order of the file.
    """
    functions = _functions(proto)
    calls: dict[_Key, list[_Key]] = {}
    for key, function in functions.items():
        keys = [_callee_key(node) for node in with_subgraph_nodes(function.node)]
        calls[key] = [callee for callee in keys if callee in functions]
    return calls


def find_called_functions(proto: onnx.ModelProto) -> list[onnx.FunctionProto]:
    """Return the functions that a model's graph calls, in the order of the file.

    Calls from subgraphs and from other functions count.
    """
    functions = _functions(proto)
    called: set[_Key] = set()
    stack = [proto.graph.node]
    while stack:
        keys = {_callee_key(node) for node in with_subgraph_nodes(stack.pop())}
        for key in keys.intersection(functions) - called:
            called.add(key)
            stack.append(functions[key].node)
    return [function for key, function in functions.items() if key in called]


def _functions(proto: onnx.ModelProto) -> dict[_Key, onnx.FunctionProto]:
    return {_function_key(function): function for function in proto.functions}


def _domain(name: str) -> str:
    return "" if name in STANDARD else name


def _function_key(function: onnx.FunctionProto) -> _Key:
    return _domain(function.domain), function.name, getattr(function, "overload", "")


def _callee_key(node: onnx.NodeProto) -> _Key:
    return _domain(node.domain), node.op_type, getattr(node, "overload", "")


# Inlining --------------------------------------------------------------------------------------


def inline_functions(proto: onnx.ModelProto, path: str) -> dict[str, str]:
    """Replace all calls of a model's own functions by their nodes, in place.

    Names of nodes and tensors in the function get the name of the call as prefix: ``layer1/Conv``.

    Args:
        proto: The model, checked by :func:`check_functions`.
        path: Name of the model in errors.

    Returns:
        Names that the inlined nodes have in the functions, by their new names.

    Raises:
        ModelError: A call has too many inputs or outputs, or a function uses an operator set that
            differs from the model's and cannot be converted.
    """
    functions = _functions(proto)
    called = {_function_key(function) for function in find_called_functions(proto)}
    calls = {key: callees for key, callees in function_calls(proto).items() if key in called}
    bodies: dict[_Key, _FunctionBody] = {}
    for key in TopologicalSorter(calls).static_order():
        function = functions[key]
        nodes = _convert_body(proto, function, path)
        scope = _InliningScope(nodes, (*function.input, *function.output), bodies, path)
        names = scope.expand()
        bodies[key] = _FunctionBody(function, list(nodes), names)
    graph = proto.graph
    boundary = [value.name for value in (*graph.input, *graph.output, *graph.initializer)]
    boundary += [sparse.values.name for sparse in graph.sparse_initializer]
    sources = _InliningScope(graph.node, boundary, bodies, path).expand()
    del proto.functions[:]
    return sources


def _convert_body(proto: onnx.ModelProto, function: onnx.FunctionProto, path: str) -> Any:
    """Return a function's nodes, converted to the operator sets of the model.

    Operator sets that the model lacks are added to the model.
    """
    versions = {_domain(opset.domain): opset.version for opset in proto.opset_import}
    for opset in function.opset_import:
        domain = _domain(opset.domain)
        if domain not in versions:
            proto.opset_import.add(domain=opset.domain, version=opset.version)
        elif not domain and not _has_same_operators(function, opset.version, versions[""]):
            return _convert_nodes(function, opset.version, versions[""], path)
    return function.node


def _has_same_operators(function: onnx.FunctionProto, version: int, model_version: int) -> bool:
    """Return whether two operator sets define the operators of a function alike."""
    nodes = with_subgraph_nodes(function.node)
    operators = {node.op_type for node in nodes if node.domain in STANDARD}
    return version == model_version or all(
        _schema_version(op, version) == _schema_version(op, model_version) for op in operators
    )


def _schema_version(op: str, version: int) -> int:
    try:
        return int(onnx.defs.get_schema(op, version).since_version)
    except onnx.defs.SchemaError:
        return 0


def _convert_nodes(
    function: onnx.FunctionProto, version: int, model_version: int, path: str
) -> Any:
    """Return a function's nodes in the operator set of the model."""
    value = onnx.helper.make_empty_tensor_value_info
    inputs, outputs = map(value, function.input), map(value, function.output)
    graph = onnx.helper.make_graph(function.node, function.name, list(inputs), list(outputs))
    opsets = [onnx.helper.make_opsetid("", version)]
    opsets += [opset for opset in function.opset_import if _domain(opset.domain)]
    try:
        if any(a.ref_attr_name for n in with_subgraph_nodes(graph.node) for a in n.attribute):
            raise ValueError("its attributes are those of the call")
        model = onnx.helper.make_model(graph, opset_imports=opsets)
        return convert_opset(model, model_version).graph.node
    except Exception as error:  # onnx's C++ raises various classes
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise ModelError(
            f"function '{function.name}' has opset {version}, but the model has opset "
            f"{model_version}, and the function cannot be converted ({reason}); export the model "
            "without functions",
            path,
            code="functions-not-inlined",
            node=function.name,
        ) from error


@dataclass(frozen=True, slots=True)
class _FunctionBody:
    """A function in which all calls of other functions are replaced by nodes.

    Attributes:
        function: The function.
        nodes: Its nodes.
        sources: Original names of inlined nodes.
    """

    function: onnx.FunctionProto
    nodes: list[onnx.NodeProto]
    sources: dict[str, str]


class _InliningScope:
    """Nodes of a graph or function, in which calls are replaced."""

    def __init__(
        self,
        nodes: MutableSequence[onnx.NodeProto],
        boundary: Iterable[str],
        bodies: Mapping[_Key, _FunctionBody],
        path: str,
    ) -> None:
        self._nodes, self._bodies, self._path = nodes, bodies, path
        self._graphs = list(nested_graphs(nodes))
        self._tensors = {*boundary, *_defined_tensors(nodes, self._graphs)}
        self._prefixes: set[str] = set()
        self._numbers: Counter[str] = Counter()
        self._sources: dict[str, str] = {}

    def expand(self) -> dict[str, str]:
        """Replace all calls and return the original names of the inlined nodes."""
        for graph in reversed(self._graphs):  # inner graphs first: outer graphs are copied
            self._expand_nodes(graph.node)
        self._expand_nodes(self._nodes)
        return self._sources

    def _expand_nodes(self, nodes: MutableSequence[onnx.NodeProto]) -> None:
        if not any(_callee_key(node) in self._bodies for node in nodes):
            return
        expanded: list[onnx.NodeProto] = []
        for node in nodes:
            body = self._bodies.get(_callee_key(node))
            expanded.extend([node] if body is None else self._copy_body(node, body))
        del nodes[:]
        nodes.extend(expanded)

    def _check_call(self, call: onnx.NodeProto, function: onnx.FunctionProto, prefix: str) -> None:
        if len(call.input) > len(function.input) or len(call.output) > len(function.output):
            raise ModelError(
                f"node '{prefix}' calls function '{function.name}' with more inputs or outputs "
                "than the function has; the file is damaged",
                self._path,
                code="node-damaged",
                node=prefix,
            )

    def _copy_body(self, call: onnx.NodeProto, body: _FunctionBody) -> list[onnx.NodeProto]:
        """Return the nodes that compute a call's outputs from its inputs."""
        function, prefix = body.function, self._unique_prefix(call)
        self._check_call(call, function, prefix)
        tensors = dict.fromkeys(function.input, "")
        tensors.update(zip(function.input, call.input, strict=False))
        copies = []
        for formal, actual in zip(function.output, call.output, strict=False):
            if formal in tensors and actual:  # an input, or an output that is listed twice
                copies.append(onnx.helper.make_node("Identity", [tensors[formal]], [actual]))
            elif actual:
                tensors[formal] = actual
        nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in body.nodes]
        attributes = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
        for node in with_subgraph_nodes(nodes):
            _set_attributes(node, attributes)
            if node.name:
                source = body.sources.get(node.name, node.name)
                node.name = f"{prefix}/{node.name}"
                self._sources[node.name] = source
        self._rename_tensors(nodes, tensors, prefix)
        return nodes + copies

    def _unique_prefix(self, call: onnx.NodeProto) -> str:
        """Return a call's name as unique prefix, with a number if another call has the name."""
        name = call.name or next(filter(None, call.output), call.op_type)
        prefix = name
        while prefix in self._prefixes:
            self._numbers[name] += 1
            prefix = f"{name}_{self._numbers[name]}"
        self._prefixes.add(prefix)
        return prefix

    def _rename_tensors(
        self, nodes: list[onnx.NodeProto], tensors: dict[str, str], prefix: str
    ) -> None:
        """Rename the tensors of a copied body.

        Inputs and outputs of the function are renamed by ``tensors``. Others get the prefix.
        """
        graphs = list(nested_graphs(nodes))
        for tensor in _defined_tensors(nodes, graphs):
            if tensor and tensor not in tensors:
                name = f"{prefix}/{tensor}"
                while name in self._tensors:
                    name += "_"
                self._tensors.add(name)
                tensors[tensor] = name
        for node in with_subgraph_nodes(nodes):
            node.input[:] = [tensors.get(tensor, tensor) for tensor in node.input]
            node.output[:] = [tensors.get(tensor, tensor) for tensor in node.output]
        for graph in graphs:
            for value in _declared_tensors(graph):
                value.name = tensors.get(value.name, value.name)
            del graph.quantization_annotation[:]


def _defined_tensors(
    nodes: Iterable[onnx.NodeProto], graphs: Iterable[onnx.GraphProto]
) -> Iterable[str]:
    """Yield the names of tensors that nodes and their subgraphs define."""
    for graph in graphs:
        yield from (value.name for value in _declared_tensors(graph))
        for node in graph.node:
            yield from node.output
    for node in nodes:
        yield from node.output


def _declared_tensors(graph: onnx.GraphProto) -> Iterable[Any]:
    """Yield the messages that name a tensor of a subgraph, apart from its nodes."""
    yield from (*graph.input, *graph.output, *graph.initializer, *graph.value_info)
    yield from (sparse.values for sparse in graph.sparse_initializer)


def _set_attributes(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> None:
    """Replace references to attributes of a function; those without a value are dropped."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return
    own = [a for a in node.attribute if not a.ref_attr_name]
    for reference in node.attribute:
        value = attributes.get(reference.ref_attr_name) if reference.ref_attr_name else None
        if value is not None:
            copy = onnx.AttributeProto.FromString(value.SerializeToString())
            copy.name = reference.name
            own.append(copy)
    del node.attribute[:]
    node.attribute.extend(own)
