"""Layers of an engine: their costs, two engines compared, and the drawing."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from qdqtool.buildlog.costs import EngineReport, align, analyze, compare
from qdqtool.buildlog.drawing import FILL, Linked, Placed, dot, drawing_of, lay_out, svg
from qdqtool.buildlog.read import read_build
from qdqtool.commands.cli import run
from qdqtool.errors import QdqtoolError
from qdqtool.types import Precision
from tests.buildlog import samples
from tests.buildlog.evidence import build_file
from tests.raising import raises

# Memory, operations and time of engine layers, against numbers worked out by hand.

INT8 = "Thirty-two wide channel vectorized row major Int8 format"
FP16, FP32 = "Row major linear FP16 format", "Row major linear FP32"


def tensor(name: str, dims: list[int], layout: str) -> dict[str, Any]:
    return {"Name": name, "Dimensions": dims, "Format/Datatype": layout}


def layer(
    name: str, kind: str, inputs: list[Any], outputs: list[Any], **fields: Any
) -> dict[str, Any]:
    return {"Name": name, "LayerType": kind, "Inputs": inputs, "Outputs": outputs, **fields}


CONV = layer(
    "conv",
    "CaskConvolution",
    [tensor("x", [2, 64, 56, 56], INT8), tensor("r", [2, 128, 28, 28], FP16)],
    [tensor("y", [2, 128, 28, 28], FP16)],
    Kernel=[3, 3],
    Stride=[2, 2],
    OutMaps=128,
    Groups=1,
    Weights={"Type": "Int8", "Count": 128 * 64 * 9},
)


def report(*layers: dict[str, Any]) -> EngineReport:
    return analyze(samples.build_of({"Layers": list(layers), "Bindings": []}))


def test_macs_of_small_engines() -> None:
    row = report(CONV).rows[0]
    written = 2 * 128 * 28 * 28 * 2
    assert (row.input_bytes, row.weight_bytes, row.output_bytes) == (
        2 * 64 * 56 * 56 + written,
        128 * 64 * 9,
        written,
    )
    assert row.total_bytes == 2 * 64 * 56 * 56 + 128 * 64 * 9 + 2 * written
    assert row.macs == 2 * 128 * 28 * 28 * 64 * 9
    assert row.intensity == pytest.approx(row.macs / row.total_bytes)
    fields = {key: value for key, value in CONV.items() if key != "Weights"}
    row = report({**fields, "Groups": 64, "OutMaps": 128}).rows[0]
    assert (row.macs, row.weight_bytes, row.total_bytes, row.intensity) == (
        2 * 128 * 28 * 28 * 9,
        None,
        None,
        None,
    )
    row = report(
        layer(
            "up",
            "CaskDeconvolutionV2",
            [tensor("x", [1, 256, 10, 10], INT8)],
            [tensor("y", [1, 64, 20, 20], INT8)],
            Kernel=[2, 2],
            Weights={"Type": "Int8", "Count": 256 * 64 * 4},
        )
    ).rows[0]
    assert (
        row.macs == 1 * 256 * 10 * 10 * 64 * 4
    )  # ten by ten positions, each spread over 2 x 2 of 64 channels
    row = report(
        layer(
            "stem",
            "ConvActPool",
            [tensor("x", [1, 3, 224, 224], "Row major Int8 format")],
            [tensor("y", [1, 64, 56, 56], INT8)],
            ConvKernel=[7, 7],
            ConvStride=[2, 2],
            ConvPrePadding=[3, 3],
            ConvPostPadding=[3, 3],
            ConvWeights={"Type": "Int8", "Count": 9408},
            ParameterType="ConvActPool",
        )
    ).rows[0]
    assert (row.macs, row.weight_bytes) == (
        112 * 112 * 64 * 3 * 49,
        9408,
    )  # 112 x 112, which the pooling halves


def test_macs_of_products_and_recorded_builds() -> None:
    rows = report(
        layer("mm", "gemm", [tensor("a", [4, 128, 64], FP16)], [tensor("b", [4, 128, 32], FP16)]),
        layer(
            "add",
            "PointWiseV2",
            [tensor("a", [8], FP32), tensor("b", [8], FP32)],
            [tensor("c", [8], FP32)],
        ),
        layer("dyn", "PointWiseV2", [tensor("a", [-1, 8], FP32)], [tensor("c", [-1, 8], FP32)]),
    ).rows
    assert rows[0].macs == 4 * 128 * 32 * 64
    left = layer(
        "l", "gemm", [tensor("a", [1, 512, 900], FP16)], [tensor("b", [1, 6144, 900], FP16)]
    )
    assert (
        report(left).rows[0].macs == 6144 * 512 * 900
    )  # the weights stand on the left: a convolution of 1x1
    assert (rows[1].macs, rows[1].total_bytes) == (0, 3 * 8 * 4)
    assert (rows[2].macs, rows[2].total_bytes) == (0, None)
    case = "mobilenet-fpn-implicit-int8"
    result = analyze(read_build(build_file(case), build_file(case, "profile.json")))
    rows = {row.name: row for row in result.rows}
    stem, add = rows["Conv_0 + PWN(Clip_3)"], rows["PWN(Add_133)"]
    assert (stem.input_bytes, stem.weight_bytes, stem.output_bytes) == (1_179_648, 864, 3_145_728)
    assert (stem.total_bytes, add.total_bytes, stem.ms) == (
        4_326_240,
        589_824,
        pytest.approx(0.0662771),
    )
    # ResNet-18 at 224 x 224 has 1.814 GMACs an image; the batch is 32
    result = analyze(read_build(build_file("resnet18-a100-qat", "graph.json")))
    assert sum(row.macs or 0 for row in result.rows) / 32 / 1e9 == pytest.approx(1.814, abs=0.001)


def test_orders_and_times() -> None:
    result = report(
        CONV, layer("b", "PointWiseV2", [tensor("a", [8], FP32)], [tensor("c", [8], FP32)])
    )
    for key, order in (("name", ["b", "conv"]), ("bytes", ["conv", "b"]), ("order", ["conv", "b"])):
        assert [r.name for r in result.sorted_rows(key)] == order
    result = analyze(samples.build_of(samples.trtexec_log()))
    told = [(row.ms, row.share and round(row.share, 4)) for row in result.rows]
    assert told == [(0.0125, 0.2), (0.05, 0.8), (None, None)]
    assert result.total_ms == pytest.approx(0.0625)
    conv = result.rows[1]  # its weights' size is in the parse section
    assert (conv.weight_bytes, conv.macs) == (16 * 3 * 9, 16 * 4 * 4 * 27)
    q = layer(
        "q",
        "Reformat",
        [tensor("i", [1, 3, 8, 8], FP32)],
        [tensor("x", [1, 3, 8, 8], INT8)],
        Origin="QDQ",
    )
    copy = layer(
        "Reformatting CopyNode for Input Tensor 0 to conv",
        "Reformat",
        [tensor("x", [4], INT8)],
        [tensor("z", [4], INT8)],
    )
    result = report(q, copy, CONV)
    kinds, types = (
        {k: total.layers for k, total in result.totals(key).items()}
        for key in ("kind", "precision")
    )
    assert (kinds, types) == (
        {"convolution": 1, "conversion": 1, "reformat": 1},
        {"INT8": 2, "FP32": 1},
    )
    assert sum(total.bytes for total in result.totals("type").values()) == sum(
        r.total_bytes or 0 for r in result.rows
    )


# Two engines side by side.


def conv(name: str, layout: str, channels: int, source: str, target: str) -> dict[str, object]:
    return layer(
        name,
        "CaskConvolution",
        [tensor(source, [1, channels, 8, 8], layout)],
        [tensor(target, [1, channels, 8, 8], layout)],
        Kernel=[3, 3],
    )


def names(first: EngineReport, second: EngineReport) -> list[tuple[str | None, str | None]]:
    return [
        (p.first and p.first.name, p.second and p.second.name) for p in compare(first, second).pairs
    ]


def test_layers_pair() -> None:
    first = report(conv("/a/Conv + /a/Relu", FP16, 8, "x", "y"), conv("/b/Conv", FP16, 8, "y", "z"))
    second = report(
        layer(
            "/a/q/QuantizeLinear",
            "Reformat",
            [tensor("x", [1, 8, 8, 8], FP16)],
            [tensor("w", [1, 8, 8, 8], INT8)],
        ),
        conv("b.weight + /b/w/QuantizeLinear + /b/Conv", INT8, 8, "y", "z"),
        conv("a.weight + /a/w/QuantizeLinear + /a/Conv", INT8, 8, "w", "y"),
    )
    assert names(first, second) == [
        ("/a/Conv + /a/Relu", "a.weight + /a/w/QuantizeLinear + /a/Conv"),
        ("/b/Conv", "b.weight + /b/w/QuantizeLinear + /b/Conv"),
        (None, "/a/q/QuantizeLinear"),
    ]
    assert compare(first, second).by == "names"
    first = report(
        conv("Conv_0", FP16, 8, "a", "b"),
        conv("Conv_1", FP16, 16, "b", "c"),
        conv("Conv_2", FP16, 8, "c", "d"),
    )
    second = report(conv("Conv_9", INT8, 8, "a", "b"), conv("Conv_19", INT8, 16, "b", "c"))
    assert names(first, second) == [("Conv_0", "Conv_9"), ("Conv_1", "Conv_19"), ("Conv_2", None)]
    assert compare(first, second).by == "shapes"


def timed(case: str) -> EngineReport:
    return analyze(read_build(build_file(case, "graph.json"), build_file(case, "profile.json")))


@pytest.mark.parametrize(
    ("case", "ms"),
    [
        ("resnet18-a100-qat", 1.09568),
        ("resnet18-a100-qat-residual", 0.731136),
        ("resnet18-a100-qat-residual-qgap", 0.672768),
    ],
)
def test_recorded_engines(case: str, ms: float) -> None:
    """Sums of the recorded profiles' averages; every time is in one pair."""
    result = compare(timed("resnet18-a100-fp16"), timed(case))
    assert (result.first.total_ms, result.second.total_ms) == (
        pytest.approx(1.016832),
        pytest.approx(ms),
    )
    assert sum(pair.change_ms or 0.0 for pair in result.pairs) == pytest.approx(ms - 1.016832)
    assert sum(p.first.layer.is_convolution for p in result.pairs if p.first and p.second) >= 18
    stem = next(p for p in result.pairs if p.first and p.first.name == "Conv_0 + Relu_1")
    assert stem.second is not None and stem.second.name.startswith("conv1.weight")


