import re
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from qdqtool.buildlog.costs import EngineReport, analyze
from qdqtool.buildlog.drawing import (
    FILL,
    draw_engine,
    format_dot,
    format_svg,
)
from qdqtool.buildlog.engine_comparison import align_sequences, compare_engines
from qdqtool.buildlog.layout import LayoutBox, LayoutEdge, lay_out
from qdqtool.buildlog.read import read_build
from qdqtool.commands.cli import run
from qdqtool.errors import QdqtoolError
from qdqtool.ir.precision import Precision
from tests.buildlog import samples
from tests.buildlog.evidence import build_file
from tests.errors import has

# Memory, operations and time of engine layers. The expected numbers are calculated by hand.

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


def test_bytes_and_macs_of_a_convolution() -> None:
    row, output = report(CONV).rows[0], 2 * 128 * 28 * 28 * 2
    assert (row.input_bytes, row.weight_bytes, row.output_bytes) == (
        2 * 64 * 56 * 56 + output,
        128 * 64 * 9,
        output,
    )
    assert row.total_bytes == 2 * 64 * 56 * 56 + 128 * 64 * 9 + 2 * output
    assert row.macs == 2 * 128 * 28 * 28 * 64 * 9
    assert row.intensity == pytest.approx(row.macs / row.total_bytes)


def test_bytes_of_a_grouped_convolution_without_weights_are_unknown() -> None:
    row = report(
        {
            **{key: value for key, value in CONV.items() if key != "Weights"},
            "Groups": 64,
            "OutMaps": 128,
        }
    ).rows[0]
    assert row.macs == 2 * 128 * 28 * 28 * 9
    assert (row.weight_bytes, row.total_bytes, row.intensity) == (None, None, None)


@pytest.mark.parametrize(
    ("listed", "macs", "weight_bytes"),
    [
        pytest.param(
            layer(
                "up",
                "CaskDeconvolutionV2",
                [tensor("x", [1, 256, 10, 10], INT8)],
                [tensor("y", [1, 64, 20, 20], INT8)],
                Kernel=[2, 2],
                Weights={"Type": "Int8", "Count": 256 * 64 * 4},
            ),
            1 * 256 * 10 * 10 * 64 * 4,  # each input position produces 2x2 values of 64 channels
            256 * 64 * 4,
            id="deconvolution",
        ),
        pytest.param(
            layer(
                "stem",
                "ConvActPool",
                [tensor("x", [1, 3, 224, 224], "Row major Int8 format")],
                [tensor("y", [1, 64, 56, 56], INT8)],
                ConvKernel=[7, 7],
                ConvStride=[2, 2],
                ConvPrePadding=[3, 3],
                ConvPostPadding=[3, 3],
                ConvWeights={"Type": "Int8", "Count": 64 * 3 * 49},
                ParameterType="ConvActPool",
            ),
            112 * 112 * 64 * 3 * 49,  # at 112x112, before the pooling
            64 * 3 * 49,
            id="convolution with pooling",
        ),
        pytest.param(
            layer(
                "a", "gemm", [tensor("a", [4, 128, 64], FP16)], [tensor("b", [4, 128, 32], FP16)]
            ),
            4 * 128 * 32 * 64,
            0,
            id="product",
        ),
        pytest.param(
            layer(
                "a", "gemm", [tensor("a", [1, 512, 900], FP16)], [tensor("b", [1, 6144, 900], FP16)]
            ),
            6144 * 512 * 900,
            0,
            id="product with weights on the left",
        ),
    ],
)
def test_macs(listed: dict[str, Any], macs: int, weight_bytes: int) -> None:
    row = report(listed).rows[0]
    assert (row.macs, row.weight_bytes) == (macs, weight_bytes)


@pytest.mark.parametrize(("size", "total"), [(8, 3 * 8 * 4), (-1, None)], ids=["static", "dynamic"])
def test_bytes_of_an_elementwise_layer(size: int, total: int | None) -> None:
    a, b, c = (tensor(name, [size], FP32) for name in "abc")
    row = report(layer("add", "PointWiseV2", [a, b], [c])).rows[0]
    assert (row.macs, row.total_bytes) == (0, total)


def test_bytes_and_times_of_a_recorded_build() -> None:
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


def test_macs_of_a_recorded_build() -> None:
    """ResNet-18 at 224x224 has 1.814 GMACs per image. The batch size is 32."""
    result = analyze(read_build(build_file("resnet18-a100-qat", "graph.json")))
    assert sum(row.macs or 0 for row in result.rows) / 32 / 1e9 == pytest.approx(1.814, abs=0.001)


@pytest.mark.parametrize(
    ("key", "order"),
    [("name", ["b", "conv"]), ("bytes", ["conv", "b"]), ("order", ["conv", "b"])],
)
def test_sorted_rows(key: str, order: list[str]) -> None:
    small = layer("b", "PointWiseV2", [tensor("a", [8], FP32)], [tensor("c", [8], FP32)])
    assert [row.name for row in report(CONV, small).sorted_rows(key)] == order


