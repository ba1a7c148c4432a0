"""Layer and profile JSON: dialects, and what can be read of damaged files."""

import json
from typing import Any

import pytest

from qdqtool.base.notes import Remark
from qdqtool.buildlog import layers
from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.layers import read_json
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError
from tests.raising import raises


def read(content: Any) -> Build:
    return read_json(
        (content if isinstance(content, str) else json.dumps(content)).encode(), "f.json"
    )


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "timeMs": 10.0, "averageMs": 0.5, "percentage": 20.0} | more


LAYER = {"Name": "a", "LayerType": "C"}


@pytest.mark.parametrize("key", ["Layers", "layers", "LayerInfo", "layerInfo"])
def test_the_list_of_layers_in_every_dialect(key: str) -> None:
    build = read({key: [LAYER, {"LayerType": "D"}, "just a name"]})
    assert [(x.name, x.type) for x in build.layers] == [("a", "C"), ("", "D"), ("just a name", "")]
    assert (build.source, build.listing, build.missing) == (
        BuildSource.LAYER_JSON,
        "layer-json",
        [],
    )
    assert [x.name for x in read([LAYER]).layers] == ["a"] and [
        x.name for x in read(["b"]).layers
    ] == ["b"]


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (["x", "y"], ["x", "y"]),
        ([{"Name": "x", "IOMode": "Input"}, {"Name": 5}, {}, 7, "y"], ["x", "y"]),
        ("xy", []),
        (None, []),
    ],
)
def test_bindings(listed: Any, names: list[str]) -> None:
    for key in ("Bindings", "I/O Tensors"):
        assert read({"Layers": [LAYER], key: listed}).bindings == names


@pytest.mark.parametrize(
    ("fields", "version", "rtx"),
    [
        ({"builder": "tensorrt-rtx", "version": "1.7.1.116"}, "1.7.1.116", True),
        ({"version": "8.5.2"}, "8.5.2", False),
        ({"version": "newest"}, None, False),
        ({"version": 8}, None, False),
        ({}, None, False),
    ],
)
def test_a_table_of_our_own_says_who_built(
    fields: dict[str, Any], version: str | None, rtx: bool
) -> None:
    build = read({"Layers": [LAYER]} | fields)
    assert (build.tensorrt, build.is_rtx) == (version, rtx)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"a": 1}, "read_json 'Layers'"),
        ({"Layers": {}}, "_layers 'Layers'"),
        ({"Layers": [LAYER, {"x": 1}]}, "_layers 1"),
        ('"text', "_load column"),
        ("[" * 100_000, "_load nested"),
        *((content, "read_json profile") for content in (5, [1, 2], [], [{"count": 3, "x": 1}])),
    ],
)
def test_what_is_neither(content: Any, told: str) -> None:
    with raises(BuildLogError, f"{told} f.json"):
        read(content)


@pytest.mark.parametrize(
    "before", [[], [{"count": 4}], [{"count": 4}, {"x": 1}], [{"x": 1}, {"y": 2}]]
)
def test_a_profile_is_known_by_its_first_rows(before: list[Any]) -> None:
    build = read([*before, row("q"), row("r", medianMs=0.25)])
    assert build.source == BuildSource.PROFILE_JSON
    assert [
        (r.name, r.total_ms, r.average_ms, r.median_ms, r.percent) for r in build.profile_rows
    ] == [("q", 10.0, 0.5, None, 20.0), ("r", 10.0, 0.5, 0.25, 20.0)]
    assert build.profile_total_ms == 1.0
    assert build.iterations == (4 if {"count": 4} in before else None)


def test_profiles_without_rows_or_percentages_and_several_of_them() -> None:
    build = read([{"count": 4}])
    assert (build.source, build.iterations, build.profile_rows, build.profile_total_ms) == (
        BuildSource.PROFILE_JSON,
        4,
        [],
        None,
    )
    assert read([{"count": 4}, row("q", percentage=None)]).profile_rows[0].percent == 0.0
    both = f"{json.dumps([{'count': 1}, row('q')])}\n{json.dumps([{'count': 4}, row('r')])}"
    build = read(both)
    assert ([r.name for r in build.profile_rows], build.iterations) == (["r"], 4)


@pytest.mark.parametrize(
    ("count", "told"),
    [(1, 1), (10**12 - 1, 10**12 - 1), *((count, None) for count in (0, -3, "4", 2.0, 10**12))],
)
def test_iterations(count: Any, told: int | None) -> None:
    assert read([{"count": count}, row("q")]).iterations == told


