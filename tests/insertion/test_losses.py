from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qdqtool
from qdqtool.demo.model import yolov8n
from qdqtool.errors import ModelError
from qdqtool.graph import Model
from qdqtool.insertion.losses import Compared, _run, _session, measure, without_pair
from qdqtool.render.insertion_text import render
from tests.insertion.nets import Net, check, images, run


def chain() -> Net:
    made = Net()
    tensor = "x"
    for name in "abc":
        tensor = made.op("Relu", f"{name}/relu", made.conv(name, tensor))
    made.output(made.conv("d", tensor))
    return made


def by_hand(wanted: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(((found - wanted) ** 2).mean() / wanted.var()))


def test_error_and_gain_are_those_of_the_models_run_by_hand() -> None:
    data = images(2)
    result = qdqtool.insert(chain().model(), data, losses=2, predict=False)
    assert result.losses is not None and result.losses.samples == 2
    activations = result.activations
    floats = result.model
    for entry in activations:
        floats = without_pair(floats, entry)
    check(floats)
    wanted = [run(floats, x)[0] for x in data]
    total = np.mean([by_hand(w, run(result.model, x)[0]) for w, x in zip(wanted, data, strict=True)])
    assert result.losses.error == pytest.approx(total, rel=2e-3)
    for loss in result.losses.tensors:
        other = without_pair(result.model, next(a for a in activations if a.tensor == loss.tensor))
        error = np.mean([by_hand(w, run(other, x)[0]) for w, x in zip(wanted, data, strict=True)])
        assert loss.gain == pytest.approx(1 - error / total, abs=5e-3)
    gains = [loss.gain for loss in result.losses.tensors]
    assert gains == sorted(gains, reverse=True) and min(gains) > 0


def test_a_tensor_with_a_bad_scale_is_named_first() -> None:
    data = images(2)
    made = qdqtool.insert(chain().model(), data, predict=False, method_for=[("b/relu", "percentile")], percentile=60.0)
    found = measure(made.model, made.activations, data, activations=made.activations)
    assert found is not None and found.tensors[0].tensor == "b/relu.out" and found.tensors[0].readers == ("c",)


def test_error_of_outputs_without_spread_counts_nothing() -> None:
    zero = np.zeros((1, 2, 2, 2), np.float32)
    assert Compared({"a": zero}, None).error({"a": zero}) == 0.0


def test_an_iterator_is_not_read_twice() -> None:
    made = qdqtool.insert(chain().model(), iter(images(2)), losses=2, predict=False)
    assert made.losses is None


def test_price_in_the_engine_and_text() -> None:
    rng = np.random.default_rng(0)
    data = [{"images": rng.random((1, 3, 64, 64), np.float32)} for _ in range(2)]
    made = qdqtool.insert(yolov8n(64, classes=2), data, losses=1)
    assert made.losses is not None and 0 < len(made.losses.tensors) <= 5 and made.losses.tried == 8
    assert made.prediction is not None
    before = made.prediction.summary()
    for loss in made.losses.tensors:
        entry = next(a for a in made.activations if a.tensor == loss.tensor)
        after = qdqtool.predict(without_pair(made.model, entry)).summary()
        assert loss.convolutions == before["int8"] - after["int8"]
        assert loss.conversions == after["conversions"] - before["conversions"]
    text = render(made, 80)
    assert "What limits accuracy" in text and made.losses.tensors[0].tensor in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert made.as_json()["losses"]["tensors"][0]["tensor"] == made.losses.tensors[0].tensor


def test_a_network_that_onnxruntime_cannot_run_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    session = _session(mismatched(), Model(mismatched()))
    with pytest.raises(ModelError, match="onnxruntime cannot run the quantized model"):
        _run(session, {"x": np.zeros((1, 3, 8, 8), np.float32)}, {}, {})
    said = capfd.readouterr()
    assert said.out == said.err == ""  # nothing of onnxruntime's own


def mismatched() -> onnx.ModelProto:
    """A convolution of four channels on an input that turns out to have three."""
    weights = numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w")
    open_ = helper.make_tensor_value_info("x", 1, [1, "channels", 8, 8])
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "g", [open_],
                              [helper.make_tensor_value_info("y", 1, None)], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
