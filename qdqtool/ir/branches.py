"""Branches of If, bodies of Loop and Scan: layer counts, folding, conversion to models.

TensorRT's parser imports one branch of an If whose condition is constant. The other subgraphs
become conditional layers and loops, which the simulation leaves out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import NamedTuple

import onnx

from qdqtool.ir import qdq
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import CONVOLUTIONS
from qdqtool.proto.subgraphs import (
    STANDARD,
    find_captured_tensors,
    nested_graphs,
    rename_tensors,
)

_MAX_LEVELS = 50  # maximum number of levels of nested subgraphs


class SubgraphContent(NamedTuple):
    """Convolutions, matrix products and quantizers in the subgraphs of a node.

    Attributes:
        node: The If, Loop or Scan.
        convolutions: Number of Conv and ConvTranspose.
        products: Number of Gemm and MatMul.
        quantizers: Number of Q and DQ.
    """

    node: Node
    convolutions: int
    products: int
    quantizers: int


def find_subgraph_contents(model: Model) -> Iterator[SubgraphContent]:
    """Yield the content of subgraphs, for nodes with layers or quantizers in their subgraphs."""
    for node in model.nodes:
        if not node.subgraphs:
            continue
        ops = Counter(inner.op_type for g in nested_graphs([node.proto]) for inner in g.node)
        convolutions = sum(ops[op] for op in CONVOLUTIONS)
        products = ops["Gemm"] + ops["MatMul"]
        quantizers = ops[qdq.Q] + ops[qdq.DQ]
        if convolutions or products or quantizers:
            yield SubgraphContent(node, convolutions, products, quantizers)


def count_subgraphs(model: Model) -> dict[str, int]:
    """Return the numbers of layers and quantizers in all subgraphs; empty without subgraphs.

    The keys are ``convolutions``, ``matrix_products`` and ``quantizers``.
    """
    contents = list(find_subgraph_contents(model))
    if not contents:
        return {}
    return {
        "convolutions": sum(content.convolutions for content in contents),
        "matrix_products": sum(content.products for content in contents),
        "quantizers": sum(content.quantizers for content in contents),
    }


def has_nested_quantizers(model: Model) -> bool:
    """Return whether subgraphs of a model contain Q or DQ."""
    return any(content.quantizers for content in find_subgraph_contents(model))


def find_bodies(model: Model, node: Node) -> Iterator[Model]:
    """Yield the subgraphs of a node, at all levels, as models.

    Tensors of outer graphs that a subgraph reads become constants or inputs of its model.
    """
    pending = [(model, node, 1)]
    for outer, owner, level in pending:
        for graph in owner.subgraphs:
            body = _make_body(outer, graph)
            yield body
            if level < _MAX_LEVELS:
                pending.extend((body, n, level + 1) for n in body.nodes if n.subgraphs)


def _make_body(model: Model, graph: onnx.GraphProto) -> Model:
    proto = onnx.ModelProto(ir_version=model.proto.ir_version)
    proto.opset_import.extend(model.proto.opset_import)
    proto.graph.CopyFrom(graph)
    wrapper = onnx.NodeProto()
    wrapper.attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.CopyFrom(graph)
    for tensor in dict.fromkeys(find_captured_tensors(wrapper)):
        _add_captured_tensor(model, tensor, proto.graph)
    return Model(proto, model.path, sha256="part", base_dir=model.base_dir)


def _add_captured_tensor(model: Model, tensor: str, body: onnx.GraphProto) -> None:
    """Add a tensor of an outer graph to a body.

    A constant is copied with its Q and DQ. Any other tensor becomes an input.
    """
    nodes, source = [], tensor
    while (producer := model.producer(source)) is not None and qdq.is_qdq(producer):
        nodes.append(producer)
        source = producer.input(0)
    if model.constant_proto(source) is None:
        elem_type, shape = model.tensor_type(tensor)
        body.input.append(onnx.helper.make_tensor_value_info(tensor, elem_type, shape))
        return
    defined = {t.name for t in body.initializer} | {t for n in body.node for t in n.output}
    parameters = itertools.chain.from_iterable(node.inputs[1:] for node in nodes)
    for name in dict.fromkeys([source, *filter(None, parameters)]):
        if name not in defined:
            _copy_constant(model, name, body)
    for node in nodes:  # The nodes are ordered from the consumer to the constant.
        if node.output not in defined:
            body.node.insert(0, node.proto)


def _copy_constant(model: Model, name: str, body: onnx.GraphProto) -> None:
    constant = model.constant_proto(name)
    if constant is not None:
        copy = body.initializer.add()
        copy.CopyFrom(constant)
        copy.name = name


# Folding --------------------------------------------------------------------------------------


def fold_constant_branches(model: Model) -> Model:
    """Return the model with one branch in place of each If whose condition is constant.

    Returns:
        The same model if no If has a constant condition, else a changed copy.
    """
    for _ in range(_MAX_LEVELS):
        branches = dict(_find_constant_branches(model))
        if not branches:
            break
        model = _replace_nodes(model, branches)
    return model


def _find_constant_branches(model: Model) -> Iterator[tuple[int, onnx.GraphProto]]:
    evaluator = ConstantEvaluator(model)
    for node in model.nodes:
        if node.op != "If" or node.domain not in STANDARD:
            continue
        condition = evaluator.evaluate(node.input(0))
        if condition is None or condition.size != 1:
            continue
        branch = node.attributes.get("then_branch" if condition.item() else "else_branch")
        if not isinstance(branch, onnx.GraphProto) or branch.sparse_initializer:
            continue
        if len(branch.output) == len(node.outputs):
            yield node.index, branch


def _replace_nodes(model: Model, branches: dict[int, onnx.GraphProto]) -> Model:
    proto = deepcopy(model.proto)
    used = {*model.producers, *model.initializers, *model.inputs, *(n.name for n in model.nodes)}
    counts = Counter(_defined_tensors(nested_graphs(model.proto.graph.node)))
    used.update(tensor for tensor, count in counts.items() if count > 1)
    nodes: list[onnx.NodeProto] = []
    for node in model.nodes:
        branch = branches.get(node.index)
        nodes.extend([node.proto] if branch is None else _inline_branch(proto, node, branch, used))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    folded = Model(proto, model.path, model.sha256, model.base_dir)
    folded.inlined_functions = model.inlined_functions
    folded.function_node_names = model.function_node_names
    return folded


def _defined_tensors(graphs: Iterable[onnx.GraphProto]) -> Iterator[str]:
    for graph in graphs:
        yield from (tensor.name for tensor in graph.initializer)
        yield from (tensor for node in graph.node for tensor in node.output)


def _unused_name(tensor: str, prefix: str, used: set[str]) -> str:
    name = tensor if tensor not in used else f"{prefix}/{tensor}"
    while name in used:
        name += "_"
    used.add(name)
    return name


def _inline_branch(
    proto: onnx.ModelProto, node: Node, branch: onnx.GraphProto, used: set[str]
) -> list[onnx.NodeProto]:
    """Return the nodes of an If's branch, and add the branch's initializers to the main graph.

    The names in the branch are added to ``used``, the names in use.
    """
    copy = deepcopy(branch)
    produced = {tensor for inner in copy.node for tensor in inner.output}
    names: dict[str, str] = {}
    passed: list[tuple[str, str]] = []  # branch outputs that no node of the branch produces
    for value, output in zip(copy.output, node.outputs, strict=True):
        if value.name in produced and value.name not in names:
            names[value.name] = output
        else:
            passed.append((value.name, output))
    for tensor in _defined_tensors([copy]):
        if tensor and tensor not in names:
            names[tensor] = _unused_name(tensor, node.name, used)
    rename_tensors(copy.node, names)
    for inner in copy.node:
        if inner.name in used:
            inner.name = f"{node.name}/{inner.name}"
        used.add(inner.name)
    for initializer in copy.initializer:
        initializer.name = names[initializer.name]
    proto.graph.initializer.extend(copy.initializer)
    identities = [
        onnx.helper.make_node("Identity", [names.get(tensor, tensor)], [output])
        for tensor, output in passed
        if output
    ]
    return [*copy.node, *identities]
