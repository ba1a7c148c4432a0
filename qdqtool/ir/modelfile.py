"""Reading, checking and writing of ONNX files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import onnx
from google.protobuf.message import DecodeError, Message

from qdqtool.errors import ModelError
from qdqtool.ir import file_types
from qdqtool.ir.branches import fold_constant_branches
from qdqtool.ir.graph import Model, hash_message
from qdqtool.ir.graphsurgeon import from_graphsurgeon, is_graphsurgeon
from qdqtool.proto import external_data as external
from qdqtool.proto.custom_quantizers import has_custom_quantizers, replace_custom_quantizers
from qdqtool.proto.functions import check_function_sizes, inline_functions
from qdqtool.proto.slim import strip_large_weights, tensor_bytes
from qdqtool.proto.subgraphs import is_repeated, with_subgraph_nodes
from qdqtool.util import compression, limits
from qdqtool.util.files import atomic_write, is_same_file, open_input
from qdqtool.util.text import cut_middle

if TYPE_CHECKING:
    import onnx_graphsurgeon

_OPSET_VERSIONS = range(1000)  # Real versions are far smaller, so a larger number shows damage.


def _check_form(proto: onnx.ModelProto, path: str) -> None:
    """Check inputs, outputs, operator sets and references to a function's attributes.

    Raises:
        ModelError: An input or output has no name, an input is declared twice, a version of an
            operator set is impossible, or a node outside a function refers to an attribute of a
            function.
    """
    for number in (opset.version for opset in proto.opset_import):
        if number not in _OPSET_VERSIONS:
            raise ModelError(
                f"operator set version {number} does not exist; the file is damaged, export it "
                "again",
                path,
                code="wrong-opset",
            )
    _check_names(proto.graph, path)
    for node in with_subgraph_nodes([n for n in proto.graph.node if n.attribute]):
        _check_attribute_references(node, path)


def _check_names(graph: onnx.GraphProto, path: str) -> None:
    inputs = [value.name for value in graph.input]
    if not all(inputs):
        raise ModelError(
            "an input has no name; the file is damaged, export it again", path, code="missing-name"
        )
    if len(set(inputs)) < len(inputs):
        name = Counter(inputs).most_common(1)[0][0]
        raise ModelError(
            f"input '{name}' is declared twice; the file is damaged, export it again",
            path,
            code="duplicate",
            node=name,
        )
    if not all(value.name for value in graph.output):
        raise ModelError(
            "an output has no name; the file is damaged, export it again", path, code="missing-name"
        )


def _check_attribute_references(node: onnx.NodeProto, path: str) -> None:
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            raise ModelError(
                f"attribute '{attribute.name}' of node '{node.name}' ({node.op_type}) refers to "
                "an attribute of a function, but the node is not in a function; the file is "
                "damaged, export it again",
                path,
                code="node-damaged",
                node=node.name,
            )


def _check_message(message: Message, path: str) -> None:
    """Check texts and tensors in a protobuf message. Documentation is not checked.

    Raises:
        ModelError: A text is not UTF-8, or a tensor has more dimensions or elements than possible.
    """
    if isinstance(message, onnx.TensorProto):
        _check_tensor(message, path)
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if is_repeated(field) else [value]:
                _check_message(inner, path)
        elif field.type == field.TYPE_STRING and not isinstance(value, str):
            if field.name != "doc_string":  # protobuf returns bytes for a text that is not UTF-8
                _check_texts([value] if isinstance(value, bytes) else value[:], path)


def _check_tensor(tensor: onnx.TensorProto, path: str) -> None:
    # Listing the fields, as for other messages, would copy the tensor's values.
    _check_dims(tensor, path)
    _check_texts([tensor.name], path)
    for entry in (*tensor.external_data, *tensor.metadata_props):
        _check_message(entry, path)


def _check_texts(texts: list[Any], path: str) -> None:
    for text in texts:
        if isinstance(text, bytes):
            shown = text[:80].decode("utf-8", "backslashreplace")
            raise ModelError(
                f"a name is not UTF-8: '{shown}'; export the model again",
                path,
                code="wrong-encoding",
            )


def _check_dims(tensor: onnx.TensorProto, path: str) -> None:
    if not external.are_possible_dims(tensor.dims):
        raise ModelError(
            f"tensor '{cut_middle(str(tensor.name), 60)}' is damaged: it has {len(tensor.dims)} "
            "dimensions and an impossible number of elements. Export the model again",
            path,
            code="tensor-damaged",
            node=str(tensor.name),
        )


ModelSource: TypeAlias = (
    "str | os.PathLike[str] | bytes | onnx.ModelProto | onnx_graphsurgeon.Graph"
)
"""A model: its path, its serialized bytes, a ModelProto, or a graph of onnx-graphsurgeon."""

MAX_PROTO_BYTES = limits.MODEL_MESSAGE  # larger models keep their weights in external files


def load(model: ModelSource | Model) -> Model:
    """Read an ONNX model; external weights are read when they are needed, and may be missing.

    Args:
        model: Path (``.onnx``, or gzip-compressed ``.onnx.gz``), serialized bytes, ModelProto,
            onnx-graphsurgeon Graph, or Model.

    Raises:
        ModelError: The file is missing or is not an ONNX model, its graph is damaged, or its names
            are too long.
    """
    if isinstance(model, Model):
        return model
    model = _load_source(model)
    _check_name_lengths(model)
    return model


def _check_name_lengths(model: Model) -> None:
    """Reject names that are too long, alone or together, because results repeat them."""
    names = {*model.producers, *model.consumers_by_tensor, *model.initializers}
    names.update(node.name for node in model.nodes)
    longest = max(names, key=len, default="")
    path = model.path or "model in memory"
    if len(longest) > limits.NAME:
        raise ModelError(
            f"the name '{cut_middle(longest, 60)}' has {len(longest)} characters; the limit is "
            f"{limits.NAME}. Export the model with shorter names",
            path,
            code="name-too-long",
            node=longest,
        )
    limits.check_size(
        sum(map(len, names)),
        limits.NAMES,
        "the names of its nodes and tensors take",
        ModelError,
        path=path,
        code="names-too-long",
    )


def _load_source(model: ModelSource) -> Model:
    if isinstance(model, onnx.ModelProto):
        _check_model(model, "model in memory")
        return _index_model(model)
    if is_graphsurgeon(model):
        return _load_source(from_graphsurgeon(model))
    if isinstance(model, bytes):
        return _index_model(
            _parse_model(model, "model in memory"), hashlib.sha256(model).hexdigest()
        )
    path = Path(model)
    data = _read_file(path)
    base_dir = str(path.resolve().parent)
    sha256 = hashlib.sha256(data).hexdigest()
    proto = _parse_model(data, str(path))
    del data
    external.check_external_weights(proto, base_dir, str(path))
    return _index_model(proto, sha256, str(path), base_dir)


def _index_model(
    source: onnx.ModelProto, sha256: str = "", path: str = "", base_dir: str = ""
) -> Model:
    """Return the indexed model of a ModelProto. The ModelProto is not changed.

    In a copy of the ModelProto, nodes of functions and of constant Ifs move to the main graph, and
    ONNX's quantizers replace TensorRT's custom quantizers.
    """
    has_custom = has_custom_quantizers(source)
    if not source.functions and not has_custom:
        return fold_constant_branches(Model(source, path, sha256, base_dir))
    proto = deepcopy(source)
    if has_custom:
        replace_custom_quantizers(proto)
    functions, node_names = inline_functions(proto, path or "model in memory")
    model = Model(proto, path, sha256 or hash_message(source), base_dir)
    model.inlined_functions, model.function_node_names = functions, node_names
    return fold_constant_branches(model)


def _read_file(path: Path) -> bytes:
    try:
        with open_input(path, error=ModelError) as file:
            return _read_limited(file, path)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise ModelError(reason, str(path), code="file-unreadable") from error


def _read_limited(file: IO[bytes], path: Path) -> bytes:
    """Return a model's unpacked bytes.

    Raises:
        ModelError: The file is damaged, or protobuf cannot read that many bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > MAX_PROTO_BYTES:
        raise _too_large_error(path, file.read(file_types.HEAD))
    head = file.read(compression.HEAD)
    if compression.find_magic(head) == compression.GZIP:
        limit = min(limits.max_unpacked_size(size), MAX_PROTO_BYTES)
        blocks = compression.unpack_blocks(
            head, file.read, str(path), limit, whole=True, error=ModelError
        )
        return b"".join(blocks)
    file.seek(0)
    return file.read(size)  # for a larger number, Python would allocate a larger buffer


