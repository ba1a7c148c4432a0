"""Reading and writing ONNX files: compressed, with external weights, atomically; and what any model must be."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import onnx
from google.protobuf.message import DecodeError, EncodeError

from qdqtool.errors import ModelError
from qdqtool.ir import file_types
from qdqtool.ir.graph import Model
from qdqtool.proto import external_data as external
from qdqtool.proto.external_data import MessageParts
from qdqtool.proto.slim import tensor_bytes, without_large_weights
from qdqtool.proto.subgraphs import check_functions, require_utf8, with_subgraph_nodes
from qdqtool.util import compression, limits
from qdqtool.util.files import open_input, same_file
from qdqtool.util.outputs import atomic_write
from qdqtool.util.text import cut_middle, reason_of

_VERSIONS = range(1000)  # of operator sets, far above any


def check_form(proto: onnx.ModelProto, what: str) -> None:
    """Looks at inputs, operator sets and references to a function's attributes of a model called ``what`` in messages.

    Raises:
        ModelError: An input or output has no name, an input is declared twice, an operator set has a version that none
            can have, or a node outside a function takes its attribute from one.
    """
    for number in (o.version for o in proto.opset_import):
        if number not in _VERSIONS:
            raise ModelError(
                f"no operator set has the version {number}; the file is damaged",
                what,
                code="wrong-opset",
            )
    declared: set[str] = set()
    for value in proto.graph.input:
        if not value.name:
            raise ModelError("an input has no name; the file is damaged", what, code="missing-name")
        if value.name in declared:
            raise ModelError(
                f"input '{value.name}' is declared twice; the file is damaged, export it again",
                what,
                code="duplicate",
                node=value.name,
            )
        declared.add(value.name)
    if not all(value.name for value in proto.graph.output):
        raise ModelError("an output has no name; the file is damaged", what, code="missing-name")
    for node in with_subgraph_nodes([n for n in proto.graph.node if n.attribute]):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise ModelError(
                    f"node '{node.name}' ({node.op_type}) takes attribute '{attribute.name}' "
                    "from a function, and is in none; the file is damaged",
                    what,
                    code="node-damaged",
                    node=node.name,
                )


_TENSOR, _TENSORS = onnx.AttributeProto.TENSOR, onnx.AttributeProto.TENSORS
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def check_names(proto: onnx.ModelProto, what: str) -> None:
    """Looks at every text of a model called ``what`` in the message, but the documentation and what nodes state.

    The names, operators and tensors of the main graph's nodes are looked at where they are read, in :class:`Model`.

    Raises:
        ModelError: One is not UTF-8; or a stored tensor has more dimensions, or more elements, than there can be.
    """
    texts: list[Any] = [proto.producer_name, proto.producer_version, proto.domain]
    texts += (o.domain for o in proto.opset_import)
    _metadata(proto.metadata_props, texts)
    try:
        _graph(proto.graph, texts, main=True)
        for function in proto.functions:
            texts += (
                function.name,
                function.domain,
                *function.input,
                *function.output,
                *function.attribute,
            )
            texts += (o.domain for o in function.opset_import)
            _nodes(function.node, texts)
    except ModelError as error:
        raise ModelError(error.reason, what, code=error.code, node=error.node) from None
    require_utf8(texts, what)


def _metadata(entries: Iterable[Any], texts: list[Any]) -> None:
    for entry in entries:
        texts += (entry.key, entry.value)


def _graph(graph: onnx.GraphProto, texts: list[Any], *, main: bool = False) -> None:
    texts.append(graph.name)
    _metadata(graph.metadata_props, texts)
    _nodes(graph.node, texts, main=main)
    for tensor in graph.initializer:
        _tensor(tensor, texts)
    for sparse in graph.sparse_initializer:
        _tensor(sparse.values, texts)
        _tensor(sparse.indices, texts)
    for value in (*graph.input, *graph.output, *graph.value_info):
        texts.append(value.name)
        if value.type.HasField("tensor_type"):
            texts += (d.dim_param for d in value.type.tensor_type.shape.dim)
    for annotation in graph.quantization_annotation:
        texts.append(annotation.tensor_name)
        _metadata(annotation.quant_parameter_tensor_names, texts)


def _tensor(tensor: onnx.TensorProto, texts: list[Any]) -> None:
    texts.append(tensor.name)
    if not external.is_possible(tensor.dims):
        raise ModelError(
            f"tensor '{cut_middle(str(tensor.name), 60)}' is damaged: it has {len(tensor.dims)} dimensions, "
            "and more elements than there can be",
            code="tensor-damaged",
            node=str(tensor.name),
        )
    if tensor.external_data:
        _metadata(tensor.external_data, texts)


def _nodes(nodes: Iterable[onnx.NodeProto], texts: list[Any], *, main: bool = False) -> None:
    add = texts.append
    for node in nodes:
        if not main:
            texts += (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute or ():
            add(attribute.name)
            kind = attribute.type
            if kind == _TENSOR:
                _tensor(attribute.t, texts)
            elif kind == _TENSORS:
                for tensor in attribute.tensors:
                    _tensor(tensor, texts)
            elif kind in _GRAPHS:
                _graph(attribute.g, texts)
                for inner in attribute.graphs:
                    _graph(inner, texts)
        if node.metadata_props:
            _metadata(node.metadata_props, texts)


ModelSource: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto

_BLOCK_BYTES = 1 << 24
MAX_PROTO_BYTES = limits.MODEL_MESSAGE  # larger models keep their weights in external files


def load(source: ModelSource | Model) -> Model:
    """Reads an ONNX model; weights in external files are read when asked for, and may be missing.

    Args:
        source: A path (``.onnx``, or gzip-compressed ``.onnx.gz``), serialized bytes, a ModelProto, an
            onnx-graphsurgeon Graph, or a Model.

    Raises:
        ModelError: The file is missing, is not an ONNX model, or its graph is damaged.
    """
    return source if isinstance(source, Model) else _with_short_names(_load(source))


def _with_short_names(model: Model) -> Model:
    """What is said of a model, and every copy of it, repeats its names."""
    names = [
        *model.producers,
        *model.consumers_by_tensor,
        *model.initializers,
        *(n.name for n in model.nodes),
    ]
    if (
        sum(map(len, names)) > limits.NAMES
    ):  # each of them counts once; to find out which are the same takes time
        names = list(set(names))
    longest = max(names, key=len, default="")
    what = model.path or "model in memory"
    if len(longest) > limits.NAME:
        raise ModelError(
            f"the name '{cut_middle(longest, 60)}' has {len(longest)} characters; the limit is "
            f"{limits.NAME}",
            what,
            code="name-too-long",
            node=longest,
        )
    limits.check_size(
        sum(map(len, names)),
        limits.NAMES,
        "the names of its nodes and tensors take",
        ModelError,
        path=what,
        code="names-too-long",
    )
    return model


def _load(source: ModelSource) -> Model:
    if isinstance(source, onnx.ModelProto):
        _check(source, "model in memory")
        return Model(source)
    if type(source).__module__.partition(".")[0] == "onnx_graphsurgeon":
        import onnx_graphsurgeon

        with quiet_graphsurgeon():
            try:
                made = onnx_graphsurgeon.export_onnx(source)
            except Exception as error:  # it raises whatever its parts raise
                raise ModelError(
                    f"onnx-graphsurgeon cannot export the graph: {reason_of(error)}",
                    code="export-failed",
                ) from error
        return _load(made)
    if isinstance(source, bytes):
        return Model(_parse(source, "model in memory"), sha256=hashlib.sha256(source).hexdigest())
    if not isinstance(source, (str, os.PathLike)):
        raise ModelError(
            f"a model of type {type(source).__name__} is not understood; give a path or a ModelProto",
            code="wrong-type",
            parameter="model",
        )
    path = Path(source)
    data = _read(path)
    base_dir = str(path.resolve().parent)
    sha256 = hashlib.sha256(data).hexdigest()
    proto = _parse(data, str(path))
    del data
    external.check(proto, base_dir, str(path))
    return Model(proto, str(path), sha256, base_dir)


def _read(path: Path) -> bytes:
    try:
        with open_input(path, error=ModelError) as file:
            data = _read_limited(file, path)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise ModelError(reason, str(path), code="file-unreadable") from error
    if data is None:
        raise _too_large(path, b"")
    return data


def _read_limited(file: IO[bytes], path: Path) -> bytes | None:
    """Return a model's bytes, unpacked; None if there are more than protobuf reads."""
    size = os.fstat(file.fileno()).st_size
    if size > MAX_PROTO_BYTES:
        raise _too_large(path, file.read(file_types.HEAD))
    head = file.read(compression.HEAD)
    if compression.find_magic(head) == compression.GZIP:
        limit = min(limits.max_unpacked_size(size), MAX_PROTO_BYTES)
        blocks = compression.unpack(head, file.read, str(path), limit, whole=True, error=ModelError)
        return b"".join(blocks)
    with contextlib.suppress(OSError):  # some files of the kernel can be read only once
        file.seek(0)
        head = b""  # joining it with the rest would copy the whole model
    return _read_all(file, MAX_PROTO_BYTES, head)


