"""Cuts a part out of a model: nodes, constants, types, opsets and metadata stay those of the whole."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import onnx
from onnx import helper

from qdqtool.errors import ModelError
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.proto.slim import tensor_bytes, without_data
from qdqtool.proto.subgraphs import called_functions, extract_part, find_dependencies, nested_graphs
from qdqtool.util.said import said

_SMALL = 4096  # bytes; larger constants are put in when the part is found


@dataclass(frozen=True)
class Part:
    """Nodes that are on their own.

    Attributes:
        nodes: Their indices.
        inputs: The tensors that enter, in the order of their first reader.
        outputs: The tensors that leave.
    """

    nodes: frozenset[int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Cutter:
    """Finds and makes parts of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        #: Nodes that depend on no input of the network: weights' quantizers, folded shapes.
        self.constant = _constant_nodes(model)
        self._place = {n.index: place for place, n in enumerate(model.ordered)}
        self._stored = {name: place for place, name in enumerate(model.initializers)}
        self._declared = {
            v.name: v for g in (model.proto.graph,) for v in (*g.value_info, *g.output, *g.input)
        }

    def neighbours(self, node: Node) -> Iterator[Node]:
        """The nodes before and behind a node, constant ones apart."""
        for tensor in (*node.inputs, *node.captured):
            maker = self.model.producer(tensor)
            if maker is not None and maker.index not in self.constant:
                yield maker
        for tensor in node.outputs:
            yield from self.model.consumers(tensor)

    def around(self, nodes: Iterable[Node], hops: int) -> set[int]:
        """Indices of the nodes at most ``hops`` steps away."""
        edge = {n.index: n for n in nodes}
        found = set(edge)
        for _ in range(hops):
            edge = {
                n.index: n
                for node in edge.values()
                for n in self.neighbours(node)
                if n.index not in found
            }
            if not edge:
                break
            found.update(edge)
        return found

    def can_enter(self, tensor: str) -> bool:
        """Whether a tensor can be a network input: a float of known rank that is no half of a Q/DQ pair."""
        maker = self.model.producer(tensor)
        if maker is None:
            return True
        known = self.model.elem_type(tensor) in qdq.FLOATS and self.model.shape(tensor) is not None
        return known and not qdq.is_dq(maker)

    def part(self, nodes: Iterable[int], every_output: bool = False) -> Part:
        """The part that holds some nodes, made whole: Q/DQ pairs, weights and shapes are never cut in two.

        Args:
            nodes: Indices.
            every_output: Whether tensors that are read on both sides of the cut become outputs too.
        """
        model = self.model
        inside = set(nodes)
        work = sorted(inside)
        entering: dict[str, None] = {}
        while work:
            node = model.nodes[work.pop()]
            wanted = []
            for tensor in (*node.inputs, *node.captured):
                maker = model.producer(tensor)
                if maker is not None and (
                    maker.index in self.constant or not self.can_enter(tensor)
                ):
                    wanted.append(maker)
            if qdq.is_q(node):
                readers = model.consumers(node.output)
                if not any(r.index in inside for r in readers):
                    wanted.extend(readers)
            for other in wanted:
                if other.index not in inside:
                    inside.add(other.index)
                    work.append(other.index)
        made = {t for i in inside for t in model.nodes[i].outputs if t}
        for index in sorted(inside):
            for tensor in (*model.nodes[index].inputs, *model.nodes[index].captured):
                if tensor and tensor not in made and tensor not in model.initializers:
                    entering[tensor] = None
        return Part(frozenset(inside), tuple(entering), tuple(self._leaving(inside, every_output)))

    def _sorted(self, nodes: Iterable[int]) -> list[Node]:
        """Nodes in topological order; a part costs what it is worth, not what the whole model is."""
        return [self.model.nodes[i] for i in sorted(nodes, key=self._place.__getitem__)]

    def _leaving(self, inside: set[int], every_output: bool) -> Iterator[str]:
        model = self.model
        for node in self._sorted(inside - self.constant):
            for tensor in node.outputs:
                readers = model.consumers(tensor)
                outside = any(r.index not in inside for r in readers)
                read = any(r.index in inside for r in readers)
                if model.is_output(tensor) or (outside and (every_output or not read)):
                    yield tensor

    def between(self, inputs: Iterable[str], outputs: Iterable[str]) -> Part:
        """The nodes between tensors that the user named; either may be empty and is then the network's own.

        Raises:
            ModelError: A tensor is not there, an output depends on another network input, or an input on nothing.
        """
        model = self.model
        given, ends = dict.fromkeys(inputs), list(dict.fromkeys(outputs)) or model.outputs
        what = model.path or "model"
        for tensor in (*given, *ends):
            if tensor not in model.producers and tensor not in model.inputs:
                raise ModelError(
                    f"has no tensor '{tensor}'; give the names of activations, not of nodes",
                    what,
                    code="unknown-choice",
                    parameter="inputs" if tensor in given else "outputs",
                    node=tensor,
                )
        nodes = [n.proto for n in model.ordered]
        leading, needed = find_dependencies(nodes, ends, given)
        if given:
            if needed.isdisjoint(given):
                turned = not find_dependencies(nodes, given)[1].isdisjoint(ends)
                way = (
                    ", but the other way round: exchange them"
                    if turned
                    else "; give a tensor on the way to it"
                )
                raise ModelError(
                    f"output '{ends[0]}' does not depend on '{next(iter(given))}'{way}",
                    what,
                    code="ends-exchanged" if turned else "ends-unconnected",
                    node=ends[0],
                )
            missing = next((t for t in model.inputs if t in needed and t not in given), None)
            if missing is not None:
                depend = {missing}
                for node in model.ordered:
                    if not depend.isdisjoint((*node.inputs, *node.captured)):
                        depend.update(t for t in node.outputs if t not in given)
                end = next(e for e in ends if e in depend)
                raise ModelError(
                    said(
                        "output '{end}' also depends on network input '{missing}'; name it "
                        "in {`inputs`}, or a tensor in between",
                        end=end,
                        missing=missing,
                    ),
                    what,
                    code="missing-argument",
                    parameter="inputs",
                    node=missing,
                )
            unused = next((t for t in given if t not in needed), None)
            if unused is not None:
                raise ModelError(
                    said(
                        "no output depends on '{unused}'; leave it out of {`inputs`}",
                        unused=unused,
                    ),
                    what,
                    code="option-without-effect",
                    parameter="inputs",
                    node=unused,
                )
        inside = {model.producers[next(filter(None, n.output))].index for n in leading}
        if not inside:
            raise ModelError(
                "nothing lies between the inputs and outputs given", what, code="empty"
            )
        made = {t for i in inside for t in model.nodes[i].outputs}
        read = {t for i in inside for t in (*model.nodes[i].inputs, *model.nodes[i].captured)}
        starts = list(given) or [t for t in model.inputs if t in read]
        return Part(
            frozenset(inside),
            tuple(t for t in starts if t in read),
            tuple(t for t in ends if t in made),
        )

    def whole(self) -> Part:
        """All of it."""
        return Part(
            frozenset(n.index for n in self.model.nodes),
            tuple(self.model.inputs),
            tuple(self.model.outputs),
        )

    def value_info(self, tensor: str) -> onnx.ValueInfoProto:
        """Type and dimensions of a tensor, as the model declares them or as they were inferred."""
        declared = self._declared.get(tensor)
        if declared is not None and declared.type.WhichOneof("value") is not None:
            copy = onnx.ValueInfoProto()
            copy.CopyFrom(declared)
            return copy
        kind = self.model.elem_type(tensor)
        if not kind:
            return onnx.ValueInfoProto(name=tensor)
        inferred: onnx.ValueInfoProto = helper.make_tensor_value_info(
            tensor, kind, self.model.shape(tensor)
        )
        return inferred

    def make(self, part: Part) -> onnx.ModelProto:
        """The model of a part: nodes, constants, types, opsets and metadata are the original's.

        Raises:
            ModelError: The type of an input is not known.
        """
        result = self._cut(part, lambda tensor: tensor)
        graph = result.graph
        functions = called_functions(result)
        if len(functions) < len(result.functions):
            functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in functions]
            del result.functions[:]
            result.functions.extend(functions)
        used = (
            {n.domain for n in graph.node}
            | {n.domain for f in result.functions for n in f.node}
            | {""}
        )
        opsets = [o for o in result.opset_import if o.domain in used or o.domain == "ai.onnx"]
        if any(True for _ in nested_graphs(graph.node)):
            opsets = list(result.opset_import)  # a subgraph may use any of them
        copies = [onnx.OperatorSetIdProto.FromString(o.SerializeToString()) for o in opsets]
        del result.opset_import[:]
        result.opset_import.extend(copies)
        return result

    def sketch(self, part: Part) -> Model:
        """What :meth:`make` would make, to be predicted: its weights are the whole model's, and cost no copying.

        Raises:
            ModelError: The type of an input is not known.
        """
        model = self.model
        slim = self._cut(
            part, lambda tensor: tensor if tensor_bytes(tensor) <= _SMALL else without_data(tensor)
        )
        return Model(slim, model.path, "a part", model.base_dir, types=model, constants=model)

    def _cut(
        self, part: Part, stored: Callable[[onnx.TensorProto], onnx.TensorProto]
    ) -> onnx.ModelProto:
        """The part's nodes alone and its constants as ``stored`` makes them, so that it costs what the part is worth.

        Raises:
            ModelError: The type of an input is not known.
        """
        typed = {t: self.value_info(t) for t in (*part.inputs, *part.outputs)}
        for tensor in part.inputs:
            if typed[tensor].type.WhichOneof("value") is None:
                raise ModelError(
                    f"the type of tensor '{tensor}' is not known, so it cannot become a network input; "
                    "run onnx's shape inference on the model, or cut elsewhere",
                    self.model.path or "model",
                    code="unknown-type",
                    node=tensor,
                )
        # In the whole's order: TensorRT's passes go by it, and which of two equal Qs stays depends on it.
        inside = self._sorted(part.nodes)
        read = {t for n in inside for t in (*n.inputs, *n.captured)}
        kept = sorted(
            (t for t in read if t in self._stored and t not in typed), key=self._stored.__getitem__
        )
        cut, _ = extract_part(
            self.model.proto,
            [n.proto for n in inside],
            [typed[t] for t in part.outputs],
            (stored(self.model.initializers[t]) for t in kept),
            part.inputs,
        )
        graph = cut.graph
        for node in (
            graph.node
        ):  # one with a doubled name goes by its output's; TensorRT has its own for one without
            if node.name:
                node.name = self.model.producers[next(filter(None, node.output))].name
        made = {t for n in graph.node for t in n.output if t} - set(typed)
        graph.input.extend(typed[t] for t in part.inputs)
        types = (self.value_info(t) for t in sorted(made))
        graph.value_info.extend(v for v in types if v.type.WhichOneof("value") is not None)
        return cut


def _constant_nodes(model: Model) -> frozenset[int]:
    moving = set(model.inputs)
    found = set()
    for node in model.ordered:
        read = [t for t in (*node.inputs, *node.captured) if t]
        if any(t in moving for t in read) or (not read and node.op != "Constant"):
            moving.update(t for t in node.outputs if t)
        else:
            found.add(node.index)
    return frozenset(found)
