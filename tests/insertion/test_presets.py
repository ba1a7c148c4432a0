from __future__ import annotations

import numpy as np
import onnx
import pytest

from qdqtool.demo.model import yolov8n
from qdqtool.graph import Model
from qdqtool.insertion.presets import float_nodes
from qdqtool.onnxgraph.heads import find_head
from tests.insertion.nets import Net

BOXES = {f"/model.22/cv2.{i}/cv2.{i}.2/Conv" for i in range(3)}
CLASSES = {f"/model.22/cv3.{i}/cv3.{i}.2/Conv" for i in range(3)}
DFL = {"/model.22/dfl/conv/Conv"}


@pytest.fixture(scope="module")
def yolo() -> onnx.ModelProto:
    return yolov8n(64, classes=5)


def names(model: Model, indices: object) -> set[str]:
    return {model.nodes[i].name for i in indices}  # type: ignore[attr-defined]


def test_head_of_yolov8(yolo: onnx.ModelProto) -> None:
    model = Model(yolo)
    head = find_head(model)
    assert names(model, head.dfl) == DFL
    assert names(model, head.boxes) == BOXES
    assert names(model, head.finals) == BOXES | CLASSES


def test_names_play_no_part(yolo: onnx.ModelProto) -> None:
    renamed = onnx.ModelProto()
    renamed.CopyFrom(yolo)
    for i, node in enumerate(renamed.graph.node):
        node.name = f"n{i}"
    mine, theirs = find_head(Model(renamed)), find_head(Model(yolo))
    assert (mine.dfl, mine.boxes, mine.finals) == (theirs.dfl, theirs.boxes, theirs.finals)


@pytest.mark.parametrize(
    ("choice", "expected"), [("none", set()), ("box", BOXES | DFL), ("float", BOXES | DFL | CLASSES)]
)
def test_choices(yolo: onnx.ModelProto, choice: str, expected: set[str]) -> None:
    model = Model(yolo)
    assert names(model, float_nodes(model, choice)) == expected


def head(order: str, product: str = "Conv") -> Model:
    """One level of a head, box branch first or class branch first."""
    net = Net()
    box, cls = net.conv("box", "x", 16, 32, 1), net.conv("cls", "x", 16, 4, 1)
    parts = [box, cls] if order == "box first" else [cls, box]
    joined = net.op("Concat", "cat", *parts, axis=1)
    flat = net.op("Reshape", "flat", joined, net.const("flat_shape", [1, 36, 64], np.int64))
    sizes = net.const("sizes", [32, 4] if order == "box first" else [4, 32], np.int64)
    halves = net.op("Split", "split", flat, sizes, outputs=2, axis=1)
    boxes, scores = halves if order == "box first" else halves[::-1]
    bins = net.op("Reshape", "bins", boxes, net.const("bins_shape", [1, 4, 8, 64], np.int64))
    if product == "Conv":
        soft = net.op("Softmax", "soft", net.op("Transpose", "t", bins, perm=[0, 2, 1, 3]), axis=1)
        mean = net.op("Conv", "dfl", soft, net.const("dfl.weight", np.arange(8).reshape(1, 8, 1, 1)))
    else:
        soft = net.op("Softmax", "soft", net.op("Transpose", "t", bins, perm=[0, 1, 3, 2]), axis=3)
        mean = net.op("MatMul", "dfl", soft, net.const("dfl.weight", np.arange(8).reshape(8, 1)))
    net.output(mean, net.op("Sigmoid", "sig", scores))
    return net.index()


@pytest.mark.parametrize("order", ["box first", "class first"])
@pytest.mark.parametrize("product", ["Conv", "MatMul"])
def test_box_channels_are_followed_through_split_and_concat(order: str, product: str) -> None:
    model = head(order, product)
    assert set(names(model, float_nodes(model, "box"))) == {"box", "dfl"}
    assert set(names(model, float_nodes(model, "float"))) == {"box", "cls", "dfl"}


def test_softmax_of_a_classifier_is_no_dfl() -> None:
    net = Net()
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", net.conv("c", "x")))
    fc = net.op("Gemm", "fc", flat, net.const("w", np.ones((16, 10))))
    net.output(net.op("Softmax", "soft", fc))
    model = net.index()
    assert float_nodes(model, "box") == {}
    assert set(names(model, float_nodes(model, "float"))) == {"fc"}


@pytest.mark.parametrize(("ends", "expected"), [(1, set()), (2, {"end0", "end1"}), (3, {"end0", "end1", "end2"})])
def test_other_detectors_keep_their_last_convolutions_float(ends: int, expected: set[str]) -> None:
    net = Net()
    stem = net.op("Relu", "r", net.conv("stem", "x"))
    net.output(*(net.conv(f"end{i}", stem, kernel=1) for i in range(ends)))
    model = net.index()
    assert names(model, float_nodes(model, "box")) == expected
    assert float_nodes(model, "none") == {}


def test_two_fully_connected_ends_are_no_detector() -> None:
    net = Net()
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", net.conv("c", "x")))
    net.output(*(net.op("Gemm", f"fc{i}", flat, net.const(f"w{i}", np.ones((16, 10)))) for i in range(2)))
    assert float_nodes(net.index(), "box") == {}


def test_a_convolution_with_an_activation_behind_it_is_not_a_final_one() -> None:
    net = Net()
    net.output(net.op("Relu", "r", net.conv("c", "x")))
    assert find_head(net.index()).finals == set()
