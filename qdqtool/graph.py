"""The ONNX model as the rest of qdqtool needs it: producers, consumers, constants, names, shapes.

The index is read-only. Code that changes a model edits the ``ModelProto`` and builds a new index.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError
from onnx import external_data_helper

from qdqtool import budgets, external
from qdqtool.errors import ModelError
from qdqtool.inference import infer
from qdqtool.message import Parts
from qdqtool.subgraphs import captured

Shape = tuple[int | None, ...]
_KEEP_FOR_SHAPES = 4096  # bytes; constants up to this size may be shapes that shape inference has to read
_KEPT = 1 << 16  # bytes; values of larger constants are read anew each time: kept, they would be all weights once more


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

    __slots__ = ("__dict__", "captured", "domain", "index", "inputs", "name", "op", "outputs", "proto")

    def __init__(self, index: int, name: str, proto: onnx.NodeProto) -> None:
        self.index = index
        self.name = name
        self.proto = proto
        self.op = proto.op_type
        self.domain = proto.domain
        self.inputs = tuple(proto.input)
        self.outputs = tuple(proto.output)
        self.captured: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.op} {self.name}>"

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """Attribute values by name; tensors and graphs as protos, strings as ``str``."""
        result: dict[str, Any] = {}
        for attribute in self.proto.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            elif isinstance(value, list) and value and isinstance(value[0], bytes):
                value = [v.decode("utf-8", "replace") for v in value]
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
        raise ModelError(f"node '{self.name}' ({self.op}) is damaged: attribute '{name}' is not an integer")

    def input(self, position: int) -> str:
        """The input tensor at a position; an empty string where there is none."""
        return self.inputs[position] if position < len(self.inputs) else ""

    @property
    def output(self) -> str:
        """The first output tensor."""
        return self.outputs[0] if self.outputs else ""


class Model:
    """A read-only index over an ONNX model.

    Args:
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
        consumers: Tensor name to the nodes that read it, in order, once for each input that reads it.
        initializers: Name to TensorProto.
        inputs: Names of the graph inputs that are not initializers.
        outputs: Names of the graph outputs.
        opset: Version of the default domain.
    """

    def __init__(
        self, proto: onnx.ModelProto, path: str = "", sha256: str = "", base_dir: str = "", types: Model | None = None,
        constants: Model | None = None,
    ) -> None:
        self.proto = proto
        self._types = types
        self._constants = constants
        self.path = path
        self.sha256 = sha256 or _hash_of(proto)
        self.base_dir = base_dir
        graph = proto.graph
        names = Counter(n.name for n in graph.node)
        self.nodes = [Node(i, _label(n, names), n) for i, n in enumerate(graph.node)]
        self.initializers: dict[str, onnx.TensorProto] = {t.name: t for t in graph.initializer}
        if constants is not None:
            self.initializers = {t: constants.initializers.get(t, own) for t, own in self.initializers.items()}
        self.inputs = [v.name for v in graph.input if v.name not in self.initializers]
        self.outputs = [v.name for v in graph.output]
        self.opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
        self.producers: dict[str, Node] = {}
        self.consumers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.outputs:
                if name:
                    if name in self.producers:
                        raise ModelError(
                            f"{path or 'model'}: tensor '{name}' is made by two nodes "
                            f"('{self.producers[name].name}' and '{node.name}'); the file is damaged, export it again"
                        )
                    self.producers[name] = node
            node.captured = tuple(captured(node.proto))
            for name in (*node.inputs, *node.captured):
                if name:
                    self.consumers.setdefault(name, []).append(node)
        self.ordered = self._order()
        self._arrays: dict[str, npt.NDArray[Any] | None] = {}
        #: What other modules worked out, by node index or tensor; dropped with the constants that it came from.
        self.memory: dict[str, dict[Any, Any]] = {}

    def _order(self) -> list[Node]:
        ready: set[str] = set()
        for node in self.nodes:
            if any(t in self.producers and t not in ready for t in (*node.inputs, *node.captured)):
                break
            ready.update(node.outputs)
        else:
            return self.nodes
        waiting = {
            n.index: len({t for t in (*n.inputs, *n.captured) if t in self.producers}) for n in self.nodes
        }
        queue = [n for n in self.nodes if not waiting[n.index]]
        order: list[Node] = []
        for node in queue:
            order.append(node)
            for tensor in node.outputs:
                for reader in dict.fromkeys(self.consumers.get(tensor, ())):
                    waiting[reader.index] -= 1
                    if not waiting[reader.index]:
                        queue.append(reader)
        if len(order) != len(self.nodes):
            stuck = next(n for n in self.nodes if waiting[n.index] > 0)
            raise ModelError(f"{self.path or 'model'}: the graph has a cycle through node '{stuck.name}'")
        return order

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

    def readers(self, tensor: str) -> list[Node]:
        """The nodes that read a tensor, once for each input that reads it."""
        return self.consumers.get(tensor, [])

    def is_output(self, tensor: str) -> bool:
        return tensor in self._outputs

    @functools.cached_property
    def _outputs(self) -> frozenset[str]:
        return frozenset(self.outputs)

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
        """The value of an initializer or Constant; None when it is neither or its data is not at hand."""
        if self._constants is not None and tensor in self.initializers and tensor in self._constants.initializers:
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
            if node is None or node.op != "Constant":
                return None
            attributes = node.attributes
            for key, dtype in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64),
                               ("value_ints", np.int64)):
                if key in attributes:
                    return np.asarray(attributes[key], dtype=dtype)
            return None
        if external_data_helper.uses_external_data(proto):
            loaded = self.external_tensor(proto)
            if loaded is None:
                return None
            proto = loaded
        return external.array_of(proto, self.path, tensor)

    def forget_constants(self) -> None:
        """Drops the cached values of constants, after their protos were filled in."""
        self._arrays.clear()
        self.memory.clear()

    def external_tensor(self, proto: onnx.TensorProto) -> onnx.TensorProto | None:
        """A copy of an external tensor with its data, None when the file is not there."""
        if not self.base_dir:
            return None
        location = external_location(proto)
        if external.path_of(proto, self.base_dir, self.path) is None:
            return None
        loaded = onnx.TensorProto()
        loaded.CopyFrom(proto)
        try:
            # onnx refuses absolute paths, '..' and links that leave the folder.
            external_data_helper.load_external_data_for_tensor(loaded, self.base_dir)
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            raise ModelError(
                f"{self.path}: external data of tensor '{proto.name}' ({location!r}) is refused: "
                f"{str(error).splitlines()[0]}"
            ) from error
        loaded.ClearField("external_data")
        loaded.data_location = onnx.TensorProto.DEFAULT
        return loaded

    def constant_shape(self, tensor: str) -> tuple[int, ...] | None:
        """Dimensions of a constant, known even when its data is not at hand."""
        proto = self.constant_proto(tensor)
        if proto is not None:
            return tuple(proto.dims)
        value = self.constant(tensor)
        return None if value is None else value.shape

    @functools.cached_property
    def _value_info(self) -> dict[str, onnx.TypeProto]:
        if self._types is not None:
            return self._types._value_info
        graph = self.proto.graph
        known = {v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)}
        if any(not _complete(known.get(t)) for n in self.nodes for t in n.outputs if t):
            for name, kind in (infer(without_large_weights(self.proto)) or {}).items():
                if not _complete(known.get(name)):
                    known[name] = kind
        return known

    def shape(self, tensor: str) -> Shape | None:
        """Dimensions of a tensor (None for a symbolic one), or None when the rank is unknown."""
        constant = self.constant_shape(tensor)
        if constant is not None:
            return constant
        type_proto = self._value_info.get(tensor)
        if type_proto is None or not type_proto.tensor_type.HasField("shape"):
            return None
        return tuple(d.dim_value if d.HasField("dim_value") else None for d in type_proto.tensor_type.shape.dim)

    def elem_type(self, tensor: str) -> int:
        """ONNX element type (``onnx.TensorProto.FLOAT`` ...) of a tensor; 0 when unknown."""
        proto = self.constant_proto(tensor)
        if proto is not None:
            return int(proto.data_type)
        type_proto = self._value_info.get(tensor)
        return int(type_proto.tensor_type.elem_type) if type_proto is not None else 0

    @property
    def metadata(self) -> dict[str, str]:
        """The model's ``metadata_props`` (Ultralytics keeps ``names``, ``stride`` and ``imgsz`` there)."""
        return {p.key: p.value for p in self.proto.metadata_props}


