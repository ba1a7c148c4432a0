"""Names in a model that are not UTF-8: protobuf hands such ones out as bytes, on which everything else would fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx

from qdqtool.errors import ModelError

_TENSOR, _TENSORS = onnx.AttributeProto.TENSOR, onnx.AttributeProto.TENSORS
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def check_names(proto: onnx.ModelProto, what: str) -> None:
    """Looks at every text of a model but the documentation.

    Args:
        proto: The model.
        what: What to call it in the message.

    Raises:
        ModelError: One is not UTF-8.
    """
    texts: list[Any] = [proto.producer_name, proto.producer_version, proto.domain]
    texts += (o.domain for o in proto.opset_import)
    _metadata(proto.metadata_props, texts)
    _graph(proto.graph, texts)
    for function in proto.functions:
        texts += (function.name, function.domain, *function.input, *function.output, *function.attribute)
        texts += (o.domain for o in function.opset_import)
        _nodes(function.node, texts)
    if set(map(type, texts)) - {str}:
        damaged = next(bytes(text) for text in texts if type(text) is not str)
        shown = damaged[:80].decode("utf-8", "backslashreplace")
        raise ModelError(f"{what}: a name is not UTF-8: '{shown}'; export the model again")


def _metadata(entries: Iterable[Any], texts: list[Any]) -> None:
    for entry in entries:
        texts += (entry.key, entry.value)


def _graph(graph: onnx.GraphProto, texts: list[Any]) -> None:
    texts.append(graph.name)
    if hasattr(graph, "metadata_props"):  # from onnx 1.17 on
        _metadata(graph.metadata_props, texts)
    _nodes(graph.node, texts)
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
    if tensor.external_data:
        _metadata(tensor.external_data, texts)


def _nodes(nodes: Iterable[onnx.NodeProto], texts: list[Any]) -> None:
    add = texts.append
    for node in nodes:
        add(node.name)
        add(node.op_type)
        add(node.domain)
        texts += node.input
        texts += node.output
        for attribute in node.attribute:
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
