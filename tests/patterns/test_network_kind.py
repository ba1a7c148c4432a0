"""Recognition of networks other than YOLO-like detectors, by metadata, outputs and normalizations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from calibration.presets import choose_preprocess
from qdqtool.ir.graph import Model
from qdqtool.patterns.network_kind import (
    NetworkKind,
    find_other_kind,
    warn_default_preprocess,
    warn_preprocess,
    warn_task_mismatch,
)
from tests.insertion.nets import detector
from tests.trt.builder import Graph


def backbone(g: Graph, side: int = 32) -> str:
    return g.relu(g.conv(g.input(1, 3, side, side), "stem"), "act")


def classifier(softmax: bool = False) -> onnx.ModelProto:
    g = Graph(opset=17)
    pooled = g.op("GlobalAveragePool", backbone(g), "pool")
    scores = g.gemm(g.op("Flatten", pooled, "flat"), "fc", 8)
    return g.model(g.op("Softmax", scores, "prob") if softmax else scores)


def fully_convolutional() -> onnx.ModelProto:
    g = Graph(opset=17)
    return g.model(g.conv(g.op("GlobalAveragePool", backbone(g), "pool"), "fc", k=1))


def features_too() -> onnx.ModelProto:
    """Return a classifier that also returns its last feature map."""
    g = Graph(opset=17)
    features = backbone(g)
    pooled = g.op("Flatten", g.op("GlobalAveragePool", features, "pool"), "flat")
    return g.model(features, g.op("Softmax", g.gemm(pooled, "fc", 8), "prob"))


def unknown_shapes() -> onnx.ModelProto:
    """Return a classifier with a plugin, after which no shape can be inferred."""
    g = Graph(opset=17)
    features = g.op("MyPlugin", backbone(g), "plugin", domain="custom")
    pooled = g.op("ReduceMean", features, "pool", axes=[2, 3], keepdims=0)
    return g.model(g.op("Sigmoid", g.gemm(pooled, "fc", 8), "prob"))


def segmentation() -> onnx.ModelProto:
    g = Graph(opset=17)
    return g.model(g.conv(backbone(g), "head"))


def grid_heads() -> onnx.ModelProto:
    """Return a detector without decoding: grids of strides 8 and 16."""
    g = Graph(opset=17)
    tensor = g.input(1, 3, 64, 64)
    for number in range(3):
        tensor = g.relu(g.conv(tensor, f"c{number}", stride=2), f"a{number}")
    deeper = g.conv(tensor, "c3", stride=2)
    return g.model(g.conv(tensor, "head8"), g.conv(deeper, "head16"))


def transformer() -> onnx.ModelProto:
    g = Graph(opset=17)
    tokens = g.reshape(backbone(g), "tokens", 1, -1, 8)
    ones = g.const("ones", np.ones(8, np.float32))
    for number in range(2):
        tokens = g.op("LayerNormalization", [tokens, ones], f"norm{number}")
    return g.model(tokens)


def strided(g: Graph, count: int, channels: int = 16) -> str:
    """Return a feature map of stride 2**count."""
    tensor = g.input(1, 3, 64, 64)
    for number in range(count):
        tensor = g.relu(g.conv(tensor, f"c{number}", channels, stride=2), f"a{number}")
    return tensor


def coarse_segmentation() -> onnx.ModelProto:
    """Return class scores at stride 8, without the final resize."""
    g = Graph(opset=17)
    return g.model(g.conv(strided(g, 3), "classes", 21, k=1))


def class_map() -> onnx.ModelProto:
    g = Graph(opset=17)
    return g.model(g.op("ArgMax", g.conv(backbone(g), "classes", 21), "argmax", axis=1, keepdims=0))


def depth() -> onnx.ModelProto:
    g = Graph(opset=17)
    return g.model(g.reshape(g.conv(backbone(g), "depth", 1), "squeeze", 1, 32, 32))


def open_size() -> onnx.ModelProto:
    """Return a segmentation network with dynamic batch, height and width."""
    proto = segmentation()
    for axis in (0, 2, 3):
        proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"size{axis}"
    del proto.graph.value_info[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def super_resolution() -> onnx.ModelProto:
    g = Graph(opset=17)
    return g.model(g.op("DepthToSpace", g.conv(backbone(g), "up", 12), "shuffle", blocksize=2))


def simcc() -> onnx.ModelProto:
    """Return scores of 17 keypoints, two per pixel of the width (64) and of the height (32)."""
    g = Graph(opset=17)
    features = g.relu(g.conv(g.input(1, 3, 32, 64), "stem", 17), "act")
    rows = g.reshape(features, "rows", 1, 17, -1)
    sides = [
        g.op("MatMul", [rows, g.const(f"w{n}", np.ones((32 * 64, n), np.float32))], f"fc{n}")
        for n in (128, 64)
    ]
    return g.model(*sides)


def patches() -> onnx.ModelProto:
    """Return attention on patches of 8x8 pixels, without layer normalization."""
    g = Graph(opset=17)
    tokens = g.reshape(g.conv(g.input(1, 3, 64, 64), "patch", 32, k=8, stride=8), "t", 1, 32, 64)
    tokens = g.op("Transpose", tokens, "last", perm=[0, 2, 1])
    keys = g.op("Transpose", tokens, "keys", perm=[0, 2, 1])
    scores = g.op("Softmax", g.op("MatMul", [tokens, keys], "qk"), "softmax", axis=-1)
    return g.model(g.op("MatMul", [scores, tokens], "values"))


def detr() -> onnx.ModelProto:
    """Return scores and boxes of queries after layer normalizations."""
    g = Graph(opset=17)
    tokens = g.reshape(backbone(g), "tokens", 1, -1, 8)
    ones = g.const("ones", np.ones(8, np.float32))
    for number in range(2):
        tokens = g.op("LayerNormalization", [tokens, ones], f"norm{number}")
    heads = [
        g.op("MatMul", [tokens, g.const(f"w{n}", np.ones((8, n), np.float32))], f"fc{n}")
        for n in (92, 4)
    ]
    return g.model(*heads)


def pyramid() -> onnx.ModelProto:
    """Return feature maps of a backbone, whose number of channels grows with the stride."""
    g = Graph(opset=17)
    low = g.relu(g.conv(strided(g, 3), "c8", 64, stride=1), "a8")
    return g.model(low, g.relu(g.conv(low, "c16", 128, stride=2), "a16"))


def gray() -> onnx.ModelProto:
    g = Graph(opset=17)
    return g.model(g.conv(g.input(1, 1, 64, 101), "stem", 16, stride=8))


def text_line() -> onnx.ModelProto:
    """Return scores of 40 characters at 32 positions along a line of text."""
    g = Graph(opset=17)
    features = g.conv(g.input(1, 3, 32, 128), "stem", 40, stride=4)
    scores = g.op("ReduceMax", features, "rows", axes=[2], keepdims=0)
    return g.model(g.op("Transpose", scores, "last", perm=[0, 2, 1]))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (coarse_segmentation, NetworkKind.MAP),
        (class_map, NetworkKind.MAP),
        (depth, NetworkKind.MAP),
        (open_size, NetworkKind.MAP),
        (simcc, NetworkKind.MAP),
        (super_resolution, NetworkKind.IMAGE),
        (patches, NetworkKind.TRANSFORMER),
        (transformer, NetworkKind.TRANSFORMER),
        (detr, NetworkKind.DETR),
        (pyramid, NetworkKind.CLASSIFIER),
        (classifier, NetworkKind.CLASSIFIER),
        (gray, NetworkKind.CHANNELS),
        (text_line, NetworkKind.TEXT),
    ],
)
def test_kind_selects_the_presets_of_the_warning(
    make: Callable[[], onnx.ModelProto], kind: NetworkKind
) -> None:
    model = Model(make())
    other = find_other_kind(model)
    assert other is not None
    assert other.kind == kind
    (warning,) = warn_default_preprocess(model, "default")
    assert kind.value in warning


def single_grid() -> onnx.ModelProto:
    """Return a single grid of stride 32 with 5 anchors of 25 channels, as YOLOv2 does."""
    g = Graph(opset=17)
    return g.model(g.conv(strided(g, 5), "grid", 125, k=1))


def rows_of_boxes() -> onnx.ModelProto:
    """Return decoded boxes [1, 84, 336] of an image that is 128 pixels high."""
    g = Graph(opset=17)
    features = g.conv(g.input(1, 3, 128, 128), "stem", 84, stride=8)
    first = g.reshape(features, "first", 1, 84, 256)
    return g.model(g.op("Concat", [first, g.op("Slice", [first, *slices(g)], "s")], "c", axis=2))


def slices(g: Graph) -> list[str]:
    return [g.const(name, np.array([n])) for name, n in (("from", 0), ("to", 80), ("axis", 2))]


@pytest.mark.parametrize("make", [single_grid, rows_of_boxes])
def test_grids_and_rows_of_detectors_get_none(make: Callable[[], onnx.ModelProto]) -> None:
    assert find_other_kind(Model(make())) is None


def test_task_of_another_tool_is_not_a_task_of_ultralytics() -> None:
    model = set_metadata(segmentation(), task="image-segmentation")
    assert find_other_kind(model) is not None
    assert choose_preprocess(model.metadata, None).origin == "default"


def set_metadata(model: onnx.ModelProto, **metadata: str) -> Model:
    helper.set_model_props(model, metadata)
    return Model(model)


@pytest.mark.parametrize(
    "proto",
    [
        classifier(),
        classifier(softmax=True),
        fully_convolutional(),
        features_too(),
        unknown_shapes(),
        segmentation(),
        transformer(),
    ],
    ids=[
        "classifier",
        "softmax",
        "fully convolutional",
        "features too",
        "unknown shapes",
        "segmentation",
        "transformer",
    ],
)
def test_other_networks_get_a_warning(proto: onnx.ModelProto) -> None:
    model = Model(proto)
    assert find_other_kind(model)
    (warning,) = warn_default_preprocess(model, "default")
    assert warning.code == "default-preprocess"
    assert warn_default_preprocess(model, "option") == []
    assert warn_default_preprocess(model, "model") == []


@pytest.mark.parametrize("proto", [detector(), grid_heads()], ids=["head with DFL", "grids"])
def test_detectors_get_none(proto: onnx.ModelProto) -> None:
    assert find_other_kind(Model(proto)) is None
    assert warn_default_preprocess(Model(proto), "default") == []


def test_task_alone_is_not_enough_to_be_sure_of_ultralytics() -> None:
    assert warn_default_preprocess(set_metadata(classifier(), task="classify"), "metadata")
    complete = set_metadata(classifier(), task="classify", imgsz="[64, 64]", names="{}")
    assert warn_default_preprocess(complete, "metadata") == []


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [
        ({"name": "imagenet", "mean": (0.485, 0.456, 0.406), "std": (0.2, 0.2, 0.2)}, True),
        ({"name": "yolox", "bgr": True}, True),
        ({"name": "rtdetr", "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}, False),
        ({"name": "imagenet", "mean": (0.485, 0.456, 0.406), "origin": "model"}, False),
    ],
)
def test_preprocess_of_another_task_is_warned(changes: dict[str, Any], is_warned: bool) -> None:
    model = set_metadata(classifier(), task="detect", stride="32")
    codes = [note.code for note in warn_preprocess(model, {"origin": "option", **changes})]
    assert codes == (["preprocess-of-task"] if is_warned else [])
    other = set_metadata(classifier(), task="depth", stride="32")
    assert not warn_task_mismatch(other, {"origin": "option", **changes})


def test_ultralytics_detectors_get_none_whatever_their_outputs() -> None:
    model = set_metadata(classifier(), task="detect", stride="32")
    assert find_other_kind(model) is None


def test_model_of_a_function_gets_a_warning() -> None:
    assert warn_default_preprocess(Model(detector()), "function")


def test_rows_of_anchors_are_no_classifier() -> None:
    g = Graph(opset=17)
    features = backbone(g)
    rows = g.reshape(g.op("Transpose", features, "last", perm=[0, 2, 3, 1]), "rows", 1024, 4)
    model = Model(g.model(rows))
    assert model.shape(model.outputs[0]) != (1, 4)
    kind = find_other_kind(model)
    assert kind and kind.kind == NetworkKind.ROWS