def _too_large_error(path: Path, head: bytes) -> ModelError:
    if file_types.recognize_file_type(str(path), head) is not None:
        return file_types.wrong_file_error(str(path), head, error=ModelError)
    return ModelError(
        "larger than 2 GB; save its weights as external data", str(path), code="file-too-large"
    )


def _parse_model(data: bytes, path: str) -> onnx.ModelProto:
    head = data[: file_types.HEAD]
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except DecodeError:
        raise file_types.wrong_file_error(path, head, error=ModelError) from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise file_types.wrong_file_error(path, head, "no graph or no opset", error=ModelError)
    _check_model(proto, path)
    return proto


def _check_model(proto: onnx.ModelProto, path: str) -> None:
    _check_message(proto, path)
    _check_form(proto, path)
    check_function_sizes(proto, path)


def load_full(model: ModelSource | Model) -> Model:
    """Read a model and all its external weights, so that the model can be saved elsewhere.

    A :class:`Model` is changed: the weights are filled into its ModelProto.

    Raises:
        ModelError: As for :func:`load`; also if an external weight file is missing or lies outside
            the model's folder.
    """
    model = load(model)
    for tensor in external.external_tensors(model.proto.graph):
        loaded = model.external_tensor(tensor)
        if loaded is None:
            raise _missing_weights_error(model, tensor)
        tensor.CopyFrom(loaded)
    model.forget_constants()
    return model


