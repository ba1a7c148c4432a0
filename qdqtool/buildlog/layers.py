"""Parsers of engine layers in every spelling of TensorRT.

``Layer(CaskConvolution): NAME, Tactic: 0x1, a[Int8(1,64,8,8)] -> b[Half(1,64,8,8)]``
    TensorRT 7 to 8.4
``Layer(CaskConvolution): NAME, Tactic: 0x1, a (Int8[1,64:32,8,8]) -> b (Half[1,64,8,8])``
    8.5 and later
``Name: NAME, LayerType: T, Inputs: [ { Name: a, Location: Device, ... }], Outputs: [...], ...``
    ``--dumpLayerInfo``, 8.2 and later. TensorRT 10 drops Location inside Myelin. TensorRT 11 and
    RTX split Format/Datatype.
``{"Name": ..., "LayerType": ..., "Inputs": [...]}``
    ``--exportLayerInfo``
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from qdqtool.buildlog.types import MAX_DIMENSION, BuiltLayer, BuiltTensor, Shape
from qdqtool.ir.precision import Precision
from qdqtool.util.json_text import parse_json

_TYPES = {p.lower(): p for p in Precision if p not in (Precision.FLOAT, Precision.UNKNOWN)} | {
    "half": Precision.FP16,
    "float16": Precision.FP16,
    "bfloat16": Precision.BF16,
    "float": Precision.FP32,
    "tf32": Precision.FP32,
    "float32": Precision.FP32,
    "float8": Precision.FP8,
}
_WORD = re.compile(r"[A-Za-z]\w*")
_VECTOR_WORDS = {
    f"{word} wide channel": width
    for word, width in (("two", 2), ("four", 4), ("eight", 8), ("sixteen", 16), ("thirty-two", 32))
}
_EDGE = re.compile(
    r"(?:\[([A-Za-z]\w*)\(([-\d,: ]*)\)\]| \(([A-Za-z]\w*)\[([-\d,: ]*)\]\))(?=, | -> |$)"
)
_LAYER = re.compile(r"Layer\(([^()]*)\): ")
_TACTIC = re.compile(r", Tactic: (0x[0-9a-fA-F]+|-?\d+)(?: \([^()]*\))?,? ?")
_SIGNS = re.compile(r"([\[{(]+)|([\]})]+)|, ")
_MAX_RANK = 64
MAX_TENSORS = 4096  # maximum number of inputs or outputs; real layers have a few hundred


@functools.lru_cache(1024)
def find_precision(text: str) -> Precision:
    """Return the data type that a format description names, else UNKNOWN.

    Examples: ``Thirty-two wide channel vectorized row major Int8 format``, ``Row major linear
    FP32``, ``Half``, ``INT8``.
    """
    words = (word.lower() for word in _WORD.findall(text))
    return next((_TYPES[word] for word in words if word in _TYPES), Precision.UNKNOWN)


@functools.lru_cache(1024)
def find_vector_width(text: str) -> int:
    """Return the number of channels per vector in a format description; 1 if not vectorized."""
    lower = text.lower()
    return next((width for words, width in _VECTOR_WORDS.items() if lower.startswith(words)), 1)


@functools.lru_cache(1024)
def parse_dims(text: str) -> tuple[Shape, int]:
    """Parse ``1,64:32,552,968`` into dimensions and vector width.

    Negative (dynamic) dimensions become None. The vector width is 1 for a layout that is not
    vectorized.
    """
    shape: list[int | None] = []
    vector = 1
    for piece in text.split(",")[:_MAX_RANK]:
        size, _, width = piece.strip().partition(":")
        if not size:
            continue
        shape.append(_as_dimension(_parse_int(size)))
        if width:
            vector = _parse_int(width) or 1
    return tuple(shape), vector


def _parse_int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _as_dimension(size: Any) -> int | None:
    return size if isinstance(size, int) and 0 <= size < MAX_DIMENSION else None


def as_int_list(value: Any, least: int | None = None) -> list[int] | None:
    """Return a copy of a list of one or more integers; None for any other value.

    None also if an integer is less than `least`, or larger than a dimension can be.
    """
    low = -MAX_DIMENSION if least is None else least
    if not isinstance(value, list) or not value or len(value) > _MAX_RANK:
        return None
    for number in value:
        if not isinstance(number, int) or isinstance(number, bool):
            return None
        if not low <= number < MAX_DIMENSION:
            return None
    return list(value)


def parse_engine_line(text: str, line: int = 0) -> BuiltLayer | None:
    """Parse a ``Layer(TYPE): ...`` line; return None for any other line."""
    head = _LAYER.match(text)
    if head is None:
        return None
    tactic = _TACTIC.search(text, head.end())
    if tactic is None:
        return BuiltLayer(name=text[head.end() :].strip(), type=head[1], line=line)
    layer = BuiltLayer(
        name=text[head.end() : tactic.start()], type=head[1], tactic=tactic[1], line=line
    )
    edges = text[tactic.end() :]
    start, side = 0, layer.inputs
    if edges.startswith(("-> ", " -> ")):
        start, side = edges.index("-> ") + 3, layer.outputs
    for match in _EDGE.finditer(edges):
        if match.start() < start or len(side) >= MAX_TENSORS:
            continue
        shape, vector = parse_dims(match[2] or match[4] or "")
        precision = find_precision(match[1] or match[3])
        side.append(BuiltTensor(edges[start : match.start()], precision, shape, vector))
        start = match.end()
        if edges.startswith(" -> ", start):
            side = layer.outputs
            start += 4
        elif edges.startswith(", ", start):
            start += 2
    return layer


def parse_info_line(text: str, line: int = 0) -> BuiltLayer | None:
    """Parse a ``Name: ..., LayerType: ...`` line of ``--dumpLayerInfo``.

    Return None for any other line, and for a line that is cut off before the layer type.
    """
    head, separator, rest = text.partition(", LayerType: ")
    if not text.startswith("Name: ") or not separator:
        return None
    kind, comma, rest = rest.partition(", ")
    fields: dict[str, Any] = {"Name": head[len("Name: ") :], "LayerType": kind.strip()}
    rest = comma + rest
    for key in ("Inputs", "Constants", "Outputs"):
        if not rest.startswith(f", {key}: ["):
            continue
        start = len(f", {key}: [")
        # The list ends at the first "]" after a "}". An empty list ends at once.
        closing = start - 1 if rest.startswith("]", start) else rest.find("}]", start)
        end = closing + 1 if closing >= 0 else len(rest)
        fields[key] = list(_parse_tensors(rest[start:end]))
        rest = rest[end + 1 :]
    return layer_from_fields(fields | _parse_fields(rest), line)


def _parse_tensors(text: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of each tensor in a list.

    A tensor is written ``{ Name: a, Dimensions: [1,3], Format/Datatype: F }``.
    """
    for item in text.split("{ Name: ", MAX_TENSORS + 1)[1 : MAX_TENSORS + 1]:
        name, listed, rest = item.partition(", Dimensions: [")
        fields = {"Name": name.partition(", Location: ")[0] if listed else item.strip(" },")}
        dims, closed, rest = rest.partition("]")
        if closed:
            fields["Dimensions"] = dims
            for key in ("Format/Datatype", "Datatype", "Format"):
                _, listed, value = rest.partition(f", {key}: ")
                if listed:
                    fields[key] = value.split(", Format: ")[0].split(" }")[0].strip()
        yield fields


