import pytest

from qdqtool.prediction import predict
from qdqtool.trt.passes.merge_layers import MergeLayers
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def merged_names(
    *options: dict[str, object], target: str = "trt8.4", relu: bool = False
) -> list[str]:
    g = Graph()
    x, outputs = g.op("Softmax", g.input(1, 8, 8, 8), "before"), []
    for name, arguments in zip("abc", options, strict=False):
        out = g.conv(x, name, **arguments)  # type: ignore[arg-type]
        outputs.append(g.op("Softmax", g.relu(out, f"{name}r") if relu else out, f"{name}t"))
    result = run_pass(g.model(*outputs), MergeLayers, target=target)
    assert {r[0] for r in result.lines} <= {"Merging layers"}
    return [r[1] for r in result.lines]


FLOAT: dict[str, object] = {"scale": None, "weights": "float"}


def test_equal_convolutions_are_merged() -> None:
    assert merged_names({}, {"channels": 16}, {}) == [
        "a.weight + a.w.Q + a || b.weight + b.w.Q + b || c.weight + c.w.Q + c"
    ]
    assert merged_names(FLOAT, FLOAT, relu=True) == ["a + ar || b + br"]


@pytest.mark.parametrize(
    ("others", "target"),
    [
        ([{"k": 1}], "trt8.4"),  # yolo-resnet18-orin-trt8502
        ([{"stride": 2}], "trt8.4"),
        ([{"scale": 0.2}], "trt8.4"),
        ([{"groups": 8}], "trt8.4"),
        ([FLOAT], "trt8.4"),  # cv3.1.0 in INT8 next to cv2.1.0 in float
        # centernet-resnet34-qat-trt80: hm.0, wh.0 and reg.0 stay. NVIDIA/TensorRT issue 1602.
        ([{}, {}], "trt8.0"),
    ],
    ids=["kernel", "stride", "scale", "groups", "float", "TensorRT 8.0"],
)
def test_different_convolutions_are_not_merged(
    others: list[dict[str, object]], target: str
) -> None:
    assert merged_names({}, *others, target=target) == []


def test_merged_convolutions_share_a_layer_with_two_outputs(g: Graph) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    outputs = [g.op("Softmax", g.conv(x, n), f"{n}t") for n in "ab"]
    prediction = predict(g.model(*outputs), "trt8.4", advice=False)
    name = "a.weight + a.w.Q + a || b.weight + b.w.Q + b"
    assert [c.layer for c in prediction.convolutions] == [name, name]
    assert [len(layer.outputs) for layer in prediction.layers if layer.name == name] == [2]
