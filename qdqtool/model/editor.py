"""The one editor of ONNX models, for preparing, rewriting, fixing and half precision.

It adds constants and nodes, changes what nodes read and write, removes nodes, and in the end drops what was used before
and no longer is, keeps a valid order and the model's metadata and value_info. The edits take effect together: until
then a step sees the graph as it was, so that what it finds does not depend on the order in which it edits.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from qdqtool.base import limits
from qdqtool.errors import ModelError
from qdqtool.model.graph import EDITED, Model, Node
from qdqtool.model.qdq import FLOATS, ParameterValues, is_dq, is_q
from qdqtool.model.slim import without_large_weights
from qdqtool.model.subgraphs import captured_tensors, sort_topologically
from qdqtool.model.view import View, WeightSource

_LARGE_PARAMETER = 1 << 16  # bytes; 16,384 channels


class Editor:
    """Edits a model in place; its index stays as it was until :meth:`finish` and is true again from then on.

    Attributes:
        model: The model; for a changed copy, give :meth:`qdqtool.model.graph.Model.copy`.
        proto: Its message.
        edited: Indices of the nodes that were changed, removed or got one in front; the caller may empty it.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.edited: set[int] = set()
        self.proto = model.proto
        names = {n.proto.name for n in model.nodes}
        self._taken = names | set(model.producers) | set(model.initializers) | set(model.inputs)
        self._numbers: dict[str, int] = {}  # where to go on looking for a free name
        self._added = 0
        self._removed: set[int] = set()
        self._touched: set[int] = set()
        self._constants: dict[str, onnx.TensorProto] = {}  # new, or with another value
        self._added_constants: set[str] = set()
        self._retyping = False
        self._before: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._behind: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._first: list[onnx.NodeProto] = []
        self._retyped: set[str] = set()
        self._alias: dict[str, str] = {}
        self._shared: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def edit_proto(self, node: Node) -> onnx.NodeProto:
        """The message of a node, to be changed; of a node of the model that this one is a copy of, that in the copy."""
        self._touched.add(node.index)
        self.edited.add(node.index)
        return self.model.nodes[node.index].proto

    def is_removed(self, node: Node) -> bool:
        return node.index in self._removed

    def unique_name(self, wanted: str) -> str:
        """``wanted``, or with a number where that name is taken."""
        name, number = wanted, self._numbers.get(wanted, 1)
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._numbers[wanted] = number
        self._taken.add(name)
        return name

    @functools.cached_property
    def _listed(self) -> dict[str, onnx.ValueInfoProto]:
        """Entries of the graph's inputs; old exporters list the initializers there."""
        return {v.name: v for v in self.proto.graph.input}

    def has_name(self, name: str) -> bool:
        """Whether a node or tensor has that name."""
        return name in self._taken

    def constant(self, wanted: str, value: npt.NDArray[Any]) -> str:
        """Adds an initializer and returns its name.

        Raises:
            ModelError: All added ones together take more than :data:`qdqtool.base.limits.ADDED_CONSTANTS`.
        """
        self._added += np.asarray(value).nbytes
        limits.check_size(
            self._added,
            limits.ADDED_CONSTANTS,
            "new constants would take",
            ModelError,
            code="constants-too-large",
        )
        name = self.unique_name(wanted)
        self._add_constant(onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def _add_constant(self, tensor: onnx.TensorProto) -> None:
        self.proto.graph.initializer.append(tensor)
        self._constants[tensor.name] = self.proto.graph.initializer[-1]
        self._added_constants.add(tensor.name)

    def set_constant(self, tensor: str, value: npt.NDArray[Any]) -> None:
        """Gives an initializer or Constant another value, for all its readers."""
        self._set_constant(onnx.numpy_helper.from_array(np.asarray(value), tensor))

    def retype_constant(self, tensor: str, elem_type: int) -> None:
        """Gives an initializer whose data is not available another element type, for all its readers."""
        made = onnx.TensorProto()
        made.CopyFrom(self.model.initializers[tensor])
        made.data_type = elem_type
        self._set_constant(made)

    def _set_constant(self, made: onnx.TensorProto) -> None:
        tensor = made.name
        self._retyping = True
        old = self._constants.get(tensor, self.model.initializers.get(tensor))
        if old is not None:
            old.CopyFrom(made)
            self._constants[tensor] = old
            if tensor in self._listed:
                self._listed[tensor].type.CopyFrom(
                    onnx.helper.make_tensor_type_proto(made.data_type, made.dims)
                )
            return
        maker = self.model.producer(tensor)
        if maker is not None:
            self.remove(maker)
        self._add_constant(made)

    def set_input(self, node: Node, position: int, tensor: str) -> None:
        """Makes a node read another tensor; missing optional inputs before it are filled in as not set."""
        proto = self.edit_proto(node)
        while len(proto.input) <= position:
            proto.input.append("")
        proto.input[position] = tensor

    def redirect(self, old: str, new: str, readers: Iterable[Node] | None = None) -> None:
        """Makes the readers of a tensor (all of them, or those given) read another one."""
        for node in self.model.consumers(old) if readers is None else readers:
            proto = self.edit_proto(node)
            for position, tensor in enumerate(proto.input):
                if tensor == old:
                    proto.input[position] = new

    def is_captured(self, tensor: str) -> bool:
        """Whether a subgraph (If, Loop, Scan) reads a tensor, which :meth:`redirect` does not reach."""
        return any(tensor in n.captured for n in self.model.consumers(tensor))

    def remove(self, node: Node) -> None:
        """Removes a node; what it alone read is pruned in :meth:`finish`."""
        self._removed.add(node.index)
        self.edited.add(node.index)

    def insert(
        self,
        before: Node,
        op: str,
        wanted: str,
        inputs: list[str],
        attributes: dict[str, Any] | None = None,
    ) -> str:
        """Adds a node with one output in front of another and returns the output's name."""
        name = self.unique_name(wanted)
        output = self.unique_name(f"{name}_output_0")
        self.edited.add(before.index)
        self._before[before.index].append(
            onnx.helper.make_node(op, inputs, [output], name=name, **(attributes or {}))
        )
        return output

    def cast(
        self, source: str, made: str, to: int, behind: Node | None = None, suffix: str = ""
    ) -> None:
        """Adds a Cast behind a node, or in front of all without one; its output gets the name ``made``."""
        proto = onnx.helper.make_node("Cast", [source], [made], name=f"{made}/Cast{suffix}", to=to)
        self._taken.update((made, proto.name))
        (self._first if behind is None else self._behind[behind.index]).append(proto)

    def set_output(self, node: Node, position: int, tensor: str) -> None:
        """Makes a node write another tensor; who reads the old one is not changed."""
        self.edit_proto(node).output[position] = tensor
        self._taken.add(tensor)

    def set_type(self, tensors: Iterable[str], elem_type: int) -> None:
        """States another element type for network inputs and for tensors inside the graph."""
        wanted = set(tensors)
        self._retyping = True
        for value in (*self.proto.graph.value_info, *self.proto.graph.input):
            if value.name in wanted:
                value.type.tensor_type.elem_type = elem_type

    def _parameter(self, wanted: str, value: npt.NDArray[Any]) -> str:
        """A constant for one node; one that is larger than any real scale is stored once for all that get the same."""
        if value.nbytes <= _LARGE_PARAMETER:
            return self.constant(wanted, value)
        key = value.dtype.str, value.shape, ParameterValues(value.reshape(-1)).digest
        if key not in self._shared:
            self._shared[key] = self.constant(wanted, value)
        return self._shared[key]

    def set_quantizer(
        self, node: Node, scale: npt.NDArray[Any], zero_point: npt.NDArray[Any]
    ) -> None:
        """Gives a Q or DQ new parameters; the scale keeps the type that it had."""
        proto = self.edit_proto(node)
        self._retyped.update(node.outputs)  # a quantized tensor's type may change
        kind = self.model.elem_type(node.input(1))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind) if kind else np.dtype(np.float32)
        self.set_input(node, 1, self._parameter(f"{node.name}/scale", scale.astype(dtype)))
        self.set_input(node, 2, self._parameter(f"{node.name}/zero_point", zero_point))
        _drop(proto.attribute, lambda name: name == "output_dtype")

    def copy_weights(self, node: Node, weights: WeightSource, value: npt.NDArray[Any]) -> None:
        """Gives a node weights of its own: constant, Q and DQ as they are, in front of what moves them for it alone."""
        tensor = self.constant(f"{weights.source}_copy", value)
        reader, position = (weights.after.top or node, 0 if weights.after else 1)
        for old in (weights.q, weights.dq):
            if old is not None:
                inputs = [tensor, *old.inputs[1:]]
                tensor = self.insert(
                    reader, old.op, f"{old.name}_copy", inputs, dict(old.attributes)
                )
        self.set_input(reader, position, tensor)

    def rewrite(
        self, node: Node, op: str, inputs: Sequence[str], attributes: dict[str, Any]
    ) -> None:
        """Lets another operator make what a node makes."""
        proto = self.edit_proto(node)
        proto.op_type, proto.domain = op, ""
        del proto.attribute[:]
        proto.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in attributes.items())
        proto.input[:] = inputs

    def bypass(self, node: Node, source: str) -> None:
        """Lets what reads a node read another tensor; for a subgraph or a network output the node becomes a copy."""
        if not self.model.is_output(node.output) and not self.is_captured(node.output):
            self._alias[node.output] = source
            self.remove(node)
            return
        self.rewrite(node, "Identity", [source], {})

    def replace(self, node: Node, made: onnx.TensorProto) -> None:
        """Puts a constant of that name, type and dimensions in the place of what a node makes."""
        self.remove(node)
        self._add_constant(made)

    def remove_pairs(self, q: Node, dqs: Iterable[Node]) -> bool:
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
        if ends and (
            len(ends) > 1 or maker is None or self.model.is_output(source) or self.is_removed(maker)
        ):
            return False
        for dq in pairs:
            if dq not in ends:
                self.redirect(dq.output, source)
                self._alias[dq.output] = source  # source may itself be removed by another bypass
            self.remove(dq)
        if all(self.is_removed(n) for n in self.model.consumers(q.output)):
            self.remove(q)
        if ends and maker is not None:
            outputs = self.edit_proto(maker).output
            outputs[list(outputs).index(source)] = ends[0].output
            self.redirect(source, ends[0].output)
            for reader in (r for dq in pairs for r in self.model.consumers(dq.output)):
                self.redirect(source, ends[0].output, [reader])
        return True

    def finish(self) -> Model:
        """Applies removals and insertions, drops what nothing reads any more, and returns the model, its index true.

        Raises:
            ModelError: The edits made a cycle, or two nodes make one tensor.
        """
        nodes: list[Node | onnx.NodeProto] = list(self._first)
        for node in self.model.nodes:
            nodes.extend(self._before.get(node.index, ()))
            if node.index not in self._removed:
                nodes.append(node)
            nodes.extend(self._behind.get(node.index, ()))
        if self._alias:
            for entry in nodes:
                if not self._alias.keys().isdisjoint(_message(entry).input):
                    inputs = (self.edit_proto(entry) if isinstance(entry, Node) else entry).input
                    inputs[:] = [self._resolved(t) for t in inputs]
        read = set(self.model.consumers_by_tensor)
        inside = self._captured()
        pruned = self._prune(nodes, inside)
        kept = sort_topologically(pruned, self._reads, self._makes)
        self.model.replace_constants((), self._constants, self._retyping)
        self.model.replace_nodes(
            kept if len(kept) == len(pruned) else pruned, self._touched
        )  # which refuses a cycle
        self._drop_constants(read, inside)
        self._drop_stale()
        return self.model

    def _resolved(self, tensor: str) -> str:
        passed = []
        while tensor in self._alias:
            passed.append(tensor)
            tensor = self._alias[tensor]
        self._alias.update(dict.fromkeys(passed, tensor))  # of a chain, each link is followed once
        return tensor

    def _prune(
        self, nodes: list[Node | onnx.NodeProto], inside: set[str]
    ) -> list[Node | onnx.NodeProto]:
        """Drops nodes that lost their last reader; those unused from the start stay."""
        unused = {id(n) for n in self.model.nodes if not any(self._is_used(o) for o in n.outputs)}
        outputs = {v.name for v in self.proto.graph.output} | inside
        makers = {o: n for n in nodes for o in self._makes(n) if o}
        read = Counter(t for n in nodes for t in self._inputs(n))
        gone: set[int] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if (
                id(node) in gone
                or id(node) in unused
                or any(read[o] > 0 or o in outputs for o in self._makes(node))
            ):
                continue
            gone.add(id(node))
            read.subtract(self._inputs(node))
            stack.extend(makers[t] for t in self._inputs(node) if t in makers)
        return [n for n in nodes if id(n) not in gone]

    def _as_indexed(self, node: Node | onnx.NodeProto) -> Node | None:
        """The node where its message is as it was read: asking messages again takes most of the time here."""
        return node if isinstance(node, Node) and node.index not in self._touched else None

    def _inputs(self, node: Node | onnx.NodeProto) -> Sequence[str]:
        same = self._as_indexed(node)
        return _message(node).input if same is None else same.inputs

    def _makes(self, node: Node | onnx.NodeProto) -> Sequence[str]:
        same = self._as_indexed(node)
        return _message(node).output if same is None else same.outputs

    def _reads(self, node: Node | onnx.NodeProto) -> tuple[str, ...]:
        same = self._as_indexed(node)
        return (
            *self._inputs(node),
            *(captured_tensors(_message(node)) if same is None else same.captured),
        )

    def _drop_constants(self, was_read: set[str], inside: set[str]) -> None:
        """Drops initializers that lost their last reader, and their entries among the inputs."""
        graph, model = self.proto.graph, self.model
        read = model.consumers_by_tensor.keys() | {v.name for v in graph.output} | inside
        gone = {
            n
            for n in model.initializers
            if n not in read and (n in was_read or n in self._added_constants)
        }
        if gone:
            _drop(graph.initializer, gone.__contains__)
            _drop(graph.input, gone.__contains__)
        model.replace_constants(gone, {}, False)

    def _captured(self) -> set[str]:
        """What subgraphs read, by the names that they read it by now."""
        return {
            t
            for n in self.model.nodes
            if n.captured or n.index in self._touched
            for t in captured_tensors(n.proto)
        }

    def _is_used(self, tensor: str) -> bool:
        return bool(tensor) and (bool(self.model.consumers(tensor)) or self.model.is_output(tensor))

    def _drop_stale(self) -> None:
        graph = self.proto.graph
        made = (
            self.model.producers.keys()
            | self.model.initializers.keys()
            | {v.name for v in graph.input}
        )
        _drop(graph.value_info, lambda n: n not in made or n in self._retyped)