# DOT and SVG of an engine.

Q = layer(
    "in/QuantizeLinear",
    "Reformat",
    [tensor("image", [2, 64, 56, 56], FP32)],
    [tensor("x", [2, 64, 56, 56], INT8)],
    Origin="QDQ",
)
SIDE = layer(
    "side",
    "CaskPooling",
    [tensor("x", [2, 64, 56, 56], INT8)],
    [tensor("r", [2, 128, 28, 28], FP16)],
)
LONE = layer('[trainStation1] <&"\x07>', "TrainStation", [], [])
SHAPES = "{http://www.w3.org/2000/svg}"


def test_drawings() -> None:
    drawing = drawing_of(report(Q, SIDE, CONV, LONE))
    assert [box.role for box in drawing.boxes] == [
        "input",
        "layer",
        "layer",
        "layer",
        "layer",
        "output",
    ]
    keys = {box.tip: box.key for box in drawing.boxes}
    edges = {
        (drawing.boxes[a.source].key, drawing.boxes[a.target].key): "\n".join(a.lines)
        for a in drawing.arrows
    }
    assert set(edges) == {
        (keys["image"], keys["in/QuantizeLinear"]),
        (keys["in/QuantizeLinear"], keys["side"]),
        (keys["in/QuantizeLinear"], keys["conv"]),
        (keys["side"], keys["conv"]),
        (keys["conv"], keys["y"]),
    }
    assert edges[keys["in/QuantizeLinear"], keys["conv"]] == "x\n2x64x56x56 INT8:32"
    assert next(b for b in drawing.boxes if b.tip == "conv").precision == Precision.INT8
    one = layer("copy a", "Reformat", [tensor("a", [4], INT8)], [tensor("buffer", [8], INT8)])
    two = layer("copy b", "Reformat", [tensor("b", [4], INT8)], [tensor("buffer", [8], INT8)])
    reader = layer(
        "conv", "CaskConvolution", [tensor("buffer", [8], INT8)], [tensor("y", [8], INT8)]
    )
    drawing = drawing_of(report(one, two, reader))
    assert sum(arrow.tensor == "buffer" for arrow in drawing.arrows) == 2
    text = dot(drawing_of(report(Q, SIDE, CONV, LONE)))
    assert text.startswith("digraph engine {") and text.rstrip().endswith("}")
    assert (
        text.count(" -> ")
        - text.count(r"INT8 -> ")
        - text.count("FP32 -> ")
        - text.count("FP16 -> ")
        >= 5
    )
    assert '\\"' in text and "\x07" not in text and FILL[Precision.INT8] in text