@pytest.mark.parametrize(
    ("first", "fields", "average", "total"),
    [
        (
            {"count": 4},
            {"averageMs": None},
            2.5,
            10.0,
        ),  # from the total, where the iterations are known
        ({"x": 1}, {"averageMs": None}, None, None),
        ({"count": 4}, {"averageMs": None, "timeMs": None}, None, None),
        ({"count": 4}, {"averageMs": 0.5}, 0.5, 10.0),
        ({"count": 4}, {"timeMs": None}, 0.5, 0.5),
        ({"count": 4}, {"averageMs": True}, 2.5, 10.0),
        ({"count": 4}, {"averageMs": "0.5"}, 2.5, 10.0),
    ],
)
def test_rows_that_lack_a_figure(
    first: dict[str, Any], fields: dict[str, Any], average: float | None, total: float | None
) -> None:
    rows = read([first, row("q", **fields), row("sure")]).profile_rows[:-1]
    assert [(r.average_ms, r.total_ms) for r in rows] == (
        [] if average is None else [(average, total)]
    )


# Damage ---------------------------------------------------------------------------------------------------------


def test_stray_escapes_and_whole_rows_of_damaged_files() -> None:
    build = read('{"Layers": [{"Name": "a\\d\\"b\tc", "LayerType": "C"}]}\0\0')
    assert [x.name for x in build.layers] == ['a\\d"b\tc'] and build.missing == []
    # TensorRT escapes no quotes in names; rows that are not whole are left out
    rows = [
        f'{{ "name" : "{n}", "timeMs" : {t}, "averageMs" : 0.5, {median}"percentage" : 33.5 }}'
        for n, t, median in (
            ("a", "1e1", ""),
            ('say "b"', "20", '"medianMs" : 0.25, '),
            ("c", "x", ""),
        )
    ]
    build = read('[ { "count" : 3 }\n, ' + "\n, ".join(rows) + '\n, { "name" : "cut", "timeMs" : 5')
    assert [
        (r.name, r.total_ms, r.average_ms, r.median_ms, r.percent) for r in build.profile_rows
    ] == [("a", 10.0, 0.5, None, 33.5), ('say "b"', 20.0, 0.5, 0.25, 33.5)]
    assert build.missing == ["profile (cut off: the end of f.json)"] and build.iterations is None


@pytest.mark.parametrize("key", ["Layers", "layers", None])
def test_a_listing_that_is_cut_off(key: str | None) -> None:
    """What stands before the cut, and that it was cut."""
    listed = json.dumps(
        [LAYER, {"Name": "b", "LayerType": "C"}, {"Name": "lost", "LayerType": "C"}], indent=1
    )
    text = f'{{"{key}": {listed}}}' if key else listed
    build = read(text[: text.index("lost")])
    assert [x.name for x in build.layers] == ["a", "b"]
    assert build.missing == ["engine listing (cut off: the end of f.json)"] and (
        build.notes == [Remark.CUT_OFF(file="f.json")]
    )
    with pytest.raises(BuildLogError, match="damaged"):
        read(text[: text.index("a") + 1])


@pytest.mark.parametrize(
    ("end", "names", "missing"), [("", ["b"], False), ('{"Layers": [', ["b"], True)]
)
def test_of_whole_documents_in_one_file_the_last_is_read(
    end: str, names: list[str], missing: bool
) -> None:
    first, last = ({"Layers": [{**LAYER, "Name": n}], "Bindings": [n]} for n in "ab")
    build = read(f"{json.dumps(first)}\n{json.dumps(last)}\n{end}")
    assert ([x.name for x in build.layers], build.bindings) == (names, names)
    assert Remark.SEVERAL_DOCUMENTS(file="f.json", count=2) in build.notes
    assert bool(build.missing) == missing


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1)])
def test_a_listing_and_a_profile_in_one_file_are_read_together(order: tuple[int, ...]) -> None:
    documents = (
        b'{"Layers": ["a", "b"], "Bindings": ["x"]}\n',
        b'[{"count": 2}, {"name": "a", "timeMs": 4.0, "averageMs": 2.0, "percentage": 100}]\n',
    )
    build = read_json(b"".join(documents[i] for i in order), "both.json")
    assert [layer.name for layer in build.layers] == ["a", "b"] and build.bindings == ["x"]
    assert build.profile_total_ms == 2.0 and not build.missing
    assert len(build.notes) == (len(order) > 2)


def test_all_layers_together_may_list_so_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of three bytes for each takes ten seconds."""
    monkeypatch.setattr(layers, "_ALL_TENSORS", 6)
    listed = [{"Name": name, "Inputs": [1, 2], "Outputs": [3]} for name in "abc"]
    assert len(read({"Layers": listed[:2]}).layers) == 2
    with raises(BuildLogError, "_layers f.json 6 2"):
        read({"Layers": listed})
