"""Shape inference of models that we did not write, in bounded memory.

onnx's inference follows values that may be shapes ("data propagation"): it makes a dimension for each entry of a
vector, whatever its declared length, so that a Concat of an input of 2^40 entries, in a file of 62 bytes, takes all
memory. An Expand does so even without it, and ranks double where a Gather reads a tensor at the places that it holds
itself. Here ranks and lengths are bounded first, node by node, by plain arithmetic; nodes that are not shown to stay
small are hidden from onnx.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx

from qdqtool import budgets
from qdqtool.extents import ANY, FOLLOWED, UNTYPED, Extent, as_known, of_dims, of_type, output_of, ranked
from qdqtool.subgraphs import held, inner_graphs

_HIDDEN = "qdqtool.hidden"
_STANDARD = ("", "ai.onnx")
_ROUNDS = 4

Types = dict[str, onnx.TypeProto]


def infer(proto: onnx.ModelProto) -> Types | None:
    """The types of the tensors of a model's main graph, as onnx infers them.

    Args:
        proto: The model, best without large weights; it is as before at the end.

    Returns:
        Types by tensor; None where inference fails. Dimensions stay unknown behind a rank above
        :data:`qdqtool.budgets.RANK`, and where a vector of more than :data:`qdqtool.budgets.SHAPE_ENTRIES` entries, or
        of unknown length, takes part in the computation of a shape.
    """
    return _Inference(proto).types(follow=True)


def grows(proto: onnx.ModelProto) -> bool:
    """Whether onnx's inference, without data propagation, could need much more memory than the file is large.

    Args:
        proto: The model; it is as before at the end.
    """
    inference = _Inference(proto)
    inference.types(follow=False)
    return bool(inference.hidden)


def stays_small(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], version: int) -> bool:
    """Whether onnx's inference of one node needs little memory.

    Args:
        node: The node.
        types: Of its inputs.
        version: Of the operator set.
    """
    proto = onnx.ModelProto(opset_import=[onnx.helper.make_opsetid("", version)])
    proto.graph.node.append(node)
    proto.graph.value_info.extend(onnx.ValueInfoProto(name=name, type=kind) for name, kind in types.items())
    return not _Inference(proto).hidden


class _Inference:
    """Inference of a model, with the nodes hidden that are not shown to stay small.

    Attributes:
        hidden: Nodes that are always hidden, by identity.
        unfollowed: Nodes that are hidden where values are followed.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        graph = proto.graph
        self._proto = proto
        self._nodes = list(_every_node(proto))  # protobuf's objects keep their identity as long as they are held
        self._functions = {(f.domain, f.name): f for f in proto.functions}
        self._known: Types = {v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)}
        self._stated = frozenset(self._known)
        self._amounts: dict[str, int] = {}  # how much is known of each
        self._limit()

    def types(self, follow: bool) -> Types | None:
        """What onnx infers; ``follow``: with data propagation."""
        if not self.hidden and not (follow and self.unfollowed):
            return self._run(follow)
        for _ in range(_ROUNDS):  # what was learned of types shows more nodes to stay small
            before = len(self.hidden) + len(self.unfollowed)
            for kind in (False, True) if follow else (False,):
                self._learn(self._run(kind))
            self._limit()
            if len(self.hidden) + len(self.unfollowed) in (0, before):
                break
        if follow and not self.hidden and not self.unfollowed:
            return self._run(True)
        self._learn(self._run(False))
        return self._known

    def _learn(self, found: Types | None) -> None:
        for name, kind in (found or {}).items():
            known = self._amounts.get(name)
            if known is None:
                known = self._amounts[name] = _knowledge(self._known.get(name))
            amount = _knowledge(kind)
            if amount > known:
                self._known[name], self._amounts[name] = kind, amount

    def _run(self, follow: bool) -> Types | None:
        graph = self._proto.graph
        places = [n for n in self._nodes if id(n) in self.hidden or (follow and id(n) in self.unfollowed)]
        domains = [n.domain if n.HasField("domain") else None for n in places]
        count = len(graph.value_info)
        graph.value_info.extend(
            onnx.ValueInfoProto(name=name, type=kind) for name, kind in self._known.items() if name not in self._stated
        )
        for node in places:
            node.domain = _HIDDEN
        opsets = [o.opset_import for o in (self._proto, *self._proto.functions)] if places else []
        for imported in opsets:
            imported.add(domain=_HIDDEN, version=1)
        try:
            inferred = onnx.shape_inference.infer_shapes(self._proto, data_prop=follow).graph
        except Exception:
            # Shapes are a convenience: a model that onnx cannot infer (custom operators, odd types) is still used.
            return None
        finally:
            for node, domain in zip(places, domains, strict=True):
                if domain is None:
                    node.ClearField("domain")
                else:
                    node.domain = domain
            del graph.value_info[count:]
            for imported in opsets:
                del imported[-1]
        return {v.name: v.type for v in (*inferred.value_info, *inferred.output)}

    # Bounds ---------------------------------------------------------------------------------------------------

    def _limit(self) -> None:
        """Decides which nodes are hidden, by what is known of types."""
        self.hidden: set[int] = set()
        self.unfollowed: set[int] = set()
        self._entries = 0
        self._graph(self._proto.graph, None, self._known)

    def _graph(self, graph: onnx.GraphProto, outer: _Scope | None, known: Types) -> None:
        extents: dict[str, Extent] = {}
        for value in (*graph.value_info, *graph.input):
            extents[value.name] = of_type(known.get(value.name, value.type))
        for tensor in graph.initializer:
            extents[tensor.name] = of_dims(tuple(tensor.dims))
        for sparse in graph.sparse_initializer:
            extents[sparse.values.name] = of_dims(tuple(sparse.dims))
        self._walk(graph.node, _Scope(extents, outer), known)

    def _walk(self, nodes: Iterable[onnx.NodeProto], extents: _Scope, known: Types) -> None:
        for node in nodes:
            inputs = [extents[t] if t else UNTYPED for t in node.input]
            function = self._functions.get((node.domain, node.op_type))
            if function is not None:
                # Types inside a function are nowhere stated, and what they are found to be is not kept.
                inside = dict(zip(function.input, inputs, strict=False))
                self._walk(function.node, _Scope(inside, None), {})
            for attribute in node.attribute:
                for graph in held(attribute):
                    stated = {v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)}
                    self._graph(graph, extents, stated)
            if function is not None or node.domain in _STANDARD:
                output = output_of(node, inputs) if function is None else ANY
            else:
                output = ANY if onnx.defs.has(node.op_type, node.domain) else UNTYPED
            if function is None and node.domain in _STANDARD:
                self._judge(node, inputs, output)
            for tensor in node.output:
                extents.own[tensor] = as_known(output, known.get(tensor), node.op_type in FOLLOWED)

    def _judge(self, node: onnx.NodeProto, inputs: list[Extent], output: Extent) -> None:
        work = sum(e.most for e in inputs) + output.most
        ranks = max(e.high for e in (*inputs, output))
        if ranks > budgets.RANK or (node.op_type == "Expand" and work > budgets.SHAPE_ENTRIES):
            self.hidden.add(id(node))
        elif node.op_type in FOLLOWED:
            if work > budgets.SHAPE_ENTRIES or self._entries + work > budgets.SHAPE_ENTRIES_ALL:
                self.unfollowed.add(id(node))
            else:
                self._entries += work


class _Scope:
    """Extents of a graph's tensors, and of those around it."""

    def __init__(self, own: dict[str, Extent], outer: _Scope | None) -> None:
        self.own = own
        self._outer = outer

    def __getitem__(self, tensor: str) -> Extent:
        scope: _Scope | None = self
        while scope is not None:
            if tensor in scope.own:
                return scope.own[tensor]
            scope = scope._outer
        return UNTYPED


def _every_node(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        yield from nodes
        for graph in inner_graphs(nodes):
            yield from graph.node


def _knowledge(kind: onnx.TypeProto | None) -> int:
    """How much a type says: more with each dimension that it gives."""
    if kind is None or not ranked(kind):
        return 0 if kind is None else 1
    known: int = sum(2 * d.HasField("dim_value") + d.HasField("dim_param") for d in kind.tensor_type.shape.dim)
    return 2 + known
