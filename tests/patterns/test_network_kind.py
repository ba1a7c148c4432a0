from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from calibration.presets import choose_preprocess
from qdqtool.ir.graph import Model
from qdqtool.patterns.network_kind import (
    NetworkKind,
    find_non_detector_kind,
    warn_default_preprocess,
    warn_preprocess,
    warn_task_mismatch,
)
from tests.insertion.nets import detector
from tests.trt.builder import Graph


def backbone(g: Graph, side: int = 32) -> str:
    return g.relu(g.conv(g.input(1, 3, side, side), "stem"), "act")


def classifier(g: Graph, softmax: bool = False) -> str:
    scores = g.gemm(
        g.op("Flatten", g.op("GlobalAveragePool", backbone(g), "pool"), "flat"), "fc", 8
    )
    return g.op("Softmax", scores, "prob") if softmax else scores


def transformer(g: Graph) -> str:
    tokens = g.reshape(backbone(g), "tokens", 1, -1, 8)
    ones = g.const("ones", np.ones(8, np.float32))
    for number in range(2):
        tokens = g.op("LayerNormalization", [tokens, ones], f"norm{number}")
    return tokens


def strided(g: Graph, count: int, channels: int = 16) -> str:
    tensor = g.input(1, 3, 64, 64)
    for number in range(count):
        tensor = g.relu(g.conv(tensor, f"c{number}", channels, stride=2), f"a{number}")
    return tensor


def products(g: Graph, tensor: str, features: int, *widths: int) -> list[str]:
    weights = {n: g.const(f"w{n}", np.ones((features, n), np.float32)) for n in widths}
    return [g.op("MatMul", [tensor, w], f"fc{n}") for n, w in weights.items()]


def simcc(g: Graph) -> list[str]:
    """Add scores of 17 keypoints, two per pixel of the width (64) and of the height (32)."""
    features = g.relu(g.conv(g.input(1, 3, 32, 64), "stem", 17), "act")
    return products(g, g.reshape(features, "rows", 1, 17, -1), 32 * 64, 128, 64)


def patches(g: Graph) -> str:
    tokens = g.reshape(g.conv(g.input(1, 3, 64, 64), "patch", 32, k=8, stride=8), "t", 1, 32, 64)
    tokens = g.op("Transpose", tokens, "last", perm=[0, 2, 1])
    keys = g.op("Transpose", tokens, "keys", perm=[0, 2, 1])
    scores = g.op("Softmax", g.op("MatMul", [tokens, keys], "qk"), "softmax", axis=-1)
    return g.op("MatMul", [scores, tokens], "values")


Build = Callable[[Graph], str | list[str]]


def build(make: Build) -> onnx.ModelProto:
    g = Graph(opset=17)
    outputs = make(g)
    return g.model(*([outputs] if isinstance(outputs, str) else outputs))


OTHERS: dict[str, tuple[Build, NetworkKind]] = {
    "classifier": (classifier, NetworkKind.CLASSIFIER),
    "softmax": (lambda g: classifier(g, softmax=True), NetworkKind.CLASSIFIER),
    "fully convolutional": (
        lambda g: g.conv(g.op("GlobalAveragePool", backbone(g), "pool"), "fc", k=1),
        NetworkKind.CLASSIFIER,
    ),
    "features too": (lambda g: [classifier(g, softmax=True), "act:0"], NetworkKind.CLASSIFIER),
    "unknown shapes": (
        lambda g: g.op(
            "Sigmoid",
            g.gemm(
                g.op(
                    "ReduceMean",
                    g.op("MyPlugin", backbone(g), "plugin", domain="custom"),
                    "pool",
                    axes=[2, 3],
                    keepdims=0,
                ),
                "fc",
                8,
            ),
            "prob",
        ),
        NetworkKind.CLASSIFIER,
    ),
    "pyramid": (
        lambda g: [
            x := g.relu(g.conv(strided(g, 3), "c8", 64, stride=1), "a8"),
            g.relu(g.conv(x, "c16", 128, stride=2), "a16"),
        ],
        NetworkKind.CLASSIFIER,
    ),
    "segmentation": (lambda g: g.conv(backbone(g), "head"), NetworkKind.MAP),
    "segmentation at stride 8, without the final resize": (
        lambda g: g.conv(strided(g, 3), "classes", 21, k=1),
        NetworkKind.MAP,
    ),
    "map of classes": (
        lambda g: g.op("ArgMax", g.conv(backbone(g), "c", 21), "argmax", axis=1, keepdims=0),
        NetworkKind.MAP,
    ),
    "depth": (
        lambda g: g.reshape(g.conv(backbone(g), "depth", 1), "squeeze", 1, 32, 32),
        NetworkKind.MAP,
    ),
    "simcc": (simcc, NetworkKind.MAP),
    "super-resolution": (
        lambda g: g.op("DepthToSpace", g.conv(backbone(g), "up", 12), "shuffle", blocksize=2),
        NetworkKind.IMAGE,
    ),
    "patches": (patches, NetworkKind.TRANSFORMER),
    "transformer": (transformer, NetworkKind.TRANSFORMER),
    "scores and boxes of queries": (
        lambda g: products(g, transformer(g), 8, 92, 4),
        NetworkKind.DETR,
    ),
    "gray": (
        lambda g: g.conv(g.input(1, 1, 64, 101), "stem", 16, stride=8),
        NetworkKind.CHANNELS,
    ),
    "text line": (
        lambda g: g.op(
            "Transpose",
            g.op(
                "ReduceMax",
                g.conv(g.input(1, 3, 32, 128), "stem", 40, stride=4),
                "rows",
                axes=[2],
                keepdims=0,
            ),
            "last",
            perm=[0, 2, 1],
        ),
        NetworkKind.TEXT,
    ),
    "rows of anchors": (
        lambda g: g.reshape(
            g.op("Transpose", backbone(g), "last", perm=[0, 2, 3, 1]), "rows", 1024, 4
        ),
        NetworkKind.ROWS,
    ),
}