def require_weights(model: Model) -> None:
    """Check that every external weight file exists, without reading it.

    Raises:
        ModelError: A file is missing.
    """
    tensors = {external.read_location(t): t for t in external.external_tensors(model.proto.graph)}
    for tensor in tensors.values():
        if external.find_weight_file(tensor, model.base_dir, model.path) is None:
            raise _missing_weights_error(model, tensor)


def _missing_weights_error(model: Model, tensor: onnx.TensorProto) -> ModelError:
    location = external.read_location(tensor)
    path = os.path.join(model.base_dir, location)
    state, advice = "missing", "copy the file to this path in the model's folder"
    if not model.base_dir:
        advice = "give the path of the model's file, because a model in memory has no folder"
    elif os.path.exists(path):
        is_directory = bool(location) and os.path.isdir(path)
        state = "a directory" if is_directory else "not a regular file"
        advice = "replace it by the file that was exported with the model"
    return ModelError(
        f"weight file '{location}' of tensor '{tensor.name}' is {state}; {advice}",
        model.path or "model",
        code="file-missing" if state == "missing" else "not-a-file",
        node=tensor.name,
    )


def save(proto: onnx.ModelProto, path: str | os.PathLike[str], *, source: str = "") -> None:
    """Write a model atomically; large weights of a model above 2 GB go to ``<name>.data``.

    Args:
        proto: The model. It is not changed.
        path: Output file; its folder must exist.
        source: Path of the original model, which is never overwritten.

    Raises:
        QdqtoolError: ``path`` is the source, the folder is missing, or the file cannot be written.
    """
    if source and is_same_file(source, path):
        raise ModelError(
            "is the input; choose another output name", os.fspath(path), code="output-is-input"
        )
    write_model(proto, path)


def write_model(proto: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model as :func:`save` does, even if ``path`` is that of the original model."""
    parts = external.serialize_in_parts(proto)
    if parts is None or sum(map(len, parts)) >= MAX_PROTO_BYTES:
        _split_weights(proto, Path(path))
        return
    with atomic_write(path) as file:
        file.writelines(parts)


def _split_weights(proto: onnx.ModelProto, path: Path) -> None:
    slim = strip_large_weights(proto, 1024)
    large = {t.name: t for t in proto.graph.initializer if tensor_bytes(t) > 1024}
    write_external(slim, large, path)


def write_external(
    proto: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    path: Path,
) -> None:
    """Write a model, and next to it a file ``<name>.data`` with its large weights.

    Args:
        proto: The model, with placeholders for the large weights. Each placeholder receives the
            location of its data. Strings and 4-bit numbers are stored in the model instead.
        weights: Tensors with the data, by name.
        path: Output file.

    Raises:
        QdqtoolError: A file cannot be written.
    """
    data_name = path.name + ".data"
    # The data is written first, so that a model never names missing data.
    with atomic_write(path.with_name(data_name)) as file:
        offset = 0
        for tensor in proto.graph.initializer:
            source = weights.get(tensor.name)
            if source is None:
                continue
            if not external.is_storable(source):
                tensor.CopyFrom(source)
                continue
            raw = source.raw_data or external.to_array(source).tobytes()
            file.write(raw)
            # onnx's set_external_data is not called, because it requires the data in the tensor.
            for key, value in (("location", data_name), ("offset", offset), ("length", len(raw))):
                tensor.external_data.add(key=key, value=str(value))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            offset += len(raw)
    with atomic_write(path) as model_file:
        model_file.write(proto.SerializeToString())