def _drop(items: Any, gone: Callable[[str], bool]) -> None:
    for position in reversed(range(len(items))):
        if gone(items[position].name):
            del items[position]


def _message(node: Node | onnx.NodeProto) -> onnx.NodeProto:
    return node.proto if isinstance(node, Node) else node


def placeholder(name: str, dims: Iterable[int], kind: int = TensorProto.FLOAT) -> TensorProto:
    """A constant of known shape whose data is not available."""
    tensor = TensorProto(name=name, data_type=kind, data_location=TensorProto.EXTERNAL)
    tensor.dims.extend(dims)
    tensor.external_data.add(key="location", value="not-at-hand")
    return tensor


def remove_quantizers(
    model: Model,
    weights: bool = False,
    stored: Callable[[str, Iterable[int]], TensorProto] | None = None,
    known: Mapping[str, TensorProto] | None = None,
) -> Model:
    """A model, itself, without activation quantizers; weights stay as quantized, unless ``weights`` says otherwise.

    Args:
        model: It is changed.
        weights: Whether float weights lose their Q and DQ too.
        stored: Makes the constant, of a name and dimensions, in the place of a DQ with stored integers, which stays
            without it; with it nothing stays quantized.
        known: Constants in the place of DQs, by the names of what these make.
    """
    view, editor = View(model), Editor(model)
    for node in (n for n in view.quantizers if n.input(0) and n.output):
        maker = model.producer(node.input(0)) if is_dq(node) else node
        constant = (
            model.constant_proto(node.input(0)) if stored is not None and is_dq(node) else None
        )
        if known and node.output in known:
            editor.replace(node, known[node.output])
        elif (
            stored is not None
            and constant is not None
            and constant.data_type not in (*FLOATS, TensorProto.UNDEFINED)
        ):
            editor.replace(node, stored(node.output, constant.dims))
        elif maker is not None and is_q(maker) and (weights or not view.is_weight(maker)):
            if is_dq(node) or stored is not None:
                editor.bypass(node, maker.input(0))
        elif stored is not None:
            editor.bypass(node, node.input(0))
    return editor.finish()


def with_nodes(
    model: Model, nodes: Iterable[onnx.NodeProto], constants: Iterable[TensorProto] = ()
) -> Model:
    """A variant of a model, without large weights, that computes more of its tensors: nodes and what they read."""
    proto = without_large_weights(model.proto)
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(constants)
    return Model(proto, sha256=EDITED, constants=model)


def unshare_weights(model: Model) -> Model:
    """A model, itself, whose layers share no quantized weights: one that is called twice would have to."""
    view, editor = View(model), Editor(model)
    first: dict[str, Node] = {}
    for node in view.weighted:
        weights = view.weights(node)
        value = (
            model.constant(weights.source) if weights.dq is not None and weights.constant else None
        )
        alone = all(len(model.consumers(n.output)) == 1 for n in weights.after)
        if value is not None and alone and first.setdefault(weights.source, node) is not node:
            editor.copy_weights(node, weights, value)
    return editor.finish()
