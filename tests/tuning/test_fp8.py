from typing import Any

import numpy as np
import onnx

import qdqtool
from qdqtool.formats.tuning_text import render_tuning
from qdqtool.insertion.number_formats import FP8
from qdqtool.tuning.recipe import Recipe
from tests.insertion.nets import Net, check, wide_samples

OPTIONS: Any = {"precision": "fp8", "head": "none", "high_precision": "fp32"}


def network() -> onnx.ModelProto:
    net, tensor = Net(32), "x"
    for i in range(3):
        tensor = net.op("Relu", f"r{i}", net.conv(f"c{i}", tensor, 32, 32))
    return net.output(tensor).model()


def test_tuned_model_is_that_of_insert() -> None:
    tuning = qdqtool.tune(network(), wide_samples(12), keep=0.5, **OPTIONS)
    check(tuning.model)
    counts = tuning.prediction.summary()
    assert (counts["int8"], counts["fp8"]) == (0, 3)
    assert tuning.reached and tuning.chosen.name == "FP8 by default"
    assert {q.method for q in tuning.quantized} == {"max", "weights-max"}
    largest = float(np.abs(wide_samples(12)).max())
    (first,) = [q for q in tuning.quantized if q.tensor == "x"]
    assert isinstance(first.scale, float) and first.scale <= largest / 448 * (1 + 1e-6)


def test_high_goal_leaves_layers_float() -> None:
    tuning = qdqtool.tune(network(), wide_samples(12), keep=0.9999, **OPTIONS)
    assert tuning.prediction.summary()["fp8"] < 3
    assert "chosen: FP8" in str(render_tuning(tuning, 500))


def test_recipes_of_both_formats_differ() -> None:
    weights = ((0, "w", 0),)
    assert Recipe((), weights).key != Recipe((), weights, FP8).key
