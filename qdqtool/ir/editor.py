"""Editing of ONNX models.

An :class:`Editor` adds constants and nodes, changes the inputs and outputs of nodes, and removes
nodes. Its method ``finish`` applies the edits, sorts the nodes, and drops nodes and constants that
lost their last consumer. Metadata and value_info remain. Until ``finish`` is called, the index of
the model shows the original graph, so the result does not depend on the order of the edits.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from qdqtool.errors import ModelError
from qdqtool.ir.graph import EDITED, Model, Node
from qdqtool.proto.external_data import data_size
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import find_captured_tensors, sort_topologically
from qdqtool.util import limits


class Editor:
    """Edits a model in place; the model's index is updated by :meth:`finish` only.

    Attributes:
        model: The model. To edit a copy, pass :meth:`qdqtool.ir.graph.Model.copy`.
        proto: The ModelProto of the model.
        edited: Indices of nodes that were changed or removed, or before which a node was inserted.
            The caller may empty the set.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.edited: set[int] = set()
        self.proto = model.proto
        names = {node.proto.name for node in model.nodes}
        self._names = names | set(model.producers) | set(model.initializers) | set(model.inputs)
        self._next_numbers: dict[str, int] = {}  # first suffix to try for each name
        self._added_bytes = 0
        self._removed: set[int] = set()
        self._touched: set[int] = set()
        self._constants: dict[str, onnx.TensorProto] = {}  # added or changed constants
        self._added_constants: set[str] = set()
        self._before: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._after: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._first: list[onnx.NodeProto] = []
        self._retyped: set[str] = set()
        self._aliases: dict[str, str] = {}

    def edit_proto(self, node: Node) -> onnx.NodeProto:
        """Return the NodeProto of a node, so that the caller can edit it.

        The node is marked as edited. If the model is a copy, a node of the original model may be
        passed instead.
        """
        self._touched.add(node.index)
        self.edited.add(node.index)
        return self.model.nodes[node.index].proto

    def is_removed(self, node: Node) -> bool:
        """Return whether a node was removed."""
        return node.index in self._removed

    def unique_name(self, base: str) -> str:
        """Reserve and return an unused name: ``base``, followed by a number if necessary."""
        name, number = base, self._next_numbers.get(base, 1)
        while name in self._names:
            name, number = f"{base}_{number}", number + 1
        self._next_numbers[base] = number
        self._names.add(name)
        return name

    @functools.cached_property
    def _input_infos(self) -> dict[str, onnx.ValueInfoProto]:
        """Entries of the graph's inputs, where old exporters list the initializers as well."""
        return {value.name: value for value in self.proto.graph.input}

    def has_name(self, name: str) -> bool:
        """Return whether a node or tensor has the name."""
        return name in self._names

    def add_constant(self, base: str, value: npt.NDArray[Any]) -> str:
        """Add an initializer and return its name.

        Raises:
            ModelError: All added constants together exceed
                :data:`qdqtool.util.limits.ADDED_CONSTANTS`.
        """
        return self.add_constant_tensor(onnx.numpy_helper.from_array(np.asarray(value), base))

    def add_constant_tensor(self, tensor: onnx.TensorProto) -> str:
        """Add an initializer of a type that numpy lacks, and return its name.

        Raises:
            ModelError: As for :meth:`add_constant`.
        """
        self._added_bytes += data_size(tensor)
        limits.check_size(
            self._added_bytes,
            limits.ADDED_CONSTANTS,
            "new constants would take",
            ModelError,
            code="constants-too-large",
        )
        tensor.name = self.unique_name(tensor.name)
        self._add_constant(tensor)
        return tensor.name

    def _add_constant(self, tensor: onnx.TensorProto) -> None:
        self.proto.graph.initializer.append(tensor)
        self._constants[tensor.name] = self.proto.graph.initializer[-1]
        self._added_constants.add(tensor.name)

    def set_constant(self, tensor: str, value: npt.NDArray[Any]) -> None:
        """Give an initializer or Constant another value, for all its consumers."""
        self._set_constant(onnx.numpy_helper.from_array(np.asarray(value), tensor))

    def retype_constant(self, tensor: str, elem_type: int) -> None:
        """Give an initializer without available data another element type."""
        constant = deepcopy(self.model.initializers[tensor])
        constant.data_type = elem_type
        self._set_constant(constant)

    def _set_constant(self, constant: onnx.TensorProto) -> None:
        tensor = constant.name
        initializer = self._constants.get(tensor, self.model.initializers.get(tensor))
        if initializer is not None:
            initializer.CopyFrom(constant)
            self._constants[tensor] = initializer
            if tensor in self._input_infos:
                tensor_type = onnx.helper.make_tensor_type_proto(constant.data_type, constant.dims)
                self._input_infos[tensor].type.CopyFrom(tensor_type)
            return
        producer = self.model.producer(tensor)
        if producer is not None:
            self.remove(producer)
        self._add_constant(constant)

    def set_input(self, node: Node, position: int, tensor: str) -> None:
        """Set an input of a node; missing inputs before this position become empty."""
        proto = self.edit_proto(node)
        while len(proto.input) <= position:
            proto.input.append("")
        proto.input[position] = tensor

    def redirect_consumers(
        self, old: str, new: str, consumers: Iterable[Node] | None = None
    ) -> None:
        """Make the consumers of a tensor (all by default) read another tensor."""
        for node in self.model.consumers(old) if consumers is None else consumers:
            proto = self.edit_proto(node)
            for position, tensor in enumerate(proto.input):
                if tensor == old:
                    proto.input[position] = new

    def is_captured(self, tensor: str) -> bool:
        """Return whether a subgraph (If, Loop, Scan) reads a tensor of the main graph.

        :meth:`redirect_consumers` does not change the inputs of nodes in subgraphs.
        """
        return any(tensor in node.captured for node in self.model.consumers(tensor))

    def remove(self, node: Node) -> None:
        """Remove a node. :meth:`finish` also removes nodes that only fed this node."""
        self._removed.add(node.index)
        self.edited.add(node.index)

    def insert_node(
        self,
        before: Node,
        op: str,
        base: str,
        inputs: list[str],
        attributes: dict[str, Any] | None = None,
    ) -> str:
        """Add a node with one output before another node and return the output's name.

        Args:
            before: Node before which the new node is added.
            op: Operator type of the new node.
            base: Name of the new node, which gets a number if the name is in use.
            inputs: Inputs of the new node.
            attributes: Attributes of the new node.
        """
        name = self.unique_name(base)
        output = self.unique_name(f"{name}_output_0")
        self.edited.add(before.index)
        self._before[before.index].append(
            onnx.helper.make_node(op, inputs, [output], name=name, **(attributes or {}))
        )
        return output

    def add_cast(
        self, source: str, output: str, to: int, after: Node | None = None, suffix: str = ""
    ) -> None:
        """Add a Cast after a node, or before all nodes.

        Args:
            source: Input of the Cast.
            output: Output of the Cast.
            to: ONNX element type of the output.
            after: The node before the Cast; None for the start of the graph.
            suffix: End of the Cast's name.
        """
        name = f"{output}/Cast{suffix}"
        proto = onnx.helper.make_node("Cast", [source], [output], name=name, to=to)
        self._names.update((output, proto.name))
        if after is None:
            self._first.append(proto)
        else:
            self._after[after.index].append(proto)

    def set_output(self, node: Node, position: int, tensor: str) -> None:
        """Rename the output of a node; consumers of the old name are not changed."""
        self.edit_proto(node).output[position] = tensor
        self._names.add(tensor)

    def set_type(self, tensors: Iterable[str], elem_type: int) -> None:
        """Change the stated element type of network inputs and of tensors inside the graph."""
        names = set(tensors)
        for value in (*self.proto.graph.value_info, *self.proto.graph.input):
            if value.name in names:
                value.type.tensor_type.elem_type = elem_type

    def set_quantizer(
        self, node: Node, scale: npt.NDArray[Any], zero_point: npt.NDArray[Any] | None
    ) -> None:
        """Give a Q or DQ new parameters; the scale keeps its type.

        If `zero_point` is None, zero point and integer type remain.
        """
        proto = self.edit_proto(node)
        self._retyped.update(node.outputs)  # The type of the quantized tensor may change.
        elem_type = self.model.elem_type(node.input(1)) or TensorProto.FLOAT
        dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
        self.set_input(node, 1, self.add_constant(f"{node.name}/scale", scale.astype(dtype)))
        if zero_point is None:
            return
        self.set_input(node, 2, self.add_constant(f"{node.name}/zero_point", zero_point))
        _remove_named(proto.attribute, lambda name: name == "output_dtype")

    def rewrite(
        self, node: Node, op: str, inputs: Sequence[str], attributes: dict[str, Any]
    ) -> None:
        """Replace the operator, inputs and attributes of a node. The outputs remain."""
        proto = self.edit_proto(node)
        proto.op_type, proto.domain = op, ""
        del proto.attribute[:]
        proto.attribute.extend(
            onnx.helper.make_attribute(name, value) for name, value in attributes.items()
        )
        proto.input[:] = inputs

    def bypass(self, node: Node, source: str) -> None:
        """Make the consumers of a node's output read another tensor instead.

        The node becomes an Identity if its output is a network output or is read by a subgraph.
        """
        if not self.model.is_output(node.output) and not self.is_captured(node.output):
            self._aliases[node.output] = source
            self.remove(node)
            return
        self.rewrite(node, "Identity", [source], {})

    def replace(self, node: Node, constant: onnx.TensorProto) -> None:
        """Replace a node by a constant, which has the name and type of the node's output."""
        self.remove(node)
        self._add_constant(constant)

    def remove_pairs(self, q: Node, dqs: Iterable[Node]) -> bool:
        """Remove a Q and its DQs, or only the DQs if the Q has further consumers.

        Consumers of a DQ read the input of the Q instead. If a DQ produces a network output, the
        producer of the Q's input produces this output instead.

        Returns:
            True if the DQs were removed. False if nothing was removed: the result of the Q is a
            network output, a subgraph reads the result of a DQ, or the Q's input cannot become the
            network output that a DQ produces.
        """
        dq_nodes = list(dqs)
        ends = [dq for dq in dq_nodes if self.model.is_output(dq.output)]
        source = q.input(0)
        if not self._can_remove(q, dq_nodes) or (ends and not self._can_be_output(source, ends)):
            return False
        for dq in dq_nodes:
            if dq not in ends:
                self.redirect_consumers(dq.output, source)
                self._aliases[dq.output] = source  # A later call may remove the source as well.
            self.remove(dq)
        if all(self.is_removed(node) for node in self.model.consumers(q.output)):
            self.remove(q)
        if ends:
            self._rename_to_output(source, ends[0].output, dq_nodes)
        return True

    def _can_remove(self, q: Node, dqs: list[Node]) -> bool:
        return not self.model.is_output(q.output) and not any(
            self.is_captured(dq.output) for dq in dqs
        )

    def _can_be_output(self, tensor: str, ends: list[Node]) -> bool:
        """Return whether a tensor can become the network output that a DQ produces.

        This needs a single DQ that produces a network output, a tensor that is not a network output
        already, and a producer of the tensor that was not removed.
        """
        producer = self.model.producer(tensor)
        return (
            len(ends) <= 1
            and producer is not None
            and not self.model.is_output(tensor)
            and not self.is_removed(producer)
        )

    def _rename_to_output(self, tensor: str, output: str, dqs: list[Node]) -> None:
        outputs = self.edit_proto(self.model.producers[tensor]).output
        outputs[list(outputs).index(tensor)] = output
        self.redirect_consumers(tensor, output)
        for dq in dqs:
            for consumer in self.model.consumers(dq.output):
                self.redirect_consumers(tensor, output, [consumer])

    def finish(self) -> Model:
        """Apply the edits, drop nodes and constants without consumers, and return the model.

        Raises:
            ModelError: The edits made a cycle, or two nodes produce one tensor.
        """
        nodes: list[Node | onnx.NodeProto] = list(self._first)
        for node in self.model.nodes:
            nodes.extend(self._before.get(node.index, ()))
            if node.index not in self._removed:
                nodes.append(node)
            nodes.extend(self._after.get(node.index, ()))
        self._apply_aliases(nodes)
        consumed = set(self.model.consumers_by_tensor)
        captured = self._find_captured()
        pruned = self._remove_unused_nodes(nodes, captured)
        ordered = sort_topologically(pruned, _consumed_tensors, _output_names)
        self.model.replace_constants((), self._constants)
        has_cycle = len(ordered) != len(pruned)  # replace_nodes raises the error for a cycle.
        self.model.replace_nodes(pruned if has_cycle else ordered, self._touched)
        self._remove_unused_constants(consumed, captured)
        self._remove_stale_types()
        return self.model

    def _apply_aliases(self, nodes: list[Node | onnx.NodeProto]) -> None:
        if not self._aliases:
            return
        for node in nodes:
            if not self._aliases.keys().isdisjoint(_as_proto(node).input):
                proto = self.edit_proto(node) if isinstance(node, Node) else node
                proto.input[:] = [self._resolve_alias(tensor) for tensor in proto.input]

    def _resolve_alias(self, tensor: str) -> str:
        links = []
        while tensor in self._aliases:
            links.append(tensor)
            tensor = self._aliases[tensor]
        self._aliases.update(dict.fromkeys(links, tensor))  # follow each link only once
        return tensor

    def _remove_unused_nodes(
        self, nodes: list[Node | onnx.NodeProto], captured: set[str]
    ) -> list[Node | onnx.NodeProto]:
        """Return all nodes except those that lost their last consumer.

        Nodes that had no consumer before the edits remain.
        """
        unused = {id(node) for node in self.model.nodes if not self._had_consumer(node)}
        required = {value.name for value in self.proto.graph.output} | captured
        removed = self._find_unneeded(nodes, unused, required)
        return [node for node in nodes if id(node) not in removed]

    def _find_unneeded(
        self, nodes: list[Node | onnx.NodeProto], ignored: set[int], required: set[str]
    ) -> set[int]:
        """Return the ids of the nodes whose outputs no other node needs.

        ``ignored`` has the ids of nodes that are not examined, ``required`` the tensors that are
        needed without a consumer.
        """
        producers: dict[str, Node | onnx.NodeProto] = {}
        uses: Counter[str] = Counter()
        for node in nodes:
            uses.update(_input_names(node))
            producers.update((output, node) for output in _output_names(node) if output)
        unneeded: set[int] = set()
        stack = [node for node in nodes if id(node) not in ignored]
        while stack:
            node = stack.pop()
            if id(node) in unneeded or self._is_needed(node, uses, required):
                continue
            unneeded.add(id(node))
            inputs = _input_names(node)
            uses.subtract(inputs)
            stack += [
                producers[tensor]
                for tensor in inputs
                if tensor in producers and id(producers[tensor]) not in ignored
            ]
        return unneeded

    def _had_consumer(self, node: Node) -> bool:
        model = self.model
        return any(t and (model.consumers(t) or model.is_output(t)) for t in node.outputs)

    def _is_needed(
        self, node: Node | onnx.NodeProto, uses: Counter[str], required: set[str]
    ) -> bool:
        return any(uses[output] > 0 or output in required for output in _output_names(node))

    def _remove_unused_constants(self, consumed: set[str], captured: set[str]) -> None:
        """Drop initializers that lost their last consumer, and their entries among the inputs.

        ``consumed`` has the tensors that had a consumer before the edits.
        """
        graph, model = self.proto.graph, self.model
        required = model.consumers_by_tensor.keys() | {v.name for v in graph.output} | captured
        removed = (model.initializers.keys() & (consumed | self._added_constants)) - required
        if removed:
            _remove_named(graph.initializer, removed.__contains__)
            _remove_named(graph.input, removed.__contains__)
        model.replace_constants(removed, {})

    def _find_captured(self) -> set[str]:
        tensors: set[str] = set()
        for node in self.model.nodes:
            if node.captured or node.index in self._touched:
                tensors.update(find_captured_tensors(node.proto))
        return tensors

    def _remove_stale_types(self) -> None:
        graph, model = self.proto.graph, self.model
        inputs = {value.name for value in graph.input}
        tensors = model.producers.keys() | model.initializers.keys() | inputs
        _remove_named(graph.value_info, lambda n: n not in tensors or n in self._retyped)


