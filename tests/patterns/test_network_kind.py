"""Networks that are no detectors of YOLO's kind: by metadata, outputs and normalizations."""

import numpy as np
import onnx
import pytest
from onnx import helper

from qdqtool.ir.graph import Model
from qdqtool.patterns.network_kind import describe_other_kind, warn_default_preprocess
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
    """A classifier that also returns its last feature map."""
    g = Graph(opset=17)
    features = backbone(g)
    pooled = g.op("Flatten", g.op("GlobalAveragePool", features, "pool"), "flat")
    return g.model(features, g.op("Softmax", g.gemm(pooled, "fc", 8), "prob"))


def unknown_shapes() -> onnx.ModelProto:
    """A classifier whose shapes cannot be inferred, because of a plugin in its backbone."""
    g = Graph(opset=17)
    features = g.op("MyPlugin", backbone(g), "plugin", domain="custom")
    pooled = g.op("ReduceMean", features, "pool", axes=[2, 3], keepdims=0)
    return g.model(g.op("Sigmoid", g.gemm(pooled, "fc", 8), "prob"))


def segmentation() -> onnx.ModelProto:
    g = Graph(opset=17)
    return g.model(g.conv(backbone(g), "head"))


def grid_heads() -> onnx.ModelProto:
    """Raw outputs of strides 8 and 16, as detectors without decoding have them."""
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
    assert describe_other_kind(model)
    (warning,) = warn_default_preprocess(model, "default")
    assert warning.code == "default-preprocess"
    assert warn_default_preprocess(model, "option") == []
    assert warn_default_preprocess(model, "model") == []


@pytest.mark.parametrize("proto", [detector(), grid_heads()], ids=["head with DFL", "grids"])
def test_detectors_get_none(proto: onnx.ModelProto) -> None:
    assert describe_other_kind(Model(proto)) is None
    assert warn_default_preprocess(Model(proto), "default") == []


def test_task_alone_is_not_enough_to_be_sure_of_ultralytics() -> None:
    assert warn_default_preprocess(set_metadata(classifier(), task="classify"), "metadata")
    complete = set_metadata(classifier(), task="classify", imgsz="[64, 64]", names="{}")
    assert warn_default_preprocess(complete, "metadata") == []


def test_ultralytics_detectors_get_none_whatever_their_outputs() -> None:
    model = set_metadata(classifier(), task="detect", stride="32")
    assert describe_other_kind(model) is None


def test_model_of_a_function_gets_a_warning() -> None:
    assert warn_default_preprocess(Model(detector()), "function")


def test_rows_of_anchors_are_no_classifier() -> None:
    g = Graph(opset=17)
    features = backbone(g)
    rows = g.reshape(g.op("Transpose", features, "last", perm=[0, 2, 3, 1]), "rows", 1024, 4)
    model = Model(g.model(rows))
    assert model.shape(model.outputs[0]) != (1, 4)
    kind = describe_other_kind(model)
    assert kind and "SCRFD" in kind
