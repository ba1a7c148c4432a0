"""Operators of which the rules say nothing, or little: each on a graph that has one and on one that has not."""

import numpy as np
import pytest

from qdqtool.prediction import predict
from qdqtool.render.predict_text import render
from tests.explain.graphs import GRAPHS
from tests.trt.builder import Graph


def told(model, code, target="trt8.5"):
    return [f for f in predict(model, target).findings if f.code == code]


def conv3d(quantized=True):
    g = Graph()
    x = g.input(1, 4, 8, 8, 8)
    w = g.const("w", np.ones((4, 4, 1, 1, 1), np.float32))
    if quantized:
        x, w = g.pair(x, "in"), g.pair(w, "wq")
    return g.model(g.op("Conv", [x, w], "c", kernel_shape=[1, 1, 1]))


def test_3d_convolutions_where_builds_failed():
    found = told(conv3d(), "CONV3D-INT8", "trt8.0")
    assert [(f.node, f.convolutions) for f in found] == [("c", ["c"])] and "8.2.5" in found[0].message
    assert not told(conv3d(), "CONV3D-INT8", "trt8.5") and not told(conv3d(False), "CONV3D-INT8", "trt8.0")


@pytest.mark.parametrize(("op", "axes", "expected"), [
    ("ConvTranspose", 3, ["c"]), ("ConvTranspose", 2, []), ("Conv", 3, []),
])
def test_quantized_3d_transposed_convolutions(op, axes, expected):
    g = Graph()
    x = g.pair(g.input(1, 4, *[8] * axes), "in")
    w = g.pair(g.const("w", np.ones((4, 4, *[2] * axes), np.float32)), "wq")
    model = g.model(g.op(op, [x, w], "c", kernel_shape=[2] * axes))
    assert [f.node for f in told(model, "CT3D-FLOAT", "trt10")] == expected


@pytest.mark.parametrize(("size", "expected"), [(32, ["c"]), (14, ["c"]), (7, [])])
def test_a_patch_embedding_is_named(size, expected):
    g = Graph()
    x = g.pair(g.input(1, 3, 64, 64), "in")
    w = g.weights("w", (16, 3, size, size), "qdq")
    model = g.model(g.op("Conv", [x, w], "c", kernel_shape=[size, size], strides=[size, size]))
    assert [f.node for f in told(model, "KERNEL-LARGE")] == expected


@pytest.mark.parametrize(("op", "expected"), [("Softmax", ["n"]), ("Relu", [])])
def test_normalizations_behind_a_pair(op, expected):
    g = Graph()
    model = g.model(g.op(op, g.pair(g.conv(g.input(1, 16, 8, 8), "c", 16), "p"), "n"))
    assert [f.node for f in told(model, "NORM-FLOAT")] == expected


def test_plugins_are_named_and_headline_and_layers_agree():
    g = Graph()
    q = g.q(g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r"), "q")
    y = g.dq(g.op("Special", q, "plug", domain="trt"), "dq")
    g.channels[y] = 16
    prediction = predict(g.model(g.conv(y, "c1", 16, scale=None)), "trt8.5")
    assert [f.node for f in prediction.findings if f.code == "PLUGIN-OUTSIDE"] == ["plug"]
    for conv in prediction.convolutions:
        layer = next(layer for layer in prediction.layers if conv.name in layer.nodes)
        assert [t.precision for t in layer.inputs][:1] == conv.inputs[:1]
        assert [t.precision for t in layer.outputs] == [conv.output]


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_fp8_is_named_first_and_not_explained_with_int8(target):
    prediction = predict(GRAPHS["outside-rules"](), target)
    first = render(prediction).splitlines()[0]
    assert first.startswith("FP8 Q/DQ is outside the rules")
    about = [f.code for f in prediction.findings if "c" in f.convolutions]
    assert set(about) <= {"FP8-OUTSIDE", "INPUT-CONVERSION"} and "FP8-OUTSIDE" in about
    assert "--stronglyTyped" in next(f.fix for f in prediction.findings if f.code == "FP8-OUTSIDE")


def test_lint_runs_for_rtx_too():
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r")
    codes = {f.code for f in predict(g.model(g.conv(x, "c1", 24)), "rtx1.7").findings}
    assert "FLOAT-FP32" in codes
