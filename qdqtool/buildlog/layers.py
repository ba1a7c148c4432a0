"""Engine layers, from each spelling in which TensorRT lists them, and the JSON files of layers and profiles.

``Layer(CaskConvolution): NAME, Tactic: 0x1, a[Int8(1,64,8,8)] -> b[Half(1,64,8,8)]``   8.0 to 8.4, and TensorRT 7
``Layer(CaskConvolution): NAME, Tactic: 0x1, a (Int8[1,64:32,8,8]) -> b (Half[1,64,8,8])``   8.5 and later
``Name: NAME, LayerType: T, Inputs: [ { Name: a, Location: Device, ... }], Outputs: [...], Kernel: [3,3], ...``
    ``--dumpLayerInfo``, 8.2 and later; TensorRT 10 drops Location inside Myelin, 11 and RTX split Format/Datatype
``{"Name": ..., "LayerType": ..., "Inputs": [...]}``   ``--exportLayerInfo``

Layers of a JSON are objects, or strings where the engine was built without ``--profilingVerbosity=detailed``. TensorRT
writes control characters, stray bytes and unescaped names into its JSON; a file may also be cut off.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.lines import parse_number
from qdqtool.buildlog.types import (
    MAX_DIMENSION,
    Build,
    BuiltLayer,
    BuiltTensor,
    Gap,
    GapKind,
    ListingSource,
    ProfileRow,
    Section,
    Shape,
)
from qdqtool.errors import BuildLogError
from qdqtool.types import Precision
from qdqtool.util.json_text import TooManyValues, parse_json
from qdqtool.util.notes import Remark

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
_METADATA = re.compile(r"\[ONNX Layer: ")
_SIGNS = re.compile(r"([\[{(]+)|([\]})]+)|, ")
_MAX_PAIRS = 200
_SHORT = 200  # characters of what is kept of the texts that a log repeats
_MAX_RANK = 64
MAX_TENSORS = 4096  # of one layer; real ones have at most some hundreds


def find_precision(text: str) -> Precision:
    """The data type that a format description names, in any of TensorRT's spellings; UNKNOWN when it names none.

    ``Thirty-two wide channel vectorized row major Int8 format``, ``Row major linear FP32``, ``Half``, ``INT8``, ...
    """
    return _find_precision(text[:400])


@functools.lru_cache(1024)
def _find_precision(text: str) -> Precision:
    found = map(_TYPES.get, map(str.lower, _WORD.findall(text)))
    return next((precision for precision in found if precision is not None), Precision.UNKNOWN)


def find_vector_width(text: str) -> int:
    """Channels per element of the layout that a format description names."""
    return _find_vector_width(text[:200])


@functools.lru_cache(1024)
def _find_vector_width(text: str) -> int:
    lower = text.lower()
    return next((width for words, width in _VECTOR_WORDS.items() if lower.startswith(words)), 1)


def parse_dims(text: str) -> tuple[Shape, int]:
    """Reads ``1,64:32,552,968`` into dimensions and vector width; negative (dynamic) dimensions become None."""
    return _parse_dims(text) if len(text) <= _SHORT else _parse_dims.__wrapped__(text)


@functools.lru_cache(1024)
def _parse_dims(text: str) -> tuple[Shape, int]:
    shape: list[int | None] = []
    vector = 1
    for piece in text.split(",", _MAX_RANK)[:_MAX_RANK]:
        size, _, width = piece.strip().partition(":")
        if not size:
            continue
        value = _parse_int(size)
        shape.append(value if value is not None and 0 <= value < MAX_DIMENSION else None)
        if width:
            vector = _parse_int(width) or 1
    return tuple(shape), vector


def _parse_int(text: str) -> int | None:
    try:
        return int(text) if len(text) < 20 else None
    except ValueError:
        return None


def int_list(value: Any, least: int | None = None) -> list[int] | None:
    """A listed field that is a non-empty list of integers, none below ``least``; None when it is something else."""
    if not isinstance(value, list) or not value or len(value) > 64:
        return None
    low = -MAX_DIMENSION if least is None else least
    whole = all(
        isinstance(v, int) and not isinstance(v, bool) and low <= v < MAX_DIMENSION for v in value
    )
    return list(value) if whole else None


def is_engine_line(text: str) -> bool:
    """Whether :func:`parse_engine_line` reads it."""
    return _LAYER.match(text) is not None


def is_info_line(text: str) -> bool:
    """Whether :func:`parse_info_line` reads it."""
    return text.startswith("Name: ") and ", LayerType: " in text


def parse_engine_line(text: str, line: int = 0) -> BuiltLayer | None:
    """Reads a ``Layer(TYPE): ...`` line; None when it is none."""
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
    at, side = 0, layer.inputs
    if edges.startswith(("-> ", " -> ")):
        at, side = edges.index("-> ") + 3, layer.outputs
    for match in _EDGE.finditer(edges):
        if match.start() < at or len(side) >= MAX_TENSORS:
            continue
        shape, vector = parse_dims(match[2] if match[1] else match[4])
        side.append(
            BuiltTensor(
                edges[at : match.start()], find_precision(match[1] or match[3]), shape, vector
            )
        )
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
        # The "]" that closes the list is the first after a "}", or the very next for an empty list.
        closing = start - 1 if text.startswith("]", start) else text.find("}]", start)
        stop = closing + 1 if closing >= 0 else len(text)
        fields[key] = list(_parse_tensors(text[start:stop]))
        at = stop + 1
    if at >= 0:
        fields.update(_parse_fields(text[at:]))
    return layer_from_fields(fields, line)


def _parse_tensors(text: str) -> Iterator[dict[str, Any]]:
    at = text.find("{ Name: ")
    for _ in range(MAX_TENSORS):
        if at < 0:
            return
        start = at + len("{ Name: ")
        after = text.find("{ Name: ", start)
        item = text[start : after if after >= 0 else len(text)]
        name, listed, rest = item.partition(", Dimensions: [")
        fields = {"Name": name.partition(", Location: ")[0] if listed else item.strip(" },")}
        dims, closed, rest = rest.partition("]")
        if closed:
            fields["Dimensions"] = dims
            for key in ("Format/Datatype", "Datatype", "Format"):
                _, found, value = rest.partition(f", {key}: ")
                if found:
                    fields[key] = value.split(", Format: ")[0].split(" }")[0].strip()
        yield fields
        at = after


def _parse_fields(text: str) -> dict[str, Any]:
    """Reads ``, Kernel: [3,3], Weights: {"Type": "Int8", "Count": 9}, Metadata: [ONNX Layer: a]``."""
    fields: dict[str, Any] = {}
    depth = start = 0
    pieces: list[str] = []
    body, named, metadata = text.partition(", Metadata: ")
    for sign in _SIGNS.finditer(body):
        if sign[1]:
            depth += len(sign[1])
        elif sign[2]:
            depth = max(0, depth - len(sign[2]))
        elif depth == 0:
            pieces.append(body[start : sign.start()])
            start = sign.end()
            if len(pieces) == _MAX_PAIRS:
                break
    for piece in [*pieces, body[start:]][:_MAX_PAIRS]:
        key, separator, value = piece.partition(": ")
        if separator and key:
            fields[key] = _parse_value(value)
    return fields | ({"Metadata": metadata} if named else {})


def _parse_value(text: str) -> Any:
    if text.startswith(("[", "{")) or text.lstrip("-").isdecimal():
        try:
            return parse_json(text)
        except (ValueError, RecursionError):
            return text
    return text


def layer_from_fields(fields: dict[str, Any], line: int = 0) -> BuiltLayer:
    """A layer from the fields of the inspector, whatever the version; unknown fields are kept in ``extras``."""
    named = {key: value for key, value in fields.items() if isinstance(key, str)}

    def tensors(key: str) -> list[BuiltTensor]:
        listed = named.pop(key, None)
        return (
            [_tensor_from_fields(item) for item in listed[:MAX_TENSORS]]
            if isinstance(listed, list)
            else []
        )

    return BuiltLayer(
        _as_text(named.pop("Name", "")),
        _as_text(named.pop("LayerType", "")),
        tensors("Inputs"),
        tensors("Outputs"),
        tensors("Constants"),
        _as_text(named.get("TacticName") or named.get("TacticValue") or ""),
        onnx_names(_as_text(named.pop("Metadata", ""))),
        _as_text(named.get("Origin", "")),
        line,
        extras=named,
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:1000]


def _tensor_from_fields(item: Any) -> BuiltTensor:
    if not isinstance(item, dict):
        return BuiltTensor(_as_text(item))
    both = _as_text(item.get("Format/Datatype", ""))
    layout = both or _as_text(item.get("Format", ""))
    dims = item.get("Dimensions")
    shape: Shape | None = None
    vector = find_vector_width(layout)
    if isinstance(dims, str):
        shape, listed = parse_dims(dims)
        vector = max(vector, listed)
    elif isinstance(dims, list):
        shape = tuple(
            d if isinstance(d, int) and 0 <= d < MAX_DIMENSION else None for d in dims[:_MAX_RANK]
        )
    kind = find_precision(_as_text(item.get("Datatype") or item.get("DataType") or both))
    return BuiltTensor(_as_text(item.get("Name", "")), kind, shape, vector, layout)


def onnx_names(metadata: str) -> list[str]:
    """The ONNX node names of a metadata field: ``[ONNX Layer: a]`` joined by nothing, by \\x1e or by \\x1f."""
    names: list[str] = []
    for piece in _METADATA.split(metadata)[1:]:
        end = piece.rfind("]")
        name = piece[:end] if end >= 0 else piece
        if name and name not in names[-50:]:
            names.append(name)
    return names


# Layer JSON and profile JSON -----------------------------------------------------------------------------------------

_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LAYER_KEYS = ("Layers", "layers", "LayerInfo", "layerInfo")
_KEYS = frozenset(_LAYER_KEYS)
_ROW_BEGINS = '{ "name" : "'
_ROW = re.compile(
    r'", "timeMs" : ([\d.e+-]{1,24}), "averageMs" : ([\d.e+-]{1,24})'
    r'(?:, "medianMs" : ([\d.e+-]{1,24}))?, "percentage" : ([\d.e+-]{1,24}) \}'
)
_VERSION = re.compile(r"\d{1,3}(?:\.\d{1,5}){1,3}")
_TARGET = re.compile(r"SM(\d{2,3})")
_MAX_LAYERS = 200_000
MAX_LISTED_TENSORS = 500_000  # of all layers: as many tensors with fields as 20 MB of JSON can hold


def read_json(data: bytes, name: str) -> Build:
    """Reads a layer JSON or a profile JSON; ``name`` is what to call it in messages."""
    documents, whole = _load_documents(data.decode("utf-8", "replace"), name)
    build = Build(source=BuildSource.LAYER_JSON)
    content = documents[-1]
    if len(documents) > 1:  # listings and profiles, as by builds that append to a file
        listings = [d for d in documents if isinstance(d, dict)]
        profiles = [d for d in documents if isinstance(d, list)]
        content, both = (listings or profiles)[-1], bool(listings and profiles)
        if len(documents) > 1 + both:
            remark = Remark.SEVERAL_OF_BOTH if both else Remark.SEVERAL_DOCUMENTS
            build.notes.append(remark(file=name, count=len(documents)))
        if both:
            _add_profile(build, profiles[-1])
    if isinstance(content, dict):
        listed = next((content[key] for key in _LAYER_KEYS if key in content), None)
        if listed is None:
            raise BuildLogError(
                "a JSON without 'Layers': no layer listing and no profile of TensorRT",
                name,
                code="no-layer-list",
            )
        _add_layers(build, listed, name)
        build.is_rtx = (
            content.get("builder") == "tensorrt-rtx"
        )  # as ``qdqtool build`` writes it into its layer table
        told = content.get("targets")
        targets = (
            [_TARGET.fullmatch(t) for t in told[:16] if isinstance(t, str)]
            if isinstance(told, list)
            else []
        )
        build.targets = tuple(int(match[1]) for match in targets if match)
        version = content.get("version")
        if isinstance(version, str) and _VERSION.fullmatch(version):
            build.tensorrt = version
        bindings = content.get("Bindings", content.get("I/O Tensors"))
        names = (
            item.get("Name") if isinstance(item, dict) else item
            for item in (bindings[:10_000] if isinstance(bindings, list) else ())
        )
        build.bindings += [name for name in names if isinstance(name, str)]
    elif isinstance(content, list) and _is_profile(content):
        build.source = BuildSource.PROFILE_JSON
        _add_profile(build, content)
    elif isinstance(content, list) and any(
        isinstance(x, str) or (isinstance(x, dict) and "LayerType" in x) for x in content
    ):
        _add_layers(build, content, name)
    else:
        raise BuildLogError(
            "a JSON that is neither a layer listing nor a profile of TensorRT",
            name,
            code="wrong-format",
        )
    if not whole:
        build.notes.append(Remark.CUT_OFF(file=name))
        is_profile = build.source == BuildSource.PROFILE_JSON
        build.gaps.append(
            Gap(Section.PROFILE if is_profile else Section.LISTING, GapKind.CUT_FILE, name=name)
        )
    return build


def _load_documents(text: str, name: str) -> tuple[list[Any], bool]:
    """The documents of a JSON, one where it is whole or was salvaged, and whether all was whole."""
    text = text.strip().rstrip("\0")
    error: Exception
    for candidate in (text, _BAD_ESCAPE.sub(r"\\\\", text)):
        try:
            return [parse_json(candidate, strict=False)], True
        except RecursionError:
            raise BuildLogError(
                "a JSON nested too deeply to be TensorRT's", name, code="nested-too-deeply"
            ) from None
        except TooManyValues as found:
            raise BuildLogError(
                f"a JSON of {found}, which none of TensorRT's has", name, code="too-many-values"
            ) from None
        except ValueError as found:
            error = found
    if (in_turn := _split_documents(text)) is not None:
        return in_turn
    if text.startswith('{"log":'):
        raise BuildLogError(
            "a log as Docker stores it; give what `docker logs` prints of that container",
            name,
            code="docker-log",
        )
    salvaged = _salvage(text)
    if salvaged is None:
        raise BuildLogError(
            f"not a JSON of TensorRT, or damaged ({error}); export it again",
            name,
            code="file-damaged",
        ) from None
    return [salvaged], False


def _split_documents(text: str) -> tuple[list[Any], bool] | None:
    """Layers that were written one object after another, as one document, or whole documents; None for a mixture."""
    items, end = _decode_values(text, 0)
    whole = end == len(text)
    if not items:
        return None
    if all(isinstance(item, dict) and "LayerType" in item for item in items):
        return [items], whole
    known = all(
        not _KEYS.isdisjoint(item)
        if isinstance(item, dict)
        else isinstance(item, list) and _is_profile(item)
        for item in items
    )
    return (items, whole) if known else None


def _salvage(text: str) -> Any:
    """What can be read of a cut or damaged file: the layers before the damage, or the profile's whole rows."""
    if rows := [
        row
        for line in text.splitlines()
        if '"timeMs"' in line and (row := _parse_profile_row(line)) is not None
    ]:
        return [{"count": 0}, *rows]
    start = next((text.find(f'"{key}"') for key in _LAYER_KEYS if f'"{key}"' in text), -1)
    start = text.find("[", start) if start >= 0 else text.find("[") if text.startswith("[") else -1
    if start < 0:
        return None
    items, _ = _decode_values(text, _skip_separators(text, start + 1))
    return {"Layers": items} if items else None


