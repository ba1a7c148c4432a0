"""ConvTranspose weights get one scale where no target is proven to take one for each output channel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qdqtool.fixing import weights
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model
from qdqtool.model.qdq import read_params
from qdqtool.model.view import View
from qdqtool.trt.targets import target_named
from tests.fixing.steps import sites
from tests.insertion.nets import run
from tests.trt.builder import Graph

TRT85 = target_named("trt8.5")


def network(axis: int | None, form: str = "qdq", half: bool = False) -> Model:
    g = Graph(opset=19 if half else 13, half=half)
    data = g.pair(g.relu(g.input(1, 8, 6, 6), "r"), "in", 0.05)
    kind = form if axis is not None else "tensor"
    stored = g.weights("up", (8, 8, 2, 2), kind, axis or 0)
    out = g.op("ConvTranspose", [data, stored], "up", kernel_shape=[2, 2], strides=[2, 2])
    return Model(g.model(g.op("Neg", g.pair(out, "q", 0.05), "end")))


def fixed(model: Model) -> Model:
    (site,) = sites(weights.transposed, model)
    assert (site.code, site.node) == ("CT-AXIS", "up")
    editor = Editor(model.copy())
    site.apply(editor)
    return editor.finish()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", ["qdq", "int8"])
@pytest.mark.parametrize("half", [False, True])
def test_one_scale_from_the_largest_weight(axis: int, form: str, half: bool) -> None:
    model = network(axis, form, half)
    view = View(model)
    old = view.weights(model.node("up"))
    value = model.constant(old.source)
    assert value is not None and old.dq is not None
    real = value.astype(np.float64)
    if form == "int8":
        scales = read_params(model, old.dq).scale
        assert scales is not None
        real = real * scales.reshape([-1 if i == axis else 1 for i in range(4)])
    result = fixed(model)
    new = View(result).weights(result.node("up"))
    assert new.dq is not None
    params = read_params(result, new.dq)
    assert params.scale is not None and params.axis is None and params.scale_shape == ()
    assert params.scale[0] == pytest.approx(np.abs(real).max() / 127, rel=1e-3)
    x = np.random.default_rng(0).random((1, 8, 6, 6)).astype(np.float16 if half else np.float32)
    (before,), (after,) = run(model.proto, {"x": x}), run(result.proto, {"x": x})
    assert np.abs(before.astype(np.float64) - after).max() <= 0.05 * 4  # a few steps of the output's quantizer
    assert not np.array_equal(before, np.zeros_like(before))


def test_per_tensor_weights_and_proven_targets_are_left_alone() -> None:
    assert sites(weights.transposed, network(None)) == []
    assert [s.code for s in sites(weights.transposed, network(0))] == ["CT-AXIS"]
    proven = replace(TRT85, transposed_per_channel=True)
    assert sites(weights.transposed, network(1), proven) == []
    assert [s.code for s in sites(weights.transposed, network(0), proven)] == ["CT-AXIS"]
