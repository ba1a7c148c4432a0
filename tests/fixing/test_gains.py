"""Which of several changes is at fault; and that the number of tries does not follow that of places."""

import numpy as np
import pytest
from onnx import numpy_helper

from qdqtool.fixing import api
from qdqtool.fixing.gains import NO_GAIN, blamed, no_better
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from tests.growth import Net, convolutions


def removed(count: int, places: list[int]) -> tuple[Model, Model, list[set[int]]]:
    """A chain of quantized convolutions, and the same without the pairs in front of some of them."""
    model = Model(convolutions(6 * count))
    editor = Editor(model.copy())
    touched = []
    for place in places:
        conv = [n for n in model.nodes if n.op == "Conv"][place]
        dq = model.producer(conv.input(0))
        editor.edited = set()
        editor.bypass(model.producer(dq.input(0)), [dq])
        touched.append(editor.edited)
    return model, editor.finish(), touched


@pytest.mark.parametrize(("places", "other"), [([2], 6), ([1, 6], 4), ([0, 3, 7], 5)])
def test_each_lost_convolution_is_laid_to_the_change_beside_it(places: list[int], other: int) -> None:
    model, candidate, touched = removed(9, places)
    harmless = [n for n in model.nodes if n.op == "Conv"][other]
    before, after = predict(model, "trt8.5"), predict(candidate, "trt8.5")
    assert after.summary()["int8"] == before.summary()["int8"] - len(places)
    found = blamed(model, candidate, [*touched, {harmless.index}], before, after, ("SKIP-FLOAT",))
    assert set(found) == set(range(len(places)))


def test_changes_of_one_node_are_judged_together() -> None:
    model, candidate, touched = removed(9, [4])
    before, after = predict(model, "trt8.5"), predict(candidate, "trt8.5")
    assert set(blamed(model, candidate, [*touched, touched[0]], before, after, ("SKIP-FLOAT",))) == {0, 1}


def test_the_same_is_no_gain() -> None:
    prediction = predict(convolutions(12), "trt8.5")
    assert no_better(prediction, prediction, ("SKIP-FLOAT",)) == NO_GAIN


def joined(count: int, apart: set[int]):
    """Concats of two scales; where these lie far apart, one scale would cost the smaller part its resolution."""
    net = Net()
    for name, value in (("w", np.eye(8)), ("w16", np.concatenate([np.eye(8), np.eye(8)], 1) / 2)):
        net.weights[name] = numpy_helper.from_array(value.astype(np.float32)[:, :, None, None], name)
    last = "x"
    ends = []
    for place in range(count):
        parts = [net.pair(net.conv(last, 0.01), 0.01), net.pair(net.conv(last, 0.01), 2.0 if place in apart else 0.011)]
        ends.append(net.add("Conv", net.pair(net.add("Concat", *parts, axis=1), 0.01), net.pair("w16", 0.25)))
    return net.done(*ends)


@pytest.mark.parametrize("apart", [set(), {5}, {1, 8, 14}, set(range(0, 16, 2))])
def test_tries_grow_with_what_is_at_fault_not_with_the_places(apart: set[int], monkeypatch) -> None:
    tries = []
    attempt = api._Work._attempt

    def counted(self, sites, step):
        tries.append(len(sites))
        return attempt(self, sites, step)

    monkeypatch.setattr(api._Work, "_attempt", counted)
    fixed = api.fix(joined(16, apart), "trt8.5", ["CONCAT-SCALE"])
    assert len(fixed.applied) + len(fixed.refused) == 16
    assert len(fixed.refused) == len(apart)
    assert len(tries) <= 1 + 6 * len(apart)