def test_analyze_log_with_profile() -> None:
    result = analyze(samples.build_of(samples.trtexec_log()))
    times = [(row.ms, row.share and round(row.share, 4)) for row in result.rows]
    assert times == [(0.0125, 0.2), (0.05, 0.8), (None, None)]
    assert result.total_ms == pytest.approx(0.0625)
    conv = result.rows[1]  # the parse section has the shape of its weights
    assert (conv.weight_bytes, conv.macs) == (16 * 3 * 9, 16 * 4 * 4 * 27)


def test_totals_by_kind_and_precision() -> None:
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


# Pairs of layers in two engines.


def conv(name: str, layout: str, channels: int, source: str, target: str) -> dict[str, object]:
    return layer(
        name,
        "CaskConvolution",
        [tensor(source, [1, channels, 8, 8], layout)],
        [tensor(target, [1, channels, 8, 8], layout)],
        Kernel=[3, 3],
    )


@pytest.mark.parametrize(
    ("first", "second", "pairs", "aligned_by"),
    [
        pytest.param(
            [conv("/a/Conv + /a/Relu", FP16, 8, "x", "y"), conv("/b/Conv", FP16, 8, "y", "z")],
            [
                layer(
                    "/a/q/QuantizeLinear",
                    "Reformat",
                    [tensor("x", [1, 8, 8, 8], FP16)],
                    [tensor("w", [1, 8, 8, 8], INT8)],
                ),
                conv("b.weight + /b/w/QuantizeLinear + /b/Conv", INT8, 8, "y", "z"),
                conv("a.weight + /a/w/QuantizeLinear + /a/Conv", INT8, 8, "w", "y"),
            ],
            [
                ("/a/Conv + /a/Relu", "a.weight + /a/w/QuantizeLinear + /a/Conv"),
                ("/b/Conv", "b.weight + /b/w/QuantizeLinear + /b/Conv"),
                (None, "/a/q/QuantizeLinear"),
            ],
            "names",
            id="names",
        ),
        pytest.param(
            [
                conv("Conv_0", FP16, 8, "a", "b"),
                conv("Conv_1", FP16, 16, "b", "c"),
                conv("Conv_2", FP16, 8, "c", "d"),
            ],
            [conv("Conv_9", INT8, 8, "a", "b"), conv("Conv_19", INT8, 16, "b", "c")],
            [("Conv_0", "Conv_9"), ("Conv_1", "Conv_19"), ("Conv_2", None)],
            "shapes",
            id="shapes",
        ),
    ],
)
def test_compare_pairs_layers_by_names_or_shapes(
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    pairs: list[tuple[str | None, str | None]],
    aligned_by: str,
) -> None:
    result = compare_engines(report(*first), report(*second))
    names = [(p.first and p.first.name, p.second and p.second.name) for p in result.pairs]
    assert (names, result.aligned_by) == (pairs, aligned_by)


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
def test_compare_recorded_engines(case: str, ms: float) -> None:
    """The expected times are the sums of the averages in the recorded profiles."""
    result = compare_engines(timed("resnet18-a100-fp16"), timed(case))
    assert (result.first.total_ms, result.second.total_ms) == (
        pytest.approx(1.016832),
        pytest.approx(ms),
    )
    assert sum(pair.change_ms or 0.0 for pair in result.pairs) == pytest.approx(ms - 1.016832)
    assert sum(p.first.layer.is_convolution for p in result.pairs if p.first and p.second) >= 18
    assert next(
        p for p in result.pairs if p.first and p.first.name == "Conv_0 + Relu_1"
    ).second.name.startswith("conv1.weight")


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


def test_drawing_boxes_and_arrows() -> None:
    drawing = draw_engine(report(Q, SIDE, CONV, LONE))
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


def test_drawing_of_a_buffer_with_two_producers() -> None:
    a, b, y = (tensor(name, [4], INT8) for name in "aby")
    buffer = tensor("buffer", [8], INT8)
    copies = [layer(f"copy {t['Name']}", "Reformat", [t], [buffer]) for t in (a, b)]
    drawing = draw_engine(report(*copies, layer("conv", "CaskConvolution", [buffer], [y])))
    assert sum(arrow.tensor == "buffer" for arrow in drawing.arrows) == 2


def test_dot() -> None:
    text = format_dot(draw_engine(report(Q, SIDE, CONV, LONE)))
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


def count_overlaps(rectangles: list[tuple[float, float, float, float]]) -> int:
    return sum(
        a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]
        for a, b in combinations(rectangles, 2)
    )


