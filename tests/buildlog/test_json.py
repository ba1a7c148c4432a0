import json
from typing import Any

import pytest

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.json_files import read_json
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError
from tests.errors import has
from tests.notes import note


def read(content: Any) -> Build:
    return read_json(
        (content if isinstance(content, str) else json.dumps(content)).encode(), "f.json"
    )


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "timeMs": 10.0, "averageMs": 0.5, "percentage": 20.0} | more


LAYER = {"Name": "a", "LayerType": "C"}


@pytest.mark.parametrize("key", ["Layers", "layers", "LayerInfo", "layerInfo"])
def test_read_json_layers_of_every_dialect(key: str) -> None:
    build = read({key: [LAYER, {"LayerType": "D"}, "just a name"]})
    assert [(x.name, x.type) for x in build.layers] == [("a", "C"), ("", "D"), ("just a name", "")]
    assert (build.source, build.listing, build.missing) == (
        BuildSource.LAYER_JSON,
        "layer-json",
        [],
    )


@pytest.mark.parametrize(("content", "name"), [([LAYER], "a"), (["b"], "b")])
def test_read_json_plain_list_of_layers(content: list[Any], name: str) -> None:
    assert [x.name for x in read(content).layers] == [name]


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (["x", "y"], ["x", "y"]),
        ([{"Name": "x", "IOMode": "Input"}, {"Name": 5}, {}, 7, "y"], ["x", "y"]),
        ("xy", []),
        (None, []),
    ],
)
def test_read_json_bindings(listed: Any, names: list[str]) -> None:
    for key in ("Bindings", "I/O Tensors"):
        assert read({"Layers": [LAYER], key: listed}).bindings == names


@pytest.mark.parametrize(
    ("fields", "version", "is_rtx"),
    [
        ({"builder": "tensorrt-rtx", "version": "1.7.1.116"}, "1.7.1.116", True),
        ({"version": "8.5.2"}, "8.5.2", False),
        ({"version": "newest"}, None, False),
        ({"version": 8}, None, False),
        ({}, None, False),
    ],
)
def test_read_json_builder_and_version(
    fields: dict[str, Any], version: str | None, is_rtx: bool
) -> None:
    build = read({"Layers": [LAYER]} | fields)
    assert (build.tensorrt, build.is_rtx) == (version, is_rtx)


@pytest.mark.parametrize(
    ("content", "code", "detail"),
    [
        ({"a": 1}, "no-layer-list", "'Layers'"),
        ({"Layers": {}}, "wrong-type", "'Layers'"),
        ({"Layers": [LAYER, {"x": 1}]}, "wrong-layer", "layer 1"),
        ('"text', "file-damaged", "column"),
        pytest.param("[" * 100_000, "too-many-values", "nested", id="nested"),
        pytest.param(
            '{"Layers": [' + '{"Name": "a", "x": ' * 50_000,
            "too-many-values",
            "nested",
            id="nested layers",
        ),
        pytest.param(
            '{"Layers": [{"Name": "a", "Inputs": [' + "[" * 50_000,
            "too-many-values",
            "nested",
            id="nested inputs",
        ),
        (5, "wrong-format", "profile"),
        ([1, 2], "wrong-format", "profile"),
        ([], "wrong-format", "profile"),
        ([{"count": 3, "x": 1}], "wrong-format", "profile"),
    ],
)
def test_read_json_rejects_other_content(content: Any, code: str, detail: str) -> None:
    with pytest.raises(BuildLogError, check=has(code, path="f.json")) as caught:
        read(content)
    assert detail in str(caught.value)


@pytest.mark.parametrize(
    "before", [[], [{"count": 4}], [{"count": 4}, {"x": 1}], [{"x": 1}, {"y": 2}]]
)
def test_profile_is_recognized_by_its_first_rows(before: list[Any]) -> None:
    build = read([*before, row("q"), row("r", medianMs=0.25)])
    assert build.source == BuildSource.PROFILE_JSON
    assert [
        (r.name, r.total_ms, r.average_ms, r.median_ms, r.percent) for r in build.profile_rows
    ] == [("q", 10.0, 0.5, None, 20.0), ("r", 10.0, 0.5, 0.25, 20.0)]
    assert build.profile_total_ms == 1.0
    assert build.iterations == (4 if {"count": 4} in before else None)


