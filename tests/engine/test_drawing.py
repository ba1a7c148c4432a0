"""DOT and SVG of an engine."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest

from qdqtool.cli import run
from qdqtool.engine.drawing import FILL, dot, drawing_of, svg
from qdqtool.errors import QdqtoolError
from qdqtool.types import Precision
from tests.buildlog.evidence import build_file
from tests.engine.test_costs import CONV, FP16, FP32, INT8, layer, report, tensor

Q = layer("in/QuantizeLinear", "Reformat", [tensor("image", [2, 64, 56, 56], FP32)],
          [tensor("x", [2, 64, 56, 56], INT8)], Origin="QDQ")
SIDE = layer("side", "CaskPooling", [tensor("x", [2, 64, 56, 56], INT8)], [tensor("r", [2, 128, 28, 28], FP16)])
LONE = layer('[trainStation1] <&"\x07>', "TrainStation", [], [])
SHAPES = "{http://www.w3.org/2000/svg}"


def test_the_graph_of_a_small_engine() -> None:
    drawing = drawing_of(report(Q, SIDE, CONV, LONE))
    assert [box.role for box in drawing.boxes] == ["input", "layer", "layer", "layer", "layer", "output"]
    keys = {box.tip: box.key for box in drawing.boxes}
    edges = {(drawing.boxes[a.source].key, drawing.boxes[a.target].key): "\n".join(a.lines) for a in drawing.arrows}
    assert set(edges) == {
        (keys["image"], keys["in/QuantizeLinear"]), (keys["in/QuantizeLinear"], keys["side"]),
        (keys["in/QuantizeLinear"], keys["conv"]), (keys["side"], keys["conv"]), (keys["conv"], keys["y"]),
    }
    assert edges[keys["in/QuantizeLinear"], keys["conv"]] == "x\n2x64x56x56 INT8:32"
    assert next(b for b in drawing.boxes if b.tip == "conv").precision == Precision.INT8


def test_a_buffer_with_two_writers_has_arrows_from_both() -> None:
    one = layer("copy a", "Reformat", [tensor("a", [4], INT8)], [tensor("buffer", [8], INT8)])
    two = layer("copy b", "Reformat", [tensor("b", [4], INT8)], [tensor("buffer", [8], INT8)])
    reader = layer("conv", "CaskConvolution", [tensor("buffer", [8], INT8)], [tensor("y", [8], INT8)])
    drawing = drawing_of(report(one, two, reader))
    assert sum(arrow.tensor == "buffer" for arrow in drawing.arrows) == 2


def test_dot() -> None:
    text = dot(drawing_of(report(Q, SIDE, CONV, LONE)))
    assert text.startswith("digraph engine {")
    assert text.count(" -> ") - text.count(r"INT8 -> ") - text.count("FP32 -> ") - text.count("FP16 -> ") >= 5
    assert '\\"' in text
    assert "\x07" not in text
    assert FILL[Precision.INT8] in text
    assert text.rstrip().endswith("}")


def boxes(text: str) -> list[tuple[float, float, float, float]]:
    root = ElementTree.fromstring(text)
    return [
        (float(r.get("x", 0)), float(r.get("y", 0)), float(r.get("width", 0)), float(r.get("height", 0)))
        for r in root.iter(f"{SHAPES}rect") if r.get("stroke")
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
    assert len(rectangles) == 6
    assert overlapping(rectangles) == 0
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in rectangles)
    words = " ".join(e.text or "" for e in root.iter(f"{SHAPES}text"))
    assert "CaskConvolution" in words
    assert "2x64x56x56 INT8:32" in words
    heads = [e for e in root.iter(f"{SHAPES}text") if e.get("font-size") == "16"]
    assert 30 + 9 * len(heads[0].text or "") < width
    labels = [e for e in root.iter(f"{SHAPES}text") if e.text == "2x64x56x56 INT8:32" and e.get("font-size") == "9"]
    assert labels[-1].get("stroke") is None  # the white halo is drawn before the label, not over it
    fills = {r.get("fill") for r in root.iter(f"{SHAPES}rect")}
    assert fills >= {FILL[Precision.INT8], FILL[Precision.FP32]}


def test_arrows_point_down_and_miss_the_boxes() -> None:
    """A skip over several ranks must not run through the boxes between."""
    pytest.importorskip("fast_sugiyama")
    chain = [layer("c0", "CaskConvolution", [tensor("t", [8], INT8)], [tensor("s0", [8], INT8)])]
    chain += [layer(f"c{i}", "CaskConvolution", [tensor(f"s{i - 1}", [8], INT8)], [tensor(f"s{i}", [8], INT8)])
              for i in range(1, 6)]
    chain.append(layer("add", "PointWiseV2", [tensor("s5", [8], INT8), tensor("s0", [8], INT8)],
                       [tensor("o", [8], INT8)]))
    text = svg(drawing_of(report(*chain)))
    rectangles = boxes(text)
    for path in re.findall(r'<path d="(M[^"]*C[^"]*)"', text):
        points = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", path)]
        assert points[0][1] < points[-1][1]
        for x, y in points[3:-1:3]:  # where the curve is at each rank it passes
            assert not any(a < x < a + w and b < y < b + h for a, b, w, h in rectangles)


@pytest.mark.parametrize(("case", "name", "layers"), [
    ("yolo-resnet18-orin-trt8502", "log.txt", 86), ("mobilenetv2-titanrtx-qat-residual", "graph.json", 58),
])
def test_recorded_engines_are_drawn_whole(case: str, name: str, layers: int, tmp_path: Path) -> None:
    pytest.importorskip("fast_sugiyama")
    output = tmp_path / "engine.svg"
    assert run(["engine", str(build_file(case, name)), "--svg", str(output)]) == 0
    rectangles = boxes(output.read_text())
    assert len(rectangles) >= layers
    assert overlapping(rectangles) == 0


def test_without_the_layout_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(QdqtoolError, match=r"pip install 'qdqtool\[draw\]'"):
        svg(drawing_of(report(CONV)))