def test_svg_boxes_labels_and_colors() -> None:
    pytest.importorskip("fast_sugiyama")
    text = format_svg(draw_engine(report(Q, SIDE, CONV, LONE)))
    rectangles = boxes(text)
    assert (len(rectangles), count_overlaps(rectangles)) == (6, 0)
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(
        x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in rectangles
    )
    words = " ".join(e.text or "" for e in root.iter(f"{SHAPES}text"))
    assert "CaskConvolution" in words and "2x64x56x56 INT8:32" in words
    heads = [e for e in root.iter(f"{SHAPES}text") if e.get("font-size") == "16"]
    assert 30 + 9 * len(heads[0].text or "") < width
    assert [
        e
        for e in root.iter(f"{SHAPES}text")
        if e.text == "2x64x56x56 INT8:32" and e.get("font-size") == "9"
    ][-1].get("stroke") is None  # the white halo must not cover the label
    fills = {r.get("fill") for r in root.iter(f"{SHAPES}rect")}
    assert fills >= {FILL[Precision.INT8], FILL[Precision.FP32]}


def test_svg_arrows_point_down_and_avoid_boxes() -> None:
    pytest.importorskip("fast_sugiyama")
    *s, o = (tensor(name, [8], INT8) for name in ("t", "s0", "s1", "s2", "s3", "s4", "s5", "o"))
    chain = [layer(f"c{i}", "CaskConvolution", [a], [b]) for i, (a, b) in enumerate(pairwise(s))]
    # The edge of the Add is over several ranks.
    text = format_svg(draw_engine(report(*chain, layer("add", "PointWiseV2", [s[-1], s[1]], [o]))))
    rectangles = boxes(text)
    for path in re.findall(r'<path d="(M[^"]*C[^"]*)"', text):
        points = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", path)]
        assert points[0][1] < points[-1][1]
        for x, y in points[3:-1:3]:  # the point of the curve at each rank
            assert not any(a < x < a + w and b < y < b + h for a, b, w, h in rectangles)


@pytest.mark.parametrize(
    ("more_links", "ranking"),
    [([], "up"), ([(0, 18)], "minimize")],
    ids=["one start", "two starts"],
)
def test_lay_out_ranks_boxes_by_the_shortest_edges(
    more_links: list[tuple[int, int]], ranking: str
) -> None:
    """With one start every ranking gives the shortest edges, without a quadratic search."""
    fast_sugiyama = pytest.importorskip("fast_sugiyama")
    ladder = [(a, b) for i in range(2, 20, 2) for a in (i, i + 1) for b in (i + 2, i + 3)]
    links = [LayoutEdge(a, b) for a, b in [(1, 2), (1, 3), *ladder, *more_links]]
    first, second = ([LayoutBox(w=100, h=20) for _ in range(22)] for _ in range(2))
    from_edges = fast_sugiyama.from_edges
    with mock.patch.object(fast_sugiyama, "from_edges", wraps=from_edges) as recorder:
        lay_out(first, links, 20, 20, 10)
    assert recorder.call_args.kwargs["ranking_type"] == ranking
    options = {**recorder.call_args.kwargs, "ranking_type": "minimize"}
    shortest = from_edges(*recorder.call_args.args, **options)
    with mock.patch.object(fast_sugiyama, "from_edges", return_value=shortest):
        lay_out(second, links, 20, 20, 10)
    assert first == second


@pytest.mark.parametrize("count", [400, 401])
def test_lay_out_refuses_rows_that_are_too_long(count: int) -> None:
    """Two thousand layers that read one tensor took minutes."""
    placed = [LayoutBox(w=10, h=10) for _ in range(1 + count)]
    size = lay_out(placed, [LayoutEdge(0, 1 + number) for number in range(count)], 20, 20, 10)
    assert ("400" in size.excess) is (count > 400)


@pytest.mark.parametrize(
    ("case", "name", "layers"),
    [
        ("yolo-resnet18-orin-trt8502", "log.txt", 86),
        ("mobilenetv2-titanrtx-qat-residual", "graph.json", 58),
    ],
)
def test_svg_of_recorded_engines_has_every_layer(
    case: str, name: str, layers: int, tmp_path: Path
) -> None:
    pytest.importorskip("fast_sugiyama")
    output = tmp_path / "engine.svg"
    assert run(["engine", str(build_file(case, name)), "--svg", str(output)]) == 0
    rectangles = boxes(output.read_text())
    assert len(rectangles) >= layers and count_overlaps(rectangles) == 0


def test_svg_needs_the_layout_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fast_sugiyama", None)
    with pytest.raises(QdqtoolError, check=has("missing-package")) as caught:
        format_svg(draw_engine(report(CONV)))
    assert "qdqtool[draw]" in str(caught.value)


def test_align_compares_equal_values_once() -> None:
    compared = []

    def likeness(a: int, b: int) -> int:
        compared.append((a, b))
        return int(a == b)

    first, second = (
        [(f"{s}{i}", i % 3) for i in range(n, n + 60)] for s, n in (("a", 0), ("b", 1))
    )
    assert align_sequences(first, second, likeness) == [(f"a{i}", f"b{i}") for i in range(1, 60)]
    assert len(compared) == 9
