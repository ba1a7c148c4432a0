"""Parts of a model, and models made from parts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass

import onnx
from onnx import helper

from qdqtool.errors import ModelError
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.proto.slim import strip_data, tensor_bytes
from qdqtool.proto.subgraphs import extract_submodel, find_dependencies, remove_unused_opsets

_SMALL = 4096  # maximum size in bytes of a constant whose data `sketch_model` keeps


@dataclass(frozen=True)
class ModelPart:
    """Part of a model: some nodes, with the inputs and outputs of the part.

    Attributes:
        nodes: Indices of the nodes.
        inputs: Input tensors of the part, in the order of their first consumer.
        outputs: Output tensors of the part.
    """

    nodes: frozenset[int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ModelCutter:
    """Finds parts of a model, and builds models from parts.

    Attributes:
        model: The whole model.
        constant: Indices of nodes that do not depend on a network input, such as quantizers of
            weights.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.constant = _find_constant_nodes(model)
        self._constant_order = {name: position for position, name in enumerate(model.initializers)}
        graph = model.proto.graph
        values: list[onnx.ValueInfoProto] = [*graph.value_info, *graph.output, *graph.input]
        self._declared = {value.name: value for value in values}

    def neighbors(self, node: Node) -> Iterator[Node]:
        """Yield the producers and consumers of a node, except producers in `constant`."""
        for tensor in node.consumed_tensors:
            producer = self.model.producer(tensor)
            if producer is not None and producer.index not in self.constant:
                yield producer
        for tensor in node.outputs:
            yield from self.model.consumers(tensor)

    def find_nodes_within(self, nodes: Iterable[Node], hops: int) -> set[int]:
        """Return the indices of all nodes at most `hops` steps away from one of the nodes."""
        frontier = list(nodes)
        indices = {n.index for n in frontier}
        for _ in range(hops):
            neighbors = {n.index: n for node in frontier for n in self.neighbors(node)}
            frontier = [n for n in neighbors.values() if n.index not in indices]
            if not frontier:
                break
            indices.update(n.index for n in frontier)
        return indices

    def can_be_input(self, tensor: str) -> bool:
        """Return whether a tensor can become a network input.

        True for tensors without a producer, and for floats of known rank that no DequantizeLinear
        produces.
        """
        producer = self.model.producer(tensor)
        if producer is None:
            return True
        if qdq.is_dq(producer) or self.model.elem_type(tensor) not in qdq.FLOATS:
            return False
        return self.model.shape(tensor) is not None

    def complete_part(self, nodes: Iterable[int], every_output: bool = False) -> ModelPart:
        """Return the smallest part that contains the nodes and can be a separate model.

        Q/DQ pairs are not split. The part includes the constant nodes and the computed shapes that
        its nodes read.

        Args:
            nodes: Indices of the nodes.
            every_output: Whether a tensor with consumers inside and outside the part becomes an
                output.
        """
        model = self.model
        inside = set(nodes)
        stack = sorted(inside)
        while stack:
            for other in self._find_inseparable_neighbors(model.nodes[stack.pop()], inside):
                if other.index not in inside:
                    inside.add(other.index)
                    stack.append(other.index)
        return ModelPart(
            frozenset(inside),
            tuple(self._find_inputs(inside)),
            tuple(self._find_outputs(inside, every_output)),
        )

    def _find_inputs(self, inside: set[int]) -> dict[str, None]:
        nodes = [self.model.nodes[i] for i in sorted(inside)]
        produced = {t for n in nodes for t in n.outputs}
        consumed = dict.fromkeys(t for n in nodes for t in n.consumed_tensors)
        return {t: None for t in consumed if t not in produced and t not in self.model.initializers}

    def _find_inseparable_neighbors(self, node: Node, inside: set[int]) -> list[Node]:
        nodes = []
        for tensor in node.consumed_tensors:
            producer = self.model.producer(tensor)
            if producer is None:
                continue
            if producer.index in self.constant or not self.can_be_input(tensor):
                nodes.append(producer)
        if qdq.is_q(node):
            consumers = self.model.consumers(node.output)
            if not any(c.index in inside for c in consumers):
                nodes += consumers
        return nodes

    def _sort_nodes(self, nodes: Iterable[int]) -> list[Node]:
        return [self.model.nodes[i] for i in sorted(nodes, key=self.model.positions.__getitem__)]

    def _find_outputs(self, inside: set[int], every_output: bool) -> Iterator[str]:
        for node in self._sort_nodes(inside - self.constant):
            for tensor in node.outputs:
                consumers = [c.index in inside for c in self.model.consumers(tensor)]
                is_cut = not all(consumers) and (every_output or not any(consumers))
                if is_cut or self.model.is_output(tensor):
                    yield tensor

    def find_between(self, inputs: Iterable[str], outputs: Iterable[str]) -> ModelPart:
        """Return the part between input and output tensors.

        Args:
            inputs: Tensors at which the part begins; empty for the network's inputs.
            outputs: Tensors at which the part ends; empty for the network's outputs.

        Raises:
            ModelError: A tensor is unknown, an output depends on a network input that is not in
                `inputs`, no output depends on one of `inputs`, or no node is between the tensors.
        """
        model, path = self.model, self.model.path or "model"
        starts = dict.fromkeys(inputs)
        ends = list(dict.fromkeys(outputs)) or model.outputs
        self._check_tensors_exist(starts, "inputs")
        self._check_tensors_exist(ends, "outputs")
        protos, needed = find_dependencies([n.proto for n in model.ordered], ends, starts)
        if starts:
            self._check_starts(starts, ends, needed)
        inside = {model.producers[next(filter(None, n.output))].index for n in protos}
        if not inside:
            raise ModelError(
                "no node lies between `inputs` and `outputs`; give tensors with nodes between them",
                path,
                code="empty",
            )
        return self._make_part(inside, list(starts) or model.inputs, ends)

    def _make_part(self, inside: set[int], starts: list[str], ends: list[str]) -> ModelPart:
        nodes = [self.model.nodes[i] for i in inside]
        produced = {t for n in nodes for t in n.outputs}
        consumed = {t for n in nodes for t in n.consumed_tensors}
        return ModelPart(
            frozenset(inside),
            tuple(t for t in starts if t in consumed),
            tuple(t for t in ends if t in produced),
        )

    def _check_tensors_exist(self, tensors: Iterable[str], parameter: str) -> None:
        for tensor in tensors:
            if tensor not in self.model.producers and tensor not in self.model.inputs:
                raise ModelError(
                    f"has no tensor '{tensor}'; give the names of activations, not of nodes",
                    self.model.path or "model",
                    code="unknown-choice",
                    parameter=parameter,
                    node=tensor,
                )

    def _make_unconnected_error(self, starts: Mapping[str, None], ends: list[str]) -> ModelError:
        protos = [n.proto for n in self.model.ordered]
        code, hint = "ends-unconnected", "; give a tensor before this output"
        if not find_dependencies(protos, starts)[1].isdisjoint(ends):
            code = "ends-exchanged"
            hint = ", but the inputs depend on this output; exchange `inputs` and `outputs`"
        return ModelError(
            f"output '{ends[0]}' does not depend on '{next(iter(starts))}'{hint}",
            self.model.path or "model",
            code=code,
            node=ends[0],
        )

    def _check_starts(
        self, starts: Mapping[str, None], ends: list[str], needed: frozenset[str] | set[str]
    ) -> None:
        path = self.model.path or "model"
        if needed.isdisjoint(starts):
            raise self._make_unconnected_error(starts, ends)
        for tensor in self.model.inputs:
            if tensor in needed and tensor not in starts:
                end = self._find_dependent_end(tensor, starts, ends)
                raise ModelError(
                    f"output '{end}' also depends on network input '{tensor}'; add '{tensor}', or "
                    "a tensor between the two, to `inputs`",
                    path,
                    code="missing-argument",
                    parameter="inputs",
                    node=tensor,
                )
        for tensor in starts:
            if tensor not in needed:
                raise ModelError(
                    f"no output depends on '{tensor}'; remove '{tensor}' from `inputs`",
                    path,
                    code="option-without-effect",
                    parameter="inputs",
                    node=tensor,
                )

    def _find_dependent_end(
        self, network_input: str, starts: Mapping[str, None], ends: list[str]
    ) -> str:
        dependent = {network_input}
        for node in self.model.ordered:
            if not dependent.isdisjoint(node.consumed_tensors):
                dependent.update(t for t in node.outputs if t not in starts)
        return next(e for e in ends if e in dependent)

    def whole_part(self) -> ModelPart:
        """Return the whole model as a part."""
        return ModelPart(
            frozenset(n.index for n in self.model.nodes),
            tuple(self.model.inputs),
            tuple(self.model.outputs),
        )

    def value_info(self, tensor: str) -> onnx.ValueInfoProto:
        """Return the name, type and dimensions of a tensor, without the type if it is unknown."""
        declared = self._declared.get(tensor)
        if declared is not None and _has_type(declared):
            return deepcopy(declared)
        kind = self.model.elem_type(tensor)
        if not kind:
            return onnx.ValueInfoProto(name=tensor)
        inferred: onnx.ValueInfoProto = helper.make_tensor_value_info(
            tensor, kind, self.model.shape(tensor)
        )
        return inferred

    def build(self, part: ModelPart) -> onnx.ModelProto:
        """Build a model from a part, and declare only the opsets that it needs.

        Raises:
            ModelError: The type of an input is unknown.
        """
        proto = self._build_proto(part, lambda tensor: tensor)
        remove_unused_opsets(proto)
        return proto

    def sketch_model(self, part: ModelPart) -> Model:
        """Build a model without large constants from a part, for prediction only.

        The model reads types and large constants from the whole model, which avoids copies.

        Raises:
            ModelError: The type of an input is unknown.
        """

        def shorten(tensor: onnx.TensorProto) -> onnx.TensorProto:
            return tensor if tensor_bytes(tensor) <= _SMALL else strip_data(tensor)

        model = self.model
        proto = self._build_proto(part, shorten)
        return Model(proto, model.path, "a part", model.base_dir, types=model, constants=model)

    def _build_proto(
        self, part: ModelPart, convert: Callable[[onnx.TensorProto], onnx.TensorProto]
    ) -> onnx.ModelProto:
        ends = {t: self.value_info(t) for t in (*part.inputs, *part.outputs)}
        for tensor in part.inputs:
            self._require_type(ends[tensor])
        # The order of nodes stays the same, because TensorRT keeps the first of two equal Qs.
        nodes = self._sort_nodes(part.nodes)
        consumed = {t for n in nodes for t in n.consumed_tensors}
        constants = (consumed & self._constant_order.keys()) - ends.keys()
        ordered_constants = sorted(constants, key=self._constant_order.__getitem__)
        proto, _ = extract_submodel(
            self.model.proto,
            [n.proto for n in nodes],
            [ends[t] for t in part.outputs],
            (convert(self.model.initializers[t]) for t in ordered_constants),
            part.inputs,
        )
        graph = proto.graph
        self._name_nodes(graph.node)
        graph.input.extend(ends[t] for t in part.inputs)
        graph.value_info.extend(self._list_inner_types(nodes, ends.keys()))
        return proto

    def _require_type(self, tensor: onnx.ValueInfoProto) -> None:
        if not _has_type(tensor):
            raise ModelError(
                f"tensor '{tensor.name}' has an unknown type, so it cannot become a network input; "
                "run onnx's shape inference on the model, or cut elsewhere",
                self.model.path or "model",
                code="unknown-type",
                node=tensor.name,
            )

    def _list_inner_types(
        self, nodes: Iterable[Node], ends: Collection[str]
    ) -> Iterator[onnx.ValueInfoProto]:
        produced = {t for n in nodes for t in n.outputs if t}.difference(ends)
        return filter(_has_type, map(self.value_info, sorted(produced)))

    def _name_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Set the unique names that the class Model gives to nodes that share a name.

        Nodes without a name remain unnamed, because TensorRT names them.
        """
        for node in nodes:
            if node.name:
                node.name = self.model.producers[next(filter(None, node.output))].name


def _has_type(info: onnx.ValueInfoProto) -> bool:
    return info.type.WhichOneof("value") is not None


def _find_constant_nodes(model: Model) -> frozenset[int]:
    variable = set(model.inputs)
    indices = set()
    for node in model.ordered:
        consumed = node.consumed_tensors
        if any(t in variable for t in consumed) or (not consumed and node.op != "Constant"):
            variable.update(t for t in node.outputs if t)
        else:
            indices.add(node.index)
    return frozenset(indices)