def _decode_values(text: str, at: int) -> tuple[list[Any], int]:
    """The values that follow each other from a place on, and where the last whole one, and what parts them, ends."""
    decoder = json.JSONDecoder(strict=False)
    items: list[Any] = []
    with contextlib.suppress(ValueError, RecursionError):
        while len(items) < _MAX_LAYERS:
            item, at = decoder.raw_decode(text, at)
            items.append(item)
            at = _skip_separators(text, at)
    return items, at


def _skip_separators(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _parse_profile_row(line: str) -> dict[str, Any] | None:
    """One whole row of a profile, its name as printed (TensorRT does not escape it)."""
    start = line.find(_ROW_BEGINS)
    name_ends = line.rfind('", "timeMs" : ')
    found = _ROW.match(line, name_ends) if 0 <= start < name_ends else None
    if found is None:
        return None
    name = line[start + len(_ROW_BEGINS) : name_ends]
    keys = ("timeMs", "averageMs", "medianMs", "percentage")
    return {
        "name": name,
        **{key: parse_number(value or "") for key, value in zip(keys, found.groups(), strict=True)},
    }


def _add_layers(build: Build, listed: Any, name: str) -> None:
    if not isinstance(listed, list):
        raise BuildLogError(
            "'Layers' is not a list; not a listing of TensorRT", name, code="wrong-type"
        )
    tensors = 0
    for item in listed[:_MAX_LAYERS]:
        if isinstance(item, str):
            build.layers.append(BuiltLayer(name=item))
        elif isinstance(item, dict) and ("Name" in item or "LayerType" in item):
            layer = layer_from_fields(item)
            build.layers.append(layer)
            tensors += len(layer.inputs) + len(layer.outputs) + len(layer.constants)
            if tensors > MAX_LISTED_TENSORS:
                raise BuildLogError(
                    f"lists more than {MAX_LISTED_TENSORS:,} tensors up to layer "
                    f"{len(build.layers) - 1}; no engine has as many",
                    name,
                    code="too-many-tensors",
                )
        else:
            raise BuildLogError(
                f"layer {len(build.layers)} of the list is neither a name nor a layer of TensorRT",
                name,
                code="wrong-layer",
            )
    build.listing = ListingSource.LAYER_JSON


def _is_profile(content: list[Any]) -> bool:
    return any(
        isinstance(x, dict) and ("timeMs" in x or "averageMs" in x) for x in content[:3]
    ) or (bool(content) and isinstance(content[0], dict) and set(content[0]) == {"count"})


def _add_profile(build: Build, content: list[Any]) -> None:
    for item in content[:_MAX_LAYERS]:
        if not isinstance(item, dict):
            continue
        if "count" in item and "name" not in item:
            count = item["count"]
            build.iterations = count if isinstance(count, int) and 0 < count < 10**12 else None
            continue
        total, average = _as_float(item.get("timeMs")), _as_float(item.get("averageMs"))
        if average is None and total is not None and build.iterations:
            average = total / build.iterations
        if average is None:
            continue
        build.profile_rows.append(
            ProfileRow(
                str(item.get("name", "")),
                total or average,
                average,
                _as_float(item.get("medianMs")),
                _as_float(item.get("percentage")) or 0.0,
            )
        )
    build.profile_total_ms = (
        sum(row.average_ms for row in build.profile_rows) if build.profile_rows else None
    )


def _as_float(value: Any) -> float | None:
    if isinstance(value, float):  # as most are
        return value if math.isfinite(value) else None
    return (
        parse_number(str(value)[:400])
        if isinstance(value, int) and not isinstance(value, bool)
        else None
    )