def _label(node: onnx.NodeProto, names: Counter[str]) -> str:
    if node.name and names[node.name] == 1:
        return node.name
    return next((o for o in node.output if o), node.name)


def _complete(type_proto: onnx.TypeProto | None) -> bool:
    return type_proto is not None and type_proto.tensor_type.HasField("shape")


def all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that a graph stores: initializers, and those in attributes and subgraphs."""
    return external.all_tensors(graph)


def external_location(proto: onnx.TensorProto) -> str:
    """The file, relative to the model's folder, that holds an external tensor."""
    return external.location_of(proto)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a tensor's message; 2 GB for one that protobuf cannot measure because it is larger."""
    try:
        return int(tensor.ByteSize())
    except (ValueError, EncodeError):
        return 2**31


def without_large_weights(proto: onnx.ModelProto, keep: int = _KEEP_FOR_SHAPES) -> onnx.ModelProto:
    """A copy whose initializers of more than ``keep`` bytes have dimensions and type but no data."""
    slim = onnx.ModelProto()
    slim.ir_version = proto.ir_version
    slim.opset_import.extend(proto.opset_import)
    slim.functions.extend(proto.functions)
    graph = slim.graph
    graph.name = proto.graph.name
    graph.node.extend(proto.graph.node)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    graph.value_info.extend(proto.graph.value_info)
    graph.sparse_initializer.extend(proto.graph.sparse_initializer)
    for tensor in proto.graph.initializer:
        if tensor_bytes(tensor) <= keep:
            graph.initializer.add().CopyFrom(tensor)
        else:
            graph.initializer.add().CopyFrom(without_data(tensor))
    return slim


def without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Name, type and dimensions of a tensor, without its data."""
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)


def _hash_of(proto: onnx.ModelProto) -> str:
    try:
        parts = Parts(proto)
        if parts.size > budgets.MODEL_MESSAGE:
            return ""  # no file that could be told by it
        found = hashlib.sha256()
        for part in parts:
            found.update(part)
    except (ValueError, EncodeError):
        return ""
    return found.hexdigest()
