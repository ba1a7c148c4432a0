"""Normal forms of the outputs of qdqtool, and hashes of the normal forms.

A normal form contains everything that a program can use, and nothing that depends on the computer
or the version (absolute paths, the version of qdqtool). Each output has the hashes of two forms:
*full*, and *data*. The data form has no texts for people, no checksums, and no names that qdqtool
gives to tensors and nodes of models.
"""

import base64
import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

Json = Any

# Strings below these keys are texts for people.
TEXT_KEYS = frozenset(
    """
    action advice agreement care caution caveat cause comment decision description detail details explanation fix
    hint kept message missing notes proof question rates_source read reason remark remarks repr says sentence source
    stderr strong suggestion target_evidence text title tooltip typed unknown verdict versions warning warnings weak
    what why why_not words
    """.split()
)
# Strings below these keys are data, with any number of words. They are names in the model, in
# layers and in log lines.
DATA_KEYS = frozenset(
    """
    aliases bindings case cases device event format fused gpu inputs layer name names node nodes object outputs pass
    subject tensor type
    """.split()
)
CHECKSUM_KEYS = frozenset(["sha256"])  # checksums depend on the names that qdqtool chooses
VERSION_KEYS = frozenset(["producer_version", "tool", "tool_version"])  # of qdqtool
TIME_KEYS = frozenset(["cpu_seconds", "seconds"])  # below "effort": the time that `tune` took
_SOURCE_LINE = re.compile(r"(\.py):\d+\b")  # in warnings of Python
_SECONDS = re.compile(r"\b\d+(?:\.\d+)? s\b")
# Other strings are texts if they have three words in a row.
_WORDS = re.compile(r"[A-Za-z][a-z']*[,;:]? [a-z']+[,;:]? [a-z']+")
TEXT = "<text>"


def to_data(value: Json, key: str = "") -> Json:
    """Return a copy of JSON without texts. Keys, numbers and lengths of lists remain."""
    if isinstance(value, dict):
        if str(value.get("schema")).startswith("qdqtool/report/"):
            value = {**value, "bytes": TEXT}  # the length of the page
        inside = "" if key in DATA_KEYS else key
        return {k: to_data(v, inside if inside in TEXT_KEYS else k) for k, v in value.items()}
    if isinstance(value, list):
        return [to_data(v, key) for v in value]
    if key in CHECKSUM_KEYS:
        return TEXT
    if not isinstance(value, str) or key in DATA_KEYS:
        return value
    return TEXT if key in TEXT_KEYS or _WORDS.search(value) else value


def without_run(value: Json, key: str = "") -> Json:
    """Return a copy of JSON without the version of qdqtool and without measured times."""
    if isinstance(value, dict):
        removed = VERSION_KEYS | TIME_KEYS if key == "effort" else VERSION_KEYS
        return {k: without_run(v, k) for k, v in value.items() if k not in removed}
    if isinstance(value, list):
        return [without_run(v) for v in value]
    return value


def without_circumstances(text: str) -> str:
    return _SOURCE_LINE.sub(r"\1", _SECONDS.sub("<seconds>", text))


def without_paths(text: str, folders: Iterable[tuple[Path, str]]) -> str:
    for folder, name in folders:
        text = text.replace(str(folder), name)
    return text


def hash_json(value: Json) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# Models -------------------------------------------------------------------------------


def collect_names(model: onnx.ModelProto) -> set[str]:
    names: set[str] = set()
    graphs = [model.graph]
    for graph in graphs:
        names.update(t.name for t in graph.initializer)
        names.update(v.name for v in (*graph.input, *graph.output))
        _add_names(graph.node, names, graphs)
    for function in model.functions:
        _add_names(function.node, names, graphs)
    return names


def _add_names(nodes: Iterable[NodeProto], names: set[str], graphs: list[GraphProto]) -> None:
    for node in nodes:
        names.update((node.name, *node.input, *node.output))
        graphs.extend(a.g for a in node.attribute if a.type == AttributeProto.GRAPH)


def describe_model(model: onnx.ModelProto, known: Collection[str] | None) -> Json:
    """Return the nodes, tensors, weights and metadata of a model as JSON.

    Args:
        model: Any model.
        known: Names that remain. Other tensors are named after the computation of their values, and
            other nodes have no name. None keeps all names.
    """
    return {
        "ir_version": model.ir_version,
        "opsets": sorted([o.domain, o.version] for o in model.opset_import),
        "producer": model.producer_name,
        "domain": model.domain,
        "doc": model.doc_string,
        "metadata": {p.key: p.value for p in model.metadata_props},
        "graph": _GraphDescription(known).describe(model.graph),
        "functions": [
            {
                "name": [f.domain, f.name],
                "inputs": list(f.input),
                "outputs": list(f.output),
                "nodes": _GraphDescription(known).describe_nodes(f.node),
            }
            for f in model.functions
        ],
    }


