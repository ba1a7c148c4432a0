"""Index of an ONNX model: producers, consumers, constants, names, types and shapes.

A model is indexed when it is loaded. :class:`qdqtool.ir.editor.Editor` changes the model, and
updates the index with :meth:`Model.replace_nodes`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from sys import intern
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.errors import ModelError
from qdqtool.proto import external_data as external
from qdqtool.proto.node_types import NodeTypeCache
from qdqtool.proto.shapes import infer_types
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import (
    STANDARD,
    find_outside_tensors,
    sort_topologically,
    subgraphs_of,
)
from qdqtool.util import limits

Shape = tuple[int | None, ...]
TensorType = tuple[int, Shape | None]  # ONNX element type (0 if unknown) and dimensions
EDITED = "edited"  # used in place of the hash if a model differs from its file
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear", "Cast")
_UNKNOWN: tuple[int, None] = (0, None)
# Larger constants are not cached: otherwise, the cache could contain copies of all weights.
_MAX_CACHED_BYTES = 1 << 16


class Node:
    """A node of the main graph.

    Attributes:
        index: Position in the graph's node list.
        name: The node's name, or its first output's name where the name is missing or not unique.
        op: Operator type.
        inputs: Input tensor names; an empty string is an optional input that is not set.
        outputs: Output tensor names.
        subgraphs: Graphs in the node's attributes (If, Loop, Scan).
        captured: Tensors of the main graph that the subgraphs read.
        proto: The NodeProto.
    """

    __slots__ = (
        "_attributes",
        "captured",
        "domain",
        "index",
        "inputs",
        "name",
        "op",
        "outputs",
        "proto",
        "subgraphs",
    )
    _attributes: Mapping[str, Any] | None  # None: not read yet

    def __init__(self, index: int, name: str, proto: onnx.NodeProto) -> None:
        self.index = index
        self.name = name
        self.read(proto)

    def read(self, proto: onnx.NodeProto) -> None:
        """Set all fields except ``index`` and ``name`` from a NodeProto."""
        self.proto = proto
        self.domain = proto.domain
        op, inputs, outputs = proto.op_type, proto.input[:], proto.output[:]
        # protobuf creates a new string on each access. Interned strings take less memory, and
        # comparing them is faster.
        self.op = intern(op)
        self.inputs = tuple(map(intern, inputs))
        self.outputs = tuple(map(intern, outputs))
        self.subgraphs = tuple(subgraphs_of(proto)) if proto.attribute else ()
        self.captured: tuple[str, ...] = ()
        if self.subgraphs:
            outside = map(find_outside_tensors, self.subgraphs)
            self.captured = tuple(itertools.chain.from_iterable(outside))
        self._attributes = None

    def __repr__(self) -> str:
        return f"<{self.op} {self.name}>"

    @property
    def parser_name(self) -> str:
        """Name that TensorRT's ONNX parser gives to the node's layer."""
        return self.proto.name or f"node_of_{self.output}"

    @property
    def consumed_tensors(self) -> list[str]:
        """Names of the main graph's tensors that the node and its subgraphs read."""
        return [tensor for tensor in (*self.inputs, *self.captured) if tensor]

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attribute values by name; tensors and graphs as protos, strings as ``str``."""
        if self._attributes is not None:
            return self._attributes
        attributes: dict[str, Any] = {}
        for attribute in self.proto.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            if attribute.type == onnx.AttributeProto.STRING:
                value = value.decode("utf-8", "replace")
            elif attribute.type == onnx.AttributeProto.STRINGS:
                value = [text.decode("utf-8", "replace") for text in value]
            attributes[attribute.name] = value
        self._attributes = attributes
        return attributes

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute, or ``default`` if it is missing.

        Raises:
            ModelError: The attribute is not an integer.
        """
        value = self.attributes.get(name, default)
        if isinstance(value, int):
            return value
        raise ModelError(
            f"node '{self.name}' ({self.op}) is damaged: attribute '{name}' is not an integer; "
            "export the model again",
            code="node-damaged",
            node=self.name,
        )

    def input(self, position: int) -> str:
        """Return the name of an input tensor by position; empty if the input is missing."""
        return self.inputs[position] if position < len(self.inputs) else ""

    @property
    def output(self) -> str:
        """Name of the first output tensor; empty if the node has no outputs."""
        return self.outputs[0] if self.outputs else ""