def _read_all(file: IO[bytes], limit: int, head: bytes = b"") -> bytes | None:
    """Return `head` and the rest of a file, None if there are more than `limit` bytes.

    Reading block by block takes no more memory than there are bytes.
    """
    blocks = [head] if head else []
    total = len(head)
    while block := file.read(_BLOCK_BYTES):
        blocks.append(block)
        total += len(block)
        if total > limit:
            return None
    return b"".join(blocks)


def _too_large(path: Path, head: bytes) -> ModelError:
    if file_types.recognize(str(path), head) is not None:
        return file_types.not_a_model(str(path), head, error=ModelError)
    return ModelError(
        "larger than 2 GB; save its weights as external data", str(path), code="file-too-large"
    )


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except DecodeError:
        if _is_deep(data):
            raise ModelError(
                f"its graphs are nested deeper than the {_DEPTH} levels that protobuf reads; "
                "export the model with fewer If, Loop and Scan inside each other",
                what,
                code="nested-too-deeply",
            ) from None
        raise file_types.not_a_model(what, data[: file_types.HEAD], error=ModelError) from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise file_types.not_a_model(
            what, data[: file_types.HEAD], "no graph or no opset", error=ModelError
        )
    _check(proto, what)
    return proto


def _check(proto: onnx.ModelProto, what: str) -> None:
    check_names(proto, what)
    check_form(proto, what)
    check_functions(proto, what)