def boxes(text: str) -> list[tuple[float, float, float, float]]:
    return [
        tuple(float(r.get(key, 0)) for key in ("x", "y", "width", "height"))  # type: ignore[misc]
        for r in ElementTree.fromstring(text).iter(f"{SHAPES}rect")
        if r.get("stroke")
    ]


def overlapping(rectangles: list[tuple[float, float, float, float]]) -> int:
    return sum(
        a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]
        for a, b in combinations(rectangles, 2)
    )


def test_svg_is_xml_with_every_box_apart() -> None:
    pytest.importorskip("fast_sugiyama")
    text = svg(drawing_of(report(Q, SIDE, CONV, LONE)))
    rectangles = boxes(text)
    assert (len(rectangles), overlapping(rectangles)) == (6, 0)
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(
        x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in rectangles
    )
    words = " ".join(e.text or "" for e in root.iter(f"{SHAPES}text"))
    assert "CaskConvolution" in words and "2x64x56x56 INT8:32" in words
    heads = [e for e in root.iter(f"{SHAPES}text") if e.get("font-size") == "16"]
    assert 30 + 9 * len(heads[0].text or "") < width
    labels = [
        e
        for e in root.iter(f"{SHAPES}text")
        if e.text == "2x64x56x56 INT8:32" and e.get("font-size") == "9"
    ]
    assert labels[-1].get("stroke") is None  # the white halo is drawn before the label, not over it
    fills = {r.get("fill") for r in root.iter(f"{SHAPES}rect")}
    assert fills >= {FILL[Precision.INT8], FILL[Precision.FP32]}


