"""Readers of TensorRT's JSON files: layer listings and profiles.

Layers are objects, or strings if the engine was built without ``--profilingVerbosity=detailed``.
TensorRT writes control characters, stray bytes and unescaped names into its JSON. A file may also
be cut off.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.layers import layer_from_fields
from qdqtool.buildlog.lines import parse_number
from qdqtool.buildlog.types import (
    Build,
    Gap,
    GapKind,
    ListingSource,
    ProfileRow,
    Section,
)
from qdqtool.errors import BuildLogError
from qdqtool.util.json_text import TooManyValues, parse_json
from qdqtool.util.notes import Note

_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SEPARATORS = re.compile(r"[ \t\r\n,]*")
_LAYER_KEYS = ("Layers", "layers", "LayerInfo", "layerInfo")
_ROW_KEYS = ("timeMs", "averageMs", "medianMs", "percentage")
_VERSION = re.compile(r"\d{1,3}(?:\.\d{1,5}){1,3}")
_TARGET = re.compile(r"\bSM(\d{2,3})\b")


def read_json(data: bytes, path: str) -> Build:
    """Read a layer listing or a profile in JSON.

    Args:
        data: Contents of the file.
        path: Name of the file in messages.

    Raises:
        BuildLogError: The file is neither a listing nor a profile, or is too damaged.
    """
    content, is_complete = _parse_content(data.decode("utf-8", "replace"), path)
    build = Build(source=BuildSource.LAYER_JSON)
    if isinstance(content, dict):
        _add_listing(build, content, path)
    elif isinstance(content, list) and _is_profile(content):
        build.source = BuildSource.PROFILE_JSON
        _add_profile(build, content)
    elif isinstance(content, list) and any(map(_is_layer, content)):
        _add_layers(build, content, path)
    else:
        raise BuildLogError(
            "neither a layer listing nor a profile of TensorRT; give the file of "
            "--exportLayerInfo or --exportProfile",
            path,
            code="wrong-format",
        )
    if not is_complete:
        build.notes.append(
            Note(
                f"{path}: truncated or damaged, so only the part before the damage was read. "
                "Export the file again",
                code="cut-off",
                file=path,
            )
        )
        is_profile = build.source == BuildSource.PROFILE_JSON
        section = Section.PROFILE if is_profile else Section.LISTING
        build.gaps.append(Gap(section, GapKind.CUT_FILE, name=path))
    return build


def _parse_content(text: str, path: str) -> tuple[Any, bool]:
    """Return the readable content of a JSON file, and whether this is the whole file."""
    text = text.strip().rstrip("\0")
    error: Exception
    for candidate in (text, _BAD_ESCAPE.sub(r"\\\\", text)):
        try:
            return parse_json(candidate, strict=False), True
        except (RecursionError, TooManyValues) as excess:
            reason = "nested too deeply" if isinstance(excess, RecursionError) else excess
            raise BuildLogError(
                f"not a JSON file of TensorRT: {reason}; give the file of --exportLayerInfo or "
                "--exportProfile",
                path,
                code="too-many-values",
            ) from None
        except ValueError as damage:
            error = damage
    salvaged = _recover_values(text)
    if salvaged is None:
        raise BuildLogError(
            f"not a JSON file of TensorRT, or damaged ({error}); export the file again",
            path,
            code="file-damaged",
        ) from None
    return salvaged, False


def _recover_values(text: str) -> Any:
    """Return the readable part of a truncated or damaged file; None if nothing is readable.

    The readable part is the list of rows (profile) or layers (listing) before the damage.
    """
    start = _find_layer_list(text)
    if start < 0:
        return None
    values = _decode_values(text, start + 1)
    if _is_profile(values):
        return values
    return {"Layers": values} if values else None


def _find_layer_list(text: str) -> int:
    for key in _LAYER_KEYS:
        position = text.find(f'"{key}"')
        if position >= 0:
            return text.find("[", position)
    return 0 if text.startswith("[") else -1


def _decode_values(text: str, start: int) -> list[Any]:
    """Return the JSON values from `start` on, up to the first damaged value."""
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            start = _SEPARATORS.match(text, start).end()  # type: ignore[union-attr]
            value, start = decoder.raw_decode(text, start)
            values.append(value)
    return values


# Listings


def _is_layer(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, dict) and "LayerType" in item)


def _add_listing(build: Build, content: dict[str, Any], path: str) -> None:
    if not any(key in content for key in _LAYER_KEYS):
        raise BuildLogError(
            "has no 'Layers', so it is neither a layer listing nor a profile of TensorRT; give "
            "the file of --exportLayerInfo or --exportProfile",
            path,
            code="no-layer-list",
        )
    _add_layers(build, next(content[key] for key in _LAYER_KEYS if key in content), path)
    # `qdqtool build` writes builder, targets and version into its layer table.
    build.is_rtx = content.get("builder") == "tensorrt-rtx"
    build.targets = tuple(map(int, _TARGET.findall(str(content.get("targets")))))
    version = str(content.get("version"))
    if _VERSION.fullmatch(version):
        build.tensorrt = version
    bindings = content.get("Bindings", content.get("I/O Tensors"))
    if isinstance(bindings, list):
        build.bindings = _read_binding_names(bindings)


def _read_binding_names(bindings: list[Any]) -> list[str]:
    names = [item.get("Name") if isinstance(item, dict) else item for item in bindings]
    return [name for name in names if isinstance(name, str)]


def _add_layers(build: Build, listed: Any, path: str) -> None:
    if not isinstance(listed, list):
        raise BuildLogError(
            "'Layers' is not a list; give the file of --exportLayerInfo", path, code="wrong-type"
        )
    for position, item in enumerate(listed):
        fields = {"Name": item} if isinstance(item, str) else item
        if not isinstance(fields, dict) or ("Name" not in fields and "LayerType" not in fields):
            raise BuildLogError(
                f"layer {position} of the list is neither a name nor a layer object; export the "
                "listing again",
                path,
                code="wrong-layer",
            )
        build.layers.append(layer_from_fields(fields))
    build.listing = ListingSource.LAYER_JSON


# Profiles


def _is_profile(content: Any) -> bool:
    if not isinstance(content, list) or not content:
        return False
    first = content[0]
    return (isinstance(first, dict) and set(first) == {"count"}) or any(
        isinstance(row, dict) and ("timeMs" in row or "averageMs" in row) for row in content[:3]
    )


def _add_profile(build: Build, content: list[Any]) -> None:
    for item in content:
        if not isinstance(item, dict):
            continue
        if "count" in item and "name" not in item:
            count = item["count"]
            build.iterations = count if isinstance(count, int) and 0 < count < 10**12 else None
            continue
        row = _make_profile_row(item, build.iterations)
        if row is not None:
            build.profile_rows.append(row)
    build.profile_total_ms = sum(row.average_ms for row in build.profile_rows) or None


def _make_profile_row(item: dict[str, Any], iterations: int | None) -> ProfileRow | None:
    total, average, median, percentage = (_as_float(item.get(key)) for key in _ROW_KEYS)
    if average is None and total is not None and iterations:
        average = total / iterations
    if average is None:
        return None
    name = str(item.get("name", ""))
    return ProfileRow(name, total or average, average, median, percentage or 0.0)


def _as_float(value: Any) -> float | None:
    return parse_number(str(value)) if type(value) in (int, float) else None