def test_profile_without_rows() -> None:
    build = read([{"count": 4}])
    assert (build.source, build.iterations, build.profile_rows, build.profile_total_ms) == (
        BuildSource.PROFILE_JSON,
        4,
        [],
        None,
    )


def test_profile_row_without_percentage() -> None:
    assert read([{"count": 4}, row("q", percentage=None)]).profile_rows[0].percent == 0.0


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 1), (10**12 - 1, 10**12 - 1), *((c, None) for c in (0, -3, "4", 2.0, 10**12))],
)
def test_profile_iterations(count: Any, expected: int | None) -> None:
    assert read([{"count": count}, row("q")]).iterations == expected


@pytest.mark.parametrize(
    ("first", "fields", "average", "total"),
    [
        ({"count": 4}, {"averageMs": None}, 2.5, 10.0),  # the total divided by the iterations
        ({"x": 1}, {"averageMs": None}, None, None),
        ({"count": 4}, {"averageMs": None, "timeMs": None}, None, None),
        ({"count": 4}, {"averageMs": 0.5}, 0.5, 10.0),
        ({"count": 4}, {"timeMs": None}, 0.5, 0.5),
        ({"count": 4}, {"averageMs": True}, 2.5, 10.0),
        ({"count": 4}, {"averageMs": "0.5"}, 2.5, 10.0),
    ],
)
def test_profile_row_with_missing_times(
    first: dict[str, Any], fields: dict[str, Any], average: float | None, total: float | None
) -> None:
    rows = read([first, row("q", **fields), row("sure")]).profile_rows[:-1]
    assert [(r.average_ms, r.total_ms) for r in rows] == (
        [] if average is None else [(average, total)]
    )


# Damage


def test_stray_escapes_in_a_listing() -> None:
    build = read('{"Layers": [{"Name": "a\\d\\"b\tc", "LayerType": "C"}]}\0\0')
    assert [x.name for x in build.layers] == ['a\\d"b\tc'] and build.missing == []


PROFILE = json.dumps([{"count": 3}, row("a"), row("b", medianMs=0.25), row("c")], indent=1)
TRTEXEC_ROW = '{{ "name" : "{}", "timeMs" : 1, "averageMs" : 0.3, "percentage" : 33 }}'


@pytest.mark.parametrize(
    ("text", "rows", "iterations"),
    [
        (PROFILE[: PROFILE.index('"c"')], [("a", None), ("b", 0.25)], 3),
        ("[\n" + "\n, ".join(map(TRTEXEC_ROW.format, "ab")), [("a", None), ("b", None)], None),
    ],
    ids=["in a row", "after the rows"],
)
def test_profile_that_is_cut_off_keeps_whole_rows(
    text: str, rows: list[tuple[str, float | None]], iterations: int | None
) -> None:
    build = read(text)
    assert [(r.name, r.median_ms) for r in build.profile_rows] == rows
    assert build.missing == ["profile (cut off: the end of f.json)"]
    assert build.iterations == iterations


@pytest.mark.parametrize("key", ["Layers", "layers", None])
def test_listing_that_is_cut_off_keeps_whole_layers(key: str | None) -> None:
    listed = json.dumps(
        [LAYER, {"Name": "b", "LayerType": "C"}, {"Name": "lost", "LayerType": "C"}], indent=1
    )
    text = f'{{"{key}": {listed}}}' if key else listed
    build = read(text[: text.index("lost")])
    assert [x.name for x in build.layers] == ["a", "b"]
    assert build.missing == ["engine listing (cut off: the end of f.json)"]
    assert build.notes == [note("cut-off", file="f.json")]
    again = read(f"{text}\n{text}")  # of two documents, the first is read
    assert (len(again.layers), again.missing) == (3, build.missing)
    with pytest.raises(BuildLogError, check=has("file-damaged", path="f.json")):
        read(text[: text.index("a") + 1])
