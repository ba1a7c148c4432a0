"""Editing a ModelProto: constants, new nodes in front of old ones, removal, and what is left unused afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from qdqtool import qdq
from qdqtool.graph import Model, Node

_PRUNED = ("QuantizeLinear", "DequantizeLinear", "Constant", "Identity", "Cast", "Transpose", "Reshape")


class Editor:
    """Edits a copy of a model; node indices stay valid until :meth:`finish`.

    Attributes:
        model: The index over the model as it was.
        proto: The copy that is edited.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(model.proto)
        graph = self.proto.graph
        self._nodes: list[onnx.NodeProto] = list(graph.node)
        self._taken = {n.name for n in graph.node} | set(model.producers) | set(model.initializers) | set(model.inputs)
        self._removed: set[int] = set()
        self._before: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._alias: dict[str, str] = {}

    def proto_of(self, node: Node) -> onnx.NodeProto:
        """The node in the copy."""
        return self._nodes[node.index]

    def is_removed(self, node: Node) -> bool:
        return node.index in self._removed

    def name(self, wanted: str) -> str:
        """``wanted``, or with a number where that name is taken."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name

    def constant(self, wanted: str, value: npt.NDArray[Any]) -> str:
        """Adds an initializer and returns its name."""
        name = self.name(wanted)
        self.proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def set_input(self, node: Node, position: int, tensor: str) -> None:
        """Makes a node read another tensor; missing optional inputs before it are filled in as not set."""
        proto = self.proto_of(node)
        while len(proto.input) <= position:
            proto.input.append("")
        proto.input[position] = tensor

    def redirect(self, old: str, new: str, readers: Iterable[Node] | None = None) -> None:
        """Makes the readers of a tensor (all of them, or those given) read another one."""
        for node in self.model.readers(old) if readers is None else readers:
            proto = self.proto_of(node)
            for position, tensor in enumerate(proto.input):
                if tensor == old:
                    proto.input[position] = new

    def is_captured(self, tensor: str) -> bool:
        """Whether a subgraph (If, Loop, Scan) reads a tensor, which :meth:`redirect` does not reach."""
        return any(tensor in n.captured for n in self.model.readers(tensor))

    def remove(self, node: Node) -> None:
        """Removes a node; what it alone read is pruned in :meth:`finish`."""
        self._removed.add(node.index)

    def insert(
        self, before: Node, op: str, wanted: str, inputs: list[str], attributes: dict[str, Any] | None = None
    ) -> str:
        """Adds a node with one output in front of another and returns the output's name."""
        name = self.name(wanted)
        output = self.name(f"{name}_output_0")
        self._before[before.index].append(helper.make_node(op, inputs, [output], name=name, **(attributes or {})))
        return output

    def set_quantizer(
        self, node: Node, scale: npt.NDArray[Any], zero_point: npt.NDArray[Any], axis: int | None = None
    ) -> None:
        """Gives a Q or DQ new parameters of its own; the scale keeps the type that it had."""
        proto = self.proto_of(node)
        kind = self.model.elem_type(node.input(1))
        dtype = helper.tensor_dtype_to_np_dtype(kind) if kind else np.dtype(np.float32)
        self.set_input(node, 1, self.constant(f"{node.name}/scale", scale.astype(dtype)))
        self.set_input(node, 2, self.constant(f"{node.name}/zero_point", zero_point))
        for position in reversed(range(len(proto.attribute))):
            if proto.attribute[position].name in ("axis", "output_dtype") and (
                axis is not None or proto.attribute[position].name == "output_dtype"
            ):
                del proto.attribute[position]
        if axis is not None:
            proto.attribute.append(helper.make_attribute("axis", axis))

    def bypass(self, q: Node, dqs: Iterable[Node]) -> bool:
        """Removes Q/DQ pairs: what read a DQ reads what Q read, and the maker of that makes a network output instead.

        Returns:
            False where nothing was done: Q's result is a network output, a subgraph reads a DQ, or one tensor would
            have to be two outputs.
        """
        pairs = list(dqs)
        ends = [dq for dq in pairs if self.model.is_output(dq.output)]
        source = q.input(0)
        maker = self.model.producer(source)
        if self.model.is_output(q.output) or any(self.is_captured(dq.output) for dq in pairs):
            return False
        if ends and (len(ends) > 1 or maker is None or self.model.is_output(source) or self.is_removed(maker)):
            return False
        for dq in pairs:
            if dq not in ends:
                self.redirect(dq.output, source)
                self._alias[dq.output] = source  # source may itself be removed by another bypass
            self.remove(dq)
        if all(self.is_removed(n) for n in self.model.readers(q.output)):
            self.remove(q)
        if ends and maker is not None:
            outputs = self.proto_of(maker).output
            outputs[list(outputs).index(source)] = ends[0].output
            self.redirect(source, ends[0].output)
            for reader in (r for dq in pairs for r in self.model.readers(dq.output)):
                self.redirect(source, ends[0].output, [reader])
        return True

    def finish(self) -> onnx.ModelProto:
        """Applies removals and insertions, drops what nothing reads any more, and returns the model."""
        graph = self.proto.graph
        nodes: list[onnx.NodeProto] = []
        for index, node in enumerate(self._nodes):
            nodes.extend(self._before.get(index, ()))
            if index not in self._removed:
                nodes.append(node)
        for node in nodes:
            for position, tensor in enumerate(node.input):
                if tensor in self._alias:
                    node.input[position] = self._resolved(tensor)
        kept = self._prune(nodes)
        copies = [_copied(n) for n in kept]
        del graph.node[:]
        graph.node.extend(copies)
        self._sort()
        self._drop_stale()
        return self.proto

    def _resolved(self, tensor: str) -> str:
        while tensor in self._alias:
            tensor = self._alias[tensor]
        return tensor

    def _prune(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Drops Q, DQ and constants that lost their last reader; nodes unused from the start stay."""
        unused_before = {n.index for n in self.model.nodes if not any(self._is_used(o) for o in n.outputs)}
        old = {id(self._nodes[i]) for i in unused_before}
        outputs = set(self.model.outputs)
        captured = {t for n in self.model.nodes for t in n.captured}
        while True:
            read = {t for n in nodes for t in n.input} | outputs | captured
            kept = [
                n for n in nodes
                if n.op_type not in _PRUNED or id(n) in old or any(o in read for o in n.output)
            ]
            if len(kept) == len(nodes):
                break
            nodes = kept
        read = {t for n in nodes for t in n.input} | outputs | captured
        graph = self.proto.graph
        was_read = set(self.model.consumers)
        for position in reversed(range(len(graph.initializer))):
            name = graph.initializer[position].name
            if name not in read and (name in was_read or name not in self.model.initializers):
                del graph.initializer[position]
        names = {t.name for t in graph.initializer}
        for position in reversed(range(len(graph.input))):
            name = graph.input[position].name
            if name in self.model.initializers and name not in names:
                del graph.input[position]
        return nodes

    def _is_used(self, tensor: str) -> bool:
        return bool(tensor) and (bool(self.model.readers(tensor)) or self.model.is_output(tensor))

    def _sort(self) -> None:
        """Puts the nodes in a topological order, the file's where it already is one."""
        index = Model(self.proto, sha256="edited")
        if index.ordered is index.nodes:
            return
        ordered = [_copied(n.proto) for n in index.ordered]
        del self.proto.graph.node[:]
        self.proto.graph.node.extend(ordered)

    def _drop_stale(self) -> None:
        graph = self.proto.graph
        made = {o for n in graph.node for o in n.output} | {t.name for t in graph.initializer}
        made.update(v.name for v in graph.input)
        changed = {o for n in graph.node if n.op_type in (qdq.Q, qdq.DQ) for o in n.output}
        for position in reversed(range(len(graph.value_info))):
            name = graph.value_info[position].name
            if name not in made or name in changed:  # a quantized tensor's type may have changed
                del graph.value_info[position]


def _copied(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