def _remove_named(items: Any, is_removed: Callable[[str], bool]) -> None:
    for position in reversed(range(len(items))):
        if is_removed(items[position].name):
            del items[position]


def _as_proto(node: Node | onnx.NodeProto) -> onnx.NodeProto:
    return node.proto if isinstance(node, Node) else node


def _input_names(node: Node | onnx.NodeProto) -> Sequence[str]:
    return list(_as_proto(node).input)


def _output_names(node: Node | onnx.NodeProto) -> Sequence[str]:
    return list(_as_proto(node).output)


def _consumed_tensors(node: Node | onnx.NodeProto) -> list[str]:
    return [*_input_names(node), *find_captured_tensors(_as_proto(node))]


def make_placeholder(name: str, dims: Iterable[int], kind: int = TensorProto.FLOAT) -> TensorProto:
    """Return an initializer with a type and dimensions, but without data."""
    tensor = TensorProto(name=name, data_type=kind, data_location=TensorProto.EXTERNAL)
    tensor.dims.extend(dims)
    tensor.external_data.add(key="location", value="not-at-hand")
    return tensor


def copy_with_nodes(
    model: Model, nodes: Iterable[onnx.NodeProto], constants: Iterable[TensorProto] = ()
) -> Model:
    """Return a copy of a model with added nodes and constants, without data of large weights."""
    proto = strip_large_weights(model.proto)
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(constants)
    return Model(proto, sha256=EDITED, constants=model)