def _parse_fields(text: str) -> dict[str, Any]:
    """Parse ``, Kernel: [3,3], Weights: {"Type": "Int8"}, Metadata: [ONNX Layer: a]``."""
    fields: dict[str, Any] = {}
    body, separator, metadata = text.partition(", Metadata: ")
    if separator:
        fields["Metadata"] = metadata
    for piece in _split_fields(body):
        key, separator, value = piece.partition(": ")
        if separator and key:
            fields[key] = _parse_value(value)
    return fields


def _split_fields(text: str) -> list[str]:
    pieces: list[str] = []
    depth = start = 0
    for sign in _SIGNS.finditer(text):
        if sign[1]:
            depth += len(sign[1])
        elif sign[2]:
            depth = max(0, depth - len(sign[2]))
        elif depth == 0:
            pieces.append(text[start : sign.start()])
            start = sign.end()
    return [*pieces, text[start:]]


def _parse_value(text: str) -> Any:
    if text.startswith(("[", "{")) or text.lstrip("-").isdecimal():
        try:
            return parse_json(text)
        except (ValueError, RecursionError):
            return text
    return text


def layer_from_fields(fields: dict[str, Any], line: int = 0) -> BuiltLayer:
    """Create a layer from its fields in the engine inspector's output of any TensorRT version.

    Unknown fields are kept in ``extras``.
    """
    extras = {key: value for key, value in fields.items() if isinstance(key, str)}
    inputs, outputs, constants = (
        _tensors_from_field(extras.pop(key, None)) for key in ("Inputs", "Outputs", "Constants")
    )
    return BuiltLayer(
        _as_text(extras.pop("Name", "")),
        _as_text(extras.pop("LayerType", "")),
        inputs,
        outputs,
        constants,
        _as_text(extras.get("TacticName") or extras.get("TacticValue") or ""),
        onnx_names(_as_text(extras.pop("Metadata", ""))),
        _as_text(extras.get("Origin", "")),
        line,
        extras=extras,
    )


def _tensors_from_field(listed: Any) -> list[BuiltTensor]:
    if not isinstance(listed, list):
        return []
    return [_tensor_from_fields(item) for item in listed[:MAX_TENSORS]]


def _as_text(value: Any) -> str:
    return "" if value is None else str(value)


def _tensor_from_fields(item: Any) -> BuiltTensor:
    if not isinstance(item, dict):
        return BuiltTensor(_as_text(item))
    layout_and_type = _as_text(item.get("Format/Datatype", ""))
    layout = layout_and_type or _as_text(item.get("Format", ""))
    dims = item.get("Dimensions")
    shape: Shape | None = None
    vector = find_vector_width(layout)
    if isinstance(dims, str):
        shape, listed_vector = parse_dims(dims)
        vector = max(vector, listed_vector)
    elif isinstance(dims, list):
        shape = tuple(map(_as_dimension, dims[:_MAX_RANK]))
    data_type = _as_text(item.get("Datatype") or item.get("DataType") or layout_and_type)
    name = _as_text(item.get("Name", ""))
    return BuiltTensor(name, find_precision(data_type), shape, vector, layout)


def onnx_names(metadata: str) -> list[str]:
    r"""Return the ONNX node names in a metadata field.

    Each name is written ``[ONNX Layer: a]``. TensorRT separates names with \x1e or \x1f, or not at
    all.
    """
    names = [piece.rpartition("]")[0] for piece in metadata.split("[ONNX Layer: ")[1:]]
    return list(dict.fromkeys(filter(None, names)))
