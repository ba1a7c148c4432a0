"""Merging layers: yolov8-orin-trt8412-excerpts (five lines), what it does not merge: yolo-resnet18, centernet."""

from qdqtool.prediction import predict
from qdqtool.trt.passes.merge_layers import MergeLayers
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def heads(*options: dict[str, object], target: str = "trt8.4", relu: bool = False) -> list[str]:
    """Convolutions a, b, c ... on one tensor; the names that each Merging line joins."""
    g = Graph()
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    outputs = []
    for name, own in zip("abc", options, strict=False):
        out = g.conv(x, name, **own)  # type: ignore[arg-type]
        outputs.append(g.op("Softmax", g.relu(out, f"{name}r") if relu else out, f"{name}t"))
    found = step(g.model(*outputs), MergeLayers, target=target)
    assert {r[0] for r in found.rows} <= {"Merging layers"}
    return [r[1] for r in found.rows]


FLOAT: dict[str, object] = {"scale": None, "weights": "float"}


def test_what_is_merged_and_what_stays_apart(g: Graph) -> None:
    """A 3x3 stays beside a 1x1 (yolo-resnet18-orin-trt8502), cv3.1.0 in INT8 beside cv2.1.0 in float."""
    assert heads({}, {"channels": 16}, {}) == [
        "a.weight + a.w.Q + a || b.weight + b.w.Q + b || c.weight + c.w.Q + c"
    ]
    assert heads(FLOAT, FLOAT, relu=True) == ["a + ar || b + br"]
    for other in ({"k": 1}, {"stride": 2}, {"scale": 0.2}, {"groups": 8}, FLOAT):
        assert heads({}, other) == [], other
    # centernet-resnet34-qat-trt80: hm.0, wh.0 and reg.0 stay; TensorRT issue 1602
    assert heads({}, {}, {}, target="trt8.0") == []
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    outputs = [g.op("Softmax", g.conv(x, n), f"{n}t") for n in "ab"]
    prediction = predict(g.model(*outputs), "trt8.4", advice=False)
    name = "a.weight + a.w.Q + a || b.weight + b.w.Q + b"
    assert [c.layer for c in prediction.convolutions] == [name, name]
    assert [len(layer.outputs) for layer in prediction.layers if layer.name == name] == [2]
