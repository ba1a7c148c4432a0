"""Layer JSON (``--exportLayerInfo``) and profile JSON (``--exportProfile``), in every dialect and somewhat damaged.

Layers are a list of objects, or of strings where the engine was built without ``--profilingVerbosity=detailed``.
TensorRT writes control characters, stray bytes and unescaped names into its JSON; a file may also be cut off.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.complete import CUT_LISTING, CUT_PROFILE
from qdqtool.buildlog.layers import layer_from_fields
from qdqtool.buildlog.numbers import number
from qdqtool.buildlog.records import ProfileRow
from qdqtool.buildlog.types import Build, BuiltLayer, Listing
from qdqtool.errors import BuildLogError
from qdqtool.io.outputs import parse_json

_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LAYER_KEYS = ("Layers", "layers", "LayerInfo", "layerInfo")
_KEYS = frozenset(_LAYER_KEYS)
_ROW_BEGINS = '{ "name" : "'
_ROW = re.compile(
    r'", "timeMs" : ([\d.e+-]{1,24}), "averageMs" : ([\d.e+-]{1,24})'
    r'(?:, "medianMs" : ([\d.e+-]{1,24}))?, "percentage" : ([\d.e+-]{1,24}) \}'
)
_VERSION = re.compile(r"\d{1,3}(?:\.\d{1,5}){1,3}")
_MAX_LAYERS = 200_000


@dataclass(frozen=True)
class _Documents:
    """Whole layer listings and profiles that were written one after the other, as by builds that append to a file.

    Attributes:
        listing: The last listing, None without one.
        profile: The last profile, None without one.
        count: How many documents there are.
    """

    listing: Any
    profile: Any
    count: int


def read_json(data: bytes, name: str) -> Build:
    """Reads a layer JSON or a profile JSON.

    Args:
        data: The file's bytes.
        name: What to call it in messages.

    Raises:
        BuildLogError: It is neither, or too damaged to use.
    """
    text = data.decode("utf-8", "replace")
    content, whole = _load(text, name)
    build = Build(source=BuildSource.LAYER_JSON)
    if isinstance(content, _Documents):
        both = content.listing is not None and content.profile is not None
        if content.count > 1 + both:
            of_each = "the last listing and the last profile were" if both else "the last was"
            build.notes.append(f"{name} holds {content.count} whole JSON documents one after the other; {of_each} read")
        if both:
            _profile(build, content.profile)
        content = content.profile if content.listing is None else content.listing
    if isinstance(content, dict):
        listed = next((content[key] for key in _LAYER_KEYS if key in content), None)
        if listed is None:
            raise BuildLogError(f"{name}: a JSON without 'Layers': no layer listing and no profile of TensorRT")
        _layers(build, listed, name)
        _builder(build, content)
        _bindings(build, content.get("Bindings", content.get("I/O Tensors")))
    elif isinstance(content, list) and _is_profile(content):
        build.source = BuildSource.PROFILE_JSON
        _profile(build, content)
    elif isinstance(content, list) and any(isinstance(x, str) or (isinstance(x, dict) and "LayerType" in x)
                                           for x in content):
        _layers(build, content, name)
    else:
        raise BuildLogError(f"{name}: a JSON that is neither a layer listing nor a profile of TensorRT")
    if not whole:
        build.notes.append(f"{name} is cut off or damaged; what could be read of it was used")
        cut = CUT_PROFILE if build.source == BuildSource.PROFILE_JSON else CUT_LISTING
        build.missing.append(f"{cut}the end of {name})")
    return build


def _builder(build: Build, content: dict[str, Any]) -> None:
    """What ``qdqtool build`` writes into its layer table: which TensorRT it was."""
    build.is_rtx = content.get("builder") == "tensorrt-rtx"
    version = content.get("version")
    if isinstance(version, str) and _VERSION.fullmatch(version):
        build.tensorrt = version


def _load(text: str, name: str) -> tuple[Any, bool]:
    """The parsed JSON, and whether it was whole."""
    text = text.strip().rstrip("\0")
    error: Exception
    for candidate in (text, _BAD_ESCAPE.sub(r"\\\\", text)):
        try:
            return parse_json(candidate, strict=False), True
        except RecursionError:
            raise BuildLogError(f"{name}: a JSON nested too deeply to be TensorRT's") from None
        except ValueError as found:
            error = found
    in_turn = _in_turn(text)
    if in_turn is not None:
        return in_turn
    if text.startswith('{"log":'):
        raise BuildLogError(f"{name}: a log as Docker stores it; give what `docker logs` prints of that container")
    salvaged = _salvage(text)
    if salvaged is None:
        raise BuildLogError(f"{name}: not a JSON of TensorRT, or damaged ({error}); export it again") from None
    return salvaged, False


def _in_turn(text: str) -> tuple[list[Any] | _Documents, bool] | None:
    """Layers that were written one object after another, as scripts around IEngineInspector do, or whole documents.

    Returns:
        What is whole of them, and whether that is all; None for a mixture, and where not even the first is whole.
    """
    decoder = json.JSONDecoder(strict=False)
    items: list[Any] = []
    at = 0
    while at < len(text) and len(items) < _MAX_LAYERS:
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        items.append(item)
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
    whole = at == len(text)
    if not items:
        return None
    if all(isinstance(item, dict) and "LayerType" in item for item in items):
        return items, whole
    listings = [item for item in items if _is_listing(item)]
    profiles = [item for item in items if isinstance(item, list) and _is_profile(item)]
    if len(listings) + len(profiles) != len(items):
        return None
    listing, profile = listings[-1] if listings else None, profiles[-1] if profiles else None
    return _Documents(listing, profile, len(items)), whole


def _is_listing(item: Any) -> bool:
    return isinstance(item, dict) and not _KEYS.isdisjoint(item)


def _salvage(text: str) -> Any:
    """What can be read of a cut or damaged file: the layers before the damage, or the profile's whole rows."""
    rows = [row for line in text.splitlines() if '"timeMs"' in line and (row := _row(line)) is not None]
    if rows:
        return [{"count": 0}, *rows]
    start = next((text.find(f'"{key}"') for key in _LAYER_KEYS if f'"{key}"' in text), -1)
    start = text.find("[", start) if start >= 0 else text.find("[") if text.startswith("[") else -1
    if start < 0:
        return None
    decoder = json.JSONDecoder(strict=False)
    at = start + 1
    items: list[Any] = []
    while len(items) < _MAX_LAYERS:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        items.append(item)
    return {"Layers": items} if items else None


