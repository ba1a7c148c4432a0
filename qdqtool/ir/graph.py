"""The ONNX model as the rest of qdqtool needs it: producers, consumers, constants, names, shapes.

A model is indexed once, when it is loaded. What changes it afterwards is an :class:`qdqtool.ir.editor.Editor`,
which keeps the index true through :meth:`Model.replace_nodes`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from sys import intern
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError

from qdqtool.errors import ModelError
from qdqtool.proto import external_data as external
from qdqtool.proto.external_data import MessageParts
from qdqtool.proto.shapes import NodeTypeCache, infer_types
from qdqtool.proto.slim import without_large_weights
from qdqtool.proto.subgraphs import STANDARD, captured_tensors, require_utf8, sort_topologically
from qdqtool.util import limits

Shape = tuple[int | None, ...]
TensorType = tuple[int, Shape | None]  # ONNX element type (0 when unknown), and dimensions
EDITED = "edited"  # in the place of a hash, for a model that is no file's
# The results' shapes of these do not depend on values that they read, but on types and dimensions alone.
_BY_SHAPE = frozenset(
    {
        "BatchNormalization",
        "Conv",
        "ConvTranspose",
        "DequantizeLinear",
        "Gemm",
        "MatMul",
        "QuantizeLinear",
    }
)
_VALUES = {  # the field of an attribute that holds its value, by its type; read here once for each attribute of a model
    onnx.AttributeProto.FLOAT: "f",
    onnx.AttributeProto.INT: "i",
    onnx.AttributeProto.STRING: "s",
    onnx.AttributeProto.TENSOR: "t",
    onnx.AttributeProto.GRAPH: "g",
    onnx.AttributeProto.FLOATS: "floats",
    onnx.AttributeProto.INTS: "ints",
    onnx.AttributeProto.STRINGS: "strings",
}
_UNKNOWN: tuple[int, None] = (0, None)
_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
_KEPT = (
    1 << 16
)  # bytes; values of larger constants are read anew each time: kept, they would be all weights once more


class Node:
    """A node of the main graph.

    Attributes:
        index: Place in the graph's node list.
        name: The node's name, or its first output's name where the name is missing or not unique.
        op: Operator type.
        inputs: Input tensor names; an empty string is an optional input that is not set.
        outputs: Output tensor names.
        captured: Tensors of the main graph that the node's subgraphs (If, Loop, Scan) read.
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
    )
    _attributes: Mapping[str, Any] | None  # None: not read yet

    def __init__(self, index: int, name: str, proto: onnx.NodeProto) -> None:
        self.index = index
        self.name = name
        self.read(proto)

    def read(self, proto: onnx.NodeProto) -> None:
        """Takes all but place and name from a message."""
        self.proto = proto
        self.domain = proto.domain
        op, inputs, outputs = proto.op_type, proto.input[:], proto.output[:]
        try:  # protobuf makes a text of its own at each place: one for all takes less memory, and is found sooner
            self.op, self.inputs, self.outputs = (
                intern(op),
                tuple(map(intern, inputs)),
                tuple(map(intern, outputs)),
            )
        except TypeError:  # bytes: no UTF-8, which a model refuses
            self.op, self.inputs, self.outputs = op, tuple(inputs), tuple(outputs)
        if proto.attribute:
            self.captured = tuple(captured_tensors(proto))
            self._attributes = None
        else:
            self.captured = ()
            self._attributes = _NO_ATTRIBUTES

    def with_proto(self, proto: onnx.NodeProto) -> Node:
        """The same node with a message of its own."""
        found = Node.__new__(Node)
        found.index, found.name, found.op, found.domain = (
            self.index,
            self.name,
            self.op,
            self.domain,
        )
        found.inputs, found.outputs, found.captured, found.proto = (
            self.inputs,
            self.outputs,
            self.captured,
            proto,
        )
        found._attributes = _NO_ATTRIBUTES if self._attributes is _NO_ATTRIBUTES else None
        return found

    def __repr__(self) -> str:
        return f"<{self.op} {self.name}>"

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attribute values by name; tensors and graphs as protos, strings as ``str``."""
        if self._attributes is None:
            self._attributes = self._read_attributes()
        return self._attributes

    def _read_attributes(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for attribute in self.proto.attribute:
            field = "" if attribute.ref_attr_name else _VALUES.get(attribute.type, "")
            value = (
                getattr(attribute, field) if field else onnx.helper.get_attribute_value(attribute)
            )
            if field == "s":
                value = value.decode("utf-8", "replace")
            elif field == "strings":
                value = [v.decode("utf-8", "replace") for v in value]
            elif field in ("ints", "floats"):
                value = list(value)
            result[attribute.name] = value
        return result

    def integer(self, name: str, default: int) -> int:
        """An integer attribute.

        Raises:
            ModelError: It is there and is no integer.
        """
        value = self.attributes.get(name, default)
        if isinstance(value, int):
            return value
        raise ModelError(
            f"node '{self.name}' ({self.op}) is damaged: attribute '{name}' is not an integer",
            code="node-damaged",
            node=self.name,
        )

    def input(self, position: int) -> str:
        """The input tensor at a position; an empty string where there is none."""
        return self.inputs[position] if position < len(self.inputs) else ""

    @property
    def output(self) -> str:
        """The first output tensor."""
        return self.outputs[0] if self.outputs else ""


class Model:
    """An ONNX model with its index.

    Args:
        sha256: Hash of the bytes that were read, or :data:`EDITED`; without one the message's own, when asked for.
        types: A model of which this one is a part or a variant: its tensors of the same names have the same types and
            dimensions, so that they need not be inferred again.
        constants: A model that holds the data of this one's initializers, which are placeholders without any.

    Attributes:
        proto: The model; external weights are loaded lazily, see :meth:`constant`.
        path: Where it came from; an empty string for a model in memory.
        sha256: Hash of the bytes that were read.
        nodes: The main graph's nodes, in file order.
        ordered: The same in a topological order (file order where that already is one).
        producers: Tensor name to the node that makes it.
        consumers_by_tensor: Tensor name to the nodes that read it, in order, once for each input that reads it.
        initializers: Name to TensorProto.
        inputs: Names of the graph inputs that are not initializers.
        outputs: Names of the graph outputs.
        opset: Version of the default domain.
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
        self._types: dict[str, TensorType] | None = None  # not inferred yet
        self._constants = constants
        self.path = path
        self._sha256: str | None = sha256 or None
        self.base_dir = base_dir
        self._read()

    def _read(self) -> None:
        graph = self.proto.graph
        protos = list(graph.node)
        given = [n.name for n in protos]
        names = Counter(given)
        self.nodes = [
            Node(i, name if name and names[name] == 1 else _label(n, names), n)
            for i, (name, n) in enumerate(zip(given, protos, strict=True))
        ]
        stated = (
            names,
            {n.op for n in self.nodes},
            {n.domain for n in self.nodes},
            *(n.inputs for n in self.nodes),
            *(n.outputs for n in self.nodes),
        )
        require_utf8(list(itertools.chain.from_iterable(stated)), self.path or "model in memory")
        kept = {} if self._constants is None else self._constants.initializers
        self.initializers: dict[str, onnx.TensorProto] = {
            t.name: kept.get(t.name, t) for t in graph.initializer
        }
        self.inputs = [v.name for v in graph.input if v.name not in self.initializers]
        self.outputs = [v.name for v in graph.output]
        self._output_names = frozenset(self.outputs)
        self.opset = next((o.version for o in self.proto.opset_import if o.domain in STANDARD), 0)
        self.producers: dict[str, Node] = {}
        self.consumers_by_tensor: dict[str, list[Node]] = {}
        for node in self.nodes:
            self._enter(node)
        self.ordered = self._order()
        self._arrays: dict[str, npt.NDArray[Any] | None] = {}
        self._stated: dict[str, tuple[int, tuple[int, ...]]] = {}  # types of initializers
        #: What other modules worked out, by node index or tensor; dropped with the constants that it came from.
        self.cache: dict[str, dict[Any, Any]] = {}

    @property
    def sha256(self) -> str:
        """Hash of the bytes that were read; of the message, for a model in memory."""
        if self._sha256 is None:
            self._sha256 = _hash_of(self.proto)
        return self._sha256

    @sha256.setter
    def sha256(self, value: str | None) -> None:
        self._sha256 = value

    def copy(self) -> Model:
        """The same model with a message of its own, to be edited."""
        found = copy.copy(self)
        found.__dict__.pop("_by_name", None)
        found.proto, found._sha256, found._arrays, found._stated, found.cache = (
            onnx.ModelProto(),
            EDITED,
            {},
            {},
            {},
        )
        found.proto.CopyFrom(self.proto)
        kept = {} if self._constants is None else self._constants.initializers
        found.initializers = {t.name: kept.get(t.name, t) for t in found.proto.graph.initializer}
        found.nodes = [
            node.with_proto(proto)
            for node, proto in zip(self.nodes, found.proto.graph.node, strict=True)
        ]
        found.ordered = [found.nodes[n.index] for n in self.ordered]
        found.producers = {t: found.nodes[n.index] for t, n in self.producers.items()}
        found.consumers_by_tensor = {
            t: [found.nodes[n.index] for n in nodes]
            for t, nodes in self.consumers_by_tensor.items()
        }
        return found

    def reindex(self) -> None:
        """Indexes the message anew, after all of it was written anew: inlined, or in another opset or type."""
        self._sha256, self._types, self._variant_of = EDITED, None, None
        self.__dict__.pop("_by_name", None)
        self._read()

    def _enter(self, node: Node) -> None:
        producers, consumers = self.producers, self.consumers_by_tensor
        for name in node.outputs:
            if name:
                if name in producers:
                    raise ModelError(
                        f"tensor '{name}' is made by two nodes ('{self.producers[name].name}' and '{node.name}'); "
                        "the file is damaged, export it again",
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

    def _leave(self, nodes: list[Node]) -> None:
        for name in (t for n in nodes for t in n.outputs):
            self.producers.pop(name, None)
        gone = set(map(id, nodes))
        for name in {
            t for n in nodes for t in (*n.inputs, *n.captured) if t
        }:  # once each: all may read one scale
            left = [n for n in self.consumers_by_tensor[name] if id(n) not in gone]
            if left:
                self.consumers_by_tensor[name] = left
            else:
                del self.consumers_by_tensor[name]

    def _order(self) -> list[Node]:
        order = sort_topologically(
            self.nodes, lambda n: (*n.inputs, *n.captured), lambda n: n.outputs
        )
        if len(order) != len(self.nodes):
            made = {n.index for n in order}
            stuck = next(n for n in self.nodes if n.index not in made)
            raise ModelError(
                f"the graph has a cycle through node '{stuck.name}'",
                self.path or "model",
                code="cycle",
                node=stuck.name,
            )
        return order

    def replace_nodes(
        self, nodes: Sequence[Node | onnx.NodeProto], touched: Collection[int]
    ) -> None:
        """Gives the graph another list of nodes, and brings the index up to date where something changed.

        Args:
            nodes: The nodes from now on, in file order: old ones, and the messages of new ones.
            touched: Indices of old ones whose messages were changed.

        Raises:
            ModelError: A tensor would be made by two nodes, or there would be a cycle.
        """
        graph, old = self.proto.graph, self.nodes
        stay = {id(n): n.index for n in nodes if isinstance(n, Node)}
        reordered = any(a > b for a, b in itertools.pairwise(stay.values()))
        leaving = [n for n in old if n.index in touched or id(n) not in stay]
        before = {id(n): (n.inputs, n.outputs) for n in leaving}
        self._leave(leaving)
        if len(nodes) != len(old) or any(a is not b for a, b in zip(nodes, old, strict=True)):
            protos = [n.proto if isinstance(n, Node) else n for n in nodes]
            del graph.node[:]
            graph.node.extend(protos)
        names = Counter(n.name for n in graph.node)
        entering = []
        self.nodes = []
        for index, (entry, proto) in enumerate(zip(nodes, graph.node, strict=True)):
            node = entry if isinstance(entry, Node) else Node(index, "", proto)
            node.index, node.proto, node.name = index, proto, _label(proto, names)
            if id(entry) in before:
                node.read(proto)
            if id(entry) in before or node is not entry:
                entering.append(node)
            self.nodes.append(node)
        for node in entering:
            self._enter(node)
        for name in (
            list(self.consumers_by_tensor)
            if reordered
            else {t for n in entering for t in (*n.inputs, *n.captured) if t}
        ):
            self.consumers_by_tensor[name].sort(key=lambda n: n.index)
        self.ordered = self._order()
        self._update_types(entering, before)
        self._sha256 = EDITED
        self.cache.clear()
        self.__dict__.pop("_by_name", None)

    def replace_constants(
        self, gone: Iterable[str], new: Mapping[str, onnx.TensorProto], retyped: bool
    ) -> None:
        """Brings the index up to date with the graph's initializers and inputs.

        Args:
            gone: Names that are no initializers any more, or Constants that have become some.
            new: Initializers that were added or given another value.
            retyped: Whether a type or dimension of what was there may be another now.
        """
        for name in (*gone, *new):
            self.initializers.pop(name, None)
            self._arrays.pop(name, None)
            self._stated.pop(name, None)
        self.initializers.update(new)
        self.inputs = [v.name for v in self.proto.graph.input if v.name not in self.initializers]
        if retyped:
            self._types = self._variant_of = None

    def _update_types(
        self, entering: list[Node], before: Mapping[int, tuple[Sequence[str], Sequence[str]]]
    ) -> None:
        """Types of what new and changed nodes make; all are inferred again, when asked for, where one is not known."""
        if self._types is None and self._variant_of is None:
            return
        known = self._known_types()
        types = self._types = dict(known)
        self._variant_of = None
        for tensor in {
            t for _, outputs in before.values() for t in outputs
        } - self.producers.keys():
            types.pop(tensor, None)
        new = {id(n) for n in entering}
        if not all(self._is_typed(n) for n in self.nodes if id(n) not in new):
            self._types = None
            return
        for node in self.ordered:
            if id(node) not in new:
                continue
            found = (
                self._made(node)
                if id(node) not in before
                else self._kept(node, *before[id(node)], known)
            )
            if found is None or any(
                types.setdefault(t, found[i]) != found[i] for i, t in enumerate(node.outputs) if t
            ):
                self._types = None
                return

    def _kept(
        self,
        node: Node,
        inputs: Sequence[str],
        outputs: Sequence[str],
        known: Mapping[str, TensorType],
    ) -> list[TensorType] | None:
        """Types of a changed node's results, where it reads what has the types of what it read before."""
        for old, new in itertools.zip_longest(inputs, node.inputs, fillvalue=""):
            if old == new:
                continue
            values = self.is_constant(new) or self.is_constant(old)
            was = self.tensor_type(old) if self.is_constant(old) else known.get(old, (0, None))
            if was != self.tensor_type(new) or (values and node.op not in _BY_SHAPE):
                return self._made(node)
        if len(outputs) != len(node.outputs) or node.op in (
            "QuantizeLinear",
            "DequantizeLinear",
            "Cast",
        ):
            return self._made(node)
        return [known.get(t, (0, None)) for t in outputs]

    def _made(self, node: Node) -> list[TensorType] | None:
        """Types of what a Q, DQ or Cast makes; None for other operators and where something is not known."""
        if (
            node.domain not in STANDARD
            or len(node.outputs) != 1
            or "output_dtype" in node.attributes
        ):
            return None
        kind = 0
        if node.op == "QuantizeLinear":
            kind = (
                self.tensor_type(node.input(2))[0] if node.input(2) else int(onnx.TensorProto.UINT8)
            )
        elif node.op == "DequantizeLinear":
            kind = (
                self.tensor_type(node.input(1))[0]
                if self.opset >= 19
                else int(onnx.TensorProto.FLOAT)
            )
        elif node.op == "Cast":
            kind = node.integer("to", 0)
        shape = self.tensor_type(node.input(0))[1]
        return [(kind, shape)] if kind and shape is not None else None

    def tensor_type(self, tensor: str) -> TensorType:
        """What :meth:`elem_type` and :meth:`shape` say."""
        kind, shape = found = self._constant_type(tensor)
        if shape is not None and kind:
            return kind, shape
        known = (self._known_types() if self._types is None else self._types).get(tensor, _UNKNOWN)
        return (
            known if found is _UNKNOWN else (kind or known[0], known[1] if shape is None else shape)
        )

    def node(self, name: str) -> Node:
        """The node of that name (see :attr:`Node.name`).

        Raises:
            KeyError: There is none.
        """
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    def producer(self, tensor: str) -> Node | None:
        return self.producers.get(tensor)

    def consumers(self, tensor: str) -> list[Node]:
        """The nodes that read a tensor, once for each input that reads it."""
        return self.consumers_by_tensor.get(tensor, [])

    def is_output(self, tensor: str) -> bool:
        return tensor in self._output_names

    def constant_proto(self, tensor: str) -> onnx.TensorProto | None:
        """The TensorProto behind an initializer or a Constant node with a tensor value, else None."""
        found = self.initializers.get(tensor)
        if found is not None:
            return found
        node = self.producers.get(tensor)
        if node is not None and node.op == "Constant":
            value = node.attributes.get("value")
            if isinstance(value, onnx.TensorProto):
                return value
        return None

    def is_constant(self, tensor: str) -> bool:
        """Whether a tensor is an initializer or the output of a Constant node."""
        if tensor in self.initializers:
            return True
        node = self.producers.get(tensor)
        return node is not None and node.op == "Constant"

    def constant(self, tensor: str) -> npt.NDArray[Any] | None:
        """The value of an initializer or Constant; None when it is neither, text, or its data is not available."""
        if (
            self._constants is not None
            and tensor in self.initializers
            and tensor in self._constants.initializers
        ):
            return self._constants.constant(tensor)
        if tensor in self._arrays:
            return self._arrays[tensor]
        value = self._read_constant(tensor)
        if value is None or value.nbytes <= _KEPT:
            self._arrays[tensor] = value
        return value

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
        if proto.data_type == onnx.TensorProto.STRING:  # nobody computes with it
            return None
        if external.is_external(proto):
            loaded = self.external_tensor(proto)
            if loaded is None:
                return None
            proto = loaded
        return external.to_array(proto, self.path, tensor)

    def forget_constants(self) -> None:
        """Drops the cached values of constants, after their protos were filled in."""
        self._arrays.clear()
        self._stated.clear()
        self.cache.clear()

    def external_tensor(self, proto: onnx.TensorProto) -> onnx.TensorProto | None:
        """A copy of an external tensor with its data, None when the file is not there."""
        if not self.base_dir:
            return None
        location = external.location_of(proto)
        if external.path_of(proto, self.base_dir, self.path) is None:
            return None
        from onnx import checker, external_data_helper

        loaded = external.with_length(proto)
        try:
            # onnx refuses absolute paths, '..' and links that leave the folder.
            external_data_helper.load_external_data_for_tensor(loaded, self.base_dir)
        except (OSError, ValueError, checker.ValidationError) as error:
            raise ModelError(
                f"external data of tensor '{proto.name}' ({location!r}) is refused: {str(error).splitlines()[0]}",
                self.path,
                code="weights-unreadable",
                node=proto.name,
            ) from error
        loaded.ClearField("external_data")
        loaded.data_location = onnx.TensorProto.DEFAULT
        return loaded

    def constant_shape(self, tensor: str) -> tuple[int, ...] | None:
        """Dimensions of a constant, known even when its data is not available."""
        return self._constant_type(tensor)[1]

    def _constant_type(self, tensor: str) -> tuple[int, tuple[int, ...] | None]:
        """Type and dimensions of a constant; 0 and None of what is none."""
        proto = self.initializers.get(tensor)
        if proto is not None:
            known = self._stated.get(tensor)
            if known is None:
                known = self._stated[tensor] = int(proto.data_type), tuple(proto.dims)
            return known
        node = self.producers.get(tensor)
        if node is None or node.op != "Constant":
            return _UNKNOWN
        proto = self.constant_proto(tensor)
        if proto is not None:
            return int(proto.data_type), tuple(proto.dims)
        value = self.constant(tensor)
        return 0, None if value is None else value.shape

    def _known_types(self) -> dict[str, TensorType]:
        """What the file states, and where it does not, what is inferred from it."""
        if self._types is not None:
            return self._types
        if self._variant_of is not None:
            return self._variant_of._known_types()
        graph = self.proto.graph
        stated = (*graph.value_info, *graph.input, *graph.output)
        cache = NodeTypeCache(self.proto)
        types = self._types = {v.name: _type_of(v.type) for v in stated}
        # Exporters state the float tensors, and quantizers leave out their own.
        for node in (n for n in self.ordered if not self._is_typed(n)):
            found = self._made(node) or cache.outputs(
                node.proto, node.op, [self.tensor_type(t) for t in node.inputs]
            )
            made: dict[str, TensorType] = dict(zip(node.outputs, found or (), strict=False))
            if found is None or True in [
                types.get(t, _UNKNOWN)[0] not in (0, kind[0]) for t, kind in made.items()
            ]:
                break
            types.update(made)
        else:
            return types
        types = self._types = {v.name: _type_of(v.type) for v in stated}
        read: dict[
            bytes, TensorType
        ] = {}  # most tensors of a network have a type that another one has
        for name, kind in (infer_types(without_large_weights(self.proto)) or {}).items():
            if types.get(name, _UNKNOWN)[1] is None:
                key = kind.SerializeToString()
                if key not in read:
                    read[key] = _type_of(kind)
                types[name] = read[key]
        return types

    def _is_typed(self, node: Node) -> bool:
        return None not in [(self._types or {}).get(t, _UNKNOWN)[1] for t in node.outputs if t]

    def shape(self, tensor: str) -> Shape | None:
        """Dimensions of a tensor (None for a symbolic one), or None when the rank is unknown."""
        return self.tensor_type(tensor)[1]

    def elem_type(self, tensor: str) -> int:
        """ONNX element type (``onnx.TensorProto.FLOAT`` ...) of a tensor; 0 when unknown."""
        return self.tensor_type(tensor)[0]

    @property
    def metadata(self) -> dict[str, str]:
        """The model's ``metadata_props`` (Ultralytics keeps ``names``, ``stride`` and ``imgsz`` there)."""
        return {p.key: p.value for p in self.proto.metadata_props}


def _label(node: onnx.NodeProto, names: Counter[str]) -> str:
    return (
        node.name
        if node.name and names[node.name] == 1
        else next((o for o in node.output if o), node.name)
    )


def _type_of(value: onnx.TypeProto) -> TensorType:
    tensor = value.tensor_type
    if not tensor.HasField("shape"):
        return int(tensor.elem_type), None
    shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return int(tensor.elem_type), shape if external.is_possible([d or 1 for d in shape]) else None


def _hash_of(proto: onnx.ModelProto) -> str:
    try:
        parts = MessageParts(proto)
        if parts.size > limits.MODEL_MESSAGE:
            return ""  # no file that it could identify
        found = hashlib.sha256()
        for part in parts:
            found.update(part)
    except (ValueError, EncodeError):
        return ""
    return found.hexdigest()
