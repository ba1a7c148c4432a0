"""Functions that a model defines: check of their size, and inlining.

TensorRT's parser inlines functions from version 9.0 on. The inliner of onnx is not used here: it
cannot inline functions of another operator set, and it gives nodes names that do not show the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableSequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import onnx

from qdqtool.errors import ModelError
from qdqtool.proto.shapes import convert_opset
from qdqtool.proto.subgraphs import STANDARD, nested_graphs, with_subgraph_nodes
from qdqtool.util import limits

_MAX_REASON = 120  # maximum number of characters of onnx's error text in a message
_Key = tuple[str, str, str]  # domain, name and overload of a function


class _FunctionSize(NamedTuple):
    """Size of a function after all calls in it are inlined.

    Attributes:
        nodes: Number of nodes.
        size: Size of the function in bytes, with a copy of the called function for each call.
        levels: Length of the longest chain of nested calls, including this function.
    """

    nodes: int
    size: int
    levels: int


def check_function_sizes(proto: onnx.ModelProto, path: str) -> None:
    """Raise an error if a model would be too large after its functions are inlined.

    For example, thirty functions that each call the next function twice result in a billion nodes.
    Shape inference and inlining visit all nodes, and copy constants for each call.

    Raises:
        ModelError: A function calls itself; or the model would exceed FUNCTION_LEVELS levels of
            calls, FUNCTION_CALLS nodes, or FUNCTION_COPIES bytes of copies (see
            :mod:`qdqtool.util.limits`).
    """
    if not proto.functions:
        return
    sizes = _measure_functions(proto, path)
    deepest = max(size.levels for size in sizes.values())
    if deepest > limits.FUNCTION_LEVELS:
        raise ModelError(
            f"the model-local functions are nested {deepest} levels deep, more than the limit of "
            f"{limits.FUNCTION_LEVELS}; export the model without functions",
            path,
            code="nested-too-deeply",
        )
    keys = [_callee_key(node) for node in with_subgraph_nodes(proto.graph.node)]
    called = [sizes[key] for key in keys if key in sizes]
    _check_inlined_size(called, sum(f.ByteSize() for f in _functions_by_key(proto).values()), path)


def _check_inlined_size(called: list[_FunctionSize], stored: int, path: str) -> None:
    total = sum(size.nodes for size in called)
    if total > limits.FUNCTION_CALLS:
        about = total if total < 10**9 else "more than a billion"
        raise ModelError(
            f"the model's own functions expand to {about} nodes, more than the limit of "
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
    functions = _functions_by_key(proto)
    calls = _function_calls(proto)
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
            f"the model's own function '{name}' calls itself; the file is damaged, export it again",
            path,
            code="recursive-function",
            node=name,
        ) from None
    return sizes


def _function_calls(proto: onnx.ModelProto) -> dict[_Key, list[_Key]]:
    """Return the functions that each function of a model calls, one entry for each call.

    Calls in subgraphs count. Functions and calls are in the order of the file.
    """
    functions = _functions_by_key(proto)
    calls: dict[_Key, list[_Key]] = {}
    for key, function in functions.items():
        keys = [_callee_key(node) for node in with_subgraph_nodes(function.node)]
        calls[key] = [callee for callee in keys if callee in functions]
    return calls


def _find_called_functions(proto: onnx.ModelProto) -> list[onnx.FunctionProto]:
    """Return the functions that a model's graph calls directly or indirectly, in file order."""
    functions = _functions_by_key(proto)
    called: set[_Key] = set()
    stack = [proto.graph.node]
    while stack:
        keys = {_callee_key(node) for node in with_subgraph_nodes(stack.pop())}
        for key in keys.intersection(functions) - called:
            called.add(key)
            stack.append(functions[key].node)
    return [function for key, function in functions.items() if key in called]


def _functions_by_key(proto: onnx.ModelProto) -> dict[_Key, onnx.FunctionProto]:
    return {_function_key(function): function for function in proto.functions}


def _normalize_domain(name: str) -> str:
    return "" if name in STANDARD else name


def _function_key(function: onnx.FunctionProto) -> _Key:
    return _normalize_domain(function.domain), function.name, function.overload


def _callee_key(node: onnx.NodeProto) -> _Key:
    return _normalize_domain(node.domain), node.op_type, node.overload


# Inlining --------------------------------------------------------------------------------------


