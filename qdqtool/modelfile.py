"""Reading and writing ONNX files: compressed, with external weights, atomically."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import external_data_helper, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.files import atomic_write, same_file
from qdqtool.graph import Model, external_location, tensor_bytes, without_large_weights

ModelSource = str | os.PathLike[str] | bytes | onnx.ModelProto

MAX_PROTO_BYTES = 2**31 - 1  # protobuf's own limit; larger models keep their weights in external files


def load(source: ModelSource | Model) -> Model:
    """Reads an ONNX model; weights in external files are read when asked for, and may be missing.

    Args:
        source: A path (``.onnx``, or gzip-compressed ``.onnx.gz``), serialized bytes, a ModelProto, an
            onnx-graphsurgeon Graph, or a Model.

    Raises:
        ModelError: The file is missing, is not an ONNX model, or its graph is damaged.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, onnx.ModelProto):
        return Model(source)
    if type(source).__module__.partition(".")[0] == "onnx_graphsurgeon":
        import onnx_graphsurgeon

        return Model(onnx_graphsurgeon.export_onnx(source))
    if isinstance(source, bytes):
        return Model(_parse(source, "model in memory"), sha256=hashlib.sha256(source).hexdigest())
    path = Path(source)
    data = _read(path)
    base_dir = str(path.resolve().parent)
    return Model(_parse(data, str(path)), str(path), hashlib.sha256(data).hexdigest(), base_dir)


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise ModelError(f"{path}: is a folder; give an .onnx file")
        if path.stat().st_size > MAX_PROTO_BYTES:
            raise ModelError(f"{path}: larger than 2 GB; save its weights as external data")
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            reader = zlib.decompressobj(wbits=31)
            data = reader.decompress(data, MAX_PROTO_BYTES)
            if reader.unconsumed_tail:
                raise ModelError(f"{path}: unpacks to more than 2 GB")
            if not reader.eof:
                raise ModelError(f"{path}: the compressed file is cut off; copy it again")
        return data
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, gzip.BadGzipFile, zlib.error) as error:
        raise ModelError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except DecodeError:
        raise ModelError(f"{what}: not an ONNX model, or damaged; export it again") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{what}: not an ONNX model (no graph or no opset)")
    return proto


def load_full(source: ModelSource | Model) -> Model:
    """Like :func:`load`, with every external weight in memory, so that the model can be saved elsewhere.

    Raises:
        ModelError: As for load; also when an external weight file is missing or lies outside the model's folder.
    """
    model = load(source)
    external = [t for t in all_tensors(model.proto.graph) if external_data_helper.uses_external_data(t)]
    for tensor in external:
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
    there: dict[str, bool] = {}
    for tensor in all_tensors(model.proto.graph):
        if external_data_helper.uses_external_data(tensor):
            location = external_location(tensor)
            if location not in there:
                there[location] = bool(model.base_dir) and (Path(model.base_dir) / location).exists()
            if not there[location]:
                raise _missing(model, tensor)


def _missing(model: Model, tensor: onnx.TensorProto) -> ModelError:
    location = external_location(tensor)
    return ModelError(f"{model.path or 'model'}: weight file '{location}' of tensor '{tensor.name}' is missing")


def all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that a graph stores: initializers, and those in attributes and subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from all_tensors(inner)


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
        raise ModelError(f"{path}: is the input; choose another output name")
    if _byte_size(proto) < MAX_PROTO_BYTES:
        data = proto.SerializeToString()
        with atomic_write(path) as file:
            file.write(data)
        return
    _save_external(proto, Path(path))


def _byte_size(proto: onnx.ModelProto) -> int:
    try:
        return int(proto.ByteSize())
    except (ValueError, EncodeError):
        return MAX_PROTO_BYTES + 1


def _save_external(proto: onnx.ModelProto, path: Path) -> None:
    data_name = path.name + ".data"
    slim = without_large_weights(proto, 1024)
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if getattr(proto, field):
            setattr(slim, field, getattr(proto, field))
    slim.metadata_props.extend(proto.metadata_props)
    slim.graph.doc_string = proto.graph.doc_string
    slim.graph.metadata_props.extend(proto.graph.metadata_props)
    with atomic_write(path.with_name(data_name)) as file:
        offset = 0
        for source, tensor in zip(proto.graph.initializer, slim.graph.initializer, strict=True):
            if tensor_bytes(source) <= 1024:
                continue
            raw = source.raw_data or numpy_helper.to_array(source).tobytes()
            file.write(raw)
            # Not onnx's set_external_data: it asks for the data to be in the tensor already.
            for key, value in (("location", data_name), ("offset", offset), ("length", len(raw))):
                tensor.external_data.add(key=key, value=str(value))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            offset += len(raw)
        with atomic_write(path) as model_file:
            model_file.write(slim.SerializeToString())