def test_arrows_point_down_and_miss_the_boxes() -> None:
    """A skip over several ranks must not run through the boxes between."""
    pytest.importorskip("fast_sugiyama")
    chain = [layer("c0", "CaskConvolution", [tensor("t", [8], INT8)], [tensor("s0", [8], INT8)])]
    chain += [
        layer(
            f"c{i}",
            "CaskConvolution",
            [tensor(f"s{i - 1}", [8], INT8)],
            [tensor(f"s{i}", [8], INT8)],
        )
        for i in range(1, 6)
    ]
    chain.append(
        layer(
            "add",
            "PointWiseV2",
            [tensor("s5", [8], INT8), tensor("s0", [8], INT8)],
            [tensor("o", [8], INT8)],
        )
    )
    text = svg(drawing_of(report(*chain)))
    rectangles = boxes(text)
    for path in re.findall(r'<path d="(M[^"]*C[^"]*)"', text):
        points = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", path)]
        assert points[0][1] < points[-1][1]
        for x, y in points[3:-1:3]:  # where the curve is at each rank it passes
            assert not any(a < x < a + w and b < y < b + h for a, b, w, h in rectangles)


def test_boxes_are_where_the_shortest_edges_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all begin in one row these need not be searched for, which takes n^2."""
    fast_sugiyama = pytest.importorskip("fast_sugiyama")
    ladder = [
        (1, 2),
        (1, 3),
        *((a, b) for i in range(2, 20, 2) for a in (i, i + 1) for b in (i + 2, i + 3)),
    ]
    lay, asked = fast_sugiyama.from_edges, []

    def placed(links: list[tuple[int, int]], **how: str) -> list[tuple[float, float]]:
        monkeypatch.setattr(
            fast_sugiyama,
            "from_edges",
            lambda *given, **own: (
                asked.append(own["ranking_type"]) or lay(*given, **{**own, **how})
            ),
        )
        found = [Placed(w=100, h=20) for _ in range(22)]
        lay_out(found, [Linked(a, b) for a, b in links], 20, 20, 10)
        return [(box.x, box.y) for box in found]

    for links in (ladder, [*ladder, (0, 18)]):
        assert placed(links) == placed(links, ranking_type="minimize")
    assert asked == ["up", "up", "minimize", "minimize"]


@pytest.mark.parametrize(
    ("case", "name", "layers"),
    [
        ("yolo-resnet18-orin-trt8502", "log.txt", 86),
        ("mobilenetv2-titanrtx-qat-residual", "graph.json", 58),
    ],
)
def test_recorded_engines_are_drawn_whole(
    case: str, name: str, layers: int, tmp_path: Path
) -> None:
    pytest.importorskip("fast_sugiyama")
    output = tmp_path / "engine.svg"
    assert run(["engine", str(build_file(case, name)), "--svg", str(output)]) == 0
    rectangles = boxes(output.read_text())
    assert len(rectangles) >= layers and overlapping(rectangles) == 0


def test_without_the_layout_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(QdqtoolError, "svg qdqtool[draw]"):
        svg(drawing_of(report(CONV)))


def test_layers_that_compute_the_same_are_compared_once() -> None:
    asked = []

    def likeness(one: int, two: int) -> int:
        asked.append((one, two))
        return int(one == two)

    pairs = align(
        [(f"a{i}", i % 3) for i in range(60)], [(f"b{i}", i % 3) for i in range(1, 61)], likeness
    )
    assert pairs == [(f"a{i}", f"b{i}") for i in range(1, 60)] and len(asked) == 9