_DEPTH = 100
_FIELDS = 1_000_000  # looked at in a file that protobuf refuses: it may be anything
_VARINT, _HOLDS, _FIXED = (
    0,
    2,
    {1: 8, 5: 4},
)  # wire types of protobuf; bytes of those of a fixed size
# By message, the numbers of its fields that lead to graphs inside graphs, and which message each holds (onnx.proto).
_INNER: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "function": {7: "node"},
    "graph": {1: "node"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}


def _is_deep(data: bytes) -> bool:
    """Whether a file that protobuf refuses holds graphs inside graphs that are deeper than it reads."""
    left = [("model", memoryview(data), 0)]
    turns = iter(range(_FIELDS))
    while left:
        kind, part, depth = left.pop()
        if depth > _DEPTH:
            return True
        try:
            left += (
                (inner, held, depth + 1)
                for number, held in _messages(part, turns)
                if (inner := _INNER[kind].get(number)) is not None
            )
        except IndexError:  # it is cut off
            continue
    return False


def _messages(data: memoryview, turns: Iterator[int]) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each field with a text or a message, ``turns`` at most; IndexError where one is cut off."""
    at = 0

    def number() -> int:
        nonlocal at
        result = shift = 0
        while shift < 70:
            result |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                break
        return result

    while at < len(data) and next(turns, None) is not None:
        field, wire = divmod(number(), 8)
        if wire == _VARINT:
            number()
        elif wire in _FIXED:
            at += _FIXED[wire]
        elif wire == _HOLDS:
            size = number()
            yield field, data[at : at + size]
            at += size
        else:
            return


def load_full(source: ModelSource | Model) -> Model:
    """Like :func:`load`, with every external weight in memory, so that the model can be saved elsewhere.

    Raises:
        ModelError: As for load; also when an external weight file is missing or lies outside the model's folder.
    """
    model = load(source)
    outside = [t for t in external.all_tensors(model.proto.graph) if external.is_external(t)]
    for tensor in outside:
        loaded = model.external_tensor(tensor)
        if loaded is None:
            raise _missing(model, tensor)
        tensor.CopyFrom(loaded)
    model.forget_constants()
    return model


def require_weights(model: Model) -> None:
    """Looks whether every external weight file is there, without reading any.

    Raises:
        ModelError: One is missing.
    """
    there: set[str] = set()
    for tensor in external.all_tensors(model.proto.graph):
        if external.is_external(tensor) and (location := external.location_of(tensor)) not in there:
            if external.path_of(tensor, model.base_dir, model.path) is None:
                raise _missing(model, tensor)
            there.add(location)


def _missing(model: Model, tensor: onnx.TensorProto) -> ModelError:
    location = external.location_of(tensor)
    path = os.path.join(model.base_dir, location)
    state = (
        "a directory"
        if location and os.path.isdir(path)
        else "no file"
        if os.path.exists(path)
        else "missing"
    )
    return ModelError(
        f"weight file '{location}' of tensor '{tensor.name}' is {state}",
        model.path or "model",
        code="file-missing" if state == "missing" else "not-a-file",
        node=tensor.name,
    )


def save(proto: onnx.ModelProto, path: str | os.PathLike[str], *, source: str = "") -> None:
    """Writes a model atomically; one of over 2 GB gets its weights in ``<name>.data`` beside it.

    Args:
        proto: The model. It is not changed.
        path: Where to write; the folder must exist.
        source: Path of the model it was made from, which is never overwritten.

    Raises:
        QdqtoolError: ``path`` is the source, its folder is missing, or it cannot be written.
    """
    if source and same_file(source, path):
        raise ModelError(
            "is the input; choose another output name", os.fspath(path), code="output-is-input"
        )
    write_model(proto, path)


@contextlib.contextmanager
def quiet_graphsurgeon() -> Iterator[None]:
    """Without the lines that onnx-graphsurgeon prints on stdout, its errors included, which it raises as well."""
    from onnx_graphsurgeon.logger import G_LOGGER

    before = G_LOGGER.severity
    G_LOGGER.severity = G_LOGGER.CRITICAL + 1
    try:
        yield
    finally:
        G_LOGGER.severity = before


def write_model(proto: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Writes a model as :func:`save` does, without looking at where it came from.

    Args:
        proto: The model. It is not changed.
        path: Where to write.
    """
    parts = _parts(proto)
    if parts is not None and parts.size < MAX_PROTO_BYTES:
        with atomic_write(path) as file:
            file.writelines(parts)
        return
    _save_external(proto, Path(path))