class _GraphDescription:
    """Description of one graph, which may use tensors of outer graphs."""

    def __init__(self, known: Collection[str] | None, outer: dict[str, str] | None = None) -> None:
        self.known = known
        self.tensors: dict[str, str] = dict(outer or {})

    def describe(self, graph: GraphProto) -> Json:
        inputs = [self._describe_value(v) for v in graph.input]
        weights = {}
        for tensor in graph.initializer:
            content = _describe_tensor(tensor)
            self.tensors[tensor.name] = (
                tensor.name if self._is_known(tensor.name) else hash_json(content)
            )
            weights[self.tensors[tensor.name]] = content
        nodes = self.describe_nodes(graph.node)
        return {
            "name": graph.name,
            "doc": graph.doc_string,
            "inputs": inputs,
            "outputs": [self._describe_value(v) for v in graph.output],
            "weights": weights,
            "weight_count": len(graph.initializer),
            "nodes": nodes,
            "values": sorted(self._describe_value(v) for v in graph.value_info),
            "annotations": sorted(
                self._identify(a.tensor_name) for a in graph.quantization_annotation
            ),
            "sparse": len(graph.sparse_initializer),
        }

    def describe_nodes(self, nodes: Iterable[NodeProto]) -> Json:
        return [self._describe_node(node) for node in nodes]

    def _describe_node(self, node: NodeProto) -> Json:
        inputs = [self._identify(name) for name in node.input]
        attributes = {a.name: self._describe_attribute(a) for a in node.attribute}
        computed = hash_json([node.op_type, node.domain, inputs, attributes])
        for position, name in enumerate(node.output):
            if name:
                self.tensors[name] = name if self._is_known(name) else f"{computed}.{position}"
        return {
            "name": node.name if self._is_known(node.name) else "",
            "op": node.op_type,
            "domain": node.domain,
            "inputs": inputs,
            "outputs": [self._identify(name) for name in node.output],
            "attributes": attributes,
            "doc": node.doc_string,
        }

    def _describe_attribute(self, attribute: AttributeProto) -> Json:
        if attribute.type == AttributeProto.GRAPH:
            return _GraphDescription(self.known, self.tensors).describe(attribute.g)
        if attribute.type == AttributeProto.TENSOR:
            return _describe_tensor(attribute.t)
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes | str | int | float):
            return str(value)
        return [str(v) for v in value]

    def _describe_value(self, value: ValueInfoProto) -> Json:
        kind = value.type.SerializeToString(deterministic=True)
        return [self._identify(value.name), base64.b64encode(kind).decode()]

    def _identify(self, name: str) -> str:
        return self.tensors.get(name, name)

    def _is_known(self, name: str) -> bool:
        return self.known is None or name in self.known


def _describe_tensor(tensor: TensorProto) -> Json:
    if tensor.data_location == TensorProto.EXTERNAL:
        place = {e.key: e.value for e in tensor.external_data}
        return [tensor.data_type, list(tensor.dims), place]
    try:
        content = numpy_helper.to_array(tensor).tobytes()
    except (ValueError, TypeError):  # a damaged tensor, whose content is its bytes
        content = tensor.SerializeToString(deterministic=True)
    return [tensor.data_type, list(tensor.dims), hash_bytes(content)]


# Files --------------------------------------------------------------------------------


def page_data(html: str) -> Json:
    found = re.search(r'id="page-data"[^>]*>\s*([A-Za-z0-9+/=\s]+)<', html)
    if found is None:
        raise ValueError("the report has no element 'page-data'")
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def describe_arrays(path: Path) -> Json:
    """Return types, shapes and hashes of the arrays of an npz file.

    For an array that contains JSON, the JSON is returned.
    """
    described = {}
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
    with np.load(path, allow_pickle=False) as arrays:
        for name in names:
            array = arrays[name.removesuffix(".npy")]
            data = array.tobytes()
            if array.dtype == np.uint8 and data[:1] == b"{":
                described[name] = json.loads(data)
            else:
                described[name] = [str(array.dtype), list(array.shape), hash_bytes(data)]
    return described


def describe_file(path: Path, known: Collection[str]) -> tuple[Json, Json]:
    """Return the normal forms of a file that a step wrote.

    Returns:
        The full normal form, and the normal form of the data.
    """
    if path.suffix == ".onnx":
        model = onnx.load(path, load_external_data=False)
        return describe_model(model, None), describe_model(model, known)
    if path.suffix == ".npz":
        arrays = describe_arrays(path)
        return arrays, arrays
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        data = page_data(text)
        return data, data
    if path.suffix == ".json":
        data = json.loads(text)
        return data, data
    lines = text.splitlines()
    return lines, lines
