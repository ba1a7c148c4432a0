"""One engine layer, from each spelling in which TensorRT lists it.

``Layer(CaskConvolution): NAME, Tactic: 0x1, a[Int8(1,64,8,8)] -> b[Half(1,64,8,8)]``   8.0 to 8.4, and TensorRT 7
``Layer(CaskConvolution): NAME, Tactic: 0x1, a (Int8[1,64:32,8,8]) -> b (Half[1,64,8,8])``   8.5 and later
``Name: NAME, LayerType: T, Inputs: [ { Name: a, Location: Device, ... }], Outputs: [...], Kernel: [3,3], ...``
    ``--dumpLayerInfo``, 8.2 and later; TensorRT 10 drops Location inside Myelin, 11 and RTX split Format/Datatype
``{"Name": ..., "LayerType": ..., "Inputs": [...]}``   ``--exportLayerInfo``
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qdqtool.buildlog.records import MAX_DIMENSION, Shape
from qdqtool.buildlog.types import BuiltLayer, BuiltTensor
from qdqtool.io.outputs import parse_json
from qdqtool.types import Precision

_TYPES = {
    "int8": Precision.INT8,
    "uint8": Precision.UINT8,
    "int4": Precision.INT4,
    "fp8": Precision.FP8,
    "fp16": Precision.FP16,
    "half": Precision.FP16,
    "bf16": Precision.BF16,
    "bfloat16": Precision.BF16,
    "fp32": Precision.FP32,
    "float": Precision.FP32,
    "tf32": Precision.FP32,
    "int32": Precision.INT32,
    "int64": Precision.INT64,
    "bool": Precision.BOOL,
    "float32": Precision.FP32,
    "float16": Precision.FP16,
    "float8": Precision.FP8,
}
_WORD = re.compile(r"[A-Za-z]\w*")
_VECTOR_WORDS = {
    "two wide channel": 2,
    "four wide channel": 4,
    "eight wide channel": 8,
    "sixteen wide channel": 16,
    "thirty-two wide channel": 32,
}
_EDGE = re.compile(r"(?:\[([A-Za-z]\w*)\(([-\d,: ]*)\)\]| \(([A-Za-z]\w*)\[([-\d,: ]*)\]\))(?=, | -> |$)")
_LAYER = re.compile(r"Layer\(([^()]*)\): ")
_TACTIC = re.compile(r", Tactic: (0x[0-9a-fA-F]+|-?\d+)(?: \([^()]*\))?,? ?")
_METADATA = re.compile(r"\[ONNX Layer: ")
_MAX_RANK = 64
MAX_TENSORS = 4096  # of one layer; real ones have at most some hundreds


def precision_of(text: str) -> Precision:
    """The data type that a format description names, in any of TensorRT's spellings; UNKNOWN when it names none.

    ``Thirty-two wide channel vectorized row major Int8 format``, ``Row major linear FP32``, ``Half``, ``INT8``, ...
    """
    for word in _WORD.findall(text[:400]):
        found = _TYPES.get(word.lower())
        if found is not None:
            return found
    return Precision.UNKNOWN


def vector_of(text: str) -> int:
    """Channels per element of the layout that a format description names."""
    lower = text[:200].lower()
    return next((width for words, width in _VECTOR_WORDS.items() if lower.startswith(words)), 1)


def parse_dims(text: str) -> tuple[Shape, int]:
    """Reads ``1,64:32,552,968`` into dimensions and vector width; negative (dynamic) dimensions become None."""
    shape: list[int | None] = []
    vector = 1
    for piece in text.split(",", _MAX_RANK)[:_MAX_RANK]:
        size, _, width = piece.strip().partition(":")
        if not size:
            continue
        value = _int(size)
        shape.append(value if value is not None and 0 <= value < MAX_DIMENSION else None)
        if width:
            vector = _int(width) or 1
    return tuple(shape), vector


def _int(text: str) -> int | None:
    try:
        return int(text) if len(text) < 20 else None
    except ValueError:
        return None


def int_list(value: Any, least: int | None = None) -> list[int] | None:
    """A listed field that is a non-empty list of integers, none below ``least``; None when it is something else."""
    if not isinstance(value, list) or not value or len(value) > 64:
        return None
    low = -MAX_DIMENSION if least is None else least
    whole = all(isinstance(v, int) and not isinstance(v, bool) and low <= v < MAX_DIMENSION for v in value)
    return list(value) if whole else None


def parse_engine_line(text: str, line: int = 0) -> BuiltLayer | None:
    """Reads a ``Layer(TYPE): ...`` line; None when it is none."""
    head = _LAYER.match(text)
    if head is None:
        return None
    rest = text[head.end() :]
    tactic = _TACTIC.search(rest)
    if tactic is None:
        return BuiltLayer(name=rest.strip(), type=head[1], line=line)
    layer = BuiltLayer(name=rest[: tactic.start()], type=head[1], tactic=tactic[1], line=line)
    edges = rest[tactic.end() :]
    at, side = 0, layer.inputs
    if edges.startswith(("-> ", " -> ")):
        at, side = edges.index("-> ") + 3, layer.outputs
    for match in _EDGE.finditer(edges):
        if match.start() < at or len(side) >= MAX_TENSORS:
            continue
        shape, vector = parse_dims(match[2] if match[1] else match[4])
        side.append(BuiltTensor(edges[at : match.start()], precision_of(match[1] or match[3]), shape, vector))
        at = match.end()
        if edges.startswith(" -> ", at):
            side = layer.outputs
            at += 4
        elif edges.startswith(", ", at):
            at += 2
    return layer


def parse_info_line(text: str, line: int = 0) -> BuiltLayer | None:
    """Reads a ``Name: ..., LayerType: ...`` line of ``--dumpLayerInfo``; None when it is none or was cut off."""
    cut = text.find(", LayerType: ")
    if not text.startswith("Name: ") or cut < 0:
        return None
    fields: dict[str, Any] = {"Name": text[len("Name: ") : cut]}
    position = cut + len(", LayerType: ")
    end = text.find(", ", position)
    fields["LayerType"] = text[position : end if end >= 0 else len(text)].strip()
    at = end
    for key in ("Inputs", "Constants", "Outputs"):
        if at < 0 or not text.startswith(f", {key}: [", at):
            continue
        start = at + len(f", {key}: [")
        stop = _end_of_list(text, start)
        fields[key] = list(_tensors(text[start:stop]))
        at = stop + 1
    if at >= 0:
        fields.update(_pairs(text[at:]))
    return layer_from_fields(fields, line)


def _end_of_list(text: str, start: int) -> int:
    """Position of the ``]`` that closes a tensor list: the first after a ``}``, or the very next for an empty list."""
    if text.startswith("]", start):
        return start
    end = text.find("}]", start)
    return end + 1 if end >= 0 else len(text)


def _tensors(text: str) -> Iterator[dict[str, Any]]:
    at = text.find("{ Name: ")
    for _ in range(MAX_TENSORS):
        if at < 0:
            return
        start = at + len("{ Name: ")
        after = text.find("{ Name: ", start)
        item = text[start : after if after >= 0 else len(text)]
        dims = item.find(", Dimensions: [")
        place = item.find(", Location: ")
        name_end = place if 0 <= place < dims else dims
        fields: dict[str, Any] = {"Name": item[:name_end] if name_end >= 0 else item.strip(" },")}
        if dims >= 0:
            begin = dims + len(", Dimensions: [")
            close = item.find("]", begin)
            if close >= 0:
                fields["Dimensions"] = item[begin:close]
                for key in ("Format/Datatype", "Datatype", "Format"):
                    mark = item.find(f", {key}: ", close)
                    if mark >= 0:
                        value = item[mark + len(key) + 4 :].split(", Format: ")[0]
                        fields[key] = value.split(" }")[0].strip()
        yield fields
        at = after


def _pairs(text: str) -> dict[str, Any]:
    """Reads ``, Kernel: [3,3], Weights: {"Type": "Int8", "Count": 9}, Metadata: [ONNX Layer: a]``."""
    fields: dict[str, Any] = {}
    depth = start = 0
    pieces: list[str] = []
    metadata = text.find(", Metadata: ")
    body = text if metadata < 0 else text[:metadata]
    for position, sign in enumerate(body):
        if sign in "[{(":
            depth += 1
        elif sign in "]})":
            depth = max(0, depth - 1)
        elif sign == "," and depth == 0 and body.startswith(", ", position):
            pieces.append(body[start:position])
            start = position + 2
    pieces.append(body[start:])
    for piece in pieces[:200]:
        key, separator, value = piece.partition(": ")
        if separator and key:
            fields[key] = _value(value)
    if metadata >= 0:
        fields["Metadata"] = text[metadata + len(", Metadata: ") :]
    return fields


def _value(text: str) -> Any:
    if text[:1] in "[{" or text.lstrip("-").isdecimal():
        try:
            return parse_json(text)
        except (ValueError, RecursionError):
            return text
    return text


def layer_from_fields(fields: dict[str, Any], line: int = 0) -> BuiltLayer:
    """A layer from the fields of the inspector, whatever the version; unknown fields are kept in ``extras``."""
    named = {key: value for key, value in fields.items() if isinstance(key, str)}
    layer = BuiltLayer(
        name=_text(named.pop("Name", "")),
        type=_text(named.pop("LayerType", "")),
        line=line,
        origin=_text(named.get("Origin", "")),
        tactic=_text(named.get("TacticName") or named.get("TacticValue") or ""),
    )
    for key, target in (("Inputs", layer.inputs), ("Outputs", layer.outputs), ("Constants", layer.constants)):
        listed = named.pop(key, None)
        if isinstance(listed, list):
            target.extend(_tensor(item) for item in listed[:MAX_TENSORS])
    layer.onnx_names = onnx_names(_text(named.pop("Metadata", "")))
    layer.extras = named
    return layer


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:1000]


def _tensor(item: Any) -> BuiltTensor:
    if not isinstance(item, dict):
        return BuiltTensor(_text(item))
    both = _text(item.get("Format/Datatype", ""))
    layout = both or _text(item.get("Format", ""))
    dims = item.get("Dimensions")
    shape: Shape | None = None
    vector = vector_of(layout)
    if isinstance(dims, str):
        shape, listed = parse_dims(dims)
        vector = max(vector, listed)
    elif isinstance(dims, list):
        shape = tuple(d if isinstance(d, int) and 0 <= d < MAX_DIMENSION else None for d in dims[:_MAX_RANK])
    kind = precision_of(_text(item.get("Datatype") or item.get("DataType") or both))
    return BuiltTensor(_text(item.get("Name", "")), kind, shape, vector, layout)


def onnx_names(metadata: str) -> list[str]:
    """The ONNX node names of a metadata field: ``[ONNX Layer: a]`` joined by nothing, by \\x1e or by \\x1f."""
    names: list[str] = []
    for piece in _METADATA.split(metadata)[1:]:
        end = piece.rfind("]")
        name = piece[:end] if end >= 0 else piece
        if name and name not in names[-50:]:
            names.append(name)
    return names