class Model:
    """An ONNX model with an index of its main graph.

    Args:
        sha256: Hash of the file's bytes, or :data:`EDITED`. If empty, `proto` is hashed when the
            hash is first needed.
        base_dir: Folder of the external weights; empty if external weights cannot be read.
        types: Model of which this model is a part or a variant. Its types are used, because tensors
            of equal names have equal types.
        constants: Model with the data of initializers that have no data in this model.

    Attributes:
        proto: The ModelProto. External weights are loaded lazily; see :meth:`constant`.
        path: Path of the file; empty for a model in memory.
        nodes: Nodes of the main graph, in file order.
        ordered: Nodes in topological order (the file's order if that is topological).
        producers: Producer of each tensor, by tensor name.
        consumers_by_tensor: Consumers of each tensor in file order, by tensor name. A node is
            listed once for each of its inputs that reads the tensor.
        initializers: TensorProtos by name.
        inputs: Names of the graph inputs that are not initializers.
        outputs: Names of the graph outputs.
        opset: Opset version of the default domain; 0 if the file states none.
        inlined_functions: Names of the file's functions that were called. The nodes of the
            functions have replaced the calls.
        function_node_names: Names that inlined nodes had in their functions, by node name.
            TensorRT's parser names layers after these names.
        cache: Results that other modules computed from the model. Each module has its own key.
            Edits empty the cache.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        path: str = "",
        sha256: str = "",
        base_dir: str = "",
        types: Model | None = None,
        constants: Model | None = None,
    ) -> None:
        self.proto = proto
        self._variant_of = types
        self._types: dict[str, TensorType] | None = None  # None: not inferred yet
        self._constants = constants
        self.path = path
        self._sha256: str | None = sha256 or None
        self.base_dir = base_dir
        self.inlined_functions: tuple[str, ...] = ()
        self.function_node_names: Mapping[str, str] = {}
        self._read()

    def _read(self) -> None:
        graph = self.proto.graph
        self._read_nodes()
        self._read_initializers()
        self.inputs = [v.name for v in graph.input if v.name not in self.initializers]
        self.outputs = [v.name for v in graph.output]
        self._output_names = frozenset(self.outputs)
        self.opset = next((o.version for o in self.proto.opset_import if o.domain in STANDARD), 0)
        self.producers: dict[str, Node] = {}
        self.consumers_by_tensor: dict[str, list[Node]] = {}
        for node in self.nodes:
            self._add_to_index(node)
        self.ordered = self._sort_nodes()
        self._arrays: dict[str, npt.NDArray[Any] | None] = {}
        self._initializer_types: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.cache: dict[str, dict[Any, Any]] = {}

    def _read_nodes(self) -> None:
        protos = list(self.proto.graph.node)
        proto_names = [proto.name for proto in protos]
        counts = Counter(proto_names)
        self.nodes = [
            Node(
                index,
                name if name and counts[name] == 1 else _unique_node_name(proto, counts),
                proto,
            )
            for index, (name, proto) in enumerate(zip(proto_names, protos, strict=True))
        ]

    def _read_initializers(self) -> None:
        stored = {} if self._constants is None else self._constants.initializers
        self.initializers: dict[str, onnx.TensorProto] = {
            tensor.name: stored.get(tensor.name, tensor) for tensor in self.proto.graph.initializer
        }

    @property
    def sha256(self) -> str:
        """SHA-256 of the file's bytes, or of the serialized ModelProto of a model in memory.

        :data:`EDITED` after edits; empty if the ModelProto is too large to be hashed.
        """
        if self._sha256 is None:
            self._sha256 = hash_message(self.proto)
        return self._sha256

    @sha256.setter
    def sha256(self, value: str | None) -> None:
        self._sha256 = value

    def copy(self) -> Model:
        """Return a copy of the model and its ModelProto, for editing.

        The hash of the copy is :data:`EDITED`. The copy does not list inlined functions.
        """
        return Model(deepcopy(self.proto), self.path, EDITED, self.base_dir, self, self._constants)

    def reindex(self) -> None:
        """Index the whole ModelProto again, after a change of opset or types."""
        self._sha256, self._types, self._variant_of = EDITED, None, None
        self.__dict__.pop("_nodes_by_name", None)
        self._read()

    def _add_to_index(self, node: Node) -> None:
        producers, consumers = self.producers, self.consumers_by_tensor
        for name in node.outputs:
            if name:
                if name in producers:
                    raise ModelError(
                        f"tensor '{name}' has two producers ('{producers[name].name}' and "
                        f"'{node.name}'); the file is damaged, export it again",
                        self.path or "model",
                        code="duplicate",
                        node=name,
                    )
                producers[name] = node
        for name in (*node.inputs, *node.captured) if node.captured else node.inputs:
            if name in consumers:
                consumers[name].append(node)
            elif name:
                consumers[name] = [node]

    def _remove_from_index(self, nodes: list[Node]) -> None:
        for node in nodes:
            for name in node.outputs:
                self.producers.pop(name, None)
        removed = set(map(id, nodes))
        for name in _input_tensors(nodes):  # each name once: many nodes may read the same scale
            remaining = [n for n in self.consumers_by_tensor[name] if id(n) not in removed]
            if remaining:
                self.consumers_by_tensor[name] = remaining
            else:
                del self.consumers_by_tensor[name]

    def _sort_nodes(self) -> list[Node]:
        order = sort_topologically(self.nodes, lambda n: n.consumed_tensors, lambda n: n.outputs)
        if len(order) != len(self.nodes):
            ordered = {node.index for node in order}
            unordered = next(node for node in self.nodes if node.index not in ordered)
            raise ModelError(
                f"the graph has a cycle at or upstream of node '{unordered.name}'; the file is "
                "damaged, export it again",
                self.path or "model",
                code="cycle",
                node=unordered.name,
            )
        return order

    def replace_nodes(
        self, nodes: Sequence[Node | onnx.NodeProto], touched: Collection[int]
    ) -> None:
        """Replace the graph's list of nodes and update the index.

        Args:
            nodes: New list in file order: remaining nodes, and the NodeProtos of new nodes.
            touched: Indices of remaining nodes whose NodeProtos were changed.

        Raises:
            ModelError: Two nodes would produce one tensor, or there would be a cycle.
        """
        remaining = {id(n): n.index for n in nodes if isinstance(n, Node)}
        is_reordered = any(a > b for a, b in itertools.pairwise(remaining.values()))
        leaving = [n for n in self.nodes if n.index in touched or id(n) not in remaining]
        self._remove_from_index(leaving)
        entering = self._replace_protos(nodes, frozenset(map(id, leaving)))
        for node in entering:
            self._add_to_index(node)
        for tensor in self.consumers_by_tensor if is_reordered else _input_tensors(entering):
            self.consumers_by_tensor[tensor].sort(key=lambda n: n.index)
        self.ordered = self._sort_nodes()
        self._types = self._variant_of = None
        self._sha256 = EDITED
        self.cache.clear()
        self.__dict__.pop("_nodes_by_name", None)

    def _replace_protos(
        self, nodes: Sequence[Node | onnx.NodeProto], changed: Container[int]
    ) -> list[Node]:
        """Replace the list of nodes and renumber the nodes; return the new and changed nodes.

        ``changed`` contains the ids of the nodes whose NodeProto was changed.
        """
        graph = self.proto.graph
        if len(nodes) != len(self.nodes) or any(map(operator.is_not, nodes, self.nodes)):
            protos = [node.proto if isinstance(node, Node) else node for node in nodes]
            del graph.node[:]
            graph.node.extend(protos)
        counts = Counter(proto.name for proto in graph.node)
        entering = []
        self.nodes = []
        for index, (entry, proto) in enumerate(zip(nodes, graph.node, strict=True)):
            node = entry if isinstance(entry, Node) else Node(index, "", proto)
            node.index, node.proto, node.name = index, proto, _unique_node_name(proto, counts)
            if id(entry) in changed:
                node.read(proto)
            if id(entry) in changed or node is not entry:
                entering.append(node)
            self.nodes.append(node)
        return entering

    def replace_constants(
        self, removed: Iterable[str], new: Mapping[str, onnx.TensorProto]
    ) -> None:
        """Update the index of the graph's initializers and inputs.

        Args:
            removed: Names of removed initializers.
            new: Initializers that were added or given another value.
        """
        for name in (*removed, *new):
            self.initializers.pop(name, None)
            self._arrays.pop(name, None)
            self._initializer_types.pop(name, None)
        self.initializers.update(new)
        self.inputs = [v.name for v in self.proto.graph.input if v.name not in self.initializers]
        self._types = self._variant_of = None

    def _conversion_types(self, node: Node) -> list[TensorType] | None:
        """Return the output type of a Q, DQ or Cast; None if unknown and for other operators."""
        if node.op not in _CONVERSIONS or node.domain not in STANDARD or len(node.outputs) != 1:
            return None
        if "output_dtype" in node.attributes:
            return None
        shape = self.tensor_type(node.input(0))[1]
        elem_type = self._conversion_type(node)
        return [(elem_type, shape)] if elem_type and shape is not None else None

    def _conversion_type(self, node: Node) -> int:
        if node.op == "Cast":
            return node.integer("to", 0)
        if node.op == "DequantizeLinear":
            return self.elem_type(node.input(1)) if self.opset >= 19 else onnx.TensorProto.FLOAT
        return self.elem_type(node.input(2)) if node.input(2) else onnx.TensorProto.UINT8

    def tensor_type(self, tensor: str) -> TensorType:
        """Return element type (0 if unknown) and dimensions (None if unknown) of a tensor."""
        elem_type, shape = self._constant_type(tensor)
        if elem_type and shape is not None:
            return elem_type, shape
        types = self._all_types() if self._types is None else self._types
        inferred = types.get(tensor, _UNKNOWN)
        if not elem_type and shape is None:
            return inferred
        return elem_type or inferred[0], inferred[1] if shape is None else shape

    def node(self, name: str) -> Node:
        """Return the node of a name (see :attr:`Node.name`).

        Raises:
            KeyError: No node has that name.
        """
        return self._nodes_by_name[name]

    def find_node(self, name: str) -> Node | None:
        """Return the node of a name, or None if no node has that name."""
        return self._nodes_by_name.get(name)

    @functools.cached_property
    def _nodes_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @property
    def positions(self) -> dict[int, int]:
        """Position of each node in topological order, by node index."""
        positions: dict[int, int] = self.cache.setdefault("positions", {})
        if not positions:
            positions.update((node.index, place) for place, node in enumerate(self.ordered))
        return positions

    def producer(self, tensor: str) -> Node | None:
        """Return the node that produces a tensor; None for inputs and initializers."""
        return self.producers.get(tensor)

    def consumers(self, tensor: str) -> list[Node]:
        """Return the nodes that read a tensor, once for each input that reads it."""
        return self.consumers_by_tensor.get(tensor, [])

    def find_downstream(self, nodes: Iterable[int]) -> set[int]:
        """Return the indices of nodes and of all nodes downstream of them."""
        found, tensors = set(nodes), set[str]()
        for node in self.ordered:
            if node.index in found or not tensors.isdisjoint(node.consumed_tensors):
                found.add(node.index)
                tensors.update(node.outputs)
        return found

    def is_output(self, tensor: str) -> bool:
        """Return whether a tensor is an output of the network."""
        return tensor in self._output_names

    def constant_proto(self, tensor: str) -> onnx.TensorProto | None:
        """Return the TensorProto of an initializer or of a Constant's ``value``, else None."""
        initializer = self.initializers.get(tensor)
        if initializer is not None:
            return initializer
        node = self.producers.get(tensor)
        if node is not None and node.op == "Constant":
            value = node.attributes.get("value")
            if isinstance(value, onnx.TensorProto):
                return value
        return None

    def is_constant(self, tensor: str) -> bool:
        """Return whether a tensor is an initializer or the output of a Constant node."""
        if tensor in self.initializers:
            return True
        node = self.producers.get(tensor)
        return node is not None and node.op == "Constant"

    def constant(self, tensor: str) -> npt.NDArray[Any] | None:
        """Return the value of an initializer or Constant.

        None for other tensors, for strings, and if the file of external data is missing.

        Raises:
            ModelError: The data is damaged, or its external file cannot be read.
        """
        if (
            self._constants is not None
            and tensor in self.initializers
            and tensor in self._constants.initializers
        ):
            return self._constants.constant(tensor)
        if tensor in self._arrays:
            return self._arrays[tensor]
        value = self._read_constant(tensor)
        if value is None or value.nbytes <= _MAX_CACHED_BYTES:
            self._arrays[tensor] = value
        return value

    def scalar(self, tensor: str) -> float | None:
        """Return the value of a constant with one element; None for other tensors."""
        value = self.constant(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def _read_constant(self, tensor: str) -> npt.NDArray[Any] | None:
        proto = self.constant_proto(tensor)
        if proto is None:
            node = self.producers.get(tensor)
            attributes = node.attributes if node is not None and node.op == "Constant" else {}
            for key, dtype in (
                ("value_float", np.float32),
                ("value_floats", np.float32),
                ("value_int", np.int64),
                ("value_ints", np.int64),
            ):
                if key in attributes:
                    return np.asarray(attributes[key], dtype=dtype)
            return None
        if proto.data_type == onnx.TensorProto.STRING:
            return None
        if external.is_external(proto):
            loaded = self.external_tensor(proto)
            if loaded is None:
                return None
            proto = loaded
        return external.to_array(proto, self.path, tensor)

    def forget_constants(self) -> None:
        """Drop all cached constants and results. Call this after adding data to initializers."""
        self._arrays.clear()
        self._initializer_types.clear()
        self.cache.clear()

    def external_tensor(self, proto: onnx.TensorProto) -> onnx.TensorProto | None:
        """Return a copy of an external tensor with its data; None if the file is missing.

        None also for a model in memory, which has no folder.

        Raises:
            ModelError: The file lies outside the model's folder, or cannot be read.
        """
        if not self.base_dir:
            return None
        location = external.read_location(proto)
        if external.find_weight_file(proto, self.base_dir, self.path) is None:
            return None
        from onnx import checker, external_data_helper

        loaded = external.copy_with_length(proto)
        try:
            # onnx refuses absolute paths, '..' and links that leave the folder.
            external_data_helper.load_external_data_for_tensor(loaded, self.base_dir)
        except (OSError, ValueError, checker.ValidationError) as error:
            raise ModelError(
                f"external data of tensor '{proto.name}' ({location!r}) is refused: "
                f"{str(error).splitlines()[0]}; export the model again, with the weights "
                "in the model's folder",
                self.path,
                code="weights-unreadable",
                node=proto.name,
            ) from error
        loaded.ClearField("external_data")
        loaded.data_location = onnx.TensorProto.DEFAULT
        return loaded

    def constant_shape(self, tensor: str) -> tuple[int, ...] | None:
        """Return the dimensions of a constant, even without its data; None for other tensors."""
        return self._constant_type(tensor)[1]

    def _constant_type(self, tensor: str) -> tuple[int, tuple[int, ...] | None]:
        proto = self.initializers.get(tensor)
        if proto is not None:
            constant_type = self._initializer_types.get(tensor)
            if constant_type is None:
                constant_type = int(proto.data_type), tuple(proto.dims)
                self._initializer_types[tensor] = constant_type
            return constant_type
        node = self.producers.get(tensor)
        if node is None or node.op != "Constant":
            return _UNKNOWN
        proto = self.constant_proto(tensor)
        if proto is not None:
            return int(proto.data_type), tuple(proto.dims)
        value = self.constant(tensor)
        return 0, None if value is None else value.shape

    def _all_types(self) -> dict[str, TensorType]:
        if self._types is not None:
            return self._types
        if self._variant_of is not None:
            return self._variant_of._all_types()
        return self._infer_node_types() or self._infer_graph_types()

    def _infer_node_types(self) -> dict[str, TensorType] | None:
        """Infer missing types node by node, which is fast; None if that is not possible.

        Inference fails if a node's output types are unknown or contradict the file. Exporters
        state the types of float tensors, but quantization tools do not state the types of tensors
        that they add.
        """
        cache = NodeTypeCache(self.proto)
        types = self._types = self._read_stated_types()
        for node in self.ordered:
            if self._is_typed(node):
                continue
            outputs = self._conversion_types(node) or cache.infer_outputs(
                node.proto, node.op, [self.tensor_type(tensor) for tensor in node.inputs]
            )
            if outputs is None:
                return None
            for tensor, inferred in zip(node.outputs, outputs, strict=False):
                if types.get(tensor, _UNKNOWN)[0] not in (0, inferred[0]):
                    return None
                types[tensor] = inferred
        return types

    def _infer_graph_types(self) -> dict[str, TensorType]:
        types = self._types = self._read_stated_types()
        read: dict[bytes, TensorType] = {}  # most tensors of a network share their types
        for tensor, proto in (infer_types(strip_large_weights(self.proto)) or {}).items():
            if types.get(tensor, _UNKNOWN)[1] is None:
                key = proto.SerializeToString()
                if key not in read:
                    read[key] = _read_type(proto)
                types[tensor] = read[key]
        return types

    def _read_stated_types(self) -> dict[str, TensorType]:
        graph = self.proto.graph
        values = (*graph.value_info, *graph.input, *graph.output)
        return {value.name: _read_type(value.type) for value in values}

    def _is_typed(self, node: Node) -> bool:
        return None not in [(self._types or {}).get(t, _UNKNOWN)[1] for t in node.outputs if t]

    def shape(self, tensor: str) -> Shape | None:
        """Return a tensor's dimensions, each None if dynamic; None if even the rank is unknown."""
        return self.tensor_type(tensor)[1]

    def elem_type(self, tensor: str) -> int:
        """Return the ONNX element type (``TensorProto.FLOAT``) of a tensor; 0 if unknown."""
        return self.tensor_type(tensor)[0]

    @property
    def metadata(self) -> dict[str, str]:
        """The model's ``metadata_props``, such as Ultralytics' ``names``, ``stride``, ``imgsz``."""
        return {p.key: p.value for p in self.proto.metadata_props}


def _unique_node_name(node: onnx.NodeProto, counts: Counter[str]) -> str:
    if node.name and counts[node.name] == 1:
        return node.name
    return next((tensor for tensor in node.output if tensor), node.name)


def _input_tensors(nodes: Iterable[Node]) -> set[str]:
    return {tensor for node in nodes for tensor in node.consumed_tensors}


def _read_type(value: onnx.TypeProto) -> TensorType:
    tensor = value.tensor_type
    if not tensor.HasField("shape"):
        return int(tensor.elem_type), None
    shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return int(tensor.elem_type), shape if external.are_possible_dims(
        [d or 1 for d in shape]
    ) else None


def hash_message(proto: onnx.ModelProto) -> str:
    """Return the SHA-256 of a serialized ModelProto; empty if it is too large for a file."""
    parts = external.serialize_in_parts(proto)
    if parts is None or sum(map(len, parts)) > limits.MODEL_MESSAGE:
        return ""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