def inline_functions(proto: onnx.ModelProto, path: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Inline all calls of a model's own functions, in place.

    The names of inlined nodes and tensors begin with the name of the call: ``layer1/Conv``. Call
    :func:`check_function_sizes` before.

    Returns:
        Names of the functions that were called, and the names that inlined nodes had in their
        functions, by new name.

    Raises:
        ModelError: A call has too many inputs or outputs, or a function uses an operator set that
            differs from the model's and cannot be converted.
    """
    functions = _functions_by_key(proto)
    called = _find_called_functions(proto)
    names = tuple(dict.fromkeys(function.name for function in called))
    keys = set(map(_function_key, called))
    calls = {key: callees for key, callees in _function_calls(proto).items() if key in keys}
    bodies: dict[_Key, _FunctionBody] = {}
    for key in TopologicalSorter(calls).static_order():
        function = functions[key]
        nodes = _convert_body(proto, function, path)
        scope = _InliningScope(nodes, (*function.input, *function.output), bodies, path)
        node_names = scope.expand()
        bodies[key] = _FunctionBody(function, list(nodes), node_names)
    graph = proto.graph
    boundary = [value.name for value in (*graph.input, *graph.output, *graph.initializer)]
    boundary += [sparse.values.name for sparse in graph.sparse_initializer]
    sources = _InliningScope(graph.node, boundary, bodies, path).expand()
    del proto.functions[:]
    return names, sources


def _convert_body(proto: onnx.ModelProto, function: onnx.FunctionProto, path: str) -> Any:
    """Return a function's nodes, converted to the operator sets of the model if necessary.

    Operator sets that only the function uses are added to the model, in place.

    Raises:
        ModelError: The nodes cannot be converted.
    """
    versions = {_normalize_domain(opset.domain): opset.version for opset in proto.opset_import}
    for opset in function.opset_import:
        domain = _normalize_domain(opset.domain)
        if domain not in versions:
            proto.opset_import.add(domain=opset.domain, version=opset.version)
        elif not domain and not _has_same_operators(function, opset.version, versions[""]):
            return _convert_nodes(function, opset.version, versions[""], path)
    return function.node


def _has_same_operators(function: onnx.FunctionProto, version: int, model_version: int) -> bool:
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
    make_info = onnx.helper.make_empty_tensor_value_info
    inputs, outputs = map(make_info, function.input), map(make_info, function.output)
    graph = onnx.helper.make_graph(function.node, function.name, list(inputs), list(outputs))
    opsets = [onnx.helper.make_opsetid("", version)]
    opsets += [opset for opset in function.opset_import if _normalize_domain(opset.domain)]
    try:
        if any(a.ref_attr_name for n in with_subgraph_nodes(graph.node) for a in n.attribute):
            raise ValueError("its nodes refer to attributes of the call")
        model = onnx.helper.make_model(graph, opset_imports=opsets)
        return convert_opset(model, model_version).graph.node
    except Exception as error:  # onnx's C++ code raises errors of various classes
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise ModelError(
            f"function '{function.name}' has opset {version}, but the model has opset "
            f"{model_version}, and the function cannot be converted ({reason}); export the model "
            "without functions",
            path,
            code="functions-not-inlined",
            node=function.name,
        ) from error


class _FunctionBody(NamedTuple):
    """A function after all calls in it are inlined.

    Attributes:
        function: The function.
        nodes: Nodes of the function and of inlined functions.
        sources: Names that inlined nodes had in their functions, by new name.
    """

    function: onnx.FunctionProto
    nodes: list[onnx.NodeProto]
    sources: dict[str, str]


class _InliningScope:
    """Inlines the calls in the nodes of a graph or function.

    Args:
        nodes: The nodes, changed in place.
        boundary: Names of inputs, outputs and initializers.
        bodies: Functions whose own calls are inlined already.
        path: Path of the model for messages.
    """

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
        """Inline all calls; return the original names of inlined nodes by new name."""
        # Inner graphs first, because expanding an outer graph replaces its nodes by copies.
        for graph in reversed(self._graphs):
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

    def _check_call_arity(
        self, call: onnx.NodeProto, function: onnx.FunctionProto, prefix: str
    ) -> None:
        if len(call.input) > len(function.input) or len(call.output) > len(function.output):
            raise ModelError(
                f"node '{prefix}' calls function '{function.name}' with more inputs or outputs "
                "than the function has; the file is damaged, export it again",
                self._path,
                code="node-damaged",
                node=prefix,
            )

    def _copy_body(self, call: onnx.NodeProto, body: _FunctionBody) -> list[onnx.NodeProto]:
        function, prefix = body.function, self._unique_prefix(call)
        self._check_call_arity(call, function, prefix)
        tensors = dict.fromkeys(function.input, "")
        tensors.update(zip(function.input, call.input, strict=False))
        copies = []
        for formal, actual in zip(function.output, call.output, strict=False):
            if formal in tensors and actual:  # the output is also an input, or is listed twice
                copies.append(onnx.helper.make_node("Identity", [tensors[formal]], [actual]))
            elif actual:
                tensors[formal] = actual
        nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in body.nodes]
        attributes = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
        for node in with_subgraph_nodes(nodes):
            _resolve_attribute_references(node, attributes)
            if node.name:
                source = body.sources.get(node.name, node.name)
                node.name = f"{prefix}/{node.name}"
                self._sources[node.name] = source
        self._rename_tensors(nodes, tensors, prefix)
        return nodes + copies

    def _unique_prefix(self, call: onnx.NodeProto) -> str:
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
        """Rename the tensors in copied nodes of a function, in place.

        ``tensors`` has the new names of the function's inputs and outputs. The new names of other
        tensors, which begin with the prefix, are added.
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
    for graph in graphs:
        yield from (value.name for value in _declared_tensors(graph))
        for node in graph.node:
            yield from node.output
    for node in nodes:
        yield from node.output


def _declared_tensors(graph: onnx.GraphProto) -> Iterable[Any]:
    yield from (*graph.input, *graph.output, *graph.initializer, *graph.value_info)
    yield from (sparse.values for sparse in graph.sparse_initializer)


def _resolve_attribute_references(
    node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]
) -> None:
    """Replace references to a function's attributes by their values, in place.

    References without a value are removed.
    """
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return
    resolved = [a for a in node.attribute if not a.ref_attr_name]
    for reference in node.attribute:
        value = attributes.get(reference.ref_attr_name) if reference.ref_attr_name else None
        if value is not None:
            copy = onnx.AttributeProto.FromString(value.SerializeToString())
            copy.name = reference.name
            resolved.append(copy)
    del node.attribute[:]
    node.attribute.extend(resolved)