def _row(line: str) -> dict[str, Any] | None:
    """One whole row of a profile, its name as printed (TensorRT does not escape it)."""
    start = line.find(_ROW_BEGINS)
    name_ends = line.rfind('", "timeMs" : ')
    found = _ROW.match(line, name_ends) if 0 <= start < name_ends else None
    if found is None:
        return None
    name = line[start + len(_ROW_BEGINS) : name_ends]
    keys = ("timeMs", "averageMs", "medianMs", "percentage")
    return {"name": name, **dict(zip(keys, map(_float, found.groups()), strict=True))}


def _float(text: str | None) -> float | None:
    return None if text is None else number(text)


def _layers(build: Build, listed: Any, name: str) -> None:
    if not isinstance(listed, list):
        raise BuildLogError(f"{name}: 'Layers' is not a list; not a listing of TensorRT")
    for item in listed[:_MAX_LAYERS]:
        if isinstance(item, str):
            build.layers.append(BuiltLayer(name=item))
        elif isinstance(item, dict) and ("Name" in item or "LayerType" in item):
            build.layers.append(layer_from_fields(item))
        else:
            raise BuildLogError(
                f"{name}: layer {len(build.layers)} of the list is neither a name nor a layer of TensorRT"
            )
    build.listing = Listing.LAYER_JSON


def _bindings(build: Build, listed: Any) -> None:
    if not isinstance(listed, list):
        return
    for item in listed[:10_000]:
        if isinstance(item, str):
            build.bindings.append(item)
        elif isinstance(item, dict) and isinstance(item.get("Name"), str):
            build.bindings.append(item["Name"])


def _is_profile(content: list[Any]) -> bool:
    return any(isinstance(x, dict) and ("timeMs" in x or "averageMs" in x) for x in content[:3]) or (
        bool(content) and isinstance(content[0], dict) and set(content[0]) == {"count"}
    )


def _profile(build: Build, content: list[Any]) -> None:
    for item in content[:_MAX_LAYERS]:
        if not isinstance(item, dict):
            continue
        if "count" in item and "name" not in item:
            count = item["count"]
            build.iterations = count if isinstance(count, int) and 0 < count < 10**12 else None
            continue
        total, average = _amount(item.get("timeMs")), _amount(item.get("averageMs"))
        if average is None and total is not None and build.iterations:
            average = total / build.iterations
        if average is None:
            continue
        percent = _amount(item.get("percentage")) or 0.0
        row = ProfileRow(str(item.get("name", "")), total or average, average, _amount(item.get("medianMs")), percent)
        build.profile_rows.append(row)
    build.profile_total_ms = sum(row.average_ms for row in build.profile_rows) if build.profile_rows else None


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return number(str(value)[:400])