def _parts(proto: onnx.ModelProto) -> MessageParts | None:
    try:
        return MessageParts(proto)
    except (ValueError, EncodeError):  # a part is over 2 GB
        return None


def byte_size(proto: onnx.ModelProto) -> int:
    """Size of a model's message; one byte over :data:`MAX_PROTO_BYTES` for one that protobuf cannot measure."""
    parts = _parts(proto)
    return MAX_PROTO_BYTES + 1 if parts is None else parts.size


def _save_external(proto: onnx.ModelProto, path: Path) -> None:
    slim = without_large_weights(proto, 1024)
    for field in ("producer_name", "producer_version", "domain", "model_version"):
        if getattr(proto, field):
            setattr(slim, field, getattr(proto, field))
    for copy, original in ((slim, proto), (slim.graph, proto.graph)):
        if isinstance(
            original.doc_string, str
        ):  # bytes where it is not UTF-8, which protobuf does not take back
            copy.doc_string = original.doc_string
    slim.metadata_props.extend(proto.metadata_props)
    slim.graph.metadata_props.extend(proto.graph.metadata_props)
    slim.graph.quantization_annotation.extend(proto.graph.quantization_annotation)
    large = {t.name: t for t in proto.graph.initializer if tensor_bytes(t) > 1024}
    write_apart(slim, large, path)


def write_apart(
    proto: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    path: Path,
) -> None:
    """Writes a model whose large weights are in ``<name>.data`` beside it; they are read one at a time.

    Args:
        proto: The model, with placeholders for these weights; where their data is will be entered in them, and the
            data itself where it is texts or half bytes.
        weights: The tensors with the data, by name.
        path: Where to write.

    Raises:
        QdqtoolError: It cannot be written.
    """
    data_name = path.name + ".data"
    # The data first: a model never names data that is not there.
    with atomic_write(path.with_name(data_name)) as file:
        offset = 0
        for tensor in proto.graph.initializer:
            source = weights.get(tensor.name)
            if source is None:
                continue
            if not external.is_bytes(source):
                tensor.CopyFrom(source)
                continue
            raw = source.raw_data or external.to_array(source).tobytes()
            file.write(raw)
            # Not onnx's set_external_data: it asks for the data to be in the tensor already.
            for key, value in (("location", data_name), ("offset", offset), ("length", len(raw))):
                tensor.external_data.add(key=key, value=str(value))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            offset += len(raw)
    with atomic_write(path) as model_file:
        model_file.write(proto.SerializeToString())