@pytest.mark.parametrize(("make", "kind"), OTHERS.values(), ids=OTHERS)
def test_other_networks_get_a_warning_with_the_presets_of_their_kind(
    make: Build, kind: NetworkKind
) -> None:
    model = Model(build(make))
    assert find_non_detector_kind(model).kind == kind
    (warning,) = warn_default_preprocess(model, "default")
    assert warning.code == "default-preprocess" and kind.value in warning
    assert not any(warn_default_preprocess(model, origin) for origin in ("option", "model"))


def test_segmentation_network_of_any_size_is_a_map() -> None:
    """Batch, height and width are dynamic, and the output has no shape."""
    proto = build(OTHERS["segmentation"][0])
    for axis in (0, 2, 3):
        proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"size{axis}"
    del proto.graph.value_info[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    assert find_non_detector_kind(Model(proto)).kind == NetworkKind.MAP


def set_metadata(model: onnx.ModelProto, **metadata: str) -> Model:
    onnx.helper.set_model_props(model, metadata)
    return Model(model)


@pytest.mark.parametrize(
    "proto",
    [
        pytest.param(
            set_metadata(build(classifier), task="detect", stride="32").proto,
            id="task of Ultralytics, whatever the outputs",
        ),
        pytest.param(detector(), id="head with DFL"),
        pytest.param(
            build(
                lambda g: [
                    g.conv(x := strided(g, 3, 8), "head8"),
                    g.conv(g.conv(x, "c3", stride=2), "head16"),
                ]
            ),
            id="grids",
        ),
        pytest.param(
            build(lambda g: g.conv(strided(g, 5), "grid", 125, k=1)),
            id="5 anchors of 25 channels, as YOLOv2",
        ),
        pytest.param(
            build(
                lambda g: g.concat(
                    [
                        x := g.reshape(
                            g.conv(g.input(1, 3, 128, 128), "stem", 84, stride=8),
                            "first",
                            1,
                            84,
                            256,
                        ),
                        g.slice(x, "s", 0, 80, axis=2),
                    ],
                    "c",
                    axis=2,
                )
            ),
            id="decoded boxes",
        ),
    ],
)
def test_detectors_get_none(proto: onnx.ModelProto) -> None:
    assert find_non_detector_kind(Model(proto)) is None
    assert warn_default_preprocess(Model(proto), "default") == []


def test_task_of_another_tool_is_not_a_task_of_ultralytics() -> None:
    model = set_metadata(build(OTHERS["segmentation"][0]), task="image-segmentation")
    assert find_non_detector_kind(model) is not None
    assert choose_preprocess(model.metadata, None).origin == "default"


def test_task_alone_is_not_enough_to_be_sure_of_ultralytics() -> None:
    assert warn_default_preprocess(set_metadata(build(classifier), task="classify"), "metadata")
    complete = set_metadata(build(classifier), task="classify", imgsz="[64, 64]", names="{}")
    assert warn_default_preprocess(complete, "metadata") == []


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (
            {"name": "imagenet", "mean": (0.485, 0.456, 0.406), "std": (0.2, 0.2, 0.2)},
            ["`preprocess='imagenet'` does not fit"],
        ),
        ({"name": "yolox", "bgr": True}, ["`preprocess='yolox'` does not fit"]),
        (
            {"name": "custom", "bgr": True, "scale": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3},
            ["`bgr`, `scale` do not fit"],
        ),
        ({"name": "custom", "std": (0.2, 0.2, 0.2)}, ["`std` does not fit"]),
        ({"name": "rtdetr", "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}, []),
        ({"name": "imagenet", "mean": (0.485, 0.456, 0.406), "origin": "model"}, []),
    ],
)
def test_preprocess_of_another_task_is_warned(changes: dict[str, Any], settings: list[str]) -> None:
    model = set_metadata(build(classifier), task="detect", stride="32")
    notes = warn_preprocess(model, {"origin": "option", **changes})
    assert [(n.code, n[len("preprocessing: ") : n.index(" the model's")]) for n in notes] == [
        ("preprocess-of-task", text) for text in settings
    ]
    other = set_metadata(build(classifier), task="depth", stride="32")
    assert not warn_task_mismatch(other, {"origin": "option", **changes})


def test_model_of_a_function_gets_a_warning() -> None:
    assert warn_default_preprocess(Model(detector()), "function")
